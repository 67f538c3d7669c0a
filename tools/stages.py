"""The stages of ``make test``: what each runs, for how long it may, and what counts as a pass."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pythons
import systems
from checks import ROOT

#: The folder for logs and JUnit files of a run; git ignores it.
REPORTS = Path("build/test")

#: Marks of tests that need more than one device on one host in ordinary time.
_SPECIAL = "not virtual_time and not two_hosts and not qemu and not dask and (smoke or not program)"
#: What runs on both loops on each device; the rest runs on one, another one for each device.
_OF_THE_LOOP = "(smoke or not slow and not one_loop)"
_NOT_OF_THE_LOOP = "(smoke or slow or one_loop)"


@dataclass(frozen=True, slots=True)
class Stage:
    """One command with its limit and its rule.

    Attributes:
        name: what the command line and the table call it.
        about: one line for ``--list``.
        command: the words to run, from the root of the repository.
        limit_s: seconds of real time, after which the stage is killed and has failed.
        report: whether the command writes the JUnit file `junit`.
        must_run: a failure if no test ran or any was skipped: a device test that is skipped has
            proved nothing.
        pytest: whether further options of the command line are for this stage.
        needs: the stage fails at once if this path is missing.
        optional: left out, with a word about it, if this path is missing.
        after: a stage whose failure makes this one pointless.
        env: additions to the environment.

    A command that ends with `systems.ABSENT` has found that what it needs is not to be had here: it
    is left out, with a word about it, too.
    """

    name: str
    about: str
    command: tuple[str, ...]
    limit_s: float
    report: bool = True
    must_run: bool = False
    pytest: bool = False
    needs: str = "."
    optional: str = "."
    after: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def junit(self) -> Path:
        """Where the results of the stage's tests are written."""
        return REPORTS / f"{self.name}.xml"

    @property
    def log(self) -> Path:
        """Where the output of the stage is kept."""
        return REPORTS / f"{self.name}.log"


def _options(name: str, *arguments: str) -> tuple[str, ...]:
    """Options of pytest in every stage; absolute, as some stages run in a copy of the tree."""
    junit = (REPORTS / f"{name}.xml").absolute()
    # -W error again, for whatever a plugin or a user's own options may have switched off.
    return ("-q", "-W", "error", "-p", "no:cacheprovider", f"--junitxml={junit}", *arguments)


def _pytest(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", *_options(name, *arguments))


def _local(
    name: str, about: str, *arguments: str, limit_s: float, optional: str = ".", after: str = ""
) -> Stage:
    """Return a stage of pytest on this machine, no device needed."""
    return Stage(
        name,
        about,
        _pytest(name, *arguments),
        limit_s,
        pytest=True,
        needs=arguments[0] if optional == "." else ".",
        optional=optional,
        after=after,
        env={"PYTHONASYNCIODEBUG": "1"},
    )


def _device(
    name: str,
    about: str,
    runner: tuple[str, ...],
    *arguments: str,
    limit_s: float,
    optional: str = ".",
    after: str = "kernel",
) -> Stage:
    """Return a stage of pytest inside softroce, which ends it some time before the limit."""
    inside = f"--timeout={limit_s - 30:.0f}"
    softroce = (sys.executable, "-m", "aiordma_softroce", *runner, inside, "--")
    return Stage(
        name,
        about,
        (*softroce, *_pytest(name, *arguments)),
        limit_s,
        must_run=True,
        pytest=True,
        needs=arguments[0] if optional == "." else ".",
        optional=optional,
        after=after,
    )


def _over_fabric(profile: str, loop: str) -> Stage:
    """Return the stage of the device tests over the fabric, where an adapter is like this profile.

    What needs the kernel has the mark `kernel`; the rest needs no guest, and waits for none.
    """
    name = f"fabric-{profile}"
    fabric = ("-m", "aiordma_fabric", f"--profile={profile}", f"--addresses={FABRIC_ADDRESSES}")
    without = "kernel or siw or shared_queue" if profile == "irdma" else "kernel or siw"
    tests = f"{_SPECIAL} and not ({without}) and {_OF_THE_LOOP}"
    return Stage(
        name,
        f"the device tests over the fabric, an adapter like {profile}, on {loop}",
        (
            *(sys.executable, *fabric, "--"),
            *_pytest(name, ALL_TESTS, f"--loop={loop}", "-m", tests),
        ),
        limit_s=900,
        must_run=True,
        pytest=True,
        env={
            "AIORDMA_SOFTROCE_ADDR": FABRIC_ADDRESSES.partition(",")[0],
            "AIORDMA_SOFTROCE_DEVICE": "rxe",  # the tests' name for RoCE
        },
    )


def _sanitized(
    name: str, about: str, kinds: str, *arguments: str, limit_s: float, after: str = ""
) -> Stage:
    """Return a stage of pytest over C that is built under sanitizers."""
    guest = ("--guest",) if after else ()
    command = (
        sys.executable,
        "tools/sanitize.py",
        kinds,
        *guest,
        "--",
        *_options(name, *arguments),
    )
    env = {"PYTHONASYNCIODEBUG": "1"}
    return Stage(name, about, command, limit_s, must_run=bool(after), after=after, env=env)


def _system_unit(python: str) -> Stage:
    """Return the stage of the unit tests in the system that has this Python."""
    which = _ANY_PYTHON
    if python != _NEWEST:
        # Each of those between has one loop.
        which += (*_BETWEEN, f"--unit-loop={'asyncio' if python == '3.14' else 'uvloop'}")
    name = f"unit-{python}"
    release = systems.system_of(python).release
    return Stage(
        name,
        f"the unit tests, with CPython {python} and rdma-core of {release}",
        (
            *(sys.executable, "tools/systems.py", python, "--", "python", "-m", "pytest"),
            *_options(name, "tests/unit", *which),
        ),
        limit_s=1500,
        pytest=True,
        after=f"system-{release}",
        env={"PYTHONASYNCIODEBUG": "1"},
    )


def _system_device(
    name: str,
    about: str,
    python: str,
    runner: tuple[str, ...],
    *arguments: str,
    limit_s: float,
    or_here: bool = False,
    env: Mapping[str, str] | None = None,
) -> Stage:
    """Return a stage of pytest inside softroce, in the system that has this Python.

    With `or_here` the machine's own Python and rdma-core stand in where it cannot be had.
    """
    release = systems.system_of(python).release
    inside = f"--timeout={limit_s - 60:.0f}"
    softroce = ("python", "-m", "aiordma_softroce", *runner, inside, "--")
    return Stage(
        name,
        f"{about}, with CPython {python} and rdma-core of {release}",
        (
            *(sys.executable, "tools/systems.py", python, *(("--or-here",) if or_here else ())),
            *("--", *softroce, "python", "-m", "pytest", *_options(name, *arguments)),
        ),
        limit_s,
        must_run=True,
        pytest=True,
        after=f"system-{release}",
        env=env or {},
    )


def _systems() -> tuple[Stage, ...]:
    """Return the stages that make the systems, and compile the tests there."""
    return tuple(
        Stage(
            f"system-{system.release}",
            f"Debian {system.release} with CPython {' and '.join(system.pythons)}; "
            "the extension builds there, and every file of tests imports",
            (sys.executable, "tools/systems.py", "--make", system.release),
            limit_s=1800,
            report=False,
        )
        for system in systems.SYSTEMS
    )


def _other_pythons(kind: str, about: str, *arguments: str) -> tuple[Stage, ...]:
    """Return a stage for every other CPython of this machine that no system has."""
    where = ("--guest",) if kind == "smoke" else ()
    stages = []
    covered = () if systems.why_not() else [python for s in systems.SYSTEMS for python in s.pythons]
    for version in filter(lambda version: version not in covered, pythons.found()):
        name = f"{kind}-{version}"
        command = (sys.executable, "tools/pythons.py", version, *where, "--")
        stages.append(
            Stage(
                name,
                f"{about}, with CPython {version}",
                (*command, *_options(name, *arguments)),
                limit_s=1500,
                after="kernel" if where else "",
                must_run=bool(where),
                env={} if where else {"PYTHONASYNCIODEBUG": "1"},
            )
        )
    if not stages:
        # So that the table shows that nothing of the kind ran.
        absent = "other CPython here that is older than those of the systems"
        stages.append(Stage(f"{kind}-3.x", about, (), 1, optional=absent))
    return tuple(stages)


#: The files that drive C the most, with memory that comes and goes.
_MUCH_C = (
    "core/test_message_state", "endpoint/test_operations", "core/test_message_waiting",
    "core/test_message_protocol", "core/test_stream_state", "core/test_wakeup",
    "core/test_wakeup_tasks", "core/test_waiting", "core/test_drain",
    "core/test_readable", "verbs/test_resource", "core/test_message_cycles", "core/test_crc32c",
    "loop/test_timers", "verbs/test_memory_region", "endpoint/test_sharing_model",
    "verbs/test_slab", "core/test_core_types", "core/test_message",
    "streams/test_delivering", "core/test_references", "core/test_send_chain",
    "core/test_coroutine", "requests/test_calls_in_c", "requests/test_served_in_c",
)  # fmt: skip

#: Those of them that are done soon, although a debug build is three times as slow.
_DEBUG = (
    "core/test_message_cycles", "core/test_core_types", "core/test_message",
    "core/test_message_state", "core/test_wakeup_tasks", "core/test_waiting", "core/test_coroutine",
)  # fmt: skip

#: The tests of aiordma-softroce; and those of aiordma that start guests themselves.
_RUNNER, _GUESTS = "softroce/tests", "tests/guests"

#: Of tests/fabric, those that need the packages of others.
_FOREIGN = ("tests/fabric/test_programs.py", "tests/fabric/test_pyverbs.py")

#: In seconds of the guest, of which a test may use many and a hang uses them up at once.
_VIRTUAL = ("--timeout=7200",)
UML = ("--engine", "uml")
RXE = (*UML, "--device", "rxe")
SIW = (*UML, "--device", "siw")
_NEWEST = "3.15"
#: What no interpreter changes: pages and tools, and models that are pure arithmetic. It runs with
#: the Python of this machine alone, which is the oldest.
_ANY_PYTHON = tuple(
    f"--ignore=tests/unit/{name}"
    for name in (
        "bench", "docs", "tools", "endpoint/test_flow_model.py", "endpoint/test_sharing_model.py",
        "rsocket/test_fuzz.py", "rsocket/test_model.py", "rsocket/test_pair.py",
    )
)  # fmt: skip
#: What only a new Python might change: those between the oldest and the newest leave it out.
_BETWEEN = tuple(
    f"--ignore=tests/unit/{name}.py"
    for name in (
        "test_docstrings",
        "cli/test_completion",
        "testing/test_conformance_kit",
        "testing/test_conformance_kit_catches",
        "testing/test_pytest_plugin",
    )
)
#: For five processes, and arrays of more than 256 MiB; pages that no process uses are not taken.
DASK_MEMORY = ("--memory", "3G")
ALL_TESTS = "tests/device"
#: One that sockets have, too, and those of softroce.
FABRIC_ADDRESSES = "127.0.0.1,10.80.0.1,fd80::1,::1"
#: Profiles of adapters, each on one loop, so that both loops occur.
FABRIC_PROFILES = {"standard": "asyncio", "mlx5": "uvloop", "irdma": "asyncio"}


def _marked(mark: str, *, but: str = "") -> tuple[str, ...]:
    """Return the files of device tests that have this mark: a guest takes long to read all."""
    files = sorted((ROOT / ALL_TESTS).glob("test_*.py"))
    return tuple(
        f"{ALL_TESTS}/{file.name}"
        for file in files
        if f"mark.{mark}" in file.read_text("utf-8") and file.stem != but
    )


#: Of tests/interop, those with the most connections and the most kinds of requests; and pyverbs
#: and cmtime, which change with rdma-core.
_INTEROP = "rping or ucmatose or rstream or pyverbs or cmtime"

# Where each combination stands. A fact about the loop and the device is looked for on both loops on
# both devices; one about the interpreter, or about rdma-core, on any of them. So the stages are
# given out: 3.15 and 3.14 with rdma-core 65 or later have Soft-RoCE, asyncio's loop and uvloop;
# 3.13 with rdma-core 56 has iWARP and asyncio's loop, and the short list on Soft-RoCE and uvloop;
# the machine's own Python has iWARP and uvloop, virtual time, faults, and what is long. Where a
# system cannot be had, the machine stands in for it, so that no combination of loop and device is
# lost. The 3.15 of device-rxe-asyncio compiles what is hot (PYTHON_JIT), where its build can;
# unit-3.15 and interop-rxe do not.

#: Three run at a time, in this order: what everything waits for, what needs no kernel while that
#: is built, and then the longest first, so that all lanes end together.
STAGES: tuple[Stage, ...] = (
    Stage(
        "kernel",
        "the User-Mode Linux kernel builds (once), boots and runs a command",
        (sys.executable, "-m", "aiordma_softroce", *UML, "--", "true"),
        limit_s=1800,
        report=False,
    ),
    Stage(
        "collect",
        "every file of tests imports; compiled here, because in a guest it takes minutes",
        (sys.executable, "-m", "pytest", "-qq", "--co", "-p", "no:cacheprovider", "tests", _RUNNER),
        limit_s=300,
        report=False,
    ),
    Stage(
        "lint",
        "style, types, layers, the structure of C, C warnings, spelling",
        (sys.executable, "tools/lint.py", f"--junit={REPORTS / 'lint.xml'}"),
        limit_s=900,
    ),
    Stage(
        "wheel",
        "sdist and wheel build, are whole, carry the stable ABI, and import without rdma-core, too",
        (sys.executable, "tools/check_wheel.py", f"--junit={REPORTS / 'wheel.xml'}"),
        limit_s=900,
    ),
    _local(
        "unit", "no device, every warning an error, asyncio's debug", "tests/unit", limit_s=1500
    ),
    _local(
        "fabric",
        "the launcher of the fabric, and pytest --fabric: RDMA in memory",
        "tests/fabric",
        *(f"--ignore={file}" for file in _FOREIGN),
        limit_s=600,
    ),
    _local(
        "foreign",
        "programs of rdma-core and perftest, and pyverbs' own tests, over the fabric",
        *_FOREIGN,
        limit_s=600,
    ),
    *(_over_fabric(profile, loop) for profile, loop in FABRIC_PROFILES.items()),
    Stage(
        "simulation",
        "servers and clients in a simulated world, in orders and with faults that a seed chooses",
        (sys.executable, "-m", "tests.simulation.run", "--count", "2000"),
        limit_s=600,
        report=False,
    ),
    Stage(
        "fuzz",
        "the C that reads the wire, by random programs under AddressSanitizer and UBSan",
        (sys.executable, "tools/fuzz.py", f"--junit={REPORTS / 'fuzz.xml'}"),
        limit_s=300,
    ),
    _sanitized(
        "sanitized",
        "the unit tests that drive C the most, under AddressSanitizer and UBSan",
        "address,undefined",
        *(f"tests/unit/{name}.py" for name in _MUCH_C),
        # It forks in a process with threads, which AddressSanitizer does not support.
        "--deselect=tests/unit/loop/test_timers.py::test_a_forked_child_has_none",
        limit_s=900,
    ),
    Stage(
        "debug",
        "unit tests of the C types, with a debug build of CPython",
        (
            *(sys.executable, "tools/pythons.py", "debug", "--"),
            *_options("debug", *(f"tests/unit/{name}.py" for name in _DEBUG)),
        ),
        limit_s=600,
        optional="." if pythons.debug() else "a debug build of this CPython (python3-dbg)",
        env={"PYTHONASYNCIODEBUG": "1"},
    ),
    # The C is of the stable ABI, and Python's own part has neighbors on both sides.
    *_other_pythons(
        "unit",
        "the unit tests that drive C the most",
        *(f"tests/unit/{name}.py" for name in _MUCH_C),
    ),
    Stage(
        "mutate-quick",
        "bugs that are put in one at a time: each is found by its test (all: make mutate)",
        (
            *(sys.executable, "tools/mutate.py", "--quick", "--jobs=1"),
            f"--junit={REPORTS / 'mutate-quick.xml'}",
        ),
        limit_s=600,
        must_run=True,
    ),
    *_systems(),
    *(_system_unit(python) for system in systems.SYSTEMS for python in system.pythons),
    _local(
        "runner-qemu",
        "the qemu engine itself, and aiordma where it takes a device away",
        *(_RUNNER, _GUESTS, "-m", "qemu"),
        limit_s=1200,
    ),
    _device(
        "smoke-qemu",
        "the short list on a stock kernel with two CPUs, but for programs: it is emulated",
        ("--engine", "qemu", "--device", "rxe"),
        *_marked("smoke", but="test_introspection"),  # which is of each Python, and of no kernel
        *("-m", f"smoke and not siw and not program and not one_loop and {_SPECIAL}"),
        "--timeout=400",
        limit_s=900,
        after="collect",
    ),
    _device(
        "programs",
        "the commands, the pages and the examples, as programs on Soft-RoCE",
        RXE,
        *_marked("program"),
        *("--loop=asyncio", "-m", "program and not two_hosts and not siw"),
        limit_s=2400,
    ),
    _system_device(
        "device-rxe-asyncio",
        "the real stack on Soft-RoCE, asyncio's own loop",
        *("3.15", RXE, ALL_TESTS, "--loop=asyncio"),
        *("-m", f"{_SPECIAL} and not siw and {_OF_THE_LOOP}"),
        limit_s=1600,
        or_here=True,
        env={"PYTHON_JIT": "1"},
    ),
    _device(
        "device-siw-uvloop",
        "everything that is of the device on software iWARP, uvloop",
        SIW,
        ALL_TESTS,
        *("--loop=uvloop", "-m", f"{_SPECIAL} and not one_device"),
        limit_s=2000,
    ),
    _device(
        "dask",
        "comms and clusters of Dask on Soft-RoCE, apart: its threads stay as long as the process",
        (*RXE, *DASK_MEMORY),
        *_marked("dask"),
        *("--loop=asyncio", "-m", "dask"),
        limit_s=900,
    ),
    _device(
        "dask-siw",
        "comms of Dask on software iWARP and uvloop",
        (*SIW, *DASK_MEMORY),
        *_marked("dask"),
        *("--loop=uvloop", "-m", "dask and not slow and not one_device"),
        limit_s=600,
    ),
    _system_device(
        "device-rxe-uvloop",
        "the same on uvloop",
        *("3.14", RXE, ALL_TESTS, "--loop=uvloop"),
        *("-m", f"{_SPECIAL} and not siw and {_OF_THE_LOOP}"),
        limit_s=1600,
        or_here=True,
    ),
    _device(
        "device-rxe-long",
        "what is long or not of the loop, and the short list",
        RXE,
        ALL_TESTS,
        *("--loop=asyncio", "-m", f"{_SPECIAL} and not siw and {_NOT_OF_THE_LOOP}"),
        limit_s=1600,
    ),
    _system_device(
        "device-siw-asyncio",
        "software iWARP, asyncio's own loop, without what is long or not of the loop",
        *("3.13", SIW, ALL_TESTS, "--loop=asyncio"),
        *("-m", f"{_SPECIAL} and {_OF_THE_LOOP}"),
        limit_s=1600,
        or_here=True,
    ),
    _system_device(
        "smoke-3.13",
        "the short list on Soft-RoCE, uvloop",
        "3.13",
        RXE,
        *_marked("smoke"),
        *("--loop=uvloop", "-m", f"smoke and not siw and {_SPECIAL}"),
        limit_s=600,
    ),
    _local(
        "runner",
        "the program that runs a command where a device is, and what has a guest of its own",
        *(_RUNNER, _GUESTS, "-m", "not qemu and not kernels"),
        limit_s=1200,
        after="kernel",
    ),
    _device(
        "interop-siw",
        "those that know iWARP, on uvloop",
        SIW,
        "tests/interop",
        "--loop=uvloop",
        limit_s=600,
    ),
    _system_device(
        "interop-rxe",
        "programs of rdma-core, and pyverbs, as peers",
        *("3.15", RXE, "tests/interop", "--loop=asyncio"),
        limit_s=900,
        or_here=True,
    ),
    *(
        _system_device(
            f"interop-{python}",
            "those with the most connections and the most kinds of requests",
            *(python, RXE, "tests/interop", "--loop=uvloop", "-k", _INTEROP),
            limit_s=600,
        )
        for python in ("3.13", "3.14")
    ),
    _device(
        "virtual-time-asyncio",
        "cancellation at every await, and long timers, in a guest whose clock skips idle time",
        (*RXE, "--virtual-time"),
        *_marked("virtual_time"),
        *("--loop=asyncio", "-m", "virtual_time and not two_hosts", *_VIRTUAL),
        limit_s=600,
    ),
    _device(
        "virtual-time-uvloop",
        "the same on uvloop",
        (*RXE, "--virtual-time"),
        *_marked("virtual_time"),
        *("--loop=uvloop", "-m", "virtual_time and not two_hosts", *_VIRTUAL),
        limit_s=600,
    ),
    *_other_pythons(
        "smoke",
        "the short list on Soft-RoCE, uvloop",
        *(*_marked("smoke"), "--loop=uvloop", "-m", f"smoke and not siw and {_SPECIAL}"),
    ),
    _sanitized(
        "sanitized-rxe",
        "messages, streams and operations on Soft-RoCE under UBSan, with checked allocations",
        "undefined",
        *(f"tests/device/test_{name}.py" for name in ("messages", "one_sided", "streams")),
        *("--loop=uvloop", "-m", f"{_SPECIAL} and not siw and not slow"),
        limit_s=600,
        after="kernel",
    ),
    _device(
        "conformance",
        "CPython's own tests of asyncio's streams, TLS and sendfile, over RDMA",
        RXE,
        "tests/conformance",
        *("--loop=asyncio", "--timeout=100"),
        limit_s=600,
    ),
    _device(
        "seeds-siw",
        "the same on software iWARP",
        SIW,
        "tests/seeds",
        "--loop=uvloop",
        limit_s=600,
    ),
    _device(
        "seeds-rxe",
        "what the documents of jVerbs state, row by row, on Soft-RoCE",
        RXE,
        "tests/seeds",
        "--loop=asyncio",
        limit_s=600,
    ),
    _device(
        "interop-rxe-uvloop",
        "the same, with the machine's own rdma-core",
        RXE,
        "tests/interop",
        *("--loop=uvloop", "-k", _INTEROP),
        limit_s=600,
    ),
    _device(
        "two-hosts",
        "a link on which packets get lost, doubled and late",
        (*RXE, "--hosts", "2", "--virtual-time"),
        *_marked("two_hosts"),
        *("-m", "two_hosts", *_VIRTUAL),
        limit_s=600,
    ),
)
