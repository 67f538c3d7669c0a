/*
 * The messages of one connection in both directions, and its READs, WRITEs and atomics, without
 * Python.
 *
 * `struct aio_connection` is written by connection.c alone, whose functions are the commands of all
 * other files.  Its members are in connection_private.h, which no other file of the library
 * includes.  A connection belongs to the thread of its event loop: every function is called there,
 * or in a child after fork, with the interpreter lock held.
 *
 * Functions that return an int return an enum aio_result or an errno, unless they say something
 * else.
 */
#ifndef AIORDMA_CONNECTION_H
#define AIORDMA_CONNECTION_H

#include "admission.h"
#include "connection_life.h"
#include "protocol.h"
#include "result.h"

struct aio_connection;

/*
 * The sizes of a connection, which its configuration decides: X(NAME, type, what
 * PyArg_ParseTuple(3) calls it).  Python gives them by name; see `Plan.state` in
 * endpoint/config.py.
 */
#define AIO_SIZES(X)                                                                               \
    X(sends, uint32_t, "I")      /* send slots that are there */                                   \
    X(receives, uint32_t, "I")   /* receive slots that are there, all to be posted at once */      \
    X(send_depth, uint32_t, "I") /* send slots that there may be */                                \
    X(arrivals, uint32_t, "I")   /* receive slots that there may be, a power of two */             \
    X(controls, uint32_t, "I")   /* slots for frames without data */                               \
    X(exchanges, uint32_t, "I")  /* large messages that may be announced and not answered */       \
    X(answers, uint32_t, "I")    /* receives for answers to large messages */                      \
    X(reads, uint32_t, "I")      /* READs of large messages */                                     \
    X(eager_size, uint64_t, "K") /* bytes of a message in a slot, until the peer's is known */     \
    X(largest, uint64_t, "K")    /* bytes of a message that the program takes */                   \
    X(raw, int, "p")             /* without frames: a foreign peer */                              \
    X(grows, int, "p")           /* the window grows when the peer has used up its credits */

#define AIO_SIZE(name, type, format) type name;

struct aio_sizes {
    AIO_SIZES(AIO_SIZE)
};

/* Where the adapter finds the slots of one kind. */
struct aio_place {
    uint64_t addr;
    uint32_t stride;
    uint32_t key;
    uint32_t count;
};

/* The adapter's side: the queue pair, and memory that lives as long as it. */
struct aio_adapter {
    struct ibv_qp *qp;
    uint64_t id; /* of the requests, without the sub-index */
    uint32_t send_flags;
    uint32_t inline_size;
    struct aio_place send;
    struct aio_place receive;
    struct aio_place frames; /* without data */
    const uint8_t *crowded;  /* set while others wait for slots of the pool; NULL: no pool */
};

/* What both sides have agreed on in the handshake. */
struct aio_terms {
    int64_t credits;
    uint64_t eager_size;      /* bytes of the largest message that goes through a slot */
    uint64_t bare_size;       /* of the largest whose header may be the immediate; 0: of none */
    uint64_t fragmented_size; /* of the largest that goes through several; 0: none does */
    uint64_t written_size;    /* of the largest that is written to a landing; 0: of none */
    uint64_t landed_size;     /* of the largest of the peer that may need one; 0: of none */
    uint8_t numbered;         /* both sides number their frames */
    uint64_t identity;        /* of the protection domain of this side; 0: it tells none */
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

struct aio_operation {
    uint32_t number;
    uint32_t opcode; /* enum ibv_wr_opcode */
    uint64_t addr;
    uint32_t length;
    uint32_t lkey;
    uint64_t remote_addr;
    uint32_t rkey;
    uint64_t compare_add; /* of a WRITE with immediate, or that is noted: that */
    uint64_t swap;
    uint8_t quiet; /* it completes only if it fails */
    uint8_t noted; /* kind of the frame behind a WRITE, DATA for an empty message, or NOTE; or 0 */
};

/* A note of the peer: it has written so many bytes to memory of this side. */
struct aio_note {
    uint64_t addr;
    uint64_t length;
    uint32_t key;
    uint32_t imm;
    uint16_t slot; /* which the program gives back: until then the note has its credit */
};

/* A large message of the peer, as its frame announces it. */
struct aio_announcement {
    uint64_t length;
    const uint8_t *body; /* in the slot, until that is given back */
    uint32_t body_size;
    uint32_t imm;
    uint16_t slot;
    uint8_t has_imm;
};

/*
 * What a frame lacks that is to be sent; of several, the first.  With a credit it may lack a slot
 * alone, which no message of the peer brings.
 */
enum aio_lack { AIO_LACKS_NOTHING, AIO_LACKS_RIGHT, AIO_LACKS_CREDIT, AIO_LACKS_SLOT };

/* What AIO_EVENT_FRAMES leaves to Python, beside announcements, DONEs and what the peer has said.
 */
struct aio_news {
    const uint16_t *reads; /* READs of large messages that have completed */
    uint32_t n_reads;
    const uint16_t *freed; /* slots of frames, of a pool of which some slots are leaving */
    uint32_t n_freed;
    uint64_t landing; /* bytes of a message for which a landing is wanted; 0: of none */
    uint32_t stage;   /* number of the peer's landing that exceeds the stage; 0: none does */
};

/* How a receive goes on that begins now. */
enum aio_receivable {
    AIO_RECEIVE_MESSAGE, /* the first message can be taken */
    AIO_RECEIVE_WAIT,    /* there is none: the next wakes its task */
    AIO_RECEIVE_PYTHON,  /* Python decides */
};

/*
 * Numbers that may be read, each by a function connection_NAME: X(NAME, where it comes from).  What
 * they mean stands at the members in connection_private.h; the second part is for connection.c,
 * which alone sees them.
 */
#define AIO_CONNECTION_COUNTERS(X)                                                                 \
    X(messages_sent, c->messages_sent)                                                             \
    X(messages_received, c->messages_received)                                                     \
    X(bytes_sent, c->bytes_sent)                                                                   \
    X(bytes_received, c->bytes_received)                                                           \
    X(bytes_read, c->bytes_read)                                                                   \
    X(bytes_written, c->bytes_written)                                                             \
    X(atomics, c->atomics)

#define AIO_CONNECTION_FACTS(X)                                                                    \
    X(arrived, c->tail - c->head - c->inner)                                                       \
    X(bare_size, c->bare_size)                                                                     \
    X(chain, c->chain)                                                                             \
    X(completed, c->completed)                                                                     \
    X(control, c->control)                                                                         \
    X(credits, c->credits)                                                                         \
    X(due, c->due)                                                                                 \
    X(eager_size, c->eager_size)                                                                   \
    X(error, c->error)                                                                             \
    X(flushed, c->flushed)                                                                         \
    X(fragmented_size, c->fragmented_size)                                                         \
    X(gate, c->gate)                                                                               \
    X(granted, c->granted)                                                                         \
    X(most_kept, c->most_kept)                                                                     \
    X(has_pending, (uint32_t)__builtin_popcount(c->controls_pending) + c->dones_pending.tail -     \
                       c->dones_pending.head)                                                      \
    X(kept, c->kept)                                                                               \
    X(inline_size, c->inline_size)                                                                 \
    X(landed_size, c->landings.most)                                                               \
    X(landing, c->landings.newest)                                                                 \
    X(landing_wanted, c->landings.wanted)                                                          \
    X(large, c->large)                                                                             \
    X(large_waiting, c->large_waiting)                                                             \
    X(n_back, c->n_back)                                                                           \
    X(n_control_free, c->n_control_free)                                                           \
    X(n_free, c->n_free)                                                                           \
    X(n_freed, c->n_freed)                                                                         \
    X(n_operations, c->n_operations)                                                               \
    X(n_operations_free, c->n_operations_free)                                                     \
    X(n_revoking, c->n_revoking)                                                                   \
    X(n_unposted, c->n_unposted)                                                                   \
    X(operating, c->operating)                                                                     \
    X(owed, owed_credits(c))                                                                       \
    X(peer_landing, c->stage.number)                                                               \
    X(posted, c->posted)                                                                           \
    X(queued, c->queued)                                                                           \
    X(receives, c->receives)                                                                       \
    X(said, c->said)                                                                               \
    X(sent, c->sent)                                                                               \
    X(to_flush, c->to_flush)                                                                       \
    X(written_size, c->stage.most)                                                                 \
    X(stage_size, c->stage.size)                                                                   \
    X(unused, c->unused)

#define AIO_CONNECTION_FLAGS(X)                                                                    \
    X(alive, c->alive)                                                                             \
    X(asking, c->asking)                                                                           \
    X(grows, c->grows)                                                                             \
    X(knows_peer, c->raw || c->peer_identity || c->ponged)                                         \
    X(listens, c->listens)                                                                         \
    X(may_say, life_rights(c->life)->says)                                                         \
    X(may_send, may_send(c))                                                                       \
    X(numbered, c->numbered)                                                                       \
    X(raw, c->raw)                                                                                 \
    X(recv_failed, c->recv_failed)                                                                 \
    X(requested, c->requested)                                                                     \
    X(slot_awaited, c->slot_awaited)

#define AIO_DECLARE_FACT(name, value) int64_t connection_##name(const struct aio_connection *c);

AIO_CONNECTION_COUNTERS(AIO_DECLARE_FACT)
AIO_CONNECTION_FACTS(AIO_DECLARE_FACT)
AIO_CONNECTION_FLAGS(AIO_DECLARE_FACT)

enum aio_life connection_life(const struct aio_connection *c);
/* Requests that the adapter has; below 0 where an adapter flushes some of them twice. */
int64_t connection_under_way(const struct aio_connection *c);

/* Making a connection, and the handshake.  message_state.c calls these. */

/* Make a connection at `*place`: 0, EINVAL if the sizes do not fit one another, or ENOMEM. */
int connection_new(const struct aio_sizes *sizes, struct aio_connection **place);
/* Free its memory; the queue pair has been told to forget it.  NULL is no connection. */
void connection_free(struct aio_connection *c);
/* Name the queue pair and the memory of the slots: from now on requests are posted. */
void connection_bind(struct aio_connection *c, const struct aio_adapter *adapter);
/* Take the terms of the handshake: from now on the program's messages are sent. */
void connection_agree(struct aio_connection *c, const struct aio_terms *terms);
/* Take no frame before the peer has proved itself: with `proof`, of AIO_PROOF_SIZE bytes, by a
 * greeting with these bytes; with NULL there is no such frame, and `connection_prove` opens. */
void connection_require_proof(struct aio_connection *c, const uint8_t *proof);
/* The peer has proved itself; the greeting of this side, which is the next frame, has `proof`. */
void connection_prove(struct aio_connection *c, const uint8_t *proof);
/* Let an event of its life happen; connection_life.c has the state that follows. */
void connection_advance_life(struct aio_connection *c, enum aio_life_event event);
/* Take a completion: its events, bits of AIO_EVENT_...; AIO_FOR_PYTHON, and nothing has changed. */
int connection_complete(struct aio_connection *c, const struct ibv_wc *wc);

/* Sending a message.  send.c calls these, and line.c for tasks whose turn has come. */

/*
 * Send a message that goes through slots or into the peer's landing: 0 or an errno.  AIO_NO_ROOM:
 * its task waits in line.  AIO_FOR_PYTHON: it is too large, or Python has to look for a slot, to
 * start a timer, or to raise the reason of the end.
 */
int connection_send(struct aio_connection *c, struct aio_bytes data, uint64_t length, int has_imm,
                    uint32_t imm);
/* The same for a task that has just been told of room, before all that wait in line. */
int connection_send_first(struct aio_connection *c, struct aio_bytes data, uint64_t length,
                          int has_imm, uint32_t imm);
/* Send one frame, which lacks nothing: 0 or an errno. */
int connection_send_frame(struct aio_connection *c, enum aio_frame_kind kind, const void *data,
                          uint64_t length, uint64_t argument, int has_imm, uint32_t imm);
/* What the next frame lacks, if it is to be sent now. */
enum aio_lack connection_lacks(const struct aio_connection *c);
/* Slots that a message in fragments lacks; 0 also if it lacks anything else, or goes otherwise. */
uint32_t connection_slots_lacking(const struct aio_connection *c, uint64_t length);
/* A task has joined the line of those that wait to send, or has left it. */
void connection_line_grew(struct aio_connection *c);
void connection_line_shrank(struct aio_connection *c);
/* Whether a timer of Python bounds the waits in line, so that tasks may join it without Python. */
void connection_set_watched(struct aio_connection *c, int watched);
/* For Python: the next message is the first of this side's requests. */
void connection_begin_requests(struct aio_connection *c);
/* For Python: a large message begins to wait for its exchange; it waits no more; it was sent. */
void connection_large_begins(struct aio_connection *c);
void connection_large_ends(struct aio_connection *c);
void connection_count_large_sent(struct aio_connection *c, uint64_t length);

/* The chain: sends that are posted together.  send.c and events.c call these. */

/* Post the chain: 0 or an errno, which ends the connection. */
int connection_post_sends(struct aio_connection *c);
/* After a send: whether the loop is to post the chain at the end of its turn. */
int connection_needs_turn(struct aio_connection *c);
/* The loop is going to, so that sends may wait in the chain until then. */
void connection_expect_turn(struct aio_connection *c);
/* The tasks of the line are being resumed: what they send is posted together. */
void connection_begin_burst(struct aio_connection *c);
/* The events of a drain are about to be delivered; 0: the turn of the loop has ended. */
void connection_begin_delivery(struct aio_connection *c, uint32_t events);
/* They have been delivered: whether the chain has to be posted now. */
int connection_end_delivery(struct aio_connection *c);
/* Keep the errno of a post that has failed, unless there is an earlier one. */
void connection_note_error(struct aio_connection *c, int code);
/* For Python, which waits for the sends up to this number: are completed sends to wake the loop? */
int connection_await_sends(struct aio_connection *c, uint64_t flush_at);

/* Frames without data, and signs of life. */

/* For Python: what ABORT is to take along; no more than AIO_WORDS_SIZE bytes of it. */
void connection_leave_words(struct aio_connection *c, const uint8_t *words, uint64_t size);
/* For Python: send a frame as soon as there is a slot for it: 0 or an errno. */
int connection_send_control(struct aio_connection *c, enum aio_frame_kind kind, uint64_t argument,
                            uint8_t flags);
/* The program waits, or has had its chance to answer: send the credits that are due; as above. */
int connection_send_credits(struct aio_connection *c);
/* Whether a last credit waits for the program's answer to take it along. */
int connection_puts_credit_off(const struct aio_connection *c);
/* For Python: whether the peer has shown life since the last call. */
int connection_was_alive(struct aio_connection *c);
/* For Python: send a PING: 0 or an errno; AIO_NO_ROOM while the last one is not answered. */
int connection_ask_life(struct aio_connection *c);

/* Whose memory a name names: docs/wire.md, "Identity". */

/* For Python: tell the peer the identity of this side, and ask for its own, unless both are done: 0
 * or an errno.  `awaited`: the answer is an AIO_EVENT_FRAMES. */
int connection_ask_identity(struct aio_connection *c, int awaited);
/* For Python: an exposure of this side has ended; the peer is told if it can be: 0 or an errno. */
int connection_revoke(struct aio_connection *c, uint32_t generation);
/* Whether the peer has told that its exposure with this number, which is not 0, has ended. */
int connection_is_revoked(const struct aio_connection *c, uint32_t generation);
/* Whether memory of this owner, and this exposure of it, is the peer's; each 0 if unknown. */
enum aio_admission connection_admission(const struct aio_connection *c, uint64_t owner,
                                        uint64_t generation);

/* Receiving.  receive.c, message_object.c and coroutine.c call these. */

/* Whether Python decides about a receive, whatever has arrived; it says so by the second. */
int connection_is_delegated(const struct aio_connection *c);
void connection_delegate(struct aio_connection *c, int delegated);
/* A receive begins: how it goes on. */
enum aio_receivable connection_begin_receive(struct aio_connection *c);
/* For Python: whether the next message is an event, because a task waits for it. */
void connection_await(struct aio_connection *c, int waiting);
/* The oldest message, or its first fragment; NULL if there is none. */
const struct aio_arrival *connection_first(const struct aio_connection *c);
/* The bytes of the oldest message, which is not large, and the number of its frames. */
uint64_t connection_measure_first(const struct aio_connection *c, uint32_t *frames);
/* Its bytes, if it is a message of one frame, which is not large. */
const char *connection_first_bytes(const struct aio_connection *c);
/* Take it out of the ring, if it is such a message: its slot is the caller's to release. */
uint32_t connection_drop_first(struct aio_connection *c);
/* Take it out of the ring, its bytes staying in its slot: may the program keep it there? */
int connection_take_first(struct aio_connection *c);
/* Take it out of the ring with a copy; its `count` slots are the caller's to release. */
void connection_copy_first(struct aio_connection *c, char *at, uint16_t *slots, uint32_t count);
/* For Python: take the oldest arrival out, whatever it is; or a large message, received. */
void connection_skip_first(struct aio_connection *c);
void connection_take_large(struct aio_connection *c, uint64_t length);
/* Drop the large messages but the oldest `count`, and all arrivals behind them. */
void connection_cut_arrivals(struct aio_connection *c, uint32_t count);
/* Where the bytes in a slot lie until it is released; NULL once the slots may be gone. */
const void *connection_slot_bytes(const struct aio_connection *c, uint32_t slot, int bare);
/* The same, as an offset in the memory of the first slots, or, if `*more`, of the later ones. */
uint64_t connection_slot_offset(const struct aio_connection *c, uint32_t slot, int bare, int *more);
/* The program has one message less that lies in its slot. */
void connection_release_kept(struct aio_connection *c);

/* What the peer says to Python.  receive.c and message_state.c call these. */

/* The oldest announcement that Python has not accepted: 0, AIO_NO_ROOM if there is none, ENOMEM. */
int connection_next_announcement(struct aio_connection *c, uint32_t receives,
                                 struct aio_announcement *announcement);
void connection_accept_announcement(struct aio_connection *c);
/* The argument of a frame without data that the peer has sent, by its kind; 0: it has sent none. */
uint64_t connection_argument(const struct aio_connection *c, enum aio_frame_kind kind);
/* The bytes behind the ABORT of the peer, and how many they are; none before it. */
const uint8_t *connection_words(const struct aio_connection *c, uint8_t *size);
/* What else has come; forget it, when Python has it. */
struct aio_news connection_news(const struct aio_connection *c);
void connection_forget_news(struct aio_connection *c);
/* Take the next DONE; whether there was one. */
int connection_next_done(struct aio_connection *c, uint64_t *number, uint32_t *flags);
/* For Python: from now on notes are kept, because a lease wants them: 0 or ENOMEM. */
int connection_allow_notes(struct aio_connection *c);
/* Take the next note; whether there was one. */
int connection_next_note(struct aio_connection *c, struct aio_note *note);
/* How the peer broke the protocol, and two numbers about it. */
enum aio_violation connection_violation(const struct aio_connection *c, uint64_t *first,
                                        uint64_t *second);

/* Landings, and READs of large messages.  message_state.c calls these for Python. */

/* Offer a landing, in the place of smaller ones: 0 or an errno; EINVAL if its number is not new. */
int connection_offer_landing(struct aio_connection *c, uint32_t number, uint64_t addr,
                             uint32_t key);
/* Name the memory from which messages are written to the peer's landing. */
void connection_set_stage(struct aio_connection *c, uint64_t addr, uint32_t key, uint64_t size);
/* Post a READ of a piece of a large message: 0 or an errno. */
int connection_post_read(struct aio_connection *c, uint32_t number, uint64_t addr, uint32_t length,
                         uint32_t lkey, uint64_t remote_addr, uint32_t rkey);

/* Slots, of a pool or not.  message_state.c calls these for Python, and receive.c the releases. */

/* Post receive slots; without `slots` the first `count`.  0 or an errno. */
int connection_post_receives(struct aio_connection *c, const uint16_t *slots, uint32_t count);
/* Count and post slots that have come, or come back, and those that wait to be posted together, and
 * send due credits.  EINVAL: no such slot. */
int connection_add_receives(struct aio_connection *c, const uint16_t *slots, uint32_t count);
/* A message's slot is free: 0 or an errno; AIO_FOR_PYTHON if Python has to post it. */
int connection_release_slot(struct aio_connection *c, uint32_t slot);
/* The same for the slot of a frame that no program gets. */
int connection_repost_slot(struct aio_connection *c, uint32_t slot);
/* A send slot has come, or is free: 0, or EINVAL if it is none. */
int connection_add_send_slot(struct aio_connection *c, uint32_t slot);
/* Take a send slot away; whether it was free. */
int connection_remove_send_slot(struct aio_connection *c, uint32_t slot);
/* Set the keys of the registrations of later slots; `keys` is the connection's unless ENOMEM. */
int connection_set_keys(struct aio_connection *c, int receives, uint64_t more_addr, uint32_t step,
                        uint32_t *keys, size_t count, int leaving, int full);
/* Fit the window to the number of receive slots. */
void connection_resize(struct aio_connection *c, uint32_t receives, uint32_t answers, int grown);
/* The send slots that are free; their count. */
uint32_t connection_free_slots(const struct aio_connection *c, const uint16_t **slots);
/* Python was given the completion of a receive, or of a send that completed or was flushed. */
void connection_count_returned(struct aio_connection *c, int receive, int flushed);

/* READs, WRITEs and atomics of the program.  operation.c calls these. */

/* Let so many be under way, once: 0, EINVAL or ENOMEM. */
int connection_allow_operations(struct aio_connection *c, uint32_t count);
/* Whether operations may be posted. */
int connection_may_operate(const struct aio_connection *c);
/* The number that an operation would get; AIO_NO_ROOM if none is free, or a task waits for one. */
int connection_peek_number(const struct aio_connection *c);
/* Take a number, or AIO_NO_ROOM; give it back: 0, or EINVAL if there is no such operation. */
int connection_take_number(struct aio_connection *c);
int connection_release_number(struct aio_connection *c, uint32_t number);
/*
 * Post an operation: 0 or an errno.  AIO_NO_ROOM, and nothing is posted, if the frame of a noted
 * WRITE lacks anything.  Such a WRITE completes with its frame.
 */
int connection_post_operation(struct aio_connection *c, const struct aio_operation *operation);
/* Post up to AIO_OPERATION_CHAIN of them with one call: 0 or an errno, and how many were posted. */
int connection_post_operations(struct aio_connection *c, const struct aio_operation *operations,
                               uint32_t count, uint32_t *posted);
/* For Python, which was given the completion of such a frame: the slot that it lay in. */
uint32_t connection_noted_slot(const struct aio_connection *c, uint32_t number);
/* The number of the next that has completed, or AIO_NO_ROOM; then it ends, and is counted. */
int connection_next_completed(struct aio_connection *c);
void connection_end_operation(struct aio_connection *c, uint32_t number);
void connection_count_operation(struct aio_connection *c, enum ibv_wr_opcode opcode,
                                uint64_t length);
/* Forget those that have completed: a forked child has no part in them. */
void connection_forget_completed(struct aio_connection *c);
/* For Python: completed operations wake the loop, so that operations may be posted without it. */
void connection_listen_for_operations(struct aio_connection *c);
/* For Python: whether they need not: since the last call there was none, and none is under way. */
int connection_rest_operations(struct aio_connection *c);
/* For Python: whether a task waits for a number. */
void connection_await_number(struct aio_connection *c, int wanted);
int connection_number_is_awaited(const struct aio_connection *c);
/* Of those that have completed and were not taken, the count; the numbers that are free. */
uint32_t connection_completed_operations(const struct aio_connection *c);
uint32_t connection_free_operations(const struct aio_connection *c, const uint16_t **numbers);

#endif
