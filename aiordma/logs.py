"""Loggers of the library: `aiordma`, and a child of it for each of its parts.

Theory of operation
    A log is for its reader, and never part of a connection: a handler or a filter of the program
    that raises does no harm to the caller (`Log`).

    Without any handler Python prints warnings to standard error.  The library's own handler keeps
    these back, as is usual for libraries.  It still prints errors, because nobody would find an
    exception of a program's handler that no log shows, and what a person at the terminal has to
    know (`FOR_ALL`).
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Mapping
from typing import Any

__all__ = ["FOR_ALL", "Log", "log_of"]

_NAME = "aiordma"
#: The `extra` of a warning that is printed while the program has no handler for it.
FOR_ALL = {"for_all": True}


class _LastResort(logging.Handler):
    """Prints errors, and lines `FOR_ALL`, while the program has no handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        printed = record.levelno >= logging.ERROR or hasattr(record, "for_all")
        if printed and not self._has_others(record.name):
            fallback = logging.lastResort
            if fallback is not None:
                fallback.handle(record)

    def _has_others(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


logging.getLogger(_NAME).addHandler(_LastResort())


class Log:
    """A logger whose calls do not raise, whatever handlers and filters do.

    Args:
        logger: The logger.
    """

    __slots__ = ("logger",)

    def __init__(self, logger: logging.Logger) -> None:
        self.logger: logging.Logger = logger

    def tells(self, level: int) -> bool:
        """Whether lines of that level are wanted."""
        return self.logger.isEnabledFor(level)

    def tell(
        self,
        level: int,
        text: str,
        *args: object,
        exc_info: Any = None,
        extra: Mapping[str, object] | None = None,
        above: int = 0,
    ) -> None:
        """Log a line, attributed to the function that is `above` levels above the caller."""
        if not self.logger.isEnabledFor(level):
            return
        try:
            self.logger.log(
                level, text, *args, exc_info=exc_info, extra=extra, stacklevel=2 + above
            )
        except Exception:
            # As logging does for handlers whose own errors it knows.
            if logging.raiseExceptions and sys.stderr is not None:
                traceback.print_exc(file=sys.stderr)

    def debug(self, text: str, *args: object, exc_info: Any = None) -> None:
        """Log a step of a connection's life, or a failure that does no harm."""
        self.tell(logging.DEBUG, text, *args, exc_info=exc_info, above=1)

    def info(self, text: str, *args: object) -> None:
        """Log an event that the operator of a server asks for."""
        self.tell(logging.INFO, text, *args, above=1)

    def warning(self, text: str, *args: object) -> None:
        """Log trouble that the program cannot see by itself."""
        self.tell(logging.WARNING, text, *args, above=1)

    def error(self, text: str, *args: object, exc_info: Any = None) -> None:
        """Log a failure inside the library, or inside a callback of the program."""
        self.tell(logging.ERROR, text, *args, exc_info=exc_info, above=1)

    def exception(self, text: str, *args: object) -> None:
        """Log the exception that is being handled, as an error."""
        self.tell(logging.ERROR, text, *args, exc_info=True, above=1)


def log_of(part: str = "") -> Log:
    """Return the log of a part of the library: logger `aiordma`, or `aiordma.<part>`."""
    return Log(logging.getLogger(f"{_NAME}.{part}" if part else _NAME))
