#!/bin/sh
# At the limit of the rdma cgroup librdmacm reports that there is no such device.
#
# Expected: a container at its limit of RDMA handles gets the same clear errno from verbs and from
#     the connection manager; and a program that has opened the device needs no further handle.
# Happens:  ibv_open_device beyond `rdma.max` fails with EAGAIN.  rdma_bind_addr fails with ENODEV,
#     as for an address that no adapter has: librdmacm opens the device once more for itself, and
#     does not report why that failed.  So a limit of one handle is too little for a program that
#     opens one device.
# Versions: Linux 6.1.192, librdmacm 44.0.
# Affects:  containers with rdma.max set: "No such device", while ibv_devices and `rdma link` show
#     the device.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile limited <<'END'
#include "pair.h"

int main(int count, char **words)
{
    struct ibv_device **devices = ibv_get_device_list(NULL);
    struct rdma_cm_id *id;

    for (int opened = 1; opened < count; opened++)
        printf("%s: %s\n", words[opened], ibv_open_device(devices[0]) ? "opened" : strerror(errno));
    id = new_id(rdma_create_event_channel());
    printf("rdma_bind_addr beside %d: %s\n", count - 1,
           rdma_bind_addr(id, place(ADDRESS, 7471)) ? strerror(errno) : "bound");
    return 0;
}
END
guest 900 <<'END'
mkdir /tmp/groups
mount -t cgroup2 none /tmp/groups
echo +rdma >/tmp/groups/cgroup.subtree_control
mkdir /tmp/groups/one
echo "rxe0 hca_handle=1" >/tmp/groups/one/rdma.max
cat /tmp/groups/one/rdma.max
sh -c 'echo $$ >/tmp/groups/one/cgroup.procs; limited; limited first second'
END
expect "the limit is one handle" "^rxe0 hca_handle=1 "
expect "without another it is enough for librdmacm" "^rdma_bind_addr beside 0: bound"
expect "verbs says EAGAIN" "^second: Resource temporarily unavailable"
expect "librdmacm says ENODEV" "^rdma_bind_addr beside 2: No such device"
as_described
