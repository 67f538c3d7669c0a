/*
 * The two protocols and their common parts, without Python: the states that the C of a connection
 * and of a stream works on, and every constant of the data path, once.
 *
 * A file without Python.h can be fuzzed by itself (tests/fuzz).  Everything here is touched with
 * the interpreter lock held.
 */
#ifndef AIORDMA_PROTOCOL_H
#define AIORDMA_PROTOCOL_H

#include <arpa/inet.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include <infiniband/verbs.h>

#include "shared.h"

/* What a post returned, as a positive errno: some providers, libsiw for one, return it negative. */
static inline int aio_post_errno(int code)
{
    return code < 0 ? -code : code;
}

/* A wr_id, as loop/slots.py makes it: tag 8, generation 16, sub-index 16, index 24 bits. */
#define AIO_INDEX_BITS 24
#define AIO_INDEX_MASK ((UINT32_C(1) << AIO_INDEX_BITS) - 1)
#define AIO_SUB_SHIFT  AIO_INDEX_BITS
#define AIO_SUB_MASK   (UINT64_C(0xFFFF) << AIO_SUB_SHIFT)
#define AIO_SUB(wr_id) ((uint32_t)((wr_id) >> AIO_SUB_SHIFT) & 0xFFFF)

/* The sub-index of a connection's requests; a send has the number of its slot alone. */
#define AIO_SUB_RECV    0x8000u /* and the slot */
#define AIO_SUB_READ    0x4000  /* of a large message, and its number */
#define AIO_SUB_OPERATE 0x5000  /* of the program: READ, WRITE or atomic, and its number */

/* The events with which the owner of a MessageState is called after a drain: 8 bits. */
#define AIO_EVENT_ARRIVED  1  /* a message, and a task waits for one */
#define AIO_EVENT_OPERATED 2  /* operations have ended */
#define AIO_EVENT_ROOM     4  /* credits or a slot have come, and sends wait for them */
#define AIO_EVENT_SENT     8  /* the messages of a flush have reached the peer's adapter */
#define AIO_EVENT_FRAMES   16 /* see aio_message_state.said, and the frames that wait for Python */
#define AIO_EVENT_FAILED   32 /* the peer broke the protocol, or a post has failed */
#define AIO_EVENT_IDLE     64 /* while it is flushing: the adapter has nothing any more */

/* The header of a frame; docs/wire.md is the specification. */
#define AIO_FRAME_SIZE    16
#define AIO_FRAME_HAS_IMM 1
#define AIO_FRAME_MORE    2 /* of DATA: the message goes on in the next */
#define AIO_FRAME_FREE    4 /* the newest landing that the receiver of the frame knows is free */
#define AIO_FRAME_REQUESTS                                                                         \
    0x80 /* of DATA: from here on the program of the sender sends requests and answers */
#define AIO_NUMBER_SHIFT  4 /* bits of the first byte for the kind; the others have the number */
#define AIO_LANDING_SHIFT 3 /* the flags from this bit on: the number of a landing */
#define AIO_LANDINGS      3 /* the largest number; a landing has four times the bytes of the last */
#define AIO_LANDING_SIZE  (1u << 16) /* bytes of the first */

enum aio_frame_kind {
    AIO_FRAME_CREDIT,
    AIO_FRAME_DATA,
    AIO_FRAME_RENDEZVOUS,
    AIO_FRAME_DONE,
    AIO_FRAME_PING,
    AIO_FRAME_PONG,
    AIO_FRAME_END,
    AIO_FRAME_ABORT,
};

static inline uint32_t aio_read32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return ntohl(value);
}

static inline uint64_t aio_read64(const uint8_t *at)
{
    return (uint64_t)aio_read32(at) << 32 | aio_read32(at + 4);
}

/* Bytes of the landing with a number, from 1 on. */
static inline uint64_t aio_landing_size(uint32_t number)
{
    return (uint64_t)AIO_LANDING_SIZE << 2 * (number - 1);
}

/* The bytes of a message, which lie in pieces; they are copied once, from the first to the last. */
struct aio_piece {
    const void *at;
    uint64_t length;
};

struct aio_bytes {
    struct aio_piece piece;       /* the rest of the piece whose bytes are next */
    const struct aio_piece *more; /* the pieces behind it */
};

static inline void aio_gather(struct aio_bytes *from, void *to, uint64_t length)
{
    while (length > from->piece.length) {
        memcpy(to, from->piece.at, from->piece.length);
        to = (char *)to + from->piece.length;
        length -= from->piece.length;
        from->piece = *from->more++;
    }
    memcpy(to, from->piece.at, length);
    from->piece.at = (const char *)from->piece.at + length;
    from->piece.length -= length;
}

#define AIO_CREDIT_FRAMES 2   /* that may be unprocessed at a time */
#define AIO_HEAD_SIZE     384 /* bytes of the body of a RENDEZVOUS frame that Python sees */

/* How the peer broke the protocol; aio_message_state.wrong has two numbers for the words. */
enum aio_violation {
    AIO_WRONG_NOTHING,
    AIO_WRONG_SHORT,  /* a frame shorter than its header: its bytes */
    AIO_WRONG_LENGTH, /* of a DATA frame: announced, came */
    AIO_WRONG_CREDIT, /* a message without credit */
    AIO_WRONG_KIND,   /* of frame: the kind */
    AIO_WRONG_WRITE,  /* a write with an immediate, and not into a landing that is free */
    AIO_WRONG_DONE,   /* more answers than exchanges can be open: the number */
    AIO_WRONG_SIZE,   /* of a message: announced, the largest */
    AIO_WRONG_BARE,   /* another frame than DATA in an immediate, or flags: its kind, and they */
    AIO_WRONG_ORDER,  /* another message, in place of so many bytes of the last */
    AIO_WRONG_NUMBER, /* of a frame: it came twice, or one is missing: its number, the next */
    AIO_WRONG_TURN,   /* not the peer, but the adapter: a request that was not the next, or not
                         there, has completed: whether it was a receive, its slot */
};

/* The events of a stream; the last while it is flushing. */
enum {
    AIO_STREAM_DATA = 1,
    AIO_STREAM_ROOM = 2,
    AIO_STREAM_FAILED = 4,
    AIO_STREAM_IDLE = 8,
    AIO_STREAM_GROW = 16, /* a larger ring would be of use */
};

#define AIO_STREAM_RECV    0x8000u /* sub-index of a receive: this and the slot of its word */
#define AIO_STREAM_MESSAGE 0x4000  /* of a message: this and the low bits of its number */
#define AIO_STREAM_NUMBER  0x3FFF
#define AIO_STREAM_BYTES                                                                           \
    2 /* of the WRITE before a word on iWARP, which completes only if it fails */
#define AIO_STREAM_PROBE        4
#define AIO_STREAM_CONTROLS     4
#define AIO_STREAM_CONTROL_SIZE 24
#define AIO_CHAIN               8          /* receives that are posted together, at most */
#define AIO_SEND_CHAIN          16         /* sends that are posted together, at most */
#define AIO_LARGEST_REQUEST     (1u << 20) /* bytes of one READ or WRITE of the program */
#define AIO_MOST_OPERATIONS     0x1000     /* whose numbers a sub-index can name */

#define AIO_WORD_VALUE          ((UINT32_C(1) << 29) - 1)
#define AIO_WORD_SGL            UINT32_C(4)

/*
 * The function that takes completions while a queue is polled; the beginning of both states.
 *
 * `take` takes a completion, or refuses it and has changed nothing: then the completion goes to
 * Python.  Where the state is `ordered`, so do all behind it, until Python has counted `passed`
 * down, once for each.
 */
struct aio_state {
    int (*take)(struct aio_state *state, const struct ibv_wc *wc);
    uint64_t id;     /* its wr_id, without the sub-index */
    uint32_t events; /* the owner is called with these */
    uint8_t ordered;
    uint32_t passed; /* completions that Python has been given and has not seen yet */
};

/* A message that has arrived, or a fragment of it, in the order of arrival. */
struct aio_arrival {
    uint32_t length; /* bytes of the fragment; of a large message, of the frame's body */
    uint32_t imm;
    uint16_t slot;
    uint8_t has_imm;
    uint8_t large;    /* 1: announced, the frame lies in `slot`; 2: Python has the announcement */
    uint8_t more;     /* the next has further bytes of the message */
    uint8_t bare;     /* no header lies in `slot` */
    uint8_t requests; /* the first frame of requests of the peer */
    uint8_t landing;  /* the message lies in the landing with this number, and `slot` is empty */
};

/* A DONE frame that waits for Python, or for a slot to be sent from. */
struct aio_done {
    uint64_t number;
    uint8_t flags;
};

/* A queue of those; `mask` + 1 places. */
struct aio_dones {
    struct aio_done *items;
    uint32_t mask;
    uint32_t head;
    uint32_t tail;
};

/* A send that is not posted yet; its bytes lie in the slot. */
struct aio_unposted {
    uint32_t length;
    uint32_t imm;
    uint16_t slot;
    uint8_t has_imm;
};

/*
 * The slots that the adapter has, in the order in which they were posted, which is the order in
 * which it completes them, each once.
 */
struct aio_order {
    uint16_t *slots; /* `mask` + 1 places */
    uint32_t mask;
    uint32_t first;
    uint32_t next;
};

struct aio_slots {
    uint64_t addr;
    uint32_t stride;
    uint32_t key; /* of the first `base` slots, which stay */
    uint32_t base;
    uint64_t more_addr; /* of the others, which come and go, */
    uint32_t step;      /* in registrations of so many */
    uint32_t *keys;     /* of their registrations */
    uint8_t more;       /* there are such slots */
    uint8_t leaving;    /* some slots leave the connection as soon as they are free */
    uint8_t full;       /* no further slot can come */
};

/* Landings of this side: registered memory that the peer writes messages to, each at its start. */
struct aio_landings {
    uint64_t addr[AIO_LANDINGS + 1]; /* by their numbers; 0: there is none */
    uint32_t key;                    /* of the newest */
    uint8_t newest;
    uint8_t offered; /* it is to be offered to the peer */
    uint8_t freed;   /* it is free, and the peer has not been told */
    uint8_t granted; /* bits, 1 << number: the peer may write to these */
    uint64_t most;   /* bytes of the largest message that may need a landing; 0: of none */
    uint64_t wanted; /* bytes of a message for which there was none; Python makes one */
};

/* The newest landing of the peer, and the memory that is written from: the stage. */
struct aio_stage {
    uint64_t most; /* bytes of the largest message that is written to a landing; 0: of none */
    uint64_t to_addr;
    uint32_t to_key;
    uint8_t number; /* of the landing; 0: the peer has offered none */
    uint8_t free;   /* no message lies in it */
    uint8_t busy;   /* a write has not completed, */
    uint16_t slot;  /* which stands for this send slot, */
    struct ibv_sge sge;
    uint64_t write_addr; /* and has these, whatever the peer offers meanwhile */
    uint32_t write_key;
    uint64_t addr;
    uint64_t size;
    uint32_t key;
};

static inline uint64_t aio_slot_addr(const struct aio_slots *slots, uint32_t slot)
{
    return slot < slots->base ? slots->addr + (uint64_t)slot * slots->stride
                              : slots->more_addr + (uint64_t)(slot - slots->base) * slots->stride;
}

/*
 * The messages of one connection, in both directions, and its operations.
 *
 * States: between `bind` and `close` it may post, and `qp` is not NULL.  `blocked`: sends wait for
 * the reason of a failure, or are refused.  `over`: no operation may be posted any more.  `dead`:
 * no frame is sent any more. `flushing`: flushed requests are only counted.
 */
struct aio_message_state {
    struct aio_state base;
    struct ibv_qp *qp;
    uint8_t raw; /* without frames: a foreign peer */
    uint8_t closed;
    uint8_t flushing;
    uint8_t dead;
    uint8_t waiting;    /* a task waits for a message */
    uint8_t discarding; /* slots of arrivals are given back at once */
    uint8_t python;     /* Python receives: there is more to it than the next message */
    uint8_t alive;      /* a sign of life of the peer since Python has cleared it */
    uint8_t grows;      /* the window grows as soon as the peer has used up its credits */
    uint8_t grown;      /* it has, and the peer does not have the credits yet */
    uint8_t numbered;   /* both sides number their frames */
    uint8_t asking;     /* a PING is not answered */
    uint8_t requested;  /* a frame of requests has come */
    uint8_t requesting; /* the next message is the first frame of requests of this side */
    uint8_t *group;     /* as `alive`, of all connections of a group (life.c); or NULL */

    /* Slots. */
    struct aio_slots send;
    struct aio_slots recv;
    const uint8_t *crowded; /* others wait for slots of the pool; set if slots come and go */
    uint16_t *freed; /* receive slots that Python gives back, as some of a pool are leaving */
    uint32_t n_freed;

    /* Sending. */
    uint8_t blocked;
    uint8_t watched;          /* the waits in line need no timer, or it runs */
    uint8_t slot_awaited;     /* completed sends wake the loop, because the line lacks a slot */
    uint32_t queued;          /* tasks that wait in line for a slot and a credit */
    uint32_t large_waiting;   /* large messages that wait for an exchange */
    uint64_t eager_size;      /* bytes of the largest message that goes through a slot */
    uint64_t bare_size;       /* of the largest whose header may be the immediate; 0: of none */
    uint64_t fragmented_size; /* of the largest that goes through several; 0: none does */
    int64_t credits;          /* messages for which the peer has posted receives */
    uint16_t *free;           /* send slots for data */
    uint32_t n_free;
    uint32_t data_slots;     /* those from this number on are for frames without data */
    struct aio_slots frames; /* for frames without data */
    uint32_t controls;       /* how many of those */
    uint16_t *control_free;
    uint32_t n_control_free;
    struct aio_order sending;
    uint8_t number_out; /* of the next frame, at its place in the first byte */
    uint64_t sent;      /* frames, or messages of a raw connection */
    uint64_t completed; /* of these, with success: they have reached the peer's adapter */
    uint64_t flushed;   /* the others that have come back, and those that were never posted */
    uint64_t flush_at;  /* `completed` that a flush waits for; 0: none */
    uint32_t send_flags;
    uint32_t inline_size; /* bytes, with the header, that go in the work request itself */
    struct aio_unposted unposted[AIO_SEND_CHAIN]; /* the chain, in the order of its sends */
    uint32_t n_unposted;
    uint8_t delivering;   /* owners are being called; the chain is posted after that */
    uint8_t turn_flushes; /* the loop posts the chain at the end of the turn */
    uint8_t in_a_row;     /* sends since the last events that did not wait in the chain, up to 2 */
    struct aio_stage stage;

    /* Frames without data that wait for a slot: each at most once, but for DONE. */
    uint8_t controls_pending; /* bits, 1 << enum aio_frame_kind */
    uint64_t abort_reason;
    struct aio_dones dones_pending;

    /* Receiving. */
    struct aio_order receiving;
    uint8_t number_in; /* of the peer's next frame */
    int64_t posted;    /* receives that the adapter has */
    int64_t receives;  /* the same, and those that were flushed */
    int64_t unused;    /* credits that the peer has */
    int64_t granted;   /* that it was given since the beginning */
    int64_t control;   /* receives kept for frames without credit */
    int64_t due;       /* so many owed credits go in a CREDIT frame */
    int64_t
        marks[AIO_CREDIT_FRAMES]; /* of CREDIT frames that may be unprocessed: `granted` before */
    uint32_t n_marks;
    struct aio_arrival *arrivals;
    uint32_t arrival_mask;
    uint32_t head;
    uint32_t tail;
    uint32_t fragments;       /* behind the tail: of the message that is arriving */
    uint64_t missing;         /* bytes of it that have not arrived; 0: no message is arriving */
    uint64_t largest;         /* bytes of a message in fragments, at most */
    uint32_t inner;           /* fragments in the ring but the last of each message */
    uint32_t announced;       /* large messages before this number are known to Python */
    uint32_t large;           /* large messages in the ring */
    uint16_t back[AIO_CHAIN]; /* receive slots that are posted together, a little later */
    uint32_t n_back;
    uint32_t chain; /* so many */
    uint32_t held;  /* messages that the program has */
    uint32_t half;  /* as many as it may have without copies, at least */
    struct aio_landings landings;

    /* Frames that the peer has sent: bits, 1 << enum aio_frame_kind; CREDIT: its first frame. */
    uint8_t said;
    uint64_t peer_reason; /* of its ABORT */
    struct aio_dones dones;
    uint8_t violation; /* enum aio_violation */
    uint64_t wrong[2];
    int error;           /* errno of a post that failed in a drain */
    uint8_t recv_failed; /* that, or one whose errno was returned, was of receives */

    /* RDMA READs of large messages. */
    uint16_t *reads_done; /* their numbers, until Python has seen them */
    uint32_t n_reads_done;
    uint32_t most_reads;

    /* Operations of the program. */
    uint8_t over;
    uint8_t attended;          /* their completions wake the loop */
    uint8_t operations_wanted; /* a task waits for a number: others wait behind it */
    uint32_t n_operations;     /* READs, WRITEs and atomics that may be under way; 0: none yet */
    uint16_t *operations_free;
    uint32_t n_operations_free;
    uint32_t operating;        /* under way */
    uint16_t *operations_done; /* ring of those whose end is not reported yet */
    uint32_t done_mask;
    uint32_t done_head;
    uint32_t done_tail;

    /* Counters, as ConnectionStats has them. */
    uint64_t messages_sent;
    uint64_t bytes_sent;
    uint64_t messages_received;
    uint64_t bytes_received;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t atomics;
};

/* Bytes of the header before the bytes of a message in a slot. */
static inline uint32_t aio_head_size(const struct aio_message_state *m, int bare)
{
    return m->raw || bare ? 0 : AIO_FRAME_SIZE;
}

/* Where the bytes of a message, or of a fragment, lie. */
static inline const void *aio_arrival_at(const struct aio_message_state *m,
                                         const struct aio_arrival *arrival)
{
    return (const void *)(uintptr_t)(arrival->landing ? m->landings.addr[arrival->landing]
                                                      : aio_slot_addr(&m->recv, arrival->slot) +
                                                            aio_head_size(m, arrival->bare));
}

struct aio_operation {
    uint32_t number;
    uint32_t opcode; /* enum ibv_wr_opcode */
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
    uint64_t remote_addr;
    uint32_t rkey;
    uint64_t compare_add; /* of a WRITE with immediate: that */
    uint64_t swap;
};

struct aio_message {
    uint32_t word;
    uint8_t wrs;      /* work requests of the message */
    uint8_t in_ring;  /* its bytes lie in the ring for sending: 1, or 2 in the larger ring */
    uint8_t signaled; /* it asked for its completion */
};

struct aio_stream_state {
    struct aio_state base;
    struct ibv_qp *qp;
    uint64_t wr_id;
    uint32_t inline_size;
    int error;           /* errno of the post that failed */
    uint8_t recv_failed; /* it was one of receives */
    uint8_t dead;        /* nothing may be posted any more */
    uint8_t flushing;    /* the end: receives that come back unused are only counted */
    uint8_t iwarp;
    uint8_t receiving; /* data may come */
    uint8_t sending;   /* data may go */
    uint8_t held;      /* aio_stream_write sends nothing; room is an event for Python */
    uint8_t crediting; /* room and credits are announced to the peer */
    uint8_t owing;     /* a control message waits in Python for a work request or a credit */
    uint8_t swapped;   /* the peer has the other byte order */
    uint8_t alive;     /* a word has come since Python has cleared it */
    uint8_t plain;     /* all bytes are for the protocol's data_received */
    uint8_t waiter;    /* or for a task, which waits for them */
    uint8_t stopped;   /* or are dropped */
    uint32_t posted;   /* work requests whose completion will come */

    uint8_t *send; /* ring */
    uint32_t send_size;
    uint32_t send_lkey;
    uint8_t send_grown; /* it is the larger one */
    uint8_t *controls;  /* payloads of four control messages, behind the first ring */
    uint32_t controls_lkey;
    uint32_t head;
    uint32_t send_free;
    uint32_t largest; /* bytes of a message */
    uint32_t control_next;
    uint64_t addr; /* where the next bytes go */
    uint32_t key;
    uint32_t left;
    uint64_t spare_addr;
    uint32_t spare_key;
    uint32_t spare_left;
    uint32_t allowed; /* messages */
    uint32_t limit;
    uint32_t sequence;
    uint32_t data_out; /* work requests under way */
    uint32_t data_limit;
    uint32_t data_wrs;
    uint32_t control_out;

    struct aio_message *messages; /* under way: from `first` to `next` */
    uint32_t messages_mask;
    uint32_t first;
    uint32_t next;
    uint32_t unsignaled; /* messages since the last that asked for its completion */
    uint32_t unsignaled_bytes;
    uint32_t signal_messages;
    uint32_t signal_bytes;
    uint64_t progress; /* messages that have completed */
    uint64_t bytes_sent;
    uint64_t bytes_received; /* that the program has taken */

    uint8_t *table; /* ours, that the peer writes descriptors to */
    uint32_t entry;
    uint32_t peer_entry;
    uint64_t table_addr; /* the peer's */
    uint32_t table_key;
    uint32_t table_length;

    uint8_t *ring;
    uint32_t ring_size;
    uint32_t ring_rkey;
    uint8_t *wider; /* a larger ring that takes the place of this */
    uint32_t wider_size;
    uint32_t wider_rkey;
    uint8_t moved;  /* its first half is with the peer: bytes behind the end of `ring` lie there */
    uint64_t taken; /* bytes, since a larger ring was asked for */
    uint64_t grow_at; /* so many are taken before the next request */
    uint32_t offset;  /* of the first byte that can be read */
    uint32_t readable;
    uint32_t want;      /* readable bytes that raise AIO_STREAM_DATA */
    uint32_t ring_left; /* room of the peer, see rsocket/flow.py */
    uint32_t ring_buffers;
    uint32_t ring_allowed;
    uint32_t ring_free;
    uint32_t ring_next;
    uint32_t credits;
    uint64_t consumed;
    uint64_t due;
    uint32_t *waiting; /* lengths of the messages that wait */
    uint32_t waiting_mask;
    uint32_t waiting_first;
    uint32_t waiting_count;

    uint8_t *words; /* on iWARP, four bytes for each receive */
    uint32_t words_lkey;
    uint32_t receives; /* slots of receives; 0: none is posted yet */
    uint32_t turn;     /* that of the next that completes */
    uint32_t n_used;
    uint16_t used[8]; /* receives to be posted again */
};

/* Requests that the adapter has; below 0 where an adapter flushes some twice. */
static inline int64_t aio_message_under_way(const struct aio_message_state *m)
{
    return m->receives + (int64_t)(m->sent - m->completed - m->flushed) + m->operating;
}

/* message.c */
void aio_message_size(struct aio_message_state *m, int64_t window);
void aio_message_init(struct aio_message_state *m, uint32_t sends, uint32_t receives,
                      uint32_t controls);
int aio_message_send(struct aio_message_state *m, struct aio_bytes data, uint64_t length,
                     int has_imm, uint32_t imm);
int aio_message_send_next(struct aio_message_state *m, enum aio_frame_kind kind, const void *data,
                          uint64_t length, uint64_t argument, int has_imm, uint32_t imm);
int aio_message_has_room(const struct aio_message_state *m);
int aio_message_lacks_slot(const struct aio_message_state *m);
int aio_message_send_control(struct aio_message_state *m, enum aio_frame_kind kind,
                             uint64_t argument, uint8_t flags);
int aio_message_offer(struct aio_message_state *m);
int aio_message_flush(struct aio_message_state *m);
void aio_message_drop(struct aio_message_state *m);
int aio_message_give_credit(struct aio_message_state *m);
int aio_message_back(struct aio_message_state *m, uint32_t slot);
int aio_message_back_now(struct aio_message_state *m, uint32_t slot);
int aio_message_receive(struct aio_message_state *m, const uint16_t *slots, uint32_t count);

/* one_sided.c */
int aio_message_read(struct aio_message_state *m, uint32_t number, uint64_t addr, uint32_t length,
                     uint32_t lkey, uint64_t remote_addr, uint32_t rkey);
int aio_message_operate(struct aio_message_state *m, const struct aio_operation *operation);

/* stream.c */
void aio_stream_init(struct aio_stream_state *s);
int aio_stream_control(struct aio_stream_state *s, uint32_t word, uint32_t wrs, const void *payload,
                       uint32_t size, uint64_t to, uint32_t key, bool signaled);
uint32_t aio_stream_room(const struct aio_stream_state *s);
int aio_stream_send(struct aio_stream_state *s, uint32_t length);
size_t aio_stream_write(struct aio_stream_state *s, const void *data, size_t size);
int aio_stream_announce(struct aio_stream_state *s);
int aio_stream_consume(struct aio_stream_state *s, uint32_t n);
uint32_t aio_stream_read(struct aio_stream_state *s, void *into, size_t size);
uint32_t aio_stream_find(const struct aio_stream_state *s, const char *separator, uint32_t size);
int aio_stream_fill(struct aio_stream_state *s, uint32_t count);
int aio_stream_used(struct aio_stream_state *s, uint32_t slot);
uint32_t aio_stream_reach(const struct aio_stream_state *s, uint32_t sub);
uint32_t aio_stream_retire(struct aio_stream_state *s);
void aio_stream_drop(struct aio_stream_state *s);
void aio_stream_shares(struct aio_stream_state *s);
void aio_stream_send_from(struct aio_stream_state *s, uint8_t *ring, uint32_t size, uint32_t lkey);
int aio_stream_probe(const struct aio_stream_state *s);

#endif
