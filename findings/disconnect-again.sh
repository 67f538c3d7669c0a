#!/bin/sh
# rdma_disconnect succeeds on a connection that has ended, again and again, at both ends.
#
# Expected: as shutdown(2) or a second close, a call on what is over fails (ENOTCONN, EINVAL), so that
#     a program can tell who ended the connection, and finds its double clean-up.
# Happens:  the client's second call returns 0, and so do both of the server's after it was told
#     DISCONNECTED.  No further event comes of them.
# Versions: Linux 6.1.192 (rdma_cm), librdmacm 44.0, on Soft-RoCE.
# Whom:     programs that wait for the DISCONNECTED event "because rdma_disconnect returned 0": after
#     the first it never comes.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile ended <<'END'
#include "pair.h"
#include <poll.h>

static int events_of(struct rdma_event_channel *at)
{
    struct pollfd one = {.fd = at->fd, .events = POLLIN};

    return poll(&one, 1, 3000);
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
    printf("further disconnections within 3 s: client %d, server %d\n",
           events_of(pair.at_client), events_of(pair.at_server));
    return 0;
}
END
guest 900 <<'END'
ended
END
expect "the second call of the client" "^the client again: 0"
expect "and of the server" "^the server again: 0"
expect "no event comes of them" "client 0, server 0$"
as_described
