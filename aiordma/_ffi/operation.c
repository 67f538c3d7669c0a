/*
 * Operations: READs, WRITEs and atomics of a connection that are under way.
 *
 * Each has a number, which is the sub-index of its wr_id, and an object that one task waits on.  The
 * local memory is retained from the post to the completion, whoever waits, or does no more: a
 * canceled task leaves its wait, the adapter goes on.  Who posts retains; the end lets go.
 *
 * An object is used again for its number unless somebody still has it: one may end before it is
 * waited for.
 */
#include "fast.h"

PyTypeObject *aio_operation_type;

static PyObject *name_let_go;

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

static PyMemberDef operation_members[] = {
    {"opcode", T_UBYTE, offsetof(Operation, opcode), READONLY, "As enum ibv_wr_opcode has it."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot operation_slots[] = {
    {Py_tp_traverse, operation_traverse},
    {Py_tp_clear, operation_clear},
    {Py_tp_dealloc, operation_dealloc},
    {Py_tp_members, operation_members},
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
    if (!name_let_go)
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
        aio_wakeup_forget(&operation->wakeup); /* an error that nobody has waited for */
        return operation;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(aio_operation_type, Py_tp_alloc);

    operation = (Operation *)allocate(aio_operation_type, 0);
    if (!operation)
        return NULL;
    operation->wakeup.loop = Py_NewRef(((Wakeup *)self->parked)->loop);
    replace(&self->operations[number], (PyObject *)operation);
    return operation;
}

/*
 * operate(number, opcode, address, length, lkey, remote address, rkey, compare_add, swap, region)
 *
 * `number` is -1 for any that is free.  The region has been retained, and is let go when the
 * operation ends.  The operation; None if there is no room, or Python has to look why not; or errno
 * of the post.  In the last two cases the region is still the caller's.
 */
PyObject *aio_post_operation(Mail *self, PyObject *const *args, Py_ssize_t count)
{
    struct aio_lane *lane = self->lane;
    struct aio_operation request;
    Operation *operation;
    long number;
    int code;

    if (count != 10) {
        PyErr_SetString(PyExc_TypeError, "operate() takes 10 arguments");
        return NULL;
    }
    if (lane->closed || lane->over || PyThread_get_thread_ident() != self->thread)
        Py_RETURN_NONE;
    number = PyLong_AsLong(args[0]);
    if (number < 0) {
        if (!lane->n_operations_free || lane->operations_wanted)
            Py_RETURN_NONE;
        number = lane->operations_free[lane->n_operations_free - 1];
    }
    request = (struct aio_operation){
        .number = (uint32_t)number,
        .opcode = (uint32_t)PyLong_AsUnsignedLong(args[1]),
        .addr = PyLong_AsUnsignedLongLong(args[2]),
        .length = (uint32_t)PyLong_AsUnsignedLong(args[3]),
        .lkey = (uint32_t)PyLong_AsUnsignedLong(args[4]),
        .remote_addr = PyLong_AsUnsignedLongLong(args[5]),
        .rkey = (uint32_t)PyLong_AsUnsignedLong(args[6]),
        .compare_add = PyLong_AsUnsignedLongLong(args[7]),
        .swap = PyLong_AsUnsignedLongLong(args[8]),
    };
    operation = PyErr_Occurred() ? NULL : fresh(self, request.number);
    if (!operation)
        return NULL;
    code = self->operate(lane, &request);
    if (code)
        return PyLong_FromLong(code);
    if (PyLong_AsLong(args[0]) < 0)
        lane->n_operations_free--;
    operation->region = Py_NewRef(args[9]);
    operation->opcode = (unsigned char)request.opcode;
    return Py_NewRef((PyObject *)operation);
}

/* It is not under way any more; its region, whose reference is the caller's. */
static PyObject *leave(Mail *self, uint32_t number)
{
    Operation *operation = (Operation *)self->operations[number];
    PyObject *region = operation->region;

    operation->region = NULL;
    self->lane->operating--;
    self->lane->operations_free[self->lane->n_operations_free++] = (uint16_t)number;
    return region;
}

/* One that has succeeded: the memory is let go, and whoever waits is resumed.  0, or -1. */
static int succeed(Mail *self, uint32_t number)
{
    Operation *operation = (Operation *)self->operations[number];
    PyObject *region = leave(self, number);
    PyObject *done = PyObject_CallMethodObjArgs(region, name_let_go, NULL);
    int rc = 0;

    Py_DECREF(region);
    if (!done)
        return -1;
    Py_DECREF(done);
    Py_INCREF((PyObject *)operation); /* the program may post again, and this number is free */
    if (operation->wakeup.state == AIO_WAITING)
        rc = aio_wake(&operation->wakeup);
    else
        operation->wakeup.state = AIO_DONE;
    Py_DECREF((PyObject *)operation);
    return rc < 0 ? -1 : 0;
}

/*
 * ended(number, error): one that did not end by way of C, with its error or None.  Its region, which
 * the caller lets go; None if it is not under way.
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
    if (error != Py_None)
        replace(&operation->wakeup.error, Py_NewRef(error));
    if (operation->wakeup.state != AIO_WAITING)
        operation->wakeup.state = AIO_DONE;
    else if (aio_wake_soon(&operation->wakeup) < 0)
        replace(&region, NULL);
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
        PyObject *told = PyObject_CallNoArgs(self->room);

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
