"""The compiled module against the headers: functions, constants and struct layouts.

The oracle is a C program that is compiled when the test runs.  It catches what cffi cannot: a
module that was built against other headers than the ones installed, and a struct whose layout
Python code has written down.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import subprocess
import sysconfig
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from aiordma._ffi import ffi, lib, load_error
from aiordma.cm import enums as cm
from aiordma.endpoint.config import ConnectionConfig
from aiordma.verbs import enums as verbs
from aiordma.verbs.enums import ForkStatus
from aiordma.verbs.wc import WC_STRUCT

from ..core.completing import Completing
from ..endpoint.fabric import new_state

if TYPE_CHECKING:
    from collections.abc import Iterator
    from enum import IntEnum, IntFlag

if load_error() is not None:
    pytest.skip(f"no compiled module: {load_error()}", allow_module_level=True)

ROOT = Path(__file__).parents[3]
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
INCLUDES = (
    "#include <stddef.h>\n#include <stdio.h>\n#include <stdint.h>\n#include <netinet/in.h>\n"
    "#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n#include <rdma/rdma_verbs.h>\n"
)

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"no C compiler ({COMPILER[0]})"
)


def compile_program(body: str, directory: Path) -> Path | None:
    """Compile `main` with the headers included; None if the compiler refuses."""
    source, program = directory / "probe.c", directory / "probe"
    source.write_text(f"{INCLUDES}int main(void)\n{{\n{body}\nreturn 0;\n}}\n")
    command = [*COMPILER, "-std=gnu11", "-w", str(source), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, check=False)
    return program if done.returncode == 0 else None


def numbers_from_c(expressions: list[str], directory: Path) -> list[int] | None:
    """Values of C expressions, as the installed headers have them."""
    body = "\n".join(f'printf("%lld\\n", (long long)({e}));' for e in expressions)
    program = compile_program(body, directory)
    if program is None:
        return None
    output = subprocess.run([program], capture_output=True, check=True, text=True).stdout
    return [int(line) for line in output.split()]


# ---- functions -----------------------------------------------------------------------------

OPERATIONS: dict[str, list[str]] = tomllib.loads(
    (Path(__file__).parent / "operations.toml").read_text()
)
CONVENTION = {name: kind for kind, names in OPERATIONS.items() for name in names}


def declared_functions() -> set[str]:
    return {name for name in dir(lib) if name.startswith(("ibv_", "rdma_"))}


def test_every_operation_of_the_list_is_offered_and_none_beside_it() -> None:
    assert declared_functions() == set(CONVENTION)


def test_every_operation_has_a_caller_in_the_library() -> None:
    """Python asks `lib` for it, or C calls it beside the declaration."""
    name = r"((?:ibv|rdma)_\w+)"
    called: set[str] = set()
    for path in (ROOT / "aiordma").rglob("*"):
        if path.suffix == ".py":
            called.update(re.findall(rf"\blib\.{name}", path.read_text()))
        elif path.suffix == ".c" and path.name != "_rdma.c":
            code = re.sub(r"/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            called.update(re.findall(rf"\b{name}\(", code))
    assert declared_functions() - called == set()


def test_no_operation_stands_in_two_groups() -> None:
    assert len(CONVENTION) == sum(len(names) for names in OPERATIONS.values())


@pytest.mark.parametrize("name", sorted(CONVENTION))
def test_result_type_fits_the_convention(name: str) -> None:
    kind = CONVENTION[name]
    result = ffi.typeof(getattr(lib, name)).result
    if kind == "pointer":
        assert result.kind == "pointer"
    elif kind == "void":
        assert result.kind == "void"
    elif kind != "value":
        # Signed, or a negative result could not be told from a large one.
        assert result.kind == "primitive"
        assert int(ffi.cast(result, -1)) == -1


# ---- constants -----------------------------------------------------------------------------


class Numbers(NamedTuple):
    """A Python enumeration, the prefix of its C names, and its C enum if that has a name."""

    python: type[IntEnum | IntFlag]
    prefix: str
    c_enum: str = ""


ENUMERATIONS = [
    Numbers(verbs.Access, "IBV_ACCESS_", "enum ibv_access_flags"),
    Numbers(verbs.AsyncEventType, "IBV_EVENT_", "enum ibv_event_type"),
    Numbers(verbs.AtomicCap, "IBV_ATOMIC_", "enum ibv_atomic_cap"),
    Numbers(verbs.DeviceCapFlags, "IBV_DEVICE_", "enum ibv_device_cap_flags"),
    Numbers(verbs.GIDType, "IBV_GID_TYPE_", "enum ibv_gid_type"),
    Numbers(ForkStatus, "IBV_FORK_", "enum ibv_fork_status"),
    Numbers(verbs.LinkLayer, "IBV_LINK_LAYER_"),
    Numbers(verbs.MigrationState, "IBV_MIG_", "enum ibv_mig_state"),
    Numbers(verbs.MRAdvice, "IBV_ADVISE_MR_ADVICE_", "enum ibv_advise_mr_advice"),
    Numbers(verbs.MTU, "IBV_", "enum ibv_mtu"),
    Numbers(verbs.MWType, "IBV_MW_", "enum ibv_mw_type"),
    Numbers(verbs.NodeType, "IBV_NODE_", "enum ibv_node_type"),
    Numbers(verbs.ODPGeneralCaps, "IBV_ODP_", "enum ibv_odp_general_caps"),
    Numbers(verbs.ODPTransportCaps, "IBV_ODP_SUPPORT_", "enum ibv_odp_transport_cap_bits"),
    Numbers(verbs.Opcode, "IBV_WR_", "enum ibv_wr_opcode"),
    Numbers(verbs.PortState, "IBV_PORT_", "enum ibv_port_state"),
    Numbers(verbs.QPAttrMask, "IBV_QP_", "enum ibv_qp_attr_mask"),
    Numbers(verbs.QPState, "IBV_QPS_", "enum ibv_qp_state"),
    Numbers(verbs.QPType, "IBV_QPT_", "enum ibv_qp_type"),
    Numbers(verbs.SRQAttrMask, "IBV_SRQ_", "enum ibv_srq_attr_mask"),
    Numbers(verbs.SendFlags, "IBV_SEND_", "enum ibv_send_flags"),
    Numbers(verbs.TransportType, "IBV_TRANSPORT_", "enum ibv_transport_type"),
    Numbers(verbs.WCFields, "IBV_WC_EX_WITH_", "enum ibv_create_cq_wc_flags"),
    Numbers(verbs.WCFlags, "IBV_WC_", "enum ibv_wc_flags"),
    Numbers(verbs.WCOpcode, "IBV_WC_", "enum ibv_wc_opcode"),
    Numbers(verbs.WCStatus, "IBV_WC_", "enum ibv_wc_status"),
    Numbers(cm.EventType, "RDMA_CM_EVENT_", "enum rdma_cm_event_type"),
    Numbers(cm.Option, "RDMA_OPTION_"),
    Numbers(cm.PortSpace, "RDMA_PS_", "enum rdma_port_space"),
]

# Not declared to cffi, because the oldest rdma-core that we build with does not have them.
NEWER = {
    "IBV_ACCESS_FLUSH_GLOBAL",
    "IBV_ACCESS_FLUSH_PERSISTENT",
    "IBV_EVENT_DEVICE_SPEED_CHANGE",
    "IBV_WC_ATOMIC_WRITE",
    "IBV_WC_DRIVER2",
    "IBV_WC_DRIVER3",
    "IBV_WC_FLUSH",
    "IBV_WR_ATOMIC_WRITE",
    "IBV_WR_FLUSH",
    "RDMA_CM_EVENT_ADDRINFO_ERROR",
    "RDMA_CM_EVENT_ADDRINFO_RESOLVED",
    "RDMA_CM_EVENT_INTERNAL",
    "RDMA_CM_EVENT_USER",
}


def members() -> Iterator[tuple[str, int]]:
    """C name and Python number of every member of every enumeration."""
    for numbers in ENUMERATIONS:
        for name, member in numbers.python.__members__.items():
            yield numbers.prefix + name, int(member)


def test_every_enumeration_is_in_the_table() -> None:
    listed = {numbers.python for numbers in ENUMERATIONS}
    helpers = {verbs.OpenIntEnum, verbs.OpenIntFlag}
    exported = {getattr(m, name) for m in (verbs, cm) for name in m.__all__}
    assert exported - helpers == listed


@pytest.mark.parametrize(
    ("c_name", "value"), sorted(member for member in members() if member[0] not in NEWER)
)
def test_number_equals_the_header(c_name: str, value: int) -> None:
    assert getattr(lib, c_name) == value


@needs_compiler
@pytest.mark.parametrize("c_name", sorted(NEWER))
def test_newer_numbers_equal_the_header(c_name: str, tmp_path: Path) -> None:
    values = numbers_from_c([c_name], tmp_path)
    if values is None:
        pytest.skip(f"the installed headers do not have {c_name}")
    assert values == [dict(members())[c_name]]


@pytest.mark.parametrize("numbers", [n for n in ENUMERATIONS if n.c_enum], ids=lambda n: n.c_enum)
def test_no_declared_number_is_missing_in_python(numbers: Numbers) -> None:
    declared = ffi.typeof(numbers.c_enum).relements
    known = {numbers.prefix + name for name in numbers.python.__members__}
    assert set(declared) - known == set()


# ---- numbers that nobody knows -------------------------------------------------------------


@pytest.mark.parametrize(
    "python",
    [n.python for n in ENUMERATIONS if issubclass(n.python, verbs.OpenIntEnum)],
    ids=lambda p: p.__name__,
)
@pytest.mark.parametrize("value", [-7, 200, 2**31])
def test_unknown_number_becomes_a_named_member(python: type[IntEnum], value: int) -> None:
    member = python(value)
    assert isinstance(member, python)
    assert (member.name, member.value, int(member)) == (f"UNKNOWN_{value}", value, value)
    assert member == value
    assert f"UNKNOWN_{value}" in repr(member)
    assert value not in list(python)


@pytest.mark.parametrize(
    "python",
    [n.python for n in ENUMERATIONS if issubclass(n.python, verbs.OpenIntFlag)],
    ids=lambda p: p.__name__,
)
def test_unknown_bit_is_kept(python: type[IntFlag]) -> None:
    known = next(iter(python))
    assert python(1 << 40).name == "UNKNOWN_0x10000000000"
    both = python(int(known) | 1 << 40)
    assert known in both
    assert int(both) == int(known) | 1 << 40
    assert not python(0)


def test_something_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="not a valid"):
        verbs.WCStatus("5")  # type: ignore[arg-type]


# ---- layout --------------------------------------------------------------------------------


# Only pointers to them are passed: asked for their fields, cffi ends the process.
_OPAQUE = ("ibv_cq_ex", "ibv_cq_init_attr_ex", "ibv_values_ex")


def declared_structs() -> list[str]:
    """C names of all complete structs and unions of the two headers."""
    _, structs, unions = ffi.list_types()
    names = [f"struct {name}" for name in structs if not name.startswith(("aio_", *_OPAQUE))]
    return [*names, *(f"union {name}" for name in unions)]


def field_names(name: str) -> list[str]:
    """Fields of a struct; those of a member without a name count as its own."""
    names = []
    pending = list(ffi.typeof(name).fields or ())
    for field, description in pending:
        if field:
            names.append(field)
        else:
            pending.extend(description.type.fields)
    return names


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", declared_structs())
def test_struct_equals_the_header(name: str, tmp_path: Path) -> None:
    fields = field_names(name)
    asked = [f"sizeof({name})", *(f"offsetof({name}, {field})" for field in fields)]
    expected = numbers_from_c(asked, tmp_path)
    assert expected is not None, f"{name} does not compile against the installed headers"
    assert ffi.sizeof(name) == expected[0]
    assert [ffi.offsetof(name, field) for field in fields] == expected[1:]


WC_FIELDS = (
    *("wr_id", "status", "opcode", "vendor_err", "byte_len", "imm_data", "qp_num", "src_qp"),
    *("wc_flags", "pkey_index", "slid", "sl", "dlid_path_bits"),
)


def test_work_completion_can_be_unpacked() -> None:
    """`WC_STRUCT` names 13 fields in order; each has to start where C puts it."""
    assert WC_STRUCT.size == ffi.sizeof("struct ibv_wc") == 48
    assert WC_STRUCT.size == struct.calcsize("=Qii6I2H2B2x")
    for position, field in enumerate(WC_FIELDS):
        wc = ffi.new("struct ibv_wc *")
        # 1 in one field and 0 elsewhere: a shifted or swapped field shows.
        setattr(wc, field, 1)
        expected = tuple(int(position == index) for index in range(len(WC_FIELDS)))
        assert WC_STRUCT.unpack(ffi.buffer(wc)) == expected


def test_the_drain_gives_work_completions_the_same_fields() -> None:
    config = ConnectionConfig()
    state = new_state(config, None, config.receives, 1)
    state.close()
    completing = Completing(state)
    wc = ffi.new("struct ibv_wc *")
    for value, field in enumerate(WC_FIELDS[1:], 3):
        setattr(wc, field, value)
    for status in (0, int(verbs.WCStatus.GENERAL_ERR)):
        wc.status = status
        assert not completing.take(wc)
        assert completing.records == [WC_STRUCT.unpack(ffi.buffer(wc))]


def test_union_members_of_a_send_request_overlap() -> None:
    wr = ffi.new("struct ibv_send_wr *")
    wr.wr.rdma.remote_addr = 0x1122334455667788
    wr.imm_data = 0xAABBCCDD
    assert wr.wr.atomic.remote_addr == 0x1122334455667788
    assert wr.invalidate_rkey == 0xAABBCCDD
    base = ffi.offsetof("struct ibv_send_wr", "wr")
    assert base == 40
    assert ffi.sizeof("struct ibv_send_wr") == 128
    assert ffi.sizeof("struct ibv_recv_wr") == 32
    assert ffi.sizeof("struct ibv_sge") == 16
