/*
 * RequestTable: the requests of the peer that this side has not answered, by their numbers, and how
 * much of what was granted they take.  PeerRequest: one of them.
 *
 * requests/served.py has the rules.  It has a subclass of each of the two types, and does what is
 * rare.  Here a request is admitted that came whole, and a handler begins with it, or it waits; and
 * an answer is sent that fits into a slot.  In every other case nothing has changed, and Python
 * goes on by the methods, which do the same steps one by one.
 */
#include "core.h"
#include "requests.h"

struct request_table {
    PyObject_HEAD
    MessageState *state; /* NULL: everything is done in Python */
    PyTypeObject *kind;  /* of the requests: a subclass of PeerRequest */
    PyObject *numbers;   /* dict: requests, and what only Python knows, by number */
    PyObject *queue;     /* dict: requests that wait for the program */
    PyObject *starters;  /* list: what may begin with a request at once */
    uint64_t limit;      /* what was granted */
    uint64_t limit_bytes;
    uint64_t hard_limit; /* the most that ever was */
    uint64_t hard_bytes;
    int64_t taken;        /* requests that the program has, and is not done with */
    int64_t held;         /* bytes of these, and of those in the queue */
    int64_t queued;       /* bytes of those in the queue */
    int64_t may_hold;     /* without asking the listener's budget */
    int64_t narrow_below; /* fewer bytes reduce the lease of that budget */
    char admits;          /* requests are admitted here */
};

/* Whether the program may have one more request, with which it has so many bytes. */
static int served_has_room(const RequestTable *self, int64_t bytes)
{
    return !self->taken ||
           ((uint64_t)self->taken < self->limit && (uint64_t)bytes <= self->limit_bytes);
}

/* Call a method of Python's subclass; 0, or -1 with an exception. */
static int tell(PyObject *object, const char *method)
{
    PyObject *told = PyObject_CallMethod(object, method, NULL);

    Py_XDECREF(told);
    return told ? 0 : -1;
}

/* The program is done with a request of so many bytes: 0, or -1 with an exception. */
static int served_note_done(RequestTable *self, uint64_t size)
{
    self->taken--;
    self->held -= (int64_t)size;
    if (self->held < self->narrow_below && tell((PyObject *)self, "_narrow"))
        return -1;
    return self->queue && PyDict_Size(self->queue) ? tell((PyObject *)self, "_let_next") : 0;
}

/* PeerRequest */

typedef struct {
    PyObject_HEAD
    RequestTable *table;
    PyObject *body;
    PyObject *deadline; /* of the loop's clock, or None */
    PyObject *starter;  /* has begun with it, and is told when it is canceled; or NULL */
    uint64_t size;
    uint32_t number;
    char answered;
    char canceled;
} PeerRequest;

static int peer_request_traverse(PyObject *object, visitproc visit, void *arg)
{
    PeerRequest *self = (PeerRequest *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->table);
    Py_VISIT(self->body);
    Py_VISIT(self->deadline);
    Py_VISIT(self->starter);
    return 0;
}

static int peer_request_clear(PyObject *object)
{
    PeerRequest *self = (PeerRequest *)object;

    replace((PyObject **)&self->table, NULL);
    replace(&self->body, NULL);
    replace(&self->deadline, NULL);
    replace(&self->starter, NULL);
    return 0;
}

/* The program has dropped it: its peer is told, unless it has an answer. */
static void peer_request_finalize(PyObject *object)
{
    PyObject *type, *value, *traceback;
    PeerRequest *self = (PeerRequest *)object;

    if (self->answered || !self->table)
        return;
    PyErr_Fetch(&type, &value, &traceback);
    if (tell(object, "_dropped"))
        PyErr_WriteUnraisable(object);
    PyErr_Restore(type, value, traceback);
}

static void peer_request_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    peer_request_clear(object);
    aio_free(object);
}

/* A request of a table, which has no place in it yet; NULL with an exception. */
static PeerRequest *peer_request_make(RequestTable *table, PyTypeObject *kind, uint32_t number,
                                      PyObject *deadline, PyObject *body)
{
    PeerRequest *self = (PeerRequest *)PyType_GenericAlloc(kind, 0);

    if (!self)
        return NULL;
    self->table = (RequestTable *)Py_NewRef((PyObject *)table);
    self->deadline = Py_NewRef(deadline);
    self->body = Py_NewRef(body);
    self->size = (uint64_t)((Message *)body)->length;
    self->number = number;
    return self;
}

static PyObject *peer_request_new(PyTypeObject *kind, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"table", "number", "deadline", "body", NULL};
    PyObject *table, *deadline, *body;
    unsigned int number;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!IOO!", names, aio_request_table_type, &table,
                                     &number, &deadline, aio_message_type, &body))
        return NULL;
    return (PyObject *)peer_request_make((RequestTable *)table, kind, number, deadline, body);
}

/* The answer goes out, or has gone: its number is free, and the peer may use it again. */
static void peer_request_note_answered(PeerRequest *self, PyObject *key)
{
    PyObject *type, *value, *traceback;

    self->answered = 1;
    PyErr_Fetch(&type, &value, &traceback); /* of a signal's handler */
    if (self->table->numbers && PyDict_DelItem(self->table->numbers, key))
        PyErr_Clear(); /* the connection is over, and the table is empty */
    PyErr_Restore(type, value, traceback);
}

/* The whole answer has gone out, with this code: the same, or AIO_RAISED. */
static int peer_request_note_sent(const PeerRequest *self, int code)
{
    RequestTable *table = (RequestTable *)Py_NewRef((PyObject *)self->table);
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback); /* of a signal's handler */
    if (served_note_done(table, self->size))
        code = AIO_RAISED;
    if (type)
        PyErr_Restore(type, value, traceback);
    Py_DECREF((PyObject *)table);
    return code;
}

/* Send the answer whose bytes are open: as aio_send_or_queue. */
static int peer_request_send(const PeerRequest *self, const struct aio_pieces *pieces,
                             QueuedSend **queued)
{
    MessageState *state = self->table->state;
    struct aio_request_header header = {.kind = AIO_ANSWER, .number = self->number};
    uint8_t bytes[AIO_REQUEST_HEADER];
    struct aio_bytes frame = {.piece = {bytes, sizeof(bytes)}, .more = pieces->pieces};
    uint64_t length = sizeof(bytes) + pieces->length;

    if (self->answered || self->canceled || /* by code of the program, behind the first look */
        length > (uint64_t)connection_eager_size(state->connection))
        return AIO_FOR_PYTHON;
    request_pack(bytes, &header);
    return aio_send_or_queue(state, &frame, length, queued);
}

/*
 * _answer(data): send the answer now, or have it wait in line if the peer takes no more: 0, or the
 * errno of the post, and it counts no more; or a QueuedSend, and it counts until Python says that
 * it is done; or AIO_FOR_PYTHON, and nothing has changed.
 */
static PyObject *peer_request_answer(PyObject *object, PyObject *data)
{
    PeerRequest *self = (PeerRequest *)object;
    RequestTable *table = self->table;
    QueuedSend *queued = NULL;
    PyObject *key;
    struct aio_pieces pieces;
    int code;

    if (!table || !table->state || self->answered || self->canceled || PyList_CheckExact(data) ||
        PyTuple_CheckExact(data))
        return PyLong_FromLong(AIO_FOR_PYTHON);
    code = aio_is_elsewhere(table->state);
    if (code)
        return code < 0 ? NULL : PyLong_FromLong(AIO_FOR_PYTHON);
    key = PyLong_FromUnsignedLong(self->number); /* before the bytes are open: see calls.c */
    if (!key)
        return NULL;
    code = aio_pieces_open(&pieces, data);
    if (code) {
        Py_DECREF(key);
        return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
    }
    code = peer_request_send(self, &pieces, &queued);
    aio_pieces_close(&pieces);
    if (code >= 0 || code == AIO_RAISED)
        peer_request_note_answered(self, key);
    Py_DECREF(key);
    if (queued)
        return (PyObject *)queued;
    if (code >= 0 || code == AIO_RAISED)
        code = peer_request_note_sent(self, code);
    return code == AIO_RAISED ? NULL : PyLong_FromLong(code);
}

static PyObject *peer_request_note_answered_method(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((PeerRequest *)object)->answered = 1;
    Py_RETURN_NONE;
}

static PyObject *peer_request_note_canceled(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((PeerRequest *)object)->canceled = 1;
    Py_RETURN_NONE;
}

/*
 * _end(): its handler has returned; Python answers, if nobody has.  Whether requests wait for the
 * program.
 */
static PyObject *peer_request_end(PyObject *object, PyObject *Py_UNUSED(unused))
{
    PeerRequest *self = (PeerRequest *)object;

    replace(&self->starter, NULL);
    if (!self->answered && tell(object, "_answer_for_the_program"))
        return NULL;
    return PyBool_FromLong(self->table && self->table->queue && PyDict_Size(self->table->queue));
}

static PyObject *peer_request_set_starter(PyObject *object, PyObject *starter)
{
    replace(&((PeerRequest *)object)->starter, starter == Py_None ? NULL : Py_NewRef(starter));
    Py_RETURN_NONE;
}

static PyMethodDef peer_request_methods[] = {
    {"_answer", peer_request_answer, METH_O,
     "Send the answer: 0, an errno, a QueuedSend that sends it, or FOR_PYTHON."},
    {"_note_answered", peer_request_note_answered_method, METH_NOARGS, "It has its answer."},
    {"_note_canceled", peer_request_note_canceled, METH_NOARGS, "The peer waits no more."},
    {"_end", peer_request_end, METH_NOARGS,
     "Its handler has returned; whether requests wait for the program."},
    {"_set_starter", peer_request_set_starter, METH_O,
     "What is told when it is canceled, or None."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef peer_request_members[] = {
    {"body", T_OBJECT, offsetof(PeerRequest, body), READONLY, NULL},
    {"deadline", T_OBJECT, offsetof(PeerRequest, deadline), READONLY, NULL},
    {"_served", T_OBJECT, offsetof(PeerRequest, table), READONLY, NULL},
    {"_starter", T_OBJECT, offsetof(PeerRequest, starter), READONLY, NULL},
    {"_size", T_ULONGLONG, offsetof(PeerRequest, size), READONLY, NULL},
    {"_number", T_UINT, offsetof(PeerRequest, number), READONLY, NULL},
    {"_answered", T_BOOL, offsetof(PeerRequest, answered), READONLY, NULL},
    {"_canceled", T_BOOL, offsetof(PeerRequest, canceled), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot peer_request_slots[] = {
    {Py_tp_new, peer_request_new},
    {Py_tp_traverse, peer_request_traverse},
    {Py_tp_clear, peer_request_clear},
    {Py_tp_finalize, peer_request_finalize},
    {Py_tp_dealloc, peer_request_dealloc},
    {Py_tp_methods, peer_request_methods},
    {Py_tp_members, peer_request_members},
    {Py_tp_doc, "A request of the peer; the base of Request."},
    {0, NULL},
};

PyType_Spec aio_peer_request_spec = {
    .name = "aiordma._core.PeerRequest",
    .basicsize = sizeof(PeerRequest),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = peer_request_slots,
};

/* RequestTable */

static PyObject *served_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kind", "requests", "bytes", "may_hold", "state", NULL};
    unsigned long long requests, bytes;
    long long may_hold;
    PyObject *kind, *state = Py_None;
    RequestTable *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!KKL|O", names, &PyType_Type, &kind, &requests,
                                     &bytes, &may_hold, &state))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)kind, aio_peer_request_type) ||
        (state != Py_None && !Py_IS_TYPE(state, aio_message_state_type))) {
        PyErr_SetString(PyExc_TypeError, "a subclass of PeerRequest and a MessageState are needed");
        return NULL;
    }
    self = (RequestTable *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->state = state == Py_None ? NULL : (MessageState *)Py_NewRef(state);
    self->kind = (PyTypeObject *)Py_NewRef(kind);
    self->numbers = PyDict_New();
    self->queue = PyDict_New();
    self->starters = PyList_New(0);
    self->limit = self->hard_limit = requests;
    self->limit_bytes = self->hard_bytes = bytes;
    self->may_hold = may_hold;
    if (!self->numbers || !self->queue || !self->starters)
        replace((PyObject **)&self, NULL);
    return (PyObject *)self;
}

static int served_traverse(PyObject *object, visitproc visit, void *arg)
{
    RequestTable *self = (RequestTable *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->state);
    Py_VISIT((PyObject *)self->kind);
    Py_VISIT(self->numbers);
    Py_VISIT(self->queue);
    Py_VISIT(self->starters);
    return 0;
}

static int served_clear(PyObject *object)
{
    RequestTable *self = (RequestTable *)object;

    replace((PyObject **)&self->state, NULL);
    replace((PyObject **)&self->kind, NULL);
    replace(&self->numbers, NULL);
    replace(&self->queue, NULL);
    replace(&self->starters, NULL);
    return 0;
}

static void served_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    served_clear(object);
    aio_free(object);
}

/* Coming in */

/* The time of the loop after so many microseconds, or None for 0; NULL with an exception. */
static PyObject *deadline_in(const MessageState *state, uint64_t microseconds)
{
    PyObject *now;
    double time;

    if (!microseconds)
        return Py_NewRef(Py_None);
    now = PyObject_CallMethodObjArgs(state->receive_wakeup->wakeup.loop, aio_name.time, NULL);
    time = now ? PyFloat_AsDouble(now) : -1;
    Py_XDECREF(now);
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(time + (double)microseconds * 1e-6);
}

/* Whether a request of so many bytes, with a new number, may be admitted here; -1. */
static int served_may_admit(const RequestTable *self, PyObject *key, uint64_t size)
{
    int has;

    if (!self->admits ||
        (PyDict_Size(self->queue) && (uint64_t)self->queued + size > self->hard_bytes) ||
        (uint64_t)PyDict_Size(self->numbers) >= self->hard_limit ||
        self->held + (int64_t)size > self->may_hold)
        return 0;
    has = PyDict_Contains(self->numbers, key);
    return has < 0 ? -1 : !has;
}

/* Have a starter begin with a request: 1, or 0 if none does; -1. */
static int served_begin(RequestTable *self, PeerRequest *request)
{
    if (!served_has_room(self, self->held))
        return 0;
    for (Py_ssize_t i = 0; self->starters && i < PyList_Size(self->starters); i++) {
        PyObject *starter = Py_NewRef(PyList_GetItem(self->starters, i)), *begun;

        self->taken++; /* before, as it may be answered in here */
        begun = PyObject_CallMethodObjArgs(starter, aio_name.begin, (PyObject *)request, NULL);
        if (begun == Py_True && !request->answered)
            replace(&request->starter, Py_NewRef(starter));
        else if (begun == Py_False)
            self->taken--;
        Py_DECREF(starter);
        Py_XDECREF(begun);
        if (begun != Py_False)
            return begun ? 1 : -1;
    }
    return 0;
}

/*
 * A request has come: AIO_OK; AIO_FOR_PYTHON, and nothing has changed; or AIO_RAISED, after which
 * the connection has to end.
 */
int aio_request_arrived(RequestTable *self, uint32_t number, uint64_t microseconds, PyObject *body)
{
    PyObject *key, *deadline, *told;
    PeerRequest *request = NULL;
    int code;

    if (!self->state || !self->kind || !self->admits)
        return AIO_FOR_PYTHON;
    key = PyLong_FromUnsignedLong(number);
    deadline = key ? deadline_in(self->state, microseconds) : NULL;
    if (deadline)
        request = peer_request_make(self, self->kind, number, deadline, body);
    Py_XDECREF(deadline);
    /* Only now, as a function of the program may have run before. */
    code = request ? served_may_admit(self, key, request->size) : -1;
    if (code > 0 && PyDict_SetItem(self->numbers, key, (PyObject *)request))
        code = -1;
    Py_XDECREF(key);
    if (code <= 0) {
        if (request)
            request->answered = 1; /* no number stands for it */
        Py_XDECREF((PyObject *)request);
        return code ? AIO_RAISED : AIO_FOR_PYTHON;
    }
    self->held += (int64_t)request->size;
    code = PyDict_Size(self->queue) ? 0 : served_begin(self, request);
    if (!code) {
        told = PyObject_CallMethod((PyObject *)self, "_enqueue", "O", (PyObject *)request);
        code = told ? 1 : -1;
        Py_XDECREF(told);
    }
    Py_DECREF((PyObject *)request);
    return code < 0 ? AIO_RAISED : AIO_OK;
}

/* For Python */

/* set_grant(requests, bytes): what the peer may have in progress. */
static PyObject *served_set_grant(PyObject *object, PyObject *args)
{
    RequestTable *self = (RequestTable *)object;
    unsigned long long requests, bytes;

    if (!PyArg_ParseTuple(args, "KK", &requests, &bytes))
        return NULL;
    self->limit = requests;
    self->limit_bytes = bytes;
    if (self->hard_limit < requests)
        self->hard_limit = requests;
    if (self->hard_bytes < bytes)
        self->hard_bytes = bytes;
    Py_RETURN_NONE;
}

/* set_lease(may_hold, narrow_below): bytes; `_narrow` is called when fewer than the second are
 * held. */
static PyObject *served_set_lease(PyObject *object, PyObject *args)
{
    long long may_hold, narrow_below;

    if (!PyArg_ParseTuple(args, "LL", &may_hold, &narrow_below))
        return NULL;
    ((RequestTable *)object)->may_hold = may_hold;
    ((RequestTable *)object)->narrow_below = narrow_below;
    Py_RETURN_NONE;
}

static PyObject *served_set_admits(PyObject *object, PyObject *value)
{
    int admits = PyObject_IsTrue(value);

    if (admits < 0)
        return NULL;
    ((RequestTable *)object)->admits = (char)admits;
    Py_RETURN_NONE;
}

static PyObject *served_has_room_method(PyObject *object, PyObject *bytes)
{
    long long taken = PyLong_AsLongLong(bytes);

    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(served_has_room((RequestTable *)object, taken));
}

static PyObject *served_hold(PyObject *object, PyObject *size)
{
    long long bytes = PyLong_AsLongLong(size);

    if (PyErr_Occurred())
        return NULL;
    ((RequestTable *)object)->held += bytes;
    Py_RETURN_NONE;
}

/* note_queued(bytes): so many more wait in the queue, or less. */
static PyObject *served_note_queued(PyObject *object, PyObject *size)
{
    long long bytes = PyLong_AsLongLong(size);

    if (PyErr_Occurred())
        return NULL;
    ((RequestTable *)object)->queued += bytes;
    Py_RETURN_NONE;
}

static PyObject *served_note_taken(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((RequestTable *)object)->taken++;
    Py_RETURN_NONE;
}

static PyObject *served_begin_method(PyObject *object, PyObject *request)
{
    int begun;

    if (!PyObject_TypeCheck(request, aio_peer_request_type)) {
        PyErr_SetString(PyExc_TypeError, "a PeerRequest is needed");
        return NULL;
    }
    begun = served_begin((RequestTable *)object, (PeerRequest *)request);
    return begun < 0 ? NULL : PyBool_FromLong(begun);
}

static PyObject *served_done(PyObject *object, PyObject *size)
{
    unsigned long long bytes = PyLong_AsUnsignedLongLong(size);

    if (PyErr_Occurred() || served_note_done((RequestTable *)object, bytes))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef served_methods[] = {
    {"set_grant", served_set_grant, METH_VARARGS, "What the peer may have: requests, bytes."},
    {"set_lease", served_set_lease, METH_VARARGS,
     "How many bytes may be held, and below how many `_narrow` is called."},
    {"set_admits", served_set_admits, METH_O, "Whether C admits requests, or Python each of them."},
    {"has_room", served_has_room_method, METH_O,
     "Whether the program may have one more request, with which it has so many bytes."},
    {"hold", served_hold, METH_O, "Count the bytes of a request that was admitted."},
    {"note_queued", served_note_queued, METH_O, "So many bytes more wait in the queue."},
    {"note_taken", served_note_taken, METH_NOARGS, "The program gets a request."},
    {"begin", served_begin_method, METH_O,
     "Have a starter begin with a request, if there is room."},
    {"done", served_done, METH_O, "The program is done with a request of so many bytes."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef served_members[] = {
    {"numbers", T_OBJECT, offsetof(RequestTable, numbers), READONLY, NULL},
    {"queue", T_OBJECT, offsetof(RequestTable, queue), READONLY, NULL},
    {"starters", T_OBJECT, offsetof(RequestTable, starters), READONLY, NULL},
    {"limit", T_ULONGLONG, offsetof(RequestTable, limit), READONLY, NULL},
    {"limit_bytes", T_ULONGLONG, offsetof(RequestTable, limit_bytes), READONLY, NULL},
    {"hard_limit", T_ULONGLONG, offsetof(RequestTable, hard_limit), READONLY, NULL},
    {"hard_bytes", T_ULONGLONG, offsetof(RequestTable, hard_bytes), READONLY, NULL},
    {"taken", T_LONGLONG, offsetof(RequestTable, taken), READONLY, NULL},
    {"held", T_LONGLONG, offsetof(RequestTable, held), READONLY, NULL},
    {"queued", T_LONGLONG, offsetof(RequestTable, queued), READONLY, NULL},
    {"may_hold", T_LONGLONG, offsetof(RequestTable, may_hold), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot served_slots[] = {
    {Py_tp_new, served_new},
    {Py_tp_traverse, served_traverse},
    {Py_tp_clear, served_clear},
    {Py_tp_dealloc, served_dealloc},
    {Py_tp_methods, served_methods},
    {Py_tp_members, served_members},
    {Py_tp_doc, "The requests of the peer that are not answered; the base of Served."},
    {0, NULL},
};

PyType_Spec aio_request_table_spec = {
    .name = "aiordma._core.RequestTable",
    .basicsize = sizeof(RequestTable),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = served_slots,
};
