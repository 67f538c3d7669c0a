"""Start a program that cannot outlive its parent, with all that it has started itself.

This is a script between the runner and the program: it stays, as the keeper of the program's
process group, and ends with the program's status. Arguments: the process id of the parent, then the
program with its arguments.

It is not enough to have the kernel kill the program at the parent's death (``PR_SET_PDEATHSIG`` in
the program itself): that reaches one process. A kernel that is a program makes processes all the
time, and one of them that has been made and cannot yet ask for the same outlives it, stopped for
ever and with the guest's memory. A signal to a group leaves no such gap: it is delivered to a
process that is being made, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
#: The signals that end the run; the keeper ignores all others.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    """Run the program, and end it when the parent dies or sends SIGTERM."""
    # Out of reach of the keyboard: the runner decides what Ctrl-C means.
    os.setsid()
    # Before the death signal is asked for, so that it is not lost before `sigwait`; and a keeper
    # that a signal ended would leave the program's children behind.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    # An ignored signal is inherited; with SIGCHLD ignored, no end of a child is reported.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with(int(sys.argv[1]), signal.SIGTERM)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        _become(sys.argv[2:], keeper, mask)
    _forget_descriptors()
    sys.exit(_keep(child))


def _die_with(parent: int, number: int) -> None:
    """Have signal `number` sent to this process at its parent's death."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        # The parent died before the call, which then waits for another parent's death.
        os._exit(1)


def _become(argv: list[str], keeper: int, mask: set[int | signal.Signals]) -> None:
    os.setpgid(0, 0)
    _die_with(keeper, signal.SIGKILL)  # the keeper itself may be killed
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        # The guest's kernel has each file open that is open in the guest.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # The interpreter ignores it, and an ignored or blocked signal stays so in the program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _forget_descriptors() -> None:
    """Close the program's descriptors: the other end has to see that the program closed them."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _keep(child: int) -> int:
    """Wait for `child`, or for an ending signal; end its group; return its status, as shells do."""
    # Here and in the child itself: the first call counts.  If it is refused, the child runs the
    # program already.
    with contextlib.suppress(PermissionError):
        os.setpgid(child, child)
    while signal.sigwait((*_ENDING, signal.SIGCHLD)) not in _ENDING:
        # Not collected yet: the number of its group must not become another's. None is a child that
        # has only stopped, which the same signal reports.
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
    with contextlib.suppress(ProcessLookupError):  # the child has left its group, which is empty
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
