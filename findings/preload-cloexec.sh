#!/bin/sh
# librspreload silently leaves a socket on TCP if it is made with SOCK_CLOEXEC.
#
# Expected: LD_PRELOAD=librspreload.so moves the TCP sockets of a program to RDMA, or says that it
#     cannot; SOCK_CLOEXEC makes no difference.
# Happens:  socket(AF_INET, SOCK_STREAM, 0) becomes an rsocket.  With SOCK_STREAM | SOCK_CLOEXEC it
#     stays a socket of the kernel's TCP: everything works, but slower, and nothing is reported.
# Versions: librdmacm1 44.0 (librspreload.so).
# Affects:  programs written in the last ten years: Python, Go, Rust and systemd make all sockets in
#     this way.  "It runs over RDMA" then measures TCP.  `rdma resource show cm_id` and `ss` tell.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
compile server <<'END'
#include "pair.h"

/* Listens on port 4660, and sleeps. */
int main(int count, char **words)
{
    int flags = count > 1 ? SOCK_CLOEXEC : 0;
    int server = socket(AF_INET, SOCK_STREAM | flags, 0);

    (void)words;
    MUST(server >= 0);
    MUST(!bind(server, place(ADDRESS, 4660), sizeof(struct sockaddr_in)));
    MUST(!listen(server, 1));
    printf("ready\n");
    fflush(stdout);
    sleep(600);
    return 0;
}
END
guest 900 <<'END'
preload=$(find /usr/lib -name librspreload.so)
for how in "" SOCK_CLOEXEC; do
    # shellcheck disable=SC2086
    LD_PRELOAD=$preload server $how >/tmp/ready &
    until grep -q ready /tmp/ready; do sleep 1; done
    # 10.80.0.1:4660, listening, as the kernel's table of TCP has it.
    echo "SOCK_STREAM|$how: TCP $(grep -c ' 0100500A:1234 .* 0A ' /proc/net/tcp)," \
        "RDMA $(rdma resource show cm_id | grep -c 'LISTEN.*10.80.0.1:4660')"
    kill $!
    wait $! || true
    rm /tmp/ready
done
END
expect "a plain socket goes over RDMA" "^SOCK_STREAM\|: TCP 0, RDMA 1"
expect "one with SOCK_CLOEXEC over TCP" "^SOCK_STREAM\|SOCK_CLOEXEC: TCP 1, RDMA 0"
as_described
