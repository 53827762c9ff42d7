"""What the Ray Serve application is told.

On a command line: `serve run deploy.app:build target=T draft=D verifier.max_replicas=4`; in a config file
under `args:`, where a pool's settings may be nested.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from outrider.config import DTYPES, parse_memory
from outrider.defaults import NUM_SPECULATIVE_TOKENS
from outrider.errors import StartupError
from outrider.net.tls import TlsFiles
from outrider.sampling.params import MAX_SEED
from outrider.store.logs import SESSION_TTL_SECONDS

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0)]
Resource = Annotated[float, Field(ge=0)]  # may be a fraction
Name = Annotated[str, Field(min_length=1)]
Labels = dict[str, str]  # of nodes, as Ray's label selectors: {"pool": "target"}


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RouterArgs(Settings):
    """The routers: the ingress. They load no model."""

    replicas: Count = 1
    cpus: Resource = 0.2  # Ray's CPUs of each: a count for placement, no limit
    labels: Labels = {}  # of the nodes that they run on
    max_sessions: Count = 256  # most requests at a time in each; more are refused with 429
    session_ttl: Count = SESSION_TTL_SECONDS  # seconds after its last token in which a stream can be resumed
    drain_seconds: Seconds = 60.0  # for its requests to end when it leaves


class PoolArgs(Settings):
    """A pool of workers. Where min_replicas < max_replicas its size follows the load."""

    min_replicas: Count = 1
    max_replicas: Count = 1
    cpus: Resource = 0.5  # Ray's CPUs of each process: a count for placement, no limit
    gpus: Resource | None = None  # Ray's GPUs of each process; None = 1 on cuda, 0 on cpu
    resources: dict[str, Resource] = {}  # others of Ray's, of each process
    labels: Labels = {}  # of the nodes that they run on
    device: Annotated[str, Field(pattern=r"^(cpu|cuda)$")] = "cpu"
    dtype: str | None = None  # None = float32 on cpu, bfloat16 on cuda
    kv_memory: str = "1GiB"
    threads: Count = 1  # CPU threads of the model
    tensor_parallel_size: Count = 1  # processes of one worker, all on one node
    max_batch_tokens: Count = 512
    prefill_chunk: Count = 256
    probe_seconds: Annotated[float, Field(gt=0)] = 10.0  # for a token to go through a model that is well

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, dtype: str | None) -> str | None:
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"must be one of {', '.join(DTYPES)}")
        return dtype

    @field_validator("kv_memory")
    @classmethod
    def _a_size(cls, size: str) -> str:
        try:
            parse_memory(size)
        except StartupError:
            raise ValueError("must be a size such as 512MiB or 2GiB") from None
        return size

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for most, least in (("max_replicas", "min_replicas"), ("max_batch_tokens", "prefill_chunk")):
            if getattr(self, most) < getattr(self, least):
                raise ValueError(f"{most} must be at least {least}, which is {getattr(self, least)}")
        return self

    @property
    def gpus_each(self) -> float:
        return self.gpus if self.gpus is not None else float(self.device == "cuda")


class VerifierArgs(PoolArgs):
    """The pool of target workers."""

    drain_seconds: Seconds = 30.0  # for its sessions to end when it leaves; the rest goes on elsewhere


class AutoscalingArgs(Settings):
    """How a pool follows its load, where its size is not fixed."""

    upscale_seconds: Seconds = 10.0  # for which more must have been wanted
    downscale_seconds: Seconds = 300.0  # for which less must have been wanted
    look_back_seconds: Annotated[float, Field(gt=0)] = 20.0  # over which measurements are averaged
    max_step_seconds: Annotated[float, Field(gt=0)] | None = None  # slower target steps call for verifiers


class TlsArgs(Settings):
    """Files (PEM) on every node: what routers and workers show one another. Read again on change."""

    cert: Name
    key: Name
    ca: Name  # the authority whose certificates they accept
    domain: Name | None = None  # workers are ADDRESS-WITH-DASHES.DOMAIN there; None = by address

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(Path(self.cert), Path(self.key), Path(self.ca))


class NetworkArgs(Settings):
    """How a worker is reached: what it needs of AppArgs."""

    tls: TlsArgs | None = None
    insecure: bool = False
    host: str | None = None  # where it listens; None = at its node's address

    def advertised(self, host: str) -> str:
        """What a worker on a node with that address registers."""
        if self.tls is None or self.tls.domain is None:
            return host
        return f"{host.replace('.', '-').replace(':', '-')}.{self.tls.domain}"


class AppArgs(Settings):
    """Everything, validated. Without target it is the demo pair; without draft it is plain decoding."""

    target: Name | None = None  # folder or hub id of the target model
    draft: Name | None = None  # folder or hub id of the draft model
    name: Name | None = None  # under which clients ask for it; None = the checkpoint's own
    store: str | None = None  # redis://... or rediss://...; None = a small deployment of its own
    num_speculative_tokens: Annotated[int, Field(ge=0)] = NUM_SPECULATIVE_TOKENS
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None  # makes drawn seeds repeatable
    tls: TlsArgs | None = None  # between routers, verifiers and drafters; None = in the clear
    insecure: bool = False  # allow what is not encrypted to leave a node: trust the network
    api_keys: Name | None = None  # file on the routers' nodes, as --api-keys; None = $OUTRIDER_API_KEYS there
    router: RouterArgs = RouterArgs()
    verifier: VerifierArgs = VerifierArgs()
    drafter: PoolArgs = PoolArgs()
    autoscaling: AutoscalingArgs = AutoscalingArgs()

    @property
    def network(self) -> NetworkArgs:
        return NetworkArgs(tls=self.tls, insecure=self.insecure)

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
        return self


def nested(given: Mapping[str, Any]) -> dict[str, Any]:
    """{"a.b": 1, "a": {"c": 2}} -> {"a": {"b": 1, "c": 2}}. Raises ValueError where that cannot be."""
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
    """The validated arguments. Raises StartupError with one sentence about the first that is wrong."""
    try:
        return AppArgs.model_validate(given)
    except ValidationError as error:
        raise StartupError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        parent = AppArgs.model_fields[str(first["loc"][0])].default if len(first["loc"]) > 1 else AppArgs()
        return f"there is no argument {place}; there is {', '.join(type(parent).model_fields)}"
    reason = first["msg"].removeprefix("Value error, ")
    if not place:
        return reason
    given = first["input"]
    shown = place != "store" and isinstance(given, str | int | float)  # a URL may hold a password
    return f"{place}: {reason}" + (f", not {given!r}" if shown else "")
