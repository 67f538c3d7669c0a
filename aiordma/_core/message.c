/*
 * The message protocol: frames in, frames out, credits and slots.  docs/wire.md specifies it.
 *
 * Owns nothing: it works on a struct aio_message_state, whose owner is a MessageState.  A
 * completion goes in (`take_completion`, which the drain calls), the state changes, events come
 * out; receives, CREDIT, PONG and the other frames without data are posted at once.  Work that
 * takes long, or waits, is Python's.
 *
 * Every send asks for a completion, which costs little as long as it wakes no task: the queue is
 * armed for solicited completions, which the peer's frames are, and a send is not.
 *
 * Functions return 0 or libibverbs' positive errno, unless they say something else.
 */
#include "protocol.h"

/* Bytes of the wire. */

static void write32(uint8_t *at, uint32_t value)
{
    value = htonl(value);
    memcpy(at, &value, sizeof(value));
}

static void write_header(uint8_t *at, uint8_t first, uint8_t flags, uint32_t credits, uint32_t imm,
                         uint64_t argument)
{
    at[0] = first;
    at[1] = flags;
    at[2] = (uint8_t)(credits >> 8);
    at[3] = (uint8_t)credits;
    write32(at + 4, imm);
    write32(at + 8, (uint32_t)(argument >> 32));
    write32(at + 12, (uint32_t)argument);
}

/*
 * The first byte of the next frame: the kind, and the number if frames have numbers.  A number is
 * 4 bits at the upper end of a byte, so that the byte wraps with it.
 */
static uint8_t first_byte(struct aio_message_state *m, enum aio_frame_kind kind)
{
    uint8_t first = (uint8_t)(m->number_out | kind);

    m->number_out += (uint8_t)(m->numbered << AIO_NUMBER_SHIFT);
    return first;
}

/* Slots. */

static void add_posted(struct aio_order *order, uint32_t slot)
{
    order->slots[order->next++ & order->mask] = (uint16_t)slot;
}

/* Take a slot whose request has completed; whether its turn was now. */
static int take_posted(struct aio_order *order, uint32_t slot)
{
    if (order->first == order->next || order->slots[order->first & order->mask] != slot)
        return 0;
    order->first++;
    return 1;
}

static uint32_t slot_key(const struct aio_slots *slots, uint32_t slot)
{
    return slot < slots->base ? slots->key : slots->keys[(slot - slots->base) / slots->step];
}

/* Whether every free slot stays. Slots that leave, for others of the pool, are Python's work. */
static int slots_stay(const struct aio_message_state *m, const struct aio_slots *slots)
{
    return !slots->more || !(slots->leaving || *m->crowded);
}

/* Credits. */

/*
 * Receives for data whose credit the peer does not have yet.
 *
 * At any time the adapter has a receive for each credit of the peer, for each credit that the peer
 * is owed, and for `control` frames without credit.  So the owed credits are the posted receives
 * without the other two.
 */
static int64_t ungranted(const struct aio_message_state *m)
{
    return m->posted - m->control - m->unused;
}

/* Forget the CREDIT frames that are known to be processed: the peer has spent what came later. */
static void forget_marks(struct aio_message_state *m)
{
    int64_t spent = m->granted - m->unused;

    while (m->n_marks && spent > m->marks[0]) {
        m->n_marks--;
        memmove(&m->marks[0], &m->marks[1], m->n_marks * sizeof(m->marks[0]));
    }
}

/*
 * Whether a CREDIT frame is due: half of the window is owed, or the window has grown.  If half is a
 * single credit, as at the beginning of a window that grows, that would be a frame for each
 * message: so the frame waits until the peer has no credit left.
 */
static int credit_is_due(struct aio_message_state *m)
{
    if (m->raw || ungranted(m) < (m->grown ? 1 : m->due) || (m->due <= 1 && m->unused > 0))
        return 0;
    forget_marks(m);
    return m->n_marks < AIO_CREDIT_FRAMES;
}

/* Credits that go with the frame that is about to be sent. */
static uint32_t grant_credits(struct aio_message_state *m, int alone)
{
    int64_t credits = ungranted(m);

    if (credits <= 0)
        return 0;
    if (credits > 0xFFFF)
        credits = 0xFFFF;
    if (alone && m->n_marks < AIO_CREDIT_FRAMES)
        m->marks[m->n_marks++] = m->granted;
    m->grown = 0;
    m->granted += credits;
    m->unused += credits;
    return (uint32_t)credits;
}

/* Landings. */

/* The flag of the frame that is about to be sent: the newest landing is free again. */
static uint8_t grant_landing(struct aio_message_state *m)
{
    struct aio_landings *landings = &m->landings;

    if (!landings->freed)
        return 0;
    landings->freed = 0;
    landings->granted |= (uint8_t)(1 << landings->newest);
    return AIO_FRAME_FREE;
}

/* Whether a message goes into the peer's landing, and not through slots. */
static int is_written(const struct aio_message_state *m, uint64_t length, int has_imm)
{
    const struct aio_stage *stage = &m->stage;

    return stage->free && !stage->busy && !has_imm && length > m->eager_size &&
           length <= stage->most && length <= stage->size &&
           length <= aio_landing_size(stage->number);
}

/* Posting. */

/* The adapter takes no sends any more: the sends of the chain have ended. */
void aio_message_drop(struct aio_message_state *m)
{
    m->flushed += m->n_unposted;
    m->n_unposted = 0;
}

/*
 * Post the sends of the chain, in their order, with one doorbell: on Soft-RoCE that is a system
 * call, and its work for each is less if there are several.  0 or an errno, which ends the
 * connection; until then the sends that were not posted stay in the chain, so that nothing is
 * posted in their place.
 */
int aio_message_flush(struct aio_message_state *m)
{
    struct ibv_sge sge[AIO_SEND_CHAIN];
    struct ibv_send_wr wr[AIO_SEND_CHAIN], *bad = NULL;
    uint32_t n = m->n_unposted, posted;
    int code;

    if (!n)
        return 0;
    if (!m->qp) { /* a forked child posts nothing of its parent's */
        aio_message_drop(m);
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct aio_unposted *send = &m->unposted[i];
        int is_data = send->slot < m->data_slots;
        int is_write = m->stage.busy && send->slot == m->stage.slot;
        const struct aio_slots *slots = is_data ? &m->send : &m->frames;
        uint32_t slot = is_data ? send->slot : send->slot - m->data_slots;

        sge[i] = is_write ? m->stage.sge
                          : (struct ibv_sge){
                                .addr = aio_slot_addr(slots, slot),
                                .length = send->length,
                                .lkey = slot_key(slots, slot),
                            };
        wr[i] = (struct ibv_send_wr){
            .wr_id = m->base.id | (uint64_t)send->slot << AIO_SUB_SHIFT,
            .next = i + 1 < n ? &wr[i + 1] : NULL,
            .sg_list = &sge[i],
            .num_sge = 1,
            .opcode = send->has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
            .send_flags = m->send_flags | (send->length <= m->inline_size ? IBV_SEND_INLINE : 0),
            .imm_data = htonl(send->imm),
        };
        if (is_write) {
            wr[i].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr[i].wr.rdma.remote_addr = m->stage.write_addr;
            wr[i].wr.rdma.rkey = m->stage.write_key;
        }
    }
    code = aio_post_errno(ibv_post_send(m->qp, wr, &bad));
    posted = code && bad ? (uint32_t)(bad - wr) : n;
    m->n_unposted -= posted;
    if (m->n_unposted)
        memmove(m->unposted, m->unposted + posted, m->n_unposted * sizeof(m->unposted[0]));
    return code;
}

/* Put the send of a slot behind the others of the chain.  0, or an errno of posting those. */
static int put_slot(struct aio_message_state *m, uint32_t slot, uint32_t length, int has_imm,
                    uint32_t imm)
{
    int code = m->n_unposted == AIO_SEND_CHAIN ? aio_message_flush(m) : 0;

    if (code)
        return code;
    m->sent++;
    add_posted(&m->sending, slot);
    m->unposted[m->n_unposted++] = (struct aio_unposted){
        .length = length, .imm = imm, .slot = (uint16_t)slot, .has_imm = (uint8_t)has_imm};
    return 0;
}

/*
 * Whether a send may wait in the chain: aio_message_flush is certain to be called, and other sends
 * are likely to come before.  A task that the drain has resumed answers message after message, and
 * the answer to the last goes at once; if it sends more than that, it sends a burst.
 */
static int may_wait(const struct aio_message_state *m)
{
    return m->n_unposted < AIO_SEND_CHAIN &&
           (m->turn_flushes || (m->delivering && (m->head != m->tail || m->in_a_row == 2)));
}

/* Put one frame without data, from a free slot, into the chain. */
static int put_control(struct aio_message_state *m, enum aio_frame_kind kind, uint8_t flags,
                       uint64_t argument)
{
    uint32_t slot = m->control_free[--m->n_control_free], credits, key = 0;
    uint8_t *at = (uint8_t *)(uintptr_t)aio_slot_addr(&m->frames, slot);
    struct aio_landings *landings = &m->landings;

    credits = grant_credits(m, kind == AIO_FRAME_CREDIT);
    if (kind == AIO_FRAME_PING && landings->offered) {
        landings->offered = landings->freed = 0;
        landings->granted |= (uint8_t)(1 << landings->newest);
        flags |= (uint8_t)(landings->newest << AIO_LANDING_SHIFT);
        argument = landings->addr[landings->newest];
        key = landings->key;
    }
    write_header(at, first_byte(m, kind), flags | grant_landing(m), credits, key, argument);
    return put_slot(m, m->data_slots + slot, AIO_FRAME_SIZE, 0, 0);
}

static int is_queued(const struct aio_dones *dones)
{
    return dones->head != dones->tail;
}

/* Whether frames without data wait for a slot. */
static int has_pending(const struct aio_message_state *m)
{
    return m->controls_pending || is_queued(&m->dones_pending);
}

/* The frames that wait at most once, in the order in which they go. */
static const enum aio_frame_kind single_frames[] = {
    AIO_FRAME_PONG, AIO_FRAME_PING, AIO_FRAME_CREDIT, AIO_FRAME_END, AIO_FRAME_ABORT};

/*
 * Send frames without data, as long as there are slots for them.  A landing is offered in a PING,
 * of which a single is unanswered at a time.
 */
static int pump(struct aio_message_state *m)
{
    int code = 0, put = 0;

    if (m->landings.offered && !m->asking) {
        m->asking = 1;
        m->controls_pending |= 1 << AIO_FRAME_PING;
    }
    while (!code && m->n_control_free && !m->dead && m->qp) {
        if (is_queued(&m->dones_pending)) {
            const struct aio_done *done =
                &m->dones_pending.items[m->dones_pending.head++ & m->dones_pending.mask];

            code = put_control(m, AIO_FRAME_DONE, done->flags, done->number);
        } else if (m->controls_pending) {
            const enum aio_frame_kind *next = single_frames;

            while (!(m->controls_pending & 1 << *next))
                next++;
            m->controls_pending &= (uint8_t)~(1 << *next);
            code = put_control(m, *next, 0, *next == AIO_FRAME_ABORT ? m->abort_reason : 0);
        } else if (credit_is_due(m)) {
            code = put_control(m, AIO_FRAME_CREDIT, 0, 0);
        } else {
            break;
        }
        put = 1;
    }
    return put && !code ? aio_message_flush(m) : code;
}

/* Post receive slots; without `slots` the first `count`, which are in the order from the start. */
int aio_message_receive(struct aio_message_state *m, const uint16_t *slots, uint32_t count)
{
    struct ibv_sge sge[AIO_RECV_CHAIN];
    struct ibv_recv_wr wr[AIO_RECV_CHAIN], *bad = NULL;
    int code = 0;

    for (uint32_t first = 0; first < count && !code; first += AIO_RECV_CHAIN) {
        uint32_t n = count - first < AIO_RECV_CHAIN ? count - first : AIO_RECV_CHAIN;

        for (uint32_t i = 0; i < n; i++) {
            uint32_t slot = slots ? slots[first + i] : first + i;

            sge[i].addr = aio_slot_addr(&m->recv, slot);
            sge[i].length = m->recv.stride;
            sge[i].lkey = slot_key(&m->recv, slot);
            wr[i].wr_id = m->base.id | (uint64_t)(AIO_SUB_RECV | slot) << AIO_SUB_SHIFT;
            wr[i].sg_list = &sge[i];
            wr[i].num_sge = 1;
            wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
            if (slots)
                add_posted(&m->receiving, slot);
        }
        code = aio_post_errno(ibv_post_recv(m->qp, wr, &bad));
    }
    m->receives += count;
    if (code && !m->error)
        m->recv_failed = 1;
    return code;
}

/* Post the receive slots that are free. */
static int post_back(struct aio_message_state *m)
{
    int code = aio_message_receive(m, m->back, m->n_back);

    m->posted += m->n_back;
    m->n_back = 0;
    return code;
}

/* A receive slot is free; it is posted again when `together` slots are free. 0 or an errno. */
static int give_slot(struct aio_message_state *m, uint32_t slot, uint32_t together)
{
    int code;

    m->back[m->n_back++] = (uint16_t)slot;
    /* Slots that complete half of the window are posted now: no further slot may come. */
    if (m->n_back < together && (m->raw || ungranted(m) + m->n_back < m->due))
        return 0;
    code = post_back(m);
    return code ? code : pump(m);
}

/*
 * The slot of a data message is free.  -1 if Python has to post it: the slot may have to leave, or
 * the window to change, which may grow when the peer has no credit left.  Else 0 or an errno.
 */
int aio_message_back(struct aio_message_state *m, uint32_t slot)
{
    const struct aio_slots *slots = &m->recv;

    if (!m->qp || !(m->unused > 0 ? slots_stay(m, slots) : slots->full && !slots->leaving))
        return -1;
    return give_slot(m, slot, m->chain);
}

/*
 * The slot of a frame without credit is free. The peer may send the next such frame at any time, so
 * that the slot is posted at once. -1 if the slot may leave instead, as no credit needs it.
 */
int aio_message_back_now(struct aio_message_state *m, uint32_t slot)
{
    if (!m->qp || (m->recv.more && m->recv.leaving && ungranted(m) >= 0))
        return -1;
    return give_slot(m, slot, 1);
}

/*
 * The program waits, or could have answered: send the credits that are due in a frame of their own.
 */
int aio_message_give_credit(struct aio_message_state *m)
{
    int code = 0;

    if (m->raw || !m->qp)
        return 0;
    if (m->n_back && ungranted(m) + m->n_back >= m->due)
        code = post_back(m);
    return code ? code : pump(m);
}

/* Offer the newest landing to the peer. 0 or an errno. */
int aio_message_offer(struct aio_message_state *m)
{
    m->landings.offered = 1;
    return m->qp ? pump(m) : 0;
}

/* Send a frame without data, as soon as there is a slot for it. */
int aio_message_send_control(struct aio_message_state *m, enum aio_frame_kind kind,
                             uint64_t argument, uint8_t flags)
{
    struct aio_dones *dones = &m->dones_pending;
    int code;

    if (kind == AIO_FRAME_DONE) {
        /* At most as many as exchanges are open, for which there is room. */
        if (dones->tail - dones->head > dones->mask)
            return ENOBUFS;
        dones->items[dones->tail++ & dones->mask] =
            (struct aio_done){.number = argument, .flags = flags};
    } else {
        if (kind == AIO_FRAME_ABORT)
            m->abort_reason = argument;
        m->controls_pending |= (uint8_t)(1 << kind);
    }
    code = pump(m);
    return code ? code : aio_message_flush(m); /* before the connection is over */
}

/* Sending. */

/* Put a frame, and its bytes, from a send slot whose credit was taken, into the chain. */
static int put_from(struct aio_message_state *m, uint32_t slot, enum aio_frame_kind kind,
                    uint8_t flags, struct aio_bytes *data, uint64_t length, uint64_t argument,
                    uint32_t imm)
{
    uint8_t *at = (uint8_t *)(uintptr_t)aio_slot_addr(&m->send, slot);
    uint32_t size = (uint32_t)length;

    if (!m->raw) {
        write_header(at, first_byte(m, kind), flags | grant_landing(m), grant_credits(m, 0), imm,
                     argument);
        at += AIO_FRAME_SIZE;
        size += AIO_FRAME_SIZE;
    }
    aio_gather(data, at, length);
    return put_slot(m, slot, size, m->raw && flags & AIO_FRAME_HAS_IMM, imm);
}

/* The first four bytes of the header of a whole message, with these flags. */
static uint32_t head_word(struct aio_message_state *m, uint32_t flags)
{
    flags |= grant_landing(m);
    return (uint32_t)first_byte(m, AIO_FRAME_DATA) << 24 | flags << 16 | grant_credits(m, 0);
}

/*
 * Put a whole message into the chain whose header is the adapter's immediate, which has room for
 * the first four bytes of a header; the adapter itself tells the length.
 */
static int put_bare(struct aio_message_state *m, uint32_t slot, struct aio_bytes *data,
                    uint64_t length)
{
    aio_gather(data, (void *)(uintptr_t)aio_slot_addr(&m->send, slot), length);
    return put_slot(m, slot, (uint32_t)length, 1, head_word(m, 0));
}

/*
 * Put a write of a whole message, into the peer's landing, into the chain; the header is as above.
 * The write stands for a send slot, so that there is a place for it in the send queue.
 */
static int put_write(struct aio_message_state *m, uint32_t slot, struct aio_bytes *data,
                     uint64_t length)
{
    struct aio_stage *stage = &m->stage;

    aio_gather(data, (void *)(uintptr_t)stage->addr, length);
    stage->sge =
        (struct ibv_sge){.addr = stage->addr, .length = (uint32_t)length, .lkey = stage->key};
    stage->write_addr = stage->to_addr;
    stage->write_key = stage->to_key;
    stage->free = 0;
    stage->busy = 1;
    stage->slot = (uint16_t)slot;
    return put_slot(m, slot, (uint32_t)length, 1,
                    head_word(m, (uint32_t)stage->number << AIO_LANDING_SHIFT));
}

/* Post the chain, unless it may wait, after `code` of the last put. */
static int put_was_last(struct aio_message_state *m, int code)
{
    return code || may_wait(m) ? code : aio_message_flush(m);
}

/* Whether there is a slot and a credit for a frame. */
int aio_message_has_room(const struct aio_message_state *m)
{
    return m->qp && !m->blocked && m->n_free && m->credits > 0;
}

/* Whether tasks wait in line, and for a slot alone: no message of the peer ends that. */
int aio_message_lacks_slot(const struct aio_message_state *m)
{
    return m->queued && m->qp && !m->blocked && !m->n_free && m->credits > 0;
}

/*
 * The flag of the first frame of requests, once: a peer whose program receives messages says so,
 * and a peer whose library does not know the flag ignores it.
 */
static uint8_t take_requesting(struct aio_message_state *m)
{
    uint8_t flag = m->requesting ? AIO_FRAME_REQUESTS : 0;

    m->requesting = 0;
    return flag;
}

/* Send a message of one frame, or announce one, for which there is room. */
int aio_message_send_next(struct aio_message_state *m, enum aio_frame_kind kind, const void *data,
                          uint64_t length, uint64_t argument, int has_imm, uint32_t imm)
{
    struct aio_bytes bytes = {{.at = data, .length = length}, NULL};
    uint8_t flags = has_imm ? AIO_FRAME_HAS_IMM : 0;

    m->credits--;
    if (kind == AIO_FRAME_DATA) {
        m->messages_sent++;
        m->bytes_sent += length;
        flags |= take_requesting(m);
    }
    return put_was_last(m, put_from(m, m->free[--m->n_free], kind, flags, &bytes, length, argument,
                                    has_imm ? imm : 0));
}

/* Frames of a message of so many bytes; 0 if it goes through no slots. */
static uint64_t frames_of(const struct aio_message_state *m, uint64_t length)
{
    if (length <= m->eager_size)
        return 1;
    return length <= m->fragmented_size && m->eager_size ? (length - 1) / m->eager_size + 1 : 0;
}

/*
 * Send a message that goes through slots: 0, an errno, or -1 if there is no room for all of it, or
 * others wait.  Then nothing has changed, and the sends of the chain are posted, because a task is
 * going to wait.
 *
 * The argument of a DATA frame is the bytes of the message from this frame on.
 */
int aio_message_send(struct aio_message_state *m, struct aio_bytes data, uint64_t length,
                     int has_imm, uint32_t imm)
{
    int bare = !has_imm && length && length <= m->bare_size && !m->requesting;
    int write = !bare && is_written(m, length, has_imm);
    uint64_t frames = bare || write ? 1 : frames_of(m, length);
    uint8_t flags = has_imm ? AIO_FRAME_HAS_IMM : 0;
    int code;

    if (!m->qp || m->blocked || m->queued || !frames || m->credits < (int64_t)frames ||
        m->n_free < frames || ((frames > 1 || write) && m->large_waiting)) {
        code = aio_message_flush(m);
        return code ? code : -1;
    }
    m->credits -= (int64_t)frames;
    m->messages_sent++;
    m->bytes_sent += length;
    flags |= take_requesting(m);
    imm = has_imm ? imm : 0;
    for (; frames > 1; frames--) {
        code = put_from(m, m->free[--m->n_free], AIO_FRAME_DATA, flags | AIO_FRAME_MORE, &data,
                        m->eager_size, length, imm);
        if (code)
            return code;
        length -= m->eager_size;
        flags = 0;
        imm = 0;
    }
    if (write)
        code = put_write(m, m->free[--m->n_free], &data, length);
    else if (bare)
        code = put_bare(m, m->free[--m->n_free], &data, length);
    else
        code = put_from(m, m->free[--m->n_free], AIO_FRAME_DATA, flags, &data, length, length, imm);
    return put_was_last(m, code);
}

/* Completions. */

/* A post has failed in a drain. */
static void fail(struct aio_message_state *m, int code)
{
    if (code > 0 && !m->error) {
        m->error = code;
        m->base.events |= AIO_EVENT_FAILED;
    }
}

/* The peer broke the protocol: the connection fails, as later frames cannot be trusted. */
static void violate(struct aio_message_state *m, enum aio_violation violation, uint64_t first,
                    uint64_t second)
{
    m->violation = (uint8_t)violation;
    m->wrong[0] = first;
    m->wrong[1] = second;
    m->base.events |= AIO_EVENT_FAILED;
}

static void note(struct aio_message_state *m, enum aio_frame_kind kind)
{
    m->said |= (uint8_t)(1 << kind);
    m->base.events |= AIO_EVENT_FRAMES;
}

/* The peer is there, and so is the peer of every connection of the group: it is the same loop. */
static void show_life(struct aio_message_state *m)
{
    m->alive = 1;
    if (m->group)
        *m->group = 1;
}

/* Fragments stay behind the tail of the ring until the last of their message is there. */
static void arrived(struct aio_message_state *m, const struct aio_arrival *arrival)
{
    if (m->tail + m->fragments - m->head > m->arrival_mask) { /* more than there are receives */
        violate(m, AIO_WRONG_CREDIT, 0, 0);
        return;
    }
    m->arrivals[(m->tail + m->fragments) & m->arrival_mask] = *arrival;
    show_life(m);
    if (arrival->more) {
        m->fragments++;
        return;
    }
    m->tail += m->fragments + 1;
    m->inner += m->fragments;
    m->fragments = 0;
    /*
     * Behind a large message that is being fetched there is nothing to take yet.  But if the peer
     * has no credit left, it may be owed one that a program that is busy does not take along.
     */
    if ((m->waiting && !m->large) || (m->due <= 1 && m->unused <= 0 && !m->raw))
        m->base.events |= AIO_EVENT_ARRIVED;
}

static void take_done(struct aio_message_state *m, uint64_t number, uint8_t flags)
{
    struct aio_dones *dones = &m->dones;

    if (dones->tail - dones->head > dones->mask) {
        violate(m, AIO_WRONG_DONE, number, 0);
        return;
    }
    dones->items[dones->tail++ & dones->mask] = (struct aio_done){.number = number, .flags = flags};
    show_life(m);
    note(m, AIO_FRAME_DONE);
}

/* A frame without credit, whose slot is posted again at once. */
static void take_control(struct aio_message_state *m, uint8_t kind, uint8_t flags,
                         uint64_t argument)
{
    switch (kind) {
    case AIO_FRAME_CREDIT:
        break;
    case AIO_FRAME_DONE:
        take_done(m, argument, flags);
        break;
    case AIO_FRAME_PING:
        /*
         * While a PING of this side waits, only its PONG is a sign that the peer hears this side.
         */
        if (!m->asking)
            show_life(m);
        m->controls_pending |= 1 << AIO_FRAME_PONG;
        break;
    case AIO_FRAME_PONG:
        if (m->asking)
            show_life(m);
        m->asking = 0;
        break;
    case AIO_FRAME_ABORT:
        if (!(m->said & 1 << AIO_FRAME_ABORT))
            m->peer_reason = argument;
        note(m, AIO_FRAME_ABORT);
        break;
    case AIO_FRAME_END:
        if (m->missing) {
            violate(m, AIO_WRONG_ORDER, m->missing, 0);
            return;
        }
        note(m, AIO_FRAME_END);
        break;
    default:
        violate(m, AIO_WRONG_KIND, kind, 0);
        return;
    }
    if (!(m->said & 1 << AIO_FRAME_CREDIT))
        note(m, AIO_FRAME_CREDIT);
}

/* Whether a message, or a fragment, whose first frame says `announced`, is in good order. */
static int is_in_order(struct aio_message_state *m, const struct aio_arrival *arrival,
                       uint64_t announced)
{
    if (m->missing && (arrival->large || arrival->landing || announced != m->missing))
        violate(m, AIO_WRONG_ORDER, m->missing, 0);
    else if (arrival->large)
        return 1;
    else if (arrival->more ? !arrival->length || announced <= arrival->length
                           : announced != arrival->length)
        violate(m, AIO_WRONG_LENGTH, announced, arrival->length);
    else if (arrival->more && announced > m->largest)
        violate(m, AIO_WRONG_SIZE, announced, m->largest);
    return !m->violation;
}

/* The slot of a frame that the program does not get is posted again at once. */
static void post_again(struct aio_message_state *m, uint32_t slot)
{
    int code = aio_message_back_now(m, slot);

    if (code < 0 && m->qp) {
        m->freed[m->n_freed++] = (uint16_t)slot;
        m->base.events |= AIO_EVENT_FRAMES;
    }
    fail(m, code ? code : pump(m));
    if (has_pending(m))
        m->base.events |= AIO_EVENT_SENT; /* Python then has completed sends wake the loop */
}

/* Whether a message of so many bytes may be in the landing with this number, which is taken. */
static int has_landed(struct aio_message_state *m, uint32_t number, uint32_t length)
{
    if (number > AIO_LANDINGS || !(m->landings.granted & 1 << number) || !length ||
        length > aio_landing_size(number) || length > m->largest)
        return 0;
    m->landings.granted &= (uint8_t)~(1 << number);
    return 1;
}

/* Note a message of so many bytes for which a larger landing would be of use: Python makes it. */
static void want_landing(struct aio_message_state *m, uint64_t length)
{
    struct aio_landings *landings = &m->landings;

    if (length > landings->most || length <= m->recv.stride ||
        (landings->newest && length <= aio_landing_size(landings->newest)))
        return;
    landings->wanted = length;
    m->base.events |= AIO_EVENT_FRAMES;
}

/* The peer's landing: offered by a PING, or free again. */
static void take_landing(struct aio_message_state *m, uint8_t kind, const uint8_t *at)
{
    struct aio_stage *stage = &m->stage;
    uint8_t number = at[1] >> AIO_LANDING_SHIFT;

    if (at[1] & AIO_FRAME_FREE)
        stage->free = stage->number != 0;
    if (kind == AIO_FRAME_PING && number && number <= AIO_LANDINGS) {
        stage->number = number;
        stage->free = 1;
        stage->to_key = aio_read32(at + 4);
        stage->to_addr = aio_read64(at + 8);
        if (stage->size < aio_landing_size(number))
            m->base.events |= AIO_EVENT_FRAMES; /* Python makes one */
    }
}

static void take_frame(struct aio_message_state *m, uint32_t slot, const struct ibv_wc *wc)
{
    uint8_t written = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    uint8_t bare = written || (wc->wc_flags & IBV_WC_WITH_IMM) != 0, flags;
    const uint8_t *at = bare ? (const uint8_t *)&wc->imm_data
                             : (const uint8_t *)(uintptr_t)aio_slot_addr(&m->recv, slot);
    struct aio_arrival arrival = {.length = wc->byte_len, .slot = (uint16_t)slot, .bare = bare};
    uint64_t argument = wc->byte_len;
    uint32_t returned;
    uint8_t kind;

    if (!bare && wc->byte_len < AIO_FRAME_SIZE) {
        violate(m, AIO_WRONG_SHORT, wc->byte_len, 0);
        return;
    }
    kind = at[0] ^ m->number_in; /* with another number, no kind */
    if (m->numbered && kind >> AIO_NUMBER_SHIFT) {
        violate(m, AIO_WRONG_NUMBER, at[0] >> AIO_NUMBER_SHIFT, m->number_in >> AIO_NUMBER_SHIFT);
        return;
    }
    m->number_in += (uint8_t)(m->numbered << AIO_NUMBER_SHIFT);
    if (written) {
        arrival.landing = at[1] >> AIO_LANDING_SHIFT;
        if (!has_landed(m, arrival.landing, wc->byte_len)) {
            violate(m, AIO_WRONG_WRITE, 0, 0);
            return;
        }
    }
    flags = m->stage.most ? at[1] & (uint8_t)~AIO_FRAME_FREE : at[1];
    if (bare && (kind != AIO_FRAME_DATA || flags != arrival.landing << AIO_LANDING_SHIFT)) {
        violate(m, AIO_WRONG_BARE, kind, at[1]);
        return;
    }
    if (!bare) {
        arrival.length -= AIO_FRAME_SIZE;
        argument = aio_read64(at + 8);
    }
    if (m->stage.most)
        take_landing(m, kind, at);
    returned = (uint32_t)at[2] << 8 | at[3];
    if (returned) {
        m->credits += returned;
        if (m->queued || m->slot_awaited)
            m->base.events |= AIO_EVENT_ROOM;
    }
    if (kind == AIO_FRAME_DATA || kind == AIO_FRAME_RENDEZVOUS) {
        arrival.has_imm = flags & AIO_FRAME_HAS_IMM;
        arrival.imm = arrival.has_imm ? aio_read32(at + 4) : 0;
        arrival.large = kind == AIO_FRAME_RENDEZVOUS;
        arrival.more = !arrival.large && flags & AIO_FRAME_MORE;
        if (!bare && !arrival.large && flags & AIO_FRAME_REQUESTS)
            arrival.requests = m->requested = m->python = 1; /* does the program take them? */
        if (m->unused <= 0) {
            violate(m, AIO_WRONG_CREDIT, 0, 0);
            return;
        }
        if (!--m->unused && m->grows && !m->recv.full)
            m->base.events |= AIO_EVENT_FRAMES; /* Python gets more slots */
        if (!is_in_order(m, &arrival, argument))
            return;
        if (arrival.large || arrival.more)
            want_landing(m, argument);
        m->missing = arrival.more ? argument - arrival.length : 0;
        if (!m->discarding) {
            m->large += arrival.large;
            arrived(m, &arrival);
            if (arrival.large)
                note(m, AIO_FRAME_RENDEZVOUS);
            return;
        }
        while (m->fragments)
            post_again(m, m->arrivals[(m->tail + --m->fragments) & m->arrival_mask].slot);
    } else {
        take_control(m, kind, flags, argument);
        if (m->violation)
            return;
    }
    post_again(m, slot);
}

static void take_receive(struct aio_message_state *m, uint32_t slot, const struct ibv_wc *wc)
{
    if (!m->violation && !take_posted(&m->receiving, slot)) {
        violate(m, AIO_WRONG_TURN, 1, slot);
        return;
    }
    m->posted--;
    m->receives--;
    if (m->violation)
        return;
    if (m->raw) {
        /* The bytes of a write with an immediate are elsewhere, and the slot is empty. */
        struct aio_arrival arrival = {
            .length = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : wc->byte_len,
            .slot = (uint16_t)slot,
            .has_imm = (wc->wc_flags & IBV_WC_WITH_IMM) != 0,
            .imm = ntohl(wc->imm_data),
        };

        arrived(m, &arrival);
    } else {
        take_frame(m, slot, wc);
    }
}

/* 0 if the completion is for Python: some slots of a pool leave. */
static int take_sent(struct aio_message_state *m, uint32_t slot)
{
    if (!take_posted(&m->sending, slot)) {
        violate(m, AIO_WRONG_TURN, 0, slot);
        return 1;
    }
    if (slot == m->stage.slot) /* of the write, if there is one under way */
        m->stage.busy = 0;
    if (slot >= m->data_slots) {
        m->control_free[m->n_control_free++] = (uint16_t)(slot - m->data_slots);
        if (has_pending(m))
            m->base.events |= AIO_EVENT_SENT; /* pump may post the last pending frame */
        fail(m, pump(m));
    } else if (slots_stay(m, &m->send)) {
        m->free[m->n_free++] = (uint16_t)slot;
        if (m->queued || m->slot_awaited)
            m->base.events |= AIO_EVENT_ROOM;
    } else {
        return 0;
    }
    m->completed++;
    if (m->flush_at && m->completed >= m->flush_at) {
        m->flush_at = 0;
        m->base.events |= AIO_EVENT_SENT;
    }
    return 1;
}

/* At the end everything that is posted comes back, and is only counted. */
static int take_flushed(struct aio_message_state *m, uint32_t sub, const struct ibv_wc *wc)
{
    if (!m->flushing || wc->status != IBV_WC_WR_FLUSH_ERR)
        return 0;
    if (sub & AIO_SUB_RECV)
        m->receives--;
    else if (sub < AIO_SUB_READ)
        m->flushed++;
    else
        return 0;
    if (aio_message_under_way(m) <= 0)
        m->base.events |= AIO_EVENT_IDLE;
    return 1;
}

/* Called by the drain: 1 if the completion was taken, 0 if it is for Python. */
static int take_completion(struct aio_state *state, const struct ibv_wc *wc)
{
    struct aio_message_state *m = (struct aio_message_state *)state;
    uint32_t sub = AIO_SUB(wc->wr_id);

    if (m->closed)
        return 0;
    if (wc->status != IBV_WC_SUCCESS)
        return take_flushed(m, sub, wc);
    if (sub & AIO_SUB_RECV)
        take_receive(m, sub & ~AIO_SUB_RECV, wc);
    else if (sub < AIO_SUB_READ)
        return take_sent(m, sub);
    else if (sub < AIO_SUB_OPERATE) {
        if (m->n_reads_done < m->most_reads)
            m->reads_done[m->n_reads_done++] = (uint16_t)(sub - AIO_SUB_READ);
        m->base.events |= AIO_EVENT_FRAMES;
    } else {
        m->operations_done[m->done_tail++ & m->done_mask] = (uint16_t)(sub - AIO_SUB_OPERATE);
        m->base.events |= AIO_EVENT_OPERATED;
    }
    return 1;
}

/* Making. */

/*
 * Fit what follows from the data messages for which there are receive slots.  The messages that a
 * program may keep, and the credits that make a CREDIT frame due, are a window together.
 */
void aio_message_size(struct aio_message_state *m, int64_t window)
{
    m->half = window > 1 ? (uint32_t)(window + 1) / 2 : 0;
    m->due = window > 1 ? window / 2 : 1;
    m->chain = window < 16 ? 1 : window > 8 * AIO_CHAIN ? AIO_CHAIN : (uint32_t)(window / 8);
}

/* Set up the state; the caller has made the arrays, and set the sizes of the configuration. */
void aio_message_init(struct aio_message_state *m, uint32_t sends, uint32_t receives,
                      uint32_t controls)
{
    m->base.take = take_completion;
    for (uint32_t i = 0; i < sends; i++)
        m->free[i] = (uint16_t)i;
    m->n_free = sends;
    for (uint32_t i = 0; i < controls; i++)
        m->control_free[i] = (uint16_t)i;
    m->n_control_free = m->controls = m->frames.base = controls;
    for (uint32_t i = 0; i < receives; i++)
        add_posted(&m->receiving, i);
    m->posted = receives;
    m->unused = m->granted = (int64_t)receives - m->control;
    aio_message_size(m, m->unused);
}
