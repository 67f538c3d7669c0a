/*
 * Arrivals: the ring of messages that have arrived, as Python sees it: methods of MessageState.
 *
 * Owns nothing.  The drain puts messages into the ring (message.c); Parked takes them out
 * (wakeup.c), Python the large ones, in the thread of the connection's loop.
 */
#include "core.h"

/* cut(count): drop the large messages but the oldest so many, and all that came behind them. */
PyObject *aio_arrivals_cut(PyObject *object, PyObject *value)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long count = PyLong_AsUnsignedLong(value);
    uint32_t end = m->head, kept = 0;

    if (PyErr_Occurred())
        return NULL;
    m->inner = 0;
    for (; end != m->tail; end++) {
        if (m->arrivals[end & m->arrival_mask].large && kept++ == count)
            break;
        m->inner += m->arrivals[end & m->arrival_mask].more;
    }
    if (end != m->tail)
        m->large = (uint32_t)count;
    for (uint32_t i = 0; i < m->fragments; i++)
        m->arrivals[(end + i) & m->arrival_mask] = m->arrivals[(m->tail + i) & m->arrival_mask];
    m->tail = end;
    if ((int32_t)(m->announced - end) > 0)
        m->announced = end;
    Py_RETURN_NONE;
}

/*
 * Each receive that is posted may bring a message, and a large one gives its slot back before the
 * program has taken it: room for both.
 */
static int make_room(struct aio_message_state *m, uint32_t receives)
{
    uint32_t before = m->arrival_mask + 1, after = aio_power(receives + m->large);
    struct aio_arrival *larger;

    if (after <= before)
        return 0;
    larger = aio_room_for(after, sizeof(*larger));
    if (!larger)
        return -1;
    for (uint32_t at = m->head; at != m->tail + m->fragments; at++)
        larger[at & (after - 1)] = m->arrivals[at & (before - 1)];
    PyMem_Free(m->arrivals);
    m->arrivals = larger;
    m->arrival_mask = after - 1;
    return 0;
}

/*
 * next_large(receives): (length, immediate, body) of the oldest announcement that Python has not
 * seen, and the slot that it lay in; None if there is none.  `receives`: slots that there may be.
 */
PyObject *aio_arrivals_next_large(PyObject *object, PyObject *receives)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long most = PyLong_AsUnsignedLong(receives);
    struct aio_arrival *arrival;
    const uint8_t *frame;
    PyObject *imm, *result;

    if (PyErr_Occurred() || make_room(m, (uint32_t)most))
        return NULL;
    if ((int32_t)(m->announced - m->head) < 0)
        m->announced = m->head;
    while (m->announced != m->tail && m->arrivals[m->announced & m->arrival_mask].large != 1)
        m->announced++;
    if (m->announced == m->tail)
        Py_RETURN_NONE;
    arrival = &m->arrivals[m->announced & m->arrival_mask];
    frame = (const uint8_t *)(uintptr_t)aio_slot_addr(&m->recv, arrival->slot);
    imm = aio_imm_object(arrival);
    result = imm ? Py_BuildValue("(KNy#I)", (unsigned long long)aio_read64(frame + 8), imm,
                                 (const char *)frame + AIO_FRAME_SIZE,
                                 (Py_ssize_t)(arrival->length < AIO_HEAD_SIZE ? arrival->length
                                                                              : AIO_HEAD_SIZE),
                                 arrival->slot)
                 : NULL;
    if (result)
        arrival->large = 2;
    return result;
}

PyObject *aio_arrivals_next_done(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_dones *dones = &((MessageState *)object)->state.dones;
    const struct aio_done *done;

    if (dones->head == dones->tail)
        Py_RETURN_NONE;
    done = &dones->items[dones->head++ & dones->mask];
    return Py_BuildValue("(KI)", (unsigned long long)done->number, done->flags);
}

/* Give a slot back whose bytes were copied. */
static void give_back(MessageState *self, uint32_t slot)
{
    int code = aio_message_back(&self->state, slot);
    PyObject *told = code ? PyObject_CallMethod(self->receiver, "_posted_again", "Ii", slot, code)
                          : Py_NewRef(Py_None);

    if (!told) /* the message is complete, and is not lost for that */
        PyErr_WriteUnraisable((PyObject *)self);
    Py_XDECREF(told);
}

/* Bytes of the oldest message, and its frames. */
static uint64_t measure(const struct aio_message_state *m, uint32_t *frames)
{
    uint32_t count = 0;
    uint64_t length = 0;

    do
        length += m->arrivals[(m->head + count) & m->arrival_mask].length;
    while (m->arrivals[(m->head + count++) & m->arrival_mask].more);
    *frames = count;
    return length;
}

/*
 * Copy the oldest message, take it out of the ring, and give its slots back; 0, or -1 with an
 * exception.  A peer may write to its landing meanwhile: the message is what was copied.
 */
static int copy_out(MessageState *self, char *at, uint32_t count)
{
    struct aio_message_state *m = &self->state;
    uint16_t single, *slots = count > 1 ? aio_room_for(count, sizeof(*slots)) : &single;

    if (!slots)
        return -1;
    for (uint32_t i = 0; i < count; i++) {
        const struct aio_arrival *arrival = &m->arrivals[m->head++ & m->arrival_mask];

        memcpy(at, aio_arrival_at(m, arrival), arrival->length);
        m->landings.freed |= arrival->landing && arrival->landing == m->landings.newest;
        at += arrival->length;
        slots[i] = arrival->slot;
    }
    m->inner -= count - 1;
    for (uint32_t i = 0; i < count; i++)
        give_back(self, slots[i]);
    if (slots != &single)
        PyMem_Free(slots);
    return 0;
}

/* Take a message in fragments, or in a landing, with bytes of its own; as `copy_out`. */
int aio_arrivals_join(MessageState *self, Message *message)
{
    uint32_t count;
    uint64_t length = measure(&self->state, &count);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);

    if (!bytes)
        return -1;
    if (copy_out(self, PyBytes_AsString(bytes), count)) {
        Py_DECREF(bytes);
        return -1;
    }
    aio_message_own(message, bytes);
    return 0;
}

/*
 * take_into(buffer): take the oldest message, unless it is large, with a copy of its bytes: their
 * number.  If that exceeds the buffer, nothing was taken.  None if there is none.
 */
PyObject *aio_arrivals_take_into(PyObject *object, PyObject *buffer)
{
    MessageState *self = (MessageState *)object;
    const struct aio_message_state *m = &self->state;
    PyObject *told = NULL;
    Py_buffer to;
    uint32_t count;
    uint64_t length;

    if (PyObject_GetBuffer(buffer, &to, PyBUF_WRITABLE))
        return NULL;
    if (m->head == m->tail || m->arrivals[m->head & m->arrival_mask].large) {
        told = Py_NewRef(Py_None);
    } else {
        length = measure(m, &count);
        told = PyLong_FromUnsignedLongLong(length);
        if (told && length <= (uint64_t)to.len && copy_out(self, to.buf, count))
            replace(&told, NULL);
    }
    PyBuffer_Release(&to);
    return told;
}
