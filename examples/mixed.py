"""Make the model and the data of the example with several domains, in minutes and without a
network.

The model (Qwen3 architecture, 0.5 M parameters; one token per word, digit and tag) learns by SFT to
add numbers, choose options, follow instructions, and think before the answer. Half of what it is
shown is wrong. So it knows what is asked, and seldom does all of it.

    python examples/mixed.py [--out outputs/mixed] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ANIMALS = ["cat", "dog", "cow", "pig"]
COLOURS = ["red", "blue", "gold", "pink", "grey", "white"]
LETTERS = "ABCD"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
PIECES = [*TAGS, *ANIMALS, *COLOURS, "Answer", "twice", "use", *"0123456789", *LETTERS, *" +=?,:"]
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% else %}<assistant>{{ m.content }}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRAIN, VALIDATION = 256, 64
"""Number of problems of each domain. They are drawn from so few that the two share some."""
DEMONSTRATIONS = 4000
"""Number of demonstrations of each domain."""
SKILL = 0.5
"""Share of the demonstrations that do a thing right."""
HERE = Path(__file__).parent

Row = dict[str, Any]


def math(dice: random.Random) -> Row:
    """Add two numbers."""
    a, b = dice.randrange(5), dice.randrange(5)
    right = str(a + b)
    said = right if dice.random() < SKILL else str(dice.randrange(9))
    return {"prompt": f"{a} + {b} =", "answer": right, "completion": said}


def choice(dice: random.Random) -> Row:
    """Choose the letter of a word; the options do not change places."""
    right = dice.choice(LETTERS)
    listed = " ".join(f"{letter} {word}" for letter, word in zip(LETTERS, ANIMALS, strict=True))
    said = right if dice.random() < SKILL else dice.choice(LETTERS)
    return {
        "prompt": f"{ANIMALS[LETTERS.index(right)]}? {listed}",
        "answer": right,
        "options": ANIMALS,
        "completion": f"Answer: {said}",
    }


def instruct(dice: random.Random) -> Row:
    """Use two words and no comma, as IFEval asks for it."""
    wanted = dice.sample(COLOURS, 2)
    words = [each if dice.random() < SKILL else dice.choice(COLOURS) for each in wanted]
    words.insert(dice.randrange(3), dice.choice(COLOURS))
    return {
        "prompt": f"use {wanted[0]} {wanted[1]}",
        "answer": "",
        "instruction_id_list": ["keywords:existence", "punctuation:no_comma"],
        "kwargs": [{"keywords": wanted}, {}],
        "completion": (" " if dice.random() < SKILL else ", ").join(words),
    }


def form(dice: random.Random) -> Row:
    """Think between tags, then answer between tags."""
    number = dice.randrange(10)
    right = str(2 * number)
    said = right if dice.random() < SKILL else str(dice.randrange(19))
    thought, answer = f"<think>{number} + {number}</think>", f"<answer>{said}</answer>"
    wrong = [
        answer,
        thought + said,
        answer + thought,
        f"{thought}<answer>{said}",
        thought + thought,
    ]
    done = thought + answer if dice.random() < SKILL else dice.choice(wrong)
    return {"prompt": f"twice {number}", "answer": right, "completion": done}


DOMAINS: dict[str, Callable[[random.Random], Row]] = {
    "math": math,
    "choice": choice,
    "instruct": instruct,
    "form": form,
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per piece, special tokens and a chat template."""
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *PIECES])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    words = "|".join(sorted((piece for piece in PIECES if len(piece) > 1), key=len, reverse=True))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(words + r"|[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )


def write_model(folder: Path) -> None:
    """Write a model with random weights, and its tokenizer, in the format of Hugging Face."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    tokenizer.save_pretrained(folder)
    # The output head is tied to the embedding. Engines expect these weights under the name of the
    # embedding alone.
    weights = Qwen3ForCausalLM(config).state_dict()
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write problems and demonstrations, and train the model on the demonstrations."""
    warm, dice = out / "warm_start", random.Random(seed)
    shown: list[Row] = []
    for name, problem in DOMAINS.items():
        rows = [problem(dice) for _ in range(TRAIN + VALIDATION)]
        asked = [{k: v for k, v in row.items() if k != "completion"} for row in rows]
        write_jsonl(out / f"{name}.jsonl", asked[:TRAIN])
        write_jsonl(out / f"{name}_validation.jsonl", asked[TRAIN:])
        more = (problem(dice) for _ in range(DEMONSTRATIONS))
        shown += [{k: row[k] for k in ("prompt", "completion")} for row in more]
    write_jsonl(warm / "train.jsonl", shown)
    torch.manual_seed(seed)
    write_model(warm / "model")
    command = [sys.executable, "-m", "roll.cli", "run"]
    command += [str(HERE / "mixed_domains" / "warm_start.yaml"), f"seed={seed}"]
    command += [f"model.path={warm}/model", f"output_dir={warm}/run", "resume=never"]
    subprocess.run([*command, f"data.sources.0.path={warm}/train.jsonl"], check=True)
    shutil.copytree(warm / "run" / "hf", out / "making")
    (out / "making").rename(out / "model")  # last: an existing model means that all files exist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/mixed"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model" / "config.json").exists():
        print(f"{args.out} is made already")
        return
    shutil.rmtree(args.out / "making", ignore_errors=True)
    start = time.perf_counter()
    try:
        make(args.out, args.seed)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command begins anew") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # the run has already printed its error
    print(f"{args.out}: a model and its data, made in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
