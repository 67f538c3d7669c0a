"""Happy eyeballs (RFC 8305): try the addresses of a name with a head start for the first.

A host that has addresses of both families may be reachable by only one family.  The first address
has `delay` seconds; then the next is tried beside it, at once if the first failed before.  The
first connection wins.  The attempts that are still under way are canceled, and have closed their
resources when `race` returns.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import chain, zip_longest
from typing import Any, TypeVar

from aiordma.cm.address import Address
from aiordma.errors import ConnectionRejectedError, ConnectTimeoutError, DeviceNotFoundError
from aiordma.loop.lasting import until_done

__all__ = ["AllFailedError", "interleave", "race"]

T = TypeVar("T")


class AllFailedError(Exception):
    """No address could be connected to; programs see the error that `as_one` returns.

    Attributes:
        failures: The addresses that were tried, each with its error.
    """

    def __init__(self, failures: Sequence[tuple[Address, OSError]]) -> None:
        super().__init__(failures)
        self.failures = failures

    def as_one(self, host: str, port: int) -> OSError:
        """Return one error that stands for all failures.

        Its class is that of the failure that came furthest: a refusal says more than an address
        that no device serves.  All failures are in its text, and in the `ExceptionGroup` that is
        its cause.
        """
        errors = [error for _, error in self.failures]
        if len(errors) == 1:
            return errors[0]
        tried = "; ".join(f"{address[0]}: {_words(error)}" for address, error in self.failures)
        text = f"no address of {host} could be connected to on port {port}: {tried}"
        one = copy.copy(max(errors, key=_distance))
        one.args = (one.errno, text)
        one.strerror = text
        one.__cause__ = ExceptionGroup(text, errors)
        return one


def _words(error: OSError) -> str:
    return error.strerror or str(error)


def _distance(error: OSError) -> int:
    """Rank of an error: the further the attempt came, the higher."""
    if isinstance(error, ConnectionRejectedError):
        return 3
    if isinstance(error, ConnectTimeoutError):
        return 2
    return 0 if isinstance(error, DeviceNotFoundError) else 1


def interleave(addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses with alternating families; the order within a family is kept."""
    families: dict[bool, list[Address]] = {}
    for address in addresses:
        families.setdefault(":" in address[0], []).append(address)
    turns = chain.from_iterable(zip_longest(*families.values()))
    return [address for address in turns if address is not None]


async def race(
    addresses: Sequence[Address],
    attempt: Callable[[Address], Coroutine[Any, Any, T]],
    delay: float | None,
    discard: Callable[[T], object],
) -> T:
    """Return the first result of `attempt`, which is called for each address after a head start.

    Args:
        addresses: Addresses to try, in this order.
        attempt: Connects to an address; closes its resources if it fails or is canceled.
        delay: Seconds of head start; None for one attempt at a time.
        discard: Called with a result that comes too late.

    Raises:
        AllFailedError: Each attempt raised OSError.
        BaseException: An attempt raised another exception, which is a bug and no answer.

    Cancellation: all attempts are canceled, and have ended when CancelledError is raised.
    """
    running: dict[asyncio.Task[T], Address] = {}
    try:
        winner = await _first(list(addresses), attempt, delay, running)
    except BaseException:
        await _end(running, discard)
        raise
    try:
        await _end(running, discard)
    except BaseException:
        discard(winner)
        raise
    return winner


async def _first(
    waiting: list[Address],
    attempt: Callable[[Address], Coroutine[Any, Any, T]],
    delay: float | None,
    running: dict[asyncio.Task[T], Address],
) -> T:
    failures: list[tuple[Address, OSError]] = []
    while waiting or running:
        if waiting:
            address = waiting.pop(0)
            running[asyncio.create_task(attempt(address))] = address
        head_start = delay if waiting else None
        await asyncio.wait(running, timeout=head_start, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in running if task.done()]:
            error = task.exception()
            if error is None:
                del running[task]
                return task.result()
            if not isinstance(error, OSError):
                try:
                    raise error
                finally:
                    del error  # its traceback has this frame: a cycle
            failures.append((running.pop(task), error))
    raise AllFailedError(failures)


async def _end(tasks: Iterable[asyncio.Task[T]], discard: Callable[[T], object]) -> None:
    def settle(task: asyncio.Task[T]) -> None:
        if not task.cancelled() and task.exception() is None:
            discard(task.result())

    for task in tasks:
        if task.done():
            settle(task)
        else:
            task.cancel()
            task.add_done_callback(settle)
    await until_done(tasks)
