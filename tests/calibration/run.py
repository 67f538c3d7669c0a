"""Run the programs under the recorder, each in a process of its own, with whatever RDMA is here.

Usage: ``python -m tests.calibration.run FOLDER [NAME...]``, with the recorder in LD_PRELOAD.  A
trace is there as soon as its program has ended, and before that a file that says that it runs: a
program can take the kernel of a guest with it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path

from tests.calibration import programs
from tests.calibration.scene import FurtherError, Scene, note, open_trace

#: Of a program; one that waits for the end of TIME-WAIT takes most of it.
LIMIT_S = 40.0


def child(name: str, path: Path) -> None:
    program = programs.PROGRAMS[name]
    open_trace(str(path))
    scene = Scene()
    if program.needs and (program.needs == "iwarp") != scene.iwarp:
        note("not for this transport")
        return
    try:
        program.run(scene)
    except FurtherError:
        note("the program goes no further")
    except Exception as error:
        traceback.print_exc()
        note(f"the program failed: {error!r}")


def run(name: str, folder: Path) -> None:
    """Run one program, and write its trace."""
    running, path = folder / f"{name}.running", folder / f"{name}.txt"
    running.touch()
    sys.stdout.flush()
    if not (process := os.fork()):
        try:
            child(name, running)
        finally:
            os._exit(0)
    status = ended(process, LIMIT_S)
    if status is None:
        os.kill(process, signal.SIGKILL)
        said = "it did not end" if ended(process, 5.0) is not None else "it cannot be ended"
    else:
        said = f"it ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
    if said:
        with running.open("a") as trace:
            trace.write(f"note {said}\n")
    running.rename(path)


def ended(process: int, bound: float) -> int | None:
    """The status of a process, or None if it still runs after a time."""
    limit = time.monotonic() + bound
    while time.monotonic() < limit:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    return None


def main(arguments: list[str]) -> None:
    folder = Path(arguments[0])
    for name in arguments[1:] or programs.PROGRAMS:
        run(name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
