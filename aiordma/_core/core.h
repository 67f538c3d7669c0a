/*
 * The module `_core`: the types that Python calls on the data path; see module.c.
 *
 * A type owns its state and shows the fields that Python needs, so that each step is one call, and
 * a field is read without a copy.  Every function holds the interpreter lock.
 *
 * A pointer to memory that is not the object's own, and the reference that keeps the memory alive:
 *
 * - MessageState, queue pair and slots: `memory`, from bind() to close(); later neither is used.
 * - MessageState, bytes of a message: `receiver`.
 * - StreamState, rings and table: `memory`.  Queue pair: none; from close() on it is not used.
 * - Drain, states: `keepers`.  Channel: the CompletionChannel, which sets `stopped` first.
 * - Drain, queues in `pending`: an event that is not acknowledged, which ibv_destroy_cq waits for.
 * - ibv_cq, aio_cq: the CompletionQueue has the QueueState, for good if the queue is not destroyed.
 * - CMEvents, channel: the EventChannel, which calls close() first.
 * - Operation, bytes of the program's buffer: `view`.  Place in `bounce`: `region`, to its end.
 * - Message, bytes: the view in AioBytes.  Loan: the Message, which counts its loans.
 * - MessageState, tasks in line: the line, while they are parked; before, a Waiting leaves it at
 *   its own end.  Waiting, state: none; the line is cleared at the end of the MessageState.
 * - Waiting, bytes: `view`.
 * - Parked, owner: none; the MessageState or StreamState takes it away at its own end.
 * - aio_turn, loop: none; it is compared, inside of one call.
 *
 * tests/unit/core/test_references.py closes each owner first, and calls objects that the cycle
 * collector has cleared.
 */
#ifndef AIORDMA_CORE_H
#define AIORDMA_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "protocol.h"

/* tally.c: a state whose counters are in the sums of the process */
struct aio_counted {
    struct aio_counted *next;
    struct aio_counted **place; /* that leads here; NULL: it is not counted */
    const struct aio_message_state *messages;
    const struct aio_stream_state *stream;
};

void aio_count_in(struct aio_counted *self, const struct aio_message_state *messages,
                  const struct aio_stream_state *stream);
void aio_count_out(struct aio_counted *self);

/* wakeup.c: the awaitable of a task */
enum aio_wakeup_state { AIO_IDLE, AIO_WAITING, AIO_READY, AIO_DONE };

typedef struct {
    PyObject_HEAD
    PyObject *loop;
    PyObject *callback; /* of the task that waits */
    PyObject *context;
    PyObject *error; /* the wait ends with it; NULL: normally */
    PyObject *spin;  /* the Spin with which a wait begins; NULL: by event */
    int64_t since;   /* beginning of the wait, of a Spin */
    char state;
    char blocking;
    char polled; /* the wait counts in its Spin */
} Wakeup;

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
    char *place;       /* in `bounce`; NULL: the bytes are not copied */
    uint32_t position; /* of it, as `bounce_head` counts */
    uint32_t length;
    unsigned char opcode;
} Operation;

/*
 * wakeup.c: the Wakeup of a task that waits for a message, or for bytes of a stream.
 *
 * `take` makes the object with which the wait ends.  It returns None if there is none yet, False if
 * Python has to make it, NULL with an exception; `again`: the task has waited.
 */
typedef struct {
    Wakeup wakeup;
    PyObject *owner; /* NULL once that is gone */
    PyObject *(*take)(PyObject *owner, int again);
    void (*gave_up)(PyObject *owner); /* the wait was broken off; or NULL */
    PyObject *adder;                  /* its add_done_callback, of the owner; NULL if not made */
    char taking;                      /* the wait ends with the object */
} Parked;

struct message_state;

/* waiting.c: the Wakeup of a task that waits to send */
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
} Waiting;

/* message_state.c: a connection's messages and operations */
typedef struct message_state {
    PyObject_HEAD
    struct aio_message_state state;
    unsigned long thread;
    PyObject *receiver; /* takes the rare cases; keeps the memory of received messages alive */
    PyObject *memory;   /* the slots, whose addresses the state has between `bind` and `close` */
    PyObject *group;    /* a bytearray, of which the state sets the first byte; or NULL */
    Parked *parked;
    Waiting *first; /* of the tasks that wait to send, `state.queued` of them */
    Waiting *last;
    PyObject *handler; /* called with the events that are for Python */
    PyObject *room;    /* called when an operation has ended and a task waits for room */
    PyObject *sge;     /* three classes, of which operation.c reads the attributes */
    PyObject *region;
    PyObject *remote;
    PyObject *pd;
    PyObject *known; /* the last RemoteRegion that was used, which never changes, and its numbers */
    uint64_t known_addr;
    uint64_t known_length;
    uint64_t known_rights;
    uint64_t known_rkey;
    PyObject **operations; /* by their numbers, NULL where there was none */
    PyObject *lent;        /* the region of `bounce` */
    PyObject *spin;        /* of the waits for operations: a Spin, or NULL */
    Registration *bounce;  /* a ring, through which the bytes of other buffers are copied */
    uint32_t bounce_head;  /* bytes that were given out; the rest is taken modulo the length */
    uint32_t bounce_tail;  /* those before it are free again, and perhaps more */
    char may_read;         /* initiator_depth is not 0 */
    char soon;             /* the loop resumes the tasks, not the drain: see Drain.soon */
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

/* calls.c: a send or a receive of a connection, as its program awaits it */
enum aio_call { AIO_CALL_SEND, AIO_CALL_RECV, AIO_CALL_NEXT };

typedef struct {
    PyObject_HEAD
    MessageState *state;
    PyObject *connection; /* goes on in Python */
    PyObject *data;       /* to be sent, or NULL */
    PyObject *inner; /* a Parked, a Waiting or a coroutine of Python that it waits on, or NULL */
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
    struct aio_stream_state state;
    PyObject *memory;   /* keeps the rings alive: a kept `write` may have nothing else */
    PyObject *handler;  /* the stream, called with the rare events; None when it is over */
    Parked *parked;     /* of the task that waits for bytes */
    char soon;          /* the loop resumes the task, not the drain: see Drain.soon */
    PyObject *protocol; /* whose data_received is called, or None */
    PyObject *run;      /* Context.run, of the context in which data_received is called */
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

/* A power of two of at least `count`. */
static inline uint32_t aio_power(uint32_t count)
{
    uint32_t power = 1;

    while (power < count)
        power *= 2;
    return power;
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

/* A method that is a function of message.c or stream.c: its result is a number. */
#define AIO_METHOD(type, name, function)                                                           \
    static PyObject *name(PyObject *object, PyObject *Py_UNUSED(unused))                           \
    {                                                                                              \
        return PyLong_FromLongLong(function(&((type *)object)->state));                            \
    }

/* The same of a function with a number. */
#define AIO_METHOD_O(type, name, function)                                                         \
    static PyObject *name(PyObject *object, PyObject *value)                                       \
    {                                                                                              \
        unsigned long number = PyLong_AsUnsignedLong(value);                                       \
                                                                                                   \
        if (PyErr_Occurred())                                                                      \
            return NULL;                                                                           \
        return PyLong_FromLongLong(function(&((type *)object)->state, (uint32_t)number));          \
    }

/* The immediate of an arrival, or None. */
static inline PyObject *aio_imm_object(const struct aio_arrival *arrival)
{
    return arrival->has_imm ? PyLong_FromUnsignedLong(arrival->imm) : Py_NewRef(Py_None);
}

/* clang-format off */

/* The types, which module.c makes, each with its base; a base stands before. */
#define AIO_TYPES(X) \
    X(wakeup, NULL) X(parked, &aio_wakeup_type) X(operation, &aio_wakeup_type) \
    X(waiting, &aio_wakeup_type) X(coroutine, NULL) X(messages, NULL) X(registration, NULL) X(message, NULL) X(loan, NULL) X(held, NULL) \
    X(message_state, NULL) X(stream_state, NULL) X(queue, NULL) X(poller, NULL) \
    X(spin, NULL) X(drain, NULL) X(readable, NULL) X(safety, NULL) X(owner, NULL) X(events, NULL)

/* Names that are looked up often, interned. */
#define AIO_NAMES(X) \
    X(run) X(call_soon) X(context) X(is_running) X(on_arrival) X(slots) X(more_slots) X(_let_go) \
    X(_registration) X(mr) X(offset) X(length) X(addr) X(rkey) X(rights) X(_value_) \
    X(data_received) X(_on_attention) X(_on_events) X(_on_raised) X(value) \
    X(_send_in_python) X(_recv_in_python) X(_next_in_python) X(_left) X(throw) X(close) \
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

extern PyMethodDef aio_alarm_functions[], aio_checksum_functions[], aio_tally_functions[];
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
    own->armed = own->solicited ? 2 : 1;
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

typedef struct {
    PyObject_HEAD
    PyObject *ask; /* called without arguments: has the loop call for a turn; None: no more */
    QueueState *queues[AIO_MOST_POLLED];
    struct ibv_cq *cqs[AIO_MOST_POLLED];
    uint32_t n_queues;
    uint32_t turns;
    uint32_t waiting; /* tasks that are polled for, and protocols of streams, of all Spins */
    int64_t until;    /* end of the spin while there are such */
    char asked;       /* a turn will come, which arms the queues that are not armed */
    char yields;      /* the process has a single processor, which it may share */
    char open;        /* after a turn: the spin goes on */
} Poller;

int64_t aio_clock(void);                                                /* ns */
int aio_poller_add(Poller *self, QueueState *queue, struct ibv_cq *cq); /* whether there is room */
void aio_poller_remove(Poller *self, QueueState *queue);
int aio_poller_ask(Poller *self); /* 0, or -1 with an exception */
int aio_poller_turn(Poller *self, struct ibv_wc *wcs, int most, uint64_t *token);

/* life.c: a method of MessageState */
PyObject *aio_show_life_to(PyObject *object, PyObject *group);

/* drain.c, for safety.c */
PyObject *aio_drain_look(PyObject *drain, struct ibv_cq *cq);

/* spin.c: the waits of a connection that begin with a spin */
int aio_spin_begin(Wakeup *wakeup); /* a task begins to wait: 0, or -1 with an exception */
void aio_spin_end(Wakeup *wakeup, int answered);
int aio_spin_heard(PyObject *spin); /* bytes were given to a protocol: 0, or -1 */

/* message_object.c: those that are used again; its bytes; give a new one a bytes object, which is
 * stolen, as its bytes */
extern AioSpares aio_spare_messages;

const char *aio_message_bytes(Message *self);
void aio_message_own(Message *self, PyObject *bytes);

/* message_tensor.c: __dlpack__ and __dlpack_device__ of a message */
PyObject *aio_message_dlpack(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *aio_message_dlpack_device(PyObject *object, PyObject *unused);

/* wakeup.c, waiting.c: am_send, and for that of a Coroutine */
PySendResult aio_parked_send(PyObject *object, PyObject *value, PyObject **result);
PySendResult aio_waiting_send(PyObject *object, PyObject *value, PyObject **result);

/* wakeup.c: tp_iternext of a type, by its am_send */
PyObject *aio_iterate(PyObject *object, PySendResult (*send)(PyObject *, PyObject *, PyObject **));

/* wakeup.c: the Parked of an owner, or NULL; `take` of a MessageState */
Parked *aio_park(PyObject *loop, PyObject *owner, PyObject *(*take)(PyObject *, int));
void aio_unpark(Parked **place);
int aio_parked_traverse(Parked *parked, visitproc visit, void *arg);
PyObject *aio_take_message(PyObject *owner, int again);

/* waiting.c: the tasks that wait to send, in line */
int aio_may_stand_in_line(const struct aio_message_state *m, uint64_t length);
PyObject *aio_send_in_turn(PyObject *self, PyObject *args);
PyObject *aio_stand_in_line(MessageState *self, enum aio_frame_kind kind, PyObject *data,
                            uint64_t argument, int has_imm, uint32_t imm);
int aio_grant(MessageState *self);
PyObject *aio_end_waits(PyObject *self, PyObject *args);
void aio_waiting_leave(Waiting *self);
int aio_line_traverse(MessageState *self, visitproc visit, void *arg);
void aio_line_clear(MessageState *self);

/* message_state.c: an immediate: 1 with the number, 0 of None, -1 with an exception */
int aio_imm_of(PyObject *object, uint32_t *imm);

/* calls.c: methods of MessageState */
PyObject *aio_sending(PyObject *state, PyObject *const *args, Py_ssize_t count);
PyObject *aio_receiving(PyObject *state, PyObject *connection);
PyObject *aio_iterating(PyObject *state, PyObject *connection);
PyObject *aio_messages(PyObject *state, PyObject *connection);

/*
 * calls.c: send bytes, a bytearray or a Message: 0, an errno, -1 if Python has to do it, or
 * AIO_RAISED; or 0 with a Waiting, whose end is 0 or an errno.  The result of a send, whose chain
 * the loop may have to post.
 */
#define AIO_RAISED (-2)

int aio_send(MessageState *self, PyObject *data, PyObject **waiting);
PyObject *aio_sent(MessageState *self, int code);

/*
 * pieces.c: the bytes of the buffers in a list or tuple.  `open` is 1, 0 if an item is Python's
 * work, or -1 with an exception; only after 1 it has to be closed.
 */
#define AIO_FEW_PIECES 8

struct aio_pieces {
    Py_buffer *views;
    struct aio_piece *pieces;
    Py_ssize_t count;
    uint64_t length; /* of all */
    Py_buffer few_views[AIO_FEW_PIECES];
    struct aio_piece few_pieces[AIO_FEW_PIECES];
};

int aio_is_for_python(PyObject *object, const Py_buffer *view);
int aio_pieces_open(struct aio_pieces *self, PyObject *items);
void aio_pieces_close(struct aio_pieces *self);
struct aio_bytes aio_pieces_bytes(const struct aio_pieces *self);
PyObject *aio_pieces_joined(const struct aio_pieces *self);
PyObject *aio_send_pieces(PyObject *self, PyObject *args);

/* calls.c: take the oldest message, None or NULL; send the credits that are due */
PyObject *aio_take_first(MessageState *self);
int aio_arrivals_join(MessageState *self, Message *message);
PyObject *aio_arrivals_take_into(PyObject *object, PyObject *buffer);
void aio_give_credit(struct aio_message_state *m);

/* arrivals.c: methods of MessageState */
PyObject *aio_arrivals_cut(PyObject *self, PyObject *value);
PyObject *aio_arrivals_next_large(PyObject *self, PyObject *receives);
PyObject *aio_arrivals_next_done(PyObject *self, PyObject *unused);

/* operation.c: methods of MessageState */
PyObject *aio_operate(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operate_copied(PyObject *self, PyObject *args);
PyObject *aio_operation_read(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operation_write(PyObject *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_operation_ended(PyObject *self, PyObject *args);
PyObject *aio_operations_lend(PyObject *self, PyObject *region);
PyObject *aio_operations_allow(PyObject *self, PyObject *depth);
PyObject *aio_operation_take_number(PyObject *self, PyObject *unused);
PyObject *aio_operation_give_number(PyObject *self, PyObject *number);
PyObject *aio_operations_forget_done(PyObject *self, PyObject *unused);

/* operation.c, for message_state.c */
int aio_operations_done(MessageState *self);
void aio_free_operations(MessageState *self);

/* For drain.c: act on the events of a connection, of a stream.  0, or -1. */
int aio_message_events(MessageState *self, uint32_t events, int late);
int aio_stream_events(StreamState *self, uint32_t events);

int aio_is_elsewhere(const MessageState *self); /* not in the connection's loop; or -1 */

/*
 * The turn of a loop in which a Readable was called, for aio_is_elsewhere.  A loop of another
 * thread may overwrite it meanwhile, and erase it: then the loop is asked.
 */
extern struct aio_turn {
    unsigned long thread; /* 0: none */
    PyObject *loop;       /* of the MessageState whose tasks are being resumed; to compare only */
} aio_turn;

#endif
