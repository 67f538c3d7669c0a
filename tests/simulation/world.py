"""The simulated world: the fabric taken step by step, a clock that stands still, and chance.

Everything that may come in more than one order is chosen by one generator, seeded by one number:
packets, events, threads' jobs, timers.  Nothing in a run may depend on anything else, so that a
seed that fails once fails again.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import random
from collections.abc import Callable

from aiordma.loop import workers
from aiordma.loop.job import Job

__all__ = ["Stuck", "World"]

_NS = 1_000_000_000
#: The moment at which each run begins, in nanoseconds of the virtual clock.
_BEGIN = 1_000_000 * 1_000_000


class Stuck(Exception):
    """Somebody waits, and nothing can happen any more."""


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
    library.fabric_count.restype = ctypes.c_int64
    return library


class World:
    """One run.

    Args:
        seed: What decides all that chance decides.
    """

    #: When the run begins, in nanoseconds of the virtual clock.
    begin = _BEGIN
    #: Chances of what may happen while the loop has work to do.
    busy_steps = (0, 0, 0, 1, 1, 2, 5)

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.fabric = _fabric()
        self.clock = ctypes.CDLL(None)
        self.clock.simulated_due.restype = ctypes.c_uint64
        self.clock.simulated_advance.argtypes = [ctypes.c_uint64]
        self.jobs: list[Job[object]] = []
        self.steps = 0
        self.trace: list[str] | None = None
        #: Whether a fault may break a connection; else no call may fail.
        self.may_break = False
        #: What happens at a moment, in nanoseconds, by itself.
        self.plan: list[tuple[int, Callable[[], object]]] = []
        self._ended = False
        self._digest = hashlib.blake2b(digest_size=8)

    # ---- beginning and end

    def __enter__(self) -> World:
        self.fabric.fabric_stepped(self.random.getrandbits(64))
        self.clock.simulated_advance(_BEGIN)
        self._submit = workers.WorkerPool.submit
        self._drain = workers.WorkerPool.drain
        self._urandom = os.urandom
        self._state = random.getstate()
        random.seed(self.seed)
        world = self

        def submit(_pool: workers.WorkerPool, function: Callable[[], object]) -> Job[object]:
            job: Job[object] = Job(function)
            world.jobs.append(job)
            return job

        def drain(_pool: workers.WorkerPool, _timeout: float) -> bool:
            while world.jobs:
                world.jobs.pop(0).run()
            return True

        workers.WorkerPool.submit = submit  # type: ignore[method-assign,assignment]
        workers.WorkerPool.drain = drain  # type: ignore[method-assign,assignment]
        os.urandom = self.random.randbytes
        return self

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

    def __exit__(self, *_: object) -> None:
        self.settle()
        workers.WorkerPool.submit = self._submit  # type: ignore[method-assign]
        workers.WorkerPool.drain = self._drain  # type: ignore[method-assign]
        os.urandom = self._urandom
        random.setstate(self._state)
        self.clock.simulated_advance(0)

    def left(self) -> dict[str, int]:
        """Objects of the fabric that are there, but for the contexts of librdmacm."""
        names = ["pd", "mr", "mw", "channel", "cq", "srq", "qp", "ah", "event_channel", "id"]
        counts = {name: self.fabric.fabric_count(kind) for kind, name in enumerate(names, 1)}
        return {name: count for name, count in counts.items() if count}

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
        total = pending + len(self.jobs)
        if not total:
            return False
        self.steps += not self._ended
        if self.random.randrange(total) < pending:
            self.fabric.fabric_step()
            self.note(f"{self.fabric.fabric_digest():x}")
        else:
            index = self.random.randrange(min(len(self.jobs), 4))
            self.note(f"job {index}")
            self.jobs.pop(index).run()
        return True

    def some_steps(self) -> None:
        """Let a few things happen while the loop is busy."""
        for _ in range(self.random.choice(self.busy_steps)):
            if not self.step():
                return

    def due(self) -> int:
        """When the next timer rings that is no timer of the loop's, in nanoseconds; 0: none is."""
        moments = [self.fabric.fabric_next_timer(), self.clock.simulated_due()]
        moments += [moment for moment, _ in self.plan]
        return min((moment for moment in moments if moment), default=0)

    def advance(self, moment: int) -> None:
        """Let time pass."""
        self.note(f"at {moment}")
        self.fabric.fabric_set_clock(moment)
        self.clock.simulated_advance(moment)
        due = [each for each in self.plan if each[0] <= moment]
        for each in due:
            self.plan.remove(each)
            each[1]()
