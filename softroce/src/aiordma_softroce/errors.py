"""The two ways in which a run ends without a verdict of the command itself."""

from __future__ import annotations

#: Exit statuses of the runner's own, the same as timeout(1) and container engines use.
STATUS_USAGE = 2
STATUS_TIMEOUT = 124
STATUS_INFRASTRUCTURE = 125
STATUS_NOT_EXECUTABLE = 126
STATUS_NOT_FOUND = 127
STATUS_SIGNAL_BASE = 128


class SoftroceError(Exception):
    """The command could not be run to its end.

    Attributes:
        exit_status: exit status of the command line for it.
    """

    exit_status = STATUS_INFRASTRUCTURE


class InfrastructureError(SoftroceError):
    """The environment failed: a build, a boot, a kernel panic, a missing package."""


class UsageError(SoftroceError):
    """The options contradict each other, or the engine cannot do what they ask for."""

    exit_status = STATUS_USAGE


class Interrupted(SoftroceError):
    """A signal came before the command had started; half-made files have been removed."""

    def __init__(self, number: int) -> None:
        """Remember the signal, which makes the exit status."""
        super().__init__("interrupted")
        self.exit_status: int = STATUS_SIGNAL_BASE + number
