/*
 * CMEvents: the events of a channel of the connection manager, each as one tuple; and the addresses
 * of an id, as Python writes them.
 *
 * Both are for every connection.  By way of cffi a field of the event is a call, and an address a
 * handful of them.
 */
#include "fast.h"

#include <arpa/inet.h>

typedef struct {
    PyObject_HEAD struct rdma_event_channel *channel; /* both kept alive by the EventChannel */
    struct aio_cm_event *event;
    int (*next)(struct rdma_event_channel *, struct aio_cm_event *);
} CMEvents;

static int events_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    CMEvents *self = (CMEvents *)object;
    static char *names[] = {"channel", "event", "next", NULL};
    unsigned long long channel, event, next;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKK", names, &channel, &event, &next))
        return -1;
    self->channel = (struct rdma_event_channel *)(uintptr_t)channel;
    self->event = (struct aio_cm_event *)(uintptr_t)event;
    self->next = (int (*)(struct rdma_event_channel *, struct aio_cm_event *))(uintptr_t)next;
    return 0;
}

static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, events_init);
}

/* What two ends may have agreed on; None where there cannot be anything yet. */
static PyObject *numbers_of(const struct aio_cm_event *event)
{
    switch (event->type) {
    case RDMA_CM_EVENT_ADDR_RESOLVED:
    case RDMA_CM_EVENT_ADDR_ERROR:
    case RDMA_CM_EVENT_ROUTE_RESOLVED:
    case RDMA_CM_EVENT_ROUTE_ERROR:
        Py_RETURN_NONE;
    default:
        return Py_BuildValue("(iiiiiII)", event->responder_resources, event->initiator_depth,
                             event->flow_control, event->retry_count, event->rnr_retry_count,
                             event->qp_num, event->qkey);
    }
}

static PyObject *events_next(PyObject *object, PyObject *unused)
{
    CMEvents *self = (CMEvents *)object;
    struct aio_cm_event *event = self->event;
    PyThreadState *state;
    PyObject *numbers;
    int code;

    (void)unused;
    do {
        state = PyEval_SaveThread();
        code = self->next(self->channel, event);
        PyEval_RestoreThread(state);
    } while (code == -EINTR);
    if (code == -EAGAIN)
        Py_RETURN_NONE;
    if (code)
        return PyLong_FromLong(-code);
    numbers = numbers_of(event);
    if (!numbers)
        return NULL;
    return Py_BuildValue("(iiKKy#N)", event->type, event->status, (unsigned long long)event->token,
                         (unsigned long long)event->listen_token, (char *)event->private_data,
                         (Py_ssize_t)event->private_data_len, numbers);
}

static PyObject *address_of(const struct sockaddr_in *sin)
{
    char host[INET_ADDRSTRLEN];

    if (!inet_ntop(AF_INET, &sin->sin_addr, host, sizeof(host)))
        return PyErr_SetFromErrno(PyExc_OSError);
    return Py_BuildValue("(si)", host, ntohs(sin->sin_port));
}

static PyObject *events_ends(PyObject *unused, PyObject *pointer)
{
    const struct rdma_cm_id *id = PyLong_AsVoidPtr(pointer);
    const struct rdma_addr *addr = id ? &id->route.addr : NULL;
    PyObject *peer, *local;

    (void)unused;
    if (!addr)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    if (addr->src_addr.sa_family != AF_INET || addr->dst_addr.sa_family != AF_INET)
        Py_RETURN_NONE;
    peer = address_of(&addr->dst_sin);
    local = address_of(&addr->src_sin);
    if (peer && local)
        return Py_BuildValue("(NN)", peer, local);
    Py_XDECREF(peer);
    Py_XDECREF(local);
    return NULL;
}

static PyMethodDef events_methods[] = {
    {"next", events_next, METH_NOARGS,
     "The next event, acknowledged: type, status, token of its id, token of the listening id, "
     "private data, numbers of the connection; None if there is none, or an errno."},
    {"ends", events_ends, METH_O | METH_STATIC,
     "The peer's (host, port) and the own of a C id, by its address; None unless both are IPv4."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot events_slots[] = {
    {Py_tp_new, events_new},
    {Py_tp_methods, events_methods},
    {Py_tp_doc, "The events of a channel of the connection manager."},
    {0, NULL},
};

static PyType_Spec events_spec = {
    .name = "aiordma._ffi._fast.CMEvents",
    .basicsize = sizeof(CMEvents),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = events_slots,
};

int aio_add_cm_events(PyObject *module)
{
    return aio_add_type(module, &events_spec, NULL) ? 0 : -1;
}
