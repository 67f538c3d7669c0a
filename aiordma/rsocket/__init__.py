"""The rsockets stream protocol, version 1, without any input or output.

Bytes and numbers go in, messages to post come out; this folder has no loop, no adapter and no
memory of its own.  `aiordma.streams` joins it to a queue pair.  It is the protocol of `librdmacm`'s
rsockets (see `rsocket(7)`), so that the peer may be any program that uses them.

Files:
    wire     the layout of the bytes on the network: private data, words, descriptors
    flow     the two gates of each direction, buffer space and message credits: rules on a state
    ending   the open directions, and the words that close them
    iomap    memory that a side names to its peer, to be written past the stream
    machine  one connection: the next message that may be posted, the meaning of arrived words
"""

from aiordma.rsocket.iomap import Iomap, Mapping
from aiordma.rsocket.machine import Machine, Place, Post
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
    "Post",
    "pack_word",
    "unpack_word",
]
