#!/bin/sh
# A client of a full listener gets no answer for 102 seconds, and then hears that the host is
# unreachable.
#
# Expected: as with TCP, a connection beyond the backlog waits, and is established as soon as the
#     server accepts one; or it is refused at once.
# Happens:  the server's kernel silently drops the request.  The client's kernel repeats it, and
#     gives up after 102 s with RDMA_CM_EVENT_UNREACHABLE, status -110 (ETIMEDOUT), as for a host
#     that is switched off.
# Versions: Linux 6.1.192 (rdma_cm), librdmacm 44.0, on Soft-RoCE.  This script's backlog is 2.
# Affects:  servers that accept requests one by one, when many clients come at once: some clients
#     hang for a minute and a half, and then their users look for a network fault.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile full <<'END'
#include "pair.h"
#include <poll.h>

int main(void)
{
    struct rdma_conn_param param = {.retry_count = 6, .rnr_retry_count = 6};
    struct rdma_event_channel *server = rdma_create_event_channel(), *each[3];
    struct rdma_cm_id *listener = new_id(server);
    struct rdma_cm_event *event;
    double begin = now();

    MUST(!rdma_bind_addr(listener, place(ADDRESS, 7471)));
    MUST(!rdma_listen(listener, 2));
    /* The server looks at none of them. */
    for (int number = 0; number < 3; number++) {
        struct rdma_cm_id *id;

        MUST(each[number] = rdma_create_event_channel());
        id = resolved(each[number], ADDRESS, 7471);
        make_qp(id);
        begin = now();
        MUST(!rdma_connect(id, &param));
        usleep(500000);
    }
    MUST(!rdma_get_cm_event(each[2], &event));
    printf("the third client: %s, status %d\n", rdma_event_str(event->event), event->status);
    printf("after 90 to 120 s: %s (%.0f s)\n",
           now() - begin > 90 && now() - begin < 120 ? "yes" : "no", now() - begin);
    for (int number = 0; number < 2; number++) {
        struct pollfd one = {.fd = each[number]->fd, .events = POLLIN};

        printf("client %d: %s\n", number + 1, poll(&one, 1, 0) ? "told" : "waits still");
    }
    return 0;
}
END
guest 900 <<'END'
full
END
expect "the client beyond the backlog is not reachable" "^the third client: RDMA_CM_EVENT_UNREACHABLE, status -110"
expect "and learns it late" "^after 90 to 120 s: yes"
expect "those within wait for the server" "^client 1: waits still"
as_described
