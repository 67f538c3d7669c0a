/*
 * The extended interface: completions that are read member by member (ibv_start_poll), and requests
 * that are built call by call (ibv_wr_start).
 *
 * Between start and end only one thread is in such a section.  It does not hold the world's lock,
 * since it may post, poll and do all else meanwhile.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <time.h>

#include "fabric.h"

/* ---- completions ----------------------------------------------------------------------------- */

static struct fabric_cq *cq_of(struct ibv_cq_ex *ex)
{
    return FABRIC_CONTAINER(ex, struct fabric_cq, ex);
}

/* 0 or ENOENT; the lock is held. */
static int take_next(struct fabric_cq *cq)
{
    if (!fabric_cq_take(cq, &cq->current))
        return ENOENT;
    cq->ex.wr_id = cq->current.wc.wr_id;
    cq->ex.status = cq->current.wc.status;
    return 0;
}

static int start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
    struct fabric_cq *cq = cq_of(ex);
    int error;

    if (attr && attr->comp_mask)
        return EINVAL;
    /* A program that polls without a pause does not keep others from the lock. */
    if (!__atomic_load_n(&cq->count, __ATOMIC_ACQUIRE))
        return ENOENT;
    fabric_lock();
    while (cq->polling && !cq->one_thread)
        fabric_wait();
    error = take_next(cq);
    cq->polling = !error;
    fabric_unlock();
    return error;
}

static int next_poll(struct ibv_cq_ex *ex)
{
    int error;

    fabric_lock();
    error = take_next(cq_of(ex));
    fabric_unlock();
    return error;
}

static void end_poll(struct ibv_cq_ex *ex)
{
    fabric_lock();
    cq_of(ex)->polling = false;
    fabric_changed();
    fabric_unlock();
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.opcode;
}

static uint32_t read_vendor_err(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.vendor_err;
}

static uint32_t read_byte_len(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.byte_len;
}

/* Or the key that was invalidated: they share their place. */
static __be32 read_imm_data(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.imm_data;
}

static uint32_t read_qp_num(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.qp_num;
}

static uint32_t read_src_qp(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.src_qp;
}

static unsigned read_wc_flags(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.wc_flags;
}

static uint32_t read_slid(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.slid;
}

static uint8_t read_sl(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.sl;
}

static uint8_t read_dlid_path_bits(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.wc.dlid_path_bits;
}

static uint64_t read_completion_ts(struct ibv_cq_ex *ex)
{
    return cq_of(ex)->current.at;
}

static uint64_t read_completion_wallclock_ns(struct ibv_cq_ex *ex)
{
    struct timespec wall;

    clock_gettime(CLOCK_REALTIME, &wall);
    return (uint64_t)wall.tv_sec * 1000 * FABRIC_MS + (uint64_t)wall.tv_nsec -
           (fabric_now() - cq_of(ex)->current.at);
}

/* What a completion queue of the extended kind can tell of a completion. */
static uint64_t wc_flags_known(void)
{
    uint64_t flags = IBV_WC_STANDARD_FLAGS;

    if (fabric_profile.timestamps)
        flags |=
            IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    return flags;
}

static int cq_attr_check(const struct ibv_cq_init_attr_ex *attr)
{
    if (attr->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
        return EINVAL;
    if (attr->wc_flags & ~wc_flags_known())
        return EOPNOTSUPP;
    if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) {
        if (attr->flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN)
            return EOPNOTSUPP;
        if (attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED)
            return EINVAL;
    }
    /* No adapter of the fabric makes parent domains, so none is given here. */
    if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD && attr->parent_domain)
        return EOPNOTSUPP;
    return attr->cqe > INT32_MAX || attr->comp_vector > INT32_MAX ? EINVAL : 0;
}

struct ibv_cq_ex *fabric_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
    int error = cq_attr_check(attr);
    struct fabric_cq *cq;
    struct ibv_cq_ex *ex;

    if (error) {
        errno = error;
        return NULL;
    }
    fabric_lock();
    cq = fabric_cq_create(fabric_context(context), (int)attr->cqe, attr->cq_context, attr->channel,
                          (int)attr->comp_vector);
    if (!cq) {
        fabric_unlock();
        return NULL;
    }
    cq->wc_flags = attr->wc_flags;
    cq->one_thread = attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS &&
                     attr->flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
    ex = &cq->ex;
    ex->start_poll = start_poll;
    ex->next_poll = next_poll;
    ex->end_poll = end_poll;
    ex->read_opcode = read_opcode;
    ex->read_vendor_err = read_vendor_err;
    ex->read_wc_flags = read_wc_flags;
    /* A program may ask only for what it has named; the other calls are there, too. */
    ex->read_byte_len = read_byte_len;
    ex->read_imm_data = read_imm_data;
    ex->read_qp_num = read_qp_num;
    ex->read_src_qp = read_src_qp;
    ex->read_slid = read_slid;
    ex->read_sl = read_sl;
    ex->read_dlid_path_bits = read_dlid_path_bits;
    ex->read_completion_ts = read_completion_ts;
    ex->read_completion_wallclock_ns = read_completion_wallclock_ns;
    fabric_unlock();
    return ex;
}

/* An event for every so many completions is what cq_mod_caps says that there is not. */
int fabric_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
    if (attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE)
        return EINVAL;
    return attr->attr_mask ? EOPNOTSUPP : 0;
}

/* ---- requests -------------------------------------------------------------------------------- */

static struct fabric_qp *qp_of(struct ibv_qp_ex *ex)
{
    return FABRIC_CONTAINER(ex, struct fabric_qp, ex);
}

/* The first fault is what ibv_wr_complete() tells. */
static void note_error(struct fabric_qp *qp, int error)
{
    if (error && !qp->staged_error)
        qp->staged_error = error;
}

int fabric_staging_wait(struct fabric_qp *qp)
{
    while (qp->staging) {
        /* A thread that is in such a section itself would wait for itself. */
        if (pthread_equal(qp->stager, pthread_self()))
            return EINVAL;
        fabric_wait();
    }
    return 0;
}

static void wr_start(struct ibv_qp_ex *ex)
{
    struct fabric_qp *qp = qp_of(ex);
    int error;

    fabric_lock();
    error = fabric_staging_wait(qp);
    if (error) {
        note_error(qp, error);
    } else {
        qp->staging = true;
        qp->stager = pthread_self();
        qp->staged = 0;
        qp->staged_error = 0;
        qp->staged_wqe = NULL;
    }
    fabric_unlock();
}

/* The request that was built is whole. */
static void wqe_finish(struct fabric_qp *qp)
{
    if (qp->staged_wqe)
        note_error(qp, fabric_wqe_check(qp, qp->staged_wqe));
    qp->staged_wqe = NULL;
}

static void staging_end(struct fabric_qp *qp)
{
    qp->staged = 0;
    qp->staged_wqe = NULL;
    qp->staging = false;
    fabric_changed();
}

static int wr_complete(struct ibv_qp_ex *ex)
{
    struct fabric_qp *qp = qp_of(ex);
    enum ibv_qp_state state;
    int error;

    fabric_lock();
    wqe_finish(qp);
    state = ex->qp_base.state;
    if (qp->generation != fabric_generation())
        note_error(qp, EBADF);
    else if (state == IBV_QPS_RESET || state == IBV_QPS_INIT || state == IBV_QPS_RTR)
        note_error(qp, EINVAL);
    else if (fabric_fails("ibv_wr_complete"))
        note_error(qp, errno);
    error = qp->staged_error;
    if (!error)
        fabric_post_staged(qp);
    staging_end(qp);
    fabric_unlock();
    return error;
}

static void wr_abort(struct ibv_qp_ex *ex)
{
    fabric_lock();
    staging_end(qp_of(ex));
    fabric_unlock();
}

/*
 * Begin the next request; NULL: there is none, and a fault is noted.  The caller holds the lock.
 */
static struct fabric_wqe *wqe_begin(struct fabric_qp *qp, enum ibv_wr_opcode opcode, uint64_t asked)
{
    struct fabric_wqe *wqe;

    wqe_finish(qp);
    if (!qp->staging || !(qp->send_ops & asked)) {
        note_error(qp, EINVAL);
        return NULL;
    }
    wqe = fabric_wqe_next(qp);
    if (!wqe) {
        note_error(qp, ENOMEM);
        return NULL;
    }
    wqe->wr_id = qp->ex.wr_id;
    wqe->opcode = opcode;
    /* Inline data has setters of its own. */
    wqe->flags = qp->ex.wr_flags & ~(unsigned)IBV_SEND_INLINE;
    qp->staged_wqe = wqe;
    return wqe;
}

/* A request of one memory of the peer's. */
static void build_one_sided(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint64_t asked,
                            uint32_t rkey, uint64_t remote, __be32 imm, uint64_t compare,
                            uint64_t swap)
{
    struct fabric_wqe *wqe;

    fabric_lock();
    wqe = wqe_begin(qp_of(ex), opcode, asked);
    if (wqe) {
        wqe->rkey = rkey;
        wqe->remote = remote;
        wqe->imm_or_key = imm;
        wqe->compare = compare;
        wqe->swap = swap;
    }
    fabric_unlock();
}

static void build_send(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode, uint64_t asked,
                       uint32_t imm_or_key)
{
    struct fabric_wqe *wqe;

    fabric_lock();
    wqe = wqe_begin(qp_of(ex), opcode, asked);
    if (wqe)
        wqe->imm_or_key = imm_or_key;
    fabric_unlock();
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote,
                              uint64_t compare, uint64_t swap)
{
    build_one_sided(ex, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, rkey, remote,
                    0, compare, swap);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote, uint64_t add)
{
    build_one_sided(ex, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, rkey,
                    remote, 0, add, 0);
}

static void wr_rdma_read(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote)
{
    build_one_sided(ex, IBV_WR_RDMA_READ, IBV_QP_EX_WITH_RDMA_READ, rkey, remote, 0, 0, 0);
}

static void wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote)
{
    build_one_sided(ex, IBV_WR_RDMA_WRITE, IBV_QP_EX_WITH_RDMA_WRITE, rkey, remote, 0, 0, 0);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t remote, __be32 imm)
{
    build_one_sided(ex, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, rkey,
                    remote, imm, 0, 0);
}

static void wr_send(struct ibv_qp_ex *ex)
{
    build_send(ex, IBV_WR_SEND, IBV_QP_EX_WITH_SEND, 0);
}

static void wr_send_imm(struct ibv_qp_ex *ex, __be32 imm)
{
    build_send(ex, IBV_WR_SEND_WITH_IMM, IBV_QP_EX_WITH_SEND_WITH_IMM, imm);
}

static void wr_send_inv(struct ibv_qp_ex *ex, uint32_t key)
{
    build_send(ex, IBV_WR_SEND_WITH_INV, IBV_QP_EX_WITH_SEND_WITH_INV, key);
}

static void wr_local_inv(struct ibv_qp_ex *ex, uint32_t key)
{
    build_send(ex, IBV_WR_LOCAL_INV, IBV_QP_EX_WITH_LOCAL_INV, key);
}

static void wr_bind_mw(struct ibv_qp_ex *ex, struct ibv_mw *mw, uint32_t rkey,
                       const struct ibv_mw_bind_info *info)
{
    struct fabric_qp *qp = qp_of(ex);
    struct fabric_wqe *wqe;

    fabric_lock();
    wqe = wqe_begin(qp, IBV_WR_BIND_MW, IBV_QP_EX_WITH_BIND_MW);
    if (wqe && mw->type != IBV_MW_TYPE_2) {
        note_error(qp, EINVAL);
    } else if (wqe) {
        wqe->mw = FABRIC_CONTAINER(mw, struct fabric_mw, ibv);
        wqe->rkey = rkey;
        wqe->bind = *info;
    }
    fabric_unlock();
}

/* What no queue pair of the fabric is created for. */
static void refuse(struct ibv_qp_ex *ex)
{
    fabric_lock();
    note_error(qp_of(ex), EOPNOTSUPP);
    fabric_unlock();
}

static void wr_send_tso(struct ibv_qp_ex *ex, void *header, uint16_t size, uint16_t mss)
{
    refuse(ex);
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *ex, uint32_t number)
{
    refuse(ex);
}

/* ---- what belongs to the last request -------------------------------------------------------- */

/* NULL: there is no request; a fault of its builder is noted already, else this is one. */
static struct fabric_wqe *wqe_begun(struct fabric_qp *qp)
{
    if (!qp->staged_wqe)
        note_error(qp, EINVAL);
    return qp->staged_wqe;
}

static void wr_set_ud_addr(struct ibv_qp_ex *ex, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
    struct fabric_qp *qp = qp_of(ex);
    struct fabric_wqe *wqe;

    fabric_lock();
    wqe = wqe_begun(qp);
    if (wqe && (qp->ex.qp_base.qp_type != IBV_QPT_UD || !ah)) {
        note_error(qp, EINVAL);
    } else if (wqe) {
        wqe->ah = ah;
        wqe->to = fabric_to_of_attr(&FABRIC_CONTAINER(ah, struct fabric_ah, ibv)->attr);
        wqe->remote_qpn = qpn;
        wqe->remote_qkey = qkey;
    }
    fabric_unlock();
}

static void wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
    struct fabric_qp *qp = qp_of(ex);
    struct fabric_wqe *wqe;
    size_t i;

    fabric_lock();
    wqe = wqe_begun(qp);
    if (wqe && count > qp->cap.max_send_sge) {
        note_error(qp, EINVAL);
    } else if (wqe) {
        wqe->sges = (unsigned)count;
        wqe->length = 0;
        for (i = 0; i < count; i++) {
            wqe->sge[i] = list[i];
            wqe->length += list[i].length;
        }
    }
    fabric_unlock();
}

static void wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length)
{
    struct ibv_sge sge = {.addr = address, .length = length, .lkey = lkey};

    wr_set_sge_list(ex, 1, &sge);
}

static bool may_be_inline(enum ibv_wr_opcode opcode)
{
    switch (opcode) {
    case IBV_WR_SEND:
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        return true;
    default:
        return false;
    }
}

static void wr_set_inline_data_list(struct ibv_qp_ex *ex, size_t count,
                                    const struct ibv_data_buf *list)
{
    struct fabric_qp *qp = qp_of(ex);
    struct fabric_wqe *wqe;
    uint64_t length = 0;
    size_t i;

    for (i = 0; i < count; i++)
        length += list[i].length;
    fabric_lock();
    wqe = wqe_begun(qp);
    if (wqe && (length > qp->cap.max_inline_data || !may_be_inline(wqe->opcode))) {
        note_error(qp, EINVAL);
    } else if (wqe) {
        unsigned char *into = wqe->inlined;

        for (i = 0; i < count; i++) {
            if (!list[i].length)
                continue;
            memcpy(into, list[i].addr, list[i].length);
            into += list[i].length;
        }
        wqe->flags |= IBV_SEND_INLINE;
        wqe->sges = 0;
        wqe->length = length;
    }
    fabric_unlock();
}

static void wr_set_inline_data(struct ibv_qp_ex *ex, void *address, size_t length)
{
    struct ibv_data_buf buffer = {.addr = address, .length = length};

    wr_set_inline_data_list(ex, 1, &buffer);
}

/* ---- queue pairs with these calls ------------------------------------------------------------ */

/* The requests that a queue pair of a type can be asked for. */
static uint64_t send_ops_known(enum ibv_qp_type type)
{
    const struct fabric_profile *profile = &fabric_profile;
    uint64_t ops = IBV_QP_EX_WITH_SEND;

    if (profile->immediate)
        ops |= IBV_QP_EX_WITH_SEND_WITH_IMM;
    if (type == IBV_QPT_UD)
        return ops;
    ops |= IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ;
    if (profile->immediate)
        ops |= IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    if (profile->atomics)
        ops |= IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    if (profile->send_invalidate)
        ops |= IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_SEND_WITH_INV;
    if (profile->windows & ~1)
        ops |= IBV_QP_EX_WITH_BIND_MW;
    return ops;
}

static int qp_attr_check(const struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
    uint32_t known =
        IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    uint32_t mask = attr->comp_mask;

    if (mask & ~known)
        return EOPNOTSUPP;
    if (!(mask & IBV_QP_INIT_ATTR_PD) || !attr->pd || attr->pd->context != context)
        return EINVAL;
    if (mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags)
        return EOPNOTSUPP;
    if (mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS &&
        attr->send_ops_flags & ~send_ops_known(attr->qp_type))
        return EOPNOTSUPP;
    return 0;
}

static void calls_fill(struct ibv_qp_ex *ex)
{
    ex->wr_atomic_cmp_swp = wr_atomic_cmp_swp;
    ex->wr_atomic_fetch_add = wr_atomic_fetch_add;
    ex->wr_bind_mw = wr_bind_mw;
    ex->wr_local_inv = wr_local_inv;
    ex->wr_rdma_read = wr_rdma_read;
    ex->wr_rdma_write = wr_rdma_write;
    ex->wr_rdma_write_imm = wr_rdma_write_imm;
    ex->wr_send = wr_send;
    ex->wr_send_imm = wr_send_imm;
    ex->wr_send_inv = wr_send_inv;
    ex->wr_send_tso = wr_send_tso;
    ex->wr_set_ud_addr = wr_set_ud_addr;
    ex->wr_set_xrc_srqn = wr_set_xrc_srqn;
    ex->wr_set_inline_data = wr_set_inline_data;
    ex->wr_set_inline_data_list = wr_set_inline_data_list;
    ex->wr_set_sge = wr_set_sge;
    ex->wr_set_sge_list = wr_set_sge_list;
    ex->wr_start = wr_start;
    ex->wr_complete = wr_complete;
    ex->wr_abort = wr_abort;
}

struct ibv_qp *fabric_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
    int error = qp_attr_check(context, attr);
    struct fabric_qp *qp;

    if (error) {
        errno = error;
        return NULL;
    }
    fabric_lock();
    qp = fabric_qp_create(FABRIC_CONTAINER(attr->pd, struct fabric_pd, ibv), attr);
    if (qp && attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS) {
        qp->send_ops = attr->send_ops_flags;
        calls_fill(&qp->ex);
    }
    fabric_unlock();
    return qp ? &qp->ibv : NULL;
}

FABRIC_API struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *ibv)
{
    struct fabric_qp *qp = fabric_qp(ibv);

    if (!qp->ex.wr_start) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    return &qp->ex;
}
