#!/bin/sh
# rdma_disconnect succeeds again and again, at both ends, on a connection that has ended.
#
# Expected: like shutdown(2) or a second close, a call on a connection that is over fails (ENOTCONN,
#     EINVAL), so a program can tell who ended the connection, and notices its double clean-up.
# Happens:  the client's second call returns 0, and so do both of the server's after its
#     DISCONNECTED event.  They cause no further DISCONNECTED.
# Versions: Linux 6.1.192 (rdma_cm), librdmacm 44.0, on Soft-RoCE.
# Affects:  programs that wait for the DISCONNECTED event "because rdma_disconnect returned 0":
#     after the first it never comes.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile ended <<'END'
#include "pair.h"
#include <poll.h>

/* What comes within 3 seconds. */
static void further(const char *name, struct rdma_event_channel *at)
{
    struct pollfd one = {.fd = at->fd, .events = POLLIN};
    struct rdma_cm_event *event;

    printf("%s, further events:", name);
    while (poll(&one, 1, 3000) == 1) {
        MUST(!rdma_get_cm_event(at, &event));
        printf(" %s", rdma_event_str(event->event));
        rdma_ack_cm_event(event);
    }
    printf(" that is all\n");
}

static void disconnect(const char *name, struct rdma_cm_id *id)
{
    printf("%s: %s\n", name, rdma_disconnect(id) ? strerror(errno) : "0");
}

int main(void)
{
    struct pair pair = connected();

    disconnect("the client", pair.client);
    wait_for(pair.at_server, RDMA_CM_EVENT_DISCONNECTED);
    disconnect("the server, when it was told", pair.server);
    wait_for(pair.at_client, RDMA_CM_EVENT_DISCONNECTED);
    disconnect("the client again", pair.client);
    disconnect("the server again", pair.server);
    further("client", pair.at_client);
    further("server", pair.at_server);
    return 0;
}
END
guest 900 <<'END'
ended
END
expect "the second call of the client" "^the client again: 0"
expect "and of the server" "^the server again: 0"
expect "no DISCONNECTED comes of the client's" "^client, further events:( RDMA_CM_EVENT_TIMEWAIT_EXIT)? that is all"
expect "nor of the server's" "^server, further events:( RDMA_CM_EVENT_TIMEWAIT_EXIT)? that is all"
as_described
