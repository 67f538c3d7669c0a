/*
 * StreamState: the type by which Python commands and asks a stream.  Its methods convert arguments
 * and results, and call stream.c, which does the work.
 *
 * Every call comes in the thread of the stream's loop, as the drain does.  Python writes no member:
 * a command changes everything that belongs together, or raises and has changed nothing.
 */
#include "core.h"

static int stream_state_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    StreamState *self = (StreamState *)object;
    struct aio_stream_sizes sizes = {0};
    static char *names[] = {"ring",  "table",       "send",   "credits", "send_depth",
                            "iwarp", "inline_size", "memory", NULL};
    unsigned long long ring, table, send;
    PyObject *memory;
    int iwarp, code;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "(KII)K(KII)IIpIO", names, &ring,
                                     &sizes.ring.key, &sizes.ring.length, &table, &send,
                                     &sizes.send.length, &sizes.send.key, &sizes.credits,
                                     &sizes.send_depth, &iwarp, &sizes.inline_size, &memory))
        return -1;
    sizes.ring.addr = ring;
    sizes.table = table;
    sizes.send.addr = send;
    sizes.iwarp = (uint8_t)iwarp;
    code = stream_new(&sizes, &self->stream);
    if (code == EINVAL)
        PyErr_SetString(PyExc_ValueError, "no such sizes");
    else if (code)
        PyErr_NoMemory();
    if (code)
        return -1;
    self->memory = Py_NewRef(memory);
    self->thread = PyThread_get_thread_ident();
    aio_count_in(&self->counted, NULL, self->stream);
    return 0;
}

static PyObject *stream_state_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, stream_state_init);
}

static int stream_state_traverse(PyObject *object, visitproc visit, void *arg)
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
    return aio_receive_wakeup_traverse(self->parked, visit, arg);
}

static int stream_state_clear(PyObject *object)
{
    /* Not the memory: it leads nowhere, and a method may still be called. */
    StreamState *self = (StreamState *)object;

    aio_receive_wakeup_part(&self->parked); /* first: the others' finalizers may resume its task */
    Py_CLEAR(self->handler);
    Py_CLEAR(self->separator);
    Py_CLEAR(self->protocol);
    Py_CLEAR(self->run);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->elsewhere);
    Py_CLEAR(self->spin);
    return 0;
}

static void stream_state_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    aio_count_out(&((StreamState *)object)->counted);
    stream_state_clear(object);
    Py_CLEAR(((StreamState *)object)->memory);
    stream_free(((StreamState *)object)->stream);
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

static PyObject *stream_state_write(PyObject *object, PyObject *data)
{
    StreamState *self = (StreamState *)object;
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *number, *rest, *result;
    size_t sent = 0;

    if (thread != self->thread && in_new_thread(self, thread))
        return NULL;
    if (PyBytes_CheckExact(data)) {
        size_t size = (size_t)PyBytes_Size(data);

        sent = stream_write(self->stream, PyBytes_AsString(data), size);
        /* A post that failed is the stream's end, although no byte is left. */
        if (sent == size && size && !stream_error(self->stream))
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
static int tell_handler(StreamState *self, PyObject *method, PyObject *argument)
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

/* The next `n` bytes, which can be read. */
static PyObject *bytes_out_of_ring(StreamState *self, uint32_t n)
{
    struct aio_stream *s = self->stream;
    PyObject *data = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)n);

    if (!data)
        return NULL;
    stream_read(s, PyBytes_AsString(data), n);
    if (stream_needs_attention(s) && tell_handler(self, aio_name._on_attention, NULL)) {
        Py_DECREF(data);
        return NULL;
    }
    return data;
}

static PyObject *stream_state_cut(PyObject *object, PyObject *number)
{
    struct aio_stream *s = ((StreamState *)object)->stream;
    Py_ssize_t n = PyLong_AsSsize_t(number);

    if (n == -1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear(); /* so many bytes can never be read */
        Py_RETURN_NONE;
    }
    if (n <= 0 || stream_stopped(s) || stream_readable(s) < n)
        Py_RETURN_NONE;
    return bytes_out_of_ring((StreamState *)object, (uint32_t)n);
}

/* data_received() raised: the stream is over, but for an exception that ends the loop.  0, or -1.
 * */
static int report_raised(StreamState *self)
{
    PyObject *error;
    int rc;

    if (PyErr_ExceptionMatches(PyExc_SystemExit) || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return -1;
    error = aio_raised();
    rc = tell_handler(self, aio_name._on_raised, error);
    Py_XDECREF(error);
    return rc;
}

/* Give the bytes to the protocol, or tell the stream of other events: 0, or -1. */
static int give_stream_events(StreamState *self, uint32_t events)
{
    struct aio_stream *s = self->stream;
    PyObject *data, *done, *push, *protocol, *run;
    int rc;

    if (events != AIO_STREAM_DATA || !stream_is_for_protocol(s) || !self->protocol || !self->run) {
        PyObject *bits = PyLong_FromUnsignedLong(events);

        rc = bits ? tell_handler(self, aio_name._on_events, bits) : -1;
        Py_XDECREF(bits);
        return rc;
    }
    run = Py_NewRef(self->run); /* the call may clear all of these */
    protocol = Py_NewRef(self->protocol);
    data = bytes_out_of_ring(self, (uint32_t)stream_readable(s));
    /* At each call, as asyncio does: a protocol may have replaced it, or have none. */
    push = data ? PyObject_GetAttr(protocol, aio_name.data_received) : NULL;
    done = push ? PyObject_CallFunctionObjArgs(run, push, data, NULL) : NULL;
    rc = done ? 0 : data ? report_raised(self) : -1;
    Py_DECREF(run);
    Py_DECREF(protocol);
    Py_XDECREF(push);
    Py_XDECREF(data);
    Py_XDECREF(done);
    return rc;
}

/* The drain has polled its queues: act on the events. */
static int act_on_events(StreamState *self, uint32_t events)
{
    if (events == AIO_STREAM_DATA && stream_waiting(self->stream) && self->parked)
        return aio_wake_or_soon(&self->parked->wakeup, self->soon) < 0 ? -1 : 0;
    if (give_stream_events(self, events))
        return -1;
    return events & AIO_STREAM_DATA && self->spin ? aio_spin_heard(self->spin) : 0;
}

static int stream_state_take_completion(PyObject *object, const struct ibv_wc *wc)
{
    return stream_complete(((StreamState *)object)->stream, wc);
}

static int stream_state_deliver(PyObject *object, uint32_t events, bool by_loop)
{
    ((StreamState *)object)->soon = by_loop;
    return act_on_events((StreamState *)object, events);
}

const struct aio_sink aio_stream_sink = {stream_state_take_completion, stream_state_deliver};

static PyObject *stream_state_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int events;

    if (aio_events_of(args, kwargs, &events) || act_on_events((StreamState *)object, events))
        return NULL;
    Py_RETURN_NONE;
}

/* For ReceiveWakeup: the bytes that were asked for, once they are there. */
static PyObject *take_for_task(PyObject *owner, int again)
{
    StreamState *self = (StreamState *)owner;
    struct aio_stream *s = self->stream;
    size_t n = 0, want = self->least, readable = (size_t)stream_readable(s);

    stream_end_wait(s);
    if (self->separator) {
        uint32_t size = (uint32_t)PyBytes_Size(self->separator);

        n = stream_find(s, PyBytes_AsString(self->separator), size);
        if (n ? n - size > self->most : readable > self->most)
            Py_RETURN_FALSE;
        want = readable + 1;
    } else if (readable >= want) {
        n = readable < self->most ? readable : self->most;
    }
    if (n && !stream_stopped(s))
        return bytes_out_of_ring(self, (uint32_t)n);
    if (again || stream_await_bytes(s, want))
        Py_RETURN_FALSE;
    Py_RETURN_NONE;
}

/* The wait was broken off: bytes that have come go to the protocol. */
static void stream_wait_broken_off(PyObject *owner)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    stream_end_wait(((StreamState *)owner)->stream);
    if (tell_handler((StreamState *)owner, aio_name._on_attention, NULL))
        PyErr_WriteUnraisable(owner);
    PyErr_Restore(type, value, traceback);
}

/* park(loop): make the ReceiveWakeup of the stream. */
static PyObject *stream_state_park(PyObject *object, PyObject *loop)
{
    StreamState *self = (StreamState *)object;

    if (!self->parked) {
        ReceiveWakeup *made = aio_receive_wakeup_new(loop, object, take_for_task);

        if (!made)
            return NULL;
        made->gave_up = stream_wait_broken_off;
        made->wakeup.spin = Py_XNewRef(self->spin);
        aio_receive_wakeup_part(
            &self->parked); /* of a call by a finalizer that the collector ran meanwhile */
        self->parked = made;
    }
    return Py_NewRef((PyObject *)self->parked);
}

/* spin_with(spin): the Spin of the waits for bytes. */
static PyObject *stream_state_spin_with(PyObject *object, PyObject *spin)
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
static PyObject *stream_state_take(PyObject *object, PyObject *const *args, Py_ssize_t count)
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
static PyObject *stream_state_await(PyObject *object)
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

static PyObject *stream_state_done(PyObject *object, PyObject *Py_UNUSED(unused))
{
    stream_end_wait(((StreamState *)object)->stream);
    Py_RETURN_NONE;
}

/* Sending */

/* send(data): send what can be sent of a buffer now; how many bytes that were. */
static PyObject *stream_state_send(PyObject *object, PyObject *data)
{
    Py_buffer seen;
    size_t sent;

    if (PyObject_GetBuffer(data, &seen, PyBUF_SIMPLE))
        return NULL;
    sent = stream_write(((StreamState *)object)->stream, seen.buf, (size_t)seen.len);
    PyBuffer_Release(&seen);
    return PyLong_FromSize_t(sent);
}

/* send_from(address, size, lkey): a larger ring for sending, from now on. */
static PyObject *stream_state_send_from(PyObject *object, PyObject *args)
{
    unsigned long long ring;
    unsigned int size, lkey;

    if (!PyArg_ParseTuple(args, "KII", &ring, &size, &lkey))
        return NULL;
    stream_replace_send_ring(((StreamState *)object)->stream, (uint8_t *)(uintptr_t)ring, size,
                             lkey);
    Py_RETURN_NONE;
}

/* next_place() -> offset into the ring for sending, bytes */
static PyObject *stream_state_next_place(PyObject *object, PyObject *Py_UNUSED(unused))
{
    uint32_t offset, room = stream_next_place(((StreamState *)object)->stream, &offset);

    return Py_BuildValue("(II)", offset, room);
}

static PyObject *stream_state_send_from_ring(PyObject *object, PyObject *number)
{
    unsigned long length = PyLong_AsUnsignedLong(number);

    if (PyErr_Occurred())
        return NULL;
    if (length > UINT32_MAX) /* more than any ring has */
        length = UINT32_MAX;
    return PyLong_FromLong(
        stream_send_from_ring(((StreamState *)object)->stream, (uint32_t)length));
}

static PyObject *stream_state_announce(PyObject *object, PyObject *repeat)
{
    int repeats = PyObject_IsTrue(repeat);

    if (repeats < 0)
        return NULL;
    return PyLong_FromLong(stream_announce(((StreamState *)object)->stream, repeats));
}

static PyObject *stream_state_say(PyObject *object, PyObject *number)
{
    unsigned long word = PyLong_AsUnsignedLong(number);

    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(stream_say(((StreamState *)object)->stream, (uint32_t)word));
}

/* publish(word, payload, address, key) */
static PyObject *stream_state_publish(PyObject *object, PyObject *args)
{
    unsigned int word, key;
    unsigned long long to;
    const char *payload;
    Py_ssize_t size;

    if (!PyArg_ParseTuple(args, "Iy#KI", &word, &payload, &size, &to, &key))
        return NULL;
    if (size > AIO_STREAM_CONTROL_SIZE) {
        PyErr_SetString(PyExc_ValueError, "too many bytes for a control message");
        return NULL;
    }
    return PyLong_FromLong(
        stream_publish(((StreamState *)object)->stream, word, payload, (uint32_t)size, to, key));
}

static PyObject *stream_state_probe(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(stream_probe(((StreamState *)object)->stream));
}

/* Completions that Python takes */

static PyObject *stream_state_seen(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (stream_note_seen(((StreamState *)object)->stream)) {
        PyErr_SetString(PyExc_RuntimeError, "Python has seen every completion");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* complete_receive(slot, failed) */
static PyObject *stream_state_complete_receive(PyObject *object, PyObject *args)
{
    struct aio_stream *s = ((StreamState *)object)->stream;
    unsigned int slot;
    int failed;

    if (!PyArg_ParseTuple(args, "Ip", &slot, &failed))
        return NULL;
    if (!failed)
        return PyLong_FromLong(stream_complete_receive(s, slot));
    stream_count_failed_receive(s);
    return PyLong_FromLong(0);
}

/* complete_send(sub, failed) -> the words of the control messages that have completed */
static PyObject *stream_state_complete_send(PyObject *object, PyObject *args)
{
    uint32_t words[AIO_STREAM_CONTROLS], count;
    unsigned int sub;
    PyObject *list;
    int failed;

    if (!PyArg_ParseTuple(args, "Ip", &sub, &failed))
        return NULL;
    count = stream_complete_send(((StreamState *)object)->stream, sub, failed, words);
    list = PyList_New(count);
    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *word = PyLong_FromUnsignedLong(words[i]);

        if (!word || PyList_SetItem(list, i, word))
            Py_CLEAR(list);
    }
    return list;
}

/* Receiving */

static PyObject *stream_state_read(PyObject *object, PyObject *args)
{
    Py_ssize_t most;
    Py_buffer into;
    uint32_t count;

    if (!PyArg_ParseTuple(args, "w*n", &into, &most))
        return NULL;
    if (most < 0 || most > into.len)
        most = into.len;
    count = stream_read(((StreamState *)object)->stream, into.buf, (size_t)most);
    PyBuffer_Release(&into);
    return PyLong_FromUnsignedLong(count);
}

/*
 * bind(qp, wr_id, words, lkey, receives): the adapter's side; `words` are where iWARP's words land,
 * or 0.  The errno of a receive that could not be posted, or 0.
 */
static PyObject *stream_state_bind(PyObject *object, PyObject *args)
{
    unsigned long long qp, id, words;
    unsigned int lkey, receives;

    if (!PyArg_ParseTuple(args, "KKKII", &qp, &id, &words, &lkey, &receives))
        return NULL;
    if (receives > AIO_STREAM_RECV) {
        PyErr_SetString(PyExc_ValueError, "more receives than there are numbers for");
        return NULL;
    }
    return PyLong_FromLong(stream_bind(((StreamState *)object)->stream,
                                       (struct ibv_qp *)(uintptr_t)qp, id,
                                       (uint8_t *)(uintptr_t)words, lkey, receives));
}

/* Who gets the bytes */

/* A reference of its own to the object, or NULL for None. */
static PyObject *or_null(PyObject *object)
{
    return object == Py_None ? NULL : Py_NewRef(object);
}

/* attach(handler, run, rest, elsewhere); each but the first may be None. */
static PyObject *stream_state_attach(PyObject *object, PyObject *args)
{
    StreamState *self = (StreamState *)object;
    PyObject *handler, *run, *rest, *elsewhere;

    if (!PyArg_ParseTuple(args, "OOOO", &handler, &run, &rest, &elsewhere))
        return NULL;
    replace(&self->handler, Py_NewRef(handler));
    replace(&self->run, or_null(run));
    replace(&self->rest, or_null(rest));
    replace(&self->elsewhere, or_null(elsewhere));
    Py_RETURN_NONE;
}

static PyObject *stream_state_part(PyObject *object, PyObject *Py_UNUSED(unused))
{
    StreamState *self = (StreamState *)object;

    replace(&self->handler, NULL);
    Py_RETURN_NONE;
}

static PyObject *stream_state_refuse_writes(PyObject *object, PyObject *rest)
{
    StreamState *self = (StreamState *)object;

    stream_advance_output(self->stream, AIO_OUTPUT_EVENT_HOLD);
    replace(&self->rest, Py_NewRef(rest));
    Py_RETURN_NONE;
}

/* deliver_to(protocol, paused); None: Python delivers. */
static PyObject *stream_state_deliver_to(PyObject *object, PyObject *args)
{
    StreamState *self = (StreamState *)object;
    PyObject *protocol;
    int paused;

    if (!PyArg_ParseTuple(args, "Op", &protocol, &paused))
        return NULL;
    stream_advance_reader(self->stream, protocol == Py_None || paused ? AIO_READER_EVENT_KEEP
                                                                      : AIO_READER_EVENT_DELIVER);
    replace(&self->protocol, or_null(protocol));
    Py_RETURN_NONE;
}

static PyObject *stream_state_stop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    stream_advance_reader(((StreamState *)object)->stream, AIO_READER_EVENT_STOP);
    Py_RETURN_NONE;
}

static PyObject *stream_state_enough(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(stream_has_enough(((StreamState *)object)->stream));
}

/* wait_for(length): whether the task has to wait. */
static PyObject *stream_state_wait_for(PyObject *object, PyObject *number)
{
    struct aio_stream *s = ((StreamState *)object)->stream;
    Py_ssize_t length = size_of(number);

    if (PyErr_Occurred())
        return NULL;
    if (stream_waiting(s) || length <= 0) {
        PyErr_SetString(PyExc_RuntimeError, "a task waits already, or for nothing");
        return NULL;
    }
    return PyBool_FromLong(stream_await_some(s, (size_t)length));
}

static PyObject *stream_state_was_alive(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(stream_check_alive(((StreamState *)object)->stream));
}

/* States */

static PyObject *stream_state_open(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (stream_open(((StreamState *)object)->stream)) {
        PyErr_SetString(PyExc_RuntimeError, "the peer is not known yet");
        return NULL;
    }
    Py_RETURN_NONE;
}

/* permit(writable, wanted, ended, owed) */
static PyObject *stream_state_permit(PyObject *object, PyObject *args)
{
    struct aio_stream *s = ((StreamState *)object)->stream;
    int writable, wanted, ended;
    unsigned int owed;

    if (!PyArg_ParseTuple(args, "pppI", &writable, &wanted, &ended, &owed))
        return NULL;
    if (owed >= AIO_OWED_COUNT) {
        PyErr_SetString(PyExc_ValueError, "nothing of this kind can be owed");
        return NULL;
    }
    if (!writable)
        stream_advance_output(s, AIO_OUTPUT_EVENT_SHUT);
    if (ended)
        stream_advance_input(s, AIO_INPUT_EVENT_END);
    else if (!wanted)
        stream_advance_input(s, AIO_INPUT_EVENT_REFUSE);
    stream_owe(s, (enum aio_owed)owed);
    Py_RETURN_NONE;
}

/* hold(whether): leave each write to Python, or take it in C. */
static PyObject *stream_state_hold(PyObject *object, PyObject *whether)
{
    int held = PyObject_IsTrue(whether);

    if (held < 0)
        return NULL;
    stream_advance_output(((StreamState *)object)->stream,
                          held ? AIO_OUTPUT_EVENT_HOLD : AIO_OUTPUT_EVENT_RELEASE);
    Py_RETURN_NONE;
}

/* A method that is an event of the queue pair: whether it is news. */
#define LIFE_METHOD(name, event)                                                                   \
    static PyObject *name(PyObject *object, PyObject *Py_UNUSED(unused))                           \
    {                                                                                              \
        return PyBool_FromLong(                                                                    \
            stream_advance_life(((StreamState *)object)->stream, AIO_STREAM_LIFE_EVENT_##event));  \
    }

LIFE_METHOD(stream_state_end, END)
LIFE_METHOD(stream_state_flush, FLUSH)
LIFE_METHOD(stream_state_close, CLOSE)

/* Larger rings */

static PyObject *stream_state_grow_after(PyObject *object, PyObject *number)
{
    Py_ssize_t taken = size_of(number);

    if (PyErr_Occurred())
        return NULL;
    if (taken < 0) {
        PyErr_SetString(PyExc_ValueError, "fewer than no bytes");
        return NULL;
    }
    stream_grow_after(((StreamState *)object)->stream, (uint64_t)taken);
    Py_RETURN_NONE;
}

/* widen(address, rkey, size) */
static PyObject *stream_state_widen(PyObject *object, PyObject *args)
{
    unsigned long long ring;
    unsigned int rkey, size;

    if (!PyArg_ParseTuple(args, "KII", &ring, &rkey, &size))
        return NULL;
    if (stream_widen(((StreamState *)object)->stream, (uint8_t *)(uintptr_t)ring, rkey, size)) {
        PyErr_SetString(PyExc_ValueError, "no such larger ring, or one is on its way");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *stream_state_wants_send_ring(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(stream_wants_send_ring(((StreamState *)object)->stream));
}

/* The peer */

/* meet(credits, (addr, key, length), (table_addr, table_key, table_length), swapped) */
static PyObject *stream_state_meet(PyObject *object, PyObject *args)
{
    unsigned long long addr, table_addr;
    struct aio_stream_peer peer;
    int swapped, code;

    if (!PyArg_ParseTuple(args, "I(KII)(KII)p", &peer.credits, &addr, &peer.buffer.key,
                          &peer.buffer.length, &table_addr, &peer.table_key, &peer.table_length,
                          &swapped))
        return NULL;
    peer.buffer.addr = addr;
    peer.table_addr = table_addr;
    peer.swapped = (uint8_t)swapped;
    code = stream_meet(((StreamState *)object)->stream, &peer);
    if (code == EALREADY)
        PyErr_SetString(PyExc_RuntimeError, "the peer is known already");
    else if (code)
        PyErr_SetString(PyExc_ValueError, "no such peer");
    if (code)
        return NULL;
    Py_RETURN_NONE;
}

/* take_word(word) -> None, or how it breaks flow control, and two numbers */
static PyObject *stream_state_take_word(PyObject *object, PyObject *number)
{
    unsigned long word = PyLong_AsUnsignedLong(number);
    struct aio_stream_violation broken;

    if (PyErr_Occurred())
        return NULL;
    broken = stream_take_word(((StreamState *)object)->stream, (uint32_t)word);
    if (broken.kind == AIO_STREAM_RIGHT)
        Py_RETURN_NONE;
    return Py_BuildValue("(iKK)", (int)broken.kind, (unsigned long long)broken.first,
                         (unsigned long long)broken.second);
}

#define FACT_GETTER(name, value)                                                                   \
    static PyObject *stream_state_get_##name(PyObject *object, void *Py_UNUSED(unused))            \
    {                                                                                              \
        return PyLong_FromLongLong(stream_##name(((StreamState *)object)->stream));                \
    }
#define FLAG_GETTER(name, value)                                                                   \
    static PyObject *stream_state_get_##name(PyObject *object, void *Py_UNUSED(unused))            \
    {                                                                                              \
        return PyBool_FromLong((long)stream_##name(((StreamState *)object)->stream));              \
    }

AIO_STREAM_FACTS(FACT_GETTER)
AIO_STREAM_FLAGS(FLAG_GETTER)

static PyMethodDef stream_state_methods[] = {
    {"write", stream_state_write, METH_O, "As RdmaTransport.write."},
    {"send", stream_state_send, METH_O, "Send what can be sent now of a buffer; how many bytes."},
    {"next_place", stream_state_next_place, METH_NOARGS,
     "Where in the ring the bytes of the next message go, and how many it can carry."},
    {"send_from_ring", stream_state_send_from_ring, METH_O,
     "Post the next so many bytes of the ring for sending, which are there; 0 or an errno."},
    {"wants_send_ring", stream_state_wants_send_ring, METH_NOARGS,
     "Whether the ring for sending is full, and the peer has more room than it."},
    {"send_from", stream_state_send_from, METH_VARARGS,
     "Send from another ring from now on: address, size, lkey."},
    {"announce", stream_state_announce, METH_O,
     "Post the updates of room that are due, or one in any case; 0 or an errno."},
    {"say", stream_state_say, METH_O, "Post a word; 0, an errno, or NO_ROOM."},
    {"publish", stream_state_publish, METH_VARARGS,
     "Post a word behind bytes to the peer's table: word, payload, address, key."},
    {"probe", stream_state_probe, METH_NOARGS, "Post a WRITE of nothing; 0 or an errno."},
    {"seen", stream_state_seen, METH_NOARGS, "Python has seen a completion that was passed to it."},
    {"complete_receive", stream_state_complete_receive, METH_VARARGS,
     "The receive of this slot has completed, or has failed; 0 or an errno."},
    {"complete_send", stream_state_complete_send, METH_VARARGS,
     "The message of this sub-index has completed, or has failed, and all before it have completed;"
     " the words of the control messages among them."},
    {"cut", stream_state_cut, METH_O, "The next so many bytes, or None if fewer are there."},
    {"read", stream_state_read, METH_VARARGS,
     "Copy at most so many bytes that are there into a buffer; how many."},
    {"take", (PyCFunction)(void (*)(void))stream_state_take, METH_FASTCALL,
     "To await: bytes, so many at least and at most, or up to a separator; None: Python reads."},
    {"park", stream_state_park, METH_O,
     "The Wakeup of the task that waits for bytes, in this loop."},
    {"done", stream_state_done, METH_NOARGS, "The wait is over."},
    {"spin_with", stream_state_spin_with, METH_O,
     "Spin while a task, or a protocol, waits for bytes."},
    {"bind", stream_state_bind, METH_VARARGS,
     "Name the adapter's side: queue pair, id of its requests, address of iWARP's words, lkey; and"
     " post so many receives.  0 or an errno."},
    {"attach", stream_state_attach, METH_VARARGS,
     "Name the stream: the handler of its events, Context.run, what takes the rest of a write, and"
     " what is asked in another thread."},
    {"part", stream_state_part, METH_NOARGS, "Forget the handler: the stream is over."},
    {"refuse_writes", stream_state_refuse_writes, METH_O, "Give every write to this function."},
    {"deliver_to", stream_state_deliver_to, METH_VARARGS,
     "Call this protocol's data_received, unless paused; None: Python delivers."},
    {"stop", stream_state_stop, METH_NOARGS, "Drop what arrives from now on."},
    {"enough", stream_state_enough, METH_NOARGS,
     "Whether the bytes are there that are waited for."},
    {"wait_for", stream_state_wait_for, METH_O,
     "Keep so many bytes for a task; whether it has to wait for them."},
    {"was_alive", stream_state_was_alive, METH_NOARGS,
     "Whether the peer has given a sign of life since the last call."},
    {"meet", stream_state_meet, METH_VARARGS,
     "Begin with the peer: its credits, its first buffer, its table, whether bytes are swapped."},
    {"open", stream_state_open, METH_NOARGS, "Data may go both ways."},
    {"permit", stream_state_permit, METH_VARARGS,
     "What the end leaves open: whether this side sends, and wants to receive; whether the peer has"
     " ended; what waits to be posted."},
    {"hold", stream_state_hold, METH_O, "Whether every write is left to Python."},
    {"end", stream_state_end, METH_NOARGS, "Post nothing any more."},
    {"flush", stream_state_flush, METH_NOARGS,
     "Only count the receives that come back; whether that is new."},
    {"close", stream_state_close, METH_NOARGS, "The queue pair may go."},
    {"take_word", stream_state_take_word, METH_O,
     "Count a message of the peer; None, or how it breaks flow control, with two numbers."},
    {"grow_after", stream_state_grow_after, METH_O,
     "Ask for a larger ring once so many bytes were taken."},
    {"widen", stream_state_widen, METH_VARARGS,
     "A larger ring for receiving: address, rkey, size."},
    {NULL, NULL, 0, NULL},
};

#define DEFINE_GETTER(name, value) {#name, stream_state_get_##name, NULL, NULL, NULL},

/* Of what each of these means, stream_private.h tells. */
static PyGetSetDef stream_state_getset[] = {
    AIO_STREAM_FACTS(DEFINE_GETTER) AIO_STREAM_FLAGS(DEFINE_GETTER){NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot stream_state_slots[] = {
    {Py_tp_new, stream_state_new},
    {Py_tp_dealloc, stream_state_dealloc},
    {Py_tp_traverse, stream_state_traverse},
    {Py_tp_clear, stream_state_clear},
    {Py_tp_call, stream_state_call}, /* with its events */
    {Py_am_await, stream_state_await},
    {Py_tp_methods, stream_state_methods},
    {Py_tp_getset, stream_state_getset},
    {Py_tp_doc, "The data and credits of one stream."},
    {0, NULL},
};

PyType_Spec aio_stream_state_spec = {
    .name = "aiordma._core.StreamState",
    .basicsize = sizeof(StreamState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = stream_state_slots,
};
