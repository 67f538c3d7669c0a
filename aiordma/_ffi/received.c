/*
 * Messages: the bytes that were received, and who gets their memory back.
 *
 * A message lies in a receive slot of a connection, or in memory of its own.  Whose memory it is is
 * told once: at release(), or when the last reference goes, in whatever thread.  Most messages are
 * released without a view of them ever being made.
 */
#include "fast.h"

#include <stdio.h>

PyTypeObject *aio_message_type;
static PyObject *name_slot_view, *name_release;

PyDoc_STRVAR(
    message_doc,
    "A received message.  Offers the buffer protocol: `bytes(m)`, `memoryview(m)`, numpy.\n\n"
    "Ownership: the bytes lie in memory of the connection, which is used again after `release()`,\n"
    "after a `with` block, or when the last reference goes.  A message whose buffer is exported\n"
    "cannot be released; one that outlives its connection stays readable.  `len()` tells the "
    "bytes,\nalso after the release.");

static int message_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Message *self = (Message *)object;
    static char *names[] = {"view", "imm", "give_back", NULL};
    PyObject *view, *imm = Py_None, *give_back = Py_None;
    Py_buffer bytes;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO", names, &view, &imm, &give_back))
        return -1;
    if (self->view || self->keeper) {
        PyErr_SetString(PyExc_RuntimeError, "the message has its bytes already");
        return -1;
    }
    if (PyObject_GetBuffer(view, &bytes, PyBUF_SIMPLE))
        return -1;
    self->length = bytes.len;
    PyBuffer_Release(&bytes);
    Py_INCREF(view);
    self->view = view;
    Py_INCREF(imm);
    replace(&self->imm, imm);
    if (give_back != Py_None) {
        Py_INCREF(give_back);
        self->keeper = give_back;
    }
    return 0;
}

/* A view of its bytes; new reference. */
static PyObject *message_exported(PyObject *object, PyObject *unused)
{
    Message *self = (Message *)object;

    (void)unused;
    if (!self->view) {
        PyObject *slot, *length;

        if (!self->keeper || !self->in_slot) {
            PyErr_SetString(PyExc_ValueError, "the message was released");
            return NULL;
        }
        slot = PyLong_FromUnsignedLong(self->slot);
        length = PyLong_FromSsize_t(self->length);
        if (slot && length)
            self->view = PyObject_CallMethodObjArgs(((Mail *)self->keeper)->receiver,
                                                    name_slot_view, slot, length, NULL);
        Py_XDECREF(slot);
        Py_XDECREF(length);
        if (!self->view)
            return NULL;
    }
    Py_INCREF(self->view);
    return self->view;
}

/* The memory goes back; `view` is what somebody may still look at, or NULL.  Steals neither. */
static int give_back(Message *self, PyObject *view)
{
    PyObject *keeper = self->keeper, *result;
    Mail *mail = (Mail *)keeper;
    int code;

    self->keeper = NULL;
    if (!self->in_slot) {
        result = PyObject_CallFunctionObjArgs(keeper, view, NULL);
    } else if (!view && PyThread_get_thread_ident() == mail->thread) {
        if (self->kept)
            mail->lane->held--;
        code = mail->back(mail->lane, self->slot);
        result = code ? PyObject_CallMethod(mail->receiver, "_posted_again", "Ii", self->slot, code)
                      : Py_NewRef(Py_None);
    } else {
        result = PyObject_CallMethod(mail->receiver, "slot_back", "IOO", self->slot,
                                     view ? view : Py_None, self->kept ? Py_True : Py_False);
    }
    Py_DECREF(keeper);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

static PyObject *message_release(PyObject *object, PyObject *unused)
{
    Message *self = (Message *)object;
    PyObject *view = self->view;
    int failed = 0;

    (void)unused;
    if (view) {
        /* BufferError, if somebody looks at it. */
        PyObject *released = PyObject_CallMethodObjArgs(view, name_release, NULL);

        if (!released)
            return NULL;
        Py_DECREF(released);
        self->view = NULL;
    }
    if (self->keeper)
        failed = give_back(self, self->in_slot ? NULL : view);
    Py_XDECREF(view);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Move the bytes to memory of their own and give the slot back. */
static PyObject *message_detach(PyObject *object, PyObject *unused)
{
    Message *self = (Message *)object;
    PyObject *view, *copy, *own;
    int failed;

    if (!self->keeper)
        Py_RETURN_NONE;
    view = message_exported(object, unused);
    if (!view)
        return NULL;
    copy = PyBytes_FromObject(view);
    own = copy ? PyMemoryView_FromObject(copy) : NULL;
    Py_XDECREF(copy);
    if (!own) {
        Py_DECREF(view);
        return NULL;
    }
    replace(&self->view, own);
    failed = give_back(self, view);
    Py_DECREF(view);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* Nobody will look at it again.  `who` is what an error is reported of. */
static void forgotten(Message *self, PyObject *who)
{
    PyObject *type, *value, *traceback;

    if (!self->keeper || (!self->in_slot && !self->view))
        return;
    PyErr_Fetch(&type, &value, &traceback);
    /* Still exported or not: the receiver finds out, and waits for the exports to end. */
    if (give_back(self, self->view))
        PyErr_WriteUnraisable(who);
    PyErr_Restore(type, value, traceback);
}

static void message_finalize(PyObject *object)
{
    forgotten((Message *)object, object);
}

static int message_traverse(PyObject *object, visitproc visit, void *arg)
{
    Message *self = (Message *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->keeper);
    Py_VISIT(self->view);
    Py_VISIT(self->imm);
    return 0;
}

static int message_clear(PyObject *object)
{
    Message *self = (Message *)object;

    Py_CLEAR(self->keeper);
    Py_CLEAR(self->view);
    Py_CLEAR(self->imm);
    return 0;
}

static void message_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    if (((Message *)object)->weak)
        PyObject_ClearWeakRefs(object);
    /* Nobody else has it, and nothing that is told here may get it, not even who reports an error:
     * a reference that comes and goes would end it once more.  So it need not be brought back to
     * life for its finalizer, which is for those that the collector finds. */
    forgotten((Message *)object, (PyObject *)type);
    message_clear(object);
    release(object);
    Py_DECREF(type);
}

static Py_ssize_t message_length(PyObject *object)
{
    return ((Message *)object)->length;
}

static int message_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    PyObject *inner = message_exported(object, NULL);
    int rc;

    if (!inner) {
        view->obj = NULL;
        return -1;
    }
    rc = PyObject_GetBuffer(inner, view, flags);
    Py_DECREF(inner);
    return rc;
}

static PyObject *message_get_imm(PyObject *object, void *unused)
{
    PyObject *imm = ((Message *)object)->imm;

    (void)unused;
    return Py_NewRef(imm ? imm : Py_None);
}

static PyObject *message_get_released(PyObject *object, void *unused)
{
    Message *self = (Message *)object;

    (void)unused;
    return PyBool_FromLong(!self->view && !(self->keeper && self->in_slot));
}

static PyObject *message_get_kept(PyObject *object, void *unused)
{
    (void)unused;
    return PyBool_FromLong(((Message *)object)->kept);
}

static int message_set_kept(PyObject *object, PyObject *value, void *unused)
{
    int truth = value ? PyObject_IsTrue(value) : 0;

    (void)unused;
    if (truth < 0)
        return -1;
    ((Message *)object)->kept = (char)truth;
    return 0;
}

static PyObject *message_bytes(PyObject *object, PyObject *unused)
{
    PyObject *view = message_exported(object, unused);
    PyObject *bytes = view ? PyBytes_FromObject(view) : NULL;

    Py_XDECREF(view);
    return bytes;
}

/* Equal to any buffer of the same bytes; memoryview knows how to compare. */
static PyObject *message_compare(PyObject *object, PyObject *other, int operator)
{
    PyObject *mine, *theirs, *result;

    if (operator != Py_EQ && operator != Py_NE)
        Py_RETURN_NOTIMPLEMENTED;
    if (object == other)
        return PyBool_FromLong(operator == Py_EQ);
    if (!PyObject_CheckBuffer(other))
        Py_RETURN_NOTIMPLEMENTED;
    mine = message_exported(object, NULL);
    theirs = mine ? PyMemoryView_FromObject(other) : NULL;
    result = theirs ? PyObject_RichCompare(mine, theirs, operator) : NULL;
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return result;
}

static PyObject *message_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    (void)args;
    (void)count;
    return message_release(object, NULL);
}

static PyObject *message_enter(PyObject *object, PyObject *unused)
{
    (void)unused;
    return Py_NewRef(object);
}

static PyObject *message_repr(PyObject *object)
{
    Message *self = (Message *)object;
    const char *state = !self->view && !(self->keeper && self->in_slot) ? " released" : "";
    char imm[20] = "";

    if (self->imm && self->imm != Py_None)
        snprintf(imm, sizeof(imm), " imm=0x%lx", PyLong_AsUnsignedLongMask(self->imm));
    return PyUnicode_FromFormat("<Message %zd bytes%s%s>", self->length, imm, state);
}

static PyMethodDef message_methods[] = {
    {"__bytes__", message_bytes, METH_NOARGS, NULL},
    {"__enter__", message_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))message_exit, METH_FASTCALL, NULL},
    {"release", message_release, METH_NOARGS,
     "Give the memory back.  Idempotent.\n\n"
     "Raises:\n"
     "    BufferError: A memoryview or array still looks at it; release that first."},
    {"_exported", message_exported, METH_NOARGS, NULL},
    {"_detach", message_detach, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef message_getset[] = {
    {"imm", message_get_imm, NULL, "The sender's 32-bit immediate, or None.", NULL},
    {"_released", message_get_released, NULL, NULL, NULL},
    {"_kept", message_get_kept, message_set_kept, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef message_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Message, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot message_slots[] = {
    {Py_tp_init, message_init},
    {Py_tp_traverse, message_traverse},
    {Py_tp_clear, message_clear},
    {Py_tp_finalize, message_finalize},
    {Py_tp_dealloc, message_dealloc},
    {Py_sq_length, message_length},
    {Py_bf_getbuffer, message_getbuffer},
    {Py_tp_methods, message_methods},
    {Py_tp_getset, message_getset},
    {Py_tp_members, message_members},
    {Py_tp_richcompare, message_compare},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_tp_repr, message_repr},
    {Py_tp_doc, (void *)message_doc},
    {0, NULL},
};

static PyType_Spec message_spec = {
    .name = "aiordma.endpoint.message.Message",
    .basicsize = sizeof(Message),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = message_slots,
};

int aio_add_message(PyObject *module)
{
    name_slot_view = PyUnicode_InternFromString("slot_view");
    name_release = PyUnicode_InternFromString("release");
    if (!name_slot_view || !name_release)
        return -1;
    aio_message_type = aio_add_type(module, &message_spec, NULL);
    return aio_message_type ? 0 : -1;
}
