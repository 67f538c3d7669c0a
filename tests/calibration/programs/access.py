"""What a peer may do with memory: keys, bounds, rights, domains, and what happens if it may not."""

from __future__ import annotations

from aiordma._ffi import lib
from tests.calibration.scene import End, Memory, Path, Scene, muted, program

ERR = lib.IBV_QPS_ERR


def outcome(scene: Scene, first: End, second: End) -> None:
    """What both sides see of a request that was refused."""
    scene.wait(first.cq)
    scene.state_becomes(first.qp, ERR)
    scene.rest(second.cq)
    scene.state_becomes(second.qp, ERR)
    scene.async_event(second.qp.context)


def with_rights(scene: Scene, end: End, rights: str) -> Memory:
    with muted():
        return scene.memory(rights, pd=end.pd)


@program()
def a_write_with_a_wrong_key(scene: Scene) -> None:
    """A write with a key that was never given out."""
    first, second = scene.pair()
    scene.recv(second.qp, (9, [second.memory.at()]))
    scene.write(first.qp, 1, [first.memory.at()], (second.memory.address, 0x7654321))
    outcome(scene, first, second)


@program()
def a_read_with_a_wrong_key(scene: Scene) -> None:
    """A read with a key that was never given out."""
    first, second = scene.pair()
    scene.read(first.qp, 1, [first.memory.at()], (second.memory.address, 0x7654321))
    outcome(scene, first, second)


@program("roce")
def a_write_beyond_the_region(scene: Scene) -> None:
    """A write that ends beyond the region, and one that begins before it."""
    for offset in (8190, -8):
        first, second = scene.pair()
        scene.write(first.qp, 1, [first.memory.at()], second.memory.to(offset))
        outcome(scene, first, second)


@program()
def a_read_beyond_the_region(scene: Scene) -> None:
    """A read that ends beyond the region."""
    first, second = scene.pair()
    scene.read(first.qp, 1, [first.memory.at()], second.memory.to(8190))
    outcome(scene, first, second)


@program("roce")
def a_write_without_the_right(scene: Scene) -> None:
    """A write to a region that is open only for reads."""
    first, second = scene.pair()
    memory = with_rights(scene, second, "LR")
    scene.write(first.qp, 1, [first.memory.at()], memory.to())
    outcome(scene, first, second)


@program("roce")
def a_read_without_the_right(scene: Scene) -> None:
    """A read of a region that is open only for writes."""
    first, second = scene.pair()
    memory = with_rights(scene, second, "LW")
    scene.read(first.qp, 1, [first.memory.at()], memory.to())
    outcome(scene, first, second)


@program("roce")
def an_atomic_without_the_right(scene: Scene) -> None:
    """An atomic on a region that is open for everything else."""
    first, second = scene.pair()
    memory = with_rights(scene, second, "LWR")
    scene.send(
        first.qp, 1, [first.memory.at(0, 8)], opcode=lib.IBV_WR_ATOMIC_FETCH_AND_ADD,
        to=memory.to(), compare_add=1,
    )  # fmt: skip
    outcome(scene, first, second)


@program("roce")
def an_atomic_that_is_not_aligned(scene: Scene) -> None:
    """An atomic needs an address that is a multiple of 8."""
    first, second = scene.pair()
    scene.send(
        first.qp, 1, [first.memory.at(0, 8)], opcode=lib.IBV_WR_ATOMIC_FETCH_AND_ADD,
        to=second.memory.to(4), compare_add=1,
    )  # fmt: skip
    outcome(scene, first, second)


@program("roce")
def an_atomic_of_another_length(scene: Scene) -> None:
    """The memory for the old value has 8 bytes."""
    first, second = scene.pair()
    scene.send(
        first.qp, 1, [first.memory.at(0, 4)], opcode=lib.IBV_WR_ATOMIC_FETCH_AND_ADD,
        to=second.memory.to(), compare_add=1,
    )  # fmt: skip
    scene.rest(first.cq)
    scene.state(first.qp)
    first.memory.show(0, 8)


@program("roce")
def a_queue_pair_without_the_right(scene: Scene) -> None:
    """A queue pair that does not allow writes, whatever its memory allows."""
    first, second = scene.pair(Path(), Path(access="LR"))
    scene.write(first.qp, 1, [first.memory.at()], second.memory.to())
    outcome(scene, first, second)


@program("roce")
def a_queue_pair_that_is_not_to_be_read(scene: Scene) -> None:
    """A queue pair that does not allow reads."""
    first, second = scene.pair(Path(), Path(access="LW"))
    scene.read(first.qp, 1, [first.memory.at()], second.memory.to())
    outcome(scene, first, second)


@program("roce")
def a_queue_pair_without_atomics(scene: Scene) -> None:
    """A queue pair that does not allow atomics."""
    first, second = scene.pair(Path(), Path(access="LWR"))
    scene.send(
        first.qp, 1, [first.memory.at(0, 8)], opcode=lib.IBV_WR_ATOMIC_CMP_AND_SWP,
        to=second.memory.to(), compare_add=1,
    )  # fmt: skip
    outcome(scene, first, second)


@program("roce")
def a_region_that_is_gone(scene: Scene) -> None:
    """An access to a region that was deregistered."""
    first, second = scene.pair()
    with muted():
        memory = scene.memory(pd=second.pd)
    where = memory.to()
    scene.write(first.qp, 1, [first.memory.at()], where)
    scene.wait(first.cq)
    lib.ibv_dereg_mr(memory.mr)
    scene.write(first.qp, 2, [first.memory.at()], where)
    outcome(scene, first, second)


@program()
def a_region_of_another_domain(scene: Scene) -> None:
    """A region whose domain is not that of the queue pair."""
    first, second = scene.pair()
    with muted():
        pd = lib.ibv_alloc_pd(second.qp.context)
        memory = scene.memory(pd=pd)
    scene.read(first.qp, 1, [first.memory.at()], memory.to())
    outcome(scene, first, second)


@program("roce")
def a_refusal_in_the_middle(scene: Scene) -> None:
    """What was posted before a refused write arrives; what was posted after it is flushed."""
    first, second = scene.pair()
    scene.recv(second.qp, (1, [second.memory.at()]), (2, [second.memory.at()]))
    scene.post(
        first.qp,
        scene.wr(3, [first.memory.at()]),
        scene.wr(
            4, [first.memory.at()], opcode=lib.IBV_WR_RDMA_WRITE,
            to=(second.memory.address, 0x7654321),
        ),
        scene.wr(5, [first.memory.at()]),
    )  # fmt: skip
    scene.wait(first.cq, 3)
    scene.wait(second.cq, 2)


@program("roce")
def rights_are_taken_back(scene: Scene) -> None:
    """Rights of a queue pair that are taken back in RTS."""
    first, second = scene.pair()
    scene.write(first.qp, 1, [first.memory.at()], second.memory.to())
    scene.wait(first.cq)
    scene.modify(second.qp, access="L")
    scene.write(first.qp, 2, [first.memory.at()], second.memory.to())
    outcome(scene, first, second)


@program("iwarp")
def iwarp_write_without_the_right(scene: Scene) -> None:
    """A write into memory that is not open for it, on iWARP."""
    first, second = scene.pair()
    memory = with_rights(scene, second, "LR")
    scene.write(first.qp, 1, [first.memory.at()], memory.to())
    outcome(scene, first, second)
