"""Make the models and data of the sorting examples, in seconds and without a network.

The task is to sort five digits. The model (Qwen3 architecture, 0.5 M parameters, one token per
character) starts with random weights. The digits of a held-out problem do not occur together in any
training problem, in any order.

    python examples/sorting.py quickstart [--out outputs/quickstart] [--seed 0]

The tasks make:

* `sft`: a model with random weights, and demonstrations for it.
* `distill`: a teacher, which an SFT run trains to sort, a smaller student with random weights, and
  texts for it.
* `quickstart`: a model that an SFT run trains on demonstrations that sort up or down at random, and
  problems for RL.
* `dpo` and `reward_model`: the model of `quickstart`, and pairs of responses; the better response
  of a pair is sorted upwards.
"""

from __future__ import annotations

import argparse
import itertools
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

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.tiny_model import given, splitter, tokenizer_of, write_model

DIGITS = 5
HELD_OUT = 256
TRAIN_PROBLEMS = 2048
WARM_START_ROWS = 38400
ROLES = ["<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% else %}<assistant>{{ m.content }}<eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
HERE = Path(__file__).parent


def make_model(folder: Path, *, hidden: int = 128) -> None:
    """Write a model with random weights, and its tokenizer with one token per digit."""
    tokenizer = tokenizer_of("0123456789", splitter(), roles=ROLES, chat_template=CHAT_TEMPLATE)
    write_model(folder, tokenizer, positions=64, hidden=hidden)


def split_sets(rng: random.Random) -> tuple[list[str], list[str]]:
    """Split all sets of five digits (a digit may repeat) at random into a part for training and a
    held-out part."""
    sets = ["".join(s) for s in itertools.combinations_with_replacement("0123456789", DIGITS)]
    sets = [s for s in sets if len(set(s)) > 1]  # sorted upwards and downwards must differ
    rng.shuffle(sets)
    return sets[HELD_OUT:], sets[:HELD_OUT]


def shuffled(digits: str, rng: random.Random) -> str:
    return "".join(rng.sample(digits, len(digits)))


def upwards(problem: str) -> str:
    return "".join(sorted(problem))


def downwards(problem: str) -> str:
    return "".join(sorted(problem, reverse=True))


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_both(
    out: Path, seed: int, row: Callable[[str], dict[str, Any]], *, count: int = TRAIN_PROBLEMS
) -> None:
    """Write `train.jsonl`, with `count` rows, and `held_out.jsonl`.

    Args:
        row: function that makes a row of a problem, which is a string of five digits.
    """
    rng = random.Random(seed)
    train, held_out = split_sets(rng)
    problems = [shuffled(rng.choice(train), rng) for _ in range(count)]
    write_jsonl(out / "train.jsonl", map(row, problems))
    write_jsonl(out / "held_out.jsonl", (row(shuffled(digits, rng)) for digits in held_out))


def make_sft(out: Path, seed: int) -> None:
    write_both(
        out, seed, lambda p: {"prompt": p, "completion": upwards(p)}, count=WARM_START_ROWS // 2
    )
    torch.manual_seed(seed)
    make_model(out / "model")  # last, because an existing model means that all files exist


def make_quickstart(out: Path, seed: int) -> None:
    write_both(out, seed, lambda p: {"prompt": p, "answer": upwards(p)})
    warm_start(out, seed)


def make_pairs(out: Path, seed: int) -> None:
    """Make pairs of responses for preference training, and the model of the quickstart."""
    write_both(out, seed, lambda p: {"prompt": p, "chosen": upwards(p), "rejected": downwards(p)})
    warm_start(out, seed)


def make_distill(out: Path, seed: int) -> None:
    """Make a teacher that has learned to sort, a student of half its width with random weights, and
    rows for the student."""
    make_sft(out / "lessons", seed)
    train(
        out / "lessons",
        "run.yaml",
        seed,
        f"validation.sets.held_out.path={out}/lessons/held_out.jsonl",
    )
    shutil.copytree(out / "lessons" / "run" / "hf", out / "teacher", dirs_exist_ok=True)
    write_both(out, seed, lambda p: {"prompt": p, "answer": upwards(p), "completion": upwards(p)})
    torch.manual_seed(seed)
    make_model(out / "making", hidden=64)
    (out / "making").rename(out / "model")  # last: an existing model means that all files exist


def warm_start(out: Path, seed: int) -> None:
    """Make `<out>/model` by an SFT run in `<out>/warm_start`. Its demonstrations sort upwards or
    downwards at random."""
    warm = out / "warm_start"
    torch.manual_seed(seed)
    make_model(warm / "model")
    teacher = random.Random(seed)
    sort = {True: upwards, False: downwards}
    write_both(
        warm,
        seed,
        lambda p: {"prompt": p, "completion": sort[teacher.random() < 0.5](p)},
        count=WARM_START_ROWS,
    )
    train(warm, "warm_start.yaml", seed)
    shutil.copytree(warm / "run" / "hf", out / "making")
    (out / "making").rename(out / "model")  # last: an existing model means that all files exist


def train(folder: Path, name: str, seed: int, *overrides: str) -> None:
    """Run `examples/sft_sort/<name>` on the model and the data in `folder`."""
    command = [sys.executable, "-m", "roll.cli", "run", str(HERE / "sft_sort" / name)]
    places = [given("model.path", folder / "model"), given("output_dir", folder / "run")]
    places += [f"seed={seed}", "resume=never"]
    places += [given("data.sources.0.path", folder / "train.jsonl"), *overrides]
    subprocess.run([*command, *places], check=True)


TASKS: dict[str, Callable[[Path, int], None]] = {
    "sft": make_sft,
    "distill": make_distill,
    "quickstart": make_quickstart,
    "dpo": make_pairs,
    "reward_model": make_pairs,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--out", type=Path, help="default: outputs/<task>")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out: Path = args.out or Path("outputs") / args.task
    if (out / "model" / "config.json").exists():
        print(f"{out} is made already")
        return
    shutil.rmtree(out / "making", ignore_errors=True)
    start = time.perf_counter()
    try:
        TASKS[args.task](out, args.seed)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command begins anew") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # the run has already printed its error
    print(f"{out}: a model and its data, made in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
