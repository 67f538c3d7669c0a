/* What a connection asks of its queue pair: the attributes of each state, from what was agreed. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>

#include "cm.h"

/* The queue pair that is connected: rdma_create_qp()'s; on iWARP also one known by its number. */
struct fabric_qp *fabric_cm_qp(const struct fabric_id *id)
{
    if (id->ibv.qp)
        return fabric_qp(id->ibv.qp);
    return fabric_profile.iwarp && id->qpn ? fabric_qp_find(id->qpn) : NULL;
}

/* On RoCE an address is a GID; elsewhere the port has one that stands for its addresses. */
void fabric_cm_gid_of_peer(const struct fabric_id *id, union ibv_gid *gid)
{
    if (id->peer && (fabric_profile.iwarp || fabric_profile.infiniband_link))
        *gid = id->peer->gids[0].gid;
    else
        fabric_address_to_gid(&id->ibv.route.addr.dst_addr, gid);
}

int fabric_cm_qp_attr(struct fabric_id *id, struct ibv_qp_attr *attr, int *mask)
{
    int index;

    /* Before a connection is asked for nothing is known but where the queue pair begins. */
    if (!fabric_cm_is_datagram(id) && id->state <= FABRIC_CM_ROUTE) {
        if (!id->device)
            return EINVAL;
        *mask = IBV_QP_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_PORT |
                (fabric_profile.iwarp ? 0 : IBV_QP_PKEY_INDEX);
        attr->pkey_index = 0;
        attr->port_num = 1;
        attr->qp_access_flags = 0;
        return 0;
    }
    if (id->state == FABRIC_CM_ENDED)
        return EINVAL; /* the peer has left, and nothing is known any more */
    switch (attr->qp_state) {
    case IBV_QPS_INIT:
        *mask = IBV_QP_STATE | (fabric_profile.iwarp ? 0 : IBV_QP_PKEY_INDEX | IBV_QP_PORT);
        attr->pkey_index = 0;
        attr->port_num = 1;
        if (fabric_cm_is_datagram(id)) {
            *mask |= IBV_QP_QKEY;
            attr->qkey = FABRIC_CM_QKEY;
        } else {
            *mask |= IBV_QP_ACCESS_FLAGS;
            attr->qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
            if (id->responder_resources)
                attr->qp_access_flags |= IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
        }
        return 0;
    case IBV_QPS_RTR:
        *mask = IBV_QP_STATE;
        if (fabric_cm_is_datagram(id))
            return 0;
        if (!id->remote_qpn || !id->device)
            return EINVAL;
        *mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                 IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        memset(&attr->ah_attr, 0, sizeof(attr->ah_attr));
        attr->ah_attr.port_num = 1;
        attr->ah_attr.is_global = 1;
        fabric_cm_gid_of_peer(id, &attr->ah_attr.grh.dgid);
        index = fabric_gid_index(id->device, &id->ibv.route.addr.src_addr);
        attr->ah_attr.grh.sgid_index = (uint8_t)(index < 0 ? 0 : index);
        attr->ah_attr.grh.hop_limit = 64;
        attr->ah_attr.grh.traffic_class = id->tos;
        if (id->peer)
            attr->ah_attr.dlid = id->peer->lid;
        attr->path_mtu = id->mtu;
        attr->dest_qp_num = id->remote_qpn;
        attr->rq_psn = id->remote_psn;
        attr->max_dest_rd_atomic = id->responder_resources;
        attr->min_rnr_timer = 0;
        return 0;
    case IBV_QPS_RTS:
        *mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        attr->sq_psn = id->psn;
        if (fabric_cm_is_datagram(id))
            return 0;
        *mask |= IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_TIMEOUT;
        attr->retry_cnt = id->retries;
        attr->rnr_retry = id->rnr_retries;
        attr->max_rd_atomic = id->initiator_depth;
        attr->timeout = id->ack_timeout;
        return 0;
    default:
        return EINVAL;
    }
}

static int qp_advance(struct fabric_id *id, enum ibv_qp_state state)
{
    struct fabric_qp *qp = fabric_cm_qp(id);
    struct ibv_qp_attr attr = {.qp_state = state};
    int mask, error;

    if (!qp || fabric_cm_is_datagram(id))
        return 0;
    error = fabric_cm_qp_attr(id, &attr, &mask);
    if (!error && state == IBV_QPS_RTR && qp->ibv.state == IBV_QPS_INIT) {
        /* Rights that the program has set itself since are left as they are. */
        if (id->responder_resources)
            qp->attr.qp_access_flags |=
                IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    }
    return error ? error : fabric_qp_modify(qp, &attr, mask);
}

int fabric_cm_qp_connect(struct fabric_id *id)
{
    int error = qp_advance(id, IBV_QPS_RTR);

    return error ? error : qp_advance(id, IBV_QPS_RTS);
}

uint8_t fabric_cm_mtu(void)
{
    uint8_t mtu = IBV_MTU_256;

    while (mtu < IBV_MTU_4096 && 128 << (mtu + 1) <= fabric_profile.mtu)
        mtu++;
    return mtu;
}

/* Of datagrams it is the status of a SIDR_REP: the service is not there, or it refuses. */
int fabric_cm_refusal(const struct fabric_id *id, const struct fabric_cm_message *message)
{
    if (fabric_cm_is_datagram(id))
        return message->reason == FABRIC_REJECT_NO_SERVICE ? 1 : 2;
    if (fabric_profile.iwarp)
        return message->reason == FABRIC_REJECT_NO_SERVICE ? -ECONNREFUSED : -ECONNRESET;
    return message->reason;
}
