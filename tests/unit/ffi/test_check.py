"""The four checkers, and that the package uses the right one for each C call."""

from __future__ import annotations

import ast
import errno
import tomllib
from pathlib import Path

import pytest

from aiordma import _ffi
from aiordma._ffi import check, newer
from aiordma._ffi.check import check_errno, check_minus_one, check_negative, check_pointer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
OPERATIONS: dict[str, list[str]] = tomllib.loads(
    (Path(__file__).parent / "operations.toml").read_text()
)


class FakeFFI:
    """As much of `ffi` as the checkers use."""

    errno = 0


@pytest.fixture
def fake_ffi(monkeypatch: pytest.MonkeyPatch) -> FakeFFI:
    fake = FakeFFI()
    monkeypatch.setattr(check, "ffi", fake)
    return fake


# ---- success -------------------------------------------------------------------------------


def test_success_is_handed_through(fake_ffi: FakeFFI) -> None:
    fake_ffi.errno = errno.EIO  # left over from an earlier call: must not matter
    handle = object()
    assert check_pointer(handle, "ibv_alloc_pd") is handle  # type: ignore[arg-type]
    assert check_minus_one(0, "rdma_listen") == 0
    assert check_minus_one(7, "ibv_get_pkey_index") == 7
    check_errno(0, "ibv_modify_qp")
    assert check_negative(0, "ibv_poll_cq") == 0
    assert check_negative(16, "ibv_poll_cq") == 16


# ---- failure -------------------------------------------------------------------------------


def test_failure_without_a_reason_is_eio(fake_ffi: FakeFFI) -> None:
    with pytest.raises(OSError, match="ibv_alloc_pd: EIO"):
        check_pointer(None, "ibv_alloc_pd")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="rdma_listen: EIO"):
        check_minus_one(-1, "rdma_listen")
    with pytest.raises(OSError, match=r"ibv_destroy_qp: EIO: .*\[returned -1\]"):
        check_errno(-1, "ibv_destroy_qp")


def test_provider_that_returns_a_negative_errno_from_a_post(fake_ffi: FakeFFI) -> None:
    fake_ffi.errno = errno.EIO
    with pytest.raises(OSError, match="ENOMEM") as caught:
        check_errno(-errno.ENOMEM, "ibv_post_send")
    assert caught.value.errno == errno.ENOMEM


def test_provider_that_returns_minus_one_and_sets_errno(fake_ffi: FakeFFI) -> None:
    fake_ffi.errno = errno.EBUSY
    with pytest.raises(OSError, match="EBUSY") as caught:
        check_errno(-1, "ibv_destroy_qp")
    assert caught.value.errno == errno.EBUSY


@pytest.mark.parametrize("value", [-1, -2, -22])
def test_negative_number_of_poll_is_no_errno(fake_ffi: FakeFFI, value: int) -> None:
    with pytest.raises(OSError, match=rf"\[returned {value}\]") as caught:
        check_negative(value, "ibv_poll_cq")
    assert caught.value.errno == errno.EIO


# ---- the real libraries --------------------------------------------------------------------


@pytest.mark.skipif(_ffi.load_error() is not None, reason="no compiled module")
def test_errno_of_a_real_call_arrives() -> None:
    """Without a device librdmacm refuses the channel and says why in errno."""
    _ffi.ffi.errno = 0
    channel = _ffi.lib.rdma_create_event_channel()
    if channel:
        _ffi.lib.rdma_destroy_event_channel(channel)
        pytest.skip("an RDMA device is present: the call succeeds")
    with pytest.raises(OSError, match="rdma_create_event_channel: ") as caught:
        check_pointer(channel, "rdma_create_event_channel")
    assert caught.value.errno in (errno.ENODEV, errno.ENOENT, errno.EPERM, errno.EACCES)


# ---- the package's own calls ---------------------------------------------------------------

CHECKERS = {
    "check_pointer": "pointer",
    "check_minus_one": "minus_one",
    "check_errno": "errno",
    "check_negative": "negative",
}
# Looked up in the library that is loaded.
LOOKED_UP = {name: "minus_one" if name.startswith("rdma_") else "errno" for name in newer.CALLS}
CONVENTION = LOOKED_UP | {name: kind for kind, names in OPERATIONS.items() for name in names}


def checked_calls() -> list[tuple[str, str, str]]:
    """Place, checker and verb of every `check_...(..., "verb")` in the package."""
    found = []
    for path in sorted((ROOT / "aiordma").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            function, verb = node.func, node.args[1]
            if (
                isinstance(function, ast.Name)
                and function.id in CHECKERS
                and isinstance(verb, ast.Constant)
                and isinstance(verb.value, str)
            ):
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                found.append((place, function.id, verb.value))
    return found


def test_every_call_is_checked_by_its_own_convention() -> None:
    wrong = [
        f"{place}: {verb} needs the checker for {CONVENTION[verb]!r}, not {checker}"
        for place, checker, verb in checked_calls()
        if verb in CONVENTION and CONVENTION[verb] != CHECKERS[checker]
    ]
    assert wrong == []


def test_checked_verbs_exist() -> None:
    unknown = [
        f"{place}: {verb}"
        for place, _, verb in checked_calls()
        if verb.startswith(("ibv_", "rdma_")) and verb not in CONVENTION
    ]
    assert unknown == []
