"""Completion queues and their events, shared receive queues, asynchronous events."""

from __future__ import annotations

from aiordma._ffi import ffi, lib
from tests.calibration.scene import End, Path, Scene, muted, note, program

SIGNALED, SOLICITED = lib.IBV_SEND_SIGNALED, lib.IBV_SEND_SOLICITED
ERR = lib.IBV_QPS_ERR


def a_completion(scene: Scene, first: End, second: End, flags: int = SIGNALED) -> None:
    """A message, whose completion waits in the second end's queue."""
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()], flags=flags | SIGNALED)
    scene.wait(first.cq)


@program()
def armed_before(scene: Scene) -> None:
    """A queue that is armed gives one event for the next completion."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 0)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)
    scene.wait(second.cq, 2)


@program()
def armed_after(scene: Scene) -> None:
    """Arming a queue that has completions gives no event for them."""
    first, second = scene.pair(channel=True)
    a_completion(scene, first, second)
    lib.ibv_req_notify_cq(second.cq, 0)
    scene.event(second.cq.channel)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)
    scene.wait(second.cq, 2)


@program()
def armed_twice(scene: Scene) -> None:
    """Arming twice gives one event."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 0)
    lib.ibv_req_notify_cq(second.cq, 0)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)
    scene.event(second.cq.channel)


@program()
def not_armed(scene: Scene) -> None:
    """A queue that was not armed gives no event."""
    first, second = scene.pair(channel=True)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)


@program()
def polled_and_not_read(scene: Scene) -> None:
    """An event stays although its completion is taken."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 0)
    a_completion(scene, first, second)
    scene.wait(second.cq)
    scene.event(second.cq.channel)


@program()
def solicited_only(scene: Scene) -> None:
    """A queue that is armed for solicited completions gives no event for others."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 1)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)
    a_completion(scene, first, second, SOLICITED)
    scene.event(second.cq.channel)


@program("roce")
def solicited_by_a_write(scene: Scene) -> None:
    """A write with immediate data may be solicited, too."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 1)
    scene.recv(second.qp, (1, []))
    scene.send(
        first.qp, 2, [first.memory.at()], opcode=lib.IBV_WR_RDMA_WRITE_WITH_IMM,
        flags=SIGNALED | SOLICITED, to=second.memory.to(),
    )  # fmt: skip
    scene.wait(first.cq)
    scene.event(second.cq.channel)


@program()
def a_failure_is_solicited(scene: Scene) -> None:
    """A failed completion wakes a program that waits for solicited ones."""
    first, _ = scene.pair(channel=True)
    lib.ibv_req_notify_cq(first.cq, 1)
    scene.recv(first.qp, (1, [first.memory.at()]))
    scene.to_error(first.qp)
    scene.event(first.cq.channel)
    scene.wait(first.cq)


@program()
def a_send_is_not_solicited(scene: Scene) -> None:
    """The completion of a send does not wake a program that waits for solicited ones."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(first.cq, 1)
    a_completion(scene, first, second, SOLICITED)
    scene.event(first.cq.channel)


@program()
def armed_for_all_and_for_some(scene: Scene) -> None:
    """A queue that is armed for all stays so when it is armed for solicited ones."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 0)
    lib.ibv_req_notify_cq(second.cq, 1)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)


@program()
def armed_for_some_and_for_all(scene: Scene) -> None:
    """A queue that is armed for solicited ones can be armed for all."""
    first, second = scene.pair(channel=True)
    lib.ibv_req_notify_cq(second.cq, 1)
    lib.ibv_req_notify_cq(second.cq, 0)
    a_completion(scene, first, second)
    scene.event(second.cq.channel)


@program()
def no_channel(scene: Scene) -> None:
    """A queue without a channel may be armed, without effect."""
    first, second = scene.pair()
    lib.ibv_req_notify_cq(second.cq, 0)
    a_completion(scene, first, second)
    scene.wait(second.cq)


@program()
def a_full_queue(scene: Scene) -> None:
    """A completion for which there is no room ends the queue and its queue pairs."""
    first, second = scene.pair(cqe=4, channel=True)
    for number in range(second.cq.cqe + 2):
        with muted():
            scene.recv(second.qp, (number, [second.memory.at()]))
            scene.send(first.qp, number, [first.memory.at()])
            scene.wait(first.cq, bound=1.0)
            scene.rest(first.cq, 0)
    scene.async_event(second.qp.context)
    scene.async_event(second.qp.context)
    scene.state(second.qp)
    with muted():
        count = sum(scene.poll(second.cq) is not None for _ in range(32))
    note(f"completions beyond the size {count - second.cq.cqe}")


@program()
def another_size(scene: Scene) -> None:
    """A queue becomes larger, and not smaller than what is in it."""
    first, second = scene.pair(cqe=8)
    lib.ibv_resize_cq(second.cq, 20)
    for _ in range(3):
        a_completion(scene, first, second)
    lib.ibv_resize_cq(second.cq, 1)
    lib.ibv_resize_cq(second.cq, 0)
    lib.ibv_resize_cq(second.cq, 1 << 30)
    scene.wait(second.cq, 3)
    lib.ibv_resize_cq(second.cq, 1)


@program()
def sizes_of_queues(scene: Scene) -> None:
    """A queue has at least as many places as were asked for."""
    for cqe in (1, 2, 3, 7, 8, 100):
        scene.cq(cqe)


# ---- shared receive queues


@program()
def a_shared_queue(scene: Scene) -> None:
    """A message takes a receive of the shared queue, and the completion is the queue pair's."""
    first, second = scene.pair(srq=True)
    scene.recv(second.qp.srq, (1, [second.memory.at()]), (2, [second.memory.at(16)]))
    for wr_id in (3, 4):
        scene.send(first.qp, wr_id, [first.memory.at()])
        scene.wait(first.cq)
        scene.wait(second.cq)


@program()
def limits_of_a_shared_queue(scene: Scene) -> None:
    """More receives or pieces than the adapter has, and none."""
    attr = ffi.new("struct ibv_device_attr *")
    lib.ibv_query_device(scene.context, attr)
    scene.srq(attr.max_srq_wr + 1)
    scene.srq(4, attr.max_srq_sge + 1)
    scene.srq(0)
    scene.srq(4, 0)
    scene.srq(4, 1, 5)
    scene.srq(4, 1)


@program()
def a_full_shared_queue(scene: Scene) -> None:
    """One receive more than there is room for is refused."""
    with muted():
        srq, memory = scene.srq(4, 1), scene.memory()
    for number in range(9):
        if scene.recv(srq, (number, [memory.at()])):
            break


@program()
def low_water(scene: Scene) -> None:
    """When fewer receives are left than the limit says, there is one event."""
    first, second = scene.pair(srq=True)
    srq = second.qp.srq
    scene.recv(srq, *((number, [second.memory.at()]) for number in range(4)))
    attr = ffi.new("struct ibv_srq_attr *")
    attr.srq_limit = 3
    lib.ibv_modify_srq(srq, attr, lib.IBV_SRQ_LIMIT)
    for wr_id in (11, 12, 13):
        scene.send(first.qp, wr_id, [first.memory.at()])
        scene.wait(first.cq)
        scene.wait(second.cq)
        scene.async_event(second.qp.context)
    with muted():
        lib.ibv_query_srq(srq, attr)
    note(f"limit {attr.srq_limit}")


@program()
def low_water_that_is_there(scene: Scene) -> None:
    """A limit above what is there gives the event when a receive is taken, or at once."""
    first, second = scene.pair(srq=True)
    srq = second.qp.srq
    scene.recv(srq, (1, [second.memory.at()]), (2, [second.memory.at()]))
    attr = ffi.new("struct ibv_srq_attr *")
    attr.srq_limit = 5
    lib.ibv_modify_srq(srq, attr, lib.IBV_SRQ_LIMIT)
    scene.async_event(second.qp.context)
    scene.send(first.qp, 3, [first.memory.at()])
    scene.wait(first.cq)
    scene.async_event(second.qp.context)


@program()
def a_limit_that_is_too_high(scene: Scene) -> None:
    """A limit above the size of the queue is refused."""
    with muted():
        srq = scene.srq(4, 1)
    attr = ffi.new("struct ibv_srq_attr *")
    attr.srq_limit = 5000
    lib.ibv_modify_srq(srq, attr, lib.IBV_SRQ_LIMIT)
    attr.srq_limit = 2
    lib.ibv_modify_srq(srq, attr, lib.IBV_SRQ_LIMIT)
    lib.ibv_query_srq(srq, attr)


@program()
def another_size_of_a_shared_queue(scene: Scene) -> None:
    """A shared queue becomes larger, where the adapter can do that."""
    with muted():
        srq = scene.srq(4, 1)
    attr = ffi.new("struct ibv_srq_attr *")
    attr.max_wr = 12
    lib.ibv_modify_srq(srq, attr, lib.IBV_SRQ_MAX_WR)
    lib.ibv_query_srq(srq, attr)


@program()
def the_last_of_a_shared_queue(scene: Scene) -> None:
    """A queue pair in ERR takes no more from the shared queue, and says so; nothing is flushed."""
    _, second = scene.pair(srq=True)
    scene.recv(second.qp.srq, (1, [second.memory.at()]))
    scene.to_error(second.qp)
    scene.async_event(second.qp.context)
    scene.rest(second.cq)


@program()
def an_empty_shared_queue(scene: Scene) -> None:
    """Without a receive in the shared queue the sender is told that the receiver is not ready."""
    first, _ = scene.pair(Path(rnr_retry=0), srq=True)
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)


@program()
def too_long_for_a_shared_queue(scene: Scene) -> None:
    """A message that is longer than the receive of a shared queue."""
    first, second = scene.pair(srq=True)
    scene.recv(second.qp.srq, (1, [second.memory.at(0, 4)]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.async_event(second.qp.context)


@program()
def too_many_pieces_for_a_shared_queue(scene: Scene) -> None:
    """A receive with more pieces than the shared queue has."""
    with muted():
        srq, memory = scene.srq(4, 2), scene.memory()
    scene.recv(srq, (1, [memory.at(0, 1)] * 9))


@program()
def two_queue_pairs_and_a_queue(scene: Scene) -> None:
    """Completions of two queue pairs in one queue keep the order of their events."""
    first, second = scene.pair()
    third, fourth = scene.pair()
    for a, b in ((first, second), (third, fourth), (first, second)):
        scene.recv(b.qp, (1, [b.memory.at()]))
        scene.send(a.qp, 2, [a.memory.at()])
        scene.wait(b.cq)
        scene.wait(a.cq)


@program()
def no_event_of_the_device(scene: Scene) -> None:
    """An idle device reports nothing."""
    scene.async_event()


@program()
def a_device_that_is_closed(scene: Scene) -> None:
    """A device is closed although nothing was destroyed, and can be opened again."""
    context = lib.ibv_open_device(scene.device)
    pd = lib.ibv_alloc_pd(context)
    lib.ibv_dealloc_pd(pd)
    lib.ibv_close_device(context)
    context = lib.ibv_open_device(scene.device)
    lib.ibv_close_device(context)
