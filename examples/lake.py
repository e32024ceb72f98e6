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

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.tiny_model import splitter, tokenizer_of, write_model
from roll.envs.built_in.boards.directions import MOVES
from roll.envs.built_in.boards.frozen_lake import HOLE, FrozenLake

SIZE, HOLES = 4, 0.2
MOST_MOVES = 10
EPISODES = 12_000
FIRST_SEED = 1_000_000
"""Seed of the first map of the demonstrations; the maps of training and validation have others."""
SKILL = 0.5
"""Share of the moves that lead along a shortest way; the others are random."""
ROLES = ["<lake>", "<move>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<move>{{ m.content }}<eos>"
    "{% else %}<lake>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<move>{% endif %}"
)
HERE = Path(__file__).parent


def make_model(folder: Path) -> None:
    """Write a model with random weights, and its tokenizer with one token per field and move."""
    tokenizer = tokenizer_of(
        [*MOVES, *"P_OG\n"], splitter([*MOVES]), roles=ROLES, chat_template=CHAT_TEMPLATE
    )
    write_model(folder, tokenizer, positions=512)


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
    make_model(warm / "model")
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
