"""`aiordma gids`: the kernel's tables of GIDs, a word in each column."""

from __future__ import annotations

import json

import pytest

from aiordma.cli.__main__ import main
from aiordma.cli.gids import list_gids

from .machine import EMPTY, GID, LINK_LOCAL, Machine


def test_columns_of_words(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.add(gids=(LINK_LOCAL, EMPTY, GID))
    assert main(["gids"]) == 0
    assert capsys.readouterr() == (
        "DEVICE  PORT  INDEX  GID               TYPE     IPv4       INTERFACE\n"
        "rxe0    1     0      fe80::1           RoCE-v2  -          dummy0\n"
        "rxe0    1     2      ::ffff:10.80.0.1  RoCE-v2  10.80.0.1  dummy0\n",
        "",
    )


def test_for_programs(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.add(gids=(GID,))
    machine.add("rxe1", gids=(LINK_LOCAL,))
    assert main(["gids", "--json", "rxe0"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "device": "rxe0",
            "port": 1,
            "index": 0,
            "gid": "::ffff:10.80.0.1",
            "type": "RoCE v2",
            "ipv4": "10.80.0.1",
            "netdev": "dummy0",
        }
    ]


def test_the_index_is_a_number(machine: Machine) -> None:
    machine.add(gids=(EMPTY, EMPTY, GID, *[EMPTY] * 7, LINK_LOCAL))
    assert [gid.index for gid in list_gids("rxe0")] == [2, 10]


@pytest.mark.parametrize(
    ("layer", "node_type", "kernel", "kind"),
    [
        ("Ethernet", "1: CA", "IB/RoCE v1", "RoCE v1"),
        ("Ethernet", "1: CA", "RoCE v2", "RoCE v2"),
        ("InfiniBand", "1: CA", "IB/RoCE v1", "InfiniBand"),
        ("Ethernet", "4: RNIC", "IB/RoCE v1", "iWARP"),
    ],
)
def test_types(machine: Machine, layer: str, node_type: str, kernel: str, kind: str) -> None:
    port = machine.add()
    (port / "link_layer").write_text(layer)
    (port / "gid_attrs/types/0").write_text(kernel)
    (machine.sysfs / "rxe0/node_type").write_text(node_type)
    [gid] = list_gids("rxe0")
    assert gid.type == kind
    assert gid.ipv4 == (None if kind == "iWARP" else "10.80.0.1")


def test_a_kernel_that_says_nothing_about_a_gid(machine: Machine) -> None:
    port = machine.add()
    for folder in ("types", "ndevs"):
        (port / "gid_attrs" / folder / "0").unlink()
    [gid] = list_gids("rxe0")
    assert (gid.type, gid.netdev) == ("unknown", None)


def test_nothing_to_list(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    for words, text in (
        (["gids"], "there is no RDMA device"),
        (["gids", "rxe7"], "no device rxe7: there is none"),
    ):
        assert main(words) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert text in err
    machine.add(gids=(EMPTY,))
    assert main(["gids", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out) == []
    assert "no port of a device has a GID" in err
    assert main(["gids", "../.."]) == 1
    assert "no device ../..: rxe0" in capsys.readouterr().err
