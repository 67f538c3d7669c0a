"""The pytest plugin where no device is: options, the command that is handed over, leaks."""

from __future__ import annotations

import os
import sys

import pytest

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]

#: A plugin in place of the runner: it shows the command, and ends with a status.
_NO_RUNNER = """
import sys
from aiordma_softroce import cli

def main(arguments):
    print("RUNNER", arguments)
    return 7

cli.main = main
"""

#: Likewise in place of the launcher of the fabric.
_NO_FABRIC = """
import aiordma_fabric

def main(arguments):
    print("FABRIC", arguments)
    return 7

aiordma_fabric.main = main
"""

#: A machine without a device, whichever this is.
_NO_DEVICE = """
import aiordma

aiordma.why_unavailable = lambda: "no RDMA device: the reason"
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project outside of softroce, whose warnings are its own affair."""
    for name in [name for name in os.environ if name.startswith(("AIORDMA_", "PYTEST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    pytester.makepyfile(no_runner=_NO_RUNNER, no_device=_NO_DEVICE, no_fabric=_NO_FABRIC)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function")
    return pytester


def _run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_a_project_that_does_not_use_it_loads_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_nothing_is_loaded(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("aiordma")
            assert "aiordma" not in sys.modules
        """
    )
    _run(project).assert_outcomes(passed=1)
    # Nor without pytest-asyncio, and with every warning an error.
    _run(project, "-p", "no:asyncio", "-W", "error", "-c", os.devnull).assert_outcomes(passed=1)


def test_the_command_is_handed_over_to_the_fabric(project: pytest.Pytester) -> None:
    words = ("-p", "no_fabric", "--fabric", "some where", "-k", "a or b", "--cov=unknown-option")
    done = _run(project, *words)
    assert done.ret == 7
    (told,) = (line for line in done.outlines if line.startswith("FABRIC"))
    assert told.startswith(f"FABRIC ['--', '{sys.executable}', ")
    assert told.endswith(f"{str(['-p', 'no:cacheprovider', *words])[1:-1]}]")
    (said,) = (line for line in done.errlines if line.startswith("aiordma: "))
    assert "runs over the fabric: python -m aiordma.testing.fabric -- " in said
    project.makefile(".conf", own="")
    done = _run(project, "-p", "no_fabric", "--fabric=own.conf", "--fabric-args=--devices 2")
    told = "FABRIC ['--profile', 'own.conf', '--devices', '2', '--', "
    assert any(line.startswith(told) for line in done.outlines)


def test_defaults_of_a_project_that_uses_the_fabric(project: pytest.Pytester) -> None:
    project.makefile(".conf", own="")
    project.makeini("[pytest]\nfabric = own.conf\nfabric_args = --devices 2\n")
    project.makepyfile("def test_here(): pass")
    told = "FABRIC ['--profile', 'own.conf', '--devices', '2', '--', "
    done = _run(project, "-p", "no_fabric")
    assert any(line.startswith(told) for line in done.outlines)
    _run(project, "-p", "no_fabric", "--no-fabric").assert_outcomes(passed=1)
    # An option is stronger, also where it asks for the other one.
    done = _run(project, "-p", "no_runner", "--softroce")
    assert any(line.startswith("RUNNER ['--engine', 'auto'") for line in done.outlines)
    project.makeini("[pytest]\nsoftroce = uml\n")
    done = _run(project, "-p", "no_fabric", "--fabric")
    assert any(line.startswith("FABRIC ['--', ") for line in done.outlines)
    project.makeini("[pytest]\nsoftroce = uml\nfabric = standard\n")
    done = _run(project)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --softroce and --fabric exclude one another: *"])
    project.makeini("[pytest]\nfabric = mlx\n")
    done = _run(project)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: fabric = mlx: profile mlx: there are standard*"])


def test_the_place_of_a_wrong_profile_is_told(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q --fabric=mlx")
    done = _run(project, "-p", "no_fabric")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    said = "ERROR: --fabric=mlx in PYTEST_ADDOPTS: profile mlx: there are standard"
    assert done.errlines[0].startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "rdma_leak_settle=soon"], "ERROR: rdma_leak_settle = soon: expected a number*"),
        (["--fabric=mlx"], "ERROR: --fabric=mlx: profile mlx: there are standard*"),
        (["--fabric="], "ERROR: --fabric=: profile '': there are standard*"),
        (["--fabric=x/y"], "ERROR: --fabric=x/y: profile x/y: there is no such file"),
        (["--fabric", "standard"], "ERROR: --fabric standard: *equals sign, --fabric=standard"),
        (["--fabric-args=--devices 2"], "ERROR: --fabric-args needs --fabric"),
        (["--fabric", "--fabric-args='"], "ERROR: --fabric-args: No closing quotation"),
        (["--fabric", "--softroce"], "ERROR: --softroce and --fabric exclude one another: *"),
    ],
)
def test_mistakes_are_told(project: pytest.Pytester, words: list[str], said: str) -> None:
    done = _run(project, "-p", "no_runner", "-p", "no_fabric", *words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([said])
    assert not done.stdout.str().startswith(("RUNNER", "FABRIC"))


def test_help_is_about_the_options(project: pytest.Pytester) -> None:
    done = _run(project, "--fabric", "--help")
    assert done.ret == 0
    text = done.stdout.str()
    assert "--fabric-args" in text
    assert "--rdma-leak-check" in text
    assert "rdma_required (bool)" in text


def test_without_the_plugin_of_softroce(project: pytest.Pytester) -> None:
    """Everything else is there."""
    project.makepyfile("def test_here(): pass")
    _run(project, "-p", "no:softroce").assert_outcomes(passed=1)
    done = _run(project, "-p", "no:softroce", "-p", "no_fabric", "--fabric")
    assert any(line.startswith("FABRIC ['--', ") for line in done.outlines)


_NEEDING = """
import pytest

@pytest.mark.rdma
def test_marked():
    raise AssertionError

def test_address(rdma_address):
    raise AssertionError

def test_device(rdma_device):
    raise AssertionError

async def test_pair(rdma_pair):
    raise AssertionError

async def test_streams(rdma_stream_pair):
    raise AssertionError

def test_neither():
    pass
"""


def test_without_a_device_tests_are_skipped(project: pytest.Pytester) -> None:
    project.makepyfile(_NEEDING)
    done = _run(project, "-p", "no_device", "-rs", "--strict-markers")
    done.assert_outcomes(skipped=5, passed=1)
    done.stdout.fnmatch_lines(["SKIPPED*no RDMA device: the reason"])


def test_without_a_device_tests_fail_where_it_is_required(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.makepyfile(_NEEDING)
    done = _run(project, "-p", "no_device", "--rdma-required")
    done.assert_outcomes(errors=5, passed=1)
    done.stdout.fnmatch_lines(["RDMA is required here: no RDMA device: the reason"])
    # A session in softroce is there for the device.
    monkeypatch.setenv("AIORDMA_SOFTROCE", "1")
    _run(project, "-p", "no_device").assert_outcomes(errors=5, passed=1)
    monkeypatch.delenv("AIORDMA_SOFTROCE")
    project.makeini("[pytest]\nrdma_required = true\nasyncio_mode = auto")
    _run(project, "-p", "no_device").assert_outcomes(errors=5, passed=1)


def test_without_pytest_asyncio(project: pytest.Pytester) -> None:
    project.makeini("[pytest]")
    project.makepyfile("def test_pair(rdma_pair): pass\ndef test_s(rdma_stream_pair): pass")
    done = _run(project, "-p", "no:asyncio")
    done.assert_outcomes(errors=2)
    done.stdout.fnmatch_lines(["the fixture rdma_pair needs pytest-asyncio 0.24*"])


_LEAKING = """
import asyncio, os, socket
import pytest

kept = []

@pytest.fixture(scope="module")
def server():
    with socket.socket() as each:
        yield each

@pytest.fixture
def file():
    with open(os.devnull) as each:
        yield each

def test_of_a_wider_scope(server): pass
def test_tidy(file): pass
def test_leaks_a_descriptor(file): kept.append(open("/dev/zero"))
async def test_tidy_too(server, file):
    await asyncio.create_task(asyncio.sleep(0))
async def test_leaks_a_task(): kept.append(asyncio.create_task(asyncio.sleep(1000), name="sleeper"))
@pytest.mark.asyncio(loop_scope="module")
async def test_leaks_in_a_module(): kept.append(asyncio.create_task(asyncio.sleep(99), name="late"))
@pytest.mark.asyncio(loop_scope="module")
async def test_tidy_in_a_module(): await asyncio.sleep(0)
async def test_ends_soon(): kept.append(asyncio.create_task(asyncio.sleep(0.1)))
@pytest.mark.rdma_leaks_allowed
def test_allowed(): kept.append(open("/dev/null"))
def test_tidy_after(): pass
def test_fails():
    kept.append(open("/dev/full"))
    raise AssertionError("for another reason")
"""


@pytest.mark.parametrize("how", ["option", "configuration", "fixture"])
def test_the_test_that_leaks_fails_and_no_other(project: pytest.Pytester, how: str) -> None:
    text = _LEAKING
    words = ["--rdma-leak-check"] if how == "option" else []
    if how == "configuration":
        project.makeini("[pytest]\nasyncio_mode = auto\nrdma_leak_check = true")
    elif how == "fixture":
        text = text.replace(
            "@pytest.mark.rdma_leaks_allowed\n",
            "pytestmark = pytest.mark.usefixtures('rdma_leak_check')\n",
        ).replace('kept.append(open("/dev/null"))', "pass")
    project.makepyfile(text)
    done = _run(project, *words, "-o", "rdma_leak_settle=0.5")
    done.assert_outcomes(passed=10, errors=3, failed=1)
    done.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_leaks_a_descriptor*",
            "the test left behind:",
            "  descriptor *: /dev/zero",
            "*ERROR at teardown of test_leaks_a_task*",
            "  <Task * name='sleeper'*",
            "*ERROR at teardown of test_leaks_in_a_module*",
            "  <Task * name='late'*",
            "* test_fails *",
            "  descriptor *: /dev/full",
        ]
    )
    assert done.stdout.str().count("\nthe test left behind:\n") == 4


def test_no_check_unless_asked(project: pytest.Pytester) -> None:
    project.makepyfile(_LEAKING.replace('raise AssertionError("for another reason")', "pass"))
    _run(project).assert_outcomes(passed=11)
