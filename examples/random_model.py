"""Make a tiny model with random weights, which reads and writes ASCII text, in a second.

A run with it shows that environment, tools and run file work together. It writes nonsense.

    python examples/random_model.py [--out outputs/random/model] [--seed 0]
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROLES = ["<system>", "<user>", "<assistant>", "<tool>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LONGEST = 2048
"""Largest number of tokens of an episode."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and a chat template with four roles."""
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *ROLES, *string.printable])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=ROLES,
        chat_template=CHAT_TEMPLATE,
    )


def write_model(folder: Path, seed: int) -> None:
    """Write a model of the Qwen3 architecture with 0.1 M parameters, in the format of Hugging
    Face."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("outputs/random/model"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    write_model(args.out, args.seed)
    print(f"{args.out}: a model with random weights")


if __name__ == "__main__":
    main()
