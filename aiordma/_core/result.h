/*
 * What a function returns that sends, posts or decides, where its contract says no more: 0, an
 * errno of libibverbs, which is positive, or one of these.  Functions that follow CPython's own
 * convention return -1 with an exception, and say so.
 */
#ifndef AIORDMA_RESULT_H
#define AIORDMA_RESULT_H

enum aio_result {
    AIO_OK = 0,
    AIO_NO_ROOM = -1,    /* nothing has changed: a slot or a credit is missing; wait */
    AIO_FOR_PYTHON = -2, /* nothing has changed: Python decides */
    AIO_RAISED = -3,     /* an exception is set */
};

#endif
