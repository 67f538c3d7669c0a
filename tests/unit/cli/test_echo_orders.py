"""The orders to `aiordma echo`: each is understood, and no other message is taken for one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiordma.cli.echo_orders import MAGIC, MOST, order, parse_order, pattern


@pytest.mark.parametrize(
    ("word", "size"),
    [("facts", None), ("take", None), ("expose", None), ("give", 0), ("give", MOST), ("look", 7)],
)
def test_orders(word: str, size: int | None) -> None:
    assert parse_order(order(word, size)) == (word, size or 0)
    assert parse_order(memoryview(bytearray(order(word, size)))) == (word, size or 0)


@pytest.mark.parametrize(
    "words",
    [
        "", "{", "[]", "null", '"facts"', "{}", '{"do": 1}', '{"do": "dance"}', '{"do": ["take"]}',
        '{"do": "give"}', '{"do": "take", "size": 1}', '{"do": "give", "size": -1}',
        '{"do": "give", "size": true}', '{"do": "give", "size": 1.0}',
        json.dumps({"do": "give", "size": MOST + 1}), "[" * 100, '{"do": "facts"}' + " " * 200,
    ],
)  # fmt: skip
def test_no_orders(words: str) -> None:
    assert parse_order(MAGIC + words.encode()) is None


@given(st.binary(max_size=300), st.booleans())
def test_any_bytes(data: bytes, begins: bool) -> None:
    found = parse_order(MAGIC + data if begins else data)
    assert found is None or begins


def test_the_pattern_is_the_same_on_each_machine() -> None:
    assert len(pattern()) == MOST
    assert pattern()[:8].hex() == "1caa271eb53c90fa"
