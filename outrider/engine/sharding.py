"""A model divided among ranks by transformers' own plan, and what joins the parts again.

transformers reads each rank's slices and wraps them in DTensors and hooks. Those are taken off again once the
model's own code has run with them: plain local weights with a few collectives of ours give the same logits,
cost less a layer, and can be packed as an undivided model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from outrider.engine import recurrent_layers
from outrider.engine.model_class import auto_class
from outrider.engine.ranks import Ranks
from outrider.errors import ModelRefused, StartupError

GATHERED = ("colwise_gather_output", "colwise_rep")
SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
ROWWISE = ("rowwise", *SPLIT_INPUT)
SUMMED = ("moe_tp_experts", "all_reduce")
LOCAL = (  # nothing to do between the ranks
    "colwise",
    "packed_colwise",
    "packed_rowwise",
    "local_params",
    "mla_kv_a_proj",
    "replicate",
    "replicated_with_grad_allreduce",
)
EMBEDDINGS = ("embedding_rowwise", "embedding_colwise")
STYLES = frozenset({*GATHERED, *ROWWISE, *SUMMED, *LOCAL, *EMBEDDINGS, "moe_identity_expert"})
WHOLE = (*GATHERED, *SPLIT_INPUT, "replicate", "replicated_with_grad_allreduce")  # rows come in and go out
DIVIDES_HEADS = ("colwise", "packed_colwise")
ATTENTION = re.compile(r"attn|attention")


@dataclass(frozen=True, slots=True)
class Joint:
    """A module at which the ranks meet."""

    name: str
    style: str
    width: int  # of its whole output, or ids of an embedding


def check_divisible(config: Any, name: str, size: int) -> None:
    """Raises ModelRefused where a model of this configuration cannot be divided among so many ranks; looks at
    its shape alone, reads no weights. Raises StartupError where there is no such model."""
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
    except Exception as error:  # values out of range
        words = str(error).strip().split("\n")[0]
        raise StartupError(f"the config.json of {name} makes no model ({words})") from None
    reason = obstacle(model, size)
    if reason is not None:
        raise ModelRefused(
            f"{type(model).__name__} ({name}) cannot be divided among {size} processes: {reason}; "
            "change --tensor-parallel-size"
        )


def obstacle(model: Any, size: int) -> str | None:
    """Returns why not, as a phrase."""
    plan = styles(model)
    if not any(re.search(r"\.\d+\.", name) for name in plan):
        return "transformers has no tensor-parallel plan for its layers"
    unknown = sorted(set(plan.values()) - STYLES)
    if unknown:
        return f"its tensor-parallel plan says {unknown[0]}, which this engine does not do"
    for layer in recurrent_layers.names(model):
        for name, style in plan.items():
            if name.startswith(f"{layer}.") and style not in WHOLE:
                return f"its tensor-parallel plan divides {name}, whose recurrent state is not divided here"
    modules = dict(model.named_modules())
    for module_name, style in plan.items():
        module = modules.get(module_name)
        if style in (*GATHERED, *ROWWISE, "colwise") and not isinstance(module, (nn.Linear, type(None))):
            return (
                f"its {module_name} is a {type(module).__name__}, which is not divided as a linear layer is"
            )
    if any(style in DIVIDES_HEADS and ATTENTION.search(rule) for rule, style in plan.items()):
        text = model.config.get_text_config()
        for what, attribute in (("attention", "num_attention_heads"), ("key-value", "num_key_value_heads")):
            heads = getattr(text, attribute, None)
            for count in heads if isinstance(heads, (list, tuple)) else [heads]:
                if isinstance(count, int) and count % size:
                    return f"it has {count} {what} heads"
    return None


def styles(model: Any) -> dict[str, str]:
    """transformers' plan, one entry for each module or parameter that it names."""
    plan: Mapping[str, str] = model.tp_plan or {}
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found = {}
    for name in names:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            found[name] = style
    return found


def localize(model: Any) -> list[Joint]:
    """Makes every weight a plain tensor, this rank's, takes transformers' hooks off, and says where the
    collectives belong. Raises ModelRefused where there is nothing for this rank of a weight."""
    modules = dict(model.named_modules())
    joints = []
    for name, style in styles(model).items():
        module = modules.get(name)
        if module is None:  # a parameter's rule
            continue
        module.__dict__.pop("forward", None)
        width = getattr(module, "num_embeddings" if style == "embedding_rowwise" else "out_features", 0)
        if style == "embedding_colwise":
            width = module.embedding_dim
        cut_logits = style in GATHERED and module is model.get_output_embeddings()
        if style not in LOCAL and not cut_logits:
            joints.append(Joint(name, style, width))
    local: dict[int, nn.Parameter] = {}  # tied weights stay tied
    for module in modules.values():
        for key, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if id(parameter) not in local:
                    part = parameter.to_local()
                    if not part.numel():
                        raise ModelRefused(
                            f"{type(model).__name__} has weights too narrow for so many processes; "
                            "change --tensor-parallel-size"
                        )
                    local[id(parameter)] = nn.Parameter(part, requires_grad=False)
                module._parameters[key] = local[id(parameter)]
    return joints


def connect(model: Any, joints: list[Joint], ranks: Ranks) -> None:
    """Puts the collectives in. The output embedding keeps this rank's slice of the logits where it is divided
    by token ids."""
    for joint in joints:
        module = model.get_submodule(joint.name)
        if joint.style in ROWWISE:
            _sum_products(module, ranks, split=joint.style in SPLIT_INPUT)
        elif joint.style in SUMMED:
            module.register_forward_hook(lambda _module, _args, out: ranks.sum(out))
        elif joint.style in GATHERED or joint.style == "embedding_colwise":
            _gather_columns(module, ranks, joint.width)
        elif joint.style == "embedding_rowwise":
            _look_up(module, ranks, ranks.slice_of(joint.width))
        else:  # an expert that gives its input back, once in a sum over all ranks
            module.register_forward_pre_hook(lambda _module, args: (args[0] / ranks.group.size, *args[1:]))


def _sum_products(module: Any, ranks: Ranks, *, split: bool) -> None:
    """A linear layer that has some of the columns: the products are summed, then the bias is added once."""
    bias, module.bias = module.bias, None

    def after(_module: Any, _args: Any, out: torch.Tensor) -> torch.Tensor:
        total = ranks.sum(out)
        return total if bias is None else total + bias

    if split:
        module.register_forward_pre_hook(
            lambda _module, args: (args[0][..., ranks.slice_of(args[0].shape[-1])], *args[1:])
        )
    module.register_forward_hook(after)


def _gather_columns(module: Any, ranks: Ranks, width: int) -> None:
    module.register_forward_hook(lambda _module, _args, out: ranks.concat(out, width))


def _look_up(module: Any, ranks: Ranks, own: slice) -> None:
    """An embedding that has some of the ids: the others' vectors come from the other ranks."""
    module.padding_idx = None  # counts from the first of all ids
    look_up = module.forward

    def forward(ids: torch.Tensor) -> torch.Tensor:
        local = ids - own.start
        elsewhere = (local < 0) | (ids >= own.stop)
        found: torch.Tensor = look_up(local.masked_fill(elsewhere, 0))
        return ranks.sum(found.masked_fill(elsewhere[..., None], 0))

    module.forward = forward
