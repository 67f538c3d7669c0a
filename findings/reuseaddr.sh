#!/bin/sh
# With RDMA_OPTION_ID_REUSEADDR two servers bind to one port, and then neither can listen.
#
# Expected: like SO_REUSEADDR of TCP, the option lets a server start while ids of the last one
#     linger, and whoever listens first has the port.
# Happens:  rdma_bind_addr of the second id succeeds, and from then on rdma_listen of *both* fails
#     with EADDRINUSE: an id can listen only while it is alone on its address and port.  Once the
#     other id is closed, it can listen at once.
# Versions: Linux 6.1.192 (rdma_cm), librdmacm 44.0; with any adapter.
# Affects:  servers that set the option by habit: a second start not only fails, but keeps the first
#     from listening.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile reuse <<'END'
#include "pair.h"

static struct rdma_cm_id *bound(struct rdma_event_channel *events)
{
    struct rdma_cm_id *id = new_id(events);
    int on = 1;

    MUST(!rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &on, sizeof on));
    MUST(!rdma_bind_addr(id, place(ADDRESS, 7471)));
    return id;
}

static void attempt(struct rdma_cm_id *id, const char *name)
{
    printf("%s: %s\n", name, rdma_listen(id, 1) ? strerror(errno) : "listens");
}

int main(void)
{
    struct rdma_event_channel *events = rdma_create_event_channel();
    struct rdma_cm_id *first = bound(events), *second = bound(events);

    printf("two ids are bound to %s:7471\n", ADDRESS);
    attempt(first, "the first");
    attempt(second, "the second");
    MUST(!rdma_destroy_id(second));
    attempt(first, "the first, when the second is closed");
    return 0;
}
END
guest 900 <<'END'
reuse
END
expect "both are bound" "^two ids are bound"
expect "the first cannot listen" "^the first: Address already in use"
expect "nor the second" "^the second: Address already in use"
expect "alone it can" "^the first, when the second is closed: listens"
as_described
