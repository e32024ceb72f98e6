"""Make the model and the demonstrations of the frozen lake example, in two minutes and without a
network.

The model (Qwen3 architecture, 0.5 M parameters; one token per field of the map and per move)
learns by SFT from a walker that takes a shortest way to the goal, but is often distracted. So it
knows what moves are, and seldom reaches the goal.

    python examples/lake.py [--out outputs/lake] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.frozen_lake import HOLE, FrozenLake

SIZE, HOLES = 4, 0.2
MOST_MOVES = 10
EPISODES = 12_000
FIRST_SEED = 1_000_000
"""Seed of the first map of the demonstrations; the maps of training and validation have others."""
SKILL = 0.5
"""Share of the moves that lead along a shortest way; the others are random."""
SPECIAL = ["<pad>", "<eos>", "<lake>", "<move>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<move>{{ m.content }}<eos>"
    "{% else %}<lake>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<move>{% endif %}"
)
HERE = Path(__file__).parent


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per field and per move, and a chat template."""
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *MOVES, *"P_OG\n"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    pieces = Regex("|".join(MOVES) + r"|[\s\S]")
    backend.pre_tokenizer = pre_tokenizers.Split(pieces, "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=["<lake>", "<move>"],
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
        max_position_embeddings=512,
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


def way(shown: str) -> str:
    """Return the first move of a shortest way from the walker to the goal."""
    rows = shown.split("\n")
    fields = {(i, j): field for i, row in enumerate(rows) for j, field in enumerate(row)}
    goal = next(place for place, field in fields.items() if field == "G")
    firsts, waiting = {goal: ""}, deque([goal])
    while waiting:
        row, column = waiting.popleft()
        for move, (down, right) in MOVES.items():
            place = row - down, column - right
            if place in fields and place not in firsts and fields[place] != HOLE:
                firsts[place] = move
                waiting.append(place)
    return next(firsts[place] for place, field in fields.items() if field == "P")


def episode(seed: int, dice: random.Random) -> list[dict[str, str]]:
    """Return a walk of the distracted walker as messages."""
    lake = FrozenLake(size=SIZE, holes=HOLES, rules=False)
    shown, _ = lake.reset(seed=seed)
    messages = []
    for _ in range(MOST_MOVES):
        move = way(shown) if dice.random() < SKILL else dice.choice(list(MOVES))
        messages += [{"role": "user", "content": shown}, {"role": "assistant", "content": move}]
        shown, _, over, _, _ = lake.step(move)
        if over:
            break
    return messages


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def make(out: Path, seed: int) -> None:
    """Write the demonstrations, and train the model on them."""
    warm, dice = out / "warm_start", random.Random(seed)
    rows = [{"messages": episode(FIRST_SEED + i, dice)} for i in range(EPISODES)]
    write_jsonl(warm / "train.jsonl", rows)
    torch.manual_seed(seed)
    write_model(warm / "model")
    command = [sys.executable, "-m", "roll.cli", "run"]
    command += [str(HERE / "agentic_frozen_lake" / "warm_start.yaml"), f"seed={seed}"]
    command += [f"model.path={warm}/model", f"output_dir={warm}/run", "resume=never"]
    subprocess.run([*command, f"data.sources.0.path={warm}/train.jsonl"], check=True)
    shutil.copytree(warm / "run" / "hf", out / "making")
    (out / "making").rename(out / "model")  # last: an existing model means that all files exist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/lake"))
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
    print(f"{args.out}: a model, made in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
