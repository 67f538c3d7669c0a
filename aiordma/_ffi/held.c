/*
 * Held: bytes of a buffer, held where the cycle collector does not look.
 *
 * A memoryview that exports its bytes to C, and is found by the collector, is taken apart although
 * it is in use: it gives up what it looks at, and a later release of the export crashes (CPython
 * 3.11).  A memoryview that is made of another one has no such trouble: both share what they
 * look at.  So the bytes are held by a memoryview of their own, which no other object has, of which
 * only the address is used, and which is never shown to the collector.  What it looks at stays for
 * as long as it is held.
 *
 * The price: a holder to which the object of its own buffer leads back is not collected
 * before it lets go.
 */
#include "fast.h"

typedef struct {
    PyObject_HEAD AioBytes bytes;
} Held;

/* Hold the bytes of a buffer, which lie in one piece, in the place of none. */
int aio_hold(AioBytes *bytes, PyObject *buffer)
{
    PyObject *view = PyMemoryView_FromObject(buffer);
    Py_buffer seen;

    if (!view)
        return -1;
    if (PyObject_GetBuffer(view, &seen, PyBUF_SIMPLE)) {
        Py_DECREF(view);
        return -1;
    }
    bytes->view = view;
    bytes->start = seen.buf;
    bytes->length = seen.len;
    bytes->readonly = seen.readonly;
    PyBuffer_Release(&seen);
    return 0;
}

void aio_let_loose(AioBytes *bytes)
{
    PyObject *view = bytes->view;

    bytes->view = NULL;
    bytes->start = NULL;
    Py_XDECREF(view);
}

/* Export the bytes, which are held, as those of `owner`. */
int aio_export(const AioBytes *bytes, PyObject *owner, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, owner, bytes->start, bytes->length, bytes->readonly, flags);
}

static int held_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", NULL};
    Held *self = (Held *)object;
    PyObject *buffer;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &buffer))
        return -1;
    if (self->bytes.view) {
        PyErr_SetString(PyExc_RuntimeError, "it holds a buffer already");
        return -1;
    }
    return aio_hold(&self->bytes, buffer);
}

static void held_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    aio_let_loose(&((Held *)object)->bytes);
    release(object);
    Py_DECREF(type);
}

static int held_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    if (!((Held *)object)->bytes.view) {
        PyErr_SetString(PyExc_ValueError, "no buffer is held");
        view->obj = NULL;
        return -1;
    }
    return aio_export(&((Held *)object)->bytes, object, view, flags);
}

static PyType_Slot held_slots[] = {
    {Py_tp_init, held_init},
    {Py_tp_dealloc, held_dealloc},
    {Py_bf_getbuffer, held_getbuffer},
    {Py_tp_doc, "The bytes of a contiguous buffer, for C; the buffer stays exported as long as "
                "this lives."},
    {0, NULL},
};

static PyType_Spec held_spec = {
    .name = "aiordma._ffi._fast.Held",
    .basicsize = sizeof(Held),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = held_slots,
};

int aio_add_held(PyObject *module)
{
    return aio_add_type(module, &held_spec, NULL) ? 0 : -1;
}
