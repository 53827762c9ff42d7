"""Checks values against schemas: Kubernetes' own, KubeRay's with its rules in CEL, and ours."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import celpy
import jsonschema
import kubernetes_validate
import yaml
from celpy.adapter import json_to_cel

from deploy.validate.manifest import Manifest

KUBERNETES = "1.34"  # whose schemas are used
CRD = Path(__file__).parents[1] / "kuberay" / "crd" / "rayservice-crd-v1.7.0.yaml"  # as KubeRay publishes it
BUILT_IN = ("", "apps", "batch", "policy", "networking.k8s.io", "rbac.authorization.k8s.io")  # groups
LONGEST = 200  # characters of a validator's message: it may quote the whole object

Problem = tuple[str, str]  # path, sentence


def built_in(manifest: Manifest) -> bool:
    """Returns True if Kubernetes itself defines the object."""
    return manifest["apiVersion"].rpartition("/")[0] in BUILT_IN


def check_manifest(manifest: Manifest) -> Iterator[Problem]:
    """Yields what its schema refuses; nothing if there is none here."""
    if manifest["kind"] == "RayService":
        yield from check(manifest, _rayservice())
    elif built_in(manifest):
        yield from _kubernetes(json.dumps(manifest))


@cache  # reading the schemas takes a third of a second, every time
def _kubernetes(text: str) -> list[Problem]:
    try:
        kubernetes_validate.validate(json.loads(text), KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [(as_path(error.absolute_path), error.message)]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [("kind", error.message)]
    return []


@cache
def _rayservice() -> Manifest:
    crd = yaml.load(CRD.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = [entry for entry in crd["spec"]["versions"] if entry["name"] == "v1"]
    schema: Manifest = strict(found["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # the API server knows it, the CRD does not say it
    return schema


def strict(schema: Any) -> Any:
    """Returns Kubernetes' dialect as plain JSON schema in which a field that is not declared is an error: the
    API server, and Ray Serve, would ignore it."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {name: strict(value) for name, value in schema.items()}
    if plain.get("x-kubernetes-int-or-string") is True:
        plain["type"] = ["integer", "string"]
    if isinstance(plain.get("properties"), dict) and not plain.get("x-kubernetes-preserve-unknown-fields"):
        plain.setdefault("additionalProperties", False)
    return plain


def check(value: Any, schema: Manifest) -> Iterator[Problem]:
    """Yields what breaks the schema: the `sentence` beside the broken rule, otherwise the validator's
    words."""
    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        sentence = error.schema.get("sentence")
        exact = error if sentence else jsonschema.exceptions.best_match([error])
        said = sentence or exact.message
        yield as_path(exact.absolute_path), said if len(said) <= LONGEST else f"{said[:90]} ... {said[-90:]}"
    yield from _cel(schema, value, ())


def as_path(parts: Iterable[str | int]) -> str:
    """Returns a.b[0].c from the parts of a path, names and indices."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).removeprefix(".")


def _cel(schema: Manifest, value: Any, path: tuple[str | int, ...]) -> Iterator[Problem]:
    """Yields the rules in CEL that do not hold. Rules on changes (oldSelf) are left out."""
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" not in rule["rule"]:
            environment = celpy.Environment()
            program = environment.program(environment.compile(rule["rule"]))
            if not program.evaluate({"self": json_to_cel(value)}):
                yield as_path(path), rule["message"]
    if isinstance(value, dict):
        for name, declared in schema.get("properties", {}).items():
            if name in value:
                yield from _cel(declared, value[name], (*path, name))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _cel(schema.get("items", {}), inner, (*path, i))
