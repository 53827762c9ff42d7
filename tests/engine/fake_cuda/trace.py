"""Runs recorded steps on fake CUDA tensors and prints what is asked of the device, as JSON:

python -m tests.engine.fake_cuda.trace GUARD_LIBRARY ARCHITECTURE...
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.jit import JITFunction

from outrider.engine import step_graphs, triton_attention, triton_layers
from outrider.engine.attention import NAME
from outrider.engine.flat_inputs import Shape
from outrider.engine.group import Alone
from outrider.engine.kernel_drawing import KernelDrawing
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.parts import kernels
from outrider.engine.runner import CallByCall
from outrider.engine.triton_layers import TritonLinear
from outrider.engine.triton_pass import run_by_kernels
from tests.tiny_models import BASE, CONFIGS

VOCAB = 199
GPU = torch.device("cuda:0")
SHAPE = Shape(8, 8, 8)
VIEWS = [
    "alias",
    "as_strided",
    "chunk",
    "detach",
    "diagonal",
    "expand",
    "lift_fresh",
    "narrow",
    "permute",
    "reshape",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "view",
    "_reshape_alias",
    "_unsafe_view",
    "split_with_sizes",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
]


KERNELS = Counter[str]()  # of Triton, launched since it was cleared


def launch(self: Any, *_args: Any, **_options: Any) -> None:
    """Stands for Triton's launch."""
    KERNELS[self.fn.__name__] += 1


class Watch(TorchDispatchMode):
    """Counts what torch launches, and notes where the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.faults: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        try:
            out = func(*args, **(kwargs or {}))
        except Exception as error:
            self.faults[f"{name}: {type(error).__name__}"] += 1
            raise
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)]
        where = {each.device.type for each in tensors if each.dim() or each.device.type == "cuda"}
        if where == {"cuda", "cpu"}:
            self.faults[f"{name} crosses between host and device"] += 1
        self.launches += "cuda" in where and name not in VIEWS
        return out


class Uploads(step_graphs.Upload):
    """A buffer that nothing is uploaded to."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.zeros(size, dtype=dtype, device=device)


class Graphs(step_graphs.StepGraphs):
    """Steps of which only what is recorded runs."""

    def _load(self, step: object) -> None:
        """It has no numbers."""

    def _load_fields(self, *_: object) -> int:
        """It has no numbers."""
        return 0

    def _load_draws(self, *_: object) -> None:
        """Neither has this."""


def model_of(arch: str) -> Any:
    model_type, special = CONFIGS[arch]
    config = AutoConfig.for_model(model_type, **{**BASE, **special, "vocab_size": VOCAB})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, tensor in own.items():
                if tensor is not None:
                    own[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
    model.set_attn_implementation(NAME)
    return model


def traced(arch: str, waits: bool = False) -> dict[str, Any]:
    """Returns what a recorded step and the draws after it ask for. `waits`: with a step that has a fault."""
    model, group = model_of(arch), Alone(VOCAB)
    triton_layers.put_into(model, TritonLinear)
    by_kernels = run_by_kernels(model)
    (kernel,) = kernels(("triton",))
    calls = CallByCall(model, PagedAttention.on(model, 4, kernel), group)
    found: list[Watch] = []
    launched: list[Counter[str]] = []

    def forward(inputs: Any) -> torch.Tensor:
        logits = calls.run(inputs)
        if waits:
            logits = logits * logits.max().item()
        return logits

    def record(function: Callable[[], None], /) -> Callable[[], None]:
        if not waits:
            function()  # makes the pools
        KERNELS.clear()
        with Watch() as watch:
            found.append(watch)
            function()
        launched.append(KERNELS.copy())
        return function

    graphs = Graphs(
        forward, group, [SHAPE], most_pages=4, block_size=kernel.block_size, scratch_block=4, device=GPU
    )
    try:
        graphs.record(record, lambda _share: None)
    except Exception:
        if not found or not found[-1].faults:
            raise
    return {
        "by_kernels": by_kernels,
        "launches": found[0].launches,
        "kernels": launched[0].total() if launched else 0,
        "draws": max(map(Counter.total, launched[1:]), default=0),
        "layers": model.config.get_text_config().num_hidden_layers,
        "faults": sorted({fault for watch in found for fault in watch.faults}),
    }


def main(library: str, *archs: str) -> None:
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    setattr(step_graphs, "Upload", Uploads)  # noqa: B010
    setattr(step_graphs, "drawing_for", KernelDrawing)  # noqa: B010
    setattr(triton_layers, "choose_tiles", lambda model: None)  # noqa: B010  # by timing
    setattr(triton_attention, "_multiprocessors", lambda device: 132)  # noqa: B010
    setattr(JITFunction, "run", launch)  # noqa: B010
    setattr(torch.cuda, "device_of", nullcontext)  # noqa: B010
    setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))  # noqa: B010
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        told = {arch: traced(arch) for arch in archs} | {"one that waits": traced(archs[0], waits=True)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
