"""Make the quickstart's model and data: about twenty seconds on two cores.

The task is to sort five digits. The model (Qwen3 architecture, 0.5 M parameters, one token per
character) is warm-started on a teacher that sorts up or down at random; the reward will pay for
up only. Held-out problems use sets of digits that occur in no training problem, in no order.

    python examples/rlvr_quickstart/prepare.py [--out outputs/quickstart] [--seed 0]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DIGITS = 5
HELD_OUT = 256
TRAIN_PROBLEMS = 2048
STEPS, BATCH, LR = 400, 96, 4e-3
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<assistant>' }}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, with a chat template."""
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *"0123456789"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def split_sets(rng: random.Random) -> tuple[list[str], list[str]]:
    """All sets of five digits, in two parts that share none: to train on, and held out."""
    sets = ["".join(s) for s in itertools.combinations_with_replacement("0123456789", DIGITS)]
    sets = [s for s in sets if len(set(s)) > 1]  # up and down must differ
    rng.shuffle(sets)
    return sets[HELD_OUT:], sets[:HELD_OUT]


def shuffled(digits: str, rng: random.Random) -> str:
    return "".join(rng.sample(digits, len(digits)))


def warm_start(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, sets: list[str], rng: random.Random
) -> float:
    """Supervised steps on a teacher that sorts up or down at random; returns the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.1)
    prompt_tokens = DIGITS + 2
    loss = torch.zeros(())
    for _ in range(STEPS):
        texts = []
        for digits in rng.choices(sets, k=BATCH):
            answer = "".join(sorted(digits, reverse=rng.random() < 0.5))
            texts.append(f"<user>{shuffled(digits, rng)}<assistant>{answer}<eos>")
        tokens = torch.tensor(tokenizer(texts)["input_ids"])
        logits = model(tokens[:, :-1]).logits[:, prompt_tokens - 1 :]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, prompt_tokens:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def write_jsonl(path: Path, problems: list[str]) -> None:
    rows = [{"prompt": p, "answer": "".join(sorted(p))} for p in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model" / "config.json").exists():
        print(f"{args.out} is made already")
        return
    start = time.perf_counter()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    train, held_out = split_sets(rng)
    loss = warm_start(model, tokenizer, train, rng)
    problems = [shuffled(rng.choice(train), rng) for _ in range(TRAIN_PROBLEMS)]
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "train.jsonl", problems)
    write_jsonl(args.out / "held_out.jsonl", [shuffled(digits, rng) for digits in held_out])
    tokenizer.save_pretrained(args.out / "model")
    model.save_pretrained(args.out / "model")  # config.json last: its presence means complete
    print(
        f"{args.out}: {model.num_parameters() / 1e6:.2f} M parameters, {TRAIN_PROBLEMS} training "
        f"and {HELD_OUT} held-out problems, loss {loss:.3f}, "
        f"{time.perf_counter() - start:.0f} s"
    )


if __name__ == "__main__":
    main()
