#!/bin/sh
# An error of pyverbs has an errno but is no OSError: `except OSError` and `.errno` miss it.
#
# Expected: a failed system call is an OSError with `.errno`, as everywhere in Python, so that
#     `except OSError as e: if e.errno == errno.ENOMEM` finds a low RLIMIT_MEMLOCK.
# Happens:  PyverbsRDMAError derives from Exception alone, and has `.error_code`; in the handler,
#     `e.errno` raises an AttributeError.
# Versions: python3-pyverbs 44.0.
# Affects:  Python programs that treat errors of verbs as errors of the system.
. "$(dirname "$0")/lib.sh"

# shellcheck disable=SC2086
packages $GUEST python3-minimal python3-pyverbs=$RDMA
guest 900 <<'END'
cat >/tmp/errors.py <<'PYTHON'
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pyverbs_error import PyverbsRDMAError

with Context(name="rxe0") as context:
    try:
        CQ(context, 1 << 30)  # more than the device has
    except PyverbsRDMAError as error:
        print("text:", error)
        print("is an OSError:", isinstance(error, OSError))
        print("has .errno:", hasattr(error, "errno"))
        print("has .error_code:", error.error_code)
PYTHON
python3 /tmp/errors.py
END
expect "no OSError" "^is an OSError: False"
expect "no errno" "^has .errno: False"
expect "an error_code" "^has .error_code: 22"
as_described
