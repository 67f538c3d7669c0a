"""The pytest plugin: ``pytest --softroce`` runs the whole session on an RDMA device.

It is for any project, and knows of no library for RDMA.  pytest imports this module in each project
of an environment where aiordma-softroce is installed, so that it imports no engine before a session
uses one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

__all__: list[str] = []

_ENGINES = ("auto", "uml", "qemu", "host")
#: Set by softroce for its command: a session that has it is where it should be.
_INSIDE = "AIORDMA_SOFTROCE"
_scratch = pytest.StashKey[str]()


class _Hooks:
    """The hook that this plugin offers to others."""

    @pytest.hookspec(firstresult=True)
    def pytest_softroce_engine(self, config: pytest.Config, engine: str) -> str | None:
        """Choose the engine of a session that is about to be handed over.

        Called before output is captured and before any conftest is loaded.

        Args:
            config: that of the session.
            engine: the one that is asked for, by option or by the configuration.

        Returns:
            The engine; an empty string keeps the session here, None leaves the choice to others.
        """


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Offer the hook."""
    pluginmanager.add_hookspecs(_Hooks)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options, and their defaults for a project's configuration."""
    _check_engine(pluginmanager)
    group = parser.getgroup("softroce", "a real RDMA device (softroce)")
    add = group.addoption
    add(
        "--softroce",
        action="store_const",
        const="auto",
        dest="softroce",
        help="run the whole session on an RDMA device: this machine's own, or else one in a "
        "User-Mode Linux guest",
    )
    # An option of argparse with an optional value would take the path behind it for the value.
    for engine in _ENGINES:
        add(
            f"--softroce={engine}",
            action="store_const",
            const=engine,
            dest="softroce",
            help=f"the same, with the engine {engine} of softroce",
        )
    add(
        "--no-softroce",
        action="store_const",
        const="",
        dest="softroce",
        help="run the session here, whatever the configuration says",
    )
    add("--softroce-device", choices=("rxe", "siw"), help="rxe: RoCE v2; siw: iWARP")
    add(
        "--softroce-args",
        metavar="OPTIONS",
        help="more options of softroce, quoted as for a shell, such as '--hosts 2 --memory 2G'",
    )
    parser.addini("softroce", "default of --softroce: an engine, or empty", default="")
    parser.addini("softroce_device", "default of --softroce-device", default="")
    parser.addini("softroce_args", "default of --softroce-args", default="")


def _check_engine(pluginmanager: pytest.PytestPluginManager) -> None:
    """Refuse an unknown engine, and name the known ones, which argparse would not do.

    Raises:
        pytest.UsageError: It is unknown; says where it was set, if not on the command line.
    """
    config: Any = pluginmanager.get_plugin("pytestconfig")
    sources = {
        "": map(os.fspath, config.invocation_params.args),
        " in PYTEST_ADDOPTS": shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
    }
    # With `-p` and the name of this module it is called before pytest has read a configuration.
    with contextlib.suppress(ValueError):
        sources[f" in addopts of {config.inipath}"] = config.getini("addopts")
    for source, words in sources.items():
        for word in itertools.takewhile(lambda word: word != "--", words):
            option, equals, engine = word.partition("=")
            if option == "--softroce" and equals and engine not in _ENGINES:
                raise pytest.UsageError(f"{word}{source}: expected one of {', '.join(_ENGINES)}")


def _check_equals(words: list[str]) -> None:
    """Refuse an engine without an equals sign before it: pytest takes it for a path.

    Raises:
        pytest.UsageError: There is one, and no file of its name.
    """
    for word, behind in itertools.pairwise(words):
        if word == "--softroce" and behind in _ENGINES and not os.path.exists(behind):
            raise pytest.UsageError(
                f"--softroce {behind}: the engine has to follow an equals sign, "
                f"--softroce={behind} (one of {', '.join(_ENGINES)})"
            )


# Handing over ----------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Iterator[None]:
    """Hand the session over, if that is asked for: before output is captured and conftests run."""
    _check_equals(args)
    engine = _asked(early_config)
    options = early_config.known_args_namespace
    if _INSIDE not in os.environ:
        if engine and not options.help:
            hook = early_config.hook.pytest_softroce_engine
            chosen = hook(config=early_config, engine=engine)
            if chosen := engine if chosen is None else chosen:
                _hand_over(early_config, chosen)
        for name in ("softroce_device", "softroce_args"):
            if not engine and getattr(options, name) is not None:
                raise pytest.UsageError(f"--{name.replace('_', '-')} needs --softroce")
    yield


def _asked(config: pytest.Config) -> str:
    """The engine that is asked for; an option is stronger than the configuration.

    Raises:
        pytest.UsageError: The configuration names an unknown engine.
    """
    engine = config.known_args_namespace.softroce
    if engine is None:
        engine = config.getini("softroce")
        if engine and engine not in _ENGINES:
            raise pytest.UsageError(f"softroce = {engine}: expected one of {', '.join(_ENGINES)}")
    return str(engine)


def _hand_over(config: pytest.Config, engine: str) -> NoReturn:
    """Run this very command where a device is, and end this process with its status."""
    from aiordma_softroce.cli import main

    options = config.known_args_namespace
    words = ["--engine", engine]
    if device := options.softroce_device or config.getini("softroce_device"):
        words += ["--device", device]
    try:
        words += shlex.split(options.softroce_args or config.getini("softroce_args"))
    except ValueError as error:
        raise pytest.UsageError(f"--softroce-args: {error}") from None
    words += ["--", *_command(config)]
    shown = shlex.join(["python", "-m", "aiordma_softroce", *words])
    sys.stdout.flush()
    sys.stderr.write(f"softroce: this session runs where an RDMA device is: {shown}\n")
    sys.stderr.flush()
    raise SystemExit(main(words))


def _command(config: pytest.Config) -> list[str]:
    """Return the command that started this session."""
    params = config.invocation_params
    if params.plugins:
        raise pytest.UsageError(
            "--softroce cannot hand over the plugins that pytest.main() was given as objects: "
            "name them with -p, or run python -m aiordma_softroce -- around your program"
        )
    words = [os.fspath(word) for word in params.args]
    if words == sys.argv[1:] and sys.orig_argv[len(sys.orig_argv) - len(words) :] == words:
        # Whatever stands before the arguments: -m pytest, -W error, a script, coverage run.
        return [sys.executable, *sys.orig_argv[1:]]
    return [sys.executable, "-m", "pytest", *words]


# The session -----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose a folder for temporary files that this user owns."""
    if _INSIDE in os.environ and not hasattr(config, "workerinput"):
        _own_temporary_folder(config)


def _own_temporary_folder(config: pytest.Config) -> None:
    """Choose --basetemp where files belong to another user than the process.

    In a guest the process is root, and its files belong to the user that started the guest.
    pytest refuses its usual folder then, as if another user had made it.
    """
    if config.getoption("basetemp", None):
        return
    folder = tempfile.mkdtemp(prefix="pytest-softroce-")
    if os.stat(folder).st_uid == os.getuid():
        os.rmdir(folder)
        return
    config.option.basetemp = os.path.join(folder, "run")
    config.stash[_scratch] = folder


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remove the folder of this session, unless a failed test may need a look at it."""
    folder = session.config.stash.get(_scratch, None)
    if folder is not None and exitstatus == 0:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_report_header() -> str | None:
    """Name the device of a session in softroce."""
    if _INSIDE not in os.environ:
        return None
    told = [os.environ.get(f"AIORDMA_SOFTROCE_{name}", "") for name in ("DEVICE", "ADDR", "ENGINE")]
    return "rdma: {} at {} (softroce, engine {})".format(*told)
