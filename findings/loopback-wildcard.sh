#!/bin/sh
# An id that is bound to 127.0.0.1 takes its port from every address of the machine.
#
# Expected: as with sockets, 127.0.0.1:7471 and 10.80.0.1:7471 are independent, and binding to one
#     that is taken fails with EADDRINUSE.
# Happens:  rdma_cm treats a loopback address as a wildcard.  With 127.0.0.1:7471 bound,
#     rdma_bind_addr of 10.80.0.1:7471 fails, and not with EADDRINUSE but with EADDRNOTAVAIL, the
#     errno of an address that this machine does not have.  The same happens after 0.0.0.0, while
#     binding to the same address twice is EADDRINUSE.
# Versions: Linux 6.1.192 (rdma_cm), librdmacm 44.0; with any adapter.
# Affects:  those who run a second instance for tests on 127.0.0.1 beside the service: one of the
#     two does not start, and its log names an address that the machine plainly has.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile bound <<'END'
#include "pair.h"

/* Bind an id to the first, and another to the second; the same with sockets of TCP. */
static void bind_both(const char *first, const char *second)
{
    struct rdma_event_channel *events = rdma_create_event_channel();
    struct rdma_cm_id *one = new_id(events), *other = new_id(events);
    int tcp = socket(AF_INET, SOCK_STREAM, 0), too = socket(AF_INET, SOCK_STREAM, 0);

    MUST(!rdma_bind_addr(one, place(first, 7471)));
    printf("%s, then %s: %s", first, second,
           rdma_bind_addr(other, place(second, 7471)) ? strerror(errno) : "bound");
    MUST(!bind(tcp, place(first, 7471), sizeof(struct sockaddr_in)));
    printf("; TCP: %s\n",
           bind(too, place(second, 7471), sizeof(struct sockaddr_in)) ? strerror(errno) : "bound");
    MUST(!rdma_destroy_id(other) && !rdma_destroy_id(one));
    rdma_destroy_event_channel(events);
    close(tcp);
    close(too);
}

int main(void)
{
    bind_both(ADDRESS, ADDRESS);
    bind_both(ADDRESS, "10.80.0.2");
    bind_both(ADDRESS, "10.99.0.1");
    bind_both("0.0.0.0", ADDRESS);
    bind_both("127.0.0.1", ADDRESS);
    return 0;
}
END
guest 900 <<'END'
ip address add 10.80.0.2/24 dev dummy0
bound
END
in_use="Address already in use" absent="Cannot assign requested address"
expect "the same address twice is in use" "^10.80.0.1, then 10.80.0.1: $in_use; TCP: $in_use$"
expect "two addresses are two places" "^10.80.0.1, then 10.80.0.2: bound; TCP: bound$"
expect "an absent one is not available" "^10.80.0.1, then 10.99.0.1: $absent; TCP: $absent$"
expect "so is one behind a wildcard" "^0.0.0.0, then 10.80.0.1: $absent; TCP: $in_use$"
expect "and behind 127.0.0.1" "^127.0.0.1, then 10.80.0.1: $absent; TCP: bound$"
as_described
