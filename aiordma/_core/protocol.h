/*
 * The two protocols and what they share, without Python: the states that the C of a connection and
 * of a stream works on, and every constant of the data path, once.
 *
 * A file without Python.h can be fuzzed by itself (tests/fuzz).  Everything here is touched with
 * the interpreter lock held.
 */
#ifndef AIORDMA_PROTOCOL_H
#define AIORDMA_PROTOCOL_H

#include <arpa/inet.h>
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include <infiniband/verbs.h>

#include "shared.h"

/* A wr_id, as loop/slots.py makes it: tag 8, generation 16, sub-index 16, index 24 bits. */
#define AIO_INDEX_BITS 24
#define AIO_INDEX_MASK ((UINT32_C(1) << AIO_INDEX_BITS) - 1)
#define AIO_SUB_SHIFT  AIO_INDEX_BITS
#define AIO_SUB_MASK   (UINT64_C(0xFFFF) << AIO_SUB_SHIFT)
#define AIO_SUB(wr_id) ((uint32_t)((wr_id) >> AIO_SUB_SHIFT) & 0xFFFF)

/* The sub-index of a connection's requests; a send has the number of its slot alone. */
#define AIO_SUB_RECV    0x8000 /* and the slot */
#define AIO_SUB_READ    0x4000 /* of a large message, and its number */
#define AIO_SUB_OPERATE 0x5000 /* of the program: READ, WRITE or atomic, and its number */

/* What an owner of a state is told of after a drain; the first also says what Python waits for. */
#define AIO_EVENT_ARRIVED  1
#define AIO_WANT_SENT      2
#define AIO_EVENT_OPERATED 4
#define AIO_EVENT_IDLE     8 /* while it is flushing: the adapter has nothing any more */

/* The header of a frame; endpoint/wire.py and docs/wire.md. */
#define AIO_FRAME_SIZE    16
#define AIO_FRAME_DATA    1
#define AIO_FRAME_HAS_IMM 1

/* The events of a stream; the last while it is flushing. */
enum {
    AIO_STREAM_DATA = 1,
    AIO_STREAM_ROOM = 2,
    AIO_STREAM_FAILED = 4,
    AIO_STREAM_IDLE = 8,
};

#define AIO_STREAM_RECV         0x8000 /* sub-index of a receive: this and the slot of its word */
#define AIO_STREAM_MESSAGE      0x4000 /* of a message: this and the low bits of its number */
#define AIO_STREAM_NUMBER       0x3FFF
#define AIO_STREAM_BYTES        2 /* of the WRITE before a word on iWARP, which tells of failure only */
#define AIO_STREAM_PROBE        4
#define AIO_STREAM_CONTROLS     4
#define AIO_STREAM_CONTROL_SIZE 24
#define AIO_CHAIN               8          /* receives that are posted together, at most */
#define AIO_LARGEST_REQUEST     (1u << 20) /* bytes of one READ or WRITE of the program */
#define AIO_MOST_OPERATIONS     0x1000     /* whose numbers a sub-index can name */

#define AIO_WORD_VALUE          ((UINT32_C(1) << 29) - 1)
#define AIO_WORD_SGL            UINT32_C(4)

/*
 * What takes completions while a queue is polled; the beginning of the two states below.
 *
 * `take` takes a completion, or refuses it and has changed nothing: then the completion goes to
 * Python, and so do all behind it, until Python has counted `passed` down, once for each.
 */
struct aio_state {
    int (*take)(struct aio_state *state, const struct ibv_wc *wc);
    uint64_t id;     /* its wr_id, without the sub-index */
    uint32_t events; /* what its owner is to be told of */
    uint32_t passed; /* completions that Python has been given and has not seen yet */
};

struct aio_arrival {
    uint32_t length;
    uint32_t imm;
    uint16_t slot;
    uint16_t has_imm;
};

struct aio_slots {
    uint64_t addr;
    uint32_t stride;
    uint32_t key; /* of the first `base` slots, which stay */
    uint32_t base;
    uint32_t step;   /* the others come and go, so many at a time */
    uint32_t *keys;  /* of those */
    uint8_t more;    /* there are some of those */
    uint8_t leaving; /* some of them are to be handed in when they are free */
    uint8_t full;    /* there are as many as there may be */
};

struct aio_message_state {
    struct aio_state base;
    struct ibv_qp *qp;
    uint32_t want;   /* EVENT_ARRIVED: a task waits; WANT_SENT: Python sees completed sends */
    uint8_t blocked; /* sends wait for room, or are refused: Python sends */
    uint8_t raw;
    uint8_t closed;
    uint8_t flushing; /* the end: what comes back unsent or unfilled is only counted */
    uint32_t heard;

    struct aio_slots send;
    struct aio_slots recv;
    const uint8_t *crowded; /* others wait for slots of the pool; set if slots come and go */
    uint64_t eager_size;
    int64_t credits;
    uint16_t *free;
    uint32_t n_free;
    uint32_t data_slots; /* those from this number on carry messages without data */
    uint64_t sent;       /* messages, with those without data */
    uint64_t completed;
    uint32_t send_flags;
    uint32_t inline_size; /* bytes, with the header, that go in the work request itself */

    int64_t posted; /* the three numbers of endpoint/window.py */
    int64_t unused;
    int64_t granted;
    int64_t control;
    int64_t due;
    int64_t receives; /* work requests of the receive queue under way */
    struct aio_arrival *arrivals;
    uint32_t arrival_mask;
    uint32_t head;
    uint32_t tail;
    uint32_t imm;
    uint16_t back[8];
    uint32_t n_back;
    uint32_t chain;
    uint32_t held; /* messages that the program has */
    uint32_t half; /* as many as it may have without copies, at least */
    uint32_t rare; /* receiving has something else to see to: Python does it */

    uint8_t over;              /* no operation may be posted any more */
    uint8_t attended;          /* their completions wake the loop */
    uint8_t operations_wanted; /* a task waits for a number: others wait behind it */
    uint32_t n_operations;     /* READs, WRITEs and atomics that may be under way; 0: none yet */
    uint16_t *operations_free;
    uint32_t n_operations_free;
    uint32_t operating;        /* under way */
    uint16_t *operations_done; /* ring of those whose end is news */
    uint32_t done_mask;
    uint32_t done_head;
    uint32_t done_tail;

    uint64_t messages_sent;
    uint64_t bytes_sent;
    uint64_t messages_received;
    uint64_t bytes_received;
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t atomics;
};

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
    uint8_t wrs;      /* work requests that it takes */
    uint8_t in_ring;  /* its bytes lie in the ring for sending */
    uint8_t signaled; /* it asked for its completion */
};

struct aio_stream_state {
    struct aio_state base;
    struct ibv_qp *qp;
    uint64_t wr_id;
    uint32_t inline_size;
    int error;        /* errno of the post that failed */
    uint8_t dead;     /* nothing may be posted any more */
    uint8_t flushing; /* the end: receives that come back unused are only counted */
    uint8_t iwarp;
    uint8_t receiving; /* data may come */
    uint8_t sending;   /* data may go */
    uint8_t held;      /* but not by aio_stream_write; Python hears when there is room */
    uint8_t crediting; /* the peer is told of room and credits */
    uint8_t owing;   /* a message of the protocol's waits in Python: for a work request, a credit */
    uint8_t swapped; /* the peer has the other byte order */
    uint8_t heard;   /* set when a word has come */
    uint8_t plain;   /* all that comes is for the protocol's data_received */
    uint8_t waiter;  /* or for a task, which waits */
    uint8_t stopped; /* or is dropped */
    uint32_t posted; /* work requests whose completion will come */

    uint8_t *send; /* ring; behind it the payloads of four control messages */
    uint32_t send_size;
    uint32_t send_lkey;
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
    uint32_t untold; /* messages since the last that asked for its completion */
    uint32_t untold_bytes;
    uint32_t tell_messages;
    uint32_t tell_bytes;
    uint64_t progress; /* messages that have completed */

    uint8_t *table; /* ours, that the peer writes descriptors to */
    uint32_t entry;
    uint32_t peer_entry;
    uint64_t table_addr; /* the peer's */
    uint32_t table_key;
    uint32_t table_length;

    uint8_t *ring;
    uint32_t ring_size;
    uint32_t ring_rkey;
    uint32_t offset; /* of the first byte that is there */
    uint32_t readable;
    uint32_t want;      /* bytes that make news */
    uint32_t ring_left; /* what the peer may use, see rsocket/flow.py */
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
    uint32_t n_used;
    uint16_t used[8]; /* receives to be posted again */
};

/* message.c */
void aio_message_size(struct aio_message_state *m, int64_t window);
void aio_message_init(struct aio_message_state *m, uint32_t sends, uint32_t receives);
int aio_message_send(struct aio_message_state *m, const void *data, uint64_t length);
int64_t aio_message_next(struct aio_message_state *m);
int aio_message_back(struct aio_message_state *m, uint32_t slot);
int aio_message_back_now(struct aio_message_state *m, uint32_t slot);
int aio_message_post(struct aio_message_state *m, uint32_t slot, uint64_t addr, uint32_t length,
                     uint32_t key, int has_imm, uint32_t imm);
int aio_message_read(struct aio_message_state *m, uint32_t number, uint64_t addr, uint32_t length,
                     uint32_t lkey, uint64_t remote_addr, uint32_t rkey);
int aio_message_receive(struct aio_message_state *m, const uint16_t *slots, uint32_t count,
                        uint32_t key);
int aio_message_operate(struct aio_message_state *m, const struct aio_operation *operation);

/* stream.c */
void aio_stream_init(struct aio_stream_state *s);
int aio_stream_control(struct aio_stream_state *s, uint32_t word, uint32_t wrs, const void *payload,
                       uint32_t size, uint64_t to, uint32_t key, int signaled);
uint32_t aio_stream_room(const struct aio_stream_state *s);
int aio_stream_send(struct aio_stream_state *s, uint32_t length);
ssize_t aio_stream_write(struct aio_stream_state *s, const void *data, size_t size);
int aio_stream_announce(struct aio_stream_state *s);
int aio_stream_consume(struct aio_stream_state *s, uint32_t n);
uint32_t aio_stream_read(struct aio_stream_state *s, void *into, size_t size);
int aio_stream_fill(struct aio_stream_state *s, uint32_t count);
int aio_stream_used(struct aio_stream_state *s, uint32_t slot);
uint32_t aio_stream_reach(const struct aio_stream_state *s, uint32_t sub);
uint32_t aio_stream_retire(struct aio_stream_state *s);
void aio_stream_drop(struct aio_stream_state *s);
int aio_stream_probe(const struct aio_stream_state *s);

#endif
