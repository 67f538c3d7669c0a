/*
 * Owner: the counts of a Resource, and its two most frequent operations.
 *
 * Each connection has five resources, and each of its steps asks some of them for their C handle.
 * With the same in Python a connected pair takes 2.356 million instructions instead of 2.164, 8.9 %
 * more (`make profile`, "connect uvloop", 2026).  The rules and their reasons are in
 * verbs/resource.py, which holds the rest; counts change under its lock here, too.
 */
#include "core.h"

typedef struct {
    PyObject_HEAD
    PyObject *handle;
    PyObject *state;
    PyObject *parents; /* a tuple */
    PyObject *made;    /* weak references by identity; NULL before the first */
    PyObject *ending;
    PyObject *outcome;
    Py_ssize_t children;
} Owner;

/* Objects of verbs/resource.py, which calls `_set_rules` with them. */
static PyObject *state_open, *state_closing, *state_destroying, *acquire_lock, *release_lock,
    *guard;

static int call(PyObject *function, PyObject *argument)
{
    PyObject *result = argument ? PyObject_CallFunctionObjArgs(function, argument, NULL)
                                : PyObject_CallNoArgs(function);

    Py_XDECREF(result);
    return result ? 0 : -1;
}

static PyObject *made_by(Owner *self)
{
    if (!self->made)
        self->made = PyDict_New();
    return self->made;
}

/* Under the lock: make `own` a child of `parent`. 1; 0 if it was a child already; -1 */
static int enter(Owner *parent, PyObject *own, PyObject *reference)
{
    PyObject *made = made_by(parent);
    int known = made ? PyDict_Contains(made, own) : -1;

    if (known)
        return known < 0 ? -1 : 0;
    if (PyDict_SetItem(made, own, reference))
        return -1;
    parent->children++;
    return 1;
}

/* Under the lock, with an exception that goes on: undo `enter`. */
static void quit(Owner *parent, PyObject *own)
{
    PyObject *error[3];

    PyErr_Fetch(&error[0], &error[1], &error[2]);
    if (PyDict_DelItem(parent->made, own))
        PyErr_Clear();
    parent->children--;
    PyErr_Restore(error[0], error[1], error[2]);
}

/* Become a child of all; 0, or -1, or 1 with the parent that is closed. */
static int enter_all(Owner *self, PyObject *parents, PyObject *held, PyObject **closed)
{
    PyObject *own = PyLong_FromVoidPtr(self), *reference = PyWeakref_NewRef((PyObject *)self, NULL);
    Py_ssize_t count = PyTuple_Size(parents);
    int rc = own && reference && count >= 0 ? 0 : -1;

    for (Py_ssize_t i = 0; !rc && i < count; i++) {
        Owner *parent = (Owner *)PyTuple_GetItem(parents, i);

        if (!PyObject_TypeCheck((PyObject *)parent, aio_owner_type)) {
            PyErr_SetString(PyExc_TypeError, "a parent is a Resource");
            rc = -1;
        } else if (parent->state != state_open) {
            *closed = (PyObject *)parent;
            rc = 1;
        } else {
            rc = enter(parent, own, reference);
            if (rc > 0) { /* 0: the parent is named twice */
                rc = PyList_Append(held, (PyObject *)parent);
                if (rc)
                    quit(parent, own);
            }
        }
    }
    Py_XDECREF(own);
    Py_XDECREF(reference);
    return rc;
}

/* Under the lock, without memory for more: undo `enter_all`. */
static void leave_all(Owner *self, PyObject *held)
{
    PyObject *own = PyLong_FromVoidPtr(self);

    for (Py_ssize_t i = 0; own && i < PyList_Size(held); i++)
        quit((Owner *)PyList_GetItem(held, i), own);
    Py_XDECREF(own);
}

static int owner_adopt(Owner *self, PyObject *parents)
{
    PyObject *held = PyList_New(0), *tuple, *error[3];
    PyObject *closed = NULL;
    int rc;

    if (!held || call(acquire_lock, NULL)) {
        Py_XDECREF(held);
        return -1;
    }
    rc = enter_all(self, parents, held, &closed);
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    tuple = PyList_AsTuple(held);
    if (tuple) {
        replace(&self->parents, tuple);
    } else {
        leave_all(self, held);
        rc = -1;
    }
    if (!rc)
        replace(&self->state, Py_NewRef(state_open));
    Py_XINCREF(closed);
    Py_DECREF(held);
    if (!error[0])
        PyErr_Fetch(&error[0], &error[1], &error[2]); /* of the tuple */
    if (call(release_lock, NULL))
        PyErr_WriteUnraisable((PyObject *)self);
    if (rc) {
        /* The fresh C object has no right to be, and its parents are not to wait for it: a parent
         * was closed meanwhile, or there was no memory. */
        PyObject *result = PyObject_CallMethod((PyObject *)self, "_finish", NULL);

        if (!result)
            PyErr_WriteUnraisable((PyObject *)self);
        Py_XDECREF(result);
    }
    if (error[0]) {
        PyErr_Restore(error[0], error[1], error[2]);
    } else if (rc) {
        PyObject *result = PyObject_CallMethod(closed, "_refuse", NULL);

        Py_XDECREF(result);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "a parent is closed");
    }
    Py_XDECREF(closed);
    return rc ? -1 : 0;
}

static int owner_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Owner *self = (Owner *)object;
    static char *names[] = {"handle", "parents", NULL};
    PyObject *handle, *parents = NULL;

    if (kwargs ? !PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", names, &handle, &parents)
               : !PyArg_UnpackTuple(args, "Resource", 1, 2, &handle, &parents))
        return -1;
    if (parents && !PyTuple_Check(parents)) {
        PyErr_SetString(PyExc_TypeError, "parents are a tuple");
        return -1;
    }
    if (!guard) {
        PyErr_SetString(PyExc_RuntimeError, "Owner is for verbs/resource.py");
        return -1;
    }
    replace(&self->handle, Py_NewRef(handle));
    replace(&self->state, Py_NewRef(state_destroying));
    replace(&self->parents, PyTuple_New(0));
    replace(&self->ending, Py_NewRef(Py_None));
    replace(&self->outcome, Py_NewRef(Py_None));
    self->children = 0;
    if (parents && PyTuple_Size(parents))
        return owner_adopt(self, parents);
    replace(&self->state, Py_NewRef(state_open));
    return call(guard, object); /* its children are found through it */
}

static PyObject *owner_require(PyObject *object, PyObject *Py_UNUSED(unused))
{
    Owner *self = (Owner *)object;
    PyObject *result;

    if (self->state == state_open && self->handle)
        return Py_NewRef(self->handle);
    result = PyObject_CallMethod(object, "_refuse", NULL);
    if (result) {
        Py_DECREF(result);
        PyErr_SetString(PyExc_RuntimeError, "the resource is closed");
    }
    return NULL;
}

/* The argument of _retain and _let_go: NULL and None alike; -1 if it is of another type. */
static int child_of(PyObject *args, PyObject **child)
{
    *child = NULL;
    if (!PyArg_ParseTuple(args, "|O", child))
        return -1;
    if (*child == Py_None)
        *child = NULL;
    return 0;
}

/* Under the lock: the counting of _retain and _let_go. */
static int count(Owner *self, PyObject *child, int more)
{
    PyObject *own = child ? PyLong_FromVoidPtr(child) : NULL, *reference = NULL;
    PyObject *made = child ? made_by(self) : NULL;
    int rc = child && (!own || !made) ? -1 : 0;

    if (!rc && child && more > 0) {
        reference = PyWeakref_NewRef(child, NULL);
        rc = reference ? PyDict_SetItem(made, own, reference) : -1;
    } else if (!rc && child) {
        rc = PyDict_DelItem(made, own); /* KeyError: not a child, and not counted */
    }
    if (!rc)
        self->children += more;
    Py_XDECREF(own);
    Py_XDECREF(reference);
    return rc;
}

static PyObject *owner_retain(PyObject *object, PyObject *args)
{
    Owner *self = (Owner *)object;
    PyObject *child, *handle, *error[3];
    int open, rc = 0;

    if (child_of(args, &child) || call(acquire_lock, NULL))
        return NULL;
    open = self->state == state_open;
    if (open)
        rc = count(self, child, 1);
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    if (call(release_lock, NULL))
        return NULL;
    if (rc) {
        PyErr_Restore(error[0], error[1], error[2]);
        return NULL;
    }
    if (open)
        Py_RETURN_NONE;
    handle = owner_require(object, NULL); /* refuses */
    Py_XDECREF(handle);
    return NULL;
}

static PyObject *owner_let_go(PyObject *object, PyObject *args)
{
    Owner *self = (Owner *)object;
    PyObject *child, *error[3];
    int last;

    if (child_of(args, &child) || call(acquire_lock, NULL))
        return NULL;
    last = !count(self, child, -1) && self->state == state_closing && !self->children;
    PyErr_Fetch(&error[0], &error[1], &error[2]);
    if (last)
        replace(&self->state, Py_NewRef(state_destroying));
    if (call(release_lock, NULL))
        return NULL;
    if (error[0]) {
        PyErr_Restore(error[0], error[1], error[2]);
        return NULL;
    }
    if (last)
        return PyObject_CallMethod(object, "_schedule", NULL);
    Py_RETURN_NONE;
}

static PyObject *owner_made(PyObject *object, void *Py_UNUSED(unused))
{
    return Py_XNewRef(made_by((Owner *)object));
}

static PyObject *owner_closed(PyObject *object, void *Py_UNUSED(unused))
{
    return PyBool_FromLong(((Owner *)object)->state != state_open);
}

static PyObject *owner_rules(PyObject *Py_UNUSED(unused), PyObject *args)
{
    PyObject *open, *closing, *destroying, *acquire, *release, *guarded;

    if (!PyArg_ParseTuple(args, "OOOOOO", &open, &closing, &destroying, &acquire, &release,
                          &guarded))
        return NULL;
    replace(&state_open, Py_NewRef(open));
    replace(&state_closing, Py_NewRef(closing));
    replace(&state_destroying, Py_NewRef(destroying));
    replace(&acquire_lock, Py_NewRef(acquire));
    replace(&release_lock, Py_NewRef(release));
    replace(&guard, Py_NewRef(guarded));
    Py_RETURN_NONE;
}

static int owner_traverse(PyObject *object, visitproc visit, void *arg)
{
    Owner *self = (Owner *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->handle);
    Py_VISIT(self->state);
    Py_VISIT(self->parents);
    Py_VISIT(self->made);
    Py_VISIT(self->ending);
    Py_VISIT(self->outcome);
    return 0;
}

static int owner_clear(PyObject *object)
{
    Owner *self = (Owner *)object;

    Py_CLEAR(self->handle);
    Py_CLEAR(self->parents);
    Py_CLEAR(self->made);
    Py_CLEAR(self->ending);
    Py_CLEAR(self->outcome);
    return 0;
}

static void owner_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    owner_clear(object);
    Py_CLEAR(((Owner *)object)->state);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef owner_methods[] = {
    {"_require", owner_require, METH_NOARGS, "The C handle, for a call."},
    {"_retain", owner_retain, METH_VARARGS,
     "Count one more user that the C object has to outlive: a child, or a use under way."},
    {"_let_go", owner_let_go, METH_VARARGS,
     "One user less; destroys a closed object that was waiting for it.  Any thread."},
    {"_set_rules", owner_rules, METH_VARARGS | METH_STATIC,
     "Tell the states OPEN, CLOSING and DESTROYING, how to lock and unlock, and what guards "
     "against forks."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef owner_getset[] = {
    {"_made", owner_made, NULL, "Weak references to what was made from it, by identity.", NULL},
    {"closed", owner_closed, NULL,
     "Whether `close()` was called; the C object may live on for its children.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef owner_members[] = {
    {"_handle", T_OBJECT_EX, offsetof(Owner, handle), 0, "The C object."},
    {"_state", T_OBJECT_EX, offsetof(Owner, state), 0, "Its life."},
    {"_parents", T_OBJECT_EX, offsetof(Owner, parents), 0, "What must not be destroyed before."},
    {"_ending", T_OBJECT_EX, offsetof(Owner, ending), 0,
     "A future of its end, if a wait has asked for one."},
    {"_outcome", T_OBJECT_EX, offsetof(Owner, outcome), 0, "Of the destroy."},
    {"_children", T_PYSSIZET, offsetof(Owner, children), 0, "What was made from it, and uses."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot owner_slots[] = {
    {Py_tp_init, owner_init},
    {Py_tp_dealloc, owner_dealloc},
    {Py_tp_traverse, owner_traverse},
    {Py_tp_clear, owner_clear},
    {Py_tp_methods, owner_methods},
    {Py_tp_getset, owner_getset},
    {Py_tp_members, owner_members},
    {Py_tp_doc, "The counting part of a Resource."},
    {0, NULL},
};

PyType_Spec aio_owner_spec = {
    .name = "aiordma._core.Owner",
    .basicsize = sizeof(Owner),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = owner_slots,
};
