"""The statements of jVerbs, their tests and their pages in the documentation belong together."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tests.seeds.rows import IWARP_DIFFERS, NOT_TESTED, ROWS, SECTIONS

ROOT = Path(__file__).parents[3]
NAMES = (ROOT / "docs/jverbs.md").read_text()
TABLE = (ROOT / "docs/jverbs-rows.md").read_text()

# Every name of jVerbs that its documents use.
JVERBS = """
    ConnectionId createConnectionId create bindAddress listen resolveAddress resolveRoute
    createQueuePair getQueuePair connect accept disconnect destroyQueuePair destroy
    getSourceAddress getSourcePort getDestinationAddress getDestinationPort getVerbsContext
    getEventChannel getPortSpace PortSpace RDMA_PS_TCP
    EventChannel createEventChannel getConnectionEvent ackConnectionEvent destroyEventChannel getFD
    ConnectionEvent getListenId getConnectionId
    RDMA_CM_EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ROUTE_RESOLVED RDMA_CM_EVENT_CONNECT_REQUEST
    RDMA_CM_EVENT_ESTABLISHED RDMA_CM_EVENT_DISCONNECTED
    ConnectionParameter getInitiatorDepth setInitiatorDepth getResponderResources
    setResponderResources getRetryCount setRetryCount getRnrRetryCount setRnrRetryCount
    VerbsContext ProtectionDomain QueuePair QueuePairInitAttribute CompletionChannel
    createCompletionQueue requestNotifyCQ getCQEvent ackCQEvent pollCQ pollCQEvent
    postSend postReceive getQueuePairLimit IBV_SEND_SOLICITED SVM free isSuccess ByteBuffer
    WorkCompletion getStatus getOpcode getByteLength getQueuePairNum
    DeviceAttribute maxQpRdAtom maxQpInitRdAtom
    IllegalArgumentException IOException
"""


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    """The program that writes the table."""
    spec = importlib.util.spec_from_file_location("jverbs_table", ROOT / "tools/jverbs_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_rows_are_numbered_without_a_gap() -> None:
    assert list(ROWS) == list(range(1, 135))
    assert set(SECTIONS) <= set(ROWS)


def test_every_row_has_a_test_or_a_reason(generator: ModuleType) -> None:
    tested = {test.row for test in generator.find_tests()}
    assert tested | set(NOT_TESTED) == set(ROWS)
    assert not tested & set(NOT_TESTED)


def test_the_exceptions_of_iwarp_are_those_of_the_tests(generator: ModuleType) -> None:
    asking = {test.row for test in generator.find_tests() if "is_siw" in test.arguments}
    assert asking == set(IWARP_DIFFERS)


def test_the_table_has_the_rows_and_the_tests_that_exist(generator: ModuleType) -> None:
    lines = dict(re.findall(r"^- \*\*(\d+)\*\* (.*)$", TABLE, re.M))
    assert list(map(int, lines)) == list(ROWS)
    for number, statement in ROWS.items():
        line = lines[str(number)]
        assert line.startswith(statement)
        assert (
            f"Software iWARP: {IWARP_DIFFERS.get(number)}." in line or number not in IWARP_DIFFERS
        )
        assert f"No test: {NOT_TESTED.get(number)}." in line or number not in NOT_TESTED
    tests = re.findall(r"^  - `(.*?)`: (.*)$", TABLE, re.M)
    names = [f"{test.file}::{test.name}" for test in generator.find_tests()]
    assert [name for name, _ in tests] == names
    assert [told for _, told in tests if re.search("not run|failed|skipped", told)] == []


def test_results_that_are_the_same_are_told_once(generator: ModuleType) -> None:
    assert generator.outcome({"a": "passed (2)", "b": "passed (2)"}) == "passed (2) on both"
    assert generator.outcome({"a": "passed", "b": "not run"}) == "a passed, b not run"


@pytest.mark.parametrize("name", ["native_server.py", "native_client.py"])
def test_the_examples_are_shown_as_they_are(name: str) -> None:
    shown = re.search(rf"^`examples/{name}`:\n\n```python\n(.*?)^```$", NAMES, re.M | re.S)
    assert shown, name
    assert shown[1] == (ROOT / "examples" / name).read_text()


def test_every_name_of_jverbs_is_translated() -> None:
    prose = re.sub(r"^```.*?^```$", "", NAMES, flags=re.M | re.S)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    assert not set(JVERBS.split()) - named - {"SVM"}
    assert "(SVM)" in prose


def test_every_name_of_aiordma_exists() -> None:
    found = set(re.findall(r"`(cm|verbs)\.(\w+)(?:\.(\w+))?", NAMES))
    assert len(found) > 60
    for module, name, member in sorted(found):
        thing = getattr(importlib.import_module(f"aiordma.{module}"), name)
        assert not member or hasattr(thing, member), f"{module}.{name}.{member}"
