/*
 * The interface of librdmacm: ids, event channels, and what man rdma_cm(7) says of them.
 *
 * An id that is made without a channel has one of its own, and its calls wait for their events.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cm.h"

/* ---- contexts and protection domains, which all ids of a device share ------------------------ */

static struct {
    unsigned generation;
    bool open;
    struct ibv_context *contexts[FABRIC_DEVICES];
    struct fabric_pd *pds[FABRIC_DEVICES]; /* man rdma_create_qp(3): one for each device */
} shared;

/* The library's own, which no program has asked for: it is not counted among the process's. */
static struct fabric_pd *pd_new(struct ibv_context *verbs)
{
    struct fabric_pd *pd = calloc(1, sizeof(*pd));

    if (pd) {
        pd->context = fabric_context(verbs);
        pd->ibv.context = verbs;
    }
    return pd;
}

static void shared_open(void)
{
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    unsigned number, count;

    /* Not the lock of the world, which opening a device takes; a second thread waits here. */
    pthread_mutex_lock(&opening);
    fabric_lock();
    if (shared.open && shared.generation == fabric_generation()) {
        fabric_unlock();
        pthread_mutex_unlock(&opening);
        return;
    }
    memset(&shared, 0, sizeof(shared));
    shared.open = true;
    shared.generation = fabric_generation();
    count = fabric_device_count();
    fabric_unlock();
    for (number = 0; number < count; number++) {
        shared.contexts[number] = fabric_open(fabric_device(number));
        if (shared.contexts[number])
            shared.pds[number] = pd_new(shared.contexts[number]);
    }
    pthread_mutex_unlock(&opening);
}

struct ibv_context *fabric_cm_context(struct fabric_device *device)
{
    return shared.contexts[device->number];
}

void fabric_cm_device_set(struct fabric_id *id, struct fabric_device *device)
{
    struct fabric_pd *pd = shared.pds[device->number];

    id->device = device;
    id->ibv.verbs = fabric_cm_context(device);
    id->ibv.pd = pd ? &pd->ibv : NULL;
    id->ibv.port_num = 1;
}

FABRIC_API struct ibv_context **rdma_get_devices(int *count)
{
    struct ibv_context **list = calloc(FABRIC_DEVICES + 1, sizeof(*list));
    int found = 0;
    unsigned number;

    if (!list)
        return NULL;
    shared_open();
    for (number = 0; number < fabric_device_count(); number++)
        if (shared.contexts[number])
            list[found++] = shared.contexts[number];
    if (count)
        *count = found;
    if (!found) {
        free(list);
        errno = ENODEV;
        return NULL;
    }
    return list;
}

FABRIC_API void rdma_free_devices(struct ibv_context **list)
{
    free(list);
}

/* ---- channels and events --------------------------------------------------------------------- */

FABRIC_API struct rdma_event_channel *rdma_create_event_channel(void)
{
    struct fabric_event_channel *channel = NULL;

    shared_open();
    fabric_lock();
    if (!fabric_device_count()) {
        fabric_unlock();
        errno = ENODEV;
        return NULL;
    }
    if (!fabric_fails("rdma_create_event_channel") && (channel = calloc(1, sizeof(*channel)))) {
        if (fabric_feed_open(&channel->feed)) {
            free(channel);
            channel = NULL;
        } else {
            channel->ibv.fd = channel->feed.fd;
            fabric_born(FABRIC_EVENT_CHANNEL);
        }
    }
    fabric_unlock();
    return channel ? &channel->ibv : NULL;
}

static struct fabric_event_channel *channel_of(struct rdma_event_channel *channel)
{
    return FABRIC_CONTAINER(channel, struct fabric_event_channel, ibv);
}

FABRIC_API void rdma_destroy_event_channel(struct rdma_event_channel *ibv)
{
    struct fabric_event_channel *channel = channel_of(ibv);

    fabric_lock();
    if (channel->feed.generation == fabric_generation()) {
        fabric_feed_close(&channel->feed);
        fabric_gone(FABRIC_EVENT_CHANNEL);
    } else {
        close(channel->feed.fd);
    }
    free(channel);
    fabric_unlock();
}

/* What the library does for the program when it takes an event: groups are joined. */
static void join_finish(struct fabric_cm_event *event)
{
    struct fabric_id *id = fabric_id(event->ibv.id);
    struct fabric_list *item;

    if (event->ibv.event != RDMA_CM_EVENT_MULTICAST_JOIN || !id->ibv.qp)
        return;
    for (item = id->groups.next; item != &id->groups; item = item->next) {
        struct fabric_group *group = FABRIC_CONTAINER(item, struct fabric_group, links);

        if (!group->attached && !memcmp(&group->gid, &event->ibv.param.ud.ah_attr.grh.dgid, 16)) {
            int error = ibv_attach_mcast(id->ibv.qp, &group->gid, 0);

            group->attached = !error;
            if (error) {
                event->ibv.event = RDMA_CM_EVENT_MULTICAST_ERROR;
                event->ibv.status = -error;
            }
        }
    }
}

FABRIC_API int rdma_get_cm_event(struct rdma_event_channel *ibv, struct rdma_cm_event **taken)
{
    struct fabric_cm_event *event;
    struct fabric_note *note;

    if (!taken)
        return fabric_fail(EINVAL);
    note = fabric_feed_take(&channel_of(ibv)->feed, "rdma_get_cm_event");
    if (!note)
        return -1;
    event = FABRIC_CONTAINER(note, struct fabric_cm_event, note);
    join_finish(event);
    *taken = &event->ibv;
    return 0;
}

FABRIC_API int rdma_ack_cm_event(struct rdma_cm_event *ibv)
{
    struct fabric_cm_event *event;

    if (!ibv)
        return fabric_fail(EINVAL);
    event = FABRIC_CONTAINER(ibv, struct fabric_cm_event, ibv);
    fabric_lock();
    if (event->counted->generation == fabric_generation()) {
        event->counted->acked++;
        fabric_changed();
    }
    free(event);
    fabric_unlock();
    return 0;
}

FABRIC_API const char *rdma_event_str(enum rdma_cm_event_type event)
{
    static const char *const NAMES[] = {
        "RDMA_CM_EVENT_ADDR_RESOLVED",   "RDMA_CM_EVENT_ADDR_ERROR",
        "RDMA_CM_EVENT_ROUTE_RESOLVED",  "RDMA_CM_EVENT_ROUTE_ERROR",
        "RDMA_CM_EVENT_CONNECT_REQUEST", "RDMA_CM_EVENT_CONNECT_RESPONSE",
        "RDMA_CM_EVENT_CONNECT_ERROR",   "RDMA_CM_EVENT_UNREACHABLE",
        "RDMA_CM_EVENT_REJECTED",        "RDMA_CM_EVENT_ESTABLISHED",
        "RDMA_CM_EVENT_DISCONNECTED",    "RDMA_CM_EVENT_DEVICE_REMOVAL",
        "RDMA_CM_EVENT_MULTICAST_JOIN",  "RDMA_CM_EVENT_MULTICAST_ERROR",
        "RDMA_CM_EVENT_ADDR_CHANGE",     "RDMA_CM_EVENT_TIMEWAIT_EXIT",
    };

    return (unsigned)event < FABRIC_LENGTH(NAMES) ? NAMES[event] : "UNKNOWN EVENT";
}

/* A synchronous id: wait for the event that the call has brought about. */
static int complete(struct fabric_id *id)
{
    int error;

    if (!id->synchronous)
        return 0;
    if (id->ibv.event) {
        rdma_ack_cm_event(id->ibv.event);
        id->ibv.event = NULL;
    }
    if (rdma_get_cm_event(id->ibv.channel, &id->ibv.event))
        return -1;
    if (!id->ibv.event->status)
        return 0;
    if (id->ibv.event->event == RDMA_CM_EVENT_REJECTED)
        error = ECONNREFUSED;
    else
        error = id->ibv.event->status < 0 ? -id->ibv.event->status : id->ibv.event->status;
    return fabric_fail(error);
}

/* ---- ids ------------------------------------------------------------------------------------- */

FABRIC_API int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **made,
                              void *context, enum rdma_port_space space)
{
    struct rdma_event_channel *own = NULL;
    struct fabric_id *id = NULL;
    int error = 0;

    if (!made || (space != RDMA_PS_TCP && space != RDMA_PS_UDP && space != RDMA_PS_IB &&
                  space != RDMA_PS_IPOIB))
        return fabric_fail(EINVAL);
    if (fabric_profile.iwarp && space != RDMA_PS_TCP)
        return fabric_fail(EPROTONOSUPPORT);
    if (!channel && !(channel = own = rdma_create_event_channel()))
        return -1;
    fabric_lock();
    if (!fabric_device_count())
        error = ENODEV;
    else if (fabric_fails("rdma_create_id"))
        error = errno;
    else if (!(id = fabric_id_new(channel, context, space)))
        error = ENOMEM;
    else
        id->synchronous = own != NULL;
    fabric_unlock();
    if (error) {
        if (own)
            rdma_destroy_event_channel(own);
        return fabric_fail(error);
    }
    *made = &id->ibv;
    return 0;
}

/* Requests that nobody has read: their ids go, and their peers hear of it. */
static void drop_requests(struct fabric_id *listener, struct fabric_list *notes)
{
    struct fabric_list *item;

    for (item = notes->next; item != notes; item = item->next) {
        struct fabric_note *note = FABRIC_CONTAINER(item, struct fabric_note, links);
        struct fabric_cm_event *event = FABRIC_CONTAINER(note, struct fabric_cm_event, note);

        /* A simulation's late notes are of all kinds: those about an id are events of ids. */
        if (note->about != listener || event->counted != listener ||
            event->ibv.event != RDMA_CM_EVENT_CONNECT_REQUEST)
            continue;
        fabric_cm_leave(fabric_id(event->ibv.id));
        fabric_id_free(fabric_id(event->ibv.id));
    }
}

static void groups_free(struct fabric_id *id)
{
    while (!fabric_list_empty(&id->groups)) {
        struct fabric_group *group = FABRIC_CONTAINER(id->groups.next, struct fabric_group, links);

        fabric_list_remove(&group->links);
        if (group->attached && id->ibv.qp)
            ibv_detach_mcast(id->ibv.qp, &group->gid, 0);
        free(group);
    }
}

FABRIC_API int rdma_destroy_id(struct rdma_cm_id *ibv)
{
    struct fabric_id *id = fabric_id(ibv);
    struct rdma_event_channel *own = NULL;
    struct fabric_feed *feed = &channel_of(ibv->channel)->feed;

    if (id->generation != fabric_generation())
        return 0;
    if (id->synchronous && ibv->event) {
        rdma_ack_cm_event(ibv->event);
        ibv->event = NULL;
    }
    groups_free(id);
    fabric_lock();
    fabric_cm_leave(id);
    fabric_timer_clear(&id->timer);
    drop_requests(id, &feed->notes);
    drop_requests(id, &fabric_late_notes);
    id->told -= fabric_feed_drop(feed, id);
    while (id->told != id->acked)
        fabric_wait();
    if (id->synchronous)
        own = ibv->channel;
    fabric_id_free(id);
    fabric_unlock();
    if (own)
        rdma_destroy_event_channel(own);
    return 0;
}

static unsigned unread_in(const struct fabric_list *notes, const struct fabric_id *id)
{
    const struct fabric_list *item;
    unsigned count = 0;

    for (item = notes->next; item != notes; item = item->next)
        count += FABRIC_CONTAINER(item, struct fabric_note, links)->about == id;
    return count;
}

/* Events of an id that no program has taken yet. */
static unsigned unread(const struct fabric_id *id)
{
    return unread_in(&channel_of(id->ibv.channel)->feed.notes, id) +
           unread_in(&fabric_late_notes, id);
}

FABRIC_API int rdma_migrate_id(struct rdma_cm_id *ibv, struct rdma_event_channel *channel)
{
    struct fabric_id *id = fabric_id(ibv);
    struct rdma_event_channel *old = ibv->channel, *own = NULL;
    struct fabric_list *item;

    if (!channel && !(channel = own = rdma_create_event_channel()))
        return -1;
    if (id->synchronous && ibv->event) {
        rdma_ack_cm_event(ibv->event);
        ibv->event = NULL;
    }
    fabric_lock();
    while (id->told - unread(id) != id->acked)
        fabric_wait();
    fabric_feed_move(&channel_of(old)->feed, &channel_of(channel)->feed, id);
    ibv->channel = channel;
    for (item = fabric_ids.next; item != &fabric_ids; item = item->next) {
        struct fabric_id *request = FABRIC_CONTAINER(item, struct fabric_id, links);

        if (request->listener == id) /* nobody has read it yet */
            request->ibv.channel = channel;
    }
    fabric_unlock();
    if (id->synchronous)
        rdma_destroy_event_channel(old);
    id->synchronous = own != NULL;
    return 0;
}

static int resolve_route(struct fabric_id *id);

/* A route that the program has brings the event that asking for one would. */
static int give_route(struct fabric_id *id, const void *value, size_t size)
{
    int error;

    if (!value || !size || size % sizeof(struct ibv_path_data))
        return fabric_fail(EINVAL);
    fabric_lock();
    error = resolve_route(id);
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_set_option(struct rdma_cm_id *ibv, int level, int name, void *value,
                               size_t size)
{
    struct fabric_id *id = fabric_id(ibv);
    int error = 0;

    if (level == RDMA_OPTION_IB)
        return name == RDMA_OPTION_IB_PATH ? give_route(id, value, size) : fabric_fail(ENOSYS);
    if (level != RDMA_OPTION_ID)
        return fabric_fail(ENOSYS);
    fabric_lock();
    switch (name) {
    case RDMA_OPTION_ID_TOS:
        if (size != sizeof(uint8_t))
            error = EINVAL;
        else
            id->tos = *(uint8_t *)value;
        break;
    case RDMA_OPTION_ID_REUSEADDR:
        if (size != sizeof(int) || id->state != FABRIC_CM_IDLE)
            error = EINVAL;
        else
            id->reuse = *(int *)value != 0;
        break;
    case RDMA_OPTION_ID_AFONLY:
        if (size != sizeof(int) || id->state != FABRIC_CM_IDLE)
            error = EINVAL;
        else
            id->only = *(int *)value != 0;
        break;
    case RDMA_OPTION_ID_ACK_TIMEOUT:
        if (size != sizeof(uint8_t) || *(uint8_t *)value > 31)
            error = EINVAL;
        else
            id->ack_timeout = *(uint8_t *)value;
        break;
    default:
        error = ENOSYS;
    }
    fabric_unlock();
    return fabric_fail(error);
}

/* ---- addresses ------------------------------------------------------------------------------- */

static socklen_t address_length(const struct sockaddr *address)
{
    return address->sa_family == AF_INET    ? sizeof(struct sockaddr_in)
           : address->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6)
                                            : 0;
}

static bool is_any(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ((const struct sockaddr_in *)address)->sin_addr.s_addr == INADDR_ANY;
    return IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static bool is_group(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return IN_MULTICAST(ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr));
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_MULTICAST(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static uint16_t *port_place(struct sockaddr *address)
{
    return address->sa_family == AF_INET ? &((struct sockaddr_in *)address)->sin_port
                                         : &((struct sockaddr_in6 *)address)->sin6_port;
}

void fabric_cm_gids(struct fabric_id *id)
{
    struct rdma_addr *addr = &id->ibv.route.addr;

    fabric_address_to_gid(&addr->src_addr, &addr->addr.ibaddr.sgid);
    if (addr->dst_addr.sa_family)
        fabric_address_to_gid(&addr->dst_addr, &addr->addr.ibaddr.dgid);
    addr->addr.ibaddr.pkey = 0xffff;
}

/* Whether the machine has an address, though no adapter does. */
static bool is_local(const struct sockaddr *address)
{
    struct sockaddr_storage copy = {0};
    int fd = socket(address->sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool local;

    memcpy(&copy, address, address_length(address));
    *port_place((struct sockaddr *)&copy) = 0;
    local = fd >= 0 && !bind(fd, (struct sockaddr *)&copy, address_length(address));
    if (fd >= 0)
        close(fd);
    return local;
}

/* The lock is held. An errno, or 0. */
static int bind_to(struct fabric_id *id, const struct sockaddr *address)
{
    struct fabric_port port = {.space = (uint16_t)id->ibv.ps, .number = id->number};
    struct sockaddr *own = &id->ibv.route.addr.src_addr;
    struct fabric_device *device = NULL;
    int error;

    if (id->state != FABRIC_CM_IDLE)
        return EINVAL;
    if (!address_length(address))
        return EINVAL;
    if (!is_any(address) && !(device = fabric_device_of_address(address)))
        return is_local(address) ? ENODEV : EADDRNOTAVAIL;
    memcpy(&id->ibv.route.addr.src_storage, address, address_length(address));
    port.family = (uint8_t)address->sa_family;
    port.any = is_any(address);
    port.only = id->only;
    port.reuse = id->reuse;
    port.port = ntohs(*port_place(own));
    if (address->sa_family == AF_INET)
        memcpy(port.address, &((const struct sockaddr_in *)address)->sin_addr, 4);
    else
        memcpy(port.address, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
    error = fabric_port_bind(&port, &id->port_index);
    if (error) {
        memset(&id->ibv.route.addr.src_storage, 0, sizeof(id->ibv.route.addr.src_storage));
        return error;
    }
    id->has_port = true;
    *port_place(own) = htons(port.port);
    if (device) {
        fabric_cm_device_set(id, device);
        fabric_cm_gids(id);
    }
    id->state = FABRIC_CM_BOUND;
    return 0;
}

FABRIC_API int rdma_bind_addr(struct rdma_cm_id *ibv, struct sockaddr *address)
{
    int error;

    if (!address)
        return fabric_fail(EINVAL);
    fabric_lock();
    error = fabric_fails("rdma_bind_addr") ? errno : bind_to(fabric_id(ibv), address);
    fabric_unlock();
    return fabric_fail(error);
}

static void put_address(struct sockaddr *into, const struct sockaddr *address)
{
    uint16_t port = *port_place(into);

    memcpy(into, address, address_length(address));
    *port_place(into) = port;
}

/* The lock is held. An errno, or 0; what is wrong with the way comes as an event. */
static int resolve_address(struct fabric_id *id, const struct sockaddr *source,
                           const struct sockaddr *destination, int timeout_ms)
{
    struct sockaddr_storage any = {.ss_family = destination->sa_family};
    struct rdma_addr *addr = &id->ibv.route.addr;
    struct fabric_device *peer;
    int error;

    if (!address_length(destination) ||
        (source && source->sa_family && source->sa_family != destination->sa_family))
        return EINVAL;
    if (id->state == FABRIC_CM_IDLE) {
        error =
            bind_to(id, source && address_length(source) ? source : (const struct sockaddr *)&any);
        if (error)
            return error;
    }
    if (id->state != FABRIC_CM_BOUND)
        return EINVAL;
    if (addr->src_addr.sa_family != destination->sa_family)
        return EINVAL;
    memcpy(&addr->dst_storage, destination, address_length(destination));
    if (is_any(destination)) {
        /* The wildcard is this host itself. */
        if (!id->device)
            fabric_cm_device_set(id, fabric_device(0));
        put_address(&addr->dst_addr, (struct sockaddr *)&id->device->addresses[0]);
    }
    peer = fabric_device_of_address(&addr->dst_addr);
    if (is_group(destination)) {
        /* No adapter has the address of a group: the program says from where it sends. */
        if (!id->device)
            fabric_cm_device_set(id, fabric_device(0));
        if (is_any(&addr->src_addr))
            put_address(&addr->src_addr, (struct sockaddr *)&id->device->addresses[0]);
    } else if (!peer && fabric_is_neighbor(&addr->dst_addr)) {
        /* A host that is off: whoever asks for its address waits in vain. */
        id->state = FABRIC_CM_RESOLVING;
        fabric_timer_set(&id->timer,
                         fabric_now() + (fabric_time)(timeout_ms > 0 ? timeout_ms : 0) * FABRIC_MS);
        return 0;
    } else if (!peer) {
        fabric_cm_tell(id, RDMA_CM_EVENT_ADDR_ERROR, -ENETUNREACH);
        return 0;
    }
    id->peer = peer;
    if (!id->device)
        fabric_cm_device_set(id, peer);
    if (is_any(&addr->src_addr)) {
        /* The way to an own address begins there. */
        put_address(&addr->src_addr, id->device == peer
                                         ? &addr->dst_addr
                                         : (struct sockaddr *)&id->device->addresses[0]);
    }
    fabric_cm_gids(id);
    id->state = FABRIC_CM_ADDRESS;
    fabric_cm_tell(id, RDMA_CM_EVENT_ADDR_RESOLVED, 0);
    return 0;
}

FABRIC_API int rdma_resolve_addr(struct rdma_cm_id *ibv, struct sockaddr *source,
                                 struct sockaddr *destination, int timeout_ms)
{
    struct fabric_id *id = fabric_id(ibv);
    int error;

    if (!destination)
        return fabric_fail(EINVAL);
    fabric_lock();
    error = fabric_fails("rdma_resolve_addr")
                ? errno
                : resolve_address(id, source, destination, timeout_ms);
    fabric_unlock();
    return error ? fabric_fail(error) : complete(id);
}

/* The lock is held. */
static int resolve_route(struct fabric_id *id)
{
    struct rdma_route *route = &id->ibv.route;
    struct ibv_sa_path_rec *path;

    if (id->state != FABRIC_CM_ADDRESS)
        return EINVAL;
    path = calloc(1, sizeof(*path));
    if (!path)
        return ENOMEM;
    fabric_address_to_gid(&route->addr.dst_addr, &path->dgid);
    fabric_address_to_gid(&route->addr.src_addr, &path->sgid);
    path->slid = htons(id->device->lid);
    path->dlid = id->peer ? htons(id->peer->lid) : 0;
    path->hop_limit = 64;
    path->traffic_class = id->tos;
    path->reversible = 1;
    path->numb_path = 1;
    path->pkey = 0xffff;
    path->mtu = IBV_MTU_4096;
    path->rate = IBV_RATE_100_GBPS;
    path->packet_life_time = id->ack_timeout;
    free(route->path_rec);
    route->path_rec = path;
    route->num_paths = 1;
    id->state = FABRIC_CM_ROUTE;
    fabric_cm_tell(id, RDMA_CM_EVENT_ROUTE_RESOLVED, 0);
    return 0;
}

FABRIC_API int rdma_resolve_route(struct rdma_cm_id *ibv, int timeout_ms)
{
    struct fabric_id *id = fabric_id(ibv);
    int error;

    fabric_lock();
    error = fabric_fails("rdma_resolve_route") ? errno : resolve_route(id);
    fabric_unlock();
    return error ? fabric_fail(error) : complete(id);
}

FABRIC_API __be16 rdma_get_src_port(struct rdma_cm_id *id)
{
    return address_length(&id->route.addr.src_addr) ? *port_place(&id->route.addr.src_addr) : 0;
}

FABRIC_API __be16 rdma_get_dst_port(struct rdma_cm_id *id)
{
    return address_length(&id->route.addr.dst_addr) ? *port_place(&id->route.addr.dst_addr) : 0;
}

/* ---- connections ----------------------------------------------------------------------------- */

FABRIC_API int rdma_listen(struct rdma_cm_id *ibv, int backlog)
{
    struct fabric_id *id = fabric_id(ibv);
    struct sockaddr_in any = {.sin_family = AF_INET};
    int error = 0;

    fabric_lock();
    if (fabric_fails("rdma_listen"))
        error = errno;
    else if (id->state == FABRIC_CM_IDLE)
        error = bind_to(id, (struct sockaddr *)&any);
    if (!error && id->state != FABRIC_CM_BOUND)
        error = EINVAL;
    if (!error)
        error = fabric_port_listen(id->port_index);
    if (!error) {
        id->backlog = backlog > 0 && backlog < 1024 ? backlog : 1024;
        id->state = FABRIC_CM_LISTENING;
    }
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_connect(struct rdma_cm_id *ibv, struct rdma_conn_param *param)
{
    struct fabric_id *id = fabric_id(ibv);
    int error;

    fabric_lock();
    error = fabric_fails("rdma_connect") ? errno : fabric_cm_connect(id, param);
    fabric_unlock();
    return error ? fabric_fail(error) : complete(id);
}

FABRIC_API int rdma_accept(struct rdma_cm_id *ibv, struct rdma_conn_param *param)
{
    struct fabric_id *id = fabric_id(ibv);
    int error;

    fabric_lock();
    error = fabric_fails("rdma_accept") ? errno : fabric_cm_accept(id, param);
    fabric_unlock();
    /* Of datagrams the passive side hears nothing more. */
    return error || ibv->qp_type == IBV_QPT_UD ? fabric_fail(error) : complete(id);
}

FABRIC_API int rdma_establish(struct rdma_cm_id *ibv)
{
    int error;

    if (!ibv || ibv->qp)
        return fabric_fail(EINVAL);
    fabric_lock();
    error = fabric_fails("rdma_establish") ? errno : fabric_cm_establish(fabric_id(ibv));
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_reject(struct rdma_cm_id *ibv, const void *data, uint8_t length)
{
    int error;

    fabric_lock();
    error = fabric_fails("rdma_reject")
                ? errno
                : fabric_cm_reject(fabric_id(ibv), data, length, FABRIC_REJECT_CONSUMER);
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_reject_ece(struct rdma_cm_id *ibv, const void *data, uint8_t length)
{
    int error;

    fabric_lock();
    error = fabric_fails("rdma_reject_ece")
                ? errno
                : fabric_cm_reject(fabric_id(ibv), data, length, FABRIC_REJECT_OPTION);
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_disconnect(struct rdma_cm_id *ibv)
{
    struct fabric_id *id = fabric_id(ibv);
    int error;

    fabric_lock();
    error = fabric_fails("rdma_disconnect") ? errno : fabric_cm_disconnect(id);
    fabric_unlock();
    return error ? fabric_fail(error) : complete(id);
}

FABRIC_API int rdma_notify(struct rdma_cm_id *ibv, enum ibv_event_type event)
{
    int error;

    fabric_lock();
    error = fabric_cm_notify(fabric_id(ibv), event);
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_init_qp_attr(struct rdma_cm_id *ibv, struct ibv_qp_attr *attr, int *mask)
{
    int error;

    if (!ibv || !attr || !mask)
        return fabric_fail(EINVAL);
    fabric_lock();
    error = fabric_cm_qp_attr(fabric_id(ibv), attr, mask);
    fabric_unlock();
    return fabric_fail(error);
}

FABRIC_API int rdma_set_local_ece(struct rdma_cm_id *ibv, struct ibv_ece *ece)
{
    if (!ibv || ibv->qp || !ece || !ece->vendor_id || ece->comp_mask)
        return fabric_fail(EINVAL);
    fabric_lock();
    fabric_id(ibv)->local_ece = *ece;
    fabric_unlock();
    return 0;
}

FABRIC_API int rdma_get_remote_ece(struct rdma_cm_id *ibv, struct ibv_ece *ece)
{
    if (!ibv || ibv->qp || !ece)
        return fabric_fail(EINVAL);
    fabric_lock();
    *ece = fabric_id(ibv)->remote_ece;
    fabric_unlock();
    return 0;
}

/* ---- multicast ------------------------------------------------------------------------------- */

FABRIC_API int rdma_join_multicast_ex(struct rdma_cm_id *ibv, struct rdma_cm_join_mc_attr_ex *attr,
                                      void *context)
{
    struct fabric_id *id = fabric_id(ibv);
    struct fabric_cm_event *event = NULL;
    struct fabric_group *group;
    int index;

    if (!attr || !attr->addr || !(attr->comp_mask & RDMA_CM_JOIN_MC_ATTR_ADDRESS) ||
        !is_group(attr->addr) || ibv->qp_type != IBV_QPT_UD)
        return fabric_fail(EINVAL);
    fabric_lock();
    if (!id->device || fabric_fails("rdma_join_multicast")) {
        fabric_unlock();
        return fabric_fail(id->device ? errno : EINVAL);
    }
    group = calloc(1, sizeof(*group));
    if (group)
        event = fabric_cm_event_new(id, RDMA_CM_EVENT_MULTICAST_JOIN, 0);
    if (!event) {
        free(group);
        fabric_unlock();
        return fabric_fail(ENOMEM);
    }
    memcpy(&group->address, attr->addr, address_length(attr->addr));
    fabric_address_to_gid(attr->addr, &group->gid);
    fabric_list_add(&id->groups, &group->links);
    event->ibv.param.ud.private_data = context;
    event->ibv.param.ud.qp_num = FABRIC_MULTICAST_QPN;
    event->ibv.param.ud.qkey = FABRIC_CM_QKEY;
    event->ibv.param.ud.ah_attr.is_global = 1;
    event->ibv.param.ud.ah_attr.port_num = 1;
    event->ibv.param.ud.ah_attr.grh.dgid = group->gid;
    index = fabric_gid_index(id->device, &ibv->route.addr.src_addr);
    event->ibv.param.ud.ah_attr.grh.sgid_index = (uint8_t)(index < 0 ? 0 : index);
    event->ibv.param.ud.ah_attr.grh.hop_limit = 1;
    fabric_cm_event_push(event);
    fabric_unlock();
    return complete(id);
}

FABRIC_API int rdma_join_multicast(struct rdma_cm_id *ibv, struct sockaddr *address, void *context)
{
    struct rdma_cm_join_mc_attr_ex attr = {.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS |
                                                        RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS,
                                           .join_flags = RDMA_MC_JOIN_FLAG_FULLMEMBER,
                                           .addr = address};

    return rdma_join_multicast_ex(ibv, &attr, context);
}

FABRIC_API int rdma_leave_multicast(struct rdma_cm_id *ibv, struct sockaddr *address)
{
    struct fabric_id *id = fabric_id(ibv);
    struct fabric_group *group = NULL;
    struct fabric_list *item;

    fabric_lock();
    for (item = id->groups.next; item != &id->groups; item = item->next) {
        struct fabric_group *each = FABRIC_CONTAINER(item, struct fabric_group, links);

        if (!memcmp(&each->address, address, address_length(address))) {
            group = each;
            break;
        }
    }
    if (group)
        fabric_list_remove(&group->links);
    fabric_unlock();
    if (!group)
        return fabric_fail(EADDRNOTAVAIL);
    if (group->attached)
        ibv_detach_mcast(ibv->qp, &group->gid, 0);
    free(group);
    return 0;
}
