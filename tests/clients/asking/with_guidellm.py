import json
import subprocess
import sys
import tempfile
from pathlib import Path

tokenizer = Path(__file__).parents[3] / "demo" / "models" / "target"
with tempfile.TemporaryDirectory() as folder:
    kept = Path(folder) / "benchmarks.json"
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={sys.argv[1]}"]
    command += ["--tokenizer", f"kind=hf_auto,model={tokenizer}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=24"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    command += ["--output", f"kind=json,path={kept}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run,) = json.loads(kept.read_text())["benchmarks"]
answered = run["requests"]["successful"]
told = {
    "asked": 6,
    "answered": len(answered),
    "failed": len(run["requests"]["errored"]) + len(run["requests"]["incomplete"]),
    "output": sum(one["output_metrics"]["total_tokens"] for one in answered),
}
print(json.dumps(told))
