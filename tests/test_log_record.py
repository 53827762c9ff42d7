"""What others say stands in the log in one line, of bounded length."""

import logging
from collections.abc import Iterator

import pytest

from outrider.errors import MAX_FIELD, MAX_MESSAGE, InvalidRequest, printable
from outrider.log_record import MAX_LINE, keep_to_lines

FORGED = "no such session\n2026-01-01 00:00:00 ERROR router: all is lost\x1b[2J\r\u2028"


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """As a handler of another's writes them."""
    written, before = list[str](), logging.getLogRecordFactory()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler, log = Handler(), logging.getLogger("outrider.lines")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(handler)
    keep_to_lines()
    yield written
    logging.setLogRecordFactory(before)
    log.removeHandler(handler)


def test_a_peers_reason_forges_no_line_and_sends_nothing_to_a_terminal(lines: list[str]) -> None:
    log = logging.getLogger("outrider.lines")
    log.warning("session %s: drafter %s ended it: %s", "00", "d", FORGED)
    log.warning("as it is: %s, ünïcode", "x")
    assert lines[0].isprintable() and r"session\n2026" in lines[0] and r"lost\x1b[2J\r\u2028" in lines[0]
    assert lines[1] == "WARNING as it is: x, ünïcode"
    log.warning("%s", "y" * 10**6)
    assert len(lines[2]) < MAX_LINE + 20


def test_a_trace_has_a_peers_words_in_one_line(lines: list[str]) -> None:
    def fails() -> None:
        try:
            raise KeyError(FORGED) from None
        except KeyError as error:
            raise ValueError(FORGED + "y" * 10**6 + '\n  File "forged"') from error

    try:
        fails()
    except ValueError:
        logging.getLogger("outrider.lines").exception("a step failed: %s", "why")
    told = lines[0].split("\n")
    assert told[0] == "ERROR a step failed: why"
    assert all(line.isprintable() and len(line) < MAX_LINE + 20 for line in told)
    assert not any(line.startswith(("2026", '  File "forged')) for line in told)
    assert sum(line.startswith(("KeyError: ", "ValueError: no such session")) for line in told) == 2
    assert any(line.endswith("in fails") for line in told), "where it was raised is told"


def test_an_error_echoes_no_more_than_a_line_of_what_was_sent() -> None:
    error = InvalidRequest(f"unknown field {'1' * 4300}\n", field="f" * 10**6)
    assert error.message.isprintable() and len(error.message) <= MAX_MESSAGE + 10
    assert error.field is not None and len(error.field) <= MAX_FIELD + 10


def test_what_is_short_and_printable_is_told_as_it_is() -> None:
    assert printable("it is 5 µs", 10) == "it is 5 µs"
    assert printable("\ud800", 10) == r"\ud800"
