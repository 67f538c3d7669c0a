"""Private parts of aiordma/metrics/ that tests ask for."""

from __future__ import annotations

from aiordma.metrics import Service


def descriptor_of(service: Service) -> int:
    """The descriptor of its socket; -1 if it is closed."""
    return service._socket.fileno()
