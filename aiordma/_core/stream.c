/*
 * The data path of a stream (the rsockets protocol) between adapter and rings.  This file alone
 * writes a struct aio_stream; stream.h has its commands, and says what each returns.
 *
 * Theory of operation
 *   The rules of flow control are here, and nowhere else.  By them the drain takes the frequent
 *   completions without Python: data within bounds, credits within bounds, and sent messages.  It
 *   leaves every other completion to Python, and then has changed nothing.  aiordma/rsocket has the
 *   handshake, the mappings and the end; it gives commands, which follow the same rules, and finds
 *   the words for a violation.
 *
 *   A message of data needs two things.  It needs space: the receiver advertises buffers, the
 *   sender fills each completely before it uses the next, and at most two are advertised and not
 *   full.  And it needs a credit: both sides count data messages, and the receiver states the
 *   number up to which the sender may count.  That limit is absolute and has 16 bits, so that
 *   repeating it changes nothing.  Both are enforced exactly: the waiting messages never exceed the
 *   ring and the credits.  Every check comes before the first change.
 *
 *   A word has no address for the receiver: the bytes lie in the ring in the order of the messages,
 *   without gaps.  The ring is advertised as two halves in turn.
 *
 *   Messages complete in the order in which they were posted, and a completion stands for all
 *   before it.  So only some messages of data ask for one: enough for the ring and the queue never
 *   to be full of messages without a completion.  A message that fails completes always.
 *
 *   Both rings begin small.  A larger ring for sending takes over at once: the count of free bytes
 *   is of that ring, and messages in the first ring complete without effect on it.  A larger ring
 *   for receiving is announced in the place of the first half of the ring, so that the bytes go on
 *   there, behind the end of the ring; C moves to it when these are read.  Python makes the rings.
 *
 *   What a stream may do follows from its states (stream_life.h), and from no other flag.
 */
#include "stream.h"

#include <stdlib.h>

#include "stream_private.h"

#define MOST_UNSIGNALED 32 /* messages for which a single completion is asked */
#define PARTS           4  /* of the ring for sending; a message is at most one of them */

static int stream_note_failure(struct aio_stream *s, int code)
{
    if (!s->adapter.error)
        s->adapter.error = code;
    s->life = stream_life_after(s->life, AIO_STREAM_LIFE_EVENT_END);
    return code;
}

/*
 * Post `length` bytes to the peer's memory and a word, and note the message; 0 or a positive errno.
 *
 * iWARP has no WRITE WITH IMMEDIATE: the bytes go as an RDMA WRITE, and the word follows as a SEND
 * of four bytes in this machine's order, inline.
 */
static int stream_post_message(struct aio_stream *s, uint32_t word, uint32_t wrs, const void *from,
                               uint32_t length, uint64_t to, uint32_t key, bool in_ring,
                               bool signaled)
{
    struct aio_message *message = &s->sent.messages[s->sent.next & s->sent.mask];
    uint64_t id =
        s->adapter.id +
        ((uint64_t)(AIO_STREAM_MESSAGE | (s->sent.next & AIO_STREAM_NUMBER)) << AIO_SUB_SHIFT);
    unsigned int flags = length <= s->adapter.inline_size ? IBV_SEND_INLINE : 0;
    struct ibv_sge sge = {.addr = (uintptr_t)from,
                          .length = length,
                          .lkey = word > AIO_WORD_VALUE ? s->control.lkey : s->send.lkey};
    struct ibv_send_wr write, *bad = NULL;
    int code;

    s->sent.next++;
    message->word = word;
    message->wrs = (uint8_t)wrs;
    message->in_ring = in_ring ? (uint8_t)(1 + s->send.grown) : 0;
    message->signaled = signaled && s->life == AIO_STREAM_LIFE_POSTS;
    if (s->life != AIO_STREAM_LIFE_POSTS)
        return 0; /* the end is on its way, and needs no further message */
    s->adapter.posted += signaled;
    write.wr_id = id;
    write.next = NULL;
    write.sg_list = &sge;
    write.num_sge = length ? 1 : 0;
    write.wr.rdma.remote_addr = to;
    write.wr.rdma.rkey = key;
    if (!s->adapter.iwarp) {
        write.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        write.send_flags = flags | (signaled ? IBV_SEND_SIGNALED : 0);
        write.imm_data = htonl(word);
        code = aio_post_errno(ibv_post_send(s->adapter.qp, &write, &bad));
    } else {
        struct ibv_sge word_sge = {.addr = (uintptr_t)&word, .length = sizeof(word)};
        struct ibv_send_wr send = {
            .wr_id = id,
            .sg_list = &word_sge,
            .num_sge = 1,
            .opcode = IBV_WR_SEND,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
        };

        write.wr_id = s->adapter.id + ((uint64_t)AIO_STREAM_BYTES << AIO_SUB_SHIFT);
        write.next = &send;
        write.opcode = IBV_WR_RDMA_WRITE;
        write.send_flags = flags;
        code = aio_post_errno(ibv_post_send(s->adapter.qp, length ? &write : &send, &bad));
    }
    return code ? stream_note_failure(s, code) : 0;
}

/* Post a control message of `size` bytes of payload, out of the memory kept for them. */
static int stream_post_control(struct aio_stream *s, uint32_t word, uint32_t wrs,
                               const void *payload, uint32_t size, uint64_t to, uint32_t key,
                               bool signaled)
{
    uint8_t *place = s->control.at + s->control.next * AIO_STREAM_CONTROL_SIZE;

    if (size) {
        /* At most four are under way, and complete in order. */
        s->control.next = (s->control.next + 1) % AIO_STREAM_CONTROLS;
        memcpy(place, payload, size);
    }
    return stream_post_message(s, word, wrs, place, size, to, key, false,
                               signaled || s->adapter.iwarp);
}

int stream_probe(const struct aio_stream *s)
{
    struct ibv_send_wr wr = {
        .wr_id = s->adapter.id | (uint64_t)AIO_STREAM_PROBE << AIO_SUB_SHIFT,
        .opcode = IBV_WR_RDMA_WRITE,
        .send_flags = IBV_SEND_SIGNALED,
    };
    struct ibv_send_wr *bad = NULL;

    return s->adapter.qp ? aio_post_errno(ibv_post_send(s->adapter.qp, &wr, &bad)) : ENOTCONN;
}

/* How the ring for sending is divided. */
static void stream_divide_send_ring(struct aio_stream *s)
{
    uint32_t part = s->send.size < PARTS ? 1 : s->send.size / PARTS;

    s->send.largest = part;
    s->sent.signal_bytes = 2 * part;
}

/* Bytes that the next message of data can carry. */
static uint32_t stream_message_room(const struct aio_stream *s)
{
    uint32_t room = s->to.left < s->send.largest ? s->to.left : s->send.largest;

    if (!stream_output_rights(s->output)->sends || s->owed == AIO_OWES_MAPPING || !s->to.allowed ||
        s->data.out > s->data.limit)
        return 0;
    if (room > s->send.free)
        room = s->send.free;
    if (room > s->send.size - s->send.head)
        room = s->send.size - s->send.head;
    return room;
}

/* Post one message of data, of at most stream_message_room bytes; 0 or a positive errno. */
static int stream_post_data(struct aio_stream *s, const void *from, uint32_t length, bool in_ring)
{
    uint64_t to = s->to.addr;
    uint32_t key = s->to.key;
    bool signaled = s->adapter.iwarp;

    /* Before posting: the moment the peer has the bytes it may replace the descriptor of the buffer
     * that they filled. */
    s->to.allowed--;
    s->to.sequence = (s->to.sequence + 1) & AIO_SEQUENCE_MASK;
    s->to.left -= length;
    s->bytes_sent += length;
    if (s->to.left) {
        s->to.addr += length;
    } else if (s->to.spare_left) {
        s->to.addr = s->to.spare_addr;
        s->to.key = s->to.spare_key;
        s->to.left = s->to.spare_left;
        s->to.spare_left = 0;
    }
    s->data.out += s->data.wrs;
    if (in_ring) {
        s->send.head = s->send.head + length == s->send.size ? 0 : s->send.head + length;
        s->send.free -= length;
        s->sent.unsignaled_bytes += length;
    }
    if (++s->sent.unsignaled >= s->sent.signal_messages ||
        s->sent.unsignaled_bytes >= s->sent.signal_bytes)
        signaled = true;
    if (signaled)
        s->sent.unsignaled = s->sent.unsignaled_bytes = 0;
    return stream_post_message(s, length, s->data.wrs, from, length, to, key, in_ring, signaled);
}

uint32_t stream_next_place(const struct aio_stream *s, uint32_t *offset)
{
    *offset = s->send.head;
    return stream_message_room(s);
}

int stream_send_from_ring(struct aio_stream *s, uint32_t length)
{
    if (!length || length > stream_message_room(s))
        return EINVAL;
    return stream_post_data(s, s->send.at + s->send.head, length, true);
}

size_t stream_write(struct aio_stream *s, const void *data, size_t size)
{
    const char *from = data;
    size_t done = 0;

    if (!stream_output_rights(s->output)->writes)
        return 0;
    while (done < size && s->life == AIO_STREAM_LIFE_POSTS) {
        uint32_t room = stream_message_room(s);

        if (room > size - done)
            room = (uint32_t)(size - done);
        if (!room)
            break;
        /* Bytes that fit into the request itself need no place in the ring. */
        if (room <= s->adapter.inline_size) {
            stream_post_data(s, from + done, room, false);
        } else {
            memcpy(s->send.at + s->send.head, from + done, room);
            stream_post_data(s, s->send.at + s->send.head, room, true);
        }
        done += room;
    }
    return done;
}

bool stream_wants_send_ring(const struct aio_stream *s)
{
    return s->life == AIO_STREAM_LIFE_POSTS && !s->send.free &&
           (uint64_t)s->to.left + s->to.spare_left > s->send.size;
}

/* Keep work requests for a control message that is posted next: AIO_OK, or AIO_NO_ROOM. */
static int stream_reserve_control(struct aio_stream *s, uint32_t wrs)
{
    if (s->control.out + wrs > AIO_STREAM_CONTROLS)
        return AIO_NO_ROOM;
    s->control.out += wrs;
    return AIO_OK;
}

int stream_say(struct aio_stream *s, uint32_t word)
{
    if (stream_reserve_control(s, 1))
        return AIO_NO_ROOM;
    return stream_post_control(s, word, 1, NULL, 0, 0, 0, true);
}

int stream_publish(struct aio_stream *s, uint32_t word, const void *payload, uint32_t size,
                   uint64_t to, uint32_t key)
{
    /* On iWARP it needs two work requests; rsockets waits for two in any case. */
    if (!s->to.allowed || stream_reserve_control(s, s->data.wrs))
        return AIO_NO_ROOM;
    s->to.allowed--;
    s->to.sequence = (s->to.sequence + 1) & AIO_SEQUENCE_MASK;
    return stream_post_control(s, word, s->data.wrs, payload, size, to, key, true);
}

void stream_replace_send_ring(struct aio_stream *s, uint8_t *ring, uint32_t size, uint32_t lkey)
{
    s->send.at = ring;
    s->send.size = s->send.free = size;
    s->send.lkey = lkey;
    s->send.grown = 1;
    s->send.head = 0;
    stream_divide_send_ring(s);
}

/* Receiving */

/* All bytes of the present ring were read: continue in the larger ring, whose second half is free.
 */
static void stream_move_to_wider(struct aio_stream *s)
{
    s->ring.at = s->ring.wider;
    s->ring.size = s->ring.wider_size;
    s->ring.rkey = s->ring.wider_rkey;
    s->ring.wider_size = s->ring.moved = 0;
    s->ring.next = s->ring.size / 2;
    s->ring.free = s->ring.next + s->ring.offset;
}

/*
 * The next buffer for the peer, to be written to its table: a half that is free, or the first half
 * of a larger ring in the place of that of this ring.
 */
static struct aio_descriptor stream_next_buffer(struct aio_stream *s)
{
    struct aio_descriptor half = {.length = s->ring.size / 2};

    if (s->ring.wider_size && !s->ring.next) {
        half.addr = (uintptr_t)s->ring.wider;
        half.key = s->ring.wider_rkey;
        half.length = s->ring.wider_size / 2;
        s->ring.moved = 1;
        if (s->ring.free == s->ring.size) /* nothing is left in this ring */
            stream_move_to_wider(s);
        else
            s->ring.free = 0; /* its rest is not announced again */
    } else {
        half.addr = (uintptr_t)s->ring.at + s->ring.next;
        half.key = s->ring.rkey;
        s->ring.free -= half.length;
        s->ring.next = s->ring.next ? 0 : half.length;
    }
    if (s->given.left)
        s->given.buffers++;
    else
        s->given.left = half.length;
    if (s->table.swapped) {
        half.addr = __builtin_bswap64(half.addr);
        half.key = __builtin_bswap32(half.key);
        half.length = __builtin_bswap32(half.length);
    }
    return half;
}

/* Whether the peer is to be told of free room or of credits: half of either is there. */
static bool stream_update_is_due(const struct aio_stream *s)
{
    return s->ring.free >= s->ring.size / 2 || s->given.consumed >= s->given.due;
}

/* Whether half of the credits wait to be read: the peer may be unable to send the rest. */
static bool stream_lacks_credits(const struct aio_stream *s)
{
    return 2 * s->waiting.count >= s->given.credits;
}

bool stream_has_enough(const struct aio_stream *s)
{
    if (s->reader == AIO_READER_NOBODY || !s->ring.readable)
        return false;
    /* Where no more will come, the end waits until these are taken. */
    return !stream_input_rights(s->input)->takes || s->ring.readable >= s->ring.wanted ||
           stream_lacks_credits(s);
}

int stream_await_bytes(struct aio_stream *s, size_t count)
{
    if (count > s->ring.size / 2 || s->reader != AIO_READER_PROTOCOL ||
        !stream_input_rights(s->input)->takes || stream_lacks_credits(s))
        return AIO_FOR_PYTHON;
    s->ring.wanted = (uint32_t)count;
    return AIO_OK;
}

bool stream_await_some(struct aio_stream *s, size_t count)
{
    /* Half of the ring the peer can always send without an update. */
    s->ring.wanted = count < s->ring.size / 2 ? (uint32_t)count : s->ring.size / 2;
    if (stream_has_enough(s))
        s->ring.wanted = 0;
    return s->ring.wanted > 0;
}

void stream_end_wait(struct aio_stream *s)
{
    s->ring.wanted = 0;
}

bool stream_is_for_protocol(const struct aio_stream *s)
{
    return s->reader == AIO_READER_PROTOCOL && s->ring.readable;
}

bool stream_needs_attention(const struct aio_stream *s)
{
    /* The event of the peer's next message is one with which the rest is given to the protocol. */
    bool more_comes = stream_input_rights(s->input)->takes && s->life == AIO_STREAM_LIFE_POSTS &&
                      s->given.left && !stream_lacks_credits(s);

    return s->adapter.error || (s->ring.readable && !more_comes);
}

void stream_grow_after(struct aio_stream *s, uint64_t taken)
{
    s->ring.grow_at = taken;
}

int stream_widen(struct aio_stream *s, uint8_t *ring, uint32_t rkey, uint32_t size)
{
    if (s->ring.wider_size || size <= s->ring.size || size % 2)
        return EINVAL;
    s->ring.wider = ring;
    s->ring.wider_rkey = rkey;
    s->ring.wider_size = size;
    s->ring.grow_at = UINT64_MAX;
    return 0;
}

/* Post an update: the limit of messages, and a buffer if half of the ring is free. */
static int stream_post_update(struct aio_stream *s)
{
    struct aio_descriptor buffer = {0};
    uint32_t wrs = 1, size = 0, key = 0, word;
    uint64_t to = 0;

    if (s->ring.free >= s->ring.size / 2) {
        buffer = stream_next_buffer(s);
        size = sizeof(buffer);
        to = s->table.peer_addr + (uint64_t)s->table.peer_entry * sizeof(buffer);
        key = s->table.peer_key;
        wrs = s->data.wrs;
        s->table.peer_entry = (s->table.peer_entry + 1) % s->table.peer_length;
    }
    /* The peer has its old credits, and one for each message consumed since the last update; both
     * together are `credits` less the messages that wait. */
    s->given.allowed = s->given.credits - s->waiting.count;
    s->given.due = s->given.consumed + (s->given.credits / 2 ? s->given.credits / 2 : 1);
    s->control.out += wrs;
    word =
        AIO_WORD_SGL << 29 | (uint32_t)((s->given.consumed + s->given.credits) & AIO_SEQUENCE_MASK);
    /* Every second message asks for its completion, which stands for the message before, too. */
    return stream_post_control(s, word, wrs, &buffer, size, to, key, s->control.out > 1);
}

int stream_announce(struct aio_stream *s, bool repeat)
{
    if (repeat)
        s->given.due = s->given.consumed;
    while (stream_input_rights(s->input)->announces && s->life == AIO_STREAM_LIFE_POSTS &&
           stream_update_is_due(s) && AIO_STREAM_CONTROLS - s->control.out > s->adapter.iwarp) {
        int code = stream_post_update(s);

        if (code)
            return code;
    }
    return 0;
}

/* The program has taken the next `n` readable bytes; 0 or a positive errno. */
static int stream_consume(struct aio_stream *s, uint32_t n)
{
    s->ring.readable -= n;
    s->ring.taken += n;
    s->bytes_received += n;
    s->ring.free += s->ring.moved ? 0 : n;
    s->ring.offset += n;
    if (s->ring.offset >= s->ring.size) {
        s->ring.offset -= s->ring.size;
        if (s->ring.moved)
            stream_move_to_wider(s);
    }
    while (n) {
        uint32_t *first = &s->waiting.lengths[s->waiting.first & s->waiting.mask];

        if (*first > n) {
            *first -= n;
            break;
        }
        n -= *first;
        s->waiting.first++;
        s->waiting.count--;
        s->given.consumed++;
    }
    return stream_announce(s, false);
}

/* Where the bytes behind the end of the ring are. */
static const uint8_t *stream_bytes_behind(const struct aio_stream *s)
{
    return s->ring.moved ? s->ring.wider : s->ring.at;
}

uint32_t stream_read(struct aio_stream *s, void *into, size_t size)
{
    uint32_t n = s->ring.readable < size ? s->ring.readable : (uint32_t)size;
    uint32_t first = s->ring.size - s->ring.offset;

    if (n <= first) {
        memcpy(into, s->ring.at + s->ring.offset, n);
    } else {
        memcpy(into, s->ring.at + s->ring.offset, first);
        memcpy((char *)into + first, stream_bytes_behind(s), n - first);
    }
    if (n)
        stream_consume(s, n);
    return n;
}

/* The readable byte of this number. */
static const uint8_t *stream_byte_at(const struct aio_stream *s, uint32_t number)
{
    uint32_t first = s->ring.size - s->ring.offset;

    return number < first ? s->ring.at + s->ring.offset + number
                          : stream_bytes_behind(s) + number - first;
}

uint32_t stream_find(const struct aio_stream *s, const char *separator, uint32_t size)
{
    uint32_t end =
        s->ring.readable >= size ? s->ring.readable - size + 1 : 0; /* it begins before */
    uint32_t first = s->ring.size - s->ring.offset; /* bytes up to the end of the ring */

    for (uint32_t at = 0; at < end; at++) {
        const uint8_t *from = stream_byte_at(s, at), *found;
        uint32_t together = (at < first && first < end ? first : end) - at, same = 1;

        found = memchr(from, (unsigned char)*separator, together);
        if (!found) {
            at += together - 1;
            continue;
        }
        at += (uint32_t)(found - from);
        while (same < size && *stream_byte_at(s, at + same) == (uint8_t)separator[same])
            same++;
        if (same == size)
            return at + size;
    }
    return 0;
}

/* Post `count` receives, for the slots in s->receives.used. */
static int stream_post_receives(struct aio_stream *s, uint32_t count)
{
    struct ibv_sge sge[AIO_CHAIN];
    struct ibv_recv_wr wr[AIO_CHAIN], *bad = NULL;
    int code;

    if (s->life != AIO_STREAM_LIFE_POSTS)
        return 0;
    s->adapter.posted += count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = s->receives.used[i];

        wr[i].wr_id = s->adapter.id + ((uint64_t)(AIO_STREAM_RECV | slot) << AIO_SUB_SHIFT);
        wr[i].next = i + 1 < count ? &wr[i + 1] : NULL;
        wr[i].sg_list = NULL;
        wr[i].num_sge = 0;
        if (s->receives.words) {
            sge[i].addr = (uintptr_t)(s->receives.words + slot * sizeof(uint32_t));
            sge[i].length = sizeof(uint32_t);
            sge[i].lkey = s->receives.lkey;
            wr[i].sg_list = &sge[i];
            wr[i].num_sge = 1;
        }
    }
    code = aio_post_errno(ibv_post_recv(s->adapter.qp, wr, &bad));
    if (code && !s->adapter.error)
        s->adapter.recv_failed = 1;
    return code ? stream_note_failure(s, code) : 0;
}

/*
 * Whether the receive of this slot is the next to complete.  Receives complete in the order in
 * which they were posted, and are posted again in the same order: so the slots take turns.  The
 * adapter that completes another has completed one twice, or lost one, whose word no byte would
 * tell.
 */
static bool stream_is_turn(const struct aio_stream *s, uint32_t slot)
{
    return !s->receives.count || slot == s->receives.turn;
}

/* The receive of this slot has completed; it is posted again with others. 0 or an errno. */
static int stream_receive_used(struct aio_stream *s, uint32_t slot)
{
    if (!stream_is_turn(s, slot))
        return EPROTO;
    s->receives.turn = slot + 1 == s->receives.count ? 0 : slot + 1;
    s->adapter.posted--;
    s->receives.used[s->receives.n_used++] = (uint16_t)slot;
    if (s->receives.n_used < AIO_CHAIN)
        return 0;
    s->receives.n_used = 0;
    return stream_post_receives(s, AIO_CHAIN);
}

/* Post all receives, for the first time.  0 or a positive errno. */
static int stream_fill(struct aio_stream *s, uint32_t count)
{
    s->receives.count = count;
    for (uint32_t done = 0; done < count;) {
        uint32_t n = count - done < AIO_CHAIN ? count - done : AIO_CHAIN;
        int code;

        for (uint32_t i = 0; i < n; i++)
            s->receives.used[i] = (uint16_t)(done + i);
        code = stream_post_receives(s, n);
        if (code)
            return code;
        done += n;
    }
    return 0;
}

/* Completions */

/* The word of a completed receive; 0 if the message brought none. */
static int stream_word_of(const struct aio_stream *s, const struct ibv_wc *wc, uint32_t *word)
{
    if (s->receives.words) {
        uint32_t slot = AIO_SUB(wc->wr_id) & ~AIO_STREAM_RECV;

        memcpy(word, s->receives.words + slot * sizeof(*word), sizeof(*word));
        return wc->byte_len == sizeof(*word);
    }
    *word = ntohl(wc->imm_data);
    return (wc->wc_flags & IBV_WC_WITH_IMM) != 0;
}

/* Count the `length` bytes of a message of data that has arrived. */
static struct aio_stream_violation stream_take_data(struct aio_stream *s, uint32_t length)
{
    if (!s->given.allowed)
        return (struct aio_stream_violation){AIO_STREAM_NO_CREDIT, s->waiting.count, 0};
    if (!length || length > s->given.left)
        return (struct aio_stream_violation){AIO_STREAM_NO_SPACE, length, s->given.left};
    s->given.allowed--;
    s->given.left -= length;
    if (!s->given.left && s->given.buffers) {
        s->given.buffers--;
        s->given.left = (s->ring.moved ? s->ring.wider_size : s->ring.size) / 2;
    }
    s->waiting.lengths[(s->waiting.first + s->waiting.count++) & s->waiting.mask] = length;
    s->ring.readable += length;
    return (struct aio_stream_violation){0};
}

/* Count a message that takes a credit and brings no bytes; its credit is returned at once. */
static struct aio_stream_violation stream_take_empty(struct aio_stream *s)
{
    if (!s->given.allowed)
        return (struct aio_stream_violation){AIO_STREAM_NO_CREDIT, s->waiting.count, 0};
    s->given.allowed--;
    s->given.consumed++;
    return (struct aio_stream_violation){0};
}

/*
 * Take a new limit of messages, and the buffer in the expected entry of the table, if it is filled.
 *
 * The peer may be writing to the table at this instant: the length, which is written last, is seen
 * before the rest is copied, and the copy is what is checked.
 */
static struct aio_stream_violation stream_take_limit(struct aio_stream *s, uint32_t limit)
{
    uint8_t *entry = s->table.at + s->table.entry * sizeof(struct aio_descriptor);
    uint32_t allowed = (limit - s->to.sequence) & AIO_SEQUENCE_MASK;
    struct aio_descriptor buffer = {0};

    if (allowed < s->to.allowed || allowed > s->to.limit)
        return (struct aio_stream_violation){AIO_STREAM_BAD_LIMIT, s->to.sequence, s->to.allowed};
    if (__atomic_load_n((uint32_t *)(entry + offsetof(struct aio_descriptor, length)),
                        __ATOMIC_ACQUIRE))
        memcpy(&buffer, entry, sizeof(buffer));
    if (buffer.length) { /* or the peer has cleared it meanwhile, which breaks the rules */
        if (buffer.length - 1 > UINT64_MAX - buffer.addr)
            return (struct aio_stream_violation){AIO_STREAM_BAD_BUFFER, buffer.addr, buffer.length};
        if (s->to.left && s->to.spare_left)
            return (struct aio_stream_violation){AIO_STREAM_THIRD_BUFFER, 0, 0};
        if (s->to.left) {
            s->to.spare_addr = buffer.addr;
            s->to.spare_key = buffer.key;
            s->to.spare_left = buffer.length;
        } else {
            s->to.addr = buffer.addr;
            s->to.key = buffer.key;
            s->to.left = buffer.length;
        }
        memset(entry, 0, sizeof(buffer));
        s->table.entry = !s->table.entry;
    }
    s->to.allowed = allowed;
    return (struct aio_stream_violation){0};
}

struct aio_stream_violation stream_take_word(struct aio_stream *s, uint32_t word)
{
    if (word <= AIO_WORD_VALUE)
        return stream_take_data(s, word);
    if (word >> 29 == AIO_WORD_SGL)
        return stream_take_limit(s, word & AIO_WORD_VALUE);
    if (word >> 29 == AIO_WORD_IOMAP)
        return stream_take_empty(s);
    return (struct aio_stream_violation){0};
}

/*
 * Count data that have arrived, in the drain, and set the events that wake waiting tasks.  1 if the
 * peer was allowed to send them; otherwise nothing has changed.
 */
static int stream_drain_data(struct aio_stream *s, uint32_t length)
{
    if (stream_take_data(s, length).kind)
        return 0;
    /* The peer has more than fits, and the program takes what comes. */
    if (s->ring.taken >= s->ring.grow_at && (length >= s->ring.size / 4 || !s->given.left)) {
        s->ring.taken = 0;
        s->events |= AIO_STREAM_GROW;
    }
    /* A task that waits for many bytes is not resumed before they are there, unless the peer needs
     * credits or room to send them. */
    if (s->ring.readable >= s->ring.wanted || stream_lacks_credits(s))
        s->events |= AIO_STREAM_DATA;
    return 1;
}

/* The same of a limit. */
static int stream_drain_limit(struct aio_stream *s, uint32_t limit)
{
    if (stream_take_limit(s, limit).kind)
        return 0;
    /* A mapping may wait for a credit. */
    if (!stream_output_rights(s->output)->writes || s->owed != AIO_OWES_NOTHING)
        s->events |= AIO_STREAM_ROOM;
    return 1;
}

/* Take the oldest message off the count; its word. */
static uint32_t stream_retire_message(struct aio_stream *s)
{
    const struct aio_message *message = &s->sent.messages[s->sent.first++ & s->sent.mask];

    s->adapter.posted -= message->signaled;
    s->sent.progress++;
    if (message->word <= AIO_WORD_VALUE) {
        s->data.out -= message->wrs;
        if (message->in_ring == 1 + s->send.grown)
            s->send.free += message->word;
    } else {
        s->control.out -= message->wrs;
    }
    return message->word;
}

/* Take the oldest message, which has failed, off the count: for the protocol it stays under way. */
static void stream_drop_message(struct aio_stream *s)
{
    s->adapter.posted -= s->sent.messages[s->sent.first++ & s->sent.mask].signaled;
}

/* How many messages a completion stands for; 0 if its message is not under way. */
static uint32_t stream_reach(const struct aio_stream *s, uint32_t sub)
{
    uint32_t count = ((sub - s->sent.first) & AIO_STREAM_NUMBER) + 1;

    return count <= s->sent.next - s->sent.first ? count : 0;
}

static int stream_drain_sent(struct aio_stream *s, uint32_t sub)
{
    uint32_t count = stream_reach(s, sub);
    int control = 0;

    if (!count)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word = s->sent.messages[(s->sent.first + i) & s->sent.mask].word;

        if (word > AIO_WORD_VALUE) {
            if (word >> 29 != AIO_WORD_SGL)
                return 0;
            control = 1;
        }
    }
    while (count--)
        stream_retire_message(s);
    if (!stream_output_rights(s->output)->writes || (control && s->owed != AIO_OWES_NOTHING))
        s->events |= AIO_STREAM_ROOM;
    if (control && stream_announce(s, false))
        s->events |= AIO_STREAM_FAILED;
    return 1;
}

/* At the end every receive is flushed, which is only counted; Python takes all else. */
static int stream_take_flushed(struct aio_stream *s, const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_WR_FLUSH_ERR || !(AIO_SUB(wc->wr_id) & AIO_STREAM_RECV) ||
        !s->adapter.posted)
        return 0;
    if (!--s->adapter.posted)
        s->events |= AIO_STREAM_IDLE;
    return 1;
}

static int stream_take_completion(struct aio_stream *s, const struct ibv_wc *wc)
{
    uint32_t sub = AIO_SUB(wc->wr_id), word;

    if (s->life == AIO_STREAM_LIFE_FLUSHING)
        return stream_take_flushed(s, wc);
    if (wc->status != IBV_WC_SUCCESS)
        return 0;
    if (!(sub & AIO_STREAM_RECV))
        return sub & AIO_STREAM_MESSAGE ? stream_drain_sent(s, sub) : 0;
    if (!stream_input_rights(s->input)->takes || !stream_is_turn(s, sub & ~AIO_STREAM_RECV) ||
        !stream_word_of(s, wc, &word))
        return 0;
    if (word <= AIO_WORD_VALUE) {
        if (!stream_drain_data(s, word))
            return 0;
    } else if (word >> 29 != AIO_WORD_SGL || !stream_drain_limit(s, word & AIO_WORD_VALUE)) {
        return 0;
    }
    s->alive = 1;
    if (stream_receive_used(s, sub & ~AIO_STREAM_RECV))
        s->events |= AIO_STREAM_FAILED;
    return 1;
}

int stream_complete(struct aio_stream *s, const struct ibv_wc *wc)
{
    uint32_t events;

    if (s->passed || !stream_take_completion(s, wc)) {
        s->passed++;
        return AIO_FOR_PYTHON;
    }
    events = s->events;
    s->events = 0;
    return (int)events;
}

/* Completions that Python takes */

int stream_note_seen(struct aio_stream *s)
{
    if (!s->passed)
        return EINVAL;
    s->passed--;
    return 0;
}

int stream_complete_receive(struct aio_stream *s, uint32_t slot)
{
    int code = stream_receive_used(s, slot);

    s->alive |= code != EPROTO;
    return code;
}

void stream_count_failed_receive(struct aio_stream *s)
{
    s->adapter.posted -= s->adapter.posted > 0;
}

uint32_t stream_complete_send(struct aio_stream *s, uint32_t sub, bool failed, uint32_t *words)
{
    uint32_t count = stream_reach(s, sub), controls = 0;

    for (uint32_t i = 0; i + failed < count; i++) {
        uint32_t word = stream_retire_message(s);

        if (word > AIO_WORD_VALUE)
            words[controls++] = word;
    }
    if (failed && count)
        stream_drop_message(s);
    return controls;
}

/* States */

bool stream_advance_life(struct aio_stream *s, enum aio_stream_life_event event)
{
    enum aio_stream_life before = s->life;

    s->life = stream_life_after(before, event);
    if (s->life == AIO_STREAM_LIFE_CLOSED)
        s->adapter.qp = NULL;
    return s->life != before;
}

void stream_advance_input(struct aio_stream *s, enum aio_input_event event)
{
    s->input = stream_input_after(s->input, event);
}

void stream_advance_output(struct aio_stream *s, enum aio_output_event event)
{
    s->output = stream_output_after(s->output, event);
}

void stream_advance_reader(struct aio_stream *s, enum aio_reader_event event)
{
    s->reader = stream_reader_after(s->reader, event);
}

void stream_owe(struct aio_stream *s, enum aio_owed owed)
{
    s->owed = owed;
}

bool stream_check_alive(struct aio_stream *s)
{
    bool alive = s->alive;

    s->alive = 0;
    return alive;
}

#define DEFINE_FACT(name, value)                                                                   \
    int64_t stream_##name(const struct aio_stream *s)                                              \
    {                                                                                              \
        return (int64_t)(value);                                                                   \
    }

AIO_STREAM_FACTS(DEFINE_FACT)
AIO_STREAM_FLAGS(DEFINE_FACT)

/* Making */

int stream_meet(struct aio_stream *s, const struct aio_stream_peer *peer)
{
    if (s->table.peer_length)
        return EALREADY;
    if (peer->table_length < 2 || peer->credits > AIO_SEQUENCE_MASK)
        return EINVAL;
    s->to.limit = s->to.allowed = peer->credits;
    s->to.addr = peer->buffer.addr;
    s->to.key = peer->buffer.key;
    s->to.left = peer->buffer.length;
    s->table.peer_addr = peer->table_addr;
    s->table.peer_key = peer->table_key;
    s->table.peer_length = peer->table_length;
    s->table.swapped = peer->swapped;
    return 0;
}

int stream_open(struct aio_stream *s)
{
    if (!s->table.peer_length)
        return EINVAL;
    stream_advance_input(s, AIO_INPUT_EVENT_OPENED);
    stream_advance_output(s, AIO_OUTPUT_EVENT_OPENED);
    return 0;
}

int stream_bind(struct aio_stream *s, struct ibv_qp *qp, uint64_t id, uint8_t *words, uint32_t lkey,
                uint32_t receives)
{
    s->adapter.qp = qp;
    s->adapter.id = id;
    s->receives.words = words;
    s->receives.lkey = lkey;
    return stream_fill(s, receives);
}

int stream_new(const struct aio_stream_sizes *sizes, struct aio_stream **place)
{
    uint32_t wrs = sizes->iwarp ? 2 : 1, messages = sizes->send_depth / wrs, signal = 1;
    struct aio_stream *s;

    if (!sizes->ring.length || !sizes->send.length || !sizes->credits ||
        sizes->credits > AIO_SEQUENCE_MASK || sizes->send.length / PARTS > AIO_WORD_VALUE ||
        sizes->send_depth < AIO_STREAM_CONTROLS + wrs || sizes->send_depth > AIO_STREAM_NUMBER)
        return EINVAL;
    s = calloc(1, sizeof(*s));
    if (!s)
        return ENOMEM;
    s->waiting.mask = aio_power(sizes->credits) - 1;
    s->sent.mask = aio_power(sizes->send_depth) - 1;
    s->waiting.lengths = calloc(s->waiting.mask + 1, sizeof(*s->waiting.lengths));
    s->sent.messages = calloc(s->sent.mask + 1, sizeof(*s->sent.messages));
    if (!s->waiting.lengths || !s->sent.messages) {
        stream_free(s);
        return ENOMEM;
    }
    s->output = AIO_OUTPUT_EARLY_HELD;
    s->adapter.inline_size = sizes->inline_size;
    s->adapter.iwarp = sizes->iwarp;
    s->send.at = (uint8_t *)(uintptr_t)sizes->send.addr;
    s->send.size = s->send.free = sizes->send.length;
    s->send.lkey = s->control.lkey = sizes->send.key;
    s->control.at = s->send.at + s->send.size;
    s->data.wrs = wrs;
    s->data.limit = sizes->send_depth - AIO_STREAM_CONTROLS - wrs;
    if (messages >= AIO_STREAM_CONTROLS + 2)
        signal = (messages - AIO_STREAM_CONTROLS) / 2;
    s->sent.signal_messages = signal < MOST_UNSIGNALED ? signal : MOST_UNSIGNALED;
    stream_divide_send_ring(s);
    /* All credits are at the peer, and the first half of the ring, as private data say.  Entry 0 of
     * both tables stands for that half. */
    s->table.at = (uint8_t *)(uintptr_t)sizes->table;
    s->table.entry = s->table.peer_entry = 1;
    s->ring.at = (uint8_t *)(uintptr_t)sizes->ring.addr;
    s->ring.rkey = sizes->ring.key;
    s->ring.size = sizes->ring.length;
    s->ring.free = s->ring.next = s->given.left = sizes->ring.length / 2;
    s->ring.grow_at = UINT64_MAX;
    s->given.credits = s->given.allowed = sizes->credits;
    s->given.due = sizes->credits / 2 ? sizes->credits / 2 : 1;
    *place = s;
    return 0;
}

void stream_free(struct aio_stream *s)
{
    if (!s)
        return;
    free(s->waiting.lengths);
    free(s->sent.messages);
    free(s);
}
