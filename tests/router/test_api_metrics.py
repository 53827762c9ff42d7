from __future__ import annotations

from collections.abc import Iterator, Mapping

from outrider.wire.hello import Role
from outrider.wire.load import VerifierLoad
from router.metrics import MOST_LEFT, Metrics
from router.requests import TokensCommitted


def test_one_session_is_counted_and_timed() -> None:
    ticks: Iterator[float] = iter([10.0, 10.5, 12.5, 13.0])
    metrics = Metrics(clock=lambda: next(ticks))
    session = metrics.session("demo", prompt_tokens=7)
    session.committed(TokensCommitted((1,), 0, 0))
    session.committed(TokensCommitted((2, 3, 4, 5), accepted=3, verified=5, beside=2))
    session.ended("stop")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {"model_name": "demo", **labels})

    assert value("vllm:prompt_tokens_total") == 7
    assert value("vllm:generation_tokens_total") == 5
    assert value("vllm:time_to_first_token_seconds_sum") == 0.5
    # Four tokens came 2 s after the one before: half a second each.
    assert value("vllm:inter_token_latency_seconds_count") == 4
    assert value("vllm:inter_token_latency_seconds_sum") == 2.0
    assert value("vllm:e2e_request_latency_seconds_sum") == 3.0
    assert value("vllm:request_success_total", finished_reason="stop") == 1
    assert value("vllm:spec_decode_num_drafts_total") == 1
    assert value("vllm:spec_decode_num_draft_tokens_total") == 5 + 2
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 3
    at = [value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(4)]
    assert at == [1, 1, 1, None]


def test_a_verifiers_load_shows_until_it_leaves() -> None:
    metrics = Metrics()
    labels = {"model_name": "demo", "engine": "v1"}

    def report(preemptions: int, step_seconds: float = 0.0) -> None:
        load = VerifierLoad(3, 2, 0.5, step_seconds, 9, preemptions=preemptions, draft_starvation=0.25)
        metrics.observe_load("v1", "demo", load)

    def value(name: str, labels: Mapping[str, str] = labels) -> float | None:
        return metrics.registry.get_sample_value(name, dict(labels))

    def of_model(name: str) -> float | None:
        return value(name, {"model_name": "demo"})

    report(preemptions=4, step_seconds=0.25)
    report(preemptions=6)
    assert (value("vllm:num_requests_running"), value("vllm:num_requests_waiting")) == (3, 2)
    assert (value("vllm:kv_cache_usage_perc"), value("outrider_draft_starvation")) == (0.5, 0.25)
    assert (of_model("outrider_step_seconds_count"), of_model("outrider_step_seconds_sum")) == (1, 0.25)
    assert of_model("outrider_step_tokens_sum") == 9
    assert value("outrider_preemptions_total") == 6
    report(preemptions=1)  # its own count began again: it was restarted
    assert value("outrider_preemptions_total") == 7
    metrics.worker_left((Role.VERIFIER, "v1"), "demo")
    metrics.worker_left((Role.VERIFIER, "never reported"), "demo")
    assert value("vllm:num_requests_running") is None
    assert value("outrider_preemptions_total") == 7


def test_of_workers_that_left_the_last_ones_are_remembered() -> None:
    metrics = Metrics()

    def comes(worker_id: str) -> None:
        metrics.worker_joined((Role.VERIFIER, worker_id), "demo")
        metrics.observe_load(worker_id, "demo", VerifierLoad(running=1, preemptions=2))
        metrics.observe_dropped(worker_id, "demo", {"stale": 3})

    def told(worker_id: str) -> int:
        return metrics.exposition().decode().count(f'engine="{worker_id}"')

    for worker_id in ("stays", "first", "comes back"):
        comes(worker_id)
    whole = told("stays")
    metrics.worker_left((Role.VERIFIER, "stays"), "what it served before")
    metrics.worker_left((Role.VERIFIER, "first"), "demo")
    metrics.worker_left((Role.VERIFIER, "comes back"), "demo")
    comes("comes back")
    for number in range(MOST_LEFT - 1):
        comes(f"w{number}")
        metrics.worker_left(
            (Role.VERIFIER, f"w{number}"), "demo"
        )  # with the last of them, "stays" as it was before is forgotten
    gauges = 6
    assert told("first") == whole - gauges
    comes("last")
    metrics.worker_left((Role.VERIFIER, "last"), "demo")
    assert (told("first"), told("w0"), told("last")) == (0, whole - gauges, whole - gauges)
    assert told("comes back") == told("stays") == whole > gauges
    metrics.observe_dropped("stays", "demo", {"stale": 4})
    labels = {"model_name": "demo", "engine": "stays", "reason": "stale"}
    assert metrics.registry.get_sample_value("outrider_drafts_dropped_total", labels) == 4
    assert ((Role.VERIFIER, "first"), "demo") not in metrics._seen
    comes("first")
    assert told("first") == whole


def test_a_drafter_with_the_name_of_a_verifier_takes_none_of_its_figures_along() -> None:
    metrics = Metrics()
    labels = {"model_name": "demo", "engine": "v"}
    load = VerifierLoad(running=3, step_seconds=0.1, step_tokens=1, preemptions=2)
    metrics.worker_joined((Role.VERIFIER, "v"), "demo")
    metrics.observe_load("v", "demo", load)
    for worker_id in ("v", *(f"d{number}" for number in range(MOST_LEFT))):
        metrics.worker_joined((Role.DRAFTER, worker_id), "demo")
        metrics.observe_rejections(worker_id, "demo", 5, 4)
        metrics.worker_left((Role.DRAFTER, worker_id), "demo")
    assert metrics.registry.get_sample_value("vllm:num_requests_running", labels) == 3
    assert metrics.registry.get_sample_value("outrider_preemptions_total", labels) == 2


def test_drafters_that_come_and_go_under_ever_new_names_leave_no_series_behind() -> None:
    """A name is what a drafter says. Two new ones a second had been 200 MB and 22 MB of text in a day."""
    metrics = Metrics()

    def comes_and_goes(number: int, model: str) -> None:
        key = Role.DRAFTER, f"d{number}"
        metrics.worker_joined(key, model)
        metrics.observe_rejections(f"d{number}", model, 5, 4)
        metrics.worker_left(key, model)

    metrics.worker_joined((Role.DRAFTER, "stays"), "draft")
    metrics.observe_rejections("stays", "draft", 2, 1)
    comes_and_goes(-1, "draft")
    for number in range(3 * MOST_LEFT):
        comes_and_goes(number, f"of drafter {number}")
    text = metrics.exposition().decode()
    assert text.count("outrider_draft_rejections_total{") == MOST_LEFT + 1
    assert text.count("outrider_draft_rejections_covered_total{") == MOST_LEFT + 1
    assert 'outrider_draft_rejections_total{model_name="draft"} 7.0' in text, "one of that name is here"


def test_what_the_session_layer_reports_is_exposed() -> None:
    metrics = Metrics()
    assert 'outrider_workers{role="verifier"} 0.0' in metrics.exposition().decode(), "none has come yet"
    metrics.workers("drafter", 2)
    metrics.draft_window("demo", 5)
    metrics.request_refused("rate_limit_error")
    text = metrics.exposition().decode()
    assert 'outrider_workers{role="drafter"} 2.0' in text
    assert 'outrider_draft_window_sum{model_name="demo"} 5.0' in text
    assert 'outrider_requests_refused_total{reason="rate_limit_error"} 1.0' in text


def test_a_drafters_rejections_are_counted_on_where_it_is_started_anew() -> None:
    metrics = Metrics()
    labels = {"model_name": "draft"}
    for rejections, covered in ((5, 3), (5, 3), (9, 4), (2, 1)):
        metrics.observe_rejections("d1", "draft", rejections, covered)
    metrics.observe_rejections("d2", "draft", 1, 0)
    found = [
        metrics.registry.get_sample_value(f"outrider_draft_rejections{which}_total", labels)
        for which in ("", "_covered")
    ]
    assert found == [12, 5]
