"""Sizes of memory as people write them, and as they are told."""

from __future__ import annotations

import pytest

from outrider.errors import StartupError
from outrider.options.memory import Share, memory_text, parse_memory, parse_memory_or_share


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MiB", 2**29), ("2G", 2**31), ("1.5 gb", 3 * 2**29), ("4096", 4096), ("1TiB", 2**40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0B"), (1, "1B"), (1023, "1023B"), (3 * 2**29 + 5, "1.5GiB"), (2**30 - 1, "1023.9MiB")],
)
def test_sizes_are_told_as_they_are_given(count: int, text: str) -> None:
    assert memory_text(count) == text
    assert parse_memory(text) <= count


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1PiB", "1e9", "1 2", "9" * 5000, "1." + "9" * 5000])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(StartupError, match="--kv-memory must be a size such as 512MiB or 2GiB"):
        parse_memory(text)


@pytest.mark.parametrize(
    ("text", "found"), [("60%", Share(60)), (" 12.5 % ", Share(12.5)), ("100%", Share(100)), ("2GiB", 2**31)]
)
def test_shares(text: str, found: int | Share) -> None:
    assert parse_memory_or_share(text) == found
    assert parse_memory_or_share(str(found)) == found


@pytest.mark.parametrize("text", ["0%", "100.1%", "-1%", "%", "1e1%", "60 percent"])
def test_what_is_no_share(text: str) -> None:
    with pytest.raises(StartupError, match=r"--kv-memory must be a (size .* or a share such|share above)"):
        parse_memory_or_share(text)


def test_the_bytes_of_a_share() -> None:
    assert Share(60).of(1000) == 600
    assert Share(60).of(-5) == 0, "where others have taken all"
