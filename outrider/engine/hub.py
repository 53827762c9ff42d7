"""Fetches checkpoints from the Hugging Face hub, or finds them where they were kept before."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outrider.engine.other_formats import other_format
from outrider.errors import StartupError
from outrider.options.model_id import GGUF, HubId, parse_hub_id

WEIGHTS = "*.safetensors"
PATTERNS = ("*.json", WEIGHTS, "*.jinja", "*.txt", "*.model")
DUPLICATES = ("original/*", "consolidated*")  # the same weights in another arrangement


def fetch(model: str, weights: bool = True) -> tuple[Path, str | None]:
    """Returns the folder of a hub id's files, and the pattern of the GGUF files that it asks for, if so.

    Without `weights` those of safetensors are left out.

    Raises StartupError, with what to do, if they cannot be had."""
    hub = parse_hub_id(model)
    if hub is None:
        raise StartupError(
            f"there is no folder or file {model}; give a .gguf file, or the folder of a checkpoint "
            "(config.json, *.safetensors)"
        )
    wanted = f"*{hub.gguf}*{GGUF}" if hub.gguf else None
    patterns = [wanted] if wanted else [one for one in PATTERNS if weights or one != WEIGHTS]
    try:
        folder = snapshot_download(
            hub.id, revision=hub.revision, allow_patterns=patterns, ignore_patterns=list(DUPLICATES)
        )
    except Exception as error:  # the hub client's errors and those of its transport have no common base
        raise StartupError(_reason(model, hub, error)) from None
    if wanted and not any(Path(folder).glob(wanted)):
        raise StartupError(
            f"{hub.id} has no GGUF file with {hub.gguf} in its name; look at its list of files"
        )
    if not hub.gguf and not (Path(folder) / "config.json").is_file():
        nothing = (
            f"{hub.id} has no config.json; if it is a repository of GGUF files, say which: {hub.id}:Q8_0"
        )
        raise StartupError(other_format(Path(folder), hub.id) or nothing)
    if not hub.gguf and weights and not any(Path(folder).glob(WEIGHTS)):
        raise StartupError(
            f"{hub.id} has no safetensors, and pickles (.bin) and other formats are not read; if it has GGUF "
            f"files, say which: {hub.id}:Q8_0"
        )
    return Path(folder), wanted


def _reason(model: str, hub: HubId, error: Exception) -> str:
    if isinstance(error, HFValidationError):
        return f"{model!r} is neither a folder nor a Hugging Face model id (name or owner/name)"
    if isinstance(error, GatedRepoError):
        return f"{hub.id} is given to those only who accepted its terms: do so on its page, and set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{hub.id} has no revision {hub.revision}; give a branch, tag or commit after the @"
    if isinstance(error, LocalEntryNotFoundError):
        why = (
            "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the Hugging Face hub cannot be reached"
        )
        return (
            f"there is no folder {model}, {why}, and {constants.HF_HUB_CACHE} has no copy: fetch it where "
            f"there is a network (hf download {hub.id}), or give a local folder"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no folder {model}, and the Hugging Face hub has no model {hub.id} for you; check the "
            "name, set HF_TOKEN if it is private, or give a local folder"
        )
    return (
        f"there is no folder {model}, and the Hugging Face hub did not give a model of that id "
        f"({type(error).__name__}); check the name, or give a local folder"
    )
