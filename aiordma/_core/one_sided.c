/*
 * READs, WRITEs and atomics of a connection are posted: those of the program, and the READs that
 * fetch large messages.  The completions come back to message.c.
 *
 * The queue pair is that of the messages.  So the sends of the chain are posted before: otherwise a
 * WRITE could overtake the message that the program sent before it.
 */
#include "protocol.h"

/* RDMA READ a piece of a large message. */
int aio_message_read(struct aio_message_state *m, uint32_t number, uint64_t addr, uint32_t length,
                     uint32_t lkey, uint64_t remote_addr, uint32_t rkey)
{
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};
    struct ibv_send_wr wr = {
        .wr_id = m->base.id | (uint64_t)(AIO_SUB_READ | number) << AIO_SUB_SHIFT,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = remote_addr, .rkey = rkey},
    };
    struct ibv_send_wr *bad = NULL;
    int code = aio_message_flush(m);

    return code ? code : aio_post_errno(ibv_post_send(m->qp, &wr, &bad));
}

/* Post an operation of the program. */
int aio_message_operate(struct aio_message_state *m, const struct aio_operation *operation)
{
    struct ibv_sge sge = {
        .addr = operation->addr, .length = operation->length, .lkey = operation->lkey};
    struct ibv_send_wr wr = {
        .wr_id = m->base.id | (uint64_t)(AIO_SUB_OPERATE + operation->number) << AIO_SUB_SHIFT,
        .sg_list = &sge,
        .num_sge = operation->length > 0,
        .opcode = operation->opcode,
        .send_flags = IBV_SEND_SIGNALED,
    };
    struct ibv_send_wr *bad = NULL;
    int code = aio_message_flush(m);

    if (code)
        return code;
    if (wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
        wr.wr.atomic.remote_addr = operation->remote_addr;
        wr.wr.atomic.rkey = operation->rkey;
        wr.wr.atomic.compare_add = operation->compare_add;
        wr.wr.atomic.swap = operation->swap;
    } else {
        wr.wr.rdma.remote_addr = operation->remote_addr;
        wr.wr.rdma.rkey = operation->rkey;
        if (wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
            wr.imm_data = htonl((uint32_t)operation->compare_add);
    }
    if (wr.opcode == IBV_WR_RDMA_WRITE && operation->length <= m->inline_size)
        wr.send_flags |= IBV_SEND_INLINE;
    code = aio_post_errno(ibv_post_send(m->qp, &wr, &bad));
    if (!code)
        m->operating++;
    return code;
}
