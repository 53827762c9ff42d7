"""What the demonstration's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def models() -> Path:
    """The committed pair's folder."""
    return Path(__file__).resolve().parents[2] / "demo" / "models"
