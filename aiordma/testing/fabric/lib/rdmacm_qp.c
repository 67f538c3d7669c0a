/*
 * Queue pairs, shared receive queues and endpoints of an id: what librdmacm does for programs that
 * leave it to make the objects of verbs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cm.h"

/* ---- queue pairs of an id -------------------------------------------------------------------- */

static int make_cq(struct ibv_context *verbs, unsigned size, void *context,
                   struct ibv_comp_channel **channel, struct ibv_cq **cq)
{
    *channel = ibv_create_comp_channel(verbs);
    if (!*channel)
        return -1;
    *cq = ibv_create_cq(verbs, size ? (int)size : 1, context, *channel, 0);
    if (*cq)
        return 0;
    ibv_destroy_comp_channel(*channel);
    *channel = NULL;
    return -1;
}

static void cqs_destroy(struct rdma_cm_id *id)
{
    if (id->recv_cq) {
        ibv_destroy_cq(id->recv_cq);
        if (id->send_cq && id->send_cq != id->recv_cq)
            ibv_destroy_cq(id->send_cq);
    } else if (id->send_cq) {
        ibv_destroy_cq(id->send_cq);
    }
    if (id->recv_cq_channel) {
        ibv_destroy_comp_channel(id->recv_cq_channel);
        if (id->send_cq_channel && id->send_cq_channel != id->recv_cq_channel)
            ibv_destroy_comp_channel(id->send_cq_channel);
    } else if (id->send_cq_channel) {
        ibv_destroy_comp_channel(id->send_cq_channel);
    }
    id->recv_cq = id->send_cq = NULL;
    id->recv_cq_channel = id->send_cq_channel = NULL;
}

static int cqs_make(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attr)
{
    if (!attr->recv_cq) {
        if (make_cq(id->verbs, attr->cap.max_recv_wr, id, &id->recv_cq_channel, &id->recv_cq))
            return -1;
        attr->recv_cq = id->recv_cq;
    }
    if (!attr->send_cq) {
        if (make_cq(id->verbs, attr->cap.max_send_wr, id, &id->send_cq_channel, &id->send_cq))
            return -1;
        attr->send_cq = id->send_cq;
    }
    return 0;
}

static int qp_begin(struct rdma_cm_id *id)
{
    static const enum ibv_qp_state STATES[] = {IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
    unsigned i, count = id->qp_type == IBV_QPT_UD ? 3 : 1;

    for (i = 0; i < count; i++) {
        struct ibv_qp_attr attr = {.qp_state = STATES[i]};
        int mask, error;

        if (rdma_init_qp_attr(id, &attr, &mask))
            return -1;
        /* Whatever the peer may be allowed is not known yet: all that is possible. */
        if (mask & IBV_QP_ACCESS_FLAGS)
            attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                                   (fabric_profile.atomics ? IBV_ACCESS_REMOTE_ATOMIC : 0);
        error = ibv_modify_qp(id->qp, &attr, mask);
        if (error)
            return fabric_fail(error);
    }
    return 0;
}

FABRIC_API int rdma_create_qp_ex(struct rdma_cm_id *ibv, struct ibv_qp_init_attr_ex *attr)
{
    struct ibv_qp_init_attr_ex own;

    if (!ibv || ibv->qp || !ibv->verbs || !attr)
        return fabric_fail(EINVAL);
    if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd) {
        attr->comp_mask |= IBV_QP_INIT_ATTR_PD;
        attr->pd = ibv->pd;
        if (!attr->pd)
            return fabric_fail(ENOMEM);
    } else if (attr->pd->context != ibv->verbs) {
        return fabric_fail(EINVAL);
    }
    own = *attr;
    if (!own.srq)
        own.srq = ibv->srq;
    if (cqs_make(ibv, &own)) {
        cqs_destroy(ibv);
        return -1;
    }
    fabric_lock();
    {
        struct fabric_qp *qp =
            fabric_qp_create(FABRIC_CONTAINER(own.pd, struct fabric_pd, ibv), &own);

        ibv->qp = qp ? &qp->ibv : NULL;
    }
    fabric_unlock();
    if (!ibv->qp) {
        cqs_destroy(ibv);
        return -1;
    }
    if (qp_begin(ibv)) {
        ibv_destroy_qp(ibv->qp);
        ibv->qp = NULL;
        cqs_destroy(ibv);
        return -1;
    }
    attr->cap = own.cap;
    ibv->pd = attr->pd;
    return 0;
}

FABRIC_API int rdma_create_qp(struct rdma_cm_id *ibv, struct ibv_pd *pd,
                              struct ibv_qp_init_attr *attr)
{
    struct ibv_qp_init_attr_ex extended = {.qp_context = attr->qp_context,
                                           .send_cq = attr->send_cq,
                                           .recv_cq = attr->recv_cq,
                                           .srq = attr->srq,
                                           .cap = attr->cap,
                                           .qp_type = attr->qp_type,
                                           .sq_sig_all = attr->sq_sig_all,
                                           .comp_mask = IBV_QP_INIT_ATTR_PD,
                                           .pd = pd};

    if (rdma_create_qp_ex(ibv, &extended))
        return -1;
    attr->cap = extended.cap;
    return 0;
}

FABRIC_API void rdma_destroy_qp(struct rdma_cm_id *ibv)
{
    ibv_destroy_qp(ibv->qp);
    ibv->qp = NULL;
    cqs_destroy(ibv);
}

FABRIC_API int rdma_create_srq(struct rdma_cm_id *ibv, struct ibv_pd *pd,
                               struct ibv_srq_init_attr *attr)
{
    if (!ibv->verbs || ibv->srq)
        return fabric_fail(EINVAL);
    if (!pd)
        pd = ibv->pd;
    if (!pd)
        return fabric_fail(ENOMEM);
    ibv->srq = ibv_create_srq(pd, attr);
    if (!ibv->srq)
        return -1;
    ibv->pd = pd;
    return 0;
}

FABRIC_API int rdma_create_srq_ex(struct rdma_cm_id *ibv, struct ibv_srq_init_attr_ex *attr)
{
    struct ibv_srq_init_attr plain = {.srq_context = attr->srq_context, .attr = attr->attr};
    struct ibv_pd *pd = attr->comp_mask & IBV_SRQ_INIT_ATTR_PD ? attr->pd : NULL;

    if (attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE && attr->srq_type != IBV_SRQT_BASIC)
        return fabric_fail(EOPNOTSUPP);
    if (rdma_create_srq(ibv, pd, &plain))
        return -1;
    attr->attr = plain.attr;
    return 0;
}

FABRIC_API void rdma_destroy_srq(struct rdma_cm_id *ibv)
{
    ibv_destroy_srq(ibv->srq);
    ibv->srq = NULL;
}

/* ---- endpoints ------------------------------------------------------------------------------- */

FABRIC_API int rdma_create_ep(struct rdma_cm_id **made, struct rdma_addrinfo *info,
                              struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct rdma_cm_id *ibv;
    struct fabric_id *id;
    int error;

    if (rdma_create_id(NULL, &ibv, NULL, (enum rdma_port_space)info->ai_port_space))
        return -1;
    id = fabric_id(ibv);
    if (info->ai_flags & RAI_PASSIVE) {
        if (rdma_bind_addr(ibv, info->ai_src_addr))
            goto failed;
        if (attr) {
            id->qp_init = malloc(sizeof(*attr));
            if (!id->qp_init)
                goto failed;
            *id->qp_init = *attr;
            id->qp_init->qp_type = (enum ibv_qp_type)info->ai_qp_type;
        }
        id->pd = pd;
    } else {
        if (rdma_resolve_addr(ibv, info->ai_src_addr, info->ai_dst_addr, 2000) ||
            rdma_resolve_route(ibv, 2000))
            goto failed;
        if (attr) {
            attr->qp_type = (enum ibv_qp_type)info->ai_qp_type;
            if (rdma_create_qp(ibv, pd, attr))
                goto failed;
        }
    }
    *made = ibv;
    return 0;
failed:
    error = errno;
    rdma_destroy_id(ibv);
    return fabric_fail(error);
}

FABRIC_API void rdma_destroy_ep(struct rdma_cm_id *ibv)
{
    if (ibv->qp)
        rdma_destroy_qp(ibv);
    if (ibv->srq)
        rdma_destroy_srq(ibv);
    rdma_destroy_id(ibv);
}

FABRIC_API int rdma_get_request(struct rdma_cm_id *listen, struct rdma_cm_id **made)
{
    struct fabric_id *listener = fabric_id(listen);
    struct rdma_cm_event *event;
    struct rdma_cm_id *ibv;
    struct fabric_id *id;

    if (!listener->synchronous)
        return fabric_fail(EINVAL);
    if (listen->event) {
        rdma_ack_cm_event(listen->event);
        listen->event = NULL;
    }
    if (rdma_get_cm_event(listen->channel, &event))
        return -1;
    if (event->status || event->event != RDMA_CM_EVENT_CONNECT_REQUEST) {
        int error = event->status < 0 ? -event->status : EINVAL;

        rdma_ack_cm_event(event);
        return fabric_fail(error);
    }
    ibv = event->id;
    id = fabric_id(ibv);
    if (listener->qp_init) {
        struct ibv_qp_init_attr attr = *listener->qp_init;

        if (rdma_create_qp(ibv, listener->pd, &attr)) {
            int error = errno;

            rdma_ack_cm_event(event);
            rdma_destroy_id(ibv);
            return fabric_fail(error);
        }
    }
    /* Its calls wait for events of its own; the request stays until the next one. */
    ibv->channel = rdma_create_event_channel();
    if (!ibv->channel) {
        ibv->channel = listen->channel;
        rdma_ack_cm_event(event);
        rdma_destroy_id(ibv);
        return fabric_fail(ENOMEM);
    }
    id->synchronous = true;
    fabric_lock();
    FABRIC_CONTAINER(event, struct fabric_cm_event, ibv)->counted = id;
    listener->told--;
    id->told++;
    fabric_unlock();
    ibv->event = event;
    *made = ibv;
    return 0;
}
