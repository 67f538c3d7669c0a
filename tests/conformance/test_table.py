"""Every test that CPython has of asyncio either runs over RDMA or has its reason in the table."""

from __future__ import annotations

import unittest

import pytest

from tests.conformance.harvest import cases, modules, name_of
from tests.conformance.table import RUN, why_left_out


def names(module: str) -> list[str]:
    try:
        return [name_of(case) for case in cases(module)]
    except unittest.SkipTest:  # the whole module, on this platform
        return [f"{module}.all"]


@pytest.mark.parametrize("module", modules())
@pytest.mark.filterwarnings("ignore")
def test_each_test_runs_or_has_a_reason(module: str) -> None:
    for name in names(module):
        why_left_out(name)  # LookupError if it has none


@pytest.mark.parametrize("run", RUN)
def test_each_class_has_tests_that_run(run: str) -> None:
    assert [name for name in names(run.partition(".")[0]) if why_left_out(name) is None]


def test_a_test_without_a_reason_is_noticed() -> None:
    with pytest.raises(LookupError):
        why_left_out("test_new.NewTests.test_transport")
    assert why_left_out("test_streams.StreamTests.test_brand_new") is None
