"""What goes wrong in a run: chosen by the seed, before it begins."""

from __future__ import annotations

import errno
from collections.abc import Callable

from tests.simulation.world import World

__all__ = ["choose"]

_MS = 1_000_000
#: How long a call may take where the adapter sends again what got lost, and where a connection is
#: given up: after 30 s of silence, and what its close takes.
_REPAIRED_S, _GIVEN_UP_S = 60.0, 150.0


def _nothing(_: World) -> str:
    return ""


def _wire(world: World) -> str:
    """What a reliable connection repairs, so that no program may notice it."""
    _delays(world)
    told = []
    for name, most in (("loss", 30_000), ("duplicate", 50_000), ("reorder", 100_000)):
        if world.draw(f"has {name}", 2):
            value = world.draw(name, most)
            world.fabric.fabric_set(name.encode(), value)
            told.append(f"{name} {value / 1e6:.3f}")
    if world.draw("has delay", 2):
        value = 1 + world.draw("delay", 19)
        world.fabric.fabric_set(b"delay", 50_000)
        world.fabric.fabric_set(b"delay_ns", value * _MS)
        told.append(f"delay {value} ms")
    return ", ".join(told)


def _delays(world: World, seconds: float = _REPAIRED_S) -> None:
    world.may_delay = True
    world.patience = max(world.patience, seconds)


def _breaks(world: World) -> None:
    _delays(world, _GIVEN_UP_S)
    world.may_break = True


def _moment(world: World, name: str) -> int:
    """A moment early in the run: most things happen in its first milliseconds."""
    return world.begin + world.draw(name, 1 << world.draw(f"{name} scale", 12)) * _MS


def _cut(world: World) -> str:
    """Nothing gets through for a while, in one direction or in both: a partition."""
    _breaks(world)
    begin = _moment(world, "cut")
    end = begin + (1 + world.draw("cut for", 60_000)) * _MS
    ends = world.one_of("cut between", ((0, 0), (0, 1), (1, 0)))
    both = world.draw("cut both", 2) and ends[0] != ends[1]
    paths = [ends, ends[::-1]] if both else [ends]

    def switch(cut: int) -> None:
        for path in paths:
            world.fabric.fabric_cut(*path, cut)

    world.at(begin, lambda: switch(1))
    world.at(end, lambda: switch(0))
    return f"cut {paths} from {_told(begin)} to {_told(end)}"


def _told(moment: int) -> str:
    return f"{moment / 1e9:.3f}"


def _power(world: World) -> str:
    """The second adapter's side, or the only one, falls silent for ever."""
    _breaks(world)
    begin = _moment(world, "power")

    def off() -> None:
        for path in ((0, 1), (1, 0), (1, 1)):
            world.fabric.fabric_cut(*path, 1)

    world.at(begin, off)
    return f"the second adapter is off from {_told(begin)}"


def _pause(world: World) -> str:
    """What one adapter sends is held back, and comes all at once."""
    seconds = 1 << world.draw("pause for", 5)
    if seconds > 1:
        _breaks(world)
    else:
        _delays(world)
    begin = _moment(world, "pause")
    device = world.draw("pause of", 2)
    end = begin + seconds * 1000 * _MS
    world.at(begin, lambda: world.fabric.fabric_pause(device, end))
    return f"adapter {device} pauses from {_told(begin)} for {seconds} s"


#: Calls that a program's user may see fail, and how: the errors of their man pages.
_CALLS = {
    "ibv_alloc_pd": errno.ENOMEM,
    "ibv_reg_mr": errno.ENOMEM,
    "ibv_create_comp_channel": errno.EMFILE,
    "ibv_create_cq": errno.ENOMEM,
    "ibv_create_qp": errno.ENOMEM,
    "ibv_create_ah": errno.ENOMEM,
    "ibv_modify_qp": errno.EINVAL,
    "ibv_post_send": errno.ENOMEM,
    "ibv_post_recv": errno.ENOMEM,
    "ibv_req_notify_cq": errno.EIO,
    "ibv_poll_cq": errno.EIO,
    "rdma_create_event_channel": errno.EMFILE,
    "rdma_create_id": errno.ENOMEM,
    "rdma_resolve_addr": errno.ENODEV,
    "rdma_resolve_route": errno.EINVAL,
    "rdma_connect": errno.EINVAL,
    "rdma_accept": errno.ENOMEM,
    "rdma_establish": errno.EINVAL,
    "rdma_disconnect": errno.EINVAL,
}


#: Those of the data path, which every system makes again and again.
_OFTEN = ("ibv_post_send", "ibv_post_send", "ibv_req_notify_cq", "ibv_req_notify_cq", "ibv_reg_mr")


def _calls(world: World) -> str:
    """One call of the libraries fails, once or a few times."""
    _breaks(world)
    call = world.one_of("call", [*_CALLS, *_OFTEN])
    # The event is taken before the poll that fails.
    world.may_lose_events |= call == "ibv_poll_cq"
    after = world.draw("call after", 1 << 1 + world.draw("call scale", 6))
    times = world.one_of("call times", (1, 1, 2, 5))
    world.fabric.fabric_fault(call.encode(), after, times, _CALLS[call])
    return f"{call} fails after {after} calls, {times} times"


def _interrupts(world: World) -> str:
    """Reads of events are interrupted by signals: they are to be tried again, and nothing lost."""
    for call in (b"ibv_get_cq_event", b"rdma_get_cm_event", b"ibv_get_async_event"):
        after = world.draw("EINTR after", 30)
        world.fabric.fabric_fault(call, after, 1 + world.draw("EINTR times", 3), errno.EINTR)
    return "EINTR"


def _lost_event(world: World) -> str:
    """Completions are there, and no event tells of them: the safety poll finds them."""
    _delays(world)
    world.may_lose_events = True
    after = world.draw("event after", 100)
    times = 1 + world.draw("events", 3)
    world.fabric.fabric_fault(b"completion event", after, times, 0)
    return f"{times} events are lost after {after}"


def _twice(world: World) -> str:
    """An adapter reports a completion twice: nothing may be delivered twice for it."""
    _breaks(world)
    world.may_violate = True
    after = world.draw("twice after", 60)
    world.fabric.fabric_fault(b"completion twice", after, 1, 0)
    return f"the completion after {after} comes twice"


def _no_result(world: World) -> str:
    """An adapter completes a READ or an atomic without its result, as Soft-RoCE may."""
    _breaks(world)
    world.may_violate = True  # a checksum tells it of a large message
    world.be_software()
    after = world.draw("result after", 20)
    world.fabric.fabric_fault(b"result", after, 1 + world.draw("results", 3), 0)
    return f"results after {after} do not land"


def _port(world: World) -> str:
    """A port goes down for a while, and its users are told of it."""
    return _away(world, "port", world.fabric.fabric_link)


def _addresses(world: World) -> str:
    """An adapter's addresses go, and come back: its GIDs change."""
    return _away(world, "addresses", world.fabric.fabric_address)


def _away(world: World, what: str, switch: Callable[[int, int], int]) -> str:
    _breaks(world)
    begin = _moment(world, what)
    end = begin + (1 + world.draw(f"{what} for", 60_000)) * _MS
    device = world.draw(f"{what} of", 2)
    world.at(begin, lambda: switch(device, 0))
    world.at(end, lambda: switch(device, 1))
    return f"adapter {device} is without its {what} from {_told(begin)} to {_told(end)}"


def _removal(world: World) -> str:
    """The module of an adapter, or its network device, is removed."""
    _breaks(world)
    begin = _moment(world, "removal")
    device = world.draw("removal of", 2)
    world.at(begin, lambda: world.fabric.fabric_remove(device))
    return f"adapter {device} is removed at {_told(begin)}"


def _no_way(world: World) -> str:
    """Datagrams cannot leave for a moment; of what their queue pair had, some comes back late."""
    _delays(world)
    after, times = world.draw("datagram after", 20), 1 + world.draw("datagrams", 3)
    world.fabric.fabric_fault(b"datagram", after, times, 0)
    strays = world.draw("strays", 3)
    if strays:
        world.fabric.fabric_fault(b"flush", world.draw("stray after", 4), strays, 0)
    return f"the way of datagrams is gone after {after}, {times} times, with {strays} strays"


#: The first are the plainest.
_KINDS = (
    _nothing, _nothing, _nothing, _wire, _wire, _wire, _calls, _calls, _calls, _cut, _cut, _pause,
    _power, _lost_event, _interrupts, _twice, _no_result, _port, _addresses, _removal,
)  # fmt: skip


def choose(world: World) -> str:
    """Choose the faults of a run, and say which they are."""
    kinds = list(_KINDS)
    if world.system == "datagrams":
        kinds.remove(_twice)  # they are told from one another by nobody
        kinds += [_no_way] * 3
    chosen = [world.one_of("fault", kinds)]
    if world.once_in("second fault", 4):
        chosen.append(world.one_of("fault too", kinds))
    told = [kind(world) for kind in chosen]
    return "; ".join(filter(None, told)) or "no fault"
