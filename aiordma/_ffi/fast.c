/*
 * The module `_fast`; see fast.h.
 *
 * The types, and names that are looked up often, are static: there is one set of them in a process.
 * So there is one module, which is the main interpreter's; a second import of it gets the same,
 * and another interpreter, which would leave types behind that it has freed, is refused.
 */
#include "fast.h"

static PyObject *the_module;
static int is_filled;

PyTypeObject *aio_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base)
{
    PyObject *type = PyType_FromSpecWithBases(spec, (PyObject *)base);
    int rc = type ? PyModule_AddObjectRef(module, strrchr(spec->name, '.') + 1, type) : -1;

    Py_XDECREF(type); /* the module has it */
    return rc ? NULL : (PyTypeObject *)type;
}

static PyObject *fast_create(PyObject *spec, PyModuleDef *definition)
{
    PyObject *name;

    (void)definition;
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) {
        PyErr_SetString(PyExc_ImportError, "aiordma cannot be used in a subinterpreter");
        return NULL;
    }
    if (the_module)
        return Py_NewRef(the_module);
    name = PyObject_GetAttrString(spec, "name");
    the_module = name ? PyModule_NewObject(name) : NULL;
    Py_XDECREF(name);
    return Py_XNewRef(the_module);
}

static int add_all(PyObject *module)
{
    return aio_add_alarm(module) || aio_add_wakeup(module) || aio_add_registration(module) ||
                   aio_add_operation(module) || aio_add_transfer(module) || aio_add_held(module) ||
                   aio_add_message(module) || aio_add_mail(module) || aio_add_reader(module) ||
                   aio_add_stream_calls(module) || aio_add_owner(module) ||
                   aio_add_cm_events(module)
               ? -1
               : 0;
}

static int fast_exec(PyObject *module)
{
    if (!is_filled && add_all(module))
        return -1;
    is_filled = 1;
    return 0;
}

/* As of 3.12; older versions refuse a slot that they do not know. */
#define SLOT_INTERPRETERS 3 /* Py_mod_multiple_interpreters: not supported */

static PyModuleDef_Slot fast_slots[] = {
    {Py_mod_create, fast_create},
    {Py_mod_exec, fast_exec},
    {0, NULL},
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
    if (Py_Version >= 0x030C0000)
        fast_slots[2].slot = SLOT_INTERPRETERS;
    return PyModuleDef_Init(&fast_module);
}
