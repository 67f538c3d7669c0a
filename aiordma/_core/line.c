/*
 * QueuedSend: a task that waits for a slot and a credit, to send a message of one frame.
 *
 * The tasks of a connection wait in a line, first come, first served.  When slots and credits have
 * come, the drain resumes them in their order (aio_line_resume), and each sends when it runs: no
 * slot is ever reserved for a task that has not run yet.  So a canceled send, or one whose wait
 * ends with an error, was not sent and has nothing to give back; and the sends of all tasks that a
 * drain resumes are posted together at its end.
 *
 * The line has a reference to each QueuedSend on which a task is parked.  Until then the coroutine
 * alone has one; if it ends before it has parked, which a signal's handler can bring about, the
 * QueuedSend leaves the line.
 */
#include <time.h>

#include "core.h"

/* The kind of a QueuedSend that waits for room, and sends nothing itself. */
#define NO_FRAME AIO_FRAME_KIND_COUNT

static double monotonic_s(void)
{
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Leave the line, which may free the object: a caller that goes on to use it has a reference. */
void aio_line_remove(QueuedSend *self)
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
    connection_line_shrank(state->connection);
    PyBuffer_Release(&self->view);
    if (owned)
        Py_DECREF((PyObject *)self);
}

/*
 * The first in line has left without a wake.  Room that came before its task had parked could
 * resume nobody: the loop now gives it to those behind.
 */
static void line_hand_on_room(MessageState *state)
{
    if (state->first && state->receive_wakeup && !connection_lacks(state->connection))
        aio_call_soon(state->receive_wakeup->wakeup.loop, (PyObject *)state, AIO_EVENT_ROOM);
}

/* The task that waits here sends no more. */
void aio_line_leave(QueuedSend *self)
{
    MessageState *state = self->state;
    int is_first = state && state->first == self;

    if (state && !state->receive_wakeup) { /* it is being deallocated: it takes no reference */
        aio_line_remove(self);
        return;
    }
    Py_XINCREF((PyObject *)state);
    aio_line_remove(self);
    if (is_first)
        line_hand_on_room(state);
    Py_XDECREF((PyObject *)state);
}

static int queued_send_traverse(PyObject *object, visitproc visit, void *arg)
{
    traverseproc base = (traverseproc)PyType_GetSlot(aio_wakeup_type, Py_tp_traverse);

    Py_VISIT(((QueuedSend *)object)->view.obj);
    return base(object, visit, arg);
}

static int queued_send_clear(PyObject *object)
{
    inquiry base = (inquiry)PyType_GetSlot(aio_wakeup_type, Py_tp_clear);

    aio_line_remove((QueuedSend *)object);
    return base(object);
}

static void queued_send_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    aio_line_leave((QueuedSend *)object);
    queued_send_clear(object);
    aio_free(object);
}

/* The line of a MessageState */

int aio_line_traverse(MessageState *self, visitproc visit, void *arg)
{
    for (QueuedSend *queued = self->first; queued; queued = queued->behind)
        if (queued->owned)
            Py_VISIT((PyObject *)queued);
    return 0;
}

void aio_line_clear(MessageState *self)
{
    while (self->first)
        aio_line_remove(self->first);
}

static void queued_send_broken_off(Wakeup *wakeup, enum aio_wait_end Py_UNUSED(how))
{
    aio_line_leave((QueuedSend *)wakeup);
}

/* Stand in line with the bytes of an object; NULL with an exception. */
PyObject *aio_line_join(MessageState *self, enum aio_frame_kind kind, PyObject *data,
                        uint64_t argument, int has_imm, uint32_t imm)
{
    QueuedSend *queued;

    if (!self->receive_wakeup || !self->receive_wakeup->wakeup.loop) { /* the collector's work */
        PyErr_SetString(PyExc_RuntimeError, "the loop is gone");
        return NULL;
    }
    queued = (QueuedSend *)PyType_GenericAlloc(aio_queued_send_type, 0);
    if (!queued)
        return NULL;
    if (PyObject_GetBuffer(data, &queued->view, PyBUF_SIMPLE)) {
        Py_DECREF((PyObject *)queued);
        return NULL;
    }
    queued->wakeup.loop = Py_NewRef(self->receive_wakeup->wakeup.loop);
    queued->wakeup.on_broken_off = queued_send_broken_off;
    queued->kind = kind;
    queued->argument = argument;
    queued->has_imm = (char)has_imm;
    queued->imm = imm;
    queued->since = monotonic_s();
    queued->state = self;
    queued->before = self->last;
    *(self->last ? &self->last->behind : &self->first) = queued;
    self->last = queued;
    connection_line_grew(self->connection);
    return (PyObject *)queued;
}

/*
 * wait_room(): stand in line without a message.  The wait ends when a frame can be sent, and its
 * task then chooses what it sends (connection_send_first): the newest message, for a peer that is
 * to get the newest.  As for `send_in_turn`, the caller has a timer.
 */
PyObject *aio_line_wait_room(PyObject *object, PyObject *Py_UNUSED(unused))
{
    MessageState *self = (MessageState *)object;
    PyObject *nothing = PyBytes_FromStringAndSize(NULL, 0), *queued = NULL;

    if (nothing) {
        connection_set_watched(self->connection, 1);
        queued = aio_line_join(self, NO_FRAME, nothing, 0, 0, 0);
        Py_DECREF(nothing);
    }
    return queued;
}

/*
 * Have the loop resume as many tasks as there are credits, in their order.  They stay in line until
 * they run, because one may be canceled before; those that then find no room wait again.  0, or -1.
 */
static int line_resume_by_loop(MessageState *self)
{
    QueuedSend *queued = self->first;

    for (int64_t n = connection_credits(self->connection); n > 0 && queued && queued->owned; n--) {
        QueuedSend *behind;
        int woken;

        Py_INCREF((PyObject *)queued);
        woken = aio_wake_soon(&queued->wakeup);
        /* call_soon may run Python code, and with it a signal's handler that clears the line. */
        behind = queued->state == self ? queued->behind : NULL;
        Py_DECREF((PyObject *)queued);
        if (woken < 0)
            return -1;
        queued = behind;
    }
    return 0;
}

/*
 * Resume the tasks in line for which there is room, in their order; no task is running.  0, or -1
 * with the exception of a task.
 */
int aio_line_resume(MessageState *self)
{
    if (self->soon && !connection_lacks(self->connection))
        return line_resume_by_loop(self);
    while (self->first && !connection_lacks(self->connection)) {
        QueuedSend *queued = self->first;
        int rc;

        if (!queued->owned || queued->wakeup.state != AIO_WAITING || !queued->wakeup.callback)
            break; /* not parked yet, or resumed already: it looks for room when it runs */
        queued->owned = 0;
        connection_begin_burst(self->connection);
        rc = aio_wake(&queued->wakeup);
        if (!queued->owned)
            aio_line_remove(queued); /* its coroutine has ended before it could send */
        Py_DECREF((PyObject *)queued);
        if (rc < 0)
            return -1;
    }
    return 0;
}

/*
 * expire_sends(make, seconds): end the waits that have lasted for so many seconds, each with an
 * exception that `make` makes.  The result is the seconds that the first of the others has waited,
 * which is the longest wait; the caller then has a timer.  None if there is no other.
 */
PyObject *aio_line_expire(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    PyObject *make, *error = NULL;
    double seconds, now;

    if (!PyArg_ParseTuple(args, "Od", &make, &seconds))
        return NULL;
    connection_set_watched(self->connection, 0);
    now = monotonic_s();
    while (self->first && self->first->since <= now - seconds) {
        QueuedSend *queued = self->first;
        int woken;

        Py_INCREF((PyObject *)queued);
        aio_line_remove(queued);
        queued->wakeup.error = PyObject_CallNoArgs(make);
        if (!queued->wakeup.error)
            queued->wakeup.error = aio_raised();
        woken = aio_wake_soon(&queued->wakeup);
        if (woken < 0)
            replace(&error, aio_raised());
        else if (!woken) /* no task is parked on it yet */
            queued->wakeup.state = AIO_DONE;
        Py_DECREF((PyObject *)queued);
    }
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return NULL;
    }
    if (!self->first)
        Py_RETURN_NONE;
    connection_set_watched(self->connection, 1);
    return PyFloat_FromDouble(now - self->first->since);
}

/* The awaiting side: the wait ends with 0 or an errno, as a send does. */

PySendResult aio_queued_send_step(PyObject *object, PyObject *Py_UNUSED(value), PyObject **result)
{
    QueuedSend *self = (QueuedSend *)object;
    MessageState *state = self->state;
    int is_parked = self->wakeup.state == AIO_WAITING, is_new = self->wakeup.state == AIO_IDLE;
    int code;

    *result = NULL;
    if (!state || is_parked) { /* the wait was ended with an error, or not by a wake */
        aio_line_remove(self);
        if (self->wakeup.error || is_parked)
            aio_wakeup_next(object);
        else
            PyErr_SetString(PyExc_RuntimeError, "the wait is over");
        return PYGEN_ERROR;
    }
    aio_wakeup_forget(&self->wakeup);
    if (state->first != self || connection_lacks(state->connection)) {
        if (!self->owned)
            Py_INCREF(object);
        self->owned = 1;
        *result = aio_wakeup_next(object);
        return PYGEN_NEXT;
    }
    code = self->kind == NO_FRAME ? 0
                                  : connection_send_frame(state->connection, self->kind,
                                                          self->view.buf, (uint64_t)self->view.len,
                                                          self->argument, self->has_imm, self->imm);
    aio_line_remove(self);
    if (is_new)
        line_hand_on_room(state);
    *result = PyLong_FromLong(code);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *queued_send_next(PyObject *object)
{
    return aio_iterate(object, aio_queued_send_step);
}

static PyType_Slot queued_send_slots[] = {
    {Py_tp_traverse, queued_send_traverse},
    {Py_tp_clear, queued_send_clear},
    {Py_tp_dealloc, queued_send_dealloc},
    {Py_am_send, aio_queued_send_step},
    {Py_tp_iternext, queued_send_next},
    {Py_tp_doc, "A task that waits in line to send a message; awaited by one task."},
    {0, NULL},
};

PyType_Spec aio_queued_send_spec = {
    .name = "aiordma._core.QueuedSend",
    .basicsize = sizeof(QueuedSend),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = queued_send_slots,
};
