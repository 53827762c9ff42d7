"""What a router measures for Prometheus: vLLM's names where vLLM has the metric, `outrider_` for the rest."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from outrider.wire.drafter_sessions import DraftEndCause
from outrider.wire.hello import Role, WorkerKey
from outrider.wire.load import VerifierLoad
from router.guess_metrics import GuessMetrics
from router.requests import TokensCommitted

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_SLOW = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_DROPPED = "dropped: "  # before a reason
_CREATED = "_created"  # after a counter's name: when it was made
LINES_AT_ONCE = 128  # that are written before others have their turn
_WINDOWS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)

MODEL = ["model_name"]
WORKER = ["model_name", "engine"]  # engine: vLLM's label; here the worker's id
MOST_REASONS = 64  # of one verifier: each is a series of its own
MOST_LEFT = 256  # workers that have left whose counts are still told: new ones come as long as a router runs


def _gauged(load: VerifierLoad) -> tuple[float, ...]:
    told = load.running, load.waiting, load.kv_usage
    return *told, load.drafts_rest, load.draft_gain, load.draft_starvation


@dataclass(frozen=True, slots=True)
class _Collected(Collector):
    """A metric by itself, as prometheus_client writes them."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.registry = CollectorRegistry()
        self.clock = clock
        # by worker, as below, and what it counts: its own running count
        self._seen: defaultdict[tuple[WorkerKey, str], dict[str, int]] = defaultdict(dict)
        self._left: dict[tuple[WorkerKey, str], None] = {}  # workers by key and model, the last at the end
        # By model and verifier: to look a metric up by its labels takes longer than to set it.
        self._gauges: dict[tuple[str, str], list[Gauge]] = {}

        def counter(name: str, help: str, labels: list[str]) -> Counter:
            return Counter(name, help, labels, registry=self.registry)

        def gauge(name: str, help: str, labels: list[str]) -> Gauge:
            return Gauge(name, help, labels, registry=self.registry)

        def histogram(name: str, help: str, labels: list[str], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, help, labels, registry=self.registry, buckets=buckets)

        self.of_load = [  # in the order of _gauged
            gauge("vllm:num_requests_running", "Sessions in a verifier's batch.", WORKER),
            gauge("vllm:num_requests_waiting", "Sessions that wait for KV blocks.", WORKER),
            gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held by sessions, 0 to 1.", WORKER),
            gauge(
                "outrider_drafts_rest",
                "1 while a verifier takes no drafts: it compares, or is faster without.",
                WORKER,
            ),
            gauge(
                "outrider_draft_gain",
                "Tokens a second with drafts over without, as a verifier compared them last; 0 = not yet.",
                WORKER,
            ),
            gauge(
                "outrider_draft_starvation",
                "Share of sessions that want drafts and had none in a step, 0 to 1, moving average.",
                WORKER,
            ),
        ]
        self.prompt_tokens = counter(
            "vllm:prompt_tokens", "Prompt tokens of sessions that gave output.", MODEL
        )
        self.generation_tokens = counter("vllm:generation_tokens", "Output tokens.", MODEL)
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From a valid request to its first token.", MODEL, _FAST
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds",
            "Between output tokens: a step's gap shared evenly among its tokens.",
            MODEL,
            _FAST,
        )
        self.latency = histogram(
            "vllm:e2e_request_latency_seconds",
            "From a valid request to its end, however it ended.",
            MODEL,
            _SLOW,
        )
        self.success = counter(
            "vllm:request_success", "Sessions ended, by reason.", [*MODEL, "finished_reason"]
        )
        self.drafts = counter("vllm:spec_decode_num_drafts", "Target steps that verified drafts.", MODEL)
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", MODEL)
        self.accepted = counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.", MODEL)
        self.accepted_at = counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            [*MODEL, "position"],
        )
        self.guesses = GuessMetrics(self.registry)
        self.step_seconds = histogram("outrider_step_seconds", "Duration of a target step.", MODEL, _FAST)
        self.step_tokens = histogram(
            "outrider_step_tokens", "Tokens through the target in a step.", MODEL, _COUNTS
        )
        self.refused = counter(
            "outrider_requests_refused", "Requests refused or failed, by reason.", ["reason"]
        )
        self.preemptions = counter("outrider_preemptions", "Sessions preempted, later recomputed.", WORKER)
        self.dropped = counter(
            "outrider_drafts_dropped", "Drafts and claims a verifier dropped, by reason.", [*WORKER, "reason"]
        )
        self.draft_trials = counter(
            "outrider_draft_trials", "Comparisons of a verifier with and without drafts.", WORKER
        )
        self.rejections = counter(
            "outrider_draft_rejections", "Drafted tokens in whose place the target took another.", MODEL
        )
        self.rejections_covered = counter(
            "outrider_draft_rejections_covered",
            "Of them, those where a branch had the token that it took.",
            MODEL,
        )
        self.drafts_ended = counter(
            "outrider_drafts_ended", "Sessions that a drafter gave up by itself, by cause.", ["cause"]
        )
        self.cut_off = Counter(
            "outrider_drafters_cut_off",
            "Drafters that a verifier cut off, as they sent what no drafter may.",
            registry=self.registry,
        )
        self.silent = Counter(
            "outrider_drafters_silent",
            "Drafters that others were preferred to, as nothing that they sent was verified.",
            registry=self.registry,
        )
        self.set_aside = counter(
            "outrider_verifiers_set_aside",
            "Verifiers that got no sessions for a while, for what was seen of them.",
            ["reason"],
        )
        self.registrations_refused = counter(
            "outrider_registrations_refused",
            "Workers' words refused, by reason.",
            ["reason"],
        )
        self.workers_cut_off = counter(
            "outrider_workers_cut_off", "Workers cut off, as they said more than they may.", ["role"]
        )
        self.numerics_changes = counter(
            "outrider_numerics_changes",
            "Texts that went on at a verifier whose logits are rounded otherwise.",
            MODEL,
        )
        self.connected = gauge("outrider_workers", "Workers connected.", ["role"])
        for role in (Role.VERIFIER, Role.DRAFTER):  # that none has come yet is told, too
            self.workers(role.name.lower(), 0)
        self.degraded = Gauge(
            "outrider_store_degraded",
            "1 while the store is away: sessions go on, but cannot be resumed by another router.",
            registry=self.registry,
        )
        self.logs_dropped = Counter(
            "outrider_session_logs_dropped",
            "Session logs given up: the store was away too long, lost them too often or does not take them.",
            registry=self.registry,
        )
        self.window = histogram("outrider_draft_window", "Draft windows set: tokens ahead.", MODEL, _WINDOWS)

        # Steps by how many draft tokens they verified, and accepted: what becomes of a draft, by position.
        self.verified_in_steps: Tally[int] = Tally()
        self.accepted_in_steps: Tally[int] = Tally()

    def exposition(self) -> bytes:
        """Returns the text that a scraper reads."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yields that text in pieces that each take a millisecond or two: it has several lines for each
        worker, of which there may be thousands. It does not tell since when a counter counts."""
        for family in self.registry.collect():
            samples = [sample for sample in family.samples if not sample.name.endswith(_CREATED)]
            for start in range(0, max(len(samples), 1), LINES_AT_ONCE):
                part = Metric(family.name, family.documentation, family.type)
                part.samples = samples[start : start + LINES_AT_ONCE]
                text = generate_latest(_Collected(part))
                yield text if start == 0 else text.split(b"\n", 2)[2]  # without HELP and TYPE

    def session(self, model: str, prompt_tokens: int, *, resumed: bool = False) -> SessionMetrics:
        """Starts the clock of one session. `resumed`: its prompt and its first token were counted before."""
        return SessionMetrics(self, model, prompt_tokens, resumed)

    def observe_load(self, worker_id: str, model: str, load: VerifierLoad) -> None:
        """Takes in a verifier's report."""
        labels, key = (model, worker_id), (Role.VERIFIER, worker_id)
        gauges = self._gauges.get(labels)
        if gauges is None:
            gauges = self._gauges[labels] = [one.labels(*labels) for one in self.of_load]
        for one, value in zip(gauges, _gauged(load), strict=True):
            one.set(value)
        if load.step_seconds > 0:  # there is a step behind it
            self.step_seconds.labels(model).observe(load.step_seconds)
            self.step_tokens.labels(model).observe(load.step_tokens)
        self._count(key, model, "preemptions", load.preemptions, self.preemptions, *labels)
        self._count(key, model, "draft trials", load.draft_trials, self.draft_trials, *labels)

    def observe_dropped(self, worker_id: str, model: str, counts: Mapping[str, int]) -> None:
        """Takes in a verifier's counts since its start, by reason: no more reasons than MOST_REASONS."""
        known = self._seen[(Role.VERIFIER, worker_id), model]
        for reason, count in counts.items():
            if _DROPPED + reason not in known and len(known) >= MOST_REASONS:
                continue
            labels = model, worker_id, reason
            self._count((Role.VERIFIER, worker_id), model, _DROPPED + reason, count, self.dropped, *labels)

    def observe_rejections(self, worker_id: str, model: str, rejections: int, covered: int) -> None:
        """Takes in a drafter's counts since its start."""
        key = Role.DRAFTER, worker_id
        self._count(key, model, "rejections", rejections, self.rejections, model)
        self._count(key, model, "rejections covered", covered, self.rejections_covered, model)

    def _count(
        self, key: WorkerKey, model: str, what: str, count: int, counter: Counter, *labels: str
    ) -> None:
        """Counts by how much a worker's own count has grown since it was told last."""
        seen = self._seen[key, model]
        before = seen.get(what)
        if before != count:
            seen[what] = count
            anew = before is None or count < before  # the worker was restarted
            counter.labels(*labels).inc(count if anew else count - (before or 0))

    def numerics_changed(self, model: str) -> None:
        self.numerics_changes.labels(model).inc()

    def draft_ended(self, cause: DraftEndCause) -> None:
        self.drafts_ended.labels(cause.name.lower()).inc()

    def drafter_cut_off(self) -> None:
        self.cut_off.inc()

    def drafter_silent(self) -> None:
        self.silent.inc()

    def verifier_set_aside(self, reason: str) -> None:
        self.set_aside.labels(reason).inc()

    def worker_left(self, key: WorkerKey, model: str) -> None:
        """Takes a worker's gauges out; what it has done stays counted until many have left after it."""
        role, worker_id = key
        if role is Role.VERIFIER and (model, worker_id) in self._gauges:  # else it never reported
            del self._gauges[model, worker_id]
            for gauge in self.of_load:
                gauge.remove(model, worker_id)
        self._left.pop((key, model), None)
        self._left[key, model] = None
        if len(self._left) > MOST_LEFT:
            first = next(iter(self._left))
            del self._left[first]
            self._forget(*first)

    def worker_joined(self, key: WorkerKey, model: str) -> None:
        self._left.pop((key, model), None)

    def _forget(self, key: WorkerKey, model: str) -> None:
        """Takes out all that a worker has counted. Where it comes back, its counts begin anew, as after a
        restart."""
        role, worker_id = key
        for metric in (self.preemptions, self.draft_trials) if role is Role.VERIFIER else ():
            with suppress(KeyError):  # it may never have reported
                metric.remove(model, worker_id)
        for what in self._seen.pop((key, model), {}):
            if what.startswith(_DROPPED):
                self.dropped.remove(model, worker_id, what.removeprefix(_DROPPED))
        if role is Role.DRAFTER and (role, model) not in ((who, name) for (who, _), name in self._seen):
            for metric in (self.rejections, self.rejections_covered):  # of the last with such a name
                with suppress(KeyError):
                    metric.remove(model)

    def registration_refused(self, reason: str) -> None:
        self.registrations_refused.labels(reason).inc()

    def worker_cut_off(self, role: str) -> None:
        self.workers_cut_off.labels(role).inc()

    def workers(self, role: str, count: int) -> None:
        self.connected.labels(role).set(count)

    def draft_window(self, model: str, window: int) -> None:
        """Notes the window handed to a drafter, in tokens."""
        self.window.labels(model).observe(window)

    def store_degraded(self, away: bool) -> None:
        self.degraded.set(away)

    def session_log_dropped(self) -> None:
        self.logs_dropped.inc()

    def request_refused(self, reason: str) -> None:
        """Counts a refusal. `reason` is the `kind` of the error that the client gets."""
        self.refused.labels(reason).inc()


class SessionMetrics:
    """One session's way through the metrics, from its validated request to its end."""

    def __init__(self, metrics: Metrics, model: str, prompt_tokens: int, resumed: bool) -> None:
        self._metrics = metrics
        self._model = model
        self._resumed = resumed
        self._prompt_tokens = prompt_tokens
        self._started = metrics.clock()
        self.first_token: float | None = None  # when it was there
        self._last_token: float | None = None
        # What every step counts: to look a metric up by its labels takes longer than to count.
        self._inter_token, self._tokens = (
            metrics.inter_token.labels(model),
            metrics.generation_tokens.labels(model),
        )
        self._drafts, self._draft_tokens = metrics.drafts.labels(model), metrics.draft_tokens.labels(model)
        self._accepted, self._accepted_at = metrics.accepted.labels(model), list[Counter]()

    def committed(self, event: TokensCommitted) -> None:
        metrics, model, now = self._metrics, self._model, self._metrics.clock()
        if self._last_token is None and not self._resumed:
            self.first_token = now
            metrics.first_token.labels(model).observe(now - self._started)
            metrics.prompt_tokens.labels(model).inc(self._prompt_tokens)
        elif self._last_token is not None:
            each = (now - self._last_token) / max(len(event.tokens), 1)
            for _ in event.tokens:
                self._inter_token.observe(each)
        self._last_token = now
        self._tokens.inc(len(event.tokens))
        if event.verified:
            metrics.verified_in_steps[event.verified] += 1
            metrics.accepted_in_steps[event.accepted] += 1
            self._drafts.inc()
            self._draft_tokens.inc(event.verified + event.beside)
            self._accepted.inc(event.accepted)
            for position in range(len(self._accepted_at), event.accepted):
                self._accepted_at.append(metrics.accepted_at.labels(model, str(position)))
            for at in self._accepted_at[: event.accepted]:
                at.inc()
            if any(event.own):
                metrics.guesses.count_own(model, event.own)

    def ended(self, reason: str) -> None:
        """Counts the end of the session. `reason` is stop, length, abort (the client left) or error."""
        self._metrics.success.labels(self._model, reason).inc()
        self._metrics.latency.labels(self._model).observe(self._metrics.clock() - self._started)
