"""SafetyPoll: an idle channel is polled in C, and Python is called only if there is work for it."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator

import pytest

from aiordma._core import Drain, SafetyPoll, alarm_open, alarm_set

from .fake_verbs import Adapter, Queue

STRANGER = 100  # an id of no state


class Scene:
    """A channel of two queues, and its alarm."""

    def __init__(self) -> None:
        self.adapter = Adapter()
        self.queues = [self.adapter.queue(), self.adapter.queue(solicited=True)]
        self.safety = SafetyPoll(self.adapter.drain)
        self.called = 0
        self.fd = alarm_open()
        self.run = self.safety.by(self.fd, self.call)
        for queue in self.queues:
            self.safety.add(queue.address)
        self.safety.expect_calm(True)

    def call(self) -> None:
        self.called += 1

    def lose(self, queue: Queue, count: int = 1) -> None:
        """So many completions whose event is lost."""
        queue.armed = None
        for _ in range(count):
            queue.complete(STRANGER)

    def alarm(self) -> int:
        """The alarm comes; how often Python is called."""
        alarm_set(self.fd, time.monotonic())
        before = self.called
        self.run()
        with pytest.raises(BlockingIOError):
            os.read(self.fd, 8)
        return self.called - before

    @property
    def polls(self) -> list[int]:
        return [queue.polls for queue in self.queues]


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    with made.adapter:
        yield made
    os.close(made.fd)


def test_a_calm_channel_is_polled_without_python(scene: Scene) -> None:
    for times in range(1, 4):
        assert scene.alarm() == 0
        assert scene.polls == [times, times]
    assert scene.safety.take() == []


def test_python_polls_a_channel_that_is_not_calm(scene: Scene) -> None:
    scene.safety.expect_calm(False)
    assert scene.alarm() == 1
    assert scene.polls == [0, 0]


def test_python_is_called_after_an_event(scene: Scene) -> None:
    scene.queues[0].complete(STRANGER)
    scene.adapter.serve()
    before = scene.polls
    assert scene.alarm() == 1
    assert scene.polls == before
    assert scene.safety.new_events() == 1
    assert scene.safety.new_events() == 0
    assert scene.alarm() == 0


def test_python_gets_what_was_found(scene: Scene) -> None:
    scene.lose(scene.queues[1], 3)
    assert scene.alarm() == 1
    ((token, events, (count, arrived, records, more)),) = scene.safety.take()
    assert (token, events, count, arrived, more) == (2, 0, 3, 0, False)
    assert [record[0] for record in records] == [STRANGER] * 3
    assert scene.safety.take() == []
    assert scene.alarm() == 0


def test_a_queue_that_has_gone_is_not_polled(scene: Scene) -> None:
    first, second = scene.queues
    scene.safety.discard(first.address)
    scene.safety.discard(first.address)
    assert scene.alarm() == 0
    assert (first.polls, second.polls) == (0, 1)


def test_its_events_go_with_it(scene: Scene) -> None:
    scene.queues[0].complete(STRANGER)
    scene.adapter.serve()
    scene.safety.new_events()
    scene.safety.discard(scene.queues[0].address)
    assert scene.alarm() == 1
    assert scene.safety.new_events() == 1, "the sum has changed"
    assert scene.alarm() == 0


def test_nothing_is_polled_beside_a_drain_that_is_not_done() -> None:
    with Adapter(most=2) as adapter:
        queue = adapter.queue()
        safety, fd, called = SafetyPoll(adapter.drain), alarm_open(), []
        run = safety.by(fd, lambda: called.append(1))
        safety.add(queue.address)
        for _ in range(5):
            queue.complete(STRANGER)
        adapter.run()
        assert adapter.drain.n_pending
        safety.new_events()
        polls = queue.polls
        safety.expect_calm(True)
        alarm_set(fd, time.monotonic())
        run()
        assert queue.polls == polls
        assert not called
        adapter.serve()
        os.close(fd)


def test_an_alarm_that_was_set_anew_does_nothing(scene: Scene) -> None:
    alarm_set(scene.fd, time.monotonic() + 3600)
    scene.run()
    assert (scene.called, scene.polls) == (0, [0, 0])


def test_it_comes_again_and_again(scene: Scene) -> None:
    alarm_set(scene.fd, time.monotonic(), 0.001)
    for _ in range(3):
        end = time.monotonic() + 10
        while time.monotonic() < end:
            try:
                os.read(scene.fd, 8)
                break
            except BlockingIOError:
                time.sleep(0.001)
        else:
            raise AssertionError("it has not come")


def test_no_descriptor_is_read_after_the_end(scene: Scene) -> None:
    """A forked child may have another file with this number."""
    alarm_set(scene.fd, time.monotonic())
    scene.safety.stop()
    scene.run()
    assert (scene.called, scene.polls) == (0, [0, 0])
    os.read(scene.fd, 8)


def test_it_does_not_keep_its_drain_alive(scene: Scene) -> None:
    gone = weakref.ref(scene.adapter.drain)
    scene.adapter.drain = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None
    assert scene.alarm() == 1, "Python stops the alarm"
    assert scene.polls == [0, 0]


def test_a_stopped_drain_is_left_alone(scene: Scene) -> None:
    scene.adapter.drain.stop()
    assert scene.alarm() == 0
    assert scene.polls == [0, 0]


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError):
        SafetyPoll(None)  # type: ignore[arg-type]
    safety = SafetyPoll(Drain(1, 4))
    with pytest.raises(ValueError, match="no queue"):
        safety.add(0)
    with pytest.raises(TypeError):
        safety.by("x", print)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        safety.discard("x")  # type: ignore[arg-type]
