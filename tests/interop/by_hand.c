/*
 * A queue pair in C: by_hand ROLE DEVICE GID_INDEX PORT.
 *
 * The other side of by_hand.py, brought up without the connection manager.  The client calls the
 * port, the server listens there and says so.  Whatever is not as it must be ends it with a line on
 * standard error and status 1.  The numbers are those of conversation.py.
 */

#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum {
    LIMIT_S = 40,
    SIZE = 4096,
    READ = 256, READ_SIZE = 512,
    WRITE = 1024, WRITE_SIZE = 700,
    WRITE_IMM = 2048, WRITE_IMM_SIZE = 300,
    ADD = 7,
    PSN = 0x654321,
    ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
             IBV_ACCESS_REMOTE_ATOMIC,
};

static const uint64_t SWAPPED = 0x0123456789ABCDEF;
static const uint32_t IMM_WRITTEN = 0xDEADBEEF;

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            fprintf(stderr, "line %d: not so: %s (%s)\n", __LINE__, #condition,           \
                    strerror(errno));                                                     \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static FILE *in, *out; /* two, because a socket cannot be sought between a read and a write */
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *region_mr, *words_mr;
static char region[SIZE], words[SIZE], expected[SIZE];
static uint64_t their_addr;
static uint32_t their_rkey;

static uint64_t start_of(const char *role)
{
    return strcmp(role, "client") ? UINT64_MAX - 2 : 1000;
}

static const char *other(const char *role)
{
    return strcmp(role, "client") ? "client" : "server";
}

static void text(char *into, const char *role, const char *what, int size)
{
    char pattern[64];
    int length = snprintf(pattern, sizeof(pattern), "%s of the %s, ", what, role);

    for (int i = 0; i < size; i++)
        into[i] = pattern[i % length];
}

static void fresh(char *into, const char *role)
{
    uint64_t start = start_of(role);

    memset(into, 0xa5, SIZE);
    memcpy(into, &start, sizeof(start));
    text(into + READ, role, "source", READ_SIZE);
}

static int called(const char *role, int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(port)};
    socklen_t size = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one;

    CHECK(fd >= 0);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (!strcmp(role, "client")) {
        CHECK(!connect(fd, (struct sockaddr *)&at, sizeof(at)));
        return fd;
    }
    CHECK(!bind(fd, (struct sockaddr *)&at, sizeof(at)) && !listen(fd, 1));
    CHECK(!getsockname(fd, (struct sockaddr *)&at, &size));
    printf("listening %d\n", ntohs(at.sin_port));
    fflush(stdout);
    one = accept(fd, NULL, NULL);
    CHECK(one >= 0);
    close(fd);
    return one;
}

static struct ibv_context *opened(const char *name)
{
    int count;
    struct ibv_device **list = ibv_get_device_list(&count);
    struct ibv_context *context = NULL;

    CHECK(list);
    for (int i = 0; i < count; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name))
            context = ibv_open_device(list[i]);
    ibv_free_device_list(list);
    CHECK(context);
    return context;
}

static void connect_to(union ibv_gid gid, int gid_index)
{
    struct ibv_qp_attr attr = {
        .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ACCESS,
    };
    struct ibv_sge none = {.addr = (uintptr_t)words, .lkey = words_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &none, .num_sge = 1}, *bad;
    unsigned number, psn, mtu, rkey, byte;
    char hex[33];

    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
                                        IBV_QP_ACCESS_FLAGS));
    CHECK(!ibv_post_recv(qp, &wr, &bad));
    for (int i = 0; i < 16; i++)
        sprintf(hex + 2 * i, "%02x", gid.raw[i]);
    fprintf(out, "%x %x %d %s %" PRIx64 " %x\n", qp->qp_num, PSN, IBV_MTU_1024, hex,
            (uint64_t)(uintptr_t)region, region_mr->rkey);
    fflush(out);
    CHECK(fscanf(in, "%x %x %u %32s %" SCNx64 " %x", &number, &psn, &mtu, hex, &their_addr,
                 &rkey) == 6);
    their_rkey = rkey;
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = mtu < IBV_MTU_1024 ? mtu : IBV_MTU_1024,
        .dest_qp_num = number,
        .rq_psn = psn,
        .max_dest_rd_atomic = 1,
        .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1,
                    .grh = {.sgid_index = gid_index, .hop_limit = 64}},
    };
    for (int i = 0; i < 16; i++) {
        CHECK(sscanf(hex + 2 * i, "%2x", &byte) == 1);
        attr.ah_attr.grh.dgid.raw[i] = byte;
    }
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
                                        IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                        IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
    attr = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS, .sq_psn = PSN, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6,
        .max_rd_atomic = 1,
    };
    CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
                                        IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                        IBV_QP_MAX_QP_RD_ATOMIC));
}

static void say(const char *word)
{
    char theirs[16];

    fprintf(out, "%s\n", word);
    fflush(out);
    CHECK(fscanf(in, "%15s", theirs) == 1 && !strcmp(theirs, word));
}

/*
 * The next completion, which is of this opcode.  What the peer has done, once it has a request of
 * ours, may come before the completion of that request; it is kept until it is asked for.
 */
static struct ibv_wc completion(enum ibv_wc_opcode opcode)
{
    static struct ibv_wc early;
    struct ibv_wc wc;
    int found;

    if (opcode == IBV_WC_RECV_RDMA_WITH_IMM && early.opcode == opcode)
        return early;
    do {
        while (!(found = ibv_poll_cq(cq, 1, &wc)))
            usleep(100);
        CHECK(found == 1);
        CHECK(wc.status == IBV_WC_SUCCESS);
        if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM)
            early = wc;
    } while (wc.opcode != opcode && wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM);
    CHECK(wc.opcode == opcode);
    return wc;
}

static void run(struct ibv_send_wr wr, enum ibv_wc_opcode done, int size)
{
    struct ibv_sge sge = {.addr = (uintptr_t)words, .length = size, .lkey = words_mr->lkey};
    struct ibv_send_wr *bad;

    wr.sg_list = &sge;
    wr.num_sge = 1;
    wr.send_flags = IBV_SEND_SIGNALED;
    CHECK(!ibv_post_send(qp, &wr, &bad));
    completion(done);
}

static void one_sided(enum ibv_wr_opcode opcode, enum ibv_wc_opcode done, int offset, int size)
{
    run((struct ibv_send_wr){.opcode = opcode, .imm_data = htonl(IMM_WRITTEN),
                             .wr.rdma = {their_addr + offset, their_rkey}},
        done, size);
}

static uint64_t atomic(enum ibv_wr_opcode opcode, enum ibv_wc_opcode done, uint64_t number,
                       uint64_t swap)
{
    uint64_t old;

    run((struct ibv_send_wr){.opcode = opcode,
                             .wr.atomic = {their_addr, number, swap, their_rkey}},
        done, sizeof(old));
    memcpy(&old, words, sizeof(old));
    return old;
}

static void act(const char *role)
{
    const char *them = other(role);
    uint64_t start = start_of(them);

    memset(words, 0xa5, READ_SIZE);
    one_sided(IBV_WR_RDMA_READ, IBV_WC_RDMA_READ, READ, READ_SIZE);
    text(expected, them, "source", READ_SIZE);
    CHECK(!memcmp(words, expected, READ_SIZE));
    text(words, role, "write", WRITE_SIZE);
    one_sided(IBV_WR_RDMA_WRITE, IBV_WC_RDMA_WRITE, WRITE, WRITE_SIZE);
    CHECK(atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WC_FETCH_ADD, ADD, 0) == start);
    CHECK(atomic(IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WC_COMP_SWAP, start + ADD, SWAPPED) == start + ADD);
    text(words, role, "immediate", WRITE_IMM_SIZE);
    one_sided(IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WC_RDMA_WRITE, WRITE_IMM, WRITE_IMM_SIZE);
}

static void endure(const char *role)
{
    struct ibv_wc wc = completion(IBV_WC_RECV_RDMA_WITH_IMM);

    CHECK(ntohl(wc.imm_data) == IMM_WRITTEN);
    CHECK(wc.byte_len == WRITE_IMM_SIZE);
    fresh(expected, role);
    memcpy(expected, &SWAPPED, sizeof(SWAPPED));
    text(expected + WRITE, other(role), "write", WRITE_SIZE);
    text(expected + WRITE_IMM, other(role), "immediate", WRITE_IMM_SIZE);
    CHECK(!memcmp(region, expected, SIZE));
}

int main(int argc, char **argv)
{
    struct ibv_context *context;
    struct ibv_pd *pd;
    union ibv_gid gid;
    int peer;
    const char *role = argv[1];

    CHECK(argc == 5);
    alarm(LIMIT_S);
    context = opened(argv[2]);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, 32, NULL, NULL, 0);
    CHECK(pd && cq);
    qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
                               .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
                               .cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1,
                                       .max_recv_sge = 1}});
    fresh(region, role);
    region_mr = ibv_reg_mr(pd, region, SIZE, ACCESS);
    words_mr = ibv_reg_mr(pd, words, SIZE, ACCESS);
    CHECK(qp && region_mr && words_mr);
    CHECK(!ibv_query_gid(context, 1, atoi(argv[3]), &gid));
    peer = called(role, atoi(argv[4]));
    in = fdopen(peer, "r");
    out = fdopen(dup(peer), "w");
    CHECK(in && out);
    connect_to(gid, atoi(argv[3]));
    say("ready");
    if (!strcmp(role, "client")) {
        act(role);
        endure(role);
    } else {
        endure(role);
        act(role);
    }
    say("done");
    CHECK(!ibv_destroy_qp(qp) && !ibv_dereg_mr(region_mr) && !ibv_dereg_mr(words_mr));
    CHECK(!ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
    puts("all as it must be");
    return 0;
}
