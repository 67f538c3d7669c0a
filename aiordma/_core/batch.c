/*
 * Batch: many READs and WRITEs of one connection, posted in chains, for one task that waits.
 *
 * A Batch has an item for each operation, which is checked when the program adds it, by the rules
 * of operation.c, and is a few numbers from then on.  A Chain is a part of them that is under way:
 * up to AIO_OPERATION_CHAIN requests, each with the number of an operation, posted by one call.
 * Only its last request completes, unless one fails; all those before it are done then, because an
 * adapter completes the requests of a queue in their order.  iWARP adapters may complete a WRITE
 * before a READ that was posted earlier, so there the last READ completes, too.
 *
 * When a chain has ended, its memory takes the next items at once, without the task, which is
 * resumed only a few times for thousands of operations.  But if another task waits for a number,
 * the chain ends, and the batch waits in line behind that task (endpoint/batch.py), so that it
 * keeps numbers no longer than others do.  A chain has half of them, and 1 MiB of data.
 *
 * Buffers of the program are copied through `bounce`, one region for each chain, which Python lends
 * to it.  A READ without memory gets a bytes object before it is posted, so that its end needs no
 * memory.  As in operation.c, the ends of memory that READs write to are marked on software
 * adapters, and local memory is in use until the adapter is done with it, canceled or not: the
 * chain has all references that this takes, and the state has the chain, for each of its numbers.
 */
#include "core.h"

#include "admission.h"

enum item_state {
    ITEM_WAITS,
    ITEM_POSTED,
    ITEM_DONE,
    ITEM_LOST,    /* a READ that has completed without all of its data */
    ITEM_CLOSED,  /* its local region was closed before it was posted */
    ITEM_REVOKED, /* the peer has ended the exposure of its memory before it was posted */
    ITEM_UNKNOWN, /* it has failed, or was posted after one that has */
};

struct item {
    PyObject *keeper; /* the local memory: a region, or bytes or a memoryview that nobody else has;
                         a READ without memory: its bytes, or NULL until it is posted */
    Registration *registration; /* of the region; NULL: the bytes are copied */
    uint64_t addr;              /* local */
    uint64_t remote_addr;
    uint32_t length;
    uint32_t rkey;
    uint32_t generation; /* of the exposure of the remote memory; 0: unknown */
    uint8_t opcode;      /* enum ibv_wr_opcode */
    uint8_t state;       /* enum item_state */
    uint8_t made;        /* its bytes are the result */
};

typedef struct {
    PyObject_HEAD
    MessageState *state;
    struct item *items;
    uint32_t count;
    uint32_t room;
    uint32_t next;   /* the first item that was not posted */
    uint32_t limit;  /* requests of a chain */
    uint32_t chains; /* that use memory of items */
    char ordered;    /* requests complete in their order */
    char begun;      /* it takes no further items */
    char running;    /* chains go on by themselves */
    char leaving;    /* its items go as soon as no chain uses their memory */
    char copies;     /* some items need `bounce` */
} Batch;

/* A request under way. */
struct link {
    char *tail; /* the last bytes of what lands, which had `mark`; or NULL */
    uint64_t mark;
    char *place; /* in `bounce`; NULL: the bytes are not copied */
    uint32_t item;
    uint16_t number;
    uint8_t signaled; /* its completion is still to come */
};

typedef struct {
    Wakeup wakeup;
    Batch *batch;
    PyObject *region; /* of `bounce` */
    Registration *bounce;
    struct link *links;
    uint32_t count;   /* under way; 0: none */
    uint32_t signals; /* completions that are to come */
    uint32_t failed;  /* the place of the first link that has failed; NONE: none has */
    PyObject *error;  /* of that */
    int code;         /* errno of a post that has failed */
} Chain;

#define NONE UINT32_MAX

/* Items */

static int batch_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"state", "limit", "ordered", NULL};
    Batch *self = (Batch *)object;
    PyObject *state;
    unsigned int limit;
    int ordered;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!Ip", names, aio_message_state_type, &state,
                                     &limit, &ordered))
        return -1;
    if (!limit || limit > AIO_OPERATION_CHAIN) {
        PyErr_SetString(PyExc_ValueError, "no such number of requests");
        return -1;
    }
    self->state = (MessageState *)Py_NewRef(state);
    self->limit = limit;
    self->ordered = (char)ordered;
    return 0;
}

static PyObject *batch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, batch_init);
}

static int batch_traverse(PyObject *object, visitproc visit, void *arg)
{
    Batch *self = (Batch *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->state);
    for (uint32_t i = 0; i < self->count; i++)
        Py_VISIT(self->items[i].keeper);
    return 0;
}

/* Let go of the items.  What runs meanwhile finds none. */
static void batch_drop(Batch *self)
{
    struct item *items = self->items;
    uint32_t count = self->count;

    self->items = NULL;
    self->count = self->room = self->next = 0;
    for (uint32_t i = 0; i < count; i++) {
        Py_XDECREF(items[i].keeper);
        Py_XDECREF((PyObject *)items[i].registration);
    }
    PyMem_Free(items);
}

static int batch_clear(PyObject *object)
{
    batch_drop((Batch *)object);
    replace((PyObject **)&((Batch *)object)->state, NULL);
    return 0;
}

static void batch_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    batch_clear(object);
    aio_free(object);
}

/* The bytes of a buffer, which stays exported: 0; or -1, perhaps with an exception. */
static int item_export(struct item *item, PyObject *buffer, int lands, uint64_t *length)
{
    int flags = (lands ? PyBUF_WRITABLE : 0) | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT, rc;
    int plain = !lands && PyBytes_CheckExact(buffer);
    Py_buffer view;

    item->keeper = plain ? Py_NewRef(buffer) : PyMemoryView_FromObject(buffer);
    if (!item->keeper || PyObject_GetBuffer(item->keeper, &view, flags))
        return -1;
    rc = aio_is_for_python(buffer, &view) ? -1 : 0;
    item->addr = (uint64_t)(uintptr_t)view.buf;
    *length = (uint64_t)view.len;
    PyBuffer_Release(&view); /* `keeper` has it, too */
    return rc;
}

/* The local memory of an item: 0; or -1, perhaps with an exception. */
static int item_take_memory(struct item *item, const MessageState *state, PyObject *memory,
                            PyObject *size, uint64_t *length)
{
    int lands = aio_operation_lands(item->opcode);
    uint64_t start;

    if (memory == Py_None) {
        *length = lands && PyLong_CheckExact(size) ? PyLong_AsUnsignedLongLong(size) : UINT64_MAX;
        item->made = 1;
    } else if (Py_IS_TYPE(memory, (PyTypeObject *)state->sge) ||
               Py_IS_TYPE(memory, (PyTypeObject *)state->region)) {
        item->keeper = aio_find_registered(state, memory, &item->registration, &start, length);
        if (!item->keeper || item->registration->pd != state->pd || item->registration->closing ||
            !local_is_admitted(item->registration->access, lands))
            return -1;
        item->addr = item->registration->addr + start;
        return *length > AIO_LARGEST_REQUEST ? -1 : 0;
    } else if (item_export(item, memory, lands, length)) {
        return -1;
    }
    return *length > AIO_LARGEST_COPY ? -1 : 0;
}

/* The remote memory of an item, and whether the access is admitted: 0; or -1 as above. */
static int item_take_remote(struct item *item, MessageState *state, PyObject *remote,
                            PyObject *offset, uint64_t length)
{
    int reads = item->opcode == IBV_WR_RDMA_READ;
    uint32_t right = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    uint64_t skip = PyLong_AsUnsignedLongLong(offset);

    if (PyErr_Occurred() || (reads && length && !state->may_read) ||
        !aio_remote_admits(state, remote, skip, length, right))
        return -1;
    item->remote_addr = state->known_addr + skip;
    item->rkey = (uint32_t)state->known_rkey;
    item->generation = state->known_owner ? (uint32_t)state->known_generation : 0;
    item->length = (uint32_t)length;
    return 0;
}

static int batch_make_room(Batch *self)
{
    uint32_t room = self->room ? self->room + self->room / 2 : 32;
    struct item *items;

    if (self->count < self->room)
        return 0;
    items = room > self->room ? PyMem_Realloc(self->items, room * sizeof(*items)) : NULL;
    if (!items) {
        PyErr_NoMemory();
        return -1;
    }
    self->items = items;
    self->room = room;
    return 0;
}

/* The exceptions of memory and offsets that Python refuses in words; others go on. */
static PyObject *leave_item_to_python(void)
{
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) && !PyErr_ExceptionMatches(PyExc_ValueError) &&
            !PyErr_ExceptionMatches(PyExc_AttributeError) &&
            !PyErr_ExceptionMatches(PyExc_BufferError) &&
            !PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

/*
 * add(opcode, remote, memory, offset, size, generation): the number of the item; None if the rules
 * in Python have to decide.  A READ into no memory, None, makes bytes of this size.  `generation`
 * is given for memory without an owner, whose owner Python finds out.
 */
static PyObject *batch_add(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    Batch *self = (Batch *)object;
    struct item item = {0};
    uint64_t length = 0;
    int bad;

    if (count != 5 && count != 6) {
        PyErr_SetString(PyExc_TypeError, "add() takes 5 or 6 arguments");
        return NULL;
    }
    if (self->begun || !self->state || !connection_may_operate(self->state->connection) ||
        !PyLong_CheckExact(args[3]))
        Py_RETURN_NONE;
    item.opcode = (uint8_t)PyLong_AsLong(args[0]);
    bad = PyErr_Occurred() || item_take_memory(&item, self->state, args[2], args[4], &length) ||
          item_take_remote(&item, self->state, args[1], args[3], length) || batch_make_room(self);
    if (!bad && count == 6) {
        item.generation = (uint32_t)PyLong_AsUnsignedLong(args[5]);
        bad = PyErr_Occurred() != NULL;
    }
    if (bad) {
        PyObject *type, *value, *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        Py_XDECREF(item.keeper);
        Py_XDECREF((PyObject *)item.registration);
        PyErr_Restore(type, value, traceback);
        return leave_item_to_python();
    }
    if (!item.registration && length &&
        (item.opcode != IBV_WR_RDMA_WRITE ||
         length > (uint64_t)connection_inline_size(self->state->connection)))
        self->copies = 1;
    self->items[self->count] = item;
    return PyLong_FromUnsignedLong(self->count++);
}

/* Chains */

static int chain_traverse(PyObject *object, visitproc visit, void *arg)
{
    traverseproc base = (traverseproc)PyType_GetSlot(aio_wakeup_type, Py_tp_traverse);

    Py_VISIT((PyObject *)((Chain *)object)->batch);
    Py_VISIT(((Chain *)object)->region);
    Py_VISIT(((Chain *)object)->error);
    return base(object, visit, arg);
}

static int chain_clear(PyObject *object)
{
    inquiry base = (inquiry)PyType_GetSlot(aio_wakeup_type, Py_tp_clear);
    Chain *self = (Chain *)object;

    self->count = 0;
    replace((PyObject **)&self->batch, NULL);
    replace((PyObject **)&self->bounce, NULL);
    Py_CLEAR(self->region);
    Py_CLEAR(self->error);
    return base(object);
}

static void chain_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    chain_clear(object);
    PyMem_Free(((Chain *)object)->links);
    aio_free(object);
}

/* The task of the batch is canceled, and has not run yet: nothing more is posted for it. */
static void chain_broken_off(Wakeup *wakeup, enum aio_wait_end Py_UNUSED(how))
{
    Batch *batch = ((Chain *)wakeup)->batch;

    if (batch)
        batch->running = 0;
}

static PyObject *chain_new(Batch *batch, PyObject *region)
{
    MessageState *state = batch->state;
    Chain *self = (Chain *)PyType_GenericAlloc(aio_chain_type, 0);

    if (!self)
        return NULL;
    self->wakeup.loop = Py_XNewRef(state->receive_wakeup->wakeup.loop);
    self->wakeup.spin = Py_XNewRef(state->spin);
    self->wakeup.on_broken_off = chain_broken_off;
    self->batch = (Batch *)Py_NewRef((PyObject *)batch);
    self->failed = NONE;
    self->links = aio_room_for(batch->limit, sizeof(*self->links));
    if (!state->chains && self->links)
        state->chains = aio_room_for((size_t)connection_n_operations(state->connection),
                                     sizeof(*state->chains));
    if (self->links && state->chains && region != Py_None) {
        PyObject *found = PyObject_GetAttr(region, aio_name._registration);

        if (found && Py_IS_TYPE(found, aio_registration_type)) {
            self->bounce = (Registration *)found;
            self->region = Py_NewRef(region);
        } else {
            Py_XDECREF(found);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a registered region is needed");
        }
    }
    if (PyErr_Occurred()) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Lay the bytes of an item into `bounce`, or find a place for them; whether there is room. */
static int link_copy(struct link *link, const Chain *self, const struct item *item,
                     struct aio_operation *request, uint32_t *used)
{
    if (item->opcode == IBV_WR_RDMA_WRITE &&
        item->length <= connection_inline_size(self->batch->state->connection)) {
        request->addr = item->addr;
        return 1;
    }
    if (!self->bounce || item->length > self->bounce->length - *used)
        return 0;
    request->addr = self->bounce->addr + *used;
    request->lkey = self->bounce->lkey;
    link->place = (char *)(uintptr_t)request->addr;
    if (!aio_operation_lands(item->opcode))
        memcpy(link->place, (const void *)(uintptr_t)item->addr, item->length);
    *used += (item->length + 7) & ~UINT32_C(7);
    return 1;
}

/* Mark the end of the memory that an item lands in, so that `link_has_landed` can tell. */
static void link_mark(struct link *link, const struct item *item,
                      const struct aio_operation *request, const Registration *registration)
{
    if (!registration || !registration->memory || !aio_operation_lands(item->opcode) ||
        item->length < sizeof(uint64_t))
        return;
    link->tail = registration->memory + (request->addr - registration->addr) + item->length -
                 sizeof(uint64_t);
    link->mark = aio_next_mark();
    memcpy(link->tail, &link->mark, sizeof(uint64_t));
}

/* Fill one link and its request: 1; 0 without room; -1 with an exception. */
static int link_fill(struct link *link, const Chain *self, struct item *item,
                     struct aio_operation *request, uint32_t *used)
{
    if (item->made && !item->keeper) {
        item->keeper = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)item->length);
        if (!item->keeper)
            return -1;
        item->addr = (uint64_t)(uintptr_t)PyBytes_AsString(item->keeper);
    }
    *request = (struct aio_operation){
        .opcode = item->opcode,
        .addr = item->addr,
        .length = item->length,
        .remote_addr = item->remote_addr,
        .rkey = item->rkey,
    };
    if (item->registration)
        request->lkey = item->registration->lkey;
    else if (!link_copy(link, self, item, request, used))
        return 0;
    link_mark(link, item, request, item->registration ? item->registration : self->bounce);
    return 1;
}

/* The next item that is to be posted, or NULL; those before it need no request. */
static struct item *batch_next(Batch *self)
{
    const struct aio_connection *c = self->state->connection;

    for (; self->next < self->count; self->next++) {
        struct item *item = &self->items[self->next];

        if (!item->length) {
            if (item->made && !item->keeper)
                item->keeper = PyBytes_FromStringAndSize(NULL, 0); /* which exists already */
            item->state = ITEM_DONE;
        } else if (item->registration && item->registration->closing) {
            item->state = ITEM_CLOSED;
        } else if (item->generation && connection_is_revoked(c, item->generation)) {
            item->state = ITEM_REVOKED;
        } else {
            return item;
        }
    }
    return NULL;
}

/* Which requests of a chain complete: its last, and perhaps its last READ. */
static void chain_signal(Chain *self, struct aio_operation *requests, uint32_t count)
{
    uint32_t last = count - 1, landing = last;

    if (!self->batch->ordered)
        while (landing && !aio_operation_lands(requests[landing].opcode))
            landing--;
    for (uint32_t i = 0; i < count; i++) {
        self->links[i].signaled =
            i == last || (i == landing && aio_operation_lands(requests[i].opcode));
        requests[i].quiet = !self->links[i].signaled;
    }
}

/* So many requests are under way. */
static void chain_begin(Chain *self, uint32_t posted, uint32_t count)
{
    MessageState *state = self->batch->state;

    self->count = posted;
    self->signals = 0;
    if (!posted)
        return;
    /* The rest was refused, and the queue pair is going to be flushed. */
    if (posted < count)
        self->links[posted - 1].signaled = 1;
    for (uint32_t i = 0; i < posted; i++) {
        struct item *item = &self->batch->items[self->links[i].item];

        self->signals += self->links[i].signaled;
        item->state = ITEM_POSTED;
        if (item->registration)
            item->registration->uses++;
        state->chains[self->links[i].number] = Py_NewRef((PyObject *)self);
    }
    if (self->bounce)
        self->bounce->uses++;
    self->batch->chains++;
}

/*
 * Post the next items with one call.  `given`: a number of the caller's, who keeps it if nothing is
 * posted; or -1.  0, or an errno; -1 with an exception, and then nothing is posted.  No function of
 * the program runs.
 */
static int chain_post(Chain *self, int given)
{
    struct aio_operation requests[AIO_OPERATION_CHAIN];
    Batch *batch = self->batch;
    struct aio_connection *c = batch->state->connection;
    uint32_t count = 0, used = 0, posted = 0;
    uint64_t bytes = 0;
    struct item *item;
    int code = 0, got = 1;

    while (count < batch->limit && (item = batch_next(batch)) != NULL) {
        struct link *link = &self->links[count];
        int number = count || given < 0 ? (int)connection_peek_number(c) : given;

        if (number < 0 || (count && bytes + item->length > AIO_LARGEST_REQUEST))
            break;
        *link = (struct link){.item = batch->next, .number = (uint16_t)number};
        got = link_fill(link, self, item, &requests[count], &used);
        if (got <= 0)
            break;
        requests[count].number = (uint32_t)number;
        if (count || given < 0)
            connection_take_number(c);
        bytes += item->length;
        batch->next++;
        count++;
    }
    if (got < 0 && count)
        PyErr_Clear(); /* the next chain fails, or does not */
    if (count) {
        chain_signal(self, requests, count);
        code = connection_post_operations(c, requests, count, &posted);
        if (posted < count)
            batch->next = self->links[posted].item;
        for (uint32_t i = posted; i < count; i++)
            if (i || given < 0)
                connection_release_number(c, self->links[i].number);
    }
    chain_begin(self, posted, count);
    return got < 0 && !count ? -1 : code;
}

/*
 * post(number, region): post the next items, of which the first takes this number; copied bytes go
 * by way of the region, or None.  The Chain; the errno of the post; or None if there is nothing to
 * post, or the connection is over.
 */
static PyObject *batch_post(PyObject *object, PyObject *args)
{
    Batch *self = (Batch *)object;
    PyObject *region, *made;
    int number, elsewhere, code;
    Chain *chain;

    if (!PyArg_ParseTuple(args, "iO", &number, &region))
        return NULL;
    if (!self->state || number < 0 || number >= connection_n_operations(self->state->connection)) {
        PyErr_SetString(PyExc_ValueError, "no such operation");
        return NULL;
    }
    elsewhere = aio_is_elsewhere(self->state);
    made = elsewhere < 0 ? NULL : chain_new(self, region);
    if (!made)
        return NULL;
    chain = (Chain *)made;
    code = 0;
    if (!elsewhere && connection_may_operate(self->state->connection) &&
        !self->state->chains[number] && !(chain->bounce && chain->bounce->closing)) {
        code = chain_post(chain, number);
    }
    if (chain->count) {
        chain->code = code;
        return made;
    }
    Py_DECREF(made);
    if (code < 0)
        return NULL;
    if (code)
        return PyLong_FromLong(code);
    Py_RETURN_NONE;
}

/* Whether the adapter has written all of the memory of a link that has succeeded. */
static int link_has_landed(const struct link *link)
{
    return !link->tail || memcmp(link->tail, &link->mark, sizeof(uint64_t));
}

/* What has become of an item that has succeeded. */
static void link_settle(const struct link *link, struct item *item, struct aio_connection *c)
{
    int good = link_has_landed(link);

    item->state = good ? ITEM_DONE : ITEM_LOST;
    if (good && link->place && aio_operation_lands(item->opcode))
        memcpy((void *)(uintptr_t)item->addr, link->place, item->length);
    connection_count_operation(c, item->opcode, good ? item->length : 0);
}

/* The adapter is done with a chain: settle its items, and free its numbers, in C alone. */
static void chain_settle(Chain *self)
{
    MessageState *state = self->batch->state;
    uint32_t sure = self->failed == NONE ? self->count : self->batch->ordered ? self->failed : 0;

    for (uint32_t i = 0; i < self->count; i++) {
        struct link *link = &self->links[i];
        struct item *item = &self->batch->items[link->item];

        if (i < sure)
            link_settle(link, item, state->connection);
        else
            item->state = ITEM_UNKNOWN;
        connection_end_operation(state->connection, link->number);
        replace(&state->chains[link->number], NULL);
    }
}

/* End the use of a region, which may call it. */
static void leave(Registration *registration, PyObject *region)
{
    PyObject *done;

    if (!aio_registration_leave(registration))
        return;
    done = PyObject_CallMethodObjArgs(region, aio_name._let_go, NULL);
    if (!done)
        PyErr_WriteUnraisable(region);
    Py_XDECREF(done);
}

/* End the use of all memory of a chain. */
static void chain_leave(Chain *self)
{
    uint32_t count = self->count;

    for (uint32_t i = 0; i < count && self->batch && self->batch->items; i++) {
        const struct item *item = &self->batch->items[self->links[i].item];

        if (item->registration)
            leave(item->registration, item->keeper);
    }
    self->count = 0;
    if (count && self->bounce)
        leave(self->bounce, self->region);
    if (count && self->batch && --self->batch->chains == 0 && self->batch->leaving)
        batch_drop(self->batch);
}

/* Whether the next items may be posted without the task; _let_go may have run Python before. */
static int chain_may_go_on(const Chain *self)
{
    const struct aio_connection *c;

    if (!self->batch || !self->batch->state || !self->batch->items)
        return 0;
    c = self->batch->state->connection;
    return self->batch->running && self->batch->next < self->batch->count && !self->code &&
           connection_may_operate(c) && connection_peek_number(c) >= 0 &&
           !(self->bounce && self->bounce->closing);
}

/* The link that a number is of; NULL, also of a chain that the collector has cleared. */
static struct link *chain_link(const Chain *self, uint32_t number)
{
    if (!self->batch || !self->batch->state || !self->batch->items)
        return NULL;
    for (uint32_t i = self->count; i-- > 0;)
        if (self->links[i].number == number)
            return &self->links[i];
    return NULL;
}

/* A completion has come, of a request that had to bring one: whether it was the last. */
static int chain_count(Chain *self, struct link *link)
{
    if (!link->signaled)
        return 0;
    link->signaled = 0;
    return --self->signals == 0;
}

/*
 * The chain has ended, and the wait for it ends with its error, if it has one.  Whether its task is
 * to be woken.  A task that was canceled, and has not run yet, gets its CancelledError.
 */
static int chain_end_wait(Chain *self)
{
    if (self->wakeup.state == AIO_READY)
        return 0;
    replace(&self->wakeup.error, self->error);
    self->error = NULL;
    if (self->wakeup.state == AIO_WAITING)
        return 1;
    self->wakeup.state = AIO_DONE;
    return 0;
}

/* A request has succeeded, and with it those before it: 0, or -1 with an exception. */
static int chain_succeed(Chain *self, uint32_t number)
{
    struct link *link = chain_link(self, number);
    int rc = 0, soon;

    if (!link || !chain_count(self, link))
        return 0;
    soon = self->batch->state->soon;
    Py_INCREF((PyObject *)self);
    chain_settle(self);
    chain_leave(self);
    if (chain_may_go_on(self)) {
        self->code = chain_post(self, -1);
        if (self->code < 0) {
            PyErr_Clear(); /* Python tries again, and raises it */
            self->code = 0;
        }
    }
    if (!self->count && chain_end_wait(self))
        rc = aio_wake_or_soon(&self->wakeup, soon);
    Py_DECREF((PyObject *)self);
    return rc < 0 ? -1 : 0;
}

/*
 * A completion went to Python, with its error or None.  The chain, if it has ended: the caller ends
 * the use of its memory.  Otherwise None.
 */
static PyObject *chain_ended(Chain *self, uint32_t number, PyObject *error, int told)
{
    struct link *link = chain_link(self, number);

    if (link && error != Py_None && self->failed == NONE) {
        self->failed = told ? (uint32_t)(link - self->links) : 0;
        self->error = Py_NewRef(error);
    }
    if (!link || !chain_count(self, link))
        Py_RETURN_NONE;
    Py_INCREF((PyObject *)self);
    chain_settle(self);
    if (chain_end_wait(self) && aio_wake_soon(&self->wakeup) < 0) {
        PyObject *type, *value, *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        chain_leave(self);
        PyErr_Restore(type, value, traceback);
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *chain_transferred(PyObject *object, PyObject *Py_UNUSED(unused))
{
    chain_leave((Chain *)object);
    Py_RETURN_NONE;
}

/* The place in the batch of the first request that has failed. */
static PyObject *chain_get_failed_item(PyObject *object, void *Py_UNUSED(unused))
{
    const Chain *self = (Chain *)object;

    if (self->failed == NONE)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLong(self->links[self->failed].item);
}

/* The chain that a number is of; borrowed, or NULL. */
static Chain *chain_of(const MessageState *self, uint32_t number)
{
    if (!self->chains || (int64_t)number >= connection_n_operations(self->connection))
        return NULL;
    return (Chain *)self->chains[number];
}

/* For the state of the connection */

int aio_operations_done(MessageState *self)
{
    int number;

    while ((number = connection_next_completed(self->connection)) >= 0) {
        Chain *chain = chain_of(self, (uint32_t)number);

        if (chain ? chain_succeed(chain, (uint32_t)number)
                  : aio_operation_succeed(self, (uint32_t)number))
            return -1;
    }
    if (connection_number_is_awaited(self->connection) && self->room) {
        PyObject *room = Py_NewRef(self->room); /* the call may set another function */
        PyObject *told = PyObject_CallNoArgs(room);

        Py_DECREF(room);
        if (!told)
            return -1;
        Py_DECREF(told);
    }
    return 0;
}

/*
 * ended(number, error, told=True): end an operation, or count a completion of a chain, that went to
 * Python.  Its region, or the chain, whose use the caller ends; None if it is not under way, or not
 * over.  `told`: the adapter has said so, and not only the end of the queue pair.
 */
PyObject *aio_ended(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    PyObject *error;
    unsigned int number;
    int told = 1;
    Chain *chain;

    if (!PyArg_ParseTuple(args, "IO|p", &number, &error, &told))
        return NULL;
    chain = chain_of(self, number);
    return chain ? chain_ended(chain, number, error, told)
                 : aio_operation_ended(self, number, error);
}

int aio_chains_traverse(const MessageState *self, visitproc visit, void *arg)
{
    for (int64_t i = 0; self->chains && i < connection_n_operations(self->connection); i++)
        Py_VISIT(self->chains[i]);
    return 0;
}

void aio_free_chains(MessageState *self)
{
    PyObject **chains = self->chains;

    self->chains = NULL;
    for (int64_t i = 0; chains && i < connection_n_operations(self->connection); i++)
        Py_XDECREF(chains[i]);
    PyMem_Free(chains);
}

/* For Python */

/* It takes no further operations, and chains go on by themselves. */
static PyObject *batch_begin(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Batch *)object)->begun = ((Batch *)object)->running = 1;
    Py_RETURN_NONE;
}

/* Chains do not go on by themselves any more. */
static PyObject *batch_stop(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Batch *)object)->running = 0;
    Py_RETURN_NONE;
}

/* It takes no further operations; forget them, once no adapter can use their memory. */
static PyObject *batch_discard(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Batch *)object)->begun = ((Batch *)object)->leaving = 1;
    if (!((Batch *)object)->chains)
        batch_drop((Batch *)object);
    Py_RETURN_NONE;
}

/* The state of each item, a byte. */
static PyObject *batch_states(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const Batch *self = (Batch *)object;
    PyObject *states = PyBytes_FromStringAndSize(NULL, self->count);

    for (uint32_t i = 0; states && i < self->count; i++)
        PyBytes_AsString(states)[i] = (char)self->items[i].state;
    return states;
}

/* Of each item that is done: the bytes that were made of it, or how many it has moved; or None. */
static PyObject *batch_results(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const Batch *self = (Batch *)object;
    PyObject *results = PyList_New(self->count);

    for (uint32_t i = 0; results && i < self->count; i++) {
        const struct item *item = &self->items[i];
        PyObject *result = item->state != ITEM_DONE ? Py_NewRef(Py_None)
                           : item->made             ? Py_XNewRef(item->keeper)
                                                    : PyLong_FromUnsignedLong(item->length);

        if (!result || PyList_SetItem(results, i, result))
            replace(&results, NULL);
    }
    return results;
}

static PyObject *batch_get_left(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(((Batch *)object)->count - ((Batch *)object)->next);
}

static PyObject *batch_get_count(PyObject *object, void *Py_UNUSED(unused))
{
    return PyLong_FromUnsignedLong(((Batch *)object)->count);
}

static PyMethodDef batch_methods[] = {
    {"add", (PyCFunction)(void (*)(void))batch_add, METH_FASTCALL,
     "Add an operation: its number; None if Python has to decide."},
    {"post", batch_post, METH_VARARGS, "Post a chain: it, an errno, or None."},
    {"begin", batch_begin, METH_NOARGS, "Chains go on by themselves; no further operations."},
    {"stop", batch_stop, METH_NOARGS, "Chains do not go on by themselves any more."},
    {"discard", batch_discard, METH_NOARGS, "Forget the operations, once none is under way."},
    {"states", batch_states, METH_NOARGS, "The state of each operation, a byte."},
    {"results", batch_results, METH_NOARGS, "The result of each operation that is done, or None."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef batch_members[] = {
    {"copies", T_BOOL, offsetof(Batch, copies), READONLY, "Whether chains need a region."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef batch_getset[] = {
    {"left", batch_get_left, NULL, "Operations that were not posted.", NULL},
    {"count", batch_get_count, NULL, "Operations.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot batch_slots[] = {
    {Py_tp_new, batch_new},
    {Py_tp_traverse, batch_traverse},
    {Py_tp_clear, batch_clear},
    {Py_tp_dealloc, batch_dealloc},
    {Py_tp_methods, batch_methods},
    {Py_tp_members, batch_members},
    {Py_tp_getset, batch_getset},
    {Py_tp_doc, "READs and WRITEs that are posted in chains."},
    {0, NULL},
};

PyType_Spec aio_batch_spec = {
    .name = "aiordma._core.Batch",
    .basicsize = sizeof(Batch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = batch_slots,
};

static PyMethodDef chain_methods[] = {
    {"_transferred", chain_transferred, METH_NOARGS, "End the use of its memory."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef chain_members[] = {
    {"code", T_INT, offsetof(Chain, code), READONLY, "Errno of a post of a part of it, or 0."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef chain_getset[] = {
    {"failed_item", chain_get_failed_item, NULL, "The operation that has failed first, or None.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot chain_slots[] = {
    {Py_tp_traverse, chain_traverse},
    {Py_tp_clear, chain_clear},
    {Py_tp_dealloc, chain_dealloc},
    {Py_tp_methods, chain_methods},
    {Py_tp_members, chain_members},
    {Py_tp_getset, chain_getset},
    {Py_tp_doc, "Operations of a batch under way; awaited by one task."},
    {0, NULL},
};

PyType_Spec aio_chain_spec = {
    .name = "aiordma._core.Chain",
    .basicsize = sizeof(Chain),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = chain_slots,
};
