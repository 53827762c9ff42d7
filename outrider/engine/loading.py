"""From a checkpoint to an engine that has shown that it runs it rightly."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from outrider.config import memory_text
from outrider.engine.attention import AttentionBackend
from outrider.engine.checkpoint import config_text, fingerprint, locate, weight_files
from outrider.engine.engine import Engine
from outrider.engine.gathered_attention import GatheredAttention
from outrider.engine.packed import pack
from outrider.engine.paged_engine import PagedEngine, Paging, with_kernel
from outrider.engine.parts import kernels
from outrider.engine.process_memory import keep_freed_memory, use_huge_pages
from outrider.engine.quantized import quantize
from outrider.engine.ranks import Ranks, of_the_group
from outrider.engine.self_check import PROBE_BLOCKS, check, reference
from outrider.engine.sharded import LeadingEngine, ShardedEngine
from outrider.engine.sharding import check_divisible, connect, localize
from outrider.engine.step_graphs import CudaGraphs
from outrider.engine.tokenizer import load_tokenizer
from outrider.errors import PeerLost, StartupError
from outrider.wire.description import ModelInfo

__all__ = ["load_engine", "load_tokenizer"]

WORTH_HUGE_PAGES = 2**26  # bytes of weights: more than the caches next to a core hold
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_engine(
    path_or_id: str,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    kv_memory_bytes: int = 2**30,
    threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    ranks: Ranks | None = None,
    quantization: str | None = None,
) -> Engine:
    """Loads a causal LM from a local folder or by its hub id; checks the engine against the model's own code.

    `name` is what clients call it (default: the last part of `path_or_id`); `dtype` is float32, bfloat16 or
    float16 (default: float32 on CPU, the checkpoint's own elsewhere); `threads` are torch's, for the whole
    process. `progress` hears what is being done and the share of the work before it, 0 to 1.

    With `ranks`, each of which makes this call, the model is divided among them: the leader gets an engine to
    use, the others one to `follow` with. `device` is this rank's own; the KV memory is that of all together.

    With `quantization` int8, on a CPU in float32 and without `ranks`, linear layers are rounded to 8 bits
    once the checks are passed; nothing is exact then.

    Raises StartupError, in one sentence, where the checkpoint is missing, damaged or incomplete or a flag is
    wrong, ModelRefused where the engine cannot run the model rightly, and PeerLost where a rank ends."""
    tell = progress or (lambda _stage, _share: None)
    _quiet()
    target = _device(device)
    if threads:
        torch.set_num_threads(threads)
    tell("looking over the checkpoint", 0.0)
    folder = locate(path_or_id)
    config = _config(folder)
    weight_files(folder)
    digest = fingerprint(folder) if ranks is None or ranks.leads else ""
    wanted = _dtype(dtype, target)
    if ranks is not None:
        check_divisible(config, Path(path_or_id).name, ranks.group.size)
        _connect(ranks, target)
    tell("loading weights", 0.1)
    model = _model(folder, config, wanted, target, ranks)
    info = describe(model, name or Path(path_or_id).name, digest, str(target))
    if ranks is not None:
        return build_engine(
            model,
            replace(info, tensor_parallel_size=ranks.group.size),
            kv_memory_bytes,
            progress=tell,
            ranks=ranks,
        )
    paging = Paging(kernels(), CudaGraphs(target), fused=True) if target.type == "cuda" else None
    return build_engine(model, info, kv_memory_bytes, progress=tell, paging=paging, quantization=quantization)


def describe(model: Any, name: str, fingerprint: str, device: str) -> ModelInfo:
    """What there is to say of a model that has not been checked."""
    return ModelInfo(
        name=name,
        fingerprint=fingerprint,
        architecture=type(model).__name__,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_context=max_context(model.config),
        eos_token_ids=_eos_token_ids(model),
        device=device,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        bit_exact=False,
    )


def build_engine(
    model: Any,
    info: ModelInfo,
    kv_memory_bytes: int,
    *,
    progress: Callable[[str, float], None],
    ranks: Ranks | None = None,
    paging: Paging | None = None,
    quantization: str | None = None,
) -> Engine:
    """An engine on a loaded model, once it has given what the model's own code gives.

    `paging`: what to try on a GPU. Raises as load_engine does."""
    tell = progress
    keep_freed_memory()
    tell("running the model's own code", 0.5)
    expected = reference(model, info)
    joints = localize(model) if ranks is not None else []
    parameter = next(model.parameters())
    invariant = parameter.device.type == "cpu" and parameter.dtype == torch.float32 and not quantization
    if invariant:
        tell("packing weights", 0.6)
        pack(model)
    tell("checking the engine against it", 0.8)
    if ranks is not None:
        connect(model, joints, ranks)
    gathered = GatheredAttention.on(model, PROBE_BLOCKS)
    probe = Engine(model, info, gathered) if ranks is None else ShardedEngine(model, info, gathered, ranks)
    checked = check(probe, expected, bits=invariant)
    if quantization:
        tell("rounding weights to 8 bits", 0.9)
        quantize(model)
        pack(model)  # what is left
        checked = replace(checked, dtype=quantization)
    if paging is not None:
        probe = with_kernel(probe, expected, paging.kernels)
    bytes_per_block = probe.attention.pools.bytes_per_block * info.tensor_parallel_size
    num_blocks = kv_memory_bytes // bytes_per_block
    if num_blocks < 2:
        raise StartupError(
            f"--kv-memory of {memory_text(kv_memory_bytes)} holds {num_blocks} blocks of {info.name}; "
            f"give at least {-(-2 * bytes_per_block // 1024)}KiB"
        )
    attention = _all_of(probe.attention, num_blocks, kv_memory_bytes)
    if isinstance(probe, PagedEngine):
        engine: Engine = PagedEngine(model, checked, attention)
    elif ranks is None:
        engine = Engine(model, checked, attention)
    else:
        checked = replace(checked, bit_exact=ranks.agree(checked.bit_exact))
        ranks.settle()
        engine = (LeadingEngine if ranks.leads else ShardedEngine)(model, checked, attention, ranks)
    if paging is not None and isinstance(engine, PagedEngine):
        if paging.fused:
            tell("compiling layers", 0.85)
            engine.fuse(expected)
        engine.record(paging.record, lambda share: tell("recording steps", 0.9 + 0.1 * share))
    if parameter.device.type == "cpu" and info.parameters * parameter.element_size() >= WORTH_HUGE_PAGES:
        use_huge_pages()  # which takes some seconds, for as many gigabytes
    tell("ready", 1.0)
    return engine


def _all_of(few: AttentionBackend, num_blocks: int, kv_memory_bytes: int) -> AttentionBackend:
    """The backend with all of its blocks, taken now: a worker that has too little memory is not to become
    ready."""
    wanted = f"there is no room for --kv-memory of {memory_text(kv_memory_bytes)} beside the model"
    if few.pools.on_cpu and num_blocks * few.pools.bytes_per_block > (free := _available_bytes()):
        # The system would promise it, and end some process once it is written.
        raise StartupError(f"{wanted}: {memory_text(free)} are free; give less")
    try:
        return few.resized(num_blocks)
    except (MemoryError, torch.OutOfMemoryError):
        raise StartupError(f"{wanted}; give less") from None


def _available_bytes() -> float:
    """Of memory, without taking any from others; infinite where the system does not tell (Linux does)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return 1024 * next(
        (int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), float("inf")
    )


def max_context(config: Any) -> int:
    """Most tokens of a session.

    Kept to the length at which a rotary scaling that depends on the length switches over: its angles would
    otherwise change with what else is in the batch."""
    text = config.get_text_config()
    longest = int(getattr(text, "max_position_embeddings", None) or 2**20)
    scaling = getattr(text, "rope_parameters", None) or {}
    by_kind = scaling.values() if all(isinstance(value, dict) for value in scaling.values()) else [scaling]
    for parameters in by_kind:
        original = parameters.get("original_max_position_embeddings") or getattr(
            text, "original_max_position_embeddings", None
        )
        if parameters.get("rope_type") == "longrope" and original:
            longest = min(longest, int(original))
    return longest


def _config(folder: Path) -> Any:
    model_type = json.loads(config_text(folder)).get("model_type")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # unknown types and damaged values raise all kinds
        reason = str(error).strip().split("\n")[0]
        raise StartupError(
            f"{folder}/config.json describes no model that transformers knows ({reason})"
        ) from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise StartupError(
            f"{folder} holds a model of type {model_type}, which is not a causal language model"
        )
    return config


def _connect(ranks: Ranks, device: torch.device) -> None:
    """Joins the ranks, in the way that transformers expects to find them."""
    if device.type == "cpu" and torch.cuda.is_available():
        raise StartupError(
            "--device cpu with --tensor-parallel-size above 1 needs a machine without GPUs; "
            "hide them with CUDA_VISIBLE_DEVICES="
        )
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    ranks.connect(device)


def _model(
    folder: Path, config: Any, dtype: torch.dtype | None, device: torch.device, ranks: Ranks | None
) -> Any:
    divided = {} if ranks is None else {"distributed_config": DistributedConfig(tp_size=ranks.group.size)}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype if dtype is not None else "auto",
            use_safetensors=True,
            trust_remote_code=False,  # otherwise it asks on the terminal
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below by name
            **divided,
        )
    except Exception as error:  # values out of range, out of memory
        if of_the_group(error):
            raise PeerLost("a process of the tensor-parallel group ended") from error
        reason = str(error).strip().split("\n")[0]
        raise StartupError(f"the weights in {folder} do not load ({reason})") from None
    missing = sorted(report["missing_keys"])
    if missing:
        raise StartupError(
            f"the weights in {folder} lack {missing[0]} ({len(missing)} missing in all), which "
            f"{type(model).__name__} needs"
        )
    for key, found, expected in report["mismatched_keys"]:
        raise StartupError(
            f"{key} in {folder} has the shape {list(found)} where config.json asks for {list(expected)}"
        )
    if ranks is None:  # otherwise it is there, in DTensors
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _device(device: str) -> torch.device:
    try:
        target = torch.device(device)
    except RuntimeError:
        raise StartupError(f"--device {device} is not a device; give cpu, cuda or cuda:N") from None
    if target.type not in ("cpu", "cuda"):
        raise StartupError(f"--device {device} is not supported; give cpu, cuda or cuda:N")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise StartupError(f"--device {device}: there are {torch.cuda.device_count()} CUDA devices here")
    return target


def _dtype(dtype: str | None, device: torch.device) -> torch.dtype | None:
    """None: the checkpoint's own."""
    if dtype in (None, "", "auto"):
        return torch.float32 if device.type == "cpu" else None
    if dtype not in DTYPES:
        raise StartupError(f"--dtype {dtype} is unknown; give {', '.join(DTYPES)} or auto")
    return DTYPES[dtype]


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """Ids that end a text, from generation_config.json and config.json, in which they are one id or a
    list."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config.get_text_config()):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return tuple(sorted(ids))


def _quiet() -> None:
    """Keeps transformers' own bars and warnings off the terminal: what matters is said by errors of ours."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.CRITICAL)
