"""Text from the target, many rows at once, with the logits it was drawn from."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM


@torch.no_grad()
def continue_rows(
    target: LlamaForCausalLM, prompts: Tensor, length: int, sampled: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Continues prompts [rows, prompt] to `length` tokens: greedily, or at temperature 1 where `sampled`.

    `sampled` is a boolean for each row. Returns ids [rows, length] and the logits [rows, length - 1,
    vocabulary] that the target gave after each of them but the last, prompt positions included.
    """
    rows, prompt = prompts.shape
    cache = DynamicCache(config=target.config)
    ids = torch.empty(rows, length, dtype=torch.long, device=prompts.device)
    ids[:, :prompt] = prompts
    first = target(input_ids=prompts, past_key_values=cache).logits
    every = first.new_empty(rows, length - 1, first.shape[-1])
    every[:, :prompt] = first
    random_rows = sampled.nonzero()[:, 0]
    for position in range(prompt, length):
        logits = every[:, position - 1]
        chosen = logits.argmax(dim=-1)
        if len(random_rows):
            said = torch.softmax(logits[random_rows].float(), dim=-1)
            # The largest p / e with e ~ Exp(1) falls on each token with its probability p.
            race = torch.empty_like(said).exponential_(generator=generator)
            chosen[random_rows] = (said / race).argmax(dim=-1)
        ids[:, position] = chosen
        if position < length - 1:
            every[:, position] = target(input_ids=chosen[:, None], past_key_values=cache).logits[:, 0]
    return ids, every


@torch.no_grad()
def continue_one(
    target: LlamaForCausalLM, prompt: Tensor, new: int, eos: int, noise: Tensor | None = None
) -> Tensor:
    """Returns one prompt [prompt] and up to `new` tokens after it, none from eos on: [prompt + at most new].

    It is greedy without `noise`; with Gumbel noise [new, vocabulary], added to the logits, a draw at T=1.
    """
    cache = DynamicCache(config=target.config)
    ids = prompt.tolist()
    step = prompt[None]
    for index in range(new):
        logits = target(input_ids=step, past_key_values=cache, use_cache=True).logits[0, -1].float()
        token = int((logits if noise is None else logits + noise[index]).argmax())
        if token == eos:
            break
        ids.append(token)
        step = torch.tensor([[token]], device=prompt.device)
    return torch.tensor(ids, device=prompt.device)
