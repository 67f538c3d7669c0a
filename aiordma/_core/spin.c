/*
 * Spin: how the waits of one connection begin: its completion queue is polled for a bounded time,
 * by the Poller of the channel, before the loop sleeps.
 *
 * A wait is that of a task on a Wakeup.  A stream on which no task has waited has a protocol, which
 * always waits: its spin begins with the bytes that the protocol was given.
 *
 * An adaptive Spin polls only if recent waits were shorter than the bound: it keeps the average of
 * their times, in which a wait weighs an eighth, and counts for two bounds at most.  So a few long
 * waits end the polling, and a few short waits begin it again.
 */
#include "core.h"

#define WEIGHT 8

typedef struct {
    PyObject_HEAD
    PyObject *poller; /* NULL: all waits are by event */
    QueueState *queue;
    int64_t bound;    /* ns */
    int64_t recent;   /* average of the waits, ns */
    int64_t heard;    /* when the protocol was given bytes; 0: never */
    uint32_t waiting; /* as of Poller */
    char adaptive;
    char tasks; /* wait, and not a protocol */
} Spin;

static void count(Spin *self, int change)
{
    self->waiting += (uint32_t)change;
    ((Poller *)self->poller)->waiting += (uint32_t)change;
}

/* A wait has taken so long. */
static void learn(Spin *self, int64_t took)
{
    int64_t most = 2 * self->bound;

    self->recent += ((took < most ? took : most) - self->recent) / WEIGHT;
}

static int is_worth_it(const Spin *self)
{
    return !self->adaptive || self->recent < self->bound;
}

/* Spin from now on: 0, or -1 with an exception. */
static int begin(Spin *self, int64_t now)
{
    Poller *poller = (Poller *)self->poller;

    if (poller->until < now + self->bound)
        poller->until = now + self->bound;
    return aio_poller_ask(poller);
}

int aio_spin_begin(Wakeup *wakeup)
{
    Spin *self = (Spin *)wakeup->spin;

    wakeup->polled = 0;
    if (!self->poller)
        return 0;
    if (self->heard)
        count(self, -1);
    self->heard = 0;
    self->tasks = 1;
    wakeup->since = aio_clock();
    if (!is_worth_it(self))
        return 0;
    if (begin(self, wakeup->since))
        return -1;
    if (self->poller) { /* a handler of a signal may have closed the connection */
        wakeup->polled = 1;
        count(self, 1);
    }
    return 0;
}

void aio_spin_end(Wakeup *wakeup, int answered)
{
    Spin *self = (Spin *)wakeup->spin;

    if (!self->poller)
        return;
    if (wakeup->polled)
        count(self, -1);
    wakeup->polled = 0;
    if (answered && self->adaptive)
        learn(self, aio_clock() - wakeup->since);
}

int aio_spin_heard(PyObject *spin)
{
    Spin *self = (Spin *)spin;
    int64_t now;

    if (!self->poller || self->tasks)
        return 0;
    now = aio_clock();
    if (self->heard)
        learn(self, now - self->heard);
    else
        count(self, 1);
    self->heard = now;
    return is_worth_it(self) ? begin(self, now) : 0;
}

static PyObject *spin_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"poller", "queue", "cq", "bound_ns", "adaptive", NULL};
    unsigned long long cq;
    PyObject *poller, *queue, *object;
    long long bound;
    int adaptive;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!KLp", names, aio_poller_type, &poller,
                                     aio_queue_type, &queue, &cq, &bound, &adaptive))
        return NULL;
    if (bound <= 0 || bound > INT64_C(1) << 60) {
        PyErr_SetString(PyExc_ValueError, "no such bound");
        return NULL;
    }
    object = PyType_GenericAlloc(type, 0);
    if (!object)
        return NULL;
    ((Spin *)object)->bound = ((Spin *)object)->recent = bound;
    ((Spin *)object)->adaptive = (char)adaptive;
    if (aio_poller_add((Poller *)poller, (QueueState *)queue, (struct ibv_cq *)(uintptr_t)cq)) {
        ((Spin *)object)->poller = Py_NewRef(poller);
        ((Spin *)object)->queue = (QueueState *)Py_NewRef(queue);
    }
    return object;
}

static int spin_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Spin *)object)->poller);
    Py_VISIT((PyObject *)((Spin *)object)->queue);
    return 0;
}

/* Also of `close`: all waits are by event from now on. */
static int spin_clear(PyObject *object)
{
    Spin *self = (Spin *)object;
    PyObject *poller = self->poller;
    QueueState *queue = self->queue;

    if (!poller)
        return 0;
    count(self, -(int)self->waiting);
    self->poller = NULL;
    self->queue = NULL;
    aio_poller_remove((Poller *)poller, queue);
    Py_DECREF(poller);
    Py_DECREF((PyObject *)queue);
    return 0;
}

static void spin_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    spin_clear(object);
    aio_free(object);
}

static PyObject *spin_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    spin_clear(object);
    Py_RETURN_NONE;
}

static PyMethodDef spin_methods[] = {
    {"close", spin_close, METH_NOARGS, "All waits are by event from now on."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef spin_members[] = {
    {"bound_ns", T_LONGLONG, offsetof(Spin, bound), READONLY, "Nanoseconds of polling, at most."},
    {"recent_ns", T_LONGLONG, offsetof(Spin, recent), READONLY, "Average of the waits."},
    {"waiting", T_UINT, offsetof(Spin, waiting), READONLY, "Tasks that wait and are polled for."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot spin_slots[] = {
    {Py_tp_new, spin_new},
    {Py_tp_dealloc, spin_dealloc},
    {Py_tp_traverse, spin_traverse},
    {Py_tp_clear, spin_clear},
    {Py_tp_methods, spin_methods},
    {Py_tp_members, spin_members},
    {Py_tp_doc, "How the waits of one connection begin with polling."},
    {0, NULL},
};

PyType_Spec aio_spin_spec = {
    .name = "aiordma._core.Spin",
    .basicsize = sizeof(Spin),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = spin_slots,
};
