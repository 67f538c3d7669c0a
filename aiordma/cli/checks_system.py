"""Checks of the software and of the process's limits; none needs a device."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from aiordma._ffi import load_error
from aiordma.cli.finding import Finding, fail, ok, warn
from aiordma.cli.version import aiordma_version
from aiordma.endpoint.config import DEFAULTS, plan_of
from aiordma.memory.memlock import may_lock

__all__ = [
    "compiled_module",
    "fork_variables",
    "libraries",
    "locked_memory",
    "open_files",
    "python",
]

PROC = Path("/proc/self")
_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1")
_INSTALL = (
    "install rdma-core's libraries: Debian/Ubuntu: apt install libibverbs1 librdmacm1 "
    "ibverbs-providers; Fedora/RHEL: dnf install libibverbs librdmacm"
)
_OLDEST_RDMA_CORE = 39
_FEW_CONNECTIONS = 32
_RAISE_MEMLOCK = (
    "memlock in /etc/security/limits.d and a new login, LimitMEMLOCK=infinity in a systemd unit, "
    "--ulimit memlock=-1 for a container"
)
_NEED_LESS = (
    "or make connections that need less: slot_size, send_depth, recv_depth and shared_slots of "
    "ConnectionConfig"
)
#: From here on the kernel copies pinned memory for a child by itself.
_FORK_SAFE_KERNEL = (5, 12)
_FEW_FILES = 1024


def python() -> Finding:
    """Which Python runs, and which aiordma."""
    seen = (
        f"aiordma {aiordma_version()}, {platform.python_implementation()} "
        f"{platform.python_version()} at {sys.executable}, {platform.system()} {platform.release()}"
    )
    if sys.platform != "linux":
        return fail(f"{seen}: {sys.platform}", "RDMA's interfaces exist on Linux only")
    return ok(seen)


def compiled_module() -> Finding:
    """Whether the module that binds rdma-core can be loaded."""
    error = load_error()
    if error is None:
        return ok("loaded")
    # The text is made for programs; here the cause and the remedy have places of their own.
    cause = str(error.__cause__ or error)
    remedy = str(error).partition(f"{cause}. ")[2].partition(" To see what else")[0]
    return fail(cause, remedy or _INSTALL)


def libraries() -> Finding:
    """Whether rdma-core's libraries are installed, and which version."""
    missing, seen, versions = [], [], []
    for name in _LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as exc:
            missing.append(str(exc))
            continue
        path = _mapped(name)
        seen.append(path or name)
        # libibverbs.so.1.14.44.0: interface 1.14, rdma-core 44.0.
        if numbers := re.search(r"\.so\.\d+\.\d+\.(\d+)\.(\d+)$", path):
            versions.append((int(numbers[1]), int(numbers[2])))
    if missing:
        return fail("; ".join(missing), _INSTALL)
    text = ", ".join(seen)
    if not versions:
        return ok(f"{text} (version unknown)")
    major, minor = min(versions)
    text = f"rdma-core {major}.{minor}: {text}"
    if major < _OLDEST_RDMA_CORE:
        return warn(text, f"aiordma is made for rdma-core {_OLDEST_RDMA_CORE} and later: update it")
    return ok(text)


def _mapped(soname: str) -> str:
    """The file that a loaded library comes from, links followed."""
    for line in (PROC / "maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith(soname):
            return os.path.realpath(f"/{path}")
    return ""


def locked_memory() -> Finding:
    """Whether memory can be registered: it is pinned, and that is limited."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    seen = f"RLIMIT_MEMLOCK is {_size(soft)}{_can_be_raised(soft, hard, _size)}"
    if soft == resource.RLIM_INFINITY:
        return ok("RLIMIT_MEMLOCK is unlimited")
    if may_lock():
        return ok(f"{seen}, but this process has CAP_IPC_LOCK and is not limited")
    each = plan_of(DEFAULTS).pinned
    fit = soft // each
    if not fit:
        return fail(
            f"{seen}: a connection with default settings needs {_size(each)}",
            _to_raise(soft, hard),
        )
    verdict = warn if fit < _FEW_CONNECTIONS else ok
    number = f"{fit} connections" if fit > 1 else "one connection"
    text = f"{seen}: room for {number} with default settings, {_size(each)} each"
    if verdict is warn:
        text += "; large messages, reads and writes need more"
    return verdict(text, _to_raise(soft, hard) if verdict is warn else "")


def _to_raise(soft: int, hard: int) -> str:
    """The ways to a higher limit; without privileges the hard limit is the most."""
    ways = [_RAISE_MEMLOCK]
    if hard == resource.RLIM_INFINITY:
        ways.insert(0, "`ulimit -l unlimited` in this shell")
    elif hard > soft:
        ways.insert(0, f"`ulimit -l {hard // 1024}` in this shell")
    return f"raise it: {', '.join(ways)}; {_NEED_LESS}"


def _can_be_raised(soft: int, hard: int, words: Callable[[int], str]) -> str:
    return f" (can be raised to {words(hard)})" if hard != soft else ""


def _size(number: int) -> str:
    if number == resource.RLIM_INFINITY:
        return "unlimited"
    large = number >= 1 << 20
    return f"{number / (1 << 20):.4g} MiB" if large else f"{number / 1024:.4g} KiB"


def fork_variables() -> Finding:
    """Whether the environment makes libibverbs hide registered memory from children."""
    found = [name for name in ("RDMAV_FORK_SAFE", "IBV_FORK_SAFE") if name in os.environ]
    if not found:
        return ok("RDMAV_FORK_SAFE and IBV_FORK_SAFE are not set")
    if _kernel() < _FORK_SAFE_KERNEL:
        return ok(f"{' and '.join(found)} set, which Linux {platform.release()} needs for forks")
    return warn(
        f"{' and '.join(found)} set",
        "unset it: kernels since 5.12 need no help, and it takes the pages of registered buffers "
        "away from forked children, such as those of multiprocessing",
    )


def _kernel() -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(numbers[1]), int(numbers[2])) if numbers else _FORK_SAFE_KERNEL


def open_files() -> Finding:
    """Whether there is room for many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = f"{_count(soft)}{_can_be_raised(soft, hard, _count)}"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        if hard == resource.RLIM_INFINITY or hard >= _FEW_FILES:
            return warn(seen, f"raise it for servers: `ulimit -n {_FEW_FILES}` or more")
        return warn(seen, "raise it for servers: nofile in /etc/security/limits.d and a new login")
    return ok(seen)


def _count(number: int) -> str:
    return "unlimited" if number == resource.RLIM_INFINITY else str(number)
