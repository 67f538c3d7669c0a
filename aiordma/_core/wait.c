/*
 * Wakeup: a task waits on it, and is resumed without a turn of the loop in between.
 *
 * A future resumes its task by loop.call_soon, which costs one more turn, and in it one more system
 * call that asks the kernel for events.  But the loop calls the drain of a completion channel while
 * no task is running, so that the drain can resume the task at once.  One task at a time waits on a
 * Wakeup, again and again, and nothing is allocated for a wait.
 *
 * To asyncio it is a future.  A task recognizes it by _asyncio_future_blocking, compares _loop, and
 * calls add_done_callback, cancel and result; it has nothing else of a future.  (It has no
 * get_loop(), whose call would cost more than the attribute.)
 *
 *   state     what leads on                                          to
 *   IDLE      a task awaits it (aio_wakeup_next)                     WAITING
 *   WAITING   a wake (aio_wake, aio_wake_soon), or cancel()          READY
 *   READY     the task runs: the wait ends, with `error` if set      IDLE
 *   WAITING, READY   throw() or close(): the wait is broken off      IDLE
 *   IDLE      it ends before a task awaits it (operation.c, line.c)  DONE
 *   DONE      a task awaits it: the wait ends at once                IDLE
 *
 * A wake by the drain runs the task at once.  A cancellation comes from another task, and is
 * delivered by a turn of the loop, as a future's is.
 *
 * What a wait is for is no business of this file.  It is told by functions: `on_broken_off` of a
 * Wakeup, and of a ReceiveWakeup, whose wait ends with an object, `take` and `gave_up`.
 */
#include "core.h"

/*
 * `ended` is a future of asyncio's that has ended, and is given to the callback of each task that
 * is woken.  From a future of this type the task reads the result directly; from any other object
 * by a call of its method, which takes 1,000 instructions.  It does not compare the future with the
 * object that it waits on.
 */
static PyObject *ended, *cancelled_error;

/* End the Spin of a wait.  `answered`: whether the wait ended with what it was for. */
static void wakeup_end_spin(Wakeup *self, int answered)
{
    if (self->spin && self->state == AIO_WAITING)
        aio_spin_end(self, answered);
}

void aio_wakeup_forget(Wakeup *self)
{
    wakeup_end_spin(self, 0);
    Py_CLEAR(self->callback);
    Py_CLEAR(self->context);
    Py_CLEAR(self->error);
    self->state = AIO_IDLE;
}

static PyObject *wakeup_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"loop", NULL};
    PyObject *loop, *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &loop))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (object)
        ((Wakeup *)object)->loop = Py_NewRef(loop);
    return object;
}

static int wakeup_traverse(PyObject *object, visitproc visit, void *arg)
{
    Wakeup *self = (Wakeup *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->loop);
    Py_VISIT(self->callback);
    Py_VISIT(self->context);
    Py_VISIT(self->error);
    Py_VISIT(self->spin);
    return 0;
}

static int wakeup_clear(PyObject *object)
{
    aio_wakeup_forget((Wakeup *)object);
    Py_CLEAR(((Wakeup *)object)->spin);
    Py_CLEAR(((Wakeup *)object)->loop);
    return 0;
}

static void wakeup_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    wakeup_clear(object);
    aio_free(object);
}

/* The awaiting side. */

PyObject *aio_wakeup_await(PyObject *object)
{
    char state = ((Wakeup *)object)->state;

    if (state != AIO_IDLE && state != AIO_DONE) {
        PyErr_SetString(PyExc_RuntimeError, "another task waits on this already");
        return NULL;
    }
    Py_INCREF(object);
    return object;
}

/* End the wait, with its error if there is one.  Always NULL, which without an error is None. */
static PyObject *wakeup_end(Wakeup *self)
{
    PyObject *error = self->error;

    self->error = NULL;
    aio_wakeup_forget(self);
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *aio_wakeup_next(PyObject *object)
{
    Wakeup *self = (Wakeup *)object;

    if (self->state == AIO_READY || self->state == AIO_DONE)
        return wakeup_end(self);
    if (self->state == AIO_WAITING) {
        /* The task was resumed by neither a wake nor throw(), which is a misuse. */
        aio_wakeup_forget(self);
        PyErr_SetString(PyExc_RuntimeError, "the wait was not ended by wake()");
        return NULL;
    }
    if (self->spin && aio_spin_begin(self))
        return NULL; /* a signal handler has raised an exception */
    self->state = AIO_WAITING;
    self->blocking = 1;
    Py_INCREF(object);
    return object;
}

static PySendResult wakeup_send(PyObject *object, PyObject *Py_UNUSED(value), PyObject **result)
{
    *result = aio_wakeup_next(object);
    if (*result)
        return PYGEN_NEXT;
    if (PyErr_Occurred())
        return PYGEN_ERROR;
    Py_INCREF(Py_None);
    *result = Py_None;
    return PYGEN_RETURN;
}

/* Break the wait off, and tell its user. */
static void wakeup_break_off(Wakeup *self)
{
    aio_wakeup_forget(self);
    if (self->on_broken_off)
        self->on_broken_off(self, AIO_WAIT_BROKEN_OFF);
}

/* The coroutine that waits is closed. */
static PyObject *wakeup_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    wakeup_break_off((Wakeup *)object);
    Py_RETURN_NONE;
}

/* An exception is thrown into the task while it waits, as Task.cancel does by way of the loop. */
static PyObject *wakeup_throw(PyObject *object, PyObject *args)
{
    PyObject *type, *value = NULL, *traceback = NULL;

    if (!PyArg_UnpackTuple(args, "throw", 1, 3, &type, &value, &traceback))
        return NULL;
    wakeup_break_off((Wakeup *)object);
    if (PyExceptionInstance_Check(type))
        PyErr_SetObject((PyObject *)Py_TYPE(type), type);
    else
        PyErr_SetObject(type, value);
    return NULL;
}

/* The methods of a future that a task calls. */

/* Called once per wait, so without the parser of arguments, which costs more than the wait. */
static PyObject *wakeup_add_done_callback(PyObject *object, PyObject *const *args, Py_ssize_t count,
                                          PyObject *names)
{
    Wakeup *self = (Wakeup *)object;

    if (count != 1 || (names && PyTuple_Size(names) != 1)) {
        PyErr_SetString(PyExc_TypeError, "add_done_callback(fn, *, context=None)");
        return NULL;
    }
    replace(&self->callback, Py_NewRef(args[0]));
    Py_CLEAR(self->context);
    if (names && args[1] != Py_None) {
        Py_INCREF(args[1]);
        self->context = args[1];
    }
    Py_RETURN_NONE;
}

void aio_call_soon(PyObject *loop, PyObject *owner, uint32_t events)
{
    PyObject *type, *value, *traceback, *handle = NULL;

    PyErr_Fetch(&type, &value, &traceback);
    /* A second try, as a signal's handler may have raised in the first; a closed loop calls nobody.
     */
    for (int tries = 0; !handle && tries < 2; tries++) {
        PyErr_Clear();
        handle = PyObject_CallMethod(loop, "call_soon", "OI", owner, (unsigned int)events);
    }
    Py_XDECREF(handle);
    PyErr_Restore(type, value, traceback);
}

/* Have the loop resume the task in its next turn. */
static int resume_soon(Wakeup *self)
{
    PyObject *function, *args, *kwargs, *handle = NULL;

    if (!self->loop) { /* the collector has cleared it */
        PyErr_SetString(PyExc_RuntimeError, "the loop is gone");
        return -1;
    }
    function = PyObject_GetAttr(self->loop, aio_name.call_soon);
    args = PyTuple_Pack(2, self->callback, (PyObject *)self);
    kwargs = PyDict_New();
    if (function && args && kwargs &&
        (!self->context || PyDict_SetItem(kwargs, aio_name.context, self->context) == 0))
        handle = PyObject_Call(function, args, kwargs);
    Py_XDECREF(function);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(handle);
    return handle ? 0 : -1;
}

static PyObject *wakeup_cancel(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Wakeup *self = (Wakeup *)object;
    static char *names[] = {"msg", NULL};
    PyObject *msg = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &msg))
        return NULL;
    if (self->state != AIO_WAITING || !self->callback)
        Py_RETURN_FALSE;
    self->error = msg && msg != Py_None ? PyObject_CallFunctionObjArgs(cancelled_error, msg, NULL)
                                        : PyObject_CallNoArgs(cancelled_error);
    if (!self->error)
        return NULL;
    wakeup_end_spin(self, 0);
    self->state = AIO_READY;
    if (self->on_broken_off)
        self->on_broken_off(self, AIO_WAIT_CANCELED);
    if (resume_soon(self))
        return NULL;
    Py_RETURN_TRUE;
}

static PyObject *wakeup_result(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Wakeup *self = (Wakeup *)object;

    if (self->error) {
        PyErr_SetObject((PyObject *)Py_TYPE(self->error), self->error);
        return NULL;
    }
    Py_RETURN_NONE;
}

/* The side that wakes. */

int aio_wake(Wakeup *self)
{
    PyObject *callback, *context, *result;

    if (self->state != AIO_WAITING || !self->callback)
        return 0;
    wakeup_end_spin(self, 1);
    self->state = AIO_READY;
    callback = self->callback;
    context = self->context;
    self->callback = self->context = NULL;
    if (context)
        result = PyObject_CallMethodObjArgs(context, aio_name.run, callback, ended, NULL);
    else
        result = PyObject_CallFunctionObjArgs(callback, ended, NULL);
    Py_DECREF(callback);
    Py_XDECREF(context);
    if (!result)
        return -1;
    Py_DECREF(result);
    return 1;
}

static PyObject *wakeup_wake(PyObject *object, PyObject *Py_UNUSED(unused))
{
    int woken = aio_wake((Wakeup *)object);

    return woken < 0 ? NULL : PyBool_FromLong(woken);
}

int aio_wake_soon(Wakeup *self)
{
    if (self->state != AIO_WAITING || !self->callback)
        return 0;
    wakeup_end_spin(self, 1);
    self->state = AIO_READY;
    return resume_soon(self) ? -1 : 1;
}

int aio_wake_or_soon(Wakeup *self, int soon)
{
    return soon ? aio_wake_soon(self) : aio_wake(self);
}

static PyObject *wakeup_wake_soon(PyObject *object, PyObject *Py_UNUSED(unused))
{
    int woken = aio_wake_soon((Wakeup *)object);

    return woken < 0 ? NULL : PyBool_FromLong(woken);
}

static PyObject *wakeup_waiting(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(((Wakeup *)object)->state == AIO_WAITING ||
                           ((Wakeup *)object)->state == AIO_READY);
}

static PyMethodDef wakeup_methods[] = {
    {"add_done_callback", (PyCFunction)(void (*)(void))wakeup_add_done_callback,
     METH_FASTCALL | METH_KEYWORDS, NULL},
    {"wake", wakeup_wake, METH_NOARGS,
     "Resume the task here and now; False if none waits.  Only where no task is running."},
    {"wake_soon", wakeup_wake_soon, METH_NOARGS,
     "Have the loop resume the task in its next turn; False if none waits."},
    {"cancel", (PyCFunction)(void (*)(void))wakeup_cancel, METH_VARARGS | METH_KEYWORDS, NULL},
    {"result", wakeup_result, METH_NOARGS, NULL},
    {"throw", wakeup_throw, METH_VARARGS, NULL},
    {"close", wakeup_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef wakeup_getset[] = {
    {"waiting", wakeup_waiting, NULL,
     "Whether a task waits, or is to be resumed and has not run yet.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef wakeup_members[] = {
    {"_asyncio_future_blocking", T_BOOL, offsetof(Wakeup, blocking), 0, NULL},
    {"_loop", T_OBJECT, offsetof(Wakeup, loop), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot wakeup_slots[] = {
    {Py_tp_new, wakeup_new},
    {Py_tp_traverse, wakeup_traverse},
    {Py_tp_clear, wakeup_clear},
    {Py_tp_dealloc, wakeup_dealloc},
    {Py_am_await, aio_wakeup_await},
    {Py_am_send, wakeup_send},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, aio_wakeup_next},
    {Py_tp_methods, wakeup_methods},
    {Py_tp_getset, wakeup_getset},
    {Py_tp_members, wakeup_members},
    {Py_tp_doc, "What one task at a time waits on, and is resumed from by `wake`."},
    {0, NULL},
};

PyType_Spec aio_wakeup_spec = {
    .name = "aiordma._core.Wakeup",
    .basicsize = sizeof(Wakeup),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = wakeup_slots,
};

/* The exception is made before anything is taken, which would be lost if there were no memory. */
PyObject *aio_iterate(PyObject *object, PySendResult (*send)(PyObject *, PyObject *, PyObject **))
{
    PyObject *result = NULL, *stop = PyObject_CallNoArgs(PyExc_StopIteration);

    if (!stop)
        return NULL;
    if (send(object, Py_None, &result) == PYGEN_RETURN) {
        if (!PyObject_SetAttr(stop, aio_name.value, result))
            PyErr_SetObject(PyExc_StopIteration, stop);
        replace(&result, NULL);
    }
    Py_DECREF(stop);
    return result;
}

/* ReceiveWakeup */

/* The task has broken off its wait: what it waited for may be for another task. */
static void receive_wakeup_broken_off(Wakeup *wakeup, enum aio_wait_end how)
{
    ReceiveWakeup *self = (ReceiveWakeup *)wakeup;

    if (how == AIO_WAIT_CANCELED)
        return; /* aio_receive_wakeup_step sees the error when the task runs */
    if (self->taking && self->owner && self->gave_up)
        self->gave_up(self->owner);
    self->taking = 0;
}

ReceiveWakeup *aio_receive_wakeup_new(PyObject *loop, PyObject *owner,
                                      PyObject *(*take)(PyObject *, int))
{
    PyObject *object =
        PyObject_CallFunctionObjArgs((PyObject *)aio_receive_wakeup_type, loop, NULL);

    if (object) {
        ((ReceiveWakeup *)object)->owner = owner;
        ((ReceiveWakeup *)object)->take = take;
        ((ReceiveWakeup *)object)->wakeup.on_broken_off = receive_wakeup_broken_off;
    }
    return (ReceiveWakeup *)object;
}

/*
 * To be called by the tp_traverse of the owner, which holds the references to the ReceiveWakeup and
 * to its bound method.
 */
int aio_receive_wakeup_traverse(ReceiveWakeup *parked, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)parked);
    if (parked)
        Py_VISIT(parked->adder);
    return 0;
}

/* The owner parts from its ReceiveWakeup. */
void aio_receive_wakeup_part(ReceiveWakeup **place)
{
    ReceiveWakeup *parked = *place;

    *place = NULL;
    if (!parked)
        return;
    parked->owner = NULL;
    Py_CLEAR(parked->adder);
    Py_DECREF((PyObject *)parked);
}

/*
 * The bound method add_done_callback.  A task asks for it at each wait, and to make it takes longer
 * than to call it; so it is made once and kept in `adder`.
 *
 * The method refers to the ReceiveWakeup, and the ReceiveWakeup to the method.  The collector is
 * not shown this cycle: the owner visits `adder` as if it were its own member
 * (aio_receive_wakeup_traverse), and clears it when it parts from the ReceiveWakeup
 * (aio_receive_wakeup_part).
 */
static PyObject *receive_wakeup_adder(PyObject *object, void *Py_UNUSED(unused))
{
    ReceiveWakeup *self = (ReceiveWakeup *)object;
    PyObject *made;

    if (self->adder)
        return Py_NewRef(self->adder);
    made = PyCFunction_NewEx(&wakeup_methods[0], object, NULL);
    if (made && self->owner && !self->adder)
        self->adder = Py_NewRef(made);
    return made;
}

PySendResult aio_receive_wakeup_step(PyObject *object, PyObject *Py_UNUSED(value),
                                     PyObject **result)
{
    ReceiveWakeup *self = (ReceiveWakeup *)object;
    int again = self->wakeup.state != AIO_IDLE;
    PyObject *owner;

    if (!self->taking || !self->owner || (again && self->wakeup.error)) {
        if (self->wakeup.error && self->taking && self->owner && self->gave_up)
            self->gave_up(self->owner);
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
    owner = Py_NewRef(self->owner); /* `take` may run the collector, which may end the owner */
    *result = self->take(owner, again);
    Py_DECREF(owner);
    if (*result == Py_None && !again) {
        Py_DECREF(*result);
        *result = aio_wakeup_next(object);
        if (*result)
            return PYGEN_NEXT;
        wakeup_break_off(&self->wakeup);
        return PYGEN_ERROR;
    }
    self->taking = 0;
    if (!*result)
        return PYGEN_ERROR;
    if (*result == Py_False)
        replace(result, Py_NewRef(Py_None));
    return PYGEN_RETURN;
}

/*
 * For a caller that iterates, as the interpreter does from 3.12 on, and before while it is traced.
 * The tp_iternext of Wakeup would park without looking for a message that has arrived already, and
 * nothing would resume the task.
 */
static PyObject *receive_wakeup_next(PyObject *object)
{
    return aio_iterate(object, aio_receive_wakeup_step);
}

/* A ReceiveWakeup that is awaited itself is a Wakeup: its wait ends without a message. */
static PyObject *receive_wakeup_await(PyObject *object)
{
    PyObject *awaited = aio_wakeup_await(object);

    if (awaited)
        ((ReceiveWakeup *)object)->taking = 0;
    return awaited;
}

static PyGetSetDef receive_wakeup_getset[] = {
    {"add_done_callback", receive_wakeup_adder, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot receive_wakeup_slots[] = {
    {Py_am_await, receive_wakeup_await},
    {Py_am_send, aio_receive_wakeup_step},
    {Py_tp_iternext, receive_wakeup_next},
    {Py_tp_getset, receive_wakeup_getset},
    {Py_tp_members, wakeup_members}, /* those of a base are read more slowly */
    {Py_tp_doc, "What a task that waits for a message is parked on."},
    {0, NULL},
};

PyType_Spec aio_receive_wakeup_spec = {
    .name = "aiordma._core.ReceiveWakeup",
    .basicsize = sizeof(ReceiveWakeup),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = receive_wakeup_slots,
};

/* asyncio.Future() asks its loop whether to debug, and nothing else. */
static PyObject *make_ended(void)
{
    PyObject *asyncio = PyImport_ImportModule("asyncio.futures");
    PyObject *types = PyImport_ImportModule("types");
    PyObject *space = types ? PyObject_GetAttrString(types, "SimpleNamespace") : NULL;
    PyObject *type = asyncio ? PyObject_GetAttrString(asyncio, "Future") : NULL;
    PyObject *debug = Py_BuildValue("{s:O}", "get_debug", (PyObject *)&PyBool_Type);
    PyObject *none = PyTuple_New(0), *loop = NULL, *named = NULL, *future = NULL, *set = NULL;

    if (space && type && debug && none)
        loop = PyObject_Call(space, none, debug);
    if (loop)
        named = Py_BuildValue("{s:O}", "loop", loop);
    if (named)
        future = PyObject_Call(type, none, named);
    if (future)
        set = PyObject_CallMethod(future, "set_result", "O", Py_None);
    if (!set)
        replace(&future, NULL);
    Py_XDECREF(asyncio);
    Py_XDECREF(types);
    Py_XDECREF(space);
    Py_XDECREF(type);
    Py_XDECREF(debug);
    Py_XDECREF(none);
    Py_XDECREF(loop);
    Py_XDECREF(named);
    Py_XDECREF(set);
    return future;
}

int aio_prepare_wakeup(void)
{
    PyObject *exceptions = PyImport_ImportModule("asyncio.exceptions");

    cancelled_error = exceptions ? PyObject_GetAttrString(exceptions, "CancelledError") : NULL;
    Py_XDECREF(exceptions);
    ended = cancelled_error ? make_ended() : NULL;
    return ended ? 0 : -1;
}
