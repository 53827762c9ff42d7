"""A checkpoint folder: found, looked over and fingerprinted before anything is loaded from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError, safe_open

from outrider.errors import StartupError

PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def locate(path_or_id: str) -> Path:
    """The local folder of a checkpoint: the path itself, or a hub id's files (fetched where needed).

    Raises StartupError where there is neither."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise StartupError(
            f"{path_or_id} is a file; give the folder of a checkpoint, or a Hugging Face model id"
        )
    if path_or_id.startswith((".", "/", "~")) or path_or_id.count("/") > 1:
        raise StartupError(
            f"there is no folder {path_or_id}; give the folder of a checkpoint (config.json, *.safetensors)"
        )
    try:
        return Path(snapshot_download(path_or_id, allow_patterns=list(PATTERNS)))
    except HFValidationError:
        raise StartupError(
            f"{path_or_id!r} is neither a folder nor a Hugging Face model id (name or owner/name)"
        ) from None
    except Exception as error:  # the hub client's errors and those of its transport have no common base
        raise StartupError(
            f"there is no folder {path_or_id}, and the Hugging Face hub did not give a model of that id "
            f"({type(error).__name__}); check the name, or give a local folder"
        ) from None


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, each with a readable header. Raises StartupError otherwise."""
    index = folder / INDEX
    if (folder / SINGLE).is_file():
        names = [SINGLE]
    elif index.is_file():
        names = sorted(set(_json(index).get("weight_map", {}).values()))
    else:
        names = []
    if not names:
        if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
            raise StartupError(
                f"{folder} holds its weights as pickles (.bin); only safetensors are read: convert them"
            )
        raise StartupError(f"{folder} holds no weights: {SINGLE} or {INDEX} is missing")
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise StartupError(f"{folder} is incomplete: {file.name}, which {INDEX} names, is missing")
        try:
            with safe_open(file, framework="pt") as weights:
                weights.keys()
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{file} is damaged or cut short ({error}); fetch it again") from None
    return files


def config_text(folder: Path) -> bytes:
    """The bytes of config.json. Raises StartupError where it is missing or no JSON object."""
    file = folder / "config.json"
    if not file.is_file():
        raise StartupError(f"{folder} is not a checkpoint: config.json is missing")
    _json(file)
    return file.read_bytes()


def fingerprint(folder: Path) -> str:
    """Hex digest of the configuration and of the weight files, headers (names, shapes) included."""
    digest = hashlib.sha256(config_text(folder))
    for file in weight_files(folder):
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise StartupError(f"{file} is damaged: it is no JSON ({error})") from None
    if not isinstance(content, dict):
        raise StartupError(f"{file} is damaged: it holds no JSON object")
    return content
