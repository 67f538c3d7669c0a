/*
 * The message lane: what most messages of a connection need, without Python.
 *
 * endpoint/{sender,receiver,window}.py have the protocol, all of it.  This file has its plain cases
 * once more, on the same state (struct aio_lane, which both sides change): a data message that
 * comes in good order, a send that has succeeded, a message for which there is room, a receive
 * that is posted again.  Whatever is not plain is refused before anything was changed, and Python
 * does it.  tests/unit/test_message_lane.py drives both with the same input and compares.
 *
 * Operations, which are the READs, WRITEs and atomics of the program, have no protocol: here they
 * are posted, and their ends noted.
 *
 * Every send asks for a completion, which costs little as long as it wakes nobody: the queue is
 * armed for solicited completions, which the peer's messages are, and a send is not.
 */

/* The header of a frame; see endpoint/wire.py and docs/wire.md. */
#define AIO_FRAME_SIZE    16
#define AIO_FRAME_DATA    1
#define AIO_FRAME_HAS_IMM 1

#define AIO_CHAIN         8 /* receives that are posted together, at most */

#define AIO_LANE_RECV     0x8000
#define AIO_LANE_READ     0x4000 /* of a large message */
#define AIO_LANE_OPERATE  0x5000

/* aio_lane.want; the first is the news, too.  See endpoint/lane.py. */
#define AIO_WANT_ARRIVAL  1
#define AIO_WANT_SENT     2
#define AIO_NEWS_OPERATED 4
#define AIO_NEWS_IDLE     8 /* while it is flushing: the adapter has nothing any more */

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
static int aio_slots_stay(const struct aio_lane *lane, const struct aio_slots *slots)
{
    return !slots->more || !(slots->leaving || *lane->crowded);
}

/* Receives for data whose credit the peer does not have yet. */
static int64_t aio_lane_owed(const struct aio_lane *lane)
{
    return lane->posted - lane->control - lane->unused;
}

/* Credits that the peer is owed and that go with the frame that is about to be sent. */
static uint32_t aio_lane_take_owed(struct aio_lane *lane)
{
    int64_t owed = aio_lane_owed(lane);

    if (owed <= 0)
        return 0;
    if (owed > 0xFFFF)
        owed = 0xFFFF;
    lane->granted += owed;
    lane->unused += owed;
    return (uint32_t)owed;
}

/*
 * Send a message from a free slot.  0; -1: Python has to do it, nothing has changed; else a
 * positive errno.
 */
static int aio_lane_send(struct aio_lane *lane, const void *data, uint64_t length)
{
    uint32_t slot, size;
    uint64_t addr;
    uint8_t *at;

    if (!lane->qp || lane->blocked || lane->credits <= 0 || !lane->n_free ||
        length > lane->eager_size)
        return -1;
    slot = lane->free[--lane->n_free];
    lane->credits--;
    addr = aio_slots_addr(&lane->send, slot);
    at = (uint8_t *)(uintptr_t)addr;
    size = (uint32_t)length;
    if (!lane->raw) {
        uint32_t owed = aio_lane_take_owed(lane);

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
    lane->sent++;
    lane->messages_sent++;
    lane->bytes_sent += length;
    return aio_post_send(lane->qp, lane->sink.id | (uint64_t)slot << AIO_SUB_SHIFT, addr, size,
                         aio_slots_key(&lane->send, slot),
                         lane->send_flags | (size <= lane->inline_size ? IBV_SEND_INLINE : 0), 0,
                         0);
}

static int aio_lane_take_sent(struct aio_lane *lane, uint32_t slot)
{
    if (lane->want & AIO_WANT_SENT || slot >= lane->data_slots ||
        !aio_slots_stay(lane, &lane->send))
        return 0;
    lane->free[lane->n_free++] = (uint16_t)slot;
    lane->completed++;
    return 1;
}

static void aio_lane_arrived(struct aio_lane *lane, uint32_t slot, uint32_t length, int has_imm,
                             uint32_t imm)
{
    lane->arrivals[lane->tail++ & lane->arrival_mask] =
        (struct aio_arrival){.length = length, .imm = imm, .slot = slot, .has_imm = has_imm};
    lane->posted--;
    lane->receives--;
    lane->heard = 1;
    if (lane->want & AIO_WANT_ARRIVAL)
        lane->sink.news |= AIO_WANT_ARRIVAL;
}

static int aio_lane_take_frame(struct aio_lane *lane, uint32_t slot, const struct ibv_wc *wc)
{
    const uint8_t *at = (const uint8_t *)(uintptr_t)aio_slots_addr(&lane->recv, slot);
    uint32_t returned, body;

    if (wc->byte_len < AIO_FRAME_SIZE || at[0] != AIO_FRAME_DATA || lane->unused <= 0)
        return 0;
    returned = (uint32_t)at[2] << 8 | at[3];
    body = wc->byte_len - AIO_FRAME_SIZE;
    if (aio_read32(at + 8) || aio_read32(at + 12) != body || (returned && lane->blocked))
        return 0;
    lane->credits += returned;
    lane->unused--;
    aio_lane_arrived(lane, slot, body, at[1] & AIO_FRAME_HAS_IMM, aio_read32(at + 4));
    return 1;
}

/* At the end everything that is posted comes back, and nobody wants to hear of each. */
static int aio_lane_take_flushed(struct aio_lane *lane, uint32_t sub, const struct ibv_wc *wc)
{
    if (!lane->flushing || wc->status != IBV_WC_WR_FLUSH_ERR)
        return 0;
    if (sub & AIO_LANE_RECV)
        lane->receives--;
    else if (sub < AIO_LANE_READ)
        lane->completed++;
    else
        return 0;
    if (lane->receives + (int64_t)(lane->sent - lane->completed) + lane->operating <= 0)
        lane->sink.news |= AIO_NEWS_IDLE;
    return 1;
}

static int aio_lane_take(struct aio_sink *sink, const struct ibv_wc *wc)
{
    struct aio_lane *lane = (struct aio_lane *)sink;
    uint32_t sub = AIO_SUB(wc->wr_id);

    if (lane->closed)
        return 0;
    if (wc->status != IBV_WC_SUCCESS)
        return aio_lane_take_flushed(lane, sub, wc);
    if (!(sub & AIO_LANE_RECV)) {
        if (sub < AIO_LANE_READ)
            return aio_lane_take_sent(lane, sub);
        if (sub < AIO_LANE_OPERATE)
            return 0;
        lane->operations_done[lane->done_tail++ & lane->done_mask] =
            (uint16_t)(sub - AIO_LANE_OPERATE);
        lane->sink.news |= AIO_NEWS_OPERATED;
        return 1;
    }
    if (wc->opcode != IBV_WC_RECV || lane->tail - lane->head > lane->arrival_mask)
        return 0;
    if (!lane->raw)
        return aio_lane_take_frame(lane, sub & ~AIO_LANE_RECV, wc);
    aio_lane_arrived(lane, sub & ~AIO_LANE_RECV, wc->byte_len,
                     (wc->wc_flags & IBV_WC_WITH_IMM) != 0, ntohl(wc->imm_data));
    return 1;
}

/* Fit what follows from the data messages for which there are receive slots. */
static void aio_lane_size(struct aio_lane *lane, int64_t window)
{
    lane->half = (uint32_t)(window / 2);
    lane->due = window > 1 ? (window + 1) / 2 : 1;
    lane->chain = window < 16 ? 1 : window > 8 * AIO_CHAIN ? AIO_CHAIN : (uint32_t)(window / 8);
}

/* What endpoint/lane.py says; the arrays are its own. */
static void aio_lane_init(struct aio_lane *lane, uint16_t *free, uint32_t sends,
                          uint32_t data_slots, struct aio_arrival *arrivals, uint32_t n_arrivals,
                          uint32_t receives, uint32_t control, int raw)
{
    lane->sink.take = aio_lane_take;
    lane->free = free;
    for (uint32_t i = 0; i < sends; i++)
        free[i] = (uint16_t)i;
    lane->n_free = sends;
    lane->data_slots = data_slots;
    lane->arrivals = arrivals;
    lane->arrival_mask = n_arrivals - 1;
    lane->control = control;
    lane->posted = receives;
    lane->unused = lane->granted = (int64_t)receives - control;
    lane->raw = !!raw;
    aio_lane_size(lane, lane->unused);
}

static void aio_lane_bind(struct aio_lane *lane, struct ibv_qp *qp, uint32_t flags,
                          uint32_t inline_size, uint64_t send_addr, uint32_t send_stride,
                          uint32_t send_key, uint32_t send_count, uint64_t recv_addr,
                          uint32_t recv_stride, uint32_t recv_key, uint32_t recv_count)
{
    lane->qp = qp;
    lane->send_flags = flags;
    lane->inline_size = inline_size;
    lane->send = (struct aio_slots){
        .addr = send_addr, .stride = send_stride, .key = send_key, .base = send_count, .full = 1};
    lane->recv = (struct aio_slots){
        .addr = recv_addr, .stride = recv_stride, .key = recv_key, .base = recv_count, .full = 1};
}

/* Post an operation.  0 or a positive errno. */
static int aio_lane_operate(struct aio_lane *lane, const struct aio_operation *operation)
{
    struct ibv_sge sge = {
        .addr = operation->addr, .length = operation->length, .lkey = operation->lkey};
    struct ibv_send_wr wr = {
        .wr_id = lane->sink.id | (uint64_t)(AIO_LANE_OPERATE + operation->number) << AIO_SUB_SHIFT,
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
    if (wr.opcode == IBV_WR_RDMA_WRITE && operation->length <= lane->inline_size)
        wr.send_flags |= IBV_SEND_INLINE;
    code = ibv_post_send(lane->qp, &wr, &bad);
    if (!code)
        lane->operating++;
    return code;
}

/*
 * The next message that has arrived: its slot, its length from bit 16 on, and bit 48 if it has an
 * immediate, which is then in lane->imm.  -1 if there is none; from then on an arrival is news.
 */
static int64_t aio_lane_next(struct aio_lane *lane)
{
    const struct aio_arrival *arrival;

    if (lane->head == lane->tail) {
        lane->want |= AIO_WANT_ARRIVAL;
        return -1;
    }
    arrival = &lane->arrivals[lane->head++ & lane->arrival_mask];
    lane->imm = arrival->imm;
    lane->messages_received++;
    lane->bytes_received += arrival->length;
    return (int64_t)arrival->has_imm << 48 | (int64_t)arrival->length << 16 | arrival->slot;
}

/* Post the receive slots that are free, those of one registration in one chain. */
static int aio_lane_post_back(struct aio_lane *lane)
{
    const uint64_t wr_id = lane->sink.id | (uint64_t)AIO_LANE_RECV << AIO_SUB_SHIFT;
    const struct aio_slots *slots = &lane->recv;
    uint32_t n = lane->n_back, end;
    int code = 0;

    for (uint32_t i = 0; i < n && !code; i = end) {
        uint32_t key = aio_slots_key(slots, lane->back[i]);

        for (end = i + 1; end < n && aio_slots_key(slots, lane->back[end]) == key; end++)
            ;
        code = aio_post_slots(lane->qp, NULL, wr_id, slots->addr, slots->stride, key,
                              lane->back + i, (int)(end - i));
    }
    lane->posted += n;
    lane->receives += n;
    lane->n_back = 0;
    return code;
}

/* Whether a CREDIT frame may be worth sending; see endpoint/window.py. */
static int aio_lane_due(const struct aio_lane *lane)
{
    return !lane->raw && aio_lane_owed(lane) >= lane->due && (lane->due > 1 || lane->unused <= 0);
}

/* A receive slot is free; it is posted again as soon as so many are. */
static int aio_lane_give(struct aio_lane *lane, uint32_t slot, uint32_t together)
{
    const struct aio_slots *slots = &lane->recv;
    int code;

    /* Python fits the window of a pool: it may grow when the peer has no credit left. */
    if (!lane->qp || lane->closed ||
        !(lane->unused > 0 ? aio_slots_stay(lane, slots) : slots->full && !slots->leaving))
        return -1;
    lane->back[lane->n_back++] = (uint16_t)slot;
    /* Not those that make half of the window with what is owed: they may be the last to come. */
    if (lane->n_back < together && (lane->raw || aio_lane_owed(lane) + lane->n_back < lane->due))
        return 0;
    code = aio_lane_post_back(lane);
    return code ? 2 + code : aio_lane_due(lane);
}

/*
 * The slot of a data message is free.  It is posted again with others, a few at a time; a credit is
 * owed once it is posted.  Returns 0, 1 if enough is owed for a CREDIT frame, -1 if Python has to
 * do it, or 2 + errno.
 */
static int aio_lane_back(struct aio_lane *lane, uint32_t slot)
{
    return aio_lane_give(lane, slot, lane->chain);
}

/* That of a message that costs no credit: the peer counts on it, so that it is posted at once. */
static int aio_lane_back_now(struct aio_lane *lane, uint32_t slot)
{
    return aio_lane_give(lane, slot, 1);
}
