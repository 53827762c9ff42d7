"""What is printed when everything is ready: the address, and two lines that work when pasted."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path

PROMPT = "def fibonacci(n):\n"
QUESTION = {"role": "user", "content": "What is the capital of France?"}
MAX_TOKENS = 64


def banner(
    url: str,
    grpc_address: str,
    model: str,
    *,
    chat: bool = False,
    keyed: bool = False,
    ca: Path | None = None,
    page: bool = False,
) -> str:
    """Returns the text for a service at `url` (http://host:port) that serves `model`. `chat`: it answers
    questions; `keyed`: to those who have a key; `ca`: file of the authority of its certificate; `page`: it
    has one."""
    trust = "" if ca is None else f"SSL_CERT_FILE={shlex.quote(str(ca))} "
    lines = [
        "",
        f"Outrider is ready: {url}  (model {model}; gRPC {grpc_address})",
        *(("Open that address in a browser, or ask it:",) if page else ()),
        "",
        *(("  export OUTRIDER_API_KEY=YOUR_KEY",) if keyed else ()),
        "  " + trust + curl_line(url, model, keyed, chat),
        "",
        *(() if importlib.util.find_spec("openai") else (f"  {_python()} -m pip install openai",)),
        "  " + trust + python_line(url, model, keyed, chat),
        "",
        "Ctrl-C stops.",
        "",
    ]
    return "\n".join(lines)


def curl_line(url: str, model: str, keyed: bool = False, chat: bool = False) -> str:
    asked = {"messages": [QUESTION]} if chat else {"prompt": PROMPT}
    body = json.dumps({"model": model, **asked, "max_tokens": MAX_TOKENS, "temperature": 0})
    key = '-H "authorization: Bearer $OUTRIDER_API_KEY" ' if keyed else ""
    path = "/v1/chat/completions" if chat else "/v1/completions"
    return f"curl {url}{path} {key}-H 'content-type: application/json' -d {shlex.quote(body)}"


def python_line(url: str, model: str, keyed: bool = False, chat: bool = False) -> str:
    key = 'os.environ["OUTRIDER_API_KEY"]' if keyed else '"none"'
    asked = f"messages={json.dumps([QUESTION])}" if chat else f"prompt={json.dumps(PROMPT)}"
    program = (
        f"{'import os; ' if keyed else ''}from openai import OpenAI; "
        f'print(OpenAI(base_url="{url}/v1", api_key={key}).{"chat." if chat else ""}completions.create('
        f"model={json.dumps(model)}, {asked}, max_tokens={MAX_TOKENS}, temperature=0)"
        f".choices[0].{'message.content' if chat else 'text'})"
    )
    return f"{_python()} -c {shlex.quote(program)}"


def _python() -> str:
    return shlex.quote(sys.executable)
