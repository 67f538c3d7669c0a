"""Datagram services: how a client finds the queue pair behind an address and a port.

Theory of operation
    There is no connection.  The client asks (service id resolution), the server's program answers
    with the number of a queue pair, or refuses, and that is all: the id can then be closed, and
    what the answer told stays true as long as the queue pair lives.  No event tells of its end,
    and the server does not learn the client's queue pair before the first datagram.

    A datagram queue pair belongs to no peer, so that it is ready to receive and to send once it is
    made.  One can answer for any number of ports and clients.
"""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

from aiordma._ffi import ffi, lib
from aiordma._ffi.check import check_minus_one
from aiordma.cm.connection_event import ConnectionEvent
from aiordma.cm.enums import EventType
from aiordma.cm.identifier import Stage
from aiordma.cm.multicast import Multicast
from aiordma.cm.qp_transition import CLIENT_LEFT
from aiordma.errors import os_error
from aiordma.verbs.enums import QPAttrMask, QPState, QPType
from aiordma.verbs.qp import QPInitAttr, QueuePair

__all__ = ["Datagrams"]

# Private data: the kernel takes 36 bytes of the 216 of a request for itself.
_REQUEST_ROOM = 180
_ANSWER_ROOM = 136


def _c_param(private_data: bytes, room: int, what: str) -> tuple[Any, Any]:
    if len(private_data) > room:
        msg = (
            f"{what} of a datagram service carries at most {room} bytes of private data, "
            f"not {len(private_data)}"
        )
        raise ValueError(msg)
    data = ffi.new("uint8_t[]", private_data or b"\0")
    param = ffi.new("struct rdma_conn_param *")
    param.private_data = data
    param.private_data_len = len(private_data)
    return param, data


class Datagrams(Multicast):
    """The datagram side of a connection id.  Part of `ConnectionId`."""

    __slots__ = ()

    def _check_qp_type(self, attr: QPInitAttr) -> None:
        """A queue pair of an id has the type of its port space.

        Raises:
            ValueError: It has not.
            NotSupportedError: iWARP has no datagrams.
        """
        if self.is_datagram != (attr.qp_type == QPType.UD):
            kind = "UD" if self.is_datagram else "RC"
            msg = f"an id of port space {self.port_space.name} needs a queue pair of type {kind}"
            raise ValueError(msg)
        if self.is_datagram:
            self._need_datagrams("rdma_create_qp")

    def _start_qp(self, qp: QueuePair) -> None:
        """First transitions of the id's new queue pair: for datagrams all that it needs."""
        # Port, partition, and the Q_Key of the port space.
        self._move(int(QPState.INIT), self.policy)
        if not self.is_datagram:
            return
        qp.modify(QPAttrMask.STATE, qp_state=QPState.RTR)
        qp.modify(QPAttrMask.STATE | QPAttrMask.SQ_PSN, qp_state=QPState.RTS, sq_psn=0)
        mtu = qp.pd.context.query_port(self.port_num).active_mtu.in_bytes
        qp._rules = dataclasses.replace(qp._rules, max_datagram=mtu)

    async def _ask_service(self, private_data: bytes, timeout: float | None) -> ConnectionEvent:
        """`connect` for datagrams."""
        param, keep = _c_param(private_data, _REQUEST_ROOM, "a request")
        self._need_datagrams("rdma_connect")
        self._need("rdma_connect", Stage.ROUTE_RESOLVED)
        handle = self._require()

        def call(keep: Any = keep) -> None:
            check_minus_one(lib.rdma_connect(handle, param), "rdma_connect")

        self.stage = Stage.CONNECTING
        try:
            return await self._step(call, frozenset({EventType.ESTABLISHED}), timeout)
        except BaseException:
            if self.stage is Stage.CONNECTING:
                self.stage = Stage.FAILED
            raise

    def _answer_service(self, private_data: bytes, qp: QueuePair | None) -> ConnectionEvent:
        """`accept` for datagrams.  No event follows: the answer is not confirmed."""
        param, keep = _c_param(private_data, _ANSWER_ROOM, "an answer")
        self._need_datagrams("rdma_accept")
        self._need("rdma_accept", Stage.REQUESTED)
        qp = qp or self.qp
        if qp is None:
            raise os_error(errno.EINVAL, "rdma_accept", detail="(no queue pair)")
        qp._require()
        param.qp_num = qp.num
        if lib.rdma_accept(self._require(), param):
            code = ffi.errno
            self.stage = Stage.FAILED
            # As with connections, a client that gave up is reported by this failure only.
            if code == errno.EINVAL:
                raise os_error(errno.ECONNABORTED, "rdma_accept", detail=CLIENT_LEFT)
            raise os_error(code, "rdma_accept")
        del keep
        self.stage = Stage.ANSWERED
        return ConnectionEvent(self._channel, EventType.ESTABLISHED, 0, self)  # type: ignore[arg-type]

    def _check_refusal(self, private_data: bytes) -> None:
        if self.is_datagram:
            _c_param(private_data, _ANSWER_ROOM, "a refusal")
