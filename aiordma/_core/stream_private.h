/*
 * The members of a stream.  stream.c alone includes this, and so is their one writer.  The fuzzer
 * (tests/fuzz), which looks at them after each step, is no part of the library.
 */
#ifndef AIORDMA_STREAM_PRIVATE_H
#define AIORDMA_STREAM_PRIVATE_H

#include "protocol.h"
#include "stream.h"
#include "stream_life.h"

struct aio_message {
    uint32_t word;
    uint8_t wrs;      /* work requests of the message */
    uint8_t in_ring;  /* its bytes lie in the ring for sending: 1, or 2 in the larger ring */
    uint8_t signaled; /* it asked for its completion */
};

/* The queue pair, and what it has been given. */
struct aio_stream_adapter {
    struct ibv_qp *qp;
    uint64_t id; /* of the requests, without the sub-index */
    uint32_t inline_size;
    uint32_t posted;     /* work requests whose completion will come */
    int error;           /* errno of the first post that failed */
    uint8_t recv_failed; /* it was one of receives */
    uint8_t iwarp;
};

/* The memory that data are sent from, in turn. */
struct aio_send_ring {
    uint8_t *at;
    uint32_t size;
    uint32_t lkey;
    uint32_t head; /* where the next bytes are put */
    uint32_t free;
    uint32_t largest; /* bytes of a message */
    uint8_t grown;    /* it is the larger one */
};

/* Control messages: their payloads, which lie behind the first ring, and their work requests. */
struct aio_stream_control {
    uint8_t *at;
    uint32_t lkey;
    uint32_t next; /* place for a payload */
    uint32_t out;  /* work requests under way */
};

/* What the peer has room for: the buffer that is being filled, the next, and messages. */
struct aio_stream_space {
    uint64_t addr;
    uint32_t key;
    uint32_t left;
    uint64_t spare_addr;
    uint32_t spare_key;
    uint32_t spare_left;
    uint32_t allowed;  /* messages that may be sent now */
    uint32_t limit;    /* and those that the peer ever allows at a time */
    uint32_t sequence; /* number of the next message */
};

/* Work requests of data. */
struct aio_stream_data {
    uint32_t out;   /* under way */
    uint32_t limit; /* with which one more message may be posted */
    uint32_t wrs;   /* of each message */
};

/* Messages under way, from `first` to `next`. */
struct aio_stream_sent {
    struct aio_message *messages; /* `mask` + 1 places */
    uint32_t mask;
    uint32_t first;
    uint32_t next;
    uint32_t unsignaled; /* messages since the last that asked for its completion */
    uint32_t unsignaled_bytes;
    uint32_t signal_messages; /* that many, or so many bytes, ask for one */
    uint32_t signal_bytes;
    uint64_t progress; /* messages that have completed */
};

/* The two tables of descriptors: ours, which the peer writes to, and the peer's. */
struct aio_stream_table {
    uint8_t *at;
    uint32_t entry;
    uint32_t peer_entry;
    uint64_t peer_addr;
    uint32_t peer_key;
    uint32_t peer_length; /* entries; 0: the peer is not known yet */
    uint8_t swapped;      /* the peer has the other byte order */
};

/* The ring that the peer writes to, and a larger ring that takes its place. */
struct aio_receive_ring {
    uint8_t *at;
    uint32_t size;
    uint32_t rkey;
    uint8_t *wider;
    uint32_t wider_size; /* 0: there is none */
    uint32_t wider_rkey;
    uint8_t moved;     /* its first half is with the peer: bytes behind the end of `at` lie there */
    uint64_t taken;    /* bytes, since a larger ring was asked for */
    uint64_t grow_at;  /* so many are taken before the next request */
    uint32_t offset;   /* of the first byte that can be read */
    uint32_t readable; /* bytes */
    uint32_t wanted;   /* by the task that waits for bytes; 0: none does */
    uint32_t free;     /* bytes that are not announced yet, */
    uint32_t next;     /* and their offset */
};

/* What the peer may still send, and what it is to be told of. */
struct aio_stream_given {
    uint32_t left;     /* bytes in the half that it fills, */
    uint32_t buffers;  /* and further halves */
    uint32_t allowed;  /* messages */
    uint32_t credits;  /* messages that may wait, at most */
    uint64_t consumed; /* messages whose last byte is read, and whose credit is returned */
    uint64_t due;      /* `consumed` from which on the peer is to be told */
};

/* The lengths of the messages whose bytes are not read yet. */
struct aio_stream_waiting {
    uint32_t *lengths; /* `mask` + 1 places */
    uint32_t mask;
    uint32_t first;
    uint32_t count;
};

/* The receives that words complete, in turn. */
struct aio_stream_receives {
    uint8_t *words; /* on iWARP, four bytes for each */
    uint32_t lkey;
    uint32_t count; /* 0: none is posted yet */
    uint32_t turn;  /* of the one that completes next */
    uint32_t n_used;
    uint16_t used[AIO_CHAIN]; /* to be posted again */
};

struct aio_stream {
    enum aio_stream_life life;
    enum aio_input input;
    enum aio_output output;
    enum aio_reader reader;
    enum aio_owed owed;
    uint8_t alive;   /* a word has come since Python has asked */
    uint32_t events; /* that the completion has brought which is being taken */
    uint32_t passed; /* completions that Python has been given and has not seen yet */
    struct aio_stream_adapter adapter;

    /* Sending. */
    struct aio_send_ring send;
    struct aio_stream_control control;
    struct aio_stream_space to;
    struct aio_stream_data data;
    struct aio_stream_sent sent;
    uint64_t bytes_sent;

    /* Receiving. */
    struct aio_stream_table table;
    struct aio_receive_ring ring;
    struct aio_stream_given given;
    struct aio_stream_waiting waiting;
    struct aio_stream_receives receives;
    uint64_t bytes_received; /* that the program has taken */
};

#endif
