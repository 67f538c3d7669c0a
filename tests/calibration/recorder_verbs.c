/*
 * The calls of libibverbs, and the functions that its inline functions find in a context.
 */
#include "recorder.h"

#include <errno.h>
#include <string.h>

/* The names of the headers are macros, and those of the library have other arguments. */
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

enum { CONTEXTS = 64 };

static struct seen {
    struct ibv_context *context;
    struct ibv_context_ops ops;
} seen[CONTEXTS];
static unsigned seen_count;

static const char *const access_names[] = {"LOCAL_WRITE",
                                           "REMOTE_WRITE",
                                           "REMOTE_READ",
                                           "REMOTE_ATOMIC",
                                           "MW_BIND",
                                           "ZERO_BASED",
                                           "ON_DEMAND",
                                           "HUGETLB",
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           NULL,
                                           "RELAXED_ORDERING"};
static const char *const state_names[] = {"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"};
static const char *const type_names[] = {NULL, NULL, "RC", "UC", "UD"};
static const char *const request_names[] = {"WRITE",   "WRITE_IMM",    "SEND",      "SEND_IMM",
                                            "READ",    "COMPARE_SWAP", "FETCH_ADD", "LOCAL_INV",
                                            "BIND_MW", "SEND_INV"};
static const char *const send_flag_names[] = {"FENCE", "SIGNALED", "SOLICITED", "INLINE",
                                              "IP_CSUM"};
static const char *const status_names[] = {
    "SUCCESS",          "LOC_LEN_ERR",       "LOC_QP_OP_ERR",     "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",     "WR_FLUSH_ERR",      "MW_BIND_ERR",       "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",   "REM_INV_REQ_ERR",   "REM_ACCESS_ERR",    "REM_OP_ERR",
    "RETRY_EXC_ERR",    "RNR_RETRY_EXC_ERR", "LOC_RDD_VIOL_ERR",  "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",    "INV_EECN_ERR",      "INV_EEC_STATE_ERR", "FATAL_ERR",
    "RESP_TIMEOUT_ERR", "GENERAL_ERR"};
static const char *const done_names[] = {"SEND",      "WRITE",   "READ",     "COMPARE_SWAP",
                                         "FETCH_ADD", "BIND_MW", "LOCAL_INV"};
static const char *const wc_flag_names[] = {"GRH", "WITH_IMM", "IP_CSUM_OK", "WITH_INV"};
static const char *const event_names[] = {"CQ_ERR",
                                          "QP_FATAL",
                                          "QP_REQ_ERR",
                                          "QP_ACCESS_ERR",
                                          "COMM_EST",
                                          "SQ_DRAINED",
                                          "PATH_MIG",
                                          "PATH_MIG_ERR",
                                          "DEVICE_FATAL",
                                          "PORT_ACTIVE",
                                          "PORT_ERR",
                                          "LID_CHANGE",
                                          "PKEY_CHANGE",
                                          "SM_CHANGE",
                                          "SRQ_ERR",
                                          "SRQ_LIMIT_REACHED",
                                          "QP_LAST_WQE_REACHED",
                                          "CLIENT_REREGISTER",
                                          "GID_CHANGE",
                                          "WQ_FATAL"};

/* ---- the data path ----------------------------------------------------------------------- */

static const struct ibv_context_ops *ops_of(struct ibv_context *context)
{
    for (unsigned i = 0; i < seen_count; i++)
        if (seen[i].context == context)
            return &seen[i].ops;
    return NULL; /* cannot be: we are called out of its table */
}

/* The flag of a header, and who has sent it, have a meaning for datagrams alone. */
static bool is_datagram(uint32_t qpn)
{
    const struct object *about = find_qpn(qpn);
    return about && !about->gone &&
           ((const struct ibv_qp *)(uintptr_t)about->value)->qp_type == IBV_QPT_UD;
}

static void say_completion(const struct ibv_wc *wc)
{
    say(" wr_id=%llu %s qp=", (unsigned long long)wc->wr_id, TEXT(wc->status, status_names));
    say_qpn(wc->qp_num);
    /* Of a failed one the other fields are undefined. */
    if (wc->status != IBV_WC_SUCCESS) {
        say(" vendor_err=%s", wc->vendor_err ? "some" : "0");
        return;
    }
    if (wc->opcode == IBV_WC_RECV)
        say(" RECV");
    else if (wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM)
        say(" RECV_WRITE_IMM");
    else
        say(" %s", TEXT(wc->opcode, done_names));
    /* Sends and writes transfer what they were asked to, and need no length. */
    if (wc->opcode & IBV_WC_RECV || wc->opcode == IBV_WC_RDMA_READ ||
        wc->opcode == IBV_WC_COMP_SWAP || wc->opcode == IBV_WC_FETCH_ADD)
        say(" byte_len=%u", wc->byte_len);
    bool datagram = is_datagram(wc->qp_num);
    FLAGS("flags", wc->wc_flags & ~(datagram ? 0u : (unsigned)IBV_WC_GRH), wc_flag_names);
    if (wc->wc_flags & IBV_WC_WITH_IMM)
        say(" imm=%x", be32toh(wc->imm_data));
    if (wc->wc_flags & IBV_WC_WITH_INV) {
        say(" key=");
        say_key_name(wc->invalidated_rkey);
    }
    if (datagram && wc->opcode == IBV_WC_RECV) {
        say(" src=");
        say_qpn(wc->src_qp);
    }
}

static int poll_cq(struct ibv_cq *cq, int most, struct ibv_wc *wc)
{
    int count = INSIDE(ops_of(cq->context)->poll_cq(cq, most, wc));
    for (int i = 0; i < count; i++) {
        if (begin("completion")) {
            say(" ");
            say_name(CQ, (uintptr_t)cq);
            say_completion(&wc[i]);
            end();
        }
    }
    if (count < 0 && begin("ibv_poll_cq")) {
        say(" ");
        say_name(CQ, (uintptr_t)cq);
        say(" -> %d", count);
        end();
    }
    return count;
}

static void say_sges(const struct ibv_sge *sge, int count)
{
    say(" [");
    for (int i = 0; i < count; i++) {
        say(i ? " " : "");
        say_key(sge[i].lkey, sge[i].addr);
        say(":%u", sge[i].length);
    }
    say("]");
}

static void say_send(const struct ibv_qp *qp, const struct ibv_send_wr *wr)
{
    say(" %llu:%s", (unsigned long long)wr->wr_id, TEXT(wr->opcode, request_names));
    FLAGS("flags", wr->send_flags, send_flag_names);
    say_sges(wr->sg_list, wr->num_sge);
    switch (wr->opcode) {
    case IBV_WR_SEND_WITH_IMM:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
        say(" imm=%x", be32toh(wr->imm_data));
        break;
    case IBV_WR_SEND_WITH_INV:
    case IBV_WR_LOCAL_INV:
        say(" key=");
        say_key_name(wr->invalidate_rkey);
        break;
    default:
        break;
    }
    if (qp->qp_type == IBV_QPT_UD) {
        say(" ");
        say_name(AH, (uintptr_t)wr->wr.ud.ah);
        say(" to=");
        say_qpn(wr->wr.ud.remote_qpn);
        say(" qkey=%x", wr->wr.ud.remote_qkey);
        return;
    }
    switch (wr->opcode) {
    case IBV_WR_RDMA_WRITE:
    case IBV_WR_RDMA_WRITE_WITH_IMM:
    case IBV_WR_RDMA_READ:
        say(" remote=");
        say_key(wr->wr.rdma.rkey, wr->wr.rdma.remote_addr);
        break;
    case IBV_WR_ATOMIC_CMP_AND_SWP:
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
        say(" remote=");
        say_key(wr->wr.atomic.rkey, wr->wr.atomic.remote_addr);
        say(" %llx %llx", (unsigned long long)wr->wr.atomic.compare_add,
            (unsigned long long)wr->wr.atomic.swap);
        break;
    case IBV_WR_BIND_MW:
        say(" ");
        say_name(MW, (uintptr_t)wr->bind_mw.mw);
        say(" to ");
        say_name(MR, (uintptr_t)wr->bind_mw.bind_info.mr);
        say("+%lld:%llu",
            (long long)(wr->bind_mw.bind_info.addr -
                        (wr->bind_mw.bind_info.mr ? (uintptr_t)wr->bind_mw.bind_info.mr->addr : 0)),
            (unsigned long long)wr->bind_mw.bind_info.length);
        FLAGS("access", wr->bind_mw.bind_info.mw_access_flags, access_names);
        break;
    default:
        break;
    }
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    /* A key is in force from the moment of its request on. */
    for (struct ibv_send_wr *each = wr; each; each = each->next) {
        if (each->opcode == IBV_WR_BIND_MW && qp->qp_type == IBV_QPT_RC) {
            struct object *window = object(MW, (uintptr_t)each->bind_mw.mw);
            window->base = each->bind_mw.bind_info.addr;
            note_key(each->bind_mw.rkey, window);
        }
    }
    bool writes = begin("ibv_post_send");
    if (writes) {
        say(" ");
        say_name(QP, (uintptr_t)qp);
        for (struct ibv_send_wr *each = wr; each; each = each->next)
            say_send(qp, each);
    }
    int code = INSIDE(ops_of(qp->context)->post_send(qp, wr, bad));
    if (writes) {
        say(" -> %s", errno_name(code));
        if (code && *bad)
            say(" bad=%llu", (unsigned long long)(*bad)->wr_id);
        else if (code)
            say(" bad=none");
        end();
    }
    return code;
}

static void say_recvs(const struct ibv_recv_wr *wr)
{
    for (; wr; wr = wr->next) {
        say(" %llu:", (unsigned long long)wr->wr_id);
        say_sges(wr->sg_list, wr->num_sge);
    }
}

static void end_recvs(int code, struct ibv_recv_wr *const *bad)
{
    say(" -> %s", errno_name(code));
    if (code && *bad)
        say(" bad=%llu", (unsigned long long)(*bad)->wr_id);
    else if (code)
        say(" bad=none");
    end();
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    bool writes = begin("ibv_post_recv");
    if (writes) {
        say(" ");
        say_name(QP, (uintptr_t)qp);
        say_recvs(wr);
    }
    int code = INSIDE(ops_of(qp->context)->post_recv(qp, wr, bad));
    if (writes)
        end_recvs(code, bad);
    return code;
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    bool writes = begin("ibv_post_srq_recv");
    if (writes) {
        say(" ");
        say_name(SRQ, (uintptr_t)srq);
        say_recvs(wr);
    }
    int code = INSIDE(ops_of(srq->context)->post_srq_recv(srq, wr, bad));
    if (writes)
        end_recvs(code, bad);
    return code;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    bool writes = begin("ibv_req_notify_cq");
    if (writes) {
        say(" ");
        say_name(CQ, (uintptr_t)cq);
        say("%s", solicited_only ? " solicited" : "");
    }
    int code = INSIDE(ops_of(cq->context)->req_notify_cq(cq, solicited_only));
    if (writes)
        end_code(code);
    return code;
}

static struct ibv_mw *alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
    bool writes = begin("ibv_alloc_mw");
    if (writes) {
        say(" ");
        say_name(PD, (uintptr_t)pd);
        say(" type=%d", (int)type);
    }
    struct ibv_mw *mw = INSIDE(ops_of(pd->context)->alloc_mw(pd, type));
    if (mw)
        note_key(mw->rkey, object(MW, (uintptr_t)mw));
    if (writes)
        end_object(MW, mw);
    return mw;
}

static int dealloc_mw(struct ibv_mw *mw)
{
    bool writes = begin("ibv_dealloc_mw");
    if (writes) {
        say(" ");
        say_name(MW, (uintptr_t)mw);
    }
    int code = INSIDE(ops_of(mw->context)->dealloc_mw(mw));
    if (!code)
        forget(MW, (uintptr_t)mw);
    if (writes)
        end_code(code);
    return code;
}

static int bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
    bool writes = begin("ibv_bind_mw");
    if (writes) {
        say(" ");
        say_name(QP, (uintptr_t)qp);
        say(" %llu:", (unsigned long long)bind->wr_id);
        say_name(MW, (uintptr_t)mw);
        say(" to ");
        say_name(MR, (uintptr_t)bind->bind_info.mr);
        say("+%lld:%llu",
            (long long)(bind->bind_info.addr -
                        (bind->bind_info.mr ? (uintptr_t)bind->bind_info.mr->addr : 0)),
            (unsigned long long)bind->bind_info.length);
        FLAGS("flags", bind->send_flags, send_flag_names);
        FLAGS("access", bind->bind_info.mw_access_flags, access_names);
    }
    int code = INSIDE(ops_of(qp->context)->bind_mw(qp, mw, bind));
    if (!code) {
        struct object *window = object(MW, (uintptr_t)mw);
        window->base = bind->bind_info.addr;
        note_key(mw->rkey, window);
    }
    if (writes)
        end_code(code);
    return code;
}

void see_context(struct ibv_context *context)
{
    if (!context || context->ops.poll_cq == poll_cq)
        return;
    unsigned i = 0;
    while (i < seen_count && seen[i].context != context)
        i++;
    if (i == CONTEXTS)
        return;
    if (i == seen_count)
        seen_count++;
    seen[i] = (struct seen){context, context->ops};
    context->ops.poll_cq = poll_cq;
    context->ops.post_send = post_send;
    context->ops.post_recv = post_recv;
    context->ops.post_srq_recv = post_srq_recv;
    context->ops.req_notify_cq = req_notify_cq;
    context->ops.alloc_mw = alloc_mw;
    context->ops.dealloc_mw = dealloc_mw;
    context->ops.bind_mw = bind_mw;
}

/* ---- devices, domains, memory ------------------------------------------------------------- */

RECORDED struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    bool writes = begin("ibv_open_device");
    struct ibv_context *context = INSIDE(REAL(ibv_open_device, "IBVERBS_1.1")(device));
    see_context(context);
    if (writes)
        end_object(CONTEXT, context);
    return context;
}

/* Most calls that make an end of something have one form. */
#define DESTROYS(name, type, kind)                                                                 \
    RECORDED int name(type *gone)                                                                  \
    {                                                                                              \
        bool writes = begin(#name);                                                                \
        if (writes) {                                                                              \
            say(" ");                                                                              \
            say_name(kind, (uintptr_t)gone);                                                       \
        }                                                                                          \
        int code = INSIDE(REAL(name, "IBVERBS_1.1")(gone));                                        \
        if (!code)                                                                                 \
            forget(kind, (uintptr_t)gone);                                                         \
        if (writes)                                                                                \
            end_code(code);                                                                        \
        return code;                                                                               \
    }

DESTROYS(ibv_close_device, struct ibv_context, CONTEXT)
DESTROYS(ibv_dealloc_pd, struct ibv_pd, PD)
DESTROYS(ibv_dereg_mr, struct ibv_mr, MR)
DESTROYS(ibv_destroy_cq, struct ibv_cq, CQ)
DESTROYS(ibv_destroy_srq, struct ibv_srq, SRQ)
DESTROYS(ibv_destroy_qp, struct ibv_qp, QP)
DESTROYS(ibv_destroy_ah, struct ibv_ah, AH)
DESTROYS(ibv_destroy_comp_channel, struct ibv_comp_channel, CHANNEL)

RECORDED struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    bool writes = begin("ibv_alloc_pd");
    struct ibv_pd *pd = INSIDE(REAL(ibv_alloc_pd, "IBVERBS_1.1")(context));
    if (writes)
        end_object(PD, pd);
    return pd;
}

static void keep_mr(const struct ibv_mr *mr, uint64_t base)
{
    if (mr) {
        struct object *region = object(MR, (uintptr_t)mr);
        region->base = base;
        note_key(mr->lkey, region);
        if (mr->rkey != mr->lkey)
            note_key(mr->rkey, region);
    }
}

static bool begin_mr(const char *call, struct ibv_pd *pd, void *address, size_t length,
                     unsigned access)
{
    if (!begin(call))
        return false;
    say(" ");
    say_name(PD, (uintptr_t)pd);
    say(" %s length=%zu", address ? "memory" : "NULL", length);
    FLAGS("access", access, access_names);
    return true;
}

RECORDED struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
    bool writes = begin_mr("ibv_reg_mr", pd, address, length, (unsigned)access);
    struct ibv_mr *mr = INSIDE(REAL(ibv_reg_mr, "IBVERBS_1.1")(pd, address, length, access));
    keep_mr(mr, access & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)address);
    if (writes)
        end_object(MR, mr);
    return mr;
}

RECORDED struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length,
                                        uint64_t iova, int access)
{
    bool writes = begin_mr("ibv_reg_mr_iova", pd, address, length, (unsigned)access);
    struct ibv_mr *mr =
        INSIDE(REAL(ibv_reg_mr_iova, "IBVERBS_1.7")(pd, address, length, iova, access));
    keep_mr(mr, iova);
    if (writes)
        end_object(MR, mr);
    return mr;
}

/* What the macro of the header calls where a flag may be ignored. */
RECORDED struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length,
                                         uint64_t iova, unsigned access)
{
    bool writes = begin_mr("ibv_reg_mr_iova2", pd, address, length, access);
    struct ibv_mr *mr =
        INSIDE(REAL(ibv_reg_mr_iova2, "IBVERBS_1.8")(pd, address, length, iova, access));
    keep_mr(mr, access & IBV_ACCESS_ZERO_BASED ? 0 : iova);
    if (writes)
        end_object(MR, mr);
    return mr;
}

RECORDED int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *address,
                          size_t length, int access)
{
    bool writes = begin("ibv_rereg_mr");
    if (writes) {
        say(" ");
        say_name(MR, (uintptr_t)mr);
        say(" flags=%d length=%zu", flags, length);
        FLAGS("access", (unsigned)access, access_names);
    }
    int code = INSIDE(REAL(ibv_rereg_mr, "IBVERBS_1.1")(mr, flags, pd, address, length, access));
    keep_mr(mr, (uintptr_t)mr->addr);
    if (writes) {
        say(" -> %d", code);
        end();
    }
    return code;
}

/* ---- completion queues -------------------------------------------------------------------- */

RECORDED struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    bool writes = begin("ibv_create_comp_channel");
    struct ibv_comp_channel *channel =
        INSIDE(REAL(ibv_create_comp_channel, "IBVERBS_1.0")(context));
    if (writes)
        end_object(CHANNEL, channel);
    return channel;
}

RECORDED struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *own,
                                      struct ibv_comp_channel *channel, int vector)
{
    bool writes = begin("ibv_create_cq");
    if (writes) {
        say(" cqe=%d ", cqe);
        say_name(CHANNEL, (uintptr_t)channel);
        say(" vector=%d", vector);
    }
    struct ibv_cq *cq =
        INSIDE(REAL(ibv_create_cq, "IBVERBS_1.1")(context, cqe, own, channel, vector));
    if (writes) {
        if (cq)
            say(" cqe=%d", cq->cqe);
        end_object(CQ, cq);
    }
    return cq;
}

RECORDED int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
    bool writes = begin("ibv_resize_cq");
    if (writes) {
        say(" ");
        say_name(CQ, (uintptr_t)cq);
        say(" cqe=%d", cqe);
    }
    int code = INSIDE(REAL(ibv_resize_cq, "IBVERBS_1.1")(cq, cqe));
    if (writes) {
        if (!code)
            say(" cqe=%d", cq->cqe);
        end_code(code);
    }
    return code;
}

RECORDED int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **own)
{
    bool writes = begin("ibv_get_cq_event");
    if (writes) {
        say(" ");
        say_name(CHANNEL, (uintptr_t)channel);
    }
    int code = INSIDE(REAL(ibv_get_cq_event, "IBVERBS_1.1")(channel, cq, own));
    if (writes) {
        if (!code) {
            say(" ");
            say_name(CQ, (uintptr_t)*cq);
        }
        end_errno(code);
    }
    return code;
}

/* ---- shared receive queues ---------------------------------------------------------------- */

RECORDED struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *init)
{
    bool writes = begin("ibv_create_srq");
    if (writes)
        say(" wr=%u sge=%u limit=%u", init->attr.max_wr, init->attr.max_sge, init->attr.srq_limit);
    struct ibv_srq *srq = INSIDE(REAL(ibv_create_srq, "IBVERBS_1.1")(pd, init));
    if (writes) {
        if (srq)
            say(" wr=%u sge=%u", init->attr.max_wr, init->attr.max_sge);
        end_object(SRQ, srq);
    }
    return srq;
}

RECORDED int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
    bool writes = begin("ibv_modify_srq");
    if (writes) {
        say(" ");
        say_name(SRQ, (uintptr_t)srq);
        if (mask & IBV_SRQ_MAX_WR)
            say(" wr=%u", attr->max_wr);
        if (mask & IBV_SRQ_LIMIT)
            say(" limit=%u", attr->srq_limit);
    }
    int code = INSIDE(REAL(ibv_modify_srq, "IBVERBS_1.1")(srq, attr, mask));
    if (writes)
        end_code(code);
    return code;
}

RECORDED int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
    bool writes = begin("ibv_query_srq");
    if (writes) {
        say(" ");
        say_name(SRQ, (uintptr_t)srq);
    }
    int code = INSIDE(REAL(ibv_query_srq, "IBVERBS_1.1")(srq, attr));
    if (writes) {
        if (!code)
            say(" wr=%u sge=%u limit=%u", attr->max_wr, attr->max_sge, attr->srq_limit);
        end_code(code);
    }
    return code;
}

/* ---- queue pairs --------------------------------------------------------------------------- */

/* Beside a shared queue those of the receive queue say nothing. */
static void say_cap(const struct ibv_qp_cap *cap, bool receives)
{
    say(" send=%ux%u", cap->max_send_wr, cap->max_send_sge);
    if (receives)
        say(" recv=%ux%u", cap->max_recv_wr, cap->max_recv_sge);
    say(" inline=%u", cap->max_inline_data);
}

RECORDED struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    bool writes = begin("ibv_create_qp");
    if (writes) {
        say(" ");
        say_name(PD, (uintptr_t)pd);
        say(" %s ", TEXT(init->qp_type, type_names));
        say_name(CQ, (uintptr_t)init->send_cq);
        say(" ");
        say_name(CQ, (uintptr_t)init->recv_cq);
        say(" ");
        say_name(SRQ, (uintptr_t)init->srq);
        say_cap(&init->cap, !init->srq);
        say("%s", init->sq_sig_all ? " sig_all" : "");
    }
    struct ibv_qp *qp = INSIDE(REAL(ibv_create_qp, "IBVERBS_1.1")(pd, init));
    if (qp)
        note_qpn(qp->qp_num, object(QP, (uintptr_t)qp));
    if (writes) {
        if (qp)
            say_cap(&init->cap, !init->srq);
        end_object(QP, qp);
    }
    return qp;
}

static void say_attr(const struct ibv_qp_attr *attr, int mask)
{
    if (mask & IBV_QP_STATE)
        say(" state=%s", TEXT(attr->qp_state, state_names));
    if (mask & IBV_QP_CUR_STATE)
        say(" cur=%s", TEXT(attr->cur_qp_state, state_names));
    if (mask & IBV_QP_EN_SQD_ASYNC_NOTIFY)
        say(" notify=%u", attr->en_sqd_async_notify);
    if (mask & IBV_QP_ACCESS_FLAGS)
        FLAGS("access", attr->qp_access_flags, access_names);
    if (mask & IBV_QP_PKEY_INDEX)
        say(" pkey_index=%u", attr->pkey_index);
    if (mask & IBV_QP_PORT)
        say(" port=%u", attr->port_num);
    if (mask & IBV_QP_QKEY)
        say(" qkey=%x", attr->qkey);
    if (mask & IBV_QP_AV)
        say(" av");
    if (mask & IBV_QP_PATH_MTU)
        say(" mtu=%d", (int)attr->path_mtu);
    if (mask & IBV_QP_TIMEOUT)
        say(" timeout=%u", attr->timeout);
    if (mask & IBV_QP_RETRY_CNT)
        say(" retry=%u", attr->retry_cnt);
    if (mask & IBV_QP_RNR_RETRY)
        say(" rnr_retry=%u", attr->rnr_retry);
    if (mask & IBV_QP_RQ_PSN)
        say(" rq_psn");
    if (mask & IBV_QP_MAX_QP_RD_ATOMIC)
        say(" rd=%u", attr->max_rd_atomic);
    if (mask & IBV_QP_ALT_PATH)
        say(" alt");
    if (mask & IBV_QP_MIN_RNR_TIMER)
        say(" min_rnr=%u", attr->min_rnr_timer);
    if (mask & IBV_QP_SQ_PSN)
        say(" sq_psn");
    if (mask & IBV_QP_MAX_DEST_RD_ATOMIC)
        say(" dest_rd=%u", attr->max_dest_rd_atomic);
    if (mask & IBV_QP_CAP)
        say_cap(&attr->cap, true);
    if (mask & IBV_QP_DEST_QPN) {
        say(" dest=");
        say_qpn(attr->dest_qp_num);
    }
    if (mask & ~0x1fffff)
        say(" mask=%x", (unsigned)mask & ~0x1fffffu);
}

RECORDED int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    bool writes = begin("ibv_modify_qp");
    if (writes) {
        say(" ");
        say_name(QP, (uintptr_t)qp);
        say_attr(attr, mask);
    }
    int code = INSIDE(REAL(ibv_modify_qp, "IBVERBS_1.1")(qp, attr, mask));
    if (writes)
        end_code(code);
    return code;
}

RECORDED int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                          struct ibv_qp_init_attr *init)
{
    bool writes = begin("ibv_query_qp");
    if (writes) {
        say(" ");
        say_name(QP, (uintptr_t)qp);
    }
    int code = INSIDE(REAL(ibv_query_qp, "IBVERBS_1.1")(qp, attr, mask, init));
    if (writes) {
        if (!code)
            say_attr(attr, mask);
        end_code(code);
    }
    return code;
}

/* ---- datagrams ----------------------------------------------------------------------------- */

RECORDED struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
    bool writes = begin("ibv_create_ah");
    if (writes)
        say(" port=%u%s", attr->port_num, attr->is_global ? " global" : "");
    struct ibv_ah *ah = INSIDE(REAL(ibv_create_ah, "IBVERBS_1.1")(pd, attr));
    if (writes)
        end_object(AH, ah);
    return ah;
}

RECORDED int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc,
                                 struct ibv_grh *grh, struct ibv_ah_attr *attr)
{
    bool writes = begin("ibv_init_ah_from_wc");
    int code = INSIDE(REAL(ibv_init_ah_from_wc, "IBVERBS_1.1")(context, port, wc, grh, attr));
    if (writes)
        end_errno(code);
    return code;
}

#define GROUPS(name)                                                                               \
    RECORDED int name(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)                   \
    {                                                                                              \
        bool writes = begin(#name);                                                                \
        if (writes) {                                                                              \
            say(" ");                                                                              \
            say_name(QP, (uintptr_t)qp);                                                           \
        }                                                                                          \
        int code = INSIDE(REAL(name, "IBVERBS_1.1")(qp, gid, lid));                                \
        if (writes)                                                                                \
            end_code(code);                                                                        \
        return code;                                                                               \
    }

GROUPS(ibv_attach_mcast)
GROUPS(ibv_detach_mcast)

/* ---- asynchronous events ------------------------------------------------------------------- */

RECORDED int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    bool writes = begin("async_event");
    int code = INSIDE(REAL(ibv_get_async_event, "IBVERBS_1.1")(context, event));
    if (!writes)
        return code;
    if (!code) {
        say(" %s ", TEXT(event->event_type, event_names));
        switch (event->event_type) {
        case IBV_EVENT_CQ_ERR:
            say_name(CQ, (uintptr_t)event->element.cq);
            break;
        case IBV_EVENT_SRQ_ERR:
        case IBV_EVENT_SRQ_LIMIT_REACHED:
            say_name(SRQ, (uintptr_t)event->element.srq);
            break;
        case IBV_EVENT_QP_FATAL:
        case IBV_EVENT_QP_REQ_ERR:
        case IBV_EVENT_QP_ACCESS_ERR:
        case IBV_EVENT_COMM_EST:
        case IBV_EVENT_SQ_DRAINED:
        case IBV_EVENT_PATH_MIG:
        case IBV_EVENT_PATH_MIG_ERR:
        case IBV_EVENT_QP_LAST_WQE_REACHED:
            say_name(QP, (uintptr_t)event->element.qp);
            break;
        default:
            say("port%d", event->element.port_num);
        }
    }
    end_errno(code);
    return code;
}
