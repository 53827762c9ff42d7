"""What a verifier is told at its start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.options.engine import EngineOptions, StepLimits
from outrider.options.model_id import checkpoint_name
from outrider.options.option import check, option, same, wrong
from outrider.options.protection import Protection
from outrider.options.sessions import SPECULATION, SessionOptions
from outrider.options.telemetry import Export
from outrider.options.worker import Listen, Registration, check_worker


@dataclass(frozen=True, slots=True)
class VerifierConfig:
    """The options of a verifier. They are checked once, here: raises StartupError with a sentence that names
    the flag to change."""

    target: str = option(help="Folder, GGUF file or Hugging Face id (ID@REVISION) of the target model.")
    registration: Registration = field(default=Registration())
    listen: Listen = field(default=Listen())
    protection: Protection = field(default=Protection())
    join_port: int | None = option(
        None,
        "With TLS, port for drafters that joined the router, which show no certificate; 0 = any free one.",
        least=0,
        most=65535,
        shown="none of them come; without TLS they come to --port",
        heading=Listen.HEADING,
    )
    name: str | None = option(
        None,
        "Name by which clients ask for it, or several with commas between: answers have the first.",
        shown="the checkpoint's own",
    )
    max_model_len: int | None = option(
        None, "Most tokens of prompt and output together.", least=2, shown="the model's own"
    )
    engine: EngineOptions = field(default=EngineOptions())
    limits: StepLimits = field(default=StepLimits())
    drain_seconds: float = option(
        20.0, "How long sessions may go on after SIGTERM; those left then move to another verifier.", least=0
    )
    lock_step: bool = same(SessionOptions, "lock_step")
    compare: bool = option(
        True,
        "Compare with decoding without drafts now and then, and let drafters rest while that is faster.",
        negated=True,
        heading=SPECULATION,
    )
    trees: bool = option(
        True,
        "Verify a session's drafts as a tree where tokens are cheap and the engine can; else a path.",
        negated=True,
        heading=SPECULATION,
    )
    speculator: str | None = option(
        None,
        "Folder of a speculator, by which the target guesses its next tokens itself.",
        metavar="FOLDER",
        shown="none",
        heading=SPECULATION,
    )
    resting_threads: int | None = option(
        None,
        "CPU threads to try, too: more than --threads to read prompts and while drafters rest, fewer always.",
        least=1,
        shown="as --threads",
        heading=SPECULATION,
    )
    export: Export = field(default=Export())
    cache: Path | None = None  # folder in which step times are remembered; None = nowhere

    def __post_init__(self) -> None:
        check(self)
        if not self.target:
            raise wrong("target", "must name a folder or a hub id, not nothing")
        if not all(name.strip() for name in self.served_names):
            raise wrong("name", "must not be blank: leave it out for the checkpoint's own name")
        on_cpu = self.engine.device == "cpu" and self.engine.tensor_parallel_size == 1
        if self.resting_threads is not None:
            if not self.compare:
                raise wrong("resting_threads", "is of no use with --no-compare: leave one out")
            if not on_cpu:
                raise wrong("resting_threads", "is for a model on a CPU in one process: leave it out")
        if self.speculator is not None and not on_cpu:
            raise wrong("speculator", "is for a model on a CPU in one process: leave it out")
        check_worker(self.registration, self.listen, self.protection)
        if self.join_port is not None and self.protection.tls is None:
            raise wrong("join_port", "is for TLS: without it drafters that joined come to --port")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Returns the names under which clients ask for the model; answers have the first."""
        if self.name is None:
            return (checkpoint_name(self.target),)
        return tuple(dict.fromkeys(name.strip() for name in self.name.split(",")))
