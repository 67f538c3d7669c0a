"""Where datagrams arrive, and what udaddy and mckey have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aiordma.cm import ConnectionEvent
from aiordma.verbs import GRH, SGE, AddressHandle, WCFlags, WorkCompletion
from tests.interop.native import End

#: Bytes of a message: within every MTU, and with the room for the header in front of it more than
#: what the GNU C library keeps in its cache.
SIZE = 1000
MESSAGES = 10

# What the programs send before they have received anything is what malloc gave them: the GNU C
# library fills it with the complement of a byte.
PERTURB = 0xA5
TUNABLES = f"glibc.malloc.perturb={PERTURB}"
FRESH = bytes([PERTURB ^ 0xFF])


async def send_all(end: End, there: ConnectionEvent, payloads: Iterable[bytes]) -> None:
    """Send datagrams of `SIZE` bytes to the service or group of an event; they carry our number."""
    assert there.ah_attr is not None
    region = end.region(SIZE)
    with await AddressHandle.create(end.pd, there.ah_attr) as ah:
        for payload in payloads:
            region.view[:] = payload
            await end.qp.send(
                region, ah=ah, remote_qpn=there.qp_num, remote_qkey=there.qkey, imm=end.qp.num
            )


@dataclass
class Letter:
    """A datagram, the header in front of it, and its completion."""

    payload: bytes
    header: GRH
    completion: WorkCompletion


class Mailbox:
    """Receives for `count` datagrams, posted at once."""

    def __init__(self, end: End, count: int) -> None:
        self.end = end
        self._slot = GRH.SIZE + SIZE
        self._region = end.region(count * self._slot)
        pieces = [SGE(self._region, n * self._slot, self._slot) for n in range(count)]
        end.post_recv(*pieces)

    async def next(self) -> Letter:
        """The next datagram; it carries its sender's number, as all of these programs have it."""
        completion = await self.end.received()
        start = completion.wr_id * self._slot
        slot = self._region.view[start : start + self._slot]
        assert completion.flags & WCFlags.WITH_IMM
        assert completion.imm_data == completion.src_qp
        return Letter(bytes(GRH.payload(slot, completion)), GRH.parse(slot), completion)
