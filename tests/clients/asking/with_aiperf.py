import json
import subprocess
import sys
import tempfile
from pathlib import Path

tokenizer = Path(__file__).parents[3] / "demo" / "models" / "target"
with tempfile.TemporaryDirectory() as folder:
    command = [
        str(Path(sys.executable).parent / "aiperf"),
        "profile",
        "--model",
        "outrider-demo",
        "--url",
        sys.argv[1],
    ]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(tokenizer), "--concurrency", "2"]
    command += ["--request-count", "6", "--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "24"]
    command += ["--output-tokens-stddev", "0", "--extra-inputs", "ignore_eos:true", "--ui-type", "none"]
    command += [
        "--no-gpu-telemetry",
        "--use-server-token-count",
        "--artifact-dir",
        folder,
        "--random-seed",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (file,) = Path(folder).rglob("profile_export_aiperf.json")
    run = json.loads(file.read_text())
told = {
    "asked": 6,
    "answered": round(run["request_count"]["avg"]),
    "failed": round((run.get("error_request_count") or {"avg": 0})["avg"]),
    "output": round(run["total_output_tokens"]["avg"]),
}
print(json.dumps(told))
