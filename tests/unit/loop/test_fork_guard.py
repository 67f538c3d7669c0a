"""After fork() every guarded object is dead in the child, and the parent's goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..conftest import LIMIT_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]

# The child reports through its exit status: 0 only if it came to its end.
PREAMBLE = """
    import asyncio, gc, os, sys, warnings
    from aiordma.errors import ForkedError
    from aiordma.loop import fork
    from aiordma.loop.pump import FdPump
    from aiordma.loop.workers import reaper
    from aiordma.verbs.resource import Resource
    from tests.forks import fork_quietly
    from tests.inside.loop import all_done

    class Fake(Resource):
        __slots__ = ()
        destroyed = []
        def _destroy(self, handle):
            self.destroyed.append((os.getpid(), handle))

    def in_child(function):
        pid = fork_quietly()
        if pid:
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == 0, "the child failed"
            return
        try:
            function()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(1)
"""


def run(code: str) -> str:
    program = textwrap.dedent(PREAMBLE) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-X", "dev", "-c", program],
        capture_output=True, check=False, cwd=ROOT, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_a_resource_is_refused_in_the_child_and_lives_in_the_parent() -> None:
    out = run("""
        parent = Fake("handle")
        child = Fake("inner", (parent,))

        def check():
            for resource in (parent, child):
                assert resource.closed
                try:
                    resource._require()
                except ForkedError as error:
                    assert "belongs to the parent process" in str(error)
                else:
                    raise AssertionError("not refused")
                try:
                    resource._retain()
                except ForkedError:
                    pass
                else:
                    raise AssertionError("a child of a dead parent")
                resource.close()
            print("checked")

        in_child(check)
        assert parent._require() == "handle"
        child.close()
        parent.close()
        assert [handle for _, handle in Fake.destroyed] == ["inner", "handle"]
        assert {pid for pid, _ in Fake.destroyed} == {os.getpid()}
        print("parent done")
    """)
    assert out.split("\n") == ["checked", "parent done"]


def test_a_finalizer_in_the_child_neither_destroys_nor_warns() -> None:
    out = run("""
        things = [Fake("handle")]

        def check():
            things.clear()  # warnings are errors here, also in a finalizer's report
            gc.collect()
            assert Fake.destroyed == []
            print("checked")

        in_child(check)
        things[0].close()
        print(len(Fake.destroyed))
    """)
    assert out.split("\n") == ["checked", "1"]


def test_an_object_made_in_the_child_works_there() -> None:
    out = run("""
        old = Fake("old")

        def check():
            new = Fake("new")
            assert new._require() == "new"
            new.close()
            assert Fake.destroyed == [(os.getpid(), "new")]
            print("checked")

        in_child(check)
        old.close()
    """)
    assert out == "checked"


def test_grandchildren_find_it_dead_too() -> None:
    out = run("""
        first = Fake("first")

        def check():
            second = Fake("second")

            def deeper():
                for resource in (first, second):
                    try:
                        resource._require()
                    except ForkedError:
                        continue
                    raise AssertionError("alive")
                print("deep")

            in_child(deeper)
            second.close()

        in_child(check)
        first.close()
    """)
    assert out == "deep"


def test_the_childs_workers_are_its_own() -> None:
    out = run("""
        def check():
            assert reaper.submit(lambda: 7).result(10) == 7
            assert all_done(reaper, 10)
            print("checked")

        # A job that the parent has not finished must not be waited for in the child.
        reaper._unfinished = 3
        in_child(check)
        reaper._unfinished = 0
        assert reaper.submit(lambda: 8).result(10) == 8
    """)
    assert out == "checked"


def test_the_childs_pump_leaves_the_parents_reader_alone() -> None:
    out = run("""
        read_fd, write_fd = os.pipe()
        got = []

        async def main():
            asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is no news
            seen = asyncio.Event()

            def drain():
                try:
                    got.append(os.read(read_fd, 1))
                    seen.set()
                except BlockingIOError:
                    pass
                return False

            pump = FdPump(asyncio.get_running_loop(), read_fd, drain, lambda exc: None)

            def check():
                assert pump.loop is None
                pump.close()
                pump.kick()
                assert got == []

            in_child(check)
            os.write(write_fd, b"x")
            await asyncio.wait_for(seen.wait(), 10)
            pump.close()

        asyncio.run(main())
        print(got)
    """)
    assert out == "[b'x']"


def test_what_is_gone_is_not_kept_by_the_guard() -> None:
    out = run("""
        import weakref
        resource = Fake("handle")
        ref = weakref.ref(resource)
        resource.close()
        del resource
        print(ref() is None, len(fork._guarded))
    """)
    assert out == "True 0"


def test_a_lock_that_another_thread_had_is_free_in_the_child() -> None:
    out = run("""
        import threading
        lock, taken, over = fork.new_lock(), threading.Event(), threading.Event()

        def hold():
            with lock:
                taken.set()
                over.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        assert taken.wait(20)

        def child():
            assert lock.acquire(timeout=5)
            with lock:
                print("free")

        in_child(child)
        assert not lock.acquire(blocking=False)
        over.set()
        thread.join(20)
    """)
    assert out == "free"


def test_who_has_a_lock_may_take_it_again() -> None:
    """The collector may run while a queue counts, and end a queue pair that counts there, too."""
    out = run("""
        from aiordma.loop import registry
        from aiordma.verbs import cq, srq
        for lock in (registry._lock, cq._promises, srq._lock):
            with lock:
                assert lock.acquire(timeout=5)
                lock.release()
        print("again")
    """)
    assert out == "again"


def test_a06_a_public_object_refuses_in_the_child_and_ends_in_silence() -> None:
    out = run("""
        class Thing:
            size = 3
            def __init__(self):
                self.log = []
                self.fast = lambda: self.log.append("fast")
                fork.guard_public(self)
            def use(self): self.log.append("used")
            async def wait(self): self.log.append("waited")
            @property
            def name(self): return "x"
            @property
            def is_closing(self): return False
            def close(self): self.log.append("closed")
            async def wait_closed(self): self.log.append("waited")
            def __len__(self): return 3
            def __enter__(self): return self
            def __exit__(self, *exc): self.log.append("left")
            def __del__(self): self.log.append("collected")

        class Hiding(Thing):
            def __init__(self):
                super().__init__()
                self.use = lambda: self.log.append("hidden")

        things = [Thing(), Hiding()]

        def check():
            for thing in things:
                assert isinstance(thing, Thing)
                assert "of the parent process" in repr(thing)
                uses = (
                    lambda: thing.use(), lambda: thing.wait(), lambda: thing.name,
                    lambda: thing.size, lambda: len(thing), lambda: thing.__enter__(),
                )
                for number, use in enumerate(uses):
                    try:
                        use()
                    except ForkedError as error:
                        assert type(thing).__name__ in str(error) and "spawn" in str(error)
                    else:
                        raise AssertionError(f"not refused: {number}")
                assert thing.is_closing is True
                thing.close()
                thing.__exit__(None, None, None)
                asyncio.run(thing.wait_closed())
            logs = [thing.log for thing in things]
            del thing, uses
            things.clear()
            gc.collect()
            assert logs == [[], []], logs
            print("checked")

        in_child(check)
        things[0].use()
        assert things[0].log == ["used"]
        fork._public.clear()
    """)
    assert out == "checked"


def test_a06_a_library_of_the_process_is_refused_in_the_child_of_a_user() -> None:
    out = run("""
        def child_of_none():
            fork.use_library()

        def child_of_a_user():
            for _ in range(2):
                try:
                    fork.use_library()
                except ForkedError as error:
                    assert "spawn" in str(error)
                else:
                    raise AssertionError("not refused")
            in_child(child_of_a_user_again)
            print("refused")

        def child_of_a_user_again():
            try:
                fork.use_library()
            except ForkedError:
                return
            raise AssertionError("not refused")

        in_child(child_of_none)
        fork.use_library()
        in_child(child_of_a_user)
        fork.use_library()
    """)
    assert out == "refused"


def test_what_modules_keep_begins_anew_in_the_child() -> None:
    out = run("""
        from aiordma.verbs import slab
        steps = []
        fork.renew(lambda: steps.append("renewed"))
        parent = Fake("handle")
        poison = type(parent).poison_after_fork
        Fake.poison_after_fork = lambda self: (poison(self), steps.append("dead"))
        slab._kept = 4096

        def child():
            print(steps, slab._kept)

        in_child(child)
        assert not steps and slab._kept == 4096
        Fake.poison_after_fork = poison
        parent.close()
    """)
    assert out == "['dead', 'renewed'] 0"
