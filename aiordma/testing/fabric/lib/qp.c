/*
 * Queue pairs: their life, and how requests are posted to them.
 *
 * The states and what each transition asks for and allows are those of the table in `man
 * ibv_modify_qp`, which is table 91 of the InfiniBand specification.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "fabric.h"

enum { FIRST_QPN = 16 }; /* those below are the fabric's own, as 0 and 1 are of InfiniBand */

static struct fabric_table numbers;

/* ---- transitions ----------------------------------------------------------------------------- */

struct transition {
    enum ibv_qp_state from, to;
    int rc_needs, rc_allows, ud_needs, ud_allows;
};

#define RC_TO_RTR                                                                                  \
    (IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |   \
     IBV_QP_MIN_RNR_TIMER)
#define RC_TO_RTS                                                                                  \
    (IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)
#define RC_IN_RTS                                                                                  \
    (IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH |             \
     IBV_QP_PATH_MIG_STATE)
#define RC_IN_SQD                                                                                  \
    (IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS | IBV_QP_AV | IBV_QP_MAX_QP_RD_ATOMIC | \
     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER | IBV_QP_ALT_PATH | IBV_QP_TIMEOUT |         \
     IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_PATH_MIG_STATE)

static const struct transition TRANSITIONS[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0,
     IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0,
     IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY},
    {IBV_QPS_INIT, IBV_QPS_RTR, RC_TO_RTR,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_RTR, IBV_QPS_RTS, RC_TO_RTS, RC_IN_RTS, IBV_QP_SQ_PSN, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, RC_IN_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_RTS, IBV_QPS_SQD, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY, 0, IBV_QP_EN_SQD_ASYNC_NOTIFY},
    {IBV_QPS_SQD, IBV_QPS_RTS, 0, RC_IN_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
    {IBV_QPS_SQD, IBV_QPS_SQD, 0, RC_IN_SQD, 0, IBV_QP_PKEY_INDEX | IBV_QP_QKEY},
    {IBV_QPS_SQE, IBV_QPS_RTS, -1, 0, 0, IBV_QP_CUR_STATE | IBV_QP_QKEY},
};

/* 0, or EINVAL. */
static int transition_check(const struct fabric_qp *qp, enum ibv_qp_state to, int mask)
{
    bool ud = qp->ibv.qp_type == IBV_QPT_UD;
    int others = mask & ~IBV_QP_STATE;
    unsigned i;

    /* From each state, and with no attribute but the state. */
    if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
        return others & ~IBV_QP_CUR_STATE ? EINVAL : 0;
    for (i = 0; i < FABRIC_LENGTH(TRANSITIONS); i++) {
        const struct transition *row = &TRANSITIONS[i];
        int needs = ud ? row->ud_needs : row->rc_needs;
        int allows = ud ? row->ud_allows : row->rc_allows;

        /* iWARP knows no partitions, and its manager no ports. */
        if (fabric_profile.iwarp && row->from == IBV_QPS_RESET && row->to == IBV_QPS_INIT) {
            allows |= needs;
            needs = 0;
        }

        if (row->from != qp->ibv.state || row->to != to || needs < 0)
            continue;
        return (others & needs) == needs && !(others & ~(needs | allows)) ? 0 : EINVAL;
    }
    return EINVAL;
}

static unsigned mtu_bytes(enum ibv_mtu mtu)
{
    return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128u << mtu : 0;
}

/* 0, or EINVAL. */
static int values_check(const struct fabric_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    unsigned sgid = attr->ah_attr.grh.sgid_index;

    if (mask & IBV_QP_PORT && attr->port_num != 1)
        return EINVAL;
    /* iWARP has no partitions, and does not look at the index. */
    if (mask & IBV_QP_PKEY_INDEX && !fabric_profile.iwarp &&
        attr->pkey_index >= fabric_pkey_table_length())
        return EINVAL;
    if (mask & IBV_QP_PATH_MTU &&
        (!mtu_bytes(attr->path_mtu) || mtu_bytes(attr->path_mtu) > (unsigned)fabric_profile.mtu))
        return EINVAL;
    if (mask & IBV_QP_DEST_QPN && attr->dest_qp_num >> 24)
        return EINVAL;
    if (mask & IBV_QP_AV) {
        if (attr->ah_attr.port_num > 1)
            return EINVAL;
        if (!attr->ah_attr.is_global && !fabric_profile.infiniband_link && !fabric_profile.iwarp)
            return EINVAL;
        if (attr->ah_attr.is_global &&
            (sgid >= FABRIC_GIDS || !qp->context->device->gids[sgid].used))
            return EINVAL;
    }
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC && attr->max_rd_atomic > fabric_profile.max_qp_init_rd_atom)
        return EINVAL;
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC &&
        attr->max_dest_rd_atomic > fabric_profile.max_qp_rd_atom)
        return EINVAL;
    if ((mask & IBV_QP_TIMEOUT && attr->timeout > 31) ||
        (mask & IBV_QP_RETRY_CNT && attr->retry_cnt > 7) ||
        (mask & IBV_QP_RNR_RETRY && attr->rnr_retry > 7) ||
        (mask & IBV_QP_MIN_RNR_TIMER && attr->min_rnr_timer > 31))
        return EINVAL;
    return 0;
}

struct fabric_device *fabric_to_device(const struct fabric_to *to)
{
    static const union ibv_gid NONE;

    return memcmp(&to->gid, &NONE, sizeof(NONE)) ? fabric_device_of_gid(&to->gid, NULL)
                                                 : fabric_device_of_lid(to->lid);
}

struct fabric_to fabric_to_of_attr(const struct ibv_ah_attr *attr)
{
    struct fabric_to to = {.lid = attr->dlid, .sl = attr->sl};

    if (attr->is_global) {
        to.gid = attr->grh.dgid;
        to.sgid_index = attr->grh.sgid_index;
    }
    return to;
}

static int values_set(struct fabric_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    struct ibv_qp_attr *own = &qp->attr;
    unsigned resources;

    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC) {
        /* The last answers are kept: as many as may be asked for, and one that is on its way. */
        resources = attr->max_dest_rd_atomic + 1u;
        free(qp->resources);
        qp->resources = calloc(resources, sizeof(*qp->resources));
        if (!qp->resources)
            return ENOMEM;
        qp->resource_size = resources;
        qp->resource_next = 0;
        own->max_dest_rd_atomic = attr->max_dest_rd_atomic;
    }
    if (mask & IBV_QP_ACCESS_FLAGS)
        own->qp_access_flags = attr->qp_access_flags;
    if (mask & IBV_QP_PKEY_INDEX)
        own->pkey_index = attr->pkey_index;
    if (mask & IBV_QP_PORT)
        own->port_num = attr->port_num;
    if (mask & IBV_QP_QKEY)
        own->qkey = attr->qkey;
    if (mask & IBV_QP_AV) {
        struct fabric_to to = fabric_to_of_attr(&attr->ah_attr);

        own->ah_attr = attr->ah_attr;
        qp->peer = fabric_to_device(&to);
    }
    if (mask & IBV_QP_PATH_MTU)
        own->path_mtu = attr->path_mtu;
    if (mask & IBV_QP_TIMEOUT)
        own->timeout = attr->timeout;
    if (mask & IBV_QP_RETRY_CNT)
        own->retry_cnt = attr->retry_cnt;
    if (mask & IBV_QP_RNR_RETRY)
        own->rnr_retry = attr->rnr_retry;
    if (mask & IBV_QP_RQ_PSN)
        own->rq_psn = attr->rq_psn & 0xffffff;
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
        own->max_rd_atomic = attr->max_rd_atomic;
    if (mask & IBV_QP_MIN_RNR_TIMER)
        own->min_rnr_timer = attr->min_rnr_timer;
    if (mask & IBV_QP_SQ_PSN)
        own->sq_psn = attr->sq_psn & 0xffffff;
    if (mask & IBV_QP_DEST_QPN)
        own->dest_qp_num = attr->dest_qp_num;
    if (mask & IBV_QP_ALT_PATH) {
        own->alt_ah_attr = attr->alt_ah_attr;
        own->alt_pkey_index = attr->alt_pkey_index;
        own->alt_port_num = attr->alt_port_num;
        own->alt_timeout = attr->alt_timeout;
    }
    if (mask & IBV_QP_PATH_MIG_STATE)
        own->path_mig_state = attr->path_mig_state;
    if (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY)
        own->en_sqd_async_notify = attr->en_sqd_async_notify;
    return 0;
}

static void qp_reset(struct fabric_qp *qp)
{
    fabric_timer_clear(&qp->ack_timer);
    fabric_timer_clear(&qp->rnr_timer);
    fabric_requester_init(qp);
    fabric_responder_init(qp);
    qp->send_head = qp->send_count = qp->staged = 0;
    qp->recvs.head = qp->recvs.count = 0;
    fabric_cq_clean(qp->send_cq, qp->ibv.qp_num);
    fabric_cq_clean(qp->recv_cq, qp->ibv.qp_num);
}

void fabric_qp_error(struct fabric_qp *qp)
{
    if (qp->ibv.state == IBV_QPS_ERR || qp->ibv.state == IBV_QPS_RESET)
        return;
    qp->ibv.state = IBV_QPS_ERR;
    fabric_timer_clear(&qp->ack_timer);
    fabric_timer_clear(&qp->rnr_timer);
    fabric_requester_flush(qp);
    fabric_responder_flush(qp);
    if (qp->srq && !fabric_profile.no_last_wqe)
        fabric_tell(qp->context, IBV_EVENT_QP_LAST_WQE_REACHED, qp);
}

int fabric_qp_modify(struct fabric_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
    enum ibv_qp_state from = qp->ibv.state, to = mask & IBV_QP_STATE ? attr->qp_state : from;
    int error;

    if (mask & IBV_QP_CUR_STATE && attr->cur_qp_state != from)
        return EINVAL;
    error = transition_check(qp, to, mask);
    if (!error)
        error = values_check(qp, attr, mask);
    if (!error)
        error = values_set(qp, attr, mask);
    if (error)
        return error;
    switch (to) {
    case IBV_QPS_RESET:
        qp->ibv.state = IBV_QPS_RESET;
        qp_reset(qp);
        break;
    case IBV_QPS_ERR:
        if (from == IBV_QPS_RESET)
            qp->ibv.state = IBV_QPS_ERR;
        else
            fabric_qp_error(qp);
        break;
    case IBV_QPS_RTR:
        qp->ibv.state = to;
        fabric_responder_init(qp);
        break;
    case IBV_QPS_RTS:
        qp->ibv.state = to;
        if (from == IBV_QPS_RTR)
            fabric_requester_init(qp);
        qp->draining = false;
        fabric_requester_run(qp);
        break;
    case IBV_QPS_SQD:
        qp->ibv.state = to;
        qp->draining = from != IBV_QPS_SQD || qp->draining;
        fabric_requester_run(qp);
        break;
    default:
        qp->ibv.state = to;
    }
    return 0;
}

FABRIC_API int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
    struct fabric_qp *qp = fabric_qp(ibv);
    int error;

    fabric_lock();
    if (qp->generation != fabric_generation())
        error = EBADF;
    else if (fabric_fails("ibv_modify_qp"))
        error = errno;
    /* What iWARP's connections are made of, a program cannot give. */
    else if (fabric_profile.iwarp && mask & IBV_QP_STATE &&
             (attr->qp_state == IBV_QPS_RTR || attr->qp_state == IBV_QPS_RTS))
        error = EINVAL;
    else
        error = fabric_qp_modify(qp, attr, mask);
    fabric_unlock();
    return error;
}

FABRIC_API int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask,
                            struct ibv_qp_init_attr *init)
{
    struct fabric_qp *qp = fabric_qp(ibv);

    fabric_lock();
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = ibv->state;
    attr->cap = qp->cap;
    attr->sq_draining = qp->draining && qp->send_next;
    *init = (struct ibv_qp_init_attr){.qp_context = ibv->qp_context,
                                      .send_cq = ibv->send_cq,
                                      .recv_cq = ibv->recv_cq,
                                      .srq = ibv->srq,
                                      .cap = qp->cap,
                                      .qp_type = ibv->qp_type,
                                      .sq_sig_all = qp->sig_all};
    fabric_unlock();
    return 0;
}

/* ---- birth and end --------------------------------------------------------------------------- */

uint32_t fabric_mtu_of(const struct fabric_qp *qp)
{
    return fabric_profile.iwarp || !qp->attr.path_mtu ? (uint32_t)fabric_profile.mtu
                                                      : 128u << qp->attr.path_mtu;
}

struct fabric_qp *fabric_qp_find(uint32_t number)
{
    struct fabric_qp *qp;

    if (fabric_slot_of(number) != fabric_slot())
        return NULL;
    qp = fabric_table_find(&numbers, number % FABRIC_QPS);
    return qp && qp->generation == fabric_generation() ? qp : NULL;
}

static unsigned rounded(unsigned count)
{
    unsigned size = 1;

    if (!fabric_profile.wr_round_up || !count)
        return count;
    while (size < count)
        size = 2 * size + 1;
    return size;
}

static int init_check(const struct ibv_qp_init_attr_ex *init)
{
    const struct ibv_qp_cap *cap = &init->cap;
    unsigned most_sge = (unsigned)fabric_profile.max_sge;

    switch (init->qp_type) {
    case IBV_QPT_RC:
    case IBV_QPT_UD:
        break;
    case IBV_QPT_UC:
    case IBV_QPT_RAW_PACKET:
    case IBV_QPT_XRC_SEND:
    case IBV_QPT_XRC_RECV:
    case IBV_QPT_DRIVER:
        return EOPNOTSUPP;
    default:
        return EINVAL;
    }
    if (init->qp_type == IBV_QPT_UD && fabric_profile.iwarp)
        return EOPNOTSUPP;
    if (!init->send_cq || !init->recv_cq)
        return EINVAL;
    if (cap->max_send_wr > (unsigned)fabric_profile.max_qp_wr || cap->max_send_sge > most_sge ||
        cap->max_inline_data > (unsigned)fabric_profile.max_inline ||
        cap->max_send_sge > FABRIC_SGES || cap->max_inline_data > FABRIC_INLINE)
        return EINVAL;
    if (!init->srq && (cap->max_recv_wr > (unsigned)fabric_profile.max_qp_wr ||
                       cap->max_recv_sge > most_sge || cap->max_recv_sge > FABRIC_SGES))
        return EINVAL;
    return 0;
}

static int qp_allocate(struct fabric_qp *qp, const struct ibv_qp_init_attr_ex *init)
{
    qp->cap = init->cap;
    qp->cap.max_send_wr = qp->send_size = rounded(init->cap.max_send_wr);
    qp->cap.max_recv_wr = init->srq ? 0 : rounded(init->cap.max_recv_wr);
    if (init->srq)
        qp->cap.max_recv_sge = 0;
    if (qp->send_size) {
        qp->sends = calloc(qp->send_size, sizeof(*qp->sends));
        if (!qp->sends)
            return ENOMEM;
        if (qp->cap.max_inline_data) {
            qp->inlined = calloc(qp->send_size, qp->cap.max_inline_data);
            if (!qp->inlined)
                return ENOMEM;
        }
    }
    if (fabric_recv_ring_init(&qp->recvs, qp->cap.max_recv_wr))
        return ENOMEM;
    return 0;
}

static void qp_free(struct fabric_qp *qp)
{
    free(qp->sends);
    free(qp->inlined);
    free(qp->recvs.items);
    free(qp->resources);
    free(qp);
}

struct fabric_qp *fabric_qp_create(struct fabric_pd *pd, struct ibv_qp_init_attr_ex *init)
{
    int error = init_check(init);
    struct fabric_qp *qp;
    unsigned index;

    if (!error && fabric_fails("ibv_create_qp"))
        error = errno;
    if (error) {
        errno = error;
        return NULL;
    }
    qp = calloc(1, sizeof(*qp));
    if (!qp || qp_allocate(qp, init)) {
        if (qp)
            qp_free(qp);
        errno = ENOMEM;
        return NULL;
    }
    if (!numbers.size) {
        /* All of them, so that a number is given again as late as can be. */
        numbers.items = calloc(FABRIC_QPS, sizeof(*numbers.items));
        numbers.size = numbers.items ? FABRIC_QPS : 0;
    }
    numbers.next = numbers.next < FIRST_QPN ? FIRST_QPN : numbers.next;
    index = fabric_table_add(&numbers, qp, FABRIC_QPS - FIRST_QPN - 1);
    if (!index || index >= FABRIC_QPS || numbers.used > (unsigned)fabric_profile.max_qp) {
        if (index)
            fabric_table_remove(&numbers, index);
        qp_free(qp);
        errno = ENOMEM;
        return NULL;
    }
    qp->context = pd->context;
    qp->pd = pd;
    qp->send_cq = FABRIC_CONTAINER(init->send_cq, struct fabric_cq, ibv);
    qp->recv_cq = FABRIC_CONTAINER(init->recv_cq, struct fabric_cq, ibv);
    qp->srq = init->srq ? FABRIC_CONTAINER(init->srq, struct fabric_srq, ibv) : NULL;
    qp->sig_all = init->sq_sig_all;
    qp->generation = fabric_generation();
    qp->ack_timer.ring = fabric_ack_timer_ring;
    qp->rnr_timer.ring = fabric_rnr_timer_ring;
    qp->ibv.context = pd->ibv.context;
    qp->ibv.qp_context = init->qp_context;
    qp->ibv.pd = &pd->ibv;
    qp->ibv.send_cq = init->send_cq;
    qp->ibv.recv_cq = init->recv_cq;
    qp->ibv.srq = init->srq;
    qp->ibv.handle = index;
    qp->ibv.qp_num = fabric_slot() * FABRIC_QPS + index;
    qp->ibv.state = IBV_QPS_RESET;
    qp->ibv.qp_type = init->qp_type;
    qp->attr.port_num = 1;
    pthread_mutex_init(&qp->ibv.mutex, NULL);
    pthread_cond_init(&qp->ibv.cond, NULL);
    fabric_list_add(&fabric_qps, &qp->links);
    pd->users++;
    qp->context->objects++;
    qp->send_cq->users++;
    qp->recv_cq->users++;
    if (qp->srq)
        qp->srq->users++;
    init->cap = qp->cap;
    fabric_born(FABRIC_QP);
    return qp;
}

FABRIC_API struct ibv_qp *ibv_create_qp(struct ibv_pd *ibv_pd, struct ibv_qp_init_attr *init)
{
    struct ibv_qp_init_attr_ex extended = {.qp_context = init->qp_context,
                                           .send_cq = init->send_cq,
                                           .recv_cq = init->recv_cq,
                                           .srq = init->srq,
                                           .cap = init->cap,
                                           .qp_type = init->qp_type,
                                           .sq_sig_all = init->sq_sig_all};
    struct fabric_qp *qp;

    fabric_lock();
    qp = fabric_qp_create(FABRIC_CONTAINER(ibv_pd, struct fabric_pd, ibv), &extended);
    fabric_unlock();
    if (!qp)
        return NULL;
    init->cap = extended.cap;
    return &qp->ibv;
}

FABRIC_API int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct fabric_qp *qp = fabric_qp(ibv);

    fabric_lock();
    if (qp->generation != fabric_generation()) {
        fabric_unlock();
        return 0;
    }
    if (qp->multicast) {
        fabric_unlock();
        return EBUSY;
    }
    qp->async_told -= fabric_feed_drop(&qp->context->events, qp);
    while (qp->async_told != qp->async_acked)
        fabric_wait();
    /* Nothing is sent or taken any more, and none of its completions is left to be polled. */
    qp->ibv.state = IBV_QPS_RESET;
    qp_reset(qp);
    fabric_windows_of_qp_gone(qp);
    fabric_table_remove(&numbers, qp->ibv.handle);
    fabric_list_remove(&qp->links);
    qp->pd->users--;
    qp->context->objects--;
    qp->send_cq->users--;
    qp->recv_cq->users--;
    if (qp->srq)
        qp->srq->users--;
    fabric_gone(FABRIC_QP);
    qp_free(qp);
    fabric_unlock();
    return 0;
}

/* Options of enhanced connection establishment are a vendor's: this adapter has none. */
FABRIC_API int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    return EOPNOTSUPP;
}

FABRIC_API int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece)
{
    return EOPNOTSUPP;
}

FABRIC_API int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
    return 0;
}

/* ---- posting --------------------------------------------------------------------------------- */

struct fabric_wqe *fabric_wqe_next(struct fabric_qp *qp)
{
    unsigned taken = qp->send_count + qp->staged, index;
    struct fabric_wqe *wqe;

    if (taken >= qp->send_size)
        return NULL;
    index = (qp->send_head + taken) % qp->send_size;
    wqe = &qp->sends[index];
    memset(wqe, 0, sizeof(*wqe));
    if (qp->cap.max_inline_data)
        wqe->inlined = qp->inlined + (size_t)index * qp->cap.max_inline_data;
    qp->staged++;
    return wqe;
}

static int rc_check(const struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    switch (wqe->opcode) {
    case IBV_WR_SEND_WITH_IMM:
        if (!fabric_profile.immediate)
            return EINVAL;
        /* fall through */
    case IBV_WR_SEND:
        wqe->done_as = IBV_WC_SEND;
        return 0;
    case IBV_WR_SEND_WITH_INV:
        wqe->done_as = IBV_WC_SEND;
        return fabric_profile.send_invalidate ? 0 : EINVAL;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        if (!fabric_profile.immediate)
            return EINVAL;
        /* fall through */
    case IBV_WR_RDMA_WRITE:
        wqe->done_as = IBV_WC_RDMA_WRITE;
        return 0;
    case IBV_WR_RDMA_READ:
        wqe->done_as = IBV_WC_RDMA_READ;
        return wqe->flags & IBV_SEND_INLINE || !qp->attr.max_rd_atomic ? EINVAL : 0;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        wqe->done_as =
            wqe->opcode == IBV_WR_ATOMIC_CMP_AND_SWP ? IBV_WC_COMP_SWAP : IBV_WC_FETCH_ADD;
        if (!fabric_profile.atomics)
            return EINVAL;
        return wqe->flags & IBV_SEND_INLINE || !qp->attr.max_rd_atomic || wqe->length < 8 ? EINVAL
                                                                                          : 0;
    case IBV_WR_LOCAL_INV:
        wqe->done_as = IBV_WC_LOCAL_INV;
        return fabric_profile.send_invalidate ? 0 : EINVAL;
    case IBV_WR_BIND_MW:
        wqe->done_as = IBV_WC_BIND_MW;
        return fabric_profile.windows ? 0 : EINVAL;
    default:
        return EINVAL;
    }
}

int fabric_wqe_check(struct fabric_qp *qp, struct fabric_wqe *wqe)
{
    if (qp->ibv.qp_type != IBV_QPT_UD)
        return rc_check(qp, wqe);
    wqe->done_as = IBV_WC_SEND;
    if (wqe->opcode != IBV_WR_SEND && wqe->opcode != IBV_WR_SEND_WITH_IMM)
        return EINVAL;
    if (wqe->opcode == IBV_WR_SEND_WITH_IMM && !fabric_profile.immediate)
        return EINVAL;
    return wqe->ah ? 0 : EINVAL;
}

static int wr_copy(struct fabric_qp *qp, struct fabric_wqe *wqe, const struct ibv_send_wr *wr)
{
    int i;

    wqe->wr_id = wr->wr_id;
    wqe->opcode = wr->opcode;
    wqe->flags = wr->send_flags;
    if (wr->num_sge < 0 || (unsigned)wr->num_sge > qp->cap.max_send_sge)
        return EINVAL;
    for (i = 0; i < wr->num_sge; i++)
        wqe->length += wr->sg_list[i].length;
    if (wqe->flags & IBV_SEND_INLINE) {
        unsigned char *into = wqe->inlined;

        if (wqe->length > qp->cap.max_inline_data)
            return EINVAL;
        for (i = 0; i < wr->num_sge; i++) {
            if (!wr->sg_list[i].length)
                continue;
            memcpy(into, (void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
            into += wr->sg_list[i].length;
        }
    } else {
        wqe->sges = (unsigned)wr->num_sge;
        if (wqe->sges)
            memcpy(wqe->sge, wr->sg_list, wqe->sges * sizeof(*wr->sg_list));
    }
    switch (wr->opcode) {
    case IBV_WR_SEND_WITH_IMM:
        wqe->imm_or_key = wr->imm_data;
        break;
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_LOCAL_INV:
        wqe->imm_or_key = wr->invalidate_rkey;
        break;
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        wqe->imm_or_key = wr->imm_data;
        /* fall through */
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_READ:
        wqe->remote = wr->wr.rdma.remote_addr;
        wqe->rkey = wr->wr.rdma.rkey;
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        wqe->remote = wr->wr.atomic.remote_addr;
        wqe->rkey = wr->wr.atomic.rkey;
        wqe->compare = wr->wr.atomic.compare_add;
        wqe->swap = wr->wr.atomic.swap;
        break;
    case IBV_WR_BIND_MW:
        if (wr->bind_mw.mw->type != IBV_MW_TYPE_2)
            return EINVAL;
        wqe->mw = FABRIC_CONTAINER(wr->bind_mw.mw, struct fabric_mw, ibv);
        wqe->rkey = wr->bind_mw.rkey;
        wqe->bind = wr->bind_mw.bind_info;
        break;
    default:
        break;
    }
    if (qp->ibv.qp_type == IBV_QPT_UD) {
        wqe->ah = wr->wr.ud.ah;
        wqe->remote_qpn = wr->wr.ud.remote_qpn;
        wqe->remote_qkey = wr->wr.ud.remote_qkey;
        if (wqe->ah)
            wqe->to = fabric_to_of_attr(&FABRIC_CONTAINER(wqe->ah, struct fabric_ah, ibv)->attr);
    }
    return 0;
}

int fabric_post_one(struct fabric_qp *qp, const struct ibv_send_wr *wr)
{
    struct fabric_wqe *wqe;
    int error;

    if (qp->ibv.state != IBV_QPS_RTS && qp->ibv.state != IBV_QPS_SQD &&
        qp->ibv.state != IBV_QPS_SQE && qp->ibv.state != IBV_QPS_ERR)
        return EINVAL;
    wqe = fabric_wqe_next(qp);
    if (!wqe)
        return ENOMEM;
    error = wr_copy(qp, wqe, wr);
    if (!error)
        error = fabric_wqe_check(qp, wqe);
    if (error)
        qp->staged--;
    return error;
}

void fabric_post_staged(struct fabric_qp *qp)
{
    qp->send_count += qp->staged;
    qp->staged = 0;
    if (qp->ibv.state == IBV_QPS_ERR || qp->ibv.state == IBV_QPS_SQE)
        fabric_requester_flush(qp);
    else
        fabric_requester_run(qp);
}

int fabric_post_send(struct ibv_qp *ibv, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr)
{
    struct fabric_qp *qp = fabric_qp(ibv);
    int error = 0;

    fabric_lock();
    if (qp->generation != fabric_generation())
        error = EBADF;
    else if (!(error = fabric_staging_wait(qp)) && fabric_fails("ibv_post_send"))
        error = errno;
    for (; wr; wr = wr->next) {
        if (!error)
            error = fabric_post_one(qp, wr);
        if (error) {
            *bad_wr = wr;
            break;
        }
    }
    fabric_post_staged(qp);
    fabric_unlock();
    fabric_meanwhile();
    return fabric_profile.posts_negative ? -error : error;
}

int fabric_post_recv(struct ibv_qp *ibv, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr)
{
    struct fabric_qp *qp = fabric_qp(ibv);
    int error = 0;

    fabric_lock();
    if (qp->generation != fabric_generation())
        error = EBADF;
    else if (fabric_fails("ibv_post_recv"))
        error = errno;
    else if (ibv->state == IBV_QPS_RESET || qp->srq)
        error = EINVAL;
    for (; wr; wr = wr->next) {
        if (!error)
            error = fabric_recv_add(&qp->recvs, wr, qp->cap.max_recv_sge);
        if (error) {
            *bad_wr = wr;
            break;
        }
    }
    if (ibv->state == IBV_QPS_ERR)
        fabric_responder_flush(qp);
    fabric_unlock();
    fabric_meanwhile();
    return fabric_profile.posts_negative ? -error : error;
}

/* ibv_bind_mw(): of windows of type 1; the new key is there at once. */
int fabric_bind_mw(struct ibv_qp *ibv, struct ibv_mw *ibv_mw, struct ibv_mw_bind *bind)
{
    struct fabric_qp *qp = fabric_qp(ibv);
    struct fabric_wqe *wqe;
    int error = 0;

    if (!(fabric_profile.windows & 1))
        return EOPNOTSUPP;
    fabric_lock();
    error = fabric_staging_wait(qp);
    if (error)
        ;
    else if (ibv->state != IBV_QPS_RTS && ibv->state != IBV_QPS_ERR)
        error = EINVAL;
    else if (fabric_fails("ibv_bind_mw"))
        error = errno;
    else if (!(wqe = fabric_wqe_next(qp)))
        error = ENOMEM;
    else {
        wqe->wr_id = bind->wr_id;
        wqe->opcode = IBV_WR_BIND_MW;
        wqe->done_as = IBV_WC_BIND_MW;
        wqe->flags = bind->send_flags;
        wqe->mw = FABRIC_CONTAINER(ibv_mw, struct fabric_mw, ibv);
        wqe->bind = bind->bind_info;
        wqe->rkey = ibv_mw->rkey = ibv_inc_rkey(ibv_mw->rkey);
        fabric_post_staged(qp);
    }
    fabric_unlock();
    return error;
}
