"""Fuzz the C that reads what a peer sends (``tests/fuzz/fuzz_wire.c``).

Usage: ``tools/fuzz.py [--seed N] [--programs N]`` runs that many random programs with a fixed seed,
under AddressSanitizer and UBSan: what CI does. ``tools/fuzz.py --guided SECONDS`` lets libFuzzer
(clang) look for inputs that reach new code; what it keeps is in ``build/fuzz/corpus``, and an input
that breaks a rule is ``build/fuzz/crash-...``, which ``build/fuzz/fuzz_wire FILE`` repeats.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from checks import ROOT, CheckFailedError, Checks, call

FOLDER = ROOT / "build" / "fuzz"
CORE = ROOT / "aiordma" / "_core"
#: The target, and the files that it drives: those of the core that know nothing of Python.
SOURCES = (
    ROOT / "tests" / "fuzz" / "fuzz_wire.c",
    *(CORE / name for name in ("connection.c", "connection_life.c", "stream.c", "stream_life.c")),
)
_FLAGS = ("-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{CORE}")
_SANITIZERS = "address,undefined"


def build(compiler: str, program: Path, *options: str, sanitizers: str = _SANITIZERS) -> None:
    """Compile the target together with the two protocols.

    Raises:
        CheckFailedError: it does not compile.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    checks = (f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined")
    call(compiler, *_FLAGS, *options, *checks, *SOURCES, "-o", program)


def guided(seconds: int) -> int:
    """Let libFuzzer search for so long; its findings go to its own output."""
    program, corpus = FOLDER / "fuzz_wire_guided", FOLDER / "corpus"
    build("clang", program, "-DGUIDED", sanitizers=f"fuzzer,{_SANITIZERS}")
    corpus.mkdir(exist_ok=True)
    limits = (f"-max_total_time={seconds}", "-timeout=10", "-max_len=4096", "-print_final_stats=1")
    command = [str(program), *limits, f"-artifact_prefix={FOLDER}/", str(corpus)]
    return subprocess.run(command, check=False, timeout=seconds + 120).returncode


def main() -> int:
    """Build and run; the exit status is that of the target."""
    parser = argparse.ArgumentParser(description="Fuzz the C that reads the wire.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--programs", type=int, default=200_000, help="random inputs")
    parser.add_argument("--guided", type=int, metavar="SECONDS", help="with libFuzzer")
    parser.add_argument("--junit", type=Path, help="write the results to this file")
    options = parser.parse_args()
    if options.guided:
        return guided(options.guided)
    program = FOLDER / "fuzz_wire"
    checks = Checks("fuzz", options.junit)
    if checks.run("build", lambda: build("gcc", program)):
        words = (str(options.seed), str(options.programs))
        checks.run(f"seed {words[0]}: {words[1]} programs", lambda: call(program, *words))
    return checks.finish()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CheckFailedError as error:
        sys.exit(str(error))
