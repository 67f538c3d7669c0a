"""Which objects of the public classes can be copied and pickled: values, and no others."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from collections.abc import Callable
from typing import Any, is_typeddict

import pytest

import aiordma
import aiordma.cm
import aiordma.metrics
import aiordma.verbs
from aiordma._core import Message
from aiordma.endpoint.config import ConnectionConfig
from aiordma.loop.uncopied import Uncopied
from aiordma.verbs import Access

from .endpoint.fabric import Wire

COPIES: list[Callable[[Any], object]] = [
    copy.copy,
    copy.deepcopy,
    lambda each: copy.copy([copy.deepcopy({"in": each})]),
    *(
        lambda each, protocol=protocol: pickle.dumps(each, protocol)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
]
#: Values that are none of the usual kinds: C fields, and an interface for programs.
VALUES = {aiordma.cm.ConnectionParameter, aiordma.metrics.Tracer}


def is_value(kind: type) -> bool:
    return (
        kind in VALUES
        or issubclass(kind, (enum.Enum, BaseException, tuple))
        or is_typeddict(kind)
        or dataclasses.is_dataclass(kind)
    )


def public_classes() -> list[type]:
    modules: list[Any] = [aiordma, aiordma.cm, aiordma.metrics, aiordma.verbs]
    found = {getattr(module, name) for module in modules for name in module.__all__}
    return sorted(
        (each for each in found if isinstance(each, type)), key=lambda each: each.__name__
    )


@pytest.mark.parametrize("kind", public_classes(), ids=lambda kind: str(kind.__name__))
def test_a_public_class_is_one_of_values_or_says_that_it_is_not(kind: type) -> None:
    if is_value(kind):
        assert not issubclass(kind, Uncopied)
    elif kind is not Message:  # a type of C, which Python's own rule refuses
        found: Any = kind.__reduce_ex__
        assert found is Uncopied.__reduce_ex__
        assert not hasattr(kind, "__copy__")
        assert not hasattr(kind, "__deepcopy__")


@pytest.mark.parametrize("copied", COPIES)
async def test_a_connection_is_not_copied(copied: Callable[[Any], object]) -> None:
    """The second would end the queue pair under the first when it is dropped."""
    config = ConnectionConfig()
    wire = Wire(config, config)
    await wire.open()
    with pytest.raises(TypeError, match="copy or pickle a Connection"):
        copied(wire.ends[0])
    await wire.close()


@pytest.mark.parametrize("copied", COPIES)
def test_a_message_is_not_copied(copied: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="Message"):
        copied(Message(memoryview(b"bytes")))


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize(
    "value",
    [
        aiordma.ConnectionConfig(recv_depth=8),
        aiordma.StreamConfig(),
        aiordma.DatagramConfig(),
        aiordma.ListenerLimits(),
        aiordma.RemoteRegion(4096, 8, 1, Access.REMOTE_READ),
        aiordma.verbs.BringUpConfig(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are(value: Any, copied: Callable[[Any], Any]) -> None:
    assert copied(value) == value
