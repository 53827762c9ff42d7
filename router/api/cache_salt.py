"""What workers are told of whose a request is: the salt of its cached prefixes, and its tenant.

With a salt a request finds only what is its own owner's. `usage` and the time to the first token tell how
much of a prompt was cached: were the cache one for all, a client could try what others have sent, block by
block.
"""

from __future__ import annotations

from hashlib import blake2b

SALT_BYTES = 16


def cache_salt(owner: str, given: str | None) -> bytes:
    """Returns the salt of an owner's request; empty if there is nothing to tell apart.

    `owner`: the name of its API key, without a NUL; empty = prefixes are shared by all. `given`: what the
    request itself says, which is not to be guessed from the salt; None = nothing."""
    if not owner and given is None:
        return b""
    return blake2b(f"{owner}\0{given or ''}".encode(), digest_size=SALT_BYTES).digest()


def tenant(owner: str) -> bytes:
    """Returns among whom an owner's requests have turns; empty where all are one owner's.

    It is not the salt, which the request itself has a say in, and which all may share."""
    return blake2b(owner.encode(), digest_size=SALT_BYTES).digest() if owner else b""
