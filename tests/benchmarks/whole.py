"""Benchmarks that start a service and wait for it: `make test-benchmarks` runs them as a whole, and the suite
what they compute."""

from __future__ import annotations

import os

import pytest

whole = pytest.mark.skipif(os.environ.get("BENCHMARKS") != "1", reason="make test-benchmarks runs it")
