"""The kernel of the guests of ``make test``.

Usage: ``tools/guest_kernel.py 7.2`` builds that kernel on first use, boots it and runs a command in
it. The exit status is 77 if its source is not to be had here, with the reason as the last line:
guests then have the newest kernel that the packages of the system have.
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

#: The newest series that Debian has; see ``seccomp`` in uml.py, too.
NEWEST = "7.2"


def for_guests() -> dict[str, str]:
    """Return what names the kernel in the environment of a stage, where it has been built."""
    if uml.KERNEL in os.environ or kernel_build.cached(NEWEST) is None:
        return {}
    return {uml.KERNEL: NEWEST}


def main() -> int:
    """Build the kernel that the command line names, and return the exit status."""
    (name,) = sys.argv[1:]
    _, absent = MARKS
    try:
        return runner.run(["uname", "-r"], engine="uml", kernel=name)
    except SourceAbsentError as exc:
        reason = exc
    if status := runner.run(["uname", "-r"], engine="uml"):
        return status
    print(f"{absent}{reason}")
    return ABSENT


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SoftroceError as exc:
        sys.exit(f"the kernel of the guests: {exc}")
