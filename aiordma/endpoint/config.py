"""ConnectionConfig: every number of a connection, with its unit; Plan: the values that follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from mmap import PAGESIZE
from typing import cast

from aiordma._core import LANDING_SIZE, LANDINGS
from aiordma.arguments import check_kind
from aiordma.cm.connection_parameter import ConnectionParameter, Offer
from aiordma.cm.qp_transition import QPPolicy
from aiordma.endpoint.wire import FRAME_SIZE, RENDEZVOUS, Hello
from aiordma.link.config_check import check_numbers, check_seconds, check_wait
from aiordma.loop.kept import Kept, kept
from aiordma.memory.arena import Place
from aiordma.verbs.context import DeviceAttributes
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES
from aiordma.verbs.qp import QPInitAttr
from aiordma.verbs.rnr_timer import rnr_timer_code

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

# Receives beyond the data depth, for messages that need no credit (docs/wire.md): two CREDIT
# frames, PING, PONG and END can be under way at a time, and one more is kept in reserve.  For the
# DONE frames there are as many again as the rendezvous window.
CONTROL_SLOTS = 6
CONTROL_SIZE = 64  # bytes of a slot for messages without data: a header
# At the beginning: data messages that the peer may send ahead, large messages that may be under way
# to the peer, which answers each, and send slots.
MIN_WINDOW = 3
MIN_ANSWERS = 1
MIN_SENDS = 1
#: Larger messages are read out of the program's own buffer, which is registered for it.
COPIED_BYTES = 1 << 18
#: Bytes of the landings, by their numbers; 0 is none.
LANDING_SIZES = (0, *(LANDING_SIZE << 2 * number for number in range(LANDINGS)))
#: Bytes of the largest messages between two sides that go in a slot with a header, in a slot
#: without, through several slots, and into a landing; and of a landing of this side.  0: none do.
Terms = tuple[int, int, int, int, int]
#: Bytes of slots that a connection has from the beginning, rather than in steps.
SMALL_BYTES = 1 << 16
#: Slots of a step; 16 of the default size fill whole pages.
_STEP = 16
#: A member of a pool takes smaller steps, for the others: from its first slots to all so many.
_POOL_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionConfig:
    """Settings of a connection; the defaults suit an ordinary server and its clients.

    Attributes:
        raw: Plain SEND and RECV without headers, credits, rendezvous or keepalive, for peers that
            are not aiordma.  Messages are then limited to `slot_size` bytes, and receives that
            the program does not take in time leave the peer's sends waiting.
        slot_size: Bytes of a message slot.  Messages up to `slot_size - 16`, or `slot_size` on
            adapters with immediates, are copied through a registered slot.  A connection begins
            with 11 slots, and gets more as its traffic asks for them; if all take 64 KiB or less,
            or with `raw`, it has all from the beginning.
        rendezvous_threshold: Bytes up to which a longer message is copied: through a landing of
            the receiver, of up to 1 MiB, or through several slots, up to 256 KiB, if they are free
            on both sides; 0 for neither (docs/adr/landings.md).  The receiver fetches other
            messages from the sender's memory.
        recv_depth: Data messages that the peer may send ahead, 2 to 16,000; three in any case, and
            so many if there is memory (docs/adr/growing-slots.md).
        send_depth: Messages of this side that may be on their way, 1 to 16,000.  The adapter's ring
            for them is made at once: on Soft-RoCE it takes 512 bytes for each request.
        shared_slots: Slots that all connections of this loop and device with equal `shared_slots`
            and `slot_size` share, for both directions, as well as completion queues; see
            docs/sharing.md.  Each is guaranteed 11 slots, and gets up to `recv_depth` and
            `send_depth` of them while there are some; a connection for which the guarantee is not
            left is refused.  None: the slots of a loop's connections may pin an eighth of the
            memory that the process may pin.
        shared_queues: Whether connections of this loop and device complete in common queues, which
            costs less (docs/growth.md), or each in one of its own; those with `shared_slots` do the
            former in any case.
        rendezvous_window: Large messages that may be under way in one direction, 1 to 255.  The
            sender keeps as many buffers of up to 256 KiB registered as were under way at a time,
            as far as the budgets of the listener and the process allow (docs/limits.md).
        check_large: Whether the large messages that this side receives are checked end to end, by a
            CRC32C that the peer sends along; see docs/wire.md.  None: where the adapter is a
            program (Soft-RoCE, software iWARP), and the peer's library knows checksums.  True:
            everywhere; a peer whose library does not know them cannot send large messages then.
        max_message_size: Largest message that this side receives, bytes; counted in full KiB.
        receive_buffer_size: Bytes of large messages that are fetched ahead of `recv()`, as far as
            the budgets of the listener and the process allow (docs/limits.md); a buffer has a
            power of two of bytes, 64 KiB at least.  Another message is fetched when `recv()` waits
            for it.
        responder_resources: RDMA reads of the peer served at a time, 1 to 255.
        initiator_depth: Own RDMA reads under way at a time, 1 to 255.
        one_sided_depth: Reads, writes and atomics of the program that may be under way, in pieces
            of 1 MiB, 1 to 4,096.
        registration_cache_size: Bytes of buffers that stay registered after a read or write of
            more than 64 KiB, for the next one with the same buffer.  They stay exported, too: a
            bytearray among them cannot be resized.  0: none.  On iWARP for writes alone: the peer
            could write to memory that stays registered for reads.
        wait: How a wait for completions begins. "event": the event loop sleeps until the adapter
            raises an event.  "spin": the completion queue is polled for up to `spin_us` before the
            loop sleeps, which takes a processor.  "adaptive": the same while recent waits were
            shorter than `spin_us`, otherwise as "event".  On a machine with a single processor all
            are as "event".  See docs/connecting.md.
        spin_us: Microseconds of polling in each wait, 1 to 1,000,000.
        tos: Type of service of the packets (IPv4), or traffic class (IPv6), 0 to 255; None for the
            system's.  The connecting side chooses for both.
        min_rnr_timer_ms: Milliseconds that the peer waits when it found no receive posted here,
            0.01 to 655.36, rounded up to one of the 32 delays of InfiniBand.
        ack_timeout: Exponent e of the adapter's acknowledgement timeout, 4.096 us * 2**e; 16 is
            268 ms.  A dead peer is noticed after (retry_count + 1) timeouts.
        retry_count: Retries without acknowledgement, 0 to 6.  7 is refused: on Soft-RoCE it
            means for ever.
        rnr_retry_count: Retries of each side when the other is not ready, 0 to 7; 7 means for ever.
        connect_timeout_s: Seconds for a connection to be made, names and all addresses included;
            the time in which other connects of this loop to the address go first does not count.
        handshake_timeout_s: Seconds that a listener gives a client to complete the handshake, in
            which the time does not count that its own loop is late; and a request to be answered by
            the program.
        close_timeout_s: Seconds that sent messages have to arrive: `close()` waits for them, as do
            `wait_closed()` after `abort()` and the end of the event loop.
        keepalive_s: Seconds between two looks whether something was heard of the peer, which is
            asked for a sign of life after silence.  If `idle_timeout_s` is at least three times as
            long, as by default, connections to the same event loop are asked in turn, one for all,
            at every second look (docs/adr/keepalive-groups.md): an idle connection is asked by the
            connecting side after twice `keepalive_s`.  The accepting side asks later, because the
            question of the connecting side is a sign of life, too.
        idle_timeout_s: Seconds of silence after which the connection is given up; also the
            bound for a peer whose program has stopped.  Up to twice `keepalive_s` may have passed
            of them when it stops.
        raw_idle_timeout_s: Seconds without a message of the peer after which a raw connection is
            given up, up to a quarter more; None for never, because a peer of reads, writes and
            atomics alone is never heard.
        stall_timeout_s: Seconds that a send waits for a living peer that takes nothing; None
            waits as long as it lives.
        request_timeout_s: Seconds that a `request()` without a `timeout` of its own waits, all in
            all, for the peer's grant and the answer; None waits as long as the connection lives.
        fetch_timeout_s: Seconds after which the connection is given up if nothing has arrived of a
            large message that is being read, in pieces of up to 1 MiB.
        pressed_fetch_rate: Bytes per second at which a large message has to arrive, on average over
            three seconds and but for 1 MiB, while messages of another source wait for memory of the
            budget (docs/limits.md); otherwise the connection is given up.
    """

    raw: bool = False
    slot_size: int = 5888
    rendezvous_threshold: int = 1024 * 1024
    recv_depth: int = 64
    send_depth: int = 32
    shared_slots: int | None = None
    shared_queues: bool = True
    rendezvous_window: int = 8
    check_large: bool | None = None
    max_message_size: int = 64 << 20
    receive_buffer_size: int = 8 << 20
    responder_resources: int = 8
    initiator_depth: int = 8
    one_sided_depth: int = 16
    registration_cache_size: int = 0
    wait: str = "event"
    spin_us: float = 50
    tos: int | None = None
    min_rnr_timer_ms: float = 0.64
    ack_timeout: int = 16
    retry_count: int = 6
    rnr_retry_count: int = 6
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 10.0
    close_timeout_s: float = 5.0
    keepalive_s: float = 10.0
    idle_timeout_s: float = 30.0
    raw_idle_timeout_s: float | None = None
    stall_timeout_s: float | None = None
    request_timeout_s: float | None = 60.0
    fetch_timeout_s: float = 30.0
    pressed_fetch_rate: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("raw", "shared_queues"):
            check_kind(name, getattr(self, name), bool, none=False)
        smallest = 2 * (FRAME_SIZE + RENDEZVOUS.size)
        check_numbers(
            self,
            (
                ("slot_size", 1 if self.raw else smallest, 1 << 30),
                ("rendezvous_threshold", 0, 1 << 50),
                ("recv_depth", 2, 16_000),
                ("send_depth", 1, 16_000),
                ("rendezvous_window", 1, 255),
                ("max_message_size", 1024, (1 << 32) * 1024 - 1),
                ("receive_buffer_size", 1, 1 << 50),
                ("pressed_fetch_rate", 1, 1 << 50),
                ("responder_resources", 1, 255),
                ("initiator_depth", 1, 255),
                ("one_sided_depth", 1, 4096),
                ("registration_cache_size", 0, 1 << 50),
                ("ack_timeout", 8, 31),
                ("retry_count", 0, 6),
                ("rnr_retry_count", 0, 7),
                ("tos", 0, 255),
            ),
            optional=("tos",),
        )
        if self.check_large not in (None, True, False):
            msg = f"check_large is a bool or None, not {self.check_large!r}"
            raise TypeError(msg)
        check_wait(self)
        rnr_timer_code(self.min_rnr_timer_ms)
        check_seconds(
            self,
            (
                "connect_timeout_s", "handshake_timeout_s", "close_timeout_s", "keepalive_s",
                "idle_timeout_s", "raw_idle_timeout_s", "stall_timeout_s", "request_timeout_s",
                "fetch_timeout_s",
            ),
            optional=("raw_idle_timeout_s", "stall_timeout_s", "request_timeout_s"),
        )  # fmt: skip
        if self.shared_slots is not None:
            self._check_sharing(self.shared_slots)

    def _check_sharing(self, slots: int) -> None:
        if not isinstance(slots, int) or isinstance(slots, bool):
            msg = f"shared_slots is an int or None, not {slots!r}"
            raise TypeError(msg)
        if self.raw:
            msg = "a raw connection cannot share slots: its peer knows no credits"
            raise ValueError(msg)
        if slots < self.guaranteed:
            msg = f"shared_slots is {slots}; one connection alone needs {self.guaranteed}"
            raise ValueError(msg)

    @property
    def receives(self) -> int:
        """Receives at most."""
        # Without `control_depth`, because each frame for Python asks for it.
        return self.recv_depth + (0 if self.raw else CONTROL_SLOTS + self.rendezvous_window)

    @property
    def sends(self) -> int:
        """Work requests of the send queue at most."""
        own = self.send_depth + (0 if self.raw else CONTROL_SLOTS)
        return own + self.initiator_depth + self.one_sided_depth

    @property
    def guaranteed(self) -> int:
        """Slots that a connection with fewer than it may get has at any time."""
        return min(MIN_WINDOW, self.recv_depth) + CONTROL_SLOTS + MIN_ANSWERS + MIN_SENDS

    @property
    def eager_size(self) -> int:
        """Largest message that goes through slots of this size, bytes."""
        return self.slot_size if self.raw else self.slot_size - FRAME_SIZE

    @property
    def control_depth(self) -> int:
        """Receives kept for messages without credit, at most."""
        return 0 if self.raw else CONTROL_SLOTS + self.rendezvous_window


#: For connections without a configuration: a single object, so that it has a single `Plan`.
DEFAULTS = ConnectionConfig()


class Plan:
    """The values that follow from `config`.

    Attributes:
        config: The configuration.
        policy: Bounds that the queue pairs apply.
        grows: Whether a connection begins with few slots, and gets more in steps.
        answers: Large messages to the peer whose answers have a receive from the beginning.
        guaranteed: Slots of a pool that the connection has at any time: its first.
        unit: Units of the budget that a slot takes.
        step: Slots that come together.
        places: Where the first slots are in their memory: those for receives, for sends, and for
            messages without data.
        first_bytes: Bytes of this memory.
        pinned: Bytes of the pages that a connection pins from its handshake on, which count against
            RLIMIT_MEMLOCK.
        quick: Whether the first slots are registered without a thread.
        completions: Room in the completion queue.
        expected: Completions that are expected with the first slots; the reads of large messages,
            and operations of the program, are expected from the first of them on.
        arrivals: Places for messages that have arrived, a power of two.
        silence: Seconds between two looks whether the peer is there, and seconds of silence after
            which it is given up; None for never.
    """

    __slots__ = (
        "_offers", "_terms", "answers", "arrivals", "completions", "config", "expected",
        "first_bytes", "grows", "guaranteed", "pinned", "places", "policy", "quick", "silence",
        "step", "unit",
    )  # fmt: skip

    answers: int

    def __init__(self, config: ConnectionConfig) -> None:
        self.config: ConnectionConfig = config
        self.policy: QPPolicy = QPPolicy(
            access=Access(0),
            ack_timeout=config.ack_timeout,
            max_retry_count=config.retry_count,
            max_rnr_retry_count=config.rnr_retry_count,
            min_rnr_timer=rnr_timer_code(config.min_rnr_timer_ms),
            max_dest_rd_atomic=config.responder_resources,
            max_rd_atomic=config.initiator_depth,
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
        # In a pool the first slots count, too, and it counts slots; a loop's budget counts bytes.
        pooled = config.shared_slots is not None
        self.guaranteed: int = receives + sends if pooled else 0
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
            # However short the patience, the peer is asked before it is given up.
            interval = limit / 4 if config.raw else min(config.keepalive_s, limit / 2)
        self.silence: tuple[float | None, float | None] = interval, limit
        self._offers: Kept[tuple[int, int, int], Offer] = Kept()
        # By identity: all hellos of an event loop are mostly the same object.
        self._terms: Kept[tuple[int, bool], tuple[Hello, Terms]] = Kept()

    def attributes(self, inline: int) -> QPInitAttr:
        """The attributes of a queue pair with room for so many inline bytes, without its queues."""
        return QPInitAttr(
            send_cq=cast("CompletionQueue", None), max_send_wr=self.config.sends,
            max_recv_wr=self.config.receives, max_inline_data=inline,
        )  # fmt: skip

    def offer(
        self, limits: DeviceAttributes, responder_resources: int = 255, initiator_depth: int = 255
    ) -> Offer:
        """Depths, at most those given, and retries as the configuration says, 0 included.

        Args:
            limits: The device's, of which an offer has no more.
            responder_resources: RDMA reads that the peer wants to have under way at a time.
            initiator_depth: RDMA reads that the peer serves at a time.
        """
        key = limits.max_qp_init_rd_atom, responder_resources, initiator_depth
        offer = self._offers.get(key)
        if offer is None:
            config = self.config
            parameter = ConnectionParameter.exact(
                responder_resources=min(config.responder_resources, responder_resources),
                initiator_depth=min(config.initiator_depth, initiator_depth),
                retry_count=config.retry_count,
                rnr_retry_count=config.rnr_retry_count,
            )
            offer = self._offers.keep(key, parameter._numbers(limits))
        return offer

    def terms(self, theirs: Hello, *, bare: bool) -> Terms:
        """The sizes of messages between this side and a peer.

        Args:
            theirs: The peer's half of the handshake.
            bare: Whether the adapter has immediates.
        """
        key = id(theirs), bare
        known = self._terms.get(key)
        if known is None:
            known = self._terms.keep(key, (theirs, _terms_of(self.config, theirs, bare=bare)))
        return known[1]

    @property
    def window(self) -> int:
        """Data messages that the peer may send at first; meaningless for raw connections."""
        return self.places[0][1] - CONTROL_SLOTS - self.answers

    def state(self, *, grows: bool) -> dict[str, int | bool]:
        """The arguments of a `MessageState`; `grows`: whether slots come without a pool."""
        config = self.config
        return {
            "sends": self.places[1][1],
            "receives": self.places[0][1],
            "send_depth": config.send_depth,
            "arrivals": self.arrivals,
            "controls": 0 if config.raw else CONTROL_SLOTS,
            "exchanges": 0 if config.raw else config.rendezvous_window,
            "answers": self.answers,
            "reads": config.initiator_depth,
            "raw": config.raw,
            "grows": grows,
        }


def _terms_of(config: ConnectionConfig, theirs: Hello, *, bare: bool) -> Terms:
    slot = min(config.slot_size, theirs.slot_size)
    limit = theirs.max_message_kib * 1024
    threshold = config.rendezvous_threshold
    written = min(threshold, LANDING_SIZES[-1])
    lands = bare and theirs.knows_landings
    return (
        min(slot - FRAME_SIZE, limit),
        min(slot, limit) if bare and theirs.takes_bare else 0,
        min(threshold, limit, COPIED_BYTES) if theirs.takes_fragments else 0,
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
    loop_id: bytes = b"",
) -> Hello:
    """This side's half of the handshake.

    Args:
        config: Numbers.
        private_data: The program's bytes.
        window: Data messages that the peer may send at first; None: `config.recv_depth`.
        check: Whether this side checks the large messages that it receives.
        bare: Whether the adapter has immediates.
        loop_id: The number of the loop; empty: it has none.
    """
    return Hello(
        recv_depth=config.recv_depth if window is None else window,
        rendezvous_window=config.rendezvous_window,
        slot_size=config.slot_size,
        max_message_kib=config.max_message_size // 1024,
        user_data=private_data,
        asks_checksums=check,
        takes_bare=bare,
        knows_landings=bare,
        loop_id=loop_id,
        takes_pieces=True,
        numbers_messages=True,
    )


plan_of: Callable[[ConnectionConfig], Plan] = kept(Plan)
