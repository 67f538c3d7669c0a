#!/bin/sh
# rping exits with 0 although its server was killed, long before all pings were done.
#
# Expected: `rping -c -C 100000` exits with 0 if it has done the pings, and with an error if the
#     server dies before that.
# Happens:  it prints what happened, and exits with 0.
# Versions: rdmacm-utils 44.0, on Soft-RoCE of Linux 6.1.192.
# Affects:  health checks and failover tests that call rping and look at its status.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST
guest 900 <<'END'
rping -s -a 10.80.0.1 >/dev/null 2>&1 &
server=$!
until rdma resource show cm_id | grep -q LISTEN; do sleep 1; done
rping -c -v -C 100000 -a 10.80.0.1 >/tmp/client 2>&1 &
client=$!
until grep -q "ping data" /tmp/client; do sleep 1; done
kill -9 $server
if wait $client; then echo "status 0"; else echo "status $?"; fi
if [ "$(grep -c 'ping data' /tmp/client)" -lt 100000 ]; then echo "pings are missing"; fi
grep -v "ping data" /tmp/client | tail -n 3
END
expect "fewer pings than asked for" "^pings are missing"
expect "and success" "^status 0"
as_described
