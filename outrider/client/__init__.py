"""The Python client of a running service."""

from outrider.client.client import LONGEST_PAUSE_SECONDS, SILENCE_SECONDS, Client, Statistics

__all__ = ["LONGEST_PAUSE_SECONDS", "SILENCE_SECONDS", "Client", "Statistics"]
