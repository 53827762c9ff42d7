"""The overlays as a cluster would get them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.validate import find_crd
from deploy.validation.finding import Manifest
from deploy.validation.render import kubectl, render

KUBERAY = Path(__file__).parents[3] / "deploy" / "kuberay"
OVERLAYS = ("cpu-demo", "gpu")


@pytest.fixture(scope="session")
def crd() -> Path:
    found = find_crd()
    if found is None:
        pytest.skip(
            "the rayservices CRD of KubeRay 1.7 is not here: name its file in $OUTRIDER_RAYSERVICE_CRD"
        )
    return found


@pytest.fixture(scope="session")
def rendered() -> Callable[[str], list[Manifest]]:
    """The manifests of an overlay, a copy to change at will."""
    program = kubectl()
    if program is None:
        pytest.skip("kubectl is not installed: the overlays cannot be rendered")
    known = {name: render(KUBERAY / "overlays" / name, program) for name in OVERLAYS}
    return lambda name: copy.deepcopy(known[name])
