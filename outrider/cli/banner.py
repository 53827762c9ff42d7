"""What is printed when everything is ready: the address, and two lines that work when pasted."""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys

PROMPT = "def fibonacci(n):\n"
MAX_TOKENS = 64


def banner(url: str, grpc_address: str, model: str) -> str:
    """The text for a service at `url` (http://host:port) that serves `model`."""
    lines = [
        "",
        f"Outrider is ready: {url}  (model {model}; gRPC {grpc_address})",
        "",
        "  " + curl_line(url, model),
        "",
        *(() if importlib.util.find_spec("openai") else (f"  {_python()} -m pip install openai",)),
        "  " + python_line(url, model),
        "",
        "Ctrl-C stops.",
        "",
    ]
    return "\n".join(lines)


def curl_line(url: str, model: str) -> str:
    body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0})
    return f"curl {url}/v1/completions -H 'content-type: application/json' -d {shlex.quote(body)}"


def python_line(url: str, model: str) -> str:
    program = (
        f'from openai import OpenAI; print(OpenAI(base_url="{url}/v1", api_key="none").completions.create('
        f"model={json.dumps(model)}, prompt={json.dumps(PROMPT)}, max_tokens={MAX_TOKENS}, temperature=0)"
        ".choices[0].text)"
    )
    return f"{_python()} -c {shlex.quote(program)}"


def _python() -> str:
    return shlex.quote(sys.executable)
