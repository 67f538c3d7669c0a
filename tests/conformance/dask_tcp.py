"""Stands for `distributed.comm.tcp` in distributed's own tests: the same names, over RDMA."""

from __future__ import annotations

from typing import Any

from distributed.comm.tcp import TLSBackend

from aiordma.contrib import dask

__all__ = ["TCP", "TCPBackend", "TCPConnector", "TCPListener", "TLSBackend"]

TCP = dask.RdmaComm
TCPConnector = dask.RdmaConnector
TCPListener = dask.RdmaListener


class TCPBackend(dask.RdmaBackend):
    """A backend whose connector a test replaces in a subclass."""

    _connector_class: Any = TCPConnector

    def get_connector(self) -> Any:
        return self._connector_class()
