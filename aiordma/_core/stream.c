/*
 * The data path of a stream (the rsockets protocol) between adapter and rings.
 *
 * Theory of operation
 *   One struct aio_stream_state holds what the frequent cases change.  The protocol in
 *   aiordma/rsocket keeps its numbers there, too, so that every rare case is Python's: handshake,
 *   mappings, the end, and violations of the peer.  C takes data within bounds, credits within
 *   bounds, and the completions of such messages.  It leaves every other completion to Python, and
 *   then has changed nothing.
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
 * Functions return 0 or libibverbs' positive errno, unless they say something else.
 */

#include "protocol.h"

#define PARTS 4 /* of the ring for sending; a message is at most one of them */

/* As the peer's table has it. */
struct aio_descriptor {
    uint64_t addr;
    uint32_t key, length;
};

static int aio_stream_failed(struct aio_stream_state *s, int code)
{
    if (!s->error)
        s->error = code;
    s->dead = 1;
    return code;
}

/*
 * Post `length` bytes to the peer's memory and a word, and note the message; 0 or a positive errno.
 *
 * iWARP has no WRITE WITH IMMEDIATE: the bytes go as an RDMA WRITE, and the word follows as a SEND
 * of four bytes in this machine's order, inline.
 */
static int aio_stream_post(struct aio_stream_state *s, uint32_t word, uint32_t wrs,
                           const void *from, uint32_t length, uint64_t to, uint32_t key,
                           bool in_ring, bool signaled)
{
    struct aio_message *message = &s->messages[s->next & s->messages_mask];
    uint64_t id = s->wr_id +
                  ((uint64_t)(AIO_STREAM_MESSAGE | (s->next & AIO_STREAM_NUMBER)) << AIO_SUB_SHIFT);
    unsigned int flags = length <= s->inline_size ? IBV_SEND_INLINE : 0;
    struct ibv_sge sge = {.addr = (uintptr_t)from,
                          .length = length,
                          .lkey = word > AIO_WORD_VALUE ? s->controls_lkey : s->send_lkey};
    struct ibv_send_wr write, *bad = NULL;
    int code;

    s->next++;
    message->word = word;
    message->wrs = (uint8_t)wrs;
    message->in_ring = in_ring ? (uint8_t)(1 + s->send_grown) : 0;
    message->signaled = signaled && !s->dead;
    if (s->dead)
        return 0; /* the end is on its way, and needs no further message */
    s->posted += signaled;
    write.wr_id = id;
    write.next = NULL;
    write.sg_list = &sge;
    write.num_sge = length ? 1 : 0;
    write.wr.rdma.remote_addr = to;
    write.wr.rdma.rkey = key;
    if (!s->iwarp) {
        write.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        write.send_flags = flags | (signaled ? IBV_SEND_SIGNALED : 0);
        write.imm_data = htonl(word);
        code = aio_post_errno(ibv_post_send(s->qp, &write, &bad));
    } else {
        struct ibv_sge word_sge = {.addr = (uintptr_t)&word, .length = sizeof(word)};
        struct ibv_send_wr send = {
            .wr_id = id,
            .sg_list = &word_sge,
            .num_sge = 1,
            .opcode = IBV_WR_SEND,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
        };

        write.wr_id = s->wr_id + ((uint64_t)AIO_STREAM_BYTES << AIO_SUB_SHIFT);
        write.next = &send;
        write.opcode = IBV_WR_RDMA_WRITE;
        write.send_flags = flags;
        code = aio_post_errno(ibv_post_send(s->qp, length ? &write : &send, &bad));
    }
    return code ? aio_stream_failed(s, code) : 0;
}

/* Post a control message of `size` bytes of payload, out of the memory kept for them. */
int aio_stream_control(struct aio_stream_state *s, uint32_t word, uint32_t wrs, const void *payload,
                       uint32_t size, uint64_t to, uint32_t key, bool signaled)
{
    uint8_t *place = s->controls + s->control_next * AIO_STREAM_CONTROL_SIZE;

    if (size) {
        /* At most four are under way, and complete in order. */
        s->control_next = (s->control_next + 1) % AIO_STREAM_CONTROLS;
        memcpy(place, payload, size);
    }
    return aio_stream_post(s, word, wrs, place, size, to, key, false, signaled || s->iwarp);
}

/*
 * Post an RDMA WRITE of nothing: the peer's adapter acknowledges it, its program sees nothing.
 * Returns 0 or a positive errno.
 */
int aio_stream_probe(const struct aio_stream_state *s)
{
    struct ibv_send_wr wr = {
        .wr_id = s->wr_id | (uint64_t)AIO_STREAM_PROBE << AIO_SUB_SHIFT,
        .opcode = IBV_WR_RDMA_WRITE,
        .send_flags = IBV_SEND_SIGNALED,
    };
    struct ibv_send_wr *bad = NULL;

    return s->qp ? aio_post_errno(ibv_post_send(s->qp, &wr, &bad)) : ENOTCONN;
}

/* How the ring for sending is divided. */
void aio_stream_shares(struct aio_stream_state *s)
{
    uint32_t part = s->send_size < PARTS ? 1 : s->send_size / PARTS;

    s->largest = part;
    s->signal_bytes = 2 * part;
}

/* Bytes that the next message of data can carry. */
uint32_t aio_stream_room(const struct aio_stream_state *s)
{
    uint32_t room = s->left < s->largest ? s->left : s->largest;

    if (!s->sending || !s->allowed || s->data_out > s->data_limit)
        return 0;
    if (room > s->send_free)
        room = s->send_free;
    if (room > s->send_size - s->head)
        room = s->send_size - s->head;
    return room;
}

/* Post one message of data, of at most aio_stream_room bytes; 0 or a positive errno. */
static int aio_stream_data(struct aio_stream_state *s, const void *from, uint32_t length,
                           bool in_ring)
{
    uint64_t to = s->addr;
    uint32_t key = s->key;
    bool signaled = s->iwarp;

    /* Before posting: the moment the peer has the bytes it may replace the descriptor of the buffer
     * that they filled. */
    s->allowed--;
    s->sequence = (s->sequence + 1) & 0xFFFF;
    s->left -= length;
    s->bytes_sent += length;
    if (s->left) {
        s->addr += length;
    } else if (s->spare_left) {
        s->addr = s->spare_addr;
        s->key = s->spare_key;
        s->left = s->spare_left;
        s->spare_left = 0;
    }
    s->data_out += s->data_wrs;
    if (in_ring) {
        s->head = s->head + length == s->send_size ? 0 : s->head + length;
        s->send_free -= length;
        s->unsignaled_bytes += length;
    }
    if (++s->unsignaled >= s->signal_messages || s->unsignaled_bytes >= s->signal_bytes)
        signaled = true;
    if (signaled)
        s->unsignaled = s->unsignaled_bytes = 0;
    return aio_stream_post(s, length, s->data_wrs, from, length, to, key, in_ring, signaled);
}

/* Post the next `length` bytes of the ring, which the caller has filled; 0 or a positive errno. */
int aio_stream_send(struct aio_stream_state *s, uint32_t length)
{
    return aio_stream_data(s, s->send + s->head, length, true);
}

/*
 * Send what can be sent now; how many bytes that were.  After a failure s->error is set.
 *
 * Bytes that fit into the request itself need no place in the ring.
 */
size_t aio_stream_write(struct aio_stream_state *s, const void *data, size_t size)
{
    const char *from = data;
    size_t done = 0;

    if (s->held)
        return 0;
    while (done < size && !s->dead) {
        uint32_t room = aio_stream_room(s);

        if (room > size - done)
            room = (uint32_t)(size - done);
        if (!room)
            break;
        if (room <= s->inline_size) {
            aio_stream_data(s, from + done, room, false);
        } else {
            memcpy(s->send + s->head, from + done, room);
            aio_stream_data(s, s->send + s->head, room, true);
        }
        done += room;
    }
    return done;
}

/* Send from this ring from now on; the ring before it stays for the messages under way. */
void aio_stream_send_from(struct aio_stream_state *s, uint8_t *ring, uint32_t size, uint32_t lkey)
{
    s->send = ring;
    s->send_size = s->send_free = size;
    s->send_lkey = lkey;
    s->send_grown = 1;
    s->head = 0;
    aio_stream_shares(s);
}

/* Receiving */

/* The bytes of the ring are read: it goes on in the larger ring, whose second half is free. */
static void aio_stream_move(struct aio_stream_state *s)
{
    s->ring = s->wider;
    s->ring_size = s->wider_size;
    s->ring_rkey = s->wider_rkey;
    s->wider_size = s->moved = 0;
    s->ring_next = s->ring_size / 2;
    s->ring_free = s->ring_next + s->offset;
}

/*
 * The next buffer for the peer, to be written to its table: a half that is free, or the first half
 * of a larger ring in the place of that of this ring.
 */
static struct aio_descriptor aio_stream_half(struct aio_stream_state *s)
{
    struct aio_descriptor half = {.length = s->ring_size / 2};

    if (s->wider_size && !s->ring_next) {
        half.addr = (uintptr_t)s->wider;
        half.key = s->wider_rkey;
        half.length = s->wider_size / 2;
        s->moved = 1;
        if (s->ring_free == s->ring_size) /* nothing is left in this ring */
            aio_stream_move(s);
        else
            s->ring_free = 0; /* its rest is not announced again */
    } else {
        half.addr = (uintptr_t)s->ring + s->ring_next;
        half.key = s->ring_rkey;
        s->ring_free -= half.length;
        s->ring_next = s->ring_next ? 0 : half.length;
    }
    if (s->ring_left)
        s->ring_buffers++;
    else
        s->ring_left = half.length;
    if (s->swapped) {
        half.addr = __builtin_bswap64(half.addr);
        half.key = __builtin_bswap32(half.key);
        half.length = __builtin_bswap32(half.length);
    }
    return half;
}

/*
 * Announce free room, and credits, when half of the ring is free or half of the credits are spent.
 */
int aio_stream_announce(struct aio_stream_state *s)
{
    while (s->crediting && !s->dead &&
           (s->ring_free >= s->ring_size / 2 || s->consumed >= s->due) &&
           AIO_STREAM_CONTROLS - s->control_out > s->iwarp) {
        struct aio_descriptor payload;
        uint32_t word, wrs = 1, size = 0;
        uint64_t place = 0;
        int code;

        if (s->ring_free >= s->ring_size / 2) {
            payload = aio_stream_half(s);
            place = s->table_addr + (uint64_t)s->peer_entry * sizeof(payload);
            s->peer_entry = (s->peer_entry + 1) % s->table_length;
            size = sizeof(payload);
            wrs = s->data_wrs;
        }
        s->ring_allowed = s->credits - s->waiting_count;
        s->due = s->consumed + (s->credits / 2 ? s->credits / 2 : 1);
        word = AIO_WORD_SGL << 29 | (uint32_t)((s->consumed + s->credits) & 0xFFFF);
        s->control_out += wrs;
        /* Every second message asks for its completion, which stands for the message before, too.
         * */
        code = aio_stream_control(s, word, wrs, &payload, size, place, size ? s->table_key : 0,
                                  s->control_out > 1);
        if (code)
            return code;
    }
    return 0;
}

/* The program has taken the next `n` readable bytes; 0 or a positive errno. */
int aio_stream_consume(struct aio_stream_state *s, uint32_t n)
{
    s->readable -= n;
    s->taken += n;
    s->bytes_received += n;
    s->ring_free += s->moved ? 0 : n;
    s->offset += n;
    if (s->offset >= s->ring_size) {
        s->offset -= s->ring_size;
        if (s->moved)
            aio_stream_move(s);
    }
    while (n) {
        uint32_t *first = &s->waiting[s->waiting_first & s->waiting_mask];

        if (*first > n) {
            *first -= n;
            break;
        }
        n -= *first;
        s->waiting_first++;
        s->waiting_count--;
        s->consumed++;
    }
    return aio_stream_announce(s);
}

/* Where the bytes lie that come behind the end of the ring. */
static const uint8_t *aio_stream_behind(const struct aio_stream_state *s)
{
    return s->moved ? s->wider : s->ring;
}

/*
 * Copy up to `size` readable bytes out of the ring; how many that were. If the announcement of the
 * room fails, s->error is set.
 */
uint32_t aio_stream_read(struct aio_stream_state *s, void *into, size_t size)
{
    uint32_t n = s->readable < size ? s->readable : (uint32_t)size;
    uint32_t first = s->ring_size - s->offset;

    if (n <= first) {
        memcpy(into, s->ring + s->offset, n);
    } else {
        memcpy(into, s->ring + s->offset, first);
        memcpy((char *)into + first, aio_stream_behind(s), n - first);
    }
    if (n)
        aio_stream_consume(s, n);
    return n;
}

/* The readable byte of this number. */
static const uint8_t *aio_stream_at(const struct aio_stream_state *s, uint32_t number)
{
    uint32_t first = s->ring_size - s->offset;

    return number < first ? s->ring + s->offset + number : aio_stream_behind(s) + number - first;
}

/* How many of the readable bytes end with the first separator among them; 0 if there is none. */
uint32_t aio_stream_find(const struct aio_stream_state *s, const char *separator, uint32_t size)
{
    uint32_t end = s->readable >= size ? s->readable - size + 1 : 0; /* it begins before */
    uint32_t first = s->ring_size - s->offset; /* bytes up to the end of the ring */

    for (uint32_t at = 0; at < end; at++) {
        const uint8_t *from = aio_stream_at(s, at), *found;
        uint32_t together = (at < first && first < end ? first : end) - at, same = 1;

        found = memchr(from, (unsigned char)*separator, together);
        if (!found) {
            at += together - 1;
            continue;
        }
        at += (uint32_t)(found - from);
        while (same < size && *aio_stream_at(s, at + same) == (uint8_t)separator[same])
            same++;
        if (same == size)
            return at + size;
    }
    return 0;
}

/* Post `count` receives, for the slots in s->used. */
static int aio_stream_receives(struct aio_stream_state *s, uint32_t count)
{
    struct ibv_sge sge[AIO_CHAIN];
    struct ibv_recv_wr wr[AIO_CHAIN], *bad = NULL;
    int code;

    if (s->dead)
        return 0;
    s->posted += count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t slot = s->used[i];

        wr[i].wr_id = s->wr_id + ((uint64_t)(AIO_STREAM_RECV | slot) << AIO_SUB_SHIFT);
        wr[i].next = i + 1 < count ? &wr[i + 1] : NULL;
        wr[i].sg_list = NULL;
        wr[i].num_sge = 0;
        if (s->words) {
            sge[i].addr = (uintptr_t)(s->words + slot * sizeof(uint32_t));
            sge[i].length = sizeof(uint32_t);
            sge[i].lkey = s->words_lkey;
            wr[i].sg_list = &sge[i];
            wr[i].num_sge = 1;
        }
    }
    code = aio_post_errno(ibv_post_recv(s->qp, wr, &bad));
    if (code && !s->error)
        s->recv_failed = 1;
    return code ? aio_stream_failed(s, code) : 0;
}

/*
 * Whether the receive of this slot is the next to complete.  Receives complete in the order in
 * which they were posted, and are posted again in the same order: so the slots take turns.  The
 * adapter that completes another has completed one twice, or lost one, whose word no byte would
 * tell.
 */
static int aio_stream_is_turn(const struct aio_stream_state *s, uint32_t slot)
{
    return !s->receives || slot == s->turn;
}

/* The receive of this slot has completed; it is posted again with others. 0 or an errno. */
int aio_stream_used(struct aio_stream_state *s, uint32_t slot)
{
    if (!aio_stream_is_turn(s, slot))
        return EPROTO;
    s->turn = slot + 1 == s->receives ? 0 : slot + 1;
    s->posted--;
    s->used[s->n_used++] = (uint16_t)slot;
    if (s->n_used < AIO_CHAIN)
        return 0;
    s->n_used = 0;
    return aio_stream_receives(s, AIO_CHAIN);
}

/* Post all receives, for the first time.  0 or a positive errno. */
int aio_stream_fill(struct aio_stream_state *s, uint32_t count)
{
    s->receives = count;
    for (uint32_t done = 0; done < count;) {
        uint32_t n = count - done < AIO_CHAIN ? count - done : AIO_CHAIN;
        int code;

        for (uint32_t i = 0; i < n; i++)
            s->used[i] = (uint16_t)(done + i);
        code = aio_stream_receives(s, n);
        if (code)
            return code;
        done += n;
    }
    return 0;
}

/* Completions */

/* The word of a completed receive; 0 if the message brought none. */
static int aio_stream_word(const struct aio_stream_state *s, const struct ibv_wc *wc,
                           uint32_t *word)
{
    if (s->words) {
        uint32_t slot = AIO_SUB(wc->wr_id) & ~AIO_STREAM_RECV;

        memcpy(word, s->words + slot * sizeof(*word), sizeof(*word));
        return wc->byte_len == sizeof(*word);
    }
    *word = ntohl(wc->imm_data);
    return (wc->wc_flags & IBV_WC_WITH_IMM) != 0;
}

/* Count bytes that have arrived: 1 if their number is within bounds. */
static int aio_stream_arrived(struct aio_stream_state *s, uint32_t length)
{
    if (!s->ring_allowed || !length || length > s->ring_left)
        return 0;
    s->ring_allowed--;
    s->ring_left -= length;
    if (!s->ring_left && s->ring_buffers) {
        s->ring_buffers--;
        s->ring_left = (s->moved ? s->wider_size : s->ring_size) / 2;
    }
    /* The peer has more than fits, and the program takes what comes. */
    if (s->taken >= s->grow_at && (length >= s->ring_size / 4 || !s->ring_left)) {
        s->taken = 0;
        s->base.events |= AIO_STREAM_GROW;
    }
    s->waiting[(s->waiting_first + s->waiting_count++) & s->waiting_mask] = length;
    s->readable += length;
    /* A task that waits for many bytes is not resumed before they are there, unless the peer needs
     * credits or room to send them. */
    if (s->readable >= s->want || 2 * s->waiting_count >= s->credits)
        s->base.events |= AIO_STREAM_DATA;
    return 1;
}

/*
 * A new limit of messages, and perhaps a buffer: 1 if both are within bounds and taken.
 *
 * The peer may be writing to the table at this instant: the length, which is written last, is seen
 * before the rest is copied, and the copy is what is checked.
 */
static int aio_stream_allow(struct aio_stream_state *s, uint32_t limit)
{
    uint8_t *entry = s->table + s->entry * 16;
    uint32_t allowed = (limit - s->sequence) & 0xFFFF;
    uint64_t addr;
    uint32_t key, length;

    if (allowed < s->allowed || allowed > s->limit)
        return 0;
    length = __atomic_load_n((uint32_t *)(entry + 12), __ATOMIC_ACQUIRE);
    if (length) {
        memcpy(&addr, entry, sizeof(addr));
        memcpy(&key, entry + 8, sizeof(key));
        memcpy(&length, entry + 12, sizeof(length));
        if (!length || (s->left && s->spare_left) || length - 1 > UINT64_MAX - addr)
            return 0;
        if (s->left) {
            s->spare_addr = addr;
            s->spare_key = key;
            s->spare_left = length;
        } else {
            s->addr = addr;
            s->key = key;
            s->left = length;
        }
        memset(entry, 0, 16);
        s->entry = !s->entry;
    }
    s->allowed = allowed;
    if (s->held || s->owing) /* a mapping may wait for a credit */
        s->base.events |= AIO_STREAM_ROOM;
    return 1;
}

/* Take the oldest message off the count; its word. */
uint32_t aio_stream_retire(struct aio_stream_state *s)
{
    const struct aio_message *message = &s->messages[s->first++ & s->messages_mask];

    s->posted -= message->signaled;
    s->progress++;
    if (message->word <= AIO_WORD_VALUE) {
        s->data_out -= message->wrs;
        if (message->in_ring == 1 + s->send_grown)
            s->send_free += message->word;
    } else {
        s->control_out -= message->wrs;
    }
    return message->word;
}

/* Take the oldest message, which has failed, off the count: for the protocol it stays under way. */
void aio_stream_drop(struct aio_stream_state *s)
{
    s->posted -= s->messages[s->first++ & s->messages_mask].signaled;
}

/* How many messages a completion stands for; 0 if its message is not under way. */
uint32_t aio_stream_reach(const struct aio_stream_state *s, uint32_t sub)
{
    uint32_t count = ((sub - s->first) & AIO_STREAM_NUMBER) + 1;

    return count <= s->next - s->first ? count : 0;
}

static int aio_stream_sent(struct aio_stream_state *s, uint32_t sub)
{
    uint32_t count = aio_stream_reach(s, sub);
    int control = 0;

    if (!count)
        return 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t word = s->messages[(s->first + i) & s->messages_mask].word;

        if (word > AIO_WORD_VALUE) {
            if (word >> 29 != AIO_WORD_SGL)
                return 0;
            control = 1;
        }
    }
    while (count--)
        aio_stream_retire(s);
    if (s->held || (control && s->owing))
        s->base.events |= AIO_STREAM_ROOM;
    if (control && aio_stream_announce(s))
        s->base.events |= AIO_STREAM_FAILED;
    return 1;
}

/* At the end every receive is flushed, which is only counted; Python takes all else. */
static int aio_stream_take_flushed(struct aio_stream_state *s, const struct ibv_wc *wc)
{
    if (wc->status != IBV_WC_WR_FLUSH_ERR || !(AIO_SUB(wc->wr_id) & AIO_STREAM_RECV) || !s->posted)
        return 0;
    if (!--s->posted)
        s->base.events |= AIO_STREAM_IDLE;
    return 1;
}

static int aio_stream_take(struct aio_state *state, const struct ibv_wc *wc)
{
    struct aio_stream_state *s = (struct aio_stream_state *)state;
    uint32_t sub = AIO_SUB(wc->wr_id), word;

    if (s->flushing)
        return aio_stream_take_flushed(s, wc);
    if (wc->status != IBV_WC_SUCCESS)
        return 0;
    if (!(sub & AIO_STREAM_RECV))
        return sub & AIO_STREAM_MESSAGE ? aio_stream_sent(s, sub) : 0;
    if (!s->receiving || !aio_stream_is_turn(s, sub & ~AIO_STREAM_RECV) ||
        !aio_stream_word(s, wc, &word))
        return 0;
    if (word <= AIO_WORD_VALUE) {
        if (!aio_stream_arrived(s, word))
            return 0;
    } else if (word >> 29 != AIO_WORD_SGL || !aio_stream_allow(s, word & AIO_WORD_VALUE)) {
        return 0;
    }
    s->alive = 1;
    if (aio_stream_used(s, sub & ~AIO_STREAM_RECV))
        s->base.events |= AIO_STREAM_FAILED;
    return 1;
}

void aio_stream_init(struct aio_stream_state *s)
{
    s->base.take = aio_stream_take;
    s->base.ordered = 1;
}
