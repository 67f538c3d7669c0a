"""Build script of the compiled module `aiordma._ffi._rdma`, made by cffi.

`setup.py` hands `ffibuilder` to cffi.  The module is made from files in `aiordma/_ffi`: what
is declared (`verbs.cdef.h`, `cm.cdef.h`, `glue.cdef.h`) and what is compiled beside it
(`C_FILES`).

    python build_ffi.py --stub      rewrite aiordma/_ffi/_rdma.pyi from the declarations

API mode, because half of the fast path cannot be reached otherwise: `ibv_post_send`,
`ibv_poll_cq` and `ibv_req_notify_cq` are static inline functions and `ibv_reg_mr` is a macro, so
no shared library exports them.  The C compiler also supplies offsets and constants, so that a newer
rdma-core that extends a struct needs a rebuild at most, not a new release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cffi import FFI

_FFI_DIR = Path(__file__).resolve().parent / "aiordma" / "_ffi"
_STUB = _FFI_DIR / "_rdma.pyi"
C_FILES = ("glue.c", "posting.c", "connecting.c", "polling.c")
_CDEF_FILES = ("verbs.cdef.h", "cm.cdef.h", "glue.cdef.h")

_STRUCT = re.compile(r"^struct \w+ \{.*?^\};", re.MULTILINE | re.DOTALL)

_PREAMBLE = """
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

#include "shared.h"

/* Linux has it since 4.0; some C libraries do not list it. */
#ifndef AF_IB
#  define AF_IB 27
#endif
"""


def declarations() -> str:
    """Text of all cdef files, in the order in which they refer to one another."""
    return "\n".join((_FFI_DIR / name).read_text() for name in _CDEF_FILES)


def c_source() -> str:
    """What is compiled beside cffi's wrappers: includes, the structs of glue.cdef.h, the C files.

    The structs are pasted, so that they are written once. The prototypes are not: in the C files
    the functions are static, and C refuses a static definition after an extern declaration.
    """
    structs = _STRUCT.findall((_FFI_DIR / "glue.cdef.h").read_text())
    return "\n\n".join([_PREAMBLE, *structs, *((_FFI_DIR / name).read_text() for name in C_FILES)])


def make_ffibuilder() -> FFI:
    """Assemble declarations and C source into cffi's builder."""
    builder = FFI()
    builder.cdef(declarations())
    builder.set_source(
        "aiordma._ffi._rdma",
        c_source(),
        libraries=["rdmacm", "ibverbs"],
        include_dirs=["aiordma/_core"],
        py_limited_api=True,
        # -Wno-unused-parameter, -Wno-missing-field-initializers: cffi's own code, not ours.
        extra_compile_args=[
            "-std=gnu11",
            "-Wall",
            "-Wextra",
            "-Wno-unused-parameter",
            "-Wno-missing-field-initializers",
            "-fvisibility=hidden",
        ],
        # Many distributions link with --as-needed by default, not all: say it, so that the module
        # names exactly the libraries that it calls.
        extra_link_args=["-Wl,--as-needed"],
    )
    return builder


# ---- stub ----------------------------------------------------------------------------------

_STUB_HEAD = '''\
# Written by `python build_ffi.py --stub` from the cdef headers: change those, not this file.
# The part about `ffi` is in build_ffi.py.
from collections.abc import Callable, Iterator
from typing import Any, Final, final

class CData:
    """A C value. Opaque to the checker: fields are `Any`, ints and bytes are not a `CData`."""

    def __getattr__(self, name: str) -> Any: ...
    def __setattr__(self, name: str, value: Any) -> None: ...
    def __getitem__(self, index: Any) -> Any: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __add__(self, offset: int) -> CData: ...
    def __sub__(self, other: Any) -> Any: ...
    def __bool__(self) -> bool: ...
    def __int__(self) -> int: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __enter__(self) -> CData: ...
    def __exit__(self, *exc_info: object) -> None: ...

class CType:
    """A C type, as `ffi.typeof` returns it."""

    kind: Final[str]
    cname: Final[str]
    fields: Final[list[tuple[str, Any]] | None]
    args: Final[tuple[CType, ...]]
    result: Final[CType]
    item: Final[CType]
    elements: Final[dict[int, str]]
    relements: Final[dict[str, int]]

class _Buffer:
    """Result of `ffi.buffer`: a view of C memory that supports the buffer protocol."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any) -> bytes: ...
    def __setitem__(self, index: Any, value: Any) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class _FFI:
    NULL: Final[CData]
    error: type[Exception]
    errno: int
    def new(self, cdecl: str | CType, init: Any = ...) -> CData: ...
    def cast(self, cdecl: str | CType, value: Any) -> CData: ...
    def buffer(self, cdata: CData, size: int = ...) -> _Buffer: ...
    def string(self, cdata: CData, maxlen: int = ...) -> bytes: ...
    def unpack(self, cdata: CData, length: int) -> Any: ...
    def gc(
        self, cdata: CData, destructor: Callable[[CData], Any] | None, size: int = ...
    ) -> CData: ...
    def release(self, cdata: CData) -> None: ...
    def new_allocator(
        self,
        alloc: Callable[[int], CData],
        free: Callable[[CData], object],
        should_clear_after_alloc: bool = ...,
    ) -> Callable[[str], CData]: ...
    def addressof(self, cdata: CData, *fields_or_indexes: str | int) -> CData: ...
    def from_buffer(
        self, cdecl: Any, python_buffer: Any = ..., require_writable: bool = ...
    ) -> CData: ...
    def memmove(self, dest: Any, src: Any, n: int) -> None: ...
    def sizeof(self, cdecl: str | CType | CData) -> int: ...
    def alignof(self, cdecl: str | CType) -> int: ...
    def offsetof(self, cdecl: str | CType, *fields_or_indexes: str | int) -> int: ...
    def typeof(self, cdecl: Any) -> CType: ...
    def list_types(self) -> tuple[list[str], list[str], list[str]]: ...
    def new_handle(self, x: Any) -> CData: ...
    def callback(self, cdecl: str | CType, python_callable: Callable[..., Any]) -> CData: ...
    def from_handle(self, handle: CData) -> Any: ...

@final
class _Lib:
'''
_STUB_TAIL = """\

ffi: Final[_FFI]
lib: Final[_Lib]
"""

_FUNCTION = re.compile(r"^([a-z_][\w \t*]*?[ *])(\w+)\(([^()]*)\);", re.MULTILINE)
_ENUM = re.compile(r"\benum\s*\w*\s*\{([^{}]*)\}")
_MACRO = re.compile(r"^#define[ \t]+(\w+)", re.MULTILINE)
_KEYWORDS = {"in", "from", "is", "lambda", "pass", "global", "def", "del", "raise", "with"}


def _python_type(ctype: str) -> str:
    if "*" in ctype:
        # cffi takes bytes for `const char *` and `const void *`, NUL-terminated, during the call.
        const_bytes = re.fullmatch(r"const (char|void) ?\*", ctype.strip())
        return "CData | bytes" if const_bytes else "CData"
    return "None" if ctype.strip() == "void" else "int"


def _stub_function(result: str, name: str, parameters: str) -> str:
    arguments = ["self"]
    for parameter in filter(None, (p.strip() for p in parameters.split(","))):
        if parameter == "void":
            continue
        declared = re.fullmatch(r"(.*?[ *])(\w+)", parameter, re.DOTALL)
        if declared is None:
            raise ValueError(f"{name}: parameter without a name: {parameter}")
        word = declared[2] + ("_" if declared[2] in _KEYWORDS else "")
        arguments.append(f"{word}: {_python_type(declared[1])}")
    if len(arguments) > 1:
        arguments.append("/")
    # What C returns as `const char *` is a pointer; bytes are only accepted, never returned.
    returned = _python_type(result).replace(" | bytes", "")
    line = f"    def {name}({', '.join(arguments)}) -> {returned}: ..."
    if len(line) <= 100:
        return line
    inner = f"        {', '.join(arguments)}"
    if len(inner) <= 100:
        return f"    def {name}(\n{inner}\n    ) -> {returned}: ..."
    lines = "\n".join(f"        {argument}," for argument in arguments)
    return f"    def {name}(\n{lines}\n    ) -> {returned}: ..."


def stub_text() -> str:
    """The stub of the compiled module, as it has to stand in `_rdma.pyi`."""
    text = re.sub(r"/\*.*?\*/", "", declarations(), flags=re.DOTALL)
    names = [
        name.split("=")[0].strip()
        for body in _ENUM.findall(text)
        for name in body.split(",")
        if name.strip() not in ("", "...")
    ]
    names += _MACRO.findall(text)
    lines = [f"    {name}: Final[int]" for name in names]
    lines += [_stub_function(*match) for match in _FUNCTION.findall(text)]
    return _STUB_HEAD + "\n".join(lines) + "\n" + _STUB_TAIL


if __name__ == "__main__":
    if sys.argv[1:] != ["--stub"]:
        sys.exit("usage: python build_ffi.py --stub")
    _STUB.write_text(stub_text())
else:
    ffibuilder = make_ffibuilder()
