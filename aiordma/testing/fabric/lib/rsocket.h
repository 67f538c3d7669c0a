/*
 * What the files of rsockets share: a byte stream over one reliable connection.
 *
 * They use the public interfaces of libibverbs and librdmacm alone, and hence work over those of
 * any maker.  Bytes travel as RDMA WRITEs into a ring of the receiver; each message carries a word
 * of 32 bits that says what it is.  The receiver tells where the sender may write next, and how
 * many messages it takes, by messages of its own.
 *
 * No thread works behind the program: all that a socket has to do is done within the calls for it.
 * Every wait is a poll() of the socket's descriptor, which is readable when a channel of the socket
 * has something to say, and of one by which another thread tells that it has changed the state.
 */
#ifndef FABRIC_RSOCKET_H
#define FABRIC_RSOCKET_H

#include <infiniband/ib.h>
#include <rdma/rsocket.h>

#include "fabric.h" /* FABRIC_API and FABRIC_LENGTH: nothing else of it */

enum {
    STREAM_BUFFERS = 2,       /* entries of the table: what of the ring the peer may fill */
    STREAM_CONTROL = 4,       /* send requests that are kept free for messages without data */
    STREAM_SPARE = 8,         /* receives beyond the credits, for messages that need no credit */
    STREAM_CHUNK = 32 * 1024, /* bytes of a message, at most */
    STREAM_INLINE = 512,      /* bytes, at most */
    STREAM_PRIVATE = 80,      /* bytes of private data that are of interest */
    STREAM_LINGER_MS = 60 * 1000,
};

/* Bytes on the wire, in the order of the host that reads them. */
struct stream_buffer {
    uint64_t address;
    uint32_t key, length;
};

struct stream_slot { /* memory that the peer has mapped */
    uint64_t offset, address;
    uint32_t key, length;
};

/* Memory of this side that the peer may write by riowrite(). */
struct stream_map {
    struct stream_map *next;
    struct ibv_mr *mr;
    off_t offset;
    int slot; /* of the peer's table; -1: for this side alone */
    bool published;
};

enum stream_state {
    STREAM_IDLE,
    STREAM_LISTENING,
    STREAM_ADDRESS, /* the three steps of rconnect() */
    STREAM_ROUTE,
    STREAM_CONNECTING,
    STREAM_ACCEPTED, /* by raccept(): nothing may be sent until the peer has heard of it */
    STREAM_CONNECTED,
    STREAM_ENDED,
};

struct stream_options { /* what raccept() passes on from the socket that listens */
    int reuse, v6only, keepalive, oob_inline, nodelay, maxseg, keep_idle, keep_interval, keep_count;
    struct linger linger;
    uint32_t receive_bytes, send_bytes, inline_bytes, slots;
    uint32_t sends, receives; /* requests in the queues; receives are without the spare ones */
};

struct stream_event { /* of the connection manager, after its acknowledgement */
    enum rdma_cm_event_type type;
    int status;
    struct rdma_cm_id *id;
    struct rdma_conn_param param;
    size_t size; /* of the private data */
    unsigned char data[STREAM_PRIVATE];
};

struct stream_sleeper { /* a thread that waits for the socket */
    struct stream_sleeper *next;
    int wakeup; /* an eventfd of that thread */
    bool is_told;
};

struct stream {
    pthread_mutex_t lock;
    unsigned users;      /* under the lock of all sockets, as is the next */
    unsigned generation; /* fork() ends it: the connection is the parent's */

    /* An epoll instance of the two channels: its descriptor is the program's name of the socket. */
    int fd;
    struct rdma_event_channel *channel;
    struct ibv_comp_channel *completions;
    struct stream_sleeper *sleepers;

    int domain;
    bool nonblocking, bound;
    struct stream_options options;
    enum stream_state state;
    int error;               /* that was not told yet */
    bool readable, writable; /* the directions that are open */
    struct rdma_cm_id *id;
    bool has_request; /* of a socket that listens */
    struct stream_event request;
    int resolve_ms, resolves_left;
    void *route; /* of RDMA_ROUTE */
    size_t route_size;

    struct ibv_pd *pd;
    struct ibv_cq *cq;
    bool armed, iwarp, swap; /* swap: the peer has the other order of bytes */

    /* Sending. The buffers are those of the peer that are not full, the one in use first. */
    struct ibv_mr *send_mr;
    unsigned char *send_ring, *controls;
    uint32_t send_offset, send_free, control_next, data_out, control_out;
    struct stream_buffer buffers[STREAM_BUFFERS];
    uint16_t sequence, limit, peer_credits;
    uint32_t word; /* that closes a direction, and waits to be sent; 0: none */
    uint64_t peer_table;
    uint32_t peer_key, peer_buffers, peer_next, peer_slots;
    struct stream_map *maps;

    /* Receiving. The table is where the peer tells its buffers and its mappings. */
    struct ibv_mr *receive_mr, *table_mr;
    unsigned char *ring;
    uint32_t ring_offset, ring_bytes; /* bytes to read, and where they begin */
    uint32_t allowed;                 /* bytes that the peer may write */
    uint32_t freed, free_offset;      /* bytes that it may not write again yet */
    struct stream_buffer *table;
    uint32_t table_next;
    uint32_t *messages; /* as many as options.receives: bytes of each that are not read */
    uint32_t message_head, message_count;
    uint16_t consumed, due;
};

/* ---- rsocket.c: sockets and their calls ------------------------------------------------------ */

/* The socket of a descriptor, which stays until stream_put(). NULL and errno: EBADF. */
struct stream *stream_get(int fd);
/* The same, with its lock; stream_release() is the opposite. */
struct stream *stream_take(int fd);
void stream_put(struct stream *stream);
void stream_release(struct stream *stream);
/* The end of a call: the result is 0, or -1 with an errno. */
int stream_finish(struct stream *stream, int error);

/* ---- rsocket_option.c: options --------------------------------------------------------------- */

void stream_default_options(struct stream_options *options);

/* ---- rsocket_connect.c: from the address to the connection, and the memory for it ------------ */

/* 0, or an errno. */
int stream_create(struct stream **created, int domain, const struct stream_options *options);
void stream_destroy(struct stream *stream);
int stream_connect(struct stream *stream, const struct sockaddr *address);
int stream_accept(struct stream *stream, const struct stream_event *request);
/* Take what the descriptor announces: events of the connection manager and completions. */
void stream_take_events(struct stream *stream);

/* ---- rsocket_flow.c: messages ---------------------------------------------------------------- */

/* The parts of a program's memory, one after the other. */
struct stream_cursor {
    const struct iovec *parts;
    size_t offset; /* in the first of them */
};

/* Take what is in the completion queue, and send what is due. */
void stream_progress(struct stream *stream);
int stream_post_receive(struct stream *stream, uint32_t index);
/* As many bytes as can be sent or read at once. */
size_t stream_write(struct stream *stream, struct stream_cursor *from, size_t size);
size_t stream_read(struct stream *stream, struct stream_cursor *into, size_t size, bool peek);
bool stream_may_send(const struct stream *stream);
/* As many bytes as fit at once into what the peer has mapped there; -1: it has nothing there. */
ssize_t stream_write_mapped(struct stream *stream, struct stream_cursor *from, size_t size,
                            uint64_t offset);
void stream_shutdown(struct stream *stream, bool reading, bool writing);
/* The connection is over, for an errno or for 0. */
void stream_end(struct stream *stream, int error);

/* ---- rsocket_poll.c: waiting ----------------------------------------------------------------- */

#define STREAM_FOREVER (-1)
#define STREAM_NOT     0

/* Milliseconds of the clock that a deadline is told by. */
int64_t stream_clock(void);
/* Wait for a condition with the socket's lock, which sleeping gives up. 0, or EAGAIN or EINTR. */
int stream_wait(struct stream *stream, bool (*condition)(const struct stream *stream),
                int64_t deadline);
/* Have the next completion told; what is in the queue already is not. */
void stream_arm(struct stream *stream);
/* The state has changed: threads that sleep look again. */
void stream_wake(struct stream *stream);

#endif
