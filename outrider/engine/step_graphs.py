"""Steps of a few shapes that are recorded once and then repeated: on a GPU, Python leaves the step.

A recorded step reads its inputs from buffers that stay where they are, and leaves logits and the likeliest
token of each row in others. A second kind of record draws with noise, for so many rows, and a third ranks a
row's best tokens; two more do so with what top_k, top_p and min_p leave. Where the model is divided among
processes, each records its own part, with what the group does together in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from outrider.engine.drawing_choice import drawing_for
from outrider.engine.flat_inputs import (
    SIZES,
    Arrays,
    FlatInputs,
    FlatStep,
    Shape,
    arrays,
    buffer_bytes,
    flat_inputs,
    flatten,
)
from outrider.engine.group import Group
from outrider.engine.recording import Record, Repeat
from outrider.sampling.how import How
from outrider.sampling.packed_rows import fields_in, pack, places_of, words_for
from outrider.sampling.ranked import MOST_RANKED, Ranked, ranked_of
from outrider.sampling.sampler import Row, possible, rank
from outrider.sampling.vocab_parallel import VocabParallelRow


class Upload:
    """A buffer on the device, and where its next contents stand until they are copied.

    Flat, since only what lies in one piece is copied without the host waiting for it."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.staged = torch.zeros(size, dtype=dtype, pin_memory=on_gpu)
        self.buffer = torch.zeros(size, dtype=dtype, device=device)
        self._device = device
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until what was staged last is copied, and may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()

    def start(self, size: int) -> None:
        """Copies the first of what is staged."""
        self.buffer[:size].copy_(self.staged[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


class StepGraphs:
    """The recorded steps of an engine. One runs at a time."""

    def __init__(
        self,
        forward: Callable[[FlatInputs], torch.Tensor],
        group: Group,
        shapes: Sequence[Shape],
        *,
        most_pages: int,
        block_size: int,
        scratch_block: int,
        device: torch.device,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """`forward` gives the model's logits of the tokens to keep; `most_pages` are blocks of a session;
        `vocabulary` [K]: ids that logits are of, rising; None: of all."""
        self.shapes = tuple(shapes)
        self._forward = forward
        self._group = group
        self._block_size = block_size
        self._scratch_block = scratch_block
        rows = max(shape.tokens for shape in shapes)
        sessions = max(shape.sessions for shape in shapes)
        size = max(buffer_bytes(shape, most_pages) for shape in shapes)
        self._inputs = Upload(size, torch.uint8, device)
        self._tables = torch.full((sessions, most_pages), scratch_block, dtype=torch.int32, device=device)
        # One row more than there are tokens, for draws that fill up a record.
        self._spare_row = rows
        self.drawing = drawing_for(group, rows + 1, device, vocabulary)
        self._vocabulary = vocabulary
        self._allowed = 0
        self._draws = Upload(3 * rows, torch.int64, device)
        self._ranked = torch.zeros(rows, 2, MOST_RANKED, dtype=torch.int32, device=device)
        self._steps: dict[Shape, Repeat] = {}
        self._noisy: dict[int, Repeat] = {}
        self._ranks: dict[int, Repeat] = {}
        self._places = None if vocabulary is None else places_of(vocabulary)
        self._told = Upload(words_for(rows), torch.int64, device)
        self._cut: dict[int, Repeat] = {}
        self._cut_ranks: dict[int, Repeat] = {}

    def record(self, record: Record, progress: Callable[[float], None]) -> None:
        """Records every shape, the largest first, whose memory the others then use; `progress` hears the
        share that is done. Raises whatever the model or the device makes of it."""
        sizes = [size for size in SIZES if size <= self._spare_row]
        total = len(self.shapes) + len(sizes)
        self.allow(self._group.ids.stop)
        with torch.inference_mode():
            for index, shape in enumerate(reversed(self.shapes)):
                progress(index / total)
                self._load(flatten([], shape, block_size=self._block_size, scratch_block=self._scratch_block))
                self._steps[shape] = record(self._step_of(shape))
            for index, size in enumerate(reversed(sizes), len(self.shapes)):
                progress(index / total)
                self._load_draws([], [], size)
                numbers = self._draws.buffer[: 3 * size].view(3, size)
                self._noisy[size] = record(partial(self.drawing.draw, numbers))
                if self._group.size == 1:  # else how clearly a token won is not known in one place
                    self._ranks[size] = record(partial(self.drawing.rank, numbers, self._ranked[:size]))
                if (cutting := self.drawing.cutting) is not None:
                    self._load_fields([], [], self._allowed, size)
                    fields = fields_in(self._told.buffer[: words_for(size)], size)
                    self._cut[size] = record(partial(cutting.draw_cut, fields))
                    self._cut_ranks[size] = record(partial(cutting.rank_cut, fields, self._ranked[:size]))
        progress(1.0)

    def run(self, step: FlatStep) -> torch.Tensor:
        """Returns this process's part of the logits, [rows, w] float32, valid until the next step.

        Raises KeyError for a shape that was not recorded."""
        with torch.inference_mode():
            repeat = self._steps[step.shape]
            self._load(step)
            repeat()
        return self.drawing.logits[: step.rows]

    def allow(self, vocab_size: int) -> None:
        """Gives ids from `vocab_size` on a logit of -inf, from the next step on."""
        if vocab_size != self._allowed:
            self._allowed = vocab_size
            self.drawing.limit.fill_(vocab_size)

    def draw_noisy(self, rows: Sequence[int], drawn: Sequence[VocabParallelRow]) -> None:
        """Replaces the tokens of these rows of the last step by tokens drawn with noise."""
        size = next(size for size in SIZES if size >= len(rows))
        with torch.inference_mode():
            self._load_draws(rows, drawn, size)
            self._noisy[size]()

    def draw_whole(self, rows: Sequence[Row], at: Sequence[int], vocab_size: int) -> None:
        """Replaces the tokens of rows of the last step, `at` these places, by what they ask for, whatever it
        is; see Drawing.draw_whole. Their logits may change."""
        if not self._cut:
            self.drawing.draw_whole(rows, at, vocab_size)
            return
        size = next(size for size in SIZES if size >= len(rows))
        with torch.inference_mode():
            self._load_fields(rows, at, vocab_size, size)
            self._cut[size]()

    def rank_whole(self, rows: Sequence[Row], count: int, vocab_size: int) -> list[Ranked]:
        """Does what `rank` does, for rows whatever they ask for. Their logits may change."""
        if not self._cut_ranks or count > MOST_RANKED:
            logits = self.drawing.logits[: len(rows)]
            return rank(logits, rows, count, vocab_size, self._vocabulary)
        size = next(size for size in SIZES if size >= len(rows))
        with torch.inference_mode():
            ids = self._load_fields(rows, range(len(rows)), vocab_size, size)
            self._cut_ranks[size]()
        return possible(ranked_of(self._ranked[: len(rows)].cpu().numpy(), min(count, ids)), rows)

    def rank(self, drawn: Sequence[VocabParallelRow], count: int) -> list[Ranked]:
        """Returns the `count` best, up to MOST_RANKED, of each row of the last step, in order: as `tokens`,
        here the host waits."""
        size = next(size for size in SIZES if size >= len(drawn))
        with torch.inference_mode():
            self._load_draws(range(len(drawn)), drawn, size)
            self._ranks[size]()
        return ranked_of(self._ranked[: len(drawn)].cpu().numpy(), min(count, self._ids_allowed()))

    def tokens(self, rows: int) -> list[int]:
        """Returns the last step's tokens: here, and only here, the host waits for the device."""
        chosen: list[int] = self.drawing.tokens[:rows].tolist()
        return chosen

    def _ids_allowed(self) -> int:
        if self._vocabulary is None:
            return min(self._allowed, self.drawing.logits.shape[1])
        return max(1, int(torch.searchsorted(self._vocabulary, self._allowed)))

    def _load(self, step: FlatStep) -> None:
        size = len(step.buffer)
        self._inputs.wait()
        self._inputs.staged[:size].copy_(torch.from_numpy(step.buffer))
        self._inputs.start(size)
        parts = self._arrays(step.shape, step.pages)
        self._tables[: step.shape.sessions, : step.pages].copy_(parts.tables)

    def _load_draws(self, rows: Sequence[int], drawn: Sequence[VocabParallelRow], size: int) -> None:
        self._draws.wait()
        row, key, temperature = self._draws.staged[: 3 * size].view(3, size).numpy()
        count = len(rows)
        row[:count], row[count:] = rows, self._spare_row
        key[:count] = np.array([one.key for one in drawn], dtype=np.uint64).view(np.int64)
        temperature.view(np.float64)[:count] = [
            0.0 if one.how is How.GREEDY else one.temperature for one in drawn
        ]
        temperature.view(np.float64)[count:] = 1.0
        self._draws.start(3 * size)

    def _load_fields(self, rows: Sequence[Row], at: Sequence[int], vocab_size: int, size: int) -> int:
        """Applies what changes logits; returns how many ids may be drawn."""
        packed = pack(rows, at, self.drawing.logits.shape[1], vocab_size, self._places)
        self._told.wait()
        packed.fill(self._told.staged, size, self._spare_row)
        self._told.start(words_for(size))
        if packed.changed and self.drawing.cutting is not None:
            self.drawing.cutting.change(packed)
        return packed.ids

    def _arrays(self, shape: Shape, pages: int) -> Arrays:
        return arrays(self._inputs.buffer, shape, pages, torch.int64, torch.int32)

    def _step_of(self, shape: Shape) -> Callable[[], None]:
        # Where the other arrays lie does not depend on the number of pages; the tables are copied out.
        tables = self._tables[: shape.sessions]
        inputs = flat_inputs(self._arrays(shape, 0), tables, shape, shape.tokens, shape.tokens)

        def step() -> None:
            self.drawing.take(self._group.part(self._forward(inputs)))

        return step
