"""The runner's side of a guest: feeds it the command, and takes out output, status and log.

Both engines that boot a kernel give their guest four byte channels. Each is a socket pair, so there
is nothing in the file system to clean up, and a channel ends by itself when the guest dies.
"""

from __future__ import annotations

import functools
import json
import operator
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import tools
from .bundle import Bundle
from .channels import Control, Input, Output, receive
from .errors import STATUS_SIGNAL_BASE, STATUS_TIMEOUT, InfrastructureError, UsageError
from .network import Plan
from .options import Options
from .signals import SignalPipe
from .terminal import SIGNALS as TERMINAL_SIGNALS
from .terminal import Escape, Terminal

INIT = Path(__file__).with_name("guest_init.py")

#: Seconds that a command has to end after the first signal.
_GRACE = 5.0
_LOG_LIMIT = 64 << 10
_LOG_LINES = 40
#: How lines begin that each guest of User-Mode Linux says, and that are of no help.
_NO_FAULT = ("check_one_sigio ", "make_umid ", "Failed to initialize umid ", "remove_umid_dir ")


def request(
    argv: Sequence[str],
    plan: Plan,
    environment: Mapping[str, str],
    options: Options,
    bundled: Bundle | None = None,
) -> dict[str, Any]:
    """Return the request to `guest_init.py`: the set-up, the command, and how to run it.

    Args:
        argv: the command.
        plan: network and devices.
        environment: added to the caller's own.
        options: of the run.
        bundled: has programs that the system may lack.

    Raises:
        UsageError: the current directory has been removed.
    """

    def text(value: str) -> str:
        return os.fsencode(value).decode("latin-1")

    try:
        directory = os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current directory is gone: start from another one") from None
    mask = os.umask(0o077)
    os.umask(mask)
    terminal = Terminal(keyboard=options.interactive).description() if options.tty else None
    return {
        "argv": [text(argument) for argument in argv],
        "environment": {
            text(name): text(value) for name, value in {**os.environ, **environment}.items()
        },
        "directory": text(directory),
        "input": options.interactive,
        "terminal": terminal,
        # An error message that was sent to a file is not to be mixed with the rest.
        "errors_apart": not os.isatty(2),
        "umask": mask,
        "core_limit": list(resource.getrlimit(resource.RLIMIT_CORE)),
        "hostname": socket.gethostname(),
        "set_up": bundled.set_up() if bundled is not None else {},
        "files": bundled.files() if bundled is not None else {},
        "steps": plan.steps,
        "devices": [asdict(device) for device in plan.devices],
    }


class Guest:
    """One guest from boot to power-off."""

    def __init__(
        self,
        options: Options,
        boot_seconds: float,
        log_name: str,
        remedies: Mapping[bytes, str] | None = None,
    ) -> None:
        """Make the channels.

        Args:
            options: of the run.
            boot_seconds: until the first process of the guest must have reported.
            log_name: name of the guest's kernel in messages.
            remedies: words of that kernel that explain a failure of the command or of the guest,
                each with the sentence that is said then.
        """
        self._options = options
        self._boot_seconds = boot_seconds
        self._log_name = log_name
        self._remedies = remedies or {}
        self._ours: list[socket.socket] = []
        self._theirs: list[socket.socket] = []
        for _ in range(4):
            ours, theirs = socket.socketpair()
            self._ours.append(ours)
            self._theirs.append(theirs)
        self._log = bytearray()
        self._terminal = Terminal(keyboard=options.interactive) if options.tty else None

    @property
    def descriptors(self) -> tuple[int, int, int, int]:
        """The guest's ends: standard output, standard error, control, log of the kernel."""
        out, err, control, log = (end.fileno() for end in self._theirs)
        return out, err, control, log

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        message: Mapping[str, Any],
        *,
        stdout: int,
        log_is_stdout: bool,
    ) -> int:
        """Boot the guest with `command`, run what `message` asks for, and return its status.

        Args:
            command: the program that is the guest, with its arguments.
            environment: of that program.
            message: from `request`.
            stdout: descriptor for the command's standard output; standard error goes to 2.
            log_is_stdout: the guest's kernel logs to its standard output and standard error.

        Raises:
            InfrastructureError: the guest did not come up, or died under the command.
        """
        deadline = time.monotonic() + self._options.timeout
        log = self.descriptors[3]
        process: subprocess.Popen[bytes] | None = None
        with SignalPipe(*(TERMINAL_SIGNALS if self._terminal else ())) as signals:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(tools.LAUNCH), str(os.getpid()), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log if log_is_stdout else subprocess.DEVNULL,
                    stderr=log,
                    env=dict(environment),
                    pass_fds=self.descriptors,
                )
                self._close(self._theirs)
                return self._serve(process, signals, message, stdout, deadline)
            except BrokenPipeError:
                return STATUS_SIGNAL_BASE + signal.SIGPIPE
            finally:
                self._give_back(undo=True)
                if process is not None:
                    tools.kill(process)
                self._close(self._ours)
                self._close(self._theirs)

    @staticmethod
    def _close(ends: list[socket.socket]) -> None:
        for end in ends:
            end.close()

    def _serve(
        self,
        process: subprocess.Popen[bytes],
        signals: SignalPipe,
        message: Mapping[str, Any],
        stdout: int,
        deadline: float,
    ) -> int:
        out, err, control, log = self._ours
        outputs = [Output(out, stdout), Output(err, 2)]
        talk = Control(control, json.dumps(message).encode() + b"\n")
        boot_limit = time.monotonic() + self._boot_seconds
        ending = 0
        ending_limit = float("inf")
        log_open = True
        escape = Escape() if self._terminal is not None else None
        keys = Input(0, out, escape) if self._options.interactive else None
        while True:
            if talk.status is not None and all(
                output.idle and output.received >= count
                for output, count in zip(outputs, talk.counts, strict=True)
            ):
                self._give_back()
                if talk.status:
                    self._take_rest_of_log(log, log_open)
                    for sentence in self._found_remedies():
                        tools.say(sentence)
                return STATUS_SIGNAL_BASE + ending if ending else talk.status
            if not talk.open and all(output.idle and not output.open for output in outputs):
                break
            limits: list[tuple[float, Callable[[], int]]] = [
                (deadline, self._timed_out),
                (ending_limit, functools.partial(operator.add, STATUS_SIGNAL_BASE, ending)),
            ]
            if not talk.ready:
                limits.append((boot_limit, self._no_boot))
            limit, consequence = min(limits, key=lambda pair: pair[0])
            left = limit - time.monotonic()
            if left <= 0:
                return consequence()
            interests: dict[int, int] = {signals.fileno(): select.POLLIN}
            for output in outputs:
                if output.open:
                    fd, event = output.interest()
                    interests[fd] = interests.get(fd, 0) | event
            if talk.open:
                interests[control.fileno()] = talk.interest()
            if log_open:
                interests[log.fileno()] = select.POLLIN
            if keys is not None:
                keys.taken = talk.taken
            wish = keys.interest() if keys is not None and talk.started else None
            if wish is not None:
                interests[wish[0]] = interests.get(wish[0], 0) | wish[1]
            ready = _poll(interests, left)
            for number in signals.take() if signals.fileno() in ready else ():
                if self._terminal is not None and number in TERMINAL_SIGNALS:
                    self._terminal.handle(number)
                    if talk.started:  # the guest's first message is the request
                        talk.send({"size": self._terminal.size()})
                    continue
                if ending or not talk.started:
                    return STATUS_SIGNAL_BASE + number
                ending, ending_limit = number, time.monotonic() + _GRACE
                talk.send({"signal": number})
            for output in outputs:
                if output.open and _is_ready(ready, output.interest()):
                    output.step()
            if keys is not None and wish is not None and _is_ready(ready, wish):
                keys.step()
                if keys.escaped:
                    return STATUS_SIGNAL_BASE + signal.SIGINT
            if log_open and log.fileno() in ready:
                log_open = self._take_log(log)
            if talk.open and control.fileno() in ready:
                was_started = talk.started
                talk.step()
                if talk.started and not was_started and self._terminal is not None:
                    self._terminal.take()
                    talk.send({"size": self._terminal.size()})  # changed during the boot, perhaps
        if ending:
            return STATUS_SIGNAL_BASE + ending
        if talk.error is not None:  # which says more than the log of the kernel
            raise InfrastructureError(f"the guest could not be set up: {talk.error}")
        self._take_rest_of_log(log, log_open)
        raise self._failure(
            "the guest ended before the command did"
            if talk.started
            else "the guest ended before it had started"
        )

    def _give_back(self, *, undo: bool = False) -> None:
        if self._terminal is not None:
            self._terminal.give_back(undo=undo)

    def _timed_out(self) -> int:
        self._give_back(undo=True)
        tools.say(f"timed out after {self._options.timeout:g} s; everything was killed")
        return STATUS_TIMEOUT

    def _no_boot(self) -> int:
        raise self._failure(f"the guest did not start within {self._boot_seconds:g} s")

    def _take_log(self, log: socket.socket) -> bool:
        data = receive(log)
        if self._options.verbose and data:
            is_raw = self._terminal is not None and self._terminal.is_raw
            sys.stderr.buffer.write(data if is_raw else data.replace(b"\r\n", b"\n"))
            sys.stderr.flush()
        self._log += data
        del self._log[:-_LOG_LIMIT]
        return bool(data)

    def _take_rest_of_log(self, log: socket.socket, is_open: bool) -> None:
        while is_open and log.fileno() in _poll({log.fileno(): select.POLLIN}, 0.0):
            is_open = self._take_log(log)

    def _found_remedies(self) -> list[str]:
        return [sentence for words, sentence in self._remedies.items() if words in self._log]

    def _failure(self, text: str) -> InfrastructureError:
        text = ": ".join((text, *self._found_remedies()))
        log = self._log.decode(errors="replace").replace("\r", "").strip()
        lines = [line for line in log.splitlines() if not line.startswith(_NO_FAULT)]
        if not lines or self._options.verbose:
            return InfrastructureError(text)
        tail = "\n".join(f"  | {line}" for line in lines[-_LOG_LINES:])
        return InfrastructureError(f"{text}\n{self._log_name} said last:\n{tail}")


def _is_ready(ready: Mapping[int, int], interest: tuple[int, int]) -> bool:
    """Whether what was waited for is there: the events of two users of one descriptor differ."""
    descriptor, event = interest
    return bool(ready.get(descriptor, 0) & (event | select.POLLHUP | select.POLLERR))


def _poll(interests: Mapping[int, int], seconds: float) -> dict[int, int]:
    poll = select.poll()
    for fd, events in interests.items():
        poll.register(fd, events)
    return dict(poll.poll(min(seconds, 3600.0) * 1000))
