"""serve() and dump_on_signal(): snapshots for another process, such as `aiordma top`.

Theory of operation
    A thread of its own answers, so that neither an event loop waits for the reader, nor a reader
    for a loop that is blocked.  A client connects to a Unix socket, gets one snapshot as JSON, and
    then the end of the stream.  Clients are served one after another, each for a bounded time, with
    a pause in between: whatever they do, they cost a small part of a processor.

    The socket is only for its user: it has mode 0600 before it listens, in a folder of mode 0700 by
    default.  A socket that a killed process has left refuses connects, as does a socket that does
    not listen yet.  So a process holds a lock of the folder from the bind to the listen, and while
    it checks and removes an existing socket.

    A dump is a file that is replaced as a whole.  It says which signal makes the next, and when the
    process began, so that a reader does not signal a later process with the same number.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from aiordma.errors import errno_error
from aiordma.logs import log_of
from aiordma.loop import fork
from aiordma.loop.uncopied import Uncopied
from aiordma.metrics.snapshot import snapshot

__all__ = ["Service", "default_paths", "dump_on_signal", "is_owned", "serve", "start_of"]

_log = log_of()
SEND_S = 2.0  # for a reader to take all of a snapshot
_PAUSE_S = 0.05  # after each
_LOCK_S = 5.0  # for others to bind in the same folder
LISTED = 10_000  # connections, streams and endpoints in one answer; the totals count all
_BACKLOG = 8


def _folders(uid: int) -> list[Path]:
    """Where sockets and dumps of a user's processes are by default, the best first."""
    own = os.environ.get("XDG_RUNTIME_DIR") if uid == os.geteuid() else None
    found = [Path(own) / "aiordma"] if own else []
    found.append(Path(f"/run/user/{uid}/aiordma"))
    found.append(Path(tempfile.gettempdir()) / f"aiordma-{uid}")
    return list(dict.fromkeys(found))


def default_paths(pid: int, uid: int, suffix: str) -> list[Path]:
    """Where the socket (`sock`) or the dump (`json`) of a process may be."""
    return [folder / f"{pid}.{suffix}" for folder in _folders(uid)]


def is_owned(folder: Path, uid: int) -> bool:
    """Whether it is a folder (not a link) of this user to which no other user can write."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and not found.st_mode & 0o22


def _default_path(suffix: str) -> Path:
    """The default path of this process; makes the folder.

    Raises:
        OSError: No folder can be made, or another user owns it or may write to it.
    """
    for folder in _folders(os.geteuid()):
        # Another user's, as that of `sudo -E`: its owner could replace the folder in it.
        if not folder.parent.is_dir() or folder.parent.stat().st_uid not in (0, os.geteuid()):
            continue
        folder.mkdir(mode=0o700, exist_ok=True)
        if not is_owned(folder, os.geteuid()):
            text = f"{folder} is no folder to which only this user can write"
            raise errno_error(errno.EPERM, text, "remove it, or give a path")
        with _alone_in(folder):
            _forget_dead(folder)
        return folder / f"{os.getpid()}.{suffix}"
    raise errno_error(errno.ENOENT, "there is no folder for the socket", "give a path")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which leaves no file, and ends with its process.

    Raises:
        OSError: There is no such folder, or no right to it; EADDRINUSE, it is locked for long.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    text = f"another process has locked the folder {folder}"
                    raise errno_error(errno.EADDRINUSE, text, "give another path") from None
            time.sleep(0.002)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the descriptor, too, and keeps it open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _forget_dead(folder: Path) -> None:
    """Remove what killed processes have left."""
    for path in folder.iterdir():
        name = path.name.partition(".")[0]
        if name.isdecimal() and not Path(f"/proc/{name}").exists():
            with contextlib.suppress(OSError):
                path.unlink()


def start_of(pid: int) -> str:
    """When a process began, in ticks since the machine did; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def as_json(**more: Any) -> bytes:
    seen = snapshot().to_dict()
    for name in ("connections", "streams", "datagrams"):
        seen["unlisted_" + name] = max(0, len(seen[name]) - LISTED)
        seen[name] = seen[name][-LISTED:]
    return json.dumps({**seen, **more}).encode()


class Service(Uncopied):
    """Answers on a Unix socket, until `close`; made by `serve`.

    Also a context manager.

    Attributes:
        path: Where the socket is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pid = os.getpid()
        self._closed = threading.Event()
        self._socket = _listening(path)
        self._inode = path.lstat().st_ino
        _services.add(self)
        self._thread = threading.Thread(target=self._run, name="aiordma-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._socket.accept()
            except OSError as exc:
                if not self._closed.wait(_PAUSE_S):
                    _log.debug("metrics: %s", exc)
                continue
            with client:
                try:
                    client.settimeout(SEND_S)
                    client.sendall(as_json())
                    # A child that was forked meanwhile has the client, too, and keeps it open.
                    client.shutdown(socket.SHUT_WR)
                except OSError as exc:
                    _log.debug("metrics: a reader has gone: %s", exc)
                except Exception as exc:
                    _log.error("metrics: no snapshot", exc_info=exc)
            self._closed.wait(_PAUSE_S)

    def close(self) -> None:
        """Answer no more, and remove the socket.  Idempotent; waits for a reader at most 3 s."""
        if self._closed.is_set() or self._pid != os.getpid():
            return
        self._closed.set()
        _services.discard(self)
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:  # else another process serves there
                self.path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # ends the accept
        if threading.current_thread() is not self._thread:
            self._thread.join(SEND_S + 1)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed.is_set() else "open"
        return f"<Service {state} {str(self.path)!r}>"


_services: set[Service] = set()


def _close_all() -> None:
    for each in list(_services):
        each.close()


def _close_inherited() -> None:
    """In a forked child: its readers would wait for the parent's thread."""
    for each in _services:
        each._socket.close()
    _services.clear()


atexit.register(_close_all)
fork.renew(_close_inherited)


def _listening(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _alone_in(path.parent):
            try:
                made.bind(os.fspath(path))
            except OSError as exc:
                if exc.errno != errno.EADDRINUSE:
                    raise
                _remove_dead(path)
                made.bind(os.fspath(path))
            os.chmod(path, 0o600)  # no connect is possible before `listen`
            made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def _remove_dead(path: Path) -> None:
    """Remove the socket of a process that has ended.

    Raises:
        OSError: EADDRINUSE, a process listens there; EEXIST, it is no socket.
    """
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise errno_error(errno.EEXIST, f"{path} exists, and is no socket", "give another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError:
            pass  # a full line: it lives
    raise errno_error(errno.EADDRINUSE, f"a process already serves {path}", "give another path")


def serve(path: str | os.PathLike[str] | None = None) -> Service:
    """Answer each connection to a Unix socket with a snapshot as JSON; for `aiordma top`.

    A thread answers, so that no event loop waits.  Readers are served one after the other, at most
    20 in a second, each for at most 2 seconds.  The socket has mode 0600, and is removed at the end
    of the process.

    Args:
        path: Where to make it; by default `aiordma/PID.sock` in `$XDG_RUNTIME_DIR`, or, where that
            is not set, in `/run/user/UID` or a folder of this user in `/tmp`.  `aiordma top PID`
            finds it there.  A socket that a killed process has left there is replaced.

    Returns:
        The service, to be closed; it is closed at the end of the process, too.

    Raises:
        TypeError: `path` is no path.
        OSError: EADDRINUSE, another process serves there; EEXIST, the path is no socket; or there
            is no such folder, or no right to it, or the path is too long for a socket.
    """
    return Service(_default_path("sock") if path is None else Path(path))


class _Dumps:
    """Writes the dump of a signal, in a thread: the handler may have interrupted anything."""

    def __init__(self, number: signal.Signals, path: Path) -> None:
        self._number = number
        self._path = path
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._write()
        fork.renew(self._renew)

    def _renew(self) -> None:
        self._thread = None  # a forked child writes no dump: the file is its parent's
        self._asked = threading.Event()

    def __call__(self, *_: object) -> None:
        if self._thread is None and os.getpid() == self._pid:
            self._thread = threading.Thread(target=self._run, name="aiordma-dump", daemon=True)
            self._thread.start()
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            try:
                self._write()
            except Exception as exc:
                _log.error("metrics: no dump", exc_info=exc)
            time.sleep(_PAUSE_S)

    def _write(self) -> None:
        self._pid = os.getpid()
        dump = {"signal": int(self._number), "began": start_of(self._pid)}
        descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(as_json(dump=dump))
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    def remove(self) -> None:
        """Remove the file, at the end of the process."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._path.unlink()


def dump_on_signal(
    number: signal.Signals = signal.SIGUSR1, path: str | os.PathLike[str] | None = None
) -> Path:
    """Write a snapshot as JSON into a file, now and at each signal; for `aiordma top`.

    The handler only wakes a thread.  The file has mode 0600, is replaced as a whole, and is removed
    at the end of the process.

    Args:
        number: The signal; its handler is replaced.
        path: The file; by default `aiordma/PID.json` in the folder that `serve` uses.

    Returns:
        The path of the file.

    Raises:
        TypeError: `number` is no signal, or `path` no path.
        ValueError: This is not the main thread, or the signal cannot be handled.
        OSError: The file cannot be written.
    """
    number = signal.Signals(number)
    where = _default_path("json") if path is None else Path(path).absolute()
    if threading.current_thread() is not threading.main_thread():
        msg = "signals are handled in the main thread: call dump_on_signal there"
        raise ValueError(msg)
    if number in (signal.SIGKILL, signal.SIGSTOP):
        msg = f"{number.name} cannot be handled"
        raise ValueError(msg)
    dumps = _Dumps(number, where)
    signal.signal(number, dumps)
    atexit.register(dumps.remove)
    return where
