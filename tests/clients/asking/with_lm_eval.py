import json
import pathlib
import sys
import tempfile

from lm_eval import simple_evaluate

words = ["there", "was", "a", "little", "girl", "who", "lived", "in", "the", "woods", "with", "her", "dog"]
endings = [[f" {words[i]} {words[i + 1]}.", f" {words[i + 1]}"] for i in range(len(words) - 1)]
docs = [
    {"context": f"{sys.argv[2]} {' '.join(words[:i])}".strip(), "endings": ends, "label": 0}
    for i, ends in enumerate(endings)
]
with tempfile.TemporaryDirectory() as folder:
    data = pathlib.Path(folder) / "docs.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "endings",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    told = []
    for batch_size in (1, 8):
        arguments = {"model": "", "base_url": f"{sys.argv[1]}/v1/completions", "batch_size": batch_size}
        results = simple_evaluate("local-completions", arguments, tasks=[task], log_samples=True)
        samples = sorted(results["samples"]["endings"], key=lambda sample: sample["doc_id"])
        told.append([[float(one[0]) for one in sample["filtered_resps"]] for sample in samples])
    chat = {
        "task": "going_on",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{endings[0]}}",
        "generation_kwargs": {
            "until": [".", "\n\n"],
            "max_gen_toks": 24,
            "temperature": 0,
            "do_sample": False,
        },
        "metric_list": [{"metric": "exact_match"}],
    }
    arguments = {"model": "", "base_url": f"{sys.argv[1]}/v1/chat/completions", "num_concurrent": 2}
    results = simple_evaluate(
        "local-chat-completions", arguments, tasks=[chat], log_samples=True, apply_chat_template=True
    )
    samples = sorted(results["samples"]["going_on"], key=lambda sample: sample["doc_id"])
    chats = [sample["resps"][0][0] for sample in samples]
print(json.dumps({"docs": docs, "told": told, "chats": chats}))
