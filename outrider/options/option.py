"""An option: a field of a frozen dataclass, with what every way of giving it needs to know.

A group is such a dataclass. A configuration is made of options and of groups, which it names as its fields.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar, get_type_hints

from outrider.errors import WrongOption

T = TypeVar("T")

KEY = "option"  # of a field's metadata


@dataclass(frozen=True, slots=True)
class About:
    """What is known of an option beyond its name, type and default."""

    help: str
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    shown: str | None = None  # in the default's place
    short: str | None = None  # a second flag, of one letter
    negated: bool = False  # whether there is a flag --no-... too
    heading: str | None = None  # what it stands under in a list of options


@dataclass(frozen=True, slots=True)
class Option:
    """An option as a group has it."""

    name: str
    type: Any
    default: Any  # MISSING: it must be given
    about: About

    @property
    def flag(self) -> str:
        return flag_of(self.name)


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    least: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
    metavar: str | None = None,
    shown: str | None = None,
    short: str | None = None,
    negated: bool = False,
    heading: str | None = None,
) -> Any:
    """Returns a field that is an option. Both ends of its range belong to it. In a list of options it stands
    under the `HEADING` of its group, or under its own."""
    about = About(help, least, most, choices, metavar, shown, short, negated, heading)
    return field(default=default, metadata={KEY: about})


def same(group: type, name: str, default: Any = ...) -> Any:
    """Returns a field that is another group's option, perhaps with another default."""
    (known,) = [option for option in options(group) if option.name == name]
    return field(default=known.default if default is ... else default, metadata={KEY: known.about})


def default_of(group: type, name: str) -> Any:
    return same(group, name).default


def options(group: type | object) -> list[Option]:
    """Returns the options of a group, and of groups inside; for a value of one, with its values as
    defaults."""
    kind = group if isinstance(group, type) else type(group)
    hints, found = get_type_hints(kind), []
    for each in fields(kind):
        value = each.default if isinstance(group, type) else getattr(group, each.name)
        if is_dataclass(hints[each.name]):
            found += options(hints[each.name] if value is MISSING else value)
        elif KEY in each.metadata:
            about = each.metadata[KEY]
            about = replace(about, heading=about.heading or getattr(kind, "HEADING", None))
            found.append(Option(each.name, hints[each.name], value, about))
    return found


def build(group: type[T], given: Mapping[str, Any]) -> T:
    """Returns the group, or configuration, with these values; what is not given is as by default."""
    hints = get_type_hints(group)
    values: dict[str, Any] = {}
    for each in fields(group):  # type: ignore[arg-type]  # is_dataclass
        if is_dataclass(hints[each.name]):
            inside = hints[each.name] if each.default is MISSING else each.default
            known = {one.name: one.default for one in options(inside) if one.default is not MISSING}
            values[each.name] = build(hints[each.name], {**known, **given})
        elif each.name in given:
            values[each.name] = given[each.name]
    return group(**values)


def words(config: object) -> list[str]:
    """Returns the command line that says what differs from the defaults."""
    return [
        word
        for told, default in zip(options(config), options(type(config)), strict=True)
        if told.default != default.default
        for word in _said(told)
    ]


def _said(told: Option) -> Iterator[str]:
    if isinstance(told.default, bool):
        yield told.flag if told.default else flag_of(f"no_{told.name}")
    else:
        yield from (told.flag, str(told.default))


def check(group: object) -> None:
    """Raises WrongOption for the first option of its own that is out of its range."""
    for each in fields(group):  # type: ignore[arg-type]  # is_dataclass
        value = getattr(group, each.name)
        if KEY in each.metadata and value is not None:
            _check(each.name, value, each.metadata[KEY])


def _check(name: str, value: Any, about: About) -> None:
    if about.choices and value not in about.choices:
        raise wrong(name, f"must be one of {', '.join(about.choices)}, not {value!r}")
    if about.least is not None and not about.least <= value <= (about.most or sys.float_info.max):
        most = f"from {about.least} to {about.most}" if about.most else f"at least {about.least}"
        most += ", and a finite number" if value > about.least and not about.most else ""
        raise wrong(name, f"must be {most}, not {value}")


def wrong(name: str, sentence: str) -> WrongOption:
    """Returns the error of an option that cannot be as it is told: `sentence` goes on after its name."""
    return WrongOption(name, sentence)


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
