/*
 * Receiving: messages leave the ring of arrivals as Message objects, or as bytes in memory of the
 * program.
 *
 * The drain puts them into the ring (connection.c), and the program's tasks take them out.  Large
 * messages are announced there, and fetched by Python (endpoint/large/fetch.py).
 */
#include "core.h"

PyObject *aio_imm_object(int has_imm, uint32_t imm)
{
    return has_imm ? PyLong_FromUnsignedLong(imm) : Py_NewRef(Py_None);
}

/* cut(count): drop the large messages but the oldest so many, and all that came behind them. */
PyObject *aio_arrivals_cut(PyObject *object, PyObject *value)
{
    unsigned long count = PyLong_AsUnsignedLong(value);

    if (PyErr_Occurred())
        return NULL;
    connection_cut_arrivals(((MessageState *)object)->connection, (uint32_t)count);
    Py_RETURN_NONE;
}

/*
 * next_large(receives): (length, immediate, body) of the oldest announcement that Python has not
 * seen, and the slot that it lay in; None if there is none.  `receives`: slots that there may be.
 */
PyObject *aio_arrivals_next_large(PyObject *object, PyObject *receives)
{
    struct aio_connection *c = ((MessageState *)object)->connection;
    unsigned long most = PyLong_AsUnsignedLong(receives);
    struct aio_announcement found;
    PyObject *imm, *result;
    int code;

    if (PyErr_Occurred())
        return NULL;
    code = connection_next_announcement(c, (uint32_t)most, &found);
    if (code > 0)
        return PyErr_NoMemory();
    if (code)
        Py_RETURN_NONE;
    imm = aio_imm_object(found.has_imm, found.imm);
    result = imm ? Py_BuildValue("(KNy#I)", (unsigned long long)found.length, imm,
                                 (const char *)found.body, (Py_ssize_t)found.body_size, found.slot)
                 : NULL;
    if (result)
        connection_accept_announcement(c);
    return result;
}

PyObject *aio_arrivals_next_done(PyObject *object, PyObject *Py_UNUSED(unused))
{
    uint64_t number;
    uint32_t flags;

    if (!connection_next_done(((MessageState *)object)->connection, &number, &flags))
        Py_RETURN_NONE;
    return Py_BuildValue("(KI)", (unsigned long long)number, flags);
}

void aio_release_slot(MessageState *self, uint32_t slot)
{
    int code = connection_release_slot(self->connection, slot);
    PyObject *told = code ? PyObject_CallMethod(self->receiver, "_posted_again", "Ii", slot, code)
                          : Py_NewRef(Py_None);

    if (!told) /* the message is complete, and is not lost for that */
        PyErr_WriteUnraisable((PyObject *)self);
    Py_XDECREF(told);
}

/* Copy the oldest message, of `count` frames, and release its slots; 0, or -1 with an exception. */
static int copy_first(MessageState *self, char *at, uint32_t count)
{
    uint16_t single, *slots = count > 1 ? aio_room_for(count, sizeof(*slots)) : &single;

    if (!slots)
        return -1;
    connection_copy_first(self->connection, at, slots, count);
    for (uint32_t i = 0; i < count; i++)
        aio_release_slot(self, slots[i]);
    if (slots != &single)
        PyMem_Free(slots);
    return 0;
}

/* Take a message that lies in fragments, or in a landing, as bytes of its own; as `copy_first`. */
static int join_first(MessageState *self, Message *message)
{
    uint32_t count;
    uint64_t length = connection_measure_first(self->connection, &count);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);

    if (!bytes)
        return -1;
    if (copy_first(self, PyBytes_AsString(bytes), count)) {
        Py_DECREF(bytes);
        return -1;
    }
    aio_message_own(message, bytes);
    return 0;
}

/*
 * Take the oldest message, unless it is large, with a copy of its bytes: their number.  If that
 * exceeds the buffer, nothing was `taken`.  None if there is none.
 */
static PyObject *take_into(MessageState *self, const Py_buffer *to, int *taken)
{
    const struct aio_arrival *first = connection_first(self->connection);
    uint32_t count;
    uint64_t length;
    PyObject *told;

    *taken = 0;
    if (!first || first->large)
        Py_RETURN_NONE;
    length = connection_measure_first(self->connection, &count);
    told = PyLong_FromUnsignedLongLong(length);
    if (told && length <= (uint64_t)to->len) {
        if (copy_first(self, to->buf, count))
            replace(&told, NULL);
        else
            *taken = 1;
    }
    return told;
}

/* take_into(buffer): see `take_into`. */
PyObject *aio_arrivals_take_into(PyObject *object, PyObject *buffer)
{
    PyObject *told;
    Py_buffer to;
    int taken;

    if (PyObject_GetBuffer(buffer, &to, PyBUF_WRITABLE))
        return NULL;
    told = take_into((MessageState *)object, &to, &taken);
    PyBuffer_Release(&to);
    return told;
}

/*
 * Take the oldest message, unless it is large, out of the ring: None if there is none; NULL with an
 * exception, and the message is still in the ring.
 *
 * Its object is made before the ring is looked at: up to Python 3.11 the collector may then run a
 * function of the program that takes the message, or aborts the connection.
 */
PyObject *aio_take_first(MessageState *self)
{
    Message *message =
        (Message *)aio_make_again(&aio_spare_messages, aio_message_type, sizeof(Message));
    const struct aio_arrival *first;

    if (!message)
        return NULL;
    first = connection_first(self->connection);
    if (!first || first->large) {
        Py_DECREF((PyObject *)message);
        Py_RETURN_NONE;
    }
    message->imm = aio_imm_object(first->has_imm, first->imm);
    if (!message->imm || ((first->more || first->landing) && join_first(self, message))) {
        Py_DECREF((PyObject *)message);
        return NULL;
    }
    if (!message->bytes.view) {
        message->keeper = Py_NewRef((PyObject *)self);
        message->length = (Py_ssize_t)first->length;
        message->slot = first->slot;
        message->bare = (char)first->bare;
        message->in_slot = 1;
        message->kept = (char)connection_take_first(self->connection);
    }
    return (PyObject *)message;
}

/* What a task waits for that receives: the next message; see ReceiveWakeup. */
PyObject *aio_take_message(PyObject *owner, int again)
{
    MessageState *self = (MessageState *)owner;
    const Py_buffer *into = self->into;
    PyObject *message;
    int elsewhere, taken = 1;

    if (connection_is_delegated(self->connection))
        Py_RETURN_FALSE;
    /* A task that was resumed is where it was when it began to wait. */
    elsewhere = again ? 0 : aio_is_elsewhere(self);
    if (elsewhere < 0)
        return NULL;
    if (elsewhere)
        Py_RETURN_FALSE;
    switch (connection_begin_receive(self->connection)) {
    case AIO_RECEIVE_WAIT:
        Py_RETURN_NONE;
    case AIO_RECEIVE_PYTHON:
        Py_RETURN_FALSE;
    case AIO_RECEIVE_MESSAGE:
        break;
    }
    message = into ? take_into(self, into, &taken) : aio_take_first(self);
    /* None: a function that the collector runs has taken it.  Python refuses a small buffer. */
    if (message && (message == Py_None || !taken))
        replace(&message, Py_NewRef(Py_False));
    return message;
}
