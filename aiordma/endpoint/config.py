"""The settings of a connection (`ConnectionConfig`), and the values computed from them (`Plan`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import Annotated, cast

from aiordma._core import LANDING_SIZE, LANDINGS
from aiordma.arguments import check_kind
from aiordma.cm.connection_parameter import ConnectionParameter, Offer
from aiordma.cm.qp_transition import QPPolicy
from aiordma.endpoint.keys import Keys
from aiordma.endpoint.wire import (
    ASKS_CHECKSUMS,
    FRAME_SIZE,
    KNOWS_LANDINGS,
    OWN_FLAGS,
    RENDEZVOUS,
    TAKES_BARE,
    TAKES_FRAGMENTS,
    Hello,
)
from aiordma.link.settings import (
    RETRIES,
    SECONDS,
    WAITS,
    Between,
    OneOf,
    check_settings,
    suggesting,
)
from aiordma.loop.bounded_cache import BoundedCache
from aiordma.memory.arena import Place
from aiordma.verbs.context import DeviceAttributes
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES
from aiordma.verbs.qp import QPInitAttr

__all__ = [
    "CONTROL_SIZE",
    "CONTROL_SLOTS",
    "COPIED_BYTES",
    "ConnectionConfig",
    "DEFAULTS",
    "LANDING_SIZES",
    "MIN_ANSWERS",
    "MIN_SENDS",
    "MIN_WINDOW",
    "Plan",
    "Terms",
    "hello_of",
    "plan_of",
]

# Receives beyond `recv_depth`, for frames that need no credit: the greeting and two CREDIT frames,
# PING, PONG and END may be in flight at the same time ("Why receives are never overrun" in
# docs/wire.md).  DONE frames have receives of their own, as many as the rendezvous window.
CONTROL_SLOTS = 6
CONTROL_SIZE = 64  # the bytes of a slot for a header, or for the greeting with its proof
# What a connection that grows begins with: the credits of the peer, receives for DONE frames (one
# for each large message in progress to the peer), and send slots.
MIN_WINDOW = 3
MIN_ANSWERS = 1
MIN_SENDS = 1
#: A larger message is not copied: the peer reads it from the program's buffer, which is registered.
COPIED_BYTES = 1 << 18
#: The sizes of landings in bytes, by their numbers.  Number 0 stands for no landing.
LANDING_SIZES = (0, *(LANDING_SIZE << 2 * number for number in range(LANDINGS)))
#: The largest messages, in bytes, that this side sends in a slot with a header, in a slot without
#: one, through several slots, and into a landing of the peer; and the largest for which this side
#: makes a landing.  0: none are sent in this way.
Terms = tuple[int, int, int, int, int]
#: A connection whose slots take no more bytes than this has all of them from the beginning.
SMALL_BYTES = 1 << 16
#: How many slots a connection gets in one step; 16 of the default size fill whole pages.
_STEP = 16
#: In a pool steps are smaller, so that more is left for others: this many until it has all slots.
_POOL_STEPS = 16


@suggesting
@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Settings of a connection; the defaults suit an ordinary server and its clients.

    Attributes:
        raw: Use plain SEND and RECV without headers, credits, rendezvous or keepalive, for peers
            that are not aiordma.  Messages are then limited to `slot_size` bytes, and while the
            program does not receive, the peer's sends have to wait.
        keys: Secrets by which both sides prove to each other that they belong there, before
            anything else of the peer counts; see docs/security.md.  A side with keys and one
            without refuse each other.  None: anybody may connect.  Not with `raw`.
        slot_size: Bytes of a message slot.  Messages of up to `slot_size - 16` bytes, or
            `slot_size` on adapters that support immediates, are copied through one registered
            slot.  A connection begins with 11 slots, and gets more as its traffic requires.  With
            `raw`, or if all of them take 64 KiB or less, it has all from the beginning.
        rendezvous_threshold: Largest message in bytes that may be copied although it exceeds a
            slot.  It goes through a landing of the receiver (up to 1 MiB), or through several slots
            (up to 256 KiB), if they are free; 0 disables both (docs/adr/landings.md).  The receiver
            fetches any other message from the sender's memory.
        recv_depth: How many messages the peer may send ahead of `recv()`, 1 to 16,000.  Three are
            always possible; the connection gets receives for more if there is memory
            (docs/adr/growing-slots.md).  1 is for a program that wants the newest message (see
            `Broadcast`): each message is copied when it is received, and a large one is fetched
            when `recv()` waits for it, whatever `receive_buffer_size` says.
        send_depth: How many messages of this side may be in flight, 1 to 16,000.  The send queue is
            allocated at once: on Soft-RoCE each entry takes 512 bytes.
        shared_slots: Size of a pool of slots that all connections of this loop and device with the
            same `shared_slots` and `slot_size` share, for both directions; they share completion
            queues, too.  See docs/sharing.md.  Each connection is guaranteed 11 slots, and gets up
            to `recv_depth` and `send_depth` of them while the pool has some; when the pool cannot
            guarantee 11, further connections are refused.  None: no pool, and the slots of a loop's
            connections may pin an eighth of the memory that the process may pin.
        shared_queues: Whether connections of this loop and device share completion queues, which
            costs less (docs/growth.md).  With `shared_slots` they always do.
        rendezvous_window: How many large messages may be in progress in each direction, 1 to 255.
            The sender keeps as many buffers of up to 256 KiB registered as it has needed at a time,
            if the budgets of the listener and the process allow it (docs/limits.md).
        check_large: Whether large messages that this side receives are checked end to end by a
            CRC32C, which the peer sends along; see docs/wire.md.  None: only if the adapter is
            software (Soft-RoCE, software iWARP), and the peer's library supports checksums.  True:
            always; a peer whose library does not support them cannot send large messages then.
        max_message_size: Largest message in bytes that this side receives, rounded down to KiB.
        receive_buffer_size: Bytes of large messages that are fetched ahead of `recv()`, if the
            budgets of the listener and the process allow it (docs/limits.md).  The size of a buffer
            is a power of two, and at least 64 KiB.  Further messages are fetched when `recv()`
            waits for them.
        one_sided_depth: How many reads, writes and atomics of the program may be in progress, in
            pieces of 1 MiB, 1 to 4,096.  Half as many reads, at most 64, may be in flight at a time
            in each direction, including those of large messages, if both adapters support that
            many.
        registration_cache_size: Bytes of buffers that stay registered after a read or write of
            more than 64 KiB, for the next one with the same buffer.  They stay exported as well, so
            a bytearray cannot be resized.  0 disables the cache.  On iWARP only buffers of writes
            are cached, because the peer can write to memory that is registered for reads.
        wait: How a wait for completions begins.  "event": the event loop sleeps until the adapter
            raises an event.  "spin": the completion queue is polled for up to `spin_us` before the
            loop sleeps, which keeps a processor busy.  "adaptive": as "spin" while recent waits
            were shorter than `spin_us`, otherwise as "event".  On a machine with a single processor
            all are as "event".  See docs/connecting.md.
        spin_us: Microseconds of polling in each wait, 1 to 1,000,000.
        tos: Type of service of the packets (IPv4), or traffic class (IPv6), 0 to 255; None for the
            system's default.  The connecting side chooses for both.
        ack_timeout: Exponent e of the adapter's acknowledgement timeout, 4.096 us * 2**e; 16 means
            268 ms.  The adapter retries six times, so a dead peer is detected after seven timeouts,
            1.9 s; the specification lets an adapter wait up to four times as long in each.
        rnr_retry_count: How often each side retries when the other has no receive posted, 0 to 7;
            7 means forever.
        close_timeout_s: Seconds within which sent messages have to arrive when the connection ends:
            `close()`, `wait_closed()` after `abort()`, and the end of the event loop wait for them.
        keepalive_s: Seconds between two checks whether the peer has been silent.  A silent peer is
            sent a PING, and its answer counts as a sign of life; so the connecting side of an idle
            connection sends one at every second check.  A PING that arrives is a sign of life, too.
            Therefore the accepting side waits for one more check before it sends its own, if
            `idle_timeout_s` is at least three times `keepalive_s`, as it is by default.
        idle_timeout_s: Seconds of silence after which the connection is given up.  This also limits
            how long the peer's program may be stopped; as up to twice `keepalive_s` may have passed
            since the last sign of life, the time that is left can be shorter by that.
        raw_idle_timeout_s: Seconds without a message of the peer after which a raw connection is
            given up; it may take a quarter longer.  None: never, because a peer that only reads,
            writes and uses atomics never sends a message.
        stall_timeout_s: Seconds that a send may wait for a peer that is alive but accepts nothing;
            None: as long as the peer is alive.
        request_timeout_s: Seconds that a `request()` without a `timeout` of its own may take
            altogether, until the answer is there; None: as long as the connection lasts.
    """

    raw: bool = False
    keys: Keys | None = None
    slot_size: int = 5888
    rendezvous_threshold: Annotated[int, Between(0, 1 << 50)] = 1 << 20
    recv_depth: Annotated[int, Between(1, 16_000)] = 64
    send_depth: Annotated[int, Between(1, 16_000)] = 32
    shared_slots: int | None = None
    shared_queues: bool = True
    rendezvous_window: Annotated[int, Between(1, 255)] = 8
    check_large: bool | None = None
    max_message_size: Annotated[int, Between(1024, (1 << 42) - 1)] = 64 << 20
    receive_buffer_size: Annotated[int, Between(1, 1 << 50)] = 8 << 20
    one_sided_depth: Annotated[int, Between(1, 4096)] = 16
    registration_cache_size: Annotated[int, Between(0, 1 << 50)] = 0
    wait: Annotated[str, OneOf(WAITS)] = "event"
    spin_us: Annotated[float, Between(1, 1_000_000)] = 50
    tos: Annotated[int | None, Between(0, 255)] = None
    ack_timeout: Annotated[int, Between(8, 31)] = 16
    rnr_retry_count: Annotated[int, Between(0, 7)] = 6
    close_timeout_s: Annotated[float, SECONDS] = 5.0
    keepalive_s: Annotated[float, SECONDS] = 10.0
    idle_timeout_s: Annotated[float, SECONDS] = 30.0
    raw_idle_timeout_s: Annotated[float | None, SECONDS] = None
    stall_timeout_s: Annotated[float | None, SECONDS] = None
    request_timeout_s: Annotated[float | None, SECONDS] = 60.0

    def __post_init__(self) -> None:
        check_kind("keys", self.keys, Keys)  # first: its error does not show the value, a secret
        check_settings(self)
        if self.raw and self.keys is not None:
            msg = "a raw connection cannot have keys: its peer does not know the handshake"
            raise ValueError(msg)
        smallest = 1 if self.raw else 2 * (FRAME_SIZE + RENDEZVOUS.size)
        Between(smallest, 1 << 30).check("slot_size", self.slot_size, int)
        if self.shared_slots is not None:
            self._check_sharing(self.shared_slots)

    def __hash__(self) -> int:
        # Not of all fields: each connection finds its plan by its settings, three times.
        return hash((self.slot_size, self.recv_depth, self.send_depth))

    def _check_sharing(self, slots: int) -> None:
        if self.raw:
            msg = "a raw connection cannot share slots: its peer knows no credits"
            raise ValueError(msg)
        if slots < self.guaranteed:
            msg = f"shared_slots is {slots}; one connection alone needs {self.guaranteed}"
            raise ValueError(msg)

    @property
    def receives(self) -> int:
        """The depth of the receive queue."""
        # `control_depth` is repeated here, because a property is slow and this is asked often.
        return self.recv_depth + (0 if self.raw else CONTROL_SLOTS + self.rendezvous_window)

    @property
    def sends(self) -> int:
        """The depth of the send queue."""
        own = self.send_depth + (0 if self.raw else CONTROL_SLOTS)
        return own + self.read_depth + self.one_sided_depth

    @property
    def read_depth(self) -> int:
        """How many RDMA READs may be in flight at a time, and how many are served at a time."""
        return max(1, min(self.one_sided_depth // 2, 64))

    @property
    def guaranteed(self) -> int:
        """How many slots of a pool a connection has at any time."""
        return min(MIN_WINDOW, self.recv_depth) + CONTROL_SLOTS + MIN_ANSWERS + MIN_SENDS

    @property
    def eager_size(self) -> int:
        """The largest message in bytes that fits into a slot behind a header."""
        return self.slot_size if self.raw else self.slot_size - FRAME_SIZE

    @property
    def control_depth(self) -> int:
        """How many receives are reserved for frames that need no credit."""
        return 0 if self.raw else CONTROL_SLOTS + self.rendezvous_window


#: For connections without a configuration.  A single object, so that there is a single `Plan`.
DEFAULTS = ConnectionConfig()


class Plan:
    """The values that are computed from a configuration, once for all its connections.

    Attributes:
        config: The configuration.
        policy: The access flags, timeouts and retries of the queue pairs.
        grows: Whether a connection begins with few slots, and gets more in steps.
        answers: How many DONE frames have a receive from the beginning; each answers one large
            message to the peer.
        complete: Whether the connection has all of its receive slots from the beginning.
        guaranteed: How many slots of a pool the connection has from the beginning to its end.
        unit: What a slot counts in the budget: one slot of a pool, or its bytes.
        step: How many slots are added at a time.
        places: Where the first slots are in their memory: receive slots, send slots, and slots for
            frames without data.
        first_bytes: The size of this memory.
        pinned: The bytes of whole pages that a connection pins from its handshake on, which count
            against RLIMIT_MEMLOCK.
        quick: Whether the first slots are few enough to be registered without a thread.
        completions: How many completions the connection may need room for in a completion queue.
        expected: How many of these it needs with its first slots.  Room for the READs of large
            messages, and for operations of the program, is made when the first is posted.
        arrivals: The size of the ring of messages that have arrived, a power of two.
        silence: The seconds between two checks of the keepalive, and the seconds of silence after
            which the peer is given up; None for never.
    """

    __slots__ = (
        "_offers", "_terms", "answers", "arrivals", "complete", "completions", "config", "expected",
        "first_bytes", "grows", "guaranteed", "pinned", "places", "policy", "quick", "silence",
        "step", "unit",
    )  # fmt: skip

    answers: int

    def __init__(self, config: ConnectionConfig) -> None:
        self.config: ConnectionConfig = config
        self.policy: QPPolicy = QPPolicy(
            access=Access(0),
            ack_timeout=config.ack_timeout,
            max_retry_count=RETRIES,
            max_rnr_retry_count=config.rnr_retry_count,
            max_dest_rd_atomic=config.read_depth,
            max_rd_atomic=config.read_depth,
        )
        receives, sends, self.answers = config.receives, config.send_depth, 0
        if not config.raw:
            self.answers = config.rendezvous_window
        slots = (receives + sends) * config.slot_size
        self.grows: bool = config.shared_slots is not None or (
            not config.raw and slots > SMALL_BYTES
        )
        if self.grows:
            self.answers = MIN_ANSWERS
            receives, sends = config.guaranteed - MIN_SENDS, MIN_SENDS
        # A pool counts slots, the first ones included; the budget of a loop counts further bytes.
        pooled = config.shared_slots is not None
        self.guaranteed: int = receives + sends if pooled else 0
        self.complete: bool = receives >= config.receives
        self.unit: int = 1 if pooled else config.slot_size
        step = max(4, (config.receives - receives) // _POOL_STEPS) if pooled else _STEP
        self.step: int = max(1, min(step, INLINE_BYTES // config.slot_size))
        shapes = [(receives, config.slot_size), (sends, config.slot_size)]
        if not config.raw:
            shapes.append((CONTROL_SLOTS, CONTROL_SIZE))
        places, slots = [], 0
        for count, size in shapes:
            places.append((slots, count, size))
            slots += count * size
        self.places: tuple[Place, ...] = tuple(places)
        self.first_bytes: int = slots
        self.quick: bool = slots <= INLINE_BYTES
        self.pinned: int = -(-slots // PAGESIZE) * PAGESIZE
        self.completions: int = config.sends + config.receives
        self.expected: int = receives + sends + (0 if config.raw else CONTROL_SLOTS)
        self.arrivals: int = 1 << (config.receives - 1).bit_length()
        limit = config.raw_idle_timeout_s if config.raw else config.idle_timeout_s
        interval: float | None = None
        if limit is not None:
            # However short the limit is, a PING has to come before the peer is given up.
            interval = limit / 4 if config.raw else min(config.keepalive_s, limit / 2)
        self.silence: tuple[float | None, float | None] = interval, limit
        self._offers: BoundedCache[tuple[int, int], Offer] = BoundedCache()
        self._terms: BoundedCache[tuple[int, int, int, bool], Terms] = BoundedCache()

    def attributes(self, inline: int) -> QPInitAttr:
        """The attributes of the queue pairs, without completion queues.

        Args:
            inline: How many bytes a SEND can have inside its work request.
        """
        return QPInitAttr(
            send_cq=cast("CompletionQueue", None), max_send_wr=self.config.sends,
            max_recv_wr=self.config.receives, max_inline_data=inline,
        )  # fmt: skip

    def offer(
        self, limits: DeviceAttributes, responder_resources: int = 255, initiator_depth: int = 255
    ) -> Offer:
        """The connection parameters of a request, or of the answer to one.

        Args:
            limits: The attributes of the device, which limit the depths.
            responder_resources: How many RDMA READs the peer wants to have in flight at a time.
            initiator_depth: How many RDMA READs the peer serves at a time.
        """
        # librdmacm refuses to serve more than the device can, and more than it can start, too.
        served = min(responder_resources, limits.max_qp_rd_atom)
        started = min(initiator_depth, limits.max_qp_init_rd_atom)
        key = served, started
        offer = self._offers.get(key)
        if offer is None:
            config = self.config
            parameter = ConnectionParameter.exact(
                responder_resources=min(config.read_depth, served),
                initiator_depth=min(config.read_depth, started),
                retry_count=RETRIES,
                rnr_retry_count=config.rnr_retry_count,
            )
            offer = self._offers.store(key, parameter._numbers(limits))
        return offer

    def terms(self, theirs: Hello, *, bare: bool) -> Terms:
        """How large a message may be to be sent to a peer in each of the ways.

        Args:
            theirs: The peer's half of the handshake.
            bare: Whether the adapter supports immediates.
        """
        # Not `theirs` itself, whose hash and comparison are Python's, and which the private data of
        # the peer's program are part of.
        key = theirs.slot_size, theirs.max_message_kib, theirs.flags, bare
        terms = self._terms.get(key)
        if terms is None:
            terms = self._terms.store(key, _terms_of(self.config, theirs, bare=bare))
        return terms

    @property
    def window(self) -> int:
        """The credits that the peer has at first; meaningless for raw connections."""
        return self.places[0][1] - CONTROL_SLOTS - self.answers

    def state(self, *, grows: bool) -> dict[str, int | bool]:
        """The sizes of a `MessageState`, in the order of `AIO_SIZES` in _core/connection.h.

        `grows`: whether it gets more slots without a pool.
        """
        config = self.config
        return {
            "sends": self.places[1][1],
            "receives": self.places[0][1],
            "send_depth": config.send_depth,
            "arrivals": self.arrivals,
            "controls": 0 if config.raw else CONTROL_SLOTS,
            "exchanges": 0 if config.raw else config.rendezvous_window,
            "answers": self.answers,
            "reads": config.read_depth,
            "eager_size": config.eager_size,
            "largest": config.max_message_size,
            "raw": config.raw,
            "grows": grows,
        }


def _terms_of(config: ConnectionConfig, theirs: Hello, *, bare: bool) -> Terms:
    slot = min(config.slot_size, theirs.slot_size)
    limit = theirs.max_message_kib * 1024
    threshold = config.rendezvous_threshold
    written = min(threshold, LANDING_SIZES[-1])
    lands = bare and theirs.flags & KNOWS_LANDINGS
    return (
        min(slot - FRAME_SIZE, limit),
        min(slot, limit) if bare and theirs.flags & TAKES_BARE else 0,
        min(threshold, limit, COPIED_BYTES) if theirs.flags & TAKES_FRAGMENTS else 0,
        min(written, limit) if lands else 0,
        min(written, config.max_message_size) if lands else 0,
    )


def hello_of(
    config: ConnectionConfig,
    private_data: bytes,
    window: int | None = None,
    *,
    check: bool = False,
    bare: bool = False,
) -> Hello:
    """This side's half of the handshake.

    Args:
        config: The settings of the connection.
        private_data: The private data of the program.
        window: The credits that the peer has at first; None: `config.recv_depth`.
        check: Whether this side checks the large messages that it receives.
        bare: Whether the adapter supports immediates.
    """
    return Hello(
        recv_depth=config.recv_depth if window is None else window,
        rendezvous_window=config.rendezvous_window,
        slot_size=config.slot_size,
        max_message_kib=config.max_message_size // 1024,
        user_data=private_data,
        flags=OWN_FLAGS
        | (ASKS_CHECKSUMS if check else 0)
        | (TAKES_BARE | KNOWS_LANDINGS if bare else 0),
    )


@functools.lru_cache(64)
def plan_of(config: ConnectionConfig) -> Plan:
    """The plan of a configuration, the same for those that are equal."""
    return Plan(config)
