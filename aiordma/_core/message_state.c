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
    if (!arrivals || sends > send_depth || arrivals & (arrivals - 1) ||
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
        make_dones(&m->dones_pending, exchanges))
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
    Py_VISIT((PyObject *)self->parked);
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
    return 0;
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
    aio_free_operations(self);
    Py_CLEAR(self->receiver);
    if (self->parked)
        self->parked->owner = NULL;
    replace((PyObject **)&self->parked, NULL);
    replace((PyObject **)&self->bounce, NULL);
    state_clear(object);
    PyMem_Free(self->state.free);
    PyMem_Free(self->state.control_free);
    PyMem_Free(self->state.freed);
    PyMem_Free(self->state.reads_done);
    PyMem_Free(self->state.dones.items);
    PyMem_Free(self->state.dones_pending.items);
    PyMem_Free(self->state.arrivals);
    PyMem_Free(self->state.operations_free);
    PyMem_Free(self->state.operations_done);
    PyMem_Free(self->state.send.keys);
    PyMem_Free(self->state.recv.keys);
    aio_free(object);
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

/* Copy a message in fragments, and take it out of the ring; 0, or -1 with an exception. */
static int join(MessageState *self, Message *message)
{
    struct aio_message_state *m = &self->state;
    uint32_t count = 0;
    uint64_t length = 0;
    uint16_t *slots;
    PyObject *bytes;
    char *at;

    do
        length += m->arrivals[(m->head + count) & m->arrival_mask].length;
    while (m->arrivals[(m->head + count++) & m->arrival_mask].more);
    slots = aio_room_for(count, sizeof(*slots));
    bytes = slots ? PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length) : NULL;
    if (!bytes) {
        PyMem_Free(slots);
        return -1;
    }
    at = PyBytes_AsString(bytes);
    for (uint32_t i = 0; i < count; i++) {
        const struct aio_arrival *arrival = &m->arrivals[m->head++ & m->arrival_mask];

        memcpy(at,
               (char *)(uintptr_t)aio_slot_addr(&m->recv, arrival->slot) +
                   aio_head_size(m, arrival->bare),
               arrival->length);
        at += arrival->length;
        slots[i] = arrival->slot;
    }
    m->inner -= count - 1;
    aio_message_own(message, bytes);
    for (uint32_t i = 0; i < count; i++)
        give_back(self, slots[i]);
    PyMem_Free(slots);
    return 0;
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
    struct aio_message_state *m = &self->state;
    Message *message = (Message *)PyType_GenericAlloc(aio_message_type, 0);
    const struct aio_arrival *first;

    if (!message)
        return NULL;
    first = &m->arrivals[m->head & m->arrival_mask];
    if (m->head == m->tail || first->large) {
        Py_DECREF((PyObject *)message);
        Py_RETURN_NONE;
    }
    message->imm = aio_imm_object(first);
    if (!message->imm || (first->more && join(self, message))) {
        Py_DECREF((PyObject *)message);
        return NULL;
    }
    if (!message->bytes.view) {
        message->keeper = Py_NewRef((PyObject *)self);
        message->length = (Py_ssize_t)first->length;
        message->slot = first->slot;
        message->bare = (char)first->bare;
        message->in_slot = 1;
        m->head++;
    }
    return (PyObject *)message;
}

static PyObject *state_take(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return aio_take_first((MessageState *)object);
}

struct aio_turn aio_turn;

/*
 * Whether the caller is not in the connection's loop: in a thread, in another loop, in none; or -1
 * with an exception, because `is_running()` is Python code, in which a signal's handler may raise.
 *
 * Not by asyncio's get_running_loop(): up to Python 3.11 that asks the kernel for the process.  A
 * task that is resumed by a MessageState of its loop needs no call at all, as no other loop can run
 * inside that turn; `is_running()` is 400 instructions, twice for each message.
 */
int aio_is_elsewhere(const MessageState *self)
{
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *loop = self->parked->wakeup.loop, *running;

    if (thread != self->thread)
        return 1;
    if (thread == aio_turn.thread && loop == aio_turn.loop)
        return 0;
    running = PyObject_CallMethodObjArgs(loop, aio_name.is_running, NULL);
    Py_XDECREF(running);
    return running ? running != Py_True : -1;
}

/* Whether a single credit waits for the program to answer; see credit_is_due in message.c. */
static int is_put_off(const struct aio_message_state *m)
{
    return m->due <= 1 && m->unused <= 0 && m->posted > m->control && !m->raw;
}

/* Send the credits that are due; a failure is noted for Python. */
void aio_give_credit(struct aio_message_state *m)
{
    int code = aio_message_give_credit(m);

    if (code && !m->error)
        m->error = code;
}

/* `await state` ends with the next message, or with None if Python has to receive it. */
static PyObject *state_await(PyObject *object)
{
    MessageState *self = (MessageState *)object;
    PyObject *nothing, *iterator;

    if (self->parked->wakeup.state == AIO_IDLE && !self->state.python) {
        self->parked->taking = 1;
        return Py_NewRef((PyObject *)self->parked);
    }
    nothing = PyTuple_New(0);
    iterator = nothing ? PyObject_GetIter(nothing) : NULL;
    Py_XDECREF(nothing);
    return iterator;
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

/*
 * Of `code` of a send: the first two in a row are posted at once, so that a lone send neither waits
 * nor pays for a call, and those behind them together.  In a drain that is when the events are
 * told; outside of it, the second has the loop call this object without events at the end of the
 * turn.
 */
PyObject *aio_sent(MessageState *self, int code)
{
    struct aio_message_state *m = &self->state;

    if (!code && !m->n_unposted && m->in_a_row < 2 && ++m->in_a_row == 2 && !m->delivering &&
        !m->turn_flushes) {
        PyObject *handle =
            PyObject_CallMethod(self->parked->wakeup.loop, "call_soon", "OI", (PyObject *)self, 0);

        if (handle)
            m->turn_flushes = 1;
        else if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && /* the loop is closed */
                 !PyErr_ExceptionMatches(PyExc_MemoryError))
            return NULL; /* of a signal's handler */
        else             /* the message is sent, and those that follow are posted at once */
            PyErr_Clear();
        Py_XDECREF(handle);
    }
    return PyLong_FromLong(code);
}

/*
 * send(data): 0, -1 if Python has to do it, an errno, or a Waiting, whose end is 0 or an errno.
 * `send_buffer` is for a caller that has checked that this is the connection's loop.
 *
 * A bytearray and a Message take this way as bytes do.  Of other objects Python checks first that
 * they have a buffer, and a contiguous one.
 */
static PyObject *state_send(PyObject *object, PyObject *data)
{
    MessageState *self = (MessageState *)object;
    int elsewhere = 1, code;
    const char *start;
    Py_ssize_t length;

    if (PyBytes_CheckExact(data) || PyByteArray_CheckExact(data) ||
        Py_IS_TYPE(data, aio_message_type))
        elsewhere = aio_is_elsewhere(self);
    if (elsewhere)
        return elsewhere < 0 ? NULL : PyLong_FromLong(-1);
    if (PyBytes_CheckExact(data)) {
        start = PyBytes_AsString(data);
        length = PyBytes_Size(data);
    } else if (PyByteArray_CheckExact(data)) {
        start = PyByteArray_AsString(data);
        length = PyByteArray_Size(data);
    } else {
        start = aio_message_bytes((Message *)data);
        length = ((Message *)data)->length;
    }
    if (start) {
        code = aio_message_send(&self->state, start, (uint64_t)length, 0, 0);
        if (code < 0 && aio_may_stand_in_line(&self->state, (uint64_t)length))
            return aio_stand_in_line(self, AIO_FRAME_DATA, data, (uint64_t)length, 0, 0);
        return aio_sent(self, code);
    }
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) /* the message was released */
        return NULL;
    PyErr_Clear();
    return PyLong_FromLong(-1);
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
        code = aio_message_send(&((MessageState *)object)->state, data.buf, (uint64_t)data.len,
                                has_imm, imm);
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

/*
 * A task that was resumed, or the handler, raised: SystemExit and KeyboardInterrupt end the loop.
 * Programs run it again to end their tasks, and the rest is for them.
 */
static void later(MessageState *self, uint32_t events)
{
    PyObject *type, *value, *traceback, *handle = NULL;

    PyErr_Fetch(&type, &value, &traceback);
    /* Once more if a signal's handler has raised in it; a loop that is closed is of no use here. */
    for (int tries = 0; !handle && tries < 2; tries++) {
        PyErr_Clear();
        handle = PyObject_CallMethod(self->parked->wakeup.loop, "call_soon", "OI", (PyObject *)self,
                                     (unsigned int)events);
    }
    Py_XDECREF(handle);
    PyErr_Restore(type, value, traceback);
}

#define FOR_HANDLER (AIO_EVENT_SENT | AIO_EVENT_FRAMES | AIO_EVENT_FAILED | AIO_EVENT_IDLE)

/* Have Python take events; 0, or -1. */
static int handle(MessageState *self, uint32_t events)
{
    PyObject *handler = self->handler;

    return handler && handler != Py_None ? aio_call_with(handler, events) : 0;
}

/*
 * Slots or credits have come.  Python is called if the line has begun to lack a slot, or to lack
 * none.  0; -1 with the exception of a task, -2 with that of the handler.
 */
static int give_room(MessageState *self)
{
    if (aio_grant(self))
        return -1;
    if (aio_message_lacks_slot(&self->state) != self->state.slot_awaited &&
        handle(self, AIO_EVENT_ROOM))
        return -2;
    return 0;
}

/* `late`: the handler has raised already, and is not called for ever. */
static int give_events(MessageState *self, uint32_t events, int late)
{
    if (events & FOR_HANDLER && handle(self, events & FOR_HANDLER)) {
        later(self, late ? events & ~(uint32_t)FOR_HANDLER : events);
        return -1;
    }
    if (events & AIO_EVENT_ROOM) {
        int given = give_room(self);

        if (given) {
            events &= AIO_EVENT_ROOM | AIO_EVENT_OPERATED | AIO_EVENT_ARRIVED;
            later(self, late && given == -2 ? events & ~(uint32_t)AIO_EVENT_ROOM : events);
            return -1;
        }
    }
    if (events & AIO_EVENT_OPERATED && aio_operations_done(self)) {
        later(self, events & (AIO_EVENT_OPERATED | AIO_EVENT_ARRIVED));
        return -1;
    }
    if (events & AIO_EVENT_ARRIVED) {
        int woken = aio_wake(&self->parked->wakeup);

        if (woken < 0) {
            later(self, AIO_EVENT_ARRIVED);
            return -1;
        }
        if (!woken) {
            PyObject *told = PyObject_CallMethodObjArgs(self->receiver, aio_name.on_arrival, NULL);

            Py_XDECREF(told);
            return told ? 0 : -1;
        }
        /* Nothing that the program has sent in answer took the credit along. */
        if (is_put_off(&self->state)) {
            aio_give_credit(&self->state);
            if (self->state.error)
                return handle(self, AIO_EVENT_FAILED);
        }
    }
    return 0;
}

/* Post the chain, after the events, whose result is `rc`: 0, or -1 with the exception of `rc`. */
static int flush(MessageState *self, int rc)
{
    PyObject *type, *value, *traceback;
    int code;

    PyErr_Fetch(&type, &value, &traceback);
    code = aio_message_flush(&self->state);
    PyErr_Restore(type, value, traceback);
    if (!code)
        return rc;
    if (!self->state.error)
        self->state.error = code;
    if (!rc)
        return handle(self, AIO_EVENT_FAILED);
    later(self, AIO_EVENT_FAILED);
    return rc;
}

/*
 * Messages have arrived, operations have ended; nothing else of the program is running.  Without
 * events the turn of the loop has ended.
 */
int aio_message_events(MessageState *self, uint32_t events, int late)
{
    struct aio_message_state *m = &self->state;
    int rc;

    if (aio_turn.thread == self->thread)
        aio_turn.loop = self->parked->wakeup.loop;
    m->delivering = 1;
    m->turn_flushes &= events != 0;
    rc = give_events(self, events, late);
    aio_turn.loop = NULL;
    m->delivering = m->in_a_row = 0;
    return m->n_unposted ? flush(self, rc) : rc;
}

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

/* peek(): (slot, length, immediate) of the oldest message; the slot of a large message is None. */
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
    return first->large ? Py_BuildValue("(OIN)", Py_None, 0, imm)
                        : Py_BuildValue("(IIN)", first->slot, first->length, imm);
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
    {"send_buffer", state_send_buffer, METH_VARARGS,
     "The same of a buffer and an immediate or None, in the connection's loop."},
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
    {"peek", state_peek, METH_NOARGS, "The oldest arrival: slot, length, immediate; or None."},
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
    {"read", (PyCFunction)(void (*)(void))aio_operation_read, METH_FASTCALL,
     "READ in one request, into registered memory or a small buffer; see operation.c."},
    {"write", (PyCFunction)(void (*)(void))aio_operation_write, METH_FASTCALL,
     "WRITE in the same way."},
    {"lend", aio_operations_lend, METH_O,
     "A region that bytes are copied through; see operation.c."},
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
    FIELD(said, T_UBYTE, READONLY),
    FIELD(peer_reason, T_ULONGLONG, READONLY),
    FIELD(error, T_INT, READONLY),
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
    FIELD(credits, T_LONGLONG, 0),
    FIELD(inline_size, T_UINT, READONLY),
    FIELD(n_free, T_UINT, READONLY),
    FIELD(sent, T_ULONGLONG, 0),
    FIELD(completed, T_ULONGLONG, 0),
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
    {Py_am_await, state_await},
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
