"""A struct of C is written by one file of C, and never by Python."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sysconfig
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

from aiordma import _core

CORE = Path(__file__).parents[3] / "aiordma" / "_core"

#: A header, a struct that it declares, and a member of that: a file that includes this header alone
#: must not be able to touch the member.
OPAQUE = [("connection.h", "aio_connection", "credits"), ("stream.h", "aio_stream", "alive")]

#: What Python may write, by the type that declares it.
WRITTEN_BY_PYTHON = {
    # asyncio's Task clears it in each object that a task waits for.
    "Wakeup": "_asyncio_future_blocking",
}


def error_of_third_file(include: Path, header: str, struct: str, member: str) -> str:
    """What the compiler says of a file that includes a header and writes a member of a struct."""
    source = f'#include "{header}"\nvoid third(struct {struct} *it) {{ it->{member} = 0; }}\n'
    options = [f"-I{include}", f"-isystem{sysconfig.get_path('include')}"]
    command = ["gcc", "-std=gnu11", "-DPy_LIMITED_API=0x030B0000", "-fsyntax-only", "-xc", "-"]
    done = subprocess.run(
        [*command, *options], input=source, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr if done.returncode else ""


def test_no_third_file_writes_an_opaque_struct() -> None:
    for header, struct, member in OPAQUE:
        error = error_of_third_file(CORE, header, struct, member)
        assert f"struct {struct}" in error, f"a third file can write {struct}.{member}"
        assert "undefined type" in error, error


def test_the_compiler_tells_an_opaque_struct_from_another_one(tmp_path: Path) -> None:
    (tmp_path / "two.h").write_text("struct opaque;\nstruct known { int member; };\n")
    assert "undefined type" in error_of_third_file(tmp_path, "two.h", "opaque", "member")
    assert error_of_third_file(tmp_path, "two.h", "known", "member") == ""
    assert error_of_third_file(CORE, "core.h", "aio_cq", "token") == ""


class _Member(ctypes.Structure):
    """PyMemberDef."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("type", ctypes.c_int), ("offset", ctypes.c_ssize_t),
        ("flags", ctypes.c_int),
    )  # fmt: skip


class _GetSet(ctypes.Structure):
    """PyGetSetDef."""

    _fields_ = (("name", ctypes.c_char_p), ("get", ctypes.c_void_p), ("set", ctypes.c_void_p))


class _Descriptor(ctypes.Structure):
    """What both descriptors begin with, in place of a Python object, and what defines them."""

    _fields_ = (
        ("object", ctypes.c_byte * object.__basicsize__), ("type", ctypes.c_void_p),
        ("name", ctypes.c_void_p), ("qualname", ctypes.c_void_p), ("definition", ctypes.c_void_p),
    )  # fmt: skip


def is_writable(value: Any) -> bool:
    """Whether a value in the dictionary of a type is an attribute that Python can write.

    CPython tells it only by an attempt, for which some types give no object.
    """
    if not isinstance(value, MemberDescriptorType | GetSetDescriptorType):
        return False
    where = _Descriptor.from_address(id(value)).definition
    if isinstance(value, MemberDescriptorType):
        return not _Member.from_address(where).flags & 1  # READONLY
    return bool(_GetSet.from_address(where).set)


def test_attributes_that_python_can_write_are_known() -> None:
    of_function = vars(FunctionType)
    assert is_writable(of_function["__doc__"])  # a member
    assert is_writable(of_function["__code__"])  # a pair of functions
    assert not is_writable(of_function["__globals__"])
    assert not is_writable(of_function["__closure__"])


def test_python_writes_no_member_of_a_type_of_c() -> None:
    found = {}
    for name, made in vars(_core).items():
        if isinstance(made, type) and made.__module__.startswith("aiordma"):
            inherited = {key for base in made.__bases__ for key in dir(base)}
            names = {key for key, value in vars(made).items() if is_writable(value)}
            if names := names - inherited:
                found[name] = names
    expected = {name: set(names.split()) for name, names in WRITTEN_BY_PYTHON.items()}
    assert found == expected


def test_the_interpreter_lock_is_released_where_core_h_says() -> None:
    head = (CORE / "core.h").read_text().split("*/")[0]
    releases = {
        path.name for path in CORE.glob("*.c") if "Py_BEGIN_ALLOW_THREADS" in path.read_text()
    }
    assert releases == set(re.findall(r"\((\w+\.c)\)", head.split("These release it")[1]))
