/*
 * Operations: READs, WRITEs and atomics of a connection that are under way.
 *
 * Each has a number, which is the sub-index of its wr_id, and an object that one task waits on. The
 * local memory is in use from the post to the completion, whether or not a task waits: a
 * canceled task leaves its wait, the adapter goes on.
 *
 * An object is used again for its number unless the program still has it: one may end before it is
 * waited for.
 */
#include "fast.h"

PyTypeObject *aio_operation_type;

static PyObject *name_let_go, *name_registration;

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

static void operation_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);

    PyObject_GC_UnTrack(object);
    operation_clear(object);
    release(object);
    Py_DECREF(type);
}

/* As a Wakeup, but it ends with the number of bytes. */
static PySendResult operation_send(PyObject *object, PyObject *value, PyObject **result)
{
    (void)value;
    *result = aio_wakeup_next(object);
    if (*result)
        return PYGEN_NEXT;
    if (PyErr_Occurred())
        return PYGEN_ERROR;
    *result = PyLong_FromUnsignedLong(((Operation *)object)->length);
    return *result ? PYGEN_RETURN : PYGEN_ERROR;
}

/* For a caller that iterates, as the interpreter does while it is traced. */
static PyObject *operation_next(PyObject *object)
{
    PyObject *length, *next = aio_wakeup_next(object);

    if (!next && !PyErr_Occurred()) {
        length = PyLong_FromUnsignedLong(((Operation *)object)->length);
        if (length)
            PyErr_SetObject(PyExc_StopIteration, length);
        Py_XDECREF(length);
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

static PyType_Spec operation_spec = {
    .name = "aiordma._ffi._fast.Operation",
    .basicsize = sizeof(Operation),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = operation_slots,
};

int aio_add_operation(PyObject *module)
{
    name_let_go = PyUnicode_InternFromString("_let_go");
    name_registration = PyUnicode_InternFromString("_registration");
    if (!name_let_go || !name_registration)
        return -1;
    aio_operation_type = aio_add_type(module, &operation_spec, aio_wakeup_type);
    return aio_operation_type ? 0 : -1;
}

/* The object for a number, which is not under way; borrowed, or NULL. */
static Operation *fresh(Mail *self, uint32_t number)
{
    Operation *operation;

    if (!self->operations) {
        self->operations = PyMem_Calloc(self->lane->n_operations, sizeof(PyObject *));
        if (!self->operations)
            return (Operation *)PyErr_NoMemory();
        self->n_operations = self->lane->n_operations;
    }
    operation = (Operation *)self->operations[number];
    if (operation && Py_REFCNT((PyObject *)operation) == 1) {
        aio_wakeup_forget(&operation->wakeup); /* an error that no task has waited for */
        return operation;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(aio_operation_type, Py_tp_alloc);

    operation = (Operation *)allocate(aio_operation_type, 0);
    if (!operation)
        return NULL;
    operation->wakeup.loop = Py_XNewRef(self->parked->wakeup.loop);
    replace(&self->operations[number], (PyObject *)operation);
    return operation;
}

/*
 * Post a request with a number, or with any that is free if that is negative.
 *
 * The operation; None if there is no room, or Python has to look why not; or errno of the post.
 */
PyObject *aio_post(Mail *self, long number, struct aio_operation *request,
                   Registration *registration)
{
    struct aio_lane *lane = self->lane;
    int any = number < 0;
    Operation *operation;
    PyObject *region;
    int code;

    if (lane->closed || lane->over || registration->closing || aio_is_elsewhere(self))
        Py_RETURN_NONE;
    if (any) {
        if (!lane->n_operations_free || lane->operations_wanted)
            Py_RETURN_NONE;
        number = lane->operations_free[lane->n_operations_free - 1];
    }
    if (number >= (long)lane->n_operations) {
        PyErr_SetString(PyExc_ValueError, "no such operation");
        return NULL;
    }
    request->number = (uint32_t)number;
    region = aio_alive(registration->region);
    if (!region || region == Py_None)
        return region;
    operation = fresh(self, request->number);
    if (!operation || operation->region) {
        if (operation)
            PyErr_SetString(PyExc_RuntimeError, "the operation is under way");
        Py_DECREF(region);
        return NULL;
    }
    code = self->operate(lane, request);
    if (code) {
        Py_DECREF(region);
        return PyLong_FromLong(code);
    }
    if (any)
        lane->n_operations_free--;
    operation->region = region;
    replace((PyObject **)&operation->registration, Py_NewRef((PyObject *)registration));
    registration->uses++;
    operation->opcode = (unsigned char)request->opcode;
    operation->length = request->length;
    return Py_NewRef((PyObject *)operation);
}

/* operate(number, opcode, address, length, remote address, rkey, compare_add, swap, region) */
PyObject *aio_post_operation(Mail *self, PyObject *const *args, Py_ssize_t count)
{
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
    registration = PyErr_Occurred() ? NULL : PyObject_GetAttr(args[8], name_registration);
    if (!registration)
        return NULL;
    if (!Py_IS_TYPE(registration, aio_registration_type)) {
        PyErr_SetString(PyExc_TypeError, "a registered region is needed");
        result = NULL;
    } else {
        request.lkey = ((Registration *)registration)->lkey;
        result = aio_post(self, number, &request, (Registration *)registration);
    }
    Py_DECREF(registration);
    return result;
}

/* It is not under way any more; its region, which is still in use, and whose reference is the
 * caller's. */
static PyObject *leave(Mail *self, uint32_t number)
{
    Operation *operation = (Operation *)self->operations[number];
    PyObject *region = operation->region;

    operation->region = NULL;
    self->lane->operating--;
    self->lane->operations_free[self->lane->n_operations_free++] = (uint16_t)number;
    return region;
}

static void count_success(struct aio_lane *lane, const Operation *operation)
{
    switch (operation->opcode) {
    case IBV_WR_RDMA_READ:
        lane->bytes_read += operation->length;
        break;
    case IBV_WR_ATOMIC_FETCH_AND_ADD:
    case IBV_WR_ATOMIC_CMP_AND_SWP:
        lane->atomics++;
        break;
    default:
        lane->bytes_written += operation->length;
    }
}

/*
 * One that has succeeded: the memory is let go, and the task that waits is resumed, even if the
 * memory could not be let go.  0, or -1.
 */
static int succeed(Mail *self, uint32_t number)
{
    Operation *operation = (Operation *)self->operations[number];
    PyObject *region = leave(self, number), *type = NULL, *value = NULL, *traceback = NULL;
    int rc = 0;

    /* The program may post again, and this number is free. */
    Py_INCREF((PyObject *)operation);
    count_success(self->lane, operation);
    if (aio_registration_leave(operation->registration)) {
        PyObject *done = PyObject_CallMethodObjArgs(region, name_let_go, NULL);

        if (!done)
            PyErr_Fetch(&type, &value, &traceback);
        Py_XDECREF(done);
    }
    if (operation->wakeup.state == AIO_WAITING)
        rc = aio_wake(&operation->wakeup);
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

/* With an exception that goes on: the caller will not do it. */
static void end_use(Operation *operation, PyObject **region)
{
    PyObject *type, *value, *traceback, *done;

    PyErr_Fetch(&type, &value, &traceback);
    if (aio_registration_leave(operation->registration)) {
        done = PyObject_CallMethodObjArgs(*region, name_let_go, NULL);
        if (!done)
            PyErr_WriteUnraisable(*region);
        Py_XDECREF(done);
    }
    PyErr_Restore(type, value, traceback);
    replace(region, NULL);
}

/*
 * ended(number, error): one that did not end by way of C, with its error or None.  Its region,
 * whose use the caller ends; None if it is not under way.
 */
PyObject *aio_end_operation(Mail *self, PyObject *args)
{
    Operation *operation;
    PyObject *error, *region;
    unsigned int number;

    if (!PyArg_ParseTuple(args, "IO", &number, &error))
        return NULL;
    if (number >= self->n_operations || !self->operations[number] ||
        !((Operation *)self->operations[number])->region)
        Py_RETURN_NONE;
    operation = (Operation *)self->operations[number];
    region = leave(self, number);
    if (error == Py_None)
        count_success(self->lane, operation);
    else
        replace(&operation->wakeup.error, Py_NewRef(error));
    if (operation->wakeup.state != AIO_WAITING)
        operation->wakeup.state = AIO_DONE;
    else if (aio_wake_soon(&operation->wakeup) < 0)
        end_use(operation, &region);
    return region;
}

/* Those that C has noted as done have ended.  0, or -1. */
int aio_operations_done(Mail *self)
{
    struct aio_lane *lane = self->lane;

    while (lane->done_head != lane->done_tail) {
        if (succeed(self, lane->operations_done[lane->done_head++ & lane->done_mask]))
            return -1;
    }
    if (lane->operations_wanted && self->room) {
        PyObject *room = Py_NewRef(self->room); /* it may put another in its place */
        PyObject *told = PyObject_CallNoArgs(room);

        Py_DECREF(room);
        if (!told)
            return -1;
        Py_DECREF(told);
    }
    return 0;
}

void aio_free_operations(Mail *self)
{
    PyObject **operations = self->operations;

    self->operations = NULL;
    for (uint32_t i = 0; operations && i < self->n_operations; i++)
        Py_XDECREF(operations[i]);
    self->n_operations = 0;
    PyMem_Free(operations);
}
