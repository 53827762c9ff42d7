"""Text from the target, many rows at once, with the logits it was drawn from."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[misc]  # transformers is not analysed
    """One layer's keys and values in a buffer of fixed room, so that a step copies only its own row."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room
        self.key_buffer: Tensor | None = None
        self.value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append [batch, kv_heads, new, head_dim] and return everything held so far, as views."""
        before = self.get_seq_length()
        if self.key_buffer is None or self.value_buffer is None:
            self.lazy_initialization(key_states, value_states)
            batch, heads, _, dim = key_states.shape
            self.key_buffer = key_states.new_empty(batch, heads, self.room, dim)
            self.value_buffer = value_states.new_empty(batch, heads, self.room, dim)
        after = before + key_states.shape[-2]
        self.key_buffer[:, :, before:after] = key_states
        self.value_buffer[:, :, before:after] = value_states
        self.keys, self.values = self.key_buffer[:, :, :after], self.value_buffer[:, :, :after]
        return self.keys, self.values


@torch.no_grad()
def continue_rows(
    target: LlamaForCausalLM, prompts: Tensor, length: int, sampled: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Continue prompts [rows, prompt] to `length` tokens: greedily, or at temperature 1 where `sampled`.

    `sampled` is a boolean per row. Returns ids [rows, length] and the logits [rows, length - 1,
    vocabulary] that the target gave after each of them but the last, prompt positions included.
    """
    rows, prompt = prompts.shape
    cache = Cache(layers=[RoomyLayer(length) for _ in range(target.config.num_hidden_layers)])
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
    """Continue one prompt [prompt] by up to `new` tokens, stopping before eos: [prompt + at most new].

    Greedy without `noise`; with Gumbel noise [new, vocabulary], added to the logits, a draw at T=1.
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
