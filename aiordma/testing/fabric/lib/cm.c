/*
 * The connection manager's protocol: requests, replies, rejections and farewells between two ids.
 *
 * It is that of the InfiniBand specification's chapter on communication management: what is not
 * answered is sent again, what comes twice is answered twice and done once, and after the last try
 * the program hears of it.  Datagram ids resolve a service (SIDR) by the same messages.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cm.h"

enum message_type { REQUEST, REPLY, READY, REJECT, LEAVE, LEFT, FIND, FOUND };

enum {
    TRIES = 15,
    RESPONSE_EXPONENT = 20, /* 4.096 us * 2^n: 4.3 s */
    TIMEWAIT_MS = 1000,
    ANSWERED_BEFORE = 1024,
    ACK_TIMEOUT = 14,
    /* What a program gets of private data; padded with zeros where a field has its full size. */
    DATA_REQUEST = 56,
    DATA_REPLY = 196,
    DATA_REJECT = 148,
    DATA_FIND = 180,
    DATA_FOUND = 136,
};

struct fabric_list fabric_ids = {&fabric_ids, &fabric_ids};

/* Requests that were taken, so that one that comes again is not taken for a new one. */
static struct {
    uint16_t slot;
    uint32_t number;
    struct fabric_cm_message *answer; /* that an id which is gone has given; NULL: none */
} answered[ANSWERED_BEFORE];
static unsigned answered_next;

/* A refusal, or a service that was found, is repeated for one who has not heard it. */
static void answer_keep(const struct fabric_id *id)
{
    unsigned i;

    if (id->sent.type != REJECT && id->sent.type != FOUND)
        return;
    for (i = 0; i < ANSWERED_BEFORE; i++)
        if (answered[i].number && answered[i].slot == id->slot &&
            answered[i].number == id->remote && !answered[i].answer) {
            answered[i].answer = malloc(sizeof(id->sent));
            if (answered[i].answer)
                *answered[i].answer = id->sent;
            return;
        }
}

/* Another process may get the number of one that has ended, and counts its ids anew. */
static void answers_forget(unsigned slot)
{
    unsigned i;

    for (i = 0; i < ANSWERED_BEFORE; i++)
        if (answered[i].slot == slot) {
            free(answered[i].answer);
            memset(&answered[i], 0, sizeof(answered[i]));
        }
}

static struct fabric_id *id_find(uint32_t number)
{
    struct fabric_list *item;

    for (item = fabric_ids.next; item != &fabric_ids; item = item->next) {
        struct fabric_id *id = FABRIC_CONTAINER(item, struct fabric_id, links);

        if (id->number == number)
            return id;
    }
    return NULL;
}

static unsigned data_room(const struct fabric_id *id, enum message_type type)
{
    switch (type) {
    case REQUEST:
        return fabric_profile.iwarp ? 255 : DATA_REQUEST;
    case REPLY:
        return fabric_profile.iwarp ? 255 : DATA_REPLY;
    case REJECT:
        return fabric_profile.iwarp ? 255 : fabric_cm_is_datagram(id) ? DATA_FOUND : DATA_REJECT;
    case FIND:
        return DATA_FIND;
    case FOUND:
        return DATA_FOUND;
    default:
        return 0;
    }
}

/* ---- events ---------------------------------------------------------------------------------- */

struct fabric_cm_event *fabric_cm_event_new(struct fabric_id *id, enum rdma_cm_event_type type,
                                            int status)
{
    struct fabric_cm_event *event = calloc(1, sizeof(*event));

    if (!event)
        return NULL;
    event->ibv.id = &id->ibv;
    event->ibv.event = type;
    event->ibv.status = status;
    event->counted = id;
    event->note.about = id;
    return event;
}

void fabric_cm_event_push(struct fabric_cm_event *event)
{
    struct fabric_event_channel *channel =
        FABRIC_CONTAINER(event->counted->ibv.channel, struct fabric_event_channel, ibv);

    event->counted->told++;
    fabric_feed_push(&channel->feed, &event->note);
}

void fabric_cm_tell(struct fabric_id *id, enum rdma_cm_event_type type, int status)
{
    struct fabric_cm_event *event = fabric_cm_event_new(id, type, status);

    if (event)
        fabric_cm_event_push(event);
}

/* Private data as the peer's program sees it. */
static uint8_t data_take(struct fabric_id *id, struct fabric_cm_event *event,
                         const struct fabric_cm_message *message)
{
    unsigned room = data_room(id, message->type);

    memcpy(event->data, message->data, message->data_length);
    return (uint8_t)(fabric_profile.iwarp ? message->data_length : room);
}

static void param_fill(struct rdma_conn_param *param, const struct fabric_cm_message *message)
{
    /* What the peer may do at most is what this side may be asked for. */
    param->responder_resources = message->initiator_depth;
    param->initiator_depth = message->responder_resources;
    /* The messages of iWARP have room for no more. */
    if (fabric_profile.iwarp)
        return;
    param->flow_control = message->flow_control;
    param->retry_count = message->retries;
    param->rnr_retry_count = message->rnr_retries;
    param->srq = message->srq;
    param->qp_num = message->qpn;
}

static void tell_message(struct fabric_id *id, enum rdma_cm_event_type type, int status,
                         const struct fabric_cm_message *message)
{
    struct fabric_cm_event *event = fabric_cm_event_new(id, type, status);
    struct rdma_conn_param *param;

    if (!event)
        return;
    param = &event->ibv.param.conn;
    param->private_data_len = data_take(id, event, message);
    param->private_data = param->private_data_len ? event->data : NULL;
    param_fill(param, message);
    fabric_cm_event_push(event);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void message_go(const struct fabric_cm_message *message, uint16_t slot,
                       const struct fabric_device *from, const struct fabric_device *to)
{
    struct fabric_packet *packet = fabric_packet_new(sizeof(*message));

    if (!packet)
        return; /* lost, as a message may be */
    packet->header.opcode = FABRIC_CM;
    packet->header.slot = slot;
    packet->header.from_device = from ? (uint8_t)from->number : 0;
    packet->header.to_device = to ? (uint8_t)to->number : 0;
    memcpy(packet->bytes, message, sizeof(*message));
    fabric_packet_send(packet);
}

static struct fabric_cm_message message_of(const struct fabric_id *id, enum message_type type)
{
    struct fabric_cm_message message = {
        .type = (uint8_t)type, .from = id->number, .to = id->remote};

    message.space = (uint16_t)id->ibv.ps;
    message.qpn = id->qpn;
    message.psn = id->psn;
    message.responder_resources = id->responder_resources;
    message.initiator_depth = id->initiator_depth;
    message.flow_control = id->flow_control;
    message.retries = id->retries;
    message.rnr_retries = id->rnr_retries;
    message.srq = id->srq;
    message.mtu = id->mtu;
    message.tos = id->tos;
    memcpy(&message.source, &id->ibv.route.addr.src_addr, sizeof(message.source));
    memcpy(&message.destination, &id->ibv.route.addr.dst_addr, sizeof(message.destination));
    return message;
}

static void send_once(struct fabric_id *id, const struct fabric_cm_message *message)
{
    message_go(message, id->slot, id->device, id->peer);
}

static void timer_start(struct fabric_id *id)
{
    fabric_time response = fabric_cm_response();

    if (!response)
        response = (fabric_time)4096 << RESPONSE_EXPONENT;
    fabric_timer_set(&id->timer, fabric_now() + response);
}

/* Send, and again until an answer stops it. */
static void send_until(struct fabric_id *id, const struct fabric_cm_message *message)
{
    id->sent = *message;
    id->tries = TRIES;
    send_once(id, message);
    timer_start(id);
}

/* An answer to a message whose id is not here, or has ended. */
static void answer_to(const struct fabric_packet *packet, enum message_type type, unsigned reason)
{
    const struct fabric_cm_message *came = (const struct fabric_cm_message *)packet->bytes;
    struct fabric_cm_message message = {.type = (uint8_t)type,
                                        .reason = (uint8_t)reason,
                                        .from = came->to,
                                        .to = came->from,
                                        .space = came->space};

    message_go(&message, packet->header.from_slot, fabric_device(packet->header.to_device),
               fabric_device(packet->header.from_device));
}

static int data_put(const struct fabric_id *id, struct fabric_cm_message *message, const void *data,
                    unsigned length)
{
    if (length > data_room(id, message->type))
        return EINVAL;
    if (length && !data)
        return EINVAL;
    if (length)
        memcpy(message->data, data, length);
    message->data_length = (uint8_t)length;
    return 0;
}

/* ---- ids ------------------------------------------------------------------------------------- */

static void timer_ring(struct fabric_timer *timer);

struct fabric_id *fabric_id_new(struct rdma_event_channel *channel, void *context,
                                enum rdma_port_space space)
{
    static uint32_t last;
    struct fabric_id *id = calloc(1, sizeof(*id));

    if (!id)
        return NULL;
    id->number = ++last;
    id->generation = fabric_generation();
    id->ibv.channel = channel;
    id->ibv.context = context;
    id->ibv.ps = space;
    id->ibv.qp_type = space == RDMA_PS_UDP || space == RDMA_PS_IPOIB ? IBV_QPT_UD : IBV_QPT_RC;
    id->timer.ring = timer_ring;
    id->ack_timeout = ACK_TIMEOUT;
    /* Now: a program may ask for the attributes of its queue pair before it accepts. */
    id->psn = (uint32_t)fabric_random() & 0xffffff;
    fabric_list_init(&id->groups);
    fabric_list_add(&fabric_ids, &id->links);
    fabric_born(FABRIC_ID);
    return id;
}

static void request_settled(struct fabric_id *id)
{
    if (id->listener)
        id->listener->waiting--;
    id->listener = NULL;
}

void fabric_id_free(struct fabric_id *id)
{
    struct fabric_list *item;

    request_settled(id);
    answer_keep(id);
    for (item = fabric_ids.next; item != &fabric_ids; item = item->next) {
        struct fabric_id *other = FABRIC_CONTAINER(item, struct fabric_id, links);

        if (other->listener == id)
            other->listener = NULL;
    }
    fabric_timer_clear(&id->timer);
    fabric_list_remove(&id->links);
    if (id->has_port)
        fabric_port_free(id->port_index);
    free(id->ibv.route.path_rec);
    free(id->qp_init);
    fabric_gone(FABRIC_ID);
    free(id);
}

/* ---- the active side ------------------------------------------------------------------------- */

static void take_param(struct fabric_id *id, const struct rdma_conn_param *param)
{
    id->responder_resources =
        fabric_cm_smaller(param->responder_resources, (unsigned)fabric_profile.max_qp_rd_atom);
    id->initiator_depth =
        fabric_cm_smaller(param->initiator_depth, (unsigned)fabric_profile.max_qp_init_rd_atom);
    id->flow_control = param->flow_control;
    id->retries = fabric_cm_smaller(param->retry_count, 7);
    id->rnr_retries = fabric_cm_smaller(param->rnr_retry_count, 7);
    id->srq = param->srq;
    id->qpn = param->qp_num;
    if (id->ibv.qp) {
        id->qpn = id->ibv.qp->qp_num;
        id->srq = id->ibv.qp->srq ? 1 : 0;
    }
}

int fabric_cm_connect(struct fabric_id *id, const struct rdma_conn_param *param)
{
    static const struct rdma_conn_param DEFAULTS = {.responder_resources = RDMA_MAX_RESP_RES,
                                                    .initiator_depth = RDMA_MAX_INIT_DEPTH,
                                                    .retry_count = 7,
                                                    .rnr_retry_count = 7};
    struct fabric_cm_message message;
    struct fabric_port port;
    int error;

    if (id->state != FABRIC_CM_ROUTE)
        return EINVAL;
    /* Without a queue pair here nothing says which one is to be connected. */
    if (!param && !id->ibv.qp && !fabric_cm_is_datagram(id))
        return EINVAL;
    if (!param)
        param = &DEFAULTS;
    if (!fabric_cm_is_datagram(id) &&
        ((param->responder_resources != RDMA_MAX_RESP_RES &&
          param->responder_resources > fabric_profile.max_qp_rd_atom) ||
         (param->initiator_depth != RDMA_MAX_INIT_DEPTH &&
          param->initiator_depth > fabric_profile.max_qp_init_rd_atom)))
        return EINVAL;
    take_param(id, param);
    id->mtu = fabric_cm_mtu();
    id->remote = 0;
    message = message_of(id, fabric_cm_is_datagram(id) ? FIND : REQUEST);
    fabric_cm_ece_put(id, &message);
    error = data_put(id, &message, param->private_data, param->private_data_len);
    if (error)
        return error;
    /* Nobody there: the request comes back to this process, which answers for the host. */
    id->slot = (uint16_t)fabric_slot();
    if (fabric_port_find((uint16_t)id->ibv.ps, &id->ibv.route.addr.dst_addr, &port))
        id->slot = port.slot;
    id->state = FABRIC_CM_CONNECTING;
    send_until(id, &message);
    return 0;
}

static void reply_arrived(struct fabric_id *id, const struct fabric_cm_message *message)
{
    struct fabric_cm_message ready;
    int error;

    if (id->state == FABRIC_CM_CONNECTED) {
        /* What said that the reply has come was lost. */
        ready = message_of(id, READY);
        send_once(id, &ready);
        return;
    }
    if (id->state != FABRIC_CM_CONNECTING)
        return;
    fabric_timer_clear(&id->timer);
    id->remote = message->from;
    id->remote_qpn = message->qpn;
    id->remote_psn = message->psn;
    fabric_cm_ece_take(id, message);
    id->initiator_depth = fabric_cm_smaller(id->initiator_depth, message->responder_resources);
    id->responder_resources = fabric_cm_smaller(id->responder_resources, message->initiator_depth);
    id->rnr_retries = message->rnr_retries;
    id->mtu = fabric_cm_smaller(id->mtu, message->mtu);
    if (!id->ibv.qp && !fabric_profile.iwarp) {
        id->state = FABRIC_CM_ANSWERED;
        tell_message(id, RDMA_CM_EVENT_CONNECT_RESPONSE, 0, message);
        return;
    }
    error = fabric_cm_qp_connect(id);
    if (error) {
        fabric_cm_reject(id, NULL, 0, FABRIC_REJECT_CONSUMER);
        id->state = FABRIC_CM_ENDED;
        fabric_cm_tell(id, RDMA_CM_EVENT_CONNECT_ERROR, -error);
        return;
    }
    id->state = FABRIC_CM_CONNECTED;
    ready = message_of(id, READY);
    send_once(id, &ready);
    tell_message(id, RDMA_CM_EVENT_ESTABLISHED, 0, message);
}

int fabric_cm_establish(struct fabric_id *id)
{
    struct fabric_cm_message ready;

    if (id->state != FABRIC_CM_ANSWERED)
        return EINVAL;
    id->state = FABRIC_CM_CONNECTED;
    ready = message_of(id, READY);
    send_once(id, &ready);
    return 0;
}

static void found_arrived(struct fabric_id *id, const struct fabric_cm_message *message)
{
    struct fabric_cm_event *event;
    struct rdma_ud_param *param;
    int index;

    if (id->state != FABRIC_CM_CONNECTING)
        return;
    fabric_timer_clear(&id->timer);
    id->state = FABRIC_CM_CONNECTED;
    event = fabric_cm_event_new(id, RDMA_CM_EVENT_ESTABLISHED, 0);
    if (!event)
        return;
    param = &event->ibv.param.ud;
    param->private_data_len = data_take(id, event, message);
    param->private_data = event->data;
    param->qp_num = message->qpn;
    param->qkey = message->qkey;
    param->ah_attr.is_global = 1;
    param->ah_attr.port_num = 1;
    param->ah_attr.dlid = id->peer ? id->peer->lid : 0;
    fabric_cm_gid_of_peer(id, &param->ah_attr.grh.dgid);
    index = fabric_gid_index(id->device, &id->ibv.route.addr.src_addr);
    param->ah_attr.grh.sgid_index = (uint8_t)(index < 0 ? 0 : index);
    param->ah_attr.grh.hop_limit = 64;
    fabric_cm_event_push(event);
}

static void timewait_begin(struct fabric_id *id);

static void reject_arrived(struct fabric_id *id, const struct fabric_cm_message *message)
{
    switch (id->state) {
    case FABRIC_CM_CONNECTING:
        fabric_timer_clear(&id->timer);
        id->state = FABRIC_CM_ROUTE;
        break;
    case FABRIC_CM_ANSWERED:
    case FABRIC_CM_ACCEPTED:
    case FABRIC_CM_REQUESTED:
        fabric_timer_clear(&id->timer);
        id->state = FABRIC_CM_ENDED;
        request_settled(id);
        break;
    case FABRIC_CM_CONNECTED:
        /* The peer gave up what it had accepted before it heard that this side was ready. */
        if (fabric_cm_is_datagram(id) || message->reason == FABRIC_REJECT_STALE)
            return;
        timewait_begin(id);
        break;
    default:
        return;
    }
    /* As librdmacm does when it takes the event. */
    if (id->ibv.qp && !fabric_cm_is_datagram(id))
        fabric_qp_error(fabric_qp(id->ibv.qp));
    if (fabric_cm_is_datagram(id))
        tell_message(id, RDMA_CM_EVENT_UNREACHABLE, fabric_cm_refusal(id, message), message);
    else
        tell_message(id, RDMA_CM_EVENT_REJECTED, fabric_cm_refusal(id, message), message);
}

/* ---- the passive side ------------------------------------------------------------------------ */

static struct fabric_id *listener_of(const struct fabric_cm_message *message)
{
    struct fabric_port port;
    struct fabric_id *id;

    if (!fabric_port_find(message->space, (const struct sockaddr *)&message->destination, &port) ||
        port.slot != fabric_slot())
        return NULL;
    id = id_find(port.number);
    return id && id->state == FABRIC_CM_LISTENING ? id : NULL;
}

/* The id that was made for this request before. */
static struct fabric_id *id_of_request(uint16_t slot, uint32_t number)
{
    struct fabric_list *item;

    for (item = fabric_ids.next; item != &fabric_ids; item = item->next) {
        struct fabric_id *id = FABRIC_CONTAINER(item, struct fabric_id, links);

        if (id->slot == slot && id->remote == number && id->state >= FABRIC_CM_REQUESTED)
            return id;
    }
    return NULL;
}

/* Whether it has come before; then its sender hears again what it was told. */
static bool was_answered(const struct fabric_packet *packet)
{
    const struct fabric_cm_message *message = (const struct fabric_cm_message *)packet->bytes;
    uint16_t slot = packet->header.from_slot;
    unsigned i;

    for (i = 0; i < ANSWERED_BEFORE; i++) {
        if (answered[i].slot != slot || answered[i].number != message->from)
            continue;
        if (answered[i].answer)
            message_go(answered[i].answer, slot, fabric_device(packet->header.to_device),
                       fabric_device(packet->header.from_device));
        else
            answer_to(packet, REJECT, FABRIC_REJECT_STALE);
        return true;
    }
    i = answered_next++ % ANSWERED_BEFORE;
    free(answered[i].answer);
    answered[i].answer = NULL;
    answered[i].slot = slot;
    answered[i].number = message->from;
    return false;
}

static void request_take(struct fabric_id *listener, const struct fabric_packet *packet)
{
    const struct fabric_cm_message *message = (const struct fabric_cm_message *)packet->bytes;
    struct fabric_device *device =
        fabric_device_of_address((const struct sockaddr *)&message->destination);
    struct fabric_cm_event *event;
    struct ibv_context *verbs;
    struct fabric_id *id;

    if (listener->backlog && (int)listener->waiting >= listener->backlog) {
        answer_to(packet, REJECT, FABRIC_REJECT_CONSUMER);
        return;
    }
    verbs = device ? fabric_cm_context(device) : NULL;
    id = verbs ? fabric_id_new(listener->ibv.channel, listener->ibv.context, listener->ibv.ps)
               : NULL;
    event = id ? fabric_cm_event_new(id, RDMA_CM_EVENT_CONNECT_REQUEST, 0) : NULL;
    if (!event) {
        if (id)
            fabric_id_free(id);
        answer_to(packet, REJECT, FABRIC_REJECT_CONSUMER);
        return;
    }
    id->state = FABRIC_CM_REQUESTED;
    fabric_cm_device_set(id, device);
    id->slot = packet->header.from_slot;
    id->peer = fabric_device(packet->header.from_device);
    id->remote = message->from;
    id->remote_qpn = message->qpn;
    id->remote_psn = message->psn;
    fabric_cm_ece_take(id, message);
    id->mtu = fabric_cm_smaller(fabric_cm_mtu(), message->mtu);
    id->tos = message->tos; /* one class for both directions */
    id->retries = message->retries;
    id->rnr_retries = message->rnr_retries;
    /* What the peer asks for; rdma_accept() may take less. */
    id->responder_resources =
        fabric_cm_smaller(message->initiator_depth, (unsigned)fabric_profile.max_qp_rd_atom);
    id->initiator_depth = fabric_cm_smaller(message->responder_resources,
                                            (unsigned)fabric_profile.max_qp_init_rd_atom);
    memcpy(&id->ibv.route.addr.src_addr, &message->destination, sizeof(message->destination));
    memcpy(&id->ibv.route.addr.dst_addr, &message->source, sizeof(message->source));
    fabric_cm_gids(id);
    id->listener = listener;
    listener->waiting++;
    event->ibv.listen_id = &listener->ibv;
    event->counted = listener;
    event->note.about = listener;
    event->ibv.param.conn.private_data_len = data_take(id, event, message);
    event->ibv.param.conn.private_data = event->data;
    if (!fabric_cm_is_datagram(id))
        param_fill(&event->ibv.param.conn, message);
    fabric_cm_event_push(event);
}

static void request_arrived(const struct fabric_packet *packet)
{
    const struct fabric_cm_message *message = (const struct fabric_cm_message *)packet->bytes;
    struct fabric_id *id = id_of_request(packet->header.from_slot, message->from), *listener;

    if (id) {
        /* The reply was lost; a rejection is repeated, too. */
        if (id->state == FABRIC_CM_ACCEPTED || id->state == FABRIC_CM_ENDED ||
            (id->state == FABRIC_CM_CONNECTED && fabric_cm_is_datagram(id)))
            send_once(id, &id->sent);
        return;
    }
    listener = listener_of(message);
    if (!listener)
        answer_to(packet, REJECT, FABRIC_REJECT_NO_SERVICE);
    else if (!was_answered(packet))
        request_take(listener, packet);
}

int fabric_cm_accept(struct fabric_id *id, const struct rdma_conn_param *param)
{
    struct fabric_cm_message message;
    struct rdma_conn_param own = {.responder_resources = id->responder_resources,
                                  .initiator_depth = id->initiator_depth,
                                  .retry_count = 7,
                                  .rnr_retry_count = id->rnr_retries};
    uint8_t retries = id->retries, rnr_retries = id->rnr_retries;
    int error;

    /* The older way of an active program without a queue pair here to say that it is ready. */
    if (id->state == FABRIC_CM_ANSWERED)
        return fabric_cm_establish(id);
    if (id->state != FABRIC_CM_REQUESTED)
        return EINVAL;
    if (param) {
        own = *param;
        if (own.responder_resources == RDMA_MAX_RESP_RES)
            own.responder_resources = id->responder_resources;
        if (own.initiator_depth == RDMA_MAX_INIT_DEPTH)
            own.initiator_depth = id->initiator_depth;
    }
    message = message_of(id, fabric_cm_is_datagram(id) ? FOUND : REPLY);
    error = data_put(id, &message, own.private_data, own.private_data_len);
    if (error) {
        /* The peer does not wait for an answer that cannot be sent. */
        fabric_cm_reject(id, NULL, 0, FABRIC_REJECT_CONSUMER);
        return error;
    }
    if (!fabric_cm_is_datagram(id) && (own.responder_resources > fabric_profile.max_qp_rd_atom ||
                                       own.initiator_depth > fabric_profile.max_qp_init_rd_atom))
        return EINVAL;
    take_param(id, &own);
    id->retries = retries; /* these are the requester's to say */
    if (!fabric_cm_is_datagram(id))
        id->rnr_retries = rnr_retries;
    error = fabric_cm_qp_connect(id);
    if (error)
        return error;
    message.qpn = id->qpn;
    message.psn = id->psn;
    message.qkey = FABRIC_CM_QKEY;
    message.mtu = id->mtu;
    message.responder_resources = id->responder_resources;
    message.initiator_depth = id->initiator_depth;
    message.retries = 0; /* a reply has no room for it */
    message.rnr_retries = own.rnr_retry_count;
    message.srq = id->srq;
    fabric_cm_ece_put(id, &message);
    request_settled(id);
    if (fabric_cm_is_datagram(id)) {
        id->state = FABRIC_CM_CONNECTED;
        id->sent = message;
        send_once(id, &message);
    } else {
        id->state = FABRIC_CM_ACCEPTED;
        send_until(id, &message);
    }
    return 0;
}

static void established(struct fabric_id *id)
{
    struct fabric_cm_event *event;

    if (id->state != FABRIC_CM_ACCEPTED)
        return;
    fabric_timer_clear(&id->timer);
    id->state = FABRIC_CM_CONNECTED;
    event = fabric_cm_event_new(id, RDMA_CM_EVENT_ESTABLISHED, 0);
    if (!event)
        return;
    if (fabric_profile.iwarp) {
        /* There it tells the depths, seen from the peer. */
        event->ibv.param.conn.responder_resources = id->initiator_depth;
        event->ibv.param.conn.initiator_depth = id->responder_resources;
    }
    fabric_cm_event_push(event);
}

int fabric_cm_notify(struct fabric_id *id, enum ibv_event_type event)
{
    /* There a connection is never half there. */
    if (fabric_profile.iwarp)
        return id->state == FABRIC_CM_CONNECTED || id->state == FABRIC_CM_ACCEPTED ? 0 : EINVAL;
    if (event == IBV_EVENT_COMM_EST) {
        if (id->state == FABRIC_CM_CONNECTED)
            return EISCONN;
        if (id->state != FABRIC_CM_ACCEPTED)
            return EINVAL;
        established(id);
        return 0;
    }
    return event == IBV_EVENT_PATH_MIG ? 0 : EINVAL;
}

int fabric_cm_reject(struct fabric_id *id, const void *data, uint8_t length, unsigned reason)
{
    struct fabric_cm_message message = message_of(id, REJECT);
    int error;

    if (id->state != FABRIC_CM_REQUESTED && id->state != FABRIC_CM_CONNECTING &&
        id->state != FABRIC_CM_ANSWERED && id->state != FABRIC_CM_ACCEPTED)
        return EINVAL;
    message.reason = (uint8_t)reason;
    error = data_put(id, &message, data, length);
    if (error)
        return error;
    fabric_timer_clear(&id->timer);
    id->sent = message;
    id->state = FABRIC_CM_ENDED;
    request_settled(id);
    send_once(id, &message);
    return 0;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void timewait_begin(struct fabric_id *id)
{
    id->state = FABRIC_CM_TIMEWAIT;
    if (fabric_profile.no_timewait || fabric_profile.iwarp)
        fabric_timer_clear(&id->timer);
    else
        fabric_timer_set(&id->timer, fabric_now() + (fabric_time)TIMEWAIT_MS * FABRIC_MS);
}

int fabric_cm_disconnect(struct fabric_id *id)
{
    struct fabric_cm_message message;
    struct fabric_qp *qp = fabric_cm_qp(id);

    if (id->state == FABRIC_CM_CONNECTED || id->state == FABRIC_CM_ACCEPTED) {
        if (fabric_cm_is_datagram(id))
            return EINVAL;
        if (qp)
            fabric_qp_error(qp);
        id->state = FABRIC_CM_DISCONNECTING;
        message = message_of(id, LEAVE);
        send_until(id, &message);
        return 0;
    }
    if (id->state == FABRIC_CM_DISCONNECTED) {
        if (qp)
            fabric_qp_error(qp);
        message = message_of(id, LEFT);
        send_once(id, &message);
        timewait_begin(id);
        return 0;
    }
    /* The peer was first, or it is over already. */
    return id->state == FABRIC_CM_DISCONNECTING || id->state == FABRIC_CM_TIMEWAIT ? 0 : EINVAL;
}

static void leave_arrived(struct fabric_id *id, const struct fabric_packet *packet)
{
    switch (id->state) {
    case FABRIC_CM_ACCEPTED:
        /* The peer was ready, which was not heard. */
        established(id);
        /* fall through */
    case FABRIC_CM_CONNECTED:
    case FABRIC_CM_ANSWERED:
        id->state = FABRIC_CM_DISCONNECTED;
        if (fabric_profile.iwarp && fabric_cm_qp(id))
            fabric_qp_error(fabric_cm_qp(id));
        fabric_cm_tell(id, RDMA_CM_EVENT_DISCONNECTED, 0);
        if (fabric_profile.iwarp) {
            /* The stream below has ended for both. */
            answer_to(packet, LEFT, 0);
            timewait_begin(id);
        }
        return;
    case FABRIC_CM_DISCONNECTING:
        /* Both at once. */
        answer_to(packet, LEFT, 0);
        fabric_cm_tell(id, RDMA_CM_EVENT_DISCONNECTED, 0);
        timewait_begin(id);
        return;
    case FABRIC_CM_TIMEWAIT:
        answer_to(packet, LEFT, 0);
        return;
    default:
        return;
    }
}

static void left_arrived(struct fabric_id *id)
{
    if (id->state != FABRIC_CM_DISCONNECTING)
        return;
    fabric_cm_tell(id, RDMA_CM_EVENT_DISCONNECTED, 0);
    timewait_begin(id);
}

void fabric_cm_leave(struct fabric_id *id)
{
    struct fabric_cm_message message;

    switch (id->state) {
    case FABRIC_CM_REQUESTED:
    case FABRIC_CM_ANSWERED:
    case FABRIC_CM_ACCEPTED:
    case FABRIC_CM_CONNECTING:
        /* The book has no message with which one who asks for a datagram service gives up. */
        if (fabric_cm_is_datagram(id) && id->state == FABRIC_CM_CONNECTING)
            break;
        fabric_cm_reject(id, NULL, 0,
                         id->state == FABRIC_CM_CONNECTING ? FABRIC_REJECT_TIMEOUT
                                                           : FABRIC_REJECT_CONSUMER);
        break;
    case FABRIC_CM_CONNECTED:
        if (fabric_cm_is_datagram(id))
            break;
        message = message_of(id, LEAVE);
        send_once(id, &message);
        break;
    case FABRIC_CM_DISCONNECTED:
        message = message_of(id, LEFT);
        send_once(id, &message);
        break;
    default:
        break;
    }
    id->state = FABRIC_CM_ENDED;
}

static void timer_ring(struct fabric_timer *timer)
{
    struct fabric_id *id = FABRIC_CONTAINER(timer, struct fabric_id, timer);

    if (id->state == FABRIC_CM_TIMEWAIT) {
        id->state = FABRIC_CM_ENDED;
        fabric_cm_tell(id, RDMA_CM_EVENT_TIMEWAIT_EXIT, 0);
        return;
    }
    if (id->state == FABRIC_CM_RESOLVING) {
        id->state = FABRIC_CM_BOUND;
        fabric_cm_tell(id, RDMA_CM_EVENT_ADDR_ERROR, -ETIMEDOUT);
        return;
    }
    if (id->tries-- > 0) {
        send_once(id, &id->sent);
        timer_start(id);
        return;
    }
    switch (id->state) {
    case FABRIC_CM_CONNECTING:
        id->state = FABRIC_CM_ROUTE;
        fabric_cm_tell(id, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
        break;
    case FABRIC_CM_ACCEPTED:
        id->state = FABRIC_CM_ENDED;
        fabric_cm_tell(id, RDMA_CM_EVENT_UNREACHABLE, -ETIMEDOUT);
        break;
    case FABRIC_CM_DISCONNECTING:
        fabric_cm_tell(id, RDMA_CM_EVENT_DISCONNECTED, -ETIMEDOUT);
        timewait_begin(id);
        break;
    default:
        break;
    }
}

void fabric_cm_process_gone(unsigned slot)
{
    static const struct fabric_cm_message REFUSED = {.type = REJECT,
                                                     .reason = FABRIC_REJECT_NO_SERVICE};
    struct fabric_list *item;

    answers_forget(slot);
    for (item = fabric_ids.next; item != &fabric_ids; item = item->next) {
        struct fabric_id *id = FABRIC_CONTAINER(item, struct fabric_id, links);

        if (id->slot != slot)
            continue;
        id->slot = 0; /* what this id still sends is for nobody */
        switch (id->state) {
        case FABRIC_CM_CONNECTING:
        case FABRIC_CM_ANSWERED:
        case FABRIC_CM_REQUESTED:
            reject_arrived(id, &REFUSED);
            break;
        case FABRIC_CM_ACCEPTED:
        case FABRIC_CM_CONNECTED:
            if (fabric_cm_is_datagram(id))
                break;
            fabric_timer_clear(&id->timer);
            id->state = FABRIC_CM_DISCONNECTED;
            fabric_cm_tell(id, RDMA_CM_EVENT_DISCONNECTED, 0);
            break;
        case FABRIC_CM_DISCONNECTING:
            left_arrived(id);
            break;
        default:
            break;
        }
    }
}

void fabric_cm_incident(const struct fabric_device *device, enum rdma_cm_event_type type,
                        int status)
{
    struct fabric_list *item;

    for (item = fabric_ids.next; item != &fabric_ids; item = item->next) {
        struct fabric_id *id = FABRIC_CONTAINER(item, struct fabric_id, links);
        bool removed = type == RDMA_CM_EVENT_DEVICE_REMOVAL;

        if (id->device != device || (!removed && id->state != FABRIC_CM_CONNECTED))
            continue;
        if (removed) {
            fabric_timer_clear(&id->timer);
            request_settled(id);
            id->state = FABRIC_CM_ENDED;
        }
        fabric_cm_tell(id, type, status);
    }
}

void fabric_cm_arrived(struct fabric_packet *packet)
{
    const struct fabric_cm_message *message = (const struct fabric_cm_message *)packet->bytes;
    struct fabric_id *id;

    if (packet->header.size != sizeof(*message))
        return;
    if (message->type == REQUEST || message->type == FIND) {
        request_arrived(packet);
        return;
    }
    if (message->type == REJECT && !message->to) {
        /* Who asked has gone: its program hears nothing, and cannot accept. */
        id = id_of_request(packet->header.from_slot, message->from);
        if (id && id->state == FABRIC_CM_REQUESTED) {
            id->state = FABRIC_CM_ENDED;
            request_settled(id);
        }
        return;
    }
    id = id_find(message->to);
    if (!id || id->slot != packet->header.from_slot) {
        /* A farewell is answered for an id that is gone, and a reply is one to nobody. */
        if (message->type == LEAVE)
            answer_to(packet, LEFT, 0);
        else if (message->type == REPLY)
            answer_to(packet, REJECT, FABRIC_REJECT_STALE);
        else if (message->type == READY)
            answer_to(packet, REJECT, FABRIC_REJECT_NO_ID);
        return;
    }
    switch ((enum message_type)message->type) {
    case REPLY:
        reply_arrived(id, message);
        break;
    case FOUND:
        found_arrived(id, message);
        break;
    case READY:
        established(id);
        break;
    case REJECT:
        reject_arrived(id, message);
        break;
    case LEAVE:
        leave_arrived(id, packet);
        break;
    case LEFT:
        left_arrived(id);
        break;
    default:
        break;
    }
}
