/* What the C programs of this folder share: two connected ends of rdma_cm in one process. */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define ADDRESS "10.80.0.1"

#define MUST(call)                                                                                 \
    do {                                                                                           \
        errno = 0;                                                                                 \
        if (!(call)) {                                                                             \
            printf("%s: errno %d (%s)\n", #call, errno, strerror(errno));                          \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

struct pair {
    struct rdma_cm_id *listener, *client, *server;
    struct rdma_event_channel *at_client, *at_server;
};

static inline double now(void)
{
    struct timespec at;

    clock_gettime(CLOCK_MONOTONIC, &at);
    return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static inline struct sockaddr *place(const char *address, int port)
{
    static struct sockaddr_in each[4];
    static int next;
    struct sockaddr_in *at = &each[next++ % 4];

    at->sin_family = AF_INET;
    at->sin_port = htons((uint16_t)port);
    MUST(inet_pton(AF_INET, address, &at->sin_addr) == 1);
    return (struct sockaddr *)at;
}

/* Waits for the event, and prints and exits if another comes. */
static inline struct rdma_cm_event *expect(struct rdma_event_channel *at,
                                           enum rdma_cm_event_type type)
{
    struct rdma_cm_event *event;

    MUST(!rdma_get_cm_event(at, &event));
    if (event->event != type) {
        printf("event %s, status %d\n", rdma_event_str(event->event), event->status);
        exit(1);
    }
    return event;
}

static inline void wait_for(struct rdma_event_channel *at, enum rdma_cm_event_type type)
{
    MUST(!rdma_ack_cm_event(expect(at, type)));
}

/* 16 sends, 16 receives of one piece each, and a completion queue for both. */
static inline void make_qp(struct rdma_cm_id *id)
{
    struct ibv_qp_init_attr asked = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
    };

    MUST(asked.send_cq = asked.recv_cq = ibv_create_cq(id->verbs, 64, NULL, NULL, 0));
    MUST(!rdma_create_qp(id, NULL, &asked));
}

static inline struct rdma_cm_id *new_id(struct rdma_event_channel *at)
{
    struct rdma_cm_id *id;

    MUST(!rdma_create_id(at, &id, NULL, RDMA_PS_TCP));
    return id;
}

static inline struct rdma_cm_id *listening(struct rdma_event_channel *at, const char *address,
                                           int port)
{
    struct rdma_cm_id *id = new_id(at);

    MUST(!rdma_bind_addr(id, place(address, port)));
    MUST(!rdma_listen(id, 8));
    return id;
}

/* An id that has found the way to the address. */
static inline struct rdma_cm_id *resolved(struct rdma_event_channel *at, const char *address,
                                          int port)
{
    struct rdma_cm_id *id = new_id(at);

    MUST(!rdma_resolve_addr(id, NULL, place(address, port), 5000));
    wait_for(at, RDMA_CM_EVENT_ADDR_RESOLVED);
    MUST(!rdma_resolve_route(id, 5000));
    wait_for(at, RDMA_CM_EVENT_ROUTE_RESOLVED);
    return id;
}

/* Connects two ends as the man pages have it, with 7 retries for want of a receive. */
static inline struct pair connected(void)
{
    struct rdma_conn_param param = {
        .responder_resources = 1, .initiator_depth = 1, .retry_count = 6, .rnr_retry_count = 7,
    };
    struct pair pair;
    struct rdma_cm_event *event;

    MUST(pair.at_server = rdma_create_event_channel());
    MUST(pair.at_client = rdma_create_event_channel());
    pair.listener = listening(pair.at_server, ADDRESS, 7471);
    pair.client = resolved(pair.at_client, ADDRESS, 7471);
    make_qp(pair.client);
    MUST(!rdma_connect(pair.client, &param));
    event = expect(pair.at_server, RDMA_CM_EVENT_CONNECT_REQUEST);
    pair.server = event->id;
    MUST(!rdma_ack_cm_event(event));
    make_qp(pair.server);
    MUST(!rdma_accept(pair.server, &param));
    wait_for(pair.at_client, RDMA_CM_EVENT_ESTABLISHED);
    wait_for(pair.at_server, RDMA_CM_EVENT_ESTABLISHED);
    return pair;
}

static inline struct ibv_mr *registered(struct rdma_cm_id *id, void *addr, size_t length)
{
    struct ibv_mr *mr = ibv_reg_mr(id->pd, addr, length,
                                   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                                       IBV_ACCESS_REMOTE_WRITE);

    MUST(mr);
    return mr;
}

static inline void post_recv(struct rdma_cm_id *id, struct ibv_mr *mr, uint32_t length)
{
    struct ibv_sge sge = {(uintptr_t)mr->addr, length, mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;

    MUST(!ibv_post_recv(id->qp, &wr, &bad));
}

static inline void post_send(struct rdma_cm_id *id, struct ibv_mr *mr, uint32_t length)
{
    struct ibv_sge sge = {(uintptr_t)mr->addr, length, mr->lkey};
    struct ibv_send_wr wr = {
        .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
        .send_flags = IBV_SEND_SIGNALED,
    }, *bad;

    MUST(!ibv_post_send(id->qp, &wr, &bad));
}

static inline void post_read(struct rdma_cm_id *id, struct ibv_mr *into, uint32_t length,
                             struct ibv_mr *from)
{
    struct ibv_sge sge = {(uintptr_t)into->addr, length, into->lkey};
    struct ibv_send_wr wr = {
        .wr_id = 3, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {(uintptr_t)from->addr, from->rkey},
    }, *bad;

    MUST(!ibv_post_send(id->qp, &wr, &bad));
}

/* The next completion, which has 20 seconds. */
static inline struct ibv_wc completion(struct rdma_cm_id *id)
{
    struct ibv_wc wc;
    double end = now() + 20;

    while (!ibv_poll_cq(id->qp->send_cq, 1, &wc)) {
        if (now() > end) {
            printf("no completion in 20 s\n");
            exit(1);
        }
    }
    return wc;
}

/* A number of /proc/self/status, in kB. */
static inline long status_of(const char *name)
{
    char line[256];
    long found = -1;
    FILE *file = fopen("/proc/self/status", "r");

    MUST(file);
    while (fgets(line, sizeof line, file)) {
        if (!strncmp(line, name, strlen(name)))
            found = atol(line + strlen(name) + 1);
    }
    fclose(file);
    return found;
}
