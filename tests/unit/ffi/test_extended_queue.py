"""Polling an extended completion queue in C, which no device here gives timestamps: a fake does."""

from __future__ import annotations

import ctypes
import errno
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aiordma._ffi import ffi, lib
from aiordma.verbs import WCFields, WCFlags, WCOpcode, WCStatus
from aiordma.verbs.cq_ex import ExtendedCompletion
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


class Fake:
    """Queues of a library of C."""

    def __init__(self, library: Path) -> None:
        self._c = ctypes.CDLL(str(library))
        self._c.made.argtypes, self._c.made.restype = [ctypes.c_uint64], ctypes.c_void_p

    def make(self, fields: WCFields) -> Any:
        """The queue, filled anew, for these fields."""
        return ffi.cast("struct ibv_cq *", self._c.made(int(fields)))

    @property
    def misreads(self) -> int:
        """Reads of a field for which the queue was not made."""
        return int(self._c.misreads())


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Fake:
    source = Path(__file__).parent / "fake_cq_ex.c"
    library = tmp_path_factory.mktemp("fake") / "fake.so"
    compiler = shlex.split(os.environ.get("CC", "cc"))
    words = ("-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source)
    subprocess.run([*compiler, *words], check=True)
    return Fake(library)


def polled(queue: Any, most: int, fields: WCFields) -> tuple[int, list[ExtendedCompletion]]:
    """The result of the call, and the completions as `ExtendedCompletionQueue` makes them."""
    wcs, extras = ffi.new("struct ibv_wc[]", most), ffi.new("struct aio_wc_extra[]", most)
    count = lib.aio_poll_cq_ex(queue, most, int(fields), wcs, extras)
    records = bytes(ffi.buffer(wcs, max(count, 0) * WC_STRUCT.size))
    found = []
    for place, record in enumerate(WC_STRUCT.iter_unpack(records)):
        found.append(extended_completion(fields, record, extras[place]))
    return count, found


def test_all_fields(fake: Fake) -> None:
    count, (first, failed, last) = polled(fake.make(ALL), 8, ALL)
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


def test_only_the_fields_that_the_queue_was_made_for(fake: Fake) -> None:
    """A driver leaves the function of another field unset: a call of it would end the process."""
    _, (first, *_) = polled(fake.make(WCFields.CVLAN), 8, WCFields.CVLAN)
    assert (first.timestamp, first.wallclock_ns, first.cvlan, first.flow_tag) == (
        None, None, 42, None
    )  # fmt: skip
    assert fake.misreads == 0


def test_no_more_than_asked_for_and_each_once(fake: Fake) -> None:
    queue = fake.make(ALL)
    assert [each.wr_id for each in polled(queue, 2, ALL)[1]] == [100, 101]
    assert [each.wr_id for each in polled(queue, 2, ALL)[1]] == [102]
    assert polled(queue, 2, ALL) == (-errno.EIO, [])
