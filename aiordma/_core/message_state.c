/*
 * MessageState: the messages and operations of one connection, as Python sees them.  The work is
 * done in message.c and operation.c.
 *
 * Python sets and reads the fields that are members of the type, in the thread of the connection's
 * loop.  The drain changes them, too, in the same thread.
 */
#include "core.h"

PyTypeObject *aio_message_state_type;

static PyTypeObject *parked_type;
static PyObject *name_on_news, *name_on_due, *name_is_running;

/* Room for `count` items, zeros; NULL with an exception. */
static void *room_for(size_t count, size_t size)
{
    void *memory = PyMem_Calloc(count ? count : 1, size);

    if (!memory)
        PyErr_NoMemory();
    return memory;
}

static int state_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    MessageState *self = (MessageState *)object;
    struct aio_message_state *m = &self->state;
    static char *names[] = {"loop",     "sends",   "receives", "send_depth",
                            "arrivals", "control", "raw",      NULL};
    unsigned int sends, receives, send_depth, arrivals, control;
    PyObject *loop;
    int raw;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OIIIIIp", names, &loop, &sends, &receives,
                                     &send_depth, &arrivals, &control, &raw))
        return -1;
    if (!arrivals || sends > send_depth || arrivals & (arrivals - 1) || control > receives) {
        PyErr_SetString(PyExc_ValueError, "sizes that do not fit one another");
        return -1;
    }
    m->free = room_for(send_depth, sizeof(*m->free));
    m->arrivals = m->free ? room_for(arrivals, sizeof(*m->arrivals)) : NULL;
    self->parked = m->arrivals
                       ? (Parked *)PyObject_CallFunctionObjArgs((PyObject *)parked_type, loop, NULL)
                       : NULL;
    if (!self->parked)
        return -1;
    self->parked->owner = self;
    self->thread = PyThread_get_thread_ident();
    m->data_slots = send_depth;
    m->arrival_mask = arrivals - 1;
    m->control = control;
    m->raw = (uint8_t)raw;
    aio_message_init(m, sends, receives);
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
    Py_VISIT((PyObject *)self->parked);
    Py_VISIT(self->room);
    Py_VISIT(self->sge);
    Py_VISIT(self->remote);
    Py_VISIT(self->pd);
    Py_VISIT(self->known);
    for (uint32_t i = 0; self->operations && i < self->state.n_operations; i++)
        Py_VISIT(self->operations[i]);
    return 0;
}

static int state_clear(PyObject *object)
{
    /* Not the receiver: a message that is finalized later gives its slot to it. */
    MessageState *self = (MessageState *)object;

    Py_CLEAR(self->room);
    Py_CLEAR(self->sge);
    Py_CLEAR(self->remote);
    Py_CLEAR(self->pd);
    Py_CLEAR(self->known);
    return 0;
}

static void state_dealloc(PyObject *object)
{
    MessageState *self = (MessageState *)object;
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    aio_free_operations(self);
    Py_CLEAR(self->receiver);
    if (self->parked)
        self->parked->owner = NULL;
    replace((PyObject **)&self->parked, NULL);
    state_clear(object);
    PyMem_Free(self->state.free);
    PyMem_Free(self->state.arrivals);
    PyMem_Free(self->state.operations_free);
    PyMem_Free(self->state.operations_done);
    PyMem_Free(self->state.send.keys);
    PyMem_Free(self->state.recv.keys);
    release(object);
    Py_DECREF(type);
}

/* A message in a slot; `imm` is stolen. */
static PyObject *make_message(MessageState *self, uint32_t slot, Py_ssize_t length, PyObject *imm)
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

static PyObject *state_message(PyObject *object, PyObject *args)
{
    unsigned int slot;
    Py_ssize_t length;
    PyObject *imm;

    if (!PyArg_ParseTuple(args, "InO", &slot, &length, &imm))
        return NULL;
    return make_message((MessageState *)object, slot, length, Py_NewRef(imm));
}

struct aio_turn aio_turn;

/*
 * Whether the caller is not in the connection's loop: in a thread, in another loop, in none.
 *
 * Not by asyncio's get_running_loop(): up to Python 3.11 that asks the kernel for the process.  A
 * task that is resumed by a MessageState of its loop needs no call at all, as no other loop can run
 * inside that turn; `is_running()` is 400 instructions, twice for each message.
 */
int aio_is_elsewhere(const MessageState *self)
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
static int put_off(const struct aio_message_state *m)
{
    return m->due <= 1 && m->unused <= 0 && m->posted > m->control && !m->raw;
}

/* The next message; None if there is none; False if Python has to look; NULL with an exception. */
static PyObject *take(MessageState *self, int again)
{
    struct aio_message_state *m = &self->state;
    const struct aio_arrival *first;
    PyObject *message, *imm;

    /* A task that was resumed is where it was when it began to wait. */
    if (m->rare || m->held >= m->half || (!again && aio_is_elsewhere(self)))
        Py_RETURN_FALSE;
    if (m->head == m->tail) {
        aio_message_next(m); /* from now on an arrival is news */
        Py_RETURN_NONE;
    }
    /* Made before it is taken: without memory for it the message stays where it is. */
    first = &m->arrivals[m->head & m->arrival_mask];
    imm = first->has_imm ? PyLong_FromUnsignedLong(first->imm) : Py_NewRef(Py_None);
    message = make_message(self, first->slot, (Py_ssize_t)first->length, imm);
    if (!message)
        return NULL;
    aio_message_next(m);
    ((Message *)message)->kept = 1;
    m->held++;
    return message;
}

/* `await owner` gives the next message, or None if Python has to see to it. */
static PyObject *state_await(PyObject *object)
{
    MessageState *self = (MessageState *)object;
    PyObject *nothing, *iterator;

    if (self->parked->wakeup.state == AIO_IDLE && !self->state.rare) {
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
    MessageState *owner;

    (void)value;
    if (!self->taking || !self->owner || (again && self->wakeup.error)) {
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
    owner = (MessageState *)Py_NewRef((PyObject *)self->owner); /* the collector may come to run */
    *result = take(owner, again);
    Py_DECREF((PyObject *)owner);
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
    struct aio_message_state *m = &((MessageState *)message->keeper)->state;

    m->head--;
    m->messages_received--;
    m->bytes_received -= (uint64_t)message->length;
    m->held--;
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
    .name = "aiordma._core.Parked",
    .basicsize = sizeof(Parked),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = parked_slots,
};

/*
 * send(data): 0, -1 if Python has to do it, or an errno.  `send_buffer` is for a caller that has
 * checked that this is the connection's loop.
 */
static PyObject *state_send(PyObject *object, PyObject *data)
{
    MessageState *self = (MessageState *)object;

    if (!PyBytes_CheckExact(data) || aio_is_elsewhere(self))
        return PyLong_FromLong(-1);
    return PyLong_FromLong(
        aio_message_send(&self->state, PyBytes_AsString(data), (uint64_t)PyBytes_Size(data)));
}

static PyObject *state_send_buffer(PyObject *object, PyObject *data)
{
    Py_buffer seen;
    int code;

    if (PyObject_GetBuffer(data, &seen, PyBUF_SIMPLE))
        return NULL;
    code = aio_message_send(&((MessageState *)object)->state, seen.buf, (uint64_t)seen.len);
    PyBuffer_Release(&seen);
    return PyLong_FromLong(code);
}

/*
 * A task that was resumed raised SystemExit or KeyboardInterrupt, which end the loop.  Programs run
 * it again to end their tasks, and the rest is for them.
 */
static void later(MessageState *self, uint32_t events)
{
    PyObject *type, *value, *traceback, *handle;

    PyErr_Fetch(&type, &value, &traceback);
    handle = PyObject_CallMethod(self->parked->wakeup.loop, "call_soon", "OI", (PyObject *)self,
                                 (unsigned int)events);
    Py_XDECREF(handle);
    PyErr_Restore(type, value, traceback); /* an error of call_soon is of no use here */
}

static int give_events(MessageState *self, uint32_t events)
{
    if (events & AIO_EVENT_OPERATED && aio_operations_done(self)) {
        later(self, events);
        return -1;
    }
    if (events & AIO_EVENT_ARRIVED) {
        int woken = aio_wake(&self->parked->wakeup);

        if (woken < 0) {
            later(self, AIO_EVENT_ARRIVED);
            return -1;
        }
        /* Nothing that the program has sent in answer took the credit along. */
        if (!woken || put_off(&self->state)) {
            PyObject *told = PyObject_CallMethodObjArgs(self->receiver,
                                                        woken ? name_on_due : name_on_news, NULL);

            Py_XDECREF(told);
            return told ? 0 : -1;
        }
    }
    return 0;
}

/* Messages have arrived, operations have ended; nothing else of the program is running. */
int aio_message_events(MessageState *self, uint32_t events)
{
    int rc;

    if (aio_turn.thread == self->thread)
        aio_turn.loop = self->parked->wakeup.loop;
    rc = give_events(self, events);
    aio_turn.loop = NULL;
    return rc;
}

static PyObject *state_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int events;

    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "MessageState takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "I", &events) || aio_message_events((MessageState *)object, events))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *state_operate(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return aio_post_operation((MessageState *)object, args, count);
}

static PyObject *state_read(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return aio_transfer((MessageState *)object, args, count, IBV_WR_RDMA_READ);
}

static PyObject *state_write(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return aio_transfer((MessageState *)object, args, count, IBV_WR_RDMA_WRITE);
}

static PyObject *state_ended(PyObject *object, PyObject *args)
{
    return aio_end_operation((MessageState *)object, args);
}

/* The adapter's side */

static PyObject *state_bind(PyObject *object, PyObject *args)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long long qp, crowded;

    if (!PyArg_ParseTuple(args, "KII(KIII)(KIII)K", &qp, &m->send_flags, &m->inline_size,
                          &m->send.addr, &m->send.stride, &m->send.key, &m->send.base,
                          &m->recv.addr, &m->recv.stride, &m->recv.key, &m->recv.base, &crowded))
        return NULL;
    m->qp = (struct ibv_qp *)(uintptr_t)qp;
    m->crowded = (const uint8_t *)(uintptr_t)crowded;
    m->send.full = m->recv.full = 1;
    Py_RETURN_NONE;
}

/* The registrations of slots that come and go: their keys, 0 where there is none. */
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
    unsigned int step;
    PyObject *keys;

    if (!PyArg_ParseTuple(args, "pIO!pp", &receives, &step, &PyList_Type, &keys, &leaving, &full))
        return NULL;
    slots = receives ? &m->recv : &m->send;
    if (fit(slots, keys))
        return NULL;
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

static PyObject *state_post_send(PyObject *object, PyObject *args)
{
    unsigned long long addr;
    unsigned int slot, length, key;
    PyObject *imm;
    unsigned long number = 0;

    if (!PyArg_ParseTuple(args, "IKIIO", &slot, &addr, &length, &key, &imm))
        return NULL;
    if (imm != Py_None) {
        number = PyLong_AsUnsignedLong(imm);
        if (PyErr_Occurred())
            return NULL;
    }
    return PyLong_FromLong(aio_message_post(&((MessageState *)object)->state, slot, addr, length,
                                            key, imm != Py_None, (uint32_t)number));
}

static PyObject *state_post_read(PyObject *object, PyObject *args)
{
    unsigned long long addr, remote_addr;
    unsigned int number, length, lkey, rkey;

    if (!PyArg_ParseTuple(args, "IKIIKI", &number, &addr, &length, &lkey, &remote_addr, &rkey))
        return NULL;
    return PyLong_FromLong(aio_message_read(&((MessageState *)object)->state, number, addr, length,
                                            lkey, remote_addr, rkey));
}

/* post_receives(key, slots), where `slots` is a list, or how many from the first on. */
static PyObject *state_post_receives(PyObject *object, PyObject *args)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    uint16_t *numbers = NULL;
    PyObject *slots;
    unsigned int key;
    Py_ssize_t count;
    int code;

    if (!PyArg_ParseTuple(args, "IO", &key, &slots))
        return NULL;
    if (PyList_Check(slots)) {
        count = PyList_Size(slots);
        numbers = room_for((size_t)count, sizeof(*numbers));
        for (Py_ssize_t i = 0; numbers && i < count; i++)
            numbers[i] = (uint16_t)PyLong_AsUnsignedLong(PyList_GetItem(slots, i));
    } else {
        count = PyLong_AsSsize_t(slots);
    }
    if (PyErr_Occurred()) {
        PyMem_Free(numbers);
        return NULL;
    }
    code = aio_message_receive(m, numbers, (uint32_t)count, key);
    PyMem_Free(numbers);
    return PyLong_FromLong(code);
}

static PyObject *give_back(PyObject *object, PyObject *slot,
                           int (*back)(struct aio_message_state *, uint32_t))
{
    unsigned long number = PyLong_AsUnsignedLong(slot);

    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(back(&((MessageState *)object)->state, (uint32_t)number));
}

static PyObject *state_back(PyObject *object, PyObject *slot)
{
    return give_back(object, slot, aio_message_back);
}

static PyObject *state_back_now(PyObject *object, PyObject *slot)
{
    return give_back(object, slot, aio_message_back_now);
}

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

static PyObject *state_take_freed(PyObject *object, PyObject *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    PyObject *list = list_of(m->back, m->n_back);

    (void)unused;
    if (list)
        m->n_back = 0;
    return list;
}

/* Arrivals */

static PyObject *state_peek(PyObject *object, PyObject *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    const struct aio_arrival *first;
    PyObject *imm;

    (void)unused;
    if (m->head == m->tail)
        Py_RETURN_NONE;
    first = &m->arrivals[m->head & m->arrival_mask];
    imm = first->has_imm ? PyLong_FromUnsignedLong(first->imm) : Py_NewRef(Py_None);
    return imm ? Py_BuildValue("(IIN)", first->slot, first->length, imm) : NULL;
}

static PyObject *state_skip(PyObject *object, PyObject *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    if (m->head != m->tail)
        m->head++;
    Py_RETURN_NONE;
}

/* Send slots that are free */

static PyObject *state_take_slot(PyObject *object, PyObject *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    if (!m->n_free) {
        PyErr_SetString(PyExc_IndexError, "no slot is free");
        return NULL;
    }
    return PyLong_FromLong(m->free[--m->n_free]);
}

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
            memmove(&m->free[i], &m->free[i + 1], (m->n_free - i - 1) * sizeof(*m->free));
            m->n_free--;
            Py_RETURN_TRUE;
        }
    }
    Py_RETURN_FALSE;
}

static PyObject *state_get_free(PyObject *object, void *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    return list_of(m->free, m->n_free);
}

/* Numbers of operations */

static PyObject *state_allow_operations(PyObject *object, PyObject *depth)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long count = PyLong_AsUnsignedLong(depth);
    uint16_t *numbers, *done;

    if (PyErr_Occurred())
        return NULL;
    if (m->n_operations || !count || count > AIO_MOST_OPERATIONS) {
        PyErr_SetString(PyExc_ValueError, "no such depth, or it is set already");
        return NULL;
    }
    numbers = room_for(count, sizeof(*numbers));
    done = numbers ? room_for(aio_power((uint32_t)count), sizeof(*done)) : NULL;
    if (!done) {
        PyMem_Free(numbers);
        return NULL;
    }
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = (uint16_t)i;
    m->operations_free = numbers;
    m->operations_done = done;
    m->done_mask = aio_power((uint32_t)count) - 1;
    m->n_operations = m->n_operations_free = (uint32_t)count;
    Py_RETURN_NONE;
}

static PyObject *state_take_number(PyObject *object, PyObject *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    if (!m->n_operations_free) {
        PyErr_SetString(PyExc_IndexError, "no operation is free");
        return NULL;
    }
    return PyLong_FromLong(m->operations_free[--m->n_operations_free]);
}

static PyObject *state_give_number(PyObject *object, PyObject *value)
{
    struct aio_message_state *m = &((MessageState *)object)->state;
    unsigned long number = PyLong_AsUnsignedLong(value);

    if (PyErr_Occurred())
        return NULL;
    if (number >= m->n_operations || m->n_operations_free >= m->n_operations) {
        PyErr_SetString(PyExc_ValueError, "no such operation");
        return NULL;
    }
    m->operations_free[m->n_operations_free++] = (uint16_t)number;
    Py_RETURN_NONE;
}

static PyObject *state_get_operations_free(PyObject *object, void *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    return list_of(m->operations_free, m->n_operations_free);
}

static PyObject *state_forget_done(PyObject *object, PyObject *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    m->done_head = m->done_tail;
    Py_RETURN_NONE;
}

static PyObject *state_get_under_way(PyObject *object, void *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    return PyLong_FromLongLong(m->receives + (int64_t)(m->sent - m->completed) + m->operating);
}

static PyObject *state_get_done(PyObject *object, void *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    return PyLong_FromUnsignedLong(m->done_tail - m->done_head);
}

static PyObject *state_get_arrived(PyObject *object, void *unused)
{
    struct aio_message_state *m = &((MessageState *)object)->state;

    (void)unused;
    return PyLong_FromUnsignedLong(m->tail - m->head);
}

static PyMethodDef state_methods[] = {
    {"send", state_send, METH_O,
     "Send bytes from a free slot: 0, -1 if Python has to do it, or an errno."},
    {"send_buffer", state_send_buffer, METH_O, "The same of a buffer, in the connection's loop."},
    {"message", state_message, METH_VARARGS, "The message in a slot: slot, length, immediate."},
    {"peek", state_peek, METH_NOARGS, "The oldest arrival: slot, length, immediate; or None."},
    {"skip", state_skip, METH_NOARGS, "Take the oldest arrival out of the ring."},
    {"bind", state_bind, METH_VARARGS,
     "Name the adapter's side: queue pair, flags of sends, inline bytes, (address, stride, key, "
     "count) of the send slots and of the receive slots, address of the pool's flag."},
    {"fit", state_fit, METH_VARARGS,
     "Slots of a pool have come or gone: receives?, slots of a registration, keys, leaving, full."},
    {"size", state_size, METH_O, "Fit what follows from the window."},
    {"post_send", state_post_send, METH_VARARGS,
     "Post a send slot: number, address, length, key, immediate; 0 or an errno."},
    {"post_read", state_post_read, METH_VARARGS,
     "Post a READ of a large message: number, address, length, lkey, remote address, rkey."},
    {"post_receives", state_post_receives, METH_VARARGS,
     "Post receive slots of one key: a list, or how many from the first on; 0 or an errno."},
    {"back", state_back, METH_O, "The slot of a data message is free; as aio_message_back."},
    {"back_now", state_back_now, METH_O, "That of a frame without credit; as aio_message_back."},
    {"take_freed", state_take_freed, METH_NOARGS,
     "Receive slots that C would have posted later, together with others."},
    {"take_slot", state_take_slot, METH_NOARGS, "Take a free send slot."},
    {"give_slot", state_give_slot, METH_O, "A send slot is free."},
    {"withdraw_slot", state_withdraw_slot, METH_O, "Take this send slot; whether it was free."},
    {"allow_operations", state_allow_operations, METH_O,
     "Make room for so many operations to be under way."},
    {"take_number", state_take_number, METH_NOARGS, "Take the number of an operation."},
    {"give_number", state_give_number, METH_O, "The number of an operation is free."},
    {"forget_done", state_forget_done, METH_NOARGS, "Ended operations are not reported any more."},
    {"operate", (PyCFunction)(void (*)(void))state_operate, METH_FASTCALL,
     "Post a READ, WRITE or atomic; see operation.c."},
    {"read", (PyCFunction)(void (*)(void))state_read, METH_FASTCALL,
     "READ into registered memory, if that is plain; see operation.c."},
    {"write", (PyCFunction)(void (*)(void))state_write, METH_FASTCALL, "WRITE in the same way."},
    {"ended", state_ended, METH_VARARGS, "An operation has ended: its number, error or None."},
    {NULL, NULL, 0, NULL},
};

#define FIELD(name, type, flags) {#name, type, offsetof(MessageState, state.name), flags, NULL}

static PyMemberDef state_members[] = {
    {"receiver", T_OBJECT, offsetof(MessageState, receiver), 0,
     "Told of what is not plain; it keeps the memory of the slots alive."},
    {"parked", T_OBJECT, offsetof(MessageState, parked), READONLY,
     "What a task that waits for a message is parked on."},
    {"room", T_OBJECT_EX, offsetof(MessageState, room), 0,
     "Called when an operation has ended while a task waits for room."},
    {"sge", T_OBJECT_EX, offsetof(MessageState, sge), 0, "The class of pieces of memory."},
    {"remote", T_OBJECT_EX, offsetof(MessageState, remote), 0, "The class of the peer's memory."},
    {"pd", T_OBJECT_EX, offsetof(MessageState, pd), 0, "The connection's protection domain."},
    {"may_read", T_BOOL, offsetof(MessageState, may_read), 0, "Whether READs are possible at all."},
    {"events", T_UINT, offsetof(MessageState, state.base.events), 0, "Not reported yet."},
    {"passed", T_UINT, offsetof(MessageState, state.base.passed), 0,
     "Completions that were given to Python, and that it has not seen yet."},
    {"id", T_ULONGLONG, offsetof(MessageState, state.base.id), READONLY, "Of its requests."},
    FIELD(want, T_UINT, 0),
    FIELD(blocked, T_BOOL, 0),
    FIELD(raw, T_BOOL, READONLY),
    FIELD(closed, T_BOOL, 0),
    FIELD(flushing, T_BOOL, 0),
    FIELD(heard, T_UINT, 0),
    FIELD(eager_size, T_ULONGLONG, 0),
    FIELD(credits, T_LONGLONG, 0),
    FIELD(inline_size, T_UINT, READONLY),
    FIELD(n_free, T_UINT, READONLY),
    FIELD(sent, T_ULONGLONG, 0),
    FIELD(completed, T_ULONGLONG, 0),
    FIELD(posted, T_LONGLONG, 0),
    FIELD(unused, T_LONGLONG, 0),
    FIELD(granted, T_LONGLONG, 0),
    FIELD(control, T_LONGLONG, READONLY),
    FIELD(due, T_LONGLONG, READONLY),
    FIELD(receives, T_LONGLONG, 0),
    FIELD(n_back, T_UINT, READONLY),
    FIELD(chain, T_UINT, READONLY),
    FIELD(held, T_UINT, 0),
    FIELD(rare, T_UINT, 0),
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
    {"free_numbers", state_get_operations_free, NULL, "Numbers of operations, likewise.", NULL},
    {"done", state_get_done, NULL, "Operations that have ended and were not reported.", NULL},
    {"under_way", state_get_under_way, NULL, "Sends, receives and operations of the adapter.",
     NULL},
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

static PyType_Spec state_spec = {
    .name = "aiordma._core.MessageState",
    .basicsize = sizeof(MessageState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = state_slots,
};

int aio_add_message_state(PyObject *module)
{
    name_on_news = PyUnicode_InternFromString("on_news");
    name_on_due = PyUnicode_InternFromString("on_due");
    name_is_running = PyUnicode_InternFromString("is_running");
    if (!name_on_news || !name_on_due || !name_is_running)
        return -1;
    parked_type = aio_add_type(module, &parked_spec, aio_wakeup_type);
    aio_message_state_type = parked_type ? aio_add_type(module, &state_spec, NULL) : NULL;
    return aio_message_state_type ? 0 : -1;
}
