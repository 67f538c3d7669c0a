/*
 * MessageState: the type by which Python commands and asks a connection.  Its methods convert
 * arguments and results, and call connection.c and operation.c, which do the work.
 *
 * Every call comes in the thread of the connection's loop, as the drain does.  Python writes no
 * member: it gives a command, and hears of what has changed by its result or by an event.
 */
#include <stdlib.h>

#include "core.h"

#define SIZE_NAME(name, type, format)   #name,
#define SIZE_FORMAT(name, type, format) format
#define SIZE_PLACE(name, type, format)  , &sizes.name

static int message_state_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    MessageState *self = (MessageState *)object;
    static char *names[] = {"loop", AIO_SIZES(SIZE_NAME) NULL};
    struct aio_sizes sizes;
    PyObject *loop;
    int code;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O" AIO_SIZES(SIZE_FORMAT), names,
                                     &loop AIO_SIZES(SIZE_PLACE)))
        return -1;
    code = connection_new(&sizes, &self->connection);
    if (code == EINVAL)
        PyErr_SetString(PyExc_ValueError, "sizes that do not fit one another");
    else if (code)
        PyErr_NoMemory();
    if (code)
        return -1;
    self->receive_wakeup = aio_receive_wakeup_new(loop, object, aio_take_message);
    if (!self->receive_wakeup)
        return -1;
    self->thread = PyThread_get_thread_ident();
    aio_count_in(&self->counted, self->connection, NULL);
    return 0;
}

static PyObject *message_state_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return aio_make(type, args, kwargs, message_state_init);
}

static int message_state_traverse(PyObject *object, visitproc visit, void *arg)
{
    MessageState *self = (MessageState *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->receiver);
    Py_VISIT(self->memory);
    if (aio_line_traverse(self, visit, arg))
        return -1;
    Py_VISIT(self->handler);
    Py_VISIT((PyObject *)self->requests);
    Py_VISIT(self->room);
    Py_VISIT(self->sge);
    Py_VISIT(self->region);
    Py_VISIT(self->remote);
    Py_VISIT(self->pd);
    Py_VISIT(self->known);
    Py_VISIT(self->bounce_region);
    Py_VISIT(self->spin);
    for (int64_t i = 0; self->operations && i < connection_n_operations(self->connection); i++)
        Py_VISIT(self->operations[i]);
    if (aio_chains_traverse(self, visit, arg))
        return -1;
    return aio_receive_wakeup_traverse(self->receive_wakeup, visit, arg);
}

/* The queue pair and the memory of the slots may go: neither is used from now on. */
static void message_state_unbind(MessageState *self)
{
    if (self->connection)
        connection_advance_life(self->connection, AIO_LIFE_EVENT_CLOSE);
    Py_CLEAR(self->memory);
}

static int message_state_clear(PyObject *object)
{
    /* The receiver stays: a message that is finalized later gives its slot back to it. */
    MessageState *self = (MessageState *)object;

    message_state_unbind(self);
    aio_line_clear(self);
    Py_CLEAR(self->handler);
    replace((PyObject **)&self->requests, NULL);
    Py_CLEAR(self->room);
    Py_CLEAR(self->sge);
    Py_CLEAR(self->region);
    Py_CLEAR(self->remote);
    Py_CLEAR(self->pd);
    Py_CLEAR(self->known);
    Py_CLEAR(self->bounce_region);
    Py_CLEAR(self->spin);
    return 0;
}

static void message_state_dealloc(PyObject *object)
{
    MessageState *self = (MessageState *)object;

    PyObject_GC_UnTrack(object);
    aio_receive_wakeup_part(
        &self->receive_wakeup); /* first, because finalizers that run below may resume its task */
    aio_count_out(&self->counted);
    aio_free_operations(self);
    aio_free_chains(self);
    Py_CLEAR(self->receiver);
    replace((PyObject **)&self->bounce, NULL);
    message_state_clear(object);
    for (int i = 0; i <= AIO_LANDINGS; i++)
        Py_CLEAR(self->landings[i]);
    connection_free(self->connection);
    aio_free(object);
}

static PyObject *message_state_take(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return aio_take_first((MessageState *)object);
}

static PyObject *message_state_post_chain(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyLong_FromLong(connection_post_sends(((MessageState *)object)->connection));
}

static PyObject *message_state_credit(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_connection *c = ((MessageState *)object)->connection;

    return PyLong_FromLong(connection_error(c) ? connection_error(c) : connection_send_credits(c));
}

static PyObject *message_state_argument(PyObject *object, PyObject *kind)
{
    const struct aio_connection *c = ((MessageState *)object)->connection;
    unsigned long number = PyLong_AsUnsignedLong(kind);

    if (PyErr_Occurred())
        return NULL;
    if (number >= AIO_FRAME_KIND_COUNT) {
        PyErr_SetString(PyExc_ValueError, "no kind of frames");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(connection_argument(c, (enum aio_frame_kind)number));
}

static PyObject *message_state_words(PyObject *object, PyObject *Py_UNUSED(unused))
{
    uint8_t size;
    const uint8_t *words = connection_words(((MessageState *)object)->connection, &size);

    return PyBytes_FromStringAndSize((const char *)words, size);
}

static PyObject *message_state_leave_words(PyObject *object, PyObject *words)
{
    char *bytes;
    Py_ssize_t size;

    if (PyBytes_AsStringAndSize(words, &bytes, &size) < 0)
        return NULL;
    connection_leave_words(((MessageState *)object)->connection, (const uint8_t *)bytes,
                           (uint64_t)size);
    Py_RETURN_NONE;
}

static PyObject *message_state_send_control(PyObject *object, PyObject *args)
{
    unsigned long long argument = 0;
    unsigned int kind, flags = 0;

    if (!PyArg_ParseTuple(args, "I|KI", &kind, &argument, &flags))
        return NULL;
    if (kind >= AIO_FRAME_KIND_COUNT || aio_kind_takes_credit(kind)) {
        PyErr_SetString(PyExc_ValueError, "no frame without a credit");
        return NULL;
    }
    return PyLong_FromLong(connection_send_control(
        ((MessageState *)object)->connection, (enum aio_frame_kind)kind, argument, (uint8_t)flags));
}

static PyObject *message_state_call(PyObject *object, PyObject *args, PyObject *kwargs)
{
    unsigned int events;

    if (aio_events_of(args, kwargs, &events) ||
        aio_message_events((MessageState *)object, events, 1))
        return NULL;
    Py_RETURN_NONE;
}

/* spin_with(messages, operations): the Spins of the waits for them. */
static PyObject *message_state_spin_with(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    PyObject *messages, *operations;

    if (!PyArg_ParseTuple(args, "O!O!", aio_spin_type, &messages, aio_spin_type, &operations))
        return NULL;
    replace(&self->receive_wakeup->wakeup.spin, Py_NewRef(messages));
    replace(&self->spin, Py_NewRef(operations));
    Py_RETURN_NONE;
}

/* The adapter's side */

/* Put a reference in the place of another; None is none. */
static PyObject *set_reference(PyObject **place, PyObject *object)
{
    replace(place, object == Py_None ? NULL : Py_NewRef(object));
    Py_RETURN_NONE;
}

static PyObject *message_state_set_receiver(PyObject *object, PyObject *receiver)
{
    return set_reference(&((MessageState *)object)->receiver, receiver);
}

static PyObject *message_state_set_handler(PyObject *object, PyObject *handler)
{
    return set_reference(&((MessageState *)object)->handler, handler);
}

/* await_number(room): call this when an operation has ended; None: no task waits for a number. */
static PyObject *message_state_await_number(PyObject *object, PyObject *room)
{
    connection_await_number(((MessageState *)object)->connection, room != Py_None);
    return set_reference(&((MessageState *)object)->room, room);
}

/* operate_on(sge, region, remote, pd): three classes, and the connection's protection domain. */
static PyObject *message_state_operate_on(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    PyObject *sge, *region, *remote, *pd;

    if (!PyArg_ParseTuple(args, "OOOO", &sge, &region, &remote, &pd))
        return NULL;
    replace(&self->sge, Py_NewRef(sge));
    replace(&self->region, Py_NewRef(region));
    replace(&self->remote, Py_NewRef(remote));
    replace(&self->pd, Py_NewRef(pd));
    Py_RETURN_NONE;
}

static PyObject *message_state_bind(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    struct aio_adapter adapter = {0};
    struct aio_place *send = &adapter.send, *receive = &adapter.receive, *frames = &adapter.frames;
    unsigned long long qp, crowded, id, addresses[3];
    PyObject *memory = Py_None;

    if (!PyArg_ParseTuple(args, "KKII(KIII)(KIII)(KII)K|O", &qp, &id, &adapter.send_flags,
                          &adapter.inline_size, &addresses[0], &send->stride, &send->key,
                          &send->count, &addresses[1], &receive->stride, &receive->key,
                          &receive->count, &addresses[2], &frames->stride, &frames->key, &crowded,
                          &memory))
        return NULL;
    replace(&self->memory, Py_NewRef(memory));
    adapter.qp = (struct ibv_qp *)(uintptr_t)qp;
    adapter.id = id;
    adapter.crowded = (const uint8_t *)(uintptr_t)crowded;
    send->addr = addresses[0];
    receive->addr = addresses[1];
    frames->addr = addresses[2];
    connection_bind(self->connection, &adapter);
    Py_RETURN_NONE;
}

static PyObject *message_state_agree(PyObject *object, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"credits",         "eager_size",   "bare_size",
                            "fragmented_size", "written_size", "landed_size",
                            "numbered",        "identity",     NULL};
    struct aio_terms terms;
    unsigned long long sizes[5] = {0}, identity = 0;
    long long credits;
    int numbered = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LK|KKKKpK", names, &credits, &sizes[0],
                                     &sizes[1], &sizes[2], &sizes[3], &sizes[4], &numbered,
                                     &identity))
        return NULL;
    terms = (struct aio_terms){
        .credits = credits,
        .eager_size = sizes[0],
        .bare_size = sizes[1],
        .fragmented_size = sizes[2],
        .written_size = sizes[3],
        .landed_size = sizes[4],
        .numbered = (uint8_t)numbered,
        .identity = identity,
    };
    connection_agree(((MessageState *)object)->connection, &terms);
    Py_RETURN_NONE;
}

/* The bytes of a proof; NULL with an exception if they are not AIO_PROOF_SIZE. */
static const uint8_t *proof_bytes(PyObject *object)
{
    char *bytes;
    Py_ssize_t size;

    if (PyBytes_AsStringAndSize(object, &bytes, &size) < 0)
        return NULL;
    if (size != AIO_PROOF_SIZE) {
        PyErr_Format(PyExc_ValueError, "a proof has %d bytes", AIO_PROOF_SIZE);
        return NULL;
    }
    return (const uint8_t *)bytes;
}

static PyObject *message_state_require_proof(PyObject *object, PyObject *value)
{
    const uint8_t *proof = NULL;

    if (value != Py_None && !(proof = proof_bytes(value)))
        return NULL;
    connection_require_proof(((MessageState *)object)->connection, proof);
    Py_RETURN_NONE;
}

static PyObject *message_state_prove(PyObject *object, PyObject *value)
{
    const uint8_t *proof = proof_bytes(value);

    if (!proof)
        return NULL;
    connection_prove(((MessageState *)object)->connection, proof);
    Py_RETURN_NONE;
}

/* The life */

/* advance(event): BIND and CLOSE are given by `bind` and `close`, as more belongs to them. */
static PyObject *message_state_advance(PyObject *object, PyObject *event)
{
    for (int i = AIO_LIFE_EVENT_BIND + 1; i < AIO_LIFE_EVENT_CLOSE; i++) {
        enum aio_life_event each = (enum aio_life_event)i;

        if (PyUnicode_Check(event) &&
            !PyUnicode_CompareWithASCIIString(event, life_event_name(each))) {
            connection_advance_life(((MessageState *)object)->connection, each);
            Py_RETURN_NONE;
        }
    }
    PyErr_Format(PyExc_ValueError, "no event of a life: %R", event);
    return NULL;
}

static PyObject *message_state_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    message_state_unbind((MessageState *)object);
    Py_RETURN_NONE;
}

/* life_table(): for each state and event the state that follows, and what each state allows. */
static PyObject *message_state_life_table(PyObject *Py_UNUSED(type), PyObject *Py_UNUSED(unused))
{
    PyObject *steps = PyDict_New(), *all = PyDict_New(), *item;
    int failed = !steps || !all;

    for (int life = 0; life < AIO_LIFE_COUNT && !failed; life++) {
        const struct aio_rights *rights = life_rights((enum aio_life)life);
        PyObject *row = PyDict_New();

        for (int event = 0; row && !failed && event < AIO_LIFE_EVENT_COUNT; event++) {
            item = PyUnicode_FromString(
                life_name(life_after((enum aio_life)life, (enum aio_life_event)event)));
            failed = !item ||
                     PyDict_SetItemString(row, life_event_name((enum aio_life_event)event), item);
            Py_XDECREF(item);
        }
        failed = failed || !row || PyDict_SetItemString(steps, life_name((enum aio_life)life), row);
        Py_XDECREF(row);
        item = Py_BuildValue(
            "{s:O,s:O,s:O,s:O,s:O}", "sends", rights->sends ? Py_True : Py_False, "operates",
            rights->operates ? Py_True : Py_False, "keeps", rights->keeps ? Py_True : Py_False,
            "says", rights->says ? Py_True : Py_False, "takes", rights->takes ? Py_True : Py_False);
        failed = failed || !item || PyDict_SetItemString(all, life_name((enum aio_life)life), item);
        Py_XDECREF(item);
    }
    item = failed ? NULL : Py_BuildValue("(OO)", steps, all);
    Py_XDECREF(steps);
    Py_XDECREF(all);
    return item;
}

/* Slots */

/* Numbers of a list, in an array of so many that is to be freed; NULL with an exception. */
static uint32_t *number_array(PyObject *list, size_t *count)
{
    uint32_t *numbers;

    *count = (size_t)PyList_Size(list);
    numbers = PyErr_Occurred() ? NULL : calloc(*count ? *count : 1, sizeof(*numbers));
    if (!numbers && !PyErr_Occurred())
        PyErr_NoMemory();
    for (size_t i = 0; numbers && i < *count; i++)
        numbers[i] = (uint32_t)PyLong_AsUnsignedLong(PyList_GetItem(list, (Py_ssize_t)i));
    if (numbers && PyErr_Occurred()) {
        free(numbers);
        return NULL;
    }
    return numbers;
}

/* set_keys(receives, address, step, keys, leaving, full): slots of a pool have come or gone. */
static PyObject *message_state_set_keys(PyObject *object, PyObject *args)
{
    int receives, leaving, full;
    unsigned long long more_addr;
    unsigned int step;
    uint32_t *numbers;
    size_t count;
    PyObject *keys;

    if (!PyArg_ParseTuple(args, "pKIO!pp", &receives, &more_addr, &step, &PyList_Type, &keys,
                          &leaving, &full))
        return NULL;
    numbers = number_array(keys, &count);
    if (!numbers)
        return NULL;
    if (connection_set_keys(((MessageState *)object)->connection, receives, more_addr, step,
                            numbers, count, leaving, full)) {
        free(numbers);
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *message_state_resize(PyObject *object, PyObject *args)
{
    unsigned int receives, answers = 0;
    int grown = 0;

    if (!PyArg_ParseTuple(args, "I|Ip", &receives, &answers, &grown))
        return NULL;
    connection_resize(((MessageState *)object)->connection, receives, answers, grown);
    Py_RETURN_NONE;
}

/* Post the slots of a list; `added`: they are to be counted, too. */
static PyObject *post_slots(MessageState *self, PyObject *list, int added)
{
    struct aio_connection *c = self->connection;
    size_t count;
    uint32_t *numbers = number_array(list, &count);
    uint16_t *slots = numbers ? aio_room_for(count, sizeof(*slots)) : NULL;
    int code;

    for (size_t i = 0; slots && i < count; i++) {
        if (numbers[i] > UINT16_MAX)
            PyErr_SetString(PyExc_ValueError, "no such slot");
        slots[i] = (uint16_t)numbers[i];
    }
    free(numbers);
    if (!slots || PyErr_Occurred()) {
        PyMem_Free(slots);
        return NULL;
    }
    code = added ? connection_add_receives(c, slots, (uint32_t)count)
                 : connection_post_receives(c, slots, (uint32_t)count);
    PyMem_Free(slots);
    return PyLong_FromLong(code);
}

static PyObject *message_state_post_receives(PyObject *object, PyObject *slots)
{
    MessageState *self = (MessageState *)object;
    unsigned long count;

    if (PyList_Check(slots))
        return post_slots(self, slots, 0);
    count = PyLong_AsUnsignedLong(slots);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(connection_post_receives(self->connection, NULL, (uint32_t)count));
}

static PyObject *message_state_add_receives(PyObject *object, PyObject *slots)
{
    if (!PyList_Check(slots)) {
        PyErr_SetString(PyExc_TypeError, "a list of slots is needed");
        return NULL;
    }
    return post_slots((MessageState *)object, slots, 1);
}

/* release_slot(slot, kept): the slot of a data message is free; as connection_release_slot. */
static PyObject *message_state_release_slot(PyObject *object, PyObject *args)
{
    struct aio_connection *c = ((MessageState *)object)->connection;
    unsigned int slot;
    int kept = 0;

    if (!PyArg_ParseTuple(args, "I|p", &slot, &kept))
        return NULL;
    if (kept)
        connection_release_kept(c);
    return PyLong_FromLong(connection_release_slot(c, slot));
}

static PyObject *message_state_repost_slot(PyObject *object, PyObject *value)
{
    unsigned long slot = PyLong_AsUnsignedLong(value);

    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(
        connection_repost_slot(((MessageState *)object)->connection, (uint32_t)slot));
}

static PyObject *message_state_add_send_slot(PyObject *object, PyObject *value)
{
    unsigned long slot = PyLong_AsUnsignedLong(value);

    if (PyErr_Occurred())
        return NULL;
    if (connection_add_send_slot(((MessageState *)object)->connection, (uint32_t)slot)) {
        PyErr_SetString(PyExc_ValueError, "no such slot");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *message_state_remove_send_slot(PyObject *object, PyObject *value)
{
    unsigned long slot = PyLong_AsUnsignedLong(value);

    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(
        connection_remove_send_slot(((MessageState *)object)->connection, (uint32_t)slot));
}

/* A list of numbers. */
static PyObject *list_of(const uint16_t *numbers, uint32_t count)
{
    PyObject *list = PyList_New(count);

    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromLong(numbers[i]);

        if (!number || PyList_SetItem(list, i, number))
            replace(&list, NULL);
    }
    return list;
}

/* take_news(): see struct aio_news. */
static PyObject *message_state_take_news(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_connection *c = ((MessageState *)object)->connection;
    struct aio_news news = connection_news(c);
    PyObject *reads = list_of(news.reads, news.n_reads);
    PyObject *freed = reads ? list_of(news.freed, news.n_freed) : NULL;
    PyObject *result =
        freed ? Py_BuildValue("(OOKI)", reads, freed, (unsigned long long)news.landing, news.stage)
              : NULL;

    Py_XDECREF(reads);
    Py_XDECREF(freed);
    if (result)
        connection_forget_news(c);
    return result;
}

/* count_returned(receive, flushed): Python was given a completion, and has seen it. */
static PyObject *message_state_count_returned(PyObject *object, PyObject *args)
{
    int receive, flushed;

    if (!PyArg_ParseTuple(args, "pp", &receive, &flushed))
        return NULL;
    connection_count_returned(((MessageState *)object)->connection, receive, flushed);
    Py_RETURN_NONE;
}

/* Large messages */

/* offer_landing(number, address, rkey, memory): offer a landing to the peer; 0 or an errno. */
static PyObject *message_state_offer_landing(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    unsigned int number, key;
    unsigned long long addr;
    PyObject *memory;
    int code;

    if (!PyArg_ParseTuple(args, "IKIO", &number, &addr, &key, &memory))
        return NULL;
    code = connection_offer_landing(self->connection, number, addr, key);
    if (code == EINVAL) {
        PyErr_SetString(PyExc_ValueError, "no number of a new landing");
        return NULL;
    }
    replace(&self->landings[number], Py_NewRef(memory));
    return PyLong_FromLong(code);
}

/* set_stage(address, lkey, size): the memory that messages are written from. */
static PyObject *message_state_set_stage(PyObject *object, PyObject *args)
{
    unsigned long long addr, size;
    unsigned int key;

    if (!PyArg_ParseTuple(args, "KIK", &addr, &key, &size))
        return NULL;
    connection_set_stage(((MessageState *)object)->connection, addr, key, size);
    Py_RETURN_NONE;
}

/* Notes */

static PyObject *message_state_allow_notes(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (connection_allow_notes(((MessageState *)object)->connection))
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* next_note(): key, address, length, immediate, slot, which the caller releases; None: no more. */
static PyObject *message_state_next_note(PyObject *object, PyObject *Py_UNUSED(unused))
{
    struct aio_note note;

    if (!connection_next_note(((MessageState *)object)->connection, &note))
        Py_RETURN_NONE;
    return Py_BuildValue("(IKKII)", note.key, (unsigned long long)note.addr,
                         (unsigned long long)note.length, note.imm, note.slot);
}

/* resume(wakeup): resume its task, now if the drain does that, while no task is running. */
static PyObject *message_state_resume(PyObject *object, PyObject *wakeup)
{
    int woken;

    if (!Py_IS_TYPE(wakeup, aio_wakeup_type)) {
        PyErr_SetString(PyExc_TypeError, "a Wakeup is needed");
        return NULL;
    }
    woken = aio_wake_or_soon((Wakeup *)wakeup, ((MessageState *)object)->soon);
    return woken < 0 ? NULL : PyBool_FromLong(woken);
}

/* noted_slot(number): of the frame behind a noted WRITE, whose completion Python was given. */
static PyObject *message_state_noted_slot(PyObject *object, PyObject *value)
{
    const struct aio_connection *c = ((MessageState *)object)->connection;
    unsigned long number = PyLong_AsUnsignedLong(value);

    if (PyErr_Occurred())
        return NULL;
    if ((int64_t)number >= connection_n_operations(c)) {
        PyErr_SetString(PyExc_ValueError, "no such operation");
        return NULL;
    }
    return PyLong_FromUnsignedLong(connection_noted_slot(c, (uint32_t)number));
}

static PyObject *message_state_post_read(PyObject *object, PyObject *args)
{
    unsigned long long addr, remote_addr;
    unsigned int number, length, lkey, rkey;

    if (!PyArg_ParseTuple(args, "IKIIKI", &number, &addr, &length, &lkey, &remote_addr, &rkey))
        return NULL;
    return PyLong_FromLong(connection_post_read(((MessageState *)object)->connection, number, addr,
                                                length, lkey, remote_addr, rkey));
}

/* Commands without arguments, with one truth, with one number. */

#define COMMAND(name, function)                                                                    \
    static PyObject *name(PyObject *object, PyObject *Py_UNUSED(unused))                           \
    {                                                                                              \
        function(((MessageState *)object)->connection);                                            \
        Py_RETURN_NONE;                                                                            \
    }

COMMAND(message_state_listen_for_operations, connection_listen_for_operations)
COMMAND(message_state_large_begins, connection_large_begins)
COMMAND(message_state_large_ends, connection_large_ends)
COMMAND(message_state_begin_requests, connection_begin_requests)
COMMAND(message_state_skip, connection_skip_first)

#define SWITCH(name, function)                                                                     \
    static PyObject *name(PyObject *object, PyObject *value)                                       \
    {                                                                                              \
        int truth = PyObject_IsTrue(value);                                                        \
                                                                                                   \
        if (truth < 0)                                                                             \
            return NULL;                                                                           \
        function(((MessageState *)object)->connection, truth);                                     \
        Py_RETURN_NONE;                                                                            \
    }

SWITCH(message_state_delegate, connection_delegate)
SWITCH(message_state_await_arrival, connection_await)

#define NUMBER_COMMAND(name, function)                                                             \
    static PyObject *name(PyObject *object, PyObject *value)                                       \
    {                                                                                              \
        unsigned long long number = PyLong_AsUnsignedLongLong(value);                              \
                                                                                                   \
        if (PyErr_Occurred())                                                                      \
            return NULL;                                                                           \
        function(((MessageState *)object)->connection, number);                                    \
        Py_RETURN_NONE;                                                                            \
    }

NUMBER_COMMAND(message_state_count_large_sent, connection_count_large_sent)
NUMBER_COMMAND(message_state_take_large, connection_take_large)

static PyObject *message_state_keep_memory(PyObject *object, PyObject *value)
{
    int truth = PyObject_IsTrue(value);

    if (truth < 0)
        return NULL;
    ((MessageState *)object)->has_memory = (char)truth;
    Py_RETURN_NONE;
}

static PyObject *message_state_get_awaited_into(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(((MessageState *)object)->into != NULL);
}

static PyObject *message_state_await_sends(PyObject *object, PyObject *value)
{
    unsigned long long flush_at = PyLong_AsUnsignedLongLong(value);

    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(connection_await_sends(((MessageState *)object)->connection, flush_at));
}

/* slots_lacking(size): see connection_slots_lacking. */
static PyObject *message_state_slots_lacking(PyObject *object, PyObject *value)
{
    unsigned long long size = PyLong_AsUnsignedLongLong(value);

    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLong(
        connection_slots_lacking(((MessageState *)object)->connection, size));
}

static PyObject *message_state_was_alive(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(connection_was_alive(((MessageState *)object)->connection));
}

static PyObject *message_state_rest_operations(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(connection_rest_operations(((MessageState *)object)->connection));
}

static PyObject *message_state_ask_life(PyObject *object, PyObject *Py_UNUSED(unused))
{
    int code = connection_ask_life(((MessageState *)object)->connection);

    return code == AIO_NO_ROOM ? Py_NewRef(Py_None) : PyLong_FromLong(code);
}

static PyObject *message_state_ask_identity(PyObject *object, PyObject *awaited)
{
    int waits = PyObject_IsTrue(awaited);

    if (waits < 0)
        return NULL;
    return PyLong_FromLong(connection_ask_identity(((MessageState *)object)->connection, waits));
}

static PyObject *message_state_revoke(PyObject *object, PyObject *generation)
{
    unsigned long number = PyLong_AsUnsignedLong(generation);

    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(
        connection_revoke(((MessageState *)object)->connection, (uint32_t)number));
}

/* admission(owner, generation): an enum aio_admission. */
static PyObject *message_state_admission(PyObject *object, PyObject *args)
{
    unsigned long long owner, generation;

    if (!PyArg_ParseTuple(args, "KK", &owner, &generation))
        return NULL;
    return PyLong_FromLong(
        (long)connection_admission(((MessageState *)object)->connection, owner, generation));
}

/*
 * peek(): (slot, length, immediate) of the oldest message, and whether it is the first frame of
 * requests; the slot of a large message is None.
 */
static PyObject *message_state_peek(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const struct aio_arrival *first = connection_first(((MessageState *)object)->connection);
    PyObject *imm;

    if (!first)
        Py_RETURN_NONE;
    imm = aio_imm_object(first->has_imm, first->imm);
    if (!imm)
        return NULL;
    return first->large ? Py_BuildValue("(OINO)", Py_None, 0, imm, Py_False)
                        : Py_BuildValue("(IINO)", first->slot, first->length, imm,
                                        first->requests ? Py_True : Py_False);
}

/* What may be read */

#define GETTER(name, value)                                                                        \
    static PyObject *name(PyObject *object, void *Py_UNUSED(unused))                               \
    {                                                                                              \
        const struct aio_connection *c = ((MessageState *)object)->connection;                     \
                                                                                                   \
        return value;                                                                              \
    }

#define NUMBER(name) GETTER(message_state_get_##name, PyLong_FromLongLong(connection_##name(c)))
#define FLAG(name)   GETTER(message_state_get_##name, PyBool_FromLong((long)connection_##name(c)))

NUMBER(arrived)
NUMBER(completed)
NUMBER(control)
NUMBER(credits)
NUMBER(eager_size)
NUMBER(flushed)
NUMBER(has_pending)
NUMBER(kept)
NUMBER(large)
NUMBER(owed)
NUMBER(queued)
NUMBER(said)
NUMBER(sent)
NUMBER(to_flush)
NUMBER(under_way)
NUMBER(unused)
FLAG(grows)
FLAG(knows_peer)
FLAG(may_say)
FLAG(requested)
GETTER(message_state_get_lacks, PyLong_FromLong(connection_lacks(c)))

/* Put a value, a reference that is stolen, into a dictionary; whether that went well. */
static int dict_put(PyObject *dict, const char *name, PyObject *value)
{
    int good = value && !PyDict_SetItemString(dict, name, value);

    Py_XDECREF(value);
    return good;
}

#define PUT_NUMBER(name, from) &&dict_put(dict, #name, PyLong_FromLongLong(connection_##name(c)))
#define PUT_FLAG(name, from)   &&dict_put(dict, #name, PyBool_FromLong((long)connection_##name(c)))

static PyObject *message_state_get_counters(PyObject *object, void *Py_UNUSED(unused))
{
    const struct aio_connection *c = ((MessageState *)object)->connection;
    PyObject *dict = PyDict_New();

    if (!(dict AIO_CONNECTION_COUNTERS(PUT_NUMBER)))
        replace(&dict, NULL);
    return dict;
}

/* (name of a violation of the peer, two numbers about it), or None. */
static PyObject *violation_object(const struct aio_connection *c)
{
    static const char *const names[] = {NULL, AIO_VIOLATIONS(AIO_TEXT)};
    uint64_t first, second;
    enum aio_violation violation = connection_violation(c, &first, &second);

    return violation ? Py_BuildValue("(sKK)", names[violation], (unsigned long long)first,
                                     (unsigned long long)second)
                     : Py_NewRef(Py_None);
}

/* What AIO_EVENT_FAILED tells. */
static PyObject *message_state_get_failure(PyObject *object, void *Py_UNUSED(unused))
{
    const struct aio_connection *c = ((MessageState *)object)->connection;

    return Py_BuildValue("(iNN)", (int)connection_error(c),
                         PyBool_FromLong((long)connection_recv_failed(c)), violation_object(c));
}

/* facts(): for debugging, and for tests; the library asks for what it needs by name. */
static PyObject *message_state_facts(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const struct aio_connection *c = ((MessageState *)object)->connection;
    PyObject *dict = message_state_get_counters(object, NULL);
    const uint16_t *slots, *numbers;
    uint32_t n_slots = connection_free_slots(c, &slots);
    uint32_t n_numbers = connection_free_operations(c, &numbers);

    if (!(dict AIO_CONNECTION_FACTS(PUT_NUMBER) AIO_CONNECTION_FLAGS(PUT_FLAG) &&
          dict_put(dict, "life", PyUnicode_FromString(life_name(connection_life(c)))) &&
          dict_put(dict, "done", PyLong_FromUnsignedLong(connection_completed_operations(c))) &&
          dict_put(dict, "free_slots", list_of(slots, n_slots)) &&
          dict_put(dict, "free_numbers", list_of(numbers, n_numbers)) &&
          dict_put(dict, "wrong", violation_object(c))))
        replace(&dict, NULL);
    return dict;
}

static PyMethodDef message_state_methods[] = {
    {"send", (PyCFunction)(void (*)(void))aio_send_method, METH_FASTCALL,
     "Send a buffer, or a list of them, with an immediate or None, now or not at all: 0, an errno, "
     "NO_ROOM or FOR_PYTHON."},
    {"sending", (PyCFunction)(void (*)(void))aio_sending, METH_FASTCALL, "See coroutine.c."},
    {"receiving", aio_receiving, METH_O, NULL},
    {"receiving_into", (PyCFunction)(void (*)(void))aio_receiving_into, METH_FASTCALL, NULL},
    {"messages", aio_messages, METH_O, NULL},
    {"send_in_turn", aio_send_in_turn, METH_VARARGS,
     "Send a frame: kind, data, argument, immediate.  0, an errno, or a QueuedSend that ends so."},
    {"send_first", (PyCFunction)(void (*)(void))aio_send_first, METH_FASTCALL,
     "The same, in the step in which wait_room has ended: before those that wait in line."},
    {"send_each", (PyCFunction)(void (*)(void))aio_send_each, METH_FASTCALL | METH_STATIC,
     "Send a message over each of a tuple of these: None, or pairs of a number and what send "
     "says."},
    {"wait_room", aio_line_wait_room, METH_NOARGS,
     "A QueuedSend that sends nothing, and ends with 0 when there is room for a frame."},
    {"expire_sends", aio_line_expire, METH_VARARGS,
     "End the waits in line that have lasted so long: what makes exceptions, seconds.  The seconds "
     "that the first of the others has waited, or None."},
    {"slots_lacking", message_state_slots_lacking, METH_O,
     "Send slots that are all that a message of so many bytes, in fragments, lacks; 0: none."},
    {"argument", message_state_argument, METH_O,
     "The argument of a frame without data that the peer has sent, by its kind."},
    {"words", message_state_words, METH_NOARGS, "The bytes behind the ABORT of the peer."},
    {"leave_words", message_state_leave_words, METH_O,
     "Have the ABORT of this side take these bytes along, as far as there is room."},
    {"send_control", message_state_send_control, METH_VARARGS,
     "Send a frame without data, when there is a slot: kind, argument, flags; 0 or an errno."},
    {"credit", message_state_credit, METH_NOARGS,
     "The program waits: send the credits that are due; 0 or an errno, perhaps of an earlier "
     "post."},
    {"post_chain", message_state_post_chain, METH_NOARGS,
     "Post the sends that wait for the end of the turn; 0 or an errno."},
    {"await_sends", message_state_await_sends, METH_O,
     "Tell of the completion of so many sends, 0 for none; whether completions are to wake the "
     "loop."},
    {"large_begins", message_state_large_begins, METH_NOARGS,
     "A large message waits: no later message goes past it in fragments."},
    {"large_ends", message_state_large_ends, METH_NOARGS, "It waits no more."},
    {"count_large_sent", message_state_count_large_sent, METH_O,
     "One of so many bytes has arrived."},
    {"begin_requests", message_state_begin_requests, METH_NOARGS, "The next message is a request."},
    {"take", message_state_take, METH_NOARGS,
     "Take the oldest message out of the ring; None if there is none, or if it is large.  One that "
     "may not be kept in its slot has `_kept` unset."},
    {"take_into", aio_arrivals_take_into, METH_O,
     "Take it by a copy into a buffer: its bytes; more than the buffer has if it was not taken."},
    {"keep_memory", message_state_keep_memory, METH_O,
     "Whether large messages are left to the next call with memory of its own."},
    {"take_large", message_state_take_large, METH_O,
     "Take a large message of so many bytes out of its place, which is the first."},
    {"peek", message_state_peek, METH_NOARGS,
     "The oldest arrival: slot, length, immediate, whether requests begin; or None."},
    {"skip", message_state_skip, METH_NOARGS, "Drop the oldest arrival."},
    {"cut", aio_arrivals_cut, METH_O,
     "Drop the large messages but the oldest so many, and what came behind."},
    {"delegate", message_state_delegate, METH_O, "Whether Python decides about each receive."},
    {"await_arrival", message_state_await_arrival, METH_O, "Whether the next message is an event."},
    {"next_large", aio_arrivals_next_large, METH_O,
     "The next announcement: length, immediate, body, slot; or None.  With how many receives there "
     "may be."},
    {"next_done", aio_arrivals_next_done, METH_NOARGS, "The next DONE: number, flags; or None."},
    {"take_news", message_state_take_news, METH_NOARGS,
     "What frames and READs have brought else: numbers of READs of large messages, slots that are "
     "free, bytes of a message for which a landing is wanted or 0, number of the peer's landing "
     "that is larger than the stage or 0."},
    {"set_receiver", message_state_set_receiver, METH_O,
     "Call this in the rare cases of a receive; it keeps the memory of received messages alive."},
    {"set_handler", message_state_set_handler, METH_O,
     "Call this with the events but for arrivals and the ends of operations; None: nothing."},
    {"bind", message_state_bind, METH_VARARGS,
     "Name the adapter's side: queue pair, id of its requests, flags of sends, inline bytes, "
     "(address, stride, key, count) of the send slots and of the receive slots, (address, stride, "
     "key) of the control slots, address of the pool's flag, the object that keeps them alive."},
    {"agree", (PyCFunction)(void (*)(void))message_state_agree, METH_VARARGS | METH_KEYWORDS,
     "Take the terms of the handshake; see struct aio_terms."},
    {"require_proof", message_state_require_proof, METH_O,
     "Take no frame but a greeting with this proof; with None, none at all until `prove`."},
    {"prove", message_state_prove, METH_O,
     "The peer has proved itself; the greeting has this proof of this side."},
    {"advance", message_state_advance, METH_O,
     "Let an event of its life happen: REFUSE_SENDS, HOLD, SHUT, END or FLUSH."},
    {"close", message_state_close, METH_NOARGS,
     "Post nothing and touch no slot any more: queue pair and memory may go.  Idempotent."},
    {"life_table", message_state_life_table, METH_NOARGS | METH_STATIC,
     "({state: {event: next state}}, {state: {right: whether}})."},
    {"facts", message_state_facts, METH_NOARGS,
     "All numbers by name, for debugging and for tests."},
    {"set_keys", message_state_set_keys, METH_VARARGS,
     "Slots of a pool have come or gone: receives?, address, slots of a registration, keys, "
     "leaving, full."},
    {"resize", message_state_resize, METH_VARARGS,
     "Fit the window to so many receive slots; so many more are for answers; slots have come."},
    {"offer_landing", message_state_offer_landing, METH_VARARGS,
     "Offer a landing to the peer: number, address, rkey, the object that keeps it alive."},
    {"set_stage", message_state_set_stage, METH_VARARGS,
     "Name the memory that messages are written from: address, lkey, bytes."},
    {"post_read", message_state_post_read, METH_VARARGS,
     "Post a READ of a large message: number, address, length, lkey, remote address, rkey."},
    {"allow_notes", message_state_allow_notes, METH_NOARGS, "Keep notes from now on."},
    {"next_note", message_state_next_note, METH_NOARGS,
     "The next note: key, address, length, immediate, slot, which is the caller's; or None."},
    {"resume", message_state_resume, METH_O,
     "Resume the task of a Wakeup; for the handler, as no task may be running."},
    {"noted_slot", message_state_noted_slot, METH_O,
     "The slot of the frame behind a noted WRITE, by its number."},
    {"post_receives", message_state_post_receives, METH_O,
     "Post receive slots that are counted: a list, or how many from the first on; 0 or an errno."},
    {"add_receives", message_state_add_receives, METH_O,
     "Post receive slots of a list that have come, or come back, and send the credits that are "
     "due; 0 or an errno."},
    {"release_slot", message_state_release_slot, METH_VARARGS,
     "The slot of a data message is free, which the program had: slot, kept.  0, an errno, or "
     "FOR_PYTHON: it may have to leave."},
    {"repost_slot", message_state_repost_slot, METH_O, "The same of a frame without credit."},
    {"add_send_slot", message_state_add_send_slot, METH_O, "A send slot has come, or is free."},
    {"remove_send_slot", message_state_remove_send_slot, METH_O,
     "Take this send slot; was it free?"},
    {"count_returned", message_state_count_returned, METH_VARARGS,
     "Python has seen a completion: of a receive?, flushed?"},
    {"allow_operations", aio_operations_allow, METH_VARARGS,
     "Make room for so many operations to be under way; are there READs?"},
    {"take_number", aio_operation_take_number, METH_NOARGS,
     "Take the number of an operation; None if none is free."},
    {"release_number", aio_operation_release_number, METH_O, "The number of an operation is free."},
    {"forget_done", aio_operations_forget_done, METH_NOARGS,
     "Ended operations are not reported any more."},
    {"listen_for_operations", message_state_listen_for_operations, METH_NOARGS,
     "Completed operations wake the loop: `read` and `write` may post."},
    {"rest_operations", message_state_rest_operations, METH_NOARGS,
     "They need not, and `read` and `write` post no more; False if there were some since the last "
     "call, or are under way."},
    {"operate_on", message_state_operate_on, METH_VARARGS,
     "Name the classes of pieces, of registered memory and of the peer's memory, and the "
     "protection "
     "domain."},
    {"await_number", message_state_await_number, METH_O,
     "A task waits for a number: call this when an operation has ended; None: no task does."},
    {"operate", (PyCFunction)(void (*)(void))aio_operate, METH_FASTCALL,
     "Post a READ, WRITE or atomic; see operation.c."},
    {"operate_copied", aio_operate_copied, METH_VARARGS,
     "The same by way of the memory of `set_bounce`; None also if there is no room."},
    {"read", (PyCFunction)(void (*)(void))aio_operation_read, METH_FASTCALL,
     "READ in one request, into registered memory or a small buffer; see operation.c."},
    {"write", (PyCFunction)(void (*)(void))aio_operation_write, METH_FASTCALL,
     "WRITE in the same way; with an immediate, a frame tells the peer of it."},
    {"fetch_add", (PyCFunction)(void (*)(void))aio_operation_fetch_add, METH_FASTCALL,
     "Add to an integer of the peer: remote memory, value, offset; see operation.c."},
    {"compare_swap", (PyCFunction)(void (*)(void))aio_operation_compare_swap, METH_FASTCALL,
     "Change it if it has a value: remote memory, expected, desired, offset."},
    {"allow_atomics", aio_operations_allow_atomics, METH_NOARGS,
     "The adapter has atomics: `fetch_add` and `compare_swap` may post."},
    {"set_bounce", aio_operations_set_bounce, METH_O,
     "A region that bytes are copied through; see operation.c."},
    {"ended", aio_ended, METH_VARARGS, "An operation has ended: its number, error or None."},
    {"was_alive", message_state_was_alive, METH_NOARGS,
     "Whether the peer has shown life since the last call."},
    {"ask_life", message_state_ask_life, METH_NOARGS,
     "Ask the peer for a sign of life; 0, an errno, or None if a question is open already."},
    {"ask_identity", message_state_ask_identity, METH_O,
     "Tell the peer whose memory the regions of this side are, and ask for the same, unless both "
     "are known; is the answer awaited?  0 or an errno."},
    {"revoke", message_state_revoke, METH_O,
     "Tell the peer, if it understands, that the exposure with this number has ended; 0 or an "
     "errno."},
    {"admission", message_state_admission, METH_VARARGS,
     "Whether memory of this owner, and of this exposure, is the peer's: 0, or a REFUSED_ number."},
    {"spin_with", message_state_spin_with, METH_VARARGS,
     "Spin while a task waits for a message, for an operation."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef message_state_members[] = {
    {"receive_wakeup", T_OBJECT, offsetof(MessageState, receive_wakeup), READONLY,
     "What a task that waits for a message is parked on."},
    {"has_memory", T_BOOL, offsetof(MessageState, has_memory), READONLY,
     "As `keep_memory` or a recv_into have left it."},
    {"bounce_region", T_OBJECT, offsetof(MessageState, bounce_region), READONLY,
     "The region of `set_bounce`, or None."},
    {NULL, 0, 0, 0, NULL},
};

#define ATTRIBUTE(name, doc) {#name, message_state_get_##name, NULL, doc, NULL}

static PyGetSetDef message_state_getset[] = {
    ATTRIBUTE(arrived, "Messages that the program has not taken."),
    ATTRIBUTE(awaited_into, "Whether the task of `receive_wakeup` is in recv_into."),
    ATTRIBUTE(completed, "Sends that have reached the peer's adapter."),
    ATTRIBUTE(control, "Receives for frames without credit."),
    ATTRIBUTE(counters, "The counters of ConnectionStats, by name."),
    ATTRIBUTE(credits, "Messages that the peer has room for."),
    ATTRIBUTE(eager_size, "Bytes of the largest message that goes through one slot."),
    ATTRIBUTE(failure, "Errno of a post of the drain or 0, whether the first that failed was one "
                       "of receives, a violation of the peer and two numbers about it or None."),
    ATTRIBUTE(flushed, "Sends that came back without success, or were never posted."),
    ATTRIBUTE(grows, "Whether slots come when the peer has used up its credits."),
    ATTRIBUTE(has_pending, "Frames without data that wait for a slot."),
    ATTRIBUTE(kept, "Messages that the program keeps in their slots."),
    ATTRIBUTE(knows_peer, "Whether the peer has told its identity, or has shown that it has none."),
    ATTRIBUTE(lacks, "What the next frame lacks, to be sent now: a LACKS_ number, or 0."),
    ATTRIBUTE(large, "Large messages among those that have arrived."),
    ATTRIBUTE(may_say, "Whether frames without data may still be sent."),
    ATTRIBUTE(owed, "Credits that the peer is owed; below 0, receives that are missing."),
    ATTRIBUTE(queued, "Tasks that wait in line to send."),
    ATTRIBUTE(requested, "Whether the peer has sent a request."),
    ATTRIBUTE(said, "Frames that the peer has sent: bits, 1 << kind; CREDIT: any."),
    ATTRIBUTE(sent, "Sends that were posted, or are about to be."),
    ATTRIBUTE(to_flush, "Of these, those up to the last that is not a frame without data."),
    ATTRIBUTE(under_way, "Sends, receives and operations of the adapter."),
    ATTRIBUTE(unused, "Credits that the peer has."),
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot message_state_slots[] = {
    {Py_tp_new, message_state_new},
    {Py_tp_traverse, message_state_traverse},
    {Py_tp_clear, message_state_clear},
    {Py_tp_dealloc, message_state_dealloc},
    {Py_tp_call, message_state_call}, /* with its events */
    {Py_tp_methods, message_state_methods},
    {Py_tp_members, message_state_members},
    {Py_tp_getset, message_state_getset},
    {Py_tp_doc, "The messages and operations of one connection."},
    {0, NULL},
};

PyType_Spec aio_message_state_spec = {
    .name = "aiordma._core.MessageState",
    .basicsize = sizeof(MessageState),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = message_state_slots,
};
