/*
 * StreamState: the data and credits of one stream, as Python sees them.  The work is stream.c's.
 *
 * The protocol in rsocket/ keeps its numbers here, so that each rule of the rare cases is written
 * once, and C and Python find what the other has left.
 * Python changes them in the thread of the stream's loop, in which the drain changes them, too.
 */
#include "core.h"

#define CONTROLS_PER_QUEUE 4  /* work requests that are kept for control messages */
#define MOST_UNSIGNALED    32 /* messages for which a single completion is asked */

static int state_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    StreamState *self = (StreamState *)object;
    struct aio_stream_state *s = &self->state;
    static char *names[] = {"ring",  "table",       "send",   "credits", "send_depth",
                            "iwarp", "inline_size", "memory", NULL};
    unsigned long long ring, table, send;
    unsigned int send_depth, wrs;
    PyObject *memory;
    int iwarp;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(KII)K(KII)IIpIO", names, &ring, &s->ring_rkey,
                                     &s->ring_size, &table, &send, &s->send_size, &s->send_lkey,
                                     &s->credits, &send_depth, &iwarp, &s->inline_size, &memory))
        return -1;
    wrs = iwarp ? 2 : 1;
    if (!s->ring_size || !s->send_size || !s->credits || s->credits > 0xFFFF ||
        send_depth < CONTROLS_PER_QUEUE + wrs || send_depth > AIO_STREAM_NUMBER) {
        PyErr_SetString(PyExc_ValueError, "no such sizes");
        return -1;
    }
    self->memory = Py_NewRef(memory);
    self->thread = PyThread_get_thread_ident();
    s->ring = (uint8_t *)(uintptr_t)ring;
    s->table = (uint8_t *)(uintptr_t)table;
    s->send = (uint8_t *)(uintptr_t)send;
    s->send_free = s->send_size;
    s->iwarp = (uint8_t)iwarp;
    s->controls = s->send + s->send_size;
    s->controls_lkey = s->send_lkey;
    s->grow_at = UINT64_MAX;
    aio_stream_shares(s);
    s->signal_messages = (send_depth / wrs - CONTROLS_PER_QUEUE) / 2;
    if (s->signal_messages > MOST_UNSIGNALED)
        s->signal_messages = MOST_UNSIGNALED;
    if (!s->signal_messages || send_depth / wrs < CONTROLS_PER_QUEUE)
        s->signal_messages = 1;
    s->waiting_mask = aio_power(s->credits) - 1;
    s->messages_mask = aio_power(send_depth) - 1;
    s->waiting = PyMem_Calloc(s->waiting_mask + 1, sizeof(*s->waiting));
    s->messages = PyMem_Calloc(s->messages_mask + 1, sizeof(*s->messages));
    if (!s->waiting || !s->messages) {
        PyErr_NoMemory();
        return -1;
    }
    s->want = 1;
    s->held = 1;
    aio_stream_init(s);
    aio_count_in(&self->counted, NULL, s);
    return 0;
}

static PyObject *state_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, state_init);
}

static int state_traverse(PyObject *object, visitproc visit, void *arg)
{
    StreamState *self = (StreamState *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->memory);
    Py_VISIT(self->handler);
    Py_VISIT(self->protocol);
    Py_VISIT(self->run);
    Py_VISIT(self->rest);
    Py_VISIT(self->elsewhere);
    Py_VISIT(self->spin);
    return aio_parked_traverse(self->parked, visit, arg);
}

static int state_clear(PyObject *object)
{
    /* Not the memory: it leads nowhere, and a method may still be called. */
    StreamState *self = (StreamState *)object;

    aio_unpark(&self->parked); /* first: the others' finalizers may resume its task */
    Py_CLEAR(self->handler);
    Py_CLEAR(self->separator);
    Py_CLEAR(self->protocol);
    Py_CLEAR(self->run);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->elsewhere);
    Py_CLEAR(self->spin);
    return 0;
}

static void state_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    aio_count_out(&((StreamState *)object)->counted);
    state_clear(object);
    Py_CLEAR(((StreamState *)object)->memory);
    PyMem_Free(((StreamState *)object)->state.waiting);
    PyMem_Free(((StreamState *)object)->state.messages);
    aio_free(object);
}

/*
 * The caller is not in the thread of the last write.  Whether it may: 0, or -1.  It may where the
 * loop has gone over to its thread, or does not run.
 */
static int in_new_thread(StreamState *self, unsigned long thread)
{
    PyObject *elsewhere = Py_XNewRef(self->elsewhere), *allowed;

    if (!elsewhere)
        return 0;
    allowed = PyObject_CallNoArgs(elsewhere);
    Py_DECREF(elsewhere);
    if (!allowed)
        return -1;
    Py_DECREF(allowed);
    self->thread = thread;
    return 0;
}

static PyObject *state_write(PyObject *object, PyObject *data)
{
    StreamState *self = (StreamState *)object;
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *number, *rest, *result;
    size_t sent = 0;

    if (thread != self->thread && in_new_thread(self, thread))
        return NULL;
    if (PyBytes_CheckExact(data)) {
        size_t size = (size_t)PyBytes_Size(data);

        sent = aio_stream_write(&self->state, PyBytes_AsString(data), size);
        /* A post that failed is the stream's end, although no byte is left. */
        if (sent == size && size && !self->state.error)
            Py_RETURN_NONE;
    }
    number = PyLong_FromSize_t(sent);
    rest = Py_XNewRef(self->rest); /* the call may change this attribute */
    result = number ? PyObject_CallFunctionObjArgs(rest, data, number, NULL) : NULL;
    Py_XDECREF(rest);
    Py_XDECREF(number);
    return result;
}

/* Call a method of the handler, with an argument or without; a stream that is over has none. */
static int tell(StreamState *self, PyObject *method, PyObject *argument)
{
    PyObject *handler = Py_XNewRef(self->handler), *done;

    if (!handler || handler == Py_None) {
        Py_XDECREF(handler);
        return 0;
    }
    done = PyObject_CallMethodObjArgs(handler, method, argument, NULL);
    Py_DECREF(handler);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/*
 * Whether the peer can send: its next message is an event, with which the rest of the bytes goes to
 * the protocol.  Until then the rest may stay in the ring, for the next reader.
 */
static bool more_comes(const struct aio_stream_state *s)
{
    return s->receiving && !s->dead && s->ring_left && 2 * s->waiting_count < s->credits;
}

/* The next `n` bytes, which can be read. */
static PyObject *cut(StreamState *self, uint32_t n)
{
    struct aio_stream_state *s = &self->state;
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n);

    if (!data)
        return NULL;
    aio_stream_read(s, PyBytes_AsString(data), n);
    if ((s->error || (s->readable && !more_comes(s))) && tell(self, aio_name._on_attention, NULL)) {
        Py_DECREF(data);
        return NULL;
    }
    return data;
}

static PyObject *state_cut(PyObject *object, PyObject *number)
{
    struct aio_stream_state *s = &((StreamState *)object)->state;
    Py_ssize_t n = PyLong_AsSsize_t(number);

    if (n == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear(); /* so many bytes can never be read */
        Py_RETURN_NONE;
    }
    if (n <= 0 || s->stopped || s->readable < (size_t)n)
        Py_RETURN_NONE;
    return cut((StreamState *)object, (uint32_t)n);
}

/* data_received() raised: the stream is over, but for an exception that ends the loop.  0, or -1.
 * */
static int failed(StreamState *self)
{
    PyObject *error;
    int rc;

    if (PyErr_ExceptionMatches(PyExc_SystemExit) || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return -1;
    error = aio_raised();
    rc = tell(self, aio_name._on_raised, error);
    Py_XDECREF(error);
    return rc;
}

/* Give the bytes to the protocol, or tell the stream of other events: 0, or -1. */
static int give_events(StreamState *self, uint32_t events)
{
    struct aio_stream_state *s = &self->state;
    PyObject *data, *done, *push, *protocol, *run;
    int rc;

    if (events != AIO_STREAM_DATA || !s->plain || !s->readable || !self->protocol || !self->run) {
        PyObject *bits = PyLong_FromUnsignedLong(events);

        rc = bits ? tell(self, aio_name._on_events, bits) : -1;
        Py_XDECREF(bits);
        return rc;
    }
    run = Py_NewRef(self->run); /* the call may clear all of these */
    protocol = Py_NewRef(self->protocol);
    data = cut(self, s->readable);
    /* At each call, as asyncio does: a protocol may have replaced it, or have none. */
    push = data ? PyObject_GetAttr(protocol, aio_name.data_received) : NULL;
    done = push ? PyObject_CallFunctionObjArgs(run, push, data, NULL) : NULL;
    rc = done ? 0 : data ? failed(self) : -1;
    Py_DECREF(run);
    Py_DECREF(protocol);
    Py_XDECREF(push);
    Py_XDECREF(data);
    Py_XDECREF(done);
    return rc;
}

/* The events that C has noted, at the end of a drain. */
int aio_stream_events(StreamState *self, uint32_t events)
{
    if (events == AIO_STREAM_DATA && self->state.waiter && self->parked)
        return aio_wake_or_soon(&self->parked->wakeup, self->soon) < 0 ? -1 : 0;
    if (give_events(self, events))
        return -1;
    return events & AIO_STREAM_DATA && self->spin ? aio_spin_heard(self->spin) : 0;
}

static PyObject *state_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int events;

    if (aio_events_of(args, kwargs, &events) || aio_stream_events((StreamState *)object, events))
        return NULL;
    Py_RETURN_NONE;
}

/* A task waits no more. */
static void stop_waiting(StreamState *self)
{
    self->state.waiter = 0;
    self->state.want = 1;
}

/* For Parked: the bytes that were asked for, once they are there. */
static PyObject *take(PyObject *owner, int again)
{
    StreamState *self = (StreamState *)owner;
    struct aio_stream_state *s = &self->state;
    size_t n = 0, want = self->least;

    stop_waiting(self);
    if (self->separator) {
        uint32_t size = (uint32_t)PyBytes_Size(self->separator);

        n = aio_stream_find(s, PyBytes_AsString(self->separator), size);
        if (n ? n - size > self->most : s->readable > self->most)
            Py_RETURN_FALSE;
        want = (size_t)s->readable + 1;
    } else if (s->readable >= want) {
        n = s->readable < self->most ? s->readable : self->most;
    }
    if (n && !s->stopped)
        return cut(self, (uint32_t)n);
    if (again || want > s->ring_size / 2 || s->stopped || !s->receiving || !s->plain ||
        2 * s->waiting_count >= s->credits)
        Py_RETURN_FALSE;
    s->want = (uint32_t)want;
    s->waiter = 1;
    Py_RETURN_NONE;
}

/* The wait was broken off: bytes that have come go to the protocol. */
static void gave_up(PyObject *owner)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    stop_waiting((StreamState *)owner);
    if (tell((StreamState *)owner, aio_name._on_attention, NULL))
        PyErr_WriteUnraisable(owner);
    PyErr_Restore(type, value, traceback);
}

/* park(loop): make the Parked of the stream. */
static PyObject *state_park(PyObject *object, PyObject *loop)
{
    StreamState *self = (StreamState *)object;

    if (!self->parked) {
        Parked *made = aio_park(loop, object, take);

        if (!made)
            return NULL;
        made->gave_up = gave_up;
        made->wakeup.spin = Py_XNewRef(self->spin);
        aio_unpark(&self->parked); /* of a call by a finalizer that the collector ran meanwhile */
        self->parked = made;
    }
    return Py_NewRef((PyObject *)self->parked);
}

/* spin_with(spin): the Spin of the waits for bytes. */
static PyObject *state_spin_with(PyObject *object, PyObject *spin)
{
    StreamState *self = (StreamState *)object;

    if (!Py_IS_TYPE(spin, aio_spin_type)) {
        PyErr_SetString(PyExc_TypeError, "a Spin is needed");
        return NULL;
    }
    replace(&self->spin, Py_NewRef(spin));
    if (self->parked)
        replace(&self->parked->wakeup.spin, Py_NewRef(spin));
    Py_RETURN_NONE;
}

/* A number of bytes, or the largest if it is too large; -1 with an exception. */
static Py_ssize_t size_of(PyObject *number)
{
    Py_ssize_t n = PyLong_AsSsize_t(number);

    if (n == -1 && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        return PY_SSIZE_T_MAX;
    }
    return n;
}

/*
 * take(least, most): `most` bytes at most, as soon as `least` are there.
 * take(separator, most): all up to the separator, which begins behind `most` bytes at most.
 */
static PyObject *state_take(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StreamState *self = (StreamState *)object;
    Py_ssize_t least, most;
    int searched;

    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "take(least or separator, most)");
        return NULL;
    }
    searched = PyBytes_CheckExact(args[0]);
    least = searched ? PyBytes_Size(args[0]) : size_of(args[0]);
    most = size_of(args[1]);
    if (PyErr_Occurred())
        return NULL;
    if (least <= 0 || most <= 0) {
        PyErr_SetString(PyExc_ValueError, searched ? "Separator should be at least one-byte string"
                                                   : "take() of no bytes");
        return NULL;
    }
    self->most = (size_t)most;
    self->least = (size_t)least;
    replace(&self->separator, searched ? Py_NewRef(args[0]) : NULL);
    return Py_NewRef(object);
}

/* `await state.take(...)` ends with the bytes, or with None if Python has to read them. */
static PyObject *state_await(PyObject *object)
{
    StreamState *self = (StreamState *)object;
    PyObject *awaited;

    if (!self->parked) {
        PyErr_SetString(PyExc_RuntimeError, "the stream has no loop");
        return NULL;
    }
    awaited = aio_wakeup_await((PyObject *)self->parked);
    if (awaited)
        self->parked->taking = 1;
    return awaited;
}

static PyObject *state_done(PyObject *object, PyObject *Py_UNUSED(unused))
{
    stop_waiting((StreamState *)object);
    Py_RETURN_NONE;
}

/* Sending */

/* send(data): send what can be sent of a buffer now; how many bytes that were. */
static PyObject *state_send(PyObject *object, PyObject *data)
{
    Py_buffer seen;
    size_t sent;

    if (PyObject_GetBuffer(data, &seen, PyBUF_SIMPLE))
        return NULL;
    sent = aio_stream_write(&((StreamState *)object)->state, seen.buf, (size_t)seen.len);
    PyBuffer_Release(&seen);
    return PyLong_FromSize_t(sent);
}

/* send_from(address, size, lkey): a larger ring for sending, from now on. */
static PyObject *state_send_from(PyObject *object, PyObject *args)
{
    unsigned long long ring;
    unsigned int size, lkey;

    if (!PyArg_ParseTuple(args, "KII", &ring, &size, &lkey))
        return NULL;
    aio_stream_send_from(&((StreamState *)object)->state, (uint8_t *)(uintptr_t)ring, size, lkey);
    Py_RETURN_NONE;
}

AIO_METHOD(StreamState, state_room, aio_stream_room)
AIO_METHOD(StreamState, state_probe, aio_stream_probe)
AIO_METHOD(StreamState, state_retire, aio_stream_retire)
AIO_METHOD_O(StreamState, state_send_ring, aio_stream_send)
AIO_METHOD_O(StreamState, state_reach, aio_stream_reach)
AIO_METHOD_O(StreamState, state_fill, aio_stream_fill)
AIO_METHOD_O(StreamState, state_used, aio_stream_used)

static PyObject *state_control(PyObject *object, PyObject *args)
{
    unsigned int word, wrs, key;
    unsigned long long to;
    const char *payload;
    Py_ssize_t size;
    int signaled;

    if (!PyArg_ParseTuple(args, "IIy#KIp", &word, &wrs, &payload, &size, &to, &key, &signaled))
        return NULL;
    if (size > AIO_STREAM_CONTROL_SIZE) {
        PyErr_SetString(PyExc_ValueError, "too many bytes for a control message");
        return NULL;
    }
    return PyLong_FromLong(aio_stream_control(&((StreamState *)object)->state, word, wrs, payload,
                                              (uint32_t)size, to, key, signaled));
}

static PyObject *state_drop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    aio_stream_drop(&((StreamState *)object)->state);
    Py_RETURN_NONE;
}

/* Receiving */

static PyObject *state_read(PyObject *object, PyObject *args)
{
    Py_ssize_t most;
    Py_buffer into;
    uint32_t count;

    if (!PyArg_ParseTuple(args, "w*n", &into, &most))
        return NULL;
    if (most < 0 || most > into.len)
        most = into.len;
    count = aio_stream_read(&((StreamState *)object)->state, into.buf, (size_t)most);
    PyBuffer_Release(&into);
    return PyLong_FromUnsignedLong(count);
}

/* bind(qp, wr_id, words, lkey): the adapter's side; `words` are where iWARP's words land, or 0. */
static PyObject *state_bind(PyObject *object, PyObject *args)
{
    struct aio_stream_state *s = &((StreamState *)object)->state;
    unsigned long long qp, words;

    if (!PyArg_ParseTuple(args, "KKKI", &qp, &s->wr_id, &words, &s->words_lkey))
        return NULL;
    s->qp = (struct ibv_qp *)(uintptr_t)qp;
    s->words = (uint8_t *)(uintptr_t)words;
    Py_RETURN_NONE;
}

static PyObject *state_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((StreamState *)object)->state.dead = 1;
    ((StreamState *)object)->state.qp = NULL;
    Py_RETURN_NONE;
}

/* The lengths of the messages that wait: a queue. */

static PyObject *state_push_waiting(PyObject *object, PyObject *length)
{
    struct aio_stream_state *s = &((StreamState *)object)->state;
    unsigned long number = PyLong_AsUnsignedLong(length);

    if (PyErr_Occurred())
        return NULL;
    if (s->waiting_count > s->waiting_mask) {
        PyErr_SetString(PyExc_IndexError, "no room for another message");
        return NULL;
    }
    s->waiting[(s->waiting_first + s->waiting_count++) & s->waiting_mask] = (uint32_t)number;
    Py_RETURN_NONE;
}

static PyObject *state_pop_waiting(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_stream_state *s = &((StreamState *)object)->state;

    if (!s->waiting_count) {
        PyErr_SetString(PyExc_IndexError, "no message waits");
        return NULL;
    }
    s->waiting_first++;
    s->waiting_count--;
    Py_RETURN_NONE;
}

static PyObject *state_get_first(PyObject *object, void *Py_UNUSED(unused))
{
    struct aio_stream_state *s = &((StreamState *)object)->state;

    return PyLong_FromUnsignedLong(s->waiting[s->waiting_first & s->waiting_mask]);
}

static int state_set_first(PyObject *object, PyObject *value, void *Py_UNUSED(unused))
{
    struct aio_stream_state *s = &((StreamState *)object)->state;
    unsigned long number = value ? PyLong_AsUnsignedLong(value) : 0;

    if (PyErr_Occurred())
        return -1;
    s->waiting[s->waiting_first & s->waiting_mask] = (uint32_t)number;
    return 0;
}

static PyMethodDef state_methods[] = {
    {"write", state_write, METH_O, "As RdmaTransport.write."},
    {"send", state_send, METH_O, "Send what can be sent now of a buffer; how many bytes."},
    {"room", state_room, METH_NOARGS, "Bytes that the next message of data can carry."},
    {"send_ring", state_send_ring, METH_O,
     "Post the next so many bytes of the ring for sending, which are there; 0 or an errno."},
    {"send_from", state_send_from, METH_VARARGS,
     "Send from another ring from now on: address, size, lkey."},
    {"control", state_control, METH_VARARGS,
     "Post a control message: word, work requests, payload, address, key, signaled."},
    {"probe", state_probe, METH_NOARGS, "Post a WRITE of nothing; 0 or an errno."},
    {"reach", state_reach, METH_O, "How many messages the completion of this sub-index means."},
    {"retire", state_retire, METH_NOARGS, "Count the oldest message off; its word."},
    {"drop", state_drop, METH_NOARGS, "Count the oldest message off, which has failed."},
    {"cut", state_cut, METH_O, "The next so many bytes, or None if fewer are there."},
    {"read", state_read, METH_VARARGS,
     "Copy at most so many bytes that are there into a buffer; how many."},
    {"take", (PyCFunction)(void (*)(void))state_take, METH_FASTCALL,
     "To await: bytes, so many at least and at most, or up to a separator; None: Python reads."},
    {"park", state_park, METH_O, "The Wakeup of the task that waits for bytes, in this loop."},
    {"done", state_done, METH_NOARGS, "The wait is over."},
    {"spin_with", state_spin_with, METH_O, "Spin while a task, or a protocol, waits for bytes."},
    {"bind", state_bind, METH_VARARGS,
     "Name the adapter's side: queue pair, id of its requests, address of iWARP's words, lkey."},
    {"close", state_close, METH_NOARGS, "Post nothing any more: the queue pair may go."},
    {"fill", state_fill, METH_O, "Post so many receives, for the first time; 0 or an errno."},
    {"used", state_used, METH_O, "The receive of this slot has completed; 0 or an errno."},
    {"push_waiting", state_push_waiting, METH_O, "A message of so many bytes waits."},
    {"pop_waiting", state_pop_waiting, METH_NOARGS, "The first message waits no more."},
    {NULL, NULL, 0, NULL},
};

#define FIELD(name, type, flags) {#name, type, offsetof(StreamState, state.name), flags, NULL}

static PyMemberDef state_members[] = {
    {"handler", T_OBJECT, offsetof(StreamState, handler), 0,
     "The stream, which is told of what is not plain; None when it is over."},
    {"protocol", T_OBJECT, offsetof(StreamState, protocol), 0,
     "Its data_received is looked up and called with what has come; None if it is not to be."},
    {"run", T_OBJECT, offsetof(StreamState, run), 0, "Of the context in which it is called."},
    {"rest", T_OBJECT, offsetof(StreamState, rest), 0, "Called with data that were not plain."},
    {"elsewhere", T_OBJECT, offsetof(StreamState, elsewhere), 0,
     "Called where write is called in another thread; raises if it may not be."},
    {"events", T_UINT, offsetof(StreamState, state.base.events), 0, "Not reported yet."},
    {"passed", T_UINT, offsetof(StreamState, state.base.passed), 0,
     "Completions that were given to Python, and that it has not seen yet."},
    FIELD(inline_size, T_UINT, READONLY),
    FIELD(error, T_INT, READONLY),
    FIELD(recv_failed, T_BOOL, READONLY),
    FIELD(dead, T_BOOL, 0),
    FIELD(flushing, T_BOOL, 0),
    FIELD(receiving, T_BOOL, 0),
    FIELD(sending, T_BOOL, 0),
    FIELD(held, T_BOOL, 0),
    FIELD(crediting, T_BOOL, 0),
    FIELD(owing, T_BOOL, 0),
    FIELD(swapped, T_BOOL, 0),
    FIELD(alive, T_BOOL, 0),
    FIELD(plain, T_BOOL, 0),
    FIELD(waiter, T_BOOL, 0),
    FIELD(stopped, T_BOOL, 0),
    FIELD(posted, T_UINT, 0),
    FIELD(send_free, T_UINT, READONLY),
    FIELD(head, T_UINT, READONLY),
    FIELD(largest, T_UINT, 0),
    FIELD(addr, T_ULONGLONG, 0),
    FIELD(key, T_UINT, 0),
    FIELD(left, T_UINT, 0),
    FIELD(spare_addr, T_ULONGLONG, 0),
    FIELD(spare_key, T_UINT, 0),
    FIELD(spare_left, T_UINT, 0),
    FIELD(allowed, T_UINT, 0),
    FIELD(limit, T_UINT, 0),
    FIELD(sequence, T_UINT, 0),
    FIELD(data_out, T_UINT, 0),
    FIELD(data_limit, T_UINT, 0),
    FIELD(data_wrs, T_UINT, 0),
    FIELD(control_out, T_UINT, 0),
    FIELD(progress, T_ULONGLONG, READONLY),
    FIELD(bytes_sent, T_ULONGLONG, READONLY),
    FIELD(bytes_received, T_ULONGLONG, READONLY),
    FIELD(entry, T_UINT, 0),
    FIELD(peer_entry, T_UINT, 0),
    FIELD(table_addr, T_ULONGLONG, 0),
    FIELD(table_key, T_UINT, 0),
    FIELD(table_length, T_UINT, 0),
    FIELD(ring_size, T_UINT, 0),
    FIELD(ring_rkey, T_UINT, 0),
    {"ring_addr", T_ULONGLONG, offsetof(StreamState, state.ring), 0, NULL},
    {"wider_addr", T_ULONGLONG, offsetof(StreamState, state.wider), 0, NULL},
    FIELD(wider_rkey, T_UINT, 0),
    FIELD(wider_size, T_UINT, 0),
    FIELD(moved, T_BOOL, 0),
    FIELD(grow_at, T_ULONGLONG, 0),
    FIELD(offset, T_UINT, 0),
    FIELD(readable, T_UINT, 0),
    FIELD(want, T_UINT, 0),
    FIELD(ring_left, T_UINT, 0),
    FIELD(ring_buffers, T_UINT, 0),
    FIELD(ring_allowed, T_UINT, 0),
    FIELD(ring_free, T_UINT, 0),
    FIELD(ring_next, T_UINT, 0),
    FIELD(credits, T_UINT, 0),
    FIELD(consumed, T_ULONGLONG, 0),
    FIELD(due, T_ULONGLONG, 0),
    FIELD(waiting_count, T_UINT, READONLY),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef state_getset[] = {
    {"first_waiting", state_get_first, state_set_first, "Bytes of the first that waits.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot state_slots[] = {
    {Py_tp_new, state_new},
    {Py_tp_dealloc, state_dealloc},
    {Py_tp_traverse, state_traverse},
    {Py_tp_clear, state_clear},
    {Py_tp_call, state_call}, /* with its events */
    {Py_am_await, state_await},
    {Py_tp_methods, state_methods},
    {Py_tp_members, state_members},
    {Py_tp_getset, state_getset},
    {Py_tp_doc, "The data and credits of one stream."},
    {0, NULL},
};

PyType_Spec aio_stream_state_spec = {
    .name = "aiordma._core.StreamState",
    .basicsize = sizeof(StreamState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = state_slots,
};
