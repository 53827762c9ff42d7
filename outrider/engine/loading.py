"""From a checkpoint to an engine that has shown that it runs it rightly."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import modeling_gguf_pytorch_utils
from transformers.distributed import DistributedConfig
from transformers.utils import logging as transformers_logging

from outrider.engine.assembly import build_engine
from outrider.engine.checkpoint import Checkpoint, files_of, fingerprint, locate, look_over, unchanged
from outrider.engine.checkpoint_config import config_of, max_context
from outrider.engine.draft_vocabulary import read, reduce_output
from outrider.engine.engine import Engine
from outrider.engine.foreign_vocabulary import adopt
from outrider.engine.gguf_file import parsed_once, unused
from outrider.engine.lent_embeddings import are_lent, borrow, check_undivided
from outrider.engine.linear_layers import Int4, Int8, has_nibbles
from outrider.engine.lora import adapter_files, find_adapter, fingerprint_with, merge
from outrider.engine.model_class import auto_class, leave_text_part
from outrider.engine.native import library, multiplies_bytes
from outrider.engine.parts import Parts, check_parts, usual
from outrider.engine.process_memory import leave_files
from outrider.engine.quantized import exact_here
from outrider.engine.quantized_checkpoint import prepare
from outrider.engine.ranks import Ranks, of_the_group
from outrider.engine.sharding import check_divisible
from outrider.engine.tokenizer import load_tokenizer
from outrider.errors import PeerLost, StartupError
from outrider.options.engine import AUTO, EngineOptions
from outrider.options.memory import Share, memory_text
from outrider.options.model_id import checkpoint_name
from outrider.vocabulary import Reading
from outrider.wire.description import ModelInfo, TokenizerFiles

__all__ = ["load_engine", "load_model", "load_tokenizer", "tokenizer_of"]

FREE_NUMBERS = 2**28  # that a model may have beside those in its files: tables that it makes up
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_engine(
    path_or_id: str,
    *,
    name: str | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    kv_memory_bytes: int | Share | None = None,
    threads: int | None = None,
    progress: Callable[[str, float], None] | None = None,
    ranks: Ranks | None = None,
    quantization: str | None = None,
    parts: Parts | None = None,
    drafts: bool = False,
    resting_threads: int | None = None,
    lora: str | None = None,
    reading: Reading | None = None,
    lender: str | None = None,
) -> Engine:
    """Loads a causal LM by its folder, GGUF file or hub id; checks the engine against the model's own code.

    `name` is what clients call it (default: the last part of `path_or_id`); `dtype` is float32, bfloat16 or
    float16 (default: float32 on CPU, the checkpoint's own elsewhere); `threads` are torch's, for the whole
    process, on a CPU. `kv_memory_bytes` may be a share of what is free once the model is loaded; None: as
    EngineOptions has it. `progress` hears what is being done and the share of the work before it, 0 to 1.

    With `ranks`, each of which makes this call, the model is divided among them: the leader gets an engine to
    use, the others one to `follow` with. `device` is this rank's own; the KV memory is that of all together.

    With `quantization` int8 or int4, on a CPU in float32 and without `ranks`, linear layers are rounded to 8
    or 4 bits once the checks are passed. auto takes 4 for weights that have no more, as those of a GGUF
    file in Q4_0 or Q4_1, where this processor has no instructions for bytes, and else 8 if it multiplies
    exactly in them.

    `parts` are those that the engine is made of, in place of what is usual on the device; every rank gives
    the same.

    `resting_threads`: another number of threads to use at times, if that gives the same bits.

    `lora` is the folder of an adapter that is merged into the model; not with `ranks`.

    With `drafts`, and without `ranks`, logits are of the checkpoint's draft vocabulary only, if it has one.

    `reading`: how a draft is to read the tokens of a target that has another tokenizer; not with `ranks`. Its
    ids are the target's then.

    `lender`: the target of a draft whose checkpoint leaves out its embeddings; not with `ranks`.

    Raises StartupError, in one sentence, where the checkpoint is missing, damaged or incomplete or a flag is
    wrong, ModelRefused where the engine cannot run the model rightly, and PeerLost where a rank ends."""
    tell = progress or (lambda _stage, _share: None)
    quiet_transformers()
    target = _device(device)
    wanted = _dtype(dtype, target)
    size = ranks.group.size if ranks is not None else 1
    if auto := quantization == AUTO:
        quantization = Int8.name if exact_here() else None
    if kv_memory_bytes is None:
        kv_memory_bytes = EngineOptions(device=target.type).memory_for_kv
    chosen = parts or usual(target, wanted, quantization)
    check_parts(chosen, target, wanted, size)
    adapter = find_adapter(lora) if lora is not None else None
    use_threads(target, threads)
    tell("looking over the checkpoint", 0.0)
    checkpoint = locate(path_or_id)
    look_over(checkpoint)
    with parsed_once(checkpoint), unchanged(checkpoint, lambda: files_of(checkpoint)):
        config = config_of(checkpoint)
        quantized = prepare(config, checkpoint, target)
        digest = fingerprint(checkpoint) if ranks is None or ranks.leads else ""
        if ranks is not None:
            check_divisible(config, checkpoint_name(path_or_id), size)
            check_undivided(config, checkpoint)
            _connect(ranks, target)
        tell("loading weights", 0.1)
        model = _model(checkpoint, config, wanted, target, ranks, lender)
    if adapter is not None:
        tell("merging the adapter", 0.4)
        with unchanged(adapter, lambda: adapter_files(adapter)):
            digest = fingerprint_with(adapter, digest)
            merge(model, adapter)
    leave_text_part(model)  # once what an adapter has for other parts has found its place
    info = describe(model, name or checkpoint_name(path_or_id), digest, str(target))
    info = replace(info, tensor_parallel_size=size)
    if quantized is not None and model.is_quantized:  # its layers are those of the package that quantised it
        if quantization is not None:
            raise StartupError(f"--quantization is of no use with {checkpoint}, which {quantized} quantised")
        chosen, info = replace(chosen, linears="ordinary"), replace(info, quantization=quantized)
    elif auto and parts is None and ranks is None and _suits_int4(model):
        chosen = replace(chosen, linears=Int4.name)
    vocabulary = read(checkpoint.folder, info.vocab_size) if drafts and ranks is None else None
    if reading is not None:
        tell("adopting the target's tokens", 0.45)
        vocabulary = adopt(model, reading, vocabulary)
        info = replace(info, vocab_size=len(reading.read_as))
    elif vocabulary is not None:
        reduce_output(model, vocabulary)
    return build_engine(
        model,
        info,
        kv_memory_bytes,
        chosen,
        progress=tell,
        ranks=ranks,
        vocabulary=vocabulary,
        resting_threads=resting_threads,
    )


def tokenizer_of(path_or_id: str, lent: TokenizerFiles | None = None) -> TokenizerFiles:
    """Returns the tokenizer of a checkpoint that is otherwise in order as far as its configuration tells:
    the `lent` one, if its target is to lend it.

    Raises StartupError."""
    quiet_transformers()
    checkpoint = locate(path_or_id)
    look_over(checkpoint)
    # The configuration of a GGUF file takes seconds to read.
    if checkpoint.gguf is None and are_lent(config_of(checkpoint), checkpoint, lent):
        assert lent is not None
        return lent
    return load_tokenizer(path_or_id)


def load_model(path_or_id: str) -> tuple[Any, ModelInfo]:
    """Returns a checkpoint's model, in float32 on the CPU, as transformers has it, and what is known of it.

    Raises StartupError."""
    quiet_transformers()
    checkpoint = locate(path_or_id)
    look_over(checkpoint)
    with parsed_once(checkpoint):
        model = _model(checkpoint, config_of(checkpoint), torch.float32, torch.device("cpu"), None)
    return model, describe(model, checkpoint_name(path_or_id), fingerprint(checkpoint), "cpu")


def use_threads(device: torch.device, threads: int | None) -> None:
    """Gives this thread so many for its arithmetic (None: as many as it has), and for a GPU's engine one: as
    the thread that runs the steps has, since what is compiled is compiled for a number of threads."""
    if device.type != "cpu":
        torch.set_num_threads(1)
    elif threads:
        torch.set_num_threads(threads)


def describe(model: Any, name: str, fingerprint: str, device: str) -> ModelInfo:
    """Returns what there is to say of a model that has not been checked."""
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


def _suits_int4(model: Any) -> bool:
    """Returns whether a model has 4 bits, which lose nothing then, and 8 are no faster for one row, or much
    for many: with instructions for bytes they may be."""
    return library() is not None and not multiplies_bytes() and has_nibbles(model)


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
    checkpoint: Checkpoint,
    config: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    ranks: Ranks | None,
    lender: str | None = None,
) -> Any:
    if not are_lent(config, checkpoint, lender):
        _check_size(config, checkpoint)
    told: dict[str, Any] = dict(checkpoint.source)
    if ranks is not None:
        told["distributed_config"] = DistributedConfig(tp_size=ranks.group.size)
    elif getattr(config, "quantization_config", None) is not None:
        told["device_map"] = {"": device}  # such weights are not moved later
    try:
        model, report = auto_class(config).from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype if dtype is not None else "auto",
            use_safetensors=True,
            trust_remote_code=False,  # otherwise it asks on the terminal
            attn_implementation="eager",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are reported, and refused below by name
            **told,
        )
    except Exception as error:  # values out of range, out of memory
        if of_the_group(error):
            raise PeerLost("a process of the tensor-parallel group ended") from error
        reason = str(error).strip().split("\n")[0]
        raise StartupError(f"the weights in {checkpoint} do not load ({reason})") from None
    if checkpoint.gguf is not None:
        report = {**report, "unexpected_keys": {*report["unexpected_keys"], *unused(model, checkpoint)}}
    if are_lent(config, checkpoint, lender):
        assert lender is not None
        report = {**report, "missing_keys": borrow(model, report["missing_keys"], lender)}
    _all_used(checkpoint, type(model).__name__, report)
    if not {"distributed_config", "device_map"} & told.keys():  # otherwise it is there
        model = _on_device(model, device, checkpoint)
    leave_files(tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.device.type == "cpu")
    return model.eval().requires_grad_(False)


def _check_size(config: Any, checkpoint: Checkpoint) -> None:
    """Raises StartupError if the configuration asks for far more numbers than the files hold. What they lack
    would be made up, and take all memory before anybody is told that it is missing."""
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config, attn_implementation="eager")
    except Exception:  # what loads it tells of it
        return
    numbers = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    held = 8 * sum(file.stat().st_size for file in files_of(checkpoint))  # of a bit at least
    if numbers > held + FREE_NUMBERS:
        where = checkpoint.gguf or "config.json"
        raise StartupError(
            f"{checkpoint.folder / where} asks for {numbers} numbers, and the files hold {held} at most: is "
            "it of another model?"
        )


def _on_device(model: Any, device: torch.device, checkpoint: Checkpoint) -> Any:
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        free = memory_text(torch.cuda.mem_get_info(device)[0])
        raise StartupError(
            f"there is no room on {device} for the weights in {checkpoint}: {free} are left; another worker "
            "there may take less for keys and values, by its --kv-memory"
        ) from None


def _all_used(checkpoint: Checkpoint, architecture: str, report: Mapping[str, Any]) -> None:
    """Raises StartupError unless the checkpoint's tensors are those that the model has, but for what
    transformers knows not to be a part of it."""
    if missing := sorted(report["missing_keys"]):
        raise StartupError(
            f"the weights in {checkpoint} lack {missing[0]} ({len(missing)} missing in all), which "
            f"{architecture} needs"
        )
    for key, found, expected in report["mismatched_keys"]:
        raise StartupError(
            f"{key} in {checkpoint} has the shape {list(found)} where config.json asks for {list(expected)}"
        )
    if unused := sorted(report["unexpected_keys"]):
        raise StartupError(
            f"{architecture} has no place for {unused[0]} in {checkpoint} ({len(unused)} such in all), and "
            "would give another text without: the checkpoint was quantised or changed in a way that "
            "config.json does not tell; give it as it was before"
        )


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
    """Returns the format that is asked for; None is the checkpoint's own."""
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
        named = [value] if isinstance(value, int) else value or []
        if not all(isinstance(one, int) and 0 <= one < 2**32 for one in named):
            raise StartupError("the checkpoint's eos_token_id is no id of a token: correct its config.json")
        ids.update(named)
    return tuple(sorted(ids))


def quiet_transformers() -> None:
    """Keeps transformers' own bars and warnings off the terminal: what matters is said by errors of ours."""
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # which heeds nothing of the following
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.CRITICAL)
