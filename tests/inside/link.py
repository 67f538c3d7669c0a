"""Private parts of aiordma/link/ that tests ask for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiordma import Connection, Listener, RdmaServer
from aiordma._core import Poller, Spin
from aiordma.cm.step import Stage
from aiordma.endpoint.link import Link
from aiordma.link import acceptor, completions, limits, log_share
from aiordma.link.acceptor import Acceptor
from aiordma.link.admission import Ledger, Places
from aiordma.link.log_share import DENIED, VIOLATIONS
from aiordma.streams import server
from aiordma.streams.stream_port import StreamPort
from aiordma.verbs import CompletionChannel, CompletionQueue
from tests.inside.endpoint import link_of

if TYPE_CHECKING:
    import pytest


def limit_half_open(
    monkeypatch: pytest.MonkeyPatch, *, size: int | None = None, pressed_s: float | None = None
) -> None:
    """Let half-open clients pin `size` bytes, and give them so many seconds while others wait."""
    if size is not None:
        monkeypatch.setattr(limits, "_HALF_OPEN_BYTES", size)
    if pressed_s is not None:
        monkeypatch.setattr(acceptor, "PRESSED_HANDSHAKE_S", pressed_s)


def limit_tls(monkeypatch: pytest.MonkeyPatch, *, most_of_one: int, pressed_s: float) -> None:
    """Give a source so many TLS handshakes at a time, and so many seconds while others wait."""
    monkeypatch.setattr(server, "MOST_TLS_HANDSHAKES", 2 * most_of_one)
    monkeypatch.setattr(server, "PRESSED_TLS_S", pressed_s)


def acceptor_without_listener(catch_up: Callable[[], None]) -> Acceptor:
    """An acceptor that drops clients, and looks for events of its connections by `catch_up`."""
    bare: Any = Acceptor.__new__(Acceptor)
    bare._shared = SimpleNamespace(_catch_up=catch_up)
    bare.dropped = 0
    bare.closed = False
    made: Acceptor = bare
    return made


class _Handshake:
    """The task of a handshake, and its request."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.cm_id, self.place = self, None
        self.canceled = False

    def cancel(self) -> None:
        self.canceled = True


def ended_by_close(stages: Iterable[Stage]) -> list[Stage]:
    """The stages in which handshakes end when their listener is closed."""
    bare: Any = acceptor_without_listener(lambda: None)
    bare.places = SimpleNamespace(close=lambda: None, drop_acting=lambda: None)
    bare.loop = SimpleNamespace(call_later=lambda *_: None)
    found = [_Handshake(stage) for stage in stages]
    bare.handshakes = {each: each for each in found}
    bare._stop_most_handshakes()
    return [each.stage for each in found if each.canceled]


def forget_violations() -> None:
    """Let each source have its share of lines in the log once more."""
    VIOLATIONS._periods.clear()
    DENIED._periods.clear()


def lengthen_log_periods(patch: pytest.MonkeyPatch) -> None:
    """Let the time in which a source has its share of lines not end within a test."""
    patch.setattr(log_share, "_PERIOD_S", 600.0)


def _side_of(end: Connection | Link | StreamPort) -> Link | StreamPort:
    return link_of(end) if isinstance(end, Connection) else end


def queue_of(end: Connection | Link | StreamPort) -> CompletionQueue:
    """Its completion queue."""
    return _side_of(end).completions.cq


def channel_of(end: Connection | Link | StreamPort) -> CompletionChannel:
    """The completion channel of its loop."""
    return _side_of(end).completions._channel


def is_quiet(connection: Connection) -> bool:
    """Whether its completion queue is armed for solicited completions only."""
    return link_of(connection).completions._quiet


def acceptor_of(server: Listener | RdmaServer) -> Acceptor:
    """What admits its clients."""
    return server._acceptor


def sources_of(counts: Places | Ledger) -> Collection[Hashable]:
    """The sources of clients that it remembers."""
    return counts._sources if isinstance(counts, Places) else counts._clients.sources


def listeners_of(link: Link) -> int:
    """The reasons for which the completion queue is armed for every completion."""
    return link.completions._listeners


def count_processors(patch: pytest.MonkeyPatch, own: int, of_the_machine: int) -> None:
    """Have connections that are opened from now on find so many processors."""
    patch.setattr(completions, "_processors", lambda: (own, of_the_machine))


def lengthen_spins(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have the longest spins that a configuration can ask for, of a second, last so long."""
    real = CompletionChannel._spin

    def spin(channel: CompletionChannel, cq: CompletionQueue, bound_s: float, **how: bool) -> Spin:
        return real(channel, cq, bound_s if bound_s < 1 else seconds, **how)

    patch.setattr(CompletionChannel, "_spin", spin)


def spins_of(end: Connection | Link | StreamPort) -> tuple[Spin, ...]:
    """How its waits begin with polling."""
    return _side_of(end).completions._spins


def poller_of(end: Connection | Link | StreamPort) -> Poller | None:
    """What polls the queues of its channel."""
    return channel_of(end).drain.poller
