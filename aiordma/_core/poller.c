/*
 * Poller: polls the completion queues of a channel for a bounded time, before they are armed and
 * the loop sleeps.
 *
 * A spin begins when a task begins to wait (spin.c), and goes on in turns: functions that the loop
 * is asked to call.  So the callbacks that are ready when the spin begins go first, and a callback
 * that gets ready meanwhile waits for one turn at most.  A turn ends with the first completions,
 * with the end of the spin, or after SLICE.
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

#define SLICE INT64_C(50000) /* ns */

int64_t aio_clock(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Have a queue polled, for one Spin more; whether there is room. */
int aio_poller_add(Poller *self, QueueState *queue, struct ibv_cq *cq)
{
    uint32_t i = 0;

    while (i < self->n_queues && self->queues[i] != queue)
        i++;
    if (i == AIO_MOST_POLLED)
        return 0;
    if (i == self->n_queues) {
        self->cqs[i] = cq;
        self->queues[i] = (QueueState *)Py_NewRef((PyObject *)queue);
        self->n_queues++;
    }
    queue->cq.spins++;
    return 1;
}

/* Forget the queues that no Spin has any more; all are armed. */
static void forget_unused(Poller *self)
{
    uint32_t kept = 0;

    for (uint32_t i = 0; i < self->n_queues; i++) {
        QueueState *queue = self->queues[i];

        if (queue->cq.spins) {
            self->cqs[kept] = self->cqs[i];
            self->queues[kept++] = queue;
        } else {
            Py_DECREF((PyObject *)queue);
        }
    }
    self->n_queues = kept;
}

/* A queue has one Spin less, in any thread.  If a turn is to come, it may have to arm the queue. */
void aio_poller_remove(Poller *self, QueueState *queue)
{
    queue->cq.spins--;
    if (!self->asked)
        forget_unused(self);
}

/* Have the loop call for a turn: 0, or -1 with an exception, which is a signal's handler's. */
int aio_poller_ask(Poller *self)
{
    PyObject *handle, *type, *value, *traceback;

    if (self->asked || !self->ask || self->ask == Py_None)
        return 0;
    handle = PyObject_CallNoArgs(self->ask);
    if (!handle && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* the loop is closed */
        return 0;
    }
    PyErr_Fetch(&type, &value, &traceback);
    if (!handle) /* for once more, because only a turn arms the queues */
        handle = PyObject_CallNoArgs(self->ask);
    self->asked = handle != NULL;
    Py_XDECREF(handle);
    PyErr_Clear();
    PyErr_Restore(type, value, traceback);
    return PyErr_Occurred() ? -1 : 0;
}

/* The queues of a turn: other threads may remove queues from the Poller meanwhile. */
struct polled {
    QueueState *queues[AIO_MOST_POLLED];
    struct ibv_cq *cqs[AIO_MOST_POLLED];
    uint32_t n_queues;
    uint32_t first; /* another queue in each turn, so that none holds up the others */
};

/* As ibv_poll_cq, of the first queue that has completions, whose token is returned, too. */
static int poll_all(const struct polled *polled, struct ibv_wc *wcs, int most, uint64_t *token)
{
    int got = 0;

    for (uint32_t n = 0; !got && n < polled->n_queues; n++) {
        uint32_t i = (polled->first + n) % polled->n_queues;

        *token = polled->queues[i]->cq.token;
        got = aio_poll_unlocked(polled->cqs[i], &polled->queues[i]->cq, wcs, most);
    }
    return got;
}

/* The spin is over: arm the queues, and poll them for completions from before the arming. */
static int end_spin(struct polled *polled, struct ibv_wc *wcs, int most, uint64_t *token)
{
    for (uint32_t i = 0; i < polled->n_queues; i++) {
        struct aio_cq *own = &polled->queues[i]->cq;

        if (own->unarmed && !own->pending && !own->retired && aio_arm(polled->cqs[i], own))
            return -1;
    }
    return poll_all(polled, wcs, most, token);
}

/*
 * One turn.  Completions of one queue, as ibv_poll_cq, and its token; `open`: the spin goes on.  If
 * there are completions, or the spin goes on, the caller asks for another turn.
 */
int aio_poller_turn(Poller *self, struct ibv_wc *wcs, int most, uint64_t *token)
{
    struct polled polled = {.n_queues = self->n_queues, .first = self->turns++};
    int64_t end = self->waiting ? self->until : 0, now = aio_clock();
    int got, yields = self->yields;

    for (uint32_t i = 0; i < polled.n_queues; i++) {
        polled.cqs[i] = self->cqs[i];
        polled.queues[i] = (QueueState *)Py_NewRef((PyObject *)self->queues[i]);
    }
    if (end > now + SLICE)
        end = now + SLICE;
    Py_BEGIN_ALLOW_THREADS
    while (!(got = poll_all(&polled, wcs, most, token)) && now < end) {
        if (yields)
            sched_yield();
        now = aio_clock();
    }
    Py_END_ALLOW_THREADS
    self->open = self->waiting && now < self->until;
    self->asked = 0;
    if (!got && !self->open) {
        got = end_spin(&polled, wcs, most, token);
        if (!got)
            forget_unused(self);
    }
    for (uint32_t i = 0; i < polled.n_queues; i++)
        Py_DECREF((PyObject *)polled.queues[i]);
    return got;
}

static PyObject *poller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ask", "yields", NULL};
    PyObject *ask, *object;
    int yields;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Op", names, &ask, &yields))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (object) {
        ((Poller *)object)->ask = Py_NewRef(ask);
        ((Poller *)object)->yields = (char)yields;
    }
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

static void poller_dealloc(PyObject *object)
{
    Poller *self = (Poller *)object;

    PyObject_GC_UnTrack(object);
    poller_clear(object);
    for (uint32_t i = 0; i < self->n_queues; i++)
        Py_DECREF((PyObject *)self->queues[i]);
    aio_free(object);
}

static PyMemberDef poller_members[] = {
    {"ask", T_OBJECT, offsetof(Poller, ask), 0, "Has the loop call for a turn; None: no more."},
    {"asked", T_BOOL, offsetof(Poller, asked), READONLY, "Whether a turn is to come."},
    {"yields", T_BOOL, offsetof(Poller, yields), 0,
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
