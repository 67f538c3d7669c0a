"""Runs a plan of programs where the device is: python -m tests.bench.guest PLAN.json.

A job is a pair of commands, or one.  The server is started, and the client as soon as the server
listens.  What both printed goes out as one line of JSON after `MARK`, so that nothing is lost if
the machine is ended before the plan is done.  Judging it is left to the host.

A word `python:MODULE` in place of a program means the function `main` of that module in a process
forked from this one, which has the modules loaded: Python needs many seconds to start here.  Such
a process is one like any other by the time its connection stands.

This process sleeps while a job runs: there is one CPU.  With AIORDMA_BENCH_DRAG set, a profile
function slows the Python of forked processes down, which `make bench-check` has to notice.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import platform
import signal
import subprocess
import sys
import time
import traceback
from array import array
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from mmap import PAGESIZE
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "@@ "
#: Loaded before the first process is forked.
PACKAGES = (
    "aiordma.cli",
    "aiordma.cli.perf",
    "aiordma.loop",
    "aiordma.endpoint",
    "aiordma.streams",
)
FORKED = "python:"
FIRST_PORT = 18_600
#: Of Python; a part of the bench does not need all of them.
LIBRARIES = ("aiofastnet", "aiohttp", "cffi", "grpcio", "ibverbs", "uvloop", "pyzmq")
#: Their modules of other names.
MODULES = {"pyzmq": "zmq", "grpcio": "grpc"}
#: Of madvise(2), and the bit of an entry of pagemap(5) for a page that is there.
_MADV_POPULATE_WRITE, _PRESENT = 23, 63
#: Entries that are read at a time.  malloc changes its ways when large memory is freed: what a
#: connection takes of the heap would be another figure.
_ENTRIES = 2048
#: Where the outputs of a job are while it runs.
SCRATCH = Path("/dev/shm")


@dataclass
class Process:
    """A program that was started; `status` is None while it runs."""

    role: str
    pid: int
    status: int | None = None

    @property
    def output(self) -> Path:
        """What it has printed."""
        return SCRATCH / f"bench-{self.role}"

    def end(self) -> None:
        """Kill it with what it has started."""
        if self.status is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = -signal.SIGKILL


def own_pages() -> None:
    """Copy the pages that this process shares with its parent, before it does anything.

    Python changes counts in all objects that it looks at: a process that was forked copies pages of
    its parent in the midst of what is measured, as no other process does.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, rights, *_ = line.split()
            if rights != "rw-p":
                continue
            begin, end = (int(address, 16) // PAGESIZE for address in place.split("-"))
            for first in range(begin, end, _ENTRIES):
                count = min(_ENTRIES, end - first)
                entries = array("Q", os.pread(pagemap.fileno(), count * 8, first * 8))
                # Those that are there; others are made when they are needed, as in any process.
                for page in (first + n for n, entry in enumerate(entries) if entry >> _PRESENT):
                    at = ctypes.c_void_p(page * PAGESIZE)
                    if libc.madvise(at, ctypes.c_size_t(PAGESIZE), _MADV_POPULATE_WRITE):
                        raise OSError(ctypes.get_errno(), f"madvise of {line}")


def reap(processes: list[Process], options: int = 0) -> None:
    """Note what has ended; sleeps until something has, unless `options` say otherwise."""
    pid, status = os.waitpid(-1, options)
    for process in processes:
        if process.pid == pid:
            process.status = os.waitstatus_to_exitcode(status)


def start(role: str, command: list[str], modules: dict[str, ModuleType]) -> Process:
    """Start a command in a process group of its own."""
    sys.stdout.flush()
    pid = os.fork()
    process = Process(role, pid)
    if pid:
        return process
    status = 127
    try:
        os.setpgid(0, 0)
        fd = os.open(process.output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        program, *words = command
        if program.startswith(FORKED):
            if "AIORDMA_BENCH_DRAG" in os.environ:
                sys.setprofile(lambda *_: None)
            sys.argv = [program.removeprefix(FORKED), *words]
            own_pages()
            status = modules[sys.argv[0]].main(words)
        else:
            os.execvp(program, command)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def listens(kind: str, port: int) -> bool:
    """Whether a program listens on the port: with the connection manager, or with TCP."""
    if kind == "tcp":
        files = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))  # one for both has the second
        lines = [line for each in files if each.exists() for line in each.read_text().splitlines()]
        found = [line.split()[1:4] for line in lines if ":" in line]
        return any(at.endswith(f":{port:04X}") and state == "0A" for at, _, state in found)
    command = ["rdma", "resource", "show", "cm_id"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return any("LISTEN" in line and f":{port} " in line for line in shown.splitlines())


def run(job: dict[str, Any], port: int, modules: dict[str, ModuleType]) -> dict[str, Any]:
    """Run one job; returns its outputs and `error`, which is empty if all went well.

    There is no limit of time: this clock jumps ahead whenever everything waits for a file of the
    host.  The host has the limit.
    """
    names = {"address": os.environ["AIORDMA_SOFTROCE_ADDR"], "port": str(port)}
    processes: list[Process] = []

    def begin(role: str) -> Process:
        processes.append(start(role, [word.format(**names) for word in job[role]], modules))
        return processes[-1]

    if job["server"]:
        server = begin("server")
        while server.status is None and not listens(job["listens"], port):
            time.sleep(0.01)
            reap(processes, os.WNOHANG)
    if all(process.status is None for process in processes):
        begin("client")
    # A server is done when its client is; one of them alone would wait for ever.
    needed = processes[-1:] if job["endless"] else processes
    while all(not process.status for process in processes):
        if all(process.status == 0 for process in needed):
            break
        reap(processes)
    failed = [
        f"{process.role}: exit status {process.status}" for process in processes if process.status
    ]
    for process in processes:
        process.end()
    told = {process.role: process.output.read_text(errors="replace") for process in processes}
    return {"error": ", ".join(failed)} | told


def versions() -> dict[str, str]:
    """What the counted instructions depend on."""
    query = ["dpkg-query", "-W", "-f", "${Package} ${Version}\n"]
    packages = ["libibverbs1", "librdmacm1", "ibverbs-providers", "rdmacm-utils", "perftest"]
    asked = [*query, *packages, "python3-pyverbs", "libc6"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return {
        "kernel": platform.release(),
        "python": f"{platform.python_version()} ({platform.python_compiler()})",
        **{name: version(name) for name in LIBRARIES if find_spec(MODULES.get(name, name))},
        **dict(line.split(maxsplit=1) for line in listed.splitlines() if " " in line),
    }


def load(jobs: list[dict[str, Any]]) -> dict[str, ModuleType]:
    """Import what the jobs name, and what they would import later."""
    words = {job[role][0] for job in jobs for role in ("server", "client") if job.get(role)}
    names = {word.removeprefix(FORKED) for word in words if word.startswith(FORKED)}
    for package in PACKAGES if names else ():
        for found in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if not found.name.startswith("__"):
                importlib.import_module(f"{package}.{found.name}")
    if names:
        # While a process waits for a file of the host this clock jumps to the next timer, which
        # then fires too early: the libraries are to be here before.
        importlib.import_module("aiordma").devices()
    return {name: importlib.import_module(name) for name in names}


def main(plan: str) -> None:
    """Run all steps of the plan."""
    steps = json.loads(Path(plan).read_text())
    modules = load(steps)

    def tell(line: dict[str, Any]) -> None:
        print(MARK + json.dumps(line), flush=True)

    tell({"versions": versions()})
    for port, step in enumerate(steps, FIRST_PORT):
        began = time.monotonic()
        result = run(step, port, modules)
        took = time.monotonic() - began
        tell({"name": step["name"], "number": step["number"]} | result | {"took_s": took})


if __name__ == "__main__":
    main(sys.argv[1])
