"""What the Ray Serve application is told.

On a command line: `serve run deploy.app:build target=T draft=D verifier.max_replicas=4`; in a config file
under `args:`, where a pool's settings may be nested.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from demo import pair
from deploy.option_args import WRONG, refused, with_options
from drafter.config import DrafterConfig
from outrider.errors import StartupError
from outrider.options.engine import EngineOptions, StepLimits
from outrider.options.option import build, default_of, options
from outrider.options.protection import Protection
from outrider.options.sessions import SessionOptions
from outrider.options.telemetry import Export, Logging, named_in
from verifier.config import VerifierConfig

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
Resource = Annotated[float, Field(ge=0)]  # may be a fraction
Name = Annotated[str, Field(min_length=1)]
LOOKUP_CPUS = 0.2  # of what looks up guesses beside a draft model
Labels = dict[str, str]  # of nodes, as Ray's label selectors: {"pool": "target"}


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


@with_options(
    SessionOptions,
    only=(
        "max_sessions",
        "session_ttl",
        "share_prefixes",
        "tool_call_parser",
        "reasoning_parser",
        "cors_origin",
        "page",
    ),
)
class RouterArgs(Settings):
    """The routers: the ingress. They load no model."""

    replicas: Count = 1
    cpus: Resource = 0.2  # Ray's CPUs of each: a count for placement, no limit
    labels: Labels = {}  # of the nodes that they run on
    drain_seconds: Seconds = 60.0  # for its requests to end when it leaves


@with_options(EngineOptions, StepLimits)
class PoolArgs(Settings):
    """A pool of workers. Where min_replicas < max_replicas its size follows the load."""

    min_replicas: Count = 1
    max_replicas: Count = 1
    cpus: Resource = 0.5  # Ray's CPUs of each process: a count for placement, no limit
    gpus: Resource | None = None  # Ray's GPUs of each process; None = 1 on cuda, 0 on cpu
    resources: dict[str, Resource] = {}  # others of Ray's, of each process
    labels: Labels = {}  # of the nodes that they run on
    threads: Count = 1  # CPU threads of the model: its node's cores are others' too
    probe_seconds: Annotated[float, Field(gt=0)] = 10.0  # for a token to go through a model that is well

    @field_validator("device", check_fields=False)
    @classmethod
    def _a_kind(cls, device: str) -> str:
        if device not in ("cpu", "cuda"):
            raise ValueError("must be cpu or cuda: which GPU it is, Ray says")
        return device

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas must be at least min_replicas, which is {self.min_replicas}")
        return self

    @model_validator(mode="after")
    def _shares(self) -> Self:
        told = dict(self)
        shared = told["device"] == "cuda" and self.gpus is not None and self.gpus % 1
        if shared and told["kv_memory"] is None:
            raise ValueError(
                f"gpus of {self.gpus:g} lets others share the GPU: say with kv_memory how much of what is "
                "free keys and values take, such as 70% for a target and 10% for a draft"
            )
        return self

    @property
    def engine(self) -> EngineOptions:
        return build(EngineOptions, dict(self))

    @property
    def limits(self) -> StepLimits:
        return build(StepLimits, dict(self))

    @property
    def gpus_each(self) -> float:
        return self.gpus if self.gpus is not None else float(self.engine.device == "cuda")


class VerifierArgs(PoolArgs):
    """The pool of target workers."""

    # For its sessions to end when it leaves; the rest goes on elsewhere.
    drain_seconds: Seconds = default_of(VerifierConfig, "drain_seconds")
    compare: bool = default_of(VerifierConfig, "compare")  # with decoding without drafts, and let these rest
    speculator: Name | None = None  # folder, on each node, of that of the target
    # Tried, too: more than threads while drafters on the same node rest, or fewer at any time.
    resting_threads: Count | None = default_of(VerifierConfig, "resting_threads")


class AutoscalingArgs(Settings):
    """How a pool follows its load, if its size is not fixed."""

    upscale_seconds: Seconds = 10.0  # for which more must have been wanted
    downscale_seconds: Seconds = 300.0  # for which less must have been wanted
    # Over which measurements are averaged. Replicas report each 10 s, and Serve wants more than one report.
    look_back_seconds: Annotated[float, Field(gt=10)] = 20.0
    max_step_seconds: Annotated[float, Field(gt=0)] | None = None  # slower target steps call for verifiers


class TlsArgs(Settings):
    """Files (PEM) on every node: what routers and workers show one another. Read again on change."""

    cert: Name
    key: Name
    ca: Name  # the authority whose certificates they accept
    domain: Name | None = None  # workers are ADDRESS-WITH-DASHES.DOMAIN there; None = by address


@with_options(Logging, Export)
class NetworkArgs(Settings):
    """How a process is reached, and what it says of itself: what it needs of AppArgs."""

    tls: TlsArgs | None = None
    insecure: bool = False
    host: str | None = None  # where it listens; None = at its node's address

    @property
    def logging(self) -> Logging:
        return build(Logging, dict(self))

    @property
    def export(self) -> Export:
        """Returns it as it is for a process of this node: its environment may name a collector."""
        return build(Export, {**dict(self), "from_environment": named_in(os.environ)})

    @property
    def protection(self) -> Protection:
        if self.tls is None:
            return Protection(insecure=self.insecure)
        return Protection(Path(self.tls.cert), Path(self.tls.key), Path(self.tls.ca), self.insecure)

    def advertised(self, host: str) -> str:
        """Returns the address that a worker on such a node registers."""
        if self.tls is None or self.tls.domain is None:
            return host
        return f"{host.replace('.', '-').replace(':', '-')}.{self.tls.domain}"


@with_options(Logging, Export)
@with_options(SessionOptions, only=("num_speculative_tokens", "seed", "drafters_per_session"))
class AppArgs(Settings):
    """Everything, validated. Without target it is the demo pair; with a target alone it is plain decoding."""

    target: Name | None = None  # folder or hub id of the target model; outrider-demo = that of the demo pair
    draft: Name | None = None  # folder or hub id of the draft model; outrider-demo = that of the demo pair
    propose: str | None = default_of(DrafterConfig, "propose")  # suffix; beside draft, if that is given
    name: Name | None = None  # under which clients ask for it; None = the checkpoint's own
    store: str | None = None  # redis://... or rediss://...; None = a small deployment of its own
    tls: TlsArgs | None = None  # between routers, verifiers and drafters; None = in the clear
    insecure: bool = False  # allow what is not encrypted to leave a node: trust the network
    api_keys: Name | None = None  # file on the routers' nodes, as --api-keys; None = $OUTRIDER_API_KEYS there
    router: RouterArgs = RouterArgs()
    verifier: VerifierArgs = VerifierArgs()
    drafter: PoolArgs = PoolArgs()
    autoscaling: AutoscalingArgs = AutoscalingArgs()

    @property
    def sessions(self) -> SessionOptions:
        told = build(SessionOptions, {**dict(self), **dict(self.router)})
        return replace(told, drafters_per_session=max(2, told.drafters_per_session)) if self.both else told

    @property
    def network(self) -> NetworkArgs:
        told = {each.name: getattr(self, each.name) for group in (Logging, Export) for each in options(group)}
        return NetworkArgs(tls=self.tls, insecure=self.insecure, **told)

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, given: Any) -> Any:
        return nested(given) if isinstance(given, Mapping) else given

    @field_validator("store")
    @classmethod
    def _a_url(cls, store: str | None) -> str | None:
        if store is not None and not store.startswith(("redis://", "rediss://")):
            raise ValueError("must be redis://HOST:PORT or rediss://HOST:PORT")
        return store

    @model_validator(mode="after")
    def _a_pair(self) -> Self:
        if self.draft is not None and self.target is None:
            raise ValueError("draft is given without target: name both models of the pair")
        # What workers could not be told is said before anything starts.
        with refused("verifier", VerifierArgs.model_fields):
            build(VerifierConfig, {**dict(self.verifier), "target": self.target or pair.NAME})
        if self.propose is not None:
            pool = self.lookup if self.both else self.drafter
            with refused("drafter", PoolArgs.model_fields):
                build(DrafterConfig, {**dict(pool), "propose": self.propose})
        return self

    @property
    def both(self) -> bool:
        """Returns whether a draft model guesses, and something else beside it."""
        return self.draft is not None and self.propose is not None

    @property
    def lookup(self) -> PoolArgs:
        """Returns the pool of one of what guesses beside a draft model: it is where the drafters are."""
        return PoolArgs(
            cpus=LOOKUP_CPUS, labels=self.drafter.labels, probe_seconds=self.drafter.probe_seconds
        )

    @property
    def has_drafters(self) -> bool:
        """Returns True if there is a pool of drafters."""
        return self.target is None or self.draft is not None or self.propose is not None


def models(args: AppArgs) -> tuple[str, str | None, str | None]:
    """Returns target, draft and the name to serve under."""
    if args.target is None:
        draft = None if args.propose else str(pair.DRAFT)
        return str(pair.TARGET), draft, args.name or pair.NAME
    draft = None if args.draft is None else _found(args.draft, pair.DRAFT)
    name = pair.NAME if args.target == pair.NAME else None
    return _found(args.target, pair.TARGET), draft, args.name or name


def _found(model: str, built_in: Path) -> str:
    """Returns a folder as every replica finds it, wherever it runs; a hub id as it is. `built_in`: that of
    the demo pair, if it is meant."""
    if model == pair.NAME:
        return str(built_in)
    return str(Path(model).resolve()) if Path(model).is_dir() else model


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings: {"a.b": 1, "a": {"c": 2}} -> {"a": {"b": 1, "c": 2}}. Raises ValueError if
    that cannot be."""
    tree: dict[str, Any] = {}
    for key, value in given.items():
        *path, last = str(key).split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{key} does not go together with {part}")
        known = branch.setdefault(last, {} if isinstance(value, Mapping) else value)
        if isinstance(value, Mapping) and isinstance(known, dict) and not known.keys() & value.keys():
            known.update(value)
        elif known is not value:
            raise ValueError(f"{key} is given twice")
    return tree


def parse(given: Mapping[str, Any]) -> AppArgs:
    """Returns the validated arguments. Raises StartupError with one sentence about the first that is
    wrong."""
    try:
        return AppArgs.model_validate(given)
    except ValidationError as error:
        raise StartupError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == WRONG:
        told = first["ctx"]
        return f"{place}{place and '.'}{told['option']}: {told['sentence']}"
    if first["type"] == "extra_forbidden":
        parent = AppArgs.model_fields[str(first["loc"][0])].default if len(first["loc"]) > 1 else AppArgs()
        return f"there is no argument {place}; there is {', '.join(type(parent).model_fields)}"
    reason = first["msg"].removeprefix("Value error, ")
    if not place:
        return reason
    given = first["input"]
    shown = place != "store" and isinstance(given, str | int | float)  # a URL may hold a password
    return f"{place}: {reason}" + (f", not {given!r}" if shown else "")
