"""What a device has to be told of rows to draw them, in one buffer, which goes there in one copy.

Each part of it begins at a multiple of 16 bytes: kernels are compiled for that, or anew for what is not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.sampling.noisy_argmax import row_keys
from outrider.sampling.shaping import SMALLEST_TEMPERATURE, Row, penalty_of

Ids = npt.NDArray[np.int64]


class Fields(NamedTuple):
    """A number of 64 bits for each row: [n] each."""

    at: torch.Tensor  # its place among the logits
    key: torch.Tensor  # of its noise
    temperature: torch.Tensor  # float64; 0 = the likeliest
    top_k: torch.Tensor  # 0 = off
    top_p: torch.Tensor  # float64
    floor: torch.Tensor  # float64: the least log p' by min_p
    mask: torch.Tensor  # its place among the masks; -1 = none
    committed_first: torch.Tensor  # where its committed tokens stand among the entries
    committed_count: torch.Tensor
    drafted_first: torch.Tensor
    drafted_count: torch.Tensor
    factor: torch.Tensor  # float64: the repetition penalty
    bias_first: torch.Tensor
    bias_count: torch.Tensor
    limit: torch.Tensor  # only ids below it are drawn; the same for all


Views = tuple[Fields, torch.Tensor, torch.Tensor, torch.Tensor]
"""The fields, the entries' ids [e] int32 and numbers [e] float32, and the masks [m, bytes] uint8."""
FLOATS = ("temperature", "top_p", "floor", "factor")


@dataclass(frozen=True, slots=True)
class PackedRows:
    """The buffer, and what the host knows of it."""

    buffer: npt.NDArray[np.uint8]
    rows: int
    limit: int  # ids below it may be drawn
    ids: int  # those that there are of them
    entries: int  # those that fill up included
    mask_bytes: int  # of each
    masks: int
    most_committed: int  # entries of a row; -1 = none is penalized
    most_biases: int  # of a row
    top_k: bool  # whether any has it
    top_p: bool
    cut: bool  # whether any has one of top_k, top_p and min_p

    @property
    def changed(self) -> bool:
        """Returns whether any row's logits are changed, before they are cut."""
        return self.most_committed >= 0 or self.most_biases > 0 or self.masks > 0

    def fill(self, staged: torch.Tensor, rows: int, spare: int) -> None:
        """Writes the fields of so many rows where they are staged; those that fill up stand at `spare`."""
        more = np.zeros((len(Fields._fields), rows - self.rows), np.int64)
        column = dict(zip(Fields._fields, more, strict=True))
        column["at"][:], column["mask"][:], column["limit"][:] = spare, -1, self.limit
        column["top_p"].view(np.float64)[:], column["floor"].view(np.float64)[:] = 1.0, -np.inf
        words = self.buffer[: 8 * words_for(self.rows)].view(np.int64).reshape(len(Fields._fields), -1)
        target = staged[: words_for(rows)].view(len(Fields._fields), -1).numpy()
        target[:, : self.rows], target[:, self.rows : rows] = words[:, : self.rows], more

    def views(self, buffer: torch.Tensor) -> Views:
        """Returns what stands in the buffer on the device."""
        words = words_for(self.rows)
        fields = fields_in(buffer[: 8 * words].view(torch.int64), self.rows)
        rest = buffer[8 * words :]
        ids, numbers = rest[: 4 * self.entries], rest[4 * self.entries : 8 * self.entries]
        masks = rest[8 * self.entries :].view(self.masks, self.mask_bytes)
        return fields, ids.view(torch.int32), numbers.view(torch.float32), masks


class _Entries:
    """Ids and numbers, one run after another."""

    def __init__(self, places: Ids | None) -> None:
        self._places = places  # of ids among the logits; below 0 = they have none
        self._ids: list[npt.NDArray[np.int32]] = []
        self._numbers: list[npt.NDArray[np.float32]] = []
        self.count = 0

    def add(self, ids: Ids, numbers: npt.NDArray[np.float32]) -> tuple[int, int]:
        """Returns where they stand, and how many they are."""
        if self._places is not None:
            known = ids < len(self._places)
            ids = np.where(known, self._places[np.where(known, ids, 0)], -1)
        self._ids.append(ids.astype(np.int32))
        self._numbers.append(numbers)
        self.count += len(ids)
        return self.count - len(ids), len(ids)

    def parts(self) -> list[npt.NDArray[np.int32] | npt.NDArray[np.float32]]:
        """Returns the ids, then the numbers, filled up."""
        more = _padded(self.count, 4) - self.count
        return [*self._ids, np.zeros(more, np.int32), *self._numbers, np.zeros(more, np.float32)]


def pack(
    rows: Sequence[Row], at: Sequence[int], width: int, limit: int, places: Ids | None = None
) -> PackedRows:
    """Returns what is to be told of rows that stand `at` these places among logits [R, width], of which only
    ids below `limit` are drawn. `places`: where each id stands in a row of logits, below 0 where it does not;
    None = at its own number."""
    count = len(rows)
    words = np.zeros((len(Fields._fields), _padded(count, 2)), np.int64)
    column = {name: of_rows[:count] for name, of_rows in zip(Fields._fields, words, strict=True)}
    column["limit"][:] = limit
    named = width if places is None else len(places)
    ids = min(limit, width) if places is None else max(1, int((places[:limit] >= 0).sum()))
    floats = {name: column[name].view(np.float64) for name in FLOATS}
    column["at"][:] = at
    column["key"][:] = row_keys([row.params.seed for row in rows], [row.position for row in rows]).view(
        np.int64
    )
    entries = _Entries(places)
    masks: list[npt.NDArray[np.uint8]] = []
    histories: dict[tuple[int, int], tuple[int, int]] = {}
    biases: dict[int, tuple[int, int]] = {}
    mask_bytes, penalized = _padded(-(-named // 8), 16), False
    for index, row in enumerate(rows):
        params = row.params
        if not params.greedy:
            floats["temperature"][index] = max(params.temperature, SMALLEST_TEMPERATURE)
        column["top_k"][index] = params.top_k if 0 < params.top_k < ids else 0
        floats["top_p"][index] = params.top_p
        floats["floor"][index] = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
        floats["factor"][index] = params.repetition_penalty
        column["mask"][index] = -1
        if params.penalized:
            if row.history is None:
                raise ValueError("a row with penalties needs its history")
            penalized = True
            which = (id(row.history), id(params))
            if which not in histories:
                tokens, counts = row.history.committed
                histories[which] = entries.add(tokens, penalty_of(params, counts))
            column["committed_first"][index], column["committed_count"][index] = histories[which]
            if row.drafted:
                tokens, counts = row.history.with_drafted(row.drafted)
                column["drafted_first"][index], column["drafted_count"][index] = entries.add(
                    tokens, penalty_of(params, counts)
                )
        if params.biases:
            if id(params.biases) not in biases:
                biases[id(params.biases)] = entries.add(
                    np.frombuffer(params.biases.ids, np.int64), np.frombuffer(params.biases.added, np.float32)
                )
            column["bias_first"][index], column["bias_count"][index] = biases[id(params.biases)]
        if row.allowed is not None and (mask := row.allowed()) is not None:
            column["mask"][index] = len(masks)
            masks.append(_resized(mask, mask_bytes))
    parts = [words.reshape(-1), *entries.parts(), *masks]
    sampled = floats["temperature"] > 0
    top_k, top_p = (
        bool((sampled & (column["top_k"] > 0)).any()),
        bool((sampled & (floats["top_p"] < 1)).any()),
    )
    return PackedRows(
        np.concatenate([part.view(np.uint8) for part in parts]),
        count,
        limit,
        ids,
        _padded(entries.count, 4),
        mask_bytes,
        len(masks),
        int(column["committed_count"].max(initial=0)) if penalized else -1,
        int(column["bias_count"].max(initial=0)),
        top_k,
        top_p,
        top_k or top_p or bool((sampled & np.isfinite(floats["floor"])).any()),
    )


def words_for(rows: int) -> int:
    """Returns how many numbers the fields of so many rows take, with what fills up."""
    return len(Fields._fields) * _padded(rows, 2)


def fields_in(words: torch.Tensor, rows: int) -> Fields:
    """Returns the fields of so many rows that stand in so many int64."""
    columns = words.view(len(Fields._fields), -1)[:, :rows]
    return Fields(
        *(
            column.view(torch.float64) if name in FLOATS else column
            for name, column in zip(Fields._fields, columns, strict=True)
        )
    )


def places_of(vocabulary: torch.Tensor) -> Ids:
    """Returns where each id up to the last stands in a vocabulary [K], whose ids rise; -1 = nowhere."""
    ids = vocabulary.cpu().numpy()
    places = np.full(int(ids[-1]) + 1, -1, np.int64)
    places[ids] = np.arange(len(ids))
    return places


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _resized(mask: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Returns so many bytes: what a mask does not tell of may not come."""
    if len(mask) >= size:
        return np.ascontiguousarray(mask[:size])
    return np.concatenate((mask, np.zeros(size - len(mask), np.uint8)))
