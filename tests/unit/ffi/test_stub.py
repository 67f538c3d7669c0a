"""The stub of the compiled module says what the module has, and nothing else."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from aiordma._ffi import ffi, lib, load_error

ROOT = Path(__file__).parents[3]
STUB = ROOT / "aiordma" / "_ffi" / "_rdma.pyi"
REWRITE = "rewrite it with: python build_ffi.py --stub"

compiled = pytest.mark.skipif(load_error() is not None, reason="no compiled module")


#: The classes of the stub: what `lib` has, and what `ffi` has.
LIB, FFI = "_Lib", "_FFI"


def stub_class(name: str) -> ast.ClassDef:
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise AssertionError(f"{STUB.name} has no class {name}")


def functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def attributes(node: ast.ClassDef) -> set[str]:
    return {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def test_stub_is_what_the_headers_give() -> None:
    pytest.importorskip("cffi")
    script = runpy.run_path(str(ROOT / "build_ffi.py"), run_name="stub")
    assert STUB.read_text() == script["stub_text"](), REWRITE


@compiled
def test_every_name_is_in_both() -> None:
    node = stub_class(LIB)
    assert {*functions(node), *attributes(node)} == set(dir(lib)), REWRITE


@compiled
def test_functions_take_as_many_arguments() -> None:
    in_stub = {
        name: len(f.args.posonlyargs or f.args.args) - 1
        for name, f in functions(stub_class(LIB)).items()
    }
    in_module = {name: len(ffi.typeof(getattr(lib, name)).args) for name in in_stub}
    assert in_stub == in_module


@compiled
def test_result_types_agree() -> None:
    for name, node in functions(stub_class(LIB)).items():
        kind = ffi.typeof(getattr(lib, name)).result.kind
        expected = {"pointer": "CData", "void": "None"}.get(kind, "int")
        assert node.returns is not None
        assert ast.unparse(node.returns) == expected, name


@compiled
def test_constants_are_numbers() -> None:
    for name in attributes(stub_class(LIB)):
        assert isinstance(getattr(lib, name), int), name


@compiled
def test_everything_that_the_stub_says_of_ffi_is_there() -> None:
    node = stub_class(FFI)
    for name in {*functions(node), *attributes(node)}:
        assert hasattr(ffi, name), name
