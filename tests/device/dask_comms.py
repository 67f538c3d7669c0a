"""Names of distributed, whose functions have no types."""

from __future__ import annotations

from typing import Any

import distributed
from distributed.comm import addressing, core
from distributed.protocol.serialize import Serialize
from distributed.protocol.serialize import deserialize as deserialize_frames

Client: Any = distributed.Client
connect: Any = core.connect
deserialize: Any = deserialize_frames
get_address_host: Any = addressing.get_address_host
listen: Any = core.listen
resolve_address: Any = addressing.resolve_address
to_serialize: Any = Serialize
