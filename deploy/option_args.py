"""Options that processes have everywhere, as arguments of Ray's application."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import BaseModel, create_model, model_validator
from pydantic_core import PydanticCustomError

from outrider.errors import WrongOption
from outrider.options.option import build, options

WRONG = "wrong_option"  # a type of pydantic's errors

T = TypeVar("T", bound=BaseModel)


@contextmanager
def refused(pool: str = "", its: Collection[str] = ()) -> Iterator[None]:
    """Turns a wrong option into an error of pydantic's. `its`: which of the options are a pool's."""
    try:
        yield
    except WrongOption as wrong:
        place = f"{pool}." if wrong.option in its else ""
        told = {"option": place + wrong.option, "sentence": wrong.sentence}
        raise PydanticCustomError(WRONG, "{option} {sentence}", told) from None


def with_options(*groups: type, only: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Gives settings the options of the groups, or only some: their names, types, defaults and checks."""
    taken = [each for group in groups for each in options(group) if not only or each.name in only]

    def checked(self: T) -> T:
        given = {each.name: getattr(self, each.name) for each in taken}
        with refused():
            for group in groups:
                build(group, given)
        return self

    def decorate(settings: type[T]) -> type[T]:
        fields: dict[str, Any] = {
            each.name: (each.type, each.default) for each in taken if each.name not in settings.model_fields
        }
        name = "_".join(("", *(group.__name__ for group in groups)))  # settings may be given options twice
        validators: dict[str, Any] = {name: model_validator(mode="after")(checked)}
        return create_model(
            settings.__name__,
            __base__=settings,
            __module__=settings.__module__,
            __doc__=settings.__doc__,
            __validators__=validators,
            **fields,
        )

    return decorate
