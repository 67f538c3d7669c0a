/*
 * QueueState: the drain's state of a completion queue.
 *
 * It is changed with the interpreter lock held.  A Poller polls the queue without the lock, and
 * sets `polled` meanwhile (poller.c).
 */
#include "core.h"

#include <sched.h>

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"token", NULL};
    unsigned long long token;
    PyObject *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K", names, &token))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (object)
        ((QueueState *)object)->cq.token = token;
    return object;
}

static PyObject *queue_get_address(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromVoidPtr(&((QueueState *)object)->cq);
}

/*
 * Poll a queue without the interpreter lock, in another thread than the thread that may destroy it:
 * as ibv_poll_cq.  Either this function sees that the queue is retired, or queue_retire sees that
 * it is being polled, and waits for it.
 */
int aio_poll_unlocked(struct ibv_cq *cq, struct aio_cq *own, struct ibv_wc *wcs, int most)
{
    int got = 0;

    __atomic_store_n(&own->polled, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&own->retired, __ATOMIC_SEQ_CST))
        got = ibv_poll_cq(cq, most, wcs);
    __atomic_store_n(&own->polled, 0, __ATOMIC_SEQ_CST);
    return got;
}

/* The queue is retired: wait until no thread polls it, which takes the time of one poll. */
static void wait_polled(struct aio_cq *own)
{
    if (!__atomic_load_n(&own->polled, __ATOMIC_SEQ_CST))
        return;
    Py_BEGIN_ALLOW_THREADS
    while (__atomic_load_n(&own->polled, __ATOMIC_SEQ_CST))
        sched_yield();
    Py_END_ALLOW_THREADS
}

/*
 * retire(address): called before ibv_destroy_cq, in any thread. From now on the drain neither arms
 * nor polls the queue, and acknowledges each event at once.
 *
 * Before it begins, and not when it returns: the queue is not to be touched while it runs, which
 * may take until each event is acknowledged.
 */
static PyObject *queue_retire(PyObject *object, PyObject *address)
{
    struct aio_cq *own = &((QueueState *)object)->cq;
    struct ibv_cq *cq = PyLong_AsVoidPtr(address);

    if (!cq && PyErr_Occurred())
        return NULL;
    __atomic_store_n(&own->retired, 1, __ATOMIC_SEQ_CST);
    wait_polled(own);
    aio_acknowledge(cq, own, 0);
    Py_RETURN_NONE;
}

/*
 * manage(solicited_only): the drain arms and polls the queue from now on, and the caller arms it
 * first, as is returned: for solicited completions only, or for all.
 */
static PyObject *queue_manage(PyObject *object, PyObject *value)
{
    struct aio_cq *own = &((QueueState *)object)->cq;
    int solicited = PyObject_IsTrue(value);

    if (solicited < 0)
        return NULL;
    own->managed = 1;
    own->solicited = solicited && !own->listeners;
    own->armed_for_all = !own->solicited;
    return PyBool_FromLong(own->solicited);
}

static PyObject *queue_listen(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_cq *own = &((QueueState *)object)->cq;

    own->listeners++;
    own->solicited = 0;
    Py_RETURN_NONE;
}

static PyObject *queue_unlisten(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_cq *own = &((QueueState *)object)->cq;

    own->listeners--;
    own->solicited = !own->listeners;
    Py_RETURN_NONE;
}

static PyObject *queue_want_arm_late(PyObject *object, PyObject *change)
{
    long by = PyLong_AsLong(change);

    if (PyErr_Occurred())
        return NULL;
    ((QueueState *)object)->cq.arm_late += (int)by;
    Py_RETURN_NONE;
}

static PyObject *queue_note_arming(PyObject *object, PyObject *value)
{
    int for_all = PyObject_IsTrue(value);

    if (for_all < 0)
        return NULL;
    ((QueueState *)object)->cq.armed_for_all = for_all;
    Py_RETURN_NONE;
}

static PyMethodDef queue_methods[] = {
    {"manage", queue_manage, METH_O,
     "The drain arms and polls it from now on; whether for solicited completions only."},
    {"listen", queue_listen, METH_NOARGS, "One object more is to be woken by every completion."},
    {"unlisten", queue_unlisten, METH_NOARGS, "One object less."},
    {"want_arm_late", queue_want_arm_late, METH_O,
     "So many objects more want it armed only when it is empty; fewer, if negative."},
    {"note_arming", queue_note_arming, METH_O,
     "Python has armed it: for all completions, or for solicited ones only."},
    {"retire", queue_retire, METH_O, "Before the queue with this address is destroyed."},
    {NULL, NULL, 0, NULL},
};

#define QUEUE_FIELD(name, type, flags, doc) {#name, type, offsetof(QueueState, cq.name), flags, doc}

static PyMemberDef queue_members[] = {
    QUEUE_FIELD(token, T_ULONGLONG, READONLY, "Its number in tables."),
    QUEUE_FIELD(managed, T_INT, READONLY, "Whether the drain arms and polls it."),
    QUEUE_FIELD(solicited, T_INT, READONLY, "Whether it is armed for solicited completions only."),
    QUEUE_FIELD(armed_for_all, T_INT, READONLY, "Whether it was armed last for all completions."),
    QUEUE_FIELD(listeners, T_INT, READONLY, "Objects to be woken by every completion."),
    QUEUE_FIELD(arm_late, T_INT, READONLY, "Objects that want it armed when it is empty only."),
    QUEUE_FIELD(spins, T_INT, READONLY, "Spins that poll it before it is armed."),
    QUEUE_FIELD(unacknowledged, T_UINT, READONLY, "Events that the drain has dealt with."),
    QUEUE_FIELD(events, T_UINT, READONLY, "Events that the drain has taken, ever."),
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef queue_getset[] = {
    {"address", queue_get_address, NULL, "For `ibv_cq.cq_context`.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot queue_slots[] = {
    {Py_tp_new, queue_new},
    {Py_tp_methods, queue_methods},
    {Py_tp_members, queue_members},
    {Py_tp_getset, queue_getset},
    {Py_tp_doc, "What the drain of a channel knows of a completion queue, which it outlives."},
    {0, NULL},
};

PyType_Spec aio_queue_spec = {
    .name = "aiordma._core.QueueState",
    .basicsize = sizeof(QueueState),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = queue_slots,
};
