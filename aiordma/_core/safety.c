/*
 * SafetyPoll: polls the managed queues of a completion channel now and then, as the kernel drops a
 * completion event when it has no memory for it.  verbs/comp_channel.py decides how often.
 *
 * The alarm of an idle channel comes forever, so no Python code runs while it finds nothing: that
 * would take four times as long as the wake-up.
 *
 * Queues: their owner discards each before it is destroyed.  It does not keep its drain alive.
 */
#include "core.h"

#include <unistd.h>

typedef struct {
    PyObject_HEAD
    PyObject *drain; /* weak reference */
    PyObject *slow;  /* called if there is work for Python */
    PyObject *found; /* a list of the completions of queues, until Python takes it; or NULL */
    struct ibv_cq **queues;
    uint32_t n_queues;
    uint32_t room;
    uint32_t seen; /* events of the queues, as Python has asked for them last */
    int fd;        /* of the alarm; -1: there is none */
    char calm;     /* Python has nothing to do while there are no events and no completions */
} SafetyPoll;

static PyObject *safety_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"drain", NULL};
    PyObject *drain, *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!", names, aio_drain_type, &drain))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (!object)
        return NULL;
    ((SafetyPoll *)object)->fd = -1;
    ((SafetyPoll *)object)->drain = PyWeakref_NewRef(drain, NULL);
    if (!((SafetyPoll *)object)->drain)
        replace(&object, NULL);
    return object;
}

static int safety_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((SafetyPoll *)object)->drain);
    Py_VISIT(((SafetyPoll *)object)->slow);
    Py_VISIT(((SafetyPoll *)object)->found);
    return 0;
}

static int safety_clear(PyObject *object)
{
    Py_CLEAR(((SafetyPoll *)object)->slow);
    Py_CLEAR(((SafetyPoll *)object)->found);
    return 0;
}

static void safety_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    safety_clear(object);
    Py_CLEAR(((SafetyPoll *)object)->drain);
    PyMem_Free(((SafetyPoll *)object)->queues);
    aio_free(object);
}

/* by(fd, slow): the alarm has this descriptor, and work for Python is done by `slow`; `run`. */
static PyObject *safety_by(PyObject *object, PyObject *args)
{
    SafetyPoll *self = (SafetyPoll *)object;
    PyObject *slow;

    if (!PyArg_ParseTuple(args, "iO", &self->fd, &slow))
        return NULL;
    replace(&self->slow, Py_NewRef(slow));
    return PyObject_GetAttrString(object, "run");
}

static PyObject *safety_stop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((SafetyPoll *)object)->fd = -1;
    Py_RETURN_NONE;
}

static PyObject *safety_expect_calm(PyObject *object, PyObject *value)
{
    int calm = PyObject_IsTrue(value);

    if (calm < 0)
        return NULL;
    ((SafetyPoll *)object)->calm = (char)calm;
    Py_RETURN_NONE;
}

static PyObject *safety_add(PyObject *object, PyObject *address)
{
    SafetyPoll *self = (SafetyPoll *)object;
    struct ibv_cq *cq = PyLong_AsVoidPtr(address);

    if (!cq) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no queue");
        return NULL;
    }
    if (self->n_queues == self->room) {
        uint32_t room = 2 * self->room + 4;
        struct ibv_cq **queues = PyMem_Realloc(self->queues, room * sizeof(cq));

        if (!queues)
            return PyErr_NoMemory();
        self->queues = queues;
        self->room = room;
    }
    self->queues[self->n_queues++] = cq;
    Py_RETURN_NONE;
}

static PyObject *safety_discard(PyObject *object, PyObject *address)
{
    SafetyPoll *self = (SafetyPoll *)object;
    struct ibv_cq *cq = PyLong_AsVoidPtr(address);

    if (!cq && PyErr_Occurred())
        return NULL;
    for (uint32_t i = 0; i < self->n_queues; i++) {
        if (self->queues[i] == cq) {
            self->queues[i] = self->queues[--self->n_queues];
            break;
        }
    }
    Py_RETURN_NONE;
}

static uint32_t events_of(const SafetyPoll *self)
{
    uint32_t events = 0;

    for (uint32_t i = 0; i < self->n_queues; i++)
        events += ((const struct aio_cq *)self->queues[i]->cq_context)->events;
    return events;
}

static PyObject *safety_new_events(PyObject *object, PyObject *Py_UNUSED(unused))
{
    SafetyPoll *self = (SafetyPoll *)object;
    int32_t count = (int32_t)(events_of(self) - self->seen);

    self->seen += (uint32_t)count;
    return PyLong_FromLong(count < 0 ? -count : count); /* less: a queue has gone */
}

static PyObject *safety_take(PyObject *object, PyObject *Py_UNUSED(unused))
{
    PyObject *found = ((SafetyPoll *)object)->found;

    ((SafetyPoll *)object)->found = NULL;
    return found ? found : PyList_New(0);
}

/* Poll all queues: 1 if none had a completion, 0 if `found` has those, -1 with an exception. */
static int safety_poll_queues(SafetyPoll *self, PyObject *drain)
{
    for (uint32_t i = 0; i < self->n_queues; i++) {
        const struct aio_cq *own = self->queues[i]->cq_context;
        uint32_t events = own->events;
        PyObject *swept = aio_drain_look(drain, self->queues[i]), *entry;
        int failed;

        if (!swept)
            return -1;
        if (swept == Py_None) {
            Py_DECREF(swept);
            continue;
        }
        if (!self->found)
            self->found = PyList_New(0);
        entry = Py_BuildValue("(KIN)", (unsigned long long)own->token, events, swept);
        failed = !self->found || !entry || PyList_Append(self->found, entry);
        Py_XDECREF(entry);
        if (failed)
            return -1;
    }
    return !self->found;
}

/* The alarm has come. */
static PyObject *safety_run(PyObject *object, PyObject *Py_UNUSED(unused))
{
    SafetyPoll *self = (SafetyPoll *)object;
    PyObject *drain, *slow, *result;
    uint64_t times;
    int quiet = 0;

    if (self->fd < 0 || (read(self->fd, &times, sizeof(times)) < 0 && errno == EAGAIN))
        Py_RETURN_NONE; /* EAGAIN: it was set anew after the loop had seen it */
    drain = PyObject_CallNoArgs(self->drain);
    if (!drain)
        return NULL;
    if (self->calm && drain != Py_None && events_of(self) == self->seen)
        quiet = safety_poll_queues(self, drain);
    Py_DECREF(drain);
    if (quiet < 0)
        return NULL;
    if (quiet)
        Py_RETURN_NONE;
    slow = Py_XNewRef(self->slow); /* the call may take this object off the loop */
    result = PyObject_CallFunctionObjArgs(slow, NULL);
    Py_XDECREF(slow);
    return result;
}

static PyMethodDef safety_methods[] = {
    {"by", safety_by, METH_VARARGS,
     "Set the descriptor of the alarm, and the function for work that is left for Python; `run`."},
    {"stop", safety_stop, METH_NOARGS,
     "The alarm is closed; a forked child, whose parent's loop may still report it, does not "
     "read."},
    {"expect_calm", safety_expect_calm, METH_O,
     "Whether the function is called only when there are events or completions."},
    {"add", safety_add, METH_O, "Poll the queue with this address, too, which is managed."},
    {"discard", safety_discard, METH_O, "Poll the queue with this address no more."},
    {"new_events", safety_new_events, METH_NOARGS, "Events of the queues since the last call."},
    {"take", safety_take, METH_NOARGS,
     "What `run` has found: token of the queue, events that it had raised, the result of `sweep`."},
    {"run", safety_run, METH_NOARGS, "The descriptor of the alarm is readable."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot safety_slots[] = {
    {Py_tp_new, safety_new},
    {Py_tp_dealloc, safety_dealloc},
    {Py_tp_traverse, safety_traverse},
    {Py_tp_clear, safety_clear},
    {Py_tp_methods, safety_methods},
    {Py_tp_doc, "Polls the queues of a channel when an alarm has come."},
    {0, NULL},
};

PyType_Spec aio_safety_spec = {
    .name = "aiordma._core.SafetyPoll",
    .basicsize = sizeof(SafetyPoll),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = safety_slots,
};
