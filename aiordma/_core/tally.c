/*
 * Sums of the counters of all connections and streams that the process has had.
 *
 * A state is in the list until its end, when it is taken out and its counters are added to those of
 * the states that have ended.  Both happen in one step, so that no sum ever falls: not when a
 * connection closes, and not when its program receives the messages that had arrived before.
 */
#include "core.h"

enum {
    MESSAGES_SENT,
    BYTES_SENT,
    MESSAGES_RECEIVED,
    BYTES_RECEIVED,
    BYTES_READ,
    BYTES_WRITTEN,
    ATOMICS,
    STREAM_BYTES_SENT,
    STREAM_BYTES_RECEIVED,
    SUMS,
};

static struct aio_counted *counted;
static uint64_t ended[SUMS];

static void add(uint64_t *sums, const struct aio_counted *each)
{
    const struct aio_connection *c = each->messages;
    const struct aio_stream *s = each->stream;

    if (c) {
        sums[MESSAGES_SENT] += (uint64_t)connection_messages_sent(c);
        sums[BYTES_SENT] += (uint64_t)connection_bytes_sent(c);
        sums[MESSAGES_RECEIVED] += (uint64_t)connection_messages_received(c);
        sums[BYTES_RECEIVED] += (uint64_t)connection_bytes_received(c);
        sums[BYTES_READ] += (uint64_t)connection_bytes_read(c);
        sums[BYTES_WRITTEN] += (uint64_t)connection_bytes_written(c);
        sums[ATOMICS] += (uint64_t)connection_atomics(c);
    }
    if (s) {
        sums[STREAM_BYTES_SENT] += (uint64_t)stream_bytes_sent(s);
        sums[STREAM_BYTES_RECEIVED] += (uint64_t)stream_bytes_received(s);
    }
}

/* Count a state from now on; `self` is a part of its object. */
void aio_count_in(struct aio_counted *self, const struct aio_connection *messages,
                  const struct aio_stream *stream)
{
    self->messages = messages;
    self->stream = stream;
    self->next = counted;
    self->place = &counted;
    if (counted)
        counted->place = &self->next;
    counted = self;
}

/* The state ends; nothing if it was not counted. */
void aio_count_out(struct aio_counted *self)
{
    if (!self->place)
        return;
    add(ended, self);
    *self->place = self->next;
    if (self->next)
        self->next->place = self->place;
    self->place = NULL;
}

static PyObject *module_totals(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
    uint64_t sums[SUMS];
    PyObject *result;

    memcpy(sums, ended, sizeof(sums));
    for (const struct aio_counted *each = counted; each; each = each->next)
        add(sums, each);
    result = PyTuple_New(SUMS);
    for (int i = 0; result && i < SUMS; i++) {
        PyObject *sum = PyLong_FromUnsignedLongLong(sums[i]);

        if (!sum || PyTuple_SetItem(result, i, sum))
            Py_CLEAR(result);
    }
    return result;
}

PyMethodDef aio_tally_functions[] = {
    {"totals", module_totals, METH_NOARGS,
     "Sums over all MessageStates and StreamStates that there have been."},
    {NULL, NULL, 0, NULL},
};
