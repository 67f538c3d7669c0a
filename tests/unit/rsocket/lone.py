"""One rsockets machine whose peer is the test."""

from __future__ import annotations

from aiordma.rsocket import Descriptor, Hello, Place

from . import forms
from .whole import Post

DISCONNECT, KEEPALIVE, SHUTDOWN = 0xE0000000, 0xE0000001, 0xE0000002
PEER = Hello(
    credits=4,
    table_addr=0x10000,
    table_key=0x77,
    table_length=2,
    buffer_addr=0x20000,
    buffer_key=0x88,
    buffer_length=100,
)


class Lone:
    """A machine whose peer is the test: 64 bytes of ring, 8 credits, 6 data work requests."""

    def __init__(
        self,
        peer: Hello = PEER,
        *,
        credit: int = 8,
        iwarp: bool = False,
        slots: int = 0,
        open_: bool = True,
    ) -> None:
        self.table = bytearray(32 + 24 * slots)
        self.ring, self.ring_memory = forms.memory_of(64, 0x11)
        self.machine = forms.new(
            ring=self.ring,
            table=Place(0x2000, 0x22, len(self.table)),
            memory=memoryview(self.table),
            credits=credit,
            send_depth=10,
            iwarp=iwarp,
        )
        self.machine.meet(peer.pack())
        if open_:
            self.machine.open()

    def control(self) -> list[Post]:
        """What it posts now; nothing completes."""
        return list(iter(self.machine.next_control, None))

    def settle(self) -> list[int]:
        """Words of what it posts now; everything completes."""
        posts = self.control()
        for post in posts:
            self.machine.on_sent(post)
        return [post.word for post in posts]

    def advertise(self, entry: int, descriptor: Descriptor) -> None:
        """Write an entry of its table, as the peer does."""
        self.table[16 * entry : 16 * entry + 16] = descriptor.pack(False)
