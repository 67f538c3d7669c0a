"""LastWords: the streams of a loop deliver what their adapters have before the loop is closed.

For TCP the kernel does so, whatever becomes of the process.  A queue pair ends with its process,
and with its loop ends whatever would wait for it; so the wait has to be the loop's last act.
asyncio has no call for that, but its generators: `asyncio.run` ends with `shutdown_asyncgens()`,
which has each of them run its `finally`.  The one of this file waits there.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator
from typing import Protocol

from aiordma.loop.registry import lasting

__all__ = ["LastWords", "last_words"]


class _Stream(Protocol):
    async def _last(self) -> None:
        """Let arrive what was posted, in bounded time."""


class LastWords:
    """The streams of one loop."""

    def __init__(self) -> None:
        self._streams: weakref.WeakSet[_Stream] = weakref.WeakSet()
        self._generator = _at_the_end(weakref.ref(self))
        # The loop notes a generator at its first step, which goes as far as the yield.
        with contextlib.suppress(StopIteration):
            self._generator.__anext__().__await__().__next__()

    def add(self, stream: _Stream) -> None:
        """Wait for this stream, too, if it is there to the end; it is not kept alive."""
        self._streams.add(stream)

    async def _wait(self) -> None:
        await asyncio.gather(
            *(stream._last() for stream in list(self._streams)), return_exceptions=True
        )


async def _at_the_end(reference: weakref.ref[LastWords]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        words = reference()
        if words is not None:
            await words._wait()


def last_words(loop: asyncio.AbstractEventLoop) -> LastWords:
    """Those of `loop`, which runs."""
    return lasting("last words", LastWords, loop)
