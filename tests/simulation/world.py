"""The simulated world: the fabric taken step by step, a clock that stands still, and chance.

Everything that may come in more than one order is chosen by the seed: packets, events, threads'
jobs, timers, runs of the collector.  Nothing in a run may depend on anything else, so that a seed
that fails once fails again.

Two generators share that work.  `draw` decides what a run does: how many clients, which sizes,
which faults.  Each of its choices has a name, under which a `Case` can bound it; a failing case is
made smaller by lower bounds.  `random` decides the order in which things happen.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import hashlib
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiordma.loop import workers
from aiordma.verbs import CompletionQueue, Context
from tests.inside.loop import make_call
from tests.inside.simulated import (
    awaits_loop,
    begin_to_destroy,
    forget_times,
    set_budget,
    set_processors,
    usual_budget,
    usual_processors,
)

__all__ = ["Case", "Stuck", "World"]

T = TypeVar("T")

_NS = 1_000_000_000
#: The moment at which each run begins, in nanoseconds of the virtual clock.
_BEGIN = 1_000_000 * 1_000_000


class Stuck(Exception):
    """Somebody waits, and nothing can happen any more."""


@dataclass
class Case:
    """What a run does, but for the library: what a file of a failure has.

    Attributes:
        system: a key of `SYSTEMS`.
        seed: decides all that chance decides.
        order: another number for another order of the same things.
        most: the largest value of a choice, by its name.
    """

    system: str
    seed: int
    order: int = 0
    most: dict[str, int] = field(default_factory=dict)


def _fabric() -> ctypes.CDLL:
    library = ctypes.CDLL("libibverbs.so.1")
    library.fabric_stepped.argtypes = [ctypes.c_uint64]
    library.fabric_next_timer.restype = ctypes.c_uint64
    library.fabric_clock.restype = ctypes.c_uint64
    library.fabric_set_clock.argtypes = [ctypes.c_uint64]
    library.fabric_digest.restype = ctypes.c_uint64
    library.fabric_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
    library.fabric_fault.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
    library.fabric_cut.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
    library.fabric_cq_acknowledged.argtypes = [ctypes.c_void_p]
    library.fabric_cq_leaves.argtypes = [ctypes.c_void_p]
    library.fabric_misused.restype = ctypes.c_int64
    library.fabric_pause.argtypes = [ctypes.c_uint, ctypes.c_uint64]
    library.fabric_overruns.restype = ctypes.c_int64
    library.fabric_count.restype = ctypes.c_int64
    return library


class World:
    """One run.

    Args:
        case: What decides all that chance decides.
    """

    #: When the run begins, in nanoseconds of the virtual clock.
    begin = _BEGIN
    #: Chances of what may happen while the loop has work to do.
    busy_steps = (0, 0, 0, 1, 1, 2, 5)
    #: How often the collector runs while the loop has work to do.
    collects = 0.005

    def __init__(self, case: Case) -> None:
        self.seed = case.seed
        self.system = case.system
        self.most = case.most
        #: The names of the choices, and the largest value that each has had.
        self.drawn: dict[str, int] = {}
        self._chance = random.Random(case.seed)
        self.random = random.Random(f"{case.seed} {case.order}")
        self.fabric = _fabric()
        self.clock = ctypes.CDLL(None)
        self.clock.simulated_due.restype = ctypes.c_uint64
        self.clock.simulated_advance.argtypes = [ctypes.c_uint64]
        #: Calls for threads, with the completion queue that they destroy, if they do.
        self.jobs: list[tuple[Callable[[], None], CompletionQueue | None]] = []
        #: Those of the queues whose thread has begun.
        self._leaving: set[Callable[[], None]] = set()
        self.steps = 0
        self.trace: list[str] | None = None
        #: Whether a fault may break a connection; else no call may fail.
        self.may_break = False
        #: Whether a fault takes time: packets are sent again, events are lost.
        self.may_delay = False
        #: Whether a fault may keep an event from a program.
        self.may_lose_events = False
        #: Whether an adapter may report what never was, so that a peer seems to break the rules.
        self.may_violate = False
        #: Parts of what the library logs with reason, although nothing is broken.
        self.may_log: tuple[str, ...] = ()
        #: Seconds that a call may take if nobody lets it wait on purpose.
        self.patience = 0.25
        #: Whether a drain takes a few completions only, and leaves the others for later turns.
        self.takes_little = False
        #: Seconds in which the loop was blocked.
        self.blocked = 0.0
        #: Seconds more for a close, where the peer's program may sleep.
        self.leisure = 0.0
        #: Whether a peer may send what there is no receive for.
        self.may_overrun = False
        self._plan: list[tuple[int, Callable[[], object]]] = []
        #: What must not be, found where an exception would be taken for the program's own.
        self.wrong: list[str] = []
        self._ended = False
        self._digest = hashlib.blake2b(digest_size=8)

    # ---- beginning and end

    def __enter__(self) -> World:
        self.fabric.fabric_stepped(self.random.getrandbits(64))
        self.clock.simulated_advance(_BEGIN)
        self._submit = workers.WorkerPool.submit
        self._urandom = os.urandom
        self._state = random.getstate()
        random.seed(self.seed)
        world = self

        def submit(_pool: workers.WorkerPool, function: Callable[[], object]) -> Future[object]:
            future: Future[object] = Future()
            owner = getattr(function, "__self__", None)
            job = functools.partial(make_call, function, future)
            world.jobs.append((job, owner if isinstance(owner, CompletionQueue) else None))
            return future

        workers.WorkerPool.submit = submit  # type: ignore[method-assign,assignment]
        os.urandom = self.random.randbytes
        self._is_software, self._budget = Context.is_software, usual_budget()
        self.fabric.fabric_set(b"meanwhile", self.one_of("meanwhile", (0, 0, 20_000, 200_000)))
        budget = self.one_of("budget", (self._budget, self._budget, 4, 1))
        set_budget(budget)
        self.takes_little = budget < self._budget
        # A wait that polls gives the processor away between two polls, which takes time.
        self._processors = usual_processors()
        set_processors(lambda: (1, 2))
        forget_times()
        return self

    def be_software(self) -> None:
        """Let the library take the adapters for programs, whose results it does not trust."""
        Context.is_software = property(lambda _: True)  # type: ignore[method-assign,assignment]

    def end(self) -> None:
        """The system has ended.

        What comes after it is no part of the digest: asyncio cancels the tasks that are left in
        the order of their addresses, which two runs do not have in common.
        """
        self._ended = True

    def settle(self) -> None:
        """Let all happen that is still on its way, once the loop has ended: threads, packets."""
        self.end()
        while self.step():
            pass
        if self.jobs:
            self.wrong.append("a queue is never destroyed: its events are not acknowledged")

    def __exit__(self, *_: object) -> None:
        self.settle()
        workers.WorkerPool.submit = self._submit  # type: ignore[method-assign]
        os.urandom = self._urandom
        Context.is_software = self._is_software  # type: ignore[method-assign]
        set_budget(self._budget)
        set_processors(self._processors)
        random.setstate(self._state)
        self.clock.simulated_advance(0)

    def left(self) -> dict[str, int]:
        """Objects of the fabric that are there, but for the contexts of librdmacm."""
        names = ["pd", "mr", "mw", "channel", "cq", "srq", "qp", "ah", "event_channel", "id"]
        counts = {name: self.fabric.fabric_count(kind) for kind, name in enumerate(names, 1)}
        return {name: count for name, count in counts.items() if count}

    def misuses(self) -> int:
        """Calls for queues that another thread was destroying."""
        return int(self.fabric.fabric_misused())

    def overruns(self) -> int:
        """Messages that have found no receive posted."""
        return int(self.fabric.fabric_overruns())

    # ---- what a run does

    def draw(self, name: str, count: int) -> int:
        """Choose a number from 0 to below `count`; the smaller, the less happens."""
        value = self._chance.randrange(count)
        if (most := self.most.get(name)) is not None:
            value = min(value, most)
        self.drawn[name] = max(value, self.drawn.get(name, 0))
        return value

    def one_of(self, name: str, values: Sequence[T]) -> T:
        """Choose one of some values, the plainest of which come first."""
        return values[self.draw(name, len(values))]

    def once_in(self, name: str, count: int) -> bool:
        """Whether something rare is to happen."""
        return self.draw(name, count) == count - 1 and count > 1

    def check(self, truth: object, text: str) -> None:
        """Note what must not be, in a handler, whose exceptions the server logs."""
        if not truth and not self._ended:
            self.wrong.append(text)

    async def within(
        self, limit: float | Callable[[], float], what: str, call: Coroutine[Any, Any, T]
    ) -> T:
        """Await a call, which has to end within so many seconds, however it ends.

        A function says how many that were, when the call has ended.  Those of `block` do not count.
        """
        began, task = self.now - self.blocked, asyncio.current_task()
        canceling = task.cancelling() if task else 0
        try:
            result = await call
            self.check(
                not task or task.cancelling() == canceling, f"{what} has left a cancellation"
            )
            return result
        finally:
            took = self.now - self.blocked - began
            seconds = limit() if callable(limit) else limit
            if took > seconds and not self._ended:
                self.wrong.append(f"{what} took {took:.3f} s, and may take {seconds:.3f} s")

    # ---- steps

    @property
    def now(self) -> float:
        """Seconds of the virtual clock."""
        return ctypes.c_uint64.in_dll(self.clock, "simulated_now").value / _NS

    def note(self, text: str) -> None:
        """Add to what two runs of a seed must have in common."""
        if self._ended:
            return
        self._digest.update(text.encode())
        if self.trace is not None:
            self.trace.append(text)

    @property
    def digest(self) -> str:
        """Of all that has happened."""
        return self._digest.hexdigest()

    def step(self) -> bool:
        """Let one thing happen that can happen now; False: nothing can."""
        pending = self.fabric.fabric_pending()
        ready = [index for index, job in enumerate(self.jobs) if not self._would_wait(*job)]
        total = pending + len(ready)
        if not total:
            return False
        self.steps += not self._ended
        if self.random.randrange(total) < pending:
            self.fabric.fabric_step()
            self.note(f"{self.fabric.fabric_digest():x}")
        else:
            index = ready[self.random.randrange(min(len(ready), 4))]
            self.note(f"job {index}")
            self._go_on(index)
        return True

    def _go_on(self, index: int) -> None:
        """Let a thread do its work; that of a queue in two steps, between which the loop runs."""
        job, cq = self.jobs[index]
        if cq is None or job in self._leaving:
            self._leaving.discard(job)
            self.jobs.pop(index)[0]()
            return
        self._leaving.add(job)
        if address := begin_to_destroy(cq):
            self.fabric.fabric_cq_leaves(address)

    def _would_wait(self, job: Callable[[], None], cq: CompletionQueue | None) -> bool:
        """Whether a thread waits for the loop to acknowledge an event."""
        if cq is None or job not in self._leaving:
            return False
        return awaits_loop(cq, self.fabric.fabric_cq_acknowledged)

    def some_steps(self) -> None:
        """Let a few things happen while the loop is busy; now and then the collector runs."""
        if self.random.random() < self.collects:
            gc.collect()
        for _ in range(self.random.choice(self.busy_steps)):
            if not self.step():
                return

    def due(self) -> int:
        """When the next timer rings that is no timer of the loop's, in nanoseconds; 0: none is."""
        moments = [self.fabric.fabric_next_timer(), self.clock.simulated_due()]
        moments += [moment for moment, _ in self._plan]
        return min((moment for moment in moments if moment), default=0)

    def advance(self, moment: int) -> None:
        """Let time pass."""
        moment = max(moment, ctypes.c_uint64.in_dll(self.clock, "simulated_now").value)
        self.note(f"at {moment}")
        self.fabric.fabric_set_clock(moment)
        self.clock.simulated_advance(moment)
        due = [each for each in self._plan if each[0] <= moment]
        for each in due:
            self._plan.remove(each)
            each[1]()

    def block(self, seconds: float) -> None:
        """Give the loop no turn for so many seconds, as a call that blocks would.

        The adapters and the threads go on.
        """
        end = int((self.now + seconds) * _NS)
        while True:
            while self.step():
                pass
            if not 0 < self.due() < end:
                break
            self.advance(self.due())
        self.advance(end)
        self.blocked += seconds

    def at(self, moment: int, function: Callable[[], object]) -> None:
        """Let something happen at a moment, in nanoseconds, by itself."""
        self._plan.append((moment, function))
