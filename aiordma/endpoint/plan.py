"""Plan: values that follow from a configuration alone, made once for all of its connections."""

from __future__ import annotations

from mmap import PAGESIZE
from typing import cast

from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.qp_transition import QPPolicy
from aiordma.endpoint.config import CONTROL_SLOTS, ConnectionConfig
from aiordma.endpoint.wire import Hello
from aiordma.loop.kept import kept
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES
from aiordma.verbs.qp import QPInitAttr
from aiordma.verbs.rnr_timer import rnr_timer_code

__all__ = ["CONTROL_SIZE", "Plan", "hello_of", "plan_of"]

CONTROL_SIZE = 64  # bytes of a slot for messages without data: a header


class Plan:
    """The values that follow from `config`.

    Attributes:
        config: The configuration.
        policy: Bounds that the queue pairs apply.
        shapes: Slots that a connection has for itself: how many of which size, for receives, sends
            and messages without data.
        size: Bytes of these.
        pinned: Bytes of the pages that a connection pins from its handshake on, which count against
            RLIMIT_MEMLOCK; if the connection shares slots, those of its guaranteed slots.
        quick: Whether they are a connection's own, and registered without a thread.
        completions: Room in the completion queue.
        arrivals: Places for messages that have arrived, a power of two.
        control: Receives kept for messages without credit.
        silence: Seconds between two looks whether the peer is there, and seconds of silence after
            which it is given up; None for never.
    """

    __slots__ = (
        "_attributes", "_hellos", "_parameters", "arrivals", "completions", "config",
        "control", "pinned", "policy", "quick", "shapes", "silence", "size",
    )  # fmt: skip

    def __init__(self, config: ConnectionConfig) -> None:
        self.config = config
        self.policy = QPPolicy(
            access=Access(0),
            ack_timeout=config.ack_timeout,
            max_retry_count=config.retry_count,
            max_rnr_retry_count=config.rnr_retry_count,
            min_rnr_timer=rnr_timer_code(config.min_rnr_timer_ms),
            max_dest_rd_atomic=config.responder_resources,
            max_rd_atomic=config.initiator_depth,
        )
        shapes = [(config.receives, config.slot_size), (config.send_depth, config.slot_size)]
        if not config.raw:
            shapes.append((CONTROL_SLOTS, CONTROL_SIZE))
        self.shapes = tuple(shapes)
        self.size = sum(count * size for count, size in shapes)
        slots = self.size
        if config.shared_slots is not None:
            slots = config.guaranteed * config.slot_size + CONTROL_SLOTS * CONTROL_SIZE
        self.pinned = -(-slots // PAGESIZE) * PAGESIZE
        self.quick = config.shared_slots is None and self.size <= INLINE_BYTES
        self.completions = config.sends + config.receives
        self.arrivals = 1 << (config.receives - 1).bit_length()
        self.control = config.control_depth
        limit = config.raw_idle_timeout_s if config.raw else config.idle_timeout_s
        interval: float | None = None
        if limit is not None:
            # However short the patience, the peer is asked before it is given up.
            interval = limit / 4 if config.raw else min(config.keepalive_s, limit / 2)
        self.silence = interval, limit
        self._attributes: dict[int, QPInitAttr] = {}
        self._parameters: dict[tuple[int, int], ConnectionParameter] = {}
        self._hellos: dict[tuple[int, bool], bytes] = {}

    def attributes(self, inline: int) -> QPInitAttr:
        """Of a queue pair with room for so many inline bytes; its completion queue is not in it."""
        attr = self._attributes.get(inline)
        if attr is None:
            config = self.config
            attr = self._attributes[inline] = QPInitAttr(
                send_cq=cast("CompletionQueue", None), max_send_wr=config.sends,
                max_recv_wr=config.receives, max_inline_data=inline,
            )  # fmt: skip
        return attr

    def parameter(
        self, responder_resources: int = 255, initiator_depth: int = 255
    ) -> ConnectionParameter:
        """Depths, at most those given, and retries as the configuration says, 0 included.

        Connections share them; so they are never changed.
        """
        config = self.config
        depths = (
            min(config.responder_resources, responder_resources),
            min(config.initiator_depth, initiator_depth),
        )
        parameter = self._parameters.get(depths)
        if parameter is None:
            parameter = self._parameters[depths] = ConnectionParameter.exact(
                responder_resources=depths[0],
                initiator_depth=depths[1],
                retry_count=config.retry_count,
                rnr_retry_count=config.rnr_retry_count,
            )
        return parameter

    def hello(self, private_data: bytes, window: int, room: int, *, check: bool) -> bytes:
        """This side's half of the handshake, as private data of at most `room` bytes.

        Args:
            private_data: The program's.
            window: Data messages that the peer may send at first.
            room: Bytes.
            check: Whether this side checks the large messages that it receives.
        """
        if private_data:
            return hello_of(self.config, private_data, window, check=check).pack(room)
        packed = self._hellos.get((window, check))
        if packed is None:
            packed = hello_of(self.config, b"", window, check=check).pack(room)
            self._hellos[window, check] = packed
        return packed


def hello_of(
    config: ConnectionConfig,
    private_data: bytes,
    window: int | None = None,
    *,
    check: bool = False,
) -> Hello:
    """This side's half of the handshake; `window` is what the peer may send at first."""
    return Hello(
        recv_depth=config.recv_depth if window is None else window,
        rendezvous_window=config.rendezvous_window,
        slot_size=config.slot_size,
        max_message_kib=config.max_message_size // 1024,
        user_data=private_data,
        asks_checksums=check,
    )


plan_of = kept(Plan)
