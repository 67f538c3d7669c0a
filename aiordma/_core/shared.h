/* Shared by both compiled modules: `_core`, and `_ffi._rdma`, which makes the queues. */
#ifndef AIORDMA_SHARED_H
#define AIORDMA_SHARED_H

#include <stdint.h>

/* Receives that are posted in one chain; it bounds the stack. */
#define AIO_RECV_CHAIN 32

/*
 * A completion queue, as the drain of its channel sees it; its `cq_context`.
 *
 * Owner: a QueueState (queue.c), which Python tells what it wants.  All of it is changed under the
 * interpreter lock, but for `retired` and `polled`, which are atomic: a Poller polls without the
 * lock (poller.c).  `token` never changes.
 */
struct aio_cq {
    uint64_t token;
    int managed;       /* the drain arms and polls the queue */
    int solicited;     /* arm it for solicited completions and failures only */
    int armed_for_all; /* and not for solicited completions only, at the last arming */
    int listeners;     /* objects to be woken by every completion, solicited or not */
    int arm_late;      /* while not 0, the queue is armed only when it is empty, see drain_once */
    int spins;         /* Spins (poller.c) that poll the queue before it is armed */
    int pending;       /* the queue is in the drain's `pending` */
    int unarmed; /* not armed since its last event, by the drain or a Poller, which will do it */
    int retired; /* being destroyed: the queue is neither armed nor polled */
    int polled;  /* a thread polls it without the interpreter lock */
    uint32_t unacknowledged; /* events that the drain has dealt with */
    uint32_t events;         /* that the drain has taken off the channel, ever */
};

#endif
