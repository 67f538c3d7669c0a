"""Way: an address that a pool connects to, whether it works, and the connections that are open.

Theory of operation
    A member is a connection of the pool.  If it may get a user, it is in one of these:

    idle       no users; the one that was used last is taken first, so that others become old
    partly     1 to `CROWDED` - 1 users
    crowded    the rest, in ranks: a rank for each number of users

    Requests are packed: one member, `current`, gets them until it is crowded, because requests that
    share a connection also share doorbells, completions and turns of the loop.  Only when all
    members are crowded does the one with the fewest users get the next request, and it is found in
    the lowest rank.  So taking a member and giving it back costs the same with one connection and
    with a thousand, and is mostly counting.

    A member that gets no user stands nowhere: it is lent to a task, kept for one that waits,
    broken, or old.

    After failures in a row a way has growing pauses between attempts.  A connection that breaks as
    soon as it is open counts as a failed attempt; otherwise there would be no pauses with a server
    that accepts and then fails.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiordma.cm.address import Address
    from aiordma.endpoint.connection import Connection
    from aiordma.endpoint.outcome import Outcome

__all__ = ["CROWDED", "AddressStats", "Member", "Members", "Way"]

#: A connection with so many users has another one opened.
CROWDED = 32
#: Seconds of the first pause between two attempts to connect.
_FIRST_PAUSE_S = 0.1
#: A connection that lasts so many seconds has shown that the server works.
_PROVEN_S = 1.0


class Member:
    """A connection of the pool.

    Attributes:
        connection: The connection.
        outcome: Whether it is over, or the server is stopping.
        way: The address to which it was made.
        users: Tasks that use it.
        lent: Whether one of them has it alone.
        live: Whether it counts: it is neither broken nor retired.
        noted: Whether its end was noted at its address, or is not to be noted.
        opened_at: Time of the loop when it was opened.
        due: Time of the loop after which it gets no user.
        idle_since: Time of the loop when its last user left.
        place: What it stands in, if it may get a user.
    """

    __slots__ = (
        "connection", "due", "idle_since", "lent", "live", "noted", "opened_at", "outcome", "place",
        "users", "way",
    )  # fmt: skip

    def __init__(
        self, connection: Connection, way: Way, now: float, lifetime: float | None
    ) -> None:
        self.connection: Connection = connection
        self.outcome: Outcome = connection._outcome
        self.way: Way = way
        self.users: int = 0
        self.lent: bool = False
        self.noted: bool = False
        self.live: bool = True
        self.opened_at: float = now
        self.idle_since: float = now
        # Connections that were opened together are not due together.
        self.due: float = (
            math.inf if lifetime is None else now + lifetime * random.uniform(0.9, 1.0)
        )
        self.place: dict[Member, None] | None = None

    @property
    def over(self) -> bool:
        """Whether the connection takes no request any more."""
        return self.outcome.stopping or self.connection.is_closing()


class Members:
    """The members to one address.

    Attributes:
        idle: The members without users, those that were used last at the end.
        current: The member that gets requests until it is crowded; None if it has to be found.
        standing: How many members may get a user.
        users: The users of all members, also of those that stand nowhere.
    """

    __slots__ = ("_lowest", "_partly", "_ranks", "current", "idle", "standing", "users")

    def __init__(self) -> None:
        self.standing: int = 0
        self.users: int = 0
        self.idle: dict[Member, None] = {}
        self._partly: dict[Member, None] = {}
        self.current: Member | None = None  # one of these
        self._ranks: list[dict[Member, None]] = []  # the first has `CROWDED` users
        self._lowest = 0  # no rank below this one has a member

    def put(self, member: Member) -> None:
        """Have a member stand where its number of users says."""
        users = member.users
        if not users:
            place = self.idle
        elif users < CROWDED:
            place = self._partly
        else:
            rank = users - CROWDED
            while len(self._ranks) <= rank:
                self._ranks.append({})
            place = self._ranks[rank]
            self._lowest = min(self._lowest, rank)
        place[member] = None
        member.place = place
        self.standing += 1

    def drop(self, member: Member) -> None:
        """Have a member stand nowhere.  Idempotent."""
        if member.place is not None:
            del member.place[member]
            member.place = None
            self.standing -= 1
            if member is self.current:
                self.current = None

    def take(self) -> Member | None:
        """Add a user to a member that others may use, too; None if no member stands here."""
        member = self.current
        if member is None:
            member = self._next()
            if member is None:
                return None
        self.users += 1
        member.users += 1
        if member.users >= CROWDED or member is not self.current:
            self._move(member)
        return member

    def give(self, member: Member) -> None:
        """Take a user from a member."""
        self.users -= 1
        member.users -= 1
        if member.place is not None and not 0 < member.users < CROWDED - 1:
            self._move(member)

    def add_user(self, member: Member) -> None:
        """Add a user to a member that stands nowhere."""
        self.users += 1
        member.users += 1

    def lend(self) -> Member | None:
        """Add a user to the idle member that was used last, which stands nowhere from now on."""
        if not self.idle:
            return None
        member, _ = self.idle.popitem()
        member.place = None
        self.standing -= 1
        self.users += 1
        member.users += 1
        return member

    def least_used(self) -> Member | None:
        """The member with the fewest users, of those that stand here."""
        if self.idle:
            return next(reversed(self.idle))
        if self._partly:
            return min(self._partly, key=lambda member: member.users)
        return self._least_crowded()

    def _next(self) -> Member | None:
        if self._partly:
            self.current = next(reversed(self._partly))
            return self.current
        return next(reversed(self.idle)) if self.idle else self._least_crowded()

    def _least_crowded(self) -> Member | None:
        while self._lowest < len(self._ranks):
            if rank := self._ranks[self._lowest]:
                return next(reversed(rank))
            self._lowest += 1
        self._lowest = 0
        self._ranks.clear()
        return None

    def _move(self, member: Member) -> None:
        """Move a member to its place, after a change of its users."""
        self.drop(member)
        self.put(member)
        if self.current is None and member.place is self._partly:
            self.current = member


@dataclass(slots=True)
class AddressStats:
    """The state and the counters of one address of a pool.

    Attributes:
        host: Name or address of the server.
        port: Its port.
        local: Address of this machine, if the pool has `local_addrs`; else None.
        size: Connections that are open.
        connecting: Connections that are being opened.
        requests: Times that a request was sent there.
        lost: Connections that broke, or failed the check.
        errors: Attempts to connect that failed.
        works: Whether the last attempt succeeded, and its connections have not all broken since.
            None: unknown, because there was no attempt, as with an address in reserve.
        last_error: The last failure, unless a connect has succeeded since.
    """

    host: str
    port: int
    local: str | None = None
    size: int = 0
    connecting: int = 0
    requests: int = 0
    lost: int = 0
    errors: int = 0
    works: bool | None = None
    last_error: BaseException | None = None


class Way:
    """An address that a pool connects to, and its state.

    Attributes:
        host, port, local: As in `AddressStats`.
        options: Further arguments of `connect`.
        tier: If two ways work, the one with the lower tier is taken.
        members: Its connections that may get users.
        size: Its connections that are open.
        connecting: Those that are being opened.
        out: Whether it does not work, as far as is known.
        tried: Whether a connect has ended.
        not_before: Time of the loop before which there is no further attempt.
        error: The last failure.
        requests, lost, errors: As in `AddressStats`.
    """

    __slots__ = (
        "_failed_at", "_failures", "_max_pause", "connecting", "error", "errors", "host", "local",
        "lost", "members", "not_before", "options", "out", "port", "requests", "size", "tier",
        "tried",
    )  # fmt: skip

    def __init__(self, address: Address, local: str | None, tier: int, max_pause: float) -> None:
        self.host: str = address[0]
        self.port: int = address[1]
        self.local: str | None = local
        self.options: dict[str, Any] = {} if local is None else {"local_addr": (local, 0)}
        self.tier: int = tier
        self.members: Members = Members()
        self.size: int = 0
        self.connecting: int = 0
        self.requests: int = 0
        self.lost: int = 0
        self.errors: int = 0
        self.out: bool = False
        self.tried: bool = False
        self.not_before: float = 0.0
        self.error: BaseException | None = None
        self._failures = 0  # in a row
        self._failed_at = -math.inf
        self._max_pause = max_pause

    def __str__(self) -> str:
        rail = "" if self.local is None else f" from {self.local}"
        return f"{self.host} port {self.port}{rail}"

    def worked(self) -> None:
        """Note that a connect has succeeded."""
        self.tried = True
        self.out = False
        self.error = None

    def failed(self, error: BaseException, began: float, now: float) -> None:
        """Note the failure of an attempt that `began` then; simultaneous ones count as one."""
        self.tried = True
        self.out = True
        self.error = error
        if began >= self._failed_at:
            self._failed_at = now
            self._failures += 1
            pause: float = min(self._max_pause, _FIRST_PAUSE_S * 2 ** min(self._failures - 1, 20))
            self.not_before = now + pause * random.uniform(0.5, 1.0)

    def ended(self, opened_at: float, now: float, error: BaseException) -> None:
        """Note that a connection has ended without having been closed."""
        if now - opened_at < _PROVEN_S:
            self.failed(error, now, now)
        else:
            self._failures = 0
            if not self.size:
                self.out = True

    def stats(self) -> AddressStats:
        """The state and the counters."""
        return AddressStats(
            self.host, self.port, self.local, self.size, self.connecting, self.requests, self.lost,
            self.errors, not self.out if self.tried else None, self.error,
        )  # fmt: skip
