"""What the tests of memory windows share."""

from __future__ import annotations

import random
from collections.abc import Coroutine
from typing import Any

import pytest

import aiordma
from aiordma.verbs import Access, MemoryWindow, MWType
from tests.device.ends import ALL, End

OPENABLE = ALL | Access.MW_BIND
READ, WRITE = Access.REMOTE_READ, Access.REMOTE_WRITE
TYPES = (MWType.TYPE_1, MWType.TYPE_2)
DATA = random.Random(12).randbytes(8192)


def make(end: End, kind: MWType) -> MemoryWindow:
    """A window that belongs to the end."""
    window = MemoryWindow(end.pd, kind)
    end.parts.insert(0, window)
    return window


async def refused(access: Coroutine[Any, Any, object]) -> None:
    """The peer's adapter does not let it happen."""
    with pytest.raises(aiordma.RemoteAccessError) as error:
        await access
    assert error.value.status_name == "REM_ACCESS_ERR"
