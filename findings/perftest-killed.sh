#!/bin/sh
# ib_send_bw -D reports a bandwidth, and success, when its server was killed.
#
# Expected: a measurement whose other end dies fails, with an error status and without a figure.
# Happens:  the client goes on to the end of its duration, prints the average of what went before, and
#     ends with 0.
# Versions: perftest 4.5+0.17-1 on Soft-RoCE of Linux 6.1.192, rdma-core 44.0.
# Whom:     qualification of clusters and nightly measurements: a host that fails in the run counts as
#     a slow one.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST perftest=4.5+0.17-1
guest 900 <<'END'
# What it prints is buffered: the state of its queue pair tells that it has begun.
ib_send_bw -F -D 30 -s 65536 >/tmp/server 2>&1 &
server=$!
until netstat -ltn | grep -q ":18515 "; do sleep 1; done
ib_send_bw -F -D 30 -s 65536 10.80.0.1 >/tmp/client 2>&1 &
client=$!
until rdma resource show qp | grep -q "state RTS.*ib_send_bw"; do sleep 1; done
sleep 8
kill -9 $server && echo "the server is killed"
if wait $client; then echo "status 0"; else echo "status $?"; fi
grep -A 100 "#bytes" /tmp/client
END
expect "the server was at work" "^the server is killed"
expect "a figure" "^ *65536 +[1-9][0-9]* +[0-9.]+ +[0-9.]+"
expect "and success" "^status 0"
as_described
