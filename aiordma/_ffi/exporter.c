/*
 * BufferExporter: lets a Python class offer the buffer protocol on every supported Python.
 *
 * Python 3.12 has __buffer__ for that (PEP 688); 3.11 has no way without C.  A subclass defines
 * _exported(), which returns a memoryview; whoever asks the object for a buffer gets one of that
 * view.  The view counts its exports, so that view.release() refuses while one is in use.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static int exporter_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    PyObject *inner = PyObject_CallMethod(self, "_exported", NULL);
    int rc;

    if (inner == NULL) {
        view->obj = NULL;
        return -1;
    }
    rc = PyObject_GetBuffer(inner, view, flags);
    Py_DECREF(inner);
    return rc;
}

static void exporter_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    release(self);
    Py_DECREF(type);
}

static PyType_Slot exporter_slots[] = {
    {Py_bf_getbuffer, exporter_getbuffer},
    {Py_tp_dealloc, exporter_dealloc},
    {Py_tp_doc, "Base class whose instances export the memoryview that _exported() returns."},
    {0, NULL},
};

static PyType_Spec exporter_spec = {
    .name = "aiordma._ffi._exporter.BufferExporter",
    .basicsize = sizeof(PyObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = exporter_slots,
};

static int exporter_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&exporter_spec);
    int rc;

    if (type == NULL)
        return -1;
    rc = PyModule_AddObjectRef(module, "BufferExporter", type);
    Py_DECREF(type);
    return rc;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, exporter_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiordma._ffi._exporter",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__exporter(void);

PyMODINIT_FUNC PyInit__exporter(void)
{
    return PyModuleDef_Init(&module_def);
}
