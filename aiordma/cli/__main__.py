"""`main`: the command `aiordma`.

Exit status: 0 success, 1 failure, 2 an error in the command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, on click if it is installed, and return the exit status.

    Args:
        arguments: Without the program's name; those of the process by default.
    """
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough. The buffered rest must not fail once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _run(arguments: Sequence[str] | None) -> int:
    try:
        from aiordma.cli.app import run
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] != "click":
            raise
        from aiordma.cli.fallback import run
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
