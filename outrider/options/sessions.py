"""What holds for the sessions of a router."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from outrider.net.draft_right import MOST_SEATS
from outrider.options.option import check, option, wrong

SPECULATION = "Speculation"  # what options are about, here and in the roles
MAX_SEED = 2**64 - 1
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "mistral", "mistral_args", "qwen3_coder", "json")
REASONING_PARSERS = ("auto", "none", "deepseek_r1", "qwen3", "granite", "mistral", "seed_oss")
ORIGIN = re.compile(r"\*|https?://[^/\s,]+")


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How many sessions there may be, for how long, and how far ahead they are drafted."""

    HEADING: ClassVar = "Requests"

    num_speculative_tokens: int = option(
        32,
        "Most draft tokens verified in one step of a request; below it each request adapts. 0 = none.",
        least=0,
        short="-k",
        heading=SPECULATION,
    )
    drafters_per_session: int = option(
        1,
        "Most drafters that guess for a request at the same time, each by another model: as many as add "
        "something.",
        least=1,
        most=MOST_SEATS,
        heading=SPECULATION,
    )
    max_sessions: int = option(256, "Most requests at a time; more are refused with 429.", least=1)
    session_ttl: int = option(
        600,
        "How long after its last token an answer that broke off can be resumed.",
        metavar="SECONDS",
        least=1,
    )
    seed: int | None = option(
        None,
        "Makes the seeds given to requests without one repeatable.",
        least=0,
        most=MAX_SEED,
        shown="drawn anew at every start",
    )
    share_prefixes: bool = option(
        False,
        "Share cached prefixes among all API keys, not only among requests of one: what is found cached then "
        "tells a client what others have sent.",
    )
    tool_call_parser: str = option(
        "auto",
        "How models write calls of tools: hermes (Qwen's too), llama3_json, mistral, mistral_args (its newer "
        "way), qwen3_coder, json; auto = as the chat template asks for it.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "How models mark what they think before they answer: qwen3 (<think>), deepseek_r1 (the same, also "
        "where nothing begins it), granite, mistral, seed_oss; auto = as the chat template tells; none = not "
        "looked for.",
        choices=REASONING_PARSERS,
    )
    cors_origin: str | None = option(
        None,
        "Origin of web pages that may ask from a browser, or several with commas between; * = any page.",
        metavar="URL",
        shown="none: browsers keep other sites' pages away",
    )
    page: bool = option(
        True,
        "Serve a page at /: to try the service, and to see what it does. It asks for a key too.",
        negated=True,
    )
    same_numerics: bool = option(
        False,
        "Let a text that lost its target worker wait for one that computes alike, to the bit, rather than go "
        "on at another one, which might choose another token where two are nearly equal.",
    )
    lock_step: bool = option(
        False,
        "For comparison only: draft k tokens, wait for the verdict, and so on; slower.",
        heading=SPECULATION,
    )

    def __post_init__(self) -> None:
        check(self)
        for origin in self.cors_origins:
            if not ORIGIN.fullmatch(origin):
                raise wrong(
                    "cors_origin", f"is a scheme and a host, such as https://a.example, not {origin!r}"
                )

    @property
    def cors_origins(self) -> list[str]:
        return [] if self.cors_origin is None else [one.strip() for one in self.cors_origin.split(",")]
