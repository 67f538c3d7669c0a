/*
 * The module `_core._compiled`: the types of the data path, compiled against the stable ABI.
 *
 * A call by way of cffi takes its arguments apart, gives the interpreter lock away and takes it
 * again, and each field of a struct that is read or set costs as much; a message needs a handful of
 * both. Here each step is one call, and nothing is called through a pointer from another module.
 *
 * The types, and names that are looked up often, are static: there is one set of them in a process.
 * So there is one module, which is the main interpreter's; a second import of it gets the same,
 * and another interpreter, which would leave types behind that it has freed, is refused.
 */
#include "admission.h"
#include "core.h"

static PyObject *the_module;
static int is_filled;

#define DEFINE_TYPE(name, base) PyTypeObject *aio_##name##_type;

AIO_TYPES(DEFINE_TYPE)

struct aio_names aio_name;

static PyObject *core_create(PyObject *spec, PyModuleDef *Py_UNUSED(definition))
{
    PyObject *name;

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

#define CONSTANT(name) {#name, AIO_##name}

/* The numbers of protocol.h for Python, so that each is written once. */
static int add_constants(PyObject *module)
{
    /* A line for each, whatever their number: clang-format would put some numbers into columns. */
    /* clang-format off */
    static const struct {
        const char *name;
        long value;
    } constants[] = {
        CONSTANT(INDEX_BITS),
        CONSTANT(SUB_SHIFT),
        CONSTANT(SUB_RECV),
        CONSTANT(SUB_READ),
        CONSTANT(SUB_OPERATE),
        CONSTANT(SUB_NOTED),
        CONSTANT(EVENT_ARRIVED),
        CONSTANT(EVENT_OPERATED),
        CONSTANT(EVENT_ROOM),
        CONSTANT(EVENT_SENT),
        CONSTANT(EVENT_FRAMES),
        CONSTANT(EVENT_FAILED),
        CONSTANT(EVENT_IDLE),
        CONSTANT(EVENT_NOTED),
        CONSTANT(FRAME_SIZE),
        CONSTANT(PROOF_SIZE),
        CONSTANT(FRAME_HAS_IMM),
        CONSTANT(FRAME_MORE),
        CONSTANT(FRAME_FREE),
        CONSTANT(LANDING_SHIFT),
        CONSTANT(LANDINGS),
        CONSTANT(LANDING_SIZE),
        CONSTANT(STREAM_DATA),
        CONSTANT(STREAM_ROOM),
        CONSTANT(STREAM_FAILED),
        CONSTANT(STREAM_IDLE),
        CONSTANT(STREAM_RECV),
        CONSTANT(STREAM_MESSAGE),
        CONSTANT(STREAM_CONTROLS),
        CONSTANT(STREAM_CONTROL_SIZE),
        CONSTANT(STREAM_PROBE),
        CONSTANT(LARGEST_REQUEST),
        CONSTANT(LARGEST_COPY),
        CONSTANT(OPERATION_CHAIN),
        CONSTANT(CHAIN),
        CONSTANT(WORD_SGL),
        CONSTANT(STREAM_GROW),
        CONSTANT(OWES_NOTHING),
        CONSTANT(OWES_WORD),
        CONSTANT(OWES_MAPPING),
        CONSTANT(NO_ROOM),
        CONSTANT(LACKS_SLOT),
        CONSTANT(REFUSED_OUTSIDE),
        CONSTANT(REFUSED_RIGHT),
        CONSTANT(REFUSED_ALIGNMENT),
        CONSTANT(REFUSED_REVOKED),
        CONSTANT(FOR_PYTHON),
        CONSTANT(STREAM_NO_CREDIT),
        CONSTANT(STREAM_NO_SPACE),
        CONSTANT(STREAM_BAD_LIMIT),
        CONSTANT(STREAM_BAD_BUFFER),
        CONSTANT(STREAM_THIRD_BUFFER),
    };
    /* clang-format on */

    for (size_t i = 0; i < sizeof(constants) / sizeof(constants[0]); i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value))
            return -1;
    return 0;
}

/* The names of an enumeration, as a tuple. */
static int add_tuple(PyObject *module, const char *name, const char *const *texts, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    int rc = -1;

    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *text = PyUnicode_FromString(texts[i]);

        if (!text || PyTuple_SetItem(tuple, i, text))
            Py_CLEAR(tuple);
    }
    if (tuple)
        rc = PyModule_AddObjectRef(module, name, tuple);
    Py_XDECREF(tuple);
    return rc;
}

static int add_enumerations(PyObject *module)
{
    static const char *const kinds[] = {AIO_FRAME_KINDS(AIO_TEXT)};
    static const char *const violations[] = {AIO_VIOLATIONS(AIO_TEXT)};

    return add_tuple(module, "FRAME_KINDS", kinds, sizeof(kinds) / sizeof(kinds[0])) ||
           add_tuple(module, "VIOLATIONS", violations, sizeof(violations) / sizeof(violations[0]));
}

#define NAMED(name) {&aio_name.name, #name},

static int add_names(void)
{
    static const struct {
        PyObject **place;
        const char *text;
    } names[] = {AIO_NAMES(NAMED)};

    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if (!(*names[i].place = PyUnicode_InternFromString(names[i].text)))
            return -1;
    return 0;
}

#define TYPED(name, base) {&aio_##name##_type, &aio_##name##_spec, base},

static int add_types(PyObject *module)
{
    static const struct {
        PyTypeObject **place;
        PyType_Spec *spec;
        PyTypeObject **base;
    } types[] = {AIO_TYPES(TYPED)};

    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        PyObject *base = types[i].base ? (PyObject *)*types[i].base : NULL;
        PyObject *type = PyType_FromSpecWithBases(types[i].spec, base);

        if (!type || PyModule_AddType(module, (PyTypeObject *)type))
            return -1;
        *types[i].place = (PyTypeObject *)type;
    }
    return 0;
}

static int core_exec(PyObject *module)
{
    if (!is_filled &&
        (add_constants(module) || add_enumerations(module) || add_names() || aio_prepare_wakeup() ||
         add_types(module) || PyModule_AddFunctions(module, aio_alarm_functions) ||
         PyModule_AddFunctions(module, aio_checksum_functions) ||
         PyModule_AddFunctions(module, aio_tally_functions) ||
         PyModule_AddFunctions(module, aio_operation_functions)))
        return -1;
    if (!is_filled)
        aio_prepare_checksum();
    is_filled = 1;
    return 0;
}

/* As of 3.12; older versions refuse a slot that they do not know. */
#define SLOT_INTERPRETERS 3 /* Py_mod_multiple_interpreters: not supported */

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_create, core_create},
    {Py_mod_exec, core_exec},
    {0, NULL},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiordma._core._compiled",
    .m_slots = core_slots,
};

PyMODINIT_FUNC PyInit__compiled(void);

PyMODINIT_FUNC PyInit__compiled(void)
{
    if (Py_Version >= 0x030C0000)
        core_slots[2].slot = SLOT_INTERPRETERS;
    return PyModuleDef_Init(&core_module);
}
