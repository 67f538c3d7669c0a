/*
 * A message as a tensor, by DLPack: torch.from_dlpack(message), numpy.from_dlpack(message).
 *
 * The capsule holds an export of the message, as a memoryview does, until the consumer is done with
 * the tensor.  So the message cannot be released under it.  (torch.frombuffer gives the export back
 * at once, and leaves a tensor that shows whatever the adapter writes there next.)
 *
 * The tensor is read-only, as some messages are.  Consumers of before version 1 of DLPack do not
 * know that flag, and get a copy; the standard has them say so if they do not want one.
 *
 * The structs are those of version 1.0 of the standard.
 */
#include "core.h"

enum { CPU = 1, UNSIGNED = 1 };
enum { READ_ONLY = 1, IS_COPIED = 2 };

struct tensor {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};

struct managed { /* of before version 1 */
    struct tensor tensor;
    void *context;
    void (*deleter)(struct managed *);
};

struct versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct versioned *);
    uint64_t flags;
    struct tensor tensor;
};

struct exported {
    union {
        struct managed managed;
        struct versioned versioned;
    } told;
    int64_t shape, stride;
    Py_buffer bytes;
};

static void give_back(struct exported *exported)
{
    PyBuffer_Release(&exported->bytes);
    PyMem_Free(exported);
}

/* The consumer calls it in any thread, with the interpreter lock or without. */
static void end_export(struct exported *exported)
{
    PyObject *type, *value, *traceback;
    PyGILState_STATE state;

    if (!Py_IsInitialized())
        return; /* the program ends, and its memory with it */
    state = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &traceback);
    give_back(exported);
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(state);
}

static void delete_managed(struct managed *self)
{
    end_export(self->context);
}

static void delete_versioned(struct versioned *self)
{
    end_export(self->context);
}

/* The consumer gives the capsule another name when it takes the tensor over. */
static void end_capsule(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor"))
        end_export(PyCapsule_GetPointer(capsule, "dltensor"));
    else if (PyCapsule_IsValid(capsule, "dltensor_versioned"))
        end_export(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
}

/* Export the bytes of the message, or a copy of them: 0, or -1. */
static int export_bytes(Message *self, int copy, Py_buffer *bytes)
{
    PyObject *owner;
    int code;

    if (!copy)
        return PyObject_GetBuffer((PyObject *)self, bytes, PyBUF_SIMPLE);
    owner = PyByteArray_FromObject((PyObject *)self);
    code = owner ? PyObject_GetBuffer(owner, bytes, PyBUF_SIMPLE) : -1;
    Py_XDECREF(owner);
    return code;
}

/* Whether the consumer knows version 1 of DLPack: 1 or 0, or -1. */
static int knows_versions(PyObject *most)
{
    int major, minor;

    if (most == Py_None)
        return 0;
    if (!PyTuple_Check(most)) {
        PyErr_SetString(PyExc_TypeError, "max_version has to be a tuple (major, minor), or None");
        return -1;
    }
    return PyArg_ParseTuple(most, "ii;max_version has to be (major, minor)", &major, &minor)
               ? major >= 1
               : -1;
}

/* Whether a consumer that wants the tensor on this device can have it: 0, or -1. */
static int check_device(PyObject *device, PyObject *stream)
{
    int type = CPU, id = 0;

    if (device != Py_None && !PyTuple_Check(device)) {
        PyErr_SetString(PyExc_TypeError, "dl_device has to be a tuple (type, id), or None");
        return -1;
    }
    if (device != Py_None &&
        !PyArg_ParseTuple(device, "ii;dl_device has to be (type, id)", &type, &id))
        return -1;
    if (type == CPU && id == 0 && stream == Py_None)
        return 0;
    PyErr_SetString(PyExc_BufferError, "a message is in memory of the processor, and on no other "
                                       "device or stream: copy the tensor there");
    return -1;
}

PyObject *aio_message_dlpack(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *words[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *most = Py_None, *device = Py_None, *copy = Py_None, *capsule;
    struct exported *exported;
    struct tensor *tensor;
    int versions, copies;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$OOOO:__dlpack__", words, &stream, &most,
                                     &device, &copy))
        return NULL;
    versions = knows_versions(most);
    if (versions < 0 || check_device(device, stream))
        return NULL;
    copies = copy == Py_None ? !versions : PyObject_IsTrue(copy);
    if (copies < 0)
        return NULL;
    if (!copies && !versions) {
        PyErr_SetString(PyExc_BufferError,
                        "a message is read-only, which only version 1 of DLPack can say: take a "
                        "copy, or pass max_version=(1, 0)");
        return NULL;
    }
    exported = PyMem_Calloc(1, sizeof(*exported));
    if (!exported)
        return PyErr_NoMemory();
    if (export_bytes((Message *)object, copies, &exported->bytes)) {
        PyMem_Free(exported);
        return NULL;
    }
    if (versions) {
        exported->told.versioned = (struct versioned){
            .major = 1,
            .context = exported,
            .deleter = delete_versioned,
            .flags = copies ? IS_COPIED : READ_ONLY,
        };
        tensor = &exported->told.versioned.tensor;
    } else {
        exported->told.managed = (struct managed){.context = exported, .deleter = delete_managed};
        tensor = &exported->told.managed.tensor;
    }
    exported->shape = exported->bytes.len;
    exported->stride = 1;
    *tensor = (struct tensor){
        .data = exported->bytes.len ? exported->bytes.buf : NULL,
        .device_type = CPU,
        .ndim = 1,
        .code = UNSIGNED,
        .bits = 8,
        .lanes = 1,
        .shape = &exported->shape,
        .strides = &exported->stride,
    };
    capsule = PyCapsule_New(exported, versions ? "dltensor_versioned" : "dltensor", end_capsule);
    if (!capsule)
        give_back(exported);
    return capsule;
}

PyObject *aio_message_dlpack_device(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(unused))
{
    return Py_BuildValue("(ii)", CPU, 0);
}
