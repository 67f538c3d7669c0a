/*
 * Transfers: READ and WRITE of a piece of registered memory, checked and posted in one call.
 *
 * endpoint/one_sided.py has all the rules, and the words for what is wrong.  Here is what is asked
 * of the plain case, of one request; whatever does not pass is left to Python, which refuses it or
 * does it in its own way.
 */
#include "fast.h"

#define LARGEST (1u << 20) /* bytes of one request; endpoint/one_sided.py has it, too */

static PyObject *name_mr, *name_offset, *name_length, *name_registration, *name_addr, *name_rkey,
    *name_rights, *name_value;

int aio_add_transfer(void)
{
    name_mr = PyUnicode_InternFromString("mr");
    name_offset = PyUnicode_InternFromString("offset");
    name_length = PyUnicode_InternFromString("length");
    name_registration = PyUnicode_InternFromString("_registration");
    name_addr = PyUnicode_InternFromString("addr");
    name_rkey = PyUnicode_InternFromString("rkey");
    name_rights = PyUnicode_InternFromString("rights");
    name_value = PyUnicode_InternFromString("_value_");
    return name_mr && name_offset && name_length && name_registration && name_addr && name_rkey &&
                   name_rights && name_value
               ? 0
               : -1;
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

/* Post, if `region` and the piece of it will do; NULL without an exception if they will not. */
static PyObject *post(Mail *self, PyObject *region, PyObject *piece, PyObject *offset,
                      enum ibv_wr_opcode opcode)
{
    int reads = opcode == IBV_WR_RDMA_READ;
    uint32_t right = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    PyObject *found = PyObject_GetAttr(region, name_registration), *result = NULL;
    Registration *registration = (Registration *)found;
    uint64_t start, length, skip = PyLong_AsUnsignedLongLong(offset);

    if (found && Py_IS_TYPE(found, aio_registration_type) && registration->pd == self->pd &&
        (!reads || registration->access & IBV_ACCESS_LOCAL_WRITE) && !PyErr_Occurred() &&
        !number_of(piece, name_offset, &start) && !number_of(piece, name_length, &length) &&
        length && length <= LARGEST && self->known_rights & right &&
        length <= self->known_length && skip <= self->known_length - length) {
        struct aio_operation request = {
            .opcode = opcode,
            .addr = registration->addr + start,
            .length = (uint32_t)length,
            .lkey = registration->lkey,
            .remote_addr = self->known_addr + skip,
            .rkey = (uint32_t)self->known_rkey,
        };

        result = aio_post(self, -1, &request, region, registration);
    }
    Py_XDECREF(found);
    return result;
}

/*
 * read(remote, piece, offset), write(...): the operation, or None if Python has to do it.
 *
 * What the adapter's library refuses Python posts once more, and says what it was.
 */
PyObject *aio_transfer(Mail *self, PyObject *const *args, Py_ssize_t count,
                       enum ibv_wr_opcode opcode)
{
    PyObject *region, *result;

    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "a transfer takes 3 arguments");
        return NULL;
    }
    if (!self->lane->attended || !Py_IS_TYPE(args[1], (PyTypeObject *)self->sge) ||
        !PyLong_CheckExact(args[2]) || know(self, args[0])) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    region = PyObject_GetAttr(args[1], name_mr);
    result = region ? post(self, region, args[1], args[2], opcode) : NULL;
    Py_XDECREF(region);
    if (result && Py_IS_TYPE(result, aio_operation_type))
        return result;
    Py_XDECREF(result);
    PyErr_Clear();
    Py_RETURN_NONE;
}
