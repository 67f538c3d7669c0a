/*
 * The common parts of the two protocols, without Python: what the drain hands completions to, and
 * every constant of the data path, once.
 *
 * A file without Python.h can be fuzzed by itself (tests/fuzz).  A connection or stream belongs to
 * the thread of its event loop, in which alone it is touched.
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

/* A power of two of at least `count`. */
static inline uint32_t aio_power(uint32_t count)
{
    uint32_t power = 1;

    while (power < count)
        power *= 2;
    return power;
}

/* For lists of names: the text of each. */
#define AIO_TEXT(name) #name,

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
#define AIO_SUB_NOTED   0x6000  /* of the frame behind a noted WRITE, and the number of that */

/* The events with which the owner of a MessageState is called after a drain: 8 bits. */
#define AIO_EVENT_ARRIVED  1   /* a message, and a task waits for one */
#define AIO_EVENT_OPERATED 2   /* operations have ended */
#define AIO_EVENT_ROOM     4   /* credits or a slot have come, and sends wait for them */
#define AIO_EVENT_SENT     8   /* the messages of a flush have reached the peer's adapter */
#define AIO_EVENT_FRAMES   16  /* `said` of a connection, or what else waits for Python */
#define AIO_EVENT_FAILED   32  /* the peer broke the protocol, or a post has failed */
#define AIO_EVENT_IDLE     64  /* while it is flushing: the adapter has nothing any more */
#define AIO_EVENT_NOTED    128 /* notes of the peer about what it has written */

/* The header of a frame; docs/wire.md is the specification. */
#define AIO_FRAME_SIZE    16
#define AIO_FRAME_HAS_IMM 1
#define AIO_FRAME_MORE    2 /* of DATA: the message goes on in the next */
#define AIO_FRAME_REVOKED                                                                          \
    2                    /* of PING: the argument is two numbers of exposures: see docs/wire.md */
#define AIO_FRAME_FREE 4 /* the newest landing that the receiver of the frame knows is free */
#define AIO_FRAME_REQUESTS                                                                         \
    0x80 /* of DATA: from here on the program of the sender sends requests and answers */
#define AIO_NUMBER_SHIFT  4 /* bits of the first byte for the kind; the others have the number */
#define AIO_LANDING_SHIFT 3 /* the flags from this bit on: the number of a landing */
#define AIO_LANDINGS      3 /* the largest number; a landing has four times the bytes of the last */
#define AIO_LANDING_SIZE  (1u << 16) /* bytes of the first */

/* The kinds of frames, by their numbers on the wire; Python has their names (`FRAME_KINDS`). */
#define AIO_FRAME_KINDS(X)                                                                         \
    X(CREDIT) X(DATA) X(RENDEZVOUS) X(DONE) X(PING) X(PONG) X(END) X(ABORT) X(NOTE)

#define AIO_FRAME_KIND(name) AIO_FRAME_##name,
enum aio_frame_kind { AIO_FRAME_KINDS(AIO_FRAME_KIND) AIO_FRAME_KIND_COUNT };

/* A set of kinds: the bits 1 << kind. */
typedef uint16_t aio_frame_kinds;

/* Those that take a credit: the peer has counted a receive for each of them. */
#define AIO_KINDS_WITH_CREDIT                                                                      \
    (1u << AIO_FRAME_DATA | 1u << AIO_FRAME_RENDEZVOUS | 1u << AIO_FRAME_NOTE)

_Static_assert(AIO_FRAME_KIND_COUNT <= 16, "the kind has four bits on the wire, and in a set one");

/* Any byte may be asked: a peer without frame numbers has eight bits for the kind. */
static inline int aio_kind_takes_credit(uint32_t kind)
{
    return kind < AIO_FRAME_KIND_COUNT && AIO_KINDS_WITH_CREDIT >> kind & 1;
}

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

#define AIO_CREDIT_FRAMES 2    /* that may be unprocessed at a time */
#define AIO_REVOKING      8    /* ranges of ended exposures that wait to be told */
#define AIO_REVOKED       1024 /* ended exposures of the peer that are kept, a power of two */
#define AIO_HEAD_SIZE     384  /* bytes of the body of a RENDEZVOUS frame that Python sees */
#define AIO_NOTE_SIZE     12   /* bytes of the body of a NOTE frame */
#define AIO_PROOF_SIZE    32   /* bytes behind the greeting of a client that has to prove itself */
#define AIO_WORDS_SIZE    31   /* bytes behind an ABORT frame, at most */

/*
 * How the peer broke the protocol, and what the two numbers mean that a connection keeps with it.
 * Python has the names (`VIOLATIONS`), and endpoint/outcome.py the words for each.
 */
#define AIO_VIOLATIONS(X)                                                                          \
    X(SHORT)  /* a frame shorter than its header: its bytes */                                     \
    X(LENGTH) /* of a DATA frame: announced, came */                                               \
    X(CREDIT) /* a message without credit */                                                       \
    X(KIND)   /* of a frame: the kind */                                                           \
    X(WRITE)  /* a write with an immediate, and not into a landing that is free */                 \
    X(DONE)   /* more answers than exchanges can be open: the number */                            \
    X(SIZE)   /* of a message: announced, the largest */                                           \
    X(BARE)   /* another frame than DATA in an immediate, or flags: its kind, and they */          \
    X(ORDER)  /* another message, in place of so many bytes of the last */                         \
    X(NUMBER) /* of a frame: it came twice, or one is missing: its number, the next */             \
    X(NOTE)   /* of another form, or of memory that goes beyond 2^64: its flags, its bytes */      \
    X(PROOF)  /* the first frame does not prove that the peer has the key: its bytes */            \
    X(TURN)   /* not the peer, but the adapter: a request that was not the next, or not there, has \
                 completed: whether it was a receive, its slot */

#define AIO_VIOLATION(name) AIO_WRONG_##name,
enum aio_violation { AIO_WRONG_NOTHING, AIO_VIOLATIONS(AIO_VIOLATION) };

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
#define AIO_LARGEST_COPY        (1u << 16) /* bytes of an operation of a batch that are copied */
#define AIO_OPERATION_CHAIN     64         /* operations that are posted together, at most */
#define AIO_MOST_OPERATIONS     0x1000     /* whose numbers a sub-index can name */

#define AIO_WORD_VALUE          ((UINT32_C(1) << 29) - 1)
#define AIO_WORD_SGL            UINT32_C(4)
#define AIO_WORD_IOMAP          UINT32_C(6)
#define AIO_SEQUENCE_MASK       0xFFFFu /* the wire numbers messages modulo 2^16 */

/* A buffer, as the tables of both sides have it. */
struct aio_descriptor {
    uint64_t addr;
    uint32_t key;
    uint32_t length;
};

#endif
