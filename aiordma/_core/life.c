/*
 * Signs of life of the peer of a MessageState, for all connections of a group; link/keepalive.py
 * has the rules.
 */
#include "core.h"

/*
 * show_life_to(group): signs of life of the peer set the first byte of `group`, too; None: of none.
 * The bytearray is not exported, which would take 80 bytes a connection: its size never changes.
 */
PyObject *aio_show_life_to(PyObject *object, PyObject *group)
{
    MessageState *self = (MessageState *)object;

    self->state.group = NULL;
    if (group == Py_None) {
        replace(&self->group, NULL);
        Py_RETURN_NONE;
    }
    if (!PyByteArray_Check(group) || PyByteArray_Size(group) != 1) {
        PyErr_SetString(PyExc_TypeError, "a bytearray of one byte is needed");
        return NULL;
    }
    replace(&self->group, Py_NewRef(group));
    self->state.group = (uint8_t *)PyByteArray_AsString(group);
    Py_RETURN_NONE;
}
