"""What this router remembers of the prompts that it placed at verifiers: blocks that may be there yet.

A guess, not a fact: a verifier may have evicted them, or hold more that came by another router.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MOST_REMEMBERED = 65_536  # blocks of one verifier
MOST_BLOCKS = 131_072  # of which it is known where they went last
MOST_HOLDERS = 4  # that are remembered of a block
MOST_SIZES = 4  # of blocks, by which a prompt is hashed: verifiers of one model have one, as a rule
DEEPEST = 64  # blocks of a prompt that are asked for: what lies deeper hardly changes who is chosen


def block_hashes(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[int]:
    """Returns the names of the whole blocks of a prompt: each is a hash of itself, of all before it, and of
    the salt under which they are cached."""
    size, before, hashes = max(block_size, 1), hash(salt), []
    for start in range(0, len(tokens) - size + 1, size):
        before = hash((before, *tokens[start : start + size]))
        hashes.append(before)
    return hashes


class PlacedPrefixes:
    """The blocks that were placed at one verifier; the oldest are forgotten."""

    def __init__(self, blocks: int, block_size: int) -> None:
        """`blocks` is how many the verifier has room for, `block_size` the tokens in one."""
        self._most = min(max(blocks, 0), MOST_REMEMBERED)
        self.block_size = max(block_size, 1)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def place(self, hashes: Sequence[int]) -> None:
        """Notes the blocks of a session that is opened there."""
        # The deepest first, so that the beginnings, which others may share, are forgotten last.
        for block in reversed(hashes):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def match(self, hashes: Sequence[int]) -> int:
        """Returns how many tokens at the beginning were placed there before, in whole blocks."""
        matched = 0
        for block in hashes:
            if block not in self._blocks:
                break
            matched += self.block_size
        return matched


class PrefixHolders:
    """The verifiers where each block was placed last: these are looked at for a prompt, and not all of them.
    What they hold, their own PlacedPrefixes says."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self._most = most_blocks
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()  # worker_ids, the last one first

    def place(self, hashes: Sequence[int], worker_id: str) -> None:
        for block in reversed(hashes[:DEEPEST]):
            others = [one for one in self._holders.pop(block, ()) if one != worker_id]
            self._holders[block] = (worker_id, *others[: MOST_HOLDERS - 1])
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def find(self, hashes: Sequence[int]) -> list[str]:
        """Returns up to MOST_HOLDERS verifiers that may hold the prompt's beginning: first those that hold
        most of it."""
        known = []
        for block in hashes[:DEEPEST]:
            if block not in self._holders:
                break
            known.append(self._holders[block])
        found: dict[str, None] = {}
        for holders in reversed(known):
            found.update(dict.fromkeys(holders))
            if len(found) >= MOST_HOLDERS:
                break
        return list(found)[:MOST_HOLDERS]


class PromptBlocks:
    """The blocks of one prompt, hashed once for each of the first sizes that are asked for."""

    def __init__(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        self._tokens = tokens
        self._salt = salt
        self._hashes: dict[int, list[int]] = {}

    def of(self, block_size: int) -> list[int]:
        """Returns none where too many sizes were asked for before."""
        if block_size not in self._hashes:
            if len(self._hashes) >= MOST_SIZES:
                return []
            self._hashes[block_size] = block_hashes(self._tokens, block_size, self._salt)
        return self._hashes[block_size]
