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

from outrider_cli.bench.suite import messages

LOOKED_UP = 10  # tokens at a time, without a draft model, if nobody chooses: as transformers' documentation
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
        """Loads them. Without a draft model (""), assisted means guesses looked up in the text."""
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from outrider.engine.checkpoint import locate
        from outrider.engine.loading import quiet_transformers

        quiet_transformers()
        self._torch = torch
        found = [locate(name) for name in (target, draft) if name]
        self._tokenizer = AutoTokenizer.from_pretrained(found[0].folder, **found[0].source)
        models = [
            AutoModelForCausalLM.from_pretrained(each.folder, dtype=torch.float32, **each.source).eval()
            for each in found
        ]
        self._target, self._draft = models[0], models[1] if draft else None
        for model in models:  # goes on past the end of a text, as ignore_eos does
            model.generation_config.eos_token_id = None
            model.generation_config.pad_token_id = 0
        if self._draft is not None:
            read = self._draft.generation_config  # assistants' settings are read from here and nowhere else
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
        assisted: dict[str, Any] = {}
        if assistant is not None and self._draft is None:
            assisted = {"prompt_lookup_num_tokens": LOOKED_UP if assistant == DEFAULT else int(assistant)}
        elif assistant is not None and self._draft is not None:
            assisted = {"assistant_model": self._draft}
            chosen = self._defaults if assistant == DEFAULT else self._settings(int(assistant))
            for name, value in chosen.items():
                setattr(self._draft.generation_config, name, value)
        arrivals = Arrivals()
        inputs = self._read(request["prompt"])
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
                **assisted,
            )
        return {
            "arrivals": arrivals.arrivals,
            "text": self._tokenizer.decode(arrivals.ids, skip_special_tokens=True),
            "prompt_tokens": inputs["input_ids"].shape[1],
            "cpu_seconds": time.process_time() - arrivals.cpu_at_first,
        }

    def _read(self, prompt: Any) -> Any:
        """Returns the tokens of a text, or of a conversation in the model's chat template."""
        if isinstance(prompt, str):
            return self._tokenizer(prompt, return_tensors="pt")
        return self._tokenizer.apply_chat_template(
            messages(prompt), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )


def main(parent: str, threads: str, target: str, draft: str) -> None:
    """Answers until standard input ends."""
    from outrider.worker.parent import die_with

    die_with(int(parent))
    import torch
    from transformers.utils import logging

    torch.set_num_threads(int(threads))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pair = Pair(target, draft)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(pair.answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
