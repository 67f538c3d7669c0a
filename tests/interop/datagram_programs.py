"""The command lines of udaddy and mckey."""

from __future__ import annotations

from tests.interop.mailbox import MESSAGES, SIZE
from tests.interop.program import Program

#: Of udaddy, always: its `-p` is another option.
PORT = 7174
#: How many queue pairs udaddy asks for.
SERVICES = 5
#: The multicast group of mckey.
GROUP = "239.80.0.7"
#: Soft-RoCE sends from a thread of the kernel, and mckey destroys its queue pair as soon as it has
#: posted: with one processor nothing would leave.  An idle program waits for the kernel.
IDLE = ("chrt", "--idle", "0")
#: How often mckey is asked to send, because that does not help always.
ATTEMPTS = 5


def udaddy(*options: str, services: int = SERVICES) -> tuple[str, ...]:
    """The command of either role."""
    counts = ("-c", str(services), "-C", str(MESSAGES), "-S", str(SIZE))
    return ("udaddy", *counts, *options)


def mckey(address: str, *options: str) -> tuple[str, ...]:
    """The command of a member that receives, or with `-s` of one that sends."""
    counts = ("-C", str(MESSAGES), "-S", str(SIZE))
    return ("mckey", "-m", GROUP, "-b", address, *counts, *options)


def assert_well(program: Program) -> None:
    """udaddy has ended without a complaint."""
    assert program.lines[-2:] == ["test complete", "return status 0"]
    assert not [line for line in program.lines if "error" in line or "fail" in line]
