/*
 * Reader: what the loop calls when a completion channel is readable, as far as it is simple.
 *
 * The work is aio_drain's, in the module that cffi makes.  What it brings mostly is that sinks have
 * news, and nothing else: then Reader calls their owners, and no Python code runs but the
 * program's. All else goes the way of verbs/comp_channel.py and loop/pump.py.
 *
 * An owner that Reader calls may poll a queue, and so bring news for other owners.  So Reader keeps
 * news in a queue of its own and delivers them in the order in which they came, those of one drain
 * at a time: news that come meanwhile wait for the next turn of the loop.
 */
#include "fast.h"

static PyTypeObject *reader_type;

#define LOOK       (1 << 30) /* as glue.c has them */
#define AGAIN      (1 << 29)
#define ROUNDS     32 /* of draining and telling, before others have their turn */

#define INDEX_BITS 24
#define INDEX_MASK ((1u << INDEX_BITS) - 1)

typedef struct {
    PyObject_HEAD struct aio_drain *drain; /* in `memory`, as is the next */
    struct ibv_wc *completions;
    int room;
    int (*run)(struct aio_drain *, struct ibv_wc *, int);
    int (*sweep)(struct aio_drain *, struct ibv_cq *, struct ibv_wc *, int);
    PyObject *memory;  /* the channel may go while it is drained */
    PyObject **owners; /* what is called for a sink, by its index */
    uint32_t n_owners;
    uint32_t *untold; /* items of aio_drain.ready, from `first` to `last` */
    uint32_t first;
    uint32_t last;
    uint32_t most;
    PyObject *error; /* what a task raised, for drain() to raise */
    int left;        /* what was drained, and is left for drain() */
    char draining;
    char deferred;
    char stopped;
    PyObject *weak;
} Reader;

/* What the loop calls.  As FdPump, it does not keep alive what it reads. */
typedef struct {
    PyObject_HEAD PyObject *reader; /* weak reference */
    PyObject *slow;                 /* called for whatever is not simple */
} Readable;

static int reader_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Reader *self = (Reader *)object;
    static char *names[] = {"drain", "completions", "room", "run", "sweep", "memory", NULL};
    unsigned long long drain, completions, run, sweep;
    PyObject *memory;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKiKKO", names, &drain, &completions,
                                     &self->room, &run, &sweep, &memory))
        return -1;
    self->drain = (struct aio_drain *)(uintptr_t)drain;
    self->completions = (struct ibv_wc *)(uintptr_t)completions;
    self->run = (int (*)(struct aio_drain *, struct ibv_wc *, int))(uintptr_t)run;
    self->sweep =
        (int (*)(struct aio_drain *, struct ibv_cq *, struct ibv_wc *, int))(uintptr_t)sweep;
    self->memory = Py_NewRef(memory);
    return 0;
}

static PyObject *reader_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, reader_init);
}

/* own(index, owner): the function to tell of a sink's news; None removes it. */
static PyObject *reader_own(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    unsigned int index;
    PyObject *owner;

    if (!PyArg_ParseTuple(args, "IO", &index, &owner))
        return NULL;
    if (index >= INDEX_MASK) {
        PyErr_SetString(PyExc_ValueError, "no such index");
        return NULL;
    }
    if (index >= self->n_owners) {
        uint32_t count = index + 1 > 2 * self->n_owners ? index + 1 : 2 * self->n_owners;
        PyObject **larger = PyMem_Realloc(self->owners, count * sizeof(PyObject *));

        if (!larger)
            return PyErr_NoMemory();
        memset(larger + self->n_owners, 0, (count - self->n_owners) * sizeof(PyObject *));
        self->owners = larger;
        self->n_owners = count;
    }
    /* News of an owner that is removed are not for the next one; a change of owner keeps them. */
    for (uint32_t i = self->first; i < self->last && owner == Py_None; i++)
        if ((self->untold[i] & INDEX_MASK) == index)
            self->untold[i] |= INDEX_MASK;
    replace(&self->owners[index], owner == Py_None ? NULL : Py_NewRef(owner));
    Py_RETURN_NONE;
}

static int reader_traverse(PyObject *object, visitproc visit, void *arg)
{
    Reader *self = (Reader *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->error);
    Py_VISIT(self->memory);
    for (uint32_t i = 0; i < self->n_owners; i++)
        Py_VISIT(self->owners[i]);
    return 0;
}

static int reader_clear(PyObject *object)
{
    /* Not the memory: it leads nowhere, and a method may still be called. */
    Reader *self = (Reader *)object;

    Py_CLEAR(self->error);
    for (uint32_t i = 0; i < self->n_owners; i++)
        Py_CLEAR(self->owners[i]);
    return 0;
}

static void reader_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    PyObject_ClearWeakRefs(object);
    reader_clear(object);
    Py_CLEAR(((Reader *)object)->memory);
    PyMem_Free(((Reader *)object)->owners);
    PyMem_Free(((Reader *)object)->untold);
    release(object);
    Py_DECREF(type);
}

/* Tell the owner of a sink, unless it was removed. */
static int tell(Reader *self, uint32_t ready)
{
    uint32_t index = ready & INDEX_MASK, news = ready >> INDEX_BITS;
    PyObject *owner = index < self->n_owners ? self->owners[index] : NULL;
    int rc;

    if (!owner)
        return 0;
    Py_INCREF(owner); /* it may remove itself */
    if (Py_IS_TYPE(owner, aio_mail_type)) {
        rc = aio_mail_news((Mail *)owner, news);
    } else if (Py_IS_TYPE(owner, aio_stream_calls_type)) {
        rc = aio_stream_news((StreamCalls *)owner, news);
    } else {
        PyObject *bits = PyLong_FromUnsignedLong(news);
        PyObject *done = bits ? PyObject_CallFunctionObjArgs(owner, bits, NULL) : NULL;

        rc = done ? 0 : -1;
        Py_XDECREF(bits);
        Py_XDECREF(done);
    }
    Py_DECREF(owner);
    return rc;
}

/* Put what the last drain or sweep brought into the line.  0, or -1. */
static int keep(Reader *self)
{
    uint32_t count = (uint32_t)self->drain->n_ready, kept = self->last - self->first;

    if (count > self->most - self->last) {
        if (self->first)
            memmove(self->untold, self->untold + self->first, kept * sizeof(*self->untold));
        self->first = 0;
        self->last = kept;
        if (count > self->most - kept) {
            uint32_t room = (uint32_t)self->room;
            uint32_t most = kept + count > room ? 2 * (kept + count) : room;
            uint32_t *larger = PyMem_Realloc(self->untold, most * sizeof(*larger));

            if (!larger) {
                PyErr_NoMemory();
                return -1;
            }
            self->untold = larger;
            self->most = most;
        }
    }
    if (count)
        memcpy(self->untold + self->last, self->drain->ready, count * sizeof(*self->untold));
    self->last += count;
    self->drain->n_ready = 0;
    return 0;
}

/* Tell of those that are in the line now.  0, or -1: then the others are still there. */
static int tell_all(Reader *self)
{
    for (uint32_t count = self->last - self->first; count && self->first != self->last; count--) {
        if (tell(self, self->untold[self->first++]))
            return -1;
    }
    if (self->first == self->last)
        self->first = self->last = 0;
    return 0;
}

/*
 * What a drain brought: 0 if all is done, -1 with an exception, else what aio_drain returned.
 *
 * Tasks are resumed here; what is not to run among them waits for the end (`draining`).
 */
static int drain(Reader *self)
{
    for (int round = 1;; round++) {
        int took = self->run(self->drain, self->completions, self->room);

        if (!took)
            return 0;
        self->draining = 1;
        if (keep(self))
            return -1;
        if (took & (LOOK | 0xFFFF))
            return took;
        if (tell_all(self))
            return -1;
        if (!(took & AGAIN) || self->stopped)
            return 0;
        if (round == ROUNDS || self->deferred)
            return AGAIN; /* in another turn of the loop, and with what else has happened */
        self->drain->again = 1;
    }
}

static PyObject *reader_drain(PyObject *object, PyObject *unused)
{
    Reader *self = (Reader *)object;
    int took;

    (void)unused;
    if (self->error) {
        PyObject *error = self->error;

        self->error = NULL;
        self->left = 0;
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return NULL;
    }
    took = self->left;
    self->left = 0;
    if (!took)
        took = drain(self);
    if (took < 0)
        return NULL;
    if (!took)
        Py_RETURN_NONE;
    return PyLong_FromLong(took);
}

/*
 * sweep(cq): poll a queue, by the address of its C object, without an event; what aio_sweep
 * returned.  The interpreter lock is kept: other threads may run finalizers, which take sinks away.
 */
static PyObject *reader_sweep(PyObject *object, PyObject *cq)
{
    Reader *self = (Reader *)object;
    struct ibv_cq *address = PyLong_AsVoidPtr(cq);

    if (!address && PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(self->sweep(self->drain, address, self->completions, self->room));
}

static PyObject *reader_keep(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (keep((Reader *)object))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reader_tell(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (tell_all((Reader *)object))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *reader_get_untold(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(((Reader *)object)->last - ((Reader *)object)->first);
}

static PyMethodDef reader_methods[] = {
    {"own", reader_own, METH_VARARGS, "Whom to tell of the news of a sink: its index, a function."},
    {"keep", reader_keep, METH_NOARGS, "Remember the news that aio_drain.ready has, for `tell`."},
    {"sweep", reader_sweep, METH_O,
     "Poll a queue, by the address of its C object, without an event; as aio_sweep."},
    {"tell", reader_tell, METH_NOARGS,
     "Tell the owners of news; with an exception, the others are still to be told."},
    {"drain", reader_drain, METH_NOARGS,
     "Drain the channel, unless that was done already: None if nothing is left, or what aio_drain "
     "returned, for Python to do."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef reader_members[] = {
    {"draining", T_BOOL, offsetof(Reader, draining), 0, "Whether tasks are being resumed."},
    {"deferred", T_BOOL, offsetof(Reader, deferred), 0, "Whether Python has to run something."},
    {"stopped", T_BOOL, offsetof(Reader, stopped), 0, "Whether the channel is not to be touched."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Reader, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef reader_getset[] = {
    {"untold", reader_get_untold, NULL, "How many news no owner was told of yet.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_new, reader_new},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_clear, reader_clear},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_members, reader_members},
    {Py_tp_getset, reader_getset},
    {Py_tp_doc, "Drains one completion channel."},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "aiordma._ffi._fast.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = reader_slots,
};

/* Readable */

static int readable_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"reader", "slow", NULL};
    PyObject *reader, *slow, *weak;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, reader_type, &reader, &slow))
        return -1;
    weak = PyWeakref_NewRef(reader, NULL);
    if (!weak)
        return -1;
    replace(&((Readable *)object)->reader, weak);
    replace(&((Readable *)object)->slow, Py_NewRef(slow));
    return 0;
}

static PyObject *readable_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, readable_init);
}

static int readable_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Readable *)object)->reader);
    Py_VISIT(((Readable *)object)->slow);
    return 0;
}

static int readable_clear(PyObject *object)
{
    Py_CLEAR(((Readable *)object)->reader);
    Py_CLEAR(((Readable *)object)->slow);
    return 0;
}

static void readable_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    readable_clear(object);
    release(object);
    Py_DECREF(type);
}

/* Whether all is done; if not, reader->left or ->error is for Python. */
static int all_done(Reader *reader)
{
    int took = drain(reader);

    if (took < 0) {
        PyObject *type, *error, *traceback;

        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback)
            PyException_SetTraceback(error, traceback);
        replace(&reader->error, error);
        Py_XDECREF(type);
        Py_XDECREF(traceback);
        return 0;
    }
    reader->left = took;
    if (took || reader->deferred || reader->first != reader->last)
        return 0;
    reader->draining = 0;
    return 1;
}

static PyObject *readable_run(PyObject *object, PyObject *unused)
{
    Readable *self = (Readable *)object;
    PyObject *reader = aio_alive(self->reader);
    PyObject *slow, *result;
    int done = 0;

    (void)unused;
    if (!reader)
        return NULL;
    if (reader != Py_None && !((Reader *)reader)->stopped) {
        aio_turn = (struct aio_turn){.thread = PyThread_get_thread_ident()};
        done = all_done((Reader *)reader);
        aio_turn = (struct aio_turn){0};
    }
    Py_DECREF(reader);
    if (done)
        Py_RETURN_NONE;
    slow = Py_NewRef(self->slow); /* it may take this object off the loop */
    result = PyObject_CallNoArgs(slow);
    Py_DECREF(slow);
    return result;
}

/* A method, which is called without the tuple of arguments that a call of the object takes. */
static PyMethodDef readable_methods[] = {
    {"run", readable_run, METH_NOARGS, "The channel is readable."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot readable_slots[] = {
    {Py_tp_new, readable_new},
    {Py_tp_traverse, readable_traverse},
    {Py_tp_clear, readable_clear},
    {Py_tp_dealloc, readable_dealloc},
    {Py_tp_methods, readable_methods},
    {Py_tp_doc, "What the loop calls when a completion channel is readable."},
    {0, NULL},
};

static PyType_Spec readable_spec = {
    .name = "aiordma._ffi._fast.Readable",
    .basicsize = sizeof(Readable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = readable_slots,
};

int aio_add_reader(PyObject *module)
{
    reader_type = aio_add_type(module, &reader_spec, NULL);
    return reader_type && aio_add_type(module, &readable_spec, NULL) ? 0 : -1;
}
