/*
 * Connections that have what the library's have: connecting ROLE ADDRESS PORT MANY WAY.
 *
 * cmtime's have no memory and no messages.  Here each end has a protection domain, registered
 * memory of its own with all receives posted, and the client says a word on each connection, so
 * that the server may send, too.  All of a process runs on one event channel, one completion
 * channel and one completion queue.  That is what a connection of the library's costs where nothing
 * is Python.
 *
 * WAY is what follows.  "only": nothing.  "defaults" and "pool": nothing, either, and memory and
 * queues have the sizes of the library's default settings, or of those of plain_many.py with a pool,
 * which each connection has for itself here.  The others ask on each connection every 20 seconds, as an
 * idle connection of the library does, for 200 seconds:
 *
 * - "spread": a few questions at a time, every 1.25 seconds.  A question and its answer are
 *   messages of 16 bytes.
 * - "together": all questions at once.
 * - "adapter": as "spread", but a question is an RDMA WRITE of no bytes: the adapter of the peer
 *   acknowledges it, and no process there wakes up.
 *
 * The client prints JSON: the connections a second; and the processor time of both processes, in
 * microseconds a second.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

/* Slots as those of the setting "lean" in growth.py, and those for messages without data. */
enum { SIZE = 256, DEPTH = 8, CONTROL = 6, RECEIVES = DEPTH + CONTROL };
enum { ROOM = (2 * DEPTH + CONTROL) * SIZE, GREETING = 64, LIMIT_MS = 2000000000 };

/* What a connection has. */
struct sizes {
    int slot, receives, max_send_wr, max_recv_wr, inline_data;
    size_t room;
};

static struct sizes sizes = {SIZE, RECEIVES, RECEIVES, RECEIVES, GREETING, ROOM};
/* As plan_of(DEFAULTS) has it: the first slots, and the requests of all that may come. */
static const struct sizes defaults = {5888, 10, 62, 78, 128, 64 << 10};
static const struct sizes pool = {4096, 10, 46, 40, 128, 48 << 10};
enum { QUESTION_S = 20, TICKS = 16, IDLE_S = 200 };

/* A receive, and where its message comes to lie. */
struct slot {
    struct rdma_cm_id *id;
    struct ibv_sge piece;
};

/* A question or an answer; `spent` are seconds of processor time. */
struct frame {
    char kind;
    double spent;
};

static struct rdma_event_channel *events;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq;
static struct rdma_cm_id **connections;
static int many, server, established, heard, told;
static double spent_there;

static double seconds(clockid_t clock)
{
    struct timespec now;

    clock_gettime(clock, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void post_receive(struct slot *slot)
{
    struct ibv_recv_wr *bad,
        request = {.wr_id = (uintptr_t)slot, .sg_list = &slot->piece, .num_sge = 1};

    check(ibv_post_recv(slot->id->qp, &request, &bad) == 0, "ibv_post_recv");
}

static void post_receives(struct rdma_cm_id *id, struct ibv_mr *region)
{
    struct slot *slots = calloc(sizes.receives, sizeof(*slots));

    check(slots, "calloc");
    for (int i = 0; i < sizes.receives; i++) {
        slots[i].id = id;
        slots[i].piece = (struct ibv_sge){(uintptr_t)region->addr + i * sizes.slot, sizes.slot,
                                          region->lkey};
        post_receive(&slots[i]);
    }
}

static void make_queue_pair(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = sizes.max_send_wr,
                .max_recv_wr = sizes.max_recv_wr,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = sizes.inline_data},
    };
    struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
    void *memory = mmap(NULL, sizes.room, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    struct ibv_mr *region;

    check(pd != NULL && memory != MAP_FAILED, "memory");
    if (completions == NULL) {
        completions = ibv_create_comp_channel(id->verbs);
        check(completions, "ibv_create_comp_channel");
        cq = ibv_create_cq(id->verbs, many * 2 * sizes.receives, NULL, completions, 0);
        check(cq, "ibv_create_cq");
        check(ibv_req_notify_cq(cq, 1) == 0, "ibv_req_notify_cq");
    }
    attr.send_cq = attr.recv_cq = cq;
    check(rdma_create_qp(id, pd, &attr) == 0, "rdma_create_qp");
    region = ibv_reg_mr(pd, memory, sizes.room, IBV_ACCESS_LOCAL_WRITE);
    check(region, "ibv_reg_mr");
    post_receives(id, region);
}

static void post(struct rdma_cm_id *id, enum ibv_wr_opcode opcode, void *data, uint32_t length)
{
    struct ibv_sge piece = {(uintptr_t)data, length, 0};
    struct ibv_send_wr *bad,
        request = {
            .sg_list = &piece,
            .num_sge = length > 0,
            .opcode = opcode,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE,
        };
    check(ibv_post_send(id->qp, &request, &bad) == 0, "ibv_post_send");
}

static void greet(struct rdma_cm_id *id)
{
    char word[GREETING] = "ready";
    post(id, IBV_WR_SEND, word, sizeof(word));
}

static void say(struct rdma_cm_id *id, char kind)
{
    struct frame frame = {kind, seconds(CLOCK_PROCESS_CPUTIME_ID)};
    post(id, IBV_WR_SEND, &frame, sizeof(frame));
}

static void on_event(void)
{
    char hello[GREETING] = "hello";
    struct rdma_conn_param param = {
        .private_data = hello,
        .private_data_len = sizeof hello / 2,
        .responder_resources = 1,
        .initiator_depth = 1,
        .retry_count = 6,
        .rnr_retry_count = 6,
    };
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;
    enum rdma_cm_event_type kind;

    check(rdma_get_cm_event(events, &event) == 0, "rdma_get_cm_event");
    kind = event->event;
    id = event->id;
    check(rdma_ack_cm_event(event) == 0, "rdma_ack_cm_event");
    switch (kind) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
        check(rdma_resolve_route(id, LIMIT_MS) == 0, "rdma_resolve_route");
        break;
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
        make_queue_pair(id);
        check(rdma_connect(id, &param) == 0, "rdma_connect");
        break;
    case RDMA_CM_EVENT_CONNECT_REQUEST:
        make_queue_pair(id);
        check(rdma_accept(id, &param) == 0, "rdma_accept");
        break;
    case RDMA_CM_EVENT_ESTABLISHED:
        connections[established++] = id;
        if (!server)
            greet(id);
        break;
    case RDMA_CM_EVENT_DISCONNECTED:
        told = 1;
        break;
    default:
        fprintf(stderr, "%s came\n", rdma_event_str(kind));
        exit(1);
    }
}

static void poll_queue(void)
{
    struct frame frame;
    struct slot *slot;
    struct ibv_wc wc;

    while (ibv_poll_cq(cq, 1, &wc) > 0) {
        check(wc.status == IBV_WC_SUCCESS || told, "completion");
        if (wc.opcode != IBV_WC_RECV || wc.status != IBV_WC_SUCCESS)
            continue;
        heard++;
        slot = (struct slot *)(uintptr_t)wc.wr_id;
        memcpy(&frame, (void *)(uintptr_t)slot->piece.addr, sizeof(frame));
        post_receive(slot);
        if (frame.kind == '?')
            say(slot->id, '!');
        else
            spent_there = frame.spent;
    }
}

static void on_completions(void)
{
    struct ibv_cq *which;
    void *context;

    check(ibv_get_cq_event(completions, &which, &context) == 0, "ibv_get_cq_event");
    ibv_ack_cq_events(cq, 1);
    check(ibv_req_notify_cq(cq, 1) == 0, "ibv_req_notify_cq");
    poll_queue();
}

/* Sleep, and take what there is; whether the timer was among it. */
static int turn(int timer)
{
    struct pollfd ready[] = {{.fd = events->fd, .events = POLLIN},
                             {.fd = completions ? completions->fd : -1, .events = POLLIN},
                             {.fd = timer, .events = POLLIN}};
    uint64_t expired;

    check(poll(ready, 3, -1) > 0, "poll");
    if (ready[0].revents)
        on_event();
    if (ready[1].revents)
        on_completions();
    return ready[2].revents && read(timer, &expired, sizeof(expired)) > 0;
}

/* Until so many words were heard. */
static void serve(int words)
{
    while (heard < words || established < many)
        turn(-1);
}

/* The processor time of both processes. */
static double spent(void)
{
    int before = heard;

    say(connections[0], '?');
    while (heard == before)
        turn(-1);
    return seconds(CLOCK_PROCESS_CPUTIME_ID) + spent_there;
}

/* Ask on all connections, again and again; microseconds of processor time a second. */
static double idle(const char *way)
{
    int together = strcmp(way, "together") == 0, adapter = strcmp(way, "adapter") == 0;
    int ticks = together ? 1 : TICKS, timer = timerfd_create(CLOCK_MONOTONIC, 0);
    long step_ns = QUESTION_S * 1000000000L / ticks;
    struct timespec step = {step_ns / 1000000000, step_ns % 1000000000};
    struct itimerspec every = {step, step};
    double begun;

    check(timer >= 0 && timerfd_settime(timer, 0, &every, NULL) == 0, "timerfd");
    begun = spent();
    for (int tick = 0; tick < IDLE_S / QUESTION_S * ticks; tick++) {
        while (!turn(timer))
            ;
        poll_queue(); /* what has ended without an event */
        for (int i = tick % ticks; i < many; i += ticks) {
            if (adapter)
                post(connections[i], IBV_WR_RDMA_WRITE, NULL, 0);
            else
                say(connections[i], '?');
        }
    }
    return (spent() - begun) / IDLE_S * 1e6;
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    struct sockaddr *address = (struct sockaddr *)&at;
    struct rdma_cm_id *id;
    double begun, took;

    if (argc != 6 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
        return 2;
    at.sin_port = htons(atoi(argv[3]));
    many = atoi(argv[4]);
    server = strcmp(argv[1], "server") == 0;
    if (strcmp(argv[5], "defaults") == 0)
        sizes = defaults;
    else if (strcmp(argv[5], "pool") == 0)
        sizes = pool;
    connections = calloc(many, sizeof(*connections));
    events = rdma_create_event_channel();
    check(connections && events, "rdma_create_event_channel");
    begun = seconds(CLOCK_MONOTONIC);
    for (int i = 0; i < (server ? 1 : many); i++) {
        check(rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0, "rdma_create_id");
        if (!server)
            check(rdma_resolve_addr(id, NULL, address, LIMIT_MS) == 0, "rdma_resolve_addr");
    }
    if (server) {
        check(rdma_bind_addr(id, address) == 0, "rdma_bind_addr");
        check(rdma_listen(id, many) == 0, "rdma_listen");
        serve(many);
        /* The client hears that all are there. */
        greet(connections[many - 1]);
        while (!told)
            turn(-1);
        return 0;
    }
    serve(1);
    took = seconds(CLOCK_MONOTONIC) - begun;
    printf("{\"connections a second\": %.3f", many / took);
    if (strcmp(argv[5], "only") != 0 && sizes.slot == SIZE)
        printf(", \"us/s\": %.3f", idle(argv[5]));
    printf("}\n");
    check(rdma_disconnect(connections[many - 1]) == 0, "rdma_disconnect");
    return 0;
}
