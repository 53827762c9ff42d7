"""What this router remembers of the prompts that it placed at a verifier: blocks that may be there yet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

MOST_REMEMBERED = 65_536  # blocks of one verifier


class PlacedPrefixes:
    """Whole blocks of tokens, each named by a hash of itself and all before it; the oldest are forgotten.

    A guess, not a fact: the verifier may have evicted them, or hold more that came by another router.
    """

    def __init__(self, blocks: int, block_size: int) -> None:
        """`blocks` is how many the verifier has room for, `block_size` the tokens in one."""
        self._most = min(max(blocks, 0), MOST_REMEMBERED)
        self._block_size = max(block_size, 1)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def place(self, tokens: Sequence[int], salt: bytes = b"") -> None:
        """Notes the blocks of a session that is opened there. Its prefixes are cached under the salt."""
        # The deepest first, so that the beginnings, which others may share, are forgotten last.
        for block in reversed(list(self._hashes(tokens, salt))):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def match(self, tokens: Sequence[int], salt: bytes = b"") -> int:
        """Returns how many tokens at the beginning were placed there before under the same salt, in whole
        blocks."""
        matched = 0
        for block in self._hashes(tokens, salt):
            if block not in self._blocks:
                break
            matched += self._block_size
        return matched

    def _hashes(self, tokens: Sequence[int], salt: bytes) -> Iterator[int]:
        size, before = self._block_size, hash(salt)
        for start in range(0, len(tokens) - size + 1, size):
            before = hash((before, *tokens[start : start + size]))
            yield before
