#!/bin/sh
# Memory that is registered twice counts twice against RLIMIT_MEMLOCK; mlock(2) counts separately.
#
# Expected: the limit is about locked memory.  4 MiB that are registered three times lock 4 MiB, and
#     what mlock has locked and what an adapter has pinned are counted together.
# Happens:  each registration of the same bytes counts in full, in VmPin, even beyond what the
#     process has in memory (VmRSS); 12 bytes across two pages count 8 KiB.  What mlock has locked
#     counts not there, but in VmLck.
# Versions: Linux 6.1.192, ibv_reg_mr of rdma-core 44.0.  The kernel counts, with any adapter.
# Affects:  those who register a buffer for each connection, or in each library (each has its own
#     protection domain), and size `ulimit -l` by the program's memory: ibv_reg_mr fails with
#     ENOMEM.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile again <<'END'
#include "pair.h"

#define SIZE (4 << 20)

int main(void)
{
    struct rlimit limit = {4 * SIZE, 4 * SIZE};
    struct ibv_device **devices = ibv_get_device_list(NULL);
    struct ibv_context *context;
    struct ibv_pd *pd;
    char *bytes = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    MUST(bytes != MAP_FAILED);
    memset(bytes, 1, SIZE);
    MUST(context = ibv_open_device(devices[0]));
    MUST(pd = ibv_alloc_pd(context));
    /* As a user without CAP_IPC_LOCK, whom the limit binds. */
    MUST(!setrlimit(RLIMIT_MEMLOCK, &limit));
    MUST(!setgid(65534) && !setuid(65534));
    printf("ulimit -l: %d kB\n", 4 * SIZE / 1024);
    for (int times = 1; times <= 3; times++) {
        MUST(ibv_reg_mr(pd, bytes, SIZE, IBV_ACCESS_LOCAL_WRITE));
        printf("the same 4096 kB registered %d times: VmPin %ld kB\n", times, status_of("VmPin"));
    }
    printf("VmRSS below VmPin: %s\n", status_of("VmRSS") < status_of("VmPin") ? "yes" : "no");
    MUST(!mlock(bytes, SIZE));
    printf("and mlocked: VmPin %ld kB, VmLck %ld kB\n", status_of("VmPin"), status_of("VmLck"));
    MUST(!munlock(bytes, SIZE));
    MUST(ibv_reg_mr(pd, bytes + 4090, 12, IBV_ACCESS_LOCAL_WRITE));
    printf("and 12 bytes on two pages: VmPin %ld kB\n", status_of("VmPin"));
    printf("once more 4096 kB: %s\n",
           ibv_reg_mr(pd, bytes, SIZE, IBV_ACCESS_LOCAL_WRITE) ? "registered" : strerror(errno));
    return 0;
}
END
guest 900 <<'END'
again
END
expect "each registration counts" "registered 3 times: VmPin 12288 kB"
expect "beyond what is in memory" "^VmRSS below VmPin: yes"
expect "mlock counts elsewhere" "^and mlocked: VmPin 12288 kB, VmLck 4096 kB"
expect "12 bytes count two pages" "on two pages: VmPin 12296 kB"
expect "the limit is reached" "^once more 4096 kB: Cannot allocate memory"
as_described
