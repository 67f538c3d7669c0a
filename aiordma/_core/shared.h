/* Shared by both compiled modules: `_core`, and `_ffi._rdma`, which makes the queues. */
#ifndef AIORDMA_SHARED_H
#define AIORDMA_SHARED_H

#include <stdint.h>

/* Receives that are posted in one chain; it bounds the stack. */
#define AIO_RECV_CHAIN 32

/*
 * A completion queue, as the drain of its channel sees it; its `cq_context`.
 *
 * Owner: a QueueState (drain.c).  Python sets `managed`, `solicited`, `listeners` and `arm_late`;
 * the drain the rest.  All of it under the interpreter lock, but for `token`, which never changes.
 */
struct aio_cq {
    uint64_t token;
    int managed;             /* the drain arms and polls the queue */
    int solicited;           /* arm it for solicited completions and failures only */
    int armed;               /* how it was armed last: 1 for every completion, 2 for those */
    int listeners;           /* objects to be woken by every completion, solicited or not */
    int arm_late;            /* objects that want it armed when it is empty only, see drain_once */
    int pending;             /* it is in the drain's `pending` */
    int unarmed;             /* it is in `pending`, and was not armed yet */
    int retired;             /* it is being destroyed: neither arm nor poll it */
    uint32_t unacknowledged; /* events that the drain has dealt with */
    uint32_t events;         /* that the drain has taken off the channel, ever */
};

#endif
