"""What the documentation says in tables is what the code does."""

from __future__ import annotations

import errno
import importlib
import operator
import re
from pathlib import Path

import aiordma
import aiordma.cm
import aiordma.memory
import aiordma.metrics
import aiordma.verbs
import aiordma_fabric
import aiordma_softroce as softroce
from aiordma import error_words, errors
from aiordma.contrib import aiohttp as contrib_aiohttp
from aiordma.contrib import dask as contrib_dask
from aiordma.contrib import httpx as contrib_httpx
from aiordma.endpoint import wire
from aiordma.endpoint.config import ConnectionConfig, plan_of
from aiordma.endpoint.wire import FrameKind
from aiordma.link import refusal
from aiordma.link.refusal import RefusalReason
from aiordma.requests import wire as requests_wire
from aiordma.streams import policy
from aiordma.testing import faults, stream_conformance
from aiordma_softroce import errors as softroce_errors
from aiordma_softroce.cli import options_parser
from aiordma_softroce.options import DEVICES, ENGINES

DOCS = Path(__file__).parents[3] / "docs"


def rows(page: str) -> list[list[str]]:
    """All rows of all tables of a page."""
    lines = (DOCS / page).read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line.startswith("| ")
    ]


def terms(page: str) -> list[str]:
    """What the lists of definitions of a page define."""
    return re.findall(r"^(.+)\n: ", (DOCS / page).read_text(), re.M)


def test_the_kinds_of_messages() -> None:
    told = [term for term in terms("wire.md") if term[0].isdecimal()]
    assert told == [f"{int(kind)}: `{kind.name}`" for kind in FrameKind]


def test_the_frames_of_requests() -> None:
    table = [cells[:2] for cells in rows("requests.md") if cells[0].isdecimal()]
    for number in (*requests_wire.Kind, *requests_wire.ErrorCode):
        assert [str(int(number)), f"`{number.name}`"] in table
    text = (DOCS / "requests.md").read_text()
    room = ConnectionConfig().eager_size - requests_wire.HEADER_SIZE
    assert f"up to {room:,} bytes with default settings" in text
    initial = requests_wire.INITIAL_REQUESTS, requests_wire.INITIAL_BYTES >> 20
    assert "it is {} requests and {} MiB".format(*initial) in text


def test_the_reasons_of_refusals() -> None:
    reasons = [cells[0] for cells in rows("wire.md") if len(cells) == 2 and cells[0].isdecimal()]
    assert reasons == [str(int(reason)) for reason in RefusalReason]


def test_the_layout_of_hello_and_header() -> None:
    places = [cells[0] for cells in rows("wire.md") if len(cells) == 3 and cells[0][0].isdecimal()]
    begins = [int(place.split()[0]) for place in places]
    assert begins == [0, 4, 5, 6, 7, 8, 10, 12, 16, wire.HELLO_SIZE, 0, 1, 2, 4, 8]
    for place, following in zip(places, [*begins[1:], wire.FRAME_SIZE], strict=True):
        if not place.endswith("on"):  # not the program's data, nor what follows it
            assert int(place.split()[-1]) == following - 1, place
    text = (DOCS / "wire.md").read_text()
    assert f"`{refusal.HELLO_MAGIC.decode()}`" in text
    assert f"`{refusal.REFUSAL_MAGIC.decode()}`" in text


def test_the_count_of_the_proof() -> None:
    config = ConnectionConfig(rendezvous_window=9)
    text = (DOCS / "wire.md").read_text()
    assert f"window + {config.control_depth - 9} + rendezvous_window" in text


def test_every_completion_class_is_in_the_table() -> None:
    told = terms("errors.md")
    for status, name in enumerate(error_words.WC_STATUS):
        kind = type(errors.completion_error(status))
        if kind is not errors.CompletionError:
            assert f"`{name}`, a `{kind.__name__}`" in told


def test_every_call_with_a_hint_is_in_the_table() -> None:
    told = [term.rsplit(": ", 1) for term in terms("errors.md") if ": " in term]
    for (verb, code), hint in error_words.ERRNO_HINTS.items():
        if not hint:
            continue
        symbol = f"`{errno.errorcode[code]}`"
        assert any(f"`{verb}`" in calls and symbol == name for calls, name in told), (
            f"docs/errors.md, C calls, has no entry for the hint of {verb} and {symbol}"
        )
    for code in error_words.ERRNO_HINTS_ANY:
        symbol = f"`{errno.errorcode[code]}`"
        assert any(name == symbol for _, name in told), symbol


def test_every_exception_is_named() -> None:
    text = (DOCS / "errors.md").read_text()
    for name in errors.__all__:
        if isinstance(getattr(errors, name), type):
            assert name in text, name


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    for module in (aiordma, aiordma.cm, aiordma.memory, aiordma.metrics, aiordma.verbs):
        listed = re.findall(rf"^\.\. auto\w+:: {module.__name__}\.(\w+)$", text, re.M)
        assert sorted(listed) == sorted(module.__all__)


def test_public_names_of_other_modules_are_in_the_reference() -> None:
    text = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    name = r"^\.\. (?:auto\w+|py:data):: (aiordma(?:_softroce)?\.[\w.]+)$"
    listed = set(re.findall(name, text, re.M))
    names = {
        "aiordma.endpoint.connect.Opening",
        "aiordma.verbs.resource.Resource",
    }
    for module in (
        contrib_aiohttp, contrib_dask, contrib_httpx, faults, policy, softroce, stream_conformance
    ):  # fmt: skip
        names |= {f"{module.__name__}.{name}" for name in module.__all__}
    assert names <= listed
    for name in listed:
        module, _, last = name.rpartition(".")
        assert hasattr(importlib.import_module(module), last), name


def test_calls_that_a_page_leaves_out_are_on_another() -> None:
    pages = [page.read_text() for page in sorted((DOCS / "api").glob("*.md"))]
    left_out = re.findall(
        r"^\.\. autoclass:: aiordma\.(\w+)\n(?:   .*\n)*?   :exclude-members: (.*)$",
        "".join(pages), re.M,
    )  # fmt: skip
    assert left_out
    told = [f"{kind}.{name}" for kind, names in left_out for name in names.split(", ")]
    assert sorted(re.findall(r"^\.\. automethod:: (.*)$", "".join(pages), re.M)) == sorted(told)
    for name in told:
        assert operator.attrgetter(name)(aiordma)


def test_the_names_beside_those_of_pyverbs_exist() -> None:
    ours = " ".join(cells[1] for cells in rows("from-pyverbs.md") if len(cells) == 2)
    names = set(re.findall(r"\b([A-Z]\w*[a-z]\w*)\(", ours)) - {"PyverbsRDMAError"}
    assert len(names) >= 12
    for name in names:
        assert any(hasattr(module, name) for module in (aiordma, aiordma.cm, aiordma.verbs)), name
    for name in re.findall(r"\bqp\.(\w+)\(", ours):
        assert hasattr(aiordma.verbs.QueuePair, name), name
    for name in re.findall(r"\bcm_id\.(\w+)\(", ours):
        assert hasattr(aiordma.cm.ConnectionId, name), name


def test_the_options_of_softroce() -> None:
    text = (DOCS / "softroce.md").read_text()
    for option in re.findall(r"^  (?:-\w, )?(--[\w-]+)", options_parser().format_help(), re.M):
        assert f"`{option}" in text, option
    for word in (*ENGINES, *DEVICES):
        assert f"`{word}`" in text, word
    for name in dir(softroce_errors):
        if name.startswith("STATUS_") and name != "STATUS_SIGNAL_BASE":
            assert f"| {getattr(softroce_errors, name)} |" in text, name


def _section(text: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_options_and_profiles_of_the_fabric() -> None:
    text = (DOCS / "fabric.md").read_text()
    found = re.findall(
        r"^  (?:-\w, )?(--[\w-]+)", aiordma_fabric.options_parser().format_help(), re.M
    )
    for option in found:
        assert f"| `{option}" in text, option
    rows = re.findall(r"^\| `([\w.-]+)` \|", _section(text, "Profiles"), re.M)
    assert rows == aiordma_fabric.profiles()
    told = re.findall(r"^\| `(AIORDMA_FABRIC\w*)` \|", text, re.M)
    source = Path(aiordma_fabric.__file__).read_text()
    assert set(told) == set(re.findall(r"AIORDMA_FABRIC\w*", source))


def test_the_incidents_of_the_fabric() -> None:
    """The names that fabric_set() knows, but for four that only a simulation has."""
    text = _section((DOCS / "fabric.md").read_text(), "Incidents")
    folder = Path(aiordma_fabric.__file__).parent / "aiordma/testing/fabric/lib"
    known = set(re.findall(r'\{"([\w ]+)", &world\.', (folder / "world.c").read_text()))
    assert known - {"completions_stay", "reorder", "late", "meanwhile"} == {
        name for name in known if f"`{name}`" in text
    }
    source = "".join((folder / name).read_text() for name in ("world.c", "incidents.c"))
    functions = re.findall(r"^\| `\w+ (fabric_\w+)\(", text, re.M)
    assert len(functions) == 8
    for name in functions:
        assert re.search(rf"^FABRIC_API .*\b{name}\(", source, re.M), name


def test_the_decisions() -> None:
    """Each has a page with the same headings, of a screen's length, and a row in the index."""
    index = (DOCS / "adr/index.md").read_text()
    listed = re.findall(r"^\| \[\]\((\S+)\.md\) \| ", index, re.M)
    assert index.endswith("\n" + "\n".join(listed) + "\n```\n")
    pages = sorted((DOCS / "adr").glob("*.md"))
    assert sorted(listed) == [page.stem for page in pages if page.stem != "index"]
    for name in listed:
        text = (DOCS / f"adr/{name}.md").read_text()
        headings = re.findall(r"^## (.*)$", text, re.M)
        assert headings == ["Context", "Decision", "Consequences", "Rejected"], name
        assert text.count("\n") <= 60, name


def test_the_connections_that_the_usual_limit_of_pinned_memory_has_room_for() -> None:
    pool = ConnectionConfig(
        shared_slots=9600, slot_size=4096, recv_depth=32, send_depth=16, rendezvous_window=2
    )
    own, pooled = ((8 << 20) // plan_of(config).pinned for config in (ConnectionConfig(), pool))
    told = f"room for {own} idle connections with default settings, and for {pooled} out of a pool"
    assert told in " ".join((DOCS / "growth.md").read_text().split())


def test_how_long_a_program_may_block_its_loop() -> None:
    config = ConnectionConfig()
    silent_s = 2 * config.keepalive_s
    text = " ".join((DOCS / "tutorial.md").read_text().split())
    assert f"twice `keepalive_s` already, {silent_s:.0f} seconds by default" in text
    assert f"for more than the {config.idle_timeout_s - silent_s:.0f} seconds that are left" in text
