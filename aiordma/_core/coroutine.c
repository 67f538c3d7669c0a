/*
 * Coroutine: the coroutine of Connection.send, recv and __anext__.
 *
 * A coroutine of Python has a frame, and the interpreter is entered for it: some 800 instructions
 * of the 6,000 of a message.  Mostly a send or a receive needs no line of Python.  Where it does,
 * the Coroutine goes on with one, by a method of the connection (`_send_in_python` ...), and passes
 * all that is sent or thrown on to it.
 *
 *   FRESH -> a task runs it -> WAITING on a Parked or a Waiting, or in PYTHON -> OVER
 *
 * As with a coroutine of Python, nothing happens before a task runs it.
 */
#include "core.h"

enum { FRESH, WAITING, PYTHON, OVER };

static const char *const names[] = {"send", "recv", "__anext__"};

static PyObject *make(PyObject *state, PyObject *connection, PyObject *data, enum aio_call call)
{
    Coroutine *self = (Coroutine *)PyType_GenericAlloc(aio_coroutine_type, 0);

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

/* A task has left its wait for a message by an exception: the next task may have its message. */
static void leave(Coroutine *self)
{
    PyObject *type, *value, *traceback, *done;

    PyErr_Fetch(&type, &value, &traceback);
    done = PyObject_CallMethodObjArgs(self->connection, aio_name._left, NULL);
    if (!done) /* of a signal's handler: the exception that the task gets tells of the end */
        PyErr_WriteUnraisable((PyObject *)self);
    Py_XDECREF(done);
    PyErr_Restore(type, value, traceback);
}

/* The wait in C is over, with an exception. */
static PySendResult failed(Coroutine *self)
{
    self->stage = OVER;
    if (self->call != AIO_CALL_SEND)
        leave(self);
    return PYGEN_ERROR;
}

/* Go on in Python: with the errno of a send, -1 if none. */
static PySendResult in_python(Coroutine *self, PyObject *code, PyObject **result)
{
    PyObject *connection = self->connection;

    self->stage = PYTHON;
    if (self->call == AIO_CALL_SEND)
        self->inner = PyObject_CallMethodObjArgs(connection, aio_name._send_in_python, self->data,
                                                 code, NULL);
    else if (self->call == AIO_CALL_RECV)
        self->inner = PyObject_CallMethodObjArgs(connection, aio_name._recv_in_python, NULL);
    else
        self->inner = PyObject_CallMethodObjArgs(connection, aio_name._next_in_python, NULL);
    if (!self->inner) {
        self->stage = OVER;
        return PYGEN_ERROR;
    }
    return PyIter_Send(self->inner, Py_None, result);
}

/* The wait in C has ended with `*result`, which is stolen: a message, or the code of a send. */
static PySendResult answered(Coroutine *self, PyObject **result)
{
    PyObject *answer = *result;
    PySendResult sent;

    if (self->call != AIO_CALL_SEND && answer != Py_None) {
        self->stage = OVER;
        return PYGEN_RETURN;
    }
    if (self->call == AIO_CALL_SEND && PyLong_AsLong(answer) == 0) {
        self->stage = OVER;
        *result = Py_NewRef(Py_None);
        Py_DECREF(answer);
        return PYGEN_RETURN;
    }
    *result = NULL;
    sent = in_python(self, answer, result);
    Py_DECREF(answer);
    return sent;
}

/* Run on with a wait in C. */
static PySendResult wait(Coroutine *self, PyObject **result)
{
    PySendResult sent = PyIter_Send(self->inner, Py_None, result);

    if (sent == PYGEN_NEXT)
        return sent;
    replace(&self->inner, NULL);
    return sent == PYGEN_RETURN ? answered(self, result) : failed(self);
}

static PySendResult begin(Coroutine *self, PyObject **result)
{
    MessageState *state = self->state;

    self->stage = WAITING;
    if (self->call == AIO_CALL_SEND) {
        *result = aio_state_send((PyObject *)state, self->data);
        if (!*result)
            return failed(self);
        if (!Py_IS_TYPE(*result, aio_waiting_type))
            return answered(self, result);
        self->inner = *result;
    } else if (state->parked->wakeup.state == AIO_IDLE && !state->state.python) {
        state->parked->taking = 1;
        self->inner = Py_NewRef((PyObject *)state->parked);
    } else {
        return in_python(self, NULL, result);
    }
    return wait(self, result);
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
    PySendResult sent;

    *result = NULL;
    if (!may_run(self))
        return PYGEN_ERROR;
    self->running = 1;
    if (self->stage == FRESH) {
        sent = begin(self, result);
    } else if (self->stage == WAITING) {
        sent = wait(self, result);
    } else {
        sent = PyIter_Send(self->inner, value ? value : Py_None, result);
    }
    self->running = 0;
    if (sent != PYGEN_NEXT) {
        self->stage = OVER;
        replace(&self->inner, NULL);
    }
    return sent;
}

static PyObject *coroutine_next(PyObject *object)
{
    return aio_iterate(object, coroutine_send);
}

static PyObject *coroutine_await(PyObject *object)
{
    if (((Coroutine *)object)->stage != FRESH) {
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
    if (self->stage == WAITING)
        failed(self);
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
    aio_free(object);
}

static PyObject *get_name(PyObject *object, void *Py_UNUSED(unused))
{
    return PyUnicode_FromString(names[(int)((Coroutine *)object)->call]);
}

static PyObject *get_qualname(PyObject *object, void *Py_UNUSED(unused))
{
    return PyUnicode_FromFormat("Connection.%s", names[(int)((Coroutine *)object)->call]);
}

static PyObject *get_running(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(((Coroutine *)object)->running);
}

static PyObject *get_await(PyObject *object, void *Py_UNUSED(unused))
{
    PyObject *inner = ((Coroutine *)object)->inner;

    return Py_NewRef(inner ? inner : Py_None);
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
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef coroutine_getset[] = {
    {"__name__", get_name, NULL, "The method that made it.", NULL},
    {"__qualname__", get_qualname, NULL, "The same, with the class.", NULL},
    {"cr_running", get_running, NULL, "Whether it runs.", NULL},
    {"cr_await", get_await, NULL, "What it waits on, or None.", NULL},
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
