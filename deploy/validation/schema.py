"""The RayService against its CustomResourceDefinition: structure, unknown fields, rules written in CEL."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from deploy.validation.finding import Finding, Manifest, as_path, place
from outrider.errors import StartupError

LONGEST = 200  # characters of a validator's message: it may quote the whole object


@cache
def load(path: Path, version: str = "v1") -> Manifest:
    """The JSON schema of one version in a CRD file (1 MB: read once).

    Raises StartupError where there is none."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        crd = yaml.load(path.read_text(), Loader=loader)
        (found,) = [entry for entry in crd["spec"]["versions"] if entry["name"] == version]
        schema: Manifest = strict(found["schema"]["openAPIV3Schema"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):
        raise StartupError(f"{path} is no CRD with a version {version}; name the rayservices CRD") from None
    schema["properties"]["metadata"] = {"type": "object"}  # the API server knows it, the CRD does not say it
    return schema


def strict(schema: Manifest) -> Manifest:
    """Kubernetes' dialect as plain JSON schema, in which a field that is not declared is an error.

    The API server drops such fields silently (pruning) where a client does not ask for strict validation.
    """
    plain = dict(schema)
    if plain.pop("x-kubernetes-int-or-string", False):
        plain.pop("type", None)
        plain.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    if "properties" in plain:
        plain["properties"] = {name: strict(value) for name, value in plain["properties"].items()}
        if not plain.get("x-kubernetes-preserve-unknown-fields"):
            plain.setdefault("additionalProperties", False)
    for inner in ("items", "additionalProperties"):
        if isinstance(plain.get(inner), dict):
            plain[inner] = strict(plain[inner])
    if plain.pop("nullable", False) and "type" in plain:
        plain["type"] = [plain["type"], "null"]
    return plain


def check(manifest: Manifest, schema: Manifest) -> Iterator[Finding]:
    for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest):
        yield Finding(place(manifest, as_path(error.absolute_path)), _short(error.message))
    for path, message in _cel(schema, manifest, ""):
        yield Finding(place(manifest, path), message)


def _short(message: str) -> str:
    return message if len(message) <= LONGEST else f"{message[:90]} ... {message[-90:]}"


def _cel(schema: Manifest, value: Any, path: str) -> Iterator[tuple[str, str]]:
    """(path, message) of each rule that does not hold. Rules on changes (oldSelf) are left out."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"] and not _holds(rule["rule"], value):
            yield path, rule.get("message", f"the rule {rule['rule']} does not hold")
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for name, inner in value.items():
            declared = schema.get("properties", {}).get(name, others)
            if isinstance(declared, dict):
                yield from _cel(declared, inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for i, inner in enumerate(value):
            yield from _cel(schema["items"], inner, f"{path}[{i}]")


def _holds(rule: str, value: Any) -> bool:
    import celpy
    from celpy.adapter import json_to_cel

    environment = celpy.Environment()
    return bool(environment.program(environment.compile(rule)).evaluate({"self": json_to_cel(value)}))
