#!/bin/sh
# While one thread waits in pyverbs' get_cq_event, no other thread of the program runs.
#
# Expected: a call that waits for an event lets the other threads run, like os.read, select and
#     every socket, so a program without an event loop can wait for completions in a thread.
# Happens:  CompChannel.get_cq_event calls ibv_get_cq_event with the interpreter lock held.  Until
#     the adapter has an event no other Python code runs, timers and signal handlers included.  A
#     signal's default action still ends the process.
# Versions: python3-pyverbs 44.0.
# Affects:  programs that use pyverbs in a thread (asyncio.to_thread, ThreadPoolExecutor): the loop
#     stops, and with it whatever would have caused the event.  Poll the queue instead, or wait in a
#     separate process.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST python3-minimal python3-pyverbs=$RDMA
guest 900 <<'END'
cat >/tmp/waits.py <<'PYTHON'
import os
import signal
import sys
import threading
import time

from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context


def tick() -> None:
    with open("/tmp/ticks", "a") as file:
        while True:
            print("tick", file=file, flush=True)
            time.sleep(0.1)


context = Context(name="rxe0")
channel = CompChannel(context)
cq = CQ(context, 8, channel=channel)
cq.req_notify()
threading.Thread(target=tick, daemon=True).start()
time.sleep(1)
signal.alarm(30)  # ends the wait and the process, whichever thread has the lock
print("waits", file=sys.stderr, flush=True)
if sys.argv[1] == "get_cq_event":
    channel.get_cq_event(cq)  # nothing is posted: there is no event
else:
    os.read(os.pipe()[0], 1)
PYTHON
for call in read get_cq_event; do
    : >/tmp/ticks
    python3 /tmp/waits.py $call 2>/tmp/waits &
    until grep -q waits /tmp/waits; do sleep 1; done
    sleep 2
    before=$(wc -l </tmp/ticks)
    sleep 5
    after=$(wc -l </tmp/ticks)
    wait $! || true
    echo "$call: the other thread ran $([ "$after" -gt "$before" ] && echo on || echo no more) in 5 s"
done
END
expect "beside os.read it runs" "^read: the other thread ran on"
expect "beside get_cq_event it does not" "^get_cq_event: the other thread ran no more"
as_described
