/*
 * The one way of a message from Python to the adapter.  `aio_send` takes one buffer, or a list or
 * tuple of them, with an immediate or without.  connection_send decides how it goes; where there is
 * no room for it, its task joins the line (line.c), and a message that is too large for slots is
 * announced by Python.
 */
#include "core.h"

struct aio_turn aio_turn;

/*
 * Whether the caller is not in the connection's loop, but in another thread, in another loop, or in
 * none; -1 with an exception, as `is_running()` is Python code, in which a signal's handler may
 * raise.
 *
 * asyncio's get_running_loop() would do, but asks the kernel for the process up to Python 3.11.  A
 * task that is resumed by a MessageState of its loop is known to be there without any call, because
 * no other loop can run inside that turn: `is_running()` takes 400 instructions, and a message
 * would pay for it twice.
 */
int aio_is_elsewhere(const MessageState *self)
{
    unsigned long thread = PyThread_get_thread_ident();
    PyObject *loop = self->receive_wakeup->wakeup.loop, *running;

    if (thread != self->thread)
        return 1;
    if (thread == aio_turn.thread && loop == aio_turn.loop)
        return 0;
    running = PyObject_CallMethodObjArgs(loop, aio_name.is_running, NULL);
    Py_XDECREF(running);
    return running ? running != Py_True : -1;
}

int aio_immediate(PyObject *object, uint32_t *imm)
{
    unsigned long number;

    *imm = 0;
    if (object == Py_None)
        return 0;
    if (!PyLong_CheckExact(object))
        return AIO_FOR_PYTHON;
    number = PyLong_AsUnsignedLong(object);
    if (number == (unsigned long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError))
            return AIO_RAISED;
        PyErr_Clear();
        return AIO_FOR_PYTHON;
    }
    *imm = (uint32_t)number;
    return number > UINT32_MAX ? AIO_FOR_PYTHON : 1;
}

int aio_after_send(MessageState *self, int code)
{
    PyObject *handle;

    if (code || !connection_needs_turn(self->connection))
        return code;
    handle = PyObject_CallMethod(self->receive_wakeup->wakeup.loop, "call_soon", "OI",
                                 (PyObject *)self, 0);
    if (handle)
        connection_expect_turn(self->connection);
    else if (!PyErr_ExceptionMatches(PyExc_RuntimeError) && /* the loop is closed */
             !PyErr_ExceptionMatches(PyExc_MemoryError))
        return AIO_RAISED; /* a signal handler has raised an exception */
    else                   /* the message is sent, and those that follow are posted at once */
        PyErr_Clear();
    Py_XDECREF(handle);
    return 0;
}

/*
 * Have a message of one frame wait in line.  Pieces are joined first, so that the QueuedSend has a
 * single buffer to keep exported.
 */
static int message_join_line(MessageState *self, PyObject *data, const struct aio_pieces *pieces,
                             int has_imm, uint32_t imm, PyObject **waiting)
{
    int several = PyList_CheckExact(data) || PyTuple_CheckExact(data);
    PyObject *bytes = several ? aio_pieces_joined(pieces) : Py_NewRef(data);

    if (bytes)
        *waiting = aio_line_join(self, AIO_FRAME_DATA, bytes, pieces->length, has_imm, imm);
    Py_XDECREF(bytes);
    return *waiting ? AIO_OK : AIO_RAISED;
}

int aio_send(MessageState *self, PyObject *data, PyObject *immediate, PyObject **waiting)
{
    struct aio_pieces pieces;
    uint32_t imm;
    int has_imm = aio_immediate(immediate, &imm), code;

    if (has_imm < 0)
        return has_imm;
    code = aio_is_elsewhere(self);
    if (code)
        return code < 0 ? AIO_RAISED : AIO_FOR_PYTHON;
    code = aio_pieces_open(&pieces, data);
    if (code)
        return code;
    code =
        connection_send(self->connection, aio_pieces_bytes(&pieces), pieces.length, has_imm, imm);
    if (code == AIO_NO_ROOM && waiting)
        code = message_join_line(self, data, &pieces, has_imm, imm, waiting);
    else
        code = aio_after_send(self, code);
    aio_pieces_close(&pieces);
    return code;
}

/*
 * send_first(data, imm): as send, for the task whose `wait_room` has ended in this very step: tasks
 * that wait in line are behind it.
 */
PyObject *aio_send_first(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    MessageState *self = (MessageState *)object;
    struct aio_pieces pieces;
    uint32_t imm;
    int has_imm, code;

    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "send_first(data, imm)");
        return NULL;
    }
    has_imm = code = aio_immediate(args[1], &imm);
    if (code >= 0)
        code = aio_pieces_open(&pieces, args[0]);
    if (!code) {
        code = connection_send_first(self->connection, aio_pieces_bytes(&pieces), pieces.length,
                                     has_imm, imm);
        code = aio_after_send(self, code);
        aio_pieces_close(&pieces);
    }
    return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
}

/*
 * Send a message over one connection of a list.  The loop of `*inside` is known to run here; that
 * of this connection, too, if it is the same.
 */
static int send_one(MessageState *self, MessageState **inside, PyObject *data, int has_imm,
                    uint32_t imm)
{
    struct aio_pieces pieces;
    int code = 0;

    if (!*inside || self->thread != (*inside)->thread ||
        self->receive_wakeup->wakeup.loop != (*inside)->receive_wakeup->wakeup.loop)
        code = aio_is_elsewhere(self);
    if (code)
        return code < 0 ? AIO_RAISED : AIO_FOR_PYTHON;
    *inside = self;
    code = aio_pieces_open(&pieces, data);
    if (code)
        return code;
    code =
        connection_send(self->connection, aio_pieces_bytes(&pieces), pieces.length, has_imm, imm);
    aio_pieces_close(&pieces);
    return aio_after_send(self, code);
}

/* Note the number of a connection in the list, and why the message did not go. */
static int refusal_note(PyObject **refusals, Py_ssize_t number, int code)
{
    PyObject *pair;
    int failed;

    if (!*refusals && !(*refusals = PyList_New(0)))
        return AIO_RAISED;
    pair = Py_BuildValue("(ni)", number, code);
    failed = !pair || PyList_Append(*refusals, pair);
    Py_XDECREF(pair);
    return failed ? AIO_RAISED : 0;
}

/*
 * send_each(states, data, imm): send one message over each connection of a tuple, now or not at
 * all.  None if it went over all; else a list of pairs, for each over which it did not: its number
 * in the tuple, and what `send` would have returned.
 */
PyObject *aio_send_each(PyObject *Py_UNUSED(unused), PyObject *const *args, Py_ssize_t count)
{
    PyObject *refusals = NULL;
    MessageState *inside = NULL;
    uint32_t imm;
    int has_imm, code = 0;

    if (count != 3 || !PyTuple_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "send_each(states, data, imm)");
        return NULL;
    }
    has_imm = aio_immediate(args[2], &imm);
    if (has_imm == AIO_RAISED)
        return NULL;
    for (Py_ssize_t i = 0; !code && i < PyTuple_Size(args[0]); i++) {
        PyObject *state = PyTuple_GetItem(args[0], i);

        if (!Py_IS_TYPE(state, aio_message_state_type)) {
            PyErr_SetString(PyExc_TypeError, "no MessageState");
            code = AIO_RAISED;
            break;
        }
        code =
            has_imm < 0 ? has_imm : send_one((MessageState *)state, &inside, args[1], has_imm, imm);
        if (code && code != AIO_RAISED)
            code = refusal_note(&refusals, i, code);
    }
    if (code) {
        Py_XDECREF(refusals);
        return NULL;
    }
    return refusals ? refusals : Py_NewRef(Py_None);
}

/*
 * Send a frame that fits into a slot, or have it wait in line, which is AIO_OK with a QueuedSend in
 * `queued`: 0, an errno, or AIO_FOR_PYTHON, and nothing has changed; or AIO_RAISED, and it is sent.
 */
int aio_send_or_queue(MessageState *self, const struct aio_bytes *frame, uint64_t length,
                      QueuedSend **queued)
{
    struct aio_bytes from = *frame;
    int code = connection_send(self->connection, *frame, length, 0, 0);
    PyObject *joined;

    if (code != AIO_NO_ROOM)
        return aio_after_send(self, code);
    joined = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)length);
    if (joined) {
        aio_gather(&from, PyBytes_AsString(joined), length);
        *queued = (QueuedSend *)aio_line_join(self, AIO_FRAME_DATA, joined, length, 0, 0);
        Py_DECREF(joined);
    }
    if (!*queued)
        PyErr_Clear(); /* Python meets it, too */
    return *queued ? AIO_OK : AIO_FOR_PYTHON;
}

/* send(data, imm): send now or not at all: as aio_send without a place for a QueuedSend. */
PyObject *aio_send_method(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    int code;

    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "send(data, imm)");
        return NULL;
    }
    code = aio_send((MessageState *)object, args[0], args[1], NULL);
    return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
}

/*
 * send_in_turn(kind, data, argument, imm): send a frame now, if there is room and no task is in
 * line: 0 or an errno.  Otherwise join the line: a QueuedSend, whose wait ends with that result.
 * The caller has a timer that bounds the waits in line (aio_line_expire).
 */
PyObject *aio_send_in_turn(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    struct aio_connection *c = self->connection;
    unsigned long long argument;
    unsigned int kind;
    PyObject *data, *immediate;
    Py_buffer bytes;
    uint32_t imm;
    int has_imm, fits, code = AIO_NO_ROOM;

    if (!PyArg_ParseTuple(args, "IOKO", &kind, &data, &argument, &immediate))
        return NULL;
    has_imm = aio_immediate(immediate, &imm);
    if (has_imm == AIO_FOR_PYTHON)
        PyErr_SetString(PyExc_ValueError, "no immediate");
    if (has_imm < 0 || PyObject_GetBuffer(data, &bytes, PyBUF_SIMPLE))
        return NULL;
    connection_set_watched(c, 1);
    fits = bytes.len <= connection_eager_size(c);
    if (fits && !connection_queued(c) && !connection_lacks(c))
        code = connection_send_frame(c, (enum aio_frame_kind)kind, bytes.buf, (uint64_t)bytes.len,
                                     argument, has_imm, imm);
    PyBuffer_Release(&bytes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "more bytes than fit into a slot");
        return NULL;
    }
    if (code == AIO_NO_ROOM)
        return aio_line_join(self, (enum aio_frame_kind)kind, data, argument, has_imm, imm);
    code = aio_after_send(self, code);
    return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
}
