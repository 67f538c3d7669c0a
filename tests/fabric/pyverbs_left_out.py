"""The tests of pyverbs that are left out: what they say, how many they are, and why.

docs/fabric-programs.md has the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LEFT_OUT", "MACHINE", "PASSED", "VERSION", "LeftOut"]

#: Of rdma-core; another one has other tests.
VERSION = "44.0"
PASSED = 96


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Tests that say the same.

    Attributes:
        says: A pattern of the whole of what they say.
        count: How many.
        subject: What they are about, for the page.
        why: What the fabric is not, or has not.
    """

    says: str
    count: int
    subject: str
    why: str


LEFT_OUT = (
    LeftOut(
        r"Can not run the test over non MLX5 device"
        r"|Could not open mlx5 context \(This is not an MLX5 device\)"
        r"|Converting timestamp to nanoseconds is not supported",
        79, "calls of the driver mlx5", "the fabric is no mlx5",
    ),
    LeftOut(
        r"Can not run the test over non EFA device", 16, "calls of the driver efa",
        "the fabric is no EFA",
    ),
    LeftOut(
        r"ODP is not supported - No ODP caps", 14, "memory that is paged on demand",
        "a driver's ability; regions of the fabric are not pinned in the first place",
    ),
    LeftOut(
        r"Device memory is not supported", 14, "memory of the adapter", "the fabric has none",
    ),
    LeftOut(
        r"Create (?:Raw Packet QP with(?:out)?(?: extended)? attrs|QP type 8) is not supported",
        14, "raw packets, flows and receive-side scaling", "no Ethernet beside RDMA",
    ),
    LeftOut(r"Create XRCD is not supported", 7, "XRC", "RC and UD only"),
    LeftOut(
        r"Create UC QP with(?:out)?(?: extended)? attrs is not supported", 5, "UC",
        "RC and UD only",
    ),
    LeftOut(
        r"Parent Domain is not supported on this device", 5, "parent domains",
        "not there yet; a thread domain would change nothing",
    ),
    LeftOut(
        r"Extended CQ is not supported", 4, "tag matching", "an ability of mlx5",
    ),
    LeftOut(
        r"Extended QP is not supported on this device", 1, "atomic WRITE",
        "newer than the specification that the fabric keeps to",
    ),
    LeftOut(
        r"Importing a device is not supported", 1, "objects of another process",
        "objects belong to the process that made them",
    ),
)  # fmt: skip

#: What depends on the machine and not on the fabric.
MACHINE = (
    LeftOut(
        r"Allocating dmabuf is not supported by \S+|.*/dev/dri/\S+", 10, "dmabuf",
        "needs a graphics device",
    ),
    LeftOut(
        r"There are no huge pages of size 2M allocated", 3, "huge pages",
        "the machine has to have some",
    ),
    LeftOut(
        r"cuda-python 12\.0\+ must be installed to run CUDA tests", 2, "CUDA", "needs a GPU",
    ),
    LeftOut(
        r"PCI device must be passed by the user", 2, "VFIO", "needs an mlx5 on PCI",
    ),
)  # fmt: skip
