"""What goes wrong in a run: chosen by the seed, before it begins."""

from __future__ import annotations

import errno

from tests.simulation.world import World

__all__ = ["choose"]

_MS = 1_000_000


def _nothing(_: World) -> str:
    return "no fault"


def _wire(world: World) -> str:
    """What a reliable connection repairs, so that no program may notice it."""
    draw = world.random
    told = []
    for name, most in (("loss", 30_000), ("duplicate", 50_000), ("reorder", 100_000)):
        if draw.randrange(2):
            value = draw.randrange(most)
            world.fabric.fabric_set(name.encode(), value)
            told.append(f"{name} {value / 1e6:.3f}")
    if draw.randrange(2):
        value = draw.randrange(1, 20)
        world.fabric.fabric_set(b"delay", 50_000)
        world.fabric.fabric_set(b"delay_ns", value * _MS)
        told.append(f"delay {value} ms")
    return ", ".join(told) or "no fault"


def _cut(world: World) -> str:
    """Nothing gets through for a while; connections may break, if it lasts."""
    begin = world.begin + world.random.randrange(1, 3_000) * _MS
    end = begin + world.random.randrange(1, 60_000) * _MS
    world.may_break = True
    world.plan.append((begin, lambda: world.fabric.fabric_cut(0, 0, 1)))
    world.plan.append((end, lambda: world.fabric.fabric_cut(0, 0, 0)))
    return f"cut from {begin / 1e9:.3f} to {end / 1e9:.3f}"


#: Calls that a program's user may see fail, and how: the errors of their man pages.
_CALLS = {
    "ibv_alloc_pd": errno.ENOMEM,
    "ibv_reg_mr": errno.ENOMEM,
    "ibv_create_comp_channel": errno.EMFILE,
    "ibv_create_cq": errno.ENOMEM,
    "ibv_create_qp": errno.ENOMEM,
    "ibv_modify_qp": errno.EINVAL,
    "ibv_post_send": errno.ENOMEM,
    "ibv_post_recv": errno.ENOMEM,
    "ibv_req_notify_cq": errno.EIO,
    "rdma_create_event_channel": errno.EMFILE,
    "rdma_create_id": errno.ENOMEM,
    "rdma_resolve_addr": errno.ENODEV,
    "rdma_resolve_route": errno.EINVAL,
    "rdma_connect": errno.EINVAL,
    "rdma_accept": errno.ENOMEM,
    "rdma_establish": errno.EINVAL,
    "rdma_disconnect": errno.EINVAL,
}


def _calls(world: World) -> str:
    """One call of the libraries fails, once or a few times."""
    world.may_break = True
    call = world.random.choice(list(_CALLS))
    after, times = world.random.randrange(12), world.random.choice([1, 1, 2, 5])
    world.fabric.fabric_fault(call.encode(), after, times, _CALLS[call])
    return f"{call} fails after {after} calls, {times} times"


def choose(world: World) -> str:
    """Choose the faults of a run, and say which they are."""
    kind = world.random.choice([_nothing, _wire, _wire, _cut, _calls])
    return kind(world)
