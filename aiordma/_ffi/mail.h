/* What mail.c and mail_message.c share; see there. */
#ifndef AIORDMA_MAIL_H
#define AIORDMA_MAIL_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

#include "glue.cdef.h"

typedef struct {
    PyObject_HEAD struct aio_lane *lane; /* kept alive by the link, which the receiver holds */
    int (*send)(struct aio_lane *, const void *, uint64_t);
    int64_t (*next)(struct aio_lane *);
    int (*back)(struct aio_lane *, uint32_t);
    unsigned long thread;
    PyObject *receiver;
    PyObject *type; /* of the messages */
} Mail;

typedef struct {
    PyObject_HEAD PyObject
        *keeper;    /* Mail, or a function that is told of the view; NULL once it was */
    PyObject *view; /* NULL until somebody wants it */
    PyObject *imm;
    Py_ssize_t length;
    uint32_t slot;
    char in_slot; /* keeper is Mail */
    char kept;    /* counts among those that the program has */
} Message;

/* Put a reference that is stolen in the place of another. */
static inline void replace(PyObject **place, PyObject *object)
{
    PyObject *before = *place;

    *place = object;
    Py_XDECREF(before);
}

extern PyType_Spec aio_message_spec;

/* Before the first message: 0, or -1 with an exception. */
int aio_message_setup(void);

#endif
