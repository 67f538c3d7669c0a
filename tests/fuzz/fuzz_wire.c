/*
 * A fuzz target for the C that reads what a peer sends: message.c and stream.c of aiordma/_core.
 *
 * The input is a program: each byte chooses what the peer, the adapter or the own program does
 * next, and the bytes after it are its arguments, so that a fuzzer that changes bytes changes the
 * story. A rule that is broken aborts; memory is the sanitizers' business.  A slot's bytes behind
 * those that arrived are poisoned, so that reading what an earlier message left there is an error,
 * too.
 *
 *   fuzz_wire SEED COUNT      so many random programs, the same for the same seed
 *   fuzz_wire FILE...         these, as a coverage-guided fuzzer has kept them
 *
 * tools/fuzz.py builds and runs it; with -DGUIDED the fuzzer brings its own main().
 */
#include "protocol.h"

#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what)                                                                                \
    do {                                                                                           \
        if (!(what)) {                                                                             \
            fprintf(stderr, "%s:%d: not true: %s\n", __func__, __LINE__, #what);                   \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

struct input {
    const uint8_t *at, *end;
};

static uint8_t take8(struct input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

static uint32_t take32(struct input *in)
{
    uint32_t value = 0;

    for (int i = 0; i < 4; i++)
        value = value << 8 | take8(in);
    return value;
}

/* A field of a frame: big-endian. */
static uint32_t get32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return ntohl(value);
}

static void put32(uint8_t *at, uint32_t value)
{
    value = htonl(value);
    memcpy(at, &value, sizeof(value));
}

/* A number of the sizes at which such code breaks, more often than any number. */
static uint32_t take_edge(struct input *in, uint32_t near)
{
    switch (take8(in) % 6) {
    case 0:
        return 0;
    case 1:
        return near - 1;
    case 2:
        return near;
    case 3:
        return near + 1;
    case 4:
        return take8(in) % 16;
    default:
        return take32(in);
    }
}

/* Memory of its own for each array, so that AddressSanitizer sees an access beyond it. */
static void *zeros(size_t count, size_t size)
{
    void *memory = calloc(count, size);

    if (!memory)
        abort();
    return memory;
}

/* The adapter: it keeps what is posted, in order. */

#define MOST 4096

static struct ibv_context adapter;
static struct ibv_qp queue_pair;
static uint64_t posted_sends[MOST], posted_receives[MOST];
static uint32_t n_sends, n_receives;
static int refuse_posts;

static int adapter_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    (void)qp;
    for (; wr; wr = wr->next) {
        if (refuse_posts) {
            *bad = wr;
            return ENOMEM;
        }
        for (int i = 0; i < wr->num_sge; i++) { /* it reads what it is given */
            const volatile uint8_t *bytes = (const uint8_t *)(uintptr_t)wr->sg_list[i].addr;

            for (uint32_t at = 0; at < wr->sg_list[i].length; at++)
                (void)bytes[at];
        }
        if (wr->send_flags & IBV_SEND_SIGNALED) {
            CHECK(n_sends < MOST);
            posted_sends[n_sends++] = wr->wr_id;
        }
    }
    return 0;
}

static int adapter_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    (void)qp;
    for (; wr; wr = wr->next) {
        if (refuse_posts) {
            *bad = wr;
            return ENOMEM;
        }
        for (uint32_t i = 0; i < n_receives; i++) /* iWARP's words and slots have one owner */
            CHECK(posted_receives[i] != wr->wr_id || !wr->num_sge);
        CHECK(n_receives < MOST);
        posted_receives[n_receives++] = wr->wr_id;
    }
    return 0;
}

static uint64_t take_first(uint64_t *ids, uint32_t *count)
{
    uint64_t id = ids[0];

    memmove(ids, ids + 1, --*count * sizeof(*ids));
    return id;
}

static void reset_adapter(void)
{
    adapter.ops.post_send = adapter_post_send;
    adapter.ops.post_recv = adapter_post_recv;
    queue_pair.context = &adapter;
    n_sends = n_receives = 0;
    refuse_posts = 0;
}

/* Messages */

static void check_messages(const struct aio_message_state *m, uint32_t sends)
{
    uint8_t seen[64] = {0};

    CHECK(m->n_free <= sends && m->n_control_free <= m->controls);
    for (uint32_t i = 0; i < m->n_free; i++) {
        CHECK(m->free[i] < sends && !seen[m->free[i]]);
        seen[m->free[i]] = 1;
    }
    for (uint32_t i = 0; i < m->n_control_free; i++) {
        CHECK(m->control_free[i] < m->controls && !seen[sends + m->control_free[i]]);
        seen[sends + m->control_free[i]] = 1;
    }
    CHECK(m->tail + m->fragments - m->head <= m->arrival_mask + 1);
    CHECK(m->large + m->inner <= m->tail - m->head);
    CHECK(!m->fragments || m->missing);
    CHECK(m->credits >= 0 && m->unused >= 0 && m->n_back <= AIO_CHAIN);
    CHECK(m->n_unposted <= AIO_SEND_CHAIN && m->n_unposted <= m->sent - m->completed - m->flushed);
    CHECK(m->completed + m->flushed <= m->sent && m->n_marks <= AIO_CREDIT_FRAMES);
    CHECK(m->done_tail - m->done_head <= m->done_mask + 1);
    CHECK(m->dones.tail - m->dones.head <= m->dones.mask + 1);
    CHECK(m->dones_pending.tail - m->dones_pending.head <= m->dones_pending.mask + 1);
    CHECK(m->n_reads_done <= m->most_reads);
    for (uint32_t number = 0; number < 8; number++) /* the peer may write to landings that exist */
        CHECK(!(m->landings.granted & 1 << number) ||
              (number && number <= AIO_LANDINGS && m->landings.addr[number]));
    CHECK(!m->landings.freed || !(m->landings.granted & 1 << m->landings.newest));
}

/* A frame lands in the oldest posted receive. */
static void frame(struct aio_message_state *m, struct input *in, uint8_t *arena, uint32_t stride)
{
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RECV};
    static const uint8_t good[4] = {AIO_FRAME_DATA, 0, 0, 1};
    struct aio_message_state before;
    uint32_t slot, body, returned;
    uint8_t *at, word[4], number, kind;

    if (!n_receives)
        return;
    wc.wr_id = take_first(posted_receives, &n_receives);
    slot = AIO_SUB(wc.wr_id) & ~AIO_SUB_RECV;
    at = arena + slot * stride;
    ASAN_UNPOISON_MEMORY_REGION(at, stride);
    wc.byte_len = take_edge(in, stride) % (stride + 1);
    for (uint32_t i = 0; i < wc.byte_len; i++)
        at[i] = take8(in);
    if (m->numbered && take8(in) % 8 == 0) { /* it completes again, or another does out of turn */
        memcpy(&before, m, sizeof(before));
        wc.wr_id ^= (uint64_t)(1 + take8(in) % 7) << AIO_SUB_SHIFT;
        CHECK(m->base.take(&m->base, &wc) && m->violation);
        CHECK(m->tail == before.tail && m->credits == before.credits);
        CHECK(before.violation ||
              (m->violation == AIO_WRONG_TURN && m->receives == before.receives));
        ASAN_POISON_MEMORY_REGION(at, stride);
        return;
    }
    number = m->numbered && take8(in) % 32 ? m->number_in : 0;
    if (wc.byte_len >= AIO_FRAME_SIZE &&
        take8(in) % 8) { /* most are in good order, but for a bit */
        body = wc.byte_len - AIO_FRAME_SIZE;
        at[0] = take8(in) % 3 ? AIO_FRAME_DATA : take8(in) % (AIO_FRAME_ABORT + 1);
        at[1] &= (uint8_t)~AIO_FRAME_MORE;
        put32(at + 8, 0);
        put32(at + 12, body);
        if (at[0] == AIO_FRAME_DATA && m->missing > body) { /* of a message that is arriving */
            at[1] |= AIO_FRAME_MORE;
            put32(at + 12, (uint32_t)m->missing);
        } else if (at[0] == AIO_FRAME_DATA && take8(in) % 4 == 0) {
            at[1] |= AIO_FRAME_MORE;
            put32(at + 12, body + take_edge(in, stride));
        }
        at[0] |= number;
        if (take8(in) % 4 == 0)
            at[take8(in) % AIO_FRAME_SIZE] ^= (uint8_t)(1 << take8(in) % 8);
    }
    ASAN_POISON_MEMORY_REGION(at + wc.byte_len, stride - wc.byte_len);
    wc.wc_flags = take8(in) & IBV_WC_WITH_IMM;
    for (int i = 0; i < 4; i++) /* a header, most often in good order */
        word[i] = take8(in) % 8 ? good[i] : take8(in);
    word[0] |= number;
    memcpy(&wc.imm_data, word, sizeof(word));
    if (take8(in) % (m->landings.granted ? 4 : 64) == 0) { /* of more bytes than a slot has, too */
        wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        wc.byte_len = take_edge(in, 4 * stride);
        word[1] = (uint8_t)(take8(in) % 8 ? m->landings.newest << AIO_LANDING_SHIFT : take8(in));
        memcpy(&wc.imm_data, word, sizeof(word));
    }
    memcpy(&before, m, sizeof(before));
    CHECK(m->base.take(&m->base, &wc));
    if (before.violation) {
        CHECK(m->tail == before.tail && m->credits == before.credits);
        return;
    }
    if (m->violation) /* and nothing is delivered */
        CHECK(m->tail == before.tail && m->base.events & AIO_EVENT_FAILED);
    if (m->violation || m->raw)
        return;
    /* The rules of docs/wire.md, read once more. */
    kind = wc.wc_flags || wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM ? word[0] : at[0];
    CHECK(!m->numbered || (kind & 0xF0) == before.number_in);
    CHECK(m->number_in == (uint8_t)(before.number_in + (m->numbered ? 16 : 0)));
    kind &= m->numbered ? 0xF : 0xFF;
    if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        uint32_t landing = word[1] >> AIO_LANDING_SHIFT;

        CHECK(kind == AIO_FRAME_DATA && !(word[1] & (AIO_FRAME_HAS_IMM | AIO_FRAME_MORE)));
        CHECK(before.landings.granted & 1 << landing && wc.byte_len);
        CHECK(wc.byte_len <= m->largest && wc.byte_len <= aio_landing_size(landing));
        CHECK(m->credits - before.credits == (word[2] << 8 | word[3]));
        CHECK(before.unused > 0 && !before.missing && !m->missing);
        return;
    }
    if (wc.wc_flags && wc.opcode == IBV_WC_RECV) {
        CHECK(kind == AIO_FRAME_DATA);
        CHECK(!(word[1] & ~(m->stage.most ? AIO_FRAME_FREE : 0)));
        CHECK(m->credits - before.credits == (word[2] << 8 | word[3]));
        CHECK(before.unused > 0 && (!before.missing || before.missing == wc.byte_len));
        CHECK(!m->missing && !m->fragments);
        return;
    }
    returned = (uint32_t)at[2] << 8 | at[3];
    CHECK(m->credits - before.credits == returned);
    switch (kind) {
    case AIO_FRAME_DATA:
    case AIO_FRAME_RENDEZVOUS:
        body = wc.byte_len - AIO_FRAME_SIZE;
        CHECK(before.unused > 0);
        CHECK(!before.missing || (kind == AIO_FRAME_DATA && get32(at + 12) == before.missing));
        if (kind == AIO_FRAME_DATA && at[1] & AIO_FRAME_MORE) {
            CHECK(body && get32(at + 12) > body && get32(at + 12) <= m->largest);
            CHECK(m->missing == get32(at + 12) - body && m->tail == before.tail);
        } else {
            CHECK(kind == AIO_FRAME_RENDEZVOUS || get32(at + 12) == body);
            CHECK(!m->missing && !m->fragments);
        }
        if (m->discarding)
            CHECK(m->tail == before.tail);
        else
            CHECK(m->unused == before.unused - 1 &&
                  m->tail + m->fragments == before.tail + before.fragments + 1);
        break;
    case AIO_FRAME_DONE:
        CHECK(m->dones.tail == before.dones.tail + 1); /* fall through */
    default:
        CHECK(kind <= AIO_FRAME_ABORT && m->tail == before.tail);
    }
}

/* A message whose bytes lie in several pieces, some of them empty. */
static void send_pieces(struct aio_message_state *m, const uint8_t *data, uint64_t length,
                        uint8_t how)
{
    struct aio_piece pieces[5];
    uint64_t start = 0;

    for (int i = 0; i < 5; i++) {
        uint64_t end = i == 4 ? length : start + (length - start) * (how & 3) / 3;

        pieces[i] = (struct aio_piece){data + start, end - start};
        start = end;
    }
    aio_message_send(m, (struct aio_bytes){pieces[0], pieces + 1}, length, how & 8, 5);
}

static void fuzz_messages(struct input *in)
{
    /* Fewer places for arrivals than receives, which a connection never has: they must not overrun.
     */
    enum {
        SENDS = 8,
        CONTROLS = 6,
        EXCHANGES = 4,
        RECEIVES = 26,
        ARRIVALS = 8,
        STRIDE = 48,
        OPERATIONS = 4,
        READS = 2,
        ORDER = 32 /* a power of two that has all slots */
    };
    struct aio_message_state *m = zeros(1, sizeof(*m));
    struct aio_arrival *arrivals = zeros(ARRIVALS, sizeof(*arrivals));
    uint16_t *free_slots = zeros(SENDS, sizeof(*free_slots));
    uint16_t *control_free = zeros(CONTROLS, sizeof(*control_free));
    uint16_t *done = zeros(OPERATIONS, sizeof(*done)), *reads = zeros(READS, sizeof(*reads));
    uint16_t *sending = zeros(ORDER, sizeof(*sending)), *receiving = zeros(ORDER, sizeof(*sending));
    struct aio_done *dones = zeros(EXCHANGES, sizeof(*dones));
    struct aio_done *controls_pending = zeros(EXCHANGES, sizeof(*controls_pending));
    uint8_t *send = zeros(SENDS, STRIDE), *recv = zeros(RECEIVES, STRIDE);
    uint8_t *control = zeros(CONTROLS, AIO_FRAME_SIZE);
    uint8_t *landing = zeros(4, STRIDE), *stage = zeros(3, STRIDE);
    uint8_t data[4 * STRIDE] = {0}, how = take8(in);
    uint16_t held[RECEIVES];
    uint32_t n_held = 0;

    reset_adapter();
    /* What MessageState.__new__ and its bind() set. */
    m->free = free_slots, m->data_slots = SENDS, m->control_free = control_free;
    m->arrivals = arrivals, m->arrival_mask = ARRIVALS - 1;
    m->dones = (struct aio_dones){.items = dones, .mask = EXCHANGES - 1};
    m->dones_pending = (struct aio_dones){.items = controls_pending, .mask = EXCHANGES - 1};
    m->reads_done = reads, m->most_reads = READS;
    m->sending = (struct aio_order){.slots = sending, .mask = ORDER - 1};
    m->receiving = (struct aio_order){.slots = receiving, .mask = ORDER - 1};
    m->numbered = how >> 6 & 1;
    m->raw = how & 1;
    m->control = m->raw ? 0 : CONTROLS + EXCHANGES;
    aio_message_init(m, SENDS, RECEIVES, m->raw ? 0 : CONTROLS);
    m->qp = &queue_pair, m->send_flags = IBV_SEND_SIGNALED, m->inline_size = how & 2 ? 24 : 0;
    m->send = (struct aio_slots){
        .addr = (uintptr_t)send, .stride = STRIDE, .key = 1, .base = SENDS, .full = 1};
    m->recv = (struct aio_slots){
        .addr = (uintptr_t)recv, .stride = STRIDE, .key = 2, .base = RECEIVES, .full = 1};
    m->frames.addr = (uintptr_t)control, m->frames.stride = AIO_FRAME_SIZE, m->frames.key = 3;
    m->base.id = UINT64_C(7) << 40;
    m->eager_size = STRIDE - AIO_FRAME_SIZE;
    m->fragmented_size = how & 8 ? 3 * STRIDE : 0;
    m->bare_size = how & 16 ? STRIDE : 0;
    m->largest = m->landings.most = 4 * STRIDE;
    m->stage.most = how & 32 ? 4 * STRIDE : 0;
    m->credits = how & 4 ? 3 : 0;
    m->operations_done = done;
    m->done_mask = OPERATIONS - 1;
    CHECK(!aio_message_receive(m, NULL, RECEIVES) && m->receives == RECEIVES);
    ASAN_POISON_MEMORY_REGION(recv, RECEIVES * STRIDE);
    while (in->at < in->end) {
        struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_SEND};
        const struct aio_arrival *first = &m->arrivals[m->head & m->arrival_mask];

        switch (take8(in) % 15) {
        case 0:
        case 1:
        case 2:
            frame(m, in, recv, STRIDE);
            break;
        case 12: /* sends wait for others, or go at once */
            m->turn_flushes = take8(in) & 1, m->delivering = take8(in) & 1;
            refuse_posts = take8(in) % 16 == 0;
            break;
        case 13: /* the end of the turn; or that of the connection, which takes no sends any more */
            if (aio_message_flush(m))
                aio_message_drop(m);
            CHECK(!m->n_unposted);
            break;
        case 3: /* a send completes, well or not */
            if (!n_sends)
                break;
            wc.wr_id = take_first(posted_sends, &n_sends);
            if (take8(in) % 8 == 0)
                wc.status = IBV_WC_RETRY_EXC_ERR;
            if (!m->base.take(&m->base, &wc)) /* the connection fails; its slot stays under way */
                m->flushed++;
            break;
        case 4: /* the program receives */
            if (m->head == m->tail)
                break;
            CHECK(first->slot < RECEIVES && n_held < RECEIVES);
            if (first->landing) { /* it is copied, and the peer may write there again */
                const volatile uint8_t *bytes = aio_arrival_at(m, first);

                for (uint32_t i = 0; i < first->length; i++)
                    (void)bytes[i];
                m->landings.freed |= first->landing == m->landings.newest;
            } else {
                CHECK(first->length + aio_head_size(m, first->bare) <= STRIDE);
            }
            held[n_held++] = first->slot;
            m->large -= first->large;
            m->inner -= first->more;
            m->head++;
            break;
        case 14: /* memory comes: for a landing, or for a stage */
            if (m->raw || take8(in) % 2) {
                m->stage.addr = (uintptr_t)stage, m->stage.size = 3 * STRIDE;
            } else if (m->landings.newest < AIO_LANDINGS) {
                m->landings.addr[++m->landings.newest] = (uintptr_t)landing;
                m->landings.freed = 0;
                aio_message_offer(m);
            }
            break;
        case 5: /* and is done with a message */
            if (n_held) {
                uint32_t slot = held[--n_held];

                CHECK(aio_message_back(m, slot) <= ENOMEM);
            }
            break;
        case 6: /* it sends; memory for a header is there, that for the bytes is exact */
            send_pieces(m, data, take8(in) % sizeof(data), how);
            break;
        case 7:
            m->waiting ^= 1;
            break;
        case 8:
            m->blocked = take8(in) & 1;
            m->discarding |= take8(in) % 32 == 0; /* the program has closed the connection */
            break;
        case 9: /* Python hears of what was said */
            if (m->dones.head != m->dones.tail)
                m->dones.head++;
            m->n_reads_done = 0;
            m->base.events = 0;
            break;
        case 10:
            if (!m->raw)
                aio_message_send_control(m, take8(in) % 2 ? AIO_FRAME_DONE : AIO_FRAME_CREDIT, 9,
                                         0);
            aio_message_give_credit(m);
            break;
        default: /* a completion that nothing here has asked for, of no number in particular */
            wc.wr_id = m->base.id | (uint64_t)(AIO_SUB_READ | take8(in)) << AIO_SUB_SHIFT;
            wc.status = take8(in) % 2 ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
            if (AIO_SUB(wc.wr_id) < AIO_SUB_OPERATE)
                m->base.take(&m->base, &wc);
            break;
        }
        check_messages(m, SENDS);
    }
    ASAN_UNPOISON_MEMORY_REGION(recv, RECEIVES * STRIDE);
    free(landing), free(stage), free(recv), free(send), free(control), free(done), free(reads),
        free(dones), free(controls_pending);
    free(free_slots), free(control_free), free(arrivals), free(sending), free(receiving), free(m);
}

/* Streams */

static void check_stream(const struct aio_stream_state *s)
{
    uint32_t waiting = 0, rest = s->ring_size - s->offset, wider = s->wider_size;

    CHECK(s->offset < s->ring_size && (!s->moved || wider));
    CHECK(s->readable <= (s->moved ? rest + wider / 2 : s->ring_size));
    CHECK(s->waiting_count <= s->credits && s->waiting_count <= s->waiting_mask + 1);
    for (uint32_t i = 0; i < s->waiting_count; i++)
        waiting += s->waiting[(s->waiting_first + i) & s->waiting_mask];
    CHECK(waiting == s->readable);
    /* Room in the ring is in one place: read but not told, told and not written, or not yet read.
     */
    if (s->moved) /* the rest of the ring, and the first half of the larger ring */
        CHECK(!s->ring_free &&
              s->readable + s->ring_left + s->ring_buffers * (wider / 2) == rest + wider / 2);
    else
        CHECK(s->ring_free + s->readable + s->ring_left + s->ring_buffers * (s->ring_size / 2) ==
              s->ring_size);
    CHECK(s->send_free <= s->send_size && s->head < s->send_size);
    CHECK(s->next - s->first <= s->messages_mask + 1);
    CHECK(s->entry < 2 && s->peer_entry < s->table_length);
    CHECK(s->allowed <= s->limit && s->n_used < AIO_CHAIN);
    CHECK(s->control_out <= AIO_STREAM_CONTROLS && s->ring_allowed <= s->credits);
    CHECK(s->data_out <= s->data_limit + s->data_wrs);
}

/* A word arrives: what the peer wrote to the table before it is whatever the input says. */
static void word(struct aio_stream_state *s, struct input *in)
{
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RECV};
    struct aio_stream_state before;
    uint32_t value, allowed;
    int taken;

    if (!n_receives)
        return;
    wc.wr_id = take_first(posted_receives, &n_receives);
    if (take8(in) % 4 == 0) /* many small ones use the credits up before the room */
        value = 1;
    else if (take8(in) % 4) /* data, of a length that is nearly right */
        value = take_edge(in, take8(in) % 2 ? s->ring_left : s->ring_size / 2) & AIO_WORD_VALUE;
    else if (take8(in) % 4)
        value = (uint32_t)AIO_WORD_SGL << 29 | ((s->sequence + take_edge(in, s->limit)) & 0xFFFF);
    else
        value = take32(in);
    if (s->words) {
        memcpy(s->words + (AIO_SUB(wc.wr_id) & ~AIO_STREAM_RECV) * 4, &value, 4);
        wc.byte_len = take8(in) % 16 ? 4 : take8(in) % 5;
    } else {
        wc.imm_data = htonl(value);
        wc.wc_flags = take8(in) % 16 ? IBV_WC_WITH_IMM : 0;
    }
    memcpy(&before, s, sizeof(before));
    taken = s->base.take(&s->base, &wc);
    if (!taken) {
        CHECK(!memcmp(&before, s, sizeof(before)));
        return;
    }
    /* The rules of the protocol, read once more. */
    CHECK(s->words ? wc.byte_len == 4 : wc.wc_flags & IBV_WC_WITH_IMM);
    if (value <= AIO_WORD_VALUE) {
        CHECK(value && value <= before.ring_left && before.ring_allowed);
        return;
    }
    allowed = (value - before.sequence) & 0xFFFF;
    CHECK(value >> 29 == AIO_WORD_SGL && allowed >= before.allowed && allowed <= s->limit);
    CHECK(!s->left || s->addr <= UINT64_MAX - (s->left - 1));
    CHECK(!s->spare_left || s->spare_addr <= UINT64_MAX - (s->spare_left - 1));
}

static void fuzz_stream(struct input *in)
{
    enum { RING = 256, WIDER = 640, SEND = 128, CREDITS = 8, DEPTH = 64, LIMIT = 12 };
    struct aio_stream_state *s = zeros(1, sizeof(*s));
    uint8_t how = take8(in), into[WIDER + 16], data[SEND + 32] = {0};
    uint8_t *wider = zeros(1, WIDER), *larger = zeros(1, 2 * SEND);
    uint8_t *ring = zeros(1, RING), *table = zeros(2, 16), *words = zeros(CREDITS + 8, 4);
    uint8_t *send = zeros(1, SEND + AIO_STREAM_CONTROLS * AIO_STREAM_CONTROL_SIZE);
    uint32_t *waiting = zeros(CREDITS, sizeof(*waiting));
    struct aio_message *messages = zeros(DEPTH, sizeof(*messages));

    reset_adapter();
    aio_stream_init(s);
    s->iwarp = how & 1;
    s->swapped = how >> 1 & 1;
    s->inline_size = how & 4 ? 16 : 0;
    s->qp = &queue_pair;
    s->ring = ring, s->ring_size = RING, s->table = table, s->send = send, s->send_size = SEND;
    s->send_free = SEND, s->controls = send + SEND, s->grow_at = RING;
    aio_stream_shares(s);
    s->data_wrs = s->iwarp ? 2 : 1;
    s->signal_messages = (DEPTH / s->data_wrs - 4) / 4;
    s->data_limit = DEPTH - 4 * 2 - s->data_wrs;
    s->waiting = waiting, s->waiting_mask = CREDITS - 1;
    s->messages = messages, s->messages_mask = DEPTH - 1;
    s->want = 1;
    s->words = s->iwarp ? words : NULL;
    s->credits = s->ring_allowed = CREDITS;
    s->due = CREDITS / 2;
    s->ring_left = RING / 2, s->ring_buffers = 1;
    s->limit = LIMIT, s->allowed = LIMIT;
    s->addr = 1 << 20, s->left = SEND, s->table_length = 1 + take8(in) % 4;
    s->receiving = s->sending = s->crediting = 1;
    CHECK(!aio_stream_fill(s, CREDITS + 8));
    while (in->at < in->end && !s->dead) {
        struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RDMA_WRITE};
        uint32_t n;

        switch (take8(in) % 10) {
        case 9: /* Python has made larger rings */
            if (!s->wider_size && s->ring_size == RING)
                s->wider = wider, s->wider_size = WIDER;
            if (!s->send_grown && take8(in) % 2)
                aio_stream_send_from(s, larger, 2 * SEND, 7);
            break;
        case 0:
        case 1:
        case 2:
            word(s, in);
            break;
        case 3: /* the peer writes to the table, with any length */
            n = take8(in) % 2;
            for (uint32_t i = 0; i < 16; i++)
                table[n * 16 + i] = take8(in);
            if (take8(in) % 4 == 0) /* memory that would go on behind the last address */
                memset(table + n * 16, 0xFF, 7);
            break;
        case 4:
            CHECK(aio_stream_read(s, into, take_edge(in, WIDER) % sizeof(into)) <= WIDER);
            break;
        case 5:
            n = take_edge(in, SEND / 4) % sizeof(data);
            CHECK(aio_stream_write(s, data, n) <= n);
            break;
        case 6: /* messages complete, in order, or a number that is of none under way */
            if (take8(in) % 8 == 0)
                wc.wr_id = s->wr_id + ((uint64_t)(AIO_STREAM_MESSAGE | take8(in)) << AIO_SUB_SHIFT);
            else if (n_sends)
                wc.wr_id = take_first(posted_sends, &n_sends);
            else
                break;
            if (aio_stream_reach(s, AIO_SUB(wc.wr_id)) || take8(in) % 2)
                s->base.take(&s->base, &wc);
            break;
        case 7:
            s->want = take_edge(in, RING / 2) % RING;
            break;
        default:
            refuse_posts = take8(in) % 32 == 0;
            break;
        }
        s->base.events = 0;
        if (!s->dead)
            check_stream(s);
    }
    free(messages), free(waiting), free(send), free(words), free(table), free(ring), free(s);
    free(wider), free(larger);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};

    if (take8(&in) & 1)
        fuzz_messages(&in);
    else
        fuzz_stream(&in);
    return 0;
}

#ifndef GUIDED
static uint64_t xorshift(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

static int run_file(const char *path)
{
    static uint8_t data[1 << 16];
    FILE *file = fopen(path, "rb");
    size_t size;

    if (!file) {
        perror(path);
        return 1;
    }
    size = fread(data, 1, sizeof(data), file);
    fclose(file);
    return LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv)
{
    char *end;
    uint64_t seed = argc == 3 ? strtoull(argv[1], &end, 10) : 0;

    if (argc != 3 || *end) {
        for (int i = 1; i < argc; i++)
            if (run_file(argv[i]))
                return 1;
        return 0;
    }
    for (uint64_t count = strtoull(argv[2], NULL, 10), i = 0; i < count; i++) {
        uint64_t state = (seed << 32 | (i + 1)) * UINT64_C(0x9E3779B97F4A7C15);
        uint8_t data[1024];
        size_t size = xorshift(&state) % sizeof(data);

        for (size_t at = 0; at < size; at++)
            data[at] = (uint8_t)(xorshift(&state) >> 32);
        /* Its own allocation, so that a read behind the input is seen, too. */
        uint8_t *exact = malloc(size + !size);

        memcpy(exact, data, size);
        fprintf(stderr, i % 100000 ? "" : "seed %llu, program %llu\n", (unsigned long long)seed,
                (unsigned long long)i);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    return 0;
}
#endif
