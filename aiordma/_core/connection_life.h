/*
 * The life of a connection, as one table: states, events, and what each state allows.
 *
 * connection.c asks this table what is allowed, and has no other flag for it.  The diagram in
 * docs/architecture.md is made from it, and tests/unit/core/test_life.py drives a connection
 * through each pair of a state and an event.
 */
#ifndef AIORDMA_CONNECTION_LIFE_H
#define AIORDMA_CONNECTION_LIFE_H

#include <stdbool.h>

#define AIO_LIVES(X)              X(NEW) X(OPEN) X(HALF_CLOSED) X(HELD) X(CLOSING) X(OVER) X(FLUSHING) X(CLOSED)
#define AIO_LIFE_EVENTS(X)        X(BIND) X(REFUSE_SENDS) X(HOLD) X(SHUT) X(END) X(FLUSH) X(CLOSE)

#define AIO_LIFE_NAME(name)       AIO_LIFE_##name,
#define AIO_LIFE_EVENT_NAME(name) AIO_LIFE_EVENT_##name,

enum aio_life { AIO_LIVES(AIO_LIFE_NAME) AIO_LIFE_COUNT };
enum aio_life_event { AIO_LIFE_EVENTS(AIO_LIFE_EVENT_NAME) AIO_LIFE_EVENT_COUNT };

/* What a connection may do in a state of its life. */
struct aio_rights {
    bool sends; /* messages of the program; where not, Python raises the reason, or waits for it */
    bool operates; /* READs, WRITEs and atomics of the program */
    bool keeps;    /* messages that arrive; where not, their slots are posted again at once */
    bool says;     /* frames without data */
    bool takes;    /* completions; where not, they are Python's */
};

enum aio_life life_after(enum aio_life life, enum aio_life_event event);
const struct aio_rights *life_rights(enum aio_life life);
const char *life_name(enum aio_life life);
const char *life_event_name(enum aio_life_event event);

#endif
