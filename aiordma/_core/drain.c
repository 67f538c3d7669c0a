/*
 * Drain: takes the completions of one completion channel, and calls the owners of the states.
 *
 * Owns a Drain: the queues that are being polled, and the events for which no owner was called yet.
 * Taking events and completions, arming and acknowledging are done with the interpreter lock held
 * throughout: a queue that another thread destroys, and a state that a finalizer removes, go before
 * or after such a step, never in it.  Between the steps the lock may be given away, and what was
 * there before may be gone: the owners are Python, and a turn of the Poller polls without the lock.
 *
 * For each event: arm the queue, then poll it until it is empty, then acknowledge the event.
 *   Arm before poll: ibv_req_notify_cq holds for one event and is silent about completions that are
 *   there already; to poll first would lose the completion that lands in between.
 *   Acknowledge last: ibv_destroy_cq, in another thread, waits for it, so that the queue cannot be
 *   freed before.
 *
 * Completions of a connection or stream are taken by its state, without Python, by the functions
 * of its type (struct aio_sink); the drain notes the events.  Once a channel is empty, the owners
 * of the states are called with their events, in the order of the first completions, and resume
 * tasks.  An owner may poll a queue, and so bring events for other owners: those wait for the next
 * turn of the loop.
 *
 * All else (completions of native queue pairs, failures, queues that the program polls) goes the
 * way of verbs/comp_channel.py and loop/pump.py.
 */
#include "core.h"

/* Drain */

#define PENDING  32
#define SEGMENTS 64
#define ROUNDS   32 /* of draining and calling owners, before the loop has its turn */

/* Completions of one queue that go to Python, in the order in which they were polled. */
struct segment {
    uint64_t token;
    uint32_t count; /* 0: the program polls the queue; there was an event */
};

/* Who takes the completions with a wr_id. */
struct entry {
    const struct aio_sink *sink; /* NULL: they are Python's */
    uint64_t id;                 /* the wr_id, without the sub-index */
    PyObject *keeper;            /* the object of the sink */
    PyObject *owner;             /* is called with the events: the keeper, or a function */
    uint32_t events;             /* brought by the drain that is under way */
};

/* The index of an entry, and its events, in one word. */
#define PACK_EVENTS(index, events) ((index) | (events) << AIO_INDEX_BITS)

typedef struct {
    PyObject_HEAD
    struct ibv_comp_channel *channel;
    struct ibv_wc *completions; /* for Python */
    uint32_t *ready;            /* entries that this drain has brought events */
    int most;                   /* completions taken at once */
    uint32_t n_completions;
    uint32_t n_ready;
    struct ibv_cq *pending[PENDING]; /* their event is still to be acknowledged */
    uint32_t n_pending;
    struct segment segments[SEGMENTS];
    uint32_t n_segments;
    int spare; /* so many drains may stop after one event, without the read that finds none */
    int again; /* go on where the last drain has stopped, and take no new events */
    char more;
    int failed; /* errno of `failed_call` */
    const char *failed_call;
    struct entry *entries; /* by index */
    uint32_t n_entries;
    uint32_t *undelivered; /* events for which no owner was called yet, from `first` to `last`: see
                              PACK_EVENTS */
    uint32_t first;
    uint32_t last;
    uint32_t room;
    PyObject *error;  /* the exception of a task, for drain() to raise */
    int left;         /* the result of a drain, for drain() */
    PyObject *poller; /* Poller, or NULL: every wait is by event */
    char draining;
    char deferred;
    char stopped;
    char soon; /* the loop resumes the tasks, in turns of their own: it names a slow one in its
                  debug mode; and a task that runs the loop itself must not be inside of the reader,
                  which the loop could not call again */
    PyObject *weak;
} Drain;

static int drain_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Drain *self = (Drain *)object;
    static char *names[] = {"channel", "most", NULL};
    unsigned long long channel;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Ki", names, &channel, &self->most))
        return -1;
    if (self->most <= 0 || self->most > 0xFFFF) {
        PyErr_SetString(PyExc_ValueError, "no such number of completions");
        return -1;
    }
    self->channel = (struct ibv_comp_channel *)(uintptr_t)channel;
    self->completions = PyMem_Calloc((size_t)self->most, sizeof(*self->completions));
    self->ready = PyMem_Calloc((size_t)self->most, sizeof(*self->ready));
    if (!self->completions || !self->ready) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *drain_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, drain_init);
}

static int drain_traverse(PyObject *object, visitproc visit, void *arg)
{
    Drain *self = (Drain *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->error);
    Py_VISIT(self->poller);
    for (uint32_t i = 0; i < self->n_entries; i++) {
        Py_VISIT(self->entries[i].owner);
        Py_VISIT(self->entries[i].keeper);
    }
    return 0;
}

static int drain_clear(PyObject *object)
{
    Drain *self = (Drain *)object;

    Py_CLEAR(self->error);
    Py_CLEAR(self->poller);
    for (uint32_t i = 0; i < self->n_entries; i++) {
        self->entries[i].sink = NULL;
        Py_CLEAR(self->entries[i].owner);
        Py_CLEAR(self->entries[i].keeper);
    }
    return 0;
}

static void drain_dealloc(PyObject *object)
{
    Drain *self = (Drain *)object;

    PyObject_GC_UnTrack(object);
    PyObject_ClearWeakRefs(object);
    drain_clear(object);
    PyMem_Free(self->completions);
    PyMem_Free(self->ready);
    PyMem_Free(self->entries);
    PyMem_Free(self->undelivered);
    aio_free(object);
}

/* Entries */

static int grow(void **array, size_t size, uint32_t before, uint32_t count)
{
    char *larger = PyMem_Realloc(*array, count * size);

    if (!larger) {
        PyErr_NoMemory();
        return -1;
    }
    memset(larger + before * size, 0, (count - before) * size);
    *array = larger;
    return 0;
}

static const struct aio_sink *sink_of(PyObject *keeper)
{
    if (Py_IS_TYPE(keeper, aio_message_state_type))
        return &aio_message_sink;
    if (Py_IS_TYPE(keeper, aio_stream_state_type))
        return &aio_stream_sink;
    PyErr_SetString(PyExc_TypeError, "a MessageState or StreamState is needed");
    return NULL;
}

/*
 * add(wr_id, state, owner): completions with this wr_id are for the state. A second call sets a new
 * owner, which is called with the events that wait.
 */
static PyObject *drain_add(PyObject *object, PyObject *args)
{
    Drain *self = (Drain *)object;
    unsigned long long wr_id;
    const struct aio_sink *sink;
    PyObject *keeper, *owner;
    struct entry *entry, before;
    uint32_t index;

    if (!PyArg_ParseTuple(args, "KOO", &wr_id, &keeper, &owner))
        return NULL;
    sink = sink_of(keeper);
    if (!sink)
        return NULL;
    index = (uint32_t)wr_id & AIO_INDEX_MASK;
    if (index == AIO_INDEX_MASK) {
        PyErr_SetString(PyExc_ValueError, "no such index");
        return NULL;
    }
    if (index >= self->n_entries) {
        uint32_t count = index + 1 > 2 * self->n_entries ? index + 1 : 2 * self->n_entries;

        if (grow((void **)&self->entries, sizeof(*self->entries), self->n_entries, count))
            return NULL;
        self->n_entries = count;
    }
    entry = &self->entries[index];
    before = *entry;
    *entry = (struct entry){
        .sink = sink,
        .id = wr_id & ~AIO_SUB_MASK,
        .keeper = Py_NewRef(keeper),
        .owner = Py_NewRef(owner),
    };
    Py_XDECREF(before.owner);
    Py_XDECREF(before.keeper);
    Py_RETURN_NONE;
}

/*
 * remove(wr_id): completions with this wr_id are for Python from now on; events that wait are lost.
 */
static PyObject *drain_remove_state(PyObject *object, PyObject *wr_id)
{
    Drain *self = (Drain *)object;
    unsigned long long id = PyLong_AsUnsignedLongLong(wr_id);
    uint32_t index = (uint32_t)id & AIO_INDEX_MASK;
    struct entry before;

    if (PyErr_Occurred())
        return NULL;
    if (index >= self->n_entries)
        Py_RETURN_NONE;
    for (uint32_t i = self->first; i < self->last; i++)
        if ((self->undelivered[i] & AIO_INDEX_MASK) == index)
            self->undelivered[i] |= AIO_INDEX_MASK;
    before = self->entries[index];
    self->entries[index] = (struct entry){0};
    Py_XDECREF(before.owner);
    Py_XDECREF(before.keeper);
    Py_RETURN_NONE;
}

/* Have the state of a completion take it; 0 if it is for Python. */
static int drain_dispatch(Drain *self, const struct ibv_wc *wc)
{
    uint64_t index = wc->wr_id & AIO_INDEX_MASK;
    struct entry *entry;
    int events;

    if (index >= self->n_entries)
        return 0;
    entry = &self->entries[index];
    if (!entry->sink || entry->id != (wc->wr_id & ~AIO_SUB_MASK))
        return 0;
    events = entry->sink->take(entry->keeper, wc);
    if (events < 0)
        return 0;
    if (events && !entry->events)
        self->ready[self->n_ready++] = (uint32_t)index;
    entry->events |= (uint32_t)events;
    return 1;
}

/* Move the events to `ready`: states may take further completions before their owners are called.
 */
static void collect_events(Drain *self)
{
    for (uint32_t i = 0; i < self->n_ready; i++) {
        struct entry *entry = &self->entries[self->ready[i]];

        self->ready[i] = PACK_EVENTS(self->ready[i], entry->events);
        entry->events = 0;
    }
}

/* Queues */

/* Have the states take polled completions, which lie behind those for Python. */
static void sort_out(Drain *self, int got)
{
    uint32_t n = self->n_completions;

    for (uint32_t i = n; i < n + (uint32_t)got; i++) {
        if (!drain_dispatch(self, &self->completions[i])) {
            if (i != self->n_completions)
                self->completions[self->n_completions] = self->completions[i];
            self->n_completions++;
        }
    }
}

/* A call has failed; the first one of a drain counts. */
static void drain_record_error(Drain *self, int code, const char *call)
{
    if (self->failed)
        return;
    self->failed = code;
    self->failed_call = call;
}

/*
 * Poll one queue, at most `turn` completions, of which *left loses as many as were polled.  1 when
 * the queue is empty, 0 when the turn is over, -errno.
 */
static int poll_queue(Drain *self, struct ibv_cq *cq, int turn, int *left)
{
    while (turn > 0) {
        int got = ibv_poll_cq(cq, turn, self->completions + self->n_completions);

        if (got < 0)
            return -EIO;
        *left -= got;
        sort_out(self, got);
        if (got < turn)
            return 1;
        turn -= got;
    }
    return 0;
}

/* For the next event. */
static void arm(Drain *self, struct ibv_cq *cq, struct aio_cq *own)
{
    int code = aio_arm(cq, own);

    if (code)
        drain_record_error(self, code, "ibv_req_notify_cq");
}

static void add_segment(Drain *self, const struct aio_cq *own, uint32_t count)
{
    self->segments[self->n_segments++] = (struct segment){.token = own->token, .count = count};
}

/*
 * Take the channel's events; managed queues are armed and wait in `pending` for their turn.
 *
 * Mostly there is a single event.  After a second read that has found nothing, the next SPARE
 * drains do without it: the descriptor stays readable while there is another event, so that the
 * next turn of the loop takes it.  After a second event all events are taken, each time.
 */
#define SPARE 64

static Poller *poller_of(const Drain *self)
{
    return (Poller *)self->poller;
}

/* Whether a Poller is going to poll the queue, and to arm it at last. */
static int is_polled(const Drain *self, const struct aio_cq *own)
{
    return own->spins && poller_of(self) && poller_of(self)->asked;
}

static void admit(Drain *self)
{
    int taken = 0;

    while (self->n_pending < PENDING && self->n_segments < SEGMENTS) {
        struct ibv_cq *cq;
        struct aio_cq *own;
        void *context;

        if (taken == 1 && self->spare > 0) {
            self->spare--;
            return;
        }
        if (ibv_get_cq_event(self->channel, &cq, &context)) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                drain_record_error(self, errno, "ibv_get_cq_event");
            else if (taken == 1)
                self->spare = SPARE;
            return;
        }
        taken++;
        own = context;
        own->events++;
        if (!own->managed) {
            add_segment(self, own, 0);
            ibv_ack_cq_events(cq, 1);
            continue;
        }
        if (!own->pending && is_polled(self, own)) {
            own->unarmed = 1;
            aio_settle(cq, own);
            continue;
        }
        own->unarmed = (own->arm_late || own->spins) && !own->pending;
        if (!own->unarmed && !own->retired)
            arm(self, cq, own);
        if (own->pending) { /* will be polled until empty after this arming, too */
            ibv_ack_cq_events(cq, 1);
            continue;
        }
        own->pending = 1;
        self->pending[self->n_pending++] = cq;
    }
}

/* Take entry i out of `pending`; the caller acknowledges its event. */
static struct ibv_cq *remove_pending(Drain *self, uint32_t i)
{
    struct ibv_cq *cq = self->pending[i];

    ((struct aio_cq *)cq->cq_context)->pending = 0;
    self->n_pending--;
    memmove(&self->pending[i], &self->pending[i + 1], (self->n_pending - i) * sizeof(cq));
    return cq;
}

/* The first of `pending` is done: its event has been dealt with. */
static void settle(Drain *self)
{
    struct ibv_cq *cq = remove_pending(self, 0);

    aio_settle(cq, cq->cq_context);
}

/*
 * Drain the channel once.
 *
 * Queues take turns of TURN completions, so that a queue that fills as fast as it is polled delays
 * the others by no more than that.  When `most` completions were taken, the queues that are not
 * empty stay in `pending`, `more` is set and the caller has to call again without waiting for the
 * descriptor: completions from before the arming raise no event.
 *
 * A queue with `arm_late` is armed when it was found empty, and then polled once more.  A program
 * often answers a completion with a request that completes at once: so the caller calls the owners,
 * and drains again (AGAIN), until the queue is empty.  Until then the loop does not sleep, and
 * needs no event.  This is done only while the queue is the only queue in `pending`.  A queue with
 * `spins` is treated alike, until a Poller polls it, which then arms it.
 *
 * A queue that was found to have fewer completions than were asked for is empty: a later completion
 * raises an event, because the queue was armed before.
 *
 * Returns 0 if nothing is left to do; else the sum of LOOK: there is work for Python; AGAIN: to be
 * called again after the owners; EVENTS_ONLY: owners are to be called.
 */
#define TURN        64
#define LOOK        1
#define AGAIN       2
#define EVENTS_ONLY 4

static int drain_once(Drain *self)
{
    int left = self->most, again = 0;

    self->failed = 0;
    self->n_completions = self->n_segments = self->n_ready = 0;
    if (self->again)
        self->again = 0;
    else
        admit(self);
    while (self->n_pending && left > 0 && self->n_segments < SEGMENTS) {
        struct ibv_cq *cq = self->pending[0];
        struct aio_cq *own = cq->cq_context;
        uint32_t before = self->n_completions;
        int turn = TURN < left ? TURN : left, empty = 1;

        if (!own->retired) {
            int had = left;

            if (own->unarmed && self->n_pending > 1)
                arm(self, cq, own);
            empty = poll_queue(self, cq, turn, &left);
            if (own->unarmed && left == had) {
                arm(self, cq, own);
                empty = poll_queue(self, cq, turn, &left);
            }
            again = own->unarmed && empty > 0;
        }
        if (self->n_completions > before)
            add_segment(self, own, self->n_completions - before);
        if (again)
            break;
        if (empty < 0)
            drain_record_error(self, -empty, "ibv_poll_cq");
        if (empty) {
            settle(self);
            continue;
        }
        memmove(&self->pending[0], &self->pending[1], (self->n_pending - 1) * sizeof(cq));
        self->pending[self->n_pending - 1] = cq;
    }
    self->more = self->n_pending > 0;
    collect_events(self);
    return (self->n_ready ? EVENTS_ONLY : 0) | (again ? AGAIN : 0) |
           (self->n_segments || (self->more && !again) || self->failed ? LOOK : 0);
}

/* Owners */

/* Call the owner of a state with its events, unless the state was removed. */
static int deliver(Drain *self, uint32_t told)
{
    uint32_t index = told & AIO_INDEX_MASK, events = told >> AIO_INDEX_BITS;
    const struct entry *entry = index < self->n_entries ? &self->entries[index] : NULL;
    PyObject *owner;
    int rc;

    if (!entry || !entry->sink)
        return 0;
    owner = Py_NewRef(entry->owner); /* which may remove its state */
    rc = owner == entry->keeper ? entry->sink->deliver(owner, events, self->soon)
                                : aio_call_with(owner, events);
    Py_DECREF(owner);
    return rc;
}

/* Append the events of the last drain or sweep to the undelivered ones: 0, or -1 without memory. */
static int queue_events(Drain *self)
{
    uint32_t count = self->n_ready, kept = self->last - self->first;

    if (count > self->room - self->last) {
        if (self->first)
            memmove(self->undelivered, self->undelivered + self->first,
                    kept * sizeof(*self->undelivered));
        self->first = 0;
        self->last = kept;
        if (count > self->room - kept) {
            uint32_t most = (uint32_t)self->most;
            uint32_t room = kept + count > most ? 2 * (kept + count) : most;

            if (grow((void **)&self->undelivered, sizeof(*self->undelivered), self->room, room))
                return -1;
            self->room = room;
        }
    }
    if (count)
        memcpy(self->undelivered + self->last, self->ready, count * sizeof(*self->undelivered));
    self->last += count;
    self->n_ready = 0;
    return 0;
}

/* Call the owners of the events that wait now. 0, or -1: then the other events still wait. */
static int deliver_all(Drain *self)
{
    for (uint32_t count = self->last - self->first; count && self->first != self->last; count--) {
        if (deliver(self, self->undelivered[self->first++]))
            return -1;
    }
    if (self->first == self->last)
        self->first = self->last = 0;
    return 0;
}

/*
 * Drain, and call the owners: 0 if all is done, -1 with an exception, else the work that is left
 * for Python.
 *
 * Tasks are resumed here. Functions that must not run among them wait for the end (`draining`).
 */
static int drain_and_deliver(Drain *self)
{
    for (int round = 1;; round++) {
        int took = drain_once(self);

        if (!took)
            return 0;
        self->draining = 1;
        if (queue_events(self))
            return -1;
        if (took & LOOK)
            return took;
        if (deliver_all(self))
            return -1;
        if (!(took & AGAIN) || self->stopped)
            return 0;
        if (self->n_pending && is_polled(self, self->pending[0]->cq_context)) {
            settle(self);
            return 0;
        }
        if (round == ROUNDS || self->deferred)
            return AGAIN; /* in another turn of the loop, and with all other events */
        self->again = 1;
    }
}

/*
 * A turn of the Poller, as drain_and_deliver.  Completions that are polled without the interpreter
 * lock are on the stack: the drain is not to be touched without it.
 */
static int spin_and_deliver(Drain *self)
{
    Poller *poller = poller_of(self);
    PyObject *type, *value, *traceback;
    struct ibv_wc polled[TURN];
    uint64_t token;
    int got, rc = 0;

    if (!poller || !poller->ask) /* the channel is closed, or has failed */
        return 0;
    Py_INCREF((PyObject *)poller);
    self->failed = 0;
    self->n_completions = self->n_segments = self->n_ready = 0;
    got = aio_poller_turn(poller, polled, TURN < self->most ? TURN : self->most, &token);
    self->more = self->n_pending > 0;
    if (got < 0) {
        drain_record_error(self, EIO, "ibv_poll_cq");
        rc = LOOK;
    } else if (got && !self->stopped) {
        memcpy(self->completions, polled, (size_t)got * sizeof(*polled));
        sort_out(self, got);
        if (self->n_completions)
            self->segments[self->n_segments++] =
                (struct segment){.token = token, .count = self->n_completions};
        collect_events(self);
        self->draining = 1;
        rc = queue_events(self) ? -1 : self->n_segments ? LOOK : deliver_all(self);
    }
    /* Whatever an owner has raised: queues may not be armed yet. */
    PyErr_Fetch(&type, &value, &traceback);
    if ((got > 0 || poller->open) && aio_poller_ask(poller) && rc >= 0)
        rc = -1;
    else
        PyErr_Restore(type, value, traceback);
    Py_DECREF((PyObject *)poller);
    return rc;
}

/* For Python */

static PyObject *drain_drain(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Drain *self = (Drain *)object;
    int took;

    self->draining = 1;
    if (self->error) {
        PyObject *error = self->error;

        self->error = NULL;
        self->left = 0;
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
        return NULL;
    }
    took = self->left;
    self->left = 0;
    if (!took && !self->stopped)
        took = drain_and_deliver(self);
    if (took < 0)
        return NULL;
    return PyBool_FromLong(!took);
}

/* As verbs/wc.py has it: the fields of struct ibv_wc in their order. */
static PyObject *record_of(const struct ibv_wc *wc)
{
    return Py_BuildValue("(KiiIIIIIIHHBB)", (unsigned long long)wc->wr_id, (int)wc->status,
                         (int)wc->opcode, wc->vendor_err, wc->byte_len, wc->imm_data, wc->qp_num,
                         wc->src_qp, wc->wc_flags, wc->pkey_index, wc->slid, wc->sl,
                         wc->dlid_path_bits);
}

static PyObject *records_of(const struct ibv_wc *completions, uint32_t count)
{
    PyObject *records = PyList_New(count);

    for (uint32_t i = 0; records && i < count; i++) {
        PyObject *record = record_of(&completions[i]);

        if (!record || PyList_SetItem(records, i, record))
            replace(&records, NULL);
    }
    return records;
}

/*
 * result(): the work that the last drain has left for Python: a list of (token of the queue, its
 * completions; None where the program polls the queue), whether there is more, and the errno and
 * name of a call that has failed, or 0 and "".
 */
static PyObject *drain_result(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Drain *self = (Drain *)object;
    PyObject *segments = PyList_New(self->n_segments);
    uint32_t from = 0;

    for (uint32_t i = 0; segments && i < self->n_segments; i++) {
        const struct segment *segment = &self->segments[i];
        PyObject *records = segment->count ? records_of(self->completions + from, segment->count)
                                           : Py_NewRef(Py_None);
        PyObject *item =
            records ? Py_BuildValue("(KN)", (unsigned long long)segment->token, records) : NULL;

        if (!item || PyList_SetItem(segments, i, item))
            replace(&segments, NULL);
        from += segment->count;
    }
    if (!segments)
        return NULL;
    return Py_BuildValue("(NOis)", segments, self->more ? Py_True : Py_False, self->failed,
                         self->failed ? self->failed_call : "");
}

/* `or_nothing`: None also if the queue is empty. */
static PyObject *sweep(Drain *self, struct ibv_cq *cq, int or_nothing)
{
    int left = self->most, code;
    uint32_t arrived = 0;
    PyObject *records;

    if (self->stopped)
        Py_RETURN_NONE;
    self->n_completions = self->n_ready = 0;
    code = poll_queue(self, cq, self->most, &left);
    if (or_nothing && left == self->most)
        Py_RETURN_NONE;
    collect_events(self);
    for (uint32_t i = 0; i < self->n_ready; i++)
        arrived += (self->ready[i] >> AIO_INDEX_BITS) & AIO_EVENT_ARRIVED;
    records = records_of(self->completions, self->n_completions);
    if (queue_events(self))
        replace(&records, NULL);
    if (!records)
        return NULL;
    if (code < 0) {
        Py_DECREF(records);
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(iINO)", self->most - left, arrived, records, code ? Py_False : Py_True);
}

/*
 * sweep(address): poll a queue without an event.  How many completions it had, of those how many
 * brought the first event of a state's program, the completions for Python, and whether there may
 * be more; None if the queue cannot be polled.  The events are put into the line.
 */
static PyObject *drain_sweep(PyObject *object, PyObject *address)
{
    Drain *self = (Drain *)object;
    struct ibv_cq *cq = PyLong_AsVoidPtr(address);

    if (!cq) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no queue");
        return NULL;
    }
    return sweep(self, cq, 0);
}

/* The same for the SafetyPoll; None also if the queue is empty, or is polled in another way. */
PyObject *aio_drain_look(PyObject *drain, struct ibv_cq *cq)
{
    Drain *self = (Drain *)drain;

    if (self->n_pending || is_polled(self, cq->cq_context))
        Py_RETURN_NONE;
    return sweep(self, cq, 1);
}

static PyObject *drain_deliver(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (deliver_all((Drain *)object))
        return NULL;
    Py_RETURN_NONE;
}

/*
 * forget(address): acknowledge the event of a queue in `pending`, before the queue is destroyed;
 * those of all queues (address 0) when no call will finish the drain.
 */
static PyObject *drain_forget(PyObject *object, PyObject *address)
{
    Drain *self = (Drain *)object;
    struct ibv_cq *cq = PyLong_AsVoidPtr(address);

    if (PyErr_Occurred())
        return NULL;
    for (uint32_t i = self->n_pending; i-- > 0;) {
        if (!cq || self->pending[i] == cq) {
            struct ibv_cq *left = remove_pending(self, i);

            aio_acknowledge(left, left->cq_context, 1);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *drain_defer(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Drain *self = (Drain *)object;

    self->deferred |= self->draining;
    return PyBool_FromLong(self->draining);
}

static PyObject *drain_finish(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Drain *)object)->draining = ((Drain *)object)->deferred = 0;
    Py_RETURN_NONE;
}

static PyObject *drain_take_all(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Drain *)object)->spare = 0;
    Py_RETURN_NONE;
}

static PyObject *drain_stop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Drain *)object)->stopped = 1;
    Py_RETURN_NONE;
}

static PyObject *drain_resume_by_loop(PyObject *object, PyObject *value)
{
    int soon = PyObject_IsTrue(value);

    if (soon < 0)
        return NULL;
    ((Drain *)object)->soon = (char)soon;
    Py_RETURN_NONE;
}

static PyObject *drain_poll_with(PyObject *object, PyObject *poller)
{
    if (!Py_IS_TYPE(poller, aio_poller_type)) {
        PyErr_SetString(PyExc_TypeError, "a Poller is needed");
        return NULL;
    }
    replace(&((Drain *)object)->poller, Py_NewRef(poller));
    Py_RETURN_NONE;
}

static PyObject *drain_get_undelivered(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(((Drain *)object)->last - ((Drain *)object)->first);
}

static PyObject *drain_get_n_states(PyObject *object, void *Py_UNUSED(unused))
{
    Drain *self = (Drain *)object;
    long count = 0;

    for (uint32_t i = 0; i < self->n_entries; i++)
        count += self->entries[i].sink != NULL;
    return PyLong_FromLong(count);
}

static PyMethodDef drain_methods[] = {
    {"add", drain_add, METH_VARARGS,
     "Hand the completions of an entry to a state: its wr_id, the state, what is told of events."},
    {"remove", drain_remove_state, METH_O, "Give the entry of a wr_id its completions again."},
    {"drain", drain_drain, METH_NOARGS,
     "Drain the channel, unless that was done already; False if `result` has something."},
    {"result", drain_result, METH_NOARGS,
     "What the last drain has left: [(token, completions or None)], whether there is more, errno."},
    {"sweep", drain_sweep, METH_O,
     "Poll the queue with this address without an event: how many it had, how many of them brought "
     "a message, completions for Python, whether there may be more; None if it cannot be polled."},
    {"deliver", drain_deliver, METH_NOARGS,
     "Tell the owners of events; with an exception, the others are still to be told."},
    {"forget", drain_forget, METH_O,
     "Acknowledge the event of the queue with this address that is at hand; 0: of all queues."},
    {"defer", drain_defer, METH_NOARGS,
     "Python has a function to run when the tasks have run; False if none are being resumed."},
    {"finish", drain_finish, METH_NOARGS, "The tasks have run, and so have Python's functions."},
    {"take_all", drain_take_all, METH_NOARGS,
     "The next drain takes all events, even if the last ones have found a single event each."},
    {"stop", drain_stop, METH_NOARGS, "The channel is not to be touched any more."},
    {"resume_by_loop", drain_resume_by_loop, METH_O,
     "Whether the loop resumes the tasks, by call_soon."},
    {"poll_with", drain_poll_with, METH_O, "Waits may begin with polling, by this Poller."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef drain_members[] = {
    {"draining", T_BOOL, offsetof(Drain, draining), READONLY, "Whether tasks are being resumed."},
    {"poller", T_OBJECT, offsetof(Drain, poller), READONLY,
     "Its Poller, if a wait begins with a spin."},
    {"n_pending", T_UINT, offsetof(Drain, n_pending), READONLY, "Queues that are being polled."},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Drain, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef drain_getset[] = {
    {"undelivered", drain_get_undelivered, NULL, "How many events no owner was told of yet.", NULL},
    {"n_states", drain_get_n_states, NULL, "How many states it hands completions to.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot drain_slots[] = {
    {Py_tp_new, drain_new},
    {Py_tp_dealloc, drain_dealloc},
    {Py_tp_traverse, drain_traverse},
    {Py_tp_clear, drain_clear},
    {Py_tp_methods, drain_methods},
    {Py_tp_members, drain_members},
    {Py_tp_getset, drain_getset},
    {Py_tp_doc, "Drains one completion channel."},
    {0, NULL},
};

PyType_Spec aio_drain_spec = {
    .name = "aiordma._core.Drain",
    .basicsize = sizeof(Drain),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = drain_slots,
};

/* Readable: called by the loop.  As FdPump, it does not keep its drain alive. */

typedef struct {
    PyObject_HEAD
    PyObject *drain; /* weak reference */
    PyObject *slow;  /* called if work is left for Python */
} Readable;

static PyObject *readable_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"drain", "slow", NULL};
    PyObject *drain, *slow, *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O", names, aio_drain_type, &drain, &slow))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (!object)
        return NULL;
    ((Readable *)object)->slow = Py_NewRef(slow);
    ((Readable *)object)->drain = PyWeakref_NewRef(drain, NULL);
    if (!((Readable *)object)->drain)
        replace(&object, NULL);
    return object;
}

static int readable_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Readable *)object)->drain);
    Py_VISIT(((Readable *)object)->slow);
    return 0;
}

static int readable_clear(PyObject *object)
{
    Py_CLEAR(((Readable *)object)->slow);
    return 0;
}

static void readable_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    readable_clear(object);
    Py_CLEAR(((Readable *)object)->drain);
    aio_free(object);
}

/* Whether all is done, with this result. If not, drain->left or drain->error is for Python. */
static int all_done(Drain *drain, int took)
{
    if (took < 0) {
        replace(&drain->error, aio_raised());
        return 0;
    }
    drain->left = took;
    if (took || drain->deferred || drain->first != drain->last)
        return 0;
    drain->draining = 0;
    return 1;
}

static PyObject *readable_call(Readable *self, int (*function)(Drain *))
{
    PyObject *drain = PyObject_CallNoArgs(self->drain);
    PyObject *slow, *result;
    int done = 0;

    if (!drain)
        return NULL;
    if (drain != Py_None && !((Drain *)drain)->stopped) {
        aio_turn = (struct aio_turn){.thread = PyThread_get_thread_ident()};
        done = all_done((Drain *)drain, function((Drain *)drain));
        aio_turn = (struct aio_turn){0};
    }
    Py_DECREF(drain);
    if (done)
        Py_RETURN_NONE;
    slow = Py_XNewRef(self->slow); /* the call may take this object off the loop */
    result = PyObject_CallFunctionObjArgs(slow, NULL);
    Py_XDECREF(slow);
    return result;
}

static PyObject *readable_run(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return readable_call((Readable *)object, drain_and_deliver);
}

static PyObject *readable_spin(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return readable_call((Readable *)object, spin_and_deliver);
}

/* A method, which is called without the tuple of arguments that a call of the object takes. */
static PyMethodDef readable_methods[] = {
    {"run", readable_run, METH_NOARGS, "The channel is readable."},
    {"spin", readable_spin, METH_NOARGS, "A turn of the drain's Poller."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot readable_slots[] = {
    {Py_tp_new, readable_new},
    {Py_tp_traverse, readable_traverse},
    {Py_tp_clear, readable_clear},
    {Py_tp_dealloc, readable_dealloc},
    {Py_tp_methods, readable_methods},
    {Py_tp_doc, "What the loop calls when a completion channel is readable."},
    {0, NULL},
};

PyType_Spec aio_readable_spec = {
    .name = "aiordma._core.Readable",
    .basicsize = sizeof(Readable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = readable_slots,
};
