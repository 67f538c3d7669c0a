/*
 * The messages of a connection: what most of them need, without Python.
 *
 * endpoint/{sender,receiver,window}.py have the protocol, all of it.  This file has its plain cases
 * once more, on the same state (struct aio_message_state, which both sides change): a data message
 * that comes in good order, a send that has succeeded, a message for which there is room, a receive
 * that is posted again.  Whatever is not plain is refused before anything was changed, and Python
 * does it.  tests/unit/core/test_message_state.py drives both with the same input and compares.
 *
 * Operations, which are the READs, WRITEs and atomics of the program, have no protocol: here they
 * are posted, and their ends noted.
 *
 * Every send asks for a completion, which costs little as long as it wakes no task: the queue is
 * armed for solicited completions, which the peer's messages are, and a send is not.
 */

#include "protocol.h"

static uint32_t aio_read32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return ntohl(value);
}

static void aio_write32(uint8_t *at, uint32_t value)
{
    value = htonl(value);
    memcpy(at, &value, sizeof(value));
}

static uint32_t aio_slots_key(const struct aio_slots *slots, uint32_t slot)
{
    return slot < slots->base ? slots->key : slots->keys[(slot - slots->base) / slots->step];
}

static uint64_t aio_slots_addr(const struct aio_slots *slots, uint32_t slot)
{
    return slots->addr + (uint64_t)slot * slots->stride;
}

/* Whether no free slot has to leave, for others of the pool; Python sees to those. */
static int aio_slots_stay(const struct aio_message_state *m, const struct aio_slots *slots)
{
    return !slots->more || !(slots->leaving || *m->crowded);
}

/* Receives for data whose credit the peer does not have yet. */
static int64_t aio_message_owed(const struct aio_message_state *m)
{
    return m->posted - m->control - m->unused;
}

/* Credits that the peer is owed and that go with the frame that is about to be sent. */
static uint32_t aio_message_take_owed(struct aio_message_state *m)
{
    int64_t owed = aio_message_owed(m);

    if (owed <= 0)
        return 0;
    if (owed > 0xFFFF)
        owed = 0xFFFF;
    m->granted += owed;
    m->unused += owed;
    return (uint32_t)owed;
}

/*
 * Send a message from a free slot.  0; -1: Python has to do it, nothing has changed; else a
 * positive errno.
 */
int aio_message_send(struct aio_message_state *m, const void *data, uint64_t length)
{
    uint32_t slot, size;
    uint64_t addr;
    uint8_t *at;

    if (!m->qp || m->blocked || m->credits <= 0 || !m->n_free || length > m->eager_size)
        return -1;
    slot = m->free[--m->n_free];
    m->credits--;
    addr = aio_slots_addr(&m->send, slot);
    at = (uint8_t *)(uintptr_t)addr;
    size = (uint32_t)length;
    if (!m->raw) {
        uint32_t owed = aio_message_take_owed(m);

        at[0] = AIO_FRAME_DATA;
        at[1] = 0;
        at[2] = (uint8_t)(owed >> 8);
        at[3] = (uint8_t)owed;
        aio_write32(at + 4, 0);
        aio_write32(at + 8, 0);
        aio_write32(at + 12, size);
        at += AIO_FRAME_SIZE;
        size += AIO_FRAME_SIZE;
    }
    memcpy(at, data, length);
    m->sent++;
    m->messages_sent++;
    m->bytes_sent += length;
    return aio_message_post(m, slot, addr, size, aio_slots_key(&m->send, slot), 0, 0);
}

static int aio_message_take_sent(struct aio_message_state *m, uint32_t slot)
{
    /* Python complains of a slot that completes twice; a forked child may bring that about. */
    if (m->want & AIO_WANT_SENT || slot >= m->data_slots || m->n_free >= m->data_slots ||
        !aio_slots_stay(m, &m->send))
        return 0;
    m->free[m->n_free++] = (uint16_t)slot;
    m->completed++;
    return 1;
}

static void aio_message_arrived(struct aio_message_state *m, uint32_t slot, uint32_t length,
                                int has_imm, uint32_t imm)
{
    m->arrivals[m->tail++ & m->arrival_mask] =
        (struct aio_arrival){.length = length, .imm = imm, .slot = slot, .has_imm = has_imm};
    m->posted--;
    m->receives--;
    m->heard = 1;
    if (m->want & AIO_EVENT_ARRIVED)
        m->base.events |= AIO_EVENT_ARRIVED;
}

static int aio_message_take_frame(struct aio_message_state *m, uint32_t slot,
                                  const struct ibv_wc *wc)
{
    const uint8_t *at = (const uint8_t *)(uintptr_t)aio_slots_addr(&m->recv, slot);
    uint32_t returned, body;

    if (wc->byte_len < AIO_FRAME_SIZE || at[0] != AIO_FRAME_DATA || m->unused <= 0)
        return 0;
    returned = (uint32_t)at[2] << 8 | at[3];
    body = wc->byte_len - AIO_FRAME_SIZE;
    if (aio_read32(at + 8) || aio_read32(at + 12) != body || (returned && m->blocked))
        return 0;
    m->credits += returned;
    m->unused--;
    aio_message_arrived(m, slot, body, at[1] & AIO_FRAME_HAS_IMM, aio_read32(at + 4));
    return 1;
}

/* At the end everything that is posted comes back, and nobody wants to hear of each. */
static int aio_message_take_flushed(struct aio_message_state *m, uint32_t sub,
                                    const struct ibv_wc *wc)
{
    if (!m->flushing || wc->status != IBV_WC_WR_FLUSH_ERR)
        return 0;
    if (sub & AIO_SUB_RECV)
        m->receives--;
    else if (sub < AIO_SUB_READ)
        m->completed++;
    else
        return 0;
    if (m->receives + (int64_t)(m->sent - m->completed) + m->operating <= 0)
        m->base.events |= AIO_EVENT_IDLE;
    return 1;
}

static int aio_message_take(struct aio_state *state, const struct ibv_wc *wc)
{
    struct aio_message_state *m = (struct aio_message_state *)state;
    uint32_t sub = AIO_SUB(wc->wr_id);

    if (m->closed)
        return 0;
    if (wc->status != IBV_WC_SUCCESS)
        return aio_message_take_flushed(m, sub, wc);
    if (!(sub & AIO_SUB_RECV)) {
        if (sub < AIO_SUB_READ)
            return aio_message_take_sent(m, sub);
        if (sub < AIO_SUB_OPERATE)
            return 0;
        m->operations_done[m->done_tail++ & m->done_mask] = (uint16_t)(sub - AIO_SUB_OPERATE);
        m->base.events |= AIO_EVENT_OPERATED;
        return 1;
    }
    if (wc->opcode != IBV_WC_RECV || m->tail - m->head > m->arrival_mask)
        return 0;
    if (!m->raw)
        return aio_message_take_frame(m, sub & ~AIO_SUB_RECV, wc);
    aio_message_arrived(m, sub & ~AIO_SUB_RECV, wc->byte_len, (wc->wc_flags & IBV_WC_WITH_IMM) != 0,
                        ntohl(wc->imm_data));
    return 1;
}

/* Fit what follows from the data messages for which there are receive slots. */
void aio_message_size(struct aio_message_state *m, int64_t window)
{
    m->half = (uint32_t)(window / 2);
    m->due = window > 1 ? (window + 1) / 2 : 1;
    m->chain = window < 16 ? 1 : window > 8 * AIO_CHAIN ? AIO_CHAIN : (uint32_t)(window / 8);
}

/* The arrays and the sizes that are configuration's are there already. */
void aio_message_init(struct aio_message_state *m, uint32_t sends, uint32_t receives)
{
    m->base.take = aio_message_take;
    for (uint32_t i = 0; i < sends; i++)
        m->free[i] = (uint16_t)i;
    m->n_free = sends;
    m->posted = receives;
    m->unused = m->granted = (int64_t)receives - m->control;
    aio_message_size(m, m->unused);
}

/*
 * Post what a send slot holds.  0 or a positive errno.
 *
 * The adapter's immediate goes with messages of connections without frames.
 */
int aio_message_post(struct aio_message_state *m, uint32_t slot, uint64_t addr, uint32_t length,
                     uint32_t key, int has_imm, uint32_t imm)
{
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = key};
    struct ibv_send_wr wr = {
        .wr_id = m->base.id | (uint64_t)slot << AIO_SUB_SHIFT,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
        .send_flags = m->send_flags | (length <= m->inline_size ? IBV_SEND_INLINE : 0),
        .imm_data = htonl(imm),
    };
    struct ibv_send_wr *bad = NULL;

    return ibv_post_send(m->qp, &wr, &bad);
}

/* RDMA READ a piece of a large message.  0 or a positive errno. */
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

    return ibv_post_send(m->qp, &wr, &bad);
}

/* Post an operation.  0 or a positive errno. */
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
    int code;

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
    code = ibv_post_send(m->qp, &wr, &bad);
    if (!code)
        m->operating++;
    return code;
}

/*
 * The next message that has arrived: its slot, its length from bit 16 on, and bit 48 if it has an
 * immediate, which is then in m->imm.  -1 if there is none; from then on an arrival is news.
 */
int64_t aio_message_next(struct aio_message_state *m)
{
    const struct aio_arrival *arrival;

    if (m->head == m->tail) {
        m->want |= AIO_EVENT_ARRIVED;
        return -1;
    }
    arrival = &m->arrivals[m->head++ & m->arrival_mask];
    m->imm = arrival->imm;
    m->messages_received++;
    m->bytes_received += arrival->length;
    return (int64_t)arrival->has_imm << 48 | (int64_t)arrival->length << 16 | arrival->slot;
}

/*
 * Post receive slots of one registration; without `slots` the first `count`.  0 or a positive
 * errno.
 */
int aio_message_receive(struct aio_message_state *m, const uint16_t *slots, uint32_t count,
                        uint32_t key)
{
    struct ibv_sge sge[AIO_RECV_CHAIN];
    struct ibv_recv_wr wr[AIO_RECV_CHAIN], *bad = NULL;
    int code = 0;

    for (uint32_t first = 0; first < count && !code; first += AIO_RECV_CHAIN) {
        uint32_t n = count - first < AIO_RECV_CHAIN ? count - first : AIO_RECV_CHAIN;

        for (uint32_t i = 0; i < n; i++) {
            uint32_t slot = slots ? slots[first + i] : first + i;

            sge[i].addr = aio_slots_addr(&m->recv, slot);
            sge[i].length = m->recv.stride;
            sge[i].lkey = key;
            wr[i].wr_id = m->base.id | (uint64_t)(AIO_SUB_RECV | slot) << AIO_SUB_SHIFT;
            wr[i].sg_list = &sge[i];
            wr[i].num_sge = 1;
            wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
        }
        code = ibv_post_recv(m->qp, wr, &bad);
    }
    m->receives += count;
    return code;
}

/* Post the receive slots that are free, those of one registration in one chain. */
static int aio_message_post_back(struct aio_message_state *m)
{
    const struct aio_slots *slots = &m->recv;
    uint32_t n = m->n_back, end;
    int code = 0;

    for (uint32_t i = 0; i < n && !code; i = end) {
        uint32_t key = aio_slots_key(slots, m->back[i]);

        for (end = i + 1; end < n && aio_slots_key(slots, m->back[end]) == key; end++)
            ;
        code = aio_message_receive(m, m->back + i, end - i, key);
    }
    m->posted += n;
    m->n_back = 0;
    return code;
}

/* Whether a CREDIT frame may be worth sending; see endpoint/window.py. */
static int aio_message_due(const struct aio_message_state *m)
{
    return !m->raw && aio_message_owed(m) >= m->due && (m->due > 1 || m->unused <= 0);
}

/* A receive slot is free; it is posted again as soon as so many are. */
static int aio_message_give(struct aio_message_state *m, uint32_t slot, uint32_t together)
{
    const struct aio_slots *slots = &m->recv;
    int code;

    /* Python fits the window of a pool: it may grow when the peer has no credit left. */
    if (!m->qp || m->closed ||
        !(m->unused > 0 ? aio_slots_stay(m, slots) : slots->full && !slots->leaving))
        return -1;
    m->back[m->n_back++] = (uint16_t)slot;
    /* Not those that make half of the window with what is owed: they may be the last to come. */
    if (m->n_back < together && (m->raw || aio_message_owed(m) + m->n_back < m->due))
        return 0;
    code = aio_message_post_back(m);
    return code ? 2 + code : aio_message_due(m);
}

/*
 * The slot of a data message is free.  It is posted again with others, a few at a time; a credit is
 * owed once it is posted.  Returns 0, 1 if enough is owed for a CREDIT frame, -1 if Python has to
 * do it, or 2 + errno.
 */
int aio_message_back(struct aio_message_state *m, uint32_t slot)
{
    return aio_message_give(m, slot, m->chain);
}

/* That of a message that costs no credit: the peer counts on it, so that it is posted at once. */
int aio_message_back_now(struct aio_message_state *m, uint32_t slot)
{
    return aio_message_give(m, slot, 1);
}
