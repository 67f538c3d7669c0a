/*
 * Transfers: READ and WRITE of a piece of registered memory, checked and posted in one call.
 *
 * endpoint/one_sided.py has all the rules, and the words for what is wrong.  Here is what is asked
 * of the plain case, of one request; whatever does not pass is left to Python, which refuses it or
 * does it in its own way.
 */
#include "fast.h"

#define LARGEST (1u << 20) /* bytes of one request; endpoint/one_sided.py has it, too */

/*
 * What a piece of registered memory (SGE) is to C: kept in the piece, which never changes, from its
 * first use on.
 */
typedef struct {
    PyObject_HEAD Registration *registration;
    uint64_t start;
    uint32_t length;
} Piece;

static PyTypeObject *piece_type;
static PyObject *name_piece, *name_mr, *name_offset, *name_length, *name_registration, *name_addr,
    *name_rkey, *name_rights, *name_value;

static void piece_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    Py_XDECREF((PyObject *)((Piece *)object)->registration);
    release(object);
    Py_DECREF(type);
}

static PyType_Slot piece_slots[] = {
    {Py_tp_dealloc, piece_dealloc},
    {Py_tp_doc, "A piece of registered memory, checked."},
    {0, NULL},
};

static PyType_Spec piece_spec = {
    .name = "aiordma._ffi._fast.Piece",
    .basicsize = sizeof(Piece),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = piece_slots,
};

int aio_add_transfer(PyObject *module)
{
    name_piece = PyUnicode_InternFromString("_piece");
    name_mr = PyUnicode_InternFromString("mr");
    name_offset = PyUnicode_InternFromString("offset");
    name_length = PyUnicode_InternFromString("length");
    name_registration = PyUnicode_InternFromString("_registration");
    name_addr = PyUnicode_InternFromString("addr");
    name_rkey = PyUnicode_InternFromString("rkey");
    name_rights = PyUnicode_InternFromString("rights");
    name_value = PyUnicode_InternFromString("_value_");
    if (!name_piece || !name_mr || !name_offset || !name_length || !name_registration ||
        !name_addr || !name_rkey || !name_rights || !name_value)
        return -1;
    piece_type = aio_add_type(module, &piece_spec, NULL);
    return piece_type ? 0 : -1;
}

static int number_of(PyObject *object, PyObject *name, uint64_t *number)
{
    PyObject *value = PyObject_GetAttr(object, name);

    if (!value)
        return -1;
    *number = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Programs use the same memory of the peer again and again; it is a value that never changes. */
static int know(Mail *self, PyObject *remote)
{
    PyObject *rights;
    int rc;

    if (self->known == remote)
        return 0;
    if (!Py_IS_TYPE(remote, (PyTypeObject *)self->remote))
        return -1;
    replace(&self->known, NULL);
    if (number_of(remote, name_addr, &self->known_addr) ||
        number_of(remote, name_length, &self->known_length) ||
        number_of(remote, name_rkey, &self->known_rkey))
        return -1;
    rights = PyObject_GetAttr(remote, name_rights);
    rc = rights ? number_of(rights, name_value, &self->known_rights) : -1;
    Py_XDECREF(rights);
    if (!rc)
        self->known = Py_NewRef(remote);
    return rc;
}

/* Put it together from what the piece says; NULL, perhaps with an exception, if it is not plain. */
static PyObject *make_piece(PyObject *sge)
{
    PyObject *region = PyObject_GetAttr(sge, name_mr);
    PyObject *found = region ? PyObject_GetAttr(region, name_registration) : NULL, *made = NULL;
    uint64_t start, length;

    if (found && Py_IS_TYPE(found, aio_registration_type) && !number_of(sge, name_offset, &start) &&
        !number_of(sge, name_length, &length) && length && length <= LARGEST) {
        allocfunc allocate = (allocfunc)PyType_GetSlot(piece_type, Py_tp_alloc);

        made = allocate(piece_type, 0);
        if (made) {
            ((Piece *)made)->registration = (Registration *)Py_NewRef(found);
            ((Piece *)made)->start = start;
            ((Piece *)made)->length = (uint32_t)length;
            if (PyObject_GenericSetAttr(sge, name_piece, made))
                replace(&made, NULL);
        }
    }
    Py_XDECREF(region);
    Py_XDECREF(found);
    return made;
}

/* Post, if the piece and the peer's memory will do; NULL, perhaps with an exception, if not. */
static PyObject *post(Mail *self, const Piece *piece, PyObject *offset, enum ibv_wr_opcode opcode)
{
    Registration *registration = piece->registration;
    int reads = opcode == IBV_WR_RDMA_READ;
    uint32_t right = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    uint64_t skip = PyLong_AsUnsignedLongLong(offset);
    struct aio_operation request = {
        .opcode = opcode,
        .addr = registration->addr + piece->start,
        .length = piece->length,
        .lkey = registration->lkey,
        .remote_addr = self->known_addr + skip,
        .rkey = (uint32_t)self->known_rkey,
    };

    if (registration->pd != self->pd || !(self->known_rights & right) ||
        (reads && !(self->may_read && registration->access & IBV_ACCESS_LOCAL_WRITE)) ||
        piece->length > self->known_length || skip > self->known_length - piece->length ||
        (skip == (uint64_t)-1 && PyErr_Occurred()))
        return NULL;
    return aio_post(self, -1, &request, registration);
}

/*
 * read(remote, piece, offset), write(...): the operation, or None if Python has to do it.
 *
 * What the adapter's library refuses Python posts once more, and says what it was.
 */
PyObject *aio_transfer(Mail *self, PyObject *const *args, Py_ssize_t count,
                       enum ibv_wr_opcode opcode)
{
    PyObject *piece, *result;

    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "a transfer takes 3 arguments");
        return NULL;
    }
    if (!self->lane->attended || (opcode == IBV_WR_RDMA_READ && !self->may_read) ||
        !Py_IS_TYPE(args[1], (PyTypeObject *)self->sge) || !PyLong_CheckExact(args[2]) ||
        know(self, args[0])) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    piece = PyObject_GetAttr(args[1], name_piece);
    if (piece == Py_None) {
        Py_DECREF(piece);
        piece = make_piece(args[1]);
    }
    result =
        piece && Py_IS_TYPE(piece, piece_type) ? post(self, (Piece *)piece, args[2], opcode) : NULL;
    Py_XDECREF(piece);
    if (result && Py_IS_TYPE(result, aio_operation_type))
        return result;
    Py_XDECREF(result);
    PyErr_Clear();
    Py_RETURN_NONE;
}
