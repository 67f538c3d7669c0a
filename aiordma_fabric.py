"""The launcher of the fabric: ``aiordma-fabric``, or ``python -m aiordma_fabric``.

It makes a folder for the run, with the library under the names of rdma-core's libraries, and
becomes the command.  So signals, the terminal and the exit status are the command's own.  A process
beside it waits for its end, however that comes, and removes the folder.

`docs/fabric.md` is the manual.  This module is not in the package aiordma, whose import takes many
times as long as all that is done here; for the same reason modules of the standard library are
imported where they are needed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import argparse

__all__ = [
    "STANDARD",
    "FabricError",
    "environment",
    "is_inside",
    "main",
    "profile_path",
    "profiles",
]

#: Of a run; the library refuses more.
DEVICES_MOST = 8
STANDARD = "standard"
#: The names under which programs ask for the library: of verbs, of the connection manager, and of
#: providers that have calls of their own.
_NAMES = ("libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1", "libefa.so.1")
#: The path of a socket has at most 107 bytes, and a process adds `/p200` to that of the folder.
_FOLDER_BYTES = 100
#: What was typed to start the launcher as a module, by the name of the module's file.
_TYPED = {
    "aiordma_fabric.py": "python -m aiordma_fabric",
    "__main__.py": "python -m aiordma.testing.fabric",
}
#: Variables of a run that another run need not have.
_OPTIONAL = (
    "AIORDMA_FABRIC_PROFILE", "AIORDMA_FABRIC_ADDRESSES",
    "AIORDMA_FABRIC_ADDR", "AIORDMA_FABRIC_ADDR2",
)  # fmt: skip
_STATUS_USAGE, _STATUS_FAILED, _STATUS_NOT_EXECUTABLE, _STATUS_NOT_FOUND = 2, 125, 126, 127

_DESCRIPTION = """\
Run a command over the fabric: RDMA in memory, between the threads and processes of the command,
without an adapter, the kernel's RDMA or privileges. The command sees libibverbs and librdmacm as
programs know them, and behind them an adapter. Each run is a fabric of its own.

The adapter has the address 10.80.0.1, as softroce's has, and 127.0.0.1 (AIORDMA_FABRIC_ADDR) for
programs that use TCP at the same address. No real adapter has 127.0.0.1."""

_EPILOG = """\
exit status: the command's; 127 not found; 126 not executable; 125 the fabric failed; 2 wrong
options."""


class FabricError(Exception):
    """The command could not be started over the fabric.

    Attributes:
        exit_status: Exit status of the command line.
    """

    exit_status = _STATUS_FAILED


class UsageError(FabricError):
    """The options are wrong."""

    exit_status = _STATUS_USAGE


def is_inside(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether a process with these variables is over a fabric already."""
    folder = variables.get("AIORDMA_FABRIC", "")
    return bool(folder) and os.path.exists(os.path.join(folder, "lib", _NAMES[0]))


def profiles() -> list[str]:
    """The names of the profiles, `standard` first."""
    names = (name for name in os.listdir(_package("profiles")) if name.endswith(".conf"))
    found = {name.removesuffix(".conf") for name in names} - {STANDARD}
    return [STANDARD, *sorted(found)]


def profile_path(profile: str) -> str:
    """The file of a profile; empty for `standard`, which the library itself has.

    Args:
        profile: A name, or the path of a file: with a slash, or with `.conf` at its end.

    Raises:
        UsageError: There is no such profile.
    """
    if profile == STANDARD:
        return ""
    if os.sep in profile or profile.endswith(".conf"):
        if os.path.isfile(profile):
            return os.path.abspath(profile)
        raise UsageError(f"profile {profile}: there is no such file")
    path = os.path.join(_package("profiles"), f"{profile}.conf")
    if not profile or not os.path.isfile(path):
        raise UsageError(
            f"profile {profile or repr(profile)}: there are {', '.join(profiles())}; the path of "
            "a file of your own needs a slash, or .conf at its end"
        )
    return path


def _package(name: str) -> str:
    """The path of a file of aiordma.testing.fabric, without an import of aiordma."""
    from importlib.util import find_spec

    spec = find_spec("aiordma")
    if spec is None or not spec.submodule_search_locations:
        raise FabricError("the package aiordma is not installed for this Python")
    return os.path.join(spec.submodule_search_locations[0], "testing", "fabric", name)


def environment(
    folder: str, profile: str = STANDARD, devices: int = 1, addresses: str = ""
) -> dict[str, str]:
    """Prepare a folder for a run, and return the variables of its processes.

    Args:
        folder: Empty; the processes have their sockets in it.
        profile: As for `profile_path`.
        devices: How many adapters there are.
        addresses: Those of the adapters, as for `--addresses`.

    Raises:
        FabricError: The library is missing.
        UsageError: An argument is wrong.
    """
    library = _package("_fabric.so")
    if not os.path.isfile(library):
        raise FabricError(
            f"{library} is not there: `make setup` builds it in a checkout, elsewhere "
            "`pip install --force-reinstall aiordma`"
        )
    if not 0 <= devices <= DEVICES_MOST:
        raise UsageError(f"--devices {devices}: expected 0 to {DEVICES_MOST}")
    path = profile_path(profile)
    links = os.path.join(folder, "lib")
    os.mkdir(links, 0o700)
    for name in _NAMES:
        os.symlink(library, os.path.join(links, name))
    former = os.environ.get("LD_LIBRARY_PATH", "")
    told = {
        "LD_LIBRARY_PATH": f"{links}:{former}" if former else links,
        "AIORDMA_FABRIC": folder,
        "AIORDMA_FABRIC_DEVICES": str(devices),
    }
    for number in range(min(devices, 2)):
        name = "AIORDMA_FABRIC_ADDR" + ("2" if number else "")
        told[name] = _first(addresses, number)
    if path:
        told["AIORDMA_FABRIC_PROFILE"] = path
    if addresses:
        told["AIORDMA_FABRIC_ADDRESSES"] = addresses
    return told


def _first(addresses: str, number: int) -> str:
    """The first address of an adapter; device.c has the defaults."""
    lists = addresses.split(";")
    given = lists[number] if number < len(lists) else ""
    return given.strip(",").partition(",")[0] or f"127.0.0.{number + 1}"


def _make_folder() -> str:
    """An empty folder whose path leaves room for the names of sockets.

    Raises:
        FabricError: None can be made.
    """
    for parent in (os.environ.get("TMPDIR", ""), "/tmp", "/dev/shm", "/var/tmp"):
        folder = os.path.join(parent, f"fabric-{os.urandom(5).hex()}")
        # The loader takes a colon or a semicolon in LD_LIBRARY_PATH for the end of a folder's name.
        fits = len(os.fsencode(folder)) <= _FOLDER_BYTES and not {":", ";"} & set(folder)
        if os.path.isabs(folder) and fits:
            try:
                os.mkdir(folder, 0o700)
            except OSError:
                continue
            return folder
    raise FabricError("no folder can be made for the run in $TMPDIR, /tmp, /dev/shm or /var/tmp")


def _remove_when_over(folder: str) -> None:
    """Have the folder removed when this process ends, whatever program it runs by then."""
    watched = os.pidfd_open(os.getpid())
    if middle := os.fork():
        os.close(watched)
        os.waitpid(middle, 0)
        return
    try:
        # Out of reach of the terminal, and of a signal to the command's group: at once.
        os.setsid()
        # Not a child of the command, which may wait for all its children.
        if os.fork() == 0:
            _watch(watched, folder)
    finally:
        os._exit(0)


def _watch(watched: int, folder: str) -> None:
    import select
    import shutil

    # Whoever waits for the end of the command's streams does not wait for this process.
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(3, watched)
    os.closerange(watched + 1, os.sysconf("SC_OPEN_MAX"))
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    shutil.rmtree(folder, ignore_errors=True)


def _become(command: Sequence[str], told: Mapping[str, str]) -> int:
    """Become the command; return the exit status if that is not possible."""
    sys.stdout.flush()
    sys.stderr.flush()
    # The interpreter ignores them, and a signal that is ignored stays so in another program.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    former = dict(os.environ)
    if told:  # a new run: drop the variables of a run that this process may have been in before
        former = {name: value for name, value in former.items() if name not in _OPTIONAL}
    try:
        os.execvpe(command[0], list(command), {**former, **told})
    except (FileNotFoundError, NotADirectoryError) as error:
        said, status = error.strerror, _STATUS_NOT_FOUND
    except (OSError, ValueError) as error:
        said, status = getattr(error, "strerror", None) or str(error), _STATUS_NOT_EXECUTABLE
    sys.stderr.write(f"fabric: {command[0]}: {said}\n")
    return status


def _start(
    command: Sequence[str], profile: str | None, devices: int | None, addresses: str | None
) -> int:
    if not command:
        raise UsageError("no command was given: put it after --")
    if is_inside():
        if profile is not None or devices is not None or addresses is not None:
            raise UsageError(
                "this is a process of a run over the fabric already, and its commands belong to "
                "that run: leave out the options, or unset AIORDMA_FABRIC for a run of its own"
            )
        return _become(command, {})
    folder = _make_folder()
    try:
        told = environment(
            folder,
            STANDARD if profile is None else profile,
            1 if devices is None else devices,
            addresses or "",
        )
        _remove_when_over(folder)
    except BaseException:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        raise
    return _become(command, told)


def options_parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    import argparse

    parser = argparse.ArgumentParser(
        prog=_TYPED.get(os.path.basename(sys.argv[0]), "aiordma-fabric"),
        usage="%(prog)s [options] -- COMMAND [ARGUMENT...]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--profile",
        metavar="NAME",
        help="what adapter the fabric is like: a name, or the path of a file (default standard)",
    )
    add(
        "--devices",
        type=int,
        metavar="N",
        help=f"how many adapters, up to {DEVICES_MOST} (default 1)",
    )
    add(
        "--addresses",
        metavar="LIST",
        help="commas separate the addresses of one adapter, semicolons the adapters",
    )
    add("--profiles", action="store_true", help="print the names of the profiles")
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Become the command of a command line; return its exit status if that is not possible."""
    options = options_parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if options.profiles:
            print(*profiles(), sep="\n")
            return 0
        return _start(command, options.profile, options.devices, options.addresses)
    except FabricError as error:
        sys.stderr.write(f"fabric: {error}\n")
        return error.exit_status


def _exit() -> NoReturn:
    sys.exit(main())


if __name__ == "__main__":
    _exit()
