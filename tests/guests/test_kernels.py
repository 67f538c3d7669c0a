"""The device tests on each kernel of aiordma-softroce, which `make test-kernels` runs."""

from __future__ import annotations

import sys

import pytest
from softroce_wheel import KERNELS

from aiordma_softroce import kernel_build
from softroce.tests.conftest import REPOSITORY, Runner

pytestmark = [pytest.mark.uml, pytest.mark.kernels, pytest.mark.timeout(3600)]

#: Short, and of each kind; iWARP has no datagrams.
_DEVICE_TESTS = {
    "rxe": ("messages", "one_sided", "streams", "datagram"),
    "siw": ("messages", "one_sided", "streams"),
}
#: Its Soft-RoCE treats such datagrams otherwise than later series (docs/softroce.md).
_NOT_ON_6_1 = "tests/device/test_datagram.py::test_what_does_not_fit_the_receive_is_dropped"


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("device", "loop"), [("rxe", "asyncio"), ("siw", "uvloop")])
def test_device_tests(name: str, device: str, loop: str, softroce: Runner) -> None:
    kernel_build.kernel(name)
    files = [f"tests/device/test_{kind}.py" for kind in _DEVICE_TESTS[device]]
    left_out = [f"--deselect={_NOT_ON_6_1}"] if name == "6.1" else []
    iwarp = "" if device == "siw" else " and not siw"
    process = softroce.start(
        "--engine", "uml", "--kernel", name, "--device", device, "--",
        sys.executable, "-m", "pytest", "-q", "-W", "error",
        "-p", "no:cacheprovider", "--tb=short", f"--loop={loop}",
        "-m", f"not slow and not virtual_time and not two_hosts and not qemu{iwarp}",
        *left_out, *files,
        cwd=REPOSITORY,
    )  # fmt: skip
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, out.decode()[-3000:] + err.decode()[-2000:]
