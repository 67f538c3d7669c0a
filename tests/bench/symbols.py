"""Whose an address is: the function, and the file that it is in, by maps and tables of symbols.

A file that was stripped still has the names that it exports; what lies between them is called by
the name before it, with a plus: `PyObject_Call+`.  A name stands for so many bytes as it says, and
one without a size (assembly, the kernel's) reaches to the next.
"""

from __future__ import annotations

import bisect
import functools
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

KERNEL = "kernel"
_FUNCTIONS = {0, 2, 10}  # of no type, a function, one that is chosen when it is loaded
_SYMBOL_TABLES = {2, 11}
_LOADED = 1


@dataclass(frozen=True)
class Place:
    """A function; `begin` is the address of its first instruction in memory."""

    file: str
    function: str
    begin: int


class Table:
    """Functions by their addresses."""

    def __init__(self, symbols: Iterable[tuple[int, int, str, str]]) -> None:
        """Sort them.

        Args:
            symbols: Address, size or 0, name, file.
        """
        # Of several names for one place the longest reach wins, then the one that sorts first.
        best: dict[int, tuple[int, str, str]] = {}
        for address, size, name, file in symbols:
            known = best.get(address)
            if known is None or (-size, name) < (-known[0], known[1]):
                best[address] = (size, name, file)
        self._addresses = sorted(best)
        self._found = [best[address] for address in self._addresses]

    def find(self, address: int) -> Place | None:
        """The function at this address; None if it lies before all."""
        index = bisect.bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        begin, (size, name, file) = self._addresses[index], self._found[index]
        outside = size and address >= begin + size
        return Place(file, f"{name}+" if outside else name, begin)


def kernel(text: str) -> Table:
    """The kernel's own, out of /proc/kallsyms; a module's name is its file."""

    def symbols() -> Iterator[tuple[int, int, str, str]]:
        for line in text.splitlines():
            address, kind, name, *module = line.split()
            if kind in "tTwW":
                yield int(address, 16), 0, name, module[0].strip("[]") if module else KERNEL

    return Table(symbols())


@functools.cache
def _read(path: str) -> tuple[Table, list[tuple[int, int, int]]]:
    """Functions of an ELF file, and where its parts are loaded: offset, size, address."""
    data = Path(path).read_bytes()
    if data[:5] != b"\x7fELF\x02":
        return Table(()), []
    programs, sections = struct.unpack_from("<QQ", data, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", data, 54)
    parts = []
    for at in range(programs, programs + program_size * program_count, program_size):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, at)
        if kind == _LOADED:
            parts.append((offset, size, address))
    heads = [
        # Type, address, offset, size, and which section its names are in.
        struct.unpack_from("<4xI8xQQQI", data, sections + section_size * number)
        for number in range(section_count)
    ]

    def symbols() -> Iterator[tuple[int, int, str, str]]:
        for kind, _, offset, size, names in heads:
            if kind not in _SYMBOL_TABLES:
                continue
            first = heads[names][2]
            for name, info, section, value, reach in (
                (word, info, section, value, reach)
                for word, info, _, section, value, reach in struct.iter_unpack(
                    "<IBBHQQ", data[offset : offset + size]
                )
            ):
                if section and value and info & 15 in _FUNCTIONS and (reach or info & 15):
                    end = data.index(b"\0", first + name)
                    # Its version is no part of the name.
                    text = data[first + name : end].decode().partition("@")[0]
                    yield value, reach, text, path

    return Table(symbols()), parts


def _in_file(path: str, offset: int, address: int) -> Place | None:
    table, parts = _read(path)
    for begin, size, at in parts:
        if begin <= offset < begin + size:
            linked = at + offset - begin
            place = table.find(linked)
            return place and replace(place, begin=place.begin + address - linked)
    return None


class Maps:
    """What is where in a process."""

    def __init__(self, text: str) -> None:
        """Read /proc/PID/maps."""
        self._ranges: list[tuple[int, int, int, str]] = []
        for line in text.splitlines():
            words = line.split(maxsplit=5)
            begin, end = (int(word, 16) for word in words[0].split("-"))
            path = words[5] if len(words) == 6 else ""
            self._ranges.append((begin, end, int(words[2], 16), path))
        self._begins = [entry[0] for entry in self._ranges]

    def find(self, address: int) -> Place:
        """The function at this address; one that nobody knows has no file."""
        index = bisect.bisect_right(self._begins, address) - 1
        if index >= 0 and address < self._ranges[index][1]:
            begin, _, offset, path = self._ranges[index]
            if path.startswith("/"):
                offset += address - begin
                return _in_file(path, offset, address) or Place(path, "?", 0)
            return Place(path or "anonymous", "?", 0)
        return Place("", "?", 0)
