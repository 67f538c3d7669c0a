"""Start a process that cannot outlive its parent.

This is a script, executed by the interpreter in front of the real program: ``prctl`` has to be
called in the new process, and a function between fork and exec is unsafe in a program with threads.
Arguments: the process id of the parent, then the program with its arguments.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Become the program, in a session of its own."""
    # Out of reach of the keyboard: the runner decides what Ctrl-C means.
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[1]):
        # The parent died before the call above, which then waits for another parent's death.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # Each file that is open in the guest is one that the guest's kernel has open.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # The interpreter ignores it, and what is ignored stays so in the program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
