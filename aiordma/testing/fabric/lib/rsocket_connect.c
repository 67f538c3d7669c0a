/* rsockets: how a connection comes about, and the memory and the queues that it needs. */
#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "rsocket.h"

#define VERSION       1
#define RESOLVE_MS    1000 /* the first time; each further time is twice as long */
#define RESOLVES      7
#define CM_HEADER     36 /* bytes before the private data of a request, with AF_IB */
#define PAGE          4096
#define FLAG_BIG      1
#define FLAG_MAPPINGS 2
#define EXACT_SLOTS   128 /* up to which a number of slots is itself; more are told in 256s */

/* Private data of the request and of its answer, in network order. */
struct hello {
    uint8_t version, flags;
    uint16_t credits;
    uint8_t reserved[3];
    uint8_t slots;
    uint64_t table;
    uint32_t table_key, table_length;
    uint64_t buffer;
    uint32_t buffer_key, buffer_length;
};
_Static_assert(sizeof(struct hello) == 40, "private data have 40 bytes");

static const bool is_big_endian = __BYTE_ORDER == __BIG_ENDIAN;

static uint8_t encode_slots(uint32_t count)
{
    return count <= EXACT_SLOTS ? count : EXACT_SLOTS | count >> 8;
}

static uint32_t decode_slots(uint8_t code)
{
    return code <= EXACT_SLOTS ? code : (uint32_t)(code & ~EXACT_SLOTS) << 8;
}

/* ---- birth and death ------------------------------------------------------------------------- */

static int watch(struct stream *stream, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    int flags = fcntl(fd, F_GETFL);

    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK))
        return errno;
    return epoll_ctl(stream->fd, EPOLL_CTL_ADD, fd, &event) ? errno : 0;
}

static int open_channel(struct stream *stream)
{
    stream->fd = epoll_create1(EPOLL_CLOEXEC);
    if (stream->fd < 0)
        return errno;
    stream->channel = rdma_create_event_channel();
    return stream->channel ? watch(stream, stream->channel->fd) : errno;
}

int stream_create(struct stream **created, int domain, const struct stream_options *options)
{
    struct stream *stream = calloc(1, sizeof(*stream));
    int error;

    if (!stream)
        return ENOMEM;
    pthread_mutex_init(&stream->lock, NULL);
    stream->domain = domain;
    stream->options = *options;
    error = open_channel(stream);
    if (error)
        stream_destroy(stream);
    else
        *created = stream;
    return error;
}

/* NULL and errno. */
static void *new_memory(struct stream *stream, size_t size, int access, struct ibv_mr **mr)
{
    void *memory;
    int error = posix_memalign(&memory, PAGE, size);

    if (!error) {
        memset(memory, 0, size);
        *mr = ibv_reg_mr(stream->pd, memory, size, access);
        if (*mr)
            return memory;
        error = errno;
        free(memory);
    }
    errno = error;
    return NULL;
}

static void free_memory(struct ibv_mr *mr)
{
    void *memory = mr ? mr->addr : NULL;

    if (mr)
        ibv_dereg_mr(mr);
    free(memory);
}

void stream_destroy(struct stream *stream)
{
    struct stream_map *map;

    if (stream->has_request) {
        rdma_reject(stream->request.id, NULL, 0);
        rdma_destroy_id(stream->request.id);
    }
    if (stream->id && stream->id->qp)
        rdma_destroy_qp(stream->id);
    while ((map = stream->maps)) {
        stream->maps = map->next;
        ibv_dereg_mr(map->mr);
        free(map);
    }
    free_memory(stream->send_mr);
    free_memory(stream->receive_mr);
    free_memory(stream->table_mr);
    free(stream->messages);
    if (stream->cq)
        ibv_destroy_cq(stream->cq);
    if (stream->completions)
        ibv_destroy_comp_channel(stream->completions);
    if (stream->pd)
        ibv_dealloc_pd(stream->pd);
    if (stream->id)
        rdma_destroy_id(stream->id);
    if (stream->channel)
        rdma_destroy_event_channel(stream->channel);
    if (stream->fd >= 0)
        close(stream->fd);
    pthread_mutex_destroy(&stream->lock);
    free(stream->route);
    free(stream);
}

/* ---- memory and queues ----------------------------------------------------------------------- */

static int make_memory(struct stream *stream, uint32_t receives)
{
    struct stream_options *options = &stream->options;
    const int remote = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    size_t ring = options->receive_bytes, table = STREAM_BUFFERS * sizeof(struct stream_buffer);

    /* The words of iWARP need memory: it is behind the ring. */
    if (stream->iwarp)
        ring += receives * sizeof(uint32_t);
    /* As many as the peer will believe that there are. */
    options->slots = decode_slots(encode_slots(options->slots));
    table += options->slots * sizeof(struct stream_slot);
    stream->ring = new_memory(stream, ring, remote, &stream->receive_mr);
    stream->table = new_memory(stream, table, remote, &stream->table_mr);
    stream->send_ring =
        new_memory(stream, options->send_bytes + STREAM_CONTROL * sizeof(struct stream_buffer),
                   IBV_ACCESS_LOCAL_WRITE, &stream->send_mr);
    stream->messages = calloc(options->receives, sizeof(*stream->messages));
    if (!stream->ring || !stream->table || !stream->send_ring || !stream->messages)
        return errno;
    stream->controls = stream->send_ring + options->send_bytes;
    stream->send_free = options->send_bytes;
    /* The first half of the ring is announced by the private data, the other by a message. */
    stream->allowed = stream->freed = stream->free_offset = options->receive_bytes / 2;
    stream->table_next = stream->peer_next = 1;
    stream->due = options->receives / 2;
    return 0;
}

static int make_queue_pair(struct stream *stream, uint32_t receives)
{
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .send_cq = stream->cq,
        .recv_cq = stream->cq,
        .sq_sig_all = 1,
        .cap = {.max_send_wr = stream->options.sends,
                .max_recv_wr = receives,
                .max_send_sge = 2,
                .max_recv_sge = 1,
                .max_inline_data = stream->options.inline_bytes},
    };

    if (stream->iwarp && attr.cap.max_inline_data < sizeof(uint32_t))
        attr.cap.max_inline_data = sizeof(uint32_t);
    if (rdma_create_qp(stream->id, stream->pd, &attr)) {
        /* Not each adapter takes data inline. */
        if (stream->iwarp || !attr.cap.max_inline_data)
            return errno;
        attr.cap.max_inline_data = 0;
        if (rdma_create_qp(stream->id, stream->pd, &attr))
            return errno;
    }
    stream->options.inline_bytes = attr.cap.max_inline_data;
    if (stream->options.inline_bytes > STREAM_INLINE)
        stream->options.inline_bytes = STREAM_INLINE;
    return 0;
}

/* All that must be there before the peer hears of this side, for it may write at once then. */
static int make_queues(struct stream *stream)
{
    struct ibv_context *verbs = stream->id->verbs;
    uint32_t receives = stream->options.receives + STREAM_SPARE, most;
    struct ibv_device_attr device;
    int error;

    error = ibv_query_device(verbs, &device);
    if (error)
        return error;
    most = device.max_qp_wr;
    stream->iwarp = verbs->device->transport_type == IBV_TRANSPORT_IWARP;
    if (stream->options.sends > most)
        stream->options.sends = most;
    if (receives > most)
        receives = most;
    if (receives <= STREAM_SPARE || stream->options.sends <= STREAM_CONTROL + 1)
        return ENOMEM;
    stream->options.receives = receives - STREAM_SPARE;

    stream->pd = ibv_alloc_pd(verbs);
    if (!stream->pd)
        return errno;
    stream->completions = ibv_create_comp_channel(verbs);
    if (!stream->completions)
        return errno;
    error = watch(stream, stream->completions->fd);
    if (error)
        return error;
    stream->cq =
        ibv_create_cq(verbs, stream->options.sends + receives, NULL, stream->completions, 0);
    if (!stream->cq)
        return errno;
    error = make_memory(stream, receives);
    if (!error)
        error = make_queue_pair(stream, receives);
    for (uint32_t index = 0; !error && index < receives; index++)
        error = stream_post_receive(stream, index);
    return error;
}

/* ---- what both sides tell of themselves ------------------------------------------------------ */

static void fill_hello(const struct stream *stream, struct hello *hello)
{
    *hello = (struct hello){
        .version = VERSION,
        .flags = FLAG_MAPPINGS | (is_big_endian ? FLAG_BIG : 0),
        .credits = htobe16(stream->options.receives),
        .slots = encode_slots(stream->options.slots),
        .table = htobe64((uintptr_t)stream->table),
        .table_key = htobe32(stream->table_mr->rkey),
        .table_length = htobe32(STREAM_BUFFERS),
        .buffer = htobe64((uintptr_t)stream->ring),
        .buffer_key = htobe32(stream->receive_mr->rkey),
        .buffer_length = htobe32(stream->options.receive_bytes / 2),
    };
}

/* 0, or an errno: ENOTSUP of a peer that does not speak this. */
static int read_hello(const struct stream_event *event, struct hello *hello)
{
    bool has_header = event->type == RDMA_CM_EVENT_CONNECT_REQUEST &&
                      rdma_get_local_addr(event->id)->sa_family == AF_IB;
    size_t start = has_header ? CM_HEADER : 0;

    if (event->size < start + sizeof(*hello))
        return ENOTSUP;
    memcpy(hello, event->data + start, sizeof(*hello));
    if (hello->version != VERSION || !hello->credits || be32toh(hello->table_length) < 2 ||
        !hello->buffer_length)
        return ENOTSUP;
    return 0;
}

static void take_hello(struct stream *stream, const struct hello *hello)
{
    stream->swap = !!(hello->flags & FLAG_BIG) != is_big_endian;
    stream->limit = stream->peer_credits = be16toh(hello->credits);
    stream->peer_slots = hello->flags & FLAG_MAPPINGS ? decode_slots(hello->slots) : 0;
    stream->peer_table = be64toh(hello->table);
    stream->peer_key = be32toh(hello->table_key);
    stream->peer_buffers = be32toh(hello->table_length);
    stream->buffers[0].address = be64toh(hello->buffer);
    stream->buffers[0].key = be32toh(hello->buffer_key);
    stream->buffers[0].length = be32toh(hello->buffer_length);
}

/* ---- the active side ------------------------------------------------------------------------- */

/* Resolve the route, or take the one that the program has given. */
static int find_route(struct stream *stream)
{
    stream->state = STREAM_ROUTE;
    if (stream->route)
        return rdma_set_option(stream->id, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, stream->route,
                               stream->route_size);
    return rdma_resolve_route(stream->id, stream->resolve_ms);
}

int stream_connect(struct stream *stream, const struct sockaddr *address)
{
    stream->resolve_ms = RESOLVE_MS;
    stream->resolves_left = RESOLVES - 1;
    if (rdma_resolve_addr(stream->id, NULL, (struct sockaddr *)address, RESOLVE_MS))
        return errno;
    stream->bound = true;
    stream->state = STREAM_ADDRESS;
    return 0;
}

/* Once more, if it took too long; else it has failed. */
static int resolve_again(struct stream *stream, int error)
{
    struct sockaddr *to = rdma_get_peer_addr(stream->id);

    if (error != ETIMEDOUT || !stream->resolves_left)
        return error;
    stream->resolves_left--;
    stream->resolve_ms *= 2;
    if (stream->state == STREAM_ADDRESS
            ? rdma_resolve_addr(stream->id, NULL, to, stream->resolve_ms)
            : find_route(stream))
        return errno;
    return 0;
}

static int ask_for_connection(struct stream *stream)
{
    unsigned char data[CM_HEADER + sizeof(struct hello)] = {0};
    size_t start = rdma_get_peer_addr(stream->id)->sa_family == AF_IB ? CM_HEADER : 0;
    struct rdma_conn_param param = {.private_data = data,
                                    .private_data_len = start + sizeof(struct hello),
                                    .flow_control = 1,
                                    .retry_count = 7,
                                    .rnr_retry_count = 7};
    struct hello hello;
    int error = make_queues(stream);

    if (error)
        return error;
    fill_hello(stream, &hello);
    memcpy(data + start, &hello, sizeof(hello));
    /* There the first message is a READ of no bytes, which the manager sends by itself. */
    param.initiator_depth = stream->iwarp;
    stream->state = STREAM_CONNECTING;
    return rdma_connect(stream->id, &param) ? errno : 0;
}

static int finish_connection(struct stream *stream, const struct stream_event *event)
{
    struct hello hello;
    int error = read_hello(event, &hello);

    if (error) {
        rdma_disconnect(stream->id);
        return error;
    }
    take_hello(stream, &hello);
    stream->readable = stream->writable = true;
    stream->state = STREAM_CONNECTED;
    return 0;
}

/* ---- the passive side ------------------------------------------------------------------------ */

/* Answer a request; the id becomes the socket's, also if that fails. 0, or an errno. */
int stream_accept(struct stream *stream, const struct stream_event *request)
{
    /* What the peer has asked for, as far as the adapter can. */
    struct rdma_conn_param param = {.private_data_len = sizeof(struct hello),
                                    .responder_resources = request->param.responder_resources,
                                    .initiator_depth = request->param.initiator_depth,
                                    .flow_control = request->param.flow_control,
                                    .retry_count = 7,
                                    .rnr_retry_count = 7};
    struct ibv_device_attr device;
    struct hello hello;
    int error;

    stream->id = request->id;
    stream->bound = true;
    error = rdma_migrate_id(stream->id, stream->channel) ? errno : read_hello(request, &hello);
    if (!error)
        error = ibv_query_device(stream->id->verbs, &device);
    if (!error) {
        take_hello(stream, &hello);
        error = make_queues(stream);
    }
    if (error) {
        rdma_reject(stream->id, NULL, 0);
        return error;
    }
    if (param.responder_resources > device.max_qp_rd_atom)
        param.responder_resources = device.max_qp_rd_atom;
    if (param.initiator_depth > device.max_qp_init_rd_atom)
        param.initiator_depth = device.max_qp_init_rd_atom;
    fill_hello(stream, &hello);
    param.private_data = &hello;
    stream->readable = stream->writable = true;
    stream->state = STREAM_ACCEPTED;
    return rdma_accept(stream->id, &param) ? errno : 0;
}

/* A request stays until raccept() takes it, unless the peer does not speak this. */
static void keep_request(struct stream *stream, const struct stream_event *event)
{
    struct hello hello;

    if (read_hello(event, &hello)) {
        rdma_reject(event->id, NULL, 0);
        rdma_destroy_id(event->id);
        return;
    }
    stream->request = *event;
    stream->has_request = true;
}

/* ---- events ---------------------------------------------------------------------------------- */

/* The errno of an event that tells of a failure; the manager's status may be a reason of IB. */
static int error_of(const struct stream_event *event)
{
    switch (event->type) {
    case RDMA_CM_EVENT_REJECTED:
        return ECONNREFUSED;
    case RDMA_CM_EVENT_DEVICE_REMOVAL:
        return ENODEV;
    case RDMA_CM_EVENT_CONNECT_ERROR:
        return event->status < 0 ? -event->status : ECONNABORTED;
    default:
        return event->status < 0 ? -event->status : EHOSTUNREACH;
    }
}

static void lose_connection(struct stream *stream)
{
    /* What the peer has sent before is there: it may have said that it closes. */
    stream_progress(stream);
    if (stream->state == STREAM_ENDED)
        return;
    stream_end(stream, stream->readable || stream->state != STREAM_CONNECTED ? ECONNRESET : 0);
}

static void happened(struct stream *stream, const struct stream_event *event)
{
    enum rdma_cm_event_type type = event->type;
    int error = 0;

    /* What else a listening socket hears is of connections that raccept() finds to be gone. */
    if (stream->state == STREAM_LISTENING && type == RDMA_CM_EVENT_CONNECT_REQUEST)
        keep_request(stream, event);
    else if (event->id != stream->id)
        return;
    else if (type == RDMA_CM_EVENT_ADDR_RESOLVED && stream->state == STREAM_ADDRESS)
        error = find_route(stream) ? errno : 0;
    else if (type == RDMA_CM_EVENT_ROUTE_RESOLVED && stream->state == STREAM_ROUTE)
        error = ask_for_connection(stream);
    else if (type == RDMA_CM_EVENT_ESTABLISHED && stream->state == STREAM_CONNECTING)
        error = finish_connection(stream, event);
    else if (type == RDMA_CM_EVENT_ESTABLISHED && stream->state == STREAM_ACCEPTED)
        stream->state = STREAM_CONNECTED;
    else if ((type == RDMA_CM_EVENT_ADDR_ERROR && stream->state == STREAM_ADDRESS) ||
             (type == RDMA_CM_EVENT_ROUTE_ERROR && stream->state == STREAM_ROUTE))
        error = resolve_again(stream, error_of(event));
    else if (type == RDMA_CM_EVENT_DISCONNECTED)
        lose_connection(stream);
    else if (type == RDMA_CM_EVENT_CONNECT_ERROR || type == RDMA_CM_EVENT_UNREACHABLE ||
             type == RDMA_CM_EVENT_REJECTED || type == RDMA_CM_EVENT_DEVICE_REMOVAL)
        error = error_of(event);
    if (error)
        stream_end(stream, error);
    stream_wake(stream);
}

/* Copy the next event and acknowledge it: what follows may destroy the id. */
static bool next_event(struct stream *stream, struct stream_event *copy)
{
    struct rdma_cm_event *event;

    if (rdma_get_cm_event(stream->channel, &event))
        return false;
    memset(copy, 0, sizeof(*copy));
    copy->type = event->event;
    copy->status = event->status;
    copy->id = event->id;
    if (copy->type == RDMA_CM_EVENT_CONNECT_REQUEST || copy->type == RDMA_CM_EVENT_ESTABLISHED) {
        copy->param = event->param.conn;
        if (copy->param.private_data)
            copy->size = copy->param.private_data_len;
        if (copy->size > sizeof(copy->data))
            copy->size = sizeof(copy->data);
        if (copy->size)
            memcpy(copy->data, copy->param.private_data, copy->size);
        copy->param.private_data = NULL;
    }
    rdma_ack_cm_event(event);
    return true;
}

void stream_take_events(struct stream *stream)
{
    struct epoll_event ready[2];
    struct stream_event event;
    struct ibv_cq *cq;
    void *context;
    int count = epoll_wait(stream->fd, ready, FABRIC_LENGTH(ready), 0);

    for (int i = 0; i < count; i++) {
        if (ready[i].data.fd == stream->channel->fd) {
            /* A request that waits leaves those behind it where the manager counts them. */
            while (!stream->has_request && next_event(stream, &event))
                happened(stream, &event);
        } else if (!ibv_get_cq_event(stream->completions, &cq, &context)) {
            ibv_ack_cq_events(cq, 1);
            stream->armed = false;
            /* The event was also for those who sleep on. */
            if (stream->sleepers)
                stream_arm(stream);
        }
    }
    stream_progress(stream);
}
