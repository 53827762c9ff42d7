"""`outrider generate`: one request to a running server, streamed to the terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from outrider.cli.reporting import WRONG_USAGE, fail, reported


def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    url: Annotated[str, typer.Option(help="Address of the server's HTTP API.")] = "http://127.0.0.1:8000",
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
        typer.Option(help="Replays an answer drawn with it.", show_default="drawn by the server"),
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
    with reported("generate"):
        _stream(url, "/v1/chat/completions" if chat else "/v1/completions", request)


def _stream(url: str, path: str, request: dict[str, object]) -> None:
    from outrider.client import Client, Statistics

    with Client(url) as client:
        for piece in client.stream(path, request):
            if isinstance(piece, Statistics):
                print(flush=True)
                print(piece, file=sys.stderr, flush=True)
            else:
                print(piece, end="", flush=True)
