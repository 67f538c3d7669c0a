#!/bin/sh
# "The program refused" (reason 28), although no program listens on the address.
#
# Expected: a client can tell from rdma_cm whether no program listens (reason 8, invalid service id)
#     or a program has refused by rdma_reject (reason 28, consumer reject).
# Happens:  if a program listens on the same port of *another* address of the device, the client of
#     this address gets 28, as if the program had looked at its request and refused.  No program has
#     seen it.
# Versions: Linux 6.1.192 (rdma_cm) on Soft-RoCE, librdmacm 44.0.
# Affects:  clients that treat a refusal as final, like a wrong token, and retry if nobody listens
#     yet, with a server that starts to listen on its addresses one by one.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile refused <<'END'
#include "pair.h"
#include <poll.h>

static void attempt(struct rdma_event_channel *events, const char *address, int port)
{
    struct rdma_conn_param param = {.retry_count = 6, .rnr_retry_count = 6};
    struct rdma_cm_id *id = resolved(events, address, port);
    struct rdma_cm_event *event;

    make_qp(id);
    MUST(!rdma_connect(id, &param));
    MUST(!rdma_get_cm_event(events, &event));
    printf("%s:%d: %s, status %d\n", address, port, rdma_event_str(event->event), event->status);
    rdma_ack_cm_event(event);
}

int main(void)
{
    struct rdma_event_channel *server = rdma_create_event_channel();
    struct rdma_event_channel *client = rdma_create_event_channel();
    struct pollfd heard = {.events = POLLIN};

    listening(server, "10.80.0.2", 7471);
    attempt(client, ADDRESS, 7472);
    attempt(client, ADDRESS, 7471);
    heard.fd = server->fd;
    printf("the listener of 10.80.0.2 has %s\n", poll(&heard, 1, 2000) ? "an event" : "no event");
    return 0;
}
END
guest 900 <<'END'
ip address add 10.80.0.2/24 dev dummy0
refused
END
expect "nobody on the port: reason 8" "^10.80.0.1:7472: RDMA_CM_EVENT_REJECTED, status 8$"
expect "nobody on the address: reason 28" "^10.80.0.1:7471: RDMA_CM_EVENT_REJECTED, status 28$"
expect "no program has seen the request" "^the listener of 10.80.0.2 has no event"
as_described
