/*
 * A fuzz target for the C that reads what a peer sends: connection.c and stream.c of aiordma/_core.
 * It looks at the members of both structs after each step, as no file of the library may.
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
#include "connection.h"
#include "connection_private.h"
#include "protocol.h"
#include "stream.h"
#include "stream_private.h"

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

static void check_messages(const struct aio_connection *c, uint32_t sends)
{
    uint8_t seen[64] = {0};

    CHECK(c->n_free <= sends && c->n_control_free <= c->controls);
    for (uint32_t i = 0; i < c->n_free; i++) {
        CHECK(c->free[i] < sends && !seen[c->free[i]]);
        seen[c->free[i]] = 1;
    }
    for (uint32_t i = 0; i < c->n_control_free; i++) {
        CHECK(c->control_free[i] < c->controls && !seen[sends + c->control_free[i]]);
        seen[sends + c->control_free[i]] = 1;
    }
    CHECK(c->tail + c->fragments - c->head <= c->arrival_mask + 1);
    CHECK(c->large + c->inner <= c->tail - c->head);
    CHECK(c->words_in.size <= AIO_WORDS_SIZE);
    CHECK(!c->fragments || c->missing);
    CHECK(c->credits >= 0 && c->unused >= 0 && c->n_back <= AIO_CHAIN);
    CHECK(c->n_unposted <= AIO_SEND_CHAIN && c->n_unposted <= c->sent - c->completed - c->flushed);
    CHECK(c->completed + c->flushed <= c->sent && c->n_marks <= AIO_CREDIT_FRAMES);
    CHECK(c->done_tail - c->done_head <= c->done_mask + 1);
    CHECK(c->dones.tail - c->dones.head <= c->dones.mask + 1);
    CHECK(c->dones_pending.tail - c->dones_pending.head <= c->dones_pending.mask + 1);
    CHECK(c->n_reads_done <= c->most_reads);
    CHECK(c->notes.next - c->notes.first <= (c->notes.slots ? c->notes.mask + 1 : 0));
    for (uint32_t number = 0; number < 8; number++) /* the peer may write to landings that exist */
        CHECK(!(c->landings.granted & 1 << number) ||
              (number && number <= AIO_LANDINGS && c->landings.addr[number]));
    CHECK(!c->landings.freed || !(c->landings.granted & 1 << c->landings.newest));
    CHECK(c->n_revoking <= AIO_REVOKING && (!c->n_revoking || c->peer_identity));
    for (uint32_t i = 0; c->revoked && i < AIO_REVOKED; i++) /* each in its own place */
        CHECK(!c->revoked[i] || c->revoked[i] % AIO_REVOKED == i);
}

/* What a name of memory says of its owner: the peer's, another's, one that has ended. */
static void check_admission(const struct aio_connection *c, uint64_t owner, uint32_t generation)
{
    enum aio_admission admission = connection_admission(c, owner, generation);

    if (!owner || c->raw)
        CHECK(!admission);
    else if (owner != c->peer_identity)
        CHECK(admission == AIO_REFUSED_OWNER);
    else
        CHECK(!admission || (admission == AIO_REFUSED_REVOKED && generation && c->revoked));
}

/* A frame lands in the oldest posted receive. */
static void frame(struct aio_connection *c, struct input *in, uint8_t *arena, uint32_t stride)
{
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RECV};
    static const uint8_t good[4] = {AIO_FRAME_DATA, 0, 0, 1};
    struct aio_connection before;
    uint32_t slot, body, returned;
    uint8_t *at, word[4], number, kind;
    int events;

    if (!n_receives)
        return;
    wc.wr_id = take_first(posted_receives, &n_receives);
    slot = AIO_SUB(wc.wr_id) & ~AIO_SUB_RECV;
    at = arena + slot * stride;
    ASAN_UNPOISON_MEMORY_REGION(at, stride);
    wc.byte_len = take_edge(in, stride) % (stride + 1);
    for (uint32_t i = 0; i < wc.byte_len; i++)
        at[i] = take8(in);
    if (c->numbered && take8(in) % 8 == 0) { /* it completes again, or another does out of turn */
        memcpy(&before, c, sizeof(before));
        wc.wr_id ^= (uint64_t)(1 + take8(in) % 7) << AIO_SUB_SHIFT;
        CHECK(connection_complete(c, &wc) >= 0 && c->violation);
        CHECK(c->tail == before.tail && c->credits == before.credits);
        CHECK(before.violation ||
              (c->violation == AIO_WRONG_TURN && c->receives == before.receives));
        ASAN_POISON_MEMORY_REGION(at, stride);
        return;
    }
    number = c->numbered && take8(in) % 32 ? c->number_in : 0;
    if (wc.byte_len >= AIO_FRAME_SIZE &&
        take8(in) % 8) { /* most are in good order, but for a bit */
        body = wc.byte_len - AIO_FRAME_SIZE;
        at[0] = take8(in) % 3 ? AIO_FRAME_DATA : take8(in) % AIO_FRAME_KIND_COUNT;
        at[1] &= (uint8_t)~AIO_FRAME_MORE;
        put32(at + 8, 0);
        put32(at + 12, body);
        if (at[0] == AIO_FRAME_DATA && c->missing > body) { /* of a message that is arriving */
            at[1] |= AIO_FRAME_MORE;
            put32(at + 12, (uint32_t)c->missing);
        } else if (at[0] == AIO_FRAME_DATA && take8(in) % 4 == 0) {
            at[1] |= AIO_FRAME_MORE;
            put32(at + 12, body + take_edge(in, stride));
        }
        if (at[0] == AIO_FRAME_PING || at[0] == AIO_FRAME_PONG || at[0] == AIO_FRAME_CREDIT) {
            at[1] &= take8(in) % 4 ? AIO_FRAME_REVOKED | AIO_FRAME_FREE : 0xFF;
            at[1] |= take8(in) % 2 ? AIO_FRAME_REVOKED : 0;
            put32(at + 8, take_edge(in, take8(in)));
            put32(at + 12, take_edge(in, take8(in)));
        } else if (at[0] == AIO_FRAME_NOTE && take8(in) % 8) { /* its body, bytes behind it */
            at[1] = AIO_FRAME_HAS_IMM;
            wc.byte_len = AIO_FRAME_SIZE + AIO_NOTE_SIZE;
            memset(at + AIO_FRAME_SIZE + 4, take8(in) % 8 ? 0 : 0xFF, 8);
        }
        at[0] |= number;
        if (take8(in) % 4 == 0)
            at[take8(in) % AIO_FRAME_SIZE] ^= (uint8_t)(1 << take8(in) % 8);
    }
    if (c->gate && take8(in) % 8) { /* the proof, but for a bit now and then */
        wc.byte_len = AIO_FRAME_SIZE + AIO_PROOF_SIZE;
        at[0] = AIO_FRAME_CREDIT;
        memcpy(at + AIO_FRAME_SIZE, c->proof, AIO_PROOF_SIZE);
        if (take8(in) % 4 == 0)
            at[take8(in) % wc.byte_len] ^= (uint8_t)(1 << take8(in) % 8);
    }
    ASAN_POISON_MEMORY_REGION(at + wc.byte_len, stride - wc.byte_len);
    wc.wc_flags = take8(in) & IBV_WC_WITH_IMM;
    for (int i = 0; i < 4; i++) /* a header, most often in good order */
        word[i] = take8(in) % 8 ? good[i] : take8(in);
    word[0] |= number;
    memcpy(&wc.imm_data, word, sizeof(word));
    if (take8(in) % (c->landings.granted ? 4 : 64) == 0) { /* of more bytes than a slot has, too */
        wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
        wc.byte_len = take_edge(in, 4 * stride);
        word[1] = (uint8_t)(take8(in) % 8 ? c->landings.newest << AIO_LANDING_SHIFT : take8(in));
        memcpy(&wc.imm_data, word, sizeof(word));
    }
    memcpy(&before, c, sizeof(before));
    events = connection_complete(c, &wc);
    CHECK(events >= 0);
    if (before.violation) {
        CHECK(c->tail == before.tail && c->credits == before.credits);
        return;
    }
    if (before.gate && !c->violation) { /* it was the proof */
        CHECK(before.gate == AIO_GATE_PROOF && c->gate == AIO_GATE_OPEN && !at[0]);
        CHECK(wc.opcode == IBV_WC_RECV && !wc.wc_flags &&
              wc.byte_len == AIO_FRAME_SIZE + AIO_PROOF_SIZE &&
              !memcmp(at + AIO_FRAME_SIZE, before.proof, AIO_PROOF_SIZE));
    } else if (before.gate) { /* and nothing of it counts */
        CHECK(c->violation == AIO_WRONG_PROOF || c->violation == AIO_WRONG_TURN ||
              (c->gate == AIO_GATE_OPEN && c->violation));
        CHECK(c->gate == AIO_GATE_OPEN || (c->credits == before.credits && c->said == before.said &&
                                           c->peer_identity == before.peer_identity));
    }
    if (c->violation) /* and nothing is delivered */
        CHECK(c->tail == before.tail && events & AIO_EVENT_FAILED);
    if (c->violation || c->raw)
        return;
    /* The rules of docs/wire.md, read once more. */
    kind = wc.wc_flags || wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM ? word[0] : at[0];
    CHECK(!c->numbered || (kind & 0xF0) == before.number_in);
    CHECK(c->number_in == (uint8_t)(before.number_in + (c->numbered ? 16 : 0)));
    kind &= c->numbered ? 0xF : 0xFF;
    if (wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM) {
        uint32_t landing = word[1] >> AIO_LANDING_SHIFT;

        CHECK(kind == AIO_FRAME_DATA && !(word[1] & (AIO_FRAME_HAS_IMM | AIO_FRAME_MORE)));
        CHECK(before.landings.granted & 1 << landing && wc.byte_len);
        CHECK(wc.byte_len <= c->largest && wc.byte_len <= aio_landing_size(landing));
        CHECK(c->credits - before.credits == (word[2] << 8 | word[3]));
        CHECK(before.unused > 0 && !before.missing && !c->missing);
        return;
    }
    if (wc.wc_flags && wc.opcode == IBV_WC_RECV) {
        CHECK(kind == AIO_FRAME_DATA);
        CHECK(!(word[1] & ~(c->stage.most ? AIO_FRAME_FREE : 0)));
        CHECK(c->credits - before.credits == (word[2] << 8 | word[3]));
        CHECK(before.unused > 0 && (!before.missing || before.missing == wc.byte_len));
        CHECK(!c->missing && !c->fragments);
        return;
    }
    returned = (uint32_t)at[2] << 8 | at[3];
    CHECK(c->credits - before.credits == returned);
    /* An identity is told once, and by these frames alone. */
    CHECK(c->peer_identity == before.peer_identity ||
          (!before.peer_identity &&
           c->peer_identity == ((uint64_t)get32(at + 8) << 32 | get32(at + 12)) &&
           (kind == AIO_FRAME_CREDIT || kind == AIO_FRAME_PONG ||
            (kind == AIO_FRAME_PING && !(at[1] & AIO_FRAME_REVOKED) &&
             !(at[1] >> AIO_LANDING_SHIFT)))));
    if (kind == AIO_FRAME_PING && at[1] & AIO_FRAME_REVOKED && !(at[1] >> AIO_LANDING_SHIFT) &&
        get32(at + 12))
        CHECK(c->revoked[get32(at + 12) % AIO_REVOKED] == get32(at + 12));
    switch (kind) {
    case AIO_FRAME_DATA:
    case AIO_FRAME_RENDEZVOUS:
        body = wc.byte_len - AIO_FRAME_SIZE;
        CHECK(before.unused > 0);
        CHECK(!before.missing || (kind == AIO_FRAME_DATA && get32(at + 12) == before.missing));
        if (kind == AIO_FRAME_DATA && at[1] & AIO_FRAME_MORE) {
            CHECK(body && get32(at + 12) > body && get32(at + 12) <= c->largest);
            CHECK(c->missing == get32(at + 12) - body && c->tail == before.tail);
        } else {
            CHECK(kind == AIO_FRAME_RENDEZVOUS || get32(at + 12) == body);
            CHECK(!c->missing && !c->fragments);
        }
        if (!life_rights(c->life)->keeps)
            CHECK(c->tail == before.tail);
        else
            CHECK(c->unused == before.unused - 1 &&
                  c->tail + c->fragments == before.tail + before.fragments + 1);
        break;
    case AIO_FRAME_NOTE:
        CHECK(before.unused > 0 && c->unused == before.unused - 1 && !before.missing);
        CHECK(c->notes.slots && wc.byte_len == AIO_FRAME_SIZE + AIO_NOTE_SIZE);
        CHECK(c->tail == before.tail && c->fragments == before.fragments);
        CHECK((at[1] & ~(c->stage.most ? AIO_FRAME_FREE : 0)) == AIO_FRAME_HAS_IMM);
        CHECK(c->notes.next - before.notes.next == life_rights(c->life)->keeps);
        break;
    case AIO_FRAME_DONE:
        CHECK(c->dones.tail == before.dones.tail + 1); /* fall through */
    default:
        CHECK(kind < AIO_FRAME_KIND_COUNT && c->tail == before.tail);
    }
}

/* An operation has ended, well or not. */
static void end_operations(struct aio_connection *c, int failed)
{
    int number = failed;

    if (failed < 0)
        number = connection_next_completed(c);
    for (; number >= 0; number = connection_next_completed(c))
        connection_end_operation(c, (uint32_t)number);
    CHECK(c->n_operations_free <= c->n_operations);
}

/* A WRITE, and the frame that tells of it; the adapter reads the bytes of both. */
static void write_noted(struct aio_connection *c, const uint8_t *data, struct input *in)
{
    struct aio_operation operation = {
        .opcode = IBV_WR_RDMA_WRITE,
        .addr = (uintptr_t)data,
        .length = 1 + take8(in) % 48,
        .compare_add = take32(in),
        .noted = take8(in) % 2 ? AIO_FRAME_NOTE : AIO_FRAME_DATA,
    };
    int number = connection_may_operate(c) && !c->raw ? connection_take_number(c) : AIO_NO_ROOM;
    int64_t credits = c->credits;
    uint32_t n_free = c->n_free;
    int code;

    if (number < 0)
        return;
    operation.number = (uint32_t)number;
    code = connection_post_operation(c, &operation);
    if (code)
        CHECK(!connection_release_number(c, operation.number));
    CHECK(code || (credits == c->credits + 1 && n_free == c->n_free + 1));
    CHECK(code != AIO_NO_ROOM || (credits == c->credits && n_free == c->n_free));
}

/* A message whose bytes lie in several pieces, some of them empty. */
static void send_pieces(struct aio_connection *c, const uint8_t *data, uint64_t length, uint8_t how)
{
    struct aio_piece pieces[5];
    uint64_t start = 0;

    for (int i = 0; i < 5; i++) {
        uint64_t end = i == 4 ? length : start + (length - start) * (how & 3) / 3;

        pieces[i] = (struct aio_piece){data + start, end - start};
        start = end;
    }
    connection_send(c, (struct aio_bytes){pieces[0], pieces + 1}, length, how & 8, 5);
}

static void fuzz_messages(struct input *in)
{
    /* Fewer places for arrivals than receives, which a connection never has: they must not overrun.
     */
    enum {
        SENDS = 8,
        CONTROLS = 6,
        CONTROL_STRIDE = AIO_FRAME_SIZE + AIO_WORDS_SIZE,
        EXCHANGES = 4,
        RECEIVES = 26,
        ARRIVALS = 8,
        STRIDE = 48,
        OPERATIONS = 4,
        READS = 2,
        ORDER = 32 /* a power of two that has all slots */
    };
    struct aio_connection *c = NULL;
    uint8_t *send = zeros(SENDS, STRIDE), *recv = zeros(RECEIVES, STRIDE);
    uint8_t *control = zeros(CONTROLS, CONTROL_STRIDE);
    uint8_t *landing = zeros(4, STRIDE), *stage = zeros(3, STRIDE);
    uint8_t data[4 * STRIDE] = {0}, how = take8(in);
    uint16_t held[RECEIVES];
    uint32_t n_held = 0, done_flags;
    uint64_t done_number;
    struct aio_note note;

    reset_adapter();
    CHECK(!connection_new(
        &(struct aio_sizes){
            .sends = SENDS,
            .receives = RECEIVES,
            .send_depth = SENDS,
            .arrivals = 32,
            .controls = how & 1 ? 0 : CONTROLS,
            .exchanges = EXCHANGES,
            .answers = how & 1 ? 0 : EXCHANGES,
            .reads = READS,
            .eager_size = STRIDE - AIO_FRAME_SIZE,
            .largest = 4 * STRIDE,
            .raw = how & 1,
        },
        &c));
    free(c->arrivals);
    c->arrivals = zeros(ARRIVALS, sizeof(*c->arrivals)), c->arrival_mask = ARRIVALS - 1;
    connection_bind(c, &(struct aio_adapter){
                           .qp = &queue_pair,
                           .id = UINT64_C(7) << 40,
                           .send_flags = IBV_SEND_SIGNALED,
                           .inline_size = how & 2 ? 24 : 0,
                           .send = {(uintptr_t)send, STRIDE, 1, SENDS},
                           .receive = {(uintptr_t)recv, STRIDE, 2, RECEIVES},
                           .frames = {(uintptr_t)control, CONTROL_STRIDE, 3, CONTROLS},
                       });
    connection_agree(c, &(struct aio_terms){
                            .credits = how & 4 ? 3 : 0,
                            .eager_size = STRIDE - AIO_FRAME_SIZE,
                            .bare_size = how & 16 ? STRIDE : 0,
                            .fragmented_size = how & 8 ? 3 * STRIDE : 0,
                            .written_size = how & 32 ? 4 * STRIDE : 0,
                            .landed_size = 4 * STRIDE,
                            .numbered = how >> 6 & 1,
                            .identity = how & 1 ? 0 : 7,
                        });
    CHECK(!connection_allow_operations(c, OPERATIONS));
    if (take8(in) % 4)
        CHECK(!connection_allow_notes(c));
    if (!c->raw && take8(in) % 4 == 0) /* the peer has to prove itself */
        connection_require_proof(c, take8(in) % 8 ? data : NULL);
    CHECK(!connection_post_receives(c, NULL, RECEIVES) && c->receives == RECEIVES);
    ASAN_POISON_MEMORY_REGION(recv, RECEIVES * STRIDE);
    while (in->at < in->end) {
        struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_SEND};
        const struct aio_arrival *first = &c->arrivals[c->head & c->arrival_mask];

        switch (take8(in) % 18) {
        case 0:
        case 1:
        case 2:
            frame(c, in, recv, STRIDE);
            break;
        case 15: /* memory is exposed, or used; or an exposure ends */
            if (take8(in) % 2)
                CHECK(connection_ask_identity(c, take8(in) & 1) <= ENOMEM);
            else
                CHECK(connection_revoke(c, take_edge(in, take8(in))) <= ENOMEM);
            break;
        case 16:
            check_admission(c, take8(in) % 3 ? c->peer_identity : take8(in), take_edge(in, 5));
            break;
        case 12: /* sends wait for others, or go at once */
            c->turn_flushes = take8(in) & 1, c->delivering = take8(in) & 1;
            refuse_posts = take8(in) % 16 == 0;
            break;
        case 13: /* the end of the turn; or that of the connection, which takes no sends any more */
            if (connection_post_sends(c))
                connection_advance_life(c, AIO_LIFE_EVENT_HOLD);
            CHECK(!c->n_unposted);
            break;
        case 3: /* a send completes, well or not */
            if (!n_sends)
                break;
            wc.wr_id = take_first(posted_sends, &n_sends);
            if (take8(in) % 8 == 0)
                wc.status = IBV_WC_RETRY_EXC_ERR;
            if (connection_complete(c, &wc) <
                0) { /* the connection fails; its slot stays under way */
                connection_count_returned(c, 0, 1);
                if (AIO_SUB(wc.wr_id) >= AIO_SUB_NOTED)
                    end_operations(c, (int)(AIO_SUB(wc.wr_id) - AIO_SUB_NOTED));
            }
            end_operations(c, -1);
            break;
        case 17:
            write_noted(c, data, in);
            break;
        case 4: /* the program receives */
            if (c->head == c->tail)
                break;
            CHECK(first->slot < RECEIVES && n_held < RECEIVES);
            if (first->large) {
                held[n_held++] = first->slot;
                connection_skip_first(c);
            } else if (first->more || first->landing) { /* it is copied */
                uint16_t slots[RECEIVES];
                uint32_t count;
                uint64_t length = connection_measure_first(c, &count);
                char *copy = zeros(1, length);

                CHECK(count + n_held <= RECEIVES);
                connection_copy_first(c, copy, slots, count);
                memcpy(held + n_held, slots, count * sizeof(slots[0]));
                n_held += count;
                free(copy);
            } else {
                CHECK(first->length + (c->raw || first->bare ? 0 : AIO_FRAME_SIZE) <= STRIDE);
                held[n_held++] = first->slot;
                if (connection_take_first(c))
                    connection_release_kept(c);
            }
            break;
        case 14: /* memory comes: for a landing, or for a stage */
            if (c->raw || take8(in) % 2) {
                connection_set_stage(c, (uintptr_t)stage, 4, 3 * STRIDE);
            } else if (c->landings.newest < AIO_LANDINGS) {
                CHECK(connection_offer_landing(c, c->landings.newest + 1u, (uintptr_t)landing, 5) <=
                      ENOMEM);
            }
            break;
        case 5: /* and is done with a message */
            if (n_held) {
                uint32_t slot = held[--n_held];

                CHECK(connection_release_slot(c, slot) <= ENOMEM);
            }
            break;
        case 6: /* it sends; memory for a header is there, that for the bytes is exact */
            send_pieces(c, data, take8(in) % sizeof(data), how);
            break;
        case 7:
            connection_await(c, take8(in) & 1);
            break;
        case 8:
            if (take8(in) % 32 == 0) /* the program stops to send, or has closed the connection */
                connection_advance_life(c, take8(in) % 2 ? AIO_LIFE_EVENT_REFUSE_SENDS
                                                         : AIO_LIFE_EVENT_SHUT);
            break;
        case 9: /* Python hears of what was said */
            connection_next_done(c, &done_number, &done_flags);
            while (connection_next_note(c, &note)) {
                CHECK(note.slot < RECEIVES && n_held < RECEIVES && note.addr <= ~note.length);
                held[n_held++] = note.slot;
            }
            connection_forget_news(c);
            break;
        case 10:
            if (!c->raw) {
                static const enum aio_frame_kind kinds[] = {AIO_FRAME_CREDIT, AIO_FRAME_DONE,
                                                            AIO_FRAME_ABORT};

                connection_leave_words(c, data, take8(in) % sizeof(data));
                connection_send_control(c, kinds[take8(in) % 3], 9, 0);
            }
            connection_send_credits(c);
            break;
        default: /* a completion that nothing here has asked for, of no number in particular */
            wc.wr_id = c->id | (uint64_t)(AIO_SUB_READ | take8(in)) << AIO_SUB_SHIFT;
            wc.status = take8(in) % 2 ? IBV_WC_WR_FLUSH_ERR : IBV_WC_SUCCESS;
            if (AIO_SUB(wc.wr_id) < AIO_SUB_OPERATE)
                connection_complete(c, &wc);
            break;
        }
        check_messages(c, SENDS);
    }
    ASAN_UNPOISON_MEMORY_REGION(recv, RECEIVES * STRIDE);
    free(landing), free(stage), free(recv), free(send), free(control);
    connection_free(c);
}

/* Streams */

static void check_stream(const struct aio_stream *s)
{
    uint32_t waiting = 0, rest = s->ring.size - s->ring.offset, wider = s->ring.wider_size;

    CHECK(s->ring.offset < s->ring.size && (!s->ring.moved || wider));
    CHECK(s->ring.readable <= (s->ring.moved ? rest + wider / 2 : s->ring.size));
    CHECK(s->waiting.count <= s->given.credits && s->waiting.count <= s->waiting.mask + 1);
    for (uint32_t i = 0; i < s->waiting.count; i++)
        waiting += s->waiting.lengths[(s->waiting.first + i) & s->waiting.mask];
    CHECK(waiting == s->ring.readable);
    /* Room in the ring is in one place: read but not told, told and not written, or not yet read.
     */
    if (s->ring.moved) /* the rest of the ring, and the first half of the larger ring */
        CHECK(!s->ring.free && s->ring.readable + s->given.left + s->given.buffers * (wider / 2) ==
                                   rest + wider / 2);
    else
        CHECK(s->ring.free + s->ring.readable + s->given.left +
                  s->given.buffers * (s->ring.size / 2) ==
              s->ring.size);
    CHECK(s->send.free <= s->send.size && s->send.head < s->send.size);
    CHECK(s->sent.next - s->sent.first <= s->sent.mask + 1);
    CHECK(s->table.entry < 2 && s->table.peer_entry < s->table.peer_length);
    CHECK(s->to.allowed <= s->to.limit && s->receives.n_used < AIO_CHAIN);
    CHECK(s->control.out <= AIO_STREAM_CONTROLS && s->given.allowed <= s->given.credits);
    CHECK(s->data.out <= s->data.limit + s->data.wrs);
}

/* A word arrives: what the peer wrote to the table before it is whatever the input says. */
static void word(struct aio_stream *s, struct input *in)
{
    struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RECV};
    struct aio_stream before;
    uint32_t value, allowed;
    int taken;

    if (!n_receives)
        return;
    wc.wr_id = take_first(posted_receives, &n_receives);
    if (take8(in) % 4 == 0) /* many small ones use the credits up before the room */
        value = 1;
    else if (take8(in) % 4) /* data, of a length that is nearly right */
        value = take_edge(in, take8(in) % 2 ? s->given.left : s->ring.size / 2) & AIO_WORD_VALUE;
    else if (take8(in) % 4)
        value =
            (uint32_t)AIO_WORD_SGL << 29 | ((s->to.sequence + take_edge(in, s->to.limit)) & 0xFFFF);
    else
        value = take32(in);
    if (s->receives.words) {
        memcpy(s->receives.words + (AIO_SUB(wc.wr_id) & ~AIO_STREAM_RECV) * 4, &value, 4);
        wc.byte_len = take8(in) % 16 ? 4 : take8(in) % 5;
    } else {
        wc.imm_data = htonl(value);
        wc.wc_flags = take8(in) % 16 ? IBV_WC_WITH_IMM : 0;
    }
    memcpy(&before, s, sizeof(before));
    taken = stream_complete(s, &wc) >= 0;
    if (!taken) {
        CHECK(!stream_note_seen(s)); /* Python has seen it by now */
        CHECK(!memcmp(&before, s, sizeof(before)));
        /* As Python goes on; what breaks a rule changes nothing. */
        if (!stream_complete_receive(s, AIO_SUB(wc.wr_id) & ~AIO_STREAM_RECV)) {
            memcpy(&before, s, sizeof(before));
            if (stream_take_word(s, value).kind != AIO_STREAM_RIGHT)
                CHECK(!memcmp(&before, s, sizeof(before)));
        }
        return;
    }
    /* The rules of the protocol, read once more. */
    CHECK(s->receives.words ? wc.byte_len == 4 : wc.wc_flags & IBV_WC_WITH_IMM);
    if (value <= AIO_WORD_VALUE) {
        CHECK(value && value <= before.given.left && before.given.allowed);
        return;
    }
    allowed = (value - before.to.sequence) & 0xFFFF;
    CHECK(value >> 29 == AIO_WORD_SGL && allowed >= before.to.allowed && allowed <= s->to.limit);
    CHECK(!s->to.left || s->to.addr <= UINT64_MAX - (s->to.left - 1));
    CHECK(!s->to.spare_left || s->to.spare_addr <= UINT64_MAX - (s->to.spare_left - 1));
}

static void fuzz_stream(struct input *in)
{
    enum { RING = 256, WIDER = 640, SEND = 128, CREDITS = 8, DEPTH = 64, LIMIT = 12 };
    uint8_t how = take8(in), into[WIDER + 16], data[SEND + 32] = {0};
    uint8_t *wider = zeros(1, WIDER), *larger = zeros(1, 2 * SEND);
    uint8_t *ring = zeros(1, RING), *table = zeros(2, 16), *words = zeros(CREDITS + 8, 4);
    uint8_t *send = zeros(1, SEND + AIO_STREAM_CONTROLS * AIO_STREAM_CONTROL_SIZE);
    struct aio_stream *s;

    reset_adapter();
    CHECK(!stream_new(
        &(struct aio_stream_sizes){
            .ring = {.addr = (uintptr_t)ring, .length = RING},
            .table = (uintptr_t)table,
            .send = {.addr = (uintptr_t)send, .length = SEND},
            .credits = CREDITS,
            .send_depth = DEPTH,
            .inline_size = how & 4 ? 16 : 0,
            .iwarp = how & 1,
        },
        &s));
    CHECK(!stream_meet(s, &(struct aio_stream_peer){
                              .credits = LIMIT,
                              .buffer = {.addr = 1 << 20, .length = SEND},
                              .table_length = 2 + take8(in) % 3,
                              .swapped = how >> 1 & 1,
                          }));
    stream_grow_after(s, RING);
    CHECK(!stream_open(s));
    stream_advance_output(s, AIO_OUTPUT_EVENT_RELEASE);
    CHECK(!stream_bind(s, &queue_pair, 0, how & 1 ? words : NULL, 0, CREDITS + 8));
    while (in->at < in->end && s->life == AIO_STREAM_LIFE_POSTS) {
        struct ibv_wc wc = {.status = IBV_WC_SUCCESS, .opcode = IBV_WC_RDMA_WRITE};
        uint32_t n;

        switch (take8(in) % 11) {
        case 9: /* Python has made larger rings */
            if (s->ring.size == RING)
                CHECK(stream_widen(s, wider, 0, WIDER) <= EINVAL);
            if (!s->send.grown && take8(in) % 2)
                stream_replace_send_ring(s, larger, 2 * SEND, 7);
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
            CHECK(stream_read(s, into, take_edge(in, WIDER) % sizeof(into)) <= WIDER);
            break;
        case 5:
            n = take_edge(in, SEND / 4) % sizeof(data);
            CHECK(stream_write(s, data, n) <= n);
            break;
        case 6: /* messages complete, in order, or a number that is of none under way */
            if (take8(in) % 8 == 0)
                wc.wr_id =
                    s->adapter.id + ((uint64_t)(AIO_STREAM_MESSAGE | take8(in)) << AIO_SUB_SHIFT);
            else if (n_sends)
                wc.wr_id = take_first(posted_sends, &n_sends);
            else
                break;
            if (stream_complete(s, &wc) < 0) {
                uint32_t controls[AIO_STREAM_CONTROLS], first = s->sent.first;

                stream_note_seen(s);
                stream_complete_send(s, AIO_SUB(wc.wr_id), take8(in) % 2, controls);
                CHECK(s->sent.first - first <= s->sent.mask + 1);
            }
            break;
        case 7:
            stream_end_wait(s);
            n = take_edge(in, RING / 2) % RING;
            if (n && (take8(in) % 2 ? stream_await_some(s, n) : !stream_await_bytes(s, n)))
                CHECK(s->ring.wanted);
            break;
        case 10: /* a word of this side, or a mapping, or the end of one direction */
            n = take8(in);
            if (n % 64 == 0)
                stream_advance_input(s, n / 64 ? AIO_INPUT_EVENT_REFUSE : AIO_INPUT_EVENT_END);
            else if (n % 8 == 1)
                stream_advance_output(s,
                                      n / 8 % 2 ? AIO_OUTPUT_EVENT_HOLD : AIO_OUTPUT_EVENT_RELEASE);
            else if (n % 8 < 4)
                CHECK(stream_publish(s, AIO_WORD_IOMAP << 29, data, 24, 1 << 16, 0) <= ENOMEM);
            else
                CHECK(stream_say(s, UINT32_C(7) << 29) <= ENOMEM);
            stream_owe(s, n % AIO_OWED_COUNT);
            stream_advance_reader(s, n & 64 ? AIO_READER_EVENT_KEEP : AIO_READER_EVENT_DELIVER);
            break;
        default:
            refuse_posts = take8(in) % 32 == 0;
            break;
        }
        if (s->life == AIO_STREAM_LIFE_POSTS)
            check_stream(s);
    }
    stream_free(s);
    free(send), free(words), free(table), free(ring), free(wider), free(larger);
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
