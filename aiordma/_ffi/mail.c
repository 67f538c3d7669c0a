/*
 * Mail: what Python calls on the data path of a connection.
 *
 * The work is message.c's, in the module that cffi makes.  A call by way of cffi takes its
 * arguments apart, gives the interpreter lock away and takes it again, and a message that is an
 * object of Python's costs more than to receive it.  Here each step is one call.
 */
#include "mail.h"

static int mail_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Mail *self = (Mail *)object;
    static char *names[] = {"lane", "send", "next", "back", "receiver", "type", NULL};
    unsigned long long lane, send, next, back;
    PyObject *receiver, *type;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKOO", names, &lane, &send, &next, &back,
                                     &receiver, &type))
        return -1;
    self->lane = (struct aio_lane *)(uintptr_t)lane;
    self->send = (int (*)(struct aio_lane *, const void *, uint64_t))(uintptr_t)send;
    self->next = (int64_t (*)(struct aio_lane *))(uintptr_t)next;
    self->back = (int (*)(struct aio_lane *, uint32_t))(uintptr_t)back;
    self->thread = PyThread_get_thread_ident();
    Py_INCREF(receiver);
    replace(&self->receiver, receiver);
    Py_INCREF(type);
    replace(&self->type, type);
    return 0;
}

static int mail_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Mail *)object)->receiver);
    Py_VISIT(((Mail *)object)->type);
    return 0;
}

static int mail_clear(PyObject *object)
{
    /* Not the receiver: a message that is finalized later gives its slot to it. */
    (void)object;
    return 0;
}

static void mail_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    Py_CLEAR(((Mail *)object)->receiver);
    Py_CLEAR(((Mail *)object)->type);
    release(object);
    Py_DECREF(type);
}

/* A message in a slot; `imm` is stolen. */
static PyObject *make_message(Mail *self, uint32_t slot, Py_ssize_t length, PyObject *imm)
{
    PyTypeObject *type = (PyTypeObject *)self->type;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Message *message = imm ? (Message *)allocate(type, 0) : NULL;

    if (!message) {
        Py_XDECREF(imm);
        return NULL;
    }
    message->keeper = Py_NewRef((PyObject *)self);
    message->imm = imm;
    message->length = length;
    message->slot = slot;
    message->in_slot = 1;
    return (PyObject *)message;
}

static PyObject *mail_message(PyObject *object, PyObject *args)
{
    unsigned int slot;
    Py_ssize_t length;
    PyObject *imm;

    if (!PyArg_ParseTuple(args, "InO", &slot, &length, &imm))
        return NULL;
    return make_message((Mail *)object, slot, length, Py_NewRef(imm));
}

static PyObject *mail_take(PyObject *object, PyObject *unused)
{
    Mail *self = (Mail *)object;
    struct aio_lane *lane = self->lane;
    PyObject *message;
    int64_t at;

    (void)unused;
    if (lane->rare || lane->held >= lane->half || PyThread_get_thread_ident() != self->thread)
        Py_RETURN_FALSE;
    at = self->next(lane);
    if (at < 0)
        Py_RETURN_NONE;
    message = make_message(self, (uint32_t)(at & 0xFFFF), (Py_ssize_t)(at >> 16 & 0xFFFFFFFF),
                           at >> 48 ? PyLong_FromUnsignedLong(lane->imm) : Py_NewRef(Py_None));
    if (message) {
        ((Message *)message)->kept = 1;
        lane->held++;
    }
    return message;
}

static PyObject *mail_send(PyObject *object, PyObject *data)
{
    Mail *self = (Mail *)object;

    if (!PyBytes_CheckExact(data) || PyThread_get_thread_ident() != self->thread)
        return PyLong_FromLong(-1);
    return PyLong_FromLong(
        self->send(self->lane, PyBytes_AsString(data), (uint64_t)PyBytes_Size(data)));
}

static PyMethodDef mail_methods[] = {
    {"send", mail_send, METH_O, "Send bytes; see aio_lane_send."},
    {"take", mail_take, METH_NOARGS,
     "The next message; None if there is none; False if Python has to look."},
    {"message", mail_message, METH_VARARGS, "The message in a slot: slot, length, immediate."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot mail_slots[] = {
    {Py_tp_init, mail_init},
    {Py_tp_traverse, mail_traverse},
    {Py_tp_clear, mail_clear},
    {Py_tp_dealloc, mail_dealloc},
    {Py_tp_methods, mail_methods},
    {Py_tp_doc, "The data path of one connection."},
    {0, NULL},
};

static PyType_Spec mail_spec = {
    .name = "aiordma._ffi._mail.Mail",
    .basicsize = sizeof(Mail),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = mail_slots,
};

static int mail_exec(PyObject *module)
{
    PyObject *mail, *message;
    int rc;

    if (aio_message_setup())
        return -1;
    mail = PyType_FromSpec(&mail_spec);
    message = PyType_FromSpec(&aio_message_spec);
    if (!mail || !message)
        return -1;
    rc = PyModule_AddObjectRef(module, "Mail", mail);
    if (!rc)
        rc = PyModule_AddObjectRef(module, "MessageBase", message);
    Py_DECREF(mail);
    Py_DECREF(message);
    return rc;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, mail_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aiordma._ffi._mail",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__mail(void);

PyMODINIT_FUNC PyInit__mail(void)
{
    return PyModuleDef_Init(&module_def);
}
