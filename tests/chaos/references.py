"""Requests of a storm, and the tokens that the target alone gives: one batch in the engine, no drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from tokenizers import Tokenizer

from demo.heldout import heldout_prompts
from outrider.engine.engine import Work
from outrider.engine.loading import load_engine
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts, draw
from tests.chaos.cluster import TARGET

SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_p=0.95, seed=3),
    SamplingParams(temperature=1.0, top_k=50, seed=2**53 + 1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2),
    SamplingParams(temperature=0.7, min_p=0.02, presence_penalty=0.5, frequency_penalty=0.2, seed=5),
)
PLAIN_EVERY = 7  # every so many cases one asks for no drafts
KV_BYTES = 2**28


@dataclass(frozen=True)
class Case:
    """A request, and its undisturbed answer."""

    prompt: list[int]
    sampling: dict[str, float]  # the fields of SamplingParams that the API has, as it names them
    num_speculative_tokens: int | None
    tokens: list[int]
    text: str


def cases(count: int, tokens: tuple[int, int]) -> list[Case]:
    """So many, greedy and sampled, with answers of lengths between the two of `tokens`, evenly spread."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in heldout_prompts(count)]
    samplings = [SAMPLINGS[index % len(SAMPLINGS)] for index in range(count)]
    least, most = tokens
    lengths = [least + (most - least) * index // max(1, count - 1) for index in range(count)]
    answers = alone(prompts, samplings, lengths)
    return [
        Case(
            prompt, fields(sampling), 0 if not index % PLAIN_EVERY else None, answer, tokenizer.decode(answer)
        )
        for index, (prompt, sampling, answer) in enumerate(zip(prompts, samplings, answers, strict=True))
    ]


def fields(sampling: SamplingParams) -> dict[str, float]:
    return {name: value for name, value in asdict(sampling).items() if name != "logit_bias"}


def alone(
    prompts: Sequence[list[int]], samplings: Sequence[SamplingParams], lengths: Sequence[int]
) -> list[list[int]]:
    """What the target gives for each, one token a step."""
    engine = load_engine(str(TARGET), threads=1, kv_memory_bytes=KV_BYTES)
    pool = engine.pool
    tables = [pool.open([]) for _ in prompts]
    counts = [TokenCounts(prompt, ()) for prompt in prompts]
    logs = [list(prompt) for prompt in prompts]
    open_ = list(range(len(prompts)))
    while open_:
        works = []
        for index in open_:
            start = tables[index].length
            pool.extend(tables[index], len(logs[index]) - start)
            works.append(Work(tables[index].blocks, start, logs[index][start:], 1))
        rows = [Row(samplings[index], len(logs[index]), counts[index], ()) for index in open_]
        for index, token in zip(open_, draw(engine.step(works), rows).tolist(), strict=True):
            counts[index].extend([token])
            logs[index].append(token)
        open_ = [index for index in open_ if len(logs[index]) < len(prompts[index]) + lengths[index]]
    return [log[len(prompt) :] for log, prompt in zip(logs, prompts, strict=True)]
