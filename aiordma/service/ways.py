"""Ways: the addresses that a pool connects to, what is known of them, and which one is next.

Theory of operation
    A way is an address of the server, with rails together with an address of this machine: each
    pair is a way, so that a rail that has failed affects no other.

    A way is *out* from a failed attempt, or from the end of its last connection, until a connect by
    it succeeds.  The next attempt takes a way that is not out, as long as there is one, so that a
    task that waits for a connection does not wait for a connect to a dead address to time out.  Of
    these it takes the lowest `tier`, and in it the way with the fewest connections.  With
    "failover" each address has a tier of its own; with "spread" all have the same.

    `better` names a way that is better than that of an existing connection: its tier is lower, or
    it is of the same tier and has two connections fewer.  The pool tries it, and moves one
    connection after another.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from aiordma.arguments import check_kind
from aiordma.cm.address import Address, check_address, check_port
from aiordma.loop.limit import Limit
from aiordma.loop.running import is_canceled
from aiordma.service.way import Way

__all__ = ["Naming", "Ways", "addresses_of", "rails_of"]

#: Addresses of a pool, and rails, at most.
_MOST_ADDRESSES, _MOST_RAILS = 64, 16
#: Ways without a connection that a function has named, and whose state is kept.
_MOST_NAMED = 64
#: Seconds that a function may take to name an address.
_NAMING_S = 10.0
#: Failures that an error lists.
_MOST_LISTED = 8
Naming = Callable[[], "Address | Awaitable[Address]"]


class Ways:
    """All ways of a pool.

    Args:
        addresses: The addresses, in order; or a function that names the next one.
        rails: Addresses of this machine; empty if the routes decide.
        failover: Whether the order of the addresses decides.
        max_pause: Seconds of the longest pause.
    """

    def __init__(
        self,
        addresses: Sequence[Address] | Naming,
        rails: Sequence[str],
        max_pause: float,
        *,
        failover: bool,
    ) -> None:
        self._rails = tuple(rails) or (None,)
        self._max_pause = max_pause
        self._naming = addresses if callable(addresses) else None
        self._named: dict[Address, list[Way]] = {}
        self._source = Way(("", 0), None, 0, max_pause)  # the function: its failures
        for tier, address in enumerate(() if callable(addresses) else addresses):
            self._add(address, tier if failover else 0)

    def _add(self, address: Address, tier: int) -> list[Way]:
        made = [Way(address, rail, tier, self._max_pause) for rail in self._rails]
        self._named[address] = made
        return made

    def __iter__(self) -> Iterator[Way]:
        return (way for ways in self._named.values() for way in ways)

    @property
    def only(self) -> Way | None:
        """The way, if there is never another one."""
        ways = list(self)
        return ways[0] if self._naming is None and len(ways) == 1 else None

    async def next(self, now: float) -> Way:
        """The way of the next attempt, which may have to wait for its `not_before`.

        Raises:
            Exception: The function has raised it, took too long, or named no address.
        """
        if self._naming is None:
            return min(self, key=_rank)
        if self._source.not_before > now:
            return self._source
        try:
            with Limit(_NAMING_S, "the function that names the address of the pool"):
                named: Any = self._naming()
                if inspect.isawaitable(named):
                    named = await named
            address = _checked(named, "the function that names the address of the pool")
        except asyncio.CancelledError as exc:
            if is_canceled():
                raise
            error = RuntimeError("the function that names the address of the pool was canceled")
            self._source.failed(error, now, now)
            raise error from exc
        except Exception as exc:
            self._source.failed(exc, now, now)
            raise
        self._source.worked()
        return min(self._named.get(address) or self._new(address), key=_rank)

    def _new(self, address: Address) -> list[Way]:
        unused = [
            known for known, ways in self._named.items()
            if not any(way.size or way.connecting for way in ways)
        ]  # fmt: skip
        for known in unused[: max(0, len(unused) - _MOST_NAMED + 1)]:
            del self._named[known]
        return self._add(address, 0)

    def better(self) -> tuple[Way, Way] | None:
        """A way that a connection is to be moved to, and the one where it is; None if all is well.

        A function decides by itself, when a connection is opened.
        """
        if self._naming is not None:
            return None
        worst = max((way for way in self if way.size), key=_weight, default=None)
        if worst is None:
            return None
        tier, size = worst.tier, worst.size
        found = [
            way for way in self
            if way.tier < tier or (way.tier == tier and way.size + way.connecting + 2 <= size)
        ]  # fmt: skip
        if not found:
            return None
        return min(found, key=lambda way: (way.not_before, _rank(way))), worst

    def failures(self) -> list[tuple[str, BaseException]]:
        """The last failure of each way that does not work."""
        found = [(str(way), way.error) for way in self if way.out and way.error is not None]
        if self._source.error is not None:
            found.append(("the function of addresses", self._source.error))
        return [(name, error) for name, error in found if error is not None]

    def why(self) -> tuple[str, BaseException | None]:
        """Why there is no connection: text to be added to an error, and its cause."""
        failures = self.failures()
        if not failures:
            return "", None
        if len(failures) == 1:
            name, error = failures[0]
            return f"; the last attempt to connect failed: {_failure(name, error)}", error
        listed = "; ".join(_failure(name, error) for name, error in failures[:_MOST_LISTED])
        more = len(failures) - _MOST_LISTED
        text = f"; the last attempts to connect failed: {listed}"
        if more > 0:
            text += f"; and {more} more"
        errors = [error for _, error in failures if isinstance(error, Exception)]
        return text, ExceptionGroup("the addresses of the pool", errors) if errors else None


def _failure(name: str, error: BaseException) -> str:
    """What happened where; most errors name the address themselves."""
    return str(error) if name in str(error) else f"{name}: {error}"


def _rank(way: Way) -> tuple[bool, float, int, int]:
    """The next attempt takes the way whose rank is the lowest."""
    waits = way.not_before if way.out else 0.0
    return way.out, waits, way.tier, way.size + way.connecting


def _weight(way: Way) -> tuple[int, int]:
    return way.tier, way.size


def _checked(value: Any, what: str) -> Address:
    """An address of a server.

    Raises:
        TypeError, ValueError: It is no address.
    """
    try:
        check_address(value)
        host, port = value
        check_port(port, lowest=1)
    except (TypeError, ValueError) as exc:
        msg = f"{what}: {exc}"
        raise type(exc)(msg) from None
    if not host:
        msg = f"{what}: the host is empty"
        raise ValueError(msg)
    return host, port


def addresses_of(host: Any, port: Any) -> tuple[Address, ...] | Naming:
    """The addresses that a program has given.

    Raises:
        TypeError, ValueError: They are not valid addresses.
    """
    if isinstance(host, str):
        if not host:
            msg = "host is empty: give the name or the address of the peer"
            raise ValueError(msg)
        check_port(port, lowest=1)
        return ((host, port),)
    if not callable(host) and not isinstance(host, list | tuple):
        check_kind("host", host, str, none=False)
    if port is not None:
        msg = "port is part of each address: with several addresses, or a function, leave it out"
        raise TypeError(msg)
    if callable(host):
        naming: Naming = host
        return naming
    if len(host) == 2 and isinstance(host[0], str):
        msg = "host has to be a list of (host, port) pairs; or give host and port by themselves"
        raise TypeError(msg)
    if not 0 < len(host) <= _MOST_ADDRESSES:
        msg = f"a pool has 1 to {_MOST_ADDRESSES} addresses, not {len(host)}"
        raise ValueError(msg)
    found = tuple(_checked(each, f"address {number}") for number, each in enumerate(host))
    if len(set(found)) < len(found):
        msg = "the pool has the same address twice"
        raise ValueError(msg)
    return found


def rails_of(local_addrs: Any) -> tuple[str, ...]:
    """The addresses of this machine that a program has given.

    Raises:
        TypeError, ValueError: They are not valid addresses.
    """
    if local_addrs is None:
        return ()
    if not isinstance(local_addrs, list | tuple):
        msg = f"local_addrs has to be a list of addresses of this machine, not {local_addrs!r}"
        raise TypeError(msg)
    if not 0 < len(local_addrs) <= _MOST_RAILS:
        msg = f"local_addrs has 1 to {_MOST_RAILS} addresses, not {len(local_addrs)}"
        raise ValueError(msg)
    for each in local_addrs:
        check_address((each, 0))
        if not each:
            msg = "an address of local_addrs is empty"
            raise ValueError(msg)
    if len(set(local_addrs)) < len(local_addrs):
        msg = "local_addrs has the same address twice"
        raise ValueError(msg)
    return tuple(local_addrs)
