"""Make the models and the data of the example with several domains, in minutes and without a
network.

The policy (Qwen3 architecture, 0.5 M parameters; one token per word, digit and tag) learns by SFT
to add numbers, write programs, choose options, follow instructions, think before the answer, and
praise animals. Half of what it is shown is wrong. So it knows what is asked, and seldom does all
of it. The judge, a model of the same size, learns to answer the two questions of `run.yaml` about
praise. Its tokenizer knows the words that matter there, and drops all others.

    python examples/mixed.py [--out outputs/mixed] [--seed 0]
"""

from __future__ import annotations

import json
import operator
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.tiny_model import given, run_script, splitter, tokenizer_of, write_model
from roll.config import RlvrConfig, load_config
from roll.rewards.contract import sample_of
from roll.rewards.judge.template import template_of
from roll.rewards.judge.verdict import form_of

ANIMALS = ["cat", "dog", "cow", "pig"]
COLOURS = ["red", "blue", "gold", "pink", "grey", "white"]
KIND, RUDE = ["good", "nice", "soft", "wise"], ["bad", "mean", "ugly", "rude"]
SIGNS = {"plus": "+", "minus": "-", "times": "*"}
OPERATIONS = {"plus": operator.add, "minus": operator.sub, "times": operator.mul}
LETTERS = "ABCD"
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
PROGRAM = "f=lambda x:x"
PIECES = [*TAGS, *ANIMALS, *COLOURS, *KIND, *RUDE, *SIGNS, PROGRAM, "Answer", "twice", "use"]
PIECES += ["praise", *"0123456789", *LETTERS, *" +-*=?,:"]
SCORES = [f'{{"score": {number}}}' for number in range(3)]
VERDICTS = [f'{{"verdict": "{name}"}}' for name in ("right", "wrong")]
JUDGE_WORDS = ["kindness", "end", "response", *ANIMALS, *KIND, *RUDE]
ROLES = ["<user>", "<assistant>"]
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
QUESTIONS = 5000
"""Number of questions that the judge learns from, of each kind."""
HERE = Path(__file__).parent

Row = dict[str, Any]


def math(dice: random.Random) -> Row:
    """Add two numbers."""
    a, b = dice.randrange(5), dice.randrange(5)
    right = str(a + b)
    said = right if dice.random() < SKILL else str(dice.randrange(9))
    return {"prompt": f"{a} + {b} =", "answer": right, "completion": said}


def code(dice: random.Random) -> Row:
    """Write a function in Python; its calls decide."""
    sign, number = dice.choice([*SIGNS]), dice.randrange(2, 10)
    right = f"{PROGRAM}{SIGNS[sign]}{number}"
    outputs = [OPERATIONS[sign](x, number) for x in (3, 10)]
    other = f"{PROGRAM}{dice.choice([*SIGNS.values()])}{dice.randrange(10)}"
    return {
        "prompt": f"{sign} {number}",
        "answer": "",
        "tests": {"fn_name": "f", "inputs": [[3], [10]], "outputs": outputs},
        "completion": right if dice.random() < SKILL else other,
    }


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


def praise(dice: random.Random) -> Row:
    """Say two kind things, and then which animal they are about; the judge decides."""
    animal = dice.choice(ANIMALS)
    words = [dice.choice(KIND if dice.random() < SKILL else RUDE) for _ in range(2)]
    words.insert(2 if dice.random() < SKILL else dice.randrange(3), animal)
    return {"prompt": f"praise {animal}", "answer": "", "completion": " ".join(words)}


DOMAINS: dict[str, Callable[[random.Random], Row]] = {
    "math": math,
    "code": code,
    "choice": choice,
    "instruct": instruct,
    "form": form,
    "praise": praise,
}


def questions(count: int, dice: random.Random) -> Iterator[Row]:
    """Yield questions as the rewards of `run.yaml` ask them, with the right answers."""
    config = load_config(HERE / "mixed_domains" / "run.yaml").config
    assert isinstance(config, RlvrConfig)
    asked = {name: each.judge for name, each in config.rewards.items() if each.judge is not None}
    for _ in range(count):
        words = dice.choices(KIND + RUDE, k=dice.randrange(4))
        words += dice.choices(ANIMALS, k=dice.randrange(3))
        dice.shuffle(words)
        kindness = sum((word in KIND) - (word in RUDE) for word in words)
        right = {
            "kindness": SCORES[max(0, min(2, kindness))],
            "ending": VERDICTS[not words or words[-1] not in ANIMALS],
        }
        sample = sample_of(" ".join(words), answer="")
        for name, judged in asked.items():
            template = template_of(judged.template, groups=False)
            message = template.message(sample, form_of(judged.verdict).instruction)
            yield {"prompt": message, "completion": right[name]}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the policy's tokenizer: one token per piece."""
    words = sorted((piece for piece in PIECES if len(piece) > 1), key=len, reverse=True)
    return tokenizer_of(PIECES, splitter(words), roles=ROLES, chat_template=CHAT_TEMPLATE)


def make_judge_tokenizer() -> PreTrainedTokenizerFast:
    """Return the judge's tokenizer: one token per word and per verdict that it knows. It drops what
    stands between them, so that it reads twenty tokens of a question with a thousand
    characters."""
    verdicts = "|".join(map(re.escape, SCORES + VERDICTS))
    pattern = rf"\b(?:{'|'.join(JUDGE_WORDS)})\b|{verdicts}"
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    pieces = [*JUDGE_WORDS, *SCORES, *VERDICTS]
    return tokenizer_of(pieces, split, roles=ROLES, chat_template=CHAT_TEMPLATE)


def write_jsonl(path: Path, rows: Iterable[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_files(out: Path, seed: int, demonstrations: int, asked: int) -> None:
    """Write problems, demonstrations and questions, and models with random weights.

    Args:
        demonstrations: number of demonstrations of each domain.
        asked: number of questions of each kind.
    """
    dice = random.Random(seed)
    shown: list[Row] = []
    for name, problem in DOMAINS.items():
        rows = [problem(dice) for _ in range(TRAIN + VALIDATION)]
        given = [{k: v for k, v in row.items() if k != "completion"} for row in rows]
        write_jsonl(out / f"{name}.jsonl", given[:TRAIN])
        write_jsonl(out / f"{name}_validation.jsonl", given[TRAIN:])
        more = (problem(dice) for _ in range(demonstrations))
        shown += [{k: row[k] for k in ("prompt", "completion")} for row in more]
    write_jsonl(out / "warm_start" / "policy.jsonl", shown)
    write_jsonl(out / "warm_start" / "judge.jsonl", questions(asked, dice))
    torch.manual_seed(seed)
    write_model(out / "warm_start" / "policy", make_tokenizer(), positions=128)
    write_model(out / "warm_start" / "judge", make_judge_tokenizer(), positions=128)


def make(out: Path, seed: int) -> None:
    """Write all files, and train judge and policy."""
    write_files(out, seed, DEMONSTRATIONS, QUESTIONS)
    train(out, "judge", "judge", seed)
    train(out, "policy", "model", seed)  # last: an existing model means that all files exist


def train(out: Path, name: str, made: str, seed: int) -> None:
    """Train a model of `<out>/warm_start` on its rows; the result is `<out>/<made>`."""
    warm = out / "warm_start"
    command = [sys.executable, "-m", "roll.cli", "run"]
    command += [str(HERE / "mixed_domains" / "warm_start.yaml"), f"seed={seed}", "resume=never"]
    command += [given("model.path", warm / name), given("output_dir", warm / f"run_{name}")]
    command += [given("data.sources.0.path", warm / f"{name}.jsonl")]
    subprocess.run(command, check=True)
    shutil.rmtree(out / "making", ignore_errors=True)
    shutil.rmtree(out / made, ignore_errors=True)
    shutil.copytree(warm / f"run_{name}" / "hf", out / "making")
    (out / "making").rename(out / made)


if __name__ == "__main__":
    run_script(make, "outputs/mixed", (__doc__ or "").splitlines()[0])
