/* Completion channels, completion queues, shared receive queues. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fabric.h"

enum { READ_EVERY = 32 }; /* empty polls */

/* ---- channels -------------------------------------------------------------------------------- */

struct event { /* of a completion queue that was armed */
    struct fabric_note note;
};

FABRIC_API struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct fabric_channel *channel = NULL;

    fabric_lock();
    if (!fabric_fails("ibv_create_comp_channel") && (channel = calloc(1, sizeof(*channel)))) {
        if (fabric_feed_open(&channel->feed)) {
            free(channel);
            channel = NULL;
        } else {
            channel->context = fabric_context(context);
            channel->context->objects++;
            channel->ibv.context = context;
            channel->ibv.fd = channel->feed.fd;
            fabric_born(FABRIC_CHANNEL);
        }
    }
    fabric_unlock();
    return channel ? &channel->ibv : NULL;
}

FABRIC_API int ibv_destroy_comp_channel(struct ibv_comp_channel *ibv)
{
    struct fabric_channel *channel = FABRIC_CONTAINER(ibv, struct fabric_channel, ibv);
    int error = 0;

    fabric_lock();
    if (channel->feed.generation != fabric_generation()) {
        close(channel->feed.fd); /* the child's copy */
    } else if (ibv->refcnt) {
        error = EBUSY;
    } else {
        channel->context->objects--;
        fabric_gone(FABRIC_CHANNEL);
        fabric_feed_close(&channel->feed);
        free(channel);
    }
    fabric_unlock();
    return error;
}

FABRIC_API int ibv_get_cq_event(struct ibv_comp_channel *ibv, struct ibv_cq **queue, void **context)
{
    struct fabric_channel *channel = FABRIC_CONTAINER(ibv, struct fabric_channel, ibv);
    struct fabric_note *note = fabric_feed_take(&channel->feed, "ibv_get_cq_event");
    struct fabric_cq *cq;

    if (!note)
        return -1;
    cq = note->about;
    *queue = &cq->ibv;
    *context = cq->ibv.cq_context;
    free(note);
    return 0;
}

FABRIC_API void ibv_ack_cq_events(struct ibv_cq *ibv, unsigned int nevents)
{
    struct fabric_cq *cq = FABRIC_CONTAINER(ibv, struct fabric_cq, ibv);

    fabric_lock();
    cq->acked += nevents;
    fabric_changed();
    fabric_unlock();
}

static void channel_tell(struct fabric_cq *cq)
{
    struct event *event;

    cq->arm = FABRIC_DISARMED;
    if (!cq->channel || fabric_fails("completion event") || !(event = malloc(sizeof(*event))))
        return;
    event->note.about = cq;
    cq->told++;
    fabric_feed_push(&cq->channel->feed, &event->note);
}

/* ---- completions that come later, for a fault ------------------------------------------------ */

struct late {
    struct fabric_timer timer;
    struct fabric_list links; /* of the queue's */
    struct fabric_cq *cq;
    struct ibv_wc wc;
    bool solicited;
};

static void complete_now(struct fabric_cq *cq, const struct ibv_wc *wc, bool solicited);

static void late_ring(struct fabric_timer *timer)
{
    struct late *late = FABRIC_CONTAINER(timer, struct late, timer);

    fabric_list_remove(&late->links);
    complete_now(late->cq, &late->wc, late->solicited);
    free(late);
}

/* Whether a completion waits for its time. None overtakes another one of its queue. */
static bool late_add(struct fabric_cq *cq, const struct ibv_wc *wc, bool solicited)
{
    fabric_time due = fabric_now() + fabric_completion_delay();
    struct late *late;

    if (!fabric_completion_delay() && fabric_list_empty(&cq->late))
        return false;
    if (!(late = calloc(1, sizeof(*late))))
        abort(); /* the program would wait for it without an end */
    if (!fabric_list_empty(&cq->late)) {
        fabric_time last = FABRIC_CONTAINER(cq->late.previous, struct late, links)->timer.due;

        if (due < last)
            due = last;
    }
    *late = (struct late){.cq = cq, .wc = *wc, .solicited = solicited};
    late->timer.ring = late_ring;
    fabric_list_add(&cq->late, &late->links);
    fabric_timer_set(&late->timer, due);
    return true;
}

/* How late a stray comes, in nanoseconds: its queue pair may have begun anew. */
#define STRAY 700000000

/* A completion goes astray, and comes late, whatever becomes of its queue pair. */
static void stray_add(struct fabric_cq *cq, const struct ibv_wc *wc, bool solicited)
{
    struct late *late = calloc(1, sizeof(*late));

    if (!late)
        abort();
    *late = (struct late){.cq = cq, .wc = *wc, .solicited = solicited};
    late->timer.ring = late_ring;
    fabric_list_add(&cq->strays, &late->links);
    fabric_timer_set(&late->timer, fabric_now() + STRAY);
}

/* Those of a queue pair, or all. */
static void late_forget(struct fabric_list *list, const uint32_t *qp_num)
{
    struct fabric_list *item, *next;

    for (item = list->next; item != list; item = next) {
        struct late *late = FABRIC_CONTAINER(item, struct late, links);

        next = item->next;
        if (qp_num && late->wc.qp_num != *qp_num)
            continue;
        fabric_list_remove(item);
        fabric_timer_clear(&late->timer);
        free(late);
    }
}

/* ---- completion queues ----------------------------------------------------------------------- */

static unsigned round_up(unsigned count)
{
    unsigned size = 1;

    while (size < count)
        size *= 2;
    return size;
}

/* Completions that a queue has room for, of those that were asked for. */
static unsigned cq_size(int cqe)
{
    switch (fabric_profile.cqe_round_up) {
    case 1:
        return round_up((unsigned)cqe + 1) - 1;
    case 2:
        return round_up((unsigned)cqe);
    default:
        return (unsigned)cqe;
    }
}

struct fabric_cq *fabric_cq_create(struct fabric_context *context, int cqe, void *cq_context,
                                   struct ibv_comp_channel *channel, int comp_vector)
{
    struct fabric_cq *cq;

    if (cqe < 1 || cqe > fabric_profile.max_cqe || comp_vector < 0 ||
        comp_vector >= context->verbs.context.num_comp_vectors) {
        errno = EINVAL;
        return NULL;
    }
    if (fabric_fails("ibv_create_cq"))
        return NULL;
    cq = calloc(1, sizeof(*cq));
    if (!cq || !(cq->ring = calloc(cq_size(cqe), sizeof(*cq->ring)))) {
        free(cq);
        errno = ENOMEM;
        return NULL;
    }
    cq->size = cq_size(cqe);
    cq->context = context;
    cq->generation = fabric_generation();
    cq->ibv.context = &context->verbs.context;
    cq->ibv.channel = channel;
    cq->ibv.cq_context = cq_context;
    cq->ibv.cqe = (int)cq->size;
    pthread_mutex_init(&cq->ibv.mutex, NULL);
    pthread_cond_init(&cq->ibv.cond, NULL);
    fabric_list_init(&cq->late);
    fabric_list_init(&cq->strays);
    if (channel) {
        cq->channel = FABRIC_CONTAINER(channel, struct fabric_channel, ibv);
        channel->refcnt++;
    }
    context->objects++;
    fabric_born(FABRIC_CQ);
    return cq;
}

FABRIC_API struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
                                        struct ibv_comp_channel *channel, int comp_vector)
{
    struct fabric_cq *cq;

    fabric_lock();
    cq = fabric_cq_create(fabric_context(context), cqe, cq_context, channel, comp_vector);
    fabric_unlock();
    return cq ? &cq->ibv : NULL;
}

FABRIC_API int ibv_resize_cq(struct ibv_cq *ibv, int cqe)
{
    struct fabric_cq *cq = FABRIC_CONTAINER(ibv, struct fabric_cq, ibv);
    struct fabric_cqe *ring;
    unsigned i, size;
    int error = 0;

    if (!fabric_profile.resize_cq)
        return EOPNOTSUPP;
    if (cqe < 1 || cqe > fabric_profile.max_cqe)
        return EINVAL;
    size = cq_size(cqe);
    fabric_lock();
    if (size < cq->count) {
        error = EINVAL;
    } else if (!(ring = calloc(size, sizeof(*ring)))) {
        error = ENOMEM;
    } else {
        for (i = 0; i < cq->count; i++)
            ring[i] = cq->ring[(cq->head + i) % cq->size];
        free(cq->ring);
        cq->ring = ring;
        cq->size = size;
        cq->head = 0;
        ibv->cqe = (int)size;
    }
    fabric_unlock();
    return error;
}

/* How many events of a queue are acknowledged. */
FABRIC_API unsigned fabric_cq_acknowledged(const struct ibv_cq *ibv)
{
    return FABRIC_CONTAINER(ibv, const struct fabric_cq, ibv)->acked;
}

/* In a simulation: a thread begins to destroy a queue, which is not to be polled or armed now. */
FABRIC_API void fabric_cq_leaves(struct ibv_cq *ibv)
{
    FABRIC_CONTAINER(ibv, struct fabric_cq, ibv)->leaves = true;
}

FABRIC_API int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct fabric_cq *cq = FABRIC_CONTAINER(ibv, struct fabric_cq, ibv);

    fabric_lock();
    if (cq->generation != fabric_generation()) {
        fabric_unlock();
        return 0;
    }
    if (cq->users) {
        fabric_unlock();
        return EBUSY;
    }
    late_forget(&cq->late, NULL);
    late_forget(&cq->strays, NULL);
    /* Nobody has read these; the others have to be acknowledged first. */
    if (cq->channel)
        cq->told -= fabric_feed_drop(&cq->channel->feed, cq);
    cq->async_told -= fabric_feed_drop(&cq->context->events, cq);
    while (cq->told != cq->acked || cq->async_told != cq->async_acked)
        fabric_wait();
    if (cq->channel)
        cq->channel->ibv.refcnt--;
    cq->context->objects--;
    fabric_gone(FABRIC_CQ);
    free(cq->ring);
    free(cq);
    fabric_unlock();
    return 0;
}

int fabric_req_notify_cq(struct ibv_cq *ibv, int solicited_only)
{
    struct fabric_cq *cq = FABRIC_CONTAINER(ibv, struct fabric_cq, ibv);

    if (solicited_only && !fabric_profile.solicited)
        return EOPNOTSUPP;
    if (cq->leaves)
        fabric_misuse();
    fabric_meanwhile();
    fabric_lock();
    if (fabric_fails("ibv_req_notify_cq")) {
        int error = errno;

        fabric_unlock();
        return error;
    }
    /* Armed for any completion it stays so, though solicited ones are asked for afterwards. */
    if (cq->arm != FABRIC_ARM_ANY)
        cq->arm = solicited_only ? FABRIC_ARM_SOLICITED : FABRIC_ARM_ANY;
    /* By the book only a completion that comes later gives an event. */
    if (fabric_profile.arm_tells_missed && cq->count)
        channel_tell(cq);
    fabric_unlock();
    return 0;
}

static void cq_overrun(struct fabric_cq *cq)
{
    struct fabric_list *item;

    if (cq->overrun)
        return;
    cq->overrun = true;
    if (fabric_profile.overrun_is_silent)
        return;
    fabric_tell(cq->context, IBV_EVENT_CQ_ERR, cq);
    for (item = fabric_qps.next; item != &fabric_qps; item = item->next) {
        struct fabric_qp *qp = FABRIC_CONTAINER(item, struct fabric_qp, links);

        if (qp->send_cq != cq && qp->recv_cq != cq)
            continue;
        if (qp->ibv.state != IBV_QPS_RESET && qp->ibv.state != IBV_QPS_ERR) {
            if (!fabric_profile.no_qp_errors)
                fabric_tell(qp->context, IBV_EVENT_QP_FATAL, qp);
            fabric_qp_error(qp);
        }
    }
}

static void complete_now(struct fabric_cq *cq, const struct ibv_wc *wc, bool solicited)
{
    struct fabric_cqe *cqe;

    if (cq->overrun && !fabric_profile.overrun_is_silent)
        return;
    if (cq->count == cq->size) {
        cq_overrun(cq);
        return;
    }
    cqe = &cq->ring[(cq->head + cq->count) % cq->size];
    cqe->wc = *wc;
    if (fabric_profile.vendor_errors && wc->status != IBV_WC_SUCCESS)
        cqe->wc.vendor_err = 0x80u | (uint32_t)wc->status;
    cqe->at = fabric_now();
    __atomic_store_n(&cq->count, cq->count + 1, __ATOMIC_RELEASE);
    if (cq->arm == FABRIC_ARM_ANY ||
        (cq->arm == FABRIC_ARM_SOLICITED &&
         (wc->status == IBV_WC_SUCCESS ? solicited : !fabric_profile.failures_unsolicited)))
        channel_tell(cq);
}

void fabric_complete(struct fabric_cq *cq, const struct ibv_wc *wc, bool solicited)
{
    /* A fault of adapters, which is that of Soft-RoCE: not all comes back in time. */
    if (wc->status == IBV_WC_WR_FLUSH_ERR && fabric_fails("flush")) {
        stray_add(cq, wc, solicited);
        return;
    }
    if (late_add(cq, wc, solicited))
        return;
    complete_now(cq, wc, solicited);
    /* A fault of adapters: a completion that comes again, of a message. */
    if (wc->status == IBV_WC_SUCCESS && (wc->opcode & IBV_WC_RECV || wc->opcode == IBV_WC_SEND) &&
        cq->count < cq->size && fabric_fails("completion twice"))
        complete_now(cq, wc, solicited);
}

bool fabric_cq_take(struct fabric_cq *cq, struct fabric_cqe *into)
{
    if (!cq->count)
        return false;
    *into = cq->ring[cq->head];
    cq->head = (cq->head + 1) % cq->size;
    cq->count--;
    return true;
}

void fabric_cq_clean(struct fabric_cq *cq, uint32_t qp_num)
{
    unsigned i, kept = 0;

    if (fabric_profile.completions_stay || fabric_completions_stay())
        return;
    late_forget(&cq->late, &qp_num);
    for (i = 0; i < cq->count; i++) {
        struct fabric_cqe *cqe = &cq->ring[(cq->head + i) % cq->size];

        if (cqe->wc.qp_num != qp_num)
            cq->ring[(cq->head + kept++) % cq->size] = *cqe;
    }
    cq->count = kept;
}

int fabric_poll_cq(struct ibv_cq *ibv, int most, struct ibv_wc *wc)
{
    struct fabric_cq *cq = FABRIC_CONTAINER(ibv, struct fabric_cq, ibv);
    struct fabric_cqe cqe;
    int count = 0;

    if (cq->leaves)
        fabric_misuse();
    /*
     * A program that polls without a pause does not keep others from the lock.  Where it has all of
     * a processor, the service thread may wait for its turn: so the sockets are read here now and
     * then.
     */
    if (!__atomic_load_n(&cq->count, __ATOMIC_ACQUIRE) && !fabric_has_faults()) {
        if (++cq->empty_polls % READ_EVERY == 0)
            fabric_wire_read();
        fabric_meanwhile();
        return 0;
    }
    fabric_lock();
    if (fabric_fails("ibv_poll_cq"))
        count = -1;
    while (count >= 0 && count < most && fabric_cq_take(cq, &cqe))
        wc[count++] = cqe.wc;
    fabric_unlock();
    fabric_meanwhile();
    return count;
}

/* ---- buffers that wait for messages ---------------------------------------------------------- */

int fabric_recv_ring_init(struct fabric_recv_ring *ring, unsigned size)
{
    ring->items = size ? calloc(size, sizeof(*ring->items)) : NULL;
    ring->size = size;
    ring->head = ring->count = 0;
    return size && !ring->items ? ENOMEM : 0;
}

uint64_t fabric_recv_room(const struct fabric_recv *recv)
{
    uint64_t room = 0;
    unsigned i;

    for (i = 0; i < recv->sges; i++)
        room += recv->sge[i].length;
    return room;
}

struct fabric_recv *fabric_recv_first(struct fabric_qp *qp)
{
    struct fabric_recv_ring *ring = qp->srq ? &qp->srq->ring : &qp->recvs;

    return ring->count ? &ring->items[ring->head] : NULL;
}

bool fabric_recv_take(struct fabric_qp *qp, struct fabric_recv *into)
{
    struct fabric_recv_ring *ring = qp->srq ? &qp->srq->ring : &qp->recvs;

    if (!ring->count)
        return false;
    *into = ring->items[ring->head];
    ring->head = (ring->head + 1) % ring->size;
    ring->count--;
    if (qp->srq && ring->count < qp->srq->limit) {
        qp->srq->limit = 0; /* told once */
        fabric_tell(qp->context, IBV_EVENT_SRQ_LIMIT_REACHED, qp->srq);
    }
    return true;
}

int fabric_recv_add(struct fabric_recv_ring *ring, const struct ibv_recv_wr *wr, unsigned max_sge)
{
    struct fabric_recv *recv;

    if (wr->num_sge < 0 || (unsigned)wr->num_sge > max_sge)
        return EINVAL;
    if (ring->count == ring->size)
        return ENOMEM;
    recv = &ring->items[(ring->head + ring->count++) % ring->size];
    recv->wr_id = wr->wr_id;
    recv->sges = (unsigned)wr->num_sge;
    if (recv->sges)
        memcpy(recv->sge, wr->sg_list, recv->sges * sizeof(*wr->sg_list));
    return 0;
}

FABRIC_API struct ibv_srq *ibv_create_srq(struct ibv_pd *ibv_pd, struct ibv_srq_init_attr *init)
{
    struct fabric_pd *pd = FABRIC_CONTAINER(ibv_pd, struct fabric_pd, ibv);
    struct ibv_srq_attr *attr = &init->attr;
    struct fabric_srq *srq = NULL;
    int error = 0;

    if (!fabric_profile.srq)
        error = EOPNOTSUPP;
    else if (!attr->max_wr || attr->max_wr > (unsigned)fabric_profile.max_srq_wr ||
             attr->max_sge > (unsigned)fabric_profile.max_srq_sge || attr->max_sge > FABRIC_SGES)
        error = EINVAL;
    fabric_lock();
    if (!error && fabric_fails("ibv_create_srq"))
        error = errno;
    if (!error && (!(srq = calloc(1, sizeof(*srq))) ||
                   fabric_recv_ring_init(&srq->ring, fabric_profile.wr_round_up
                                                         ? round_up(attr->max_wr + 1) - 1
                                                         : attr->max_wr)))
        error = ENOMEM;
    if (error) {
        free(srq);
        fabric_unlock();
        errno = error;
        return NULL;
    }
    srq->pd = pd;
    srq->generation = fabric_generation();
    srq->max_wr = srq->ring.size;
    srq->max_sge = attr->max_sge ? attr->max_sge : 1;
    attr->max_wr = srq->max_wr;
    attr->max_sge = srq->max_sge;
    srq->ibv.context = ibv_pd->context;
    srq->ibv.srq_context = init->srq_context;
    srq->ibv.pd = ibv_pd;
    pthread_mutex_init(&srq->ibv.mutex, NULL);
    pthread_cond_init(&srq->ibv.cond, NULL);
    pd->users++;
    pd->context->objects++;
    fabric_born(FABRIC_SRQ);
    fabric_unlock();
    return &srq->ibv;
}

FABRIC_API int ibv_modify_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr, int mask)
{
    struct fabric_srq *srq = FABRIC_CONTAINER(ibv, struct fabric_srq, ibv);
    struct fabric_recv *items;
    int error = 0;
    unsigned i;

    if (mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
        return EINVAL;
    if (mask & IBV_SRQ_MAX_WR && fabric_profile.srq_fixed)
        return EOPNOTSUPP;
    fabric_lock();
    if (mask & IBV_SRQ_MAX_WR) {
        if (attr->max_wr < srq->ring.count || attr->max_wr > (unsigned)fabric_profile.max_srq_wr ||
            !attr->max_wr) {
            error = EINVAL;
        } else if (!(items = calloc(attr->max_wr, sizeof(*items)))) {
            error = ENOMEM;
        } else {
            for (i = 0; i < srq->ring.count; i++)
                items[i] = srq->ring.items[(srq->ring.head + i) % srq->ring.size];
            free(srq->ring.items);
            srq->ring.items = items;
            srq->ring.head = 0;
            srq->ring.size = srq->max_wr = attr->max_wr;
        }
    }
    if (!error && mask & IBV_SRQ_LIMIT) {
        if (attr->srq_limit > srq->max_wr)
            error = EINVAL;
        else
            srq->limit = attr->srq_limit;
    }
    fabric_unlock();
    return error;
}

FABRIC_API int ibv_query_srq(struct ibv_srq *ibv, struct ibv_srq_attr *attr)
{
    struct fabric_srq *srq = FABRIC_CONTAINER(ibv, struct fabric_srq, ibv);

    if (fabric_profile.srq_fixed)
        return EOPNOTSUPP;
    fabric_lock();
    *attr = (struct ibv_srq_attr){srq->max_wr, srq->max_sge, srq->limit};
    fabric_unlock();
    return 0;
}

FABRIC_API int ibv_destroy_srq(struct ibv_srq *ibv)
{
    struct fabric_srq *srq = FABRIC_CONTAINER(ibv, struct fabric_srq, ibv);

    fabric_lock();
    if (srq->generation != fabric_generation()) {
        fabric_unlock();
        return 0;
    }
    if (srq->users) {
        fabric_unlock();
        return EBUSY;
    }
    srq->async_told -= fabric_feed_drop(&srq->pd->context->events, srq);
    while (srq->async_told != srq->async_acked)
        fabric_wait();
    srq->pd->users--;
    srq->pd->context->objects--;
    fabric_gone(FABRIC_SRQ);
    free(srq->ring.items);
    free(srq);
    fabric_unlock();
    return 0;
}

int fabric_post_srq_recv(struct ibv_srq *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    struct fabric_srq *srq = FABRIC_CONTAINER(ibv, struct fabric_srq, ibv);
    int error = 0;

    fabric_lock();
    if (fabric_fails("ibv_post_srq_recv"))
        error = errno;
    for (; wr; wr = wr->next) {
        if (!error)
            error = fabric_recv_add(&srq->ring, wr, srq->max_sge);
        if (error) {
            *bad_wr = wr;
            break;
        }
    }
    fabric_unlock();
    return fabric_profile.posts_negative ? -error : error;
}
