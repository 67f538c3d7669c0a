"""Files of a folder, none of which is outside of it; and files that appear only when complete.

A name is walked part by part from the folder's descriptor, and no symbolic link is followed: the
file that was checked is the file that is opened, so that a program that changes the folder
meanwhile cannot lead out of it.

Every call may block and is for a thread.  Making a `Source` or an `Incoming` does nothing yet, so
its owner can always give back its resources, even if canceled while it is being opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from aiordma.cli.transfer.names import split_name

__all__ = ["Folder", "Incoming", "Source", "local_incoming", "local_source"]

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK the opening of a pipe waits for its other end.
_SOURCE_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PREFIX, _SUFFIX = ".aiordma-", ".part"


class Source:
    """A file that is read."""

    def __init__(self, name: str, opener: Callable[[], int]) -> None:
        self._name = name
        self._opener = opener
        self._fd = -1

    def open(self) -> int:
        """Open the file and return its size in bytes.

        Raises:
            OSError: There is no such file, it may not be read, or it is no regular file.
        """
        self._fd = self._opener()
        found = os.fstat(self._fd)
        if stat.S_ISDIR(found.st_mode):
            raise _error(errno.EISDIR, self._name)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", self._name)
        return found.st_size

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes into `buffer`; return how many, 0 at the end of the file.

        Raises:
            OSError: The disk fails.
        """
        return os.readv(self._fd, [buffer])

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class Incoming:
    """A file that is written under another name, in the folder where it will be.

    `commit()` renames it, over a file that has the name already; `discard()` without that removes
    it.  After a crash only the other name is left, `.aiordma-*.part`.
    """

    def __init__(self, name: str, open_parent: Callable[[], int]) -> None:
        self._name = name
        self._open_parent = open_parent
        self._parent = -1
        self._fd = -1
        self._other_name = ""

    def open(self) -> None:
        """Make the file.

        Raises:
            OSError: It cannot be made, or the name is a folder's (EISDIR).
        """
        self._parent = self._open_parent()
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(self._name, dir_fd=self._parent, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode):
                raise _error(errno.EISDIR, self._name)
        other_name = f"{_PREFIX}{secrets.token_hex(8)}{_SUFFIX}"
        self._fd = os.open(other_name, _NEW_FLAGS, 0o666, dir_fd=self._parent)
        self._other_name = other_name

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`.

        Raises:
            OSError: The disk is full, or fails.
        """
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def commit(self) -> None:
        """Give the file its name.

        Raises:
            OSError: Its last bytes cannot be written, or it cannot be renamed.
        """
        # Some file systems report a full disk only here.
        fd, self._fd = self._fd, -1
        os.close(fd)
        os.rename(self._other_name, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        self._other_name = ""

    def discard(self) -> None:
        """Close everything, and remove the file unless it has its name."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)
        if self._other_name:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._other_name, dir_fd=self._parent)
            self._other_name = ""
        if self._parent >= 0:
            fd, self._parent = self._parent, -1
            os.close(fd)


class Folder:
    """A folder whose files are offered."""

    def __init__(self, path: Path) -> None:
        """Open the folder; links that lead to it are followed.

        Raises:
            OSError: There is no such folder, or it may not be read.
        """
        self._fd = os.open(path, _FOLDER_FLAGS)

    def close(self) -> None:
        """Close the folder's descriptor; files that were opened in it stay open."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def source(self, name: str) -> Source:
        """A file of the folder, to read.

        Raises:
            ValueError: The name is not that of a file in a folder.
        """
        parts = split_name(name)

        def open_() -> int:
            parent = self._parent(parts)
            try:
                return os.open(parts[-1], _SOURCE_FLAGS | os.O_NOFOLLOW, dir_fd=parent)
            finally:
                os.close(parent)

        return Source(name, open_)

    def incoming(self, name: str) -> Incoming:
        """A file in the folder, new or replacing another.

        Raises:
            ValueError: The name is not that of a file in a folder.
        """
        parts = split_name(name)
        return Incoming(parts[-1], lambda: self._parent(parts))

    def _parent(self, parts: list[str]) -> int:
        """Descriptor of the folder in which the last part is."""
        fd = os.dup(self._fd)
        for part in parts[:-1]:
            try:
                inner = os.open(part, _FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
        return fd


def local_source(path: Path) -> Source:
    """A file of this machine, to read; links are followed."""
    return Source(str(path), lambda: os.open(path, _SOURCE_FLAGS))


def local_incoming(path: Path) -> Incoming:
    """A file of this machine, new or replacing another."""
    return Incoming(path.name, lambda: os.open(path.parent, _FOLDER_FLAGS))


def _error(code: int, name: str) -> OSError:
    return OSError(code, os.strerror(code), name)
