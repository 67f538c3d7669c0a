/* What the connection manager's files share: cm.c the protocol, rdmacm.c the interface. */
#ifndef FABRIC_CM_H
#define FABRIC_CM_H

#include <errno.h>

#include "fabric.h"

enum fabric_cm_state {
    FABRIC_CM_IDLE,
    FABRIC_CM_BOUND,
    FABRIC_CM_LISTENING,
    FABRIC_CM_RESOLVING,  /* an address of which nobody answers */
    FABRIC_CM_ADDRESS,    /* resolved */
    FABRIC_CM_ROUTE,      /* resolved */
    FABRIC_CM_CONNECTING, /* active: the request was sent */
    FABRIC_CM_ANSWERED,   /* active: a program without a queue pair here has to establish */
    FABRIC_CM_REQUESTED,  /* passive: the program has to accept or reject */
    FABRIC_CM_ACCEPTED,   /* passive: the reply was sent */
    FABRIC_CM_CONNECTED,
    FABRIC_CM_DISCONNECTING, /* the disconnect request was sent */
    FABRIC_CM_DISCONNECTED,  /* the peer's has come, and was not answered yet */
    FABRIC_CM_TIMEWAIT,
    FABRIC_CM_ENDED,
};

/* Codes of a rejection that the fabric itself gives: table 112 of the specification. */
enum {
    FABRIC_REJECT_TIMEOUT = 4,
    FABRIC_REJECT_NO_ID = 6,
    FABRIC_REJECT_NO_SERVICE = 8,
    FABRIC_REJECT_STALE = 10,
    FABRIC_REJECT_CONSUMER = 28,
    FABRIC_REJECT_OPTION = 35,
};

struct fabric_cm_message {
    uint8_t type, reason;
    uint8_t responder_resources, initiator_depth, flow_control, retries, rnr_retries, srq;
    uint8_t mtu, tos, data_length;
    uint16_t space;
    uint32_t from, to; /* ids; to: 0 in a request */
    uint32_t qpn, psn, qkey;
    uint32_t ece_vendor, ece_options; /* enhanced connection establishment; 0: none */
    struct sockaddr_storage source, destination;
    unsigned char data[FABRIC_CM_DATA];
};

struct fabric_event_channel {
    struct rdma_event_channel ibv;
    struct fabric_feed feed;
};

struct fabric_group { /* a multicast group that an id has joined */
    struct fabric_list links;
    struct sockaddr_storage address;
    union ibv_gid gid;
    bool attached;
};

struct fabric_id {
    struct rdma_cm_id ibv;
    enum fabric_cm_state state;
    unsigned generation;
    uint32_t number; /* in this process, never given again */
    struct fabric_device *device;
    bool synchronous; /* made without a channel */
    bool reuse, only, has_port;
    unsigned port_index;
    unsigned told, acked; /* events */
    struct fabric_list links, groups;
    struct fabric_id *listener; /* while the request was not accepted or rejected */
    int backlog;
    unsigned waiting;  /* requests of a listener */
    struct ibv_pd *pd; /* for queue pairs of a listener of rdma_create_ep() */
    struct ibv_qp_init_attr *qp_init;

    /* The other end, and what was agreed. */
    uint16_t slot;
    uint32_t remote;
    struct fabric_device *peer;
    uint32_t qpn, psn, remote_qpn, remote_psn, remote_qkey;
    uint8_t responder_resources, initiator_depth, flow_control, retries, rnr_retries, srq, mtu;
    uint8_t ack_timeout, tos;
    struct ibv_ece local_ece, remote_ece;

    /* What is sent again until it is answered. */
    struct fabric_timer timer;
    struct fabric_cm_message sent;
    int tries;
};

struct fabric_cm_event {
    struct fabric_note note;
    struct rdma_cm_event ibv;
    struct fabric_id *counted; /* the id on which it counts as unacknowledged */
    unsigned char data[FABRIC_CM_DATA];
};

enum { FABRIC_CM_QKEY = 0x01234567 }; /* RDMA_UDP_QKEY */

static inline bool fabric_cm_is_datagram(const struct fabric_id *id)
{
    return id->ibv.qp_type == IBV_QPT_UD;
}

/* Requests and replies say what the program's queue pair may do beyond the specification. */
static inline void fabric_cm_ece_put(const struct fabric_id *id, struct fabric_cm_message *message)
{
    message->ece_vendor = id->local_ece.vendor_id;
    message->ece_options = id->local_ece.options;
}

static inline void fabric_cm_ece_take(struct fabric_id *id, const struct fabric_cm_message *message)
{
    id->remote_ece.vendor_id = message->ece_vendor;
    id->remote_ece.options = message->ece_options;
}

static inline uint8_t fabric_cm_smaller(unsigned one, unsigned other)
{
    return (uint8_t)(one < other ? one : other);
}

/* -1 with errno, or 0 without. */
static inline int fabric_fail(int error)
{
    errno = error;
    return error ? -1 : 0;
}

static inline struct fabric_id *fabric_id(struct rdma_cm_id *id)
{
    return FABRIC_CONTAINER(id, struct fabric_id, ibv);
}

/* All with the lock held. */
struct fabric_id *fabric_id_new(struct rdma_event_channel *channel, void *context,
                                enum rdma_port_space space);
void fabric_id_free(struct fabric_id *id);
struct fabric_cm_event *fabric_cm_event_new(struct fabric_id *id, enum rdma_cm_event_type type,
                                            int status);
void fabric_cm_event_push(struct fabric_cm_event *event);
void fabric_cm_tell(struct fabric_id *id, enum rdma_cm_event_type type, int status);
/* An errno, or 0. */
int fabric_cm_connect(struct fabric_id *id, const struct rdma_conn_param *param);
int fabric_cm_accept(struct fabric_id *id, const struct rdma_conn_param *param);
int fabric_cm_reject(struct fabric_id *id, const void *data, uint8_t length, unsigned reason);
int fabric_cm_establish(struct fabric_id *id);
int fabric_cm_disconnect(struct fabric_id *id);
int fabric_cm_notify(struct fabric_id *id, enum ibv_event_type event);
/* What a destroyed id owes to the other end. */
void fabric_cm_leave(struct fabric_id *id);
/* The context of a device that all ids of the process share; NULL: it could not be opened. */
struct ibv_context *fabric_cm_context(struct fabric_device *device);
/* The status of an event that tells of a refusal. */
int fabric_cm_refusal(const struct fabric_id *id, const struct fabric_cm_message *message);
void fabric_cm_device_set(struct fabric_id *id, struct fabric_device *device);
/* The queue pair that is connected; NULL: the program has it, and connects it itself. */
struct fabric_qp *fabric_cm_qp(const struct fabric_id *id);
/* An errno, or 0: to RTR and RTS. */
int fabric_cm_qp_connect(struct fabric_id *id);
/* The GIDs that an id shows are those of its addresses, as soon as it has an adapter. */
void fabric_cm_gids(struct fabric_id *id);

void fabric_cm_gid_of_peer(const struct fabric_id *id, union ibv_gid *gid);
/* The MTU of the port. */
uint8_t fabric_cm_mtu(void);
int fabric_cm_qp_attr(struct fabric_id *id, struct ibv_qp_attr *attr, int *mask);

#endif
