"""What is printed when everything is ready: the address, and two lines that work when pasted."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from pathlib import Path

PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 64


def banner(url: str, grpc_address: str, model: str, *, keyed: bool = False, ca: Path | None = None) -> str:
    """Returns the text for a service at `url` (http://host:port) that serves `model`. `keyed`: to those who
    have a key; `ca`: file of the authority of its certificate."""
    trust = "" if ca is None else f"SSL_CERT_FILE={shlex.quote(str(ca))} "
    lines = [
        "",
        f"Outrider is ready: {url}  (model {model}; gRPC {grpc_address})",
        "",
        *(("  export OUTRIDER_API_KEY=YOUR_KEY",) if keyed else ()),
        "  " + trust + curl_line(url, model, keyed),
        "",
        *(() if importlib.util.find_spec("openai") else (f"  {_python()} -m pip install openai",)),
        "  " + trust + python_line(url, model, keyed),
        "",
        "Ctrl-C stops.",
        "",
    ]
    return "\n".join(lines)


def curl_line(url: str, model: str, keyed: bool = False) -> str:
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0})
    key = '-H "authorization: Bearer $OUTRIDER_API_KEY" ' if keyed else ""
    return f"curl {url}/v1/completions {key}-H 'content-type: application/json' -d {shlex.quote(body)}"


def python_line(url: str, model: str, keyed: bool = False) -> str:
    key = 'os.environ["OUTRIDER_API_KEY"]' if keyed else '"none"'
    program = (
        f"{'import os; ' if keyed else ''}from openai import OpenAI; "
        f'print(OpenAI(base_url="{url}/v1", api_key={key}).completions.create('
        f"model={json.dumps(model)}, prompt={json.dumps(PROMPT)}, max_tokens={MAX_TOKENS}, temperature=0)"
        ".choices[0].text)"
    )
    return f"{_python()} -c {shlex.quote(program)}"


def _python() -> str:
    return shlex.quote(sys.executable)
