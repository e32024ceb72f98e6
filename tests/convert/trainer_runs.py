"""Runs of the trainer on tiny models and rows, and the same by hand with Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from mcore_adapter.train.settings import Settings
from tests.convert.tiny_models import save_model
from tests.tiny import ALPHABET, SPECIAL, char_tokenizer

EXAMPLES, STEPS, LR, CLIP = 6, 3, 3e-3, 0.5
EPS = 1e-4
"""Of AdamW, where weights after the steps are compared: with less, entries whose gradients are next
to zero move by the sign of a rounding, which differs between processors."""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{{ m.content }}<eos>"
    "{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOKEN = {piece: number for number, piece in enumerate([*SPECIAL, *ALPHABET])}
EOS, USER, ASSISTANT = TOKEN["<eos>"], TOKEN["<user>"], TOKEN["<assistant>"]

Sequence_ = tuple[list[int], list[bool]]
"""Tokens, and which of them are trained on."""


def tokenizer() -> PreTrainedTokenizerBase:
    made = char_tokenizer()
    made.chat_template = TEMPLATE
    return made


def trainable(folder: Path, name: str) -> Path:
    """A random model with a tokenizer of characters."""
    found = save_model(folder, name)
    tokenizer().save_pretrained(found)
    return found


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(count: int, *, longest: int = 12, seed: int = 0) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        "".join(ALPHABET[i] for i in torch.randint(0, 36, (n,), generator=generator).tolist())
        for n in lengths
    ]


def text_rows(count: int) -> list[dict[str, str]]:
    return [{"text": word} for word in words(count, longest=25)]


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Two turns each."""
    said = iter(words(4 * count))
    roles = ("user", "assistant", "user", "assistant")
    return [
        {"messages": [{"role": role, "content": next(said)} for role in roles]}
        for _ in range(count)
    ]


def pair_rows(count: int) -> list[dict[str, str]]:
    said = iter(words(2 * count))
    return [
        {"prompt": "say ", "chosen": next(said), "rejected": next(said) + "!"} for _ in range(count)
    ]


def ids(text: str) -> list[int]:
    return [TOKEN[character] for character in text]


def sequences_by_hand(row: dict[str, Any]) -> list[Sequence_]:
    """One token a character: what the trainer must find."""
    if "text" in row:
        tokens = [*ids(row["text"]), EOS]
        return [(tokens, [False] + [True] * (len(tokens) - 1))]
    if "messages" in row:
        tokens, trained = [], []
        for turn in row["messages"]:
            answer = turn["role"] == "assistant"
            said = [*ids(turn["content"]), *([EOS] if answer else [])]
            tokens += [ASSISTANT if answer else USER, *said]
            trained += [False, *[answer] * len(said)]
        return [(tokens, trained)]
    before = ids(row["prompt"])
    answers = [[*ids(row[name]), EOS] for name in ("chosen", "rejected")]
    return [
        ([*before, *answer], [False] * len(before) + [True] * len(answer)) for answer in answers
    ]


def logprobs_by_hand(model: Any, sequence: Sequence_) -> Tensor:
    """Of the tokens that are trained on."""
    tokens, trained = torch.tensor(sequence[0]), torch.tensor(sequence[1])
    logits = model(input_ids=tokens[None], use_cache=False).logits[0]
    chosen = logits[:-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
    return chosen[trained[1:]]


def likelihood_by_hand(model: Any, rows: Sequence[dict[str, Any]]) -> Tensor:
    sequences = [sequence for row in rows for sequence in sequences_by_hand(row)]
    return -torch.cat([logprobs_by_hand(model, sequence) for sequence in sequences]).mean()


def preference_by_hand(beta: float, smoothing: float, frozen: Any) -> Callable[..., Tensor]:
    def margin(model: Any, row: dict[str, Any]) -> Tensor:
        chosen, rejected = (logprobs_by_hand(model, s).sum() for s in sequences_by_hand(row))
        return chosen - rejected

    def loss(model: Any, rows: Sequence[dict[str, Any]]) -> Tensor:
        found = []
        for row in rows:
            with torch.no_grad():
                before = margin(frozen, row)
            x = beta * (margin(model, row) - before)
            found.append(-(1 - smoothing) * F.logsigmoid(x) - smoothing * F.logsigmoid(-x))
        return torch.stack(found).mean()

    return loss


def train_by_hand(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    loss: Callable[[Any, Sequence[dict[str, Any]]], Tensor] = likelihood_by_hand,
    model: Any = None,
    eps: float = 1e-8,
) -> tuple[list[tuple[float, float]], float]:
    """Losses and gradient norms of the first steps, rows in the order of the file; and the loss of
    all of them afterwards."""
    model = hf_model(folder) if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LR, weight_decay=0.0, eps=eps)
    found = []
    for step in range(STEPS):
        value = loss(model, rows[step * EXAMPLES : (step + 1) * EXAMPLES])
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((value.item(), norm.item()))
    with torch.no_grad():
        return found, loss(model, rows).item()


def hf_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()


def settings(model: Path, rows: Path, output: Path, method: str = "sft", **more: Any) -> Settings:
    """Of as many steps as `train_by_hand`; `more` is merged into sections."""
    made: dict[str, Any] = {
        "method": method,
        "model": str(model),
        "output": str(output),
        "data": {"train": str(rows), "max_length": 64, "shuffle": False},
        "batch": {"examples": EXAMPLES, "tokens": 128},
        "optimizer": {"lr": LR, "schedule": "constant", "max_grad_norm": CLIP},
        "dtype": "fp32",
        "steps": STEPS,
        "log_every": 1000,
    }
    for key, value in more.items():
        made[key] = {**made.get(key, {}), **value} if isinstance(value, dict) else value
    return Settings.model_validate_json(json.dumps(made))


def run_all(runs: Sequence[Settings]) -> None:
    """What a rank does."""
    from mcore_adapter.train.setup import train

    for each in runs:
        assert train(each) == 0


def steps_of(run: Settings) -> list[dict[str, Any]]:
    """Metrics of the steps of a run, without validations."""
    lines = (run.output / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "lr" in line]
