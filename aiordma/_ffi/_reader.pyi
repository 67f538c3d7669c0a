"""The compiled class of reader.c."""

from collections.abc import Callable
from typing import final

@final
class Reader:
    """Drains one completion channel."""

    def __init__(
        self,
        drain: int,
        completions: int,
        room: int,
        run: int,
        news: dict[int, Callable[[int], None]],
    ) -> None: ...
    def drain(self) -> int | None: ...
