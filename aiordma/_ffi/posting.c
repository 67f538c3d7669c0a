/*
 * Posting: work requests that are built on the stack and posted in one call.
 *
 * The rules are those of glue.c.  All of these return 0 or libibverbs' positive errno.
 */

/* Post one SEND of one buffer, imm in host order.  Returns 0 or a positive errno. */
static int aio_post_send(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                         uint32_t lkey, unsigned int flags, int has_imm, uint32_t imm)
{
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};
    struct ibv_send_wr wr = {
        .wr_id = wr_id,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
        .send_flags = flags,
        .imm_data = htonl(imm),
    };
    struct ibv_send_wr *bad = NULL;

    return ibv_post_send(qp, &wr, &bad);
}

static int aio_post_rdma(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint64_t wr_id,
                         uint64_t addr, uint32_t length, uint32_t lkey, uint64_t remote_addr,
                         uint32_t rkey)
{
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};
    struct ibv_send_wr wr = {
        .wr_id = wr_id,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = opcode,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = remote_addr, .rkey = rkey},
    };
    struct ibv_send_wr *bad = NULL;

    return ibv_post_send(qp, &wr, &bad);
}

/* Post one signaled RDMA READ into one buffer.  Returns 0 or a positive errno. */
static int aio_post_read(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                         uint32_t lkey, uint64_t remote_addr, uint32_t rkey)
{
    return aio_post_rdma(qp, IBV_WR_RDMA_READ, wr_id, addr, length, lkey, remote_addr, rkey);
}

/* Post one signaled RDMA WRITE of one buffer.  Returns 0 or a positive errno. */
static int aio_post_write(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t length,
                          uint32_t lkey, uint64_t remote_addr, uint32_t rkey)
{
    return aio_post_rdma(qp, IBV_WR_RDMA_WRITE, wr_id, addr, length, lkey, remote_addr, rkey);
}

/*
 * Post a chain of receives, one for each slot of an arena: slot i lies at addr + i * stride and
 * completes as wr_id + (i << 24).  Without `slots` the first `count`.  Long runs go out in chains
 * of AIO_RECV_CHAIN.  Returns 0 or a positive errno.
 */
static int aio_post_recv_slots(struct ibv_qp *qp, uint64_t wr_id, uint64_t addr, uint32_t stride,
                               uint32_t lkey, const uint16_t *slots, int count)
{
    struct ibv_sge sge[AIO_RECV_CHAIN];
    struct ibv_recv_wr wr[AIO_RECV_CHAIN];
    struct ibv_recv_wr *bad = NULL;

    for (int first = 0; first < count; first += AIO_RECV_CHAIN) {
        int n = count - first < AIO_RECV_CHAIN ? count - first : AIO_RECV_CHAIN;
        int rc;

        for (int i = 0; i < n; i++) {
            uint64_t slot = slots ? slots[first + i] : (uint64_t)(first + i);

            sge[i].addr = addr + slot * stride;
            sge[i].length = stride;
            sge[i].lkey = lkey;
            wr[i].wr_id = wr_id + (slot << 24);
            wr[i].sg_list = &sge[i];
            wr[i].num_sge = 1;
            wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
        }
        rc = ibv_post_recv(qp, wr, &bad);
        if (rc)
            return rc;
    }
    return 0;
}

/*
 * Post a prepared list once more.  Returns 0 or a positive errno.
 *
 * Each request completes as its entry's id with the number of this execution in the sub-index
 * (bits 24 to 39), so that the caller's own ids can be changed between two executions: those of
 * the executions under way are in the history, a ring of rows of `count` ids.  The execution
 * counts even if the post fails, because the list may have been queued all the same.
 */
static int aio_execute(struct aio_prepared *p)
{
    uint64_t *history = p->history + (size_t)(p->executions & p->history_mask) * p->count;
    uint64_t number = (uint64_t)(p->executions & 0xFFFF) << 24;
    struct ibv_send_wr *bad_send = NULL;
    struct ibv_recv_wr *bad_recv = NULL;

    p->executions++;
    memcpy(history, p->caller, p->count * sizeof(*history));
    if (p->send) {
        for (uint32_t i = 0; i < p->count; i++)
            p->send[i].wr_id = p->entries[i] | number;
        return ibv_post_send(p->qp, p->send, &bad_send);
    }
    for (uint32_t i = 0; i < p->count; i++)
        p->recv[i].wr_id = p->entries[i] | number;
    return ibv_post_recv(p->qp, p->recv, &bad_recv);
}
