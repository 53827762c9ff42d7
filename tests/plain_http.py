"""A client for plain HTTP, for tests that look again and again: to make one takes longer than to ask."""

import httpx

HTTP = httpx.Client(timeout=240, trust_env=False)
