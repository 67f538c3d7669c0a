"""Common: the objects that the connections of a loop and device have in common.

One object of the registry for all of them: a connection is a user of it, instead of a user of each.
"""

from __future__ import annotations

from collections.abc import Callable

from aiordma.endpoint.config import Plan
from aiordma.link.shared_queues import SharedQueues
from aiordma.loop import registry
from aiordma.memory.budget import SlotBudget, step_budget
from aiordma.verbs.comp_channel import shared_completions
from aiordma.verbs.context import Context

__all__ = ["Common"]

# Bytes of a short message that the adapter need not fetch; each send request is longer by them.
_INLINE = 128


class Common:
    """The common objects of the connections with one plan; closed with the last connection.

    Args:
        context: The device.
        plan: Values of the configuration.

    Raises:
        OSError: The limit of open files is reached.

    Attributes:
        attributes: Of the queue pairs, with room for inline messages where the adapter has it.
        without_inline: The same without that room.
        channel: Completion channel.
        quiet: Whether completion queues are armed for solicited completions only.
        expected: Completions that a connection expects with its first slots; None for all.
        queues: Completion queues; None if each connection has a queue of its own.
        budget: Slots, or their bytes, that come with traffic; None if no slots come.
    """

    __slots__ = (
        "_plan", "_releases", "attributes", "budget", "channel", "expected", "queues", "quiet",
        "without_inline",
    )  # fmt: skip

    def __init__(self, context: Context, plan: Plan) -> None:
        config = plan.config
        self._plan = plan  # keeps its identity, which is a part of the key
        # Messages of a raw peer, and those on iWARP, raise no solicited event.
        self.quiet = not (config.raw or context.is_iwarp)
        # Software iWARP cannot grow a queue: there is room for all completions from the beginning.
        self.expected = None if context.is_iwarp else plan.expected
        self.without_inline = plan.attributes(0)
        self.attributes = plan.attributes(0 if context.is_iwarp else _INLINE)
        self.queues: SharedQueues | None = None
        self.budget: SlotBudget | None = None
        self.channel, release = shared_completions(context)
        self._releases: list[Callable[[], None]] = [release]
        if config.shared_queues or config.shared_slots is not None:
            self.queues, release = SharedQueues.of(self.channel, quiet=self.quiet)
            self._releases.append(release)
        total = config.shared_slots
        if total is not None:
            key = ("slots", id(context), total, config.slot_size)
            self.budget, release = registry.acquire(key, lambda: SlotBudget(total))
            self._releases.append(release)
        elif plan.grows:
            self.budget, release = step_budget()
            self._releases.append(release)

    @classmethod
    def of(cls, context: Context, plan: Plan) -> tuple[Common, Callable[[], None]]:
        """Return the common objects of the running loop, and their release.

        Args:
            context: The device.
            plan: Values of the configuration.

        Raises:
            OSError: The limit of open files is reached.
        """
        return registry.acquire(("common", id(context), id(plan)), lambda: cls(context, plan))

    def close(self) -> None:
        """Release all: the last connection has gone."""
        while self._releases:
            self._releases.pop()()
