/* StreamCalls: what Python calls on the data path of a stream.  The work is stream.c's. */
#include "fast.h"

#define NEWS_DATA 1 /* as stream.c has it */

PyTypeObject *aio_stream_calls_type;

static PyObject *name_data_received;

static int calls_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    StreamCalls *self = (StreamCalls *)object;
    static char *names[] = {"stream", "write", "read", "wakeup", "memory", NULL};
    unsigned long long stream, write, read;
    PyObject *wakeup, *memory;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKO!O", names, &stream, &write, &read,
                                     aio_wakeup_type, &wakeup, &memory))
        return -1;
    self->stream = (struct aio_stream *)(uintptr_t)stream;
    self->write = (ssize_t (*)(struct aio_stream *, const void *, size_t))(uintptr_t)write;
    self->read = (uint32_t (*)(struct aio_stream *, void *, size_t))(uintptr_t)read;
    replace((PyObject **)&self->wakeup, Py_NewRef(wakeup));
    replace(&self->memory, Py_NewRef(memory));
    self->thread = PyThread_get_thread_ident();
    return 0;
}

static PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, calls_init);
}

static int calls_traverse(PyObject *object, visitproc visit, void *arg)
{
    StreamCalls *self = (StreamCalls *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->memory);
    Py_VISIT(self->attention);
    Py_VISIT((PyObject *)self->wakeup);
    Py_VISIT(self->protocol);
    Py_VISIT(self->run);
    Py_VISIT(self->other);
    Py_VISIT(self->failed);
    Py_VISIT(self->rest);
    Py_VISIT(self->elsewhere);
    return 0;
}

static int calls_clear(PyObject *object)
{
    /* Not the memory: it leads nowhere, and a method may still be called. */
    StreamCalls *self = (StreamCalls *)object;

    Py_CLEAR(self->attention);
    replace((PyObject **)&self->wakeup, NULL);
    Py_CLEAR(self->protocol);
    Py_CLEAR(self->run);
    Py_CLEAR(self->other);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->elsewhere);
    return 0;
}

static void calls_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    calls_clear(object);
    Py_CLEAR(((StreamCalls *)object)->memory);
    release(object);
    Py_DECREF(type);
}

/*
 * The caller is not in the thread of the last write.  Whether it may: 0, or -1.  It may where the
 * loop has gone over to its thread, or does not run.
 */
static int in_new_thread(StreamCalls *self, unsigned long thread)
{
    PyObject *elsewhere = Py_XNewRef(self->elsewhere), *allowed;

    if (!elsewhere)
        return 0;
    allowed = PyObject_CallNoArgs(elsewhere);
    Py_DECREF(elsewhere);
    if (!allowed)
        return -1;
    Py_DECREF(allowed);
    self->thread = thread;
    return 0;
}

static PyObject *calls_write(PyObject *object, PyObject *data)
{
    StreamCalls *self = (StreamCalls *)object;
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *number, *rest, *result;
    ssize_t sent = 0;

    if (thread != self->thread && in_new_thread(self, thread))
        return NULL;
    if (PyBytes_CheckExact(data)) {
        Py_ssize_t size = PyBytes_Size(data);

        sent = self->write(self->stream, PyBytes_AsString(data), (size_t)size);
        if (sent == size && size)
            Py_RETURN_NONE;
    }
    number = PyLong_FromSsize_t(sent);
    rest = Py_XNewRef(self->rest); /* each of these may be changed by its own call */
    result = number ? PyObject_CallFunctionObjArgs(rest, data, number, NULL) : NULL;
    Py_XDECREF(rest);
    Py_XDECREF(number);
    return result;
}

/* The next `n` bytes, which are there. */
static PyObject *cut(StreamCalls *self, uint32_t n)
{
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n);

    if (!data)
        return NULL;
    self->read(self->stream, PyBytes_AsString(data), n);
    if (self->attention && (self->stream->readable || self->stream->error)) {
        PyObject *attention = Py_NewRef(self->attention);
        PyObject *done = PyObject_CallNoArgs(attention);

        Py_DECREF(attention);
        if (!done) {
            Py_DECREF(data);
            return NULL;
        }
        Py_DECREF(done);
    }
    return data;
}

static PyObject *calls_cut(PyObject *object, PyObject *number)
{
    struct aio_stream *s = ((StreamCalls *)object)->stream;
    Py_ssize_t n = PyLong_AsSsize_t(number);

    if (n == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear(); /* so many are never there */
        Py_RETURN_NONE;
    }
    if (n <= 0 || s->stopped || s->readable < (size_t)n)
        Py_RETURN_NONE;
    return cut((StreamCalls *)object, (uint32_t)n);
}

/* data_received() raised: the stream is over, but for what ends the loop.  0, or -1. */
static int failed(StreamCalls *self)
{
    PyObject *type, *value, *traceback, *function, *told;

    if (PyErr_ExceptionMatches(PyExc_SystemExit) || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return -1;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback)
        PyException_SetTraceback(value, traceback);
    function = Py_XNewRef(self->failed);
    told = PyObject_CallFunctionObjArgs(function, value, NULL);
    Py_XDECREF(function);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

/* What C has taken, at the end of a drain. */
int aio_stream_news(StreamCalls *self, uint32_t news)
{
    struct aio_stream *s = self->stream;
    PyObject *data, *done, *push, *protocol, *run;
    int rc;

    if (news == NEWS_DATA && s->waiter && self->wakeup)
        return aio_wake(self->wakeup) < 0 ? -1 : 0;
    if (news != NEWS_DATA || !s->plain || !s->readable || !self->protocol || !self->run) {
        PyObject *bits = PyLong_FromUnsignedLong(news), *other = Py_XNewRef(self->other);

        done = bits ? PyObject_CallFunctionObjArgs(other, bits, NULL) : NULL;
        Py_XDECREF(other);
        Py_XDECREF(bits);
        Py_XDECREF(done);
        return done ? 0 : -1;
    }
    run = Py_NewRef(self->run); /* all may be cleared by the call */
    protocol = Py_NewRef(self->protocol);
    data = cut(self, s->readable);
    /* At each call, as asyncio does: a protocol may have replaced it, or have none. */
    push = data ? PyObject_GetAttr(protocol, name_data_received) : NULL;
    done = push ? PyObject_CallFunctionObjArgs(run, push, data, NULL) : NULL;
    rc = done ? 0 : data ? failed(self) : -1;
    Py_DECREF(run);
    Py_DECREF(protocol);
    Py_XDECREF(push);
    Py_XDECREF(data);
    Py_XDECREF(done);
    return rc;
}

static PyObject *calls_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int news;

    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "StreamCalls takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "I", &news) || aio_stream_news((StreamCalls *)object, news))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *calls_ask(PyObject *object, PyObject *number)
{
    struct aio_stream *s = ((StreamCalls *)object)->stream;
    Py_ssize_t n = PyLong_AsSsize_t(number);

    if (n == -1 && PyErr_Occurred())
        PyErr_Clear();
    if (n <= 0 || (size_t)n > s->ring_size / 2 || s->stopped || s->waiter || !s->receiving ||
        !s->plain || s->readable >= (size_t)n || 2 * s->waiting_count >= s->credits)
        Py_RETURN_FALSE;
    s->want = (uint32_t)n;
    s->waiter = 1;
    Py_RETURN_TRUE;
}

static PyObject *calls_done(PyObject *object, PyObject *unused)
{
    struct aio_stream *s = ((StreamCalls *)object)->stream;

    (void)unused;
    s->waiter = 0;
    s->want = 1;
    Py_RETURN_NONE;
}

static PyMethodDef calls_methods[] = {
    {"write", calls_write, METH_O, "As RdmaTransport.write."},
    {"cut", calls_cut, METH_O, "The next so many bytes, or None if fewer are there."},
    {"ask", calls_ask, METH_O, "Whether to wait for so many bytes is all that is to be done."},
    {"done", calls_done, METH_NOARGS, "The wait is over."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"attention", T_OBJECT, offsetof(StreamCalls, attention), 0,
     "Called when there is more than was taken, or a post has failed."},
    {"protocol", T_OBJECT, offsetof(StreamCalls, protocol), 0,
     "Its data_received is looked up and called with what has come; None if it is not to be."},
    {"run", T_OBJECT, offsetof(StreamCalls, run), 0, "Of the context in which it is called."},
    {"other", T_OBJECT, offsetof(StreamCalls, other), 0, "Called with news that are not plain."},
    {"failed", T_OBJECT, offsetof(StreamCalls, failed), 0, "Called with what it raised."},
    {"rest", T_OBJECT, offsetof(StreamCalls, rest), 0, "Called with data that were not plain."},
    {"elsewhere", T_OBJECT, offsetof(StreamCalls, elsewhere), 0,
     "Called where write is called in another thread; raises if it may not be."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_new, calls_new},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_call, calls_call}, /* with the news of its sink */
    {Py_tp_methods, calls_methods},
    {Py_tp_members, calls_members},
    {Py_tp_doc, "The data path of one stream."},
    {0, NULL},
};

static PyType_Spec calls_spec = {
    .name = "aiordma._ffi._fast.StreamCalls",
    .basicsize = sizeof(StreamCalls),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = calls_slots,
};

int aio_add_stream_calls(PyObject *module)
{
    name_data_received = PyUnicode_InternFromString("data_received");
    if (!name_data_received)
        return -1;
    aio_stream_calls_type = aio_add_type(module, &calls_spec, NULL);
    return aio_stream_calls_type ? 0 : -1;
}
