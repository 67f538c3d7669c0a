"""Messages, writes, reads and atomics that go well: sizes, pieces, order, flags, completions."""

from __future__ import annotations

from aiordma._ffi import ffi, lib
from tests.calibration.scene import Path, Scene, note, program

INLINE, SIGNALED = lib.IBV_SEND_INLINE, lib.IBV_SEND_SIGNALED
FENCE, SOLICITED = lib.IBV_SEND_FENCE, lib.IBV_SEND_SOLICITED


@program()
def a_message(scene: Scene) -> None:
    """A message ends up in the receive that was posted, and completes on both sides."""
    first, second = scene.pair()
    first.memory.put(b"sixteen letters!")
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    scene.wait(second.cq)
    second.memory.show()


@program()
def a_message_without_bytes(scene: Scene) -> None:
    """A message of no bytes takes a receive, too."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]), (2, [second.memory.at(16)]))
    scene.send(first.qp, 3, [])
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.send(first.qp, 4, [first.memory.at(0, 4)])
    scene.wait(first.cq)
    scene.wait(second.cq)


@program()
def a_receive_without_pieces(scene: Scene) -> None:
    """A receive without a piece takes a message without bytes."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, []))
    scene.send(first.qp, 2, [])
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def pieces(scene: Scene) -> None:
    """A message is gathered from pieces and scattered into others, of any lengths."""
    first, second = scene.pair()
    first.memory.put(b"abcdefghijklmnop")
    here, there = first.memory, second.memory
    scene.recv(second.qp, (1, [there.at(100, 5), there.at(0, 7), there.at(200, 90)]))
    scene.send(first.qp, 2, [here.at(8, 8), here.at(0, 3), here.at(3, 5)])
    scene.wait(first.cq)
    scene.wait(second.cq)
    there.show(100, 5)
    there.show(0, 8)
    there.show(200, 5)


@program("roce")
def a_piece_of_no_bytes(scene: Scene) -> None:
    """A piece of length 0 among others."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at(0, 4), first.memory.at(8, 0), first.memory.at(4, 4)])
    scene.wait(first.cq)
    scene.wait(second.cq)


@program()
def many_packets(scene: Scene) -> None:
    """A message that is longer than the MTU arrives whole."""
    first, second = scene.pair()
    first.memory.put(bytes(range(256)) * 20)
    scene.recv(second.qp, (1, [second.memory.at(0, 6000)]))
    scene.send(first.qp, 2, [first.memory.at(0, 5000)])
    scene.wait(first.cq)
    scene.wait(second.cq)
    same = bytes(second.memory.view[:5000]) == bytes(first.memory.view[:5000])
    note(f"same {same}")


@program()
def inline_bytes(scene: Scene) -> None:
    """Inline bytes are taken at the post: the memory needs no region, and may change."""
    first, second = scene.pair()
    bare = scene.bare()
    bare.put(b"before")
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [(bare.address, 6, 0)], flags=INLINE | SIGNALED)
    bare.put(b"after!")
    scene.wait(first.cq)
    scene.wait(second.cq)
    second.memory.show(0, 6)


@program()
def too_many_inline_bytes(scene: Scene) -> None:
    """More inline bytes than the queue pair has room for are refused at the post."""
    first, _ = scene.pair(Path(inline=32))
    scene.send(first.qp, 1, [first.memory.at(0, 4096)], flags=INLINE | SIGNALED)
    scene.rest(first.cq)


@program("roce")
def an_inline_read(scene: Scene) -> None:
    """INLINE means nothing for a read."""
    first, second = scene.pair()
    scene.read(first.qp, 1, [first.memory.at()], second.memory.to(), flags=INLINE | SIGNALED)
    scene.rest(first.cq)


@program()
def too_many_pieces(scene: Scene) -> None:
    """More pieces than the queue pair has are refused at the post."""
    first, second = scene.pair(Path(sges=2))
    scene.send(first.qp, 1, [first.memory.at(0, 1)] * 8)
    scene.recv(second.qp, (2, [second.memory.at(0, 1)] * 8))
    scene.rest(first.cq)


@program("roce")
def immediate_data(scene: Scene) -> None:
    """Immediate data arrive beside a message, and without one."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]), (2, []))
    scene.send(first.qp, 3, [first.memory.at()], opcode=lib.IBV_WR_SEND_WITH_IMM, imm=0x1234)
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.send(first.qp, 4, [], opcode=lib.IBV_WR_SEND_WITH_IMM, imm=0xFFFFFFFF)
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def a_write_with_immediate_data(scene: Scene) -> None:
    """A write with immediate data takes a receive, and leaves its memory alone."""
    first, second = scene.pair()
    first.memory.put(b"written")
    scene.recv(second.qp, (1, [second.memory.at(100)]), (2, []))
    for wr_id, length in ((3, 7), (4, 0)):
        scene.send(
            first.qp, wr_id, [first.memory.at(0, length)] if length else [],
            opcode=lib.IBV_WR_RDMA_WRITE_WITH_IMM, imm=wr_id, to=second.memory.to(),
        )  # fmt: skip
        scene.wait(first.cq)
        scene.wait(second.cq)
    second.memory.show(0, 7)
    second.memory.show(100, 7)


@program("iwarp")
def iwarp_without_immediate_data(scene: Scene) -> None:
    """iWARP has no immediate data."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()], opcode=lib.IBV_WR_SEND_WITH_IMM, imm=1)
    scene.send(
        first.qp, 3, [first.memory.at()], opcode=lib.IBV_WR_RDMA_WRITE_WITH_IMM,
        to=second.memory.to(),
    )  # fmt: skip
    scene.rest(first.cq)


@program()
def a_write(scene: Scene) -> None:
    """A write arrives, and the peer is not told."""
    first, second = scene.pair()
    first.memory.put(b"written")
    scene.write(first.qp, 1, [first.memory.at(0, 7)], second.memory.to(32))
    scene.wait(first.cq)
    scene.recv(second.qp, (2, [second.memory.at(64)]))
    scene.send(first.qp, 3, [first.memory.at(0, 1)])
    scene.wait(first.cq)
    scene.wait(second.cq)
    second.memory.show(32, 7)


@program()
def a_read(scene: Scene) -> None:
    """A read brings bytes of the peer."""
    first, second = scene.pair()
    second.memory.put(b"to be read", 40)
    scene.read(first.qp, 1, [first.memory.at(0, 16)], second.memory.to(40))
    scene.wait(first.cq)
    first.memory.show(0, 10)


@program("roce")
def a_read_into_pieces(scene: Scene) -> None:
    """A read is scattered into pieces."""
    first, second = scene.pair()
    second.memory.put(b"abcdefgh")
    scene.read(first.qp, 1, [first.memory.at(0, 3), first.memory.at(100, 5)], second.memory.to())
    scene.wait(first.cq)
    first.memory.show(0, 3)
    first.memory.show(100, 5)


@program()
def a_long_read_and_write(scene: Scene) -> None:
    """Reads and writes of several packets."""
    first, second = scene.pair()
    first.memory.put(b"x" * 5000)
    scene.write(first.qp, 1, [first.memory.at(0, 5000)], second.memory.to())
    scene.wait(first.cq)
    scene.read(first.qp, 2, [first.memory.at(0, 4000)], second.memory.to(1000))
    scene.wait(first.cq)
    second.memory.show(4990, 12)


@program("roce")
def nothing_is_not_checked(scene: Scene) -> None:
    """A read or write of no bytes succeeds whatever it names."""
    first, _ = scene.pair()
    scene.write(first.qp, 1, [], (0, 0x123456))
    scene.wait(first.cq)
    scene.read(first.qp, 2, [], (0, 0x123456))
    scene.wait(first.cq)
    scene.state(first.qp)


@program("roce")
def fetch_and_add(scene: Scene) -> None:
    """Fetch and add brings the old value, and adds."""
    first, second = scene.pair()
    second.memory.put((40).to_bytes(8, "little"))
    scene.send(
        first.qp, 1, [first.memory.at(0, 8)], opcode=lib.IBV_WR_ATOMIC_FETCH_AND_ADD,
        to=second.memory.to(), compare_add=2,
    )  # fmt: skip
    scene.wait(first.cq)
    first.memory.show(0, 8)
    second.memory.show(0, 8)


@program("roce")
def compare_and_swap(scene: Scene) -> None:
    """Compare and swap brings the old value, and swaps if it is as expected."""
    first, second = scene.pair()
    second.memory.put((40).to_bytes(8, "little"))
    for wr_id, expected in ((1, 41), (2, 40)):
        scene.send(
            first.qp, wr_id, [first.memory.at(0, 8)], opcode=lib.IBV_WR_ATOMIC_CMP_AND_SWP,
            to=second.memory.to(), compare_add=expected, swap=7,
        )  # fmt: skip
        scene.wait(first.cq)
        first.memory.show(0, 8)
        second.memory.show(0, 8)


@program("iwarp")
def iwarp_without_atomics(scene: Scene) -> None:
    """This iWARP has no atomics."""
    first, second = scene.pair()
    scene.send(
        first.qp, 1, [first.memory.at(0, 8)], opcode=lib.IBV_WR_ATOMIC_FETCH_AND_ADD,
        to=second.memory.to(), compare_add=2,
    )  # fmt: skip
    scene.rest(first.cq)


@program()
def without_completion(scene: Scene) -> None:
    """A request that asks for no completion has none; the next that asks completes alone."""
    first, second = scene.pair()
    scene.recv(second.qp, *((number, [second.memory.at()]) for number in (1, 2, 3)))
    scene.post(
        first.qp,
        scene.wr(4, [first.memory.at()], flags=0),
        scene.wr(5, [first.memory.at()], flags=0),
        scene.wr(6, [first.memory.at()]),
    )
    scene.wait(first.cq)
    scene.wait(second.cq, 3)
    scene.rest(first.cq)


@program()
def all_signaled(scene: Scene) -> None:
    """With sq_sig_all each request has a completion, without a flag."""
    first, second = scene.pair(Path(sig_all=1))
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()], flags=0)
    scene.wait(first.cq)
    scene.wait(second.cq)


@program("roce")
def a_full_send_queue(scene: Scene) -> None:
    """One request more than there is room for is refused with ENOMEM."""
    first, second = scene.pair(Path(send_wr=4), cqe=64)
    scene.modify(first.qp, state=lib.IBV_QPS_SQD)
    attr, init = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    lib.ibv_query_qp(first.qp, attr, lib.IBV_QP_CAP, init)
    codes = [
        scene.write(first.qp, number, [first.memory.at(0, 1)], second.memory.to())
        for number in range(attr.cap.max_send_wr + 1)
    ]
    note(f"refused {sum(code != 0 for code in codes)}")


@program()
def a_full_receive_queue(scene: Scene) -> None:
    """One receive more than there is room for is refused with ENOMEM."""
    first, _ = scene.pair(Path(recv_wr=4))
    for number in range(9):
        if scene.recv(first.qp, (number, [first.memory.at()])):
            break


@program()
def a_list_with_a_fault(scene: Scene) -> None:
    """In a list with a bad request, those before it are posted, and bad_wr names it."""
    first, second = scene.pair(Path(sges=2))
    scene.recv(second.qp, (1, [second.memory.at()]), (2, [second.memory.at()]))
    scene.post(
        first.qp,
        scene.wr(3, [first.memory.at(0, 1)]),
        scene.wr(4, [first.memory.at(0, 1)] * 9),
        scene.wr(5, [first.memory.at(0, 1)]),
    )
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.rest(first.cq)


@program()
def an_opcode_that_is_none(scene: Scene) -> None:
    """A request with an undefined opcode."""
    first, _ = scene.pair()
    scene.send(first.qp, 1, [first.memory.at()], opcode=77)
    scene.rest(first.cq)
    scene.state(first.qp)


@program()
def a_fence(scene: Scene) -> None:
    """A fenced message sends what the read before it has brought."""
    first, second = scene.pair()
    second.memory.put(b"fence")
    scene.recv(second.qp, (1, [second.memory.at(100)]))
    scene.post(
        first.qp,
        scene.wr(2, [first.memory.at(0, 5)], opcode=lib.IBV_WR_RDMA_READ, to=second.memory.to()),
        scene.wr(3, [first.memory.at(0, 5)], flags=FENCE | SIGNALED),
    )
    scene.wait(first.cq, 2)
    scene.wait(second.cq)
    second.memory.show(100, 5)


@program("roce")
def reads_beyond_the_depth(scene: Scene) -> None:
    """More reads than may be under way at a time wait for one another."""
    first, second = scene.pair(Path(rd=1, dest_rd=1))
    scene.post(
        first.qp,
        *(
            scene.wr(n, [first.memory.at(0, 8)], opcode=lib.IBV_WR_RDMA_READ, to=second.memory.to())
            for n in (1, 2, 3)
        ),
    )
    scene.wait(first.cq, 3)


@program("roce")
def reads_without_a_depth(scene: Scene) -> None:
    """A requester that may have no read under way cannot read."""
    first, second = scene.pair(Path(rd=0), Path())
    scene.read(first.qp, 1, [first.memory.at()], second.memory.to())
    scene.rest(first.cq)
    scene.state(first.qp)


@program("roce")
def reads_that_the_peer_did_not_promise(scene: Scene) -> None:
    """A responder that serves no reads answers none."""
    first, second = scene.pair(Path(), Path(dest_rd=0))
    scene.read(first.qp, 1, [first.memory.at()], second.memory.to())
    scene.wait(first.cq)
    scene.rest(second.cq)
    scene.state(second.qp)


@program("roce")
def order_of_mixed_requests(scene: Scene) -> None:
    """Requests complete in the order in which they were posted."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at(500)]))
    scene.post(
        first.qp,
        scene.wr(2, [first.memory.at()], opcode=lib.IBV_WR_RDMA_READ, to=second.memory.to()),
        scene.wr(3, [first.memory.at()]),
        scene.wr(4, [first.memory.at()], opcode=lib.IBV_WR_RDMA_WRITE, to=second.memory.to()),
    )
    scene.wait(first.cq, 3)
    scene.wait(second.cq)


@program("roce")
def established_by_a_message(scene: Scene) -> None:
    """The first message that comes to a queue pair in RTR gives the event COMM_EST."""
    first, second = scene.pair()
    scene.modify(second.qp, state=lib.IBV_QPS_RESET)
    scene.to_init(second.qp)
    scene.to_rtr(second.qp, first.qp.qp_num)
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    scene.wait(second.cq)
    scene.async_event()


@program("roce")
def a_queue_pair_that_is_its_own_peer(scene: Scene) -> None:
    """A queue pair may be connected with itself."""
    first, _second = scene.pair()
    scene.modify(first.qp, state=lib.IBV_QPS_RESET)
    scene.to_init(first.qp)
    scene.to_rtr(first.qp, first.qp.qp_num)
    scene.to_rts(first.qp)
    scene.recv(first.qp, (1, [first.memory.at(100)]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq, 2)
