"""API keys at rest: who may use the service, how much at a time, and the hash by which a key is known again.

One line for each key, `#` begins a comment:

    NAME sha256:HEX [max-concurrent=N] [requests-per-minute=N]

A key is 32 random bytes: nobody can try them all, so a plain hash hides it as well as a slow one would, and
costs a request microseconds. (Slow hashes protect what people make up.) A name may have several lines, while
its key is exchanged for another.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.errors import StartupError
from outrider.net.watched import Watched, reason

KEY_PREFIX = "sk-outrider-"  # by which people and scanners of leaked secrets know what it is
TOKEN_PREFIX = "dt-outrider-"  # of a drafter's token
KEY_BYTES = 32
COUNT = re.compile(r"0*[1-9][0-9]{0,8}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
LIMITS = ("max-concurrent", "requests-per-minute")
FORM = "NAME sha256:HEX [max-concurrent=N] [requests-per-minute=N]"


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as its line has it."""

    name: str  # whose it is; seen in metrics
    digest: bytes  # SHA-256 of the key
    max_concurrent: int | None = None  # most requests at a time, in each router; None = no limit
    requests_per_minute: int | None = None  # in each router; None = no limit

    @property
    def line(self) -> str:
        limits = zip(LIMITS, (self.max_concurrent, self.requests_per_minute), strict=True)
        told = [f"{name}={limit}" for name, limit in limits if limit is not None]
        return " ".join([self.name, f"sha256:{self.digest.hex()}", *told])


def new_key(prefix: str = KEY_PREFIX) -> str:
    """Returns a key that nobody has."""
    return prefix + secrets.token_urlsafe(KEY_BYTES)


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def find(keys: Iterable[ApiKey], shown: str) -> ApiKey | None:
    """Returns the key that a client has shown. It takes the same time for every key."""
    ours, found = digest(shown), None
    for key in keys:
        if hmac.compare_digest(key.digest, ours):
            found = key
    return found


def parse_tokens(text: str) -> tuple[ApiKey, ...]:
    """Returns the tokens of drafters, perhaps none: that of the last one may be taken away. Raises ValueError
    as parse_keys does."""
    tokens = _parse_lines(text)
    if any(token.requests_per_minute is not None for token in tokens):
        raise ValueError("requests-per-minute is for API keys: drafters that join make none")
    return tokens


def parse_keys(text: str) -> tuple[ApiKey, ...]:
    """Returns the keys. Raises ValueError with a sentence that names the line and quotes nothing of it."""
    keys = _parse_lines(text)
    if not keys:
        raise ValueError("there is no key; make one with `outrider keys add NAME`")
    return keys


def _parse_lines(text: str) -> tuple[ApiKey, ...]:
    keys = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if words:
            try:
                keys.append(_parse(words))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
    return tuple(keys)


def _parse(words: list[str]) -> ApiKey:
    if not NAME.fullmatch(words[0]):
        raise ValueError("a name is up to 64 letters, digits, '.', '_' and '-'")
    if len(words) < 2 or not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", words[1]):
        raise ValueError(f"must be {FORM}")
    limits: dict[str, int] = {}
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name not in LIMITS or name in limits or not COUNT.fullmatch(value):
            raise ValueError(
                f"limits are {' and '.join(f'{limit}=N' for limit in LIMITS)}, N from 1 to 999999999"
            )
        limits[name] = int(value)
    return ApiKey(words[0], bytes.fromhex(words[1][7:]), *(limits.get(name) for name in LIMITS))


def _text(file: Path) -> str:
    if file.exists() and not file.is_file():
        raise ValueError("it is no regular file")  # a pipe would never end
    return file.read_text("utf-8")


Keys = Callable[[], Sequence[ApiKey]]  # gives those in force now


def keys_of(file: Path | None, lines: str | None) -> Keys | None:
    """Returns the keys as they are now, from a file that may change or from lines that do not (a `;` parts
    them too); None if neither is given. Raises StartupError."""
    try:
        if file is not None:
            return Watched("the API keys", [file], lambda: parse_keys(_text(file))).current
        if lines is not None:
            keys = parse_keys(lines.replace(";", "\n"))
            return lambda: keys
    except (OSError, ValueError) as error:
        where = f"--api-keys {file}" if file is not None else "$OUTRIDER_API_KEYS"
        raise StartupError(f"{where}: {reason(error)}") from None
    return None


def tokens_of(file: Path) -> Keys:
    """Returns the tokens of drafters that join, as the file has them now. Raises StartupError."""
    try:
        return Watched("the drafters' tokens", [file], lambda: parse_tokens(_text(file))).current
    except (OSError, ValueError) as error:
        raise StartupError(f"--drafter-tokens {file}: {reason(error)}") from None
