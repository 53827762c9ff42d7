"""Files that are not read, named for what they are, with what to do. Pure, but for a look into a folder."""

from __future__ import annotations

from pathlib import Path

ADAPTER = "adapter_config.json"
POINTER = (
    b"version https://git-lfs.github.com/spec/"  # how the text begins that Git LFS puts in a file's place
)
MISTRAL = (
    "holds its weights in Mistral's own arrangement (params.json, consolidated.safetensors); give them as "
    "transformers reads them: config.json, model.safetensors"
)
OTHERS = {  # by a file of the folder
    ADAPTER: "holds an adapter, not a model: give the model that it is for, and it by --lora",
    "consolidated*.safetensors": MISTRAL,
    **dict.fromkeys(
        ("*.bin", "*.pt", "*.pth", "*.ckpt"),
        "holds its weights as pickles (.bin), which could run code here; only safetensors and GGUF are read: "
        "convert them, as transformers does that loads the model and saves it",
    ),
    "params.json": MISTRAL,
    **dict.fromkeys(
        ("*.onnx", "*.h5", "*.msgpack", "*.tflite", "*.ggml"),
        "holds weights of another format; only safetensors and GGUF are read: give one of these",
    ),
}


def other_format(folder: Path, name: object) -> str | None:
    """Returns the sentence that says what the folder holds instead of what can be read; None if that is
    nothing known. `name`: the folder's, for people."""
    return next((f"{name} {said}" for pattern, said in OTHERS.items() if any(folder.glob(pattern))), None)


def pointer(file: Path) -> str | None:
    """Returns the sentence about a file of which there is only what Git LFS puts in its place; None if it is
    another."""
    try:
        with file.open("rb") as content:
            found = content.read(len(POINTER)) == POINTER
    except OSError:
        found = False
    return f"{file} is a pointer of Git LFS, not the file itself: git lfs pull fetches it" if found else None


def damaged(file: Path, why: object) -> str:
    """Returns the sentence about a file that cannot be read."""
    return pointer(file) or f"{file} is damaged or cut short ({why}); fetch it again"
