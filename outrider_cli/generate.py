"""`outrider generate`: one request to a running server, streamed to the terminal."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider_cli.reporting import WRONG_USAGE, fail, reported

if TYPE_CHECKING:
    from outrider.client import Client

DEFAULT_URL = "http://127.0.0.1:8000"
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        envvar="OUTRIDER_API_KEY",
        help="Key that the service asks for. In $OUTRIDER_API_KEY it is seen by nobody else.",
        show_default="$OUTRIDER_API_KEY, or none",
        show_envvar=False,
    ),
]


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of the HTTP API. Several, by commas or by repeating it, are routers of one "
            "service: where one fails, the next goes on.",
            show_default=DEFAULT_URL,
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model.", show_default="the one that is served")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 = always the likeliest token.")] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest of this mass.", show_default="off")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from that many likeliest.", show_default="off")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Replays an answer drawn with it.", show_default="drawn"),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="Text to stop before; may be repeated.", show_default="none"),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send the prompt as a message, through the chat template."),
    ] = False,
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--num-speculative-tokens",
            "-k",
            help="Most draft tokens a step for this request; 0 = plain decoding.",
            show_default="adaptive",
        ),
    ] = None,
    api_key: ApiKey = None,
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            metavar="FILE",
            help="Authority (PEM) behind the certificates of https addresses.",
            show_default="the public ones",
        ),
    ] = None,
    patience: Annotated[
        float,
        typer.Option(
            "--patience",
            metavar="SECONDS",
            min=0,
            help="How long to try to go on with an answer that broke off; 0 = not at all.",
        ),
    ] = 60.0,
) -> None:
    """Continue a prompt on a running server; statistics follow on stderr."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        fail("generate", "the prompt is empty: give some text to continue", WRONG_USAGE)
    try:
        text.encode()
    except UnicodeEncodeError:
        fail("generate", "the prompt is not valid UTF-8", WRONG_USAGE)
    request: dict[str, object] = (
        {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    )
    request |= {"max_tokens": max_tokens, "temperature": temperature}
    optional = {
        "model": model,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "stop": stop or None,
        "num_speculative_tokens": num_speculative_tokens,
    }
    request |= {name: value for name, value in optional.items() if value is not None}
    urls = [part.strip() for given in url or [DEFAULT_URL] for part in given.split(",") if part.strip()]
    if not urls:
        fail("generate", "--url is empty: name a server", WRONG_USAGE)
    with reported("generate"):
        from outrider.client import Client

        with Client(urls, api_key=api_key, ca_file=ca_file, patience_seconds=patience) as client:
            _stream(client, "/v1/chat/completions" if chat else "/v1/completions", request)


def _stream(client: Client, path: str, request: dict[str, object]) -> None:
    from outrider.client import Statistics

    shown = _harmless if sys.stdout.isatty() else str
    for piece in client.stream(path, request):
        if isinstance(piece, Statistics):
            print(flush=True)
            print(piece, file=sys.stderr, flush=True)
        else:
            print(shown(piece), end="", flush=True)


def _harmless(text: str) -> str:
    """Returns the text as a terminal may have it: a model repeats what it read, and some of it could move the
    cursor, name the window, or fill the clipboard."""
    return "".join(
        one.encode("unicode_escape").decode()
        if unicodedata.category(one) == "Cc" and one not in "\n\t"
        else one
        for one in text
    )
