/*
 * The bytes of a message, as the program gives them: in one buffer, or in a list or tuple of
 * buffers.  They are copied into slots, or into the stage, one behind the other, and are not joined
 * before.  Of an object that is not simply a contiguous buffer Python finds out what is wrong.
 */
#include <string.h>

#include "core.h"

/*
 * Whether the bytes of a buffer are not the whole object, because they are references to objects,
 * or the values of an array that has a mask, too.  Python then refuses it in words.
 */
int aio_is_for_python(PyObject *object, const Py_buffer *view)
{
    PyTypeObject *type = Py_TYPE(object);

    if (view->format && strchr(view->format, 'O'))
        return 1;
    return (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE) &&
           PyObject_HasAttr((PyObject *)type, aio_name.mask);
}

/* Whether the exception that is set says that an object has no such buffer; if so, it is cleared.
 */
int aio_is_refusal(void)
{
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_BufferError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError))
        return 0;
    PyErr_Clear();
    return 1;
}

/* Add the buffer of an object. */
static int add_export(struct aio_pieces *self, PyObject *item)
{
    int simple = PyBytes_CheckExact(item) || PyByteArray_CheckExact(item) ||
                 Py_IS_TYPE(item, aio_message_type);
    Py_buffer *view = &self->views[self->exports];

    if (PyObject_GetBuffer(item, view, simple ? PyBUF_SIMPLE : PyBUF_CONTIG_RO | PyBUF_FORMAT))
        return aio_is_refusal() ? AIO_FOR_PYTHON : AIO_RAISED;
    if (!simple && aio_is_for_python(item, view)) {
        PyBuffer_Release(view);
        return AIO_FOR_PYTHON;
    }
    self->exports++;
    self->pieces[self->count++] =
        (struct aio_piece){view->buf ? view->buf : "", (uint64_t)view->len};
    self->length += (uint64_t)view->len;
    return AIO_OK;
}

/* Add the bytes of a frequent type without an export: no other code runs before they are copied. */
static int add_bytes(struct aio_pieces *self, const char *start, Py_ssize_t length)
{
    if (!start)
        return aio_is_refusal() ? AIO_FOR_PYTHON : AIO_RAISED; /* the message was released */
    self->pieces[0] = (struct aio_piece){start, (uint64_t)length};
    self->length = (uint64_t)length;
    self->count = 1;
    return AIO_OK;
}

static int add_items(struct aio_pieces *self, PyObject *items)
{
    Py_ssize_t count = PyTuple_CheckExact(items) ? PyTuple_Size(items) : PyList_Size(items);
    int code = AIO_OK;

    if (count > AIO_FEW_PIECES) {
        self->views = aio_room_for((size_t)count, sizeof(*self->views));
        self->pieces = self->views ? aio_room_for((size_t)count, sizeof(*self->pieces)) : NULL;
        if (!self->pieces)
            return AIO_RAISED;
    }
    for (Py_ssize_t i = 0; i < count && !code; i++) {
        PyObject *item =
            PyTuple_CheckExact(items) ? PyTuple_GetItem(items, i) : PyList_GetItem(items, i);

        /* The export of an object may run code of the program, which may change the list. */
        if (!item) {
            PyErr_Clear();
            return AIO_FOR_PYTHON;
        }
        Py_INCREF(item);
        code = add_export(self, item);
        Py_DECREF(item);
    }
    return code;
}

int aio_pieces_open(struct aio_pieces *self, PyObject *data)
{
    int code;

    self->count = self->exports = 0;
    self->length = 0;
    self->views = self->few_views;
    self->pieces = self->few_pieces;
    if (PyBytes_CheckExact(data))
        return add_bytes(self, PyBytes_AsString(data), PyBytes_Size(data));
    if (PyByteArray_CheckExact(data))
        return add_bytes(self, PyByteArray_AsString(data), PyByteArray_Size(data));
    if (Py_IS_TYPE(data, aio_message_type))
        return add_bytes(self, aio_message_bytes((Message *)data), ((Message *)data)->length);
    code = PyList_CheckExact(data) || PyTuple_CheckExact(data) ? add_items(self, data)
                                                               : add_export(self, data);
    if (code)
        aio_pieces_close(self);
    return code;
}

void aio_pieces_close(struct aio_pieces *self)
{
    while (self->exports)
        PyBuffer_Release(&self->views[--self->exports]);
    if (self->views != self->few_views) {
        PyMem_Free(self->views);
        PyMem_Free(self->pieces);
    }
}

struct aio_bytes aio_pieces_bytes(const struct aio_pieces *self)
{
    return self->count ? (struct aio_bytes){self->pieces[0], self->pieces + 1}
                       : (struct aio_bytes){{"", 0}, NULL};
}

PyObject *aio_pieces_joined(const struct aio_pieces *self)
{
    struct aio_bytes bytes = aio_pieces_bytes(self);
    PyObject *joined = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)self->length);

    if (joined)
        aio_gather(&bytes, PyBytes_AsString(joined), self->length);
    return joined;
}
