/*
 * CMEvents: the events of a channel of the connection manager, each as one tuple; the address of an
 * id, as Python writes it; and the step that an id takes by itself.
 *
 * Every connection needs all of them.  Through cffi a field of an event is a call, and an address
 * takes a handful: a connected pair takes 2.310 million instructions instead of 2.170, 6.4 % more
 * (`make profile`, "connect uvloop", 2026).
 */
#include "core.h"

#include <arpa/inet.h>
#include <rdma/rdma_cma.h>

struct event {
    int type;
    int status;
    uint64_t token;
    uint64_t listen_token;
    struct rdma_cm_id *id;
    uint32_t qp_num;
    uint32_t qkey;
    uint8_t responder_resources;
    uint8_t initiator_depth;
    uint8_t flow_control;
    uint8_t retry_count;
    uint8_t rnr_retry_count;
    uint8_t srq;
    uint8_t is_datagram;
    uint8_t private_data_len;
    struct ibv_ah_attr ah_attr;
    uint8_t private_data[256];
};

/*
 * An id's context: its token, and above it the milliseconds for the route of an id that goes on
 * from its address to its route by itself; 0 for others.
 */
#define TOKEN_BITS 40

static uint64_t token_of(const struct rdma_cm_id *id)
{
    return (uint64_t)(uintptr_t)id->context & ((UINT64_C(1) << TOKEN_BITS) - 1);
}

/*
 * Start to resolve the route of an id whose context asks for it: 0, and the event is not reported.
 * 1: not such an event or id; or -errno of rdma_resolve_route, which becomes the event's status.
 */
static int go_on(const struct rdma_cm_event *ev)
{
    struct rdma_cm_id *id = ev->id;
    int limit;

    if (ev->event != RDMA_CM_EVENT_ADDR_RESOLVED || !id || ev->status)
        return 1;
    limit = (int)((uint64_t)(uintptr_t)id->context >> TOKEN_BITS);
    if (!limit)
        return 1;
    id->context = (void *)(uintptr_t)token_of(id);
    return rdma_resolve_route(id, limit) ? -(errno ? errno : EIO) : 0;
}

/*
 * Take one connection-management event: copy all of it, acknowledge, return 0.
 *
 * One at a time by design.  Fetching a batch first would leave unacknowledged events of an id
 * that a handler destroys, and rdma_destroy_id waits for those without end.
 * The id's context holds an integer token; the pointer of a new id is given to Python for
 * CONNECT_REQUEST only, the event whose receiver becomes the owner of the id.
 * -EAGAIN ends a drain.  librdmacm may swallow events, so that a readable descriptor can
 * end here at once.
 */
static int next_event(struct rdma_event_channel *channel, struct event *out)
{
    struct rdma_cm_event *ev;
    const void *data;
    int refused;

    do {
        if (rdma_get_cm_event(channel, &ev))
            return errno ? -errno : -EIO;
        refused = go_on(ev);
        if (!refused)
            rdma_ack_cm_event(ev);
    } while (!refused);
    memset(out, 0, offsetof(struct event, private_data));
    out->type = (int)ev->event;
    out->status = refused < 0 ? refused : ev->status;
    if (ev->event == RDMA_CM_EVENT_CONNECT_REQUEST) {
        out->id = ev->id; /* its context is a copy of the listener's: not its own token */
        out->listen_token = ev->listen_id ? token_of(ev->listen_id) : 0;
    } else {
        out->token = ev->id ? token_of(ev->id) : 0;
    }
    if (ev->id && ev->id->qp_type == IBV_QPT_UD) { /* port spaces UDP and IPOIB */
        out->is_datagram = 1;
        out->qp_num = ev->param.ud.qp_num;
        out->qkey = ev->param.ud.qkey;
        out->ah_attr = ev->param.ud.ah_attr;
        out->private_data_len = ev->param.ud.private_data_len;
        data = ev->param.ud.private_data;
    } else {
        out->qp_num = ev->param.conn.qp_num;
        out->responder_resources = ev->param.conn.responder_resources;
        out->initiator_depth = ev->param.conn.initiator_depth;
        out->flow_control = ev->param.conn.flow_control;
        out->retry_count = ev->param.conn.retry_count;
        out->rnr_retry_count = ev->param.conn.rnr_retry_count;
        out->srq = ev->param.conn.srq;
        out->private_data_len = ev->param.conn.private_data_len;
        data = ev->param.conn.private_data;
    }
    if (data && out->private_data_len)
        memcpy(out->private_data, data, out->private_data_len);
    else
        out->private_data_len = 0;
    rdma_ack_cm_event(ev);
    return 0;
}

typedef struct {
    PyObject_HEAD
    struct rdma_event_channel *channel; /* NULL once the EventChannel is closed */
    struct event event;                 /* the last that was taken */
} CMEvents;

static PyObject *events_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"channel", NULL};
    unsigned long long channel;
    PyObject *object;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K", names, &channel))
        return NULL;
    object = PyType_GenericAlloc(type, 0);
    if (object)
        ((CMEvents *)object)->channel = (struct rdma_event_channel *)(uintptr_t)channel;
    return object;
}

/* The numbers that two ends may have agreed on; None where there cannot be any yet. */
static PyObject *numbers_of(const struct event *event)
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

static PyObject *events_next(PyObject *object, PyObject *Py_UNUSED(unused))
{
    CMEvents *self = (CMEvents *)object;
    struct event *event = &self->event;
    PyThreadState *state;
    PyObject *numbers;
    int code;

    if (!self->channel) /* the handler of the last event has closed it */
        Py_RETURN_NONE;
    do {
        state = PyEval_SaveThread();
        code = next_event(self->channel, event);
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

static PyObject *events_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((CMEvents *)object)->channel = NULL;
    Py_RETURN_NONE;
}

static PyObject *address_of(const struct sockaddr_in *sin)
{
    char host[INET_ADDRSTRLEN];

    if (!inet_ntop(AF_INET, &sin->sin_addr, host, sizeof(host)))
        return PyErr_SetFromErrno(PyExc_OSError);
    return Py_BuildValue("(si)", host, ntohs(sin->sin_port));
}

static PyObject *events_ends(PyObject *Py_UNUSED(unused), PyObject *pointer)
{
    const struct rdma_cm_id *id = PyLong_AsVoidPtr(pointer);
    const struct rdma_addr *addr = id ? &id->route.addr : NULL;
    PyObject *peer, *local;

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

/*
 * resolve(id, source, destination, milliseconds, token, route): rdma_resolve_addr for the id with
 * that token; with milliseconds for the route the id goes on to that by itself.  0 or an errno.
 */
static PyObject *events_resolve(PyObject *Py_UNUSED(unused), PyObject *args)
{
    unsigned long long pointer, source, destination, token;
    struct rdma_cm_id *id;
    int limit, route, code;

    if (!PyArg_ParseTuple(args, "KKKiKi", &pointer, &source, &destination, &limit, &token, &route))
        return NULL;
    id = (struct rdma_cm_id *)(uintptr_t)pointer;
    id->context = (void *)(uintptr_t)(token | (uint64_t)route << TOKEN_BITS);
    Py_BEGIN_ALLOW_THREADS
    code = rdma_resolve_addr(id, (struct sockaddr *)(uintptr_t)source,
                             (struct sockaddr *)(uintptr_t)destination, limit)
               ? (errno ? errno : EIO)
               : 0;
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(code);
}

static PyObject *events_get_id(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromVoidPtr(((CMEvents *)object)->event.id);
}

static PyObject *events_get_ah_attr(PyObject *object, void *Py_UNUSED(unused))
{
    struct event *event = &((CMEvents *)object)->event;

    return PyLong_FromVoidPtr(event->is_datagram ? &event->ah_attr : NULL);
}

static PyMethodDef events_methods[] = {
    {"next", events_next, METH_NOARGS,
     "The next event, acknowledged: type, status, token of its id, token of the listening id, "
     "private data, numbers of the connection; None if there is none, or an errno."},
    {"close", events_close, METH_NOARGS, "The channel may go: `next` gives None from now on."},
    {"ends", events_ends, METH_O | METH_STATIC,
     "The peer's (host, port) and the own of a C id, by its address; None unless both are IPv4."},
    {"resolve", events_resolve, METH_VARARGS | METH_STATIC,
     "rdma_resolve_addr: addresses of the id, of the source and of the destination, milliseconds, "
     "token of the id, milliseconds for the route or 0; 0 or an errno."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef events_getset[] = {
    {"id", events_get_id, NULL, "The C id of the last request; its receiver becomes its owner.",
     NULL},
    {"ah_attr", events_get_ah_attr, NULL,
     "Where the `struct ibv_ah_attr` of the last event of a datagram id is; 0 of others.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot events_slots[] = {
    {Py_tp_new, events_new},
    {Py_tp_methods, events_methods},
    {Py_tp_getset, events_getset},
    {Py_tp_doc, "The events of a channel of the connection manager."},
    {0, NULL},
};

PyType_Spec aio_events_spec = {
    .name = "aiordma._core.CMEvents",
    .basicsize = sizeof(CMEvents),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = events_slots,
};
