"""Admission: how many clients of a listener are in the middle of a handshake, and which goes first.

Theory of operation
    A handshake costs memory before the client has proved anything.  So `Places` limits the number
    of handshakes, in total and for each source (`source_of`).  A request that finds no place waits
    in the line of its source, where it costs a connection id and nothing else.  A free place goes
    to the sources in turn, so that a source with a long line holds up no other.

    While requests wait, the oldest handshake is ended after `pressed_s`, of the source that has
    most of them, because a client that is slow to act holds up the others.  The server's own work
    counts for no client: the time begins with `Place.turn`, and stands still while the loop is
    late, which `Places` checks ten times in `pressed_s`.  On a busy machine the clients are as late
    as the loop.

    A place becomes free when its memory is free, not when the handshake is given up: otherwise a
    flood of clients that are dropped would pin more memory than the places stand for.

    `Ledger` counts connections, from the handshake to the end, and the bytes that they pin, of one
    listener and of all listeners of the process.
"""

from __future__ import annotations

import asyncio
import errno
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from aiordma.errors import errno_error
from aiordma.link.limits import ListenerLimits
from aiordma.loop import fork
from aiordma.memory.governor import CLIENTS, Count, Lack, fair_share

__all__ = ["Ledger", "Place", "Places"]


class Place:
    """A client's place in the line or among the handshakes; made by `Places.arrive`."""

    __slots__ = ("_calls", "_drop", "_dropped", "_places", "_since", "source")

    def __init__(
        self,
        places: Places,
        source: str,
        begin: Callable[[Place], None],
        refuse: Callable[[], None],
    ) -> None:
        self.source: str = source
        self._places: Places | None = places
        # Called once: the end of the queue pair keeps the place, and no listener.
        self._calls: tuple[Callable[[Place], None], Callable[[], None]] | None = (begin, refuse)
        self._drop: Callable[[], bool] | None = None
        self._dropped = False
        self._since = places._now()

    def turn(self, drop: Callable[[], bool]) -> None:
        """Begin the time in which the client has to act.

        `drop` ends the handshake, or returns False if the client has acted already.
        """
        if self._places is not None:
            self._drop = drop
            self._since = self._places._now()
            if self._places.waiting:
                self._places._press()

    def acted(self) -> None:
        """Note that the client has acted: it is not dropped any more."""
        self._drop = None

    def leave(self) -> None:
        """End the place: the handshake is over, or the request is answered.  Idempotent."""
        places, self._places, self._drop, self._calls = self._places, None, None, None
        if places is not None:
            places._left(self)


class _Source:
    """The clients of one source: `line` waits, `open` has places, each with the oldest first."""

    __slots__ = ("dropped", "line", "open")

    def __init__(self) -> None:
        self.line: deque[Place] = deque()
        self.open: dict[Place, None] = {}
        self.dropped = 0  # of those in `open`

    @property
    def held(self) -> int:
        return len(self.line) + len(self.open)

    @property
    def live(self) -> int:
        return len(self.open) - self.dropped

    def oldest(self) -> Place | None:
        """The client that has to act and has taken longest, or None."""
        acting = (place for place in self.open if place._drop is not None)
        return min(acting, key=_since, default=None)


def _since(place: Place) -> float:
    return place._since


class Places:
    """The places of one listener for one kind of handshake.

    Args:
        most: Places in total.
        most_of_one: Places that one source may have.
        pressed_s: Seconds that a client has to act while others wait.
        patience_s: Seconds that a request waits for a place.
    """

    def __init__(self, most: int, most_of_one: int, *, pressed_s: float, patience_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._most = most
        self._most_of_one = most_of_one
        self._pressed_s = pressed_s
        self._patience_s = patience_s
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0  # when the timer is due
        self._late_s = 0.0  # seconds that the timer came late, in all
        #: Requests that wait, and clients that have a place.
        self.waiting: int = 0
        self.open: int = 0

    def arrive(
        self, source: str, begin: Callable[[Place], None], refuse: Callable[[], None]
    ) -> None:
        """Put a client into the line of its source.

        Args:
            source: Source of the client, as `source_of` returns it.
            begin: Called with the place when it is free, perhaps at once; `Place.leave` ends it.
            refuse: Called instead if no place is free in time.
        """
        clients = self._sources.get(source)
        if clients is None:
            clients = self._sources[source] = _Source()
        clients.line.append(Place(self, source, begin, refuse))
        self.waiting += 1
        self._admit()
        if self.waiting:
            self._press()

    def make_room(self, source: str) -> bool:
        """Refuse the request that has waited longest, of the source that holds most.

        Returns:
            False if that source is `source` itself: the newcomer is to be refused then.
        """
        crowded = [name for name, clients in self._sources.items() if clients.line]
        fullest = max(crowded, key=lambda name: self._sources[name].held, default=source)
        ours = self._sources.get(source)
        if fullest == source or (ours and ours.held >= self._sources[fullest].held):
            return False
        self._send_away(self._sources[fullest].line[0])
        return True

    def drop_acting(self) -> None:
        """End the handshakes whose client has to act, except those that have acted meanwhile."""
        for clients in list(self._sources.values()):
            for place in list(clients.open):
                drop, place._drop = place._drop, None
                if drop is not None:
                    drop()

    def close(self) -> None:
        """Refuse each request that waits; clients that have a place keep it."""
        for clients in list(self._sources.values()):
            while clients.line:
                self._send_away(clients.line[0])
        self._press()

    def _admit(self) -> None:
        while self.waiting and self.open < self._most:
            place = self._next()
            if place is None:
                return
            self._sources.move_to_end(place.source)  # the others' turn
            self._sources[place.source].open[place] = None
            self.waiting -= 1
            self.open += 1
            calls, place._calls = place._calls, None
            if calls is not None:
                calls[0](place)

    def _next(self) -> Place | None:
        for clients in self._sources.values():
            if clients.line and len(clients.open) < self._most_of_one:
                return clients.line.popleft()
        return None

    def _left(self, place: Place) -> None:
        clients = self._sources[place.source]
        if place in clients.open:
            del clients.open[place]
            clients.dropped -= place._dropped
            self.open -= 1
        else:
            clients.line.remove(place)
            self.waiting -= 1
        if not clients.held:
            del self._sources[place.source]
        if self.waiting or self._timer is not None:
            self._admit()
            self._press()

    def _send_away(self, place: Place) -> None:
        calls = place._calls
        place.leave()
        if calls is not None:
            calls[1]()

    # Under pressure

    def _now(self) -> float:
        """The loop's time in seconds, less the seconds in which the loop was late."""
        now = self._loop.time()
        if self._timer is not None and now > self._due:
            self._late_s += now - self._due
            self._due = now
        return now - self._late_s

    def _press(self) -> None:
        """End the handshakes and waits whose time is over, and set the timer for the next."""
        now = self._now()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self.waiting:
            return
        due = [*self._tire(now), *self._drop_late(now)]
        if due and self.waiting and self._timer is None:
            self._due = self._late_s + min(*due, now + self._pressed_s / 10)
            self._timer = self._loop.call_at(self._due, self._press)

    def _tire(self, now: float) -> Iterable[float]:
        for clients in list(self._sources.values()):
            while clients.line:
                until = clients.line[0]._since + self._patience_s
                if until > now:
                    yield until
                    break
                self._send_away(clients.line[0])

    def _drop_late(self, now: float) -> Iterable[float]:
        if self.open >= self._most:
            dropped = sum(clients.dropped for clients in self._sources.values())
            for _ in range(self.waiting - dropped):
                fullest = max(self._sources.values(), key=lambda clients: clients.live)
                until = self._drop_oldest(fullest, now)
                if until is not None:
                    yield until
                    return
            return
        for clients in list(self._sources.values()):
            for _ in range(len(clients.line) - clients.dropped):
                until = self._drop_oldest(clients, now)
                if until is not None:
                    yield until
                    break

    def _drop_oldest(self, clients: _Source, now: float) -> float | None:
        """Drop the oldest client if it is late; return the time when it will be, if it is not."""
        place = clients.oldest()
        if place is None:
            return None
        until = place._since + self._pressed_s
        if until > now:
            return until
        drop, place._drop = place._drop, None
        assert drop is not None
        if drop() and place._places is not None:
            place._dropped = True
            clients.dropped += 1
        return None


_lock = fork.new_lock()
PINNED = Count()  # bytes that the connections of all listeners pin
fork.renew(PINNED.forget)


def _why_full(count: Count, limit: str, most: int, source: str, more: int) -> str:
    """The reason why a source cannot have `more`; empty if it can.

    `limit` is the name of the setting, `most` its value.
    """
    lack = count.lack(CLIENTS, most, more, source)
    if lack is Lack.ROOM:
        return f"there are {count.held}, and {more} more would be above {most} ({limit})"
    if lack is Lack.PART:
        own = count.sources[source]
        return f"{source} has {own}, its share is {fair_share(most, count.held, own)} ({limit})"
    return ""


class Ledger:
    """Connections of one listener, half-open ones included, and the bytes that they pin.

    Args:
        limits: Limits of both.
        size: Bytes that each connection pins, unless `take` gets another size.
    """

    def __init__(self, limits: ListenerLimits, size: int) -> None:
        self._limits = limits
        self._most_bytes = limits.pinned_bytes, limits.process_pinned_bytes
        self._size = size
        self._clients = Count()
        self._pinned = Count()

    @property
    def connections(self) -> int:
        """Number of connections."""
        return self._clients.held

    @property
    def pinned(self) -> int:
        """Bytes that the connections pin."""
        return self._pinned.held

    @property
    def most_of_process(self) -> int:
        """Bytes that the connections of all listeners may pin, as this listener has it."""
        return self._most_bytes[1]

    def why_full(self, source: str, size: int | None = None) -> str:
        """The reason why a further client of a source cannot be let in; empty if it can.

        `size` is the bytes that it pins; None: as many as each.
        """
        size = self._size if size is None else size
        limits, clients = self._limits, self._clients
        own = clients.sources.get(source, 0)
        if own >= limits.max_connections_per_source:
            return f"{source} has {own} (max_connections_per_source)"
        most, most_of_process = self._most_bytes
        if (
            4 * clients.held < limits.max_connections
            and 4 * (self._pinned.held + size) <= most
            and 4 * (PINNED.held + size) <= most_of_process
        ):
            return ""  # so few that any source is below its share
        return (
            _why_full(clients, "max_connections", limits.max_connections, source, 1)
            or _why_full(self._pinned, "max_pinned_bytes", most, source, size)
            or _why_full(PINNED, "max_process_pinned_bytes", most_of_process, source, size)
        )

    def take(self, source: str, size: int | None = None) -> Callable[[], None]:
        """Count a connection in; the returned function counts it out, once, in any thread.

        Raises:
            OSError: ENOBUFS, the client cannot be let in.
        """
        size = self._size if size is None else size
        with _lock:  # listeners in other threads count, too
            if full := self.why_full(source, size):
                raise errno_error(errno.ENOBUFS, f"no more connections: {full}")
            self._count(source, 1, size)
        return _GiveBack(self, source, size)

    def _count(self, source: str, step: int, size: int) -> None:
        self._clients.add(step, source)
        self._pinned.add(size, source)
        PINNED.add(size, source)


class _GiveBack:
    """Counts a connection out, once; a closure would be five objects, for each connection."""

    __slots__ = ("_ledger", "_size", "_source")

    def __init__(self, ledger: Ledger, source: str, size: int) -> None:
        self._ledger: Ledger | None = ledger
        self._source = source
        self._size = size

    def __call__(self) -> None:
        with _lock:
            ledger, self._ledger = self._ledger, None
            if ledger is not None:
                ledger._count(self._source, -1, -self._size)
