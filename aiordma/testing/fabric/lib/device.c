/*
 * The adapters of a run: what they are called, their addresses, what a program can ask them.
 *
 * AIORDMA_FABRIC_DEVICES says how many there are, and AIORDMA_FABRIC_ADDRESSES which addresses each
 * has: those of a device with commas, the devices with semicolons between them.  All processes of a
 * run read the same, and so know the same adapters.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fabric.h"

#define COUNT_VARIABLE   "AIORDMA_FABRIC_DEVICES"
#define ADDRESS_VARIABLE "AIORDMA_FABRIC_ADDRESSES"

/* The header's macro checks a call in a program; here is the function that it calls in the end. */
#undef ibv_query_port

enum {
    GUID_BASE = 0x02fab0, /* the first bytes of each GUID, given by no registry */
    INFINIBAND_GIDS = 8,  /* of the table of a port of InfiniBand */
};

struct event {
    struct fabric_note note;
    struct ibv_async_event event;
};

static struct fabric_device devices[FABRIC_DEVICES];
static unsigned device_count;

/* ---- addresses and GIDs ---------------------------------------------------------------------- */

void fabric_address_to_gid(const struct sockaddr *address, union ibv_gid *gid)
{
    memset(gid, 0, sizeof(*gid));
    if (address->sa_family == AF_INET) {
        gid->raw[10] = gid->raw[11] = 0xff;
        memcpy(&gid->raw[12], &((const struct sockaddr_in *)address)->sin_addr, 4);
    } else if (address->sa_family == AF_INET6) {
        memcpy(gid->raw, &((const struct sockaddr_in6 *)address)->sin6_addr, 16);
    }
}

static bool is_wildcard(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ((const struct sockaddr_in *)address)->sin_addr.s_addr == htonl(INADDR_ANY);
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_UNSPECIFIED(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

static bool is_loopback(const struct sockaddr *address)
{
    if (address->sa_family == AF_INET)
        return ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr) >> 24 ==
               IN_LOOPBACKNET;
    return IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)address)->sin6_addr);
}

/* ::ffff:192.0.2.1 and 192.0.2.1 are one address. */
static bool has_address(const struct fabric_device *device, const struct sockaddr *address)
{
    union ibv_gid wanted, own;
    unsigned i;

    if (device->unaddressed || (address->sa_family != AF_INET && address->sa_family != AF_INET6))
        return false;
    fabric_address_to_gid(address, &wanted);
    for (i = 0; i < device->address_count; i++) {
        fabric_address_to_gid((const struct sockaddr *)&device->addresses[i], &own);
        if (!memcmp(&own, &wanted, sizeof(own)))
            return true;
    }
    return false;
}

unsigned fabric_gid_table_length(void)
{
    if (fabric_profile.iwarp)
        return 1;
    return fabric_profile.infiniband_link ? INFINIBAND_GIDS : FABRIC_GIDS;
}

unsigned fabric_pkey_table_length(void)
{
    /* On Ethernet there is only the default partition, and iWARP has none. */
    if (fabric_profile.infiniband_link)
        return (unsigned)fabric_profile.max_pkeys;
    return fabric_profile.iwarp ? 0 : 1;
}

static bool gid_add(struct fabric_device *device, const union ibv_gid *gid, enum ibv_gid_type type)
{
    unsigned i;

    for (i = 0; i < fabric_gid_table_length(); i++)
        if (!device->gids[i].used) {
            device->gids[i] = (struct fabric_gid){*gid, type, true};
            return true;
        }
    return false;
}

/* Once for each version of RoCE that is in use. */
static bool gid_add_versions(struct fabric_device *device, const union ibv_gid *gid)
{
    if (fabric_profile.gid_versions & 1 && !gid_add(device, gid, IBV_GID_TYPE_ROCE_V1))
        return false;
    return !(fabric_profile.gid_versions & 2) || gid_add(device, gid, IBV_GID_TYPE_ROCE_V2);
}

/* The prefix is that of link-local addresses, which is also InfiniBand's default one. */
static void gid_add_own(struct fabric_device *device)
{
    union ibv_gid gid = {.global = {htobe64(0xfe80000000000000u), device->guid}};

    if (fabric_profile.iwarp) {
        memset(&gid, 0, sizeof(gid));
        memcpy(gid.raw, &device->guid, sizeof(device->guid));
        gid_add(device, &gid, IBV_GID_TYPE_IB);
    } else if (fabric_profile.infiniband_link) {
        gid_add(device, &gid, IBV_GID_TYPE_IB);
    } else {
        gid_add_versions(device, &gid);
    }
}

/* false: there is no room. */
static bool address_add(struct fabric_device *device, const struct sockaddr *address)
{
    bool with_gid = !fabric_profile.iwarp && !fabric_profile.infiniband_link;
    struct sockaddr_storage *into;
    union ibv_gid gid;

    if (has_address(device, address))
        return true;
    fabric_address_to_gid(address, &gid);
    if (device->address_count == FABRIC_LENGTH(device->addresses) ||
        (with_gid && !gid_add_versions(device, &gid)))
        return false;
    into = &device->addresses[device->address_count++];
    if (address->sa_family == AF_INET) {
        memcpy(into, address, sizeof(struct sockaddr_in));
        ((struct sockaddr_in *)into)->sin_port = 0;
    } else {
        memcpy(into, address, sizeof(struct sockaddr_in6));
        ((struct sockaddr_in6 *)into)->sin6_port = 0;
    }
    return true;
}

static bool address_parse(const char *text, struct sockaddr_storage *into)
{
    struct sockaddr_in *four = (struct sockaddr_in *)into;
    struct sockaddr_in6 *six = (struct sockaddr_in6 *)into;

    memset(into, 0, sizeof(*into));
    if (inet_pton(AF_INET, text, &four->sin_addr) == 1)
        into->ss_family = AF_INET;
    else if (inet_pton(AF_INET6, text, &six->sin6_addr) == 1)
        into->ss_family = AF_INET6;
    else
        return false;
    return true;
}

static void address_add_text(struct fabric_device *device, const char *text)
{
    struct sockaddr_storage address;

    if (!address_parse(text, &address))
        fabric_refuse("%s: '%s' is no address of IPv4 or IPv6", ADDRESS_VARIABLE, text);
    if (is_wildcard((struct sockaddr *)&address))
        fabric_refuse("%s: %s is no adapter's address", ADDRESS_VARIABLE, text);
    if (fabric_device_of_address((struct sockaddr *)&address))
        fabric_refuse("%s: %s is given twice", ADDRESS_VARIABLE, text);
    if (!address_add(device, (struct sockaddr *)&address))
        fabric_refuse("%s: %s has more addresses than its table of GIDs has room for",
                      ADDRESS_VARIABLE, device->ibv.name);
}

/*
 * The addresses of the machine are those of the first adapter, so that a program finds it under the
 * names that it would use on the network.  A link-local address is one of its interface only, and
 * would need a scope.
 */
static void addresses_of_machine(struct fabric_device *device)
{
    struct ifaddrs *all, *item;

    if (getifaddrs(&all))
        return;
    for (item = all; item; item = item->ifa_next) {
        const struct sockaddr *address = item->ifa_addr;

        if (!address || !(item->ifa_flags & IFF_UP) || item->ifa_flags & IFF_LOOPBACK)
            continue;
        if (address->sa_family == AF_INET6 &&
            IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)address)->sin6_addr))
            continue;
        if (address->sa_family == AF_INET || address->sa_family == AF_INET6)
            address_add(device, address);
    }
    freeifaddrs(all);
}

static void addresses_default(struct fabric_device *device)
{
    struct sockaddr_storage usual;
    char text[INET_ADDRSTRLEN];

    snprintf(text, sizeof(text), "127.0.0.%u", device->number + 1);
    address_add_text(device, text);
    /* That of the guests of softroce, with which examples and tests are written. */
    snprintf(text, sizeof(text), "10.80.0.%u", device->number + 1);
    if (address_parse(text, &usual) && !fabric_device_of_address((struct sockaddr *)&usual))
        address_add(device, (struct sockaddr *)&usual);
    if (device->number == 0) {
        address_add_text(device, "::1");
        addresses_of_machine(device);
    }
}

/* ---- the devices of the run ------------------------------------------------------------------ */

static void device_init(struct fabric_device *device, unsigned number)
{
    struct ibv_device *ibv = &device->ibv;

    device->number = number;
    device->guid = htobe64((uint64_t)GUID_BASE << 40 | 0xfffe000000u | number);
    device->state = IBV_PORT_ACTIVE;
    device->lid = fabric_profile.infiniband_link ? (uint16_t)(number + 1) : 0;
    ibv->node_type = fabric_profile.iwarp ? IBV_NODE_RNIC : IBV_NODE_CA;
    ibv->transport_type = fabric_profile.iwarp ? IBV_TRANSPORT_IWARP : IBV_TRANSPORT_IB;
    snprintf(ibv->name, sizeof(ibv->name), "%s%u", fabric_profile.device, number);
    snprintf(ibv->dev_name, sizeof(ibv->dev_name), "uverbs%u", number);
    /* Where they would be; ibv_read_sysfs_file() reads there though no kernel knows them. */
    snprintf(ibv->dev_path, sizeof(ibv->dev_path), "/sys/class/infiniband_verbs/uverbs%u", number);
    snprintf(ibv->ibdev_path, sizeof(ibv->ibdev_path), "/sys/class/infiniband/%s", ibv->name);
    gid_add_own(device);
}

static unsigned count_wanted(void)
{
    const char *text = getenv(COUNT_VARIABLE);
    unsigned long count;
    char *end;

    if (!text || !*text)
        return 1;
    errno = 0;
    count = strtoul(text, &end, 10);
    if (errno || end == text || *end || count > FABRIC_DEVICES)
        fabric_refuse("%s is a number from 0 to %d, and not %s", COUNT_VARIABLE, FABRIC_DEVICES,
                      text);
    return (unsigned)count;
}

static void addresses_given(char *text)
{
    unsigned number = 0;
    char *list, *item;

    while ((list = strsep(&text, ";"))) {
        if (number == device_count)
            fabric_refuse("%s has lists for more than the %u devices of %s", ADDRESS_VARIABLE,
                          device_count, COUNT_VARIABLE);
        while ((item = strsep(&list, ",")))
            if (*item)
                address_add_text(&devices[number], item);
        number++;
    }
}

/* Before anything is asked of the devices; with the lock. */
static void devices_begin(void)
{
    static bool begun;
    const char *given = getenv(ADDRESS_VARIABLE);
    unsigned number;
    char *copy;

    if (begun)
        return;
    begun = true;
    fabric_profile_load();
    device_count = count_wanted();
    for (number = 0; number < device_count; number++)
        device_init(&devices[number], number);
    if (given && *given && (copy = strdup(given))) {
        addresses_given(copy);
        free(copy);
    }
    for (number = 0; number < device_count; number++)
        if (!devices[number].address_count)
            addresses_default(&devices[number]);
}

void fabric_device_address(struct fabric_device *device, bool present)
{
    union ibv_gid gid;
    unsigned i, j;

    for (i = 0; i < device->address_count; i++) {
        fabric_address_to_gid((const struct sockaddr *)&device->addresses[i], &gid);
        for (j = 0; j < FABRIC_GIDS; j++)
            if (!memcmp(&device->gids[j].gid, &gid, sizeof(gid)))
                device->gids[j].used = present;
    }
    device->unaddressed = !present;
}

void fabric_devices_anew(void)
{
    unsigned number;

    devices_begin();
    for (number = 0; number < device_count; number++) {
        devices[number].removed = false;
        devices[number].state = IBV_PORT_ACTIVE;
        fabric_device_address(&devices[number], true);
    }
}

struct fabric_device *fabric_device(unsigned number)
{
    devices_begin();
    return number < device_count ? &devices[number] : NULL;
}

unsigned fabric_device_count(void)
{
    devices_begin();
    return device_count;
}

struct fabric_device *fabric_device_of_address(const struct sockaddr *address)
{
    unsigned number;

    devices_begin();
    for (number = 0; number < device_count; number++)
        if (!devices[number].removed &&
            (is_wildcard(address) || has_address(&devices[number], address)))
            return &devices[number];
    return NULL;
}

/* No mask is given with an address; a network has 24 bits of IPv4, or 64 of IPv6. */
bool fabric_is_neighbor(const struct sockaddr *address)
{
    size_t network = address->sa_family == AF_INET ? 15 : 8;
    union ibv_gid wanted, own;
    unsigned number, i;

    if (is_loopback(address))
        return false;
    devices_begin();
    fabric_address_to_gid(address, &wanted);
    for (number = 0; number < device_count; number++)
        for (i = 0; i < devices[number].address_count; i++) {
            const struct sockaddr *known = (const struct sockaddr *)&devices[number].addresses[i];

            fabric_address_to_gid(known, &own);
            if (known->sa_family == address->sa_family && !is_loopback(known) &&
                !memcmp(&own, &wanted, network))
                return true;
        }
    return false;
}

struct fabric_device *fabric_device_of_gid(const union ibv_gid *gid, unsigned *index)
{
    unsigned number, i;

    devices_begin();
    for (number = 0; number < device_count; number++)
        /* From the end: a GID's newest type comes last. */
        for (i = FABRIC_GIDS; i-- > 0;)
            if (devices[number].gids[i].used &&
                !memcmp(&devices[number].gids[i].gid, gid, sizeof(*gid))) {
                if (index)
                    *index = i;
                return &devices[number];
            }
    return NULL;
}

struct fabric_device *fabric_device_of_lid(uint16_t lid)
{
    unsigned number;

    devices_begin();
    for (number = 0; number < device_count; number++)
        if (lid && devices[number].lid == lid)
            return &devices[number];
    return NULL;
}

int fabric_gid_index(struct fabric_device *device, const struct sockaddr *address)
{
    union ibv_gid gid;
    unsigned i;

    if (!has_address(device, address))
        return -1;
    /* There, addresses are another layer's, and the port's one GID is what stands for them. */
    if (fabric_profile.iwarp || fabric_profile.infiniband_link)
        return 0;
    fabric_address_to_gid(address, &gid);
    for (i = FABRIC_GIDS; i-- > 0;)
        if (device->gids[i].used && !memcmp(&device->gids[i].gid, &gid, sizeof(gid)))
            return (int)i;
    return -1;
}

/* ---- lists of devices ------------------------------------------------------------------------ */

FABRIC_API struct ibv_device **ibv_get_device_list(int *num_devices)
{
    struct ibv_device **list = NULL;
    unsigned number;

    if (num_devices)
        *num_devices = 0;
    fabric_lock();
    devices_begin();
    if (!fabric_fails("ibv_get_device_list"))
        list = calloc(device_count + 1, sizeof(struct ibv_device *));
    if (list) {
        unsigned present = 0;

        for (number = 0; number < device_count; number++)
            if (!devices[number].removed)
                list[present++] = &devices[number].ibv;
        if (num_devices)
            *num_devices = (int)present;
    }
    fabric_unlock();
    return list;
}

/* The devices themselves stay: a program may ask one for its name that it has opened before. */
FABRIC_API void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

static struct fabric_device *device_of(struct ibv_device *device)
{
    return FABRIC_CONTAINER(device, struct fabric_device, ibv);
}

FABRIC_API const char *ibv_get_device_name(struct ibv_device *device)
{
    return device->name;
}

FABRIC_API int ibv_get_device_index(struct ibv_device *device)
{
    return (int)device_of(device)->number;
}

FABRIC_API __be64 ibv_get_device_guid(struct ibv_device *device)
{
    return device_of(device)->guid;
}

/* ---- contexts -------------------------------------------------------------------------------- */

/* Of calls that are left out here, the functions of verbs.h say EOPNOTSUPP. */
static void context_fill(struct fabric_context *context)
{
    struct verbs_context *verbs = &context->verbs;
    struct ibv_context_ops *ops = &verbs->context.ops;

    verbs->sz = sizeof(*verbs);
    verbs->query_port = fabric_query_port;
    verbs->query_device_ex = fabric_query_device_ex;
    verbs->modify_cq = fabric_modify_cq;
    if (fabric_profile.timestamps)
        verbs->query_rt_values = fabric_query_rt_values;
    if (fabric_profile.extended_cq)
        verbs->create_cq_ex = fabric_create_cq_ex;
    if (fabric_profile.extended_qp)
        verbs->create_qp_ex = fabric_create_qp_ex;
    ops->_compat_query_device = ibv_query_device;
    ops->_compat_query_port = ibv_query_port;
    ops->alloc_mw = fabric_alloc_mw;
    ops->bind_mw = fabric_bind_mw;
    ops->dealloc_mw = fabric_dealloc_mw;
    ops->poll_cq = fabric_poll_cq;
    ops->req_notify_cq = fabric_req_notify_cq;
    ops->post_srq_recv = fabric_post_srq_recv;
    ops->post_send = fabric_post_send;
    ops->post_recv = fabric_post_recv;
    verbs->context.device = &context->device->ibv;
    verbs->context.async_fd = context->events.fd;
    verbs->context.num_comp_vectors = fabric_profile.comp_vectors;
    verbs->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    pthread_mutex_init(&verbs->context.mutex, NULL);
}

/*
 * 0, or -1 and errno.  There is no kernel behind cmd_fd, and nothing to be read or written: it is
 * there for programs that duplicate it, for ibv_import_device() to tell them that this cannot be.
 */
static int descriptors_open(struct fabric_context *context)
{
    int *command = &context->verbs.context.cmd_fd;

    *command = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (*command < 0)
        return -1;
    if (fabric_feed_open(&context->events)) {
        close(*command);
        return -1;
    }
    return 0;
}

struct ibv_context *fabric_open(struct fabric_device *device)
{
    struct fabric_context *context = NULL;

    fabric_lock();
    if (device->removed)
        errno = ENODEV;
    else if (!fabric_fails("ibv_open_device") && (context = calloc(1, sizeof(*context)))) {
        context->device = device;
        context->generation = fabric_generation();
        if (descriptors_open(context)) {
            free(context);
            context = NULL;
        } else {
            context_fill(context);
            fabric_list_add(&fabric_contexts, &context->links);
            fabric_born(FABRIC_CONTEXT);
        }
    }
    fabric_unlock();
    return context ? &context->verbs.context : NULL;
}

FABRIC_API struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    return fabric_open(device_of(device));
}

/* The objects of a context that is closed are gone from the adapter: its peers hear nothing more.
 */
static void queue_pairs_end(struct fabric_context *context)
{
    struct fabric_list *item;

    for (item = fabric_qps.next; item != &fabric_qps; item = item->next) {
        struct fabric_qp *qp = FABRIC_CONTAINER(item, struct fabric_qp, links);

        if (qp->context == context)
            fabric_qp_error(qp);
    }
}

/*
 * The man page lets a program close a context whose objects it has not destroyed: their memory is
 * lost then, and that is all.  So this succeeds; the context's own memory is one that stays, as the
 * objects have pointers to it.  fabric_count() tells which were forgotten.
 */
FABRIC_API int ibv_close_device(struct ibv_context *ibv)
{
    struct fabric_context *context = fabric_context(ibv);
    bool forgotten;

    fabric_lock();
    if (context->generation != fabric_generation()) {
        /* The child's copies. */
        close(context->events.fd);
        close(ibv->cmd_fd);
        fabric_unlock();
        return 0;
    }
    if (fabric_fails("ibv_close_device")) {
        fabric_unlock();
        return -1;
    }
    forgotten = context->objects;
    if (forgotten)
        queue_pairs_end(context);
    fabric_list_remove(&context->links);
    fabric_feed_close(&context->events);
    close(ibv->cmd_fd);
    fabric_gone(FABRIC_CONTEXT);
    fabric_unlock();
    if (!forgotten) {
        pthread_mutex_destroy(&ibv->mutex);
        free(context);
    }
    return 0;
}

/* ---- asynchronous events --------------------------------------------------------------------- */

enum affiliation { OF_PORT, OF_CQ, OF_QP, OF_SRQ };

static enum affiliation affiliation_of(enum ibv_event_type type)
{
    switch (type) {
    case IBV_EVENT_CQ_ERR:
        return OF_CQ;
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
        return OF_QP;
    case IBV_EVENT_SRQ_ERR:
    case IBV_EVENT_SRQ_LIMIT_REACHED:
        return OF_SRQ;
    default:
        return OF_PORT;
    }
}

/* Where the events of the object are counted. */
static unsigned *count_of(const struct ibv_async_event *event, bool acked)
{
    struct fabric_srq *srq;
    struct fabric_cq *cq;
    struct fabric_qp *qp;

    switch (affiliation_of(event->event_type)) {
    case OF_CQ:
        cq = FABRIC_CONTAINER(event->element.cq, struct fabric_cq, ibv);
        return acked ? &cq->async_acked : &cq->async_told;
    case OF_QP:
        qp = fabric_qp(event->element.qp);
        return acked ? &qp->async_acked : &qp->async_told;
    case OF_SRQ:
        srq = FABRIC_CONTAINER(event->element.srq, struct fabric_srq, ibv);
        return acked ? &srq->async_acked : &srq->async_told;
    default:
        return NULL;
    }
}

void fabric_tell(struct fabric_context *context, enum ibv_event_type type, void *element)
{
    struct event *event;
    unsigned *told;

    if (context->events.fd < 0 || !(event = calloc(1, sizeof(*event))))
        return;
    event->event.event_type = type;
    if (affiliation_of(type) == OF_PORT)
        event->event.element.port_num = (int)(intptr_t)element;
    else
        event->event.element.cq = element; /* a union of pointers */
    told = count_of(&event->event, false);
    if (told) {
        ++*told;
        event->note.about = element;
    }
    fabric_feed_push(&context->events, &event->note);
}

FABRIC_API int ibv_get_async_event(struct ibv_context *ibv, struct ibv_async_event *event)
{
    struct fabric_note *note =
        fabric_feed_take(&fabric_context(ibv)->events, "ibv_get_async_event");

    if (!note)
        return -1;
    *event = FABRIC_CONTAINER(note, struct event, note)->event;
    free(note);
    return 0;
}

FABRIC_API void ibv_ack_async_event(struct ibv_async_event *event)
{
    unsigned *acked = count_of(event, true);

    if (!acked)
        return;
    fabric_lock();
    ++*acked;
    fabric_changed();
    fabric_unlock();
}

/* ---- fork ------------------------------------------------------------------------------------ */

/*
 * Memory that is registered stays the parent's own, as with a kernel that copies such pages for the
 * child at once: nothing has to be prepared.
 */
FABRIC_API int ibv_fork_init(void)
{
    return 0;
}

FABRIC_API enum ibv_fork_status ibv_is_fork_initialized(void)
{
    return IBV_FORK_UNNEEDED;
}

FABRIC_API int ibv_dontfork_range(void *base, size_t size)
{
    return 0;
}

FABRIC_API int ibv_dofork_range(void *base, size_t size)
{
    return 0;
}
