"""transformers' own generate, in a process of its own: what most would use for the same pair of models.

    python -m outrider_cli.bench.peer PARENT_PID THREADS TARGET DRAFT

Reads one request a line from standard input as JSON, and answers each with a line. Nothing but generate runs
while it generates, so that nothing of the measurement slows it down.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

DEFAULT = "default"  # assisted as transformers does it if nobody chooses


class Arrivals:
    """A streamer of transformers': notes when generate handed out how many tokens."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.arrivals: list[tuple[float, int]] = []
        self.cpu_at_first = 0.0
        self._prompt_seen = False

    def put(self, value: Any) -> None:
        """Takes token ids [n] or [1, n]; the first call brings the prompt."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        ids = value.flatten().tolist()
        self.ids += ids
        self.arrivals.append((time.perf_counter(), len(ids)))
        if len(self.arrivals) == 1:
            self.cpu_at_first = time.process_time()

    def end(self) -> None: ...


class Pair:
    """Target and draft as transformers runs them."""

    def __init__(self, target: str, draft: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from outrider.engine.checkpoint import locate

        self._torch = torch
        found = [locate(name) for name in (target, draft)]
        self._tokenizer = AutoTokenizer.from_pretrained(found[0].folder, **found[0].source)
        self._target, self._draft = (
            AutoModelForCausalLM.from_pretrained(each.folder, dtype=torch.float32, **each.source).eval()
            for each in found
        )
        for model in (self._target, self._draft):  # goes on past the end of a text, as ignore_eos does
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        read = self._draft.generation_config  # assistants' settings are read from here and from nowhere else
        self._defaults = {name: getattr(read, name) for name in self._settings(1)}

    @staticmethod
    def _settings(k: int) -> dict[str, object]:
        return {
            "num_assistant_tokens": k,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, object]:
        """Returns what generate gave. `assistant`: None = plain, DEFAULT, or the tokens to draft."""
        assistant = request["assistant"]
        if assistant is not None:
            chosen = self._defaults if assistant == DEFAULT else self._settings(int(assistant))
            for name, value in chosen.items():
                setattr(self._draft.generation_config, name, value)
        arrivals = Arrivals()
        inputs = self._tokenizer(request["prompt"], return_tensors="pt")
        sampled = request["temperature"] > 0
        sampling = {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0} if sampled else {}
        self._torch.manual_seed(request["seed"])
        with self._torch.inference_mode():
            self._target.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=request["max_tokens"],
                do_sample=sampled,
                streamer=arrivals,
                **sampling,
                **({} if assistant is None else {"assistant_model": self._draft}),
            )
        return {
            "arrivals": arrivals.arrivals,
            "text": self._tokenizer.decode(arrivals.ids, skip_special_tokens=True),
            "prompt_tokens": inputs["input_ids"].shape[1],
            "cpu_seconds": time.process_time() - arrivals.cpu_at_first,
        }


def main(parent: str, threads: str, target: str, draft: str) -> None:
    """Answers until standard input ends."""
    import torch
    from transformers.utils import logging

    from outrider.worker.followers import die_with

    die_with(int(parent))
    torch.set_num_threads(int(threads))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pair = Pair(target, draft)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(pair.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
