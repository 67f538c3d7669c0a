/* The module `_fast`; see fast.h. */
#include "fast.h"

PyTypeObject *aio_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base)
{
    PyObject *type = PyType_FromSpecWithBases(spec, (PyObject *)base);
    int rc = type ? PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type) : -1;

    Py_XDECREF(type); /* the module has it */
    return rc ? NULL : (PyTypeObject *)type;
}

static int fast_exec(PyObject *module)
{
    return aio_add_alarm(module) || aio_add_wakeup(module) || aio_add_registration(module) ||
                   aio_add_operation(module) || aio_add_transfer(module) || aio_add_held(module) ||
                   aio_add_message(module) || aio_add_mail(module) || aio_add_reader(module) ||
                   aio_add_stream_calls(module) || aio_add_owner(module) ||
                   aio_add_cm_events(module)
               ? -1
               : 0;
}

static PyModuleDef_Slot fast_slots[] = {
    {Py_mod_exec, fast_exec},
    {0, NULL},
};

static struct PyModuleDef fast_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiordma._ffi._fast",
    .m_slots = fast_slots,
};

PyMODINIT_FUNC PyInit__fast(void);

PyMODINIT_FUNC PyInit__fast(void)
{
    return PyModuleDef_Init(&fast_module);
}
