/*
 * Fast: the types that Python calls on the data path, compiled into one module, `_fast`.
 *
 * A call by way of cffi takes its arguments apart, gives the interpreter lock away and takes it
 * again, and each field of a struct that is read or set costs as much; a message needs a handful of
 * both.  Here each step is one call.  The work is done by functions of the module that cffi makes;
 * their addresses are handed over, so that libibverbs is bound once.
 */
#ifndef AIORDMA_FAST_H
#define AIORDMA_FAST_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "glue.cdef.h"

/* wakeup.c: what a task waits on */
enum aio_wakeup_state { AIO_IDLE, AIO_WAITING, AIO_READY, AIO_DONE };

typedef struct {
    PyObject_HEAD PyObject *loop;
    PyObject *callback; /* of the task that waits */
    PyObject *context;
    PyObject *error; /* what the wait ends with; NULL: normally */
    char state;
    char blocking;
} Wakeup;

int aio_wake(Wakeup *self);      /* resume the task now: 1, 0 if none waits, -1 */
int aio_wake_soon(Wakeup *self); /* in the next turn of the loop */
void aio_wakeup_forget(Wakeup *self);

/* registration.c: registered memory, and how many operations use it */
typedef struct {
    PyObject_HEAD uint64_t addr;
    uint32_t lkey;
    uint32_t access;
    uint32_t uses;
    char closing;
    const PyObject *pd; /* to compare only; the region keeps it alive */
    PyObject *region;   /* whose this is: a weak reference */
} Registration;

int aio_registration_leave(Registration *self); /* one use less; whether the region waits for it */

/* operation.c: a READ, WRITE or atomic under way */
typedef struct {
    Wakeup wakeup;
    PyObject *region;           /* the local memory; NULL once it has ended */
    Registration *registration; /* of it, used until then */
    uint32_t length;
    unsigned char opcode;
} Operation;

/* mail.c: what a task that waits for a message is parked on */
struct mail;

typedef struct {
    Wakeup wakeup;
    struct mail *mail; /* NULL once that is gone */
    char taking;       /* the wait ends with the message */
} Parked;

/* mail.c: the data path of a connection */
typedef struct mail {
    PyObject_HEAD struct aio_lane *lane; /* kept alive by the link, which the receiver holds */
    int (*send)(struct aio_lane *, const void *, uint64_t);
    int64_t (*next)(struct aio_lane *);
    int (*back)(struct aio_lane *, uint32_t);
    int (*operate)(struct aio_lane *, const struct aio_operation *);
    unsigned long thread;
    PyObject *receiver;
    Parked *parked;
    PyObject *room; /* called when an operation has ended and a task waits for room */
    PyObject *sge;  /* two classes, of which transfer.c reads the attributes */
    PyObject *remote;
    PyObject *pd;
    PyObject *known; /* the last RemoteRegion that was used, which never changes, and its numbers */
    uint64_t known_addr;
    uint64_t known_length;
    uint64_t known_rights;
    uint64_t known_rkey;
    PyObject **operations; /* by their numbers, NULL where there was none */
    uint32_t n_operations;
    char may_read; /* initiator_depth is not 0 */
} Mail;

/* held.c: bytes of a buffer that are held */
typedef struct {
    PyObject *view; /* a memoryview that no other object has; NULL: none are held */
    char *start;
    Py_ssize_t length;
    int readonly;
} AioBytes;

int aio_hold(AioBytes *bytes, PyObject *buffer); /* 0, or -1 */
void aio_let_loose(AioBytes *bytes);
int aio_export(const AioBytes *bytes, PyObject *owner, Py_buffer *view, int flags); /* 0, or -1 */

/* received.c: the bytes of a message */
typedef struct {
    PyObject_HEAD PyObject *keeper; /* Mail, or a function that is told whether there are exports
                                     * left; NULL once it was */
    AioBytes bytes;                 /* none in a slot until the program wants them */
    PyObject *imm;
    Py_ssize_t length;
    Py_ssize_t exports; /* to the program */
    Py_ssize_t loans;   /* to the library, for what goes on behind a canceled call */
    uint32_t slot;
    char in_slot; /* keeper is Mail */
    char kept;    /* counts among those that the program has */
    char over;    /* no further export */
    PyObject *weak;
} Message;

/* stream_calls.c: the data path of a stream */
typedef struct {
    PyObject_HEAD struct aio_stream *stream; /* in `memory` */
    ssize_t (*write)(struct aio_stream *s, const void *data, size_t size);
    uint32_t (*read)(struct aio_stream *s, void *into, size_t size);
    PyObject *memory; /* keeps the stream alive: a kept `write` may have nothing else */
    PyObject *attention;
    Wakeup *wakeup;     /* of the task that waits for bytes */
    PyObject *protocol; /* whose data_received is called, or None */
    PyObject *run;      /* of the context in which it is called */
    PyObject *other;    /* called with the news that are not plain */
    PyObject *failed;   /* called with what data_received raised */
    PyObject *rest;     /* called with data that were not plain, and how many bytes have gone */
    PyObject *elsewhere;  /* called in another thread than that of the last write */
    unsigned long thread; /* of the last write */
} StreamCalls;

int aio_stream_news(StreamCalls *self, uint32_t news); /* 0, or -1 */

/* What a weak reference leads to, None if that is gone; a new reference, or NULL. */
static inline PyObject *aio_alive(PyObject *weak)
{
    return PyObject_CallNoArgs(weak);
}

/*
 * Make an object and initialize it, for types that are of no use before: they have no tp_init, so
 * that `X.__new__(X)` is a TypeError, and nothing is initialized twice.
 */
static inline PyObject *aio_make(PyTypeObject *type, PyObject *args, PyObject *kwargs,
                                 initproc init)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = allocate(type, 0);

    if (object && init(object, args, kwargs)) {
        Py_DECREF(object);
        return NULL;
    }
    return object;
}

/* Put a reference that is stolen in the place of another. */
static inline void replace(PyObject **place, PyObject *object)
{
    PyObject *before = *place;

    *place = object;
    Py_XDECREF(before);
}

/* Each adds its types to the module: 0, or -1 with an exception. */
int aio_add_alarm(PyObject *module);
int aio_add_wakeup(PyObject *module);
int aio_add_registration(PyObject *module);
int aio_add_cm_events(PyObject *module);
int aio_add_operation(PyObject *module);
int aio_add_owner(PyObject *module);
int aio_add_transfer(PyObject *module);
int aio_add_held(PyObject *module);
int aio_add_message(PyObject *module);
int aio_add_mail(PyObject *module);
int aio_add_reader(PyObject *module);
int aio_add_stream_calls(PyObject *module);

/* Add one type, made from `spec` and perhaps a base; a borrowed reference, or NULL. */
PyTypeObject *aio_add_type(PyObject *module, PyType_Spec *spec, PyTypeObject *base);

extern PyTypeObject *aio_mail_type, *aio_message_type, *aio_stream_calls_type, *aio_wakeup_type,
    *aio_registration_type, *aio_operation_type;

PyObject *aio_wakeup_await(PyObject *self);
PyObject *aio_wakeup_next(PyObject *self);

/* operation.c, for mail.c and transfer.c */
PyObject *aio_post(Mail *self, long number, struct aio_operation *request,
                   Registration *registration);
PyObject *aio_post_operation(Mail *self, PyObject *const *args, Py_ssize_t count);
PyObject *aio_end_operation(Mail *self, PyObject *args);
int aio_operations_done(Mail *self);
void aio_free_operations(Mail *self);

/* mail.c, for reader.c: 0, or -1 */
int aio_mail_news(Mail *self, uint32_t news);
int aio_is_elsewhere(const Mail *self); /* not in the connection's loop */

/*
 * The turn of a loop in which a Readable was called, for aio_is_elsewhere.  A loop of another
 * thread may overwrite it meanwhile, and erase it: then the loop is asked.
 */
extern struct aio_turn {
    unsigned long thread; /* 0: none */
    PyObject *loop;       /* of the Mail whose tasks are being resumed; to compare only */
} aio_turn;

/* transfer.c, for mail.c */
PyObject *aio_transfer(Mail *self, PyObject *const *args, Py_ssize_t count,
                       enum ibv_wr_opcode opcode);

#endif
