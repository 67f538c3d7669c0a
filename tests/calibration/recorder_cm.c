/*
 * The calls of librdmacm.
 */
#include "recorder.h"

#include <string.h>

static const char *const event_names[] = {
    "ADDR_RESOLVED",   "ADDR_ERROR",       "ROUTE_RESOLVED", "ROUTE_ERROR",
    "CONNECT_REQUEST", "CONNECT_RESPONSE", "CONNECT_ERROR",  "UNREACHABLE",
    "REJECTED",        "ESTABLISHED",      "DISCONNECTED",   "DEVICE_REMOVAL",
    "MULTICAST_JOIN",  "MULTICAST_ERROR",  "ADDR_CHANGE",    "TIMEWAIT_EXIT"};

static bool begin_id(const char *call, const struct rdma_cm_id *id)
{
    if (!begin(call))
        return false;
    say(" ");
    say_name(ID, (uintptr_t)id);
    return true;
}

/* Binding and resolving give an id its adapter, and rdma_create_qp its queue pair. */
static int ended(const struct rdma_cm_id *id, bool writes, int code)
{
    see_context(id->verbs);
    if (writes)
        end_errno(code);
    return code;
}

RECORDED struct rdma_event_channel *rdma_create_event_channel(void)
{
    bool writes = begin("rdma_create_event_channel");
    struct rdma_event_channel *channel = INSIDE(REAL(rdma_create_event_channel, "RDMACM_1.0")());
    if (writes)
        end_object(EVENTS, channel);
    return channel;
}

RECORDED int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *own,
                            enum rdma_port_space ps)
{
    bool writes = begin("rdma_create_id");
    if (writes) {
        say(" ");
        say_name(EVENTS, (uintptr_t)channel);
        say(" ps=%s", ps == RDMA_PS_TCP ? "TCP" : ps == RDMA_PS_UDP ? "UDP" : "other");
    }
    int code = INSIDE(REAL(rdma_create_id, "RDMACM_1.0")(channel, id, own, ps));
    if (writes) {
        if (!code) {
            say(" ");
            say_name(ID, (uintptr_t)*id);
        }
        end_errno(code);
    }
    return code;
}

RECORDED int rdma_destroy_id(struct rdma_cm_id *id)
{
    bool writes = begin_id("rdma_destroy_id", id);
    int code = INSIDE(REAL(rdma_destroy_id, "RDMACM_1.0")(id));
    if (!code)
        forget(ID, (uintptr_t)id);
    if (writes)
        end_errno(code);
    return code;
}

RECORDED int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *channel)
{
    bool writes = begin_id("rdma_migrate_id", id);
    if (writes) {
        say(" ");
        say_name(EVENTS, (uintptr_t)channel);
    }
    return ended(id, writes, INSIDE(REAL(rdma_migrate_id, "RDMACM_1.0")(id, channel)));
}

RECORDED int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t length)
{
    bool writes = begin_id("rdma_set_option", id);
    if (writes)
        say(" level=%d name=%d length=%zu", level, name, length);
    return ended(id, writes,
                 INSIDE(REAL(rdma_set_option, "RDMACM_1.0")(id, level, name, value, length)));
}

RECORDED int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address)
{
    bool writes = begin_id("rdma_bind_addr", id);
    if (writes) {
        say(" ");
        say_address(address);
    }
    int code = INSIDE(REAL(rdma_bind_addr, "RDMACM_1.0")(id, address));
    if (writes && !code)
        say(" device=%s", id->verbs ? "yes" : "no");
    return ended(id, writes, code);
}

RECORDED int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to,
                               int timeout_ms)
{
    bool writes = begin_id("rdma_resolve_addr", id);
    if (writes) {
        say(" ");
        say_address(from);
        say(" ");
        say_address(to);
    }
    return ended(id, writes,
                 INSIDE(REAL(rdma_resolve_addr, "RDMACM_1.0")(id, from, to, timeout_ms)));
}

RECORDED int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms)
{
    bool writes = begin_id("rdma_resolve_route", id);
    return ended(id, writes, INSIDE(REAL(rdma_resolve_route, "RDMACM_1.0")(id, timeout_ms)));
}

RECORDED int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *init)
{
    bool writes = begin_id("rdma_create_qp", id);
    int code = INSIDE(REAL(rdma_create_qp, "RDMACM_1.0")(id, pd, init));
    if (!code)
        note_qpn(id->qp->qp_num, object(QP, (uintptr_t)id->qp));
    if (writes && !code) {
        say(" ");
        say_name(QP, (uintptr_t)id->qp);
    }
    return ended(id, writes, code);
}

RECORDED void rdma_destroy_qp(struct rdma_cm_id *id)
{
    uintptr_t qp = (uintptr_t)id->qp;
    bool writes = begin_id("rdma_destroy_qp", id);
    depth++;
    REAL(rdma_destroy_qp, "RDMACM_1.0")(id);
    depth--;
    forget(QP, qp);
    if (writes)
        end();
}

static void say_conn(const struct rdma_conn_param *param)
{
    say(" data=");
    say_bytes(param->private_data, param->private_data_len);
    say(" responder=%u initiator=%u flow=%u retry=%u rnr=%u", param->responder_resources,
        param->initiator_depth, param->flow_control, param->retry_count, param->rnr_retry_count);
}

#define CONNECTS(name)                                                                             \
    RECORDED int name(struct rdma_cm_id *id, struct rdma_conn_param *param)                        \
    {                                                                                              \
        bool writes = begin_id(#name, id);                                                         \
        if (writes && param) {                                                                     \
            say_conn(param);                                                                       \
            say(" qp=");                                                                           \
            say_qpn(param->qp_num);                                                                \
        }                                                                                          \
        return ended(id, writes, INSIDE(REAL(name, "RDMACM_1.0")(id, param)));                     \
    }

CONNECTS(rdma_connect)
CONNECTS(rdma_accept)

RECORDED int rdma_listen(struct rdma_cm_id *id, int backlog)
{
    bool writes = begin_id("rdma_listen", id);
    if (writes)
        say(" backlog=%d", backlog);
    return ended(id, writes, INSIDE(REAL(rdma_listen, "RDMACM_1.0")(id, backlog)));
}

RECORDED int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t length)
{
    bool writes = begin_id("rdma_reject", id);
    if (writes) {
        say(" data=");
        say_bytes(data, length);
    }
    return ended(id, writes, INSIDE(REAL(rdma_reject, "RDMACM_1.0")(id, data, length)));
}

RECORDED int rdma_disconnect(struct rdma_cm_id *id)
{
    bool writes = begin_id("rdma_disconnect", id);
    return ended(id, writes, INSIDE(REAL(rdma_disconnect, "RDMACM_1.0")(id)));
}

RECORDED int rdma_establish(struct rdma_cm_id *id)
{
    bool writes = begin_id("rdma_establish", id);
    return ended(id, writes, INSIDE(REAL(rdma_establish, "RDMACM_1.2")(id)));
}

RECORDED int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event)
{
    bool writes = begin_id("rdma_notify", id);
    if (writes)
        say(" event=%d", (int)event);
    return ended(id, writes, INSIDE(REAL(rdma_notify, "RDMACM_1.0")(id, event)));
}

RECORDED int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attr, int *mask)
{
    bool writes = begin_id("rdma_init_qp_attr", id);
    if (writes)
        say(" state=%d", (int)attr->qp_state);
    int code = INSIDE(REAL(rdma_init_qp_attr, "RDMACM_1.2")(id, attr, mask));
    if (writes && !code) {
        say(" mask=%x", (unsigned)*mask);
        if (*mask & IBV_QP_ACCESS_FLAGS)
            say(" access=%x", attr->qp_access_flags);
        if (*mask & IBV_QP_MAX_DEST_RD_ATOMIC)
            say(" dest_rd=%u", attr->max_dest_rd_atomic);
        if (*mask & IBV_QP_MAX_QP_RD_ATOMIC)
            say(" rd=%u", attr->max_rd_atomic);
        if (*mask & IBV_QP_MIN_RNR_TIMER)
            say(" min_rnr=%u", attr->min_rnr_timer);
        if (*mask & IBV_QP_RETRY_CNT)
            say(" retry=%u", attr->retry_cnt);
        if (*mask & IBV_QP_RNR_RETRY)
            say(" rnr_retry=%u", attr->rnr_retry);
        if (*mask & IBV_QP_QKEY)
            say(" qkey=%x", attr->qkey);
    }
    return ended(id, writes, code);
}

static void say_event(const struct rdma_cm_event *event)
{
    say(" %s ", TEXT(event->event, event_names));
    say_name(ID, (uintptr_t)event->id);
    if (event->listen_id) {
        say(" of ");
        say_name(ID, (uintptr_t)event->listen_id);
    }
    say(" status=%d", event->status);
    if (event->id->ps == RDMA_PS_UDP) {
        if (event->param.ud.private_data_len) {
            say(" data=");
            say_bytes(event->param.ud.private_data, event->param.ud.private_data_len);
        }
        if (event->event == RDMA_CM_EVENT_ESTABLISHED ||
            event->event == RDMA_CM_EVENT_MULTICAST_JOIN) {
            say(" qkey=%x qp=", event->param.ud.qkey);
            say_qpn(event->param.ud.qp_num);
        }
        return;
    }
    switch (event->event) {
    case RDMA_CM_EVENT_CONNECT_REQUEST:
    case RDMA_CM_EVENT_CONNECT_RESPONSE:
    case RDMA_CM_EVENT_ESTABLISHED:
        say_conn(&event->param.conn);
        say(" qp=");
        say_qpn(event->param.conn.qp_num);
        break;
    default:
        if (event->param.conn.private_data_len) {
            say(" data=");
            say_bytes(event->param.conn.private_data, event->param.conn.private_data_len);
        }
    }
}

RECORDED int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
    bool writes = begin("cm_event");
    if (writes) {
        say(" ");
        say_name(EVENTS, (uintptr_t)channel);
    }
    int code = INSIDE(REAL(rdma_get_cm_event, "RDMACM_1.0")(channel, event));
    if (!code)
        see_context((*event)->id->verbs);
    if (writes) {
        if (!code)
            say_event(*event);
        end_errno(code);
    }
    return code;
}

RECORDED int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attr,
                                    void *own)
{
    bool writes = begin_id("rdma_join_multicast_ex", id);
    if (writes) {
        say(" ");
        say_address(attr->addr);
        say(" flags=%u", attr->join_flags);
    }
    return ended(id, writes, INSIDE(REAL(rdma_join_multicast_ex, "RDMACM_1.1")(id, attr, own)));
}

RECORDED int rdma_leave_multicast(struct rdma_cm_id *id, struct sockaddr *address)
{
    bool writes = begin_id("rdma_leave_multicast", id);
    if (writes) {
        say(" ");
        say_address(address);
    }
    return ended(id, writes, INSIDE(REAL(rdma_leave_multicast, "RDMACM_1.0")(id, address)));
}
