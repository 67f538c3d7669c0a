"""Kernels for the guests of ``make test``, which are built on first use and then kept.

Usage: ``tools/guest_kernel.py 7.2`` builds that kernel, boots it and runs a command in it. The exit
status is 77 if its source is not to be had here, with the reason as the last line.
"""

from __future__ import annotations

import os
import sys

from checks import ROOT
from systems import ABSENT, MARKS

# As with ``python -m``: of this checkout, whatever is installed.
sys.path.insert(0, str(ROOT))

from aiordma.testing.softroce import kernel_build, runner, uml
from aiordma.testing.softroce.errors import SoftroceError, SourceAbsentError

#: What names the kernel of a guest.
VARIABLE = uml.KERNEL
#: The newest series that Debian has. It also takes two thirds of the time of the other: see
#: ``seccomp`` in uml.py.
NEWEST = "7.2"
#: The long-term series of Debian 12 and 13; stages in the system trixie have it, and all others,
#: where NEWEST is not to be had.
LONG_TERM = "6.12"


def for_guests() -> dict[str, str]:
    """Return the environment of a stage whose guests have no kernel of their own choice."""
    if VARIABLE in os.environ:
        return {}
    return {VARIABLE: NEWEST if kernel_build.cached(NEWEST) else LONG_TERM}


def main() -> int:
    """Build the kernel that the command line names, and return the exit status."""
    (name,) = sys.argv[1:]
    _, absent = MARKS
    try:
        return runner.run(["uname", "-r"], engine="uml", kernel=name, install=True)
    except SourceAbsentError as exc:
        print(f"{absent}{exc}")
        return ABSENT
    except SoftroceError as exc:
        print(f"Linux {name}: {exc}")
        return exc.exit_status


if __name__ == "__main__":
    sys.exit(main())
