"""Private parts of aiordma/_core/ that tests ask for."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from aiordma import Message
from aiordma._core import Loan, MessageState
from aiordma.verbs.resource import Resource

if TYPE_CHECKING:
    import pytest


def is_released(message: Message) -> bool:
    """Whether its memory was given back."""
    return message._released


def exports_of(message: Message) -> int:
    """How many views of its bytes there are."""
    return message._exports


def detach(message: Message) -> None:
    """Give its slot back, and copy the bytes."""
    message._detach()


def lend(message: Message, view: memoryview) -> Loan:
    """Bytes of the message that keep it."""
    return message._lend(view)


# States


def have_timer(state: MessageState) -> None:
    """Have sends wait in line without help of Python, as while its timer looks at them."""
    state.wait_room().close()


# Resources


def retain(owner: Resource) -> None:
    """Count a user."""
    owner._retain()


def let_go(owner: Resource) -> None:
    """Count a user out."""
    owner._let_go()


def children_of(owner: Resource) -> int:
    """How many there are that count."""
    return owner._children


def made_of(owner: Resource) -> Sized:
    """Those that it closes."""
    return owner._made


def fail_after_letting_go(
    patch: pytest.MonkeyPatch, kind: type[Resource], failures: list[Exception]
) -> None:
    """When resources of a kind count a user out, raise these, each once, behind it."""
    as_ever = Resource._let_go

    def then_fail(resource: Resource, *args: Any) -> None:
        as_ever(resource, *args)
        if isinstance(resource, kind) and failures:
            raise failures.pop()

    patch.setattr(kind, "_let_go", then_fail, raising=False)
