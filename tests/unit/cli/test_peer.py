"""`aiordma doctor PEER`: what a step that fails is told as; the wire is in tests/device."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable
from typing import Any

import pytest

from aiordma.cli import checks_system, doctor
from aiordma.cli.finding import Finding, Status, fail, ok
from aiordma.cli.peer import SIZES, Scene, StepError, try_sizes
from aiordma.cli.words import MESSAGES, STREAMS, words_of
from aiordma.error_words import WC_STATUS
from aiordma.errors import ConnectionLostError, ConnectionRejectedError, completion_error
from aiordma.link.refusal import RefusalReason, library_words, refusal

RETRY = completion_error(WC_STATUS.index("RETRY_EXC_ERR"))
REMOTE = completion_error(WC_STATUS.index("REM_ACCESS_ERR"))


def lost(cause: BaseException) -> ConnectionLostError:
    error = ConnectionLostError(104, "the connection is lost")
    error.__cause__ = cause
    return error


async def break_at(size: int, error: BaseException, mtu: int) -> StepError:
    """What is told if `size` and all above do not pass."""
    done: list[int] = []

    async def one(each: int) -> None:
        if each >= size:
            raise error
        done.append(each)

    with pytest.raises(StepError) as caught:
        await try_sizes(Scene("peer", 1, 0.5, mtu=mtu), one)
    assert done == [each for each in SIZES if each < size]
    return caught.value


@pytest.mark.parametrize(
    ("size", "error", "mtu", "is_of_packets"),
    [
        (1024, RETRY, 4096, True),
        (4096, lost(RETRY), 4096, True),
        (4096, TimeoutError(), 4096, True),
        (4096, RETRY, 1024, False),  # a full packet has passed
        (1 << 20, RETRY, 4096, False),
        (1, RETRY, 4096, False),  # nothing has passed
        (4096, REMOTE, 4096, False),
        (4096, lost(REMOTE), 4096, False),
        (4096, RETRY, 0, False),  # iWARP
    ],
)
async def test_packets_that_are_too_large_for_a_network(
    size: int, error: BaseException, mtu: int, is_of_packets: bool
) -> None:
    told = await break_at(size, error, mtu)
    assert ("`ping -M do -s 4128 peer`" in told.advice) is is_of_packets
    assert bool(told.advice) is is_of_packets


async def test_the_size_and_the_reason() -> None:
    told = await break_at(64 << 10, TimeoutError(), 4096)
    assert told.seen == "64 KiB: nothing came back within 0.5 s; up to 16 KiB passed"
    told = await break_at(1, StepError("other bytes", "look"), 4096)
    assert (told.seen, told.advice) == ("1 B: other bytes; no size passed", "look")


async def test_all_sizes_pass() -> None:
    async def one(_: int) -> None:
        await asyncio.sleep(0)

    assert await try_sizes(Scene("peer", 1, 0.5), one) == "1 B to 1 MiB"


def test_a_server_of_the_other_kind() -> None:
    error = ConnectionRejectedError(111, "refused", event="REJECTED", status=28, private_data=b"")
    error.hint = library_words(refusal(RefusalReason.STREAMS))
    assert words_of(error) == STREAMS
    error = ConnectionRejectedError(
        111, "refused", event="REJECTED", status=28, private_data=refusal(RefusalReason.NOT_AIORDMA)
    )
    assert words_of(error) == MESSAGES
    assert words_of(FileNotFoundError(2, "No such file", "x")) == "x: No such file"
    assert words_of(TimeoutError()) == "TimeoutError"


@pytest.fixture
def one_check(monkeypatch: pytest.MonkeyPatch) -> Callable[[Finding], None]:
    """Replaces all checks of this machine."""

    def replace(finding: Finding) -> None:
        monkeypatch.setattr(doctor, "CHECKS", {"memory": lambda: finding})

    return replace


def test_this_machine_comes_first(
    one_check: Callable[[Finding], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def examine_peer(*words: Any) -> None:
        scene, told = words
        assert scene == Scene("host", 7, 0.5, "10.80.0.2")
        told("peer", ok("there"))
        told("reads", fail("broken", "mend it"))

    monkeypatch.setattr("aiordma.cli.peer.examine_peer", examine_peer)
    one_check(fail("none", "buy some"))
    assert doctor.run(as_json=False, peer="host", port=7, source="10.80.0.2", limit_s=0.5) == 1
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  memory              none",
        "      -> buy some",
        "SKIP  peer                not checked: host; this machine comes first",
        "RDMA with host cannot be used like this: 1 failed, 0 warnings, 1 not checked",
    ]
    one_check(ok("plenty"))
    assert doctor.run(as_json=False, peer="host", port=7, source="10.80.0.2", limit_s=0.5) == 1
    assert capsys.readouterr().out.splitlines() == [
        "OK    memory              plenty",
        "OK    peer                there",
        "FAIL  reads               broken",
        "      -> mend it",
        "RDMA with host cannot be used like this: 1 failed, 0 warnings",
    ]


def test_the_limit_of_a_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release without numbers is taken for a new kernel."""
    monkeypatch.setattr(platform, "release", lambda: "strange")
    monkeypatch.setenv("RDMAV_FORK_SAFE", "1")
    assert checks_system.fork_variables().status is Status.WARN
