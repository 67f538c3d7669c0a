/*
 * The calls of a program: its sends and receives, and the events that resume its tasks.
 *
 * Connection.send, recv and __anext__ return a Coroutine.  A coroutine of Python has a frame, and
 * the interpreter is entered for it: some 800 instructions of the 6,000 of a message.  Mostly a
 * send or a receive needs no line of Python.  Where it does, the Coroutine goes on with one, by a
 * method of the connection (`_send_in_python` ...), and passes all that is sent or thrown on to it.
 *
 *   FRESH -> a task runs it -> WAITING on a Parked or a Waiting, or in PYTHON -> OVER
 *
 * As with a coroutine of Python, nothing happens before a task runs it.
 */
#include "core.h"

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

/* Sending */

/*
 * After a send with this `code`: the first two in a row are posted at once, so that a lone send
 * neither waits nor pays for a call, and those behind them together.  In a drain that is when the
 * events are told; outside of it, the second has the loop call this object without events at the
 * end of the turn.  `code`, or AIO_RAISED.
 */
static int sent(MessageState *self, int code)
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
            return AIO_RAISED; /* of a signal's handler */
        else                   /* the message is sent, and those that follow are posted at once */
            PyErr_Clear();
        Py_XDECREF(handle);
    }
    return code;
}

PyObject *aio_sent(MessageState *self, int code)
{
    code = sent(self, code);
    return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
}

/* As aio_send, of a list or a tuple. */
static int send_pieces(MessageState *self, PyObject *data, PyObject **waiting)
{
    struct aio_pieces pieces;
    int code = aio_is_elsewhere(self);

    if (code)
        return code < 0 ? AIO_RAISED : -1;
    code = aio_pieces_open(&pieces, data);
    if (code <= 0)
        return code < 0 ? AIO_RAISED : -1;
    code = aio_message_send(&self->state, aio_pieces_bytes(&pieces), pieces.length, 0, 0);
    if (code >= 0 || !aio_may_stand_in_line(&self->state, pieces.length)) {
        aio_pieces_close(&pieces);
        return sent(self, code);
    }
    data = aio_pieces_joined(&pieces); /* less than a slot, which has to wait */
    if (data)
        *waiting = aio_stand_in_line(self, AIO_FRAME_DATA, data, pieces.length, 0, 0);
    Py_XDECREF(data);
    aio_pieces_close(&pieces);
    return *waiting ? 0 : AIO_RAISED;
}

/*
 * A bytearray and a Message take this way as bytes do.  Of other objects Python checks first that
 * they have a buffer, and a contiguous one.
 */
int aio_send(MessageState *self, PyObject *data, PyObject **waiting)
{
    int elsewhere = 1, code;
    const char *start;
    Py_ssize_t length;

    if (PyBytes_CheckExact(data) || PyByteArray_CheckExact(data) ||
        Py_IS_TYPE(data, aio_message_type))
        elsewhere = aio_is_elsewhere(self);
    else if (PyList_CheckExact(data) || PyTuple_CheckExact(data))
        return send_pieces(self, data, waiting);
    if (elsewhere)
        return elsewhere < 0 ? AIO_RAISED : -1;
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
        struct aio_bytes bytes = {{start, (uint64_t)length}, NULL};

        code = aio_message_send(&self->state, bytes, (uint64_t)length, 0, 0);
        if (code >= 0 || !aio_may_stand_in_line(&self->state, (uint64_t)length))
            return sent(self, code);
        *waiting = aio_stand_in_line(self, AIO_FRAME_DATA, data, (uint64_t)length, 0, 0);
        return *waiting ? 0 : AIO_RAISED;
    }
    if (!PyErr_ExceptionMatches(PyExc_ValueError)) /* the message was released */
        return AIO_RAISED;
    PyErr_Clear();
    return -1;
}

/* Receiving */

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
    Message *message =
        (Message *)aio_make_again(&aio_spare_messages, aio_message_type, sizeof(Message));
    const struct aio_arrival *first;

    if (!message)
        return NULL;
    first = &m->arrivals[m->head & m->arrival_mask];
    if (m->head == m->tail || first->large) {
        Py_DECREF((PyObject *)message);
        Py_RETURN_NONE;
    }
    message->imm = aio_imm_object(first);
    if (!message->imm || ((first->more || first->landing) && aio_arrivals_join(self, message))) {
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

/* Coroutine */

enum { FRESH, WAITING, PYTHON, OVER };

static AioSpares spares;

static const char *const names[] = {"send", "recv", "__anext__"};

/*
 * What each call shows as its frame: see loop/coroutines.py.  Debuggers and asyncio read the place
 * of a coroutine from it, and inspect whether a coroutine has ended.
 */
static PyObject *frames[3];

static PyObject *make(PyObject *state, PyObject *connection, PyObject *data, enum aio_call call)
{
    Coroutine *self = (Coroutine *)aio_make_again(&spares, aio_coroutine_type, sizeof(Coroutine));

    if (self) {
        self->state = (MessageState *)Py_NewRef(state);
        self->connection = Py_NewRef(connection);
        self->data = Py_XNewRef(data);
        self->call = (char)call;
    }
    return (PyObject *)self;
}

PyObject *aio_sending(PyObject *state, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "sending(connection, data)");
        return NULL;
    }
    return make(state, args[0], args[1], AIO_CALL_SEND);
}

PyObject *aio_receiving(PyObject *state, PyObject *connection)
{
    return make(state, connection, NULL, AIO_CALL_RECV);
}

PyObject *aio_iterating(PyObject *state, PyObject *connection)
{
    return make(state, connection, NULL, AIO_CALL_NEXT);
}

PyObject *aio_messages(PyObject *state, PyObject *connection)
{
    Messages *self = (Messages *)PyType_GenericAlloc(aio_messages_type, 0);

    if (self) {
        self->state = Py_NewRef(state);
        self->connection = Py_NewRef(connection);
    }
    return (PyObject *)self;
}

/*
 * A task has left its wait for a message by an exception: the next task may have its message.
 *
 * Also of a Coroutine without a reference, whose end it is: no call may take one, not even to
 * report an error, because giving it back would end the Coroutine a second time.
 */
static void leave(Coroutine *self)
{
    PyObject *type, *value, *traceback, *done;

    PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallMethodObjArgs(self->connection, aio_name._left, NULL);
    if (!done) /* of a signal's handler: the exception that the task gets tells of the end */
        PyErr_WriteUnraisable(self->connection);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

/* Go on in Python: of a send with its `code`. */
static PySendResult in_python(Coroutine *self, int code, PyObject **result)
{
    PyObject *connection = self->connection, *number;

    self->stage = PYTHON;
    if (self->call == AIO_CALL_SEND) {
        number = PyLong_FromLong(code);
        if (number)
            self->inner = PyObject_CallMethodObjArgs(connection, aio_name._send_in_python,
                                                     self->data, number, NULL);
        Py_XDECREF(number);
    } else if (self->call == AIO_CALL_RECV) {
        self->inner = PyObject_CallMethodObjArgs(connection, aio_name._recv_in_python, NULL);
    } else {
        self->inner = PyObject_CallMethodObjArgs(connection, aio_name._next_in_python, NULL);
    }
    return self->inner ? PyIter_Send(self->inner, Py_None, result) : PYGEN_ERROR;
}

/* A send has ended with `code`. */
static PySendResult has_sent(Coroutine *self, int code, PyObject **result)
{
    if (code)
        return code == AIO_RAISED ? PYGEN_ERROR : in_python(self, code, result);
    *result = Py_NewRef(Py_None);
    return PYGEN_RETURN;
}

/* Run on with a wait for a slot and a credit. */
static PySendResult wait_in_line(Coroutine *self, PyObject **result)
{
    PySendResult way = aio_waiting_send(self->inner, Py_None, result);
    long code;

    if (way == PYGEN_NEXT)
        return way;
    replace(&self->inner, NULL);
    if (way == PYGEN_ERROR)
        return way;
    code = PyLong_AsLong(*result);
    replace(result, NULL);
    return has_sent(self, (int)code, result);
}

/* Run on with a wait for a message. */
static PySendResult wait_for_message(Coroutine *self, PyObject **result)
{
    PySendResult way = aio_parked_send(self->inner, Py_None, result);

    if (way == PYGEN_NEXT)
        return way;
    replace(&self->inner, NULL);
    if (way == PYGEN_ERROR)
        leave(self);
    else if (*result == Py_None) {
        replace(result, NULL);
        way = in_python(self, 0, result);
    }
    return way;
}

static PySendResult begin(Coroutine *self, PyObject **result)
{
    Parked *parked = self->state->parked;

    self->stage = WAITING;
    if (self->call == AIO_CALL_SEND) {
        int code = aio_send(self->state, self->data, &self->inner);

        return self->inner ? wait_in_line(self, result) : has_sent(self, code, result);
    }
    if (parked->wakeup.state != AIO_IDLE || self->state->state.python)
        return in_python(self, 0, result);
    parked->taking = 1;
    self->inner = Py_NewRef((PyObject *)parked);
    return wait_for_message(self, result);
}

/* Whether it may run: not twice, and not from within. */
static int may_run(Coroutine *self)
{
    if (self->running)
        PyErr_SetString(PyExc_ValueError, "coroutine already executing");
    else if (self->stage == OVER)
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
    return !self->running && self->stage != OVER;
}

static PySendResult coroutine_send(PyObject *object, PyObject *value, PyObject **result)
{
    Coroutine *self = (Coroutine *)object;
    PySendResult way;

    *result = NULL;
    if (!may_run(self))
        return PYGEN_ERROR;
    self->running = 1;
    if (self->stage == FRESH)
        way = begin(self, result);
    else if (self->stage == PYTHON)
        way = PyIter_Send(self->inner, value ? value : Py_None, result);
    else
        way = self->call == AIO_CALL_SEND ? wait_in_line(self, result)
                                          : wait_for_message(self, result);
    self->running = 0;
    if (way != PYGEN_NEXT) {
        self->stage = OVER;
        replace(&self->inner, NULL);
    }
    return way;
}

static PyObject *coroutine_next(PyObject *object)
{
    Coroutine *self = (Coroutine *)object;
    PyObject *result = aio_iterate(object, coroutine_send);

    if (!result && self->stage == FRESH) /* no memory to begin; it was awaited all the same */
        self->stage = OVER;
    return result;
}

static PyObject *coroutine_await(PyObject *object)
{
    int stage = ((Coroutine *)object)->stage;

    if (stage != FRESH && stage != OVER) { /* after OVER, may_run raises */
        PyErr_SetString(PyExc_RuntimeError, "coroutine is being awaited already");
        return NULL;
    }
    return Py_NewRef(object);
}

static PyObject *send_method(PyObject *object, PyObject *value)
{
    PyObject *result, *stop;

    if (value != Py_None && ((Coroutine *)object)->stage == FRESH) {
        PyErr_SetString(PyExc_TypeError, "can't send non-None value to a just-started coroutine");
        return NULL;
    }
    if (coroutine_send(object, value, &result) != PYGEN_RETURN)
        return result;
    stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    Py_DECREF(result);
    if (stop)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    return NULL;
}

static PyObject *throw_method(PyObject *object, PyObject *args)
{
    Coroutine *self = (Coroutine *)object;
    PyObject *type, *value = NULL, *traceback = NULL, *method, *result = NULL;

    if (!PyArg_UnpackTuple(args, "throw", 1, 3, &type, &value, &traceback) || !may_run(self))
        return NULL;
    if (!self->inner) { /* it never began */
        self->stage = OVER;
        if (PyExceptionInstance_Check(type))
            PyErr_SetObject((PyObject *)Py_TYPE(type), type);
        else
            PyErr_SetObject(type, value);
        return NULL;
    }
    self->running = 1;
    method = PyObject_GetAttr(self->inner, aio_name.throw);
    if (method)
        result = PyObject_Call(method, args, NULL);
    Py_XDECREF(method);
    self->running = 0;
    if (result)
        return result;
    replace(&self->inner, NULL);
    if (self->stage == WAITING && self->call != AIO_CALL_SEND)
        leave(self);
    self->stage = OVER;
    return NULL;
}

/* Give up what it waits for; 0, or -1 with the exception of Python code. */
static int end(Coroutine *self)
{
    PyObject *inner = self->inner, *done;
    int received = self->stage == WAITING && self->call != AIO_CALL_SEND;

    self->stage = OVER;
    self->inner = NULL;
    if (!inner)
        return 0;
    done = PyObject_CallMethodObjArgs(inner, aio_name.close, NULL);
    Py_DECREF(inner);
    if (received)
        leave(self);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *close_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (((Coroutine *)object)->running) {
        PyErr_SetString(PyExc_ValueError, "coroutine already executing");
        return NULL;
    }
    return end((Coroutine *)object) ? NULL : Py_NewRef(Py_None);
}

/* The object */

static int coroutine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Coroutine *self = (Coroutine *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->state);
    Py_VISIT(self->connection);
    Py_VISIT(self->data);
    Py_VISIT(self->inner);
    return 0;
}

/* It is dropped before its end, as a coroutine of Python may be. */
static void coroutine_finalize(PyObject *object)
{
    Coroutine *self = (Coroutine *)object;
    PyObject *type, *value, *traceback;
    int failed = 0;

    if (self->stage == OVER)
        return;
    PyErr_Fetch(&type, &value, &traceback);
    if (self->stage == FRESH)
        failed =
            PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine 'Connection.%s' was never awaited",
                             names[(int)self->call]);
    else if (self->stage == WAITING)
        failed = end(self);
    if (failed)
        PyErr_WriteUnraisable(self->connection);
    PyErr_Restore(type, value, traceback);
    self->stage = OVER; /* a coroutine of Python closes itself */
}

static int coroutine_clear(PyObject *object)
{
    Coroutine *self = (Coroutine *)object;

    replace(&self->inner, NULL);
    replace(&self->data, NULL);
    replace(&self->connection, NULL);
    replace((PyObject **)&self->state, NULL);
    return 0;
}

static void coroutine_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    coroutine_finalize(object);
    coroutine_clear(object);
    aio_keep_spare(&spares, object);
}

static PyObject *get_name(PyObject *object, void *Py_UNUSED(unused))
{
    return PyUnicode_FromString(names[(int)((Coroutine *)object)->call]);
}

static PyObject *get_qualname(PyObject *object, void *Py_UNUSED(unused))
{
    return PyUnicode_FromFormat("Connection.%s", names[(int)((Coroutine *)object)->call]);
}

static int is_suspended(const Coroutine *self)
{
    return !self->running && (self->stage == WAITING || self->stage == PYTHON);
}

static PyObject *get_running(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(((Coroutine *)object)->running);
}

static PyObject *get_suspended(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(is_suspended((Coroutine *)object));
}

static PyObject *get_await(PyObject *object, void *Py_UNUSED(unused))
{
    Coroutine *self = (Coroutine *)object;

    return Py_NewRef(self->inner && is_suspended(self) ? self->inner : Py_None);
}

static PyObject *get_frame(PyObject *object, void *Py_UNUSED(unused))
{
    Coroutine *self = (Coroutine *)object;
    PyObject *frame = self->stage == OVER && !self->running ? NULL : frames[(int)self->call];

    return Py_NewRef(frame ? frame : Py_None);
}

static PyObject *get_code(PyObject *object, void *Py_UNUSED(unused))
{
    PyObject *frame = frames[(int)((Coroutine *)object)->call];

    return frame ? PyObject_GetAttrString(frame, "f_code") : Py_NewRef(Py_None);
}

/* Where it was made is not noted. */
static PyObject *get_origin(PyObject *Py_UNUSED(object), void *Py_UNUSED(unused))
{
    Py_RETURN_NONE;
}

static PyObject *get_state(PyObject *object, void *Py_UNUSED(unused))
{
    Coroutine *self = (Coroutine *)object;

    return PyUnicode_FromString(self->running          ? "CORO_RUNNING"
                                : is_suspended(self)   ? "CORO_SUSPENDED"
                                : self->stage == FRESH ? "CORO_CREATED"
                                                       : "CORO_CLOSED");
}

static PyObject *set_frames(PyObject *Py_UNUSED(unused), PyObject *args)
{
    PyObject *given[3];

    if (!PyArg_UnpackTuple(args, "_set_frames", 3, 3, &given[0], &given[1], &given[2]))
        return NULL;
    for (int i = 0; i < 3; i++)
        replace(&frames[i], Py_NewRef(given[i]));
    Py_RETURN_NONE;
}

static PyObject *coroutine_repr(PyObject *object)
{
    return PyUnicode_FromFormat("<coroutine object Connection.%s at %p>",
                                names[(int)((Coroutine *)object)->call], (void *)object);
}

static PyMethodDef coroutine_methods[] = {
    {"send", send_method, METH_O, "Run on, with None; StopIteration has the result."},
    {"throw", throw_method, METH_VARARGS, "Run on with an exception."},
    {"close", close_method, METH_NOARGS, "End the wait."},
    {"_set_frames", set_frames, METH_VARARGS | METH_STATIC,
     "Set what `cr_frame` is of send, recv and __anext__."},
    {NULL, NULL, 0, NULL},
};

/* All that a coroutine of Python has; cr_state as of 3.15. */
static PyGetSetDef coroutine_getset[] = {
    {"__name__", get_name, NULL, "The method that made it.", NULL},
    {"__qualname__", get_qualname, NULL, "The same, with the class.", NULL},
    {"cr_await", get_await, NULL, "What it waits on, or None.", NULL},
    {"cr_code", get_code, NULL, "The code of its frame: its name, file and line.", NULL},
    {"cr_frame", get_frame, NULL, "A frame without variables, until it is over; then None.", NULL},
    {"cr_origin", get_origin, NULL, "None.", NULL},
    {"cr_running", get_running, NULL, "Whether it runs.", NULL},
    {"cr_state", get_state, NULL, "As inspect.getcoroutinestate tells.", NULL},
    {"cr_suspended", get_suspended, NULL, "Whether it waits.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot coroutine_slots[] = {
    {Py_tp_traverse, coroutine_traverse},
    {Py_tp_clear, coroutine_clear},
    {Py_tp_dealloc, coroutine_dealloc},
    {Py_tp_finalize, coroutine_finalize},
    {Py_tp_repr, coroutine_repr},
    {Py_am_await, coroutine_await},
    {Py_am_send, coroutine_send},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, coroutine_next},
    {Py_tp_methods, coroutine_methods},
    {Py_tp_getset, coroutine_getset},
    {Py_tp_doc, "A send or a receive of a connection, awaited by one task."},
    {0, NULL},
};

PyType_Spec aio_coroutine_spec = {
    .name = "aiordma._core.Coroutine",
    .basicsize = sizeof(Coroutine),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = coroutine_slots,
};

/* Messages: the iterator of `async for`, which calls no method of Python for each message. */

static int messages_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Messages *)object)->state);
    Py_VISIT(((Messages *)object)->connection);
    return 0;
}

static int messages_clear(PyObject *object)
{
    replace(&((Messages *)object)->state, NULL);
    replace(&((Messages *)object)->connection, NULL);
    return 0;
}

static void messages_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    messages_clear(object);
    aio_free(object);
}

static PyObject *messages_next(PyObject *object)
{
    return aio_iterating(((Messages *)object)->state, ((Messages *)object)->connection);
}

static PyType_Slot messages_slots[] = {
    {Py_tp_traverse, messages_traverse},
    {Py_tp_clear, messages_clear},
    {Py_tp_dealloc, messages_dealloc},
    {Py_am_aiter, PyObject_SelfIter},
    {Py_am_anext, messages_next},
    {Py_tp_doc, "The messages of a connection, for `async for`."},
    {0, NULL},
};

PyType_Spec aio_messages_spec = {
    .name = "aiordma._core.Messages",
    .basicsize = sizeof(Messages),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = messages_slots,
};

/* Events */

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
 * Slots or credits have come.  Python is called if the line has begun to lack a slot, and when it
 * is empty again.  0; -1 with the exception of a task, -2 with that of the handler.
 */
static int give_room(MessageState *self)
{
    const struct aio_message_state *m = &self->state;

    if (aio_grant(self))
        return -1;
    if (self->soon && self->first && aio_message_has_room(m))
        later(self, AIO_EVENT_ROOM); /* for tasks that come while those are on their way */
    if ((m->slot_awaited ? !m->queued : aio_message_lacks_slot(m)) && handle(self, AIO_EVENT_ROOM))
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
        int woken = aio_wake_or_soon(&self->parked->wakeup, self->soon);

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
