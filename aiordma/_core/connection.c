/*
 * The message protocol: frames in, frames out, credits and slots.  docs/wire.md specifies it.
 *
 * This file alone writes a struct aio_connection; connection.h has its commands, and says what each
 * returns.  What comes from the adapter enters by `connection_complete`, which the drain calls for
 * each completion: it changes the connection, posts receives and frames without data at once, and
 * returns as events what somebody has to be told.  The drain delivers those events when it has
 * polled all queues (events.c), so that no task runs while a completion is being looked at.  Work
 * that waits, or takes long, is Python's.
 *
 * Every send asks for a completion, which costs little as long as it wakes no task: the queue is
 * armed for solicited completions, which the peer's frames are, and a send is not.
 */
#include "connection.h"

#include <stdlib.h>

#include "connection_private.h"

/* Bytes of the wire. */

static void wire_put32(uint8_t *at, uint32_t value)
{
    value = htonl(value);
    memcpy(at, &value, sizeof(value));
}

static void wire_put_header(uint8_t *at, uint8_t first, uint8_t flags, uint32_t credits,
                            uint32_t imm, uint64_t argument)
{
    at[0] = first;
    at[1] = flags;
    at[2] = (uint8_t)(credits >> 8);
    at[3] = (uint8_t)credits;
    wire_put32(at + 4, imm);
    wire_put32(at + 8, (uint32_t)(argument >> 32));
    wire_put32(at + 12, (uint32_t)argument);
}

/*
 * The first byte of the next frame: the kind, and the number if frames have numbers.  A number is
 * 4 bits at the upper end of a byte, so that the byte wraps with it.
 */
static uint8_t next_first_byte(struct aio_connection *c, enum aio_frame_kind kind)
{
    uint8_t first = (uint8_t)(c->number_out | kind);

    c->number_out += (uint8_t)(c->numbered << AIO_NUMBER_SHIFT);
    return first;
}

/* Bytes of the header before the bytes of a message in a slot. */
static uint32_t head_size(const struct aio_connection *c, int bare)
{
    return c->raw || bare ? 0 : AIO_FRAME_SIZE;
}

/* Where the bytes of a message, or of a fragment, lie. */
static const void *arrival_bytes(const struct aio_connection *c, const struct aio_arrival *arrival)
{
    return (const void *)(uintptr_t)(arrival->landing ? c->landings.addr[arrival->landing]
                                                      : aio_slot_addr(&c->recv, arrival->slot) +
                                                            head_size(c, arrival->bare));
}

/* Slots. */

static void order_append(struct aio_order *order, uint32_t slot)
{
    order->slots[order->next++ & order->mask] = (uint16_t)slot;
}

/*
 * Remove the slot of a completed request.  False, and nothing has changed, if another request
 * should have completed first.
 */
static int order_complete(struct aio_order *order, uint32_t slot)
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

/*
 * Whether every slot that becomes free stays with the connection.  Otherwise Python decides which
 * slots it gives back to the pool.
 */
static int slots_may_stay(const struct aio_connection *c, const struct aio_slots *slots)
{
    return !slots->more || !(slots->leaving || *c->crowded);
}

/* Credits. */

/*
 * Credits that the peer is owed: receives are posted for them, and it does not know yet.
 *
 * Each receive that the adapter has is for a credit of the peer, for a credit that it is owed, or
 * for one of the `control` frames that need no credit.
 */
static int64_t owed_credits(const struct aio_connection *c)
{
    return c->posted - c->control - c->unused;
}

/*
 * Forget the CREDIT frames that the peer is known to have processed, because it has spent credits
 * that were granted after them.
 */
static void forget_processed_credit_frames(struct aio_connection *c)
{
    int64_t spent = c->granted - c->unused;

    while (c->n_marks && spent > c->marks[0]) {
        c->n_marks--;
        memmove(&c->marks[0], &c->marks[1], c->n_marks * sizeof(c->marks[0]));
    }
}

/*
 * Whether a CREDIT frame is due: half of the window is owed, or the window has grown.  If half is a
 * single credit, as at the beginning of a window that grows, that would be a frame for each
 * message: so the frame waits until the peer has no credit left.
 */
static int credit_is_due(struct aio_connection *c)
{
    if (c->raw || owed_credits(c) < (c->grown ? 1 : c->due) || (c->due <= 1 && c->unused > 0))
        return 0;
    forget_processed_credit_frames(c);
    return c->n_marks < AIO_CREDIT_FRAMES;
}

/* Grant what is owed, with the frame that is about to be sent; `alone`: a CREDIT frame. */
static uint32_t grant_credits(struct aio_connection *c, int alone)
{
    int64_t credits = owed_credits(c);

    if (credits <= 0)
        return 0;
    if (credits > 0xFFFF)
        credits = 0xFFFF;
    if (alone && c->n_marks < AIO_CREDIT_FRAMES)
        c->marks[c->n_marks++] = c->granted;
    c->grown = 0;
    c->granted += credits;
    c->unused += credits;
    return (uint32_t)credits;
}

/* Landings. */

/* The flag that tells the peer, with the next frame, that the newest landing is free again. */
static uint8_t grant_landing(struct aio_connection *c)
{
    struct aio_landings *landings = &c->landings;

    if (!landings->freed)
        return 0;
    landings->freed = 0;
    landings->granted |= (uint8_t)(1 << landings->newest);
    return AIO_FRAME_FREE;
}

/* Whether a message goes into the peer's landing, and not through slots. */
static int goes_to_landing(const struct aio_connection *c, uint64_t length, int has_imm)
{
    const struct aio_stage *stage = &c->stage;

    return stage->free && !stage->busy && !has_imm && length > c->eager_size &&
           length <= stage->most && length <= stage->size &&
           length <= aio_landing_size(stage->number);
}

/* Posting. */

/* Count the sends of the chain as flushed, because the adapter takes no sends any more. */
static void drop_chain(struct aio_connection *c)
{
    c->flushed += c->n_unposted;
    c->n_unposted = 0;
}

/*
 * Post the sends of the chain, in their order, with one doorbell: on Soft-RoCE that is a system
 * call, and its work for each is less if there are several.  0 or an errno, which ends the
 * connection; until then the sends that were not posted stay in the chain, so that nothing is
 * posted in their place.
 */
int connection_post_sends(struct aio_connection *c)
{
    struct ibv_sge sge[AIO_SEND_CHAIN];
    struct ibv_send_wr wr[AIO_SEND_CHAIN], *bad = NULL;
    uint32_t n = c->n_unposted, posted;
    int code;

    if (!n)
        return 0;
    if (!c->qp) { /* closed meanwhile; or a child after fork, which posts nothing */
        drop_chain(c);
        return 0;
    }
    for (uint32_t i = 0; i < n; i++) {
        const struct aio_unposted *send = &c->unposted[i];
        int is_data = send->slot < c->data_slots;
        int is_write = c->stage.busy && send->slot == c->stage.slot;
        const struct aio_slots *slots = is_data ? &c->send : &c->frames;
        uint32_t slot = is_data ? send->slot : send->slot - c->data_slots;

        sge[i] = is_write ? c->stage.sge
                          : (struct ibv_sge){
                                .addr = aio_slot_addr(slots, slot),
                                .length = send->length,
                                .lkey = slot_key(slots, slot),
                            };
        wr[i] = (struct ibv_send_wr){
            .wr_id = c->id | (uint64_t)send->slot << AIO_SUB_SHIFT,
            .next = i + 1 < n ? &wr[i + 1] : NULL,
            .sg_list = &sge[i],
            .num_sge = 1,
            .opcode = send->has_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND,
            .send_flags = c->send_flags | (send->length <= c->inline_size ? IBV_SEND_INLINE : 0),
            .imm_data = htonl(send->imm),
        };
        if (is_write) {
            wr[i].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr[i].wr.rdma.remote_addr = c->stage.write_addr;
            wr[i].wr.rdma.rkey = c->stage.write_key;
        }
    }
    code = aio_post_errno(ibv_post_send(c->qp, wr, &bad));
    posted = code && bad ? (uint32_t)(bad - wr) : n;
    c->n_unposted -= posted;
    if (c->n_unposted)
        memmove(c->unposted, c->unposted + posted, c->n_unposted * sizeof(c->unposted[0]));
    return code;
}

/* Put the send of a slot behind the others of the chain.  0, or an errno of posting those. */
static int chain_append(struct aio_connection *c, uint32_t slot, uint32_t length, int has_imm,
                        uint32_t imm)
{
    int code = c->n_unposted == AIO_SEND_CHAIN ? connection_post_sends(c) : 0;

    if (code)
        return code;
    c->sent++;
    if (slot < c->data_slots)
        c->to_flush = c->sent;
    order_append(&c->sending, slot);
    c->unposted[c->n_unposted++] = (struct aio_unposted){
        .length = length, .imm = imm, .slot = (uint16_t)slot, .has_imm = (uint8_t)has_imm};
    return 0;
}

/*
 * Whether a send may wait in the chain: connection_post_sends is certain to be called, and other
 * sends are likely to come before.  A task that the drain has resumed answers message after
 * message, and the answer to the last goes at once; if it sends more than that, it sends a burst.
 */
static int chain_may_wait(const struct aio_connection *c)
{
    return c->n_unposted < AIO_SEND_CHAIN &&
           (c->turn_flushes || (c->delivering && (c->head != c->tail || c->in_a_row == 2)));
}

/* The oldest exposures that have ended, as the argument of a PING. */
static uint64_t take_revoking(struct aio_connection *c)
{
    struct aio_exposures oldest = c->revoking[0];

    memmove(&c->revoking[0], &c->revoking[1], --c->n_revoking * sizeof(c->revoking[0]));
    return (uint64_t)oldest.first << 32 | oldest.last;
}

/* Whether there is something to tell, or to ask, that a PING takes along. */
static int ping_is_wanted(const struct aio_connection *c)
{
    return c->landings.offered || c->identity_wanted || c->n_revoking;
}

/* Put one frame without data, from a free slot, into the chain. */
static int chain_append_control(struct aio_connection *c, enum aio_frame_kind kind, uint8_t flags,
                                uint64_t argument)
{
    uint32_t slot = c->control_free[--c->n_control_free], size = AIO_FRAME_SIZE, credits, key = 0;
    uint8_t *at = (uint8_t *)(uintptr_t)aio_slot_addr(&c->frames, slot);
    struct aio_landings *landings = &c->landings;

    credits = grant_credits(c, kind == AIO_FRAME_CREDIT);
    if (kind == AIO_FRAME_PING && landings->offered) {
        landings->offered = landings->freed = 0;
        landings->granted |= (uint8_t)(1 << landings->newest);
        flags |= (uint8_t)(landings->newest << AIO_LANDING_SHIFT);
        argument = landings->addr[landings->newest];
        key = landings->key;
    } else if (kind == AIO_FRAME_PING && c->n_revoking) {
        flags |= AIO_FRAME_REVOKED;
        argument = take_revoking(c);
    } else if (kind == AIO_FRAME_PING || kind == AIO_FRAME_PONG || kind == AIO_FRAME_CREDIT) {
        argument = c->identity;
        c->identity_told = 1;
        if (kind == AIO_FRAME_PING)
            c->identity_wanted = 0;
    }
    wire_put_header(at, next_first_byte(c, kind), flags | grant_landing(c), credits, key, argument);
    if (c->proving && kind == AIO_FRAME_CREDIT) {
        memcpy(at + AIO_FRAME_SIZE, c->proof, AIO_PROOF_SIZE);
        size += AIO_PROOF_SIZE;
        c->proving = 0;
    } else if (kind == AIO_FRAME_ABORT) {
        memcpy(at + AIO_FRAME_SIZE, c->words_out.bytes, c->words_out.size);
        size += c->words_out.size;
    }
    return chain_append(c, c->data_slots + slot, size, 0, 0);
}

static int dones_are_queued(const struct aio_dones *dones)
{
    return dones->head != dones->tail;
}

/* Whether frames without data wait for a slot. */
static int controls_are_pending(const struct aio_connection *c)
{
    return c->controls_pending || dones_are_queued(&c->dones_pending);
}

/* The frames that wait at most once, in the order in which they go. */
static const enum aio_frame_kind single_frames[] = {
    AIO_FRAME_PONG, AIO_FRAME_PING, AIO_FRAME_CREDIT, AIO_FRAME_END, AIO_FRAME_ABORT};

/*
 * Send frames without data, as long as there are slots for them.  A PING offers a landing, or says
 * which exposures have ended; only one PING is unanswered at a time.
 */
static int send_pending_controls(struct aio_connection *c)
{
    int code = 0, put = 0;

    if (!c->asking && ping_is_wanted(c)) {
        c->asking = 1;
        c->controls_pending |= 1 << AIO_FRAME_PING;
    }
    while (!code && c->n_control_free && life_rights(c->life)->says && c->qp) {
        if (dones_are_queued(&c->dones_pending)) {
            const struct aio_done *done =
                &c->dones_pending.items[c->dones_pending.head++ & c->dones_pending.mask];

            code = chain_append_control(c, AIO_FRAME_DONE, done->flags, done->number);
        } else if (c->controls_pending) {
            const enum aio_frame_kind *next = single_frames;

            while (!(c->controls_pending & 1 << *next))
                next++;
            c->controls_pending &= (aio_frame_kinds) ~(1 << *next);
            code = chain_append_control(c, *next, 0, c->arguments_out[*next]);
        } else if (credit_is_due(c)) {
            code = chain_append_control(c, AIO_FRAME_CREDIT, 0, 0);
        } else {
            break;
        }
        put = 1;
    }
    return put && !code ? connection_post_sends(c) : code;
}

/* Post receive slots; without `slots` the first `count`, which are in the order from the start. */
int connection_post_receives(struct aio_connection *c, const uint16_t *slots, uint32_t count)
{
    struct ibv_sge sge[AIO_RECV_CHAIN];
    struct ibv_recv_wr wr[AIO_RECV_CHAIN], *bad = NULL;
    int code = 0;

    if (!c->qp)
        return ENOTCONN;
    for (uint32_t first = 0; first < count && !code; first += AIO_RECV_CHAIN) {
        uint32_t n = count - first < AIO_RECV_CHAIN ? count - first : AIO_RECV_CHAIN;

        for (uint32_t i = 0; i < n; i++) {
            uint32_t slot = slots ? slots[first + i] : first + i;

            sge[i].addr = aio_slot_addr(&c->recv, slot);
            sge[i].length = c->recv.stride;
            sge[i].lkey = slot_key(&c->recv, slot);
            wr[i].wr_id = c->id | (uint64_t)(AIO_SUB_RECV | slot) << AIO_SUB_SHIFT;
            wr[i].sg_list = &sge[i];
            wr[i].num_sge = 1;
            wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
            if (slots)
                order_append(&c->receiving, slot);
        }
        code = aio_post_errno(ibv_post_recv(c->qp, wr, &bad));
    }
    c->receives += count;
    if (code && !c->error)
        c->recv_failed = 1;
    return code;
}

/* Post the receive slots that are free. */
static int post_freed_receives(struct aio_connection *c)
{
    int code = connection_post_receives(c, c->back, c->n_back);

    c->posted += c->n_back;
    c->n_back = 0;
    return code;
}

/* A receive slot is free; it is posted again when `together` slots are free. 0 or an errno. */
static int free_receive_slot(struct aio_connection *c, uint32_t slot, uint32_t together)
{
    int code;

    c->back[c->n_back++] = (uint16_t)slot;
    /* Slots that complete half of the window are posted now: no further slot may come. */
    if (c->n_back < together && (c->raw || owed_credits(c) + c->n_back < c->due))
        return 0;
    code = post_freed_receives(c);
    return code ? code : send_pending_controls(c);
}

/*
 * It is for Python where the slot may have to go back to the pool, and where the peer has no credit
 * left, as the window may then grow.
 */
int connection_release_slot(struct aio_connection *c, uint32_t slot)
{
    const struct aio_slots *slots = &c->recv;

    if (!c->qp || !(c->unused > 0 ? slots_may_stay(c, slots) : slots->full && !slots->leaving))
        return AIO_FOR_PYTHON;
    return free_receive_slot(c, slot, c->chain);
}

/*
 * The peer may send the next frame without credit at any time, so that the slot is posted at once.
 * It is for Python where slots leave and no credit depends on this one.
 */
int connection_repost_slot(struct aio_connection *c, uint32_t slot)
{
    if (!c->qp || (c->recv.more && c->recv.leaving && owed_credits(c) >= 0))
        return AIO_FOR_PYTHON;
    return free_receive_slot(c, slot, 1);
}

int connection_send_credits(struct aio_connection *c)
{
    int code = 0;

    if (c->raw || !c->qp)
        return 0;
    if (c->n_back && owed_credits(c) + c->n_back >= c->due)
        code = post_freed_receives(c);
    return code ? code : send_pending_controls(c);
}

/* Keep as many of these bytes as there is room for. */
static void words_keep(struct aio_words *words, const uint8_t *from, uint64_t size)
{
    words->size = (uint8_t)(size < AIO_WORDS_SIZE ? size : AIO_WORDS_SIZE);
    memcpy(words->bytes, from, words->size);
}

void connection_leave_words(struct aio_connection *c, const uint8_t *words, uint64_t size)
{
    words_keep(&c->words_out, words, size);
}

int connection_send_control(struct aio_connection *c, enum aio_frame_kind kind, uint64_t argument,
                            uint8_t flags)
{
    struct aio_dones *dones = &c->dones_pending;
    int code;

    if (kind == AIO_FRAME_DONE) {
        /* At most as many as exchanges are open, for which there is room. */
        if (dones->tail - dones->head > dones->mask)
            return ENOBUFS;
        dones->items[dones->tail++ & dones->mask] =
            (struct aio_done){.number = argument, .flags = flags};
    } else {
        c->arguments_out[kind] = argument;
        c->controls_pending |= (aio_frame_kinds)(1 << kind);
    }
    code = send_pending_controls(c);
    return code ? code : connection_post_sends(c); /* before the connection is over */
}

/* Sending. */

/* Put a frame, and its bytes, from a send slot whose credit was taken, into the chain. */
static int chain_append_frame(struct aio_connection *c, uint32_t slot, enum aio_frame_kind kind,
                              uint8_t flags, struct aio_bytes *data, uint64_t length,
                              uint64_t argument, uint32_t imm)
{
    uint8_t *at = (uint8_t *)(uintptr_t)aio_slot_addr(&c->send, slot);
    uint32_t size = (uint32_t)length;

    if (!c->raw) {
        wire_put_header(at, next_first_byte(c, kind), flags | grant_landing(c), grant_credits(c, 0),
                        imm, argument);
        at += AIO_FRAME_SIZE;
        size += AIO_FRAME_SIZE;
    }
    aio_gather(data, at, length);
    return chain_append(c, slot, size, c->raw && flags & AIO_FRAME_HAS_IMM, imm);
}

/* The first four bytes of the header of a whole message, with these flags. */
static uint32_t next_head_word(struct aio_connection *c, uint32_t flags)
{
    flags |= grant_landing(c);
    return (uint32_t)next_first_byte(c, AIO_FRAME_DATA) << 24 | flags << 16 | grant_credits(c, 0);
}

/*
 * Put a whole message into the chain whose header is the adapter's immediate, which has room for
 * the first four bytes of a header; the adapter itself tells the length.
 */
static int chain_append_bare(struct aio_connection *c, uint32_t slot, struct aio_bytes *data,
                             uint64_t length)
{
    aio_gather(data, (void *)(uintptr_t)aio_slot_addr(&c->send, slot), length);
    return chain_append(c, slot, (uint32_t)length, 1, next_head_word(c, 0));
}

/*
 * Put a write of a whole message, into the peer's landing, into the chain; the header is as above.
 * The write stands for a send slot, so that there is a place for it in the send queue.
 */
static int chain_append_write(struct aio_connection *c, uint32_t slot, struct aio_bytes *data,
                              uint64_t length)
{
    struct aio_stage *stage = &c->stage;

    aio_gather(data, (void *)(uintptr_t)stage->addr, length);
    stage->sge =
        (struct ibv_sge){.addr = stage->addr, .length = (uint32_t)length, .lkey = stage->key};
    stage->write_addr = stage->to_addr;
    stage->write_key = stage->to_key;
    stage->free = 0;
    stage->busy = 1;
    stage->slot = (uint16_t)slot;
    return chain_append(c, slot, (uint32_t)length, 1,
                        next_head_word(c, (uint32_t)stage->number << AIO_LANDING_SHIFT));
}

/* Post the chain, unless it may wait; `code` is the result of the last append to it. */
static int chain_post_unless_it_may_wait(struct aio_connection *c, int code)
{
    return code || chain_may_wait(c) ? code : connection_post_sends(c);
}

/* Whether the program may send: the queue pair is there, and the life is not at its end. */
static int may_send(const struct aio_connection *c)
{
    return c->qp && life_rights(c->life)->sends;
}

enum aio_lack connection_lacks(const struct aio_connection *c)
{
    if (!may_send(c))
        return AIO_LACKS_RIGHT;
    if (c->credits <= 0)
        return AIO_LACKS_CREDIT;
    return c->n_free ? AIO_LACKS_NOTHING : AIO_LACKS_SLOT;
}

/*
 * The flag of the first frame of requests.  A peer whose program wants plain messages can then say
 * so; a library that does not know the flag ignores it.
 */
static uint8_t next_requests_flag(struct aio_connection *c)
{
    uint8_t flag = c->requesting ? AIO_FRAME_REQUESTS : 0;

    c->requesting = 0;
    return flag;
}

int connection_send_frame(struct aio_connection *c, enum aio_frame_kind kind, const void *data,
                          uint64_t length, uint64_t argument, int has_imm, uint32_t imm)
{
    struct aio_bytes bytes = {{.at = data, .length = length}, NULL};
    uint8_t flags = has_imm ? AIO_FRAME_HAS_IMM : 0;

    c->credits--;
    if (kind == AIO_FRAME_DATA) {
        c->messages_sent++;
        c->bytes_sent += length;
        flags |= next_requests_flag(c);
    }
    return chain_post_unless_it_may_wait(c, chain_append_frame(c, c->free[--c->n_free], kind, flags,
                                                               &bytes, length, argument,
                                                               has_imm ? imm : 0));
}

/* Frames of a message of so many bytes; 0 if it goes through no slots. */
static uint64_t frames_needed(const struct aio_connection *c, uint64_t length)
{
    if (length <= c->eager_size)
        return 1;
    return length <= c->fragmented_size && c->eager_size ? (length - 1) / c->eager_size + 1 : 0;
}

uint32_t connection_slots_lacking(const struct aio_connection *c, uint64_t length)
{
    uint64_t frames = frames_needed(c, length);

    if (!may_send(c) || c->queued || c->large_waiting || frames < 2 ||
        c->credits < (int64_t)frames || c->n_free >= frames)
        return 0;
    return (uint32_t)frames - c->n_free;
}

/*
 * Whether a message that cannot be sent now may wait in line without help of Python, which looks
 * for a slot of the pool, or starts the timer that bounds the wait.
 */
static int may_stand_in_line(const struct aio_connection *c, uint64_t length)
{
    return may_send(c) && c->watched && length <= c->eager_size && (c->queued || c->credits <= 0);
}

/*
 * The one place that decides how a message goes: bare, in a slot without a header of its own; in a
 * slot with one; as fragments through several slots; or as a write into the peer's landing.
 *
 * If the message cannot be sent, only the chain is posted: the task is going to wait, perhaps for
 * answers to messages that are still in the chain.
 *
 * The argument of a DATA frame is the bytes of the message from this frame on.
 */
int connection_send(struct aio_connection *c, struct aio_bytes data, uint64_t length, int has_imm,
                    uint32_t imm)
{
    int bare = !has_imm && length && length <= c->bare_size && !c->requesting;
    int write = !bare && goes_to_landing(c, length, has_imm);
    uint64_t frames = bare || write ? 1 : frames_needed(c, length);
    uint8_t flags = has_imm ? AIO_FRAME_HAS_IMM : 0;
    int code;

    if (!may_send(c) || c->queued || !frames || c->credits < (int64_t)frames ||
        c->n_free < frames || ((frames > 1 || write) && c->large_waiting)) {
        code = connection_post_sends(c);
        return code ? code : may_stand_in_line(c, length) ? AIO_NO_ROOM : AIO_FOR_PYTHON;
    }
    c->credits -= (int64_t)frames;
    c->messages_sent++;
    c->bytes_sent += length;
    flags |= next_requests_flag(c);
    imm = has_imm ? imm : 0;
    for (; frames > 1; frames--) {
        code = chain_append_frame(c, c->free[--c->n_free], AIO_FRAME_DATA, flags | AIO_FRAME_MORE,
                                  &data, c->eager_size, length, imm);
        if (code)
            return code;
        length -= c->eager_size;
        flags = 0;
        imm = 0;
    }
    if (write)
        code = chain_append_write(c, c->free[--c->n_free], &data, length);
    else if (bare)
        code = chain_append_bare(c, c->free[--c->n_free], &data, length);
    else
        code = chain_append_frame(c, c->free[--c->n_free], AIO_FRAME_DATA, flags, &data, length,
                                  length, imm);
    return chain_post_unless_it_may_wait(c, code);
}

/* For a task whose turn in the line has come: those that wait are behind it. */
int connection_send_first(struct aio_connection *c, struct aio_bytes data, uint64_t length,
                          int has_imm, uint32_t imm)
{
    uint32_t queued = c->queued;
    int code;

    c->queued = 0;
    code = connection_send(c, data, length, has_imm, imm);
    c->queued = queued;
    return code;
}

/* Completions. */

/* Keep the errno of a post that has failed in a drain; Python then ends the connection. */
static void note_post_failure(struct aio_connection *c, int code)
{
    if (code > 0 && !c->error) {
        c->error = code;
        c->events |= AIO_EVENT_FAILED;
    }
}

/* The peer broke the protocol.  Later frames cannot be trusted, so that the connection fails. */
static void note_violation(struct aio_connection *c, enum aio_violation violation, uint64_t first,
                           uint64_t second)
{
    c->violation = (uint8_t)violation;
    c->wrong[0] = first;
    c->wrong[1] = second;
    c->events |= AIO_EVENT_FAILED;
}

static void note_frame(struct aio_connection *c, enum aio_frame_kind kind)
{
    c->said |= (aio_frame_kinds)(1 << kind);
    c->events |= AIO_EVENT_FRAMES;
}

/*
 * Put an arrival into the ring.  Fragments stay behind its tail until the last one of their message
 * has come: a receiver never sees half of a message.
 */
static void arrival_append(struct aio_connection *c, const struct aio_arrival *arrival)
{
    if (c->tail + c->fragments - c->head > c->arrival_mask) { /* more than there are receives */
        note_violation(c, AIO_WRONG_CREDIT, 0, 0);
        return;
    }
    c->arrivals[(c->tail + c->fragments) & c->arrival_mask] = *arrival;
    c->alive = 1;
    if (arrival->more) {
        c->fragments++;
        return;
    }
    c->tail += c->fragments + 1;
    c->inner += c->fragments;
    c->fragments = 0;
    /*
     * A message behind a large one that is being fetched cannot be taken yet, and wakes nobody.  A
     * peer without a credit is another matter: it may be owed one that a busy program, which sends
     * nothing, does not return.
     */
    if ((c->waiting && !c->large) || (c->due <= 1 && c->unused <= 0 && !c->raw))
        c->events |= AIO_EVENT_ARRIVED;
}

static void done_append(struct aio_connection *c, uint64_t number, uint8_t flags)
{
    struct aio_dones *dones = &c->dones;

    if (dones->tail - dones->head > dones->mask) {
        note_violation(c, AIO_WRONG_DONE, number, 0);
        return;
    }
    dones->items[dones->tail++ & dones->mask] = (struct aio_done){.number = number, .flags = flags};
    c->alive = 1;
    note_frame(c, AIO_FRAME_DONE);
}

/* The first identity that the peer tells is its own: it cannot become another by a later frame. */
static void learn_identity(struct aio_connection *c, uint64_t identity)
{
    if (!c->peer_identity)
        c->peer_identity = identity;
    if (c->identity_awaited && (c->peer_identity || c->ponged)) {
        c->identity_awaited = 0;
        c->events |= AIO_EVENT_FRAMES;
    }
}

/*
 * Exposures of the peer have ended.  However many it tells of, a fixed number is kept, and what is
 * forgotten is left to its adapter, as is everything where there is no memory.
 */
static void note_revoked(struct aio_connection *c, uint32_t first, uint32_t last)
{
    if (!c->revoked)
        c->revoked = calloc(AIO_REVOKED, sizeof(*c->revoked));
    if (!c->revoked)
        return;
    if (last - first >= AIO_REVOKED)
        first = last - (AIO_REVOKED - 1);
    for (uint32_t count = last - first + 1; count; count--, first++)
        c->revoked[first % AIO_REVOKED] = first;
}

/* A note of the peer lies in its slot until Python takes it.  Whether somebody is to get it. */
static int note_append(struct aio_connection *c, const struct aio_arrival *arrival, uint8_t flags)
{
    const uint8_t *at = (const uint8_t *)(uintptr_t)aio_slot_addr(&c->recv, arrival->slot);
    struct aio_order *notes = &c->notes;

    if (!notes->slots) { /* no lease has ever wanted notes */
        note_violation(c, AIO_WRONG_KIND, AIO_FRAME_NOTE, 0);
        return 0;
    }
    if (c->missing) {
        note_violation(c, AIO_WRONG_ORDER, c->missing, 0);
        return 0;
    }
    if (flags != AIO_FRAME_HAS_IMM || arrival->length != AIO_NOTE_SIZE ||
        aio_read64(at + AIO_FRAME_SIZE + 4) > UINT64_MAX - aio_read64(at + 8)) {
        note_violation(c, AIO_WRONG_NOTE, flags, arrival->length);
        return 0;
    }
    c->alive = 1;
    if (!life_rights(c->life)->keeps)
        return 0;
    if (notes->next - notes->first > notes->mask) { /* more than there are receives */
        note_violation(c, AIO_WRONG_CREDIT, 0, 0);
        return 0;
    }
    order_append(notes, arrival->slot);
    c->events |= AIO_EVENT_NOTED;
    return 1;
}

/* A frame without credit, whose slot is posted again at once; `size` bytes follow its header. */
static void process_control(struct aio_connection *c, uint8_t kind, uint8_t flags,
                            uint64_t argument, const uint8_t *behind, uint64_t size)
{
    switch (kind) {
    case AIO_FRAME_CREDIT:
        learn_identity(c, argument);
        break;
    case AIO_FRAME_DONE:
        done_append(c, argument, flags);
        break;
    case AIO_FRAME_PING:
        /* Once this side has asked, only the PONG shows that the peer hears it. */
        if (!c->asking)
            c->alive = 1;
        c->controls_pending |= 1 << AIO_FRAME_PONG;
        if (flags >> AIO_LANDING_SHIFT) /* the argument is its address */
            break;
        if (flags & AIO_FRAME_REVOKED)
            note_revoked(c, (uint32_t)(argument >> 32), (uint32_t)argument);
        else
            learn_identity(c, argument);
        break;
    case AIO_FRAME_PONG:
        if (c->asking)
            c->alive = 1;
        c->asking = 0;
        c->ponged = 1;
        c->identity_wanted &= !c->identity_told;
        learn_identity(c, argument);
        break;
    case AIO_FRAME_ABORT:
        if (!(c->said & 1 << AIO_FRAME_ABORT)) { /* the first says why */
            c->arguments_in[kind] = argument;
            words_keep(&c->words_in, behind, size);
        }
        note_frame(c, AIO_FRAME_ABORT);
        break;
    case AIO_FRAME_END:
        if (c->missing) {
            note_violation(c, AIO_WRONG_ORDER, c->missing, 0);
            return;
        }
        if (!(c->said & 1 << AIO_FRAME_END))
            c->arguments_in[kind] = argument;
        note_frame(c, AIO_FRAME_END);
        break;
    default:
        note_violation(c, AIO_WRONG_KIND, kind, 0);
        return;
    }
    if (!(c->said & 1 << AIO_FRAME_CREDIT))
        note_frame(c, AIO_FRAME_CREDIT);
}

/*
 * Whether a message may come now; if not, the violation is noted.  `announced`: its bytes from this
 * frame on.
 */
static int message_is_in_order(struct aio_connection *c, const struct aio_arrival *arrival,
                               uint64_t announced)
{
    if (c->missing && (arrival->large || arrival->landing || announced != c->missing))
        note_violation(c, AIO_WRONG_ORDER, c->missing, 0);
    else if (arrival->large)
        return 1;
    else if (arrival->more ? !arrival->length || announced <= arrival->length
                           : announced != arrival->length)
        note_violation(c, AIO_WRONG_LENGTH, announced, arrival->length);
    else if (arrival->more && announced > c->largest)
        note_violation(c, AIO_WRONG_SIZE, announced, c->largest);
    return !c->violation;
}

/* Post the slot of a frame again at once, as no program is going to get it. */
static void repost_receive(struct aio_connection *c, uint32_t slot)
{
    int code = connection_repost_slot(c, slot);

    if (code < 0 && c->qp) {
        c->freed[c->n_freed++] = (uint16_t)slot;
        c->events |= AIO_EVENT_FRAMES;
    }
    note_post_failure(c, code ? code : send_pending_controls(c));
    if (controls_are_pending(c))
        c->events |= AIO_EVENT_SENT; /* so that Python calls connection_await_sends */
}

/* Take the landing that the peer says it has filled; whether it was allowed to. */
static int take_filled_landing(struct aio_connection *c, uint32_t number, uint32_t length)
{
    if (number > AIO_LANDINGS || !(c->landings.granted & 1 << number) || !length ||
        length > aio_landing_size(number) || length > c->largest)
        return 0;
    c->landings.granted &= (uint8_t)~(1 << number);
    return 1;
}

/* Have Python make a larger landing, if one would have taken this message. */
static void request_landing(struct aio_connection *c, uint64_t length)
{
    struct aio_landings *landings = &c->landings;

    if (length > landings->most || length <= c->recv.stride ||
        (landings->newest && length <= aio_landing_size(landings->newest)))
        return;
    landings->wanted = length;
    c->events |= AIO_EVENT_FRAMES;
}

/* The peer's landing: offered by a PING, or free again. */
static void process_landing(struct aio_connection *c, uint8_t kind, const uint8_t *at)
{
    struct aio_stage *stage = &c->stage;
    uint8_t number = at[1] >> AIO_LANDING_SHIFT;

    if (at[1] & AIO_FRAME_FREE)
        stage->free = stage->number != 0;
    if (kind == AIO_FRAME_PING && number && number <= AIO_LANDINGS) {
        stage->number = number;
        stage->free = 1;
        stage->to_key = aio_read32(at + 4);
        stage->to_addr = aio_read64(at + 8);
        if (stage->size < aio_landing_size(number))
            c->events |= AIO_EVENT_FRAMES; /* Python makes one */
    }
}

/* A frame that takes a credit of the peer's: whether it had one. */
static inline int spend_credit(struct aio_connection *c)
{
    if (c->unused <= 0) {
        note_violation(c, AIO_WRONG_CREDIT, 0, 0);
        return 0;
    }
    if (!--c->unused && c->grows && !c->recv.full)
        c->events |= AIO_EVENT_FRAMES; /* Python gets more slots */
    return 1;
}

/*
 * Whether a frame of a peer that has proved nothing is the proof: a greeting, whose first byte is
 * 0, with the bytes that only the owner of the key can know.  A peer has one try, and the time that
 * the comparison takes does not depend on the bytes.
 */
static int pass_gate(struct aio_connection *c, uint32_t slot, const struct ibv_wc *wc)
{
    const uint8_t *at = (const uint8_t *)(uintptr_t)aio_slot_addr(&c->recv, slot);
    uint8_t difference = 0;

    if (c->gate == AIO_GATE_PROOF && wc->opcode == IBV_WC_RECV &&
        !(wc->wc_flags & IBV_WC_WITH_IMM) && wc->byte_len == AIO_FRAME_SIZE + AIO_PROOF_SIZE) {
        difference = at[0];
        for (uint32_t i = 0; i < AIO_PROOF_SIZE; i++)
            difference |= at[AIO_FRAME_SIZE + i] ^ c->proof[i];
        if (!difference) {
            c->gate = AIO_GATE_OPEN;
            return 1;
        }
    }
    note_violation(c, AIO_WRONG_PROOF, wc->byte_len, 0);
    return 0;
}

static void process_frame(struct aio_connection *c, uint32_t slot, const struct ibv_wc *wc)
{
    uint8_t written = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM;
    uint8_t bare = written || (wc->wc_flags & IBV_WC_WITH_IMM) != 0, flags;
    const uint8_t *at = bare ? (const uint8_t *)&wc->imm_data
                             : (const uint8_t *)(uintptr_t)aio_slot_addr(&c->recv, slot);
    struct aio_arrival arrival = {.length = wc->byte_len, .slot = (uint16_t)slot, .bare = bare};
    uint64_t argument = wc->byte_len;
    uint32_t returned;
    uint8_t kind;

    if (c->gate && !pass_gate(c, slot, wc))
        return;
    if (!bare && wc->byte_len < AIO_FRAME_SIZE) {
        note_violation(c, AIO_WRONG_SHORT, wc->byte_len, 0);
        return;
    }
    kind = at[0] ^ c->number_in; /* another number than the expected leaves bits above the kind */
    if (c->numbered && kind >> AIO_NUMBER_SHIFT) {
        note_violation(c, AIO_WRONG_NUMBER, at[0] >> AIO_NUMBER_SHIFT,
                       c->number_in >> AIO_NUMBER_SHIFT);
        return;
    }
    c->number_in += (uint8_t)(c->numbered << AIO_NUMBER_SHIFT);
    if (written) {
        arrival.landing = at[1] >> AIO_LANDING_SHIFT;
        if (!take_filled_landing(c, arrival.landing, wc->byte_len)) {
            note_violation(c, AIO_WRONG_WRITE, 0, 0);
            return;
        }
    }
    flags = c->stage.most ? at[1] & (uint8_t)~AIO_FRAME_FREE : at[1];
    if (bare && (kind != AIO_FRAME_DATA || flags != arrival.landing << AIO_LANDING_SHIFT)) {
        note_violation(c, AIO_WRONG_BARE, kind, at[1]);
        return;
    }
    if (!bare) {
        arrival.length -= AIO_FRAME_SIZE;
        argument = aio_read64(at + 8);
    }
    if (c->stage.most)
        process_landing(c, kind, at);
    returned = (uint32_t)at[2] << 8 | at[3];
    if (returned) {
        c->credits += returned;
        if (c->queued || c->slot_awaited)
            c->events |= AIO_EVENT_ROOM;
    }
    if (kind == AIO_FRAME_NOTE) {
        if (!spend_credit(c) || note_append(c, &arrival, flags) || c->violation)
            return;
    } else if (aio_kind_takes_credit(kind)) {
        arrival.has_imm = flags & AIO_FRAME_HAS_IMM;
        arrival.imm = arrival.has_imm ? aio_read32(at + 4) : 0;
        arrival.large = kind == AIO_FRAME_RENDEZVOUS;
        arrival.more = !arrival.large && flags & AIO_FRAME_MORE;
        if (!bare && !arrival.large && flags & AIO_FRAME_REQUESTS)
            arrival.requests = c->requested = c->delegated = 1; /* Python asks the program */
        if (!spend_credit(c) || !message_is_in_order(c, &arrival, argument))
            return;
        if (arrival.large || arrival.more)
            request_landing(c, argument);
        c->missing = arrival.more ? argument - arrival.length : 0;
        if (life_rights(c->life)->keeps) {
            c->large += arrival.large;
            arrival_append(c, &arrival);
            if (arrival.large)
                note_frame(c, AIO_FRAME_RENDEZVOUS);
            return;
        }
        while (c->fragments)
            repost_receive(c, c->arrivals[(c->tail + --c->fragments) & c->arrival_mask].slot);
    } else {
        process_control(c, kind, flags, argument, at + AIO_FRAME_SIZE, arrival.length);
        if (c->violation)
            return;
    }
    repost_receive(c, slot);
}

static void complete_receive(struct aio_connection *c, uint32_t slot, const struct ibv_wc *wc)
{
    if (!c->violation && !order_complete(&c->receiving, slot)) {
        note_violation(c, AIO_WRONG_TURN, 1, slot);
        return;
    }
    c->posted--;
    c->receives--;
    if (c->violation)
        return;
    if (c->raw) {
        /* The bytes of a write with an immediate are elsewhere, and the slot is empty. */
        struct aio_arrival arrival = {
            .length = wc->opcode == IBV_WC_RECV_RDMA_WITH_IMM ? 0 : wc->byte_len,
            .slot = (uint16_t)slot,
            .has_imm = (wc->wc_flags & IBV_WC_WITH_IMM) != 0,
            .imm = ntohl(wc->imm_data),
        };

        arrival_append(c, &arrival);
    } else {
        process_frame(c, slot, wc);
    }
}

/* Whether the completion was dealt with; not if the slot may go back to the pool. */
static int complete_send(struct aio_connection *c, uint32_t slot)
{
    if (!order_complete(&c->sending, slot)) {
        note_violation(c, AIO_WRONG_TURN, 0, slot);
        return 1;
    }
    if (slot == c->stage.slot) /* the write out of the stage, if one is under way */
        c->stage.busy = 0;
    if (slot >= c->data_slots) {
        c->control_free[c->n_control_free++] = (uint16_t)(slot - c->data_slots);
        if (controls_are_pending(c))
            c->events |= AIO_EVENT_SENT; /* the last of them may go out in the next line */
        note_post_failure(c, send_pending_controls(c));
    } else if (slots_may_stay(c, &c->send)) {
        c->free[c->n_free++] = (uint16_t)slot;
        if (c->queued || c->slot_awaited)
            c->events |= AIO_EVENT_ROOM;
    } else {
        return 0;
    }
    c->completed++;
    if (c->flush_at && c->completed >= c->flush_at) {
        c->flush_at = 0;
        c->events |= AIO_EVENT_SENT;
    }
    return 1;
}

/* An operation has succeeded. */
static void complete_operation(struct aio_connection *c, uint32_t number)
{
    c->operations_done[c->done_tail++ & c->done_mask] = (uint16_t)number;
    c->events |= AIO_EVENT_OPERATED;
}

/* As complete_send, of the frame behind a noted WRITE, which has succeeded with it. */
static int complete_noted(struct aio_connection *c, uint32_t number)
{
    if (!complete_send(c, c->noted[number]))
        return 0;
    if (!c->violation)
        complete_operation(c, number);
    return 1;
}

/* While the queue pair is being flushed, all that was posted comes back, and is only counted. */
static int complete_flushed(struct aio_connection *c, uint32_t sub, const struct ibv_wc *wc)
{
    if (c->life != AIO_LIFE_FLUSHING || wc->status != IBV_WC_WR_FLUSH_ERR)
        return 0;
    if (sub & AIO_SUB_RECV)
        c->receives--;
    else if (sub < AIO_SUB_READ)
        c->flushed++;
    else
        return 0;
    if (connection_under_way(c) <= 0)
        c->events |= AIO_EVENT_IDLE;
    return 1;
}

/* Whether a completion was dealt with; if not, nothing has changed. */
static int take_completion(struct aio_connection *c, const struct ibv_wc *wc)
{
    uint32_t sub = AIO_SUB(wc->wr_id);

    if (!life_rights(c->life)->takes)
        return 0;
    if (wc->status != IBV_WC_SUCCESS)
        return complete_flushed(c, sub, wc);
    if (sub & AIO_SUB_RECV)
        complete_receive(c, sub & ~AIO_SUB_RECV, wc);
    else if (sub < AIO_SUB_READ)
        return complete_send(c, sub);
    else if (sub < AIO_SUB_OPERATE) {
        if (c->n_reads_done < c->most_reads)
            c->reads_done[c->n_reads_done++] = (uint16_t)(sub - AIO_SUB_READ);
        c->events |= AIO_EVENT_FRAMES;
    } else if (sub < AIO_SUB_NOTED) {
        complete_operation(c, sub - AIO_SUB_OPERATE);
    } else {
        return complete_noted(c, sub - AIO_SUB_NOTED);
    }
    return 1;
}

int connection_complete(struct aio_connection *c, const struct ibv_wc *wc)
{
    uint32_t events;

    if (!take_completion(c, wc))
        return AIO_FOR_PYTHON;
    events = c->events;
    c->events = 0;
    return (int)events;
}

/* READs, WRITEs and atomics. */

/* RDMA READ a piece of a large message. */
int connection_post_read(struct aio_connection *c, uint32_t number, uint64_t addr, uint32_t length,
                         uint32_t lkey, uint64_t remote_addr, uint32_t rkey)
{
    struct ibv_sge sge = {.addr = addr, .length = length, .lkey = lkey};
    struct ibv_send_wr wr = {
        .wr_id = c->id | (uint64_t)(AIO_SUB_READ | number) << AIO_SUB_SHIFT,
        .sg_list = &sge,
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_READ,
        .send_flags = IBV_SEND_SIGNALED,
        .wr.rdma = {.remote_addr = remote_addr, .rkey = rkey},
    };
    struct ibv_send_wr *bad = NULL;
    int code = c->qp ? connection_post_sends(c) : ENOTCONN;

    return code ? code : aio_post_errno(ibv_post_send(c->qp, &wr, &bad));
}

/* The work request of an operation of the program. */
static void operation_request(const struct aio_connection *c, const struct aio_operation *operation,
                              struct ibv_sge *sge, struct ibv_send_wr *wr)
{
    *sge = (struct ibv_sge){
        .addr = operation->addr, .length = operation->length, .lkey = operation->lkey};
    *wr = (struct ibv_send_wr){
        .wr_id = c->id | (uint64_t)(AIO_SUB_OPERATE + operation->number) << AIO_SUB_SHIFT,
        .sg_list = sge,
        .num_sge = operation->length > 0,
        .opcode = operation->opcode,
        .send_flags = operation->quiet ? 0 : IBV_SEND_SIGNALED,
    };
    if (wr->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || wr->opcode == IBV_WR_ATOMIC_CMP_AND_SWP) {
        wr->wr.atomic.remote_addr = operation->remote_addr;
        wr->wr.atomic.rkey = operation->rkey;
        wr->wr.atomic.compare_add = operation->compare_add;
        wr->wr.atomic.swap = operation->swap;
    } else {
        wr->wr.rdma.remote_addr = operation->remote_addr;
        wr->wr.rdma.rkey = operation->rkey;
        if (wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
            wr->imm_data = htonl((uint32_t)operation->compare_add);
    }
    if (wr->opcode == IBV_WR_RDMA_WRITE && operation->length <= c->inline_size)
        wr->send_flags |= IBV_SEND_INLINE;
}

/*
 * Post a WRITE, and in the same chain the frame that tells of it: an empty message, or a NOTE.  The
 * reliable connection executes both in their order, so that the frame arrives when the bytes
 * are in place, on iWARP too.  The WRITE asks for no completion: if it fails, it has one all the
 * same, and the frame is flushed.
 */
static int post_noted(struct aio_connection *c, const struct aio_operation *operation)
{
    enum aio_frame_kind kind = (enum aio_frame_kind)operation->noted;
    uint32_t size = AIO_FRAME_SIZE, imm = (uint32_t)operation->compare_add, slot;
    struct ibv_send_wr *bad = NULL, wr[2];
    struct ibv_sge sge[2];
    uint64_t argument = 0;
    uint8_t *at;
    int code;

    if (c->queued || connection_lacks(c) != AIO_LACKS_NOTHING)
        return AIO_NO_ROOM;
    slot = c->free[--c->n_free];
    at = (uint8_t *)(uintptr_t)aio_slot_addr(&c->send, slot);
    if (kind == AIO_FRAME_NOTE) {
        wire_put32(at + AIO_FRAME_SIZE, operation->rkey);
        wire_put32(at + AIO_FRAME_SIZE + 4, 0);
        wire_put32(at + AIO_FRAME_SIZE + 8, operation->length);
        size += AIO_NOTE_SIZE;
        argument = operation->remote_addr;
    } else {
        c->messages_sent++;
    }
    c->credits--;
    wire_put_header(at, next_first_byte(c, kind), AIO_FRAME_HAS_IMM | grant_landing(c),
                    grant_credits(c, 0), imm, argument);
    sge[0] = (struct ibv_sge){
        .addr = operation->addr, .length = operation->length, .lkey = operation->lkey};
    sge[1] =
        (struct ibv_sge){.addr = (uintptr_t)at, .length = size, .lkey = slot_key(&c->send, slot)};
    wr[0] = (struct ibv_send_wr){
        .wr_id = c->id | (uint64_t)(AIO_SUB_OPERATE + operation->number) << AIO_SUB_SHIFT,
        .next = &wr[1],
        .sg_list = &sge[0],
        .num_sge = 1,
        .opcode = IBV_WR_RDMA_WRITE,
        .send_flags = operation->length <= c->inline_size ? IBV_SEND_INLINE : 0,
        .wr.rdma = {.remote_addr = operation->remote_addr, .rkey = operation->rkey},
    };
    wr[1] = (struct ibv_send_wr){
        .wr_id = c->id | (uint64_t)(AIO_SUB_NOTED + operation->number) << AIO_SUB_SHIFT,
        .sg_list = &sge[1],
        .num_sge = 1,
        .opcode = IBV_WR_SEND,
        .send_flags = c->send_flags | (size <= c->inline_size ? IBV_SEND_INLINE : 0),
    };
    code = aio_post_errno(ibv_post_send(c->qp, wr, &bad));
    if (code)
        return code;
    c->noted[operation->number] = (uint16_t)slot;
    c->to_flush = ++c->sent;
    order_append(&c->sending, slot);
    c->operating++;
    return 0;
}

/* Post an operation of the program. */
int connection_post_operation(struct aio_connection *c, const struct aio_operation *operation)
{
    struct ibv_send_wr wr, *bad = NULL;
    struct ibv_sge sge;
    int code = connection_post_sends(c);

    if (code)
        return code;
    if (operation->noted)
        return post_noted(c, operation);
    operation_request(c, operation, &sge, &wr);
    code = aio_post_errno(ibv_post_send(c->qp, &wr, &bad));
    if (!code)
        c->operating++;
    return code;
}

/*
 * Post several, in their order.  Of a chain that is refused, those before the first bad request are
 * under way.  If the provider does not name it, all of them may be.
 */
int connection_post_operations(struct aio_connection *c, const struct aio_operation *operations,
                               uint32_t count, uint32_t *posted)
{
    struct ibv_send_wr wrs[AIO_OPERATION_CHAIN], *bad = NULL;
    struct ibv_sge sges[AIO_OPERATION_CHAIN];
    int code = connection_post_sends(c);

    *posted = 0;
    if (code)
        return code;
    for (uint32_t i = 0; i < count; i++) {
        operation_request(c, &operations[i], &sges[i], &wrs[i]);
        if (i)
            wrs[i - 1].next = &wrs[i];
    }
    code = aio_post_errno(ibv_post_send(c->qp, wrs, &bad));
    *posted = code && bad ? (uint32_t)(bad - wrs) : count;
    c->operating += *posted;
    return code;
}

/* Making. */

/*
 * Divide a window of so many data messages: the program may keep one half in their slots, and a
 * CREDIT frame is due when the other half is owed.  So the peer gets credits however much of the
 * window is kept.
 */
static void set_window(struct aio_connection *c, int64_t window)
{
    c->most_kept = window > 1 ? (uint32_t)(window + 1) / 2 : 0;
    c->due = window > 1 ? window / 2 : 1;
    c->chain = window < 16 ? 1 : window > 8 * AIO_CHAIN ? AIO_CHAIN : (uint32_t)(window / 8);
}

void connection_free(struct aio_connection *c)
{
    if (!c)
        return;
    free(c->free);
    free(c->control_free);
    free(c->freed);
    free(c->reads_done);
    free(c->dones.items);
    free(c->dones_pending.items);
    free(c->arrivals);
    free(c->sending.slots);
    free(c->receiving.slots);
    free(c->operations_free);
    free(c->operations_done);
    free(c->noted);
    free(c->notes.slots);
    free(c->send.keys);
    free(c->recv.keys);
    free(c->revoked);
    free(c);
}

/* Zeros, at least one; NULL without memory. */
static void *zeros_of(size_t count, size_t size)
{
    return calloc(count ? count : 1, size);
}

static int dones_make(struct aio_dones *dones, uint32_t count)
{
    dones->mask = aio_power(count) - 1;
    dones->items = zeros_of(dones->mask + 1, sizeof(*dones->items));
    return dones->items != NULL;
}

static int order_make(struct aio_order *order, uint32_t count)
{
    order->mask = aio_power(count) - 1;
    order->slots = zeros_of(order->mask + 1, sizeof(*order->slots));
    return order->slots != NULL;
}

static int sizes_fit(const struct aio_sizes *sizes)
{
    return sizes->arrivals && sizes->arrivals <= AIO_SUB_RECV &&
           !(sizes->arrivals & (sizes->arrivals - 1)) && sizes->receives <= sizes->arrivals &&
           sizes->sends <= sizes->send_depth &&
           (uint64_t)sizes->send_depth + sizes->controls < AIO_SUB_READ &&
           (uint64_t)sizes->controls + sizes->answers <= sizes->receives &&
           sizes->answers <= sizes->exchanges && sizes->exchanges <= 0xFFFF &&
           sizes->reads <= AIO_SUB_OPERATE - AIO_SUB_READ;
}

int connection_new(const struct aio_sizes *sizes, struct aio_connection **place)
{
    struct aio_connection *c;

    if (!sizes_fit(sizes))
        return EINVAL;
    c = calloc(1, sizeof(*c));
    if (!c)
        return ENOMEM;
    c->free = zeros_of(sizes->send_depth, sizeof(*c->free));
    c->control_free = zeros_of(sizes->controls, sizeof(*c->control_free));
    c->arrivals = zeros_of(sizes->arrivals, sizeof(*c->arrivals));
    c->reads_done = zeros_of(sizes->reads, sizeof(*c->reads_done));
    if (!c->free || !c->control_free || !c->arrivals || !c->reads_done ||
        !dones_make(&c->dones, sizes->exchanges) ||
        !dones_make(&c->dones_pending, sizes->exchanges) ||
        !order_make(&c->sending, sizes->send_depth + sizes->controls) ||
        !order_make(&c->receiving, sizes->arrivals)) {
        connection_free(c);
        return ENOMEM;
    }
    c->raw = sizes->raw != 0;
    c->grows = sizes->grows != 0;
    c->eager_size = sizes->eager_size;
    c->largest = sizes->largest;
    c->most_reads = sizes->reads;
    c->data_slots = sizes->send_depth;
    c->arrival_mask = sizes->arrivals - 1;
    for (uint32_t i = 0; i < sizes->sends; i++)
        c->free[i] = (uint16_t)i;
    c->n_free = sizes->sends;
    for (uint32_t i = 0; i < sizes->controls; i++)
        c->control_free[i] = (uint16_t)i;
    c->n_control_free = c->controls = c->frames.base = sizes->controls;
    for (uint32_t i = 0; i < sizes->receives; i++)
        order_append(&c->receiving, i);
    c->posted = sizes->receives;
    c->control = (int64_t)sizes->controls + sizes->answers;
    c->unused = c->granted = (int64_t)sizes->receives - c->control;
    set_window(c, c->unused);
    *place = c;
    return 0;
}

static void slots_place(struct aio_slots *slots, const struct aio_place *place)
{
    slots->addr = place->addr;
    slots->stride = place->stride;
    slots->key = place->key;
}

void connection_bind(struct aio_connection *c, const struct aio_adapter *adapter)
{
    slots_place(&c->send, &adapter->send);
    c->send.base = adapter->send.count;
    slots_place(&c->recv, &adapter->receive);
    c->recv.base = adapter->receive.count;
    slots_place(&c->frames, &adapter->frames);
    c->crowded = adapter->crowded;
    c->recv.full = !c->crowded; /* without a pool no slot comes; else connection_set_keys tells */
    c->send_flags = adapter->send_flags;
    c->inline_size = adapter->inline_size;
    c->id = adapter->id;
    c->qp = adapter->qp;
    c->life = life_after(c->life, AIO_LIFE_EVENT_BIND);
}

void connection_agree(struct aio_connection *c, const struct aio_terms *terms)
{
    c->eager_size = terms->eager_size;
    c->bare_size = terms->bare_size;
    c->fragmented_size = terms->fragmented_size;
    c->stage.most = terms->written_size;
    c->landings.most = terms->landed_size;
    c->numbered = terms->numbered;
    c->identity = terms->identity;
    c->credits += terms->credits;
}

void connection_require_proof(struct aio_connection *c, const uint8_t *proof)
{
    c->gate = proof ? AIO_GATE_PROOF : AIO_GATE_SHUT;
    if (proof)
        memcpy(c->proof, proof, AIO_PROOF_SIZE);
}

void connection_prove(struct aio_connection *c, const uint8_t *proof)
{
    c->gate = AIO_GATE_OPEN;
    c->proving = 1;
    memcpy(c->proof, proof, AIO_PROOF_SIZE);
}

/* Life. */

/*
 * HOLD and END drop the sends that are not posted yet, as the adapter takes none any more.  After
 * CLOSE neither the queue pair nor a slot is touched.
 */
void connection_advance_life(struct aio_connection *c, enum aio_life_event event)
{
    c->life = life_after(c->life, event);
    if (event == AIO_LIFE_EVENT_HOLD || event == AIO_LIFE_EVENT_END)
        drop_chain(c);
    if (event == AIO_LIFE_EVENT_CLOSE)
        c->qp = NULL;
}

/* Slots of a pool. */

/*
 * Slots that come and go lie in registrations of `step` slots each; `keys` has 0 where there is no
 * registration at the time.
 */
int connection_set_keys(struct aio_connection *c, int receives, uint64_t more_addr, uint32_t step,
                        uint32_t *keys, size_t count, int leaving, int full)
{
    struct aio_slots *slots = receives ? &c->recv : &c->send;

    if (!c->freed) {
        c->freed = zeros_of(c->arrival_mask + 1, sizeof(*c->freed));
        if (!c->freed)
            return ENOMEM;
    }
    free(slots->keys);
    slots->keys = keys;
    slots->n_keys = (uint32_t)count;
    slots->more = 0;
    for (size_t i = 0; i < count; i++)
        slots->more |= keys[i] != 0;
    slots->more_addr = more_addr;
    slots->step = step;
    slots->leaving = (uint8_t)leaving;
    slots->full = (uint8_t)full;
    return 0;
}

/*
 * Of the slots, `answers` more than before are for answers to large messages.  `grown`: slots have
 * come, and the peer is to hear of their credits at once.
 */
void connection_resize(struct aio_connection *c, uint32_t receives, uint32_t answers, int grown)
{
    c->control += answers;
    c->grown |= (uint8_t)grown;
    set_window(c, (int64_t)receives - c->control);
}

int connection_add_receives(struct aio_connection *c, const uint16_t *slots, uint32_t count)
{
    int code;

    for (uint32_t i = 0; i < count; i++)
        if (slots[i] >= c->recv.base + c->recv.n_keys * c->recv.step)
            return EINVAL;
    code = post_freed_receives(c);
    if (!code)
        code = connection_post_receives(c, slots, count);
    c->posted += count;
    return code ? code : connection_send_credits(c);
}

int connection_add_send_slot(struct aio_connection *c, uint32_t slot)
{
    if (slot >= c->data_slots || c->n_free >= c->data_slots)
        return EINVAL;
    c->free[c->n_free++] = (uint16_t)slot;
    return 0;
}

int connection_remove_send_slot(struct aio_connection *c, uint32_t slot)
{
    for (uint32_t i = 0; i < c->n_free; i++) {
        if (c->free[i] == slot) {
            memmove(&c->free[i], &c->free[i + 1], (--c->n_free - i) * sizeof(*c->free));
            return 1;
        }
    }
    return 0;
}

/* Arrays of numbers for Python. */

uint32_t connection_free_slots(const struct aio_connection *c, const uint16_t **slots)
{
    *slots = c->free;
    return c->n_free;
}

uint32_t connection_free_operations(const struct aio_connection *c, const uint16_t **numbers)
{
    *numbers = c->operations_free;
    return c->n_operations_free;
}

uint64_t connection_argument(const struct aio_connection *c, enum aio_frame_kind kind)
{
    return c->arguments_in[kind];
}

const uint8_t *connection_words(const struct aio_connection *c, uint8_t *size)
{
    *size = c->words_in.size;
    return c->words_in.bytes;
}

struct aio_news connection_news(const struct aio_connection *c)
{
    const struct aio_stage *stage = &c->stage;

    return (struct aio_news){
        .reads = c->reads_done,
        .n_reads = c->n_reads_done,
        .freed = c->freed,
        .n_freed = c->n_freed,
        .landing = c->landings.wanted,
        .stage = stage->number && stage->size < aio_landing_size(stage->number) ? stage->number : 0,
    };
}

void connection_forget_news(struct aio_connection *c)
{
    c->n_reads_done = c->n_freed = 0;
    c->landings.wanted = 0;
}

void connection_count_returned(struct aio_connection *c, int receive, int flushed)
{
    if (receive)
        c->receives--;
    else if (flushed)
        c->flushed++;
    else
        c->completed++;
}

/* Landings. */

int connection_offer_landing(struct aio_connection *c, uint32_t number, uint64_t addr, uint32_t key)
{
    struct aio_landings *landings = &c->landings;

    if (number <= landings->newest || number > AIO_LANDINGS)
        return EINVAL;
    landings->addr[number] = addr;
    landings->key = key;
    landings->newest = (uint8_t)number;
    landings->freed = 0;
    landings->offered = 1;
    return c->qp ? send_pending_controls(c) : 0;
}

void connection_set_stage(struct aio_connection *c, uint64_t addr, uint32_t key, uint64_t size)
{
    c->stage.addr = addr;
    c->stage.key = key;
    c->stage.size = size;
}

/* What Python and the line wait for. */

void connection_line_grew(struct aio_connection *c)
{
    c->queued++;
}

void connection_line_shrank(struct aio_connection *c)
{
    c->queued--;
}

void connection_set_watched(struct aio_connection *c, int watched)
{
    c->watched = (uint8_t)watched;
}

/*
 * Completed sends wake the loop if Python waits for them (`flush_at`; 0: for none), if the line
 * waits for a slot, or if frames without data do.
 */
int connection_await_sends(struct aio_connection *c, uint64_t flush_at)
{
    c->slot_awaited = c->queued && (c->slot_awaited || connection_lacks(c) == AIO_LACKS_SLOT);
    c->flush_at = flush_at;
    return flush_at || (life_rights(c->life)->says && (c->slot_awaited || controls_are_pending(c)));
}

/* While a large message waits, no later one goes past it in fragments, or into the landing. */
void connection_large_begins(struct aio_connection *c)
{
    c->large_waiting++;
}

void connection_large_ends(struct aio_connection *c)
{
    c->large_waiting--;
}

void connection_count_large_sent(struct aio_connection *c, uint64_t length)
{
    c->messages_sent++;
    c->bytes_sent += length;
}

/* Where tasks wait in line, the next frame is one of theirs, so that none is marked. */
void connection_begin_requests(struct aio_connection *c)
{
    c->requesting = !c->queued;
}

/* The chain, and turns of the loop. */

void connection_begin_burst(struct aio_connection *c)
{
    c->in_a_row = 2;
}

/*
 * The first two sends of a turn are posted at once, so that a lone send neither waits nor pays for
 * a call of the loop.  From the third on they are posted together, at the end of the turn: the
 * second, which has just been posted, is when the loop is asked for that.
 */
int connection_needs_turn(struct aio_connection *c)
{
    return !c->n_unposted && c->in_a_row < 2 && ++c->in_a_row == 2 && !c->delivering &&
           !c->turn_flushes;
}

void connection_expect_turn(struct aio_connection *c)
{
    c->turn_flushes = 1;
}

void connection_begin_delivery(struct aio_connection *c, uint32_t events)
{
    c->delivering = 1;
    c->turn_flushes &= events != 0;
}

int connection_end_delivery(struct aio_connection *c)
{
    c->delivering = c->in_a_row = 0;
    return c->n_unposted != 0;
}

void connection_note_error(struct aio_connection *c, int code)
{
    if (code > 0 && !c->error)
        c->error = code;
}

/* Signs of life. */

int connection_was_alive(struct aio_connection *c)
{
    int alive = c->alive;

    c->alive = 0;
    return alive;
}

int connection_ask_life(struct aio_connection *c)
{
    if (c->asking)
        return AIO_NO_ROOM;
    c->asking = 1;
    return connection_send_control(c, AIO_FRAME_PING, 0, 0);
}

/* Whose memory a name names. */

/*
 * Whether the peer has said that it ends.  It may be gone before it answers, and the end of this
 * side would wait for a frame that cannot arrive; a peer that stays asks when it needs to know.
 */
static int peer_has_ended(const struct aio_connection *c)
{
    return (c->said & (1 << AIO_FRAME_END | 1 << AIO_FRAME_ABORT)) != 0;
}

int connection_ask_identity(struct aio_connection *c, int awaited)
{
    if (!awaited && peer_has_ended(c))
        return 0;
    if (c->raw || ((c->peer_identity || c->ponged) && c->identity_told))
        return 0;
    c->identity_awaited |= (uint8_t)awaited;
    c->identity_wanted = 1;
    return c->qp ? send_pending_controls(c) : 0;
}

/*
 * A peer without identity checks nothing.  Exposures that follow one another go in one frame.  Of
 * more than there is room for, the oldest are not told: they are refused by the adapter of this
 * side, as they are anyway.
 */
int connection_revoke(struct aio_connection *c, uint32_t generation)
{
    uint32_t i = 0;

    if (!c->peer_identity || peer_has_ended(c) || !c->qp || !life_rights(c->life)->says)
        return 0;
    while (i < c->n_revoking && c->revoking[i].last + 1 != generation &&
           c->revoking[i].first != generation + 1)
        i++;
    if (i == c->n_revoking) {
        if (c->n_revoking == AIO_REVOKING)
            take_revoking(c);
        c->revoking[c->n_revoking++] =
            (struct aio_exposures){.first = generation, .last = generation};
    } else if (c->revoking[i].last + 1 == generation) {
        c->revoking[i].last = generation;
    } else {
        c->revoking[i].first = generation;
    }
    return send_pending_controls(c);
}

int connection_is_revoked(const struct aio_connection *c, uint32_t generation)
{
    return c->revoked && c->revoked[generation % AIO_REVOKED] == generation;
}

enum aio_admission connection_admission(const struct aio_connection *c, uint64_t owner,
                                        uint64_t generation)
{
    if (!owner || c->raw)
        return AIO_ADMITTED;
    if (owner != c->peer_identity)
        return AIO_REFUSED_OWNER;
    return generation && connection_is_revoked(c, (uint32_t)generation) ? AIO_REFUSED_REVOKED
                                                                        : AIO_ADMITTED;
}

/* Arrivals. */

void connection_delegate(struct aio_connection *c, int delegated)
{
    c->delegated = (uint8_t)delegated;
}

void connection_await(struct aio_connection *c, int waiting)
{
    c->waiting = (uint8_t)waiting;
}

/* See credit_is_due. */
int connection_puts_credit_off(const struct aio_connection *c)
{
    return c->due <= 1 && c->unused <= 0 && c->posted > c->control && !c->raw;
}

enum aio_receivable connection_begin_receive(struct aio_connection *c)
{
    if (c->head != c->tail)
        return c->arrivals[c->head & c->arrival_mask].large ? AIO_RECEIVE_PYTHON
                                                            : AIO_RECEIVE_MESSAGE;
    c->waiting = 1;
    connection_note_error(c, connection_send_credits(c));
    return c->error ? AIO_RECEIVE_PYTHON : AIO_RECEIVE_WAIT;
}

/* A program that keeps half of the window in its slots gets its next messages by copies. */
int connection_is_delegated(const struct aio_connection *c)
{
    return c->delegated || c->kept >= c->most_kept;
}

const struct aio_arrival *connection_first(const struct aio_connection *c)
{
    return c->head == c->tail ? NULL : &c->arrivals[c->head & c->arrival_mask];
}

uint64_t connection_measure_first(const struct aio_connection *c, uint32_t *frames)
{
    uint32_t count = 0;
    uint64_t length = 0;

    do
        length += c->arrivals[(c->head + count) & c->arrival_mask].length;
    while (c->arrivals[(c->head + count++) & c->arrival_mask].more);
    *frames = count;
    return length;
}

const char *connection_first_bytes(const struct aio_connection *c)
{
    return arrival_bytes(c, &c->arrivals[c->head & c->arrival_mask]);
}

uint32_t connection_drop_first(struct aio_connection *c)
{
    const struct aio_arrival *arrival = &c->arrivals[c->head++ & c->arrival_mask];

    c->messages_received++;
    c->bytes_received += arrival->length;
    return arrival->slot;
}

/* The message lies in one slot; it has to be copied where the program has half of the window. */
int connection_take_first(struct aio_connection *c)
{
    uint32_t length = c->arrivals[c->head++ & c->arrival_mask].length;

    c->messages_received++;
    c->bytes_received += length;
    if (c->kept >= c->most_kept)
        return 0;
    c->kept++;
    return 1;
}

/*
 * A peer that breaks the rules may write to its landing meanwhile: the message is what was copied,
 * and is looked at afterwards.
 */
void connection_copy_first(struct aio_connection *c, char *at, uint16_t *slots, uint32_t count)
{
    c->messages_received++;
    c->inner -= count - 1;
    for (uint32_t i = 0; i < count; i++) {
        const struct aio_arrival *arrival = &c->arrivals[c->head++ & c->arrival_mask];

        memcpy(at, arrival_bytes(c, arrival), arrival->length);
        c->landings.freed |= arrival->landing && arrival->landing == c->landings.newest;
        c->bytes_received += arrival->length;
        at += arrival->length;
        slots[i] = arrival->slot;
    }
}

void connection_skip_first(struct aio_connection *c)
{
    if (c->head == c->tail)
        return;
    c->inner -= c->arrivals[c->head & c->arrival_mask].more;
    c->large -= c->arrivals[c->head++ & c->arrival_mask].large != 0;
    if ((int32_t)(c->announced - c->head) < 0)
        c->announced = c->head;
}

void connection_take_large(struct aio_connection *c, uint64_t length)
{
    connection_skip_first(c);
    c->messages_received++;
    c->bytes_received += length;
}

void connection_cut_arrivals(struct aio_connection *c, uint32_t count)
{
    uint32_t end = c->head, kept = 0;

    c->inner = 0;
    for (; end != c->tail; end++) {
        if (c->arrivals[end & c->arrival_mask].large && kept++ == count)
            break;
        c->inner += c->arrivals[end & c->arrival_mask].more;
    }
    if (end != c->tail)
        c->large = count;
    for (uint32_t i = 0; i < c->fragments; i++)
        c->arrivals[(end + i) & c->arrival_mask] = c->arrivals[(c->tail + i) & c->arrival_mask];
    c->tail = end;
    if ((int32_t)(c->announced - end) > 0)
        c->announced = end;
}

/*
 * Have room in the ring for a message of each receive that may be posted, and for the large ones,
 * which give their slots back before the program has taken them.  0 or ENOMEM.
 */
static int make_room_for_arrivals(struct aio_connection *c, uint32_t receives)
{
    uint32_t before = c->arrival_mask + 1, after = aio_power(receives + c->large);
    struct aio_arrival *larger;

    if (after <= before)
        return 0;
    larger = zeros_of(after, sizeof(*larger));
    if (!larger)
        return ENOMEM;
    for (uint32_t at = c->head; at != c->tail + c->fragments; at++)
        larger[at & (after - 1)] = c->arrivals[at & (before - 1)];
    free(c->arrivals);
    c->arrivals = larger;
    c->arrival_mask = after - 1;
    return 0;
}

int connection_next_announcement(struct aio_connection *c, uint32_t receives,
                                 struct aio_announcement *announcement)
{
    struct aio_arrival *arrival;
    const uint8_t *frame;
    int code = make_room_for_arrivals(c, receives);

    if (code)
        return code;
    if ((int32_t)(c->announced - c->head) < 0)
        c->announced = c->head;
    while (c->announced != c->tail && c->arrivals[c->announced & c->arrival_mask].large != 1)
        c->announced++;
    if (c->announced == c->tail)
        return AIO_NO_ROOM;
    arrival = &c->arrivals[c->announced & c->arrival_mask];
    frame = (const uint8_t *)(uintptr_t)aio_slot_addr(&c->recv, arrival->slot);
    *announcement = (struct aio_announcement){
        .length = aio_read64(frame + 8),
        .body = frame + AIO_FRAME_SIZE,
        .body_size = arrival->length < AIO_HEAD_SIZE ? arrival->length : AIO_HEAD_SIZE,
        .imm = arrival->imm,
        .slot = arrival->slot,
        .has_imm = arrival->has_imm,
    };
    return 0;
}

void connection_accept_announcement(struct aio_connection *c)
{
    c->arrivals[c->announced & c->arrival_mask].large = 2;
}

int connection_next_done(struct aio_connection *c, uint64_t *number, uint32_t *flags)
{
    const struct aio_done *done;

    if (c->dones.head == c->dones.tail)
        return 0;
    done = &c->dones.items[c->dones.head++ & c->dones.mask];
    *number = done->number;
    *flags = done->flags;
    return 1;
}

/* Each has a receive slot of its own, so that there is room for as many as there may be slots. */
int connection_allow_notes(struct aio_connection *c)
{
    return c->notes.slots || order_make(&c->notes, c->receiving.mask + 1) ? 0 : ENOMEM;
}

int connection_next_note(struct aio_connection *c, struct aio_note *note)
{
    struct aio_order *notes = &c->notes;
    const uint8_t *at;
    uint16_t slot;

    if (notes->first == notes->next || !life_rights(c->life)->takes)
        return 0;
    slot = notes->slots[notes->first++ & notes->mask];
    at = (const uint8_t *)(uintptr_t)aio_slot_addr(&c->recv, slot);
    *note = (struct aio_note){
        .addr = aio_read64(at + 8),
        .length = aio_read64(at + AIO_FRAME_SIZE + 4),
        .key = aio_read32(at + AIO_FRAME_SIZE),
        .imm = aio_read32(at + 4),
        .slot = slot,
    };
    return 1;
}

const void *connection_slot_bytes(const struct aio_connection *c, uint32_t slot, int bare)
{
    if (!life_rights(c->life)->takes)
        return NULL;
    return (const void *)(uintptr_t)(aio_slot_addr(&c->recv, slot) + head_size(c, bare));
}

uint64_t connection_slot_offset(const struct aio_connection *c, uint32_t slot, int bare, int *more)
{
    *more = slot >= c->recv.base;
    return (uint64_t)(slot - (*more ? c->recv.base : 0)) * c->recv.stride + head_size(c, bare);
}

void connection_release_kept(struct aio_connection *c)
{
    c->kept--;
}

enum aio_violation connection_violation(const struct aio_connection *c, uint64_t *first,
                                        uint64_t *second)
{
    *first = c->wrong[0];
    *second = c->wrong[1];
    return (enum aio_violation)c->violation;
}

/* Operations. */

int connection_allow_operations(struct aio_connection *c, uint32_t count)
{
    uint16_t *numbers, *done, *noted;

    if (c->n_operations || !count || count > AIO_MOST_OPERATIONS)
        return EINVAL;
    numbers = zeros_of(count, sizeof(*numbers));
    done = zeros_of(aio_power(count), sizeof(*done));
    noted = zeros_of(count, sizeof(*noted));
    if (!numbers || !done || !noted) {
        free(numbers);
        free(done);
        free(noted);
        return ENOMEM;
    }
    for (uint32_t i = 0; i < count; i++)
        numbers[i] = (uint16_t)i;
    c->operations_free = numbers;
    c->operations_done = done;
    c->noted = noted;
    c->done_mask = aio_power(count) - 1;
    c->n_operations = c->n_operations_free = count;
    return 0;
}

void connection_listen_for_operations(struct aio_connection *c)
{
    c->listens = 1;
}

int connection_rest_operations(struct aio_connection *c)
{
    int idle = !c->listens && c->n_operations_free == c->n_operations;

    c->listens = 0;
    return idle;
}

void connection_await_number(struct aio_connection *c, int wanted)
{
    c->number_awaited = (uint8_t)wanted;
}

int connection_number_is_awaited(const struct aio_connection *c)
{
    return c->number_awaited;
}

int connection_may_operate(const struct aio_connection *c)
{
    return c->qp && life_rights(c->life)->operates;
}

int connection_peek_number(const struct aio_connection *c)
{
    if (!c->n_operations_free || c->number_awaited)
        return AIO_NO_ROOM;
    return c->operations_free[c->n_operations_free - 1];
}

int connection_take_number(struct aio_connection *c)
{
    return c->n_operations_free ? c->operations_free[--c->n_operations_free] : AIO_NO_ROOM;
}

int connection_release_number(struct aio_connection *c, uint32_t number)
{
    if (number >= c->n_operations || c->n_operations_free >= c->n_operations)
        return EINVAL;
    c->operations_free[c->n_operations_free++] = (uint16_t)number;
    return 0;
}

uint32_t connection_noted_slot(const struct aio_connection *c, uint32_t number)
{
    return c->noted[number];
}

void connection_end_operation(struct aio_connection *c, uint32_t number)
{
    c->operating--;
    c->operations_free[c->n_operations_free++] = (uint16_t)number;
}

int connection_next_completed(struct aio_connection *c)
{
    return c->done_head == c->done_tail ? AIO_NO_ROOM
                                        : c->operations_done[c->done_head++ & c->done_mask];
}

void connection_forget_completed(struct aio_connection *c)
{
    c->done_head = c->done_tail;
}

uint32_t connection_completed_operations(const struct aio_connection *c)
{
    return c->done_tail - c->done_head;
}

void connection_count_operation(struct aio_connection *c, enum ibv_wr_opcode opcode,
                                uint64_t length)
{
    switch (opcode) {
    case IBV_WR_RDMA_READ:
        c->bytes_read += length;
        break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        c->atomics++;
        break;
    default:
        c->bytes_written += length;
    }
}

/* Facts. */

enum aio_life connection_life(const struct aio_connection *c)
{
    return c->life;
}

int64_t connection_under_way(const struct aio_connection *c)
{
    return c->receives + (int64_t)(c->sent - c->completed - c->flushed) + c->operating;
}

#define FACT(name, value)                                                                          \
    int64_t connection_##name(const struct aio_connection *c)                                      \
    {                                                                                              \
        return (int64_t)(value);                                                                   \
    }

AIO_CONNECTION_COUNTERS(FACT)
AIO_CONNECTION_FACTS(FACT)
AIO_CONNECTION_FLAGS(FACT)
