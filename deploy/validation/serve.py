"""Serve's configuration in a RayService: Ray's schema, unknown keys refused, our application's arguments."""

from __future__ import annotations

import importlib
import types
import typing
from collections.abc import Iterator
from typing import Any

import pydantic
import yaml

from deploy.args import AppArgs, parse
from deploy.validation.finding import Finding, Manifest, as_path, place
from outrider.errors import StartupError

OURS = "deploy.app:build"
FIELD = "spec.serveConfigV2"


def check(manifest: Manifest) -> Iterator[Finding]:
    """Findings in a RayService; none in anything else."""
    if manifest.get("kind") == "RayService":
        for path, sentence in check_text(manifest.get("spec", {}).get("serveConfigV2") or ""):
            yield Finding(place(manifest, f"{FIELD}: {path}" if path else FIELD), sentence)


def check_text(text: str) -> Iterator[tuple[str, str]]:
    """(path, sentence) for a configuration as `serve deploy` takes it."""
    from ray.serve.schema import ServeDeploySchema

    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        yield "", f"is no YAML: {' '.join(str(error).split())}"
        return
    if not isinstance(config, dict):
        yield "", "must be a mapping with applications"
        return
    yield from _unknown(config, ServeDeploySchema, ())
    try:
        ServeDeploySchema.model_validate(config)
    except (pydantic.ValidationError, ValueError) as error:
        yield from _messages(error)
    yield from _importable(config)
    for i, application in enumerate(applications(config)):
        if application.get("import_path") == OURS:
            yield from _arguments(application.get("args") or {}, f"applications[{i}].args")


def applications(config: Manifest) -> list[Manifest]:
    found = config.get("applications")
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []


def arguments(manifest: Manifest) -> AppArgs | None:
    """Those of our application in a RayService; None where there are none, or none that are valid."""
    try:
        config = yaml.safe_load(manifest.get("spec", {}).get("serveConfigV2") or "")
        found = [entry for entry in applications(config) if entry.get("import_path") == OURS]
        return parse(found[0].get("args") or {}) if found else None
    except (yaml.YAMLError, StartupError, AttributeError):
        return None  # check tells what is wrong


def _unknown(value: Any, declared: Any, path: tuple[str | int, ...]) -> Iterator[tuple[str, str]]:
    """Keys that no model of Ray's declares. Ray itself ignores most of them."""
    model, items = _models(declared)
    if isinstance(value, list) and items is not None:
        for i, entry in enumerate(value):
            yield from _unknown(entry, items, (*path, i))
    if not isinstance(value, dict) or model is None:
        return
    fields = dict(model.model_fields)
    fields |= {field.alias: field for field in model.model_fields.values() if field.alias}
    for key, inner in value.items():
        if key in fields:
            yield from _unknown(inner, fields[key].annotation, (*path, key))
        else:
            yield (
                as_path((*path, key)),
                f"Ray Serve knows no such key and would ignore it; it knows {_near(key, fields)}",
            )


def _models(declared: Any) -> tuple[type[pydantic.BaseModel] | None, Any]:
    """(the model that a mapping is read with, the type of a list's entries), each where there is one."""
    if isinstance(declared, type) and issubclass(declared, pydantic.BaseModel):
        return declared, None
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if origin in (list, tuple):
        return None, inner[0] if inner else None
    if origin in (typing.Union, types.UnionType):
        found = [_models(option) for option in inner]
        return next((m for m, _ in found if m), None), next((i for _, i in found if i is not None), None)
    return None, None


def _near(key: object, fields: dict[str, Any]) -> str:
    import difflib

    return ", ".join(difflib.get_close_matches(str(key), fields, n=3, cutoff=0.4) or sorted(fields))


def _messages(error: Exception) -> Iterator[tuple[str, str]]:
    if isinstance(error, pydantic.ValidationError):
        for each in error.errors(include_url=False, include_input=False, include_context=False):
            yield as_path(each["loc"]), each["msg"]
    else:
        yield "", str(error)


def _importable(config: Manifest) -> Iterator[tuple[str, str]]:
    """Names that Serve imports when it starts: a typing error there shows only on the cluster."""
    servicers = (config.get("grpc_options") or {}).get("grpc_servicer_functions") or []
    for i, name in enumerate(servicers):
        module, _, function = str(name).rpartition(".")
        if not _has(module, function):
            yield f"grpc_options.grpc_servicer_functions[{i}]", f"there is no {name} to import"
    for i, application in enumerate(applications(config)):
        module, _, function = str(application.get("import_path", "")).partition(":")
        if module.partition(".")[0] == "deploy" and not _has(module, function):
            yield f"applications[{i}].import_path", f"there is no {module}:{function} to import"


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except (ImportError, ValueError):
        return False


def _arguments(given: Any, path: str) -> Iterator[tuple[str, str]]:
    if not isinstance(given, dict):
        yield path, "must be a mapping"
        return
    try:
        parse(given)
    except StartupError as error:
        yield path, error.message
