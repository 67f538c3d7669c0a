"""The rsockets stream protocol, version 1, without any input or output.

Bytes and numbers go in, commands for the state in C come out; this folder has no loop, no adapter
and no memory of its own.  `aiordma.streams` joins it to a queue pair.  It is the protocol of
`librdmacm`'s rsockets (see `rsocket(7)`), so the peer may be any program that uses them.

Files:
    wire     the layout of the bytes on the network: private data, words, descriptors
    ending   the open directions, and the words that close them
    iomap    memory that a side names to its peer, which writes to it outside of the stream
    machine  one connection: when which message is posted, the meaning of arrived words

Flow control, the gates of space and of credits, is in `_core/stream.c`.
"""

from aiordma.rsocket.iomap import Iomap, Mapping
from aiordma.rsocket.machine import Machine, Place
from aiordma.rsocket.wire import (
    DESCRIPTOR_SIZE,
    HELLO_SIZE,
    IOMAP_SLOT_SIZE,
    TABLE_LENGTH,
    VERSION,
    Control,
    Descriptor,
    Hello,
    Kind,
    pack_word,
    unpack_word,
)

__all__ = [
    "DESCRIPTOR_SIZE",
    "HELLO_SIZE",
    "IOMAP_SLOT_SIZE",
    "TABLE_LENGTH",
    "VERSION",
    "Control",
    "Descriptor",
    "Hello",
    "Iomap",
    "Kind",
    "Machine",
    "Mapping",
    "Place",
    "pack_word",
    "unpack_word",
]
