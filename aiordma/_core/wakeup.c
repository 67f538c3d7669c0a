/*
 * Wakeup: a task waits on it, and is resumed without a turn of the loop in between.
 *
 * A future resumes its task by loop.call_soon: one more turn, and in it one more system call that
 * asks the kernel for events.  The drain of a completion channel is called by the loop itself,
 * with no task running, so that it can resume the task at once.  That is all that this type is for.
 * A single task waits on it at a time, again and again, and nothing is allocated for a wait.
 *
 * To asyncio it is a future: a task recognizes it by _asyncio_future_blocking, looks at _loop (as
 * of futures without get_loop(), whose call costs more), and calls add_done_callback, cancel and
 * result.  Nothing else of a future is there.
 *
 *   IDLE -> await -> WAITING -> wake(), or cancel() -> READY -> the task runs -> IDLE
 *
 * A cancellation is delivered by the loop, as a future's: it comes from other tasks.
 *
 * An Operation (operation.c) ends once, perhaps before a task waits: then it is DONE, and to wait
 * for it takes no time.
 *
 * Parked is a Wakeup whose wait ends with the next message of a MessageState, or with bytes of a
 * StreamState.
 */
#include "core.h"

/*
 * An ended future of asyncio's.  A task whose callback gets a future of this type reads the result
 * without a call of a method by its name, which costs 1,000 instructions.  The task does not
 * compare the future with the object that it waits on.
 */
static PyObject *ended, *cancelled_error;

/* The wait is over; `answered`: with the object that it was for. */
static void left(Wakeup *self, int answered)
{
    if (self->spin && self->state == AIO_WAITING)
        aio_spin_end(self, answered);
}

void aio_wakeup_forget(Wakeup *self)
{
    left(self, 0);
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

/* Ends the wait: NULL with the error, or NULL without one, which is a return of None. */
static PyObject *finish(Wakeup *self)
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
        return finish(self);
    if (self->state == AIO_WAITING) {
        /* The task was resumed by neither wake() nor throw(): the wait ends with an error. */
        aio_wakeup_forget(self);
        PyErr_SetString(PyExc_RuntimeError, "the wait was not ended by wake()");
        return NULL;
    }
    if (self->spin && aio_spin_begin(self))
        return NULL; /* of a signal's handler */
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

/* The wait is broken off. */
static void give_up(Wakeup *self)
{
    aio_wakeup_forget(self);
    if (Py_IS_TYPE((PyObject *)self, aio_waiting_type))
        aio_waiting_leave((Waiting *)self);
    if (Py_IS_TYPE((PyObject *)self, aio_parked_type)) {
        Parked *parked = (Parked *)self;

        if (parked->taking && parked->owner && parked->gave_up)
            parked->gave_up(parked->owner);
        parked->taking = 0;
    }
}

/* The coroutine that waits is closed. */
static PyObject *wakeup_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    give_up((Wakeup *)object);
    Py_RETURN_NONE;
}

/* An exception is thrown into the task while it waits, as Task.cancel does by way of the loop. */
static PyObject *wakeup_throw(PyObject *object, PyObject *args)
{
    PyObject *type, *value = NULL, *traceback = NULL;

    if (!PyArg_UnpackTuple(args, "throw", 1, 3, &type, &value, &traceback))
        return NULL;
    give_up((Wakeup *)object);
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
    left(self, 0);
    self->state = AIO_READY;
    if (Py_IS_TYPE(object, aio_waiting_type)) /* the sends behind it do not wait for it */
        aio_waiting_leave((Waiting *)self);
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
    left(self, 1);
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
    left(self, 1);
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

/* Parked */

Parked *aio_park(PyObject *loop, PyObject *owner, PyObject *(*take)(PyObject *, int))
{
    PyObject *object = PyObject_CallFunctionObjArgs((PyObject *)aio_parked_type, loop, NULL);

    if (object) {
        ((Parked *)object)->owner = owner;
        ((Parked *)object)->take = take;
    }
    return (Parked *)object;
}

/* For the tp_traverse of the owner, which has the Parked and its method. */
int aio_parked_traverse(Parked *parked, visitproc visit, void *arg)
{
    Py_VISIT((PyObject *)parked);
    if (parked)
        Py_VISIT(parked->adder);
    return 0;
}

/* The owner parts from its Parked. */
void aio_unpark(Parked **place)
{
    Parked *parked = *place;

    *place = NULL;
    if (!parked)
        return;
    parked->owner = NULL;
    Py_CLEAR(parked->adder);
    Py_DECREF((PyObject *)parked);
}

/*
 * The method add_done_callback, as an object that is made once: to make it takes longer than its
 * call, and a task asks for it at each wait.  It has a reference to the Parked; to avoid a cycle,
 * the reference to it counts as the owner's.
 */
static PyObject *parked_adder(PyObject *object, void *Py_UNUSED(unused))
{
    Parked *self = (Parked *)object;
    PyObject *made;

    if (self->adder)
        return Py_NewRef(self->adder);
    made = PyCFunction_NewEx(&wakeup_methods[0], object, NULL);
    if (made && self->owner && !self->adder)
        self->adder = Py_NewRef(made);
    return made;
}

/* Of Parked: the next message. */
PyObject *aio_take_message(PyObject *owner, int again)
{
    MessageState *self = (MessageState *)owner;
    struct aio_message_state *m = &self->state;
    PyObject *message;
    int elsewhere;

    if (m->python || m->held >= m->half)
        Py_RETURN_FALSE;
    /* A task that was resumed is where it was when it began to wait. */
    elsewhere = again ? 0 : aio_is_elsewhere(self);
    if (elsewhere < 0)
        return NULL;
    if (elsewhere)
        Py_RETURN_FALSE;
    if (m->head == m->tail) {
        m->waiting = 1;
        aio_give_credit(m);
        return Py_NewRef(m->error ? Py_False : Py_None);
    }
    if (m->arrivals[m->head & m->arrival_mask].large)
        Py_RETURN_FALSE;
    message = aio_take_first(self);
    if (message == Py_None) { /* a function that the collector runs has taken it */
        Py_DECREF(message);
        Py_RETURN_FALSE;
    }
    if (!message)
        return NULL;
    m->messages_received++;
    m->bytes_received += (uint64_t)((Message *)message)->length;
    if (((Message *)message)->in_slot) {
        ((Message *)message)->kept = 1;
        m->held++;
    }
    return message;
}

PySendResult aio_parked_send(PyObject *object, PyObject *Py_UNUSED(value), PyObject **result)
{
    Parked *self = (Parked *)object;
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
    owner = Py_NewRef(self->owner); /* `take` may run the collector, which may find the state */
    *result = self->take(owner, again);
    Py_DECREF(owner);
    if (*result == Py_None && !again) {
        Py_DECREF(*result);
        *result = aio_wakeup_next(object);
        if (*result)
            return PYGEN_NEXT;
        give_up(&self->wakeup);
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
static PyObject *parked_next(PyObject *object)
{
    return aio_iterate(object, aio_parked_send);
}

/* A Parked that is awaited itself is a Wakeup: its wait ends without a message. */
static PyObject *parked_await(PyObject *object)
{
    PyObject *awaited = aio_wakeup_await(object);

    if (awaited)
        ((Parked *)object)->taking = 0;
    return awaited;
}

static PyGetSetDef parked_getset[] = {
    {"add_done_callback", parked_adder, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot parked_slots[] = {
    {Py_am_await, parked_await},
    {Py_am_send, aio_parked_send},
    {Py_tp_iternext, parked_next},
    {Py_tp_getset, parked_getset},
    {Py_tp_members, wakeup_members}, /* those of a base are read more slowly */
    {Py_tp_doc, "What a task that waits for a message is parked on."},
    {0, NULL},
};

PyType_Spec aio_parked_spec = {
    .name = "aiordma._core.Parked",
    .basicsize = sizeof(Parked),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = parked_slots,
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
