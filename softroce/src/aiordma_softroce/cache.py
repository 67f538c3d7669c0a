"""Kernels that have been built or unpacked, kept for the next run.

They are programs that run with the rights of this user.  So an entry is used only if it, and the
folder that it lies in, belong to this user or to root, no other user may write to it, and its files
have the hashes that they had when they were made.  Nor may another user put something else in the
place of one of the folders above: they belong to this user or to root, too, and where others may
write, as in /tmp, the sticky bit keeps what is there.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import hashlib
import os
import pwd
import shutil
import stat
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
_HASHES = ".sha256"


def root() -> Path:
    """Return the cache folder: AIORDMA_SOFTROCE_CACHE, or a place in the user's own cache."""
    chosen = os.environ.get("AIORDMA_SOFTROCE_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    # The XDG standard: a relative path is ignored.
    folder = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return folder / "aiordma" / "softroce"


def nearest() -> Path:
    """Return the cache folder, or the nearest folder above it that there is."""
    folder = root()
    while not folder.exists():
        folder = folder.parent
    return folder


def digest(*parts: str | bytes | int) -> str:
    """Return a short hash of the values that a result depends on."""
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
    """Return the log of the programs that make entries of `kind`; the folder is there afterwards.

    Raises:
        InfrastructureError: the folder cannot be made.
    """
    return _folder() / f"{kind}.log"


def find(kind: str, key: str) -> Path | None:
    """Return the entry made last of those for `kind` and `key`, or None.

    Raises:
        InfrastructureError: the folder cannot be read, or its files are not to be trusted.
    """
    try:
        entries = [path for path in root().iterdir() if _is_entry(path.name, kind, key)]
        found = max(entries, key=lambda path: path.lstat().st_mtime, default=None)
        if found is not None:
            _require_private_folder(root())
            _verify(found)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InfrastructureError(_unusable(error)) from None
    return found


def obtain(
    kind: str, key: str, needed: int, build: Callable[[Workshop], str], *, what: str
) -> Path:
    """Return the entry for `kind` and `key`, and have it built if there is none.

    An entry is a folder called ``<kind>-<version>-<key>``. The version is not asked for when there
    is an entry, so that a run needs no look-up and a new package does not make a build: to have the
    newest, remove the folder. Building happens once, however many processes want it, and an entry
    is there either whole or not at all.

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
        # Another process may have built it while this process waited.
        found = find(kind, key)
        if found is not None:
            return found
        for left in folder.glob(f".{kind}-*"):
            # No other process is building, so that a killed process has left this behind.
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
        for path in result.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & ~0o022)
        _write_hashes(result)
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
        # Not mkdir(parents=True), whose parents are as open as the umask says.
        for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            path.mkdir(mode=0o700, exist_ok=True)
        _require_private_folder(folder)
        found = folder.stat()
        chosen = "AIORDMA_SOFTROCE_CACHE" in os.environ
        if not chosen and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            folder.chmod(0o700)  # made by a version that left it readable
    except OSError as error:
        raise InfrastructureError(_unusable(error)) from None
    return folder


def _require_private_folder(folder: Path) -> None:
    """Refuse a folder that another user has made, or may change or replace.

    Raises:
        InfrastructureError: with the remedy.
    """
    _require_private(folder)
    # The folders above it by name, in which links may lie, and those that the links lead to.
    above = {*folder.parents, folder.resolve(), *folder.resolve().parents}
    for path in sorted(above - {folder}):
        found = path.lstat()
        if found.st_uid not in (0, os.geteuid()):
            why = f"belongs to another user, of ID {found.st_uid}"
        elif _others_may_replace(found):
            mode = f"{stat.S_IMODE(found.st_mode):04o}"
            why = f"may be written to by others (its mode is {mode}, without the sticky bit)"
        else:
            continue
        raise InfrastructureError(
            f"{path} {why}, who could replace {folder}, from where kernels are run: change "
            "that, or set AIORDMA_SOFTROCE_CACHE to a folder of your own"
        )


def _others_may_replace(found: os.stat_result) -> bool:
    """Whether other users may rename an entry of a folder, and put another in its place."""
    mode = found.st_mode
    if stat.S_ISLNK(mode) or mode & stat.S_ISVTX:
        return False
    if mode & 0o002:
        return True
    return bool(mode & 0o020) and not _is_own_group(found.st_gid)


def _is_own_group(gid: int) -> bool:
    """Whether the group is that of this user, or of root, and has no other member."""
    try:
        user = pwd.getpwuid(os.geteuid())
        members = grp.getgrgid(gid).gr_mem
    except KeyError:
        return False
    return gid in (0, user.pw_gid) and set(members) <= {user.pw_name, "root"}


def _require_private(path: Path) -> None:
    """Refuse a path that another user has made, or may change; links are not followed.

    Raises:
        InfrastructureError: with the remedy.
    """
    found = path.lstat()
    if found.st_uid not in (0, os.geteuid()):
        why = f"belongs to another user, of ID {found.st_uid}"
    elif found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode):
        why = f"may be written to by others (its mode is {stat.S_IMODE(found.st_mode):04o})"
    else:
        return
    raise InfrastructureError(
        f"{path} {why}, and kernels are run from there: remove it, or set AIORDMA_SOFTROCE_CACHE "
        "to a folder of your own"
    )


def _verify(entry: Path) -> None:
    """Refuse an entry that another user has made or may change, or that has changed.

    Raises:
        InfrastructureError: with the remedy.
    """
    _require_private(entry)
    for path in entry.rglob("*"):
        _require_private(path)
    hashes = entry / _HASHES
    if not hashes.exists():
        # An entry of a version without hashes; its owner is this user, or root.
        with contextlib.suppress(PermissionError):
            _write_hashes(entry)
        return
    if hashes.read_text() != _hashes_of(entry):
        raise InfrastructureError(
            f"{entry} has changed since it was made: remove it, and it is made again"
        )


def _write_hashes(entry: Path) -> None:
    text = _hashes_of(entry)
    # Whole or not at all: another process may look at the entry.
    other = entry.parent / f".hashes-{os.getpid()}"
    other.write_text(text)
    other.chmod(0o644)
    other.rename(entry / _HASHES)


def _hashes_of(entry: Path) -> str:
    """A line for each file and link, as sha256sum has them."""
    lines = []
    for path in sorted(entry.rglob("*")):
        name = path.relative_to(entry)
        if path.is_symlink():
            lines.append(f"-> {os.readlink(path)}  {name}")
        elif path.is_file() and name != Path(_HASHES):
            with path.open("rb") as file:
                lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}")
    return "\n".join(lines) + "\n"


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
