/*
 * The data and credits of one stream in both directions, without Python.
 *
 * `struct aio_stream` is written by stream.c alone, whose functions are the commands of all other
 * files.  Its members are in stream_private.h, which no other file of the library includes.  A
 * stream belongs to the thread of its event loop: every function is called there, or in a child
 * after fork, with the interpreter lock held.
 *
 * Functions that return an int return an enum aio_result or an errno, unless they say something
 * else.
 */
#ifndef AIORDMA_STREAM_H
#define AIORDMA_STREAM_H

#include "protocol.h"
#include "result.h"
#include "stream_life.h"

struct aio_stream;

/* The sizes and the memory of a stream, which its configuration decides. */
struct aio_stream_sizes {
    struct aio_descriptor ring; /* that the peer writes data to first */
    uint64_t table;             /* that it writes descriptors to: two entries */
    struct aio_descriptor send; /* to send from; the payloads of control messages lie behind it */
    uint32_t credits;           /* messages that may wait */
    uint32_t send_depth;        /* work requests for sending */
    uint32_t inline_size;       /* bytes that go in the work request itself */
    uint8_t iwarp;
};

/* What a stream needs to know of the peer's private data. */
struct aio_stream_peer {
    uint32_t credits;
    struct aio_descriptor buffer; /* that it takes data in first */
    uint64_t table_addr;
    uint32_t table_key;
    uint32_t table_length; /* entries */
    uint8_t swapped;       /* it has the other byte order */
};

/* How the peer broke flow control, with two numbers for the words. */
struct aio_stream_violation {
    enum {
        AIO_STREAM_RIGHT,
        AIO_STREAM_NO_CREDIT,    /* a message without a credit: messages that wait */
        AIO_STREAM_NO_SPACE,     /* data that is empty or too long: bytes, bytes of its buffer */
        AIO_STREAM_BAD_LIMIT,    /* it takes credits back, or exceeds those it began with: messages
                                    sent, messages allowed */
        AIO_STREAM_BAD_BUFFER,   /* beyond the end of all addresses: its address, its length */
        AIO_STREAM_THIRD_BUFFER, /* while two are not full */
    } kind;
    uint64_t first, second;
};

/* Numbers that may be read, each by a function stream_NAME: X(NAME, where it comes from). */
#define AIO_STREAM_FACTS(X)                                                                        \
    X(bytes_received, s->bytes_received)                                                           \
    X(bytes_sent, s->bytes_sent)                                                                   \
    X(error, s->adapter.error)                                                                     \
    X(posted, s->adapter.posted)                                                                   \
    X(progress, s->sent.progress)                                                                  \
    X(readable, s->ring.readable)

#define AIO_STREAM_FLAGS(X)                                                                        \
    X(is_over, s->life != AIO_STREAM_LIFE_POSTS)                                                   \
    X(recv_failed, s->adapter.recv_failed)                                                         \
    X(stopped, s->reader == AIO_READER_NOBODY)                                                     \
    X(waiting, s->ring.wanted > 0)

#define AIO_DECLARE_STREAM_FACT(name, value) int64_t stream_##name(const struct aio_stream *s);

AIO_STREAM_FACTS(AIO_DECLARE_STREAM_FACT)
AIO_STREAM_FLAGS(AIO_DECLARE_STREAM_FACT)

/* Making a stream, and the handshake.  stream_state.c calls these, and all that follow. */

/* Make a stream at `*place`: 0, EINVAL if the sizes do not fit one another, or ENOMEM. */
int stream_new(const struct aio_stream_sizes *sizes, struct aio_stream **place);
/* Free its memory; the queue pair has been told to forget it.  NULL is no stream. */
void stream_free(struct aio_stream *s);
/*
 * Name the queue pair and the id of its requests, and post so many receives.  On iWARP words land
 * at `words`.
 */
int stream_bind(struct aio_stream *s, struct ibv_qp *qp, uint64_t id, uint8_t *words, uint32_t lkey,
                uint32_t receives);
/* The peer is known: EALREADY if it was, EINVAL for a peer that there cannot be. */
int stream_meet(struct aio_stream *s, const struct aio_stream_peer *peer);
/* The connection is open on this side, and data may go both ways: 0, or EINVAL before the meeting.
 */
int stream_open(struct aio_stream *s);

/* What may happen.  stream_life.c has the state that follows. */

/* Of the queue pair: whether this is news. */
bool stream_advance_life(struct aio_stream *s, enum aio_stream_life_event event);
void stream_advance_input(struct aio_stream *s, enum aio_input_event event);
void stream_advance_output(struct aio_stream *s, enum aio_output_event event);
void stream_advance_reader(struct aio_stream *s, enum aio_reader_event event);
/* What Python has to post, so that it is told of room for it.  A mapping goes before data. */
enum aio_owed { AIO_OWES_NOTHING, AIO_OWES_WORD, AIO_OWES_MAPPING, AIO_OWED_COUNT };
void stream_owe(struct aio_stream *s, enum aio_owed owed);

/* Sending data. */

/* Send what can be sent now; how many bytes.  After a failure there is a stream_error. */
size_t stream_write(struct aio_stream *s, const void *data, size_t size);
/* Bytes that the next message of data can carry, and where in the ring they are put. */
uint32_t stream_next_place(const struct aio_stream *s, uint32_t *offset);
/* Post the next `length` bytes of the ring, which the caller has filled; at most so many fit. */
int stream_send_from_ring(struct aio_stream *s, uint32_t length);
/* Whether a larger ring for sending would be of use: this one is full, and the peer has more room.
 */
bool stream_wants_send_ring(const struct aio_stream *s);
/* Send from this ring from now on; the ring before it stays for the messages under way. */
void stream_replace_send_ring(struct aio_stream *s, uint8_t *ring, uint32_t size, uint32_t lkey);

/* Sending control messages. */

/* Post the updates that are due, and with `repeat` one that is not, as a sign of life. */
int stream_announce(struct aio_stream *s, bool repeat);
/* Post a word: 0, an errno, or AIO_NO_ROOM where no work request is free. */
int stream_say(struct aio_stream *s, uint32_t word);
/*
 * Post a word behind `size` bytes to the peer's memory, at most AIO_STREAM_CONTROL_SIZE, which
 * takes a credit and no space: 0, an errno, or AIO_NO_ROOM where a work request or the credit is
 * missing.
 */
int stream_publish(struct aio_stream *s, uint32_t word, const void *payload, uint32_t size,
                   uint64_t to, uint32_t key);
/* Post an RDMA WRITE of nothing: the peer's adapter acknowledges it, its program sees nothing. */
int stream_probe(const struct aio_stream *s);

/* Receiving. */

/*
 * Count a message of the peer: data, a limit of messages, with the buffer in the table, or a
 * mapping.  Any other word means nothing for flow control.
 */
struct aio_stream_violation stream_take_word(struct aio_stream *s, uint32_t word);
/*
 * Copy up to `size` readable bytes out of the ring; how many that were.  If the announcement of the
 * room fails, there is a stream_error.
 */
uint32_t stream_read(struct aio_stream *s, void *into, size_t size);
/* How many of the readable bytes end with the first separator among them; 0 if there is none. */
uint32_t stream_find(const struct aio_stream *s, const char *separator, uint32_t size);
/* Whether the readable bytes are the protocol's, and it is called by C. */
bool stream_is_for_protocol(const struct aio_stream *s);
/*
 * Whether Python is needed after bytes were read: a post has failed, or bytes are left, and the
 * peer may send nothing with whose event they would be given to the reader.
 */
bool stream_needs_attention(const struct aio_stream *s);
/*
 * A task waits for `count` bytes from now on: AIO_OK; AIO_FOR_PYTHON where the bytes are not the
 * protocol's, no more will come, or the peer cannot send so many before this side reads some.
 */
int stream_await_bytes(struct aio_stream *s, size_t count);
/* The same for Python, of as many bytes as the peer can send; whether the task has to wait. */
bool stream_await_some(struct aio_stream *s, size_t count);
/* Whether bytes are there for the task that waits, and it is to be resumed for them. */
bool stream_has_enough(const struct aio_stream *s);
/* No task waits any more. */
void stream_end_wait(struct aio_stream *s);
/* Raise AIO_STREAM_GROW when so many more bytes are taken, and there is more than fits. */
void stream_grow_after(struct aio_stream *s, uint64_t taken);
/*
 * Have a ring of `size` bytes take over when the first half of the ring is free: 0, or EINVAL where
 * one is on its way, or the larger ring is not larger.
 */
int stream_widen(struct aio_stream *s, uint8_t *ring, uint32_t rkey, uint32_t size);
/* Whether the peer has given a sign of life since the last call. */
bool stream_check_alive(struct aio_stream *s);

/* Completions. */

/*
 * Take a completion: the events that it brings, or AIO_FOR_PYTHON, and then nothing has changed.
 * Their order is kept: behind a completion for Python all others are Python's, too, until it has
 * seen that one (stream_note_seen).
 */
int stream_complete(struct aio_stream *s, const struct ibv_wc *wc);
/* It has seen a completion that was passed to it: 0, or EINVAL where there was none. */
int stream_note_seen(struct aio_stream *s);
/* The receive of this slot has completed; it is posted again with others.  EPROTO: out of turn. */
int stream_complete_receive(struct aio_stream *s, uint32_t slot);
/* A receive has failed, which is the end.  An adapter may flush one twice. */
void stream_count_failed_receive(struct aio_stream *s);
/*
 * A message has completed, and with it all before it.  If it has failed it stays under way for the
 * protocol.  Returns how many of AIO_STREAM_CONTROLS `words` are those of control messages.
 */
uint32_t stream_complete_send(struct aio_stream *s, uint32_t sub, bool failed, uint32_t *words);

#endif
