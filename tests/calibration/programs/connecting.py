"""The connection manager: events of both ends and their order, data, refusals, ends."""

from __future__ import annotations

import socket
from typing import Any

from aiordma._ffi import ffi, lib
from tests.calibration.scene import (
    ADDRESS,
    USUAL,
    Agent,
    End,
    Path,
    Scene,
    address,
    direct,
    muted,
    note,
    pointer,
    program,
)

#: A port where nobody listens.
NOBODY = 7471
UDP = lib.RDMA_PS_UDP


class Meeting:
    """A listener, and a client that has a route to it."""

    def __init__(self, scene: Scene, path: Path = USUAL, space: int = lib.RDMA_PS_TCP) -> None:
        self.scene, self.path = scene, path
        with muted():
            self.server, self.client = Agent(scene), Agent(scene)
            self.listener, self.port = self.server.listener(space=space)
        self.kind = lib.IBV_QPT_UD if space == UDP else lib.IBV_QPT_RC
        self.out = self.client.resolved(self.port, space)
        self.taken: Any = ffi.NULL
        with muted():
            self.client_end = scene.equip(self.out, path, type=self.kind)
        self.server_end: End | None = None

    def ask(self, data: bytes = b"", **more: int) -> int:
        return int(lib.rdma_connect(self.out, self.scene.conn(self.path, data, **more)))

    def hear(self) -> Any:
        """The request, with a queue pair for it."""
        self.taken = self.server.next().id
        if self.taken:
            with muted():
                self.server_end = self.scene.equip(self.taken, self.path, type=self.kind)
        return self.taken

    def accept(self, data: bytes = b"", **more: int) -> int:
        return int(lib.rdma_accept(self.taken, self.scene.conn(self.path, data, **more)))

    def connect(self) -> tuple[End, End]:
        """All of it, without a line."""
        with muted():
            self.ask()
            self.hear()
            self.accept()
            self.client.next()
            self.server.next()
        assert self.server_end is not None
        return self.client_end, self.server_end


@program()
def from_beginning_to_end(scene: Scene) -> None:
    """The calls and events of a connection, from both sides."""
    server, client = Agent(scene), Agent(scene)
    listener = server.id()
    lib.rdma_bind_addr(listener, address())
    lib.rdma_listen(listener, 4)
    port = socket.ntohs(listener.route.addr.src_sin.sin_port)
    out = client.id()
    lib.rdma_resolve_addr(out, ffi.NULL, address(port=port), 2000)
    client.next()
    lib.rdma_resolve_route(out, 2000)
    client.next()
    scene.equip(out)
    lib.rdma_connect(out, scene.conn())
    taken = server.next().id
    scene.equip(taken)
    lib.rdma_accept(taken, scene.conn())
    client.next()
    server.next()
    scene.state(out.qp)
    scene.state(taken.qp)
    lib.rdma_disconnect(out)
    server.next()
    lib.rdma_disconnect(taken)
    client.next()
    for id in (out, taken):
        direct.rdma_destroy_qp(pointer(id))
        lib.rdma_destroy_id(id)
    lib.rdma_destroy_id(listener)


@program()
def data_of_each_step(scene: Scene) -> None:
    """Private data travel with the request and with the answer."""
    meeting = Meeting(scene)
    meeting.ask(b"a request")
    meeting.hear()
    meeting.accept(b"an answer")
    meeting.client.next()
    meeting.server.next()


@program()
def the_most_data_of_a_request(scene: Scene) -> None:
    """How long the private data of a request may be: 56 bytes on InfiniBand and RoCE."""
    for length in (56, 57, 255):
        meeting = Meeting(scene)
        meeting.ask(b"x" * length)
        meeting.server.next(0.3)


@program()
def the_most_data_of_an_answer(scene: Scene) -> None:
    """How long the private data of an answer may be: 196 bytes on InfiniBand and RoCE."""
    for length in (196, 197):
        meeting = Meeting(scene)
        with muted():
            meeting.ask()
            meeting.hear()
        meeting.accept(b"x" * length)
        meeting.client.next(0.3)


@program()
def a_refusal(scene: Scene) -> None:
    """A program refuses, with private data."""
    meeting = Meeting(scene)
    meeting.ask()
    taken = meeting.server.next().id
    lib.rdma_reject(taken, b"no", 2)
    meeting.client.next()
    lib.rdma_destroy_id(taken)
    scene.state(meeting.out.qp)


@program()
def the_most_data_of_a_refusal(scene: Scene) -> None:
    """How long the private data of a refusal may be: 148 bytes on InfiniBand and RoCE."""
    for length in (148, 149):
        meeting = Meeting(scene)
        with muted():
            meeting.ask()
            meeting.hear()
        lib.rdma_reject(meeting.taken, b"x" * length, length)
        meeting.client.next(0.3)


@program()
def nobody_listens(scene: Scene) -> None:
    """A port on which nobody listens."""
    client = Agent(scene)
    out = client.resolved(NOBODY)
    with muted():
        scene.equip(out)
    lib.rdma_connect(out, scene.conn())
    client.next()


@program()
def a_request_that_is_dropped(scene: Scene) -> None:
    """An id with a request that is destroyed refuses the request."""
    meeting = Meeting(scene)
    meeting.ask()
    taken = meeting.server.next().id
    lib.rdma_destroy_id(taken)
    meeting.client.next()


@program()
def a_listener_that_goes(scene: Scene) -> None:
    """The requests that a listener has not reported end when it is destroyed."""
    meeting = Meeting(scene)
    meeting.ask()
    meeting.server.has_event()
    lib.rdma_destroy_id(meeting.listener)
    meeting.client.next()


@program()
def a_listener_that_goes_later(scene: Scene) -> None:
    """A request that was reported survives its listener."""
    meeting = Meeting(scene)
    meeting.ask()
    meeting.hear()
    lib.rdma_destroy_id(meeting.listener)
    meeting.accept()
    meeting.client.next()
    meeting.server.next()


@program()
def the_client_ends_it(scene: Scene) -> None:
    """Both sides are told when the client ends the connection; receives are flushed."""
    meeting = Meeting(scene)
    first, second = meeting.connect()
    scene.recv(first.qp, (1, [first.memory.at()]))
    scene.recv(second.qp, (2, [second.memory.at()]))
    lib.rdma_disconnect(meeting.out)
    meeting.server.next()
    meeting.client.next(0.3)
    scene.wait(first.cq)
    scene.state(second.qp)
    lib.rdma_disconnect(meeting.taken)
    meeting.client.next()
    scene.wait(second.cq)


@program()
def the_server_ends_it(scene: Scene) -> None:
    """Both sides are told when the server ends the connection."""
    meeting = Meeting(scene)
    meeting.connect()
    lib.rdma_disconnect(meeting.taken)
    meeting.client.next()
    lib.rdma_disconnect(meeting.out)
    meeting.server.next()
    lib.rdma_disconnect(meeting.out)


@program()
def both_end_it(scene: Scene) -> None:
    """Both sides end the connection; each is told once."""
    meeting = Meeting(scene)
    meeting.connect()
    lib.rdma_disconnect(meeting.out)
    lib.rdma_disconnect(meeting.taken)
    meeting.client.next()
    meeting.server.next()


@program()
def after_the_end(scene: Scene) -> None:
    """TIMEWAIT_EXIT follows the end, on InfiniBand and RoCE."""
    meeting = Meeting(scene)
    meeting.connect()
    lib.rdma_disconnect(meeting.out)
    meeting.server.next()
    lib.rdma_disconnect(meeting.taken)
    meeting.client.next()
    meeting.client.next(6.0)
    meeting.server.next(6.0)


@program()
def an_id_that_goes(scene: Scene) -> None:
    """The peer is told when an id is destroyed while it is connected."""
    meeting = Meeting(scene)
    meeting.connect()
    direct.rdma_destroy_qp(pointer(meeting.out))
    lib.rdma_destroy_id(meeting.out)
    meeting.server.next()


@program()
def an_id_that_goes_while_it_connects(scene: Scene) -> None:
    """The server is told nothing before it accepts, and then of the end."""
    meeting = Meeting(scene)
    meeting.ask()
    meeting.hear()
    with muted():
        direct.rdma_destroy_qp(pointer(meeting.out))
    lib.rdma_destroy_id(meeting.out)
    meeting.server.next(0.5)
    meeting.accept()
    meeting.server.next(0.5)


@program()
def what_is_sent_before_the_end(scene: Scene) -> None:
    """A message that has completed is there, although the connection has ended."""
    meeting = Meeting(scene)
    first, second = meeting.connect()
    scene.recv(second.qp, (1, [second.memory.at()]))
    scene.send(first.qp, 2, [first.memory.at()])
    scene.wait(first.cq)
    lib.rdma_disconnect(meeting.out)
    meeting.server.next()
    scene.wait(second.cq)


@program()
def calls_out_of_order(scene: Scene) -> None:
    """Calls that come too early are refused."""
    agent = Agent(scene)
    id = agent.id()
    lib.rdma_disconnect(id)
    lib.rdma_reject(id, ffi.NULL, 0)
    lib.rdma_establish(id)
    lib.rdma_notify(id, lib.IBV_EVENT_COMM_EST)
    lib.rdma_destroy_id(id)


@program()
def listening_twice(scene: Scene) -> None:
    """An id that listens does not listen again, nor does it bind or resolve."""
    agent = Agent(scene)
    listener = agent.id()
    lib.rdma_bind_addr(listener, address())
    lib.rdma_listen(listener, 1)
    lib.rdma_listen(listener, 1)
    lib.rdma_bind_addr(listener, address())
    lib.rdma_resolve_addr(listener, ffi.NULL, address(port=NOBODY), 100)
    lib.rdma_connect(listener, scene.conn(qp_num=5))


@program()
def listening_without_an_address(scene: Scene) -> None:
    """rdma_listen() of an id that is not bound."""
    agent = Agent(scene)
    id = agent.id()
    lib.rdma_listen(id, 1)


@program()
def bound_twice(scene: Scene) -> None:
    """An id is bound once."""
    agent = Agent(scene)
    id = agent.id()
    lib.rdma_bind_addr(id, address())
    lib.rdma_bind_addr(id, address())


@program()
def addresses_that_are_none(scene: Scene) -> None:
    """An address that the machine does not have, and an unknown family."""
    agent = Agent(scene)
    lib.rdma_bind_addr(agent.id(), address("10.99.99.99"))
    strange = ffi.new("struct sockaddr_in *")
    strange.sin_family = 77
    lib.rdma_bind_addr(agent.id(), ffi.cast("struct sockaddr *", strange))
    lib.rdma_bind_addr(agent.id(), address("0.0.0.0"))


@program()
def a_port_that_is_taken(scene: Scene) -> None:
    """A port has one listener."""
    agent = Agent(scene)
    _, port = agent.listener()
    lib.rdma_bind_addr(agent.id(), address(port=port))
    lib.rdma_bind_addr(agent.id(), address("0.0.0.0", port))


@program()
def a_port_in_another_space(scene: Scene) -> None:
    """Port spaces are independent."""
    agent = Agent(scene)
    _, port = agent.listener()
    lib.rdma_bind_addr(agent.id(UDP), address(port=port))


@program()
def a_port_that_is_free_again(scene: Scene) -> None:
    """The port of a listener that has gone can be taken at once."""
    agent = Agent(scene)
    listener, port = agent.listener()
    lib.rdma_destroy_id(listener)
    lib.rdma_bind_addr(agent.id(), address(port=port))


@program()
def shared_ports(scene: Scene) -> None:
    """REUSEADDR lets ids that do not listen share a port."""
    agent = Agent(scene)
    yes = ffi.new("int *", 1)
    ids = [agent.id(), agent.id()]
    for id in ids:
        lib.rdma_set_option(id, lib.RDMA_OPTION_ID, lib.RDMA_OPTION_ID_REUSEADDR, yes, 4)
    lib.rdma_bind_addr(ids[0], address(port=7001))
    lib.rdma_bind_addr(ids[1], address(port=7001))
    lib.rdma_listen(ids[0], 1)
    lib.rdma_destroy_id(ids[1])
    lib.rdma_listen(ids[0], 1)


@program()
def options(scene: Scene) -> None:
    """Options with a wrong length, and unknown options."""
    agent = Agent(scene)
    id = agent.id()
    box = ffi.new("int *", 1)
    ID = lib.RDMA_OPTION_ID
    for level, name, length in (
        (ID, lib.RDMA_OPTION_ID_TOS, 1), (ID, lib.RDMA_OPTION_ID_TOS, 4),
        (ID, lib.RDMA_OPTION_ID_REUSEADDR, 4), (ID, lib.RDMA_OPTION_ID_REUSEADDR, 1),
        (ID, lib.RDMA_OPTION_ID_AFONLY, 4), (ID, lib.RDMA_OPTION_ID_ACK_TIMEOUT, 1),
        (ID, 99, 4), (99, 0, 4),
    ):  # fmt: skip
        lib.rdma_set_option(id, level, name, box, length)


@program()
def an_address_that_nobody_has(scene: Scene) -> None:
    """An address that no route leads to, or that nobody answers for."""
    agent = Agent(scene)
    id = agent.id()
    lib.rdma_resolve_addr(id, ffi.NULL, address("10.80.0.99", 7000), 500)
    agent.next()
    other = agent.id()
    lib.rdma_resolve_addr(other, address("10.99.99.99"), address(ADDRESS, 7000), 500)
    agent.next(0.7)


@program()
def resolved_twice(scene: Scene) -> None:
    """An address is resolved once, and a route, too."""
    agent = Agent(scene)
    out = agent.resolved(NOBODY)
    lib.rdma_resolve_addr(out, ffi.NULL, address(port=NOBODY), 500)
    lib.rdma_resolve_route(out, 500)
    agent.next(0.3)


@program()
def bound_and_resolved(scene: Scene) -> None:
    """An id that is bound resolves from its own address."""
    agent = Agent(scene)
    id = agent.id()
    lib.rdma_bind_addr(id, address())
    lib.rdma_resolve_addr(id, ffi.NULL, address(port=NOBODY), 2000)
    agent.next()
    lib.rdma_resolve_addr(id, ffi.NULL, address(port=NOBODY), 2000)
    agent.next(0.3)


@program()
def moved_to_another_channel(scene: Scene) -> None:
    """Events that were not read move with their id."""
    server, client, third = Agent(scene), Agent(scene), Agent(scene)
    with muted():
        _, port = server.listener()
    out = client.resolved(port)
    with muted():
        end = scene.equip(out)
    lib.rdma_connect(out, scene.conn())
    taken = server.next().id
    with muted():
        scene.equip(taken)
    lib.rdma_migrate_id(taken, third.channel)
    lib.rdma_accept(taken, scene.conn())
    client.next()
    third.next()
    lib.rdma_disconnect(out)
    third.next()
    note(f"ends {bool(end.qp)}")


@program()
def established_by_the_program(scene: Scene) -> None:
    """A client with a queue pair of its own gets the answer, and confirms it itself."""
    meeting = Meeting(scene)
    client = Agent(scene)
    out = client.resolved(meeting.port)
    with muted():
        pd = scene.pd_of(out)
        cq = scene.cq(context=out.verbs)
        qp = scene.qp(cq, pd=pd)
        lib.aio_qp_advance(out, qp, 1, 1, -1, -1, -1, -1, -1, -1, -1)
    lib.rdma_connect(out, scene.conn(qp_num=qp.qp_num))
    meeting.hear()
    meeting.accept()
    client.next()
    lib.aio_qp_advance(out, qp, 2, 3, -1, -1, -1, -1, -1, -1, -1)
    lib.rdma_establish(out)
    meeting.server.next()


@program()
def proposed_attributes(scene: Scene) -> None:
    """What the connection manager proposes for each state of the client's queue pair."""
    meeting = Meeting(scene, Path(rd=3, dest_rd=2, retry=5, rnr_retry=4))
    attr, mask = ffi.new("struct ibv_qp_attr *"), ffi.new("int *")
    for state in (1, 2, 3):
        attr.qp_state = state
        lib.rdma_init_qp_attr(meeting.out, attr, mask)
    meeting.ask()
    meeting.hear()
    for state in (1, 2, 3):
        attr.qp_state = state
        lib.rdma_init_qp_attr(meeting.taken, attr, mask)
    meeting.accept()
    meeting.client.next()
    for state in (1, 2, 3):
        attr.qp_state = state
        lib.rdma_init_qp_attr(meeting.out, attr, mask)


@program()
def depths(scene: Scene) -> None:
    """Each side is told the depths of the other, swapped."""
    meeting = Meeting(scene, Path(rd=3, dest_rd=2))
    meeting.ask(responder_resources=2, initiator_depth=3)
    meeting.hear()
    meeting.accept(responder_resources=3, initiator_depth=2)
    meeting.client.next()
    meeting.server.next()


@program()
def depths_that_are_too_much(scene: Scene) -> None:
    """Depths beyond those of the adapter."""
    meeting = Meeting(scene)
    meeting.ask(responder_resources=200, initiator_depth=200)
    meeting.server.next(0.5)


@program()
def depths_by_default(scene: Scene) -> None:
    """255 stands for the most that the adapter has."""
    meeting = Meeting(scene)
    meeting.ask(responder_resources=255, initiator_depth=255)
    meeting.hear()
    meeting.accept(responder_resources=255, initiator_depth=255)
    meeting.client.next()
    meeting.server.next()


@program()
def told_of_a_message(scene: Scene) -> None:
    """rdma_notify() reports that a message came before the confirmation."""
    meeting = Meeting(scene)
    meeting.connect()
    lib.rdma_notify(meeting.taken, lib.IBV_EVENT_COMM_EST)
    lib.rdma_notify(meeting.taken, lib.IBV_EVENT_QP_FATAL)


@program()
def more_than_the_backlog(scene: Scene) -> None:
    """A backlog of 1, and two requests that nobody has read."""
    server, client = Agent(scene), Agent(scene)
    with muted():
        _, port = server.listener(backlog=1)
    outs = [client.resolved(port) for _ in range(2)]
    for out in outs:
        with muted():
            scene.equip(out)
        lib.rdma_connect(out, scene.conn())
        server.has_event()
    client.next(0.5)
    server.next()
    server.next(0.5)


@program()
def without_a_queue_pair(scene: Scene) -> None:
    """An id without a queue pair connects with the number of one that is not its own."""
    meeting = Meeting(scene)
    other = Agent(scene)
    out = other.resolved(meeting.port)
    lib.rdma_connect(out, scene.conn(qp_num=0))
    meeting.server.next(0.5)


@program()
def a_queue_pair_for_an_id(scene: Scene) -> None:
    """rdma_create_qp() needs an id with a device, and moves the queue pair to INIT."""
    agent = Agent(scene)
    with muted():
        lone, out = agent.id(), agent.resolved(NOBODY)
        pd, cq = scene.pd_of(out), scene.cq(context=out.verbs)
    init = scene.init_attr(cq)
    direct.rdma_create_qp(pointer(lone), pointer(pd), pointer(init))
    direct.rdma_create_qp(pointer(out), pointer(pd), pointer(init))
    scene.state(out.qp)
    direct.rdma_create_qp(pointer(out), pointer(pd), pointer(init))
    direct.rdma_destroy_qp(pointer(out))


# ---- services for datagrams


@program("roce")
def a_service_for_datagrams(scene: Scene) -> None:
    """A client asks for a service, and is told where to send."""
    meeting = Meeting(scene, space=UDP)
    meeting.ask(b"where?")
    meeting.hear()
    meeting.accept(b"here", qp_num=0)
    meeting.client.next()
    meeting.server.next(0.3)
    scene.state(meeting.out.qp)


@program("roce")
def a_service_that_says_no(scene: Scene) -> None:
    """A service that refuses."""
    meeting = Meeting(scene, space=UDP)
    meeting.ask()
    taken = meeting.server.next().id
    lib.rdma_reject(taken, b"no", 2)
    meeting.client.next()


@program("roce")
def a_service_that_is_not_there(scene: Scene) -> None:
    """A service that nobody offers."""
    client = Agent(scene)
    out = client.resolved(NOBODY, UDP)
    with muted():
        scene.equip(out, type=lib.IBV_QPT_UD)
    lib.rdma_connect(out, scene.conn())
    client.next()


@program("roce")
def the_most_data_for_a_service(scene: Scene) -> None:
    """How long the private data to a service, and of its answer, may be."""
    for length in (180, 181):
        meeting = Meeting(scene, space=UDP)
        meeting.ask(b"x" * length)
        meeting.server.next(0.3)
    for length in (136, 137):
        meeting = Meeting(scene, space=UDP)
        with muted():
            meeting.ask()
            meeting.hear()
        meeting.accept(b"x" * length)
        meeting.client.next(0.3)


@program("roce")
def a_member_by_the_manager(scene: Scene) -> None:
    """Joining a group by the connection manager, and leaving it."""
    agent = Agent(scene)
    id = agent.id(UDP)
    lib.rdma_bind_addr(id, address())
    with muted():
        scene.equip(id, type=lib.IBV_QPT_UD)
    attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
    attr.comp_mask = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS | lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
    attr.join_flags = lib.RDMA_MC_JOIN_FLAG_FULLMEMBER
    attr.addr = address("239.0.0.7")
    lib.rdma_join_multicast_ex(id, attr, ffi.NULL)
    agent.next()
    lib.rdma_leave_multicast(id, attr.addr)
    lib.rdma_leave_multicast(id, attr.addr)


@program("roce")
def a_datagram_to_a_group(scene: Scene) -> None:
    """Members that joined by the connection manager get datagrams, the sender as well."""
    agent = Agent(scene)
    attr = ffi.new("struct rdma_cm_join_mc_attr_ex *")
    attr.comp_mask = lib.RDMA_CM_JOIN_MC_ATTR_ADDRESS | lib.RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS
    attr.join_flags = lib.RDMA_MC_JOIN_FLAG_FULLMEMBER
    attr.addr = address("239.0.0.8")
    ends: list[End] = []
    ah = ffi.NULL
    for _ in range(2):
        with muted():
            id = agent.id(UDP)
            lib.rdma_bind_addr(id, address())
            ends.append(scene.equip(id, type=lib.IBV_QPT_UD))
        lib.rdma_join_multicast_ex(id, attr, ffi.NULL)
        event = agent.unacked()
        if event and not ah:
            ah = lib.ibv_create_ah(ends[0].pd, ffi.addressof(event.param.ud.ah_attr))
        if event:
            lib.rdma_ack_cm_event(event)
        scene.recv(ends[-1].qp, (1, [ends[-1].memory.at(100, 100)]))
    wr = scene.wr(2, [ends[0].memory.at()])
    wr.wr.ud.ah, wr.wr.ud.remote_qpn = ah, 0xFFFFFF
    wr.wr.ud.remote_qkey = lib.RDMA_UDP_QKEY
    scene.post(ends[0].qp, wr)
    scene.wait(ends[1].cq)
    scene.wait(ends[0].cq, 2)


@program("iwarp")
def iwarp_has_no_datagrams(scene: Scene) -> None:
    """The port space for datagrams, on iWARP."""
    agent = Agent(scene)
    id = agent.id(UDP)
    lib.rdma_bind_addr(id, address())
    lib.rdma_listen(id, 1)
