"""Options that several commands have."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(StrEnum):
    """How weights and activations are stored."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


TlsCert = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Certificate (PEM) that this process shows, and those above it. Read again on change.",
        show_default="none: nothing is encrypted",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", metavar="FILE", help="Private key of it (PEM).", show_default="none"),
]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        metavar="FILE",
        help="Authority (PEM) whose certificates routers, verifiers and drafters must show one another.",
        show_default="none: they speak in the clear, and on this machine only",
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Allow what is not encrypted to leave this machine: trust the network."),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        "--api-keys",
        metavar="FILE",
        help="Keys of the clients, hashed: lines of `outrider keys add NAME`. Read again on change.",
        show_default="$OUTRIDER_API_KEYS, or none: everybody may ask",
    ),
]
WorkerRegistryPort = Annotated[
    int | None,
    typer.Option(
        "--worker-port",
        min=0,
        max=65535,
        help="Port at which workers register; 0 = any free one.",
        show_default="50052 with TLS, otherwise --grpc-port",
    ),
]


SessionTtl = Annotated[
    int,
    typer.Option(
        "--session-ttl",
        metavar="SECONDS",
        min=1,
        help="How long after its last token an answer that broke off can be resumed.",
    ),
]


class Level(StrEnum):
    """From which on a process logs what it does."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LogLevel = Annotated[
    Level,
    typer.Option("--log-level", help="From which on to log. Prompts, answers and secrets never are."),
]
HttpHost = Annotated[str, typer.Option("--host", help="Address to listen on, for HTTP and gRPC.")]
HttpPort = Annotated[
    int,
    typer.Option("--port", min=0, max=65535, help="Port of the HTTP API; 0 = any free one."),
]
GrpcPort = Annotated[
    int,
    typer.Option(
        "--grpc-port",
        min=0,
        max=65535,
        help="Port of gRPC, for clients, and for workers where no other is theirs; 0 = any free one.",
    ),
]
NumSpeculativeTokens = Annotated[
    int,
    typer.Option(
        "--num-speculative-tokens",
        "-k",
        min=0,
        help="Most draft tokens verified in one step of a request; below it each request adapts. 0 = none.",
    ),
]
ServerSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        max=2**64 - 1,
        help="Makes the seeds given to requests without one repeatable.",
        show_default="drawn anew at every start",
    ),
]
Target = Annotated[str, typer.Option("--target", help="Folder or Hugging Face id of the target model.")]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft",
        help="Folder or Hugging Face id of the draft model.",
        show_default="none: --propose says how",
    ),
]


class Proposer(StrEnum):
    """Where guesses come from, if not from a draft model."""

    NGRAM = "ngram"


Propose = Annotated[
    Proposer | None,
    typer.Option(
        "--propose",
        help="Guess without a draft model: ngram looks up what followed the same tokens in the text so far.",
        show_default="none: the draft model guesses",
    ),
]
RouterAddress = Annotated[
    str | None,
    typer.Option(
        "--router",
        metavar="HOST:PORT",
        help="gRPC address of the router to register with.",
        show_default="none: --store says where",
    ),
]
WorkerStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Store that the routers share, to register there instead: redis://HOST:PORT, rediss:// for TLS. "
        "In $OUTRIDER_STORE its password is seen by nobody else.",
        show_default="$OUTRIDER_STORE, or none: --router says where",
    ),
]
RouterStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="Store shared with other routers: redis://HOST:PORT, rediss:// for TLS. "
        "In $OUTRIDER_STORE its password is seen by nobody else.",
        show_default="$OUTRIDER_STORE, or this router's own memory",
    ),
]
WorkerHost = Annotated[str, typer.Option("--host", help="Address to listen on.")]
WorkerPort = Annotated[
    int, typer.Option("--port", min=0, max=65535, help="Port of the worker's gRPC; 0 = any free one.")
]
Advertise = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST",
        help="Host by which others reach it.",
        show_default="same as --host",
    ),
]
Device = Annotated[str, typer.Option("--device", help="Where the model runs: cpu, cuda or cuda:N.")]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="Number format of the model. float32 on cpu is bit-exact.",
        show_default="float32 on cpu, bfloat16 on cuda",
    ),
]


class Quantization(StrEnum):
    """How the draft model's linear layers are rounded."""

    INT8 = "int8"


DraftQuantization = Annotated[
    Quantization | None,
    typer.Option(
        "--draft-quantization",
        help="Run the draft model's linear layers in 8 bits on a CPU: faster, and the answers stay the same.",
        show_default="none",
    ),
]
KvMemory = Annotated[
    str,
    typer.Option("--kv-memory", metavar="SIZE", help="Memory for the keys and values of a worker."),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="CPU threads for the model's arithmetic, in each of its processes.",
        show_default="the cores of this machine divided among them",
    ),
]
ThreadsEach = Annotated[
    int | None,
    typer.Option(
        "--threads",
        min=1,
        help="CPU threads for the model of each worker.",
        show_default="the cores divided among the workers",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        help="Processes (on GPUs: one each) that the model is divided among.",
    ),
]
TargetParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size",
        min=1,
        help="Processes (on GPUs: one each) that each target worker's model is divided among.",
    ),
]
MaxBatchTokens = Annotated[
    int,
    typer.Option("--max-batch-tokens", min=1, help="Most tokens in one step, over all sessions."),
]
DRAIN_SECONDS = 20.0  # of a verifier that is not told otherwise
DrainSeconds = Annotated[
    float,
    typer.Option(
        "--drain-seconds",
        min=0,
        help="How long sessions may go on after SIGTERM; those left then move to another verifier.",
    ),
]
Branches = Annotated[
    bool,
    typer.Option(
        "--branches/--no-branches",
        help="Draft on from likely corrections, too, where no session wants a next token.",
        show_default=False,
    ),
]
LockStep = Annotated[
    bool,
    typer.Option(
        "--lock-step",
        help="For comparison only: draft k tokens, wait for the verdict, and so on; slower.",
    ),
]
PrefillChunk = Annotated[
    int, typer.Option("--prefill-chunk", min=1, help="Most tokens of one prompt in one step.")
]
