/* The least that a message of 64 bytes can take from Python: the C of floors.py.
 *
 * The connection is made here, with librdmacm, and has nothing of the library: a completion queue
 * with a channel, a few receives, and one message at a time.  A message is sent inline and
 * solicited; the queue is armed for solicited completions, so that no send wakes anybody; events
 * are acknowledged 64 at a time.  That is what the library does, and the least that there is to do.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { SIZE = 64, RECEIVES = 16, LIMIT_MS = 2000000000, UNACKNOWLEDGED = 64 };

static struct rdma_event_channel *events;
static struct rdma_cm_id *id;
static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_mr *region;
static char memory[(RECEIVES + 1) * SIZE];
static unsigned int unacknowledged;
/* How many messages are to be answered within answer(), and what is called then. */
static long missing, answers;
/* How many messages nobody has asked for with there(); less than none if somebody waits. */
static long waiting;
static PyObject *when_done;

static PyObject *refuse(const char *what)
{
    return PyErr_Format(PyExc_OSError, "%s: %s", what, strerror(errno));
}

/* The next event has to be this one; its id becomes ours. */
static int expect(enum rdma_cm_event_type wanted)
{
    struct rdma_cm_event *event;
    if (rdma_get_cm_event(events, &event) != 0)
        return -1;
    int as_wanted = event->event == wanted;
    id = event->id;
    rdma_ack_cm_event(event);
    errno = EPROTO;
    return as_wanted ? 0 : -1;
}

static int post_receive(unsigned long long slot)
{
    struct ibv_sge piece = {(uintptr_t)memory + slot * SIZE, SIZE, region->lkey};
    struct ibv_recv_wr *bad, request = {.wr_id = slot, .sg_list = &piece, .num_sge = 1};
    return ibv_post_recv(id->qp, &request, &bad);
}

static int make_queue_pair(void)
{
    struct ibv_qp_init_attr attr = {
        .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16,
                .max_recv_wr = RECEIVES,
                .max_send_sge = 1,
                .max_recv_sge = 1,
                .max_inline_data = SIZE},
    };
    channel = ibv_create_comp_channel(id->verbs);
    if (channel == NULL || fcntl(channel->fd, F_SETFL, O_NONBLOCK) != 0)
        return -1;
    cq = ibv_create_cq(id->verbs, 64, NULL, channel, 0);
    if (cq == NULL || ibv_req_notify_cq(cq, 1) != 0)
        return -1;
    attr.send_cq = attr.recv_cq = cq;
    if (rdma_create_qp(id, NULL, &attr) != 0)
        return -1;
    region = ibv_reg_mr(id->pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
    if (region == NULL)
        return -1;
    for (unsigned long long slot = 0; slot < RECEIVES; slot++)
        if (post_receive(slot) != 0)
            return -1;
    return 0;
}

static int serve(struct sockaddr *at)
{
    struct rdma_conn_param param = {.responder_resources = 1, .initiator_depth = 1};
    return rdma_bind_addr(id, at) != 0 || rdma_listen(id, 1) != 0 ||
           expect(RDMA_CM_EVENT_CONNECT_REQUEST) != 0 || make_queue_pair() != 0 ||
           rdma_accept(id, &param) != 0 || expect(RDMA_CM_EVENT_ESTABLISHED) != 0;
}

static int call(struct sockaddr *at)
{
    struct rdma_conn_param param = {
        .responder_resources = 1, .initiator_depth = 1, .retry_count = 6, .rnr_retry_count = 6};
    return rdma_resolve_addr(id, NULL, at, LIMIT_MS) != 0 ||
           expect(RDMA_CM_EVENT_ADDR_RESOLVED) != 0 || rdma_resolve_route(id, LIMIT_MS) != 0 ||
           expect(RDMA_CM_EVENT_ROUTE_RESOLVED) != 0 || make_queue_pair() != 0 ||
           rdma_connect(id, &param) != 0 || expect(RDMA_CM_EVENT_ESTABLISHED) != 0;
}

/* Whether a message was posted. */
static int post_send(void)
{
    struct ibv_sge piece = {(uintptr_t)memory + RECEIVES * SIZE, SIZE, region->lkey};
    struct ibv_send_wr *bad,
        request = {
            .wr_id = RECEIVES,
            .sg_list = &piece,
            .num_sge = 1,
            .opcode = IBV_WR_SEND,
            .send_flags = IBV_SEND_SIGNALED | IBV_SEND_SOLICITED | IBV_SEND_INLINE,
        };
    return ibv_post_send(id->qp, &request, &bad) == 0;
}

/* How many messages have arrived; -1 for an error. */
static int take_all(void)
{
    struct ibv_cq *which;
    struct ibv_wc found[16];
    void *context;
    int count, total = 0;

    if (ibv_get_cq_event(channel, &which, &context) != 0)
        return errno == EAGAIN ? 0 : -1;
    if (++unacknowledged == UNACKNOWLEDGED) {
        ibv_ack_cq_events(cq, unacknowledged);
        unacknowledged = 0;
    }
    if (ibv_req_notify_cq(cq, 1) != 0)
        return -1;
    while ((count = ibv_poll_cq(cq, 16, found)) > 0)
        for (int i = 0; i < count; i++) {
            if (found[i].status != IBV_WC_SUCCESS)
                return -1;
            if (found[i].wr_id == RECEIVES)
                continue;
            total++;
            if (post_receive(found[i].wr_id) != 0)
                return -1;
        }
    return count < 0 ? -1 : total;
}

/* What Python calls. */

static PyObject *py_connect(PyObject *module, PyObject *args)
{
    struct sockaddr_in at = {.sin_family = AF_INET};
    const char *address;
    int server, port, failed;
    (void)module;
    if (!PyArg_ParseTuple(args, "psi", &server, &address, &port))
        return NULL;
    at.sin_port = htons((uint16_t)port);
    events = rdma_create_event_channel();
    errno = EINVAL;
    if (events == NULL || inet_pton(AF_INET, address, &at.sin_addr) != 1 ||
        rdma_create_id(events, &id, NULL, RDMA_PS_TCP) != 0)
        return refuse("an id");
    Py_BEGIN_ALLOW_THREADS;
    failed = server ? serve((struct sockaddr *)&at) : call((struct sockaddr *)&at);
    Py_END_ALLOW_THREADS;
    return failed ? refuse("connecting") : PyLong_FromLong(channel->fd);
}

static PyObject *py_hang_up(PyObject *module, PyObject *server)
{
    int failed;
    (void)module;
    int waits = PyObject_IsTrue(server);
    Py_BEGIN_ALLOW_THREADS;
    failed = (waits && expect(RDMA_CM_EVENT_DISCONNECTED) != 0) || rdma_disconnect(id) != 0;
    Py_END_ALLOW_THREADS;
    return failed ? refuse("disconnecting") : Py_NewRef(Py_None);
}

static PyObject *py_send(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (!post_send())
        return refuse("ibv_post_send");
    Py_RETURN_NONE;
}

static PyObject *py_take(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    int count = take_all();
    return count < 0 ? refuse("taking messages") : PyLong_FromLong(count);
}

/* Takes what is there and answers it. */
static int answer_all(void)
{
    int count = take_all();
    for (int i = 0; i < count; i++)
        if (missing-- > 0 && answers-- > 0 && !post_send())
            return -1;
    return count;
}

static PyObject *py_answer(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    int count = answer_all();
    return count < 0 ? refuse("answering") : PyBool_FromLong(missing <= 0);
}

/* The same as what a loop calls: nobody looks at what it returns. */
static PyObject *py_reader(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (answer_all() < 0)
        return refuse("answering");
    if (missing > 0 || when_done == NULL)
        Py_RETURN_NONE;
    PyObject *done = when_done;
    when_done = NULL;
    PyObject *result = PyObject_CallNoArgs(done);
    Py_DECREF(done);
    return result;
}

/* What a loop calls where a task waits: takes what is there and calls what resumes the task. */
static PyObject *py_arrive(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    int count = take_all();
    if (count < 0)
        return refuse("taking messages");
    waiting += count;
    return count > 0 ? PyObject_CallNoArgs(when_done) : Py_NewRef(Py_None);
}

static PyObject *py_there(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyBool_FromLong(waiting-- > 0);
}

static PyObject *py_expect(PyObject *module, PyObject *args)
{
    PyObject *done;
    (void)module;
    if (!PyArg_ParseTuple(args, "llO", &missing, &answers, &done))
        return NULL;
    Py_INCREF(done);
    Py_XSETREF(when_done, done);
    Py_RETURN_NONE;
}

static PyObject *py_pump(PyObject *module, PyObject *unused)
{
    struct epoll_event ready, wanted = {.events = EPOLLIN};
    int found = 0, epoll = epoll_create1(EPOLL_CLOEXEC);
    (void)module, (void)unused;
    if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, channel->fd, &wanted) != 0)
        return refuse("epoll");
    Py_BEGIN_ALLOW_THREADS;
    while (missing > 0 && found >= 0) {
        epoll_wait(epoll, &ready, 1, -1);
        found = answer_all();
    }
    Py_END_ALLOW_THREADS;
    close(epoll);
    return found < 0 ? refuse("answering") : Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"connect", py_connect, METH_VARARGS,
     "connect(is_server, address, port): the connection; the descriptor of its completions"},
    {"hang_up", py_hang_up, METH_O, "End the connection; a server waits until its client does."},
    {"send", py_send, METH_NOARGS, "A message."},
    {"take", py_take, METH_NOARGS, "How many messages have arrived."},
    {"expect", py_expect, METH_VARARGS,
     "expect(messages, answers, done): what answer(), reader(), pump() and arrive() have to do"},
    {"arrive", py_arrive, METH_NOARGS, "Take messages; done() is called each time there are any."},
    {"there", py_there, METH_NOARGS, "Whether a message has arrived; if not, it is waited for."},
    {"answer", py_answer, METH_NOARGS, "Take messages and answer them; whether all were there."},
    {"reader", py_reader, METH_NOARGS, "The same; done() is called when all were there."},
    {"pump", py_pump, METH_NOARGS, "The same, with epoll, until all were there."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "floors", NULL, -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit_floors(void)
{
    return PyModule_Create(&definition);
}
