"""The library's loggers: lines never raise, and nothing is printed by default but errors."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aiordma.logs import Log, log_of


class Failing(logging.Handler):
    def handle(self, record: logging.LogRecord) -> bool:
        raise ZeroDivisionError(record.getMessage())


class Refusing(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        raise ZeroDivisionError


@pytest.fixture
def log() -> Iterator[Log]:
    made = log_of("of_a_test")
    yield made
    for handler in list(made.logger.handlers):
        made.logger.removeHandler(handler)
    for each in list(made.logger.filters):
        made.logger.removeFilter(each)
    made.logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("broken", ["handler", "filter", "format", "repr"])
def test_a_line_never_raises(log: Log, broken: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Unprintable:
        def __str__(self) -> str:
            raise ZeroDivisionError

    argument: object = "fact"
    log.logger.setLevel(logging.DEBUG)
    if broken == "handler":
        log.logger.addHandler(Failing())
    elif broken == "filter":
        log.logger.addFilter(Refusing())
    elif broken == "format":
        argument = None
    else:
        log.logger.addHandler(Failing())
        argument = Unprintable()
    text = "%d" if broken == "format" else "%s"
    if broken == "format":
        log.logger.addHandler(Failing())  # it formats outside of `emit`
    for call in (log.debug, log.info, log.warning, log.error):
        call(text, argument)
    try:
        raise KeyError
    except KeyError:
        log.exception(text, argument)
    assert "Traceback" in capsys.readouterr().err


def test_an_interrupt_passes(log: Log) -> None:
    class Interrupted(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise KeyboardInterrupt

    log.logger.addHandler(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        log.error("x")


def test_a_line_names_the_place_that_wrote_it(log: Log, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aiordma.of_a_test")
    log.debug("one")
    log.tell(logging.INFO, "two", extra={"connection": 7})
    log.error("three", exc_info=KeyError("k"))
    assert [each.filename for each in caplog.records] == ["test_logs.py"] * 3
    assert {each.funcName for each in caplog.records} == {
        "test_a_line_names_the_place_that_wrote_it"
    }
    assert vars(caplog.records[1])["connection"] == 7
    assert caplog.records[2].exc_info is not None


def test_nothing_is_formatted_while_the_level_is_off(log: Log) -> None:
    class Fact:
        def __str__(self) -> str:
            raise AssertionError

    log.logger.setLevel(logging.WARNING)
    log.logger.addHandler(Failing())
    log.debug("%s", Fact())
    assert not log.tells(logging.INFO)


_PROGRAM = """
import logging, sys
from aiordma.logs import FOR_ALL, log_of
if sys.argv[1] == "own":
    logging.basicConfig(format="own %(message)s")
if sys.argv[1] == "child":
    logging.getLogger("aiordma.part").addHandler(logging.NullHandler())
log = log_of("part")
log.debug("debug"); log.info("info"); log.warning("warning"); log.error("error")
log.tell(logging.WARNING, "for all", extra=FOR_ALL)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        ("none", "error\nfor all\n"),
        ("own", "own warning\nown error\nown for all\n"),
        ("child", ""),
    ],
)
def test_what_is_printed(kind: str, printed: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", _PROGRAM, kind], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stderr, run.stdout) == (0, printed, "")
