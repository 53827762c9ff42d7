import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    models = [
        {
            "model_id": name,
            "model_name": "outrider-demo",
            "api_base": f"{sys.argv[1]}/v1",
            "completion": name == "text",
            "supports_schema": True,
        }
        for name in ("chat", "text")
    ]
    Path(folder, "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}

    def said(*arguments: str) -> str:
        command = [sys.executable, "-m", "llm", *arguments, "-o", "temperature", "0"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.removesuffix("\n")

    most = ("-o", "max_tokens", "24")
    schema = {
        "type": "object",
        "properties": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["unit"],
        "additionalProperties": False,
    }
    told = {
        "chat": [
            said("-m", "chat", sys.argv[2], *most),
            said("-m", "chat", sys.argv[2], *most, "--no-stream"),
        ],
        "completion": [said("-m", "text", sys.argv[2], *most)],
        "format": [json.loads(said("-m", "chat", sys.argv[2], "--schema", json.dumps(schema)))["unit"]],
    }
print(json.dumps(told))
