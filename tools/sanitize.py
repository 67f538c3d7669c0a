"""Run pytest with the C of aiordma built under a sanitizer: AddressSanitizer or UBSan, or both.

Usage: ``tools/sanitize.py address,undefined -- PYTEST OPTION...``; with ``--guest`` before ``--``
to run on Soft-RoCE (``undefined`` alone: a guest has no address space for the other's shadow).

The first thing that a sanitizer finds ends the process, so that no test can pass over it. The
library is built in a copy of the repository, ``build/sanitize-...``, and tested there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checks import ROOT, CheckFailedError, call, copy_repository

_ENDS = "halt_on_error=1:abort_on_error=1:print_stacktrace=1"
_ENVIRONMENT = {
    "address": {
        # The interpreter keeps much until it exits.
        "ASAN_OPTIONS": f"{_ENDS}:detect_leaks=0:detect_stack_use_after_return=1",
        # Objects come from malloc(), where the sanitizer sees each of them.
        "PYTHONMALLOC": "malloc",
    },
    "undefined": {"UBSAN_OPTIONS": _ENDS},
}


def build(kinds: list[str]) -> Path:
    """Build the copy for these sanitizers, what has changed of it, and return its folder.

    Raises:
        CheckFailedError: it does not compile.
    """
    folder = ROOT / "build" / f"sanitize-{'-'.join(kinds)}"
    copy_repository(folder)
    flags = f"-fsanitize={','.join(kinds)} -fno-omit-frame-pointer -g -O1"
    if "undefined" in kinds:
        flags += " -fno-sanitize-recover=undefined"
    environment = {**os.environ, "CFLAGS": flags, "LDFLAGS": flags}
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        raise CheckFailedError(f"the build under {', '.join(kinds)} failed:\n{done.stdout[-4000:]}")
    return folder


def main() -> None:
    """Build, then become pytest."""
    kinds, cut = sorted(sys.argv[1].split(",")), sys.argv.index("--")
    if unknown := set(kinds) - _ENVIRONMENT.keys():
        raise CheckFailedError(f"no such sanitizer: {', '.join(unknown)}")
    folder = build(kinds)
    settings = {"PYTHONMALLOC": "debug"}
    for kind in kinds:
        settings.update(_ENVIRONMENT[kind])
    preload = ""
    if "address" in kinds:
        # Of the program, which is not built with it: before everything else.
        preload = call("gcc", "-print-file-name=libasan.so").strip()
        settings["LD_PRELOAD"] = preload
    python = sys.executable
    command = [python, "-m", "pytest", *sys.argv[cut + 1 :]]
    if "--guest" in sys.argv[:cut]:
        inside = ["env", *(f"{name}={value}" for name, value in settings.items())]
        engine = ["--engine", "uml", "--device", "rxe", "--timeout=570"]
        command = [
            sys.executable,
            "-m",
            "aiordma_softroce",
            *engine,
            "--",
            *inside,
            *command,
        ]
        settings = {}
    os.chdir(folder)
    os.execve(command[0], command, {**os.environ, **settings})


if __name__ == "__main__":
    try:
        main()
    except CheckFailedError as error:
        sys.exit(str(error))
