"""The overlays as a cluster would get them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.validate.manifest import Manifest, render

KUBERAY = Path(__file__).parents[3] / "deploy" / "kuberay"
OVERLAYS = ("cpu-demo", "gpu")


@pytest.fixture(scope="session")
def rendered() -> Callable[[str], list[Manifest]]:
    """The manifests of an overlay, a copy to change at will."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: the overlays cannot be rendered")
    known = {name: render(KUBERAY / "overlays" / name) for name in OVERLAYS}
    return lambda name: copy.deepcopy(known[name])
