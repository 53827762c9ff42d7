"""The numbers that a field of a request may hold: once, for the check, its message and the API's document."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included unless `above` leaves `low` out."""

    low: float
    high: float
    above: bool = False
    words: str = ""  # follows "must be" in the message, with {low} and {high}; "" = the range in brackets

    def __contains__(self, value: float) -> bool:
        return (value > self.low if self.above else value >= self.low) and value <= self.high  # NaN is not

    def __str__(self) -> str:
        if self.words:
            return self.words.format(low=self.low, high=self.high)
        return f"in {'(' if self.above else '['}{self.low:g}, {self.high:g}]"

    def check(self, name: str, value: float) -> None:
        """Raises InvalidRequest naming the field and its limits."""
        if value not in self:
            raise InvalidRequest(f"{name} must be {self}, not {value}", field=name)

    def json_schema(self) -> dict[str, float]:
        """Returns the range in the words of JSON Schema."""
        return {"exclusiveMinimum" if self.above else "minimum": self.low, "maximum": self.high}
