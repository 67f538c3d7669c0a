"""The first process of a guest: brings it up, runs the command, and turns it off.

It runs as a script inside the guest, so it imports nothing of the package. It gets three
character devices as arguments: two for the standard output and the standard error of the command,
and one to talk to the runner in lines of JSON:

- guest -> runner ``{"ready": true}``, then the runner sends one request (see `guest.request`);
- guest -> runner ``{"read": BYTES}`` for all that it has read, as the runner sends no more ahead
  than the device holds;
- guest -> runner ``{"started": true}`` when the command is about to run;
- runner -> guest ``{"signal": N}`` for the command's process group, and ``{"size": [LINES,
  COLUMNS]}`` of its terminal, any number of times;
- guest -> runner ``{"exit": STATUS, "bytes": [N, M]}`` when the command has ended and its files are
  written, with the number of bytes sent as its standard output and standard error, or
  ``{"error": TEXT}`` when the guest could not be made ready. The runner turns the guest off once it
  has them all: output still on its way would be lost if the guest did that.

If the command reads the runner's standard input, that comes over the device of its standard output,
in frames: a length of four bytes and so many bytes; the frame of length 0 is the end. For each
frame that it has read from the device the guest sends ``{"taken": BYTES}``, those of the length
included: the runner sends no more ahead than the device holds.

Text that stands for arbitrary bytes (arguments, environment, directory) is decoded as Latin-1.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import json
import os
import resource
import select
import signal
import subprocess
import sys
import termios
import threading
import time
import tty
from pathlib import Path
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

_POWER_OFF = 0x4321FEDC
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DEVICE_SECONDS = 60.0
_STEP_SECONDS = 600.0  # of a clock that may jump while the host is busy
#: Of the 1,024 of Soft-RoCE, which take 0.3 s to read. An address gets the first free place.
_GIDS = 16
_telling = threading.Lock()


class SetupError(Exception):
    """The guest could not be made ready; the text is for the user."""


def main() -> None:
    """Run the guest from its first process to the end of its power."""
    # Nothing of this may end in the death of process 1, which is a kernel panic.
    try:
        _mount_basics()
        out, err, control = (_open_raw(path) for path in sys.argv[1:4])
    except Exception as error:
        sys.stderr.write(f"guest: cannot start: {error!r}\n")
        _power_off()
        return
    try:
        _session(out, err, control)
    except Exception as error:
        text = str(error) if isinstance(error, SetupError) else repr(error)
        _send(control, {"error": text})
    finally:
        _power_off()


def _session(out: int, err: int, control: int) -> None:
    _send(control, {"ready": True})
    lines = _Lines(control)
    request = lines.wait()
    _prepare(request)
    _send(control, {"started": True})
    pumps = [_Pump(out), _Pump(err)]
    status = _run(request, pumps, control, lines, out)
    os.sync()
    _send(control, {"exit": status, "bytes": [pump.count for pump in pumps]})
    while True:
        lines.read()


def _tell(control: int, message: dict[str, Any]) -> None:
    with _telling:
        _write_all(control, json.dumps(message).encode() + b"\n")


def _send(control: int, message: dict[str, Any]) -> None:
    _tell(control, message)
    if os.isatty(control):
        # An error is followed by the end of the guest, which would take the message with it.
        termios.tcdrain(control)


class _Lines:
    """Messages from the runner, one to a line."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = bytearray()

    def wait(self) -> dict[str, Any]:
        """Return the next message; blocks."""
        while (message := self.next()) is None:
            self.read()
        return message

    def next(self) -> dict[str, Any] | None:
        """Return the next message that has arrived in full, or None."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        message: dict[str, Any] = json.loads(line.decode())
        return message

    def read(self) -> None:
        """Take in the bytes that are there; blocks while there are none."""
        data = os.read(self._fd, 65536)
        if not data:
            raise SetupError("the runner has gone away")
        self._buffer += data
        _tell(self._fd, {"read": len(data)})


# Setting up ------------------------------------------------------------------------------------


def _mount(kind: str, target: str, options: str = "", *, must: bool = True) -> None:
    if _libc.mount(kind.encode(), target.encode(), kind.encode(), 0, options.encode()) == 0:
        return
    number = ctypes.get_errno()
    if must:
        raise SetupError(f"cannot mount {kind} on {target}: {os.strerror(number)}")


def _mount_basics() -> None:
    os.environ["PATH"] = _PATH
    _mount("proc", "/proc")
    _mount("sysfs", "/sys")
    if not os.path.ismount("/dev"):
        _mount("devtmpfs", "/dev")
    for name, mode in (("pts", 0o755), ("shm", 0o1777)):
        path = Path("/dev", name)
        path.mkdir(exist_ok=True)
        path.chmod(mode)
    _mount("devpts", "/dev/pts", "gid=5,mode=620,ptmxmode=666")
    _mount("tmpfs", "/dev/shm", "mode=1777")
    _mount("tmpfs", "/run", "mode=755")
    # /tmp stays what it is: a file that the caller put there is a file that the command finds.
    Path("/run/lock").mkdir(mode=0o1777)
    _mount("debugfs", "/sys/kernel/debug", must=False)
    _mount("configfs", "/sys/kernel/config", must=False)
    _mount("cgroup2", "/sys/fs/cgroup", must=False)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        link = Path("/dev", name)
        if not link.exists():
            link.symlink_to(f"/proc/self/{target}")


def _open_raw(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    if os.isatty(fd):
        # Without this the line would echo, edit what comes in, and turn \n into \r\n.
        tty.setraw(fd, termios.TCSANOW)
    return fd


def _prepare(request: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        _libc.sethostname(request["hostname"].encode(), len(request["hostname"].encode()))
    for name, value in request["set_up"].items():
        os.environ[name] = f"{_PATH}:{value}" if name == "PATH" else value
    for name, text in request["files"].items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    for step in (("ip", "link", "set", "dev", "lo", "up"), *request["steps"]):
        if step[0] == "write":
            _write_setting(step[1], step[2])
        else:
            _step(step)
    directory = os.fsdecode(request["directory"].encode("latin-1"))
    if not os.path.isdir(directory):
        raise SetupError(
            f"the current directory {directory} does not exist in the guest, where /dev, /proc, "
            "/run and /sys are its own; start from another directory"
        )
    deadline = time.monotonic() + _DEVICE_SECONDS
    for device in request["devices"]:
        _await_device(device["name"], device["addresses"], deadline)


def _write_setting(name: str, text: str) -> None:
    try:
        Path("/proc/sys", name).write_text(text)
    except OSError as error:
        raise SetupError(f"cannot set {name} to {text}: {error.strerror}") from None


def _step(argv: list[str]) -> None:
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_STEP_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{' '.join(argv)}: {error}") from None
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace").strip()
        raise SetupError(f"{' '.join(argv)}: exit status {done.returncode}: {said}")


def _await_device(name: str, addresses: list[str], deadline: float) -> None:
    """Wait until the device is active and its table of GIDs has all of its addresses.

    The kernel fills the table from a work queue some time after an address was added; a program
    that binds to the address before finds no device.
    """
    port = Path("/sys/class/infiniband", name, "ports/1")
    wanted = {_gid(address) for address in addresses}
    # iWARP has one GID, made from the hardware address, and no table to wait for.
    if "RNIC" in _read(port.parent.parent / "node_type"):
        wanted = set()
    while True:
        seen = {_read(port / "gids" / str(index)) for index in range(_GIDS)}
        state = _read(port / "state")
        if wanted <= seen and "ACTIVE" in state:
            return
        if time.monotonic() > deadline:
            raise SetupError(
                f"device {name} did not become ready: state {state or 'unknown'}, "
                f"missing addresses: {', '.join(sorted(wanted - seen)) or 'none'}"
            )
        time.sleep(0.01)


def _gid(address: str) -> str:
    parsed = ipaddress.ip_address(address)
    if parsed.version == 4:
        parsed = ipaddress.IPv6Address(f"::ffff:{address}")
    # Not `exploded`: from Python 3.13 on that writes the last four bytes as an IPv4 address.
    return parsed.packed.hex(":", 2)


def _read(path: Path) -> str:
    # An empty slot of the table of GIDs fails with EINVAL; it has no text.
    try:
        return path.read_text().strip()
    except OSError:
        return ""


# The command -----------------------------------------------------------------------------------


class _Pump(threading.Thread):
    """Copies one stream of the command to a device."""

    def __init__(self, target: int) -> None:
        super().__init__(daemon=True)
        self.source, self.inner = os.pipe2(os.O_CLOEXEC)
        self._target = target
        self.count = 0

    def become_terminal(self, description: dict[str, Any]) -> None:
        """Give the command a terminal in place of the pipe."""
        os.close(self.source)
        os.close(self.inner)
        self.source, self.inner = os.openpty()
        if description["modes"] is not None:
            termios.tcsetattr(self.inner, termios.TCSANOW, description["modes"])
        termios.tcsetwinsize(self.inner, description["size"])

    def run(self) -> None:
        # A terminal that no process has open any longer is an error to read.
        with contextlib.suppress(OSError):
            while data := os.read(self.source, 65536):
                self.write(data)

    def write(self, data: bytes) -> None:
        _write_all(self._target, data)
        self.count += len(data)


class _Feed(threading.Thread):
    """Copies the runner's standard input to the command: to its terminal, or to a pipe."""

    def __init__(self, source: int, target: int, control: int) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._target = target
        self._control = control

    def run(self) -> None:
        with open(self._source, "rb", closefd=False) as frames:
            # The command may read no more, or may have ended: the rest is for no process.
            with contextlib.suppress(OSError):
                while size := int.from_bytes(frames.read(4), "big"):
                    data = frames.read(size)
                    _tell(self._control, {"taken": 4 + size})
                    _write_all(self._target, data)
            if not os.isatty(self._target):
                os.close(self._target)


def _run(
    request: dict[str, Any], pumps: list[_Pump], control: int, lines: _Lines, keys: int
) -> int:
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    terminal = -1
    stdin, feed = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), -1
    if request["terminal"] is not None:
        pumps[0].become_terminal(request["terminal"])
        terminal, stdin, feed = pumps[0].source, pumps[0].inner, pumps[0].source
    elif request["input"]:
        stdin, feed = os.pipe2(os.O_CLOEXEC)
    stderr = pumps[1].inner if terminal < 0 or request["errors_apart"] else pumps[0].inner
    # Before there are threads: with threads no code between fork and exec is safe.
    child, failure = _spawn(request, (stdin, pumps[0].inner, stderr), is_terminal=terminal >= 0)
    # A terminal stays open: its last output is there to be read until the command has ended.
    for descriptor in {stdin, pumps[0].inner, pumps[1].inner}:
        if terminal < 0 or descriptor != pumps[0].inner:
            os.close(descriptor)
    for pump in pumps:
        pump.start()
    if request["input"]:
        _Feed(keys, feed, control).start()
    status = _supervise(child, wake_read, control, lines, terminal)
    # Like a container: with its first process ends everything that is left of the command.
    # Otherwise the pipes would stay open, and with them this guest.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    if terminal >= 0:
        os.close(pumps[0].inner)
    for pump in pumps:
        pump.join()
    if failure is not None:
        status, text = failure
        end = "\n" if terminal < 0 or request["errors_apart"] else "\r\n"
        pumps[1].write(f"softroce: {text}{end}".encode("utf-8", "surrogateescape"))
    return status


def _spawn(
    request: dict[str, Any], standard: tuple[int, int, int], *, is_terminal: bool
) -> tuple[int, tuple[int, str] | None]:
    """Start the command; return its process and, if it could not be run, status and reason."""
    argv = [text.encode("latin-1") for text in request["argv"]]
    environment = {
        name.encode("latin-1"): value.encode("latin-1")
        for name, value in request["environment"].items()
    }
    failed_read, failed_write = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            if is_terminal:
                fcntl.ioctl(standard[1], termios.TIOCSCTTY, 0)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            _limits(request["core_limit"])
            os.umask(request["umask"])
            os.chdir(request["directory"].encode("latin-1"))
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            os.execvpe(argv[0], argv, environment)
        except OSError as error:
            os.write(failed_write, str(error.errno).encode())
        except BaseException as error:
            os.write(failed_write, repr(error).encode())
        finally:
            os._exit(126)
    os.close(failed_write)
    with open(failed_read, "rb") as stream:
        reason = stream.read()
    if not reason:
        return child, None
    code = int(reason) if reason.isdigit() else 0
    status = 127 if code in (errno.ENOENT, errno.ENOTDIR) else 126
    name = os.fsdecode(argv[0])
    text = os.strerror(code) if code else reason.decode()
    return child, (status, f"{name}: {text}")


def _limits(core: list[int]) -> None:
    infinity = resource.RLIM_INFINITY
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (infinity, infinity))
    resource.setrlimit(resource.RLIMIT_NPROC, (infinity, infinity))
    resource.setrlimit(resource.RLIMIT_NOFILE, (65536, 1048576))
    # The directory is the caller's, and so is the wish to find core files in it.
    resource.setrlimit(resource.RLIMIT_CORE, (core[0], core[1]))


def _supervise(child: int, wake: int, control: int, lines: _Lines, terminal: int) -> int:
    """Reap until `child` has ended, and pass signals on; return its status as a shell does.

    Args:
        child: the command.
        wake: is readable when a process has ended.
        control: the device to the runner.
        lines: of that device.
        terminal: the command's, or -1.
    """
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.register(control, select.POLLIN)
    while True:
        status = _reap(child)
        if status is not None:
            return status
        ready = {fd for fd, _ in poll.poll()}
        if wake in ready:
            os.read(wake, 4096)
        if control in ready:
            lines.read()
            while (message := lines.next()) is not None:
                if "size" in message:
                    termios.tcsetwinsize(terminal, message["size"])
                    continue
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, message["signal"])


def _reap(child: int) -> int | None:
    """Collect every process that has ended; return the status of `child` if it is among them."""
    status = None
    while True:
        try:
            process, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if process == 0:
            return status
        if process == child:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _power_off() -> None:
    os.sync()
    _libc.reboot(_POWER_OFF)


if __name__ == "__main__":
    main()
