"""What ends a queue pair, what is flushed then, and retries."""

from __future__ import annotations

from aiordma._ffi import ffi, lib
from tests.calibration.scene import Path, Scene, muted, program

INIT, RTS, ERR, RESET = lib.IBV_QPS_INIT, lib.IBV_QPS_RTS, lib.IBV_QPS_ERR, lib.IBV_QPS_RESET


@program()
def flushed_in_order(scene: Scene) -> None:
    """In ERR, waiting receives are flushed in order."""
    first, _ = scene.pair()
    scene.recv(first.qp, *((number, [first.memory.at()]) for number in (1, 2, 3)))
    scene.to_error(first.qp)
    scene.wait(first.cq, 3)
    scene.state(first.qp)


@program("roce")
def sends_are_flushed_too(scene: Scene) -> None:
    """In ERR, sends that did not leave are flushed in order, signaled or not."""
    first, _ = scene.pair()
    scene.modify(first.qp, state=lib.IBV_QPS_SQD)
    scene.send(first.qp, 1, [first.memory.at()])
    scene.send(first.qp, 2, [first.memory.at()], flags=0)
    scene.send(first.qp, 3, [first.memory.at()])
    scene.to_error(first.qp)
    scene.wait(first.cq, 3)


@program()
def receives_after_the_error(scene: Scene) -> None:
    """A receive that is posted in ERR is flushed."""
    first, _ = scene.pair()
    scene.to_error(first.qp)
    scene.recv(first.qp, (1, [first.memory.at()]))
    scene.wait(first.cq, bound=0.5)


@program()
def sends_after_the_error(scene: Scene) -> None:
    """A send that is posted in ERR is flushed, signaled or not."""
    first, _ = scene.pair()
    scene.to_error(first.qp)
    scene.send(first.qp, 2, [first.memory.at()])
    scene.send(first.qp, 3, [first.memory.at()], flags=0)
    scene.wait(first.cq, 2, bound=0.5)


@program()
def destroyed_with_work(scene: Scene) -> None:
    """A queue pair that is destroyed takes its requests with it: none completes."""
    first, _ = scene.pair()
    scene.recv(first.qp, (1, [first.memory.at()]), (2, [first.memory.at()]))
    lib.ibv_destroy_qp(first.qp)
    scene.rest(first.cq)


@program("roce")
def destroyed_with_completions(scene: Scene) -> None:
    """Completions that were not polled are gone with their queue pair."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    lib.ibv_destroy_qp(second.qp)
    scene.rest(second.cq)


@program("roce")
def reset_with_completions(scene: Scene) -> None:
    """Completions that were not polled are gone after RESET, and so are receives."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]), (3, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    scene.modify(second.qp, state=RESET)
    scene.rest(second.cq)
    scene.to_init(second.qp)
    scene.to_error(second.qp)
    scene.rest(second.cq)


@program()
def longer_than_the_receive(scene: Scene) -> None:
    """A message that is longer than its receive ends both queue pairs."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at(0, 8)]), (2, [second.memory.at(0, 8)]))
    scene.send(first.qp, 3, [first.memory.at(0, 9)])
    scene.wait(first.cq)
    scene.wait(second.cq, 2)
    scene.state_becomes(first.qp, ERR)
    scene.state_becomes(second.qp, ERR)
    scene.async_event(second.qp.context)


@program("roce")
def longer_than_the_receive_in_packets(scene: Scene) -> None:
    """A message of several packets, whose end does not fit into its receive."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at(0, 3000)]))
    scene.send(first.qp, 3, [first.memory.at(0, 5000)])
    scene.wait(first.cq)
    scene.wait(second.cq)


@program()
def no_receive_and_no_retry(scene: Scene) -> None:
    """Without a receive and without retries the sender gives up; the receiver continues."""
    first, second = scene.pair(Path(rnr_retry=0))
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)
    scene.state_becomes(first.qp, ERR)
    scene.state(second.qp)


@program("roce")
def no_receive_and_two_retries(scene: Scene) -> None:
    """The retries of a receiver that is not ready are counted."""
    first, second = scene.pair(Path(rnr_retry=2))
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)
    scene.state(second.qp)


@program("roce")
def no_receive_yet(scene: Scene) -> None:
    """With seven retries the sender waits for a receive for ever."""
    first, second = scene.pair()
    scene.send(first.qp, 1, [first.memory.at()])
    scene.rest(first.cq)
    scene.recv(second.qp, (2, [second.memory.at()]))
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def no_receive_yet_and_time(scene: Scene) -> None:
    """The same, where the acknowledgement may take as long as the receive does."""
    first, second = scene.pair(Path(timeout=18))
    scene.send(first.qp, 1, [first.memory.at()])
    scene.rest(first.cq)
    scene.recv(second.qp, (2, [second.memory.at()]))
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def no_receive_for_a_write(scene: Scene) -> None:
    """A write with immediate data needs a receive, too; its bytes may be there before."""
    first, second = scene.pair(Path(rnr_retry=1))
    scene.send(
        first.qp, 1, [first.memory.at()], opcode=lib.IBV_WR_RDMA_WRITE_WITH_IMM,
        to=second.memory.to(),
    )  # fmt: skip
    scene.wait(first.cq)


@program("roce")
def flushed_behind_a_failure(scene: Scene) -> None:
    """The request that fails says why; those after it are flushed."""
    first, second = scene.pair(Path(rnr_retry=0))
    scene.recv(first.qp, (9, [first.memory.at()]))
    scene.post(
        first.qp,
        scene.wr(1, [first.memory.at()]),
        scene.wr(2, [first.memory.at()], flags=0),
        scene.wr(3, [first.memory.at()], opcode=lib.IBV_WR_RDMA_WRITE, to=second.memory.to()),
    )
    scene.wait(first.cq, 4)


@program("roce")
def nobody_answers(scene: Scene) -> None:
    """A peer that is in RESET does not answer: the retries end."""
    first, second = scene.pair(Path(retry=1))
    scene.modify(second.qp, state=RESET)
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)
    scene.state(first.qp)


@program("roce")
def nobody_answers_in_init(scene: Scene) -> None:
    """A peer that is in INIT does not answer."""
    first, second = scene.pair(Path(retry=1))
    with muted():
        scene.modify(second.qp, state=RESET)
        scene.to_init(second.qp)
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)


@program("roce")
def nobody_answers_in_error(scene: Scene) -> None:
    """A peer that is in ERR does not answer."""
    first, second = scene.pair(Path(retry=1))
    scene.to_error(second.qp)
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)


@program("roce")
def nobody_is_there(scene: Scene) -> None:
    """A queue pair that is destroyed does not answer."""
    first, second = scene.pair(Path(retry=1))
    lib.ibv_destroy_qp(second.qp)
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)


@program("roce")
def nobody_answers_a_read(scene: Scene) -> None:
    """Reads have the same retries."""
    first, second = scene.pair(Path(retry=1))
    scene.to_error(second.qp)
    scene.read(first.qp, 1, [first.memory.at()], second.memory.to())
    scene.wait(first.cq)


@program("roce")
def numbers_that_do_not_fit(scene: Scene) -> None:
    """A first packet that is ahead of what is expected is answered, and sent in vain again."""
    first, second = scene.pair(Path(retry=1))
    with muted():
        scene.modify(second.qp, state=RESET)
        scene.to_init(second.qp)
        scene.modify(
            second.qp, state=lib.IBV_QPS_RTR, av=None, mtu=3, dest=first.qp.qp_num, rq_psn=3,
            dest_rd=4, min_rnr=1,
        )  # fmt: skip
    scene.recv(second.qp, (2, [second.memory.at()]))
    scene.send(first.qp, 1, [first.memory.at()])
    scene.wait(first.cq)
    scene.rest(second.cq)


@program("roce")
def another_peer(scene: Scene) -> None:
    """A queue pair takes packets from any sender: only numbers are compared."""
    first, second = scene.pair(Path(retry=1))
    with muted():
        third = scene.qp(first.cq)
        scene.to_init(third)
        scene.to_rtr(third, second.qp.qp_num)
        scene.to_rts(third, Path(retry=1))
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(third, 2, [first.memory.at()])
    scene.wait(second.cq)
    scene.rest(first.cq, 1.0)


@program()
def a_send_of_foreign_memory(scene: Scene) -> None:
    """A send with an unknown local key ends the queue pair, and nothing leaves."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [(first.memory.address, 16, 0x7654321)])
    scene.wait(first.cq)
    scene.rest(second.cq)
    scene.state_becomes(first.qp, ERR)


@program()
def a_send_beyond_its_region(scene: Scene) -> None:
    """A send beyond its region ends the queue pair, and nothing leaves."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at(8190, 16)])
    scene.wait(first.cq)
    scene.state_becomes(first.qp, ERR)


@program()
def a_send_of_another_domain(scene: Scene) -> None:
    """A send of memory of another domain ends the queue pair, and nothing leaves."""
    first, _ = scene.pair()
    with muted():
        pd = lib.ibv_alloc_pd(first.qp.context)
        memory = scene.memory(pd=pd)
    scene.send(first.qp, 1, [memory.at()])
    scene.wait(first.cq)


@program()
def a_send_of_memory_that_is_gone(scene: Scene) -> None:
    """A send of a deregistered region ends the queue pair, and nothing leaves."""
    first, _ = scene.pair()
    piece = first.memory.at()
    lib.ibv_dereg_mr(first.memory.mr)
    scene.send(first.qp, 1, [piece])
    scene.wait(first.cq)


@program()
def a_receive_of_foreign_memory(scene: Scene) -> None:
    """A receive with an unknown key fails when a message comes, on both sides."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [(second.memory.address, 16, 0x7654321)]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(second.cq)
    scene.wait(first.cq)
    scene.state_becomes(second.qp, ERR)


@program()
def a_receive_without_the_right(scene: Scene) -> None:
    """A receive needs memory with LOCAL_WRITE."""
    first, second = scene.pair()
    with muted():
        memory = scene.memory("", pd=second.pd)
    scene.recv(second.qp, (1, [memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(second.cq)
    scene.wait(first.cq)


@program()
def a_receive_beyond_its_region(scene: Scene) -> None:
    """A receive that is longer than its region fails when a message reaches that far."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at(8184, 100)]))
    scene.send(first.qp, 2, [first.memory.at(0, 50)])
    scene.wait(second.cq)
    scene.wait(first.cq)


@program("roce")
def a_read_into_memory_without_the_right(scene: Scene) -> None:
    """A read needs memory with LOCAL_WRITE."""
    first, second = scene.pair()
    with muted():
        memory = scene.memory("R", pd=first.pd)
    scene.read(first.qp, 1, [memory.at()], second.memory.to())
    scene.wait(first.cq)


@program("roce")
def an_unsignaled_failure(scene: Scene) -> None:
    """A request that fails has a completion, although it asked for none."""
    first, _ = scene.pair()
    scene.send(first.qp, 1, [(first.memory.address, 16, 0x7654321)], flags=0)
    scene.wait(first.cq)


@program("roce")
def from_the_error_to_work(scene: Scene) -> None:
    """After ERR and RESET the pair works again."""
    first, second = scene.pair()
    scene.to_error(first.qp)
    for end, peer in ((first, second), (second, first)):
        with muted():
            scene.modify(end.qp, state=RESET)
            scene.to_init(end.qp)
            scene.to_rtr(end.qp, peer.qp.qp_num)
            scene.to_rts(end.qp)
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def longer_than_the_port_carries(scene: Scene) -> None:
    """A message longer than the port's max_msg_sz is refused."""
    first, second = scene.pair()
    port = ffi.new("struct ibv_port_attr *")
    lib.ibv_query_port(scene.context, 1, port)
    if port.max_msg_sz > 1 << 30:
        first.memory.show(0, 1)
        return
    piece = (first.memory.address, port.max_msg_sz + 1, first.memory.mr.lkey)
    scene.write(first.qp, 1, [piece], second.memory.to())
    scene.wait(first.cq)
