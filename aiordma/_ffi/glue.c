/*
 * What has to be one C call.
 *
 * Theory of operation
 *   Python pays per call and per wake-up, not per completion, so that everything that a wake-up
 *   needs is folded into one function: read the event, re-arm, poll, acknowledge.  The order of
 *   those steps is the correctness of the whole library and stands here once.
 *
 * Rules of this file
 *   C11, no Python.h, no global state, no allocation.  Functions return a count or 0, and -errno
 *   on failure, except the posting functions, which return libibverbs' positive errno.
 *   Nothing that was read from an event stays referenced after the function has returned:
 *   a handler may destroy the object that the next event names.
 */

/* An id's layout, as loop/slots.py makes it: tag 8, generation 16, sub-index 16, index 24 bits. */
#define AIO_SUB_SHIFT  24
#define AIO_INDEX_MASK ((UINT64_C(1) << AIO_SUB_SHIFT) - 1)
#define AIO_SUB_MASK   (UINT64_C(0xFFFF) << AIO_SUB_SHIFT)
#define AIO_SUB(wr_id) ((uint32_t)((wr_id) >> AIO_SUB_SHIFT) & 0xFFFF)

/*
 * Hand a completion to its sink, which takes it without Python; 0 if it is for Python.
 *
 * The order of a sink's completions is kept: what comes behind one that went to Python goes there,
 * too, until Python has seen it.
 */
static int aio_take(struct aio_drain *d, const struct ibv_wc *wc)
{
    uint64_t index = wc->wr_id & AIO_INDEX_MASK;
    struct aio_sink *sink;
    uint32_t before;

    if (index >= d->n_sinks)
        return 0;
    sink = d->sinks[index];
    if (!sink || sink->id != (wc->wr_id & ~AIO_SUB_MASK))
        return 0;
    before = sink->news;
    if (sink->spilled || !sink->take(sink, wc)) {
        sink->spilled++;
        return 0;
    }
    if (sink->news && !before)
        d->ready[d->n_ready++] = (uint32_t)index;
    return 1;
}

/*
 * Poll one CQ: what no sink takes goes into out[*n..], at most `turn` completions in all, of which
 * *left loses as many as were polled.  1 when the queue is empty, 0 when the turn is over, -errno.
 */
static int aio_poll_into(struct aio_drain *d, struct ibv_cq *cq, struct ibv_wc *out, int *n,
                         int turn, int *left)
{
    while (turn > 0) {
        int got = ibv_poll_cq(cq, turn, out + *n);
        int end = *n + got;

        if (got < 0)
            return -EIO;
        *left -= got;
        for (int i = *n; i < end; i++) {
            if (!aio_take(d, &out[i])) {
                if (i != *n)
                    out[*n] = out[i];
                ++*n;
            }
        }
        if (got < turn)
            return 1;
        turn -= got;
    }
    return 0;
}

/*
 * The state of a CQ: free, held by the drain, or, for good, by the thread that destroys it.
 *
 * An event that is not acknowledged keeps ibv_destroy_cq from returning, but not from beginning:
 * software iWARP unmaps the queue before it waits, and a poll that runs beside it crashes.
 */
enum { AIO_FREE, AIO_DRAINED, AIO_RETIRED };

static int aio_cq_seize(struct aio_cq *own)
{
    int expected = AIO_FREE;

    return __atomic_compare_exchange_n(&own->hands, &expected, AIO_DRAINED, 0, __ATOMIC_ACQUIRE,
                                       __ATOMIC_RELAXED);
}

static void aio_cq_release(struct aio_cq *own)
{
    __atomic_store_n(&own->hands, AIO_FREE, __ATOMIC_RELEASE);
}

/*
 * Acknowledge the events that are owed, and `more`.  To acknowledge takes a lock and wakes the
 * thread that destroys the queue, so that the drain owes them until there are AIO_OWED.
 */
#define AIO_OWED 32

static void aio_cq_ack(struct ibv_cq *cq, struct aio_cq *own, uint32_t more)
{
    more += __atomic_exchange_n(&own->owed, 0, __ATOMIC_SEQ_CST);
    if (more)
        ibv_ack_cq_events(cq, more);
}

/*
 * Before ibv_destroy_cq, in whatever thread: the drain keeps off it from now on, and owes it
 * nothing: what it owes after this it acknowledges at once.
 */
static void aio_cq_retire(struct ibv_cq *cq, struct aio_cq *own)
{
    for (;;) {
        int expected = AIO_FREE;

        if (__atomic_compare_exchange_n(&own->hands, &expected, AIO_RETIRED, 0, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST) ||
            expected == AIO_RETIRED)
            break;
        sched_yield(); /* a drain takes microseconds */
    }
    aio_cq_ack(cq, own, 0);
}

/* Completions that one CQ may take before the next has its turn. */
#define AIO_TURN 64

/* For the next event; the queue has been seized. */
static void aio_drain_arm(struct aio_drain *d, struct ibv_cq *cq, struct aio_cq *own)
{
    int code = ibv_req_notify_cq(cq, own->solicited);

    own->unarmed = 0;
    own->armed = own->solicited ? 2 : 1;
    if (code && !d->error)
        d->error = code;
}

/*
 * Take the channel's events; managed CQs are armed and wait in d->pending for their turn.
 *
 * Mostly there is one event, and a second read would only say so.  It is spared AIO_SPARE times
 * after it has found nothing: the descriptor stays readable while there is another event, so that
 * the next turn of the loop takes it.  Where a second one is found, all are taken, each time.
 */
#define AIO_SPARE 64

static void aio_drain_admit(struct aio_drain *d)
{
    int taken = 0;

    while (d->n_pending < (int)(sizeof(d->pending) / sizeof(d->pending[0])) &&
           d->n_segments < d->max_segments) {
        struct ibv_cq *cq;
        struct aio_cq *own;
        void *context;

        if (taken == 1 && d->spare > 0) {
            d->spare--;
            return;
        }
        if (ibv_get_cq_event(d->channel, &cq, &context)) {
            if (errno == EINTR)
                continue;
            if (errno != EAGAIN)
                d->error = errno;
            else if (taken == 1)
                d->spare = AIO_SPARE;
            return;
        }
        taken++;
        own = context;
        own->events++;
        if (!own->managed) {
            d->segments[d->n_segments].token = own->token;
            d->segments[d->n_segments].count = -1;
            d->n_segments++;
            ibv_ack_cq_events(cq, 1);
            continue;
        }
        own->unarmed = own->eager && !own->pending;
        if (!own->unarmed && aio_cq_seize(own)) {
            aio_drain_arm(d, cq, own);
            aio_cq_release(own);
        }
        if (own->pending) { /* will be polled until empty after this arming, too */
            ibv_ack_cq_events(cq, 1);
            continue;
        }
        own->pending = 1;
        d->pending[d->n_pending++] = cq;
    }
}

/* Take entry i out of d->pending; its event is still to be acknowledged. */
static struct ibv_cq *aio_drain_remove(struct aio_drain *d, int i)
{
    struct ibv_cq *cq = d->pending[i];

    ((struct aio_cq *)cq->cq_context)->pending = 0;
    d->n_pending--;
    memmove(&d->pending[i], &d->pending[i + 1], (d->n_pending - i) * sizeof(cq));
    return cq;
}

/*
 * The first of d->pending is done.
 *
 * Once the event is counted as owed, the thread that destroys the queue may acknowledge it and free
 * the queue.  Not `own`, as long as the interpreter lock is held, which the caller does.
 */
static void aio_drain_settle(struct aio_drain *d)
{
    struct ibv_cq *cq = aio_drain_remove(d, 0);
    struct aio_cq *own = cq->cq_context;

    if (__atomic_add_fetch(&own->owed, 1, __ATOMIC_SEQ_CST) >= AIO_OWED ||
        __atomic_load_n(&own->hands, __ATOMIC_SEQ_CST) == AIO_RETIRED)
        aio_cq_ack(cq, own, 0);
}

/* Put the news of the sinks beside their indices. */
static int aio_tell(struct aio_drain *d)
{
    for (int i = 0; i < d->n_ready; i++) {
        struct aio_sink *sink = d->sinks[d->ready[i]];

        d->ready[i] |= sink->news << AIO_SUB_SHIFT;
        sink->news = 0;
    }
    return d->n_ready << 16;
}

/*
 * Drain a completion channel.
 *
 * For each event: re-arm, then poll until empty, then acknowledge.
 *   Arm before poll: ibv_req_notify_cq is one-shot and silent about completions that are there
 *   already; polling first would lose the completion that lands in between.
 *   Acknowledge last: ibv_destroy_cq, running in another thread, waits for it, so that the CQ
 *   cannot be freed while its event is at hand (see also aio_cq_retire).
 * CQs take turns of AIO_TURN completions, so that one that fills as fast as it is polled delays
 * the others by no more than that.  When `cap` completions were taken, those that are not empty
 * stay in d->pending, d->more is 1 and the caller has to call again without waiting for the
 * descriptor: completions from before the re-arm raise no event.
 * An eager CQ is armed last, and polled once more: its completions make the program post what may
 * be done at once, so that the caller tells it of them and calls again (AIO_AGAIN), until nothing
 * is left.  So long nothing sleeps, and no event is needed.  Only while it is the only one.
 * A CQ whose aio_cq.managed is 0 is polled by the program: it is only reported, with
 * a segment whose count is -1.
 * A queue that was found to have fewer completions than were asked for is empty: what comes later
 * raises an event, because it was armed before.
 *
 * Returns the completions for Python in the low 16 bits; d->segments says how many belong to which
 * CQ, in order.  The bits above count the sinks with news; d->ready has their
 * indices, and the news, of 8 bits, above.  Bit 30 says that there
 * is something to look at in d: segments, more or error; bit 29 asks to be called again once the
 * program has been told; a caller that does so at once sets d->again, and no new events are taken.
 */
#define AIO_LOOK  (1 << 30)
#define AIO_AGAIN (1 << 29)

static int aio_drain(struct aio_drain *d, struct ibv_wc *out, int cap)
{
    int n = 0, left = cap, again = 0;

    d->error = 0;
    d->n_segments = 0;
    d->n_ready = 0;
    if (d->again)
        d->again = 0;
    else
        aio_drain_admit(d);
    while (d->n_pending && left > 0 && d->n_segments < d->max_segments) {
        struct ibv_cq *cq = d->pending[0];
        struct aio_cq *own = cq->cq_context;
        int before = n, empty = 1;
        int turn = AIO_TURN < left ? AIO_TURN : left;

        if (aio_cq_seize(own)) {
            int had = left;

            if (own->unarmed && d->n_pending > 1)
                aio_drain_arm(d, cq, own);
            empty = aio_poll_into(d, cq, out, &n, turn, &left);
            if (own->unarmed && left == had) {
                aio_drain_arm(d, cq, own);
                empty = aio_poll_into(d, cq, out, &n, turn, &left);
            }
            again = own->unarmed && empty > 0;
            aio_cq_release(own);
        }
        if (n > before) {
            d->segments[d->n_segments].token = own->token;
            d->segments[d->n_segments].count = n - before;
            d->n_segments++;
        }
        if (again)
            break;
        if (empty < 0 && !d->error)
            d->error = -empty;
        if (empty) {
            aio_drain_settle(d);
            continue;
        }
        memmove(&d->pending[0], &d->pending[1], (d->n_pending - 1) * sizeof(cq));
        d->pending[d->n_pending - 1] = cq;
    }
    d->more = d->n_pending > 0;
    return n | aio_tell(d) | (again ? AIO_AGAIN : 0) |
           (d->n_segments || (d->more && !again) || d->error ? AIO_LOOK : 0);
}

/*
 * Poll one CQ without an event.  Returns as aio_drain does, all of it of this queue, or -errno;
 * AIO_LOOK says that there may be more.
 */
static int aio_sweep(struct aio_drain *d, struct ibv_cq *cq, struct ibv_wc *out, int cap)
{
    int n = 0, left = cap, code;

    d->n_ready = 0;
    code = aio_poll_into(d, cq, out, &n, cap, &left);
    d->swept = cap - left;
    int told = aio_tell(d);

    return code < 0 ? code : n | told | (code ? 0 : AIO_LOOK);
}

/*
 * Give back the events that an unfinished drain holds: of one CQ before it is destroyed, of all
 * (cq is NULL) when no call will finish it.
 */
static void aio_drain_forget(struct aio_drain *d, struct ibv_cq *cq)
{
    for (int i = d->n_pending - 1; i >= 0; i--) {
        if (!cq || d->pending[i] == cq) {
            struct ibv_cq *left = aio_drain_remove(d, i);

            aio_cq_ack(left, left->cq_context, 1);
        }
    }
}

/*
 * Take one device event, acknowledged; 0 or -errno (-EAGAIN: none, -EIO: the device is gone).
 *
 * The token of the queue that it concerns is read before the acknowledgement, which its destroy
 * waits for: afterwards the address may already be another queue's.
 */
static int aio_async_next(struct ibv_context *context, struct aio_async_event *out)
{
    struct ibv_async_event ev;

    if (ibv_get_async_event(context, &ev))
        return errno ? -errno : -EIO;
    out->type = (int)ev.event_type;
    out->port = 0;
    out->element = 0;
    out->token = 0;
    switch (ev.event_type) {
    case IBV_EVENT_CQ_ERR:
        out->element = (uint64_t)(uintptr_t)ev.element.cq;
        out->token = ((const struct aio_cq *)ev.element.cq->cq_context)->token;
        break;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        out->element = (uint64_t)(uintptr_t)ev.element.qp;
        out->token = (uint64_t)(uintptr_t)ev.element.qp->qp_context;
        break;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        out->element = (uint64_t)(uintptr_t)ev.element.srq;
        out->token = (uint64_t)(uintptr_t)ev.element.srq->srq_context;
        break;
    default:
        out->port = ev.element.port_num;
        break;
    }
    ibv_ack_async_event(&ev);
    return 0;
}

/* Memory for slots (verbs/slab.py): an anonymous mapping, or NULL. */
static void *aio_map(size_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    return memory == MAP_FAILED ? NULL : memory;
}

static void aio_unmap(void *memory, size_t size)
{
    munmap(memory, size);
}

static void aio_clear(void *memory, size_t size)
{
    memset(memory, 0, size);
}
