"""fork() in a process that may have threads."""

from __future__ import annotations

import os
import warnings


def fork_quietly() -> int:
    """`os.fork`, without the warning about threads that Python 3.12 and later give.

    From 3.15 on the parent gets it as an exception where warnings are errors, and the child, which
    is there by then, goes on with the parent's program.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .*multi-threaded", DeprecationWarning)
        return os.fork()
