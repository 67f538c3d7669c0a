"""Plan: values that follow from a configuration alone, made once for all of its streams."""

from __future__ import annotations

import functools
import mmap
from typing import cast

from aiordma._core import CHAIN, STREAM_CONTROLS
from aiordma.cm.connection_parameter import ConnectionParameter
from aiordma.cm.qp_transition import QPPolicy
from aiordma.link.settings import RETRIES
from aiordma.loop.bounded_cache import BoundedCache
from aiordma.rsocket.wire import DESCRIPTOR_SIZE, IOMAP_SLOT_SIZE, TABLE_LENGTH
from aiordma.streams.stream_config import StreamConfig
from aiordma.verbs.cq import CompletionQueue
from aiordma.verbs.enums import Access
from aiordma.verbs.mr import INLINE_BYTES
from aiordma.verbs.qp import QPInitAttr

__all__ = ["RECV_DEPTH", "SEND_DEPTH", "WORD_SIZE", "Plan", "plan_of"]

WORD_SIZE = 4
#: Messages that the peer may send ahead, and that this side may have on their way; each `write` is
#: one or more.
RECV_DEPTH = 100
SEND_DEPTH = 60
_PAYLOAD = IOMAP_SLOT_SIZE  # bytes of a control message: a descriptor, or a mapping
_MAPPED_WRITES = 16  # under way past the stream, see iomap.py
_UNANNOUNCED = 16 + CHAIN
_INLINE = 64
_RNR_RETRIES = 7  # for ever, as rsockets programs have it
_LINE = 64  # bytes; the part behind a ring of any size begins with a page
_FIRST = 16 * 1024  # bytes of a ring with which a stream begins


def _first(size: int) -> int:
    return size if size > INLINE_BYTES else min(size, _FIRST)


class Plan:
    """The values that follow from the configuration, and from whether the device is iWARP.

    Attributes:
        config: The configuration.
        policy: Bounds that the queue pairs apply.
        credits: Messages that the peer may send ahead.
        receives: Work requests of the receive queue.
        sends: Those of the send queue that messages and the probe take.
        completions: Room that a stream takes in a completion queue.
        ring: Bytes of the ring that the peer writes to at first.  It grows to the size that the
            configuration has, unless registering so many bytes would hold up the loop: such a
            ring is there from the beginning.
        sending: Bytes of the ring for sending at first; the same holds for it.
        table: Bytes of the table that the peer writes to.
        words: Where in this side's own memory words land, on iWARP; before them lie the ring for
            sending and the payloads of control messages.
        own: Bytes of that memory.
        pinned: Bytes that a stream pins from its handshake on.
        silence: Seconds between two checks that the peer is there; None for never.
        attributes: Of queue pairs; the completion queue is not in them.
    """

    __slots__ = (
        "_parameters", "attributes", "completions", "config", "credits", "own", "pinned", "policy",
        "receives", "ring", "sending", "sends", "silence", "table", "words",
    )  # fmt: skip

    def __init__(self, config: StreamConfig, *, iwarp: bool) -> None:
        self.config: StreamConfig = config
        self.policy: QPPolicy = QPPolicy(
            access=Access.REMOTE_WRITE,
            ack_timeout=config.ack_timeout,
            max_retry_count=RETRIES,
            max_rnr_retry_count=_RNR_RETRIES,
        )
        self.credits: int = RECV_DEPTH
        self.receives: int = RECV_DEPTH + _UNANNOUNCED
        # On iWARP a message is two requests; one more is the probe's.
        self.sends: int = SEND_DEPTH * (2 if iwarp else 1) + 1
        mapped = self.sends + (_MAPPED_WRITES if config.iomap_slots else 0)
        self.completions: int = mapped + self.receives
        self.attributes: QPInitAttr = QPInitAttr(
            send_cq=cast("CompletionQueue", None), max_send_wr=mapped, max_recv_wr=self.receives,
            max_send_sge=1, max_recv_sge=1, max_inline_data=_INLINE,
        )  # fmt: skip
        self.table: int = TABLE_LENGTH * DESCRIPTOR_SIZE + config.iomap_slots * IOMAP_SLOT_SIZE
        self.ring: int = _first(config.receive_buffer_size)
        self.sending: int = _first(config.send_buffer_size)
        self.words: int = -(-(self.sending + STREAM_CONTROLS * _PAYLOAD) // _LINE) * _LINE
        self.own: int = self.words + (self.receives * WORD_SIZE if iwarp else 0)
        parts = (self.ring, self.table, self.own)
        self.pinned: int = sum(-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in parts)
        # However short the limit, the peer is asked before it is given up.
        waits = [config.keepalive_s, config.idle_timeout_s and config.idle_timeout_s / 4]
        self.silence: float | None = min((wait for wait in waits if wait is not None), default=None)
        self._parameters: BoundedCache[tuple[int, int], ConnectionParameter] = BoundedCache()

    def parameter(self, depth: int, resources: int = 0) -> ConnectionParameter:
        """The parameter of rsockets: no reads, and retries while a receive is missing.

        Connections share them, so they are never changed.
        """
        parameter = self._parameters.get((depth, resources))
        if parameter is None:  # clients choose the numbers
            parameter = ConnectionParameter.exact(
                responder_resources=resources,
                initiator_depth=depth,
                retry_count=RETRIES,
                rnr_retry_count=_RNR_RETRIES,
            )
            self._parameters.store((depth, resources), parameter)
        return parameter


@functools.lru_cache(64)
def plan_of(config: StreamConfig, *, iwarp: bool) -> Plan:
    """The plan of a configuration, for devices of that kind."""
    return Plan(config, iwarp=iwarp)
