"""Every failure out of C, and every exception class, is an RdmaError with a hint."""

from __future__ import annotations

import asyncio
import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from aiordma import device_nodes, error_words, errors
from aiordma._ffi import ffi
from aiordma._ffi.check import check_errno, check_minus_one, check_negative, check_pointer
from aiordma.cm.address import look_up
from aiordma.errors import RdmaError, RdmaOSError, cm_error, os_error
from aiordma.memory.governor import Growth, Member
from aiordma.memory.remote import RemoteRegion
from aiordma.verbs.enums import Access

CLASSES = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RdmaError)
]
CODES = sorted(errno.errorcode)


@pytest.fixture(autouse=True)
def _no_nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The machine's own nodes have no say in the words of a test."""
    monkeypatch.setattr(device_nodes, "FOLDER", tmp_path)
    return tmp_path


def assert_told(error: BaseException) -> None:
    assert isinstance(error, RdmaError), error
    assert error.hint.strip(), error
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.hint) == (type(error), str(error), error.hint)


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_b01_every_class_has_a_hint(kind: type[RdmaError]) -> None:
    assert kind.hint.strip()
    error = kind("it failed", status=1) if issubclass(kind, errors.CompletionError) else kind("it")
    assert_told(error)


def test_b01_the_classes_that_programs_name_have_hints_of_their_own() -> None:
    named = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    inherited = {"CompletionError", "RemoteAccessError"}
    own = set(error_words.CLASS_HINTS)
    missing = {
        name
        for name in named - own
        if not issubclass(getattr(errors, name), errors.CompletionError) or name in inherited
    }
    assert missing <= inherited
    assert own <= named | {"HostNotFoundError", "RdmaPermissionError", "RdmaTimeoutError"}


# ---- what C answers ------------------------------------------------------------------------


def _pointer(code: int, verb: str) -> None:
    ffi.errno = code
    check_pointer(ffi.NULL, verb)


def _minus_one(code: int, verb: str) -> None:
    ffi.errno = code
    check_minus_one(-1, verb)


def _errno_minus_one(code: int, verb: str) -> None:
    ffi.errno = code
    check_errno(-1, verb)


CONVENTIONS: dict[str, Any] = {
    "pointer": _pointer,
    "minus one": _minus_one,
    "errno": lambda code, verb: check_errno(code, verb),
    "errno negative": lambda code, verb: check_errno(-code, verb),
    "errno minus one": _errno_minus_one,
    "negative": lambda code, verb: check_negative(-code, verb),
}
VERBS = sorted({verb for verb, _ in error_words.ERRNO_HINTS} | {"ibv_post_send", "ibv_poll_cq"})


@pytest.mark.slow
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_b01_every_errno_of_every_convention(convention: str) -> None:
    for verb in VERBS:
        for code in CODES:
            if convention == "errno negative" and code == 1:
                continue  # -1 is the other convention
            with pytest.raises(RdmaError) as caught:
                CONVENTIONS[convention](code, verb)
            error = caught.value
            assert_told(error)
            assert isinstance(error, OSError)
            assert verb in str(error)
            if convention == "negative" and verb == "ibv_poll_cq":
                assert error.errno == errno.EIO
                continue
            assert error.errno == code
            # What an `except` of the builtin caught before, it catches now.
            assert isinstance(error, type(OSError(code, "")))


EVENTS = [
    "ADDR_ERROR", "ROUTE_ERROR", "CONNECT_ERROR", "UNREACHABLE", "REJECTED", "DISCONNECTED",
    "DEVICE_REMOVAL", "MULTICAST_ERROR",
]  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
def test_b01_every_status_of_every_event(event: str) -> None:
    for status in (*range(40), *(-code for code in CODES)):
        assert_told(cm_error(event, status))


def test_b01_other_sources_of_errors() -> None:
    told = errors.queue_error("SOMETHING_NEW", "queue pair 17")
    assert told.hint
    assert errors.device_error().hint
    assert errors.completion_error(99).hint


def test_b01_what_the_library_refuses_by_itself() -> None:
    with pytest.raises(PermissionError) as denied:
        RemoteRegion(4096, 8, 1, Access.REMOTE_READ).check(0, 8, Access.REMOTE_WRITE)
    assert_told(denied.value)

    async def overfull() -> None:
        Member(Growth(4), 5)

    with pytest.raises(OSError, match="slots") as full:
        asyncio.run(overfull())
    assert_told(full.value)
    assert full.value.errno == errno.ENOBUFS


def test_b01_a_name_that_does_not_resolve() -> None:
    import socket

    class Loop(asyncio.SelectorEventLoop):
        async def getaddrinfo(self, *_: Any, **__: Any) -> Any:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with asyncio.Runner(loop_factory=Loop) as runner, pytest.raises(socket.gaierror) as caught:
        runner.run(look_up("nowhere.invalid", 1))
    assert_told(caught.value)
    assert caught.value.errno == socket.EAI_NONAME


# ---- no permission is told as no permission ------------------------------------------------


class Nodes:
    """Stand-ins for the device nodes; opening some fails."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **failing: int) -> None:
        for name in failing:
            (folder / name).touch()
        codes = {str(folder / name): code for name, code in failing.items()}
        real = os.open

        def open_(path: Any, flags: int, *rest: Any) -> int:
            if code := codes.get(str(path), 0):
                raise OSError(code, os.strerror(code), str(path))
            return real(path, flags, *rest)

        monkeypatch.setattr(os, "open", open_)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM])
@pytest.mark.parametrize("forbidden", ["rdma_cm", "uverbs0"])
def test_b02_no_permission_is_no_missing_device(
    forbidden: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Nodes(tmp_path, monkeypatch, **{"rdma_cm": 0, "uverbs0": 0, forbidden: code})
    for error in (
        os_error(errno.ENODEV, "rdma_bind_addr"),
        os_error(errno.ENODEV, "rdma_resolve_addr"),
        os_error(errno.ENOENT, "rdma_create_event_channel"),
        cm_error("ADDR_ERROR", -errno.ENODEV),
        cm_error("ADDR_ERROR", -1),  # what librdmacm makes of it
    ):
        assert isinstance(error, PermissionError), error
        assert isinstance(error, errors.RdmaPermissionError)
        assert error.errno == code
        assert str(tmp_path / forbidden) in str(error)
        assert "0666" in error.hint
        assert "modprobe" not in str(error)
        assert "rdma link" not in str(error)


def test_b02_one_of_two_devices_is_forbidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Nodes(tmp_path, monkeypatch, rdma_cm=0, uverbs0=0, uverbs1=errno.EACCES)
    error = os_error(errno.ENODEV, "rdma_bind_addr")
    assert isinstance(error, errors.DeviceNotFoundError)  # listen() passes such an address over
    assert "uverbs1" in str(error)


def test_g11_no_descriptor_is_no_missing_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Nodes(tmp_path, monkeypatch, rdma_cm=errno.EMFILE, uverbs0=errno.EMFILE)
    error = os_error(errno.ENODEV, "rdma_create_event_channel")
    assert error.errno == errno.EMFILE
    assert "ulimit -n" in error.hint


def test_b02_a_missing_device_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nodes(tmp_path, monkeypatch, rdma_cm=0, uverbs0=0)
    assert isinstance(os_error(errno.ENODEV, "rdma_bind_addr"), errors.DeviceNotFoundError)
    missing = os_error(errno.ENOENT, "rdma_create_event_channel")
    assert isinstance(missing, FileNotFoundError)
    assert isinstance(missing, RdmaOSError)
    assert "modprobe rdma_ucm" in missing.hint
