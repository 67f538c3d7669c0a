/*
 * The members of a connection.  connection.c alone includes this, and so is their one writer.  The
 * fuzzer (tests/fuzz), which looks at them after each step, is no part of the library.
 */
#ifndef AIORDMA_CONNECTION_PRIVATE_H
#define AIORDMA_CONNECTION_PRIVATE_H

#include "connection_life.h"
#include "protocol.h"

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
    uint64_t more_addr; /* of the others, which come and go */
    uint32_t step;      /* slots in each registration of those */
    uint32_t *keys;     /* of those registrations */
    uint32_t n_keys;
    uint8_t more;    /* there are such slots */
    uint8_t leaving; /* some slots leave the connection as soon as they are free */
    uint8_t full;    /* no further slot can come */
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
    uint8_t busy;   /* a write has not completed; the four members below are of that write */
    uint16_t slot;  /* the send slot whose place in the send queue it takes */
    struct ibv_sge sge;
    uint64_t write_addr; /* where to, whatever the peer offers meanwhile */
    uint32_t write_key;
    uint64_t addr;
    uint64_t size;
    uint32_t key;
};

/* What the first frame of the peer has to be. */
enum aio_gate {
    AIO_GATE_OPEN,  /* any that the protocol allows */
    AIO_GATE_SHUT,  /* there may be none: the peer has proved nothing, and has not to send first */
    AIO_GATE_PROOF, /* the greeting, with the proof behind it */
};

/* Exposures whose numbers follow one another, modulo 2^32. */
struct aio_exposures {
    uint32_t first;
    uint32_t last;
};

/* The last words of a side, behind its ABORT. */
struct aio_words {
    uint8_t size;
    uint8_t bytes[AIO_WORDS_SIZE];
};

static inline uint64_t aio_slot_addr(const struct aio_slots *slots, uint32_t slot)
{
    return slot < slots->base ? slots->addr + (uint64_t)slot * slots->stride
                              : slots->more_addr + (uint64_t)(slot - slots->base) * slots->stride;
}

struct aio_connection {
    struct ibv_qp *qp; /* NULL before the first post and after the last */
    uint64_t id;       /* of its requests, without the sub-index */
    uint32_t events;   /* that the completion has brought which is being taken */
    enum aio_life life;
    uint8_t raw;        /* without frames: a foreign peer */
    uint8_t waiting;    /* a task waits for a message */
    uint8_t delegated;  /* Python receives: there is more to it than the next message */
    uint8_t alive;      /* a sign of life of the peer since Python has asked */
    uint8_t grows;      /* the window grows as soon as the peer has used up its credits */
    uint8_t grown;      /* it has grown, and the peer does not have the credits yet */
    uint8_t numbered;   /* both sides number their frames */
    uint8_t asking;     /* a PING is not answered */
    uint8_t requested;  /* a frame of requests has come */
    uint8_t requesting; /* the next message is the first frame of requests of this side */

    /* Keys: docs/wire.md, "Keys". */
    uint8_t gate;                  /* enum aio_gate */
    uint8_t proving;               /* the next CREDIT takes `proof` along */
    uint8_t proof[AIO_PROOF_SIZE]; /* of this side to the peer, or that the peer has to send */

    /* Slots. */
    struct aio_slots send;
    struct aio_slots recv;
    const uint8_t *crowded; /* others wait for slots of the pool; set if slots come and go */
    uint16_t *freed; /* receive slots that Python gives back, as some of a pool are leaving */
    uint32_t n_freed;

    /* Sending. */
    uint8_t watched;          /* the waits in line have a timer, or need none */
    uint8_t slot_awaited;     /* completed sends wake the loop, because the line lacks a slot */
    uint32_t queued;          /* tasks that wait in line for a slot and a credit */
    uint32_t large_waiting;   /* large messages that wait for an exchange */
    uint64_t eager_size;      /* bytes of the largest message that goes through a slot */
    uint64_t bare_size;       /* of the largest whose header may be the immediate; 0: of none */
    uint64_t fragmented_size; /* of the largest that goes through several; 0: none does */
    int64_t credits;          /* of this side: messages for which the peer has posted receives */
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
    uint64_t flushed;   /* those that came back without success, or were never posted */
    uint64_t to_flush;  /* `sent`, as of the last frame that is not one without data */
    uint64_t flush_at;  /* `completed` that a flush waits for; 0: none */
    uint32_t send_flags;
    uint32_t inline_size; /* bytes, with the header, that go in the work request itself */
    struct aio_unposted unposted[AIO_SEND_CHAIN]; /* the chain, in the order of its sends */
    uint32_t n_unposted;
    uint8_t delivering;   /* owners are being called; the chain is posted after that */
    uint8_t turn_flushes; /* the loop posts the chain at the end of the turn */
    uint8_t in_a_row;     /* sends that were posted at once since the last events, up to 2 */
    struct aio_stage stage;

    /* Frames without data that wait for a slot, and for nothing else: Python flushes until there is
     * none.  Each kind waits at most once, but for DONE. */
    aio_frame_kinds controls_pending;
    uint64_t arguments_out[AIO_FRAME_KIND_COUNT]; /* of those frames */
    struct aio_words words_out;                   /* of this side */
    struct aio_dones dones_pending;

    /* Receiving. */
    struct aio_order receiving;
    uint8_t number_in; /* of the peer's next frame */
    int64_t posted;    /* receives that the adapter has */
    int64_t receives;  /* as `posted`; at the end, less those that were flushed */
    int64_t unused;    /* credits of the peer: messages that it may still send */
    int64_t granted;   /* that it was given since the beginning */
    int64_t control;   /* receives kept for frames without credit */
    int64_t due;       /* credits that have to be owed for a CREDIT frame of their own */
    /* `granted` before each CREDIT frame that the peer may not have processed yet. */
    int64_t marks[AIO_CREDIT_FRAMES];
    uint32_t n_marks;
    struct aio_arrival *arrivals;
    uint32_t arrival_mask;
    uint32_t head;
    uint32_t tail;
    uint32_t fragments;       /* of the message that is arriving; they lie behind the tail */
    uint64_t missing;         /* bytes of it that have not arrived; 0: no message is arriving */
    uint64_t largest;         /* bytes of a message in fragments, at most */
    uint32_t inner;           /* fragments in the ring that another one of their message follows */
    uint32_t announced;       /* large messages before this number are known to Python */
    uint32_t large;           /* large messages in the ring */
    uint16_t back[AIO_CHAIN]; /* receive slots that are posted together, a little later */
    uint32_t n_back;
    uint32_t chain;     /* how many of them */
    uint32_t kept;      /* messages that the program keeps in their slots */
    uint32_t most_kept; /* half of the window; further messages are copied when received */
    struct aio_landings landings;

    /* Whose memory names name. */
    uint64_t identity;        /* of this side's protection domain; 0: it tells none */
    uint64_t peer_identity;   /* the first that the peer has told; 0: none yet */
    uint8_t identity_told;    /* to the peer, by a frame */
    uint8_t identity_wanted;  /* a PING is to tell it, and to ask for that of the peer */
    uint8_t identity_awaited; /* Python waits for it */
    uint8_t ponged;           /* a PONG has come: a peer that has an identity has told it */
    uint32_t *revoked; /* of the peer, each at its number modulo AIO_REVOKED; NULL: none yet */
    struct aio_exposures revoking[AIO_REVOKING]; /* of this side, which the peer is to be told */
    uint32_t n_revoking;

    aio_frame_kinds said; /* frames that the peer has sent; CREDIT: its first frame */
    uint64_t arguments_in[AIO_FRAME_KIND_COUNT]; /* of these; of END and ABORT, the first */
    struct aio_words words_in;                   /* of the peer, with its first ABORT */
    struct aio_dones dones;
    struct aio_order notes; /* the slots that they lie in; no memory before a lease wants notes */
    uint8_t violation;      /* enum aio_violation */
    uint64_t wrong[2];
    int error;           /* errno of a post that failed in a drain */
    uint8_t recv_failed; /* the first post that failed was of receives */

    /* RDMA READs of large messages. */
    uint16_t *reads_done; /* their numbers, until Python has seen them */
    uint32_t n_reads_done;
    uint32_t most_reads;

    /* Operations of the program. */
    uint8_t listens;        /* their completions wake the loop */
    uint8_t number_awaited; /* a task waits for a number: others wait behind it */
    uint32_t n_operations;  /* READs, WRITEs and atomics that may be under way; 0: none yet */
    uint16_t *operations_free;
    uint32_t n_operations_free;
    uint32_t operating;        /* under way */
    uint16_t *noted;           /* the slot of the frame behind each noted WRITE, by its number */
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

#endif
