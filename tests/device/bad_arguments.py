"""Values that no public call takes, and a list of the calls that take them all the same."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "LIMIT_S", "NO_32_BITS", "NO_64_BITS", "NO_BUFFER", "NO_BYTES", "NO_INT", "NO_INT_OR_NONE",
    "NO_DEADLINE", "NO_OFFSET", "NO_REGION", "NO_SECONDS", "REFUSED", "STRIDED",
    "Bad", "Mistakes", "no_mistakes",
]  # fmt: skip

LIMIT_S = 20


class OddError(Exception):
    """Out of an argument's own method."""


class OddIndex:
    """Says that it is a number, and is not."""

    def __index__(self) -> int:
        raise OddError


class NoIndex:
    """A number that is a str."""

    def __index__(self) -> Any:
        return "1"


class OddLength:
    """Nothing that has a length."""

    def __len__(self) -> int:
        raise OddError

    def __iter__(self) -> Iterator[int]:
        raise OddError


def released() -> memoryview:
    """A view that shows nothing any more."""
    view = memoryview(b"gone")
    view.release()
    return view


REFUSED = (TypeError, ValueError, BufferError, OddError)
# fmt: off
NO_INT: list[Any] = [
    1.5, math.nan, "1", b"1", object(), True, [1], OddIndex(), NoIndex(), OddLength(),
]
NO_INT_OR_NONE: list[Any] = [*NO_INT, None]
NO_32_BITS: list[Any] = [*NO_INT, -1, 1 << 32, 1 << 64, 1 << 200]
NO_64_BITS: list[Any] = [*NO_INT_OR_NONE, -1, 1 << 64, 1 << 200]
NO_OFFSET: list[Any] = [*NO_64_BITS, 4096, 1 << 63]
NO_BUFFER: list[Any] = [
    "text", 1.5, None, object(), [1, 2], {1: 2}, OddLength(), OddIndex(), released(),
]
STRIDED = memoryview(b"abcdef")[::2]
NO_BYTES: list[Any] = [*NO_BUFFER, 5, 1 << 40, True]
NO_SECONDS: list[Any] = ["1", b"1", object(), -1, math.nan, [1], OddIndex(), 1j, True]
# A deadline may have passed.
NO_DEADLINE: list[Any] = [x for x in NO_SECONDS if x != -1]
NO_REGION: list[Any] = [None, "remote", 5, b"x" * 24, object(), OddLength()]
# fmt: on

Bad = tuple[str, Callable[[Any], Any], list[Any]]


class Mistakes(list[str]):
    """Bad calls that were not refused as they should be."""

    def of_call(self, name: str, call: Callable[[Any], Any], wrong: Any) -> None:
        """The call itself raises, before anything is awaited."""
        with self._judged(name, wrong):
            call(wrong)

    async def of_wait(self, name: str, call: Callable[[Any], Any], wrong: Any) -> None:
        """The call raises, or what it returns when it is awaited."""
        with self._judged(name, wrong):
            async with asyncio.timeout(LIMIT_S):
                answer = call(wrong)
                if isinstance(answer, Awaitable):
                    await answer

    def of_calls(self, table: list[Bad]) -> None:
        """Each value of each row, as `of_call`."""
        for name, call, refused in table:
            for wrong in refused:
                self.of_call(name, call, wrong)

    async def of_waits(
        self, table: list[Bad], after: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        """Each value of each row, as `of_wait`; `after` looks at the objects behind each row."""
        for name, call, refused in table:
            for wrong in refused:
                await self.of_wait(name, call, wrong)
            if after is not None:
                await after(name)

    @contextmanager
    def _judged(self, name: str, wrong: Any) -> Iterator[None]:
        try:
            yield
        except REFUSED:
            return
        except BaseException as exc:
            self.append(f"{name} of {wrong!r} raised {exc!r}")
        else:
            self.append(f"{name} takes {wrong!r}")


@contextmanager
def no_mistakes() -> Iterator[Mistakes]:
    """At the end of the block there is no mistake, or all of them are shown."""
    made = Mistakes()
    yield made
    assert not made, "\n".join(made)
