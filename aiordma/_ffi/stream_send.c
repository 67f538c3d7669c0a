/*
 * The data path of a stream (the rsockets protocol), between the adapter and its two rings.
 *
 * Theory of operation
 *   One struct aio_stream holds what the plain cases touch.  The protocol in aiordma/rsocket keeps
 *   its numbers there, too (streams/lane.py), so that every rare case is Python's: handshake,
 *   mappings, the end, and whatever a peer may not do.  C does data within bounds, credits within
 *   bounds, and the completion of such messages; a completion that it does not understand to the
 *   last bit it leaves alone, and has then changed nothing.
 *
 *   Messages complete in the order in which they were posted, and a completion stands for all
 *   before it.  So only some messages of data ask for one: enough for the ring and the queue never
 *   to be full of messages without a completion.  A message that fails completes always.
 *
 * The rules are those of glue.c.
 */

#define AIO_STREAM_RECV         0x8000 /* sub-index of a receive: this and the slot of its word */
#define AIO_STREAM_MESSAGE      0x4000 /* of a message: this and the low bits of its number */
#define AIO_STREAM_NUMBER       0x3FFF
#define AIO_STREAM_BYTES        2 /* of the WRITE before a word on iWARP, which tells of failure only */
#define AIO_STREAM_CONTROLS     4
#define AIO_STREAM_CONTROL_SIZE 24
#define AIO_STREAM_CHAIN        8 /* receives that are posted together */

/* News; the last while it is flushing: the adapter has nothing any more. */
enum {
    AIO_STREAM_DATA = 1,
    AIO_STREAM_ROOM = 2,
    AIO_STREAM_FAILED = 4,
    AIO_STREAM_IDLE = 8,
};

#define AIO_WORD_VALUE ((UINT32_C(1) << 29) - 1)
#define AIO_WORD_SGL   UINT32_C(4)

/* Posting; tests put functions of their own in the place of these two. */

static int aio_stream_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    return ibv_post_send(qp, wr, bad);
}

static int aio_stream_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    return ibv_post_recv(qp, wr, bad);
}

static int aio_stream_failed(struct aio_stream *s, int code)
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
static int aio_stream_post(struct aio_stream *s, uint32_t word, uint32_t wrs, const void *from,
                           uint32_t length, uint64_t to, uint32_t key, int in_ring, int signaled)
{
    struct aio_message *message = &s->messages[s->next & s->messages_mask];
    uint64_t id = s->wr_id + ((uint64_t)(AIO_STREAM_MESSAGE | (s->next & AIO_STREAM_NUMBER)) << 24);
    unsigned int flags = length <= s->inline_size ? IBV_SEND_INLINE : 0;
    struct ibv_sge sge = {.addr = (uintptr_t)from, .length = length, .lkey = s->send_lkey};
    struct ibv_send_wr write, *bad = NULL;
    int code;

    s->next++;
    message->word = word;
    message->wrs = (uint8_t)wrs;
    message->in_ring = (uint8_t)in_ring;
    message->signaled = (uint8_t)(signaled && !s->dead);
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
        code = s->post_send(s->qp, &write, &bad);
    } else {
        struct ibv_sge word_sge = {.addr = (uintptr_t)&word, .length = sizeof(word)};
        struct ibv_send_wr send = {
            .wr_id = id,
            .sg_list = &word_sge,
            .num_sge = 1,
            .opcode = IBV_WR_SEND,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE,
        };

        write.wr_id = s->wr_id + ((uint64_t)AIO_STREAM_BYTES << 24);
        write.next = &send;
        write.opcode = IBV_WR_RDMA_WRITE;
        write.send_flags = flags;
        code = s->post_send(s->qp, length ? &write : &send, &bad);
    }
    return code ? aio_stream_failed(s, code) : 0;
}

/* Post a control message of `size` bytes of payload, out of the memory kept for them. */
static int aio_stream_control(struct aio_stream *s, uint32_t word, uint32_t wrs,
                              const void *payload, uint32_t size, uint64_t to, uint32_t key,
                              int signaled)
{
    uint8_t *place = s->send + s->send_size + s->control_next * AIO_STREAM_CONTROL_SIZE;

    if (size) {
        /* At most four are under way, and complete in order. */
        s->control_next = (s->control_next + 1) % AIO_STREAM_CONTROLS;
        memcpy(place, payload, size);
    }
    return aio_stream_post(s, word, wrs, place, size, to, key, 0, signaled || s->iwarp);
}

/* Bytes that the next message of data can carry. */
static uint32_t aio_stream_room(const struct aio_stream *s)
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
static int aio_stream_data(struct aio_stream *s, const void *from, uint32_t length, int in_ring)
{
    uint64_t to = s->addr;
    uint32_t key = s->key;
    int signaled = s->iwarp;

    /* Before posting: the moment the peer has the bytes it may put a descriptor in the place of
     * the one that they filled. */
    s->allowed--;
    s->sequence = (s->sequence + 1) & 0xFFFF;
    s->left -= length;
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
        s->untold_bytes += length;
    }
    if (++s->untold >= s->tell_messages || s->untold_bytes >= s->tell_bytes)
        signaled = 1;
    if (signaled)
        s->untold = s->untold_bytes = 0;
    return aio_stream_post(s, length, s->data_wrs, from, length, to, key, in_ring, signaled);
}

/* Post the next `length` bytes of the ring, which the caller has filled; 0 or a positive errno. */
static int aio_stream_send(struct aio_stream *s, uint32_t length)
{
    return aio_stream_data(s, s->send + s->head, length, 1);
}

/*
 * Send what can be sent now; how many bytes that were.  After a failure s->error is set.
 *
 * What fits into the request itself needs no place in the ring.
 */
static ssize_t aio_stream_write(struct aio_stream *s, const void *data, size_t size)
{
    const char *from = data;
    size_t done = 0;

    if (s->held)
        return 0;
    while (done < size && !s->dead) {
        size_t room = aio_stream_room(s);

        if (room > size - done)
            room = size - done;
        if (!room)
            break;
        if (room <= s->inline_size) {
            aio_stream_data(s, from + done, room, 0);
        } else {
            memcpy(s->send + s->head, from + done, room);
            aio_stream_data(s, s->send + s->head, room, 1);
        }
        done += room;
    }
    return done;
}
