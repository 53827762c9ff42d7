"""What routers have said to a worker, as a Redis hands it back."""

from outrider.store.redis import _words


def test_a_damaged_word_is_passed_over() -> None:
    sound = [b"word:r", b'[null, "far"]']
    damaged = [b"word:a", b"{", b"word:b", b"1", b"word:c", b"[1]", b"word:\xff", b"[null, null]"]
    assert _words([*damaged, *sound]) == {"r": (None, "far")}
