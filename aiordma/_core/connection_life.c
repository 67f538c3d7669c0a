/*
 * The table of a connection's life; see connection_life.h.
 *
 * - NEW: there is no queue pair yet, and nothing is posted whatever the table allows.
 * - OPEN: everything is allowed.
 * - HALF_CLOSED: this side sends no further messages (`send_eof`).  It receives, and its
 *   operations go on.
 * - HELD: the adapter has failed, and the reason is not known yet.  A send waits, to raise it.
 * - CLOSING: this side has called `close` or `abort`.  What was sent goes on; messages that arrive
 *   are dropped, and END or ABORT may follow.
 * - OVER: the cause of the end is known.  Nothing is sent any more.
 * - FLUSHING: the queue pair is about to enter the error state.  Flushed requests are only counted.
 * - CLOSED: the queue pair and the memory of the slots may be gone.
 *
 * The states are in the order in which a connection passes them; it may leave some out, and never
 * goes back.  An event that brings nothing new leaves the state as it is: what is CLOSING does not
 * become HELD because its adapter fails, too.
 */
#include "connection_life.h"

#include <assert.h>

#define L(name) AIO_LIFE_##name

/* clang-format off */
static const enum aio_life transitions[AIO_LIFE_COUNT][AIO_LIFE_EVENT_COUNT] = {
    /*                BIND            REFUSE_SENDS    HOLD            SHUT         END          FLUSH        CLOSE */
    [L(NEW)]         = {L(OPEN),        L(HALF_CLOSED), L(HELD),        L(CLOSING),  L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(OPEN)]        = {L(OPEN),        L(HALF_CLOSED), L(HELD),        L(CLOSING),  L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(HALF_CLOSED)] = {L(HALF_CLOSED), L(HALF_CLOSED), L(HELD),        L(CLOSING),  L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(HELD)]        = {L(HELD),        L(HELD),        L(HELD),        L(CLOSING),  L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(CLOSING)]     = {L(CLOSING),     L(CLOSING),     L(CLOSING),     L(CLOSING),  L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(OVER)]        = {L(OVER),        L(OVER),        L(OVER),        L(OVER),     L(OVER),     L(FLUSHING), L(CLOSED)},
    [L(FLUSHING)]    = {L(FLUSHING),    L(FLUSHING),    L(FLUSHING),    L(FLUSHING), L(FLUSHING), L(FLUSHING), L(CLOSED)},
    [L(CLOSED)]      = {L(CLOSED),      L(CLOSED),      L(CLOSED),      L(CLOSED),   L(CLOSED),   L(CLOSED),   L(CLOSED)},
};

static const struct aio_rights rights[AIO_LIFE_COUNT] = {
    /*                 sends  operates keeps  says   takes */
    [L(NEW)]         = {true,  true,    true,  true,  true},
    [L(OPEN)]        = {true,  true,    true,  true,  true},
    [L(HALF_CLOSED)] = {false, true,    true,  true,  true},
    [L(HELD)]        = {false, true,    true,  true,  true},
    [L(CLOSING)]     = {false, false,   false, true,  true},
    [L(OVER)]        = {false, false,   false, false, true},
    [L(FLUSHING)]    = {false, false,   false, false, true},
    [L(CLOSED)]      = {false, false,   false, false, false},
};
/* clang-format on */

enum aio_life life_after(enum aio_life life, enum aio_life_event event)
{
    enum aio_life next = transitions[life][event];

    assert(next >= life);
    return next;
}

const struct aio_rights *life_rights(enum aio_life life)
{
    return &rights[life];
}

#define NAME_OF(name) #name,

const char *life_name(enum aio_life life)
{
    static const char *const names[] = {AIO_LIVES(NAME_OF)};

    return names[life];
}

const char *life_event_name(enum aio_life_event event)
{
    static const char *const names[] = {AIO_LIFE_EVENTS(NAME_OF)};

    return names[event];
}
