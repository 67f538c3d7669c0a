"""The pytest plugin of aiordma; `docs/pytest.md` is its manual.

`--softroce` is the plugin of the distribution aiordma-softroce, which may be there or not.

pytest imports this module in each project of an environment where aiordma is installed. So it
stands beside the package aiordma, whose import takes longer than pytest's own, and imports that
only for a session that uses it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

import aiordma_fabric

if TYPE_CHECKING:
    from aiordma import Device

__all__: list[str] = []

#: Set by softroce for its command: a session that has it is where it should be.
_INSIDE = "AIORDMA_SOFTROCE"
_NEEDS_ASYNCIO = "the fixture {} needs pytest-asyncio 0.24 or later: pip install pytest-asyncio"
_failed = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options, and their defaults for a project's configuration."""
    words = _words(pluginmanager)
    group = parser.getgroup("aiordma", "RDMA (aiordma)")
    add = group.addoption
    add(
        "--fabric",
        action="store_const",
        const=aiordma_fabric.STANDARD,
        dest="fabric",
        help="run the whole session over the fabric: RDMA in memory, without a kernel; "
        "--fabric=PROFILE: as a certain adapter, by name or by a file",
    )
    # Of all the profiles there may be, those that are asked for: see above.
    for profile in _asked_profiles(words):
        add(
            f"--fabric={profile}",
            action="store_const",
            const=profile,
            dest="fabric",
            help=argparse.SUPPRESS,
        )
    add(
        "--no-fabric",
        action="store_const",
        const="",
        dest="fabric",
        help="run the session here, whatever the configuration says",
    )
    add(
        "--fabric-args",
        metavar="OPTIONS",
        help="more options of the fabric, quoted as for a shell, such as '--devices 2'",
    )
    add(
        "--rdma-required",
        action="store_true",
        default=None,
        help="where there is no RDMA device, fail a test that needs one instead of skipping it",
    )
    add(
        "--rdma-leak-check",
        action="store_true",
        default=None,
        help="fail each test that leaves tasks, descriptors or RDMA objects behind",
    )
    parser.addini("fabric", "default of --fabric: a profile, or empty", default="")
    parser.addini("fabric_args", "default of --fabric-args", default="")
    parser.addini("rdma_required", "default of --rdma-required", type="bool", default=False)
    parser.addini(
        "rdma_leak_settle",
        "seconds that the leftovers of a test may take to end",
        default="5",
    )
    parser.addini("rdma_leak_check", "default of --rdma-leak-check", type="bool", default=False)


def _words(pluginmanager: pytest.PytestPluginManager) -> list[tuple[str, str]]:
    """The options of the session that is to come, each with the place where it stands.

    The place is empty for the command line.
    """
    config: Any = pluginmanager.get_plugin("pytestconfig")
    sources = {
        "": map(os.fspath, config.invocation_params.args),
        " in PYTEST_ADDOPTS": shlex.split(os.environ.get("PYTEST_ADDOPTS", "")),
    }
    # With `-p aiordma_pytest` this is called before pytest has read a configuration.
    with contextlib.suppress(ValueError):
        sources[f" in addopts of {config.inipath}"] = config.getini("addopts")
    return [
        (word, source)
        for source, words in sources.items()
        for word in itertools.takewhile(lambda word: word != "--", words)
    ]


def _asked_profiles(words: list[tuple[str, str]]) -> list[str]:
    """The profiles that stand behind `--fabric=`, each once.

    Raises:
        pytest.UsageError: There is no such profile; with the place, if not on the command line.
    """
    found = []
    for word, source in words:
        option, equals, profile = word.partition("=")
        if option == "--fabric" and equals and profile not in found:
            try:
                aiordma_fabric.profile_path(profile)
            except aiordma_fabric.FabricError as error:
                raise pytest.UsageError(f"{word}{source}: {error}") from None
            found.append(profile)
    return found


def _check_equals(words: list[str]) -> None:
    """Refuse a profile without an equals sign before it: pytest takes it for a path.

    Raises:
        pytest.UsageError: There is one, and no file of its name.
    """
    for word, behind in itertools.pairwise(words):
        if (
            word == "--fabric"
            and not behind.startswith("-")
            and not os.path.exists(behind)
            and behind in aiordma_fabric.profiles()
        ):
            raise pytest.UsageError(
                f"--fabric {behind}: the profile has to follow an equals sign, --fabric={behind}"
            )


# Handing over ----------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Iterator[None]:
    """Hand the session over, if that is asked for: before output is captured and conftests run."""
    _check_equals(args)
    _, profile = _asked(early_config)
    options = early_config.known_args_namespace
    over_fabric = aiordma_fabric.is_inside()
    if profile and not over_fabric and not options.help:
        _hand_over(early_config, profile)
    if not profile and not over_fabric and options.fabric_args is not None:
        raise pytest.UsageError("--fabric-args needs --fabric")
    yield


@pytest.hookimpl(optionalhook=True)
def pytest_softroce_engine(config: pytest.Config) -> str | None:
    """Have softroce leave a session alone that is over the fabric, or is to be."""
    engine, _ = _asked(config)
    return "" if aiordma_fabric.is_inside() or not engine else None


def _asked(config: pytest.Config) -> tuple[str, str]:
    """The engine of softroce and the profile of the fabric that are asked for; one is empty.

    An option on the command line is stronger than the configuration of the project.

    Raises:
        pytest.UsageError: Both are asked for, or there is no such profile.
    """
    options = config.known_args_namespace
    engine, profile = getattr(options, "softroce", None), options.fabric
    if engine is None:
        engine = ""
        if not profile:
            with contextlib.suppress(ValueError):  # aiordma-softroce is not installed
                engine = config.getini("softroce")
    if profile is None:
        profile = "" if getattr(options, "softroce", None) else config.getini("fabric")
    if engine and profile:
        raise pytest.UsageError(
            "--softroce and --fabric exclude one another: a session runs on the RDMA of a kernel, "
            "or in memory"
        )
    if profile and not options.fabric:
        try:
            aiordma_fabric.profile_path(profile)
        except aiordma_fabric.FabricError as error:
            raise pytest.UsageError(f"fabric = {profile}: {error}") from None
    return engine, profile


def _hand_over(config: pytest.Config, profile: str) -> NoReturn:
    """Become this very command over the fabric."""
    words = [] if profile == aiordma_fabric.STANDARD else ["--profile", profile]
    try:
        words += shlex.split(
            config.known_args_namespace.fabric_args or config.getini("fabric_args")
        )
    except ValueError as error:
        raise pytest.UsageError(f"--fabric-args: {error}") from None
    words += ["--", *_command(config)]
    shown = shlex.join(["python", "-m", "aiordma.testing.fabric", *words])
    sys.stdout.flush()
    sys.stderr.write(f"aiordma: this session runs over the fabric: {shown}\n")
    sys.stderr.flush()
    raise SystemExit(aiordma_fabric.main(words))


def _command(config: pytest.Config) -> list[str]:
    """Return the command that started this session."""
    params = config.invocation_params
    if params.plugins:
        raise pytest.UsageError(
            "--fabric cannot hand over the plugins that pytest.main() was given as objects: "
            "name them with -p, or run python -m aiordma.testing.fabric -- around your program"
        )
    words = [os.fspath(word) for word in params.args]
    if words == sys.argv[1:] and sys.orig_argv[len(sys.orig_argv) - len(words) :] == words:
        # Whatever stands before the arguments: -m pytest, -W error, a script, coverage run.
        return [sys.executable, *sys.orig_argv[1:]]
    return [sys.executable, "-m", "pytest", *words]


# The session -----------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and fixtures."""
    config.addinivalue_line(
        "markers", "rdma: needs an RDMA device; without one skipped, or failed with --rdma-required"
    )
    config.addinivalue_line(
        "markers", "rdma_leaks_allowed: left out of the check of --rdma-leak-check"
    )
    config.pluginmanager.register(_async_fixtures(config), "aiordma-async")
    text = config.getini("rdma_leak_settle")
    try:
        valid = float(text) >= 0
    except ValueError:
        valid = False
    if not valid:
        raise pytest.UsageError(f"rdma_leak_settle = {text}: expected a number of seconds")
    if _is_set(config, "rdma_leak_check"):
        config.pluginmanager.register(_LeakCheck(), "aiordma-leaks")


def _async_fixtures(config: pytest.Config) -> object:
    """Return the fixtures that are coroutines, or their stand-ins."""
    if config.pluginmanager.hasplugin("asyncio"):
        try:
            from aiordma_pytest import async_fixtures
        except TypeError:  # pytest-asyncio before 0.24 knows no loop_scope
            return _NoAsyncFixtures()
        return async_fixtures
    return _NoAsyncFixtures()


def pytest_report_header() -> str | None:
    """Name the device of a session over the fabric."""
    if not aiordma_fabric.is_inside():
        return None
    path = os.environ.get("AIORDMA_FABRIC_PROFILE", "")
    profile = os.path.basename(path).removesuffix(".conf") or aiordma_fabric.STANDARD
    return f"rdma: {os.environ.get('AIORDMA_FABRIC_ADDR', '')} (fabric, profile {profile})"


def _is_set(config: pytest.Config, name: str) -> bool:
    """Whether a switch is on, by option or by configuration."""
    return bool(config.getoption(name) or config.getini(name))


# Tests that need a device ------------------------------------------------------------------------


def _require(config: pytest.Config) -> None:
    """Skip or fail if RDMA cannot be used here."""
    from aiordma import why_unavailable

    if (reason := why_unavailable()) is not None:
        _unavailable(config, reason)


def _unavailable(config: pytest.Config, reason: str) -> NoReturn:
    # Such a session is there for the device: skips would hide that nothing was tested.
    if _is_set(config, "rdma_required") or _INSIDE in os.environ or aiordma_fabric.is_inside():
        pytest.fail(f"RDMA is required here: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test with the marker `rdma` where there is no device."""
    if item.get_closest_marker("rdma") is not None:
        _require(item.config)


@pytest.fixture(scope="session")
def rdma_address(pytestconfig: pytest.Config) -> str:
    """The IP address of the RDMA device, to listen on and to connect to."""
    _require(pytestconfig)
    from aiordma_pytest.device import DeviceError, address

    try:
        return address()
    except DeviceError as error:
        _unavailable(pytestconfig, str(error))


@pytest.fixture(scope="session")
def rdma_device(rdma_address: str) -> Device:
    """The RDMA device that has `rdma_address`: an `aiordma.Device`."""
    from aiordma_pytest.device import device

    return device(rdma_address)


class _NoAsyncFixtures:
    """Stand-ins that say how to get the fixtures that are coroutines."""

    @pytest.fixture
    def rdma_pair(self) -> NoReturn:
        """Two connected Connections (needs pytest-asyncio)."""
        pytest.fail(_NEEDS_ASYNCIO.format("rdma_pair"), pytrace=False)

    @pytest.fixture
    def rdma_stream_pair(self) -> NoReturn:
        """Two connected pairs of reader and writer (needs pytest-asyncio)."""
        pytest.fail(_NEEDS_ASYNCIO.format("rdma_stream_pair"), pytrace=False)


# Leaks -----------------------------------------------------------------------------------------


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Note a failure: the leaks of a test that was cut short are no news."""
    result: Any = yield
    if result.get_result().failed:
        item.stash[_failed] = True


@pytest.fixture(scope="session")
def _rdma_warm() -> None:
    from aiordma_pytest.leaks import warm

    warm()


@pytest.fixture
def rdma_leak_check(request: pytest.FixtureRequest, _rdma_warm: None) -> Iterator[None]:
    """Fail the test if it leaves tasks, descriptors or RDMA objects behind."""
    from aiordma_pytest import leaks

    fixtures = request.config.pluginmanager.getplugin("aiordma-async")
    if leaks.is_coroutine(request.node) and not isinstance(fixtures, _NoAsyncFixtures):
        fixtures.in_loop_of_test(request, "rdma_leak_check")
        yield
        return
    before = leaks.Snapshot.now()
    yield
    report_leaks(request.node, leaks.left_behind(before, settle_s(request.node)))


def settle_s(item: pytest.Item) -> float:
    """Seconds that the leftovers of a test may take to end."""
    if item.stash.get(_failed, False):
        return 0.0
    return float(item.config.getini("rdma_leak_settle"))


def report_leaks(item: pytest.Item, left: list[str]) -> None:
    """Fail with a line for each thing that was left, or add the lines to an earlier failure."""
    if not left:
        return
    text = "\n".join(["the test left behind:", *(f"  {line}" for line in left)])
    if item.stash.get(_failed, False):
        item.add_report_section("teardown", "leaks", text)
    else:
        pytest.fail(text, pytrace=False)


class _LeakCheck:
    """The check for each test of a session."""

    @pytest.fixture(autouse=True)
    def _rdma_leak_check_of_all(self, request: pytest.FixtureRequest) -> None:
        if request.node.get_closest_marker("rdma_leaks_allowed") is None:
            request.getfixturevalue("rdma_leak_check")
