/*
 * CallTable: the requests of this side that the peer has not answered, by their numbers, and what
 * it has granted.  Call: one of them, on which its task waits.
 *
 * requests/calls.py has the rules, and does what is rare.  Here a call goes out that fits into a
 * slot, and an answer that fits into a slot resumes its task.  Both use the same table and the same
 * functions as Python does by way of the methods.
 *
 * A call may have to wait twice before it is sent.  Without room under the grant it stands in the
 * line of Python's Calls, with its bytes in `data`, beside calls of Python; it is counted when it
 * is let in (`admitted`), and sent when its task runs.  Without a slot or a credit its frame waits
 * in the line of the connection (`queued`, line.c).  A call that ends before, in either line, was
 * not sent: its number is free, and the peer is told nothing.
 *
 * A call is in the table from `table_enter` until its final frame has come.  It has *ended* when
 * its task has nothing to wait for any more, which may be earlier: at its deadline, or when its
 * task was canceled.  Then it is abandoned, and its number stays in use.
 */
#include <math.h>

#include "core.h"
#include "requests.h"

struct call_table {
    PyObject_HEAD
    MessageState *state;  /* NULL: every call is made in Python */
    PyObject *owner;      /* Python's Calls; NULL when the connection is over */
    PyObject *exchange;   /* gets the frames that are not processed here */
    RequestTable *served; /* the requests of the peer; NULL: Python gets each */
    PyObject *calls;      /* dict: Call by number */
    struct aio_grant grant;
    double due;              /* a timer of Python's rings at this time, or before */
    uint32_t number;         /* of the last call */
    uint32_t abandoned;      /* calls in the table that are */
    uint32_t most_abandoned; /* beyond which further calls wait */
    uint32_t steps;          /* of the time in which the peer has to end an abandoned call */
    Call *first;             /* of those that have ended and whose tasks are still to be resumed */
    Call *last;
    char in_line; /* tasks wait in line, in Python: others do so behind them */
    char failed;  /* the connection is over */
};

/* Call */

static int call_traverse(PyObject *object, visitproc visit, void *arg)
{
    traverseproc base = (traverseproc)PyType_GetSlot(aio_wakeup_type, Py_tp_traverse);
    Call *self = (Call *)object;

    Py_VISIT(self->message);
    Py_VISIT(self->failure);
    Py_VISIT(self->instead);
    Py_VISIT((PyObject *)self->queued);
    Py_VISIT(self->data);
    return base(object, visit, arg);
}

static int call_clear(PyObject *object)
{
    inquiry base = (inquiry)PyType_GetSlot(aio_wakeup_type, Py_tp_clear);
    Call *self = (Call *)object;

    replace(&self->message, NULL);
    replace(&self->failure, NULL);
    replace(&self->instead, NULL);
    replace((PyObject **)&self->queued, NULL);
    replace(&self->data, NULL);
    return base(object);
}

static void call_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    call_clear(object);
    aio_free(object);
}

/* Go on with the wait for room for its frame; PYGEN_RETURN: it is sent. */
static PySendResult call_send_queued(Call *self, PyObject **result)
{
    MessageState *state = self->queued->state;
    PySendResult way;
    long code;

    Py_XINCREF((PyObject *)state);
    way = aio_queued_send_step((PyObject *)self->queued, Py_None, result);
    if (way == PYGEN_RETURN) {
        code = PyLong_AsLong(*result);
        replace(result, NULL);
        replace((PyObject **)&self->queued, NULL);
        if (code && state) { /* the connection ends, and with it this call */
            connection_note_error(state->connection, (int)code);
            aio_call_soon(self->wakeup.loop, (PyObject *)state, AIO_EVENT_FAILED);
        }
    }
    Py_XDECREF((PyObject *)state);
    return way;
}

/* End the wait: with the answer, or by raising what there is in its place. */
PySendResult aio_call_step(PyObject *object, PyObject *Py_UNUSED(value), PyObject **result)
{
    Call *self = (Call *)object;

    if (self->queued && !self->ended) {
        PySendResult way = call_send_queued(self, result);

        if (way != PYGEN_RETURN)
            return way;
    }
    if (!self->ended || self->wakeup.error) { /* it begins to wait, or was canceled */
        *result = aio_wakeup_next(object);
        if (*result)
            return PYGEN_NEXT;
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "the wait was not ended by the call");
        return PYGEN_ERROR;
    }
    aio_wakeup_forget(&self->wakeup);
    *result = self->message;
    self->message = NULL;
    if (*result)
        return PYGEN_RETURN;
    if (self->failure) {
        PyErr_SetObject((PyObject *)Py_TYPE(self->failure), self->failure);
        replace(&self->failure, NULL); /* whose traceback will refer to the task's frames */
    } else {
        PyErr_SetString(PyExc_RuntimeError, "the call has no answer any more");
    }
    return PYGEN_ERROR;
}

static PyObject *call_next(PyObject *object)
{
    return aio_iterate(object, aio_call_step);
}

static PyObject *call_await(PyObject *object)
{
    char state = ((Call *)object)->wakeup.state;

    if (state != AIO_IDLE && !((Call *)object)->ended) {
        PyErr_SetString(PyExc_RuntimeError, "another task waits on this already");
        return NULL;
    }
    return Py_NewRef(object);
}

/* header(seconds, flags): of its REQUEST frame; None: no limit of time is told. */
static PyObject *call_header(PyObject *object, PyObject *args)
{
    struct aio_request_header header = {.kind = AIO_REQUEST, .number = ((Call *)object)->number};
    uint8_t bytes[AIO_REQUEST_HEADER];
    PyObject *seconds;

    if (!PyArg_ParseTuple(args, "Ob", &seconds, &header.flags))
        return NULL;
    if (seconds != Py_None) {
        header.argument = request_microseconds(PyFloat_AsDouble(seconds));
        if (PyErr_Occurred())
            return NULL;
    }
    request_pack(bytes, &header);
    return PyBytes_FromStringAndSize((const char *)bytes, sizeof(bytes));
}

/* call_instead(function): have this called in place of the task when the call has ended. */
static PyObject *call_call_instead(PyObject *object, PyObject *function)
{
    replace(&((Call *)object)->instead, function == Py_None ? NULL : Py_NewRef(function));
    Py_RETURN_NONE;
}

static PyObject *call_answer(PyObject *object, void *Py_UNUSED(unused))
{
    PyObject *message = ((Call *)object)->message;

    return Py_NewRef(message ? message : Py_None);
}

static PyObject *call_sent(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(!((Call *)object)->queued && !((Call *)object)->data);
}

/* Of a future, what the line of Python asks for in which a call waits for the peer's grant. */

static PyObject *call_done(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const Call *self = (Call *)object;

    return PyBool_FromLong(self->ended || self->admitted || self->wakeup.error != NULL);
}

static PyObject *call_set_result(PyObject *object, PyObject *Py_UNUSED(value))
{
    Call *self = (Call *)object;

    if (!self->data) {
        PyErr_SetString(PyExc_RuntimeError, "the call does not wait for the grant");
        return NULL;
    }
    self->admitted = 1;
    return aio_wake_soon(&self->wakeup) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *call_set_exception(PyObject *object, PyObject *error)
{
    Call *self = (Call *)object;

    self->ended = 1;
    replace(&self->failure, Py_NewRef(error));
    return aio_wake_soon(&self->wakeup) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef call_methods[] = {
    {"header", call_header, METH_VARARGS,
     "The header of its REQUEST frame, with the seconds that are left or None, and flags."},
    {"done", call_done, METH_NOARGS, "Whether it does not wait for the grant any more."},
    {"set_result", call_set_result, METH_O, "The grant has room for it, and it was counted."},
    {"set_exception", call_set_exception, METH_O, "Have it raise while it waits for the grant."},
    {"call_instead", call_call_instead, METH_O,
     "Have a function called in place of the task when the call has ended; or None."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef call_getset[] = {
    {"answer", call_answer, NULL, "The answer that has come and was not taken, or None.", NULL},
    {"sent", call_sent, NULL, "Whether its frame does not wait in line any more.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef call_members[] = {
    {"_asyncio_future_blocking", T_BOOL, offsetof(Wakeup, blocking), 0, NULL},
    {"_loop", T_OBJECT, offsetof(Wakeup, loop), READONLY, NULL},
    {"number", T_UINT, offsetof(Call, number), READONLY, NULL},
    {"size", T_ULONGLONG, offsetof(Call, size), READONLY, NULL},
    {"deadline", T_DOUBLE, offsetof(Call, deadline), READONLY, NULL},
    {"timeout", T_DOUBLE, offsetof(Call, timeout), READONLY, NULL},
    {"ended", T_BOOL, offsetof(Call, ended), READONLY, NULL},
    {"abandoned", T_BOOL, offsetof(Call, abandoned), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},
    {Py_tp_dealloc, call_dealloc},
    {Py_am_await, call_await},
    {Py_am_send, aio_call_step},
    {Py_tp_iternext, call_next},
    {Py_tp_methods, call_methods},
    {Py_tp_getset, call_getset},
    {Py_tp_members, call_members},
    {Py_tp_doc, "A request that the peer has not answered; awaited by one task."},
    {0, NULL},
};

PyType_Spec aio_call_spec = {
    .name = "aiordma._core.Call",
    .basicsize = sizeof(Call),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = call_slots,
};

/* CallTable */

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "exchange", "calls", "bytes", "abandoned", "state", NULL};
    unsigned long long calls, bytes;
    unsigned int abandoned;
    PyObject *owner, *exchange, *state = Py_None;
    CallTable *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOKKI|O", names, &owner, &exchange, &calls,
                                     &bytes, &abandoned, &state))
        return NULL;
    if (state != Py_None && !Py_IS_TYPE(state, aio_message_state_type)) {
        PyErr_SetString(PyExc_TypeError, "a MessageState is needed");
        return NULL;
    }
    self = (CallTable *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->calls = PyDict_New();
    self->owner = Py_NewRef(owner);
    self->exchange = Py_NewRef(exchange);
    self->grant = (struct aio_grant){.most_calls = calls, .most_bytes = bytes};
    self->most_abandoned = abandoned;
    self->due = INFINITY;
    if (!self->calls) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    if (state != Py_None) {
        self->state = (MessageState *)Py_NewRef(state);
        replace((PyObject **)&self->state->requests, Py_NewRef((PyObject *)self));
    }
    return (PyObject *)self;
}

static int table_traverse(PyObject *object, visitproc visit, void *arg)
{
    CallTable *self = (CallTable *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->state);
    Py_VISIT(self->owner);
    Py_VISIT(self->exchange);
    Py_VISIT((PyObject *)self->served);
    Py_VISIT(self->calls);
    for (Call *call = self->first; call; call = call->next)
        Py_VISIT((PyObject *)call);
    return 0;
}

/* Take the first of the calls that have ended; NULL if there is none. */
static Call *table_next_ended(CallTable *self)
{
    Call *call = self->first;

    if (!call)
        return NULL;
    self->first = call->next;
    if (!self->first)
        self->last = NULL;
    call->next = NULL;
    return call;
}

static int table_clear(PyObject *object)
{
    CallTable *self = (CallTable *)object;
    Call *call;

    while ((call = table_next_ended(self)))
        Py_DECREF((PyObject *)call);
    replace((PyObject **)&self->state, NULL);
    replace(&self->owner, NULL);
    replace(&self->exchange, NULL);
    replace((PyObject **)&self->served, NULL);
    replace(&self->calls, NULL);
    return 0;
}

static void table_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    table_clear(object);
    aio_free(object);
}

/* The call with a number, a reference that is the table's; NULL, perhaps with an exception. */
static Call *table_find(CallTable *self, uint32_t number)
{
    PyObject *key = self->calls ? PyLong_FromUnsignedLong(number) : NULL;
    PyObject *call = key ? PyDict_GetItemWithError(self->calls, key) : NULL;

    Py_XDECREF(key);
    return (Call *)call;
}

/* Take a call out of the table; 0, or -1 with an exception. */
static int table_forget(CallTable *self, const Call *call)
{
    PyObject *key = PyLong_FromUnsignedLong(call->number);
    int code = key ? PyDict_DelItem(self->calls, key) : -1;

    Py_XDECREF(key);
    return code;
}

/* A call that has no number yet; NULL with an exception. */
static Call *call_new(PyObject *loop, double deadline, double timeout)
{
    Call *call = (Call *)PyType_GenericAlloc(aio_call_type, 0);

    if (!call)
        return NULL;
    call->wakeup.loop = Py_NewRef(loop);
    call->deadline = deadline;
    call->timeout = timeout;
    return call;
}

/* Give a call the next number that is free, and a place in the table; 0, or -1. */
static int table_enter(CallTable *self, Call *call, uint64_t size)
{
    PyObject *key = NULL;
    int taken = 1;

    while (taken > 0) {
        self->number = (self->number + 1) % AIO_ANSWER_BODY;
        Py_XDECREF(key);
        key = PyLong_FromUnsignedLong(self->number);
        taken = key && self->calls ? PyDict_Contains(self->calls, key) : -1;
    }
    call->size = size;
    call->number = self->number;
    if (!taken)
        taken = PyDict_SetItem(self->calls, key, (PyObject *)call);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "the table is gone");
    Py_XDECREF(key);
    return taken;
}

/* Note the end of a call: with an answer or a failure, of which a reference is stolen, or none. */
static void table_note_end(CallTable *self, Call *call, PyObject *message, PyObject *failure)
{
    if (call->ended) {
        Py_XDECREF(message);
        Py_XDECREF(failure);
        return;
    }
    call->ended = 1;
    call->message = message;
    call->failure = failure;
    *(self->last ? &self->last->next : &self->first) = (Call *)Py_NewRef((PyObject *)call);
    self->last = call;
}

/* The final frame of a call has come; references are stolen, as by table_note_end.  0, or -1. */
static int table_finish(CallTable *self, Call *call, PyObject *message, PyObject *failure)
{
    int code;

    Py_INCREF((PyObject *)call);
    code = table_forget(self, call);
    if (code) {
        Py_XDECREF(message);
        Py_XDECREF(failure);
    } else {
        self->abandoned -= call->abandoned != 0;
        self->steps = 0;
        grant_give_back(&self->grant, call->size);
        table_note_end(self, call, message, failure);
    }
    Py_DECREF((PyObject *)call);
    return code;
}

/* Resume the task of a call that has ended, wherever it waits: 1, 0 if it does not, -1. */
static int call_resume(Call *self, int soon)
{
    QueuedSend *queued = self->queued;
    int woken;

    if (!queued)
        return aio_wake_or_soon(&self->wakeup, soon);
    Py_INCREF((PyObject *)queued);
    aio_line_leave(queued);
    woken = aio_wake_or_soon(&queued->wakeup, soon);
    Py_DECREF((PyObject *)queued);
    return woken;
}

/*
 * Resume the tasks whose calls have ended: now, or `soon`, by the loop.  0, or -1 with the
 * exception of the first task that has raised one, after which the loop resumes the others.
 */
static int table_resume(CallTable *self, int soon)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    Call *call;
    int failed = 0;

    while ((call = table_next_ended(self))) {
        PyObject *told;
        int code = 0;

        if (call->instead) {
            told = PyObject_CallNoArgs(call->instead);
            code = told ? 0 : -1;
            Py_XDECREF(told);
        } else if (call_resume(call, soon || failed) < 0) {
            code = -1;
        }
        Py_DECREF((PyObject *)call);
        if (code && !failed) {
            PyErr_Fetch(&type, &value, &traceback);
            failed = 1;
        } else if (code) {
            PyErr_Clear();
        }
    }
    if (failed)
        PyErr_Restore(type, value, traceback);
    return failed ? -1 : 0;
}

/* Going out */

/* The time of the loop, or -1 with an exception. */
static double time_of(PyObject *loop)
{
    PyObject *time = PyObject_CallMethodObjArgs(loop, aio_name.time, NULL);
    double seconds = time ? PyFloat_AsDouble(time) : -1;

    Py_XDECREF(time);
    return seconds;
}

/* Post the frame of a call, or have it wait in line: 0, an errno, AIO_FOR_PYTHON or AIO_RAISED. */
static int post_call(MessageState *state, Call *call, const struct aio_pieces *pieces,
                     uint64_t microseconds)
{
    struct aio_request_header header = {
        .kind = AIO_REQUEST, .number = call->number, .argument = microseconds};
    uint8_t bytes[AIO_REQUEST_HEADER];
    struct aio_bytes frame = {.piece = {bytes, sizeof(bytes)}, .more = pieces->pieces};

    request_pack(bytes, &header);
    return aio_send_or_queue(state, &frame, sizeof(bytes) + pieces->length, &call->queued);
}

/* Send a call whose bytes are open, and which is counted: as aio_call_begin. */
static int call_send(CallTable *self, Call *call, const struct aio_pieces *pieces, double seconds)
{
    int code;

    if (table_enter(self, call, pieces->length)) {
        grant_give_back(&self->grant, pieces->length);
        return AIO_RAISED;
    }
    code = post_call(self->state, call, pieces, call->tell ? request_microseconds(seconds) : 0);
    if (code && code != AIO_RAISED) { /* nothing was sent: Python tries again */
        grant_give_back(&self->grant, call->size);
        if (table_forget(self, call))
            code = AIO_RAISED;
    }
    return code;
}

/* Have a call wait in line for the grant: AIO_OK, or AIO_RAISED. */
static int call_line_up(CallTable *self, Call *call, PyObject *data, uint64_t size)
{
    PyObject *told;

    call->data = Py_NewRef(data);
    call->size = size;
    told = PyObject_CallMethod(self->owner, "_line_up", "O", (PyObject *)call);
    Py_XDECREF(told);
    return told ? AIO_OK : AIO_RAISED;
}

/* Send a new call, or have it wait in line: as aio_call_begin. */
static int call_send_or_line_up(CallTable *self, Call *call, PyObject *data)
{
    struct aio_pieces pieces;
    int waits, code = aio_pieces_open(&pieces, data);
    uint64_t size = pieces.length;

    if (code)
        return code;
    waits =
        self->in_line || self->abandoned >= self->most_abandoned || !grant_fits(&self->grant, size);
    if (self->failed ||
        size + AIO_REQUEST_HEADER > (uint64_t)connection_eager_size(self->state->connection)) {
        code = AIO_FOR_PYTHON;
    } else if (!waits) {
        grant_take(&self->grant, size);
        code = call_send(self, call, &pieces, call->timeout);
    }
    aio_pieces_close(&pieces);
    return code || !waits ? code : call_line_up(self, call, data, size);
}

/* Have Python's timer ring for a deadline that is earlier: AIO_OK, or AIO_RAISED. */
static int table_ring_at(const CallTable *self, double deadline)
{
    PyObject *told;

    if (deadline >= self->due || !self->owner)
        return AIO_OK;
    told = PyObject_CallMethod(self->owner, "_ring_at", "d", deadline);
    Py_XDECREF(told);
    return told ? AIO_OK : AIO_RAISED;
}

int aio_call_go(CallTable *self, Call *call, double *left)
{
    PyObject *data = call->data;
    struct aio_pieces pieces;
    int code = AIO_RAISED;

    call->data = NULL;
    call->admitted = 0;
    aio_wakeup_forget(&call->wakeup);
    *left = call->deadline < INFINITY ? call->deadline - time_of(call->wakeup.loop) : INFINITY;
    if (!PyErr_Occurred() && !table_ring_at(self, call->deadline))
        code = aio_pieces_open(&pieces, data);
    if (!code && pieces.length == call->size && !self->failed) {
        code = call_send(self, call, &pieces, *left);
        aio_pieces_close(&pieces);
    } else { /* the program has changed its buffer, or the connection is over */
        grant_give_back(&self->grant, call->size);
        if (!code)
            aio_pieces_close(&pieces);
        code = code == AIO_RAISED ? AIO_RAISED : AIO_FOR_PYTHON;
    }
    Py_DECREF(data);
    return code == AIO_FOR_PYTHON ? AIO_NO_ROOM : code;
}

/*
 * The call is made before its bytes are opened: up to Python 3.11 the collector may then run a
 * function of the program, and of some objects the bytes are not exported (pieces.c).
 */
int aio_call_begin(CallTable *self, PyObject *data, double timeout, int tell, PyObject **begun)
{
    MessageState *state = self->state;
    PyObject *loop;
    Call *call;
    double deadline = INFINITY;
    int code;

    if (!state || timeout <= 0 || PyList_CheckExact(data) || PyTuple_CheckExact(data))
        return AIO_FOR_PYTHON;
    code = aio_is_elsewhere(state);
    if (code)
        return code < 0 ? AIO_RAISED : AIO_FOR_PYTHON;
    loop = state->receive_wakeup->wakeup.loop;
    if (timeout < INFINITY) {
        deadline = time_of(loop) + timeout;
        if (PyErr_Occurred())
            return AIO_RAISED;
        if (deadline < self->due) /* Python sets the timer */
            return AIO_FOR_PYTHON;
    }
    call = call_new(loop, deadline, timeout);
    if (!call)
        return AIO_RAISED;
    call->tell = (char)tell;
    code = call_send_or_line_up(self, call, data);
    if (!code || (code == AIO_RAISED && table_find(self, call->number) == call))
        *begun = (PyObject *)call;
    else
        Py_DECREF((PyObject *)call);
    return code;
}

/* Coming in */

/* Give a frame that is not processed here to Python: 1; 0 if there is none; -1. */
static int leave_frame_to_python(const CallTable *self)
{
    PyObject *told;
    int more;

    if (!self->exchange)
        return 0;
    told = PyObject_CallMethodObjArgs(self->exchange, aio_name.read_next, NULL);
    more = told ? told == Py_True : -1;
    Py_XDECREF(told);
    return more;
}

/* A failure after which no further frame is read: Python ends the connection.  1, or AIO_RAISED. */
static int fail_requests(const CallTable *self)
{
    PyObject *error = aio_raised(), *told = NULL;

    if (self->exchange && error)
        told = PyObject_CallMethod(self->exchange, "_broken", "O", error);
    Py_XDECREF(error);
    Py_XDECREF(told);
    return told ? 1 : AIO_RAISED;
}

/* A request of the peer has come, and its body is copied: 1, or AIO_RAISED. */
static int request_admit(CallTable *self, const struct aio_request_header *header, PyObject *body)
{
    int code = self->served
                   ? aio_request_arrived(self->served, header->number, header->argument, body)
                   : AIO_FOR_PYTHON;
    PyObject *told;

    if (code != AIO_FOR_PYTHON)
        return code ? fail_requests(self) : 1;
    told = PyObject_CallMethod(self->exchange, "on_request", "IKO", header->number,
                               (unsigned long long)header->argument, body);
    Py_XDECREF(told);
    return told ? 1 : AIO_RAISED;
}

/*
 * Process the oldest message, if it is a REQUEST or an ANSWER in a slot of its own, and its body is
 * copied: 1; 0 if there is none, and the next is told; AIO_FOR_PYTHON, and nothing has changed; or
 * AIO_RAISED.
 */
static int process_first(CallTable *self)
{
    MessageState *state = self->state;
    struct aio_connection *c = state->connection;
    const struct aio_arrival *first = connection_first(c);
    struct aio_request_header header;
    const char *bytes;
    PyObject *body;
    Call *call = NULL;
    int code;

    if (!first)
        return connection_begin_receive(c) == AIO_RECEIVE_WAIT ? 0 : AIO_FOR_PYTHON;
    if (first->large || first->more || first->landing || first->has_imm)
        return AIO_FOR_PYTHON;
    bytes = connection_first_bytes(c);
    if (!request_parse((const uint8_t *)bytes, first->length, &header))
        return AIO_FOR_PYTHON;
    if (header.kind == AIO_ANSWER && !(call = table_find(self, header.number)))
        return PyErr_Occurred() ? AIO_RAISED : AIO_FOR_PYTHON;
    Py_XINCREF((PyObject *)call);
    body = aio_message_copied(bytes + AIO_REQUEST_HEADER,
                              (Py_ssize_t)(first->length - AIO_REQUEST_HEADER));
    /* The collector may run a function of the program in an allocation, which aborts. */
    if (!body || connection_first(c) != first) {
        Py_XDECREF((PyObject *)call);
        Py_XDECREF(body);
        return body ? AIO_FOR_PYTHON : AIO_RAISED;
    }
    aio_release_slot(state, connection_drop_first(c));
    if (call) {
        code = table_finish(self, call, body, NULL);
        Py_DECREF((PyObject *)call);
        return code ? AIO_RAISED : 1;
    }
    code = request_admit(self, &header, body);
    Py_DECREF(body);
    return code;
}

/* Have Python let in those that wait in line, if a call has ended. */
static int let_in(const CallTable *self)
{
    PyObject *told;

    if (!self->in_line || !self->owner)
        return 0;
    told = PyObject_CallMethod(self->owner, "_let_in", NULL);
    Py_XDECREF(told);
    return told ? 0 : -1;
}

int aio_requests_deliver(CallTable *self, int soon)
{
    int code = 1;

    Py_INCREF((PyObject *)self);
    while (code > 0 && self->state && !self->failed) {
        code = process_first(self);
        if (code == AIO_RAISED && PyErr_ExceptionMatches(PyExc_MemoryError)) {
            PyErr_Clear(); /* Python meets it, too, and ends the connection */
            code = AIO_FOR_PYTHON;
        }
        if (code == AIO_FOR_PYTHON)
            code = leave_frame_to_python(self);
    }
    if (!code)
        code = let_in(self);
    if (code < 0) { /* its task, or the loop, raises; the others go on */
        PyObject *type, *value, *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        if (table_resume(self, 1))
            PyErr_Clear();
        PyErr_Restore(type, value, traceback);
        code = -1;
    } else {
        code = table_resume(self, soon);
    }
    Py_DECREF((PyObject *)self);
    return code;
}

/* For Python */

static PyObject *table_fits(PyObject *object, PyObject *size)
{
    CallTable *self = (CallTable *)object;
    unsigned long long bytes = PyLong_AsUnsignedLongLong(size);

    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(self->abandoned < self->most_abandoned &&
                           grant_fits(&self->grant, bytes));
}

static PyObject *table_take(PyObject *object, PyObject *size)
{
    unsigned long long bytes = PyLong_AsUnsignedLongLong(size);

    if (PyErr_Occurred())
        return NULL;
    grant_take(&((CallTable *)object)->grant, bytes);
    Py_RETURN_NONE;
}

static PyObject *table_give_back(PyObject *object, PyObject *size)
{
    unsigned long long bytes = PyLong_AsUnsignedLongLong(size);

    if (PyErr_Occurred())
        return NULL;
    grant_give_back(&((CallTable *)object)->grant, bytes);
    Py_RETURN_NONE;
}

static PyObject *table_set_grant(PyObject *object, PyObject *args)
{
    unsigned long long calls, bytes;

    if (!PyArg_ParseTuple(args, "KK", &calls, &bytes))
        return NULL;
    ((CallTable *)object)->grant.most_calls = calls;
    ((CallTable *)object)->grant.most_bytes = bytes;
    Py_RETURN_NONE;
}

static PyObject *table_enter_method(PyObject *object, PyObject *args)
{
    unsigned long long size;
    double deadline, timeout;
    PyObject *loop;
    Call *call;

    if (!PyArg_ParseTuple(args, "OKdd", &loop, &size, &deadline, &timeout))
        return NULL;
    call = call_new(loop, deadline, timeout);
    if (call && table_enter((CallTable *)object, call, size))
        replace((PyObject **)&call, NULL);
    return (PyObject *)call;
}

/* number_from(number): the next call gets this number, or the next one that is free. */
static PyObject *table_number_from(PyObject *object, PyObject *number)
{
    unsigned long first = PyLong_AsUnsignedLong(number);

    if (PyErr_Occurred())
        return NULL;
    ((CallTable *)object)->number = (uint32_t)(first - 1) % AIO_ANSWER_BODY;
    Py_RETURN_NONE;
}

static PyObject *table_find_method(PyObject *object, PyObject *number)
{
    unsigned long key = PyLong_AsUnsignedLong(number);
    Call *call = PyErr_Occurred() ? NULL : table_find((CallTable *)object, (uint32_t)key);

    if (!call && PyErr_Occurred())
        return NULL;
    return Py_NewRef(call ? (PyObject *)call : Py_None);
}

/* Whether an object is a call of the table; -1 with an exception. */
static int has_call(CallTable *self, PyObject *object)
{
    Call *found;

    if (!Py_IS_TYPE(object, aio_call_type)) {
        PyErr_SetString(PyExc_TypeError, "a Call is needed");
        return -1;
    }
    found = table_find(self, ((Call *)object)->number);
    return !found && PyErr_Occurred() ? -1 : (PyObject *)found == object;
}

static PyObject *table_finish_method(PyObject *object, PyObject *args)
{
    PyObject *call, *message, *failure;
    int has;

    if (!PyArg_ParseTuple(args, "OOO", &call, &message, &failure))
        return NULL;
    has = has_call((CallTable *)object, call);
    if (has < 0 || (has && table_finish((CallTable *)object, (Call *)call,
                                        message == Py_None ? NULL : Py_NewRef(message),
                                        failure == Py_None ? NULL : Py_NewRef(failure))))
        return NULL;
    return PyBool_FromLong(has);
}

static PyObject *table_end(PyObject *object, PyObject *args)
{
    PyObject *call, *failure;

    if (!PyArg_ParseTuple(args, "O!O", aio_call_type, &call, &failure))
        return NULL;
    table_note_end((CallTable *)object, (Call *)call, NULL, Py_NewRef(failure));
    Py_RETURN_NONE;
}

/* abandon(call, sent): its task waits no more; if nothing was sent, the number is free again.
 * Whether the peer is to be told. */
static PyObject *table_abandon(PyObject *object, PyObject *args)
{
    CallTable *self = (CallTable *)object;
    PyObject *call;
    int sent, has;

    if (!PyArg_ParseTuple(args, "Op", &call, &sent))
        return NULL;
    has = has_call(self, call);
    if (has < 0)
        return NULL;
    if (((Call *)call)->admitted)
        grant_give_back(&self->grant, ((Call *)call)->size);
    ((Call *)call)->admitted = 0;
    replace(&((Call *)call)->data, NULL);
    if (((Call *)call)->queued) {
        aio_line_leave(((Call *)call)->queued);
        replace((PyObject **)&((Call *)call)->queued, NULL);
        sent = 0;
    }
    ((Call *)call)->ended = 1;
    if (!has)
        Py_RETURN_FALSE;
    if (!sent) {
        grant_give_back(&self->grant, ((Call *)call)->size);
        return table_forget(self, (Call *)call) ? NULL : Py_NewRef(Py_False);
    }
    if (!((Call *)call)->abandoned)
        self->abandoned++;
    ((Call *)call)->abandoned = 1;
    Py_RETURN_TRUE;
}

/* step(): count a step of the time in which the peer has to end an abandoned call: the steps in a
 * row without a final frame.  While other calls are in progress, it may be busy with those. */
static PyObject *table_step(PyObject *object, PyObject *Py_UNUSED(unused))
{
    CallTable *self = (CallTable *)object;

    self->steps = self->abandoned == (uint32_t)PyDict_Size(self->calls) ? self->steps + 1 : 0;
    return PyLong_FromUnsignedLong(self->steps);
}

static PyObject *table_begin_steps(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((CallTable *)object)->steps = 0;
    Py_RETURN_NONE;
}

static PyObject *table_set_due(PyObject *object, PyObject *value)
{
    double due = PyFloat_AsDouble(value);

    if (PyErr_Occurred())
        return NULL;
    ((CallTable *)object)->due = due;
    Py_RETURN_NONE;
}

static PyObject *table_set_line(PyObject *object, PyObject *value)
{
    int in_line = PyObject_IsTrue(value);

    if (in_line < 0)
        return NULL;
    ((CallTable *)object)->in_line = (char)in_line;
    Py_RETURN_NONE;
}

/* serve(table): the requests of the peer. */
static PyObject *table_serve(PyObject *object, PyObject *served)
{
    if (!PyObject_TypeCheck(served, aio_request_table_type)) {
        PyErr_SetString(PyExc_TypeError, "a RequestTable is needed");
        return NULL;
    }
    replace((PyObject **)&((CallTable *)object)->served, Py_NewRef(served));
    Py_RETURN_NONE;
}

static PyObject *table_list(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyDict_Values(((CallTable *)object)->calls);
}

/*
 * close(): the connection is over; the calls, which the caller ends.  Nothing refers to the owner
 * any more, so that all are freed with their last references.
 */
static PyObject *table_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    CallTable *self = (CallTable *)object;
    PyObject *calls = PyDict_Values(self->calls);

    if (!calls)
        return NULL;
    self->failed = 1;
    self->in_line = 0;
    PyDict_Clear(self->calls);
    replace(&self->owner, NULL);
    replace(&self->exchange, NULL);
    replace((PyObject **)&self->served, NULL);
    if (self->state && self->state->requests == self)
        replace((PyObject **)&self->state->requests, NULL);
    return calls;
}

static PyObject *table_resume_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    CallTable *self = (CallTable *)object;

    return table_resume(self, !self->state || self->state->soon) ? NULL : Py_NewRef(Py_None);
}

static Py_ssize_t table_length(PyObject *object)
{
    return PyDict_Size(((CallTable *)object)->calls);
}

static PyMethodDef table_methods[] = {
    {"fits", table_fits, METH_O, "Whether a call of so many bytes may go out."},
    {"take", table_take, METH_O, "Count a call of so many bytes against the grant."},
    {"give_back", table_give_back, METH_O, "Undo `take`, for a call that is not in the table."},
    {"set_grant", table_set_grant, METH_VARARGS, "What the peer has granted: calls, bytes."},
    {"enter", table_enter_method, METH_VARARGS,
     "A call with a number: loop, bytes, deadline, timeout; `take` was called for it."},
    {"number_from", table_number_from, METH_O, "The number of the next call, if it is free."},
    {"find", table_find_method, METH_O, "The call with a number, or None."},
    {"finish", table_finish_method, METH_VARARGS,
     "The final frame of a call has come: call, answer or None, exception or None."},
    {"end", table_end, METH_VARARGS, "Have a call raise an exception: call, exception."},
    {"abandon", table_abandon, METH_VARARGS,
     "The task of a call waits no more: call, whether it was sent; whether the peer is to be "
     "told."},
    {"step", table_step, METH_NOARGS,
     "Count a step in which the peer has ended no call, while all are abandoned; the steps."},
    {"begin_steps", table_begin_steps, METH_NOARGS, "Count the steps anew."},
    {"set_due", table_set_due, METH_O, "The time at which a timer rings for the deadlines."},
    {"set_line", table_set_line, METH_O, "Whether tasks wait in line."},
    {"serve", table_serve, METH_O, "The RequestTable that gets the peer's requests."},
    {"calls", table_list, METH_NOARGS, "The calls, as a list."},
    {"close", table_close, METH_NOARGS, "No call goes out any more; the calls in progress."},
    {"resume", table_resume_method, METH_NOARGS,
     "Resume the tasks whose calls have ended; while no task is running."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef table_members[] = {
    {"abandoned", T_UINT, offsetof(CallTable, abandoned), READONLY, NULL},
    {"number", T_UINT, offsetof(CallTable, number), READONLY, NULL},
    {"due", T_DOUBLE, offsetof(CallTable, due), READONLY, NULL},
    {"taken", T_ULONGLONG, offsetof(CallTable, grant.calls), READONLY, NULL},
    {"taken_bytes", T_ULONGLONG, offsetof(CallTable, grant.bytes), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot table_slots[] = {
    {Py_tp_new, table_new},
    {Py_tp_traverse, table_traverse},
    {Py_tp_clear, table_clear},
    {Py_tp_dealloc, table_dealloc},
    {Py_mp_length, table_length},
    {Py_tp_methods, table_methods},
    {Py_tp_members, table_members},
    {Py_tp_doc, "The requests of this side of a connection that are not answered."},
    {0, NULL},
};

PyType_Spec aio_call_table_spec = {
    .name = "aiordma._core.CallTable",
    .basicsize = sizeof(CallTable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = table_slots,
};
