/*
 * Words and numbers for the enumerations of verbs.h, and copies between its structs and those of
 * the kernel.  The words are the InfiniBand specification's own.
 */
#define _GNU_SOURCE
#include <infiniband/sa.h>
#include <rdma/ib_user_sa.h>
#include <rdma/ib_user_verbs.h>
#include <string.h>

#include "fabric.h"

/* ---- words ----------------------------------------------------------------------------------- */

static const char *const STATUSES[] = {
    [IBV_WC_SUCCESS] = "success",
    [IBV_WC_LOC_LEN_ERR] = "local length error",
    [IBV_WC_LOC_QP_OP_ERR] = "local QP operation error",
    [IBV_WC_LOC_EEC_OP_ERR] = "local EE context operation error",
    [IBV_WC_LOC_PROT_ERR] = "local protection error",
    [IBV_WC_WR_FLUSH_ERR] = "work request flushed error",
    [IBV_WC_MW_BIND_ERR] = "memory window bind error",
    [IBV_WC_BAD_RESP_ERR] = "bad response error",
    [IBV_WC_LOC_ACCESS_ERR] = "local access error",
    [IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error",
    [IBV_WC_REM_ACCESS_ERR] = "remote access error",
    [IBV_WC_REM_OP_ERR] = "remote operation error",
    [IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded",
    [IBV_WC_RNR_RETRY_EXC_ERR] = "RNR retry counter exceeded",
    [IBV_WC_LOC_RDD_VIOL_ERR] = "local RDD violation error",
    [IBV_WC_REM_INV_RD_REQ_ERR] = "remote invalid RD request",
    [IBV_WC_REM_ABORT_ERR] = "remote aborted error",
    [IBV_WC_INV_EECN_ERR] = "invalid EE context number",
    [IBV_WC_INV_EEC_STATE_ERR] = "invalid EE context state",
    [IBV_WC_FATAL_ERR] = "fatal error",
    [IBV_WC_RESP_TIMEOUT_ERR] = "response timeout error",
    [IBV_WC_GENERAL_ERR] = "general error",
    [IBV_WC_TM_ERR] = "tag matching error",
    [IBV_WC_TM_RNDV_INCOMPLETE] = "tag matching rendezvous incomplete",
};

static const char *const EVENTS[] = {
    [IBV_EVENT_CQ_ERR] = "CQ error",
    [IBV_EVENT_QP_FATAL] = "local work queue catastrophic error",
    [IBV_EVENT_QP_REQ_ERR] = "invalid request local work queue error",
    [IBV_EVENT_QP_ACCESS_ERR] = "local access violation work queue error",
    [IBV_EVENT_COMM_EST] = "communication established",
    [IBV_EVENT_SQ_DRAINED] = "send queue drained",
    [IBV_EVENT_PATH_MIG] = "path migrated",
    [IBV_EVENT_PATH_MIG_ERR] = "path migration request error",
    [IBV_EVENT_DEVICE_FATAL] = "local catastrophic error",
    [IBV_EVENT_PORT_ACTIVE] = "port active",
    [IBV_EVENT_PORT_ERR] = "port error",
    [IBV_EVENT_LID_CHANGE] = "LID change",
    [IBV_EVENT_PKEY_CHANGE] = "P_Key change",
    [IBV_EVENT_SM_CHANGE] = "SM change",
    [IBV_EVENT_SRQ_ERR] = "SRQ catastrophic error",
    [IBV_EVENT_SRQ_LIMIT_REACHED] = "SRQ limit reached",
    [IBV_EVENT_QP_LAST_WQE_REACHED] = "last WQE reached",
    [IBV_EVENT_CLIENT_REREGISTER] = "client reregistration",
    [IBV_EVENT_GID_CHANGE] = "GID change",
    [IBV_EVENT_WQ_FATAL] = "WQ catastrophic error",
};

static const char *const NODES[] = {
    [IBV_NODE_CA] = "InfiniBand channel adapter",
    [IBV_NODE_SWITCH] = "InfiniBand switch",
    [IBV_NODE_ROUTER] = "InfiniBand router",
    [IBV_NODE_RNIC] = "iWARP NIC",
    [IBV_NODE_USNIC] = "usNIC",
    [IBV_NODE_USNIC_UDP] = "usNIC UDP",
    [IBV_NODE_UNSPECIFIED] = "unspecified",
};

static const char *const STATES[] = {
    [IBV_PORT_NOP] = "no change", [IBV_PORT_DOWN] = "down",
    [IBV_PORT_INIT] = "init",     [IBV_PORT_ARMED] = "armed",
    [IBV_PORT_ACTIVE] = "active", [IBV_PORT_ACTIVE_DEFER] = "active defer",
};

/* The index is of an enumeration, of which a program may give any value. */
#define WORD(words, index)                                                                         \
    ((size_t)(index) < FABRIC_LENGTH(words) && (words)[index] ? (words)[index] : "unknown")

FABRIC_API const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    return WORD(STATUSES, status);
}

FABRIC_API const char *ibv_event_type_str(enum ibv_event_type event)
{
    return WORD(EVENTS, event);
}

FABRIC_API const char *ibv_node_type_str(enum ibv_node_type type)
{
    return WORD(NODES, type);
}

FABRIC_API const char *ibv_port_state_str(enum ibv_port_state state)
{
    return WORD(STATES, state);
}

/* ---- rates ----------------------------------------------------------------------------------- */

static const struct rate {
    enum ibv_rate rate;
    int multiple; /* of 2.5 Gbit/s, the nearest */
    int mbps;     /* of signals: from 14 Gbit/s on a lane has more than its name says */
} RATES[] = {
    {IBV_RATE_2_5_GBPS, 1, 2500},      {IBV_RATE_5_GBPS, 2, 5000},
    {IBV_RATE_10_GBPS, 4, 10000},      {IBV_RATE_20_GBPS, 8, 20000},
    {IBV_RATE_30_GBPS, 12, 30000},     {IBV_RATE_40_GBPS, 16, 40000},
    {IBV_RATE_60_GBPS, 24, 60000},     {IBV_RATE_80_GBPS, 32, 80000},
    {IBV_RATE_120_GBPS, 48, 120000},   {IBV_RATE_14_GBPS, 6, 14062},
    {IBV_RATE_56_GBPS, 22, 56250},     {IBV_RATE_112_GBPS, 45, 112500},
    {IBV_RATE_168_GBPS, 67, 168750},   {IBV_RATE_25_GBPS, 10, 25781},
    {IBV_RATE_100_GBPS, 40, 103125},   {IBV_RATE_200_GBPS, 80, 206250},
    {IBV_RATE_300_GBPS, 120, 309375},  {IBV_RATE_28_GBPS, 11, 28125},
    {IBV_RATE_50_GBPS, 20, 53125},     {IBV_RATE_400_GBPS, 160, 425000},
    {IBV_RATE_600_GBPS, 240, 637500},  {(enum ibv_rate)23, 320, 850000}, /* IBV_RATE_800_GBPS */
    {(enum ibv_rate)24, 480, 1275000},                                   /* IBV_RATE_1200_GBPS */
};

FABRIC_API int ibv_rate_to_mult(enum ibv_rate rate)
{
    unsigned i;

    for (i = 0; i < FABRIC_LENGTH(RATES); i++)
        if (RATES[i].rate == rate)
            return RATES[i].multiple;
    return -1;
}

FABRIC_API enum ibv_rate mult_to_ibv_rate(int multiple)
{
    unsigned i;

    for (i = 0; i < FABRIC_LENGTH(RATES); i++)
        if (RATES[i].multiple == multiple)
            return RATES[i].rate;
    return IBV_RATE_MAX;
}

FABRIC_API int ibv_rate_to_mbps(enum ibv_rate rate)
{
    unsigned i;

    for (i = 0; i < FABRIC_LENGTH(RATES); i++)
        if (RATES[i].rate == rate)
            return RATES[i].mbps;
    return -1;
}

FABRIC_API enum ibv_rate mbps_to_ibv_rate(int mbps)
{
    unsigned i;

    for (i = 0; i < FABRIC_LENGTH(RATES); i++)
        if (RATES[i].mbps == mbps)
            return RATES[i].rate;
    return IBV_RATE_MAX;
}

/* ---- the kernel's structs -------------------------------------------------------------------- */

FABRIC_API void ibv_copy_ah_attr_from_kern(struct ibv_ah_attr *to, struct ib_uverbs_ah_attr *from)
{
    memcpy(to->grh.dgid.raw, from->grh.dgid, sizeof(to->grh.dgid));
    to->grh.flow_label = from->grh.flow_label;
    to->grh.sgid_index = from->grh.sgid_index;
    to->grh.hop_limit = from->grh.hop_limit;
    to->grh.traffic_class = from->grh.traffic_class;
    to->dlid = from->dlid;
    to->sl = from->sl;
    to->src_path_bits = from->src_path_bits;
    to->static_rate = from->static_rate;
    to->is_global = from->is_global;
    to->port_num = from->port_num;
}

FABRIC_API void ibv_copy_qp_attr_from_kern(struct ibv_qp_attr *to, struct ib_uverbs_qp_attr *from)
{
    to->qp_state = (enum ibv_qp_state)from->qp_state;
    to->cur_qp_state = (enum ibv_qp_state)from->cur_qp_state;
    to->path_mtu = (enum ibv_mtu)from->path_mtu;
    to->path_mig_state = (enum ibv_mig_state)from->path_mig_state;
    to->qkey = from->qkey;
    to->rq_psn = from->rq_psn;
    to->sq_psn = from->sq_psn;
    to->dest_qp_num = from->dest_qp_num;
    to->qp_access_flags = from->qp_access_flags;
    to->cap.max_send_wr = from->max_send_wr;
    to->cap.max_recv_wr = from->max_recv_wr;
    to->cap.max_send_sge = from->max_send_sge;
    to->cap.max_recv_sge = from->max_recv_sge;
    to->cap.max_inline_data = from->max_inline_data;
    ibv_copy_ah_attr_from_kern(&to->ah_attr, &from->ah_attr);
    ibv_copy_ah_attr_from_kern(&to->alt_ah_attr, &from->alt_ah_attr);
    to->pkey_index = from->pkey_index;
    to->alt_pkey_index = from->alt_pkey_index;
    to->en_sqd_async_notify = from->en_sqd_async_notify;
    to->sq_draining = from->sq_draining;
    to->max_rd_atomic = from->max_rd_atomic;
    to->max_dest_rd_atomic = from->max_dest_rd_atomic;
    to->min_rnr_timer = from->min_rnr_timer;
    to->port_num = from->port_num;
    to->timeout = from->timeout;
    to->retry_cnt = from->retry_cnt;
    to->rnr_retry = from->rnr_retry;
    to->alt_port_num = from->alt_port_num;
    to->alt_timeout = from->alt_timeout;
}

FABRIC_API void ibv_copy_path_rec_from_kern(struct ibv_sa_path_rec *to,
                                            struct ib_user_path_rec *from)
{
    memcpy(to->dgid.raw, from->dgid, sizeof(to->dgid));
    memcpy(to->sgid.raw, from->sgid, sizeof(to->sgid));
    to->dlid = from->dlid;
    to->slid = from->slid;
    to->raw_traffic = (int)from->raw_traffic;
    to->flow_label = from->flow_label;
    to->hop_limit = from->hop_limit;
    to->traffic_class = from->traffic_class;
    to->reversible = (int)from->reversible;
    to->numb_path = from->numb_path;
    to->pkey = from->pkey;
    to->sl = from->sl;
    to->mtu_selector = from->mtu_selector;
    to->mtu = (uint8_t)from->mtu;
    to->rate_selector = from->rate_selector;
    to->rate = from->rate;
    to->packet_life_time_selector = from->packet_life_time_selector;
    to->packet_life_time = from->packet_life_time;
    to->preference = from->preference;
}

FABRIC_API void ibv_copy_path_rec_to_kern(struct ib_user_path_rec *to, struct ibv_sa_path_rec *from)
{
    memcpy(to->dgid, from->dgid.raw, sizeof(to->dgid));
    memcpy(to->sgid, from->sgid.raw, sizeof(to->sgid));
    to->dlid = from->dlid;
    to->slid = from->slid;
    to->raw_traffic = (__u32)from->raw_traffic;
    to->flow_label = from->flow_label;
    to->hop_limit = from->hop_limit;
    to->traffic_class = from->traffic_class;
    to->reversible = (__u32)from->reversible;
    to->numb_path = from->numb_path;
    to->pkey = from->pkey;
    to->sl = from->sl;
    to->mtu_selector = from->mtu_selector;
    to->mtu = from->mtu;
    to->rate_selector = from->rate_selector;
    to->rate = from->rate;
    to->packet_life_time_selector = from->packet_life_time_selector;
    to->packet_life_time = from->packet_life_time;
    to->preference = from->preference;
}
