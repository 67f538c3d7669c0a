/*
 * Reader: what the loop calls when a completion channel is readable, as far as it is simple.
 *
 * The work is aio_drain's, in the module that cffi makes.  What it brings mostly is that sinks have
 * news, and nothing else: then their owners are told from here, and nothing is unpacked.
 */
#include "fast.h"

#define INDEX_BITS 24
#define INDEX_MASK ((1u << INDEX_BITS) - 1)

typedef struct {
    PyObject_HEAD struct aio_drain *drain; /* kept alive by the channel, as is the next */
    struct ibv_wc *completions;
    int room;
    int (*run)(struct aio_drain *, struct ibv_wc *, int);
    PyObject *news; /* what is called for a sink, by its index */
} Reader;

static int reader_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Reader *self = (Reader *)object;
    static char *names[] = {"drain", "completions", "room", "run", "news", NULL};
    unsigned long long drain, completions, run;
    PyObject *news, *before = self->news;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKiKO!", names, &drain, &completions,
                                     &self->room, &run, &PyDict_Type, &news))
        return -1;
    self->drain = (struct aio_drain *)(uintptr_t)drain;
    self->completions = (struct ibv_wc *)(uintptr_t)completions;
    self->run = (int (*)(struct aio_drain *, struct ibv_wc *, int))(uintptr_t)run;
    self->news = Py_NewRef(news);
    Py_XDECREF(before);
    return 0;
}

static int reader_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Reader *)object)->news);
    return 0;
}

static int reader_clear(PyObject *object)
{
    Py_CLEAR(((Reader *)object)->news);
    return 0;
}

static void reader_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    reader_clear(object);
    release(object);
    Py_DECREF(type);
}

/* Tell the owner of a sink; nobody, if it was removed. */
static int tell(Reader *self, uint32_t ready)
{
    PyObject *index = PyLong_FromUnsignedLong(ready & INDEX_MASK);
    PyObject *bits = PyLong_FromUnsignedLong(ready >> INDEX_BITS);
    PyObject *owner, *done = NULL;

    if (index && bits) {
        owner = PyDict_GetItemWithError(self->news, index);
        if (owner) {
            Py_INCREF(owner); /* it may remove itself */
            done = PyObject_CallFunctionObjArgs(owner, bits, NULL);
            Py_DECREF(owner);
        } else if (!PyErr_Occurred()) {
            done = Py_NewRef(Py_None);
        }
    }
    Py_XDECREF(index);
    Py_XDECREF(bits);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *reader_drain(PyObject *object, PyObject *unused)
{
    Reader *self = (Reader *)object;
    int took = self->run(self->drain, self->completions, self->room);

    (void)unused;
    if (took == 0)
        Py_RETURN_NONE;
    /* With several, one that drains again would overwrite what the others have to hear. */
    if (took != 1 << 16)
        return PyLong_FromLong(took);
    if (tell(self, self->drain->ready[0]))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef reader_methods[] = {
    {"drain", reader_drain, METH_NOARGS,
     "Drain the channel: None if all is done, or what aio_drain returned, for Python to do."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_init, reader_init},
    {Py_tp_traverse, reader_traverse},
    {Py_tp_clear, reader_clear},
    {Py_tp_dealloc, reader_dealloc},
    {Py_tp_methods, reader_methods},
    {Py_tp_doc, "Drains one completion channel."},
    {0, NULL},
};

static PyType_Spec reader_spec = {
    .name = "aiordma._ffi._fast.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = reader_slots,
};

int aio_add_reader(PyObject *module)
{
    return aio_add_type(module, &reader_spec, NULL) ? 0 : -1;
}
