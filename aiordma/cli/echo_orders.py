"""The orders that `aiordma doctor PEER` gives to `aiordma echo`.

`aiordma echo` sends every message back.  A message that begins with `MAGIC` is an order, a JSON
object behind it; the answer is a JSON object, too, or the bytes that were asked for:

    facts               {"aiordma": VERSION, "device": NAME, "stream_port": PORT}
    take                the next message is no order: {"size": ..., "crc32": ...} of it
    give size           a message of the first `size` bytes of `pattern`
    expose              {"region": HEX} of `MOST` bytes that hold `pattern`, or {"error": TEXT}
    look size           {"size": ..., "crc32": ...} of the first `size` bytes exposed

A server that only sends messages back answers with the order itself, by which the client knows it.

At the port for streams each order is 5 bytes: `t` or `g`, and the size, big-endian.  After `t` that
many bytes follow, and the answer is their CRC32 in 4 bytes; the answer to `g` is that many bytes.
"""

from __future__ import annotations

import functools
import json
import random
import struct
from typing import Any

from aiordma.cli.foreign import parsed

__all__ = ["GIVE", "MAGIC", "MOST", "STREAM_ORDER", "TAKE", "order", "parse_order", "pattern"]

MAGIC = b"\0aiordma-echo-1 "
#: Bytes of the largest message of a test, and of the memory that is exposed.
MOST = 1 << 20
STREAM_ORDER = struct.Struct(">cI")
TAKE, GIVE = b"t", b"g"
_MOST_ORDER = 200
_SIZED = {"facts": False, "take": False, "give": True, "expose": False, "look": True}


def order(word: str, size: int | None = None) -> bytes:
    """The message that gives an order."""
    words = {"do": word} if size is None else {"do": word, "size": size}
    return MAGIC + json.dumps(words).encode()


def parse_order(message: Any) -> tuple[str, int] | None:
    """The word and the size of an order; None for any other message.

    Args:
        message: The message; any buffer.
    """
    with memoryview(message) as view:
        if len(view) > _MOST_ORDER or view[: len(MAGIC)] != MAGIC:
            return None
        text = bytes(view[len(MAGIC) :])
    try:
        words = parsed(text)
    except ValueError:
        return None
    if not isinstance(words, dict):
        return None
    word, size = words.get("do"), words.get("size", 0)
    if not isinstance(word, str) or word not in _SIZED or type(size) is not int:
        return None
    if not 0 <= size <= MOST or ("size" in words) is not _SIZED[word]:
        return None
    return word, size


@functools.cache
def pattern() -> bytes:
    """`MOST` bytes that no shift and no cut leaves alike."""
    return random.Random("aiordma").randbytes(MOST)
