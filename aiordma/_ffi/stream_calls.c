/* StreamCalls: what Python calls on the data path of a stream.  The work is stream.c's. */
#include "fast.h"

typedef struct {
    PyObject_HEAD struct aio_stream *stream; /* kept alive by whoever made this object */
    ssize_t (*write)(struct aio_stream *s, const void *data, size_t size);
    uint32_t (*read)(struct aio_stream *s, void *into, size_t size);
    PyObject *attention;
} StreamCalls;

static int calls_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    StreamCalls *self = (StreamCalls *)object;
    static char *names[] = {"stream", "write", "read", "attention", NULL};
    unsigned long long stream, write, read;
    PyObject *attention;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKO", names, &stream, &write, &read,
                                     &attention))
        return -1;
    self->stream = (struct aio_stream *)(uintptr_t)stream;
    self->write = (ssize_t (*)(struct aio_stream *, const void *, size_t))(uintptr_t)write;
    self->read = (uint32_t (*)(struct aio_stream *, void *, size_t))(uintptr_t)read;
    Py_INCREF(attention);
    Py_XDECREF(self->attention);
    self->attention = attention;
    return 0;
}

static int calls_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((StreamCalls *)object)->attention);
    return 0;
}

static int calls_clear(PyObject *object)
{
    Py_CLEAR(((StreamCalls *)object)->attention);
    return 0;
}

static void calls_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    calls_clear(object);
    release(object);
    Py_DECREF(type);
}

static PyObject *calls_write(PyObject *object, PyObject *data)
{
    StreamCalls *self = (StreamCalls *)object;
    Py_ssize_t size;
    ssize_t sent;

    if (!PyBytes_CheckExact(data))
        return PyLong_FromLong(0);
    size = PyBytes_Size(data);
    sent = self->write(self->stream, PyBytes_AsString(data), (size_t)size);
    if (sent == size && size)
        Py_RETURN_NONE;
    return PyLong_FromSsize_t(sent);
}

/* The next `n` bytes, which are there. */
static PyObject *cut(StreamCalls *self, uint32_t n)
{
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n);

    if (!data)
        return NULL;
    self->read(self->stream, PyBytes_AsString(data), n);
    if (self->stream->readable || self->stream->error) {
        PyObject *done = PyObject_CallNoArgs(self->attention);

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

static PyObject *calls_pull(PyObject *object, PyObject *unused)
{
    struct aio_stream *s = ((StreamCalls *)object)->stream;

    (void)unused;
    if (s->waiter)
        Py_RETURN_NONE;
    if (!s->plain || !s->readable)
        return PyBytes_FromStringAndSize(NULL, 0);
    return cut((StreamCalls *)object, s->readable);
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
    {"write", calls_write, METH_O, "Send bytes: None for all of them, or how many have gone."},
    {"cut", calls_cut, METH_O, "The next so many bytes, or None if fewer are there."},
    {"pull", calls_pull, METH_NOARGS,
     "What is there; nothing if it is not for data_received; None if a task waits for it."},
    {"ask", calls_ask, METH_O, "Whether to wait for so many bytes is all that is to be done."},
    {"done", calls_done, METH_NOARGS, "The wait is over."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_init, calls_init},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_methods, calls_methods},
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
    return aio_add_type(module, &calls_spec, NULL) ? 0 : -1;
}
