"""Make the models and data of the agentic examples, in minutes and without a network.

A model (Qwen3 architecture, 0.5 M parameters) learns by SFT from a player that is often distracted.
So it knows what an action looks like, and seldom reaches the goal.

    python examples/agents.py lake [--out outputs/lake] [--seed 0]

The tasks are `lake` (walk over frozen lakes), `sokoban` (push a box onto a goal), `tic_tac_toe`,
and `tools` (questions that only tools can answer: Python, search, and a server of the Model Context
Protocol).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.demonstrations import (
    SYLLABLES,
    Messages,
    calculation,
    errand_with_tools,
    game_of_sokoban,
    game_of_tic_tac_toe,
    number,
    rows_about,
    walk_on_lake,
    word,
)
from roll.envs.built_in.boards.directions import MOVES

SPECIAL = ["<pad>", "<eos>", "<said>", "<result>", "<turn>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<turn>{{ m.content }}<eos>"
    "{% elif m.role == 'tool' %}<result>{{ m.content }}{% else %}<said>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<turn>{% endif %}"
)
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Task:
    """What the model of an example learns first."""

    pieces: tuple[str, ...]
    """Texts that are one token each."""
    episode: Callable[[int, random.Random], Messages]
    """Function that returns the demonstration of a seed."""
    episodes: int
    most_tokens: int
    """Tokens of the longest demonstration."""


TASKS = {
    "lake": Task((*MOVES, *"P_OG\n"), walk_on_lake, 12_000, 256),
    "sokoban": Task((*MOVES, *"#_.$*@+\n"), game_of_sokoban, 8_000, 768),
    "tic_tac_toe": Task(tuple("123456789XO \n"), game_of_tic_tac_toe, 12_000, 256),
    "tools": Task(
        (
            *("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": "', '"}}'),
            *("python", "code", "print(", "search", "query", "phone", "name", "town", " of "),
            *SYLLABLES,
            *(f"{pair:02}" for pair in range(100)),
            *string.printable[:-2],
        ),
        errand_with_tools,
        24_000,
        256,
    ),
}
PEOPLE, HELD_OUT = 400, 100
"""Number of people that questions are about, in training and held out."""


def make_tokenizer(pieces: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each of these pieces, and a chat template."""
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *pieces])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    longest_first = sorted((p for p in vocab if len(p) > 1), key=len, reverse=True)
    pattern = "|".join(map(re.escape, longest_first)) + r"|[\s\S]"
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )


def write_model(folder: Path, pieces: Iterable[str]) -> None:
    """Write a model with random weights, and its tokenizer, in the format of Hugging Face."""
    tokenizer = make_tokenizer(pieces)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
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


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_questions(out: Path, dice: random.Random) -> None:
    """Write what only tools can answer: a corpus, a list of phone numbers, and the questions."""
    names: dict[str, None] = {}
    while len(names) < PEOPLE + HELD_OUT:
        names[word(dice)] = None
    towns = {name: word(dice) for name in names}
    phones = {name: number(dice) for name in names}
    write_jsonl(out / "towns.jsonl", ({"title": n, "text": t} for n, t in towns.items()))
    (out / "phones.json").write_text(json.dumps(phones), encoding="utf-8")
    products = [calculation(dice) for _ in names]
    tasks = {
        "products": [{"question": p.question, "answer": p.answer} for p in products],
        "towns": rows_about(towns, "town"),
        "phones": rows_about(phones, "phone"),
    }
    for name, rows in tasks.items():
        write_jsonl(out / f"questions/{name}.jsonl", rows[:PEOPLE])
        write_jsonl(out / f"questions/{name}_held_out.jsonl", rows[PEOPLE:])


def make(name: str, out: Path, seed: int) -> None:
    """Write the demonstrations, and train the model on them."""
    task, warm, dice = TASKS[name], out / "warm_start", random.Random(seed)
    rows = ({"messages": task.episode(i, dice)} for i in range(task.episodes))
    write_jsonl(warm / "train.jsonl", rows)
    if name == "tools":
        write_questions(out, dice)
    torch.manual_seed(seed)
    write_model(warm / "model", task.pieces)
    command = [sys.executable, "-m", "roll.cli", "run"]
    command += [str(HERE / "agentic_frozen_lake" / "warm_start.yaml"), f"seed={seed}"]
    command += [f"model.path={warm}/model", f"output_dir={warm}/run", "resume=never"]
    command += [f"data.sources.0.path={warm}/train.jsonl", f"data.max_tokens={task.most_tokens}"]
    subprocess.run(command, check=True)
    shutil.copytree(warm / "run" / "hf", out / "making")
    (out / "making").rename(out / "model")  # last: an existing model means that all files exist


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--out", type=Path, help="folder for the files (outputs/TASK)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or Path("outputs") / args.task
    if (out / "model" / "config.json").exists():
        print(f"{out} is made already")
        return
    shutil.rmtree(out / "making", ignore_errors=True)
    start = time.perf_counter()
    try:
        make(args.task, out, args.seed)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command begins anew") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # the run has already printed its error
    print(f"{out}: a model, made in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
