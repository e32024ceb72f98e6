"""Make a tiny model with random weights, which reads and writes ASCII text, in a second.

A run with it shows that environment, tools and run file work together. It writes nonsense.

    python examples/random_model.py [--out outputs/random/model] [--seed 0]
"""

from __future__ import annotations

import argparse
import string
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from examples.tiny_model import splitter, tokenizer_of, write_model

ROLES = ["<system>", "<user>", "<assistant>", "<tool>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LONGEST = 2048
"""Largest number of tokens of an episode."""


def make_model(folder: Path, seed: int) -> None:
    """Write a model with 0.1 M parameters, and its tokenizer with one token per character."""
    tokenizer = tokenizer_of(string.printable, splitter(), roles=ROLES, chat_template=CHAT_TEMPLATE)
    torch.manual_seed(seed)
    write_model(folder, tokenizer, positions=LONGEST, hidden=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/random/model"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "config.json").exists() or any(args.out.glob("*.safetensors")):
        print(f"{args.out} is made already")
        return
    make_model(args.out, args.seed)
    print(f"{args.out}: a model with random weights")


if __name__ == "__main__":
    main()
