"""Accuracy of models on held-out problems of the sorting examples, with greedy decoding.

    python benchmarks/sort_accuracy.py outputs/distill/held_out.jsonl MODEL [MODEL ...]

A row has a `prompt` and an `answer` or a `completion`. A model is a folder in the format of Hugging
Face.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def accuracy(rows: list[dict[str, str]], folder: Path) -> float:
    """Return the share of rows whose greedy response equals the answer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    tokens = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**tokens, do_sample=False, max_new_tokens=8)
    told = tokenizer.batch_decode(written[:, tokens["input_ids"].shape[1] :], True)
    wanted = [row.get("answer", row.get("completion")) for row in rows]
    return sum(map(str.__eq__, told, wanted)) / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("problems", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.problems.read_text(encoding="utf-8").splitlines()]
    for folder in args.models:
        print(f"{folder}: {accuracy(rows, folder):.3f} of {len(rows)}")


if __name__ == "__main__":
    main()
