/*
 * Connections that have what the library's have, a hundred at once: connecting ROLE ADDRESS PORT.
 *
 * cmtime's have no memory and no messages.  Here each end has a protection domain, registered
 * memory of its own with all receives posted, and the client says a word on each connection, so
 * that the server may send, too.  All of a process runs on one event channel, one completion
 * channel and one completion queue.  That is what a connection of the library's costs where nothing
 * is Python. The client prints the connections a second as JSON.
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
#include <time.h>

#include "check.h"

/* Slots as those of the setting "lean" in growth.py, and those for messages without data. */
enum { MANY = 100, SIZE = 256, DEPTH = 8, CONTROL = 6, RECEIVES = DEPTH + CONTROL };
enum { ROOM = (2 * DEPTH + CONTROL) * SIZE, GREETING = 64, LIMIT_MS = 2000000000 };

static struct rdma_event_channel *events;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq;
static struct rdma_cm_id *last;
static int server, established, heard, told;

static void post_receives(struct rdma_cm_id *id, struct ibv_mr *region)
{
    struct ibv_sge piece = {(uintptr_t)region->addr, SIZE, region->lkey};
    struct ibv_recv_wr *bad, request = {.sg_list = &piece, .num_sge = 1};
    for (int i = 0; i < RECEIVES; i++, piece.addr += SIZE)
        check(ibv_post_recv(id->qp, &request, &bad) == 0, "ibv_post_recv");
}

static void make_queue_pair(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = RECEIVES,
                .max_recv_wr = RECEIVES,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = GREETING},
    };
    struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
    void *memory =
        mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    struct ibv_mr *region;

    check(pd != NULL && memory != MAP_FAILED, "memory");
    if (completions == NULL) {
        completions = ibv_create_comp_channel(id->verbs);
        check(completions, "ibv_create_comp_channel");
        cq = ibv_create_cq(id->verbs, MANY * 2 * RECEIVES, NULL, completions, 0);
        check(cq, "ibv_create_cq");
        check(ibv_req_notify_cq(cq, 1) == 0, "ibv_req_notify_cq");
    }
    attr.send_cq = attr.recv_cq = cq;
    check(rdma_create_qp(id, pd, &attr) == 0, "rdma_create_qp");
    region = ibv_reg_mr(pd, memory, ROOM, IBV_ACCESS_LOCAL_WRITE);
    check(region, "ibv_reg_mr");
    post_receives(id, region);
}

static void greet(struct rdma_cm_id *id)
{
    char word[GREETING] = "ready";
    struct ibv_sge piece = {(uintptr_t)word, sizeof word, 0};
    struct ibv_send_wr *bad,
        request = {
            .sg_list = &piece,
            .num_sge = 1,
            .opcode = IBV_WR_SEND,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE,
        };
    check(ibv_post_send(id->qp, &request, &bad) == 0, "ibv_post_send");
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
        established++;
        last = id;
        if (!server)
            greet(id);
        break;
    default:
        fprintf(stderr, "%s came\n", rdma_event_str(kind));
        exit(1);
    }
}

static void on_completions(void)
{
    struct ibv_cq *which;
    struct ibv_wc wc;
    void *context;

    check(ibv_get_cq_event(completions, &which, &context) == 0, "ibv_get_cq_event");
    ibv_ack_cq_events(cq, 1);
    check(ibv_req_notify_cq(cq, 1) == 0, "ibv_req_notify_cq");
    while (ibv_poll_cq(cq, 1, &wc) > 0) {
        check(wc.status == IBV_WC_SUCCESS, "completion");
        heard += wc.opcode == IBV_WC_RECV;
    }
}

/* Until so many words were heard. */
static void serve(int many)
{
    while (heard < many || established < MANY) {
        struct pollfd ready[2] = {{.fd = events->fd, .events = POLLIN},
                                  {.fd = completions ? completions->fd : -1, .events = POLLIN}};
        check(poll(ready, 2, -1) > 0, "poll");
        if (ready[0].revents)
            on_event();
        if (ready[1].revents)
            on_completions();
    }
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    struct sockaddr *address = (struct sockaddr *)&at;
    struct timespec begun, ended;
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;

    if (argc != 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
        return 2;
    at.sin_port = htons(atoi(argv[3]));
    server = strcmp(argv[1], "server") == 0;
    events = rdma_create_event_channel();
    check(events, "rdma_create_event_channel");
    clock_gettime(CLOCK_MONOTONIC, &begun);
    for (int i = 0; i < (server ? 1 : MANY); i++) {
        check(rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0, "rdma_create_id");
        if (!server)
            check(rdma_resolve_addr(id, NULL, address, LIMIT_MS) == 0, "rdma_resolve_addr");
    }
    if (server) {
        check(rdma_bind_addr(id, address) == 0, "rdma_bind_addr");
        check(rdma_listen(id, MANY) == 0, "rdma_listen");
        serve(MANY);
        /* The client hears that all are there. */
        greet(last);
        while (!told) {
            check(rdma_get_cm_event(events, &event) == 0, "rdma_get_cm_event");
            told = event->event == RDMA_CM_EVENT_DISCONNECTED;
            check(rdma_ack_cm_event(event) == 0, "rdma_ack_cm_event");
        }
        return 0;
    }
    serve(1);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    printf("{\"connections a second\": %.3f}\n",
           MANY / ((ended.tv_sec - begun.tv_sec) + (ended.tv_nsec - begun.tv_nsec) / 1e9));
    check(rdma_disconnect(last) == 0, "rdma_disconnect");
    return 0;
}
