"""`pytest --fabric`: a session over the fabric, its fixtures, and its check for leaks."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from aiordma_fabric import profiles
from tests.fabric.launching import LIMIT_S, launched, outside

pytest_plugins = ["pytester"]

_INI = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
#: What a session of 50 tests may take with the import of aiordma: of the processor, whose rest
#: other programs take, and by its own account, which shows that it waits for nothing.
_BUSY_S, _MOST_S = 1.5, 5.0


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project outside of any fabric."""
    clean = outside()
    for name in [name for name in os.environ if name not in clean or name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    if "LD_LIBRARY_PATH" in clean:
        monkeypatch.setenv("LD_LIBRARY_PATH", clean["LD_LIBRARY_PATH"])
    pytester.makeini(_INI)
    return pytester


def _run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    words = ("-p", "no:cacheprovider", "-W", "error", *arguments)
    return project.runpytest_subprocess(*words, timeout=LIMIT_S)


def test_fixtures(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import os
        import aiordma, pytest

        async def test_messages(rdma_pair):
            client, server = rdma_pair
            await server.send(b"answer")
            assert bytes(await client.recv()) == b"answer"

        async def test_streams(rdma_stream_pair):
            (_, writer), (reader, _) = rdma_stream_pair
            writer.write(b"line" + bytes((10,)))
            assert await reader.readline() == b"line" + bytes((10,))

        @pytest.mark.rdma
        def test_the_device(rdma_device, rdma_address):
            assert rdma_address == os.environ["AIORDMA_FABRIC_ADDR"] == "127.0.0.1"
            assert rdma_device == aiordma.devices()[0]

        def test_the_second_device():
            from aiordma_pytest.device import device
            found = aiordma.devices()
            assert device(os.environ["AIORDMA_FABRIC_ADDR2"]) == found[1]
        """
    )
    done = _run(project, "--fabric", "--fabric-args=--devices 2", "-k", "test_")
    done.assert_outcomes(passed=4)
    done.stdout.fnmatch_lines(["rdma: 127.0.0.1 (fabric, profile standard)"])
    (said,) = (line for line in done.errlines if line.startswith("aiordma: "))
    begin = "aiordma: this session runs over the fabric: python -m aiordma.testing.fabric --devices"
    assert said.startswith(f"{begin} 2 -- ")


def test_fifty_tests_with_a_connection_each(project: pytest.Pytester) -> None:
    project.makeconftest(
        """
        import time

        began = time.process_time()

        def pytest_terminal_summary(terminalreporter):
            terminalreporter.write_line(f"busy for {time.process_time() - began:.2f} s")
        """
    )
    project.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("number", range(50))
        async def test_it(rdma_pair, number):
            client, server = rdma_pair
            await client.send(b"question")
            assert bytes(await server.recv()) == b"question"
        """
    )
    busy: list[float] = []
    seconds: list[float] = []
    for _ in range(3):
        # Importing Hypothesis takes longer than the tests.
        done = _run(project, "--fabric", "-p", "no:hypothesispytest")
        done.assert_outcomes(passed=50)
        said = done.stdout.str()
        busy += map(float, re.findall(r"busy for ([\d.]+) s", said))
        seconds += map(float, re.findall(r"50 passed in ([\d.]+)s", said))
    assert len(busy) == len(seconds) == 3
    assert min(busy) <= _BUSY_S, busy
    assert min(seconds) <= _MOST_S, seconds


def test_leaks(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import aiordma
        from aiordma.verbs import ProtectionDomain

        kept = []

        async def test_before(rdma_pair):
            pass

        async def test_leaks(rdma_address):
            kept.append(await aiordma.listen(rdma_address, 0))
            kept.append(await aiordma.connect(rdma_address, kept[0].port))

        def test_leaks_in_no_loop(rdma_device):
            kept.append(rdma_device.open())
            kept.append(ProtectionDomain(kept[-1]))

        async def test_after(rdma_pair):
            await rdma_pair[0].send(b"x")
            assert bytes(await rdma_pair[1].recv()) == b"x"
        """
    )
    words = ("--rdma-leak-check", "-o", "rdma_leak_settle=0.5", "-W", "ignore")
    done = _run(project, "--fabric", *words)
    done.assert_outcomes(passed=4, errors=2)
    done.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaks _*",
            "the test left behind:",
            "  connection id * of the fabric",
            "  queue pair * of the fabric",
            "  still open: <Listener *",
            "*ERROR at teardown of test_leaks_in_no_loop*",
            "the test left behind:",
            "  device context * of the fabric",
            "  protection domain * of the fabric",
        ]
    )


def test_no_device(project: pytest.Pytester) -> None:
    """A session over the fabric is there for the device."""
    project.makepyfile("def test_it(rdma_address): pass")
    done = _run(project, "--fabric", "--fabric-args=--devices 0")
    done.assert_outcomes(errors=1)
    done.stdout.fnmatch_lines(["RDMA is required here: no RDMA device*"])


def test_profiles(project: pytest.Pytester) -> None:
    project.makepyfile("def test_it(rdma_pair): pass".replace("def", "async def"))
    for name in profiles():
        done = _run(project, f"--fabric={name}")
        done.assert_outcomes(passed=1)
        done.stdout.fnmatch_lines([f"rdma: 127.0.0.1 (fabric, profile {name})"])
    own = Path(project.path) / "own.conf"
    own.write_text("name = own\ndevice = mine\n")
    project.makepyfile("def test_it(rdma_device): assert rdma_device.name == 'mine0'")
    _run(project, "--fabric=own.conf").assert_outcomes(passed=1)
    project.makeini(f"{_INI}fabric = own.conf\n")
    done = _run(project)
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["rdma: 127.0.0.1 (fabric, profile own)"])


def test_a_session_over_the_fabric_stays(project: pytest.Pytester) -> None:
    """However it got there, and whatever else is asked for."""
    project.makepyfile("async def test_it(rdma_pair): pass")
    for words in ([], ["--fabric"], ["--softroce=uml"]):
        done = project.run(
            *launched("--", sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words),
            timeout=LIMIT_S,
        )  # fmt: skip
        done.assert_outcomes(passed=1)
        assert not any(line.startswith("aiordma: ") for line in done.errlines)
