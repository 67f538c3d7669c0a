"""The pytest plugin without a guest: options, and the command that is handed over."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

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


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project outside of softroce, whose warnings are its own affair."""
    for name in [name for name in os.environ if name.startswith(("AIORDMA_", "PYTEST_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(pytester.path))
    pytester.makepyfile(no_runner=_NO_RUNNER)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    return pytester


def _run(project: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return project.runpytest_subprocess("-p", "no:cacheprovider", *arguments)


def test_a_project_that_does_not_use_it_loads_nothing(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import sys

        def test_nothing_is_loaded(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("softroce")
            assert "aiordma_softroce.runner" not in sys.modules
        """
    )
    _run(project).assert_outcomes(passed=1)
    words = ("-p", "no:asyncio", "-W", "error", "-c", os.devnull)
    _run(project, *words).assert_outcomes(passed=1)


def test_the_command_is_handed_over_as_it_was(project: pytest.Pytester) -> None:
    words = ("-p", "no_runner", "--softroce", "some where", "-k", "a or b", "--junitxml=x.xml")
    done = _run(project, *words, "--cov=unknown-option")
    assert done.ret == 7
    (told,) = (line for line in done.outlines if line.startswith("RUNNER"))
    begin = f"RUNNER ['--engine', 'auto', '--', '{sys.executable}', "
    assert told.startswith(begin)
    rest = ["-p", "no:cacheprovider", *words, "--cov=unknown-option"]
    assert told.endswith(f"{str(rest)[1:-1]}]")
    said = [line for line in done.errlines if line.startswith("softroce: ")]
    assert len(said) == 1
    assert "runs where an RDMA device is: python -m aiordma_softroce" in said[0]
    assert "'some where' -k 'a or b'" in said[0]


@pytest.mark.parametrize("start", [["-m", "pytest"], ["-W", "ignore", "-m", "pytest"], ["go.py"]])
def test_however_pytest_was_started(project: pytest.Pytester, start: list[str]) -> None:
    project.makepyfile(go="import pytest, sys\nsys.exit(pytest.main())\n")
    done = project.run(sys.executable, *start, "-p", "no_runner", "--softroce=uml", "-q")
    assert done.ret == 7
    words = [sys.executable, *start, "-p", "no_runner", "--softroce=uml", "-q"]
    assert f"RUNNER {['--engine', 'uml', '--', *words]}" in done.outlines


def test_a_program_that_calls_pytest(project: pytest.Pytester) -> None:
    """Its own words are not pytest's; and plugins that are objects cannot be handed over."""
    project.makepyfile(
        go="import pytest, sys\n"
        "sys.exit(pytest.main(['-p', 'no_runner', '--softroce'], [object()] * len(sys.argv[1:])))\n"
    )
    done = project.run(sys.executable, "go.py")
    words = [sys.executable, "-m", "pytest", "-p", "no_runner", "--softroce"]
    assert f"RUNNER {['--engine', 'auto', '--', *words]}" in done.outlines
    done = project.run(sys.executable, "go.py", "with a plugin")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --softroce cannot hand over the plugins*"])


def test_options_of_the_runner(project: pytest.Pytester) -> None:
    done = _run(
        project, "-p", "no_runner", "--softroce=qemu", "--softroce-device=siw",
        "--softroce-args=--memory 2G --net 'netem loss 5%'",
    )  # fmt: skip
    told = "RUNNER ['--engine', 'qemu', '--device', 'siw', '--memory', '2G', '--net', "
    assert any(line.startswith(told + "'netem loss 5%', '--'") for line in done.outlines)


def test_defaults_of_a_project(project: pytest.Pytester) -> None:
    project.makeini(
        "[pytest]\nsoftroce = uml\nsoftroce_device = siw\nsoftroce_args = --memory 2G\n"
    )
    project.makepyfile("def test_here(): pass")
    done = _run(project, "-p", "no_runner")
    told = "RUNNER ['--engine', 'uml', '--device', 'siw', '--memory', '2G', '--'"
    assert any(line.startswith(told) for line in done.outlines)
    _run(project, "-p", "no_runner", "--no-softroce").assert_outcomes(passed=1)
    project.makeini("[pytest]\nsoftroce = vmware\n")
    done = _run(project, "-p", "no_runner")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: softroce = vmware: expected one of auto, uml, qemu, host"])


def test_the_place_of_a_wrong_engine_is_told(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = "expected one of auto, uml, qemu, host"
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q --softroce=vmware")
    done = _run(project, "-p", "no_runner", "--softroce=uml")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert done.errlines[0] == f"ERROR: --softroce=vmware in PYTEST_ADDOPTS: {engines}"
    monkeypatch.setenv("PYTEST_ADDOPTS", "-q")
    file = project.makeini("[pytest]\naddopts = --softroce=vmware")
    done = _run(project, "-p", "no_runner")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    assert done.errlines[0] == f"ERROR: --softroce=vmware in addopts of {file}: {engines}"
    # The plugin is there before pytest has read the file.
    done = _run(project, "-p", "no_runner", "-p", "aiordma_softroce.pytest_plugin")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["*--softroce*vmware*"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--softroce=vmware"], "ERROR: --softroce=vmware: expected one of auto, uml, qemu, host"),
        (["--softroce="], "ERROR: --softroce=: expected one of auto, uml, qemu, host"),
        (["--softroce", "uml"], "ERROR: --softroce uml: *--softroce=uml (one of auto, uml, *"),
        (["--softroce-device=siw"], "ERROR: --softroce-device needs --softroce"),
        (["--softroce-args=--hosts 2"], "ERROR: --softroce-args needs --softroce"),
        (["--softroce", "--softroce-args='"], "ERROR: --softroce-args: No closing quotation"),
        (["--softroce", "--softroce-device=mlx5"], "*--softroce-device*mlx5*"),
    ],
)
def test_mistakes_are_told(project: pytest.Pytester, words: list[str], said: str) -> None:
    done = _run(project, "-p", "no_runner", *words)
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines([said])
    assert not done.stdout.str().startswith("RUNNER")


def test_help_is_about_the_options(project: pytest.Pytester) -> None:
    done = _run(project, "--softroce", "--help")
    assert done.ret == 0
    text = done.stdout.str()
    assert "--softroce=qemu" in text
    assert "softroce_args (string)" in text


def test_another_plugin_chooses_the_engine(project: pytest.Pytester) -> None:
    """Or has the session stay; the last word is the first that is not None."""
    text = (
        "def pytest_softroce_engine(config, engine):\n    assert engine == 'uml'\n    return {!r}\n"
    )
    project.makepyfile("def test_here(): pass", qemu=text.format("qemu"))
    project.makepyfile(none=text.format(None), stay=text.format(""))
    done = _run(project, "-p", "no_runner", "-p", "qemu", "--softroce=uml")
    assert any(line.startswith("RUNNER ['--engine', 'qemu'") for line in done.outlines)
    done = _run(project, "-p", "no_runner", "-p", "none", "--softroce=uml")
    assert any(line.startswith("RUNNER ['--engine', 'uml'") for line in done.outlines)
    _run(project, "-p", "no_runner", "-p", "stay", "--softroce=uml").assert_outcomes(passed=1)


def test_a_session_in_softroce_stays(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIORDMA_SOFTROCE", "1")
    monkeypatch.setenv("AIORDMA_SOFTROCE_DEVICE", "siw")
    project.makepyfile("def test_here(): pass")
    done = _run(project, "-p", "no_runner", "--softroce", "--softroce-device=siw")
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines(["rdma: siw at*"])


def test_temporary_files_where_the_user_is_another(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a guest the process is root, and files are those of the user that started it."""
    (tmp_path / "T").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "T"))
    project.makepyfile(another_user=f"import os\nos.getuid = lambda: {os.getuid() + 1}\n")
    project.makepyfile("def test_writes(tmp_path): (tmp_path / 'x').write_text('x')")
    # pytest itself refuses its folder then.

    def run() -> pytest.RunResult:
        # Not by `_run`, which gives a --basetemp.
        words = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "another_user"]
        return project.run(sys.executable, *words)

    run().assert_outcomes(errors=1)
    before = sorted((tmp_path / "T").iterdir())
    monkeypatch.setenv("AIORDMA_SOFTROCE", "1")
    run().assert_outcomes(passed=1)
    assert sorted((tmp_path / "T").iterdir()) == before
    project.makepyfile("def test_fails(tmp_path): assert not (tmp_path / 'x').write_text('x')")
    run().assert_outcomes(failed=1)
    (left,) = (tmp_path / "T").glob("pytest-softroce-*/run/test_fails0/x")
    assert left.read_text() == "x"
