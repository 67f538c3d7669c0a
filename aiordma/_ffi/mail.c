/*
 * Mail: what Python calls on the data path of a connection, and what is called when completions
 * have brought it news.  The work is message.c's.
 */
#include "fast.h"

#define WANT_ARRIVAL 1 /* as message.c has them */
#define OPERATED     4

PyTypeObject *aio_mail_type;

static PyTypeObject *parked_type;
static PyObject *name_on_news, *name_on_due, *name_is_running;

static int mail_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Mail *self = (Mail *)object;
    static char *names[] = {"lane", "send", "next", "back", "operate", "receiver", "parked", NULL};
    unsigned long long lane, send, next, back, operate;
    PyObject *receiver, *parked;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKKKKOO!", names, &lane, &send, &next, &back,
                                     &operate, &receiver, parked_type, &parked))
        return -1;
    if (((Parked *)parked)->mail) {
        PyErr_SetString(PyExc_ValueError, "another Mail has this Parked");
        return -1;
    }
    self->lane = (struct aio_lane *)(uintptr_t)lane;
    self->send = (int (*)(struct aio_lane *, const void *, uint64_t))(uintptr_t)send;
    self->next = (int64_t (*)(struct aio_lane *))(uintptr_t)next;
    self->back = (int (*)(struct aio_lane *, uint32_t))(uintptr_t)back;
    self->operate = (int (*)(struct aio_lane *, const struct aio_operation *))(uintptr_t)operate;
    self->thread = PyThread_get_thread_ident();
    Py_INCREF(receiver);
    replace(&self->receiver, receiver);
    Py_INCREF(parked);
    replace((PyObject **)&self->parked, parked);
    self->parked->mail = self;
    return 0;
}

static PyObject *mail_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, mail_init);
}

static int mail_traverse(PyObject *object, visitproc visit, void *arg)
{
    Mail *self = (Mail *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->receiver);
    Py_VISIT((PyObject *)self->parked);
    Py_VISIT(self->room);
    Py_VISIT(self->sge);
    Py_VISIT(self->remote);
    Py_VISIT(self->pd);
    Py_VISIT(self->known);
    for (uint32_t i = 0; i < self->n_operations; i++)
        Py_VISIT(self->operations[i]);
    return 0;
}

static int mail_clear(PyObject *object)
{
    /* Not the receiver: a message that is finalized later gives its slot to it. */
    Mail *self = (Mail *)object;

    Py_CLEAR(self->room);
    Py_CLEAR(self->sge);
    Py_CLEAR(self->remote);
    Py_CLEAR(self->pd);
    Py_CLEAR(self->known);
    return 0;
}

static void mail_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    aio_free_operations((Mail *)object);
    Py_CLEAR(((Mail *)object)->receiver);
    if (((Mail *)object)->parked)
        ((Mail *)object)->parked->mail = NULL;
    replace((PyObject **)&((Mail *)object)->parked, NULL);
    mail_clear(object);
    release(object);
    Py_DECREF(type);
}

/* A message in a slot; `imm` is stolen. */
static PyObject *make_message(Mail *self, uint32_t slot, Py_ssize_t length, PyObject *imm)
{
    Message *message = imm ? (Message *)PyType_GenericAlloc(aio_message_type, 0) : NULL;

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

struct aio_turn aio_turn;

/*
 * Whether the caller is not in the connection's loop: in a thread, in another loop, in none.
 *
 * Not by asyncio's get_running_loop(): up to Python 3.11 that asks the kernel for the process.  A
 * task that is resumed by the Mail of its loop needs no call at all, as no other loop can run
 * inside that turn; `is_running()` is 400 instructions, twice for each message.
 */
int aio_is_elsewhere(const Mail *self)
{
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *loop = self->parked->wakeup.loop, *running;
    int elsewhere;

    if (thread != self->thread)
        return 1;
    if (thread == aio_turn.thread && loop == aio_turn.loop)
        return 0;
    running = PyObject_CallMethodObjArgs(loop, name_is_running, NULL);
    elsewhere = running != Py_True;
    if (!running)
        PyErr_Clear();
    Py_XDECREF(running);
    return elsewhere;
}

/* Whether the peer has to be told of a single credit now; see endpoint/window.py. */
static int put_off(const struct aio_lane *lane)
{
    return lane->due <= 1 && lane->unused <= 0 && lane->posted > lane->control && !lane->raw;
}

/* The next message; None if there is none; False if Python has to look; NULL with an exception. */
static PyObject *take(Mail *self, int again)
{
    struct aio_lane *lane = self->lane;
    const struct aio_arrival *first;
    PyObject *message, *imm;

    /* A task that was resumed is where it was when it began to wait. */
    if (lane->rare || lane->held >= lane->half || (!again && aio_is_elsewhere(self)))
        Py_RETURN_FALSE;
    if (lane->head == lane->tail) {
        self->next(lane); /* from now on an arrival is news */
        Py_RETURN_NONE;
    }
    /* Made before it is taken: without memory for it the message stays where it is. */
    first = &lane->arrivals[lane->head & lane->arrival_mask];
    imm = first->has_imm ? PyLong_FromUnsignedLong(first->imm) : Py_NewRef(Py_None);
    message = make_message(self, first->slot, (Py_ssize_t)first->length, imm);
    if (!message)
        return NULL;
    self->next(lane);
    ((Message *)message)->kept = 1;
    lane->held++;
    return message;
}

/* `await mail` gives the next message, or None if Python has to see to it. */
static PyObject *mail_await(PyObject *object)
{
    Mail *self = (Mail *)object;
    PyObject *nothing, *iterator;

    if (self->parked->wakeup.state == AIO_IDLE && !self->lane->rare) {
        self->parked->taking = 1;
        return Py_NewRef((PyObject *)self->parked);
    }
    nothing = PyTuple_New(0);
    iterator = nothing ? PyObject_GetIter(nothing) : NULL;
    Py_XDECREF(nothing);
    return iterator;
}

static PySendResult parked_send(PyObject *object, PyObject *value, PyObject **result)
{
    Parked *self = (Parked *)object;
    int again = self->wakeup.state != AIO_IDLE;
    Mail *mail;

    (void)value;
    if (!self->taking || !self->mail || (again && self->wakeup.error)) {
        *result = aio_wakeup_next(object);
        if (*result)
            return PYGEN_NEXT;
        self->taking = 0;
        if (PyErr_Occurred())
            return PYGEN_ERROR;
        *result = Py_NewRef(Py_None);
        return PYGEN_RETURN;
    }
    if (again)
        aio_wakeup_forget(&self->wakeup);
    mail = (Mail *)Py_NewRef((PyObject *)self->mail); /* the collector may come to run */
    *result = take(mail, again);
    Py_DECREF((PyObject *)mail);
    if (*result == Py_None && !again) {
        Py_DECREF(*result);
        *result = aio_wakeup_next(object);
        return PYGEN_NEXT;
    }
    self->taking = 0;
    if (!*result)
        return PYGEN_ERROR;
    if (*result == Py_False)
        replace(result, Py_NewRef(Py_None));
    return PYGEN_RETURN;
}

/* There was no memory to hand the message over: put it back to where it was taken from. */
static void untake(Message *message)
{
    struct aio_lane *lane = ((Mail *)message->keeper)->lane;

    lane->head--;
    lane->messages_received--;
    lane->bytes_received -= (uint64_t)message->length;
    lane->held--;
    replace(&message->keeper, NULL); /* it gives no slot back */
}

/*
 * For a caller that iterates, as the interpreter does from 3.12 on, and before while it is traced.
 * The tp_iternext of Wakeup would park without looking for a message that has arrived already, and
 * nothing would resume the task.
 */
static PyObject *parked_next(PyObject *object)
{
    PyObject *result = NULL;

    switch (parked_send(object, NULL, &result)) {
    case PYGEN_NEXT:
        return result;
    case PYGEN_RETURN:
        PyErr_SetObject(PyExc_StopIteration, result);
        if (!PyErr_ExceptionMatches(PyExc_StopIteration) && Py_IS_TYPE(result, aio_message_type))
            untake((Message *)result);
        Py_DECREF(result);
        break;
    default:
        break;
    }
    return NULL;
}

/* Awaited by itself it is a Wakeup and nothing else. */
static PyObject *parked_await(PyObject *object)
{
    PyObject *awaited = aio_wakeup_await(object);

    if (awaited)
        ((Parked *)object)->taking = 0;
    return awaited;
}

static PyType_Slot parked_slots[] = {
    {Py_am_await, parked_await},
    {Py_am_send, parked_send},
    {Py_tp_iternext, parked_next},
    {Py_tp_doc, "What a task that waits for a message is parked on."},
    {0, NULL},
};

static PyType_Spec parked_spec = {
    .name = "aiordma._ffi._fast.Parked",
    .basicsize = sizeof(Parked),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = parked_slots,
};

static PyObject *mail_send(PyObject *object, PyObject *data)
{
    Mail *self = (Mail *)object;

    if (!PyBytes_CheckExact(data) || aio_is_elsewhere(self))
        return PyLong_FromLong(-1);
    return PyLong_FromLong(
        self->send(self->lane, PyBytes_AsString(data), (uint64_t)PyBytes_Size(data)));
}

/*
 * A task that was resumed raised SystemExit or KeyboardInterrupt, which end the loop.  Programs run
 * it again to end their tasks, and the rest is for them.
 */
static void later(Mail *self, uint32_t news)
{
    PyObject *type, *value, *traceback, *handle;

    PyErr_Fetch(&type, &value, &traceback);
    handle = PyObject_CallMethod(self->parked->wakeup.loop, "call_soon", "OI", (PyObject *)self,
                                 (unsigned int)news);
    Py_XDECREF(handle);
    PyErr_Restore(type, value, traceback); /* an error of call_soon is of no use here */
}

static int mail_news(Mail *self, uint32_t news)
{
    if (news & OPERATED && aio_operations_done(self)) {
        later(self, news);
        return -1;
    }
    if (news & WANT_ARRIVAL) {
        int woken = aio_wake(&self->parked->wakeup);

        if (woken < 0) {
            later(self, WANT_ARRIVAL);
            return -1;
        }
        /* Nothing that the program has sent in answer took the credit along. */
        if (!woken || put_off(self->lane)) {
            PyObject *told = PyObject_CallMethodObjArgs(self->receiver,
                                                        woken ? name_on_due : name_on_news, NULL);

            Py_XDECREF(told);
            return told ? 0 : -1;
        }
    }
    return 0;
}

/* Messages have arrived, operations have ended; nothing else of the program is running. */
int aio_mail_news(Mail *self, uint32_t news)
{
    int rc;

    if (aio_turn.thread == self->thread)
        aio_turn.loop = self->parked->wakeup.loop;
    rc = mail_news(self, news);
    aio_turn.loop = NULL;
    return rc;
}

static PyObject *mail_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int news;

    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Mail takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "I", &news) || aio_mail_news((Mail *)object, news))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *mail_operate(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return aio_post_operation((Mail *)object, args, count);
}

static PyObject *mail_read(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return aio_transfer((Mail *)object, args, count, IBV_WR_RDMA_READ);
}

static PyObject *mail_write(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return aio_transfer((Mail *)object, args, count, IBV_WR_RDMA_WRITE);
}

static PyObject *mail_ended(PyObject *object, PyObject *args)
{
    return aio_end_operation((Mail *)object, args);
}

static PyMethodDef mail_methods[] = {
    {"send", mail_send, METH_O, "Send bytes; see aio_lane_send."},
    {"message", mail_message, METH_VARARGS, "The message in a slot: slot, length, immediate."},
    {"operate", (PyCFunction)(void (*)(void))mail_operate, METH_FASTCALL,
     "Post a READ, WRITE or atomic; see operation.c."},
    {"read", (PyCFunction)(void (*)(void))mail_read, METH_FASTCALL,
     "READ into registered memory, if that is plain; see transfer.c."},
    {"write", (PyCFunction)(void (*)(void))mail_write, METH_FASTCALL, "WRITE in the same way."},
    {"ended", mail_ended, METH_VARARGS, "An operation has ended: its number, error or None."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef mail_members[] = {
    {"room", T_OBJECT_EX, offsetof(Mail, room), 0,
     "Called when an operation has ended while a task waits for room."},
    {"sge", T_OBJECT_EX, offsetof(Mail, sge), 0, "The class of pieces of registered memory."},
    {"remote", T_OBJECT_EX, offsetof(Mail, remote), 0, "The class of memory of the peer."},
    {"pd", T_OBJECT_EX, offsetof(Mail, pd), 0, "The connection's protection domain."},
    {"may_read", T_BOOL, offsetof(Mail, may_read), 0, "Whether READs are possible at all."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot mail_slots[] = {
    {Py_tp_new, mail_new},
    {Py_tp_traverse, mail_traverse},
    {Py_tp_clear, mail_clear},
    {Py_tp_dealloc, mail_dealloc},
    {Py_tp_call, mail_call}, /* with the news of its sink */
    {Py_am_await, mail_await},
    {Py_tp_methods, mail_methods},
    {Py_tp_members, mail_members},
    {Py_tp_doc, "The data path of one connection."},
    {0, NULL},
};

static PyType_Spec mail_spec = {
    .name = "aiordma._ffi._fast.Mail",
    .basicsize = sizeof(Mail),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = mail_slots,
};

int aio_add_mail(PyObject *module)
{
    name_on_news = PyUnicode_InternFromString("on_news");
    name_on_due = PyUnicode_InternFromString("on_due");
    name_is_running = PyUnicode_InternFromString("is_running");
    if (!name_on_news || !name_on_due || !name_is_running)
        return -1;
    parked_type = aio_add_type(module, &parked_spec, aio_wakeup_type);
    aio_mail_type = parked_type ? aio_add_type(module, &mail_spec, NULL) : NULL;
    return aio_mail_type ? 0 : -1;
}
