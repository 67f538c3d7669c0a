/*
 * Registration: registered memory as the data path needs it: numbers, and how many operations use
 * it.
 *
 * To retain a resource takes a lock and two calls of Python, because everything may happen in
 * every thread.  Operations begin and end in the thread of their loop, and with the interpreter
 * lock held, so that a number is enough.  The region asks for it when it is closed: then it
 * counts what is under way as one user, and is told when the last has ended.
 */
#include "fast.h"

PyTypeObject *aio_registration_type;

static int registration_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Registration *self = (Registration *)object;
    static char *names[] = {"addr", "lkey", "access", "pd", "region", NULL};
    unsigned long long addr;
    unsigned int lkey, access;
    PyObject *pd, *region, *weak;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KIIOO", names, &addr, &lkey, &access, &pd,
                                     &region))
        return -1;
    weak = PyWeakref_NewRef(region, NULL); /* the region has this object */
    if (!weak)
        return -1;
    self->addr = addr;
    self->lkey = lkey;
    self->access = access;
    self->pd = pd;
    self->region = weak;
    return 0;
}

static PyObject *registration_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, registration_init);
}

static void registration_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    Py_CLEAR(((Registration *)object)->region);
    release(object);
    Py_DECREF(type);
}

static PyObject *registration_shut(PyObject *object, PyObject *unused)
{
    (void)unused;
    ((Registration *)object)->closing = 1;
    return PyBool_FromLong(((Registration *)object)->uses > 0);
}

int aio_registration_leave(Registration *self)
{
    return --self->uses == 0 && self->closing;
}

static PyObject *registration_leave(PyObject *object, PyObject *unused)
{
    (void)unused;
    if (!((Registration *)object)->uses) {
        PyErr_SetString(PyExc_RuntimeError, "no operation uses the memory");
        return NULL;
    }
    return PyBool_FromLong(aio_registration_leave((Registration *)object));
}

static PyMethodDef registration_methods[] = {
    {"shut", registration_shut, METH_NOARGS, "No more use of it; whether it is in use."},
    {"leave", registration_leave, METH_NOARGS,
     "One use less; whether it was the last of a region that is being closed."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef registration_members[] = {
    {"uses", T_UINT, offsetof(Registration, uses), READONLY, "Operations under way."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot registration_slots[] = {
    {Py_tp_new, registration_new},
    {Py_tp_dealloc, registration_dealloc},
    {Py_tp_methods, registration_methods},
    {Py_tp_members, registration_members},
    {Py_tp_doc, "Registered memory, and how many operations use it."},
    {0, NULL},
};

static PyType_Spec registration_spec = {
    .name = "aiordma._ffi._fast.Registration",
    .basicsize = sizeof(Registration),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = registration_slots,
};

int aio_add_registration(PyObject *module)
{
    aio_registration_type = aio_add_type(module, &registration_spec, NULL);
    return aio_registration_type ? 0 : -1;
}
