"""The folder that `aiordma serve` offers: nobody gets out of it, and no file is half there."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiordma.cli.transfer.folder import Folder, Incoming, Source, local_incoming, local_source


@pytest.fixture
def served(tmp_path: Path) -> Path:
    path = tmp_path / "served"
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "file").write_bytes(b"inside")
    (tmp_path / "outside").write_bytes(b"secret")
    return path


@pytest.fixture
def folder(served: Path) -> Iterator[Folder]:
    before = os.listdir("/proc/self/fd")
    folder = Folder(served)
    yield folder
    folder.close()
    assert os.listdir("/proc/self/fd") == before


def contents(source: Source) -> bytes:
    try:
        size = source.open()
        data = bytearray(size + 1)
        assert source.readinto(memoryview(data)) == size
        return bytes(data[:size])
    finally:
        source.close()


def write(incoming: Incoming, data: bytes, *, commit: bool = True) -> None:
    try:
        incoming.open()
        incoming.write(data)
        if commit:
            incoming.commit()
    finally:
        incoming.discard()


def test_a_file_is_read(folder: Folder) -> None:
    assert contents(folder.source("inner/file")) == b"inside"


def test_a_file_appears_whole(folder: Folder, served: Path) -> None:
    incoming = folder.incoming("inner/new")
    incoming.open()
    incoming.write(b"12")
    assert not (served / "inner" / "new").exists()
    incoming.write(b"34")
    incoming.commit()
    incoming.discard()
    assert (served / "inner" / "new").read_bytes() == b"1234"
    assert sorted(os.listdir(served / "inner")) == ["file", "new"]


def test_a_file_that_is_discarded_leaves_nothing(folder: Folder, served: Path) -> None:
    write(folder.incoming("inner/file"), b"half", commit=False)
    assert os.listdir(served / "inner") == ["file"]
    assert (served / "inner" / "file").read_bytes() == b"inside"


def test_a_file_takes_the_place_of_another(folder: Folder, served: Path) -> None:
    write(folder.incoming("inner/file"), b"other")
    assert (served / "inner" / "file").read_bytes() == b"other"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "inner/../../outside", ""])
def test_names_that_lead_out_are_no_names(folder: Folder, name: str) -> None:
    with pytest.raises(ValueError, match=r"name|part|absolute"):
        folder.source(name)
    with pytest.raises(ValueError, match=r"name|part|absolute"):
        folder.incoming(name)


def test_a_link_is_not_read(folder: Folder, served: Path) -> None:
    (served / "link").symlink_to("../outside")
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        contents(folder.source("link"))


def test_a_link_to_a_folder_is_not_followed(folder: Folder, served: Path) -> None:
    (served / "up").symlink_to("..")
    with pytest.raises(OSError, match=os.strerror(errno.ENOTDIR)):
        contents(folder.source("up/outside"))
    with pytest.raises(OSError, match=os.strerror(errno.ENOTDIR)):
        write(folder.incoming("up/new"), b"x")
    assert sorted(os.listdir(served.parent)) == ["outside", "served"]


def test_a_link_is_replaced_and_not_written_through(folder: Folder, served: Path) -> None:
    (served / "link").symlink_to("../outside")
    write(folder.incoming("link"), b"new")
    assert (served.parent / "outside").read_bytes() == b"secret"
    assert not (served / "link").is_symlink()
    assert (served / "link").read_bytes() == b"new"


def test_a_folder_is_neither_read_nor_replaced(folder: Folder) -> None:
    with pytest.raises(IsADirectoryError):
        contents(folder.source("inner"))
    with pytest.raises(IsADirectoryError):
        write(folder.incoming("inner"), b"x")


def test_what_is_no_file_is_not_read(folder: Folder, served: Path) -> None:
    os.mkfifo(served / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        contents(folder.source("pipe"))


def test_missing_files_and_folders(folder: Folder) -> None:
    for name in ("none", "none/none", "inner/none"):
        with pytest.raises(FileNotFoundError):
            contents(folder.source(name))
    with pytest.raises(FileNotFoundError):
        write(folder.incoming("none/new"), b"x")


def test_local_files(tmp_path: Path) -> None:
    write(local_incoming(tmp_path / "x"), b"data")
    (tmp_path / "link").symlink_to("x")
    assert contents(local_source(tmp_path / "link")) == b"data"


def test_a_folder_that_is_moved_away_meanwhile(folder: Folder, served: Path) -> None:
    incoming = folder.incoming("inner/new")
    incoming.open()
    (served / "inner").rename(served / "moved")
    (served / "inner").symlink_to("../..")
    incoming.write(b"x")
    incoming.commit()
    incoming.discard()
    assert (served / "moved" / "new").read_bytes() == b"x"
