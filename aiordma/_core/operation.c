/*
 * Operations: READs, WRITEs and atomics of a connection, checked, posted, completed and ended.
 *
 * Registration is the registered memory as the data path needs it: numbers, and how many operations
 * use it.  Retaining a resource takes a lock and two calls of Python, because it may happen in any
 * thread.  Operations begin and end in the thread of their loop, with the interpreter lock held, so
 * that a number is enough.  A region that is closed while the number is not 0 counts all of them as
 * a single user, and `_let_go` is called when the last operation has ended.
 *
 * Operation is a request that is under way.  Each has a number, which is the sub-index of its
 * wr_id, and an object that one task waits on.  The local memory is in use from the post to the
 * completion, whether or not a task waits: a canceled task leaves its wait, the adapter goes on.
 * An object is used again for its number unless the program still has it: an operation may end
 * before it is waited for.
 *
 * `transfer` posts a READ or WRITE in a single request: of registered memory, or of a buffer that
 * is small enough to be copied.  It has the rules of these frequent cases; endpoint/one_sided.py
 * has all rules, and the texts of the errors.  A transfer that does not pass here is left to
 * Python, which does it in another way or refuses it.
 *
 * `change` posts an atomic in the same way, whose result is an integer and no memory of the
 * program.
 *
 * The bytes of other buffers are copied through `bounce`, registered memory that Python lends after
 * its first transfer of this kind.  A WRITE copies before the post, so that the buffer is free at
 * once; and it needs no room there if it goes inline.  A READ copies at its end, and its buffer
 * stays exported until then, canceled or not: the adapter never has the buffer itself.
 *
 * On Soft-RoCE a completion does not prove that the data of a READ, or the result of an atomic, are
 * there (docs/surprises.md).  What is missing are the last packets.  So the last 8 bytes of the
 * local memory are random from the post on, and an operation that finds them unchanged ends with 0
 * bytes, of which Python makes an error.  Data that equal them by chance are taken for missing,
 * too: once in 2^64 times.  A READ of less than 8 bytes is a single packet, of which none was lost
 * so.
 */
#include "core.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "admission.h"

/* Registration */

static PyObject *registration_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"addr", "length", "lkey", "access", "pd", "memory", NULL};
    unsigned long long addr, length, memory = 0;
    unsigned int lkey, access;
    PyObject *pd;
    Registration *self;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKIIO|K", names, &addr, &length, &lkey, &access,
                                     &pd, &memory))
        return NULL;
    self = (Registration *)PyType_GenericAlloc(type, 0);
    if (!self)
        return NULL;
    self->addr = addr;
    self->length = length;
    self->memory = (char *)(uintptr_t)memory;
    self->lkey = lkey;
    self->access = access;
    self->pd = Py_NewRef(pd);
    return (PyObject *)self;
}

static void registration_dealloc(PyObject *object)
{
    Py_CLEAR(((Registration *)object)->pd);
    aio_free(object);
}

static PyObject *registration_shut(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((Registration *)object)->closing = 1;
    return PyBool_FromLong(((Registration *)object)->uses > 0);
}

/* One use less; whether the region waits for it. */
int aio_registration_leave(Registration *self)
{
    return --self->uses == 0 && self->closing;
}

static PyObject *registration_leave(PyObject *object, PyObject *Py_UNUSED(unused))
{
    if (!((Registration *)object)->uses) {
        PyErr_SetString(PyExc_RuntimeError, "no operation uses the memory");
        return NULL;
    }
    return PyBool_FromLong(aio_registration_leave((Registration *)object));
}

static PyMethodDef registration_methods[] = {
    {"shut", registration_shut, METH_NOARGS, "No more use of it; whether it is in use."},
    {"leave", registration_leave, METH_NOARGS,
     "One use less; whether it was the last of a region that is being closed."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef registration_members[] = {
    {"uses", T_UINT, offsetof(Registration, uses), READONLY, "Operations under way."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot registration_slots[] = {
    {Py_tp_new, registration_new},
    {Py_tp_dealloc, registration_dealloc},
    {Py_tp_methods, registration_methods},
    {Py_tp_members, registration_members},
    {Py_tp_doc, "Registered memory, and how many operations use it."},
    {0, NULL},
};

PyType_Spec aio_registration_spec = {
    .name = "aiordma._core.Registration",
    .basicsize = sizeof(Registration),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = registration_slots,
};

/* Operation */

static int operation_traverse(PyObject *object, visitproc visit, void *arg)
{
    traverseproc base = (traverseproc)PyType_GetSlot(aio_wakeup_type, Py_tp_traverse);

    Py_VISIT(((Operation *)object)->region);
    return base(object, visit, arg);
}

static int operation_clear(PyObject *object)
{
    inquiry base = (inquiry)PyType_GetSlot(aio_wakeup_type, Py_tp_clear);

    Py_CLEAR(((Operation *)object)->region);
    replace((PyObject **)&((Operation *)object)->registration, NULL);
    return base(object);
}

/* The collector does not see the buffer of `view`: see message_object.c. */
static void operation_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    PyBuffer_Release(&((Operation *)object)->view);
    operation_clear(object);
    aio_free(object);
}

/* What the wait ends with: the bytes, 0 if a READ or atomic was not complete; or of `change`. */
static PyObject *operation_result(const Operation *self)
{
    if (!self->changes)
        return PyLong_FromUnsignedLong(self->length);
    return self->length ? PyLong_FromUnsignedLongLong(self->before) : Py_NewRef(Py_None);
}

/* As a Wakeup, but it ends with `operation_result`. */
static PySendResult operation_send(PyObject *object, PyObject *Py_UNUSED(value), PyObject **result)
{
    *result = aio_wakeup_next(object);
    if (*result)
        return PYGEN_NEXT;
    if (PyErr_Occurred())
        return PYGEN_ERROR;
    *result = operation_result((Operation *)object);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

/* For a caller that iterates, as the interpreter does while it is traced. */
static PyObject *operation_next(PyObject *object)
{
    PyObject *ended, *next = aio_wakeup_next(object);

    if (!next && !PyErr_Occurred()) {
        ended = operation_result((Operation *)object);
        if (ended)
            PyErr_SetObject(PyExc_StopIteration, ended);
        Py_XDECREF(ended);
    }
    return next;
}

static PyMemberDef operation_members[] = {
    {"opcode", T_UBYTE, offsetof(Operation, opcode), READONLY, "As enum ibv_wr_opcode has it."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_traverse, operation_traverse},
    {Py_tp_clear, operation_clear},
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_members, operation_members},
    {Py_am_send, operation_send},
    {Py_tp_iternext, operation_next},
    {Py_tp_doc, "A READ, WRITE or atomic under way; awaited by one task."},
    {0, NULL},
};

PyType_Spec aio_operation_spec = {
    .name = "aiordma._core.Operation",
    .basicsize = sizeof(Operation),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = operation_slots,
};

/* The operation that is under way with a number; borrowed, or NULL. */
static Operation *operation_under_way(const MessageState *self, uint32_t number)
{
    Operation *operation;

    if (!self->operations || (int64_t)number >= connection_n_operations(self->connection))
        return NULL;
    operation = (Operation *)self->operations[number];
    return operation && operation->region ? operation : NULL;
}

/*
 * The object for a number, made or used again; borrowed, or NULL.  Up to Python 3.11 the collector
 * may run a function of the program meanwhile, which takes the number itself: see aio_post.
 */
static Operation *operation_for(MessageState *self, uint32_t number)
{
    Operation *operation;
    PyObject *made;

    if (!self->operations) {
        self->operations =
            PyMem_Calloc((size_t)connection_n_operations(self->connection), sizeof(PyObject *));
        if (!self->operations)
            return (Operation *)PyErr_NoMemory();
    }
    operation = (Operation *)self->operations[number];
    if (operation && Py_REFCNT((PyObject *)operation) == 1) {
        aio_wakeup_forget(&operation->wakeup); /* an error that no task has waited for */
        return operation;
    }
    made = PyType_GenericAlloc(aio_operation_type, 0);
    if (!made)
        return NULL;
    ((Wakeup *)made)->loop = Py_XNewRef(self->receive_wakeup->wakeup.loop);
    ((Wakeup *)made)->spin = Py_XNewRef(self->spin);
    if (operation_under_way(self, number))
        Py_DECREF(made);
    else
        replace(&self->operations[number], made);
    return (Operation *)self->operations[number];
}

/* The first position in `bounce` with so many bytes in a row; whether they are free. */
static int bounce_fits(const MessageState *self, uint32_t length, uint32_t *position)
{
    uint32_t size = (uint32_t)self->bounce->length, left = size - self->bounce_head % size;

    *position = self->bounce_head + (length > left ? left : 0);
    return *position + length - self->bounce_tail <= size;
}

/* Free what no operation has any more: not at the end of each, but when room is needed. */
static void bounce_reclaim(MessageState *self)
{
    uint32_t first = self->bounce_head, count = 0;

    if (connection_operating(self->connection))
        count = (uint32_t)connection_n_operations(self->connection);
    for (uint32_t i = 0; i < count; i++) {
        const Operation *operation = operation_under_way(self, i);

        if (operation && operation->place && (int32_t)(operation->position - first) < 0)
            first = operation->position;
    }
    if (first == self->bounce_head)
        self->bounce_head = first = 0;
    self->bounce_tail = first;
}

/* Whether the adapter writes to the local memory. */
int aio_operation_lands(uint32_t opcode)
{
    return opcode == IBV_WR_RDMA_READ || opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ||
           opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
}

/* Random enough that no data are like it by chance; different in each process. */
uint64_t aio_next_mark(void)
{
    static uint64_t state;
    uint64_t mark;

    /* Not getentropy(), which a C library older than 2.25 does not have. */
    if (!state && syscall(SYS_getrandom, &state, sizeof(state), 0) != (long)sizeof(state))
        state = (uint64_t)getpid();
    state += UINT64_C(0x9e3779b97f4a7c15); /* splitmix64 */
    mark = (state ^ state >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    mark = (mark ^ mark >> 27) * UINT64_C(0x94d049bb133111eb);
    return mark ^ mark >> 31;
}

/* Mark the end of the local memory of an operation, so that `arrived` can tell. */
static void mark_tail(Operation *operation, const struct aio_operation *request,
                      const Registration *registration)
{
    operation->tail = NULL;
    if (!registration->memory || !aio_operation_lands(request->opcode) ||
        request->length < sizeof(uint64_t))
        return;
    operation->tail = registration->memory + (request->addr - registration->addr) +
                      request->length - sizeof(uint64_t);
    operation->mark = aio_next_mark();
    memcpy(operation->tail, &operation->mark, sizeof(uint64_t));
}

/* Whether the adapter has written all of the memory of an operation that has succeeded. */
static int operation_has_landed(Operation *operation)
{
    if (!operation->tail || memcmp(operation->tail, &operation->mark, sizeof(uint64_t)))
        return 1;
    operation->length = 0;
    return 0;
}

/* Name the bytes of a buffer in a request, copied if they have to be; whether there is room. */
static int bounce_put(MessageState *self, struct aio_operation *request, const Py_buffer *view,
                      uint32_t *position)
{
    request->addr = (uint64_t)(uintptr_t)view->buf;
    if (request->opcode == IBV_WR_RDMA_WRITE &&
        request->length <= connection_inline_size(self->connection))
        return 1;
    if (!connection_operating(self->connection))
        bounce_reclaim(self); /* to the beginning, which is in the caches */
    if (!bounce_fits(self, request->length, position)) {
        bounce_reclaim(self);
        if (!bounce_fits(self, request->length, position))
            return 0;
    }
    request->addr = self->bounce->addr + *position % (uint32_t)self->bounce->length;
    if (!aio_operation_lands(request->opcode))
        memcpy((void *)(uintptr_t)request->addr, view->buf, request->length);
    return 1;
}

/*
 * Post a request with this number; if the number is negative, with a free number.  The bytes are
 * those of `view`, unless that is NULL.
 *
 * Returns the operation; None if no number is free, or if the rules in Python have to decide; or
 * the errno of the post.
 */
static PyObject *aio_post(MessageState *self, long number, struct aio_operation *request,
                          PyObject *region, Registration *registration, const Py_buffer *view)
{
    struct aio_connection *c = self->connection;
    int any = number < 0, elsewhere = aio_is_elsewhere(self);
    uint32_t position = 0;
    Operation *operation;
    int code;

    if (elsewhere < 0)
        return NULL;
    if (elsewhere)
        Py_RETURN_NONE;
    if (any) {
        number = connection_peek_number(c);
        if (number < 0)
            Py_RETURN_NONE;
    }
    if (number >= connection_n_operations(c)) {
        PyErr_SetString(PyExc_ValueError, "no such operation");
        return NULL;
    }
    request->number = (uint32_t)number;
    operation = operation_for(self, request->number);
    if (!operation)
        return NULL;
    /* No function of the program runs from here to the last line. */
    if (!any && operation->region) {
        PyErr_SetString(PyExc_RuntimeError, "the operation is under way");
        return NULL;
    }
    if (!connection_may_operate(c) || registration->closing || operation->region ||
        (view && !bounce_put(self, request, view, &position)))
        Py_RETURN_NONE;
    mark_tail(operation, request, registration);
    code = connection_post_operation(c, request);
    if (code == AIO_NO_ROOM)
        Py_RETURN_NONE;
    if (code)
        return PyLong_FromLong(code);
    if (any)
        connection_take_number(c);
    registration->uses++;
    operation->region = Py_NewRef(region);
    operation->opcode = (unsigned char)request->opcode;
    operation->length = request->length;
    operation->place = NULL;
    operation->changes = 0;
    if (view && request->addr != (uint64_t)(uintptr_t)view->buf) {
        operation->place = (char *)(uintptr_t)request->addr;
        operation->position = position;
        self->bounce_head = position + ((request->length + 63) & ~UINT32_C(63));
    }
    Py_INCREF((PyObject *)operation);
    replace((PyObject **)&operation->registration, Py_NewRef((PyObject *)registration));
    return (PyObject *)operation;
}

/*
 * Export the bytes of a buffer: 0, or -1 with an exception.
 *
 * They are exported by a memoryview of their own, so that the program can release its memoryview,
 * and so that an exporter gets back the struct that it has filled.  Bytes and a bytearray need no
 * such care.
 */
static int export_buffer(PyObject *buffer, uint32_t opcode, Py_buffer *view)
{
    int flags =
        (aio_operation_lands(opcode) ? PyBUF_WRITABLE : 0) | PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
    PyObject *exporter = PyBytes_CheckExact(buffer) || PyByteArray_CheckExact(buffer)
                             ? Py_NewRef(buffer)
                             : PyMemoryView_FromObject(buffer);
    int code = exporter ? PyObject_GetBuffer(exporter, view, flags) : -1;

    Py_XDECREF(exporter);
    return code;
}

/* The export goes on until the end of the operation, if its result is copied to the buffer. */
static void keep_export(PyObject *result, uint32_t opcode, Py_buffer *view)
{
    if (aio_operation_lands(opcode) && result && Py_IS_TYPE(result, aio_operation_type))
        ((Operation *)result)->view = *view;
    else
        PyBuffer_Release(view);
}

/* operate(number, opcode, address, length, remote address, rkey, compare_add, swap, region) */
PyObject *aio_operate(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    MessageState *self = (MessageState *)object;
    struct aio_operation request;
    PyObject *registration, *result;
    long number;

    if (count != 9) {
        PyErr_SetString(PyExc_TypeError, "operate() takes 9 arguments");
        return NULL;
    }
    number = PyLong_AsLong(args[0]);
    request = (struct aio_operation){
        .opcode = (uint32_t)PyLong_AsUnsignedLong(args[1]),
        .addr = PyLong_AsUnsignedLongLong(args[2]),
        .length = (uint32_t)PyLong_AsUnsignedLong(args[3]),
        .remote_addr = PyLong_AsUnsignedLongLong(args[4]),
        .rkey = (uint32_t)PyLong_AsUnsignedLong(args[5]),
        .compare_add = PyLong_AsUnsignedLongLong(args[6]),
        .swap = PyLong_AsUnsignedLongLong(args[7]),
    };
    registration = PyErr_Occurred() ? NULL : PyObject_GetAttr(args[8], aio_name._registration);
    if (!registration)
        return NULL;
    if (!Py_IS_TYPE(registration, aio_registration_type)) {
        PyErr_SetString(PyExc_TypeError, "a registered region is needed");
        result = NULL;
    } else {
        request.lkey = ((Registration *)registration)->lkey;
        result = aio_post(self, number, &request, args[8], (Registration *)registration, NULL);
    }
    Py_DECREF(registration);
    return result;
}

/*
 * operate_copied(number, opcode, buffer, remote address, rkey, compare_add, swap): as `operate`, of
 * the bytes of a buffer, by way of `bounce`.  None also if there is no room there.
 */
PyObject *aio_operate_copied(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    struct aio_operation request = {0};
    unsigned long long remote_addr, compare_add, swap;
    PyObject *buffer, *result = NULL;
    Py_buffer view;
    long number;

    if (!PyArg_ParseTuple(args, "lIOKIKK", &number, &request.opcode, &buffer, &remote_addr,
                          &request.rkey, &compare_add, &swap))
        return NULL;
    if (!self->bounce)
        Py_RETURN_NONE;
    if (export_buffer(buffer, request.opcode, &view))
        return NULL;
    request.remote_addr = remote_addr;
    request.compare_add = compare_add;
    request.swap = swap;
    request.lkey = self->bounce->lkey;
    if (view.len && (uint64_t)view.len <= self->bounce->length) {
        request.length = (uint32_t)view.len;
        result = aio_post(self, number, &request, self->bounce_region, self->bounce, &view);
    } else {
        result = Py_NewRef(Py_None);
    }
    keep_export(result, request.opcode, &view);
    return result;
}

/*
 * The operation has ended: its region, which is still in use; the reference is the caller's, as is
 * one to the operation.  The end of the export may run a function of the program, which may post.
 */
static PyObject *operation_finish(MessageState *self, Operation *operation, uint32_t number,
                                  int good)
{
    PyObject *region = operation->region;
    Py_buffer view = operation->view;

    Py_INCREF((PyObject *)operation);
    if (good && view.obj)
        memcpy(view.buf, operation->place, operation->length);
    else if (good && operation->changes)
        memcpy(&operation->before, operation->place, sizeof(operation->before));
    operation->view.obj = operation->region = NULL;
    connection_end_operation(self->connection, number);
    PyBuffer_Release(&view);
    return region;
}

/* End the use of an operation's memory: 0, or -1 with an exception. */
static int operation_end_use(Operation *operation, PyObject *region)
{
    PyObject *done;

    if (!aio_registration_leave(operation->registration))
        return 0;
    done = PyObject_CallMethodObjArgs(region, aio_name._let_go, NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/*
 * End an operation that has succeeded: the memory is let go, and the task that waits is resumed,
 * even if the memory could not be let go.  0, or -1.  A forked child may bring a completion twice:
 * the second is of no operation.
 */
int aio_operation_succeed(MessageState *self, uint32_t number)
{
    Operation *operation = operation_under_way(self, number);
    PyObject *region, *type = NULL, *value = NULL, *traceback = NULL;
    int rc = 0, good;

    if (!operation)
        return 0;
    good = operation_has_landed(operation);
    connection_count_operation(self->connection, (enum ibv_wr_opcode)operation->opcode,
                               operation->length);
    region = operation_finish(self, operation, number, good);
    if (operation_end_use(operation, region))
        PyErr_Fetch(&type, &value, &traceback);
    if (operation->wakeup.state == AIO_WAITING)
        rc = aio_wake_or_soon(&operation->wakeup, self->soon);
    else
        operation->wakeup.state = AIO_DONE;
    Py_DECREF((PyObject *)operation);
    if (type && rc < 0) {
        PyObject *other[3];

        PyErr_Fetch(&other[0], &other[1], &other[2]);
        PyErr_Restore(type, value, traceback);
        PyErr_WriteUnraisable(region);
        PyErr_Restore(other[0], other[1], other[2]);
    } else if (type) {
        PyErr_Restore(type, value, traceback);
        rc = -1;
    }
    Py_DECREF(region);
    return rc < 0 ? -1 : 0;
}

/*
 * End an operation whose completion went to Python, with its error or None.  Its region, whose use
 * the caller ends; None if the operation is not under way.
 */
PyObject *aio_operation_ended(MessageState *self, uint32_t number, PyObject *error)
{
    Operation *operation;
    PyObject *region;
    int good;

    operation = operation_under_way(self, number);
    if (!operation)
        Py_RETURN_NONE;
    good = error == Py_None && operation_has_landed(operation);
    if (error == Py_None)
        connection_count_operation(self->connection, (enum ibv_wr_opcode)operation->opcode,
                                   operation->length);
    else if (operation->wakeup.state != AIO_READY) /* a task that was canceled is told that */
        replace(&operation->wakeup.error, Py_NewRef(error));
    region = operation_finish(self, operation, number, good);
    if (operation->wakeup.state != AIO_WAITING) {
        operation->wakeup.state = AIO_DONE;
    } else if (aio_wake_soon(&operation->wakeup) < 0) {
        /* The exception goes on, so that the caller does not end the use. */
        PyObject *type, *value, *traceback;

        PyErr_Fetch(&type, &value, &traceback);
        if (operation_end_use(operation, region))
            PyErr_WriteUnraisable(region);
        PyErr_Restore(type, value, traceback);
        replace(&region, NULL);
    }
    Py_DECREF((PyObject *)operation);
    return region;
}

void aio_free_operations(MessageState *self)
{
    PyObject **operations = self->operations;

    self->operations = NULL;
    for (int64_t i = 0; operations && i < connection_n_operations(self->connection); i++)
        Py_XDECREF(operations[i]);
    PyMem_Free(operations);
}

/* READ and WRITE in a single request */

static int number_of(PyObject *object, PyObject *name, uint64_t *number)
{
    PyObject *value = PyObject_GetAttr(object, name);

    if (!value)
        return -1;
    *number = PyLong_AsUnsignedLongLong(value);
    Py_DECREF(value);
    return *number == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/*
 * Read the numbers of a RemoteRegion, unless they are those of the last call: programs use the same
 * memory of the peer again and again, and a RemoteRegion never changes.
 */
static int know_remote(MessageState *self, PyObject *remote)
{
    PyObject *rights;
    int rc;

    if (self->known == remote)
        return 0;
    if (!Py_IS_TYPE(remote, (PyTypeObject *)self->remote))
        return -1;
    replace(&self->known, NULL);
    if (number_of(remote, aio_name.addr, &self->known_addr) ||
        number_of(remote, aio_name.length, &self->known_length) ||
        number_of(remote, aio_name.rkey, &self->known_rkey) ||
        number_of(remote, aio_name.owner, &self->known_owner) ||
        number_of(remote, aio_name.generation, &self->known_generation) ||
        number_of(remote, aio_name.notes, &self->known_notes))
        return -1;
    rights = PyObject_GetAttr(remote, aio_name.rights);
    rc = rights ? number_of(rights, aio_name._value_, &self->known_rights) : -1;
    Py_XDECREF(rights);
    if (!rc)
        self->known = Py_NewRef(remote);
    return rc;
}

int aio_remote_admits(MessageState *self, PyObject *remote, uint64_t skip, uint64_t length,
                      uint32_t right)
{
    return !know_remote(self, remote) &&
           !admission_of_remote(self->known_addr, self->known_length, self->known_rights, skip,
                                length, right) &&
           !connection_admission(self->connection, self->known_owner, self->known_generation);
}

/*
 * Post, if the memory of both sides allows it; NULL, perhaps with an exception, if not.  `args` are
 * those of `transfer`, `view` is for aio_post.
 */
static PyObject *transfer_post(MessageState *self, PyObject *const *args, enum ibv_wr_opcode opcode,
                               PyObject *region, Registration *registration, uint64_t start,
                               uint64_t length, const Py_buffer *view)
{
    int reads = opcode == IBV_WR_RDMA_READ, has_imm;
    uint32_t imm = 0;
    uint32_t right = reads ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE;
    uint64_t skip = PyLong_AsUnsignedLongLong(args[2]);
    struct aio_operation request = {
        .opcode = opcode,
        .addr = registration->addr + start,
        .length = (uint32_t)length,
        .lkey = registration->lkey,
    };

    has_imm = reads ? 0 : aio_immediate(args[3], &imm);
    if (has_imm < 0 || (skip == (uint64_t)-1 && PyErr_Occurred()) || !length ||
        length > AIO_LARGEST_REQUEST || registration->pd != self->pd ||
        !local_is_admitted(registration->access, reads) ||
        !aio_remote_admits(self, args[0], skip, length, right))
        return NULL;
    request.remote_addr = self->known_addr + skip;
    request.rkey = (uint32_t)self->known_rkey;
    if (has_imm) {
        request.noted = self->known_notes ? AIO_FRAME_NOTE : AIO_FRAME_DATA;
        request.compare_add = imm;
    }
    return aio_post(self, -1, &request, region, registration, view);
}

PyObject *aio_find_registered(const MessageState *self, PyObject *memory,
                              Registration **registration, uint64_t *start, uint64_t *length)
{
    int piece = Py_IS_TYPE(memory, (PyTypeObject *)self->sge);
    PyObject *region = piece ? PyObject_GetAttr(memory, aio_name.mr) : Py_NewRef(memory);
    PyObject *found = region ? PyObject_GetAttr(region, aio_name._registration) : NULL;

    *start = 0;
    if (found && Py_IS_TYPE(found, aio_registration_type)) {
        *length = ((Registration *)found)->length;
        if (!piece || (!number_of(memory, aio_name.offset, start) &&
                       !number_of(memory, aio_name.length, length))) {
            *registration = (Registration *)found;
            return region;
        }
    }
    Py_XDECREF(region);
    Py_XDECREF(found);
    return NULL;
}

/* Post memory of a region: a piece of it, or all. */
static PyObject *post_registered(MessageState *self, PyObject *const *args,
                                 enum ibv_wr_opcode opcode)
{
    Registration *registration;
    uint64_t start, length;
    PyObject *region = aio_find_registered(self, args[1], &registration, &start, &length);
    PyObject *result = NULL;

    if (region) {
        result = transfer_post(self, args, opcode, region, registration, start, length, NULL);
        Py_DECREF(region);
        Py_DECREF((PyObject *)registration);
    }
    return result;
}

/* Post the bytes of a buffer. */
static PyObject *post_copied(MessageState *self, PyObject *const *args, enum ibv_wr_opcode opcode)
{
    PyObject *result = NULL;
    Py_buffer view;

    if (export_buffer(args[1], opcode, &view))
        return NULL;
    if (!aio_is_for_python(args[1], &view))
        result = transfer_post(self, args, opcode, self->bounce_region, self->bounce, 0,
                               (uint64_t)view.len, &view);
    keep_export(result, opcode, &view);
    return result;
}

/*
 * Leave a transfer to Python, which refuses wrong arguments with words of its own.  An exception of
 * another kind, such as that of a signal's handler, goes on.
 */
static PyObject *leave_to_python(void)
{
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
            !PyErr_ExceptionMatches(PyExc_AttributeError) &&
            !PyErr_ExceptionMatches(PyExc_ValueError) &&
            !PyErr_ExceptionMatches(PyExc_BufferError) &&
            !PyErr_ExceptionMatches(PyExc_OverflowError))
            return NULL;
        PyErr_Clear();
    }
    Py_RETURN_NONE;
}

/*
 * read(remote, memory, offset), write(remote, memory, offset, immediate or None): the operation, or
 * None if Python has to do it.
 *
 * Python posts a request that the adapter's library refuses once more, and names the error.
 */
static PyObject *transfer(MessageState *self, PyObject *const *args, Py_ssize_t count,
                          enum ibv_wr_opcode opcode)
{
    PyObject *result = NULL;

    if (count != (opcode == IBV_WR_RDMA_READ ? 3 : 4)) {
        PyErr_SetString(PyExc_TypeError, "a READ takes 3 arguments, a WRITE 4");
        return NULL;
    }
    if (!connection_listens(self->connection) ||
        (opcode == IBV_WR_RDMA_WRITE && args[3] != Py_None && connection_raw(self->connection)) ||
        (opcode == IBV_WR_RDMA_READ && !self->may_read) || !PyLong_CheckExact(args[2]))
        Py_RETURN_NONE;
    if (Py_IS_TYPE(args[1], (PyTypeObject *)self->sge) ||
        Py_IS_TYPE(args[1], (PyTypeObject *)self->region))
        result = post_registered(self, args, opcode);
    else if (self->bounce)
        result = post_copied(self, args, opcode);
    if (result && Py_IS_TYPE(result, aio_operation_type))
        return result;
    Py_XDECREF(result);
    return leave_to_python();
}

PyObject *aio_operation_read(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return transfer((MessageState *)object, args, count, IBV_WR_RDMA_READ);
}

PyObject *aio_operation_write(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    return transfer((MessageState *)object, args, count, IBV_WR_RDMA_WRITE);
}

/*
 * Post an atomic on an integer of the peer, if the rules allow it: the operation, or None if Python
 * has to do it, or to refuse it.
 */
static PyObject *change(MessageState *self, PyObject *remote, PyObject *offset,
                        enum ibv_wr_opcode opcode, uint64_t compare_add, uint64_t swap)
{
    const Py_buffer nothing = {0}; /* the integer lands in `bounce`, and is copied nowhere */
    PyObject *result = NULL;
    uint64_t skip;

    if (PyErr_Occurred())
        return leave_to_python();
    if (!connection_listens(self->connection) || !self->may_read || !self->may_change ||
        !self->bounce || !PyLong_CheckExact(offset))
        Py_RETURN_NONE;
    skip = PyLong_AsUnsignedLongLong(offset);
    if (!(skip == (uint64_t)-1 && PyErr_Occurred()) &&
        aio_remote_admits(self, remote, skip, sizeof(uint64_t), IBV_ACCESS_REMOTE_ATOMIC)) {
        struct aio_operation request = {
            .opcode = opcode,
            .length = sizeof(uint64_t),
            .lkey = self->bounce->lkey,
            .remote_addr = self->known_addr + skip,
            .rkey = (uint32_t)self->known_rkey,
            .compare_add = compare_add,
            .swap = swap,
        };

        result = aio_post(self, -1, &request, self->bounce_region, self->bounce, &nothing);
    }
    if (result && Py_IS_TYPE(result, aio_operation_type)) {
        ((Operation *)result)->changes = 1;
        return result;
    }
    Py_XDECREF(result);
    return leave_to_python();
}

/* fetch_add(remote, value, offset): see `change`; the value is taken modulo 2**64. */
PyObject *aio_operation_fetch_add(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "fetch_add(remote, value, offset)");
        return NULL;
    }
    if (!PyLong_CheckExact(args[1]))
        Py_RETURN_NONE;
    return change((MessageState *)object, args[0], args[2], IBV_WR_ATOMIC_FETCH_AND_ADD,
                  PyLong_AsUnsignedLongLongMask(args[1]), 0);
}

/* compare_swap(remote, expected, desired, offset): see `change`. */
PyObject *aio_operation_compare_swap(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    uint64_t expected, desired;

    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "compare_swap(remote, expected, desired, offset)");
        return NULL;
    }
    if (!PyLong_CheckExact(args[1]) || !PyLong_CheckExact(args[2]))
        Py_RETURN_NONE;
    expected = PyLong_AsUnsignedLongLong(args[1]);
    desired = PyErr_Occurred() ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    return change((MessageState *)object, args[0], args[3], IBV_WR_ATOMIC_CMP_AND_SWP, expected,
                  desired);
}

/* Numbers of operations */

static PyObject *refuse_operations(int code, const char *why)
{
    if (code == ENOMEM)
        return PyErr_NoMemory();
    PyErr_SetString(PyExc_ValueError, why);
    return NULL;
}

/* allow_operations(depth, may_read): once. */
PyObject *aio_operations_allow(PyObject *object, PyObject *args)
{
    MessageState *self = (MessageState *)object;
    unsigned int depth;
    int may_read, code;

    if (!PyArg_ParseTuple(args, "Ip", &depth, &may_read))
        return NULL;
    code = connection_allow_operations(self->connection, depth);
    if (code)
        return refuse_operations(code, "no such depth, or it is set already");
    self->may_read = (char)may_read;
    Py_RETURN_NONE;
}

PyObject *aio_operations_allow_atomics(PyObject *object, PyObject *Py_UNUSED(unused))
{
    ((MessageState *)object)->may_change = 1;
    Py_RETURN_NONE;
}

PyObject *aio_operation_take_number(PyObject *object, PyObject *Py_UNUSED(unused))
{
    int number = connection_take_number(((MessageState *)object)->connection);

    return number < 0 ? Py_NewRef(Py_None) : PyLong_FromLong(number);
}

PyObject *aio_operation_release_number(PyObject *object, PyObject *value)
{
    unsigned long number = PyLong_AsUnsignedLong(value);
    int code;

    if (PyErr_Occurred())
        return NULL;
    code = connection_release_number(((MessageState *)object)->connection, (uint32_t)number);
    if (code)
        return refuse_operations(code, "no such operation");
    Py_RETURN_NONE;
}

PyObject *aio_operations_forget_done(PyObject *object, PyObject *Py_UNUSED(unused))
{
    connection_forget_completed(((MessageState *)object)->connection);
    Py_RETURN_NONE;
}

/* set_bounce(region): copy through this memory from now on, until it is closed; once. */
PyObject *aio_operations_set_bounce(PyObject *object, PyObject *region)
{
    MessageState *self = (MessageState *)object;
    PyObject *found = PyObject_GetAttr(region, aio_name._registration);
    uint64_t length;

    if (!found)
        return NULL;
    length = Py_IS_TYPE(found, aio_registration_type) ? ((Registration *)found)->length : 0;
    if (self->bounce || length < 64 || length > AIO_LARGEST_REQUEST || length & (length - 1)) {
        PyErr_SetString(PyExc_ValueError,
                        "the region is set once, and has a power of two of bytes");
        Py_DECREF(found);
        return NULL;
    }
    self->bounce = (Registration *)found;
    self->bounce_region = Py_NewRef(region);
    Py_RETURN_NONE;
}

/* A number of an access; UINT64_MAX if it is none of 64 bits, which is outside of all memory. */
static uint64_t extent_of(PyObject *object)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(object);

    if (number == (unsigned long long)-1 && PyErr_ExceptionMatches(PyExc_OverflowError))
        PyErr_Clear();
    return number;
}

/* admit(address, size, rights, offset, length, right): an enum aio_admission. */
static PyObject *module_admit(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long addr, size, rights, right;
    PyObject *offset, *length;
    uint64_t from, bytes;

    if (!PyArg_ParseTuple(args, "KKKO!O!K", &addr, &size, &rights, &PyLong_Type, &offset,
                          &PyLong_Type, &length, &right))
        return NULL;
    from = extent_of(offset);
    bytes = PyErr_Occurred() ? 0 : extent_of(length);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(admission_of_remote(addr, size, rights, from, bytes, right));
}

/* may_land(access): whether the adapter may write to memory that is registered so. */
static PyObject *module_may_land(PyObject *Py_UNUSED(module), PyObject *access)
{
    unsigned long flags = PyLong_AsUnsignedLong(access);

    return PyErr_Occurred() ? NULL : PyBool_FromLong(local_is_admitted((uint32_t)flags, true));
}

PyMethodDef aio_operation_functions[] = {
    {"admit", module_admit, METH_VARARGS,
     "Whether an access may be posted: address and bytes of the peer's memory, its rights, first "
     "byte and bytes of the access, the right that it takes; 0, or a REFUSED_ number."},
    {"may_land", module_may_land, METH_O,
     "Whether the adapter may write to memory that is registered with these accesses."},
    {NULL, NULL, 0, NULL},
};
