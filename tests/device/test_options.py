"""Options of connections, shown by what the device says or does."""

from __future__ import annotations

import asyncio
import errno

import pytest

import aiordma
from aiordma import Connection, ConnectionConfig
from aiordma.cm import (
    ConnectionId,
    ConnectionParameter,
    EventChannel,
    Option,
)
from aiordma.errors import NotSupportedError, ResourceClosedError
from aiordma.verbs.rnr_timer import RNR_TIMERS_MS
from tests.device.closing import End, Hall
from tests.device.meeting import meet, part, qp_of

pytestmark = [pytest.mark.device, pytest.mark.one_loop]

NOBODY = "10.80.0.77"


# set_option


BEST = {
    Option.ID_TOS: (0, 255),
    Option.ID_REUSEADDR: (0, 1),
    Option.ID_AFONLY: (0, 1),
    Option.ID_ACK_TIMEOUT: (0, 31),
}


@pytest.mark.parametrize("option", list(Option))
async def test_values_are_checked(events: EventChannel, option: Option) -> None:
    low, high = BEST[option]
    with ConnectionId(events) as cm_id:
        cm_id.set_option(option, low)
        cm_id.set_option(option, high)
        for value in (low - 1, high + 1, 256, -1, 1 << 40):
            with pytest.raises(ValueError, match=rf"{option.name} is .*, not in 0\.\.{high}"):
                cm_id.set_option(option, value)
        for wrong in (None, "1", 1.0, *([True] if high > 1 else [])):
            with pytest.raises(TypeError, match=f"the value of {option.name} is an int"):
                cm_id.set_option(option, wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="not an Option"):
            cm_id.set_option(int(option), 1)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="there is no option"):
            cm_id.set_option(Option(77), 1)
    with pytest.raises(ResourceClosedError):
        cm_id.set_option(option, low)


EARLY = {
    Option.ID_TOS: "before the route is resolved",
    Option.ID_REUSEADDR: "before another id takes the address",
    Option.ID_AFONLY: "before listen and resolve_addr",
    Option.ID_ACK_TIMEOUT: "before connect or accept",
}
IN_TIME = {
    "idle": set(Option),
    "bound": set(Option),
    "listening": set(),
    "address resolved": {Option.ID_TOS, Option.ID_ACK_TIMEOUT},
    "route resolved": {Option.ID_ACK_TIMEOUT},
    "requested": {Option.ID_ACK_TIMEOUT},
    "connected": set(),
}


async def test_too_late_is_an_error(hall: Hall) -> None:
    """The kernel would take most of it, without an effect."""

    def check(cm_id: ConnectionId, stage: str) -> None:
        assert cm_id.stage.value == stage
        for option in Option:
            if option in IN_TIME[stage]:
                cm_id.set_option(option, 1)
                continue
            text = f"{option.name} has to be set {EARLY[option]}; the connection id is {stage}"
            with pytest.raises(OSError, match=text) as caught:
                cm_id.set_option(option, 1)
            assert caught.value.errno == errno.EINVAL

    events = EventChannel()
    with ConnectionId(events) as bound:
        check(bound, "idle")
    with ConnectionId(events) as bound:
        bound.bind_addr((hall.address, 0))
        check(bound, "bound")
    check(hall.listener, "listening")
    cm_id = ConnectionId(events)
    await cm_id.resolve_addr((hall.address, hall.listener.source_port), timeout=10)
    check(cm_id, "address resolved")
    await cm_id.resolve_route(timeout=10)
    check(cm_id, "route resolved")
    client = End(cm_id, events)
    connecting = asyncio.create_task(cm_id.connect(ConnectionParameter(1, 1, 6, 6)))
    request = await hall.events.get_event(10)
    assert request is not None
    assert request.connection_id is not None
    request.ack()
    check(request.connection_id, "requested")
    request.connection_id.reject(b"no")
    request.connection_id.close()
    with pytest.raises(ConnectionRefusedError):
        await connecting
    ends = await hall.connected()
    for end in ends:
        check(end.cm_id, "connected")
    for end in (client, *ends):
        end.close()
        await end.ended()


async def test_the_ack_timeout_reaches_both_queue_pairs(hall: Hall, is_siw: bool) -> None:
    events = EventChannel()
    cm_id = ConnectionId(events)
    cm_id.set_option(Option.ID_ACK_TIMEOUT, 14)
    await cm_id.resolve_addr((hall.address, hall.listener.source_port), timeout=10)
    await cm_id.resolve_route(timeout=10)
    client = End(cm_id, events)
    connecting = asyncio.create_task(cm_id.connect(ConnectionParameter(1, 1, 6, 6)))
    request = await hall.events.get_event(10)
    assert request is not None
    request.ack()
    passive = request.connection_id
    assert passive is not None
    passive.set_option(Option.ID_ACK_TIMEOUT, 15)
    server_events = EventChannel()
    passive.migrate(server_events)
    server = End(passive, server_events)
    await passive.accept(ConnectionParameter(1, 1, 6, 6))
    await connecting
    timeouts = [end.cm_id.qp.query().timeout for end in (client, server)]  # type: ignore[union-attr]
    assert timeouts == ([0, 0] if is_siw else [14, 15]), "iWARP leaves it to TCP"
    for end in (client, server):
        end.close()
        await end.ended()


@pytest.mark.smoke
async def test_the_config_reaches_the_queue_pair(address: str, is_siw: bool) -> None:
    config = ConnectionConfig(tos=0x88, ack_timeout=17)
    for client_config, tos in ((config, 0x88), (ConnectionConfig(), 0)):
        async with aiordma.listen(address, 0, config=config) as listener:
            client, server = await meet(listener, address, config=client_config)
            for end in (client, server):
                asked = end.config
                found = qp_of(end).query()
                if is_siw:  # software iWARP tells nothing of this: the fields have any value
                    continue
                # The client's choice: its request names the traffic class for both.
                assert found.ah_attr.traffic_class == tos
                assert found.timeout == asked.ack_timeout
                assert RNR_TIMERS_MS[found.min_rnr_timer] == 0.64
            await part(client, server)


async def test_rnr_timer_of_a_connected_queue_pair(
    pair: tuple[Connection, Connection], is_siw: bool
) -> None:
    for end in pair:
        qp = qp_of(end)
        if is_siw:
            with pytest.raises(NotSupportedError, match="iWARP has no RNR timer"):
                qp.set_min_rnr_timer(1)
            continue
        for code, delay in enumerate(RNR_TIMERS_MS):
            qp.set_min_rnr_timer(delay)
            assert qp.query().min_rnr_timer == code
        with pytest.raises(ValueError, match=r"0\.01\.\.655\.36"):
            qp.set_min_rnr_timer(0)
    client, server = pair
    await client.send(b"unharmed")
    assert bytes(await server.recv()) == b"unharmed"


async def test_rnr_timer_needs_a_connected_queue_pair(hall: Hall, is_siw: bool) -> None:
    client = End(*await hall.resolved())
    assert client.cm_id.qp is not None
    if is_siw:
        with pytest.raises(NotSupportedError, match="iWARP has no RNR timer"):
            client.cm_id.qp.set_min_rnr_timer(1)
    else:  # Soft-RoCE would take it, and lose it with the connection
        with pytest.raises(OSError, match="not ready to receive: INIT") as caught:
            client.cm_id.qp.set_min_rnr_timer(1)
        assert caught.value.errno == errno.EINVAL
    client.close()
    await client.ended()
