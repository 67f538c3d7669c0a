/*
 * The module `_core`: the types that Python calls on the data path; see module.c.
 *
 * A type owns its state.  Python reads attributes and gives commands by methods, so that each step
 * is one call.  A connection, a stream or a queue is touched in the thread of its loop; what may be
 * called in any thread, as the release of a Message, looks for the thread first.
 *
 * State is changed with the interpreter lock held.  These release it, for work that takes long, and
 * rely on nothing from before: a turn of a Poller (poller.c), the wait for one (queue.c), the
 * look-up of an address (cm.c), sums and copies of bytes (checksum.c).  So may every function that
 * calls Python, such as the one that resumes a task.
 *
 * A pointer to memory that is not the object's own, and the reference that keeps the memory alive:
 *
 * - MessageState, queue pair and slots: `memory`, from bind() to close(); later neither is used.
 * - MessageState, bytes of a message: `receiver`.
 * - StreamState, rings and table: `memory`.  Queue pair: none; from close() on it is not used.
 * - Drain, entries: `keeper`.  Channel: the CompletionChannel, which sets `stopped` first.
 * - Drain, queues in `pending`: an event that is not acknowledged, which ibv_destroy_cq waits for.
 * - ibv_cq, aio_cq: the CompletionQueue has the QueueState, for good if the queue is not destroyed.
 * - CMEvents, channel: the EventChannel, which calls close() first.
 * - Operation, bytes of the program's buffer: `view`.  Place in `bounce`: `region`, to its end.
 * - Batch, bytes of the program's buffers: `keeper` of the item.
 * - Chain, place in `bounce`: `region`.
 * - Message, bytes: the view in AioBytes.  Loan: the Message, which counts its loans.
 * - MessageState, tasks in line: the line, while they are parked; before, a QueuedSend leaves it at
 *   its own end.  QueuedSend, state: none; the line is cleared at the end of the MessageState.
 * - QueuedSend, bytes: `view`.
 * - MessageState, `into`: the Coroutine, which takes it away when its wait ends.
 * - Call, frame in line: a reference.  It leaves the line when the call ends.
 * - ReceiveWakeup, owner: none; the MessageState or StreamState takes it away at its own end.
 * - aio_turn, loop: none; it is compared, inside one call.
 *
 * tests/unit/core/test_references.py closes each owner first, and calls objects that the cycle
 * collector has cleared.
 */
#ifndef AIORDMA_CORE_H
#define AIORDMA_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "connection.h"
#include "protocol.h"
#include "stream.h"

/* tally.c: a state whose counters are in the sums of the process */
struct aio_counted {
    struct aio_counted *next;
    struct aio_counted **place; /* that leads here; NULL: it is not counted */
    const struct aio_connection *messages;
    const struct aio_stream *stream;
};

void aio_count_in(struct aio_counted *self, const struct aio_connection *messages,
                  const struct aio_stream *stream);
void aio_count_out(struct aio_counted *self);

/* wait.c: the awaitable of a task */
enum aio_wakeup_state { AIO_IDLE, AIO_WAITING, AIO_READY, AIO_DONE };

/* How a wait was broken off by the task: see Wakeup.on_broken_off. */
enum aio_wait_end {
    AIO_WAIT_CANCELED,   /* the loop resumes the task, with an error */
    AIO_WAIT_BROKEN_OFF, /* an exception was thrown in, or the coroutine was closed */
};

typedef struct wakeup {
    PyObject_HEAD
    PyObject *loop;
    PyObject *callback; /* of the task that waits */
    PyObject *context;
    PyObject *error; /* the wait ends with it; NULL: normally */
    PyObject *spin;  /* the Spin with which a wait begins; NULL: by event */
    void (*on_broken_off)(struct wakeup *self, enum aio_wait_end how); /* or NULL */
    int64_t since; /* of a Spin: its beginning */
    char state;
    char blocking;
    char polled; /* the wait counts in its Spin */
} Wakeup;

/* Have the loop call an owner with events; the exception that is set, if any, stays so. */
void aio_call_soon(PyObject *loop, PyObject *owner, uint32_t events);

int aio_wake(Wakeup *self);      /* resume the task now: 1, 0 if none waits, -1 */
int aio_wake_soon(Wakeup *self); /* in the next turn of the loop */
int aio_wake_or_soon(Wakeup *self, int soon);
void aio_wakeup_forget(Wakeup *self);
PyObject *aio_wakeup_await(PyObject *self);
PyObject *aio_wakeup_next(PyObject *self);

/* operation.c: registered memory, and how many operations use it */
typedef struct {
    PyObject_HEAD
    uint64_t addr;
    uint64_t length;
    char *memory; /* the bytes, if what lands there is looked at; or NULL */
    uint32_t lkey;
    uint32_t access;
    uint32_t uses;
    char closing;
    PyObject *pd;
} Registration;

/* operation.c: a READ, WRITE or atomic under way */
typedef struct {
    Wakeup wakeup;
    PyObject *region;           /* the local memory; NULL once it has ended */
    Registration *registration; /* of it, used until then */
    Py_buffer view;             /* of a READ or atomic that is copied: where to */
    char *tail;                 /* the last bytes of what lands, which had `mark`; or NULL */
    uint64_t mark;
    uint64_t before;   /* of an atomic of `change`, once it has succeeded: the integer before */
    char *place;       /* in `bounce`; NULL: the bytes are not copied */
    uint32_t position; /* of it, as `bounce_head` counts */
    uint32_t length;
    unsigned char opcode;
    char changes; /* the wait ends with `before`, or with None if that was lost */
} Operation;

/*
 * wait.c: the Wakeup of a task that waits for a message, or for bytes of a stream; each owner has
 * one, for all its waits.
 *
 * The wait ends with the object that `take` returns.  None says that there is none yet, False that
 * Python has to make it, and NULL is an exception; `again`: the task has waited.
 */
typedef struct {
    Wakeup wakeup;
    PyObject *owner; /* NULL once that is gone */
    PyObject *(*take)(PyObject *owner, int again);
    void (*gave_up)(PyObject *owner); /* the wait was broken off; or NULL */
    PyObject *adder;                  /* its bound add_done_callback; NULL if not made yet */
    char taking;                      /* the wait is for what `take` returns, not for a wake */
} ReceiveWakeup;

/* calls.c: a request of this side that the peer has not answered; what its task waits on */
typedef struct call {
    Wakeup wakeup;
    struct call *next;      /* of those that have ended, and whose tasks are still to be resumed */
    PyObject *message;      /* the answer */
    PyObject *failure;      /* the exception in its place */
    PyObject *instead;      /* called in place of the task; or NULL */
    struct waiting *queued; /* its frame, which waits in line and is not sent; or NULL */
    PyObject *data;         /* the bytes, while it waits for the peer's grant; or NULL */
    uint64_t size;          /* of them */
    double deadline;        /* of the loop's clock */
    double timeout;         /* the seconds that it had */
    uint32_t number;
    char tell;      /* the peer is told the time that is left */
    char admitted;  /* the grant has room for it, and its task is to send it */
    char ended;     /* its task has nothing to wait for any more */
    char abandoned; /* its task has gone, and the final frame has not come */
} Call;

typedef struct call_table CallTable;
typedef struct request_table RequestTable;

struct message_state;

/* line.c: the Wakeup of a task that waits for a slot and a credit, to send */
typedef struct waiting {
    Wakeup wakeup;
    struct message_state *state; /* in whose line it stands; NULL: in none any more */
    struct waiting *before;      /* in the line */
    struct waiting *behind;
    Py_buffer view;    /* the bytes of the message, or of the announcement of a large message */
    uint64_t argument; /* of the frame */
    double since;      /* CLOCK_MONOTONIC */
    uint32_t imm;
    enum aio_frame_kind kind;
    char has_imm;
    char owned; /* the line has a reference: the task is parked */
} QueuedSend;

/* message_state.c: a connection's messages and operations */
typedef struct message_state {
    PyObject_HEAD
    struct aio_connection *connection;
    unsigned long thread;
    PyObject *receiver; /* takes the rare cases; keeps the memory of received messages alive */
    PyObject *memory;   /* the slots, whose addresses the state has between `bind` and `close` */
    ReceiveWakeup *receive_wakeup;
    const Py_buffer *into; /* where its task wants the message; NULL: as an object */
    QueuedSend *first;     /* of the tasks that wait to send */
    QueuedSend *last;
    PyObject *handler;   /* called with the events that are for Python */
    CallTable *requests; /* takes all messages, which are requests and answers; NULL: none are */
    PyObject *room;      /* called when an operation has ended and a task waits for room */
    PyObject *sge;       /* three classes, of which operation.c reads the attributes */
    PyObject *region;
    PyObject *remote;
    PyObject *pd;
    PyObject *known; /* the last RemoteRegion that was used, which never changes, and its numbers */
    uint64_t known_addr;
    uint64_t known_length;
    uint64_t known_rights;
    uint64_t known_rkey;
    uint64_t known_owner;
    uint64_t known_generation;
    uint64_t known_notes;    /* 1: its owner wants notes */
    PyObject **operations;   /* by their numbers, NULL where there was none */
    PyObject **chains;       /* the Chain that has a number; NULL: there was no batch yet */
    PyObject *bounce_region; /* the region of `bounce` */
    PyObject *spin;          /* of the waits for operations: a Spin, or NULL */
    Registration *bounce;    /* a ring, through which the bytes of other buffers are copied */
    uint32_t bounce_head;    /* bytes that were given out; the rest is taken modulo the length */
    uint32_t bounce_tail;    /* those before it are free again, and perhaps more */
    char has_memory; /* large messages are left to the next recv_into: see Receiver.has_memory */
    char may_read;   /* initiator_depth is not 0 */
    char may_change; /* the adapter has atomics */
    char soon;       /* the loop resumes the tasks, not the drain: see Drain.resume_by_loop */
    PyObject *landings[AIO_LANDINGS + 1]; /* objects that keep their memory */
    struct aio_counted counted;
} MessageState;

/* message_object.c: bytes of a buffer, which stays exported */
typedef struct {
    PyObject *view; /* a memoryview or bytes that no other object has; NULL: none are held */
    char *start;
    Py_ssize_t length;
    int readonly;
} AioBytes;

/* message_object.c: the bytes of a message */
typedef struct {
    PyObject_HEAD
    PyObject *keeper; /* a MessageState, or a function, called once, with whether exports are left;
                         NULL after that */
    AioBytes bytes;   /* none in a slot until the program wants them */
    PyObject *imm;
    Py_ssize_t length;
    Py_ssize_t exports; /* to the program */
    Py_ssize_t loans;   /* to the library, for transfers behind a canceled call */
    uint32_t slot;
    char in_slot; /* keeper is MessageState */
    char bare;    /* no header is before it in the slot */
    char kept;    /* counts among those that the program has */
    char over;    /* no further export */
    PyObject *weak;
} Message;

/* coroutine.c: a send, receive or request of a connection, as its program awaits it */
enum aio_call {
    AIO_CALL_SEND,
    AIO_CALL_RECV,
    AIO_CALL_NEXT,
    AIO_CALL_REQUEST,
    AIO_CALL_INTO,
    AIO_CALL_COUNT
};

typedef struct {
    PyObject_HEAD
    MessageState *state;  /* NULL of a request */
    CallTable *table;     /* of a request */
    PyObject *connection; /* goes on in Python; of a request, the owner of the table */
    PyObject *data;       /* to be sent, or where to receive; or NULL */
    PyObject *imm;        /* with it: a number or None; of a request: its seconds, or None */
    PyObject *inner; /* a ReceiveWakeup, a QueuedSend, a Call or a coroutine of Python that it waits
                        on, or NULL */
    Py_buffer into;  /* of recv_into, while it waits in C: the bytes of `data` */
    char tell;       /* of a request: the peer is told the seconds */
    char call;
    char stage;
    char running;
} Coroutine;

typedef struct {
    PyObject_HEAD
    PyObject *state;
    PyObject *connection;
} Messages;

/* stream_state.c: a stream's data and credits */
typedef struct {
    PyObject_HEAD
    struct aio_stream *stream;
    PyObject *memory;      /* keeps the rings alive: a kept `write` may have nothing else */
    PyObject *handler;     /* the stream, called with the rare events; None when it is over */
    ReceiveWakeup *parked; /* of the task that waits for bytes */
    char soon;             /* the loop resumes the task, not the drain: see Drain.resume_by_loop */
    PyObject *protocol;    /* whose data_received is called, or None */
    PyObject *run;         /* Context.run, of the context in which data_received is called */
    PyObject *rest; /* called with data that C cannot send whole, and how many bytes it has sent */
    PyObject *elsewhere;  /* called in another thread than that of the last write */
    unsigned long thread; /* of the last write */
    PyObject *spin;       /* of the waits for bytes: a Spin, or NULL */
    PyObject *separator;  /* which ends the bytes that the task wants, or NULL */
    size_t most;          /* bytes that it wants, without the separator, at most */
    size_t least;         /* and at least */
    struct aio_counted counted;
} StreamState;

/*
 * Make an object and initialize it, for types that are of no use before: they have no tp_init, so
 * that `X.__new__(X)` is a TypeError, and nothing is initialized twice.
 */
static inline PyObject *aio_make(PyTypeObject *type, PyObject *args, PyObject *kwargs,
                                 initproc init)
{
    PyObject *object = PyType_GenericAlloc(type, 0);

    if (object && init(object, args, kwargs)) {
        Py_DECREF(object);
        return NULL;
    }
    return object;
}

/* The end of a tp_dealloc. */
static inline void aio_free(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

/*
 * Objects that have ended, of a type that is made for each message, for those that are made next.
 * So an allocation is not paid for each, nor the collections that many allocations bring about.
 * Under AddressSanitizer there are none: it looks for uses of objects that have ended.
 */
#if defined(__SANITIZE_ADDRESS__)
#define AIO_MOST_SPARE 0
#else
#define AIO_MOST_SPARE 64
#endif

typedef struct {
    uint32_t count;
    PyObject *items[AIO_MOST_SPARE + 1];
} AioSpares;

/* Make an object of a type that the collector knows, all zeros. */
static inline PyObject *aio_make_again(AioSpares *spares, PyTypeObject *type, size_t size)
{
    PyObject *object;

    if (!spares->count)
        return PyType_GenericAlloc(type, 0);
    object = spares->items[--spares->count];
    memset((char *)object + sizeof(PyObject), 0, size - sizeof(PyObject));
    PyObject_GC_Track(object);
    return object;
}

/* The end of a tp_dealloc, of an object that the collector does not know any more. */
static inline void aio_keep_spare(AioSpares *spares, PyObject *object)
{
    if (spares->count < AIO_MOST_SPARE && !PyObject_GC_IsFinalized(object))
        spares->items[spares->count++] =
            Py_NewRef(object); /* from 0 references to that of the list */
    else
        aio_free(object);
}

/* Put a reference that is stolen in the place of another. */
static inline void replace(PyObject **place, PyObject *object)
{
    PyObject *before = *place;

    *place = object;
    Py_XDECREF(before);
}

/* Room for `count` items, zeros; NULL with an exception. */
static inline void *aio_room_for(size_t count, size_t size)
{
    void *memory = PyMem_Calloc(count ? count : 1, size);

    if (!memory)
        PyErr_NoMemory();
    return memory;
}

/* The exception that was raised, which is taken; as PyErr_GetRaisedException of Python 3.12. */
static inline PyObject *aio_raised(void)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback)
        PyException_SetTraceback(value, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return value;
}

/* Call a function, which the call may take away, with events; 0, or -1 with an exception. */
static inline int aio_call_with(PyObject *function, uint32_t events)
{
    PyObject *bits = PyLong_FromUnsignedLong(events), *done;

    Py_INCREF(function);
    done = bits ? PyObject_CallFunctionObjArgs(function, bits, NULL) : NULL;
    Py_DECREF(function);
    Py_XDECREF(bits);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The events with which a state is called; 0, or -1 with an exception. */
static inline int aio_events_of(PyObject *args, PyObject *kwargs, unsigned int *events)
{
    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "a state takes no keywords");
        return -1;
    }
    return PyArg_ParseTuple(args, "I", events) ? 0 : -1;
}

/* clang-format off */

/* The types, which module.c makes, each with its base; a base stands before. */
#define AIO_TYPES(X) \
    X(wakeup, NULL) X(receive_wakeup, &aio_wakeup_type) X(operation, &aio_wakeup_type) \
    X(batch, NULL) X(chain, &aio_wakeup_type) \
    X(queued_send, &aio_wakeup_type) X(call, &aio_wakeup_type) X(call_table, NULL) X(peer_request, NULL) X(request_table, NULL) X(coroutine, NULL) X(messages, NULL) X(registration, NULL) X(message, NULL) X(loan, NULL) X(buffer_export, NULL) \
    X(message_state, NULL) X(stream_state, NULL) X(queue, NULL) X(poller, NULL) \
    X(spin, NULL) X(drain, NULL) X(readable, NULL) X(safety, NULL) X(events, NULL)

/* Names that are looked up often, interned. */
#define AIO_NAMES(X) \
    X(run) X(call_soon) X(context) X(is_running) X(on_arrival) X(slots) X(more_slots) X(_let_go) \
    X(_registration) X(mr) X(notes) X(offset) X(length) X(addr) X(rkey) X(rights) X(_value_) \
    X(owner) X(generation) \
    X(data_received) X(_on_attention) X(_on_events) X(_on_raised) X(value) \
    X(time) X(read_next) X(begin) X(_request_in_python) X(_call_abandoned) \
    X(_send_in_python) X(_recv_in_python) X(_recv_into_in_python) X(_next_in_python) \
    X(_receive_abandoned) X(throw) X(close) \
    X(mask)

/* clang-format on */

#define AIO_DECLARE_TYPE(name, base)                                                               \
    extern PyTypeObject *aio_##name##_type;                                                        \
    extern PyType_Spec aio_##name##_spec;

AIO_TYPES(AIO_DECLARE_TYPE)

#define AIO_DECLARE_NAME(name) PyObject *name;

extern struct aio_names {
    AIO_NAMES(AIO_DECLARE_NAME)
} aio_name;

extern PyMethodDef aio_alarm_functions[], aio_checksum_functions[], aio_tally_functions[],
    aio_operation_functions[];
void aio_prepare_checksum(void);

int aio_prepare_wakeup(void); /* before the first Wakeup: 0, or -1 with an exception */

/* queue.c: the drain's state of a completion queue */
typedef struct {
    PyObject_HEAD
    struct aio_cq cq;
} QueueState;

/*
 * Acknowledge the events that have been dealt with, and `more`.  To acknowledge takes a lock and
 * wakes the thread that destroys the queue, so that the drain puts it off until there are
 * AIO_MOST_UNACKNOWLEDGED.
 */
#define AIO_MOST_UNACKNOWLEDGED 32

static inline void aio_acknowledge(struct ibv_cq *cq, struct aio_cq *own, uint32_t more)
{
    more += own->unacknowledged;
    own->unacknowledged = 0;
    if (more)
        ibv_ack_cq_events(cq, more);
}

/* 0, or the errno of the arming. */
static inline int aio_arm(struct ibv_cq *cq, struct aio_cq *own)
{
    int code = ibv_req_notify_cq(cq, own->solicited);

    own->unarmed = 0;
    own->armed_for_all = !own->solicited;
    return code;
}

/* An event has been dealt with. */
static inline void aio_settle(struct ibv_cq *cq, struct aio_cq *own)
{
    own->unacknowledged++;
    if (own->retired || own->unacknowledged >= AIO_MOST_UNACKNOWLEDGED)
        aio_acknowledge(cq, own, 0);
}

/* queue.c */
int aio_poll_unlocked(struct ibv_cq *cq, struct aio_cq *own, struct ibv_wc *wcs, int most);

/* poller.c: polls the queues of a channel before they are armed */
#define AIO_MOST_POLLED 16

struct aio_polled {
    QueueState *queue;
    struct ibv_cq *cq;
};

typedef struct {
    PyObject_HEAD
    PyObject *ask; /* called without arguments: has the loop call for a turn; NULL: no more */
    struct aio_polled queues[AIO_MOST_POLLED];
    uint32_t n_queues;
    uint32_t turns;
    uint32_t waiting; /* tasks that are polled for, and protocols of streams, of all Spins */
    int64_t until;    /* end of the spin while there are such */
    char asked;       /* a turn will come, which arms the queues that are not armed */
    char yields;      /* as its last Spin says: the process shares its processor */
    char open;        /* after a turn: the spin goes on */
} Poller;

int aio_poller_ask(Poller *self); /* 0, or -1 with an exception */
int aio_poller_turn(Poller *self, struct ibv_wc *wcs, int most, uint64_t *token);

/* drain.c, for safety.c */
PyObject *aio_drain_look(PyObject *drain, struct ibv_cq *cq);

/* poller.c: the waits of a connection that begin with a spin */
int aio_spin_begin(Wakeup *wakeup); /* a task begins to wait: 0, or -1 with an exception */
void aio_spin_end(Wakeup *wakeup, int answered);
int aio_spin_heard(PyObject *spin); /* bytes were given to a protocol: 0, or -1 */

/* message_object.c: those that are used again; its bytes; give a new one a bytes object, which is
 * stolen, as its bytes */
extern AioSpares aio_spare_messages;

const char *aio_message_bytes(Message *self);
void aio_message_own(Message *self, PyObject *bytes);
PyObject *aio_message_copied(const char *bytes, Py_ssize_t length); /* NULL with an exception */

/* message_tensor.c: __dlpack__ and __dlpack_device__ of a message */
PyObject *aio_message_dlpack(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *aio_message_dlpack_device(PyObject *object, PyObject *unused);

/* wait.c, line.c: am_send of ReceiveWakeup and of QueuedSend, which that of a Coroutine calls */
PySendResult aio_receive_wakeup_step(PyObject *object, PyObject *value, PyObject **result);
PySendResult aio_queued_send_step(PyObject *object, PyObject *value, PyObject **result);

/* wait.c: tp_iternext of a type, by its am_send */
PyObject *aio_iterate(PyObject *object, PySendResult (*send)(PyObject *, PyObject *, PyObject **));

/* wait.c: make the ReceiveWakeup of an owner, or NULL with an exception; part from it */
ReceiveWakeup *aio_receive_wakeup_new(PyObject *loop, PyObject *owner,
                                      PyObject *(*take)(PyObject *, int));
void aio_receive_wakeup_part(ReceiveWakeup **place);
int aio_receive_wakeup_traverse(ReceiveWakeup *parked, visitproc visit, void *arg);

/*
 * line.c: the line of the tasks that wait to send.  Join it: a QueuedSend, or NULL.  Resume those
 * for which there is room: 0, or -1.  End the waits that have lasted too long, a method of
 * MessageState.
 */
PyObject *aio_line_join(MessageState *self, enum aio_frame_kind kind, PyObject *data,
                        uint64_t argument, int has_imm, uint32_t imm);
int aio_line_resume(MessageState *self);
PyObject *aio_line_wait_room(PyObject *self, PyObject *unused);
PyObject *aio_line_expire(PyObject *self, PyObject *args);
void aio_line_remove(QueuedSend *self);
void aio_line_leave(QueuedSend *self); /* the same, and the room goes to those behind */
int aio_line_traverse(MessageState *self, visitproc visit, void *arg);
void aio_line_clear(MessageState *self);

/*
 * calls.c: begin a call: AIO_OK with a Call, for which aio_call_step waits; AIO_RAISED, perhaps
 * with one; or a code with which Python goes on.  Act on messages that have arrived, all of which
 * are frames of requests, and resume tasks, now or `soon`: 0, or -1 with an exception.
 */
int aio_call_begin(CallTable *self, PyObject *data, double timeout, int tell, PyObject **begun);
/* The grant has room for a call: it is sent, AIO_OK; AIO_RAISED; or Python sends it, an errno or
 * AIO_NO_ROOM, in the seconds that are left, and before those behind it in line. */
int aio_call_go(CallTable *self, Call *call, double *left);
PySendResult aio_call_step(PyObject *object, PyObject *value, PyObject **result);
int aio_requests_deliver(CallTable *self, int soon);

/*
 * served.c: a request of the peer has come whole, as a Message: AIO_OK; AIO_FOR_PYTHON, and nothing
 * has changed; or AIO_RAISED.
 */
int aio_request_arrived(RequestTable *self, uint32_t number, uint64_t microseconds, PyObject *body);

/* coroutine.c: methods of MessageState */
PyObject *aio_sending(PyObject *state, PyObject *const *args, Py_ssize_t count);
PyObject *aio_receiving(PyObject *state, PyObject *connection);
PyObject *aio_receiving_into(PyObject *state, PyObject *const *args, Py_ssize_t count);
PyObject *aio_messages(PyObject *state, PyObject *connection);

/*
 * send.c: send a buffer, or those of a list or tuple, with an immediate or None: as
 * connection_send. If there is no room, and a place for a QueuedSend is given, the message joins
 * the line: AIO_OK with a QueuedSend there, whose wait ends with 0 or an errno.
 */
int aio_send(MessageState *self, PyObject *data, PyObject *imm, PyObject **waiting);
PyObject *aio_send_method(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_send_first(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_send_each(PyObject *unused, PyObject *const *args, Py_ssize_t count);
PyObject *aio_send_in_turn(PyObject *self, PyObject *args);

/* send.c: for calls.c and served.c */
int aio_send_or_queue(MessageState *self, const struct aio_bytes *frame, uint64_t length,
                      QueuedSend **queued);

/* send.c: an immediate: 1 with the number, 0 of None, AIO_FOR_PYTHON, or AIO_RAISED */
int aio_immediate(PyObject *object, uint32_t *imm);

/* send.c: the code of a send, behind which the loop may have to post the chain; or AIO_RAISED */
int aio_after_send(MessageState *self, int code);
int aio_is_elsewhere(const MessageState *self); /* not in the connection's loop; or -1 */

/*
 * pieces.c: the bytes of an object, or of those in a list or tuple.  They have to be closed if they
 * were opened with AIO_OK, and only then.
 */
#define AIO_FEW_PIECES 8

struct aio_pieces {
    Py_buffer *views;
    struct aio_piece *pieces;
    Py_ssize_t count;   /* of pieces */
    Py_ssize_t exports; /* of views */
    uint64_t length;    /* of all */
    Py_buffer few_views[AIO_FEW_PIECES];
    struct aio_piece few_pieces[AIO_FEW_PIECES];
};

int aio_is_refusal(void);
int aio_is_for_python(PyObject *object, const Py_buffer *view);
int aio_pieces_open(struct aio_pieces *self, PyObject *data);
void aio_pieces_close(struct aio_pieces *self);
struct aio_bytes aio_pieces_bytes(const struct aio_pieces *self);
PyObject *aio_pieces_joined(const struct aio_pieces *self);

/* receive.c: take the oldest message: it, None or NULL; `take` of the ReceiveWakeup of a
 * MessageState */
PyObject *aio_take_first(MessageState *self);
PyObject *aio_take_message(PyObject *owner, int again);
PyObject *aio_imm_object(int has_imm, uint32_t imm);
void aio_release_slot(MessageState *self, uint32_t slot); /* of a message that was copied */

/* receive.c: methods of MessageState */
PyObject *aio_arrivals_take_into(PyObject *object, PyObject *buffer);
PyObject *aio_arrivals_cut(PyObject *self, PyObject *value);
PyObject *aio_arrivals_next_large(PyObject *self, PyObject *receives);
PyObject *aio_arrivals_next_done(PyObject *self, PyObject *unused);

/* operation.c: methods of MessageState */
PyObject *aio_operate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operate_copied(PyObject *self, PyObject *args);
PyObject *aio_operation_read(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operation_write(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operation_fetch_add(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operation_compare_swap(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operations_allow_atomics(PyObject *self, PyObject *unused);
PyObject *aio_operations_set_bounce(PyObject *self, PyObject *region);
PyObject *aio_operations_allow(PyObject *self, PyObject *args);
PyObject *aio_operation_take_number(PyObject *self, PyObject *unused);
PyObject *aio_operation_release_number(PyObject *self, PyObject *number);
PyObject *aio_operations_forget_done(PyObject *self, PyObject *unused);

/* operation.c, for message_state.c */
void aio_free_operations(MessageState *self);

/*
 * operation.c, for batch.c.  One use of a region less: whether the region waits for it.  Read the
 * numbers of a RemoteRegion into `known`: 0, or -1, perhaps with an exception.  Find the registered
 * memory that a region or piece names: its region, whose reference is the caller's, or NULL,
 * perhaps with an exception.  Whether the adapter writes to local memory.  Eight random bytes.
 * End an operation that has succeeded: 0, or -1; and one whose completion went to Python.
 */
int aio_registration_leave(Registration *self);
int aio_remote_admits(MessageState *self, PyObject *remote, uint64_t skip, uint64_t length,
                      uint32_t right);
PyObject *aio_find_registered(const MessageState *self, PyObject *memory,
                              Registration **registration, uint64_t *start, uint64_t *length);
int aio_operation_lands(uint32_t opcode);
uint64_t aio_next_mark(void);
int aio_operation_succeed(MessageState *self, uint32_t number);
PyObject *aio_operation_ended(MessageState *self, uint32_t number, PyObject *error);

/*
 * batch.c: end what has completed, of operations and chains: 0, or -1.  A method of MessageState,
 * by which Python does so.  At the end of a MessageState.
 */
int aio_operations_done(MessageState *self);
PyObject *aio_ended(PyObject *self, PyObject *args);
int aio_chains_traverse(const MessageState *self, visitproc visit, void *arg);
void aio_free_chains(MessageState *self);

/* events.c: act on the events of a connection.  0, or -1 with an exception. */
int aio_message_events(MessageState *self, uint32_t events, int late);

/*
 * How a type of objects takes completions.  drain.c calls these two functions, and knows nothing
 * else of the objects; what it notes about one of them is its own (struct entry).
 */
struct aio_sink {
    /* While a queue is being polled, without Python: the events that the completion brings, as
     * bits, or AIO_FOR_PYTHON, and then nothing has changed. */
    int (*take)(PyObject *object, const struct ibv_wc *wc);
    /* Act on the events of a drain; the loop resumes the tasks, or this does.  0, or -1. */
    int (*deliver)(PyObject *object, uint32_t events, bool by_loop);
};

extern const struct aio_sink aio_message_sink; /* events.c */
extern const struct aio_sink aio_stream_sink;  /* stream_state.c */

/*
 * The turn of a loop in which a Readable was called, for aio_is_elsewhere.  A loop of another
 * thread may overwrite it meanwhile, and erase it: then the loop is asked.
 */
extern struct aio_turn {
    unsigned long thread; /* 0: none */
    PyObject *loop;       /* of the MessageState whose tasks are being resumed; to compare only */
} aio_turn;

#endif
