"""Whether a model's code chooses, experts above all: where two nearly tie, rounding decides, and what follows
is another sum."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode

CHOOSE = {"topk", "argmax", "sort", "argsort"}
CHOOSE_ALONG = {"max"}  # if they are told a dimension


class Choices(TorchFunctionMode):
    """Notices, while it is entered, if any is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, told = getattr(func, "__name__", ""), kwargs or {}
        self.made |= name in CHOOSE or (name in CHOOSE_ALONG and len(args) + len(told) > 1)
        return func(*args, **told)
