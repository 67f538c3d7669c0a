"""`aiordma doctor`: the parts of RDMA that are here or missing, each with a remedy.

With a peer, the way to it as well: peer.py.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiordma.cli import checks_device, checks_system
from aiordma.cli.bounded import call_bounded
from aiordma.cli.finding import Finding, Status, fail, skip
from aiordma.cli.output import print_json, print_line
from aiordma.cli.ports import DEFAULT_PORT

if TYPE_CHECKING:
    from aiordma.endpoint.keys import Keys

__all__ = ["CHECKS", "LIMIT_S", "examine", "run"]

LIMIT_S = 10.0

#: In the order in which one thing needs another.
CHECKS: dict[str, Callable[[], Finding]] = {
    "Python": checks_system.python,
    "rdma-core libraries": checks_system.libraries,
    "compiled module": checks_system.compiled_module,
    "kernel devices": checks_device.kernel_devices,
    "providers": checks_device.providers,
    "device nodes": checks_device.nodes,
    "connection manager": checks_device.connection_manager,
    "ports": checks_device.ports,
    "GIDs": checks_device.gids,
    "locked memory": checks_system.locked_memory,
    "fork variables": checks_system.fork_variables,
    "open files": checks_system.open_files,
}
_STYLES = {
    Status.OK: "green",
    Status.WARN: "yellow",
    Status.FAIL: "bold red",
    Status.SKIP: "dim",
}


def run(
    *,
    as_json: bool,
    peer: str | None = None,
    port: int = DEFAULT_PORT,
    source: str | None = None,
    limit_s: float = LIMIT_S,
    keys: Keys | None = None,
) -> int:
    """Run all checks and print what they saw, each as soon as it is known.

    Args:
        as_json: Print all of it at the end, for programs.
        peer: Name or address of a machine to which the way is checked, too; None for none.
        port: Its port.
        source: Local address to connect from; None lets routing choose.
        limit_s: Seconds for each step on the wire.
        keys: The key to prove; None for a peer without keys.

    Returns:
        1 if a check failed, else 0; warnings and skipped checks do not count.
    """
    findings: dict[str, Finding] = {}

    def told(name: str, finding: Finding) -> None:
        findings[name] = finding
        if not as_json:
            _print(name, finding)

    for name, check in CHECKS.items():
        told(name, examine(check))
    if peer is not None and _count(findings, Status.FAIL):
        told("peer", skip(f"{peer}; this machine comes first"))
    elif peer is not None:
        # It needs RDMA.
        from aiordma.cli.peer import Scene, examine_peer

        asyncio.run(examine_peer(Scene(peer, port, limit_s, source, keys), told))
    failed, warned, skipped = (
        _count(findings, status) for status in (Status.FAIL, Status.WARN, Status.SKIP)
    )
    if as_json:
        checks = [
            {
                "name": name,
                "status": finding.status.value,
                "seen": finding.seen,
                "advice": finding.advice,
            }
            for name, finding in findings.items()
        ]
        print_json({"ok": not failed, "checks": checks})
        return 1 if failed else 0
    way = "" if peer is None else f" with {peer}"
    verdict = f"RDMA{way} cannot be used like this" if failed else f"RDMA{way} can be used"
    rest = f", {skipped} not checked" if skipped else ""
    print_line((f"{verdict}: {failed} failed, {warned} warnings{rest}", "bold"))
    return 1 if failed else 0


def _count(findings: dict[str, Finding], status: Status) -> int:
    return sum(finding.status is status for finding in findings.values())


def _print(name: str, finding: Finding) -> None:
    status = (f"{finding.status.value:4}  ", _STYLES[finding.status])
    print_line(status, (f"{name:20}", "bold"), (finding.seen, ""))
    if finding.advice:
        print_line((f"{'':6}-> {finding.advice}", "cyan"))
    sys.stdout.flush()


def examine(check: Callable[[], Finding]) -> Finding:
    """Run one check; if the check hangs or raises, the finding is a failure with the cause."""
    try:
        return call_bounded(check)
    except TimeoutError as exc:
        return fail(str(exc), "a driver or a library hangs: look into `dmesg`")
    except Exception as exc:
        return fail(f"the check itself failed: {type(exc).__name__}: {exc}", "please report this")
