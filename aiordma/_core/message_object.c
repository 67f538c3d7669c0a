/*
 * Messages: the bytes that were received, and the keeper that gets their memory back.
 *
 * A message lies in a receive slot of a connection, or in memory of its own.  The memory goes back
 * to the keeper once: at release(), or when the last reference goes, in any thread.  Of most
 * messages no view is ever made.
 *
 * A message exports its bytes itself, so that each export has a reference to it, and counts them.
 *
 * A Loan keeps bytes of a message for the library: the adapter may read them after a send was
 * canceled.  A program cannot end a loan, and so a loan does not prevent a release.
 *
 * BufferExport keeps bytes of a buffer, by a reference that the cycle collector does not visit.
 *
 * The bytes are held by a memoryview of their own, which no other object has, of which only the
 * address is used, and which is never shown to the collector: it alone decides when they go.
 *
 * The price: a cycle through such a view is not collected.
 */
#include "core.h"

typedef struct {
    PyObject_HEAD
    Message *message;
    AioBytes bytes;
} Loan;

/* Make a view of a contiguous buffer; `bytes` has none before. */
static int aio_hold(AioBytes *bytes, PyObject *buffer)
{
    PyObject *view = PyMemoryView_FromObject(buffer);
    Py_buffer seen;

    if (!view)
        return -1;
    if (PyObject_GetBuffer(view, &seen, PyBUF_SIMPLE)) {
        Py_DECREF(view);
        return -1;
    }
    bytes->view = view;
    bytes->start = seen.buf;
    bytes->length = seen.len;
    bytes->readonly = seen.readonly;
    PyBuffer_Release(&seen);
    return 0;
}

static void aio_let_loose(AioBytes *bytes)
{
    PyObject *view = bytes->view;

    bytes->view = NULL;
    bytes->start = NULL;
    Py_XDECREF(view);
}

/* A bytes object is held as it is. */
void aio_message_own(Message *self, PyObject *bytes)
{
    self->bytes.view = bytes;
    self->bytes.start = PyBytes_AsString(bytes);
    self->bytes.length = self->length = PyBytes_Size(bytes);
    self->bytes.readonly = 1;
}

/* Bytes of their own. */
static PyObject *copy_of(const char *start, Py_ssize_t length)
{
    PyObject *copy = PyBytes_FromStringAndSize(NULL, length);

    if (copy)
        memcpy(PyBytes_AsString(copy), start, (size_t)length);
    return copy;
}

PyObject *aio_message_copied(const char *bytes, Py_ssize_t length)
{
    Message *message =
        (Message *)aio_make_again(&aio_spare_messages, aio_message_type, sizeof(Message));
    PyObject *copy = message ? copy_of(bytes, length) : NULL;

    if (!copy) {
        Py_XDECREF((PyObject *)message);
        return NULL;
    }
    message->imm = Py_NewRef(Py_None);
    aio_message_own(message, copy);
    return (PyObject *)message;
}

/* Export the bytes of a view that exists as those of `owner`. */
static int aio_export(const AioBytes *bytes, PyObject *owner, Py_buffer *view, int flags)
{
    return PyBuffer_FillInfo(view, owner, bytes->start, bytes->length, bytes->readonly, flags);
}

/* BufferExport */

typedef struct {
    PyObject_HEAD
    AioBytes bytes;
} BufferExport;

static int buffer_export_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", NULL};
    BufferExport *self = (BufferExport *)object;
    PyObject *buffer;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &buffer))
        return -1;
    if (self->bytes.view) {
        PyErr_SetString(PyExc_RuntimeError, "it holds a buffer already");
        return -1;
    }
    return aio_hold(&self->bytes, buffer);
}

static void buffer_export_dealloc(PyObject *object)
{
    aio_let_loose(&((BufferExport *)object)->bytes);
    aio_free(object);
}

static int buffer_export_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    if (!((BufferExport *)object)->bytes.view) {
        PyErr_SetString(PyExc_ValueError, "no buffer is held");
        view->obj = NULL;
        return -1;
    }
    return aio_export(&((BufferExport *)object)->bytes, object, view, flags);
}

static PyType_Slot buffer_export_slots[] = {
    {Py_tp_init, buffer_export_init},
    {Py_tp_dealloc, buffer_export_dealloc},
    {Py_bf_getbuffer, buffer_export_getbuffer},
    {Py_tp_doc, "The bytes of a contiguous buffer, for C; the buffer stays exported as long as "
                "this lives."},
    {0, NULL},
};

PyType_Spec aio_buffer_export_spec = {
    .name = "aiordma._core.BufferExport",
    .basicsize = sizeof(BufferExport),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = buffer_export_slots,
};

/* Message */

PyDoc_STRVAR(
    message_doc,
    "A received message.\n\n"
    "It supports the buffer protocol (`bytes(m)`, `memoryview(m)`, numpy), DLPack\n"
    "(`torch.from_dlpack(m)`) and, as bytes do, `m[0]`, `m[4:]` (a copy), `x in m`, `m == x`,\n"
    "`m.tobytes()` and `m.decode()`.  `len(m)` is its size in bytes, even after the release.\n\n"
    "Ownership: the bytes are in memory of the connection, which is used again after `release()`,\n"
    "after a `with` block, or when the last reference is gone.  A message cannot be released\n"
    "while its buffer is exported.  If an exception ends a `with` block then, the block raises\n"
    "that exception, and the memory goes back when the last export ends.  A message that\n"
    "outlives its connection stays readable.");

static int message_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Message *self = (Message *)object;
    static char *names[] = {"view", "imm", "give_back", NULL};
    PyObject *view, *imm = Py_None, *give_back = Py_None;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO", names, &view, &imm, &give_back))
        return -1;
    if (self->bytes.view || self->keeper || self->over) {
        PyErr_SetString(PyExc_RuntimeError, "the message has its bytes already");
        return -1;
    }
    if (PyBytes_CheckExact(view))
        aio_message_own(self, Py_NewRef(view));
    else if (aio_hold(&self->bytes, view))
        return -1;
    self->length = self->bytes.length;
    replace(&self->imm, Py_NewRef(imm));
    if (give_back != Py_None)
        self->keeper = Py_NewRef(give_back);
    return 0;
}

/* Exports and loans. */
static int is_in_use(const Message *self)
{
    return self->exports || self->loans;
}

static int is_released(const Message *self)
{
    return self->over || (!self->bytes.view && !(self->keeper && self->in_slot));
}

static int refuse_released(const Message *self)
{
    if (!is_released(self))
        return 0;
    PyErr_SetString(PyExc_ValueError, "the message was released");
    return -1;
}

/* Make the view of the message's bytes, unless there is one. 0, or -1. */
static int message_look(Message *self)
{
    const MessageState *state = (MessageState *)self->keeper;
    AioBytes bytes = {0};
    PyObject *slots;
    uint64_t offset;
    int rc, later;

    if (refuse_released(self))
        return -1;
    if (self->bytes.view)
        return 0;
    offset = connection_slot_offset(state->connection, self->slot, self->bare, &later);
    slots = state->receiver
                ? PyObject_GetAttr(state->receiver, later ? aio_name.more_slots : aio_name.slots)
                : PyErr_Format(PyExc_SystemError, "a message without a receiver");
    rc = slots ? aio_hold(&bytes, slots) : -1;
    Py_XDECREF(slots);
    if (!rc && offset + (uint64_t)self->length > (uint64_t)bytes.length) {
        PyErr_SetString(PyExc_SystemError, "a message outside of the slots");
        rc = -1;
    }
    /* Up to Python 3.11 the collector may have run a function that releases or reads it. */
    if (!rc)
        rc = refuse_released(self);
    if (rc || self->bytes.view) {
        aio_let_loose(&bytes);
        return rc;
    }
    bytes.start += offset;
    bytes.length = self->length;
    self->bytes = bytes;
    return 0;
}

/*
 * The bytes of the message, until other code runs that could release it or close the connection;
 * NULL with an exception.  No view is made of a slot whose connection is open.
 */
const char *aio_message_bytes(Message *self)
{
    const MessageState *state = (MessageState *)self->keeper;

    if (!self->bytes.view && self->in_slot && state && state->memory && !self->over)
        return connection_slot_bytes(state->connection, self->slot, self->bare);
    return message_look(self) ? NULL : self->bytes.start;
}

/* Give the memory back to the keeper: 0, or -1 with an exception. */
static int message_give_back(Message *self)
{
    PyObject *keeper = self->keeper, *result;
    MessageState *owner = (MessageState *)keeper;
    int code;

    if (!keeper)
        return 0;
    self->keeper = NULL;
    if (!self->in_slot) {
        result = PyObject_CallFunctionObjArgs(keeper, is_in_use(self) ? Py_True : Py_False, NULL);
    } else if (!is_in_use(self) && PyThread_get_thread_ident() == owner->thread) {
        if (self->kept)
            connection_release_kept(owner->connection);
        code = connection_release_slot(owner->connection, self->slot);
        result = code
                     ? PyObject_CallMethod(owner->receiver, "_posted_again", "Ii", self->slot, code)
                     : Py_NewRef(Py_None);
    } else {
        result = PyObject_CallMethod(owner->receiver, "slot_back", "IOO", self->slot,
                                     is_in_use(self) ? (PyObject *)self : Py_None,
                                     self->kept ? Py_True : Py_False);
    }
    Py_DECREF(keeper);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* Release the message: the memory goes back at once, or with the end of the last export or loan. */
static int message_let_go(Message *self)
{
    self->over = 1;
    if (!is_in_use(self))
        aio_let_loose(&self->bytes);
    return message_give_back(self);
}

static PyObject *message_release(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Message *self = (Message *)object;

    if (self->exports && !self->over) {
        PyErr_Format(PyExc_BufferError, "the message has %zd exported buffer%s", self->exports,
                     self->exports == 1 ? "" : "s");
        return NULL;
    }
    if (message_let_go(self))
        return NULL;
    Py_RETURN_NONE;
}

/* Move the bytes to memory of their own and give the slot back. */
static PyObject *message_detach(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Message *self = (Message *)object;
    PyObject *copy;

    if (!self->keeper)
        Py_RETURN_NONE;
    if (is_in_use(self)) {
        PyErr_SetString(PyExc_BufferError, "an exported message cannot be moved");
        return NULL;
    }
    if (message_look(self))
        return NULL;
    copy = copy_of(self->bytes.start, self->length);
    if (!copy)
        return NULL;
    aio_let_loose(&self->bytes);
    aio_message_own(self, copy);
    if (message_give_back(self))
        return NULL;
    Py_RETURN_NONE;
}

/* Release the message where no error can be raised; an error is reported, with `source`. */
static void forgotten(Message *self, PyObject *source)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    if (message_let_go(self))
        PyErr_WriteUnraisable(source);
    PyErr_Restore(type, value, traceback);
}

AioSpares aio_spare_messages;

/*
 * For a message that the collector has found. Its exports are garbage, too, and end after this,
 * when no function of the keeper can be called any more: so the memory goes back now.
 */
static void message_finalize(PyObject *object)
{
    forgotten((Message *)object, object);
}

static int message_traverse(PyObject *object, visitproc visit, void *arg)
{
    Message *self = (Message *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->keeper);
    Py_VISIT(self->imm);
    return 0;
}

static int message_clear(PyObject *object)
{
    Message *self = (Message *)object;

    Py_CLEAR(self->keeper);
    Py_CLEAR(self->imm);
    return 0;
}

static void message_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    if (((Message *)object)->weak)
        PyObject_ClearWeakRefs(object);
    /* The last reference is gone.  No call made here may take a new one, not even to report an
     * error: giving it back would deallocate the Message a second time.  So tp_finalize, which
     * needs a reference, is for Messages that the collector finds.  Each export holds a reference,
     * so that no export is left. */
    forgotten((Message *)object, (PyObject *)Py_TYPE(object));
    message_clear(object);
    aio_keep_spare(&aio_spare_messages, object);
}

static Py_ssize_t message_length(PyObject *object)
{
    return ((Message *)object)->length;
}

static int message_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    Message *self = (Message *)object;

    if (message_look(self) || aio_export(&self->bytes, object, view, flags)) {
        view->obj = NULL;
        return -1;
    }
    self->exports++;
    return 0;
}

static void message_releasebuffer(PyObject *object, Py_buffer *Py_UNUSED(view))
{
    Message *self = (Message *)object;

    self->exports--;
    if (self->over && !is_in_use(self))
        aio_let_loose(&self->bytes);
}

/* Bytes of the message for the library: like an export, but the message can be released. */
static PyObject *message_lend(PyObject *object, PyObject *view)
{
    Message *self = (Message *)object;
    AioBytes bytes;
    Py_buffer seen;
    Loan *loan;

    if (message_look(self) || PyObject_GetBuffer(view, &seen, PyBUF_SIMPLE))
        return NULL;
    bytes = self->bytes;
    bytes.start = seen.buf;
    bytes.length = seen.len;
    PyBuffer_Release(&seen);
    if (bytes.start < self->bytes.start ||
        bytes.start + bytes.length > self->bytes.start + self->bytes.length) {
        PyErr_SetString(PyExc_ValueError, "no bytes of the message");
        return NULL;
    }
    loan = PyObject_New(Loan, aio_loan_type);
    if (!loan)
        return NULL;
    loan->message = (Message *)Py_NewRef(object);
    loan->bytes = bytes;
    loan->bytes.view = NULL; /* the message's */
    self->loans++;
    return (PyObject *)loan;
}

static void loan_dealloc(PyObject *object)
{
    Message *message = ((Loan *)object)->message;

    message->loans--;
    if (message->over && !is_in_use(message))
        aio_let_loose(&message->bytes);
    Py_DECREF(message);
    aio_free(object);
}

static int loan_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    return aio_export(&((Loan *)object)->bytes, object, view, flags);
}

static PyType_Slot loan_slots[] = {
    {Py_tp_dealloc, loan_dealloc},
    {Py_bf_getbuffer, loan_getbuffer},
    {Py_tp_doc, "Bytes of a message that the library holds."},
    {0, NULL},
};

PyType_Spec aio_loan_spec = {
    .name = "aiordma._core.Loan",
    .basicsize = sizeof(Loan),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = loan_slots,
};

static PyObject *message_get_released(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(is_released((Message *)object));
}

static PyObject *message_get_exports(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromSsize_t(((Message *)object)->exports + ((Message *)object)->loans);
}

static PyObject *message_bytes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Message *self = (Message *)object;
    const char *start = aio_message_bytes(self);

    if (!start)
        return NULL;
    if (self->bytes.view &&
        PyBytes_CheckExact(self->bytes.view)) /* of a message that was joined or detached */
        return Py_NewRef(self->bytes.view);
    return copy_of(start, self->length);
}

static PyObject *message_item(PyObject *object, Py_ssize_t index)
{
    const char *start = aio_message_bytes((Message *)object);

    if (!start)
        return NULL;
    if (index < 0 || index >= ((Message *)object)->length) {
        PyErr_SetString(PyExc_IndexError, "index out of range");
        return NULL;
    }
    return PyLong_FromLong((unsigned char)start[index]);
}

/* message[index] is a number; message[first:last] are bytes, copied, as those of bytes are. */
static PyObject *message_subscript(PyObject *object, PyObject *key)
{
    Message *self = (Message *)object;
    Py_ssize_t index, first, last, step;
    PyObject *piece;
    const char *start;

    if (!PySlice_Check(key)) {
        index = PyNumber_AsSsize_t(key, PyExc_IndexError);
        if (index == -1 && PyErr_Occurred())
            return NULL;
        return message_item(object, index < 0 ? index + self->length : index);
    }
    if (PySlice_Unpack(key, &first, &last, &step))
        return NULL;
    index = PySlice_AdjustIndices(self->length, &first, &last, step);
    start = aio_message_bytes(self);
    if (!start)
        return NULL;
    piece = PyBytes_FromStringAndSize(step == 1 ? start + first : NULL, index);
    for (Py_ssize_t i = 0; piece && step != 1 && i < index; i++)
        PyBytes_AsString(piece)[i] = start[first + i * step];
    return piece;
}

/* As `in` of bytes: a number, or bytes in a row. */
static int message_contains(PyObject *object, PyObject *wanted)
{
    PyObject *copy = message_bytes(object, NULL);
    int found = copy ? PySequence_Contains(copy, wanted) : -1;

    Py_XDECREF(copy);
    return found;
}

static PyObject *message_decode(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"encoding", "errors", NULL};
    const char *encoding = "utf-8", *errors = "strict";
    PyObject *copy, *text;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ss:decode", names, &encoding, &errors))
        return NULL;
    copy = message_bytes(object, NULL); /* a decoder is Python code, or may be */
    text = copy ? PyUnicode_FromEncodedObject(copy, encoding, errors) : NULL;
    Py_XDECREF(copy);
    return text;
}

/*
 * Equal to any buffer of the same bytes.  Bytes are compared where they lie; memoryview, which runs
 * the collector, compares all others, whose bytes may change meanwhile.
 */
static PyObject *message_compare(PyObject *object, PyObject *other, int operator)
{
    PyObject *mine, *theirs, *result;
    Message *self = (Message *)object;

    if (operator != Py_EQ && operator != Py_NE)
        Py_RETURN_NOTIMPLEMENTED;
    if (object == other)
        return PyBool_FromLong(operator == Py_EQ);
    /* As a memoryview that was released: equal to itself only. */
    if (is_released((Message *)object) || !PyObject_CheckBuffer(other) ||
        (Py_IS_TYPE(other, aio_message_type) && is_released((Message *)other)))
        Py_RETURN_NOTIMPLEMENTED;
    if (PyBytes_Check(other)) {
        const char *start = aio_message_bytes(self);
        int same;

        if (!start)
            return NULL;
        same = PyBytes_Size(other) == self->length &&
               !memcmp(start, PyBytes_AsString(other), (size_t)self->length);
        return PyBool_FromLong(same == (operator == Py_EQ));
    }
    mine = PyMemoryView_FromObject(object);
    theirs = mine ? PyMemoryView_FromObject(other) : NULL;
    result = theirs ? PyObject_RichCompare(mine, theirs, operator) : NULL;
    Py_XDECREF(mine);
    Py_XDECREF(theirs);
    return result;
}

/* An exception of release() would replace the exception that ends the block. */
static PyObject *message_exit(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    if (!count || args[0] == Py_None)
        return message_release(object, NULL);
    forgotten((Message *)object, object);
    Py_RETURN_NONE;
}

static PyObject *message_enter(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return Py_NewRef(object);
}

static PyObject *message_repr(PyObject *object)
{
    Message *self = (Message *)object;
    const char *state = is_released(self) ? " released" : "";
    PyObject *imm = self->imm ? self->imm : Py_None;
    PyObject *hex, *result;

    if (imm == Py_None)
        return PyUnicode_FromFormat("<Message %zd bytes%s>", self->length, state);
    /* Of a message that a program made it may be anything. */
    hex = PyLong_Check(imm) ? PyNumber_ToBase(imm, 16) : PyObject_Repr(imm);
    result =
        hex ? PyUnicode_FromFormat("<Message %zd bytes imm=%U%s>", self->length, hex, state) : NULL;
    Py_XDECREF(hex);
    return result;
}

/* Python's own rule refuses a copy, and a pickle from protocol 2 on; see loop/uncopied.py. */
static PyObject *message_reduce(PyObject *Py_UNUSED(object), PyObject *Py_UNUSED(protocol))
{
    PyErr_SetString(PyExc_TypeError, "cannot copy or pickle a Message: bytes(message) is a copy");
    return NULL;
}

static PyMethodDef message_methods[] = {
    {"__bytes__", message_bytes, METH_NOARGS, NULL},
    {"__dlpack__", (PyCFunction)(void (*)(void))aio_message_dlpack, METH_VARARGS | METH_KEYWORDS,
     "The bytes as a tensor of uint8: `torch.from_dlpack(m)`, `numpy.from_dlpack(m)`.\n\n"
     "The tensor is read-only, and keeps the message from being released.  A consumer that does\n"
     "not know read-only tensors (`max_version` below 1) gets a copy.\n\n"
     "Raises:\n"
     "    BufferError: Such a consumer wants no copy; or the tensor is wanted on another device.\n"
     "    ValueError: The message was released."},
    {"__dlpack_device__", aio_message_dlpack_device, METH_NOARGS,
     "The processor: `(1, 0)` of DLPack."},
    {"__reduce_ex__", message_reduce, METH_O, NULL},
    {"__enter__", message_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))message_exit, METH_FASTCALL, NULL},
    {"decode", (PyCFunction)(void (*)(void))message_decode, METH_VARARGS | METH_KEYWORDS,
     "Decode the bytes, as `bytes.decode` does."},
    {"release", message_release, METH_NOARGS,
     "Give the memory back.  Idempotent.\n\n"
     "If a send or write of the message was canceled and still goes on, the memory goes back when\n"
     "that has ended.\n\n"
     "Raises:\n"
     "    BufferError: A memoryview or array still uses it; release that first."},
    {"tobytes", message_bytes, METH_NOARGS, "A copy of the bytes, as `memoryview.tobytes`."},
    {"_detach", message_detach, METH_NOARGS, NULL},
    {"_lend", message_lend, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef message_getset[] = {
    {"_released", message_get_released, NULL, NULL, NULL},
    {"_exports", message_get_exports, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef message_members[] = {
    {"imm", T_OBJECT, offsetof(Message, imm), READONLY, "The sender's 32-bit immediate, or None."},
    {"_kept", T_BOOL, offsetof(Message, kept), READONLY, NULL},
    {"_in_slot", T_BOOL, offsetof(Message, in_slot), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Message, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot message_slots[] = {
    {Py_tp_init, message_init},
    {Py_tp_traverse, message_traverse},
    {Py_tp_clear, message_clear},
    {Py_tp_finalize, message_finalize},
    {Py_tp_dealloc, message_dealloc},
    {Py_tp_iter, PySeqIter_New},
    {Py_sq_length, message_length},
    {Py_sq_item, message_item},
    {Py_sq_contains, message_contains},
    {Py_mp_length, message_length},
    {Py_mp_subscript, message_subscript},
    {Py_bf_getbuffer, message_getbuffer},
    {Py_bf_releasebuffer, message_releasebuffer},
    {Py_tp_methods, message_methods},
    {Py_tp_getset, message_getset},
    {Py_tp_members, message_members},
    {Py_tp_richcompare, message_compare},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_tp_repr, message_repr},
    {Py_tp_doc, (void *)message_doc},
    {0, NULL},
};

PyType_Spec aio_message_spec = {
    .name = "aiordma.Message",
    .basicsize = sizeof(Message),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = message_slots,
};
