"""Names of distributed, whose functions have no types."""

from __future__ import annotations

from typing import Any

import distributed
from distributed import protocol
from distributed.comm import addressing, core

Client: Any = distributed.Client
connect: Any = core.connect
deserialize: Any = protocol.deserialize
get_address_host: Any = addressing.get_address_host
listen: Any = core.listen
resolve_address: Any = addressing.resolve_address
to_serialize: Any = protocol.to_serialize
