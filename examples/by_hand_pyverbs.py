"""A client of by_hand.py in pyverbs: without aiordma, asyncio, or the connection manager.

Usage: by_hand_pyverbs.py HOST PORT DEVICE GID_INDEX TEXT...

For the Python that pyverbs is installed for: Debian's is /usr/bin/python3.
"""

import json
import socket
import sys
from typing import Any

SIZE = 4096
PSN = 7


def main(host: str, port: str, device: str, gid_index: str, *texts: str) -> None:
    """Send each text, and print the answer."""
    from pyverbs.addr import GID, AHAttr, GlobalRoute
    from pyverbs.cq import CQ
    from pyverbs.device import Context
    from pyverbs.mr import MR
    from pyverbs.pd import PD
    from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
    from pyverbs.wr import SGE, RecvWR, SendWR

    try:
        import pyverbs.libibverbs_enums as e  # rdma-core 56 and 65
    except ImportError:
        import pyverbs.enums as e  # rdma-core 44

    context = Context(name=device)
    pd = PD(context)
    cq = CQ(context, 16)
    cap = QPCap(max_send_wr=4, max_recv_wr=4)
    qp = QP(pd, QPInitAttr(qp_type=e.ibv_qp_type.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap))
    mr = MR(pd, 2 * SIZE, e.ibv_access_flags.IBV_ACCESS_LOCAL_WRITE)

    def completion(opcode: int) -> Any:
        while True:
            count, found = cq.poll(1)
            if count:
                assert found[0].status == e.ibv_wc_status.IBV_WC_SUCCESS, found[0]
                if found[0].opcode == opcode:
                    return found[0]

    attr = QPAttr(port_num=1)
    attr.qp_access_flags = e.ibv_access_flags.IBV_ACCESS_LOCAL_WRITE
    qp.to_init(attr)

    with (
        socket.create_connection((host, int(port))) as connection,
        connection.makefile("rw") as tcp,
    ):
        gid = context.query_gid(1, int(gid_index)).gid.replace(":", "")
        tcp.write(json.dumps({"qp_num": qp.qp_num, "psn": PSN, "gid": gid}) + "\n")
        tcp.flush()
        theirs = json.loads(tcp.readline())
        dgid = ":".join(theirs["gid"][n : n + 4] for n in range(0, 32, 4))
        route = GlobalRoute(dgid=GID(dgid), sgid_index=int(gid_index))
        attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn = theirs["qp_num"], theirs["psn"], PSN
        attr.path_mtu = e.ibv_mtu.IBV_MTU_1024
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 14, 6, 6
        qp.to_rts(attr)
        for text in texts:
            qp.post_recv(RecvWR(1, 1, [SGE(mr.buf + SIZE, SIZE, mr.lkey)]))
            data = text.encode()
            mr.write(data, len(data))
            piece = SGE(mr.buf, len(data), mr.lkey)
            qp.post_send(SendWR(opcode=e.ibv_wr_opcode.IBV_WR_SEND, num_sge=1, sg=[piece]))
            wc = completion(e.ibv_wc_opcode.IBV_WC_RECV)
            print(mr.read(wc.byte_len, SIZE).decode(), flush=True)
    for part in (qp, mr, cq, pd, context):
        part.close()


if __name__ == "__main__":
    if len(sys.argv) - 1 < 5:
        print("usage: by_hand_pyverbs.py HOST PORT DEVICE GID_INDEX TEXT...", file=sys.stderr)
        sys.exit(2)
    main(*sys.argv[1:])
