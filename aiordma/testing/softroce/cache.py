"""Kernels that have been built or unpacked, kept for the next run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import tools
from .errors import InfrastructureError

#: Seconds to wait for another process that is building the same thing.
_LOCK_SECONDS = 3 * 3600.0
_LOCK_POLL_SECONDS = 0.2


def root() -> Path:
    """Return the cache folder: AIORDMA_SOFTROCE_CACHE, or a place in the user's own cache."""
    chosen = os.environ.get("AIORDMA_SOFTROCE_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The standard tells to ignore a relative path.
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "aiordma" / "softroce"


def digest(*parts: str | bytes | int) -> str:
    """Return a short hash of what a result depends on."""
    whole = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        whole.update(f"{len(data)}:".encode() + data)
    return whole.hexdigest()[:12]


@dataclass(frozen=True)
class Workshop:
    """Where a result is made.

    Attributes:
        scratch: a folder that is removed afterwards, whatever happens.
        result: a folder in it, to be filled; it becomes the entry.
        log: a file that stays.
    """

    scratch: Path
    result: Path
    log: Path


def log_file(kind: str) -> Path:
    """Return the log of what makes entries of `kind`; the folder is there afterwards.

    Raises:
        InfrastructureError: the folder cannot be made.
    """
    return _folder() / f"{kind}.log"


def find(kind: str, key: str) -> Path | None:
    """Return the entry made last of those for `kind` and `key`, or None."""
    try:
        entries = [path for path in root().iterdir() if _is_entry(path.name, kind, key)]
        return max(entries, key=lambda path: path.stat().st_mtime, default=None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfrastructureError(_unusable(error)) from None


def obtain(
    kind: str, key: str, needed: int, build: Callable[[Workshop], str], *, what: str
) -> Path:
    """Return the entry for `kind` and `key`, and have it built if there is none.

    An entry is a folder called ``<kind>-<version>-<key>``. The version is not asked for when there
    is an entry, so that a run needs no look-up and a new package does not make a build: who wants
    the newest removes the folder. Building happens once, however many processes want it, and an
    entry is there either whole or not at all.

    Args:
        kind: such as ``uml``; has no dash.
        key: from `digest`.
        needed: bytes of free space that a build takes.
        build: fills the result and returns its version.
        what: for the user, as in "the kernel of the uml engine".

    Raises:
        InfrastructureError: the folder cannot be written to, there is no room, or `build` failed.
    """
    found = find(kind, key)
    if found is not None:
        return found
    folder = _folder()
    with _locked(folder / f"{kind}.lock", what):
        # Somebody else may have built it while this process waited.
        found = find(kind, key)
        if found is not None:
            return found
        for left in folder.glob(f".{kind}-*"):
            # Nobody else is building, so this is what a killed process left behind.
            shutil.rmtree(left, ignore_errors=True)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise InfrastructureError(
                f"{what} needs {needed >> 20} MB of free space in {folder} to be built, and there "
                f"are {free >> 20} MB: free some, or set AIORDMA_SOFTROCE_CACHE to another folder"
            )
        return _build(folder, kind, key, build)


def _build(folder: Path, kind: str, key: str, build: Callable[[Workshop], str]) -> Path:
    log = folder / f"{kind}.log"
    log.write_bytes(b"")
    scratch = Path(tempfile.mkdtemp(prefix=f".{kind}-", dir=folder))
    try:
        result = scratch / "result"
        result.mkdir()
        version = build(Workshop(scratch, result, log))
        entry = folder / f"{kind}-{version.replace('/', '_')}-{key}"
        # After this other users may read it, if they may read the cache.
        result.chmod(0o755)
        result.rename(entry)
        return entry
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_entry(name: str, kind: str, key: str) -> bool:
    return name.startswith(f"{kind}-") and name.endswith(f"-{key}")


def _folder() -> Path:
    folder = root()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InfrastructureError(_unusable(error)) from None
    return folder


def _unusable(error: OSError) -> str:
    return (
        f"the cache folder {root()} cannot be used ({error.strerror}): set AIORDMA_SOFTROCE_CACHE "
        "to a folder that you may write to"
    )


@contextlib.contextmanager
def _locked(path: Path, what: str) -> Iterator[None]:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise InfrastructureError(_unusable(error)) from None
    try:
        deadline = time.monotonic() + _LOCK_SECONDS
        told = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    tools.say(f"another process is making {what}; waiting for it")
                    told = True
            if time.monotonic() > deadline:
                raise InfrastructureError(
                    f"another process has been making {what} for too long; its lock is {path}"
                )
            # A lock that is waited for in the kernel could not be given up after a time.
            time.sleep(_LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)
