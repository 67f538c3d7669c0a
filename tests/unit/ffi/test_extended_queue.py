"""Polling an extended completion queue in C, which no device here gives timestamps: a fake does."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aiordma._ffi import ffi, lib
from aiordma.verbs import (
    ExtendedCompletion,
    WCFields,
    WCFlags,
    WCOpcode,
    WCStatus,
)
from aiordma.verbs.wc import WC_STRUCT
from tests.inside.verbs import extended_completion

STAMP = 0x1122334455667788
WALLCLOCK = 1_700_000_000_000_000_000
ALL = (
    WCFields.COMPLETION_TIMESTAMP
    | WCFields.COMPLETION_TIMESTAMP_WALLCLOCK
    | WCFields.CVLAN
    | WCFields.FLOW_TAG
)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """A function that returns the fake queue, filled anew."""
    source = Path(__file__).parent / "fake_cq_ex.c"
    library = tmp_path_factory.mktemp("fake") / "fake.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    words = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source)
    subprocess.run([*compiler, *words], check=True)
    made = ctypes.CDLL(str(library)).made
    made.restype = ctypes.c_void_p
    return lambda: ffi.cast("struct ibv_cq *", made())


def polled(queue: Any, most: int, fields: WCFields) -> tuple[int, list[ExtendedCompletion]]:
    """The result of the call, and the completions as `ExtendedCompletionQueue` makes them."""
    wcs, extras = ffi.new("struct ibv_wc[]", most), ffi.new("struct aio_wc_extra[]", most)
    count = lib.aio_poll_cq_ex(queue, most, int(fields), wcs, extras)
    records = bytes(ffi.buffer(wcs, max(count, 0) * WC_STRUCT.size))
    found = []
    for place, record in enumerate(WC_STRUCT.iter_unpack(records)):
        found.append(extended_completion(fields, record, extras[place]))
    return count, found


def test_all_fields(make: Callable[[], Any]) -> None:
    count, (first, failed, last) = polled(make(), 8, ALL)
    assert count == 3
    assert first == ExtendedCompletion(
        wr_id=100, status=WCStatus.SUCCESS, qp_num=17, vendor_err=0, opcode=WCOpcode.RECV,
        byte_len=4096, imm_data=0x04030201, invalidated_rkey=None, flags=WCFlags.WITH_IMM,
        src_qp=18, slid=19, sl=2, dlid_path_bits=3,
        timestamp=STAMP, wallclock_ns=WALLCLOCK, cvlan=42, flow_tag=43,
    )  # fmt: skip
    assert (last.wr_id, last.timestamp, last.wallclock_ns) == (102, STAMP + 2, WALLCLOCK + 2)
    assert failed == ExtendedCompletion(
        wr_id=101, status=WCStatus.REM_ACCESS_ERR, qp_num=17, vendor_err=77, opcode=None,
        byte_len=None, imm_data=None, invalidated_rkey=None, flags=WCFlags(0), src_qp=0,
    )  # fmt: skip


def test_only_the_fields_that_the_queue_was_made_for(make: Callable[[], Any]) -> None:
    """A driver leaves the function of another field unset: a call of it would end the process."""
    _, (first, *_) = polled(make(), 8, WCFields.CVLAN)
    assert (first.timestamp, first.wallclock_ns, first.cvlan, first.flow_tag) == (
        None, None, 42, None
    )  # fmt: skip


def test_no_more_than_asked_for_and_each_once(make: Callable[[], Any]) -> None:
    queue = make()
    assert [each.wr_id for each in polled(queue, 2, ALL)[1]] == [100, 101]
    assert [each.wr_id for each in polled(queue, 2, ALL)[1]] == [102]
    assert polled(queue, 2, ALL) == (-errno.EIO, [])
