"""The demonstration pair: where it lies, and the name by which clients ask for it."""

from __future__ import annotations

from pathlib import Path

NAME = "outrider-demo"
MODELS = Path(__file__).resolve().parent / "models"
TARGET = MODELS / "target"
DRAFT = MODELS / "draft"
