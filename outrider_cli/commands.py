"""Commands made of configurations: each option of theirs is one of the command line."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from dataclasses import MISSING
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from outrider.options.option import Option, options


class Headed(TyperCommand):
    """A command whose options stand under their headings in its help."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        under: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for each in self.get_params(ctx):
            if (shown := each.get_help_record(ctx)) is not None:
                kind = "Options" if each.param_type_name == "option" else "Arguments"
                under[getattr(each, "rich_help_panel", None) or kind].append(shown)
        for heading, records in under.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def command(run: Callable[..., None], name: str, help: str, *groups: type) -> Callable[..., None]:
    """Returns a command for typer: it calls `run` with a value for every option of the groups."""

    def called(**given: Any) -> None:
        run(**given)

    parameters = [_parameter(each) for group in groups for each in options(group)]
    required_first = sorted(parameters, key=lambda parameter: parameter.default is not parameter.empty)
    called.__signature__ = inspect.Signature(required_first)  # type: ignore[attr-defined]  # typer reads it
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    called.__name__, called.__doc__ = name, help
    return called


def _parameter(told: Option) -> inspect.Parameter:
    about = told.about
    flag = f"{told.flag}/--no-{told.flag[2:]}" if about.negated else told.flag
    shown = about.shown if about.shown is not None and told.default is None else not about.negated
    info = typer.Option(
        flag,
        *([about.short] if about.short else []),
        help=about.help,
        metavar=about.metavar,
        min=about.least,
        max=about.most,
        show_default=shown,
        rich_help_panel=about.heading,
    )
    kind = told.type
    if about.choices:
        kind = Literal[about.choices] if told.default is not None else Literal[about.choices] | None
    return inspect.Parameter(
        told.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if told.default is MISSING else told.default,
        annotation=Annotated[kind, info],
    )
