"""Descriptors: each connection takes one, and a process begins with few of those that it may have."""

from __future__ import annotations

import resource


def descriptors() -> int:
    """Lets this process have as many descriptors as the system allows it, and returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft
