"""The ``host`` engine: the RDMA device that this machine has, or a software one for the run."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from . import network, tools
from .errors import (
    STATUS_NOT_EXECUTABLE,
    STATUS_NOT_FOUND,
    STATUS_SIGNAL_BASE,
    STATUS_TIMEOUT,
    InfrastructureError,
    UsageError,
)
from .job import SIGNALS as JOB_SIGNALS
from .job import Job
from .options import Options
from .signals import SignalPipe

DEVICES = Path("/sys/class/infiniband")
_CARD = "aiordma0"
_LINK = "aiordma_rxe0"
_READY_SECONDS = 10.0
_GRACE = 5.0


def has_device() -> bool:
    """Return whether the machine has an RDMA device with an active port."""
    return bool(active())


def active() -> list[str]:
    """Return the names of the RDMA devices with an active port."""
    found = []
    for state in sorted(DEVICES.glob("*/ports/*/state")):
        # A device may go away between the listing and the reading.
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                found.append(state.parts[-4])
    return found


def of_kind(device: str | None) -> list[str]:
    """Return the active devices that `--device` asks for: all, or those that their names tell."""
    return [name for name in active() if name.startswith(device or "")]


def run(argv: Sequence[str], options: Options, *, stdout: int = 1) -> int:
    """Run `argv` as a child and return its status; see `runner.run`."""
    options.refuse(
        "host", "kernel", "virtual_time", "counted", "net", "hosts", "memory", "cpus", "mtu"
    )
    if options.tty and not options.interactive:
        raise UsageError(
            "--tty without --interactive is not possible with --engine host, which lends the "
            "command the terminal of the runner: add --interactive, or use --engine uml"
        )
    names = of_kind(options.device)
    if names:
        return _child(argv, options, _surroundings(names[0], options), stdout)
    if options.device != "rxe":
        raise InfrastructureError(
            f"this machine has no {'RDMA' if options.device is None else options.device} device "
            "with an active port: use --engine uml, or, as root and with a kernel that has the "
            "module, --engine host --device rxe"
        )
    with _software_device():
        return _child(argv, options, network.environment(options, "host"), stdout)


def _surroundings(name: str, options: Options) -> dict[str, str]:
    told = network.environment(options, "host")
    kind = next((kind for kind in ("rxe", "siw") if name.startswith(kind)), name)
    told["AIORDMA_SOFTROCE_DEVICE"] = kind
    told["AIORDMA_SOFTROCE_ADDR"] = address_of(name)
    return told


def address_of(name: str) -> str:
    """Return the first address of a device's network card.

    Raises:
        InfrastructureError: it has none, and so cannot be addressed by rdma_cm; or there is no
            program that tells.
    """
    ip = tools.find("ip")
    if ip is None:
        raise InfrastructureError("--engine host needs the program ip (package iproute2)")
    cards = sorted(path.name for path in (DEVICES / name / "device/net").glob("*"))
    if not cards:
        # Software devices have no hardware parent; they name their card themselves.
        with contextlib.suppress(OSError):
            cards = [(DEVICES / name / "parent").read_text().strip()]
    for card in cards:
        done = tools.query([ip, "-json", "address", "show", "dev", card])
        if done.returncode != 0:
            continue
        for entry in json.loads(done.stdout):
            for info in entry.get("addr_info", ()):
                address = ipaddress.ip_address(info["local"])
                if not address.is_link_local:
                    return str(address)
    raise InfrastructureError(
        f"the RDMA device {name} has no IP address: give its network card one, or use --engine uml"
    )


@contextlib.contextmanager
def _software_device() -> Iterator[None]:
    """Make an rxe device on a dummy card, and remove both afterwards."""
    if os.geteuid() != 0:
        raise InfrastructureError(
            "--engine host --device rxe has to load a module and make a device: run it as root, or "
            "use --engine uml, which needs no privileges"
        )
    _must(["modprobe", "rdma_rxe"], "the kernel has no rdma_rxe; use --engine uml")
    _must(
        ["ip", "link", "add", _CARD, "type", "dummy"],
        f"another run has it, or an earlier one was killed; in that case: ip link delete {_CARD}",
    )
    try:
        for words in (
            ["ip", "link", "set", "dev", _CARD, "mtu", "9000", "up"],
            ["ip", "address", "add", f"{network.ADDRESS}/24", "dev", _CARD],
            ["rdma", "link", "add", _LINK, "type", "rxe", "netdev", _CARD],
        ):
            _must(words, "use --engine uml")
        deadline = time.monotonic() + _READY_SECONDS
        while _LINK not in active():
            if time.monotonic() > deadline:
                raise InfrastructureError(f"the device {_LINK} did not become active")
            time.sleep(0.02)
        yield
    finally:
        # Deleting the card takes the device with it.
        tools.query(["ip", "link", "delete", _CARD])


def _must(words: list[str], advice: str) -> None:
    done = tools.query(words)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        raise InfrastructureError(f"{' '.join(words)} failed ({said}): {advice}")


def _child(argv: Sequence[str], options: Options, told: dict[str, str], stdout: int) -> int:
    job = Job() if options.tty else None
    with SignalPipe(*(JOB_SIGNALS if job else ())) as signals:
        try:
            process = subprocess.Popen(
                argv,
                stdin=None if options.interactive else subprocess.DEVNULL,
                stdout=stdout,
                env={**os.environ, **told},
                # Its own group, so that a time limit reaches all processes of the command.
                process_group=0,
                preexec_fn=Job.come_to_front if job else None,
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            tools.say(f"{argv[0]}: {error.strerror}")
            return STATUS_NOT_FOUND
        except OSError as error:
            tools.say(f"{argv[0]}: {error.strerror}")
            return STATUS_NOT_EXECUTABLE
        try:
            return _await(process, signals, options.timeout, job)
        finally:
            if job is not None:
                job.end()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(
    process: subprocess.Popen[bytes], signals: SignalPipe, timeout: float, job: Job | None
) -> int:
    deadline = time.monotonic() + timeout
    ending = 0
    # Readable as soon as the process has ended.
    watched = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.register(signals, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = {fd for fd, _ in poll.poll(max(0.0, min(left, 3600.0)) * 1000)}
            if watched in ready:
                code = process.wait()
                status = code if code >= 0 else STATUS_SIGNAL_BASE - code
                return STATUS_SIGNAL_BASE + ending if ending else status
            if time.monotonic() >= deadline:
                if job is not None:
                    job.end()
                if ending:
                    return STATUS_SIGNAL_BASE + ending
                tools.say(f"timed out after {timeout:g} s; everything was killed")
                return STATUS_TIMEOUT
            for number in signals.take():
                if job is not None and number in JOB_SIGNALS:
                    job.handle(number, process.pid)
                    continue
                if ending:
                    return STATUS_SIGNAL_BASE + number
                ending = number
                deadline = min(deadline, time.monotonic() + _GRACE)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
    finally:
        os.close(watched)
