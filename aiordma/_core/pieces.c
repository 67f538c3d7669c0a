/*
 * Pieces: the bytes of a message that the program gives as a list or tuple of buffers.
 *
 * They are copied into slots, or into the stage, one behind the other, and are never joined before.
 * Of an item that is not simply a contiguous buffer Python finds out what is wrong with it.
 */
#include <string.h>

#include "core.h"

/*
 * Whether the bytes of a buffer may not be all of the object, so that Python is asked, and refuses:
 * they are references to objects, or the values of an array with a mask.
 */
int aio_is_for_python(PyObject *object, const Py_buffer *view)
{
    PyTypeObject *type = Py_TYPE(object);

    if (view->format && strchr(view->format, 'O'))
        return 1;
    return (PyType_GetFlags(type) & Py_TPFLAGS_HEAPTYPE) &&
           PyObject_HasAttr((PyObject *)type, aio_name.mask);
}

/* Export an item: 1, 0 if that is Python's work, or -1 with an exception that is no error of it. */
static int export_item(PyObject *item, Py_buffer *view)
{
    int simple = PyBytes_CheckExact(item) || PyByteArray_CheckExact(item) ||
                 Py_IS_TYPE(item, aio_message_type);

    if (!PyObject_GetBuffer(item, view, simple ? PyBUF_SIMPLE : PyBUF_CONTIG_RO | PyBUF_FORMAT)) {
        if (simple || !aio_is_for_python(item, view))
            return 1;
        PyBuffer_Release(view);
        return 0;
    }
    if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_BufferError) &&
        !PyErr_ExceptionMatches(PyExc_ValueError))
        return -1;
    PyErr_Clear();
    return 0;
}

int aio_pieces_open(struct aio_pieces *self, PyObject *items)
{
    Py_ssize_t count = PyTuple_CheckExact(items) ? PyTuple_Size(items) : PyList_Size(items);

    self->count = 0;
    self->length = 0;
    self->views = self->few_views;
    self->pieces = self->few_pieces;
    if (count > AIO_FEW_PIECES) {
        self->views = aio_room_for((size_t)count, sizeof(*self->views));
        self->pieces = self->views ? aio_room_for((size_t)count, sizeof(*self->pieces)) : NULL;
        if (!self->pieces) {
            aio_pieces_close(self);
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item;
        Py_buffer *view = &self->views[i];
        int rc = 0;

        /* The export of an object may run code of the program, which may change the list. */
        item = PyTuple_CheckExact(items) ? PyTuple_GetItem(items, i) : PyList_GetItem(items, i);
        if (item) {
            Py_INCREF(item);
            rc = export_item(item, view);
            Py_DECREF(item);
        } else {
            PyErr_Clear();
        }
        if (rc <= 0) {
            aio_pieces_close(self);
            return rc;
        }
        self->count++;
        self->pieces[i] = (struct aio_piece){view->buf ? view->buf : "", (uint64_t)view->len};
        self->length += (uint64_t)view->len;
    }
    return 1;
}

void aio_pieces_close(struct aio_pieces *self)
{
    while (self->count)
        PyBuffer_Release(&self->views[--self->count]);
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

/* send_pieces(items, imm): as send_buffer. */
PyObject *aio_send_pieces(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    struct aio_pieces pieces;
    PyObject *items, *number;
    uint32_t imm;
    int has_imm, rc, code;

    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &items, &number))
        return NULL;
    has_imm = aio_imm_of(number, &imm);
    if (has_imm < 0)
        return NULL;
    rc = aio_pieces_open(&pieces, items);
    if (rc <= 0) {
        if (!rc)
            PyErr_SetString(PyExc_TypeError, "an item without a contiguous buffer");
        return NULL;
    }
    code = aio_message_send(&self->state, aio_pieces_bytes(&pieces), pieces.length, has_imm, imm);
    aio_pieces_close(&pieces);
    return aio_sent(self, code);
}
