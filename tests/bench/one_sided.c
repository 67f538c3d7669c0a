/*
 * RDMA READ and WRITE of 64 bytes, one after the other, event-driven: one_sided ROLE ADDRESS PORT.
 *
 * perftest has events for READ alone.  This is what its ib_read_lat -e does (post, sleep for the
 * event, arm, poll), for both operations; that its READ costs what theirs does shows that its WRITE
 * is a fair base.  The client prints the microseconds of one operation as JSON.
 */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "check.h"

enum { SIZE = 64, ROOM = 4096, WARM_UP = 100, TRIPS = 300, LIMIT_MS = 2000000000 };

struct place {
    uint64_t address;
    uint32_t key;
};

static struct rdma_event_channel *events;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq;
static struct ibv_mr *region;
static char memory[ROOM];

/* The next event has to be this one; the id that it came with, and the private data. */
static struct rdma_cm_id *expect(enum rdma_cm_event_type wanted, struct place *place)
{
    struct rdma_cm_event *event;
    struct rdma_cm_id *id;

    check(rdma_get_cm_event(events, &event) == 0, "rdma_get_cm_event");
    if (event->event != wanted) {
        fprintf(stderr, "%s came, not %s\n", rdma_event_str(event->event), rdma_event_str(wanted));
        exit(1);
    }
    if (place) {
        check(event->param.conn.private_data_len >= sizeof(*place), "private data");
        memcpy(place, event->param.conn.private_data, sizeof(*place));
    }
    id = event->id;
    check(rdma_ack_cm_event(event) == 0, "rdma_ack_cm_event");
    return id;
}

static void make_queue_pair(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16,
                .max_recv_wr = 1,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = SIZE},
    };

    completions = ibv_create_comp_channel(id->verbs);
    check(completions, "ibv_create_comp_channel");
    cq = ibv_create_cq(id->verbs, 32, NULL, completions, 0);
    check(cq, "ibv_create_cq");
    check(ibv_req_notify_cq(cq, 0) == 0, "ibv_req_notify_cq");
    attr.send_cq = attr.recv_cq = cq;
    check(rdma_create_qp(id, NULL, &attr) == 0, "rdma_create_qp");
    region = ibv_reg_mr(id->pd, memory, ROOM,
                        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE);
    check(region, "ibv_reg_mr");
}

static void wait_for_one(void)
{
    struct ibv_cq *which;
    struct ibv_wc wc;
    void *context;
    int found;

    /* An event may be left over from a completion that was polled before. */
    do {
        check(ibv_get_cq_event(completions, &which, &context) == 0, "ibv_get_cq_event");
        ibv_ack_cq_events(which, 1);
        check(ibv_req_notify_cq(which, 0) == 0, "ibv_req_notify_cq");
        found = ibv_poll_cq(cq, 1, &wc);
    } while (found == 0);
    check(found == 1 && wc.status == IBV_WC_SUCCESS, "completion");
}

static double latency(struct ibv_qp *qp, enum ibv_wr_opcode opcode, int flags, struct place at)
{
    struct ibv_sge piece = {(uintptr_t)memory, SIZE, region->lkey};
    struct ibv_send_wr *bad, request = {
                                 .sg_list = &piece,
                                 .num_sge = 1,
                                 .opcode = opcode,
                                 .send_flags = IBV_SEND_SIGNALED | flags,
                                 .wr.rdma = {at.address, at.key},
                             };
    struct timespec begun, ended;

    for (int i = 0; i < WARM_UP + TRIPS; i++) {
        if (i == WARM_UP)
            clock_gettime(CLOCK_MONOTONIC, &begun);
        check(ibv_post_send(qp, &request, &bad) == 0, "ibv_post_send");
        wait_for_one();
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    return ((ended.tv_sec - begun.tv_sec) * 1e9 + (ended.tv_nsec - begun.tv_nsec)) / 1e3 / TRIPS;
}

static void serve(struct rdma_cm_id *listener, struct sockaddr *at)
{
    struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
    struct place place;
    struct rdma_cm_id *id;

    check(rdma_bind_addr(listener, at) == 0, "rdma_bind_addr");
    check(rdma_listen(listener, 1) == 0, "rdma_listen");
    id = expect(RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
    make_queue_pair(id);
    place = (struct place){(uintptr_t)memory, region->rkey};
    param.private_data = &place;
    param.private_data_len = sizeof(place);
    check(rdma_accept(id, &param) == 0, "rdma_accept");
    expect(RDMA_CM_EVENT_ESTABLISHED, NULL);
    expect(RDMA_CM_EVENT_DISCONNECTED, NULL);
    check(rdma_disconnect(id) == 0, "rdma_disconnect");
}

static void call(struct rdma_cm_id *id, struct sockaddr *at)
{
    struct rdma_conn_param param = {
        .responder_resources = 1, .initiator_depth = 1, .retry_count = 6, .rnr_retry_count = 6};
    struct place place;
    double read, write, inlined;

    check(rdma_resolve_addr(id, NULL, at, LIMIT_MS) == 0, "rdma_resolve_addr");
    expect(RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
    check(rdma_resolve_route(id, LIMIT_MS) == 0, "rdma_resolve_route");
    expect(RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
    make_queue_pair(id);
    check(rdma_connect(id, &param) == 0, "rdma_connect");
    expect(RDMA_CM_EVENT_ESTABLISHED, &place);
    read = latency(id->qp, IBV_WR_RDMA_READ, 0, place);
    write = latency(id->qp, IBV_WR_RDMA_WRITE, 0, place);
    inlined = latency(id->qp, IBV_WR_RDMA_WRITE, IBV_SEND_INLINE, place);
    printf("{\"read us\": %.3f, \"write us\": %.3f, \"write, inline us\": %.3f}\n", read, write,
           inlined);
    check(rdma_disconnect(id) == 0, "rdma_disconnect");
    expect(RDMA_CM_EVENT_DISCONNECTED, NULL);
}

int main(int argc, char **argv)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    struct rdma_cm_id *id;

    if (argc != 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
        return 2;
    at.sin_port = htons(atoi(argv[3]));
    events = rdma_create_event_channel();
    check(events, "rdma_create_event_channel");
    check(rdma_create_id(events, &id, NULL, RDMA_PS_TCP) == 0, "rdma_create_id");
    if (strcmp(argv[1], "server") == 0)
        serve(id, (struct sockaddr *)&at);
    else
        call(id, (struct sockaddr *)&at);
    return 0;
}
