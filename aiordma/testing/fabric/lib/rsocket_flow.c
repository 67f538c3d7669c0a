/*
 * rsockets: messages.
 *
 * A message of data passes three gates: bytes that the peer has announced as free, a credit for
 * the message, and room in the queue and the ring for sending.  The peer's numbers are believed as
 * far as they are possible; those that are not end the connection with EPROTO.
 *
 * Each request that is posted completes, in order, and its completion gives back its place in the
 * queue and its bytes of the ring.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <byteswap.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "rsocket.h"

/* The word of a message: three bits of kind, and a value. */
#define KIND_SHIFT 29
#define VALUE      ((1u << KIND_SHIFT) - 1)
enum { KIND_DATA = 0, KIND_CREDIT = 4, KIND_MAPPING = 6, KIND_CONTROL = 7 };
#define WORD(kind, value) ((uint32_t)(kind) << KIND_SHIFT | (value))
#define WORD_DISCONNECT   WORD(KIND_CONTROL, 0)
#define WORD_SHUTDOWN     WORD(KIND_CONTROL, 2)

/* The number of a request: what it was, and the bytes of the ring for sending that it holds. */
#define ID_RECEIVE ((uint64_t)1 << 63)
#define ID_CONTROL ((uint64_t)1 << 62)

#define BATCH      16

struct message {
    uint32_t word;
    bool silent;  /* the peer does not hear of it: there is no word */
    bool control; /* it takes one of the places that are kept for these */
    bool in_line;
    struct ibv_sge sges[2];
    int sge_count;
    uint32_t bytes; /* of the ring for sending */
    uint64_t address;
    uint32_t key;
};

void stream_end(struct stream *stream, int error)
{
    bool is_there = stream->state == STREAM_ACCEPTED || stream->state == STREAM_CONNECTED;

    if (stream->state == STREAM_ENDED)
        return;
    stream->state = STREAM_ENDED;
    stream->readable = stream->writable = false;
    stream->word = 0;
    stream->error = error;
    /* The peer is not to wait for what does not come any more. */
    if (error && is_there)
        rdma_disconnect(stream->id);
    stream_wake(stream);
}

/* ---- posting --------------------------------------------------------------------------------- */

int stream_post_receive(struct stream *stream, uint32_t index)
{
    struct ibv_sge sge = {.addr =
                              (uintptr_t)(stream->ring + stream->options.receive_bytes) + index * 4,
                          .length = 4,
                          .lkey = stream->receive_mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = ID_RECEIVE | index}, *bad;

    if (stream->iwarp) {
        wr.sg_list = &sge;
        wr.num_sge = 1;
    }
    return ibv_post_recv(stream->id->qp, &wr, &bad);
}

/*
 * The peer gets the word as immediate data.  iWARP has none: there the bytes are followed by a SEND
 * of the word, in the order of this host.
 */
static void post(struct stream *stream, const struct message *message)
{
    uint64_t id = (message->control ? ID_CONTROL : 0) | message->bytes;
    struct ibv_sge word = {.addr = (uintptr_t)&message->word, .length = sizeof(message->word)};
    struct ibv_send_wr send = {.wr_id = id,
                               .sg_list = &word,
                               .num_sge = 1,
                               .opcode = IBV_WR_SEND,
                               .send_flags = IBV_SEND_INLINE};
    struct ibv_send_wr write = {.wr_id = id,
                                .sg_list = (struct ibv_sge *)message->sges,
                                .num_sge = message->sge_count,
                                .opcode = IBV_WR_RDMA_WRITE,
                                .send_flags = message->in_line ? IBV_SEND_INLINE : 0};
    struct ibv_send_wr *first = &write, *bad;
    unsigned count = 1;
    int error;

    write.wr.rdma.remote_addr = message->address;
    write.wr.rdma.rkey = message->key;
    if (!message->silent && !stream->iwarp) {
        write.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
        write.imm_data = htonl(message->word);
    } else if (!message->silent && !message->sge_count) {
        first = &send;
    } else if (!message->silent) {
        write.wr_id &= ID_CONTROL;
        write.next = &send;
        count = 2;
    }
    error = ibv_post_send(stream->id->qp, first, &bad);
    if (error)
        stream_end(stream, error);
    else if (message->control)
        stream->control_out += count;
    else
        stream->data_out += count;
}

static bool has_room_for_control(const struct stream *stream, unsigned count)
{
    return stream->control_out + count <= STREAM_CONTROL;
}

/* A quarter of the ring at least, for else it would be filled by ever smaller messages. */
static bool has_room_for_data(const struct stream *stream)
{
    unsigned count = stream->iwarp ? 2 : 1;

    return stream->data_out + count <= stream->options.sends - STREAM_CONTROL &&
           stream->send_free >= stream->options.send_bytes / 4;
}

bool stream_may_send(const struct stream *stream)
{
    return stream->state == STREAM_CONNECTED && stream->writable &&
           stream->sequence != stream->limit && stream->buffers[0].length &&
           has_room_for_data(stream);
}

/* ---- copies ---------------------------------------------------------------------------------- */

static void copy(struct stream_cursor *cursor, unsigned char *bytes, size_t size, bool from)
{
    while (size) {
        size_t left = cursor->parts->iov_len - cursor->offset;
        unsigned char *part = (unsigned char *)cursor->parts->iov_base + cursor->offset;
        size_t now = size < left ? size : left;

        if (now && from)
            memcpy(bytes, part, now);
        else if (now)
            memcpy(part, bytes, now);
        bytes += now;
        size -= now;
        cursor->offset += now;
        if (cursor->offset == cursor->parts->iov_len) {
            cursor->parts++;
            cursor->offset = 0;
        }
    }
}

/* Send bytes of the program, which may use them again at once. */
static void post_copy(struct stream *stream, struct stream_cursor *from, uint32_t size,
                      struct message *message)
{
    unsigned char small[STREAM_INLINE];
    uint32_t to_end = stream->options.send_bytes - stream->send_offset;
    uint32_t first = size < to_end ? size : to_end;

    if (size <= stream->options.inline_bytes) {
        copy(from, small, size, true);
        message->sges[0] = (struct ibv_sge){(uintptr_t)small, size, 0};
        message->sge_count = 1;
        message->in_line = true;
    } else {
        copy(from, stream->send_ring + stream->send_offset, first, true);
        copy(from, stream->send_ring, size - first, true);
        message->sges[0] = (struct ibv_sge){(uintptr_t)stream->send_ring + stream->send_offset,
                                            first, stream->send_mr->lkey};
        message->sges[1] =
            (struct ibv_sge){(uintptr_t)stream->send_ring, size - first, stream->send_mr->lkey};
        message->sge_count = size > first ? 2 : 1;
        message->bytes = size;
        stream->send_free -= size;
        stream->send_offset = size < to_end ? stream->send_offset + size : size - to_end;
    }
    post(stream, message);
}

static uint32_t least(size_t wanted, uint32_t most)
{
    return wanted < most ? wanted : most;
}

/* ---- messages without data ------------------------------------------------------------------- */

static void swap_buffer(struct stream_buffer *buffer)
{
    buffer->address = bswap_64(buffer->address);
    buffer->key = bswap_32(buffer->key);
    buffer->length = bswap_32(buffer->length);
}

/* The peer may fill the next half of the ring. */
static void announce_half(struct stream *stream, struct message *message)
{
    uint32_t half = stream->options.receive_bytes / 2;
    struct stream_buffer *buffer =
        (struct stream_buffer *)stream->controls + stream->control_next++ % STREAM_CONTROL;

    *buffer = (struct stream_buffer){(uintptr_t)stream->ring + stream->free_offset,
                                     stream->receive_mr->rkey, half};
    if (stream->swap)
        swap_buffer(buffer);
    message->sges[0] = (struct ibv_sge){(uintptr_t)buffer, sizeof(*buffer), stream->send_mr->lkey};
    message->sge_count = 1;
    message->in_line = sizeof(*buffer) <= stream->options.inline_bytes;
    message->address = stream->peer_table + stream->peer_next * sizeof(*buffer);
    message->key = stream->peer_key;
    stream->peer_next = (stream->peer_next + 1) % stream->peer_buffers;
    stream->freed -= half;
    stream->free_offset = stream->free_offset ? 0 : half;
    stream->allowed += half;
}

/* Tell the peer once half of the ring or half of the credits are there again. */
static void give_credit(struct stream *stream)
{
    struct message message = {.control = true};
    bool is_half_free = stream->freed >= stream->options.receive_bytes / 2;

    if (stream->state != STREAM_CONNECTED || !stream->readable ||
        !has_room_for_control(stream, stream->iwarp ? 2 : 1))
        return;
    if (!is_half_free && (int16_t)(stream->consumed - stream->due) < 0)
        return;
    message.word = WORD(KIND_CREDIT, stream->consumed + stream->options.receives);
    if (is_half_free)
        announce_half(stream, &message);
    stream->due = stream->consumed + stream->options.receives / 2;
    post(stream, &message);
}

/* A direction closes behind all that was sent before. */
static void say_word(struct stream *stream)
{
    struct message message = {.control = true, .word = stream->word};

    if (!stream->word || !has_room_for_control(stream, 1))
        return;
    stream->word = 0;
    post(stream, &message);
}

void stream_shutdown(struct stream *stream, bool reading, bool writing)
{
    bool was_readable = stream->readable, was_writable = stream->writable;

    stream->readable = was_readable && !reading;
    stream->writable = was_writable && !writing;
    if (!stream->readable && !stream->writable && (was_readable || was_writable))
        stream->word = WORD_DISCONNECT;
    else if (was_writable && !stream->writable)
        stream->word = WORD_SHUTDOWN;
    stream_progress(stream);
    stream_wake(stream);
}

/* ---- what arrives ---------------------------------------------------------------------------- */

static bool take_data(struct stream *stream, uint32_t size)
{
    uint32_t place = (stream->message_head + stream->message_count) % stream->options.receives;

    if (!size || size > stream->allowed || stream->message_count == stream->options.receives)
        return false;
    stream->messages[place] = size;
    stream->message_count++;
    stream->ring_bytes += size;
    stream->allowed -= size;
    return true;
}

/* More credits, and perhaps a buffer: the table has it where the next one is to be. */
static bool take_credit(struct stream *stream, uint16_t limit)
{
    struct stream_buffer *announced = &stream->table[stream->table_next];

    if ((uint16_t)(limit - stream->sequence) > stream->peer_credits)
        return false;
    stream->limit = limit;
    if (!announced->length)
        return true;
    if (stream->buffers[1].length)
        return false;
    stream->buffers[stream->buffers[0].length ? 1 : 0] = *announced;
    announced->length = 0;
    stream->table_next = (stream->table_next + 1) % STREAM_BUFFERS;
    return true;
}

static void take_control(struct stream *stream, uint32_t value)
{
    if (WORD(KIND_CONTROL, value) == WORD_DISCONNECT)
        stream_end(stream, 0);
    else if (WORD(KIND_CONTROL, value) == WORD_SHUTDOWN)
        stream->readable = false;
}

static void take_message(struct stream *stream, uint32_t word)
{
    uint32_t value = word & VALUE;
    bool is_right = true;

    switch (word >> KIND_SHIFT) {
    case KIND_DATA:
        is_right = take_data(stream, value);
        break;
    case KIND_CREDIT:
        is_right = take_credit(stream, value);
        break;
    case KIND_MAPPING:
        stream->consumed++; /* it has taken a credit, and the table has the rest */
        break;
    case KIND_CONTROL:
        take_control(stream, value);
        break;
    default:
        is_right = false;
    }
    if (!is_right)
        stream_end(stream, EPROTO);
}

static int error_of(enum ibv_wc_status status)
{
    switch (status) {
    case IBV_WC_WR_FLUSH_ERR:
        return ECONNRESET;
    case IBV_WC_RETRY_EXC_ERR:
    case IBV_WC_RNR_RETRY_EXC_ERR:
        return ETIMEDOUT;
    default:
        return EIO;
    }
}

static void take_completion(struct stream *stream, const struct ibv_wc *wc)
{
    uint32_t index = wc->wr_id, word, native;
    int error = 0;

    if (wc->status) {
        stream_end(stream, error_of(wc->status));
    } else if (wc->wr_id & ID_RECEIVE) {
        word = ntohl(wc->imm_data);
        if (stream->iwarp) {
            memcpy(&native, stream->ring + stream->options.receive_bytes + index * 4, 4);
            word = native;
        }
        error = stream_post_receive(stream, index);
        if (error)
            stream_end(stream, error);
        else
            take_message(stream, word);
    } else if (wc->wr_id & ID_CONTROL) {
        stream->control_out--;
    } else {
        stream->data_out--;
        stream->send_free += (uint32_t)wc->wr_id;
    }
}

void stream_progress(struct stream *stream)
{
    struct ibv_wc wc[BATCH];
    bool has_changed = false;
    int count = BATCH;

    while (count == BATCH &&
           (stream->state == STREAM_ACCEPTED || stream->state == STREAM_CONNECTED)) {
        count = ibv_poll_cq(stream->cq, BATCH, wc);
        has_changed = has_changed || count;
        if (count < 0)
            stream_end(stream, EIO);
        for (int i = 0; i < count && stream->state != STREAM_ENDED; i++)
            take_completion(stream, &wc[i]);
    }
    if (stream->state == STREAM_CONNECTED) {
        say_word(stream);
        give_credit(stream);
        if (!stream->readable && !stream->writable && !stream->word && !stream->data_out &&
            !stream->control_out)
            stream_end(stream, 0);
    }
    if (has_changed)
        stream_wake(stream);
}

/* ---- reading and writing --------------------------------------------------------------------- */

/* Tell the peer what it may write by riowrite(), before the data that follow. */
static void publish_maps(struct stream *stream)
{
    for (struct stream_map *map = stream->maps; map; map = map->next) {
        struct stream_slot slot = {map->offset, (uintptr_t)map->mr->addr, map->mr->rkey,
                                   map->mr->length};
        struct iovec part = {&slot, sizeof(slot)};
        struct stream_cursor cursor = {&part, 0};
        struct message message = {.word = WORD(KIND_MAPPING, map->slot),
                                  .key = stream->peer_key,
                                  .address = stream->peer_table +
                                             stream->peer_buffers * sizeof(struct stream_buffer) +
                                             map->slot * sizeof(slot)};

        if (map->published || map->slot < 0)
            continue;
        if (!stream_may_send(stream))
            return;
        if (stream->swap) {
            slot.offset = bswap_64(slot.offset);
            slot.address = bswap_64(slot.address);
            slot.key = bswap_32(slot.key);
            slot.length = bswap_32(slot.length);
        }
        stream->sequence++;
        map->published = true;
        post_copy(stream, &cursor, sizeof(slot), &message);
    }
}

size_t stream_write(struct stream *stream, struct stream_cursor *from, size_t size)
{
    struct stream_buffer *buffer = &stream->buffers[0];
    size_t done = 0;

    publish_maps(stream);
    while (done < size && stream_may_send(stream)) {
        uint32_t now = least(size - done, least(buffer->length, STREAM_CHUNK));
        struct message message = {.address = buffer->address, .key = buffer->key};

        now = least(now, stream->send_free);
        message.word = WORD(KIND_DATA, now);
        buffer->address += now;
        buffer->length -= now;
        if (!buffer->length) {
            *buffer = stream->buffers[1];
            stream->buffers[1].length = 0;
        }
        stream->sequence++;
        post_copy(stream, from, now, &message);
        done += now;
    }
    return done;
}

static void consume(struct stream *stream, uint32_t size)
{
    stream->ring_offset = (stream->ring_offset + size) % stream->options.receive_bytes;
    stream->ring_bytes -= size;
    stream->freed += size;
    while (size) {
        uint32_t *message = &stream->messages[stream->message_head];
        uint32_t now = least(size, *message);

        size -= now;
        *message -= now;
        if (!*message) {
            stream->message_head = (stream->message_head + 1) % stream->options.receives;
            stream->message_count--;
            stream->consumed++;
        }
    }
    give_credit(stream);
}

size_t stream_read(struct stream *stream, struct stream_cursor *into, size_t size, bool peek)
{
    uint32_t now = least(size, stream->ring_bytes);
    uint32_t first = least(now, stream->options.receive_bytes - stream->ring_offset);

    copy(into, stream->ring + stream->ring_offset, first, false);
    copy(into, stream->ring, now - first, false);
    if (!peek && now)
        consume(stream, now);
    return now;
}

/* The mapping that has an offset; the peer may write it any time, hence the copy. */
static bool find_slot(const struct stream *stream, uint64_t offset, struct stream_slot *found)
{
    const struct stream_slot *slots = (const struct stream_slot *)(stream->table + STREAM_BUFFERS);

    for (uint32_t i = 0; i < stream->options.slots; i++) {
        memcpy(found, &slots[i], sizeof(*found));
        if (offset >= found->offset && offset - found->offset < found->length)
            return true;
    }
    return false;
}

ssize_t stream_write_mapped(struct stream *stream, struct stream_cursor *from, size_t size,
                            uint64_t offset)
{
    struct stream_slot slot;
    size_t done = 0;

    publish_maps(stream);
    while (done < size && stream_may_send(stream)) {
        uint32_t now = least(size - done, least(STREAM_CHUNK, stream->send_free));
        struct message message = {.silent = true};

        if (!find_slot(stream, offset + done, &slot))
            return done ? (ssize_t)done : -1;
        now = least(now, slot.length - (offset + done - slot.offset));
        message.address = slot.address + (offset + done - slot.offset);
        message.key = slot.key;
        post_copy(stream, from, now, &message);
        done += now;
    }
    return done;
}
