"""`make programs`: tries programs off PyPI under the switch; writes the table in docs/switch.md.

Theory of operation
    The programs have a virtual environment of their own, of the versions in requirements.txt.  All
    of them run in one guest (tests/programs/guest.py); what was seen is judged here.  RDMA means
    that the adapter sent packets and the kernel opened no TCP connection; TCP or UDP, that the
    switch said so.  A program that leaves RDMA without a word, or goes another way than the list
    expects, is a failure.

Pages whose programs need these packages are run there, too (tests/programs/pages.py).

Usage: python -m tests.programs.run [NAME or PAGE...]; with names, nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.programs.listed import Program, programs
from tests.programs.pages import PAGES

_ROOT = Path(__file__).parents[2]
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_BUILT = _ROOT / "build" / "programs"
_PYTHON = _BUILT / "venv" / "bin" / "python"
_PAGE = _ROOT / "docs" / "switch.md"
_BEGIN, _END = "<!-- programs: by make programs -->\n", "<!-- end of programs -->\n"
_LIMIT_S = 1800
_LOOPS = ("asyncio", "uvloop")


def _install() -> None:
    """The virtual environment, made anew when the requirements or the interpreter have changed."""
    stamp = _BUILT / "stamp"
    key = hashlib.sha256(_REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == key and _PYTHON.exists():
        return
    print("installing the programs", flush=True)
    stamp.unlink(missing_ok=True)
    venv = (sys.executable, "-m", "venv", "--clear", str(_BUILT / "venv"))
    pip = (str(_PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    for words in (venv, (*pip, "-r", str(_REQUIREMENTS))):
        subprocess.run(words, check=True, timeout=_LIMIT_S)
    stamp.write_text(key)


def _versions() -> dict[str, str]:
    """The version of each package, by its name as the list has it."""
    pins = (line.split("==") for line in _REQUIREMENTS.read_text().splitlines() if "==" in line)
    return {name.lower(): version for name, version in pins}


def _in_guest(*words: str, memory: str = "1G") -> int:
    """Run a module of this folder in a guest; its exit status."""
    softroce = ("aiordma_softroce", "--engine", "uml", "--device", "rxe", "--memory", memory)
    limit = ("--timeout", str(_LIMIT_S - 60), "--")
    command = (sys.executable, "-m", *softroce, *limit, str(_PYTHON), "-m", *words)
    return subprocess.run(command, cwd=_ROOT, check=False, timeout=_LIMIT_S).returncode


def _run(names: list[str]) -> list[dict[str, Any]]:
    seen = _BUILT / "seen.json"
    seen.unlink(missing_ok=True)
    if status := _in_guest("tests.programs.guest", str(seen), *names):
        msg = f"the guest ended with {status}"
        raise RuntimeError(msg)
    results: list[dict[str, Any]] = json.loads(seen.read_text())
    return results


def judged(seen: dict[str, Any]) -> str:
    """Which way a program went on one loop: RDMA, TCP, UDP, both, or what went wrong."""
    if seen["error"]:
        return f"fails: {seen['error']}"
    rdma = bool(seen["over"]) and seen["packets"] > 0
    # Each connection that the kernel opened was told of: "... to ADDRESS port NUMBER not ...".
    if seen["tcp_connections"] > sum(" to " in line for line in seen["not_over"]):
        return "TCP without a word"
    if rdma:
        return "RDMA and TCP" if seen["tcp_connections"] else "RDMA"
    if seen["tcp_connections"]:
        return "TCP"
    return "UDP" if any("datagram" in line for line in seen["not_over"]) else "nothing"


def table(ways: dict[str, dict[str, str]]) -> str:
    """The rows that docs/switch.md has, in Markdown."""
    versions = _versions()

    def named(packages: tuple[str, ...]) -> str:
        if not packages:
            return "a few lines of asyncio"
        return ", ".join(f"{name} {versions[name.lower()]}" for name in packages)

    def told(program: Program) -> str:
        found = dict.fromkeys(ways[program.name][loop] for loop in _LOOPS)
        said = (
            way if way == "RDMA" or way.startswith("fails") else f"{way}, said at INFO"
            for way in found
        )
        return ": ".join(filter(None, (" and ".join(said), program.why)))

    lines = ["| Server, client | Exchange | Goes over |", "| --- | --- | --- |"]
    for program in programs.values():
        both = dict.fromkeys((named(program.server), named(program.client)))
        lines.append(f"| {'; '.join(both)} | {program.does} | {told(program)} |")
    over = [name for name, way in ways.items() if set(way.values()) == {"RDMA"}]
    head = (
        f"{len(over)} of {len(programs)} pairs go over RDMA on both loops, none leaves it silently."
    )
    return "\n".join((head, "", *lines, ""))


def main(*names: str) -> int:
    """Run the programs; the exit status."""
    _install()
    ways: dict[str, dict[str, str]] = {}
    tried = [name for name in names if name not in PAGES]
    for seen in _run(tried) if tried or not names else ():
        ways.setdefault(seen["name"], {})[seen["loop"]] = judged(seen)
    bad = 0
    for name, way in ways.items():
        wrong = set(way.values()) != {programs[name].expected}
        bad += wrong
        print(f"{'WRONG' if wrong else 'ok':5} {name:22} {way}")
    if ways:
        print(f"{len(ways) - bad} passed, {bad} failed")
    read = [page for page in PAGES if not names or page in names]
    wrong = bool(read) and _in_guest("tests.programs.pages", *read, memory="4G") != 0
    if not names and not bad:
        head, _, rest = _PAGE.read_text().partition(_BEGIN)
        _, _, tail = rest.partition(_END)
        _PAGE.write_text(f"{head}{_BEGIN}\n{table(ways)}\n{_END}{tail}")
    return int(bool(bad) or wrong)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
