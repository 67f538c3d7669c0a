/*
 * Coroutine: what Connection.send, recv, recv_into and __anext__ return, a coroutine that is
 * written in C.
 *
 * A coroutine of Python has a frame, for which the interpreter is entered: some 800 instructions of
 * the 6,000 of a message.  Most sends and receives need no line of Python.  For those that do, a
 * method of the connection (`_send_in_python` ...) makes a coroutine of Python, to which everything
 * that is sent or thrown into this one is passed on.
 *
 *   stage     what it waits on (`inner`)                  left by
 *   FRESH     nothing: no task has run it yet             the first send(None)
 *   WAITING   a QueuedSend (send), a ReceiveWakeup        the end of the wait
 *             (recv, recv_into, __anext__), a Call (request)
 *   PYTHON    a coroutine of Python, which may wait on    its end
 *             one of these itself
 *   OVER      nothing
 *
 * As with a coroutine of Python, nothing happens before a task runs it.
 *
 * recv_into keeps its buffer exported from its first step on (`into`), because a bytearray could be
 * resized by any other code, that of the collector included.  Where it goes on in Python, the
 * export ends when Python has one of its own.
 *
 * Three objects take part in a wait: the call, which the task awaits (Coroutine); the place of a
 * send in the line (QueuedSend, line.c), or what the one receiver of a connection waits on
 * (ReceiveWakeup, wait.c); and in each of these two a Wakeup, which stands for the future that
 * asyncio's Task expects.  There are these combinations and no others; IDLE to DONE are the states
 * of the Wakeup:
 *
 *   QueuedSend       in line      meaning                          next
 *   IDLE             yes          made; no task has parked         its first step sends, or waits
 *   WAITING          yes, owned   a task is parked                 a wake: READY; else it leaves
 *   READY            yes          resumed by a drain or the loop   its step sends, or waits anew
 *   READY, DONE;     no           canceled, or the time is over    its step raises the error
 *     with an error
 *   IDLE             no           it has sent, or was given up     nothing: a step is an error
 *
 *   ReceiveWakeup    taking       meaning                          next
 *   IDLE             no           no task waits                    a call sets `taking`
 *   IDLE             yes          a call has its first step        takes a message, or waits
 *   WAITING          yes          a task waits for a message       a wake, or is broken off
 *   READY            yes          a message may be there           takes it, or goes on in Python
 *   WAITING, READY   no           a task of Python waits           its wait ends with None
 */
#include <math.h>

#include "core.h"

/* Coroutine */

enum { FRESH, WAITING, PYTHON, OVER };

static AioSpares spares;

static const char *const names[AIO_CALL_COUNT] = {"send", "recv", "__anext__", "request",
                                                  "recv_into"};

/*
 * What each call shows as its frame: see loop/coroutines.py.  Debuggers and asyncio read the place
 * of a coroutine from it, and inspect whether a coroutine has ended.
 */
static PyObject *frames[AIO_CALL_COUNT];

static PyObject *coroutine_make(PyObject *state, PyObject *connection, PyObject *data,
                                PyObject *imm, enum aio_call call)
{
    Coroutine *self = (Coroutine *)aio_make_again(&spares, aio_coroutine_type, sizeof(Coroutine));

    if (self) {
        self->state = (MessageState *)Py_XNewRef(state);
        self->connection = Py_NewRef(connection);
        self->data = Py_XNewRef(data);
        self->imm = Py_XNewRef(imm);
        self->call = (char)call;
    }
    return (PyObject *)self;
}

PyObject *aio_sending(PyObject *state, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "sending(connection, data, imm)");
        return NULL;
    }
    return coroutine_make(state, args[0], args[1], args[2], AIO_CALL_SEND);
}

PyObject *aio_receiving(PyObject *state, PyObject *connection)
{
    return coroutine_make(state, connection, NULL, NULL, AIO_CALL_RECV);
}

PyObject *aio_receiving_into(PyObject *state, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "receiving_into(connection, buffer)");
        return NULL;
    }
    return coroutine_make(state, args[0], args[1], NULL, AIO_CALL_INTO);
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
 * A task has left its wait for a message by an exception: its message is for the next task.
 *
 * This is also called in the deallocation of a Coroutine, which has no reference left: nothing here
 * may take one, not even to report an error, because to release it would deallocate it again.
 */
static void receive_abandoned(Coroutine *self)
{
    PyObject *type, *value, *traceback, *done;

    PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallMethodObjArgs(self->connection, aio_name._receive_abandoned, NULL);
    if (!done) /* a signal handler has raised; the task's own exception tells of the end */
        PyErr_WriteUnraisable(self->connection);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

/* As receive_abandoned, for the task of a request: the peer is told. */
static void call_abandoned(Coroutine *self, PyObject *call)
{
    PyObject *type, *value, *traceback, *done;

    PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallMethodObjArgs(self->connection, aio_name._call_abandoned, call, NULL);
    if (!done)
        PyErr_WriteUnraisable(self->connection);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

/* The task has left its wait on `inner` by an exception. */
static void wait_abandoned(Coroutine *self, PyObject *inner)
{
    if (self->call == AIO_CALL_REQUEST)
        call_abandoned(self, inner);
    else if (self->call != AIO_CALL_SEND)
        receive_abandoned(self);
}

/*
 * Export the bytes of the program's buffer: AIO_OK; AIO_FOR_PYTHON, which refuses it or looks for
 * its bytes in another way; or AIO_RAISED.  A memoryview is exported by another one, so that the
 * program can release its own.
 */
static int into_open(Coroutine *self)
{
    PyObject *exporter = PyMemoryView_Check(self->data) ? PyMemoryView_FromObject(self->data)
                                                        : Py_NewRef(self->data);
    int failed =
        !exporter || PyObject_GetBuffer(exporter, &self->into, PyBUF_CONTIG | PyBUF_FORMAT);

    Py_XDECREF(exporter);
    if (failed) {
        self->into.obj = NULL;
        return aio_is_refusal() ? AIO_FOR_PYTHON : AIO_RAISED;
    }
    return self->into.obj && self->into.len && !aio_is_for_python(self->data, &self->into)
               ? AIO_OK
               : AIO_FOR_PYTHON;
}

/* End the export, if there is one; this may run code of the exporter. */
static void into_close(Coroutine *self)
{
    PyObject *type, *value, *traceback;

    if (!self->into.obj)
        return;
    if (self->state->into == &self->into)
        self->state->into = NULL;
    PyErr_Fetch(&type, &value, &traceback);
    PyBuffer_Release(&self->into);
    PyErr_Restore(type, value, traceback);
}

/* Go on in Python; `code`: the result of a send, or whether a receive has waited. */
static PySendResult go_on_in_python(Coroutine *self, int code, PyObject **result)
{
    PyObject *connection = self->connection, *number, *waited = code ? Py_True : Py_False;

    self->stage = PYTHON;
    if (self->call == AIO_CALL_SEND) {
        number = PyLong_FromLong(code);
        if (number)
            self->inner = PyObject_CallMethodObjArgs(connection, aio_name._send_in_python,
                                                     self->data, self->imm, number, NULL);
        Py_XDECREF(number);
    } else if (self->call == AIO_CALL_REQUEST) {
        number = PyLong_FromLong(code);
        if (number)
            self->inner = PyObject_CallMethodObjArgs(connection, aio_name._request_in_python,
                                                     self->data, self->imm,
                                                     self->tell ? Py_True : Py_False, number, NULL);
        Py_XDECREF(number);
    } else if (self->call == AIO_CALL_INTO) {
        self->inner = PyObject_CallMethodObjArgs(connection, aio_name._recv_into_in_python,
                                                 self->data, waited, NULL);
    } else if (self->call == AIO_CALL_RECV) {
        self->inner =
            PyObject_CallMethodObjArgs(connection, aio_name._recv_in_python, waited, NULL);
    } else {
        self->inner =
            PyObject_CallMethodObjArgs(connection, aio_name._next_in_python, waited, NULL);
    }
    return self->inner ? PyIter_Send(self->inner, Py_None, result) : PYGEN_ERROR;
}

/* A send has ended with `code`. */
static PySendResult send_has_ended(Coroutine *self, int code, PyObject **result)
{
    if (code)
        return code == AIO_RAISED ? PYGEN_ERROR : go_on_in_python(self, code, result);
    *result = Py_NewRef(Py_None);
    return PYGEN_RETURN;
}

/* Begin, or go on with, a wait for a slot and a credit. */
static PySendResult wait_in_line(Coroutine *self, PyObject **result)
{
    PySendResult way = aio_queued_send_step(self->inner, Py_None, result);
    long code;

    if (way == PYGEN_NEXT)
        return way;
    replace(&self->inner, NULL);
    if (way == PYGEN_ERROR)
        return way;
    code = PyLong_AsLong(*result);
    replace(result, NULL);
    return send_has_ended(self, (int)code, result);
}

/* Begin a wait for a message, or go on with it (`waited`). */
static PySendResult wait_for_message(Coroutine *self, int waited, PyObject **result)
{
    PySendResult way = aio_receive_wakeup_step(self->inner, Py_None, result);

    if (way == PYGEN_NEXT)
        return way;
    replace(&self->inner, NULL);
    if (way == PYGEN_ERROR)
        receive_abandoned(self);
    else if (*result == Py_None) {
        replace(result, NULL);
        way = go_on_in_python(self, waited, result);
    }
    return way;
}

/* Wait for the answer to a request that was sent. */
static PySendResult wait_for_answer(Coroutine *self, PyObject **result)
{
    Call *call = (Call *)self->inner;
    double left = INFINITY;
    int code = call->admitted ? aio_call_go(self->table, call, &left) : AIO_OK;
    PySendResult way;

    if (code && code != AIO_RAISED && left < INFINITY) {
        replace(&self->imm, PyFloat_FromDouble(left > 0 ? left : 0));
        if (!self->imm)
            code = AIO_RAISED;
    }
    if (code && code != AIO_RAISED) {
        replace(&self->inner, NULL);
        return go_on_in_python(self, code, result);
    }
    way = code ? PYGEN_ERROR : aio_call_step(self->inner, Py_None, result);
    if (way == PYGEN_ERROR)
        call_abandoned(self, self->inner);
    return way;
}

static PySendResult request_begin(Coroutine *self, PyObject **result)
{
    double timeout = self->imm == Py_None ? INFINITY : PyFloat_AsDouble(self->imm);
    int code = PyErr_Occurred()
                   ? AIO_RAISED
                   : aio_call_begin(self->table, self->data, timeout, self->tell, &self->inner);

    if (!code)
        return wait_for_answer(self, result);
    if (code != AIO_RAISED)
        return go_on_in_python(self, code, result);
    if (self->inner)
        call_abandoned(self, self->inner);
    return PYGEN_ERROR;
}

static PySendResult coroutine_begin(Coroutine *self, PyObject **result)
{
    ReceiveWakeup *parked;
    int code;

    self->stage = WAITING;
    if (self->call == AIO_CALL_REQUEST)
        return request_begin(self, result);
    parked = self->state->receive_wakeup;
    if (self->call == AIO_CALL_SEND) {
        code = aio_send(self->state, self->data, self->imm, &self->inner);
        return self->inner ? wait_in_line(self, result) : send_has_ended(self, code, result);
    }
    code = self->call == AIO_CALL_INTO ? into_open(self) : AIO_OK;
    if (code == AIO_RAISED)
        return PYGEN_ERROR;
    /* `into`: this call comes from within one that is copying a message. */
    if (code || parked->wakeup.state != AIO_IDLE || self->state->into ||
        connection_is_delegated(self->state->connection))
        return go_on_in_python(self, 0, result);
    if (self->call == AIO_CALL_INTO) {
        self->state->into = &self->into;
        self->state->has_memory = 1;
    }
    parked->taking = 1;
    self->inner = Py_NewRef((PyObject *)parked);
    return wait_for_message(self, 0, result);
}

/* Whether it may run: not twice, and not from within. */
static int coroutine_may_run(Coroutine *self)
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
    if (!coroutine_may_run(self))
        return PYGEN_ERROR;
    self->running = 1;
    if (self->stage == FRESH)
        way = coroutine_begin(self, result);
    else if (self->stage == PYTHON)
        way = PyIter_Send(self->inner, value ? value : Py_None, result);
    else if (self->call == AIO_CALL_REQUEST)
        way = wait_for_answer(self, result);
    else
        way = self->call == AIO_CALL_SEND ? wait_in_line(self, result)
                                          : wait_for_message(self, 1, result);
    if (self->into.obj && (way != PYGEN_NEXT || self->stage == PYTHON))
        into_close(self);
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

    if (!result && self->stage == FRESH) /* there was no memory to begin, but it was awaited */
        self->stage = OVER;
    return result;
}

static PyObject *coroutine_await(PyObject *object)
{
    int stage = ((Coroutine *)object)->stage;

    if (stage != FRESH && stage != OVER) { /* of OVER, coroutine_may_run tells */
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

    if (!PyArg_UnpackTuple(args, "throw", 1, 3, &type, &value, &traceback) ||
        !coroutine_may_run(self))
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
    if (!result)
        into_close(self);
    self->running = 0;
    if (result)
        return result;
    if (self->stage == WAITING)
        wait_abandoned(self, self->inner);
    replace(&self->inner, NULL);
    self->stage = OVER;
    return NULL;
}

/* Give up what it waits for; 0, or -1 with the exception of Python code. */
static int coroutine_end(Coroutine *self)
{
    PyObject *inner = self->inner, *done;
    int waited = self->stage == WAITING;

    self->stage = OVER;
    self->inner = NULL;
    if (!inner)
        return 0;
    done = PyObject_CallMethodObjArgs(inner, aio_name.close, NULL);
    into_close(self);
    if (waited)
        wait_abandoned(self, inner);
    Py_DECREF(inner);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static PyObject *close_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (((Coroutine *)object)->running) {
        PyErr_SetString(PyExc_ValueError, "coroutine already executing");
        return NULL;
    }
    return coroutine_end((Coroutine *)object) ? NULL : Py_NewRef(Py_None);
}

/* The object */

static int coroutine_traverse(PyObject *object, visitproc visit, void *arg)
{
    Coroutine *self = (Coroutine *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->state);
    Py_VISIT((PyObject *)self->table);
    Py_VISIT(self->connection);
    Py_VISIT(self->data);
    Py_VISIT(self->imm);
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
        failed = coroutine_end(self);
    if (failed)
        PyErr_WriteUnraisable(self->connection);
    PyErr_Restore(type, value, traceback);
    self->stage = OVER; /* a coroutine of Python closes itself */
}

static int coroutine_clear(PyObject *object)
{
    Coroutine *self = (Coroutine *)object;

    replace(&self->inner, NULL);
    into_close(self);
    replace(&self->data, NULL);
    replace(&self->imm, NULL);
    replace(&self->connection, NULL);
    replace((PyObject **)&self->state, NULL);
    replace((PyObject **)&self->table, NULL);
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
    if (PyTuple_Size(args) != AIO_CALL_COUNT) {
        PyErr_SetString(PyExc_TypeError, "a frame for each kind of call is needed");
        return NULL;
    }
    for (int i = 0; i < AIO_CALL_COUNT; i++)
        replace(&frames[i], Py_NewRef(PyTuple_GetItem(args, i)));
    Py_RETURN_NONE;
}

/*
 * requesting(table, owner, data, timeout, tell): the coroutine of Connection.request; the owner
 * goes on in Python; timeout: seconds or None; tell: whether the peer is told them.
 */
static PyObject *coroutine_requesting(PyObject *Py_UNUSED(unused), PyObject *const *args,
                                      Py_ssize_t count)
{
    Coroutine *self;

    if (count != 5 || !Py_IS_TYPE(args[0], aio_call_table_type)) {
        PyErr_SetString(PyExc_TypeError, "requesting(table, owner, data, timeout, tell)");
        return NULL;
    }
    self = (Coroutine *)coroutine_make(NULL, args[1], args[2], args[3], AIO_CALL_REQUEST);
    if (self) {
        self->table = (CallTable *)Py_NewRef(args[0]);
        self->tell = args[4] == Py_True;
    }
    return (PyObject *)self;
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
    {"requesting", (PyCFunction)(void (*)(void))coroutine_requesting, METH_FASTCALL | METH_STATIC,
     "That of Connection.request: table, owner, data, seconds or None, whether to tell them."},
    {"_set_frames", set_frames, METH_VARARGS | METH_STATIC,
     "Set what `cr_frame` is of send, recv, __anext__, request and recv_into."},
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
    Messages *self = (Messages *)object;

    if (!self->state) { /* the collector has cleared it */
        PyErr_SetString(PyExc_RuntimeError, "the connection is gone");
        return NULL;
    }
    return coroutine_make(self->state, self->connection, NULL, NULL, AIO_CALL_NEXT);
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
