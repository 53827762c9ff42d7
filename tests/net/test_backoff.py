"""How long one waits before something is tried again."""

from outrider.net.backoff import Backoff


def test_pauses_double_up_to_the_most_and_begin_anew_after_a_good_stretch_only() -> None:
    backoff = Backoff(first=1.0, most=5.0, good=10.0)
    assert [backoff.after(0.0) for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert backoff.after(9.9) == 5.0
    assert [backoff.after(lasted) for lasted in (10.0, 0.0, 9.0)] == [1.0, 2.0, 4.0]
