/*
 * The events of a connection.  A drain notes them while it polls (connection.c), and delivers them
 * here: to the tasks that wait, which are resumed on the spot, and to the handler in Python.
 *
 * All of this runs inside the loop's call of a Readable, with no task of the program running.  An
 * exception that comes out of a task there would end the drain for all connections; so the events
 * that are left are delivered anew, by a call of the loop's.
 */
#include "core.h"

/*
 * Have the loop deliver events in its next turn.  A task that was resumed, or the handler, has
 * raised SystemExit or KeyboardInterrupt, which end the loop; programs then run it again to end
 * their tasks, and these get what is left.
 */
static void run_soon(MessageState *self, uint32_t events)
{
    aio_call_soon(self->receive_wakeup->wakeup.loop, (PyObject *)self, events);
}

#define FOR_HANDLER                                                                                \
    (AIO_EVENT_SENT | AIO_EVENT_FRAMES | AIO_EVENT_FAILED | AIO_EVENT_IDLE | AIO_EVENT_NOTED)

/* Call the handler, if there is one; 0, or -1 with an exception. */
static int call_handler(MessageState *self, uint32_t events)
{
    PyObject *handler = self->handler;

    return handler && handler != Py_None ? aio_call_with(handler, events) : 0;
}

/* No message of the peer resumes such a line. */
static int line_waits_for_slot(const struct aio_connection *c)
{
    return connection_queued(c) && connection_lacks(c) == AIO_LACKS_SLOT;
}

/*
 * Slots or credits have come: resume the tasks in line.  Python is called when the line has begun
 * to wait for a slot alone, so that completed sends wake the loop, and when it is empty again.  0;
 * -1 with the exception of a task, or -2 with that of the handler.
 */
static int deliver_room(MessageState *self)
{
    const struct aio_connection *c = self->connection;

    if (aio_line_resume(self))
        return -1;
    if (self->soon && self->first && !connection_lacks(c))
        run_soon(self, AIO_EVENT_ROOM); /* as tasks may join the line before those have run */
    if ((connection_slot_awaited(c) ? !connection_queued(c) : line_waits_for_slot(c)) &&
        call_handler(self, AIO_EVENT_ROOM))
        return -2;
    return 0;
}

/* `late`: these are delivered anew.  A handler that raises again is not called a third time. */
static int deliver_events(MessageState *self, uint32_t events, int late)
{
    if (events & FOR_HANDLER && call_handler(self, events & FOR_HANDLER)) {
        run_soon(self, late ? events & ~(uint32_t)FOR_HANDLER : events);
        return -1;
    }
    if (events & AIO_EVENT_ROOM) {
        int given = deliver_room(self);

        if (given) {
            events &= AIO_EVENT_ROOM | AIO_EVENT_OPERATED | AIO_EVENT_ARRIVED;
            run_soon(self, late && given == -2 ? events & ~(uint32_t)AIO_EVENT_ROOM : events);
            return -1;
        }
    }
    if (events & AIO_EVENT_OPERATED && aio_operations_done(self)) {
        run_soon(self, events & (AIO_EVENT_OPERATED | AIO_EVENT_ARRIVED));
        return -1;
    }
    if (events & AIO_EVENT_ARRIVED) {
        int woken = self->requests ? aio_requests_deliver(self->requests, self->soon) < 0 ? -1 : 1
                                   : aio_wake_or_soon(&self->receive_wakeup->wakeup, self->soon);

        if (woken < 0) {
            run_soon(self, AIO_EVENT_ARRIVED);
            return -1;
        }
        if (!woken) {
            PyObject *starved = connection_due(self->connection) <= 1 ? Py_True : Py_False;
            PyObject *told =
                PyObject_CallMethodObjArgs(self->receiver, aio_name.on_arrival, starved, NULL);

            Py_XDECREF(told);
            return told ? 0 : -1;
        }
        /* Nothing that the program has sent in answer took the credit along. */
        if (connection_puts_credit_off(self->connection)) {
            connection_note_error(self->connection, connection_send_credits(self->connection));
            if (connection_error(self->connection))
                return call_handler(self, AIO_EVENT_FAILED);
        }
    }
    return 0;
}

/* Post the chain after the events, whose result `rc` and exception, if there is one, are kept. */
static int post_chain(MessageState *self, int rc)
{
    PyObject *type, *value, *traceback;
    int code;

    PyErr_Fetch(&type, &value, &traceback);
    code = connection_post_sends(self->connection);
    PyErr_Restore(type, value, traceback);
    if (!code)
        return rc;
    connection_note_error(self->connection, code);
    if (!rc)
        return call_handler(self, AIO_EVENT_FAILED);
    run_soon(self, AIO_EVENT_FAILED);
    return rc;
}

/* Deliver events, then post what was sent meanwhile.  No events: the turn of the loop has ended. */
int aio_message_events(MessageState *self, uint32_t events, int late)
{
    int rc;

    if (aio_turn.thread == self->thread)
        aio_turn.loop = self->receive_wakeup->wakeup.loop;
    connection_begin_delivery(self->connection, events);
    rc = deliver_events(self, events, late);
    aio_turn.loop = NULL;
    return connection_end_delivery(self->connection) ? post_chain(self, rc) : rc;
}

static int message_state_complete(PyObject *object, const struct ibv_wc *wc)
{
    return connection_complete(((MessageState *)object)->connection, wc);
}

static int message_state_deliver(PyObject *object, uint32_t events, bool by_loop)
{
    ((MessageState *)object)->soon = by_loop;
    return aio_message_events((MessageState *)object, events, 0);
}

const struct aio_sink aio_message_sink = {message_state_complete, message_state_deliver};
