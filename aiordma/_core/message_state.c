/*
 * MessageState: the messages and operations of one connection, as Python sees them.  The work is
 * done in message.c and operation.c.
 *
 * Python sets and reads the fields that are members of the type, in the thread of the connection's
 * loop.  The drain changes them, too, in the same thread.
 */
#include "core.h"

static int make_dones(struct aio_dones *dones, unsigned int count)
{
    dones->mask = aio_power(count) - 1;
    dones->items = aio_room_for(dones->mask + 1, sizeof(*dones->items));
    return dones->items ? 0 : -1;
}

static int make_order(struct aio_order *order, unsigned int count)
{
    order->mask = aio_power(count) - 1;
    order->slots = aio_room_for(order->mask + 1, sizeof(*order->slots));
    return order->slots ? 0 : -1;
}

static int state_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    MessageState *self = (MessageState *)object;
    struct aio_message_state *m = &self->state;
    static char *names[] = {"loop",     "sends",    "receives",  "send_depth",
                            "arrivals", "controls", "exchanges", "answers",
                            "reads",    "raw",      "grows",     NULL};
    unsigned int sends, receives, send_depth, arrivals, controls, exchanges, answers;
    PyObject *loop;
    int raw, grows;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIIIIIIIIpp", names, &loop, &sends, &receives,
                                     &send_depth, &arrivals, &controls, &exchanges, &answers,
                                     &m->most_reads, &raw, &grows))
        return -1;
    if (!arrivals || sends > send_depth || arrivals & (arrivals - 1) || receives > arrivals ||
        controls + answers > receives || answers > exchanges ||
        send_depth + controls >= AIO_SUB_READ || exchanges > 0xFFFF) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not fit one another");
        return -1;
    }
    m->free = aio_room_for(send_depth, sizeof(*m->free));
    m->control_free = m->free ? aio_room_for(controls, sizeof(*m->control_free)) : NULL;
    m->arrivals = m->control_free ? aio_room_for(arrivals, sizeof(*m->arrivals)) : NULL;
    m->reads_done = m->arrivals ? aio_room_for(m->most_reads, sizeof(*m->reads_done)) : NULL;
    if (!m->reads_done || make_dones(&m->dones, exchanges) ||
        make_dones(&m->dones_pending, exchanges) ||
        make_order(&m->sending, send_depth + controls) || make_order(&m->receiving, arrivals))
        return -1;
    self->parked = aio_park(loop, object, aio_take_message);
    if (!self->parked)
        return -1;
    self->thread = PyThread_get_thread_ident();
    m->data_slots = send_depth;
    m->arrival_mask = arrivals - 1;
    m->control = (int64_t)controls + answers;
    m->grows = (uint8_t)grows;
    m->raw = (uint8_t)raw;
    aio_message_init(m, sends, receives, controls);
    aio_count_in(&self->counted, m, NULL);
    return 0;
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, state_init);
}

static int state_traverse(PyObject *object, visitproc visit, void *arg)
{
    MessageState *self = (MessageState *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->receiver);
    Py_VISIT(self->memory);
    Py_VISIT(self->group);
    if (aio_line_traverse(self, visit, arg))
        return -1;
    Py_VISIT(self->handler);
    Py_VISIT(self->room);
    Py_VISIT(self->sge);
    Py_VISIT(self->region);
    Py_VISIT(self->remote);
    Py_VISIT(self->pd);
    Py_VISIT(self->known);
    Py_VISIT(self->lent);
    Py_VISIT(self->spin);
    for (uint32_t i = 0; self->operations && i < self->state.n_operations; i++)
        Py_VISIT(self->operations[i]);
    return aio_parked_traverse(self->parked, visit, arg);
}

/* The queue pair and the memory of the slots may go: neither is used from now on. */
static void unbind(MessageState *self)
{
    self->state.closed = 1;
    self->state.qp = NULL;
    Py_CLEAR(self->memory);
}

static int state_clear(PyObject *object)
{
    /* Not the receiver: a message that is finalized later gives its slot to it. */
    MessageState *self = (MessageState *)object;

    unbind(self);
    aio_line_clear(self);
    self->state.group = NULL;
    Py_CLEAR(self->group);
    Py_CLEAR(self->handler);
    Py_CLEAR(self->room);
    Py_CLEAR(self->sge);
    Py_CLEAR(self->region);
    Py_CLEAR(self->remote);
    Py_CLEAR(self->pd);
    Py_CLEAR(self->known);
    Py_CLEAR(self->lent);
    Py_CLEAR(self->spin);
    return 0;
}

static void state_dealloc(PyObject *object)
{
    MessageState *self = (MessageState *)object;

    PyObject_GC_UnTrack(object);
    aio_unpark(&self->parked); /* first: the others' finalizers may resume its task */
    aio_count_out(&self->counted);
    aio_free_operations(self);
    Py_CLEAR(self->receiver);
    replace((PyObject **)&self->bounce, NULL);
    state_clear(object);
    for (int i = 0; i <= AIO_LANDINGS; i++)
        Py_CLEAR(self->landings[i]);
    PyMem_Free(self->state.free);
    PyMem_Free(self->state.control_free);
    PyMem_Free(self->state.freed);
    PyMem_Free(self->state.reads_done);
    PyMem_Free(self->state.dones.items);
    PyMem_Free(self->state.dones_pending.items);
    PyMem_Free(self->state.arrivals);
    PyMem_Free(self->state.sending.slots);
    PyMem_Free(self->state.receiving.slots);
    PyMem_Free(self->state.operations_free);
    PyMem_Free(self->state.operations_done);
    PyMem_Free(self->state.send.keys);
    PyMem_Free(self->state.recv.keys);
    aio_free(object);
}

static PyObject *state_take(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return aio_take_first((MessageState *)object);
}

/* An immediate: 1 with the number, 0 of None, -1 with an exception. */
int aio_imm_of(PyObject *object, uint32_t *imm)
{
    unsigned long number;

    *imm = 0;
    if (object == Py_None)
        return 0;
    number = PyLong_AsUnsignedLong(object);
    if (number == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    *imm = (uint32_t)number;
    return 1;
}

/* send(data): 0, -1 if Python has to do it, an errno, or a Waiting, whose end is 0 or an errno. */
static PyObject *state_send(PyObject *object, PyObject *data)
{
    PyObject *waiting = NULL;
    int code = aio_send((MessageState *)object, data, &waiting);

    if (waiting)
        return waiting;
    return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
}

static PyObject *state_post_chain(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(aio_message_flush(&((MessageState *)object)->state));
}

static PyObject *state_send_buffer(PyObject *object, PyObject *args)
{
    PyObject *number;
    Py_buffer data;
    uint32_t imm;
    int has_imm, code = 0;

    if (!PyArg_ParseTuple(args, "y*O", &data, &number))
        return NULL;
    has_imm = aio_imm_of(number, &imm);
    if (has_imm >= 0)
        code = aio_message_send(&((MessageState *)object)->state,
                                (struct aio_bytes){{data.buf, (uint64_t)data.len}, NULL},
                                (uint64_t)data.len, has_imm, imm);
    PyBuffer_Release(&data);
    return has_imm < 0 ? NULL : aio_sent((MessageState *)object, code);
}

static PyObject *state_send_control(PyObject *object, PyObject *args)
{
    unsigned long long argument = 0;
    unsigned int kind, flags = 0;

    if (!PyArg_ParseTuple(args, "I|KI", &kind, &argument, &flags))
        return NULL;
    if (kind > AIO_FRAME_ABORT || kind == AIO_FRAME_DATA || kind == AIO_FRAME_RENDEZVOUS) {
        PyErr_SetString(PyExc_ValueError, "no frame without data");
        return NULL;
    }
    return PyLong_FromLong(aio_message_send_control(
        &((MessageState *)object)->state, (enum aio_frame_kind)kind, argument, (uint8_t)flags));
}

static PyObject *state_drop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    aio_message_drop(&((MessageState *)object)->state);
    Py_RETURN_NONE;
}

AIO_METHOD(MessageState, state_credit, aio_message_give_credit)

static PyObject *state_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int events;

    if (aio_events_of(args, kwargs, &events) ||
        aio_message_events((MessageState *)object, events, 1))
        return NULL;
    Py_RETURN_NONE;
}

/* spin_with(messages, operations): the Spins of the waits for them. */
static PyObject *state_spin_with(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    PyObject *messages, *operations;

    if (!PyArg_ParseTuple(args, "O!O!", aio_spin_type, &messages, aio_spin_type, &operations))
        return NULL;
    replace(&self->parked->wakeup.spin, Py_NewRef(messages));
    replace(&self->spin, Py_NewRef(operations));
    Py_RETURN_NONE;
}

/* The adapter's side */

static PyObject *state_bind(PyObject *object, PyObject *args)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long long qp, crowded;
    PyObject *memory = Py_None;

    if (!PyArg_ParseTuple(args, "KKII(KIII)(KIII)(KII)K|O", &qp, &m->base.id, &m->send_flags,
                          &m->inline_size, &m->send.addr, &m->send.stride, &m->send.key,
                          &m->send.base, &m->recv.addr, &m->recv.stride, &m->recv.key,
                          &m->recv.base, &m->frames.addr, &m->frames.stride, &m->frames.key,
                          &crowded, &memory))
        return NULL;
    replace(&((MessageState *)object)->memory, Py_NewRef(memory));
    m->qp = (struct ibv_qp *)(uintptr_t)qp;
    m->crowded = (const uint8_t *)(uintptr_t)crowded;
    m->recv.full = !m->crowded; /* slots that come are told by `fit` */
    Py_RETURN_NONE;
}

static PyObject *state_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    unbind((MessageState *)object);
    Py_RETURN_NONE;
}

/* Take the keys of the registrations of slots that come and go; 0 where there is none. */
static int fit(struct aio_slots *slots, PyObject *keys)
{
    Py_ssize_t count = PyList_Size(keys);
    uint32_t *room;

    if (count < 0)
        return -1;
    room = PyMem_Realloc(slots->keys, (size_t)(count ? count : 1) * sizeof(*room));
    if (!room) {
        PyErr_NoMemory();
        return -1;
    }
    slots->keys = room;
    slots->more = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        room[i] = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(keys, i));
        slots->more |= room[i] != 0;
    }
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *state_fit(PyObject *object, PyObject *args)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    struct aio_slots *slots;
    int receives, leaving, full;
    unsigned long long more_addr;
    unsigned int step;
    PyObject *keys;

    if (!PyArg_ParseTuple(args, "pKIO!pp", &receives, &more_addr, &step, &PyList_Type, &keys,
                          &leaving, &full))
        return NULL;
    slots = receives ? &m->recv : &m->send;
    if (!m->freed) {
        m->freed = aio_room_for(m->arrival_mask + 1, sizeof(*m->freed));
        if (!m->freed)
            return NULL;
    }
    if (fit(slots, keys))
        return NULL;
    slots->more_addr = more_addr;
    slots->step = step;
    slots->leaving = (uint8_t)leaving;
    slots->full = (uint8_t)full;
    Py_RETURN_NONE;
}

static PyObject *state_size(PyObject *object, PyObject *window)
{
    long long size = PyLong_AsLongLong(window);

    if (size == -1 && PyErr_Occurred())
        return NULL;
    aio_message_size(&((MessageState *)object)->state, size);
    Py_RETURN_NONE;
}

/* land(number, address, rkey, memory): offer a landing to the peer; 0 or an errno. */
static PyObject *state_land(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    struct aio_landings *landings = &self->state.landings;
    unsigned int number, key;
    unsigned long long addr;
    PyObject *memory;

    if (!PyArg_ParseTuple(args, "IKIO", &number, &addr, &key, &memory))
        return NULL;
    if (number <= landings->newest || number > AIO_LANDINGS) {
        PyErr_SetString(PyExc_ValueError, "no number of a new landing");
        return NULL;
    }
    replace(&self->landings[number], Py_NewRef(memory));
    landings->addr[number] = addr;
    landings->key = key;
    landings->newest = (uint8_t)number;
    landings->freed = 0;
    return PyLong_FromLong(aio_message_offer(&self->state));
}

/* set_stage(address, lkey, size): the memory that messages are written from. */
static PyObject *state_set_stage(PyObject *object, PyObject *args)
{
    struct aio_stage *stage = &((MessageState *)object)->state.stage;
    unsigned long long addr, size;
    unsigned int key;

    if (!PyArg_ParseTuple(args, "KIK", &addr, &key, &size))
        return NULL;
    stage->addr = addr;
    stage->key = key;
    stage->size = size;
    Py_RETURN_NONE;
}

static PyObject *state_post_read(PyObject *object, PyObject *args)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long long addr, remote_addr;
    unsigned int number, length, lkey, rkey;

    if (!PyArg_ParseTuple(args, "IKIIKI", &number, &addr, &length, &lkey, &remote_addr, &rkey))
        return NULL;
    if (!m->qp)
        return PyLong_FromLong(ENOTCONN);
    return PyLong_FromLong(aio_message_read(m, number, addr, length, lkey, remote_addr, rkey));
}

/* post_receives(slots): `slots` is a list, or a number of slots, from the first on. */
static PyObject *state_post_receives(PyObject *object, PyObject *slots)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    uint16_t *numbers = NULL;
    Py_ssize_t count;
    int code;

    if (PyList_Check(slots)) {
        count = PyList_Size(slots);
        numbers = aio_room_for((size_t)count, sizeof(*numbers));
        for (Py_ssize_t i = 0; numbers && i < count; i++)
            numbers[i] = (uint16_t)PyLong_AsUnsignedLong(PyList_GetItem(slots, i));
    } else {
        count = PyLong_AsSsize_t(slots);
    }
    if (PyErr_Occurred()) {
        PyMem_Free(numbers);
        return NULL;
    }
    code = m->qp ? aio_message_receive(m, numbers, (uint32_t)count) : ENOTCONN;
    PyMem_Free(numbers);
    return PyLong_FromLong(code);
}

AIO_METHOD_O(MessageState, state_back, aio_message_back)
AIO_METHOD_O(MessageState, state_back_now, aio_message_back_now)

/* Numbers of a stack, as a list. */
static PyObject *list_of(const uint16_t *numbers, uint32_t count)
{
    PyObject *list = PyList_New(count);

    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromLong(numbers[i]);

        if (!number || PyList_SetItem(list, i, number))
            replace(&list, NULL);
    }
    return list;
}

/* A method that takes all numbers of a stack. */
#define TAKE_METHOD(name, stack)                                                                   \
    static PyObject *name(PyObject *object, PyObject *Py_UNUSED(unused))                           \
    {                                                                                              \
        struct aio_message_state *m = &((MessageState *)object)->state;                            \
        PyObject *list = list_of(m->stack, m->n_##stack);                                          \
                                                                                                   \
        if (list)                                                                                  \
            m->n_##stack = 0;                                                                      \
        return list;                                                                               \
    }

TAKE_METHOD(state_take_unposted, back)
TAKE_METHOD(state_take_freed, freed)
TAKE_METHOD(state_take_reads, reads_done)

/* Arrivals: the rest is in arrivals.c */

/*
 * peek(): (slot, length, immediate) of the oldest message, and whether it is the first frame of
 * requests; the slot of a large message is None.
 */
static PyObject *state_peek(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    const struct aio_arrival *first;
    PyObject *imm;

    if (m->head == m->tail)
        Py_RETURN_NONE;
    first = &m->arrivals[m->head & m->arrival_mask];
    imm = aio_imm_object(first);
    if (!imm)
        return NULL;
    return first->large ? Py_BuildValue("(OINO)", Py_None, 0, imm, Py_False)
                        : Py_BuildValue("(IINO)", first->slot, first->length, imm,
                                        first->requests ? Py_True : Py_False);
}

static PyObject *state_skip(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    if (m->head != m->tail) {
        m->inner -= m->arrivals[m->head & m->arrival_mask].more;
        m->large -= m->arrivals[m->head++ & m->arrival_mask].large != 0;
        if ((int32_t)(m->announced - m->head) < 0)
            m->announced = m->head;
    }
    Py_RETURN_NONE;
}

/* Send slots that are free */

static PyObject *state_give_slot(PyObject *object, PyObject *slot)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long number = PyLong_AsUnsignedLong(slot);

    if (PyErr_Occurred())
        return NULL;
    if (number >= m->data_slots || m->n_free >= m->data_slots) {
        PyErr_SetString(PyExc_ValueError, "no such slot");
        return NULL;
    }
    m->free[m->n_free++] = (uint16_t)number;
    Py_RETURN_NONE;
}

static PyObject *state_withdraw_slot(PyObject *object, PyObject *slot)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long number = PyLong_AsUnsignedLong(slot);

    if (PyErr_Occurred())
        return NULL;
    for (uint32_t i = 0; i < m->n_free; i++) {
        if (m->free[i] == number) {
            memmove(&m->free[i], &m->free[i + 1], (--m->n_free - i) * sizeof(*m->free));
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_FALSE;
}

/* An attribute that is not a field. */
#define GETTER(name, value)                                                                        \
    static PyObject *name(PyObject *object, void *Py_UNUSED(unused))                               \
    {                                                                                              \
        const struct aio_message_state *m = &((MessageState *)object)->state;                      \
                                                                                                   \
        return value;                                                                              \
    }

GETTER(state_get_free, list_of(m->free, m->n_free))
GETTER(state_get_free_numbers, list_of(m->operations_free, m->n_operations_free))
GETTER(state_get_has_room, PyBool_FromLong(m->queued &&aio_message_has_room(m)))
GETTER(state_get_lacks_slot, PyBool_FromLong(aio_message_lacks_slot(m)))
GETTER(state_get_under_way, PyLong_FromLongLong(aio_message_under_way(m)))
GETTER(state_get_done, PyLong_FromUnsignedLong(m->done_tail - m->done_head))
GETTER(state_get_arrived, PyLong_FromUnsignedLong(m->tail - m->head - m->inner))
GETTER(state_get_has_pending,
       PyLong_FromLong(__builtin_popcount(m->controls_pending) +
                       (long)(m->dones_pending.tail - m->dones_pending.head)))
GETTER(state_get_wrong, Py_BuildValue("(IKK)", m->violation, (unsigned long long)m->wrong[0],
                                      (unsigned long long)m->wrong[1]))

static PyMethodDef state_methods[] = {
    {"send", state_send, METH_O,
     "Send bytes, a bytearray or a Message from a free slot: 0, an errno, or -1 for Python."},
    {"sending", (PyCFunction)(void (*)(void))aio_sending, METH_FASTCALL, "See calls.c."},
    {"receiving", aio_receiving, METH_O, NULL},
    {"iterating", aio_iterating, METH_O, NULL},
    {"messages", aio_messages, METH_O, NULL},
    {"send_buffer", state_send_buffer, METH_VARARGS,
     "The same of a buffer and an immediate or None, in the connection's loop."},
    {"send_pieces", aio_send_pieces, METH_VARARGS, "The same of a list of buffers."},
    {"stand_in_line", aio_send_in_turn, METH_VARARGS,
     "Send a frame: kind, data, argument, immediate.  0, an errno, or a Waiting that ends so."},
    {"end_waits", aio_end_waits, METH_VARARGS,
     "End the waits in line that have lasted so long: what makes exceptions, seconds.  The seconds "
     "until the next has, or None."},
    {"send_control", state_send_control, METH_VARARGS,
     "Send a frame without data, when there is a slot: kind, argument, flags; 0 or an errno."},
    {"drop", state_drop, METH_NOARGS, "Sends that are not posted yet have ended."},
    {"credit", state_credit, METH_NOARGS,
     "The program waits: send the credits that are due; 0 or an errno."},
    {"post_chain", state_post_chain, METH_NOARGS,
     "Post the sends that wait for the end of the turn; 0 or an errno."},
    {"take", state_take, METH_NOARGS,
     "Take the oldest message out of the ring; None if there is none, or if it is large."},
    {"take_into", aio_arrivals_take_into, METH_O,
     "Take it by a copy into a buffer: its bytes; more than the buffer has if it was not taken."},
    {"peek", state_peek, METH_NOARGS,
     "The oldest arrival: slot, length, immediate, whether requests begin; or None."},
    {"skip", state_skip, METH_NOARGS, "Take the oldest arrival out of the ring."},
    {"cut", aio_arrivals_cut, METH_O,
     "Drop the large messages but the oldest so many, and what came behind."},
    {"next_large", aio_arrivals_next_large, METH_O,
     "The next announcement: length, immediate, body, slot; or None.  With how many receives there "
     "may be."},
    {"take_reads", state_take_reads, METH_NOARGS,
     "The numbers of READs of large messages that have completed."},
    {"next_done", aio_arrivals_next_done, METH_NOARGS, "The next DONE: number, flags; or None."},
    {"bind", state_bind, METH_VARARGS,
     "Name the adapter's side: queue pair, id of its requests, flags of sends, inline bytes, "
     "(address, stride, key, count) of the send slots and of the receive slots, (address, stride, "
     "key) of the control slots, address of the pool's flag, the object that keeps them alive."},
    {"close", state_close, METH_NOARGS,
     "Post nothing and touch no slot any more: queue pair and memory may go.  Idempotent."},
    {"fit", state_fit, METH_VARARGS,
     "Slots of a pool have come or gone: receives?, slots of a registration, keys, leaving, full."},
    {"size", state_size, METH_O, "Fit what follows from the window."},
    {"land", state_land, METH_VARARGS,
     "Offer a landing to the peer: number, address, rkey, the object that keeps it alive."},
    {"set_stage", state_set_stage, METH_VARARGS,
     "Name the memory that messages are written from: address, lkey, bytes."},
    {"post_read", state_post_read, METH_VARARGS,
     "Post a READ of a large message: number, address, length, lkey, remote address, rkey."},
    {"post_receives", state_post_receives, METH_O,
     "Post receive slots: a list, or how many from the first on; 0 or an errno."},
    {"back", state_back, METH_O, "The slot of a data message is free; as aio_message_back."},
    {"back_now", state_back_now, METH_O, "That of a frame without credit; as aio_message_back."},
    {"take_unposted", state_take_unposted, METH_NOARGS,
     "Receive slots that C would have posted later, together with others."},
    {"take_freed", state_take_freed, METH_NOARGS,
     "Receive slots of frames without data, of a pool of which some slots are leaving."},
    {"give_slot", state_give_slot, METH_O, "A send slot is free."},
    {"withdraw_slot", state_withdraw_slot, METH_O, "Take this send slot; whether it was free."},
    {"allow_operations", aio_operations_allow, METH_O,
     "Make room for so many operations to be under way."},
    {"take_number", aio_operation_take_number, METH_NOARGS, "Take the number of an operation."},
    {"give_number", aio_operation_give_number, METH_O, "The number of an operation is free."},
    {"forget_done", aio_operations_forget_done, METH_NOARGS,
     "Ended operations are not reported any more."},
    {"operate", (PyCFunction)(void (*)(void))aio_operate, METH_FASTCALL,
     "Post a READ, WRITE or atomic; see operation.c."},
    {"operate_copied", aio_operate_copied, METH_VARARGS,
     "The same by way of the memory of `lend`; None also if there is no room."},
    {"read", (PyCFunction)(void (*)(void))aio_operation_read, METH_FASTCALL,
     "READ in one request, into registered memory or a small buffer; see operation.c."},
    {"write", (PyCFunction)(void (*)(void))aio_operation_write, METH_FASTCALL,
     "WRITE in the same way."},
    {"lend", aio_operations_lend, METH_O,
     "A region that bytes are copied through; see operation.c."},
    {"show_life_to", aio_show_life_to, METH_O,
     "Signs of life of the peer set the first byte of this bytearray, too; None: of none."},
    {"spin_with", state_spin_with, METH_VARARGS,
     "Spin while a task waits for a message, for an operation."},
    {"ended", aio_operation_ended, METH_VARARGS,
     "An operation has ended: its number, error or None."},
    {NULL, NULL, 0, NULL},
};

#define FIELD(name, type, flags) {#name, type, offsetof(MessageState, state.name), flags, NULL}

static PyMemberDef state_members[] = {
    {"receiver", T_OBJECT, offsetof(MessageState, receiver), 0,
     "Called in the rare cases; keeps the memory of received messages alive."},
    {"handler", T_OBJECT, offsetof(MessageState, handler), 0,
     "Called with the events but for arrivals and the ends of operations."},
    {"parked", T_OBJECT, offsetof(MessageState, parked), READONLY,
     "What a task that waits for a message is parked on."},
    {"room", T_OBJECT_EX, offsetof(MessageState, room), 0,
     "Called when an operation has ended while a task waits for room."},
    {"sge", T_OBJECT_EX, offsetof(MessageState, sge), 0, "The class of pieces of memory."},
    {"region", T_OBJECT_EX, offsetof(MessageState, region), 0, "The class of registered memory."},
    {"lent", T_OBJECT, offsetof(MessageState, lent), READONLY, "The region of `lend`, or None."},
    {"remote", T_OBJECT_EX, offsetof(MessageState, remote), 0, "The class of the peer's memory."},
    {"pd", T_OBJECT_EX, offsetof(MessageState, pd), 0, "The connection's protection domain."},
    {"may_read", T_BOOL, offsetof(MessageState, may_read), 0, "Whether READs are possible at all."},
    {"events", T_UINT, offsetof(MessageState, state.base.events), 0, "Not reported yet."},
    {"id", T_ULONGLONG, offsetof(MessageState, state.base.id), READONLY, "Of its requests."},
    FIELD(waiting, T_BOOL, 0),
    FIELD(dead, T_BOOL, 0),
    FIELD(discarding, T_BOOL, 0),
    FIELD(flush_at, T_ULONGLONG, 0),
    FIELD(asking, T_BOOL, 0),
    FIELD(grows, T_BOOL, READONLY),
    FIELD(grown, T_BOOL, 0),
    FIELD(numbered, T_BOOL, 0),
    FIELD(said, T_UBYTE, READONLY),
    FIELD(peer_reason, T_ULONGLONG, READONLY),
    FIELD(error, T_INT, READONLY),
    FIELD(recv_failed, T_BOOL, READONLY),
    FIELD(n_control_free, T_UINT, READONLY),
    FIELD(n_freed, T_UINT, READONLY),
    FIELD(large, T_UINT, READONLY),
    FIELD(blocked, T_BOOL, 0),
    FIELD(watched, T_BOOL, 0),
    FIELD(slot_awaited, T_BOOL, 0),
    FIELD(queued, T_UINT, READONLY),
    FIELD(large_waiting, T_UINT, 0),
    FIELD(raw, T_BOOL, READONLY),
    FIELD(closed, T_BOOL, READONLY),
    FIELD(flushing, T_BOOL, 0),
    FIELD(alive, T_BOOL, 0),
    FIELD(eager_size, T_ULONGLONG, 0),
    FIELD(fragmented_size, T_ULONGLONG, 0),
    FIELD(bare_size, T_ULONGLONG, 0),
    FIELD(largest, T_ULONGLONG, 0),
    {"written_size", T_ULONGLONG, offsetof(MessageState, state.stage.most), 0, NULL},
    {"stage_size", T_ULONGLONG, offsetof(MessageState, state.stage.size), READONLY, NULL},
    {"peer_landing", T_UBYTE, offsetof(MessageState, state.stage.number), READONLY, NULL},
    {"landed_size", T_ULONGLONG, offsetof(MessageState, state.landings.most), 0, NULL},
    {"landing_wanted", T_ULONGLONG, offsetof(MessageState, state.landings.wanted), 0, NULL},
    {"landing", T_UBYTE, offsetof(MessageState, state.landings.newest), READONLY, NULL},
    FIELD(credits, T_LONGLONG, 0),
    FIELD(inline_size, T_UINT, READONLY),
    FIELD(n_free, T_UINT, READONLY),
    FIELD(sent, T_ULONGLONG, 0),
    FIELD(completed, T_ULONGLONG, 0),
    FIELD(flushed, T_ULONGLONG, 0),
    FIELD(n_unposted, T_UINT, READONLY),
    FIELD(posted, T_LONGLONG, 0),
    FIELD(unused, T_LONGLONG, 0),
    FIELD(granted, T_LONGLONG, 0),
    FIELD(control, T_LONGLONG, 0),
    FIELD(due, T_LONGLONG, READONLY),
    FIELD(half, T_UINT, READONLY),
    FIELD(receives, T_LONGLONG, 0),
    FIELD(n_back, T_UINT, READONLY),
    FIELD(chain, T_UINT, READONLY),
    FIELD(held, T_UINT, 0),
    FIELD(python, T_BOOL, 0),
    FIELD(requested, T_BOOL, 0),
    FIELD(requesting, T_BOOL, 0),
    FIELD(over, T_BOOL, 0),
    FIELD(attended, T_BOOL, 0),
    FIELD(operations_wanted, T_BOOL, 0),
    FIELD(n_operations, T_UINT, READONLY),
    FIELD(n_operations_free, T_UINT, READONLY),
    FIELD(operating, T_UINT, READONLY),
    FIELD(messages_sent, T_ULONGLONG, 0),
    FIELD(bytes_sent, T_ULONGLONG, 0),
    FIELD(messages_received, T_ULONGLONG, 0),
    FIELD(bytes_received, T_ULONGLONG, 0),
    FIELD(bytes_read, T_ULONGLONG, 0),
    FIELD(bytes_written, T_ULONGLONG, 0),
    FIELD(atomics, T_ULONGLONG, 0),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef state_getset[] = {
    {"free_slots", state_get_free, NULL, "Send slots for data that are free.", NULL},
    {"has_room", state_get_has_room, NULL, "Whether there is room for the first in line.", NULL},
    {"lacks_slot", state_get_lacks_slot, NULL, "Whether the line waits for a slot alone.", NULL},
    {"free_numbers", state_get_free_numbers, NULL, "Numbers of operations, likewise.", NULL},
    {"done", state_get_done, NULL, "Operations that have ended and were not reported.", NULL},
    {"under_way", state_get_under_way, NULL, "Sends, receives and operations of the adapter.",
     NULL},
    {"has_pending", state_get_has_pending, NULL, "Frames without data that wait for a slot.", NULL},
    {"wrong", state_get_wrong, NULL, "A violation of the peer, and two numbers about it.", NULL},
    {"arrived", state_get_arrived, NULL, "Messages in the ring.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot state_slots[] = {
    {Py_tp_new, state_new},
    {Py_tp_traverse, state_traverse},
    {Py_tp_clear, state_clear},
    {Py_tp_dealloc, state_dealloc},
    {Py_tp_call, state_call}, /* with its events */
    {Py_tp_methods, state_methods},
    {Py_tp_members, state_members},
    {Py_tp_getset, state_getset},
    {Py_tp_doc, "The messages and operations of one connection."},
    {0, NULL},
};

PyType_Spec aio_message_state_spec = {
    .name = "aiordma._core.MessageState",
    .basicsize = sizeof(MessageState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = state_slots,
};
