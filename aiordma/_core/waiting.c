/*
 * Waiting: a task that waits for a slot and a credit, to send a message of one frame.
 *
 * Those of a connection stand in a line, first come, first served.  When slots and credits have
 * come, the drain resumes the tasks in their order (aio_grant), and a task sends when it runs: no
 * slot is ever kept for a task that has not run yet.  So a send that is canceled, or whose wait
 * ends with an error, is not sent, and has nothing to give back; and the sends of all tasks that
 * are resumed in a drain are posted together at its end.
 *
 * The line keeps a task that is parked alive.  Before, the coroutine alone has the Waiting: where
 * that ends in between, as a signal's handler may bring about, the Waiting leaves the line.
 */
#include <time.h>

#include "core.h"

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Leave the line; a caller that uses the object after that has a reference. */
void aio_waiting_leave(Waiting *self)
{
    MessageState *state = self->state;
    char owned = self->owned;

    if (!state)
        return;
    *(self->before ? &self->before->behind : &state->first) = self->behind;
    *(self->behind ? &self->behind->before : &state->last) = self->before;
    self->before = self->behind = NULL;
    self->state = NULL;
    self->owned = 0;
    state->state.queued--;
    PyBuffer_Release(&self->view);
    if (owned)
        Py_DECREF((PyObject *)self);
}

static int waiting_traverse(PyObject *object, visitproc visit, void *arg)
{
    traverseproc base = (traverseproc)PyType_GetSlot(aio_wakeup_type, Py_tp_traverse);

    Py_VISIT(((Waiting *)object)->view.obj);
    return base(object, visit, arg);
}

static int waiting_clear(PyObject *object)
{
    inquiry base = (inquiry)PyType_GetSlot(aio_wakeup_type, Py_tp_clear);

    aio_waiting_leave((Waiting *)object);
    return base(object);
}

static void waiting_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    waiting_clear(object);
    aio_free(object);
}

/* The line of a MessageState */

int aio_line_traverse(MessageState *self, visitproc visit, void *arg)
{
    for (Waiting *waiting = self->first; waiting; waiting = waiting->behind)
        if (waiting->owned)
            Py_VISIT((PyObject *)waiting);
    return 0;
}

void aio_line_clear(MessageState *self)
{
    while (self->first)
        aio_waiting_leave(self->first);
}

/* Stand in line with the bytes of an object; NULL with an exception. */
PyObject *aio_stand_in_line(MessageState *self, enum aio_frame_kind kind, PyObject *data,
                            uint64_t argument, int has_imm, uint32_t imm)
{
    Waiting *waiting = (Waiting *)PyType_GenericAlloc(aio_waiting_type, 0);

    if (!waiting)
        return NULL;
    if (PyObject_GetBuffer(data, &waiting->view, PyBUF_SIMPLE)) {
        Py_DECREF((PyObject *)waiting);
        return NULL;
    }
    waiting->wakeup.loop = Py_NewRef(self->parked->wakeup.loop);
    waiting->kind = kind;
    waiting->argument = argument;
    waiting->has_imm = (char)has_imm;
    waiting->imm = imm;
    waiting->since = now();
    waiting->state = self;
    waiting->before = self->last;
    *(self->last ? &self->last->behind : &self->first) = waiting;
    self->last = waiting;
    self->state.queued++;
    return (PyObject *)waiting;
}

/*
 * Whether a message that could not be sent is to wait, and Python has nothing to do for that: no
 * slot to look for, and no timer to start.
 */
int aio_may_stand_in_line(const struct aio_message_state *m, uint64_t length)
{
    return m->qp && !m->blocked && m->watched && length <= m->eager_size &&
           (m->queued || m->credits <= 0);
}

/*
 * stand_in_line(kind, data, argument, imm): send a frame, if there is room and no task waits: 0 or
 * an errno; else a Waiting, whose end is that.
 */
PyObject *aio_send_in_turn(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    struct aio_message_state *m = &self->state;
    unsigned long long argument;
    unsigned int kind;
    PyObject *data, *number;
    Py_buffer bytes;
    uint32_t imm;
    int has_imm, fits, code = -1;

    if (!PyArg_ParseTuple(args, "IOKO", &kind, &data, &argument, &number))
        return NULL;
    has_imm = aio_imm_of(number, &imm);
    if (has_imm < 0 || PyObject_GetBuffer(data, &bytes, PyBUF_SIMPLE))
        return NULL;
    fits = (uint64_t)bytes.len <= m->eager_size;
    if (fits && !m->queued && aio_message_has_room(m))
        code = aio_message_send_next(m, (enum aio_frame_kind)kind, bytes.buf, (uint64_t)bytes.len,
                                     argument, has_imm, imm);
    PyBuffer_Release(&bytes);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "more bytes than fit into a slot");
        return NULL;
    }
    if (code < 0)
        return aio_stand_in_line(self, (enum aio_frame_kind)kind, data, argument, has_imm, imm);
    return aio_sent(self, code);
}

/*
 * Have the loop resume as many tasks as there are credits, in their order.  They stay in line until
 * they run, as one may give up before, and those that find no room wait again.  0, or -1.
 */
static int grant_soon(MessageState *self)
{
    Waiting *waiting = self->first;

    for (int64_t n = self->state.credits; n > 0 && waiting && waiting->owned; n--) {
        Waiting *behind;
        int woken;

        Py_INCREF((PyObject *)waiting);
        woken = aio_wake_soon(&waiting->wakeup);
        /* call_soon may run Python code, and with it a signal's handler that clears the line. */
        behind = waiting->state == self ? waiting->behind : NULL;
        Py_DECREF((PyObject *)waiting);
        if (woken < 0)
            return -1;
        waiting = behind;
    }
    return 0;
}

/*
 * Resume the tasks in line for which there is room, in their order; no task is running.  0, or -1
 * with the exception of a task.
 */
int aio_grant(MessageState *self)
{
    if (self->soon && aio_message_has_room(&self->state))
        return grant_soon(self);
    while (self->first && aio_message_has_room(&self->state)) {
        Waiting *waiting = self->first;
        int rc;

        if (!waiting->owned || waiting->wakeup.state != AIO_WAITING || !waiting->wakeup.callback)
            break; /* not parked yet, or on its way: it looks when it runs */
        waiting->owned = 0;
        self->state.in_a_row = 2; /* the chain is posted at the end of the drain */
        rc = aio_wake(&waiting->wakeup);
        if (!waiting->owned)
            aio_waiting_leave(waiting); /* its coroutine has ended before it could send */
        Py_DECREF((PyObject *)waiting);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/*
 * End the waits that have lasted for so many seconds, each with an exception that `make` makes:
 * the seconds until the next wait has, or None.  The first in line has waited longest.
 */
PyObject *aio_end_waits(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    PyObject *make, *error = NULL;
    double seconds, until;

    if (!PyArg_ParseTuple(args, "Od", &make, &seconds))
        return NULL;
    until = now() - seconds;
    while (self->first && self->first->since <= until) {
        Waiting *waiting = self->first;
        int woken;

        Py_INCREF((PyObject *)waiting);
        aio_waiting_leave(waiting);
        waiting->wakeup.error = PyObject_CallNoArgs(make);
        if (!waiting->wakeup.error)
            waiting->wakeup.error = aio_raised();
        woken = aio_wake_soon(&waiting->wakeup);
        if (woken < 0)
            replace(&error, aio_raised());
        else if (!woken) /* no task is parked on it yet */
            waiting->wakeup.state = AIO_DONE;
        Py_DECREF((PyObject *)waiting);
    }
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return NULL;
    }
    return self->first ? PyFloat_FromDouble(self->first->since - until) : Py_NewRef(Py_None);
}

/* The awaiting side: the wait ends with 0 or an errno, as a send does. */

PySendResult aio_waiting_send(PyObject *object, PyObject *Py_UNUSED(value), PyObject **result)
{
    Waiting *self = (Waiting *)object;
    MessageState *state = self->state;
    int is_parked = self->wakeup.state == AIO_WAITING, code;

    *result = NULL;
    if (!state || is_parked) { /* it has ended with an error; or was resumed by another */
        aio_waiting_leave(self);
        if (self->wakeup.error || is_parked)
            aio_wakeup_next(object);
        else
            PyErr_SetString(PyExc_RuntimeError, "the wait is over");
        return PYGEN_ERROR;
    }
    aio_wakeup_forget(&self->wakeup);
    if (state->first != self || !aio_message_has_room(&state->state)) {
        if (!self->owned)
            Py_INCREF(object);
        self->owned = 1;
        *result = aio_wakeup_next(object);
        return PYGEN_NEXT;
    }
    code =
        aio_message_send_next(&state->state, self->kind, self->view.buf, (uint64_t)self->view.len,
                              self->argument, self->has_imm, self->imm);
    aio_waiting_leave(self);
    *result = PyLong_FromLong(code);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *waiting_next(PyObject *object)
{
    return aio_iterate(object, aio_waiting_send);
}

static PyType_Slot waiting_slots[] = {
    {Py_tp_traverse, waiting_traverse},
    {Py_tp_clear, waiting_clear},
    {Py_tp_dealloc, waiting_dealloc},
    {Py_am_send, aio_waiting_send},
    {Py_tp_iternext, waiting_next},
    {Py_tp_doc, "A task that waits in line to send a message; awaited by one task."},
    {0, NULL},
};

PyType_Spec aio_waiting_spec = {
    .name = "aiordma._core.Waiting",
    .basicsize = sizeof(Waiting),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = waiting_slots,
};
