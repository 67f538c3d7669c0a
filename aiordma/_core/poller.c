/*
 * Waits that begin with polling: Poller polls the completion queues of a channel for a bounded
 * time, before they are armed and the loop sleeps; Spin is how the waits of one connection begin.
 *
 * A wait is that of a task on a Wakeup.  A stream on which no task has waited has a protocol, which
 * always waits: its spin begins with the bytes that the protocol was given.  An adaptive Spin polls
 * only if recent waits were shorter than the bound: it keeps the average of their times, in which a
 * wait weighs an eighth, and counts for two bounds at most.  So a few long waits end the polling,
 * and a few short waits begin it again.
 *
 * A spin goes on in turns: functions that the loop is asked to call.  So the callbacks that are
 * ready when the spin begins go first, and a callback that gets ready meanwhile waits for one turn
 * at most.  A turn ends with the first completions, with the end of the spin, or after SLICE_NS.
 *
 * While a turn is to come (`asked`), the drain leaves the events of these queues without an arming.
 * The last turn, which has found nothing and is past the end of the spin, arms the queues and polls
 * them once more; a turn that has found completions is never the last.  So no wake-up is lost.
 *
 * The interpreter lock is not held while a turn polls.  See aio_poll_unlocked (queue.c) for a queue
 * that another thread destroys meanwhile.
 */
#include "core.h"

#include <sched.h>
#include <time.h>

#define SLICE_NS INT64_C(50000)
#define WEIGHT   8

typedef struct {
    PyObject_HEAD
    Poller *poller; /* NULL: all waits are by event */
    QueueState *queue;
    int64_t bound;    /* ns */
    int64_t recent;   /* average of the waits, ns */
    int64_t heard;    /* when the protocol was given bytes; 0: never */
    uint32_t waiting; /* as of Poller */
    char adaptive;
    char tasks; /* wait, and not a protocol */
} Spin;

static int64_t clock_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Poller */

/* Forget the queues that no Spin has any more; all are armed. */
static void poller_forget_unused(Poller *self)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < self->n_queues; i++) {
        struct aio_polled each = self->queues[i];

        if (each.queue->cq.spins)
            self->queues[kept++] = each;
        else
            Py_DECREF((PyObject *)each.queue);
    }
    self->n_queues = kept;
}

/* Have the loop call for a turn: 0, or -1 with an exception, which is a signal's handler's. */
int aio_poller_ask(Poller *self)
{
    PyObject *handle, *type, *value, *traceback;

    if (self->asked || !self->ask)
        return 0;
    handle = PyObject_CallNoArgs(self->ask);
    if (!handle && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* the loop is closed */
        return 0;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (!handle) /* once more, because only a turn arms the queues */
        handle = PyObject_CallNoArgs(self->ask);
    self->asked = handle != NULL;
    Py_XDECREF(handle);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return PyErr_Occurred() ? -1 : 0;
}

/* The queues of a turn: other threads may remove queues from the Poller meanwhile. */
struct turn {
    struct aio_polled queues[AIO_MOST_POLLED];
    uint32_t n_queues;
    uint32_t first; /* another queue in each turn, so that none holds up the others */
};

/* As ibv_poll_cq, of the first queue that has completions, whose token is returned, too. */
static int turn_poll(const struct turn *turn, struct ibv_wc *wcs, int most, uint64_t *token)
{
    int got = 0;

    for (uint32_t n = 0; !got && n < turn->n_queues; n++) {
        struct aio_polled each = turn->queues[(turn->first + n) % turn->n_queues];

        *token = each.queue->cq.token;
        got = aio_poll_unlocked(each.cq, &each.queue->cq, wcs, most);
    }
    return got;
}

/* The spin is over: arm the queues, and poll them for completions from before the arming. */
static int turn_end_spin(const struct turn *turn, struct ibv_wc *wcs, int most, uint64_t *token)
{
    for (uint32_t i = 0; i < turn->n_queues; i++) {
        struct aio_cq *own = &turn->queues[i].queue->cq;

        if (own->unarmed && !own->pending && !own->retired && aio_arm(turn->queues[i].cq, own))
            return -1;
    }
    return turn_poll(turn, wcs, most, token);
}

/*
 * One turn.  Completions of one queue, as ibv_poll_cq, and its token; `open`: the spin goes on.  If
 * there are completions, or the spin goes on, the caller asks for another turn.
 */
int aio_poller_turn(Poller *self, struct ibv_wc *wcs, int most, uint64_t *token)
{
    struct turn turn = {.n_queues = self->n_queues, .first = self->turns++};
    int64_t now = clock_ns(), end = self->waiting ? self->until : 0;
    int got, yields = self->yields;

    memcpy(turn.queues, self->queues, sizeof(turn.queues));
    for (uint32_t i = 0; i < turn.n_queues; i++)
        Py_INCREF((PyObject *)turn.queues[i].queue);
    if (end > now + SLICE_NS)
        end = now + SLICE_NS;
    Py_BEGIN_ALLOW_THREADS
    while (!(got = turn_poll(&turn, wcs, most, token)) && now < end) {
        if (yields)
            sched_yield();
        now = clock_ns();
    }
    Py_END_ALLOW_THREADS
    self->open = self->waiting && now < self->until;
    self->asked = 0;
    if (!got && !self->open) {
        got = turn_end_spin(&turn, wcs, most, token);
        if (!got)
            poller_forget_unused(self);
    }
    for (uint32_t i = 0; i < turn.n_queues; i++)
        Py_DECREF((PyObject *)turn.queues[i].queue);
    return got;
}

static PyObject *poller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ask", NULL};
    PyObject *ask, *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &ask))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (object)
        ((Poller *)object)->ask = Py_NewRef(ask);
    return object;
}

static int poller_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Poller *)object)->ask);
    return 0;
}

static int poller_clear(PyObject *object)
{
    Py_CLEAR(((Poller *)object)->ask);
    return 0;
}

static PyObject *poller_stop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    poller_clear(object);
    Py_RETURN_NONE;
}

static void poller_dealloc(PyObject *object)
{
    Poller *self = (Poller *)object;

    PyObject_GC_UnTrack(object);
    poller_clear(object);
    for (uint32_t i = 0; i < self->n_queues; i++)
        Py_DECREF((PyObject *)self->queues[i].queue);
    aio_free(object);
}

static PyMethodDef poller_methods[] = {
    {"stop", poller_stop, METH_NOARGS, "Ask the loop for no more turns."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef poller_members[] = {
    {"asked", T_BOOL, offsetof(Poller, asked), READONLY, "Whether a turn is to come."},
    {"yields", T_BOOL, offsetof(Poller, yields), READONLY,
     "Whether other processes get the processor between two polls."},
    {"waiting", T_UINT, offsetof(Poller, waiting), READONLY, "Tasks that wait with a Spin."},
    {"n_queues", T_UINT, offsetof(Poller, n_queues), READONLY, "Queues that it polls."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot poller_slots[] = {
    {Py_tp_new, poller_new},
    {Py_tp_dealloc, poller_dealloc},
    {Py_tp_traverse, poller_traverse},
    {Py_tp_clear, poller_clear},
    {Py_tp_methods, poller_methods},
    {Py_tp_members, poller_members},
    {Py_tp_doc, "Polls the queues of a channel before they are armed."},
    {0, NULL},
};

PyType_Spec aio_poller_spec = {
    .name = "aiordma._core.Poller",
    .basicsize = sizeof(Poller),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = poller_slots,
};

/* Spin */

static void spin_count(Spin *self, int change)
{
    self->waiting += (uint32_t)change;
    self->poller->waiting += (uint32_t)change;
}

/* A wait has taken so long. */
static void spin_learn(Spin *self, int64_t took)
{
    int64_t most = 2 * self->bound;

    self->recent += ((took < most ? took : most) - self->recent) / WEIGHT;
}

/* Poll from now on, if it is worth it: 1, 0, or -1 with an exception. */
static int spin_poll(Spin *self, int64_t now)
{
    if (self->adaptive && self->recent >= self->bound)
        return 0;
    if (self->poller->until < now + self->bound)
        self->poller->until = now + self->bound;
    return aio_poller_ask(self->poller) ? -1 : 1;
}

int aio_spin_begin(Wakeup *wakeup)
{
    Spin *self = (Spin *)wakeup->spin;
    int polls;

    wakeup->polled = 0;
    if (!self->poller)
        return 0;
    if (self->heard)
        spin_count(self, -1);
    self->heard = 0;
    self->tasks = 1;
    wakeup->since = clock_ns();
    polls = spin_poll(self, wakeup->since);
    if (polls > 0 && self->poller) { /* a handler of a signal may have closed the connection */
        wakeup->polled = 1;
        spin_count(self, 1);
    }
    return polls < 0 ? -1 : 0;
}

void aio_spin_end(Wakeup *wakeup, int answered)
{
    Spin *self = (Spin *)wakeup->spin;

    if (!self->poller)
        return;
    if (wakeup->polled)
        spin_count(self, -1);
    wakeup->polled = 0;
    if (answered && self->adaptive)
        spin_learn(self, clock_ns() - wakeup->since);
}

int aio_spin_heard(PyObject *spin)
{
    Spin *self = (Spin *)spin;
    int64_t now;

    if (!self->poller || self->tasks)
        return 0;
    now = clock_ns();
    if (self->heard)
        spin_learn(self, now - self->heard);
    else
        spin_count(self, 1);
    self->heard = now;
    return spin_poll(self, now) < 0 ? -1 : 0;
}

/* Have the Poller poll a queue, if it has room for it. */
static void spin_add_queue(Spin *self, Poller *poller, QueueState *queue, struct ibv_cq *cq)
{
    uint32_t i = 0;

    while (i < poller->n_queues && poller->queues[i].queue != queue)
        i++;
    if (i == AIO_MOST_POLLED)
        return;
    if (i == poller->n_queues)
        poller->queues[poller->n_queues++] =
            (struct aio_polled){(QueueState *)Py_NewRef((PyObject *)queue), cq};
    queue->cq.spins++;
    self->poller = (Poller *)Py_NewRef((PyObject *)poller);
    self->queue = (QueueState *)Py_NewRef((PyObject *)queue);
}

static PyObject *spin_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"poller", "queue", "cq", "bound_ns", "adaptive", "yields", NULL};
    unsigned long long cq;
    PyObject *poller, *queue, *object;
    long long bound;
    int adaptive, yields;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!KLpp", names, aio_poller_type, &poller,
                                     aio_queue_type, &queue, &cq, &bound, &adaptive, &yields))
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
    ((Poller *)poller)->yields = (char)yields;
    spin_add_queue((Spin *)object, (Poller *)poller, (QueueState *)queue,
                   (struct ibv_cq *)(uintptr_t)cq);
    return object;
}

static int spin_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)((Spin *)object)->poller);
    Py_VISIT((PyObject *)((Spin *)object)->queue);
    return 0;
}

/* Also of `close`, in any thread.  If a turn is to come, it may have to arm the queue. */
static int spin_clear(PyObject *object)
{
    Spin *self = (Spin *)object;
    Poller *poller = self->poller;
    QueueState *queue = self->queue;

    if (!poller)
        return 0;
    spin_count(self, -(int)self->waiting);
    self->poller = NULL;
    self->queue = NULL;
    queue->cq.spins--;
    if (!poller->asked)
        poller_forget_unused(poller);
    Py_DECREF((PyObject *)poller);
    Py_DECREF((PyObject *)queue);
    return 0;
}

static PyObject *spin_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    spin_clear(object);
    Py_RETURN_NONE;
}

static void spin_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    spin_clear(object);
    aio_free(object);
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
