"""`aiordma doctor`: the parts of RDMA that are here or missing, each with a remedy."""

from __future__ import annotations

from collections.abc import Callable

from aiordma.cli import checks_device, checks_system
from aiordma.cli.bounded import call_bounded
from aiordma.cli.finding import Finding, Status, fail
from aiordma.cli.output import print_json, print_line

__all__ = ["CHECKS", "examine", "run"]

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
_STYLES = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def run(*, as_json: bool) -> int:
    """Run all checks and print what they saw.

    Returns:
        1 if a check failed, else 0; warnings do not count.
    """
    findings = {name: examine(check) for name, check in CHECKS.items()}
    failed = sum(finding.status is Status.FAIL for finding in findings.values())
    warned = sum(finding.status is Status.WARN for finding in findings.values())
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
    for name, finding in findings.items():
        status = (f"{finding.status.value:4}  ", _STYLES[finding.status])
        print_line(status, (f"{name:20}", "bold"), (finding.seen, ""))
        if finding.advice:
            print_line((f"{'':6}-> {finding.advice}", "cyan"))
    verdict = "RDMA cannot be used like this" if failed else "RDMA can be used"
    print_line((f"{verdict}: {failed} failed, {warned} warnings", "bold"))
    return 1 if failed else 0


def examine(check: Callable[[], Finding]) -> Finding:
    """Run one check; if the check hangs or raises, the finding is a failure with the cause."""
    try:
        return call_bounded(check)
    except TimeoutError as exc:
        return fail(str(exc), "a driver or a library hangs: look into `dmesg`")
    except Exception as exc:
        return fail(f"the check itself failed: {type(exc).__name__}: {exc}", "please report this")
