"""Tiny models with random weights for the examples, and their tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


def splitter(words: Sequence[str] = ()) -> Any:
    """Return a pre-tokenizer that makes one piece of each of the words, and of each character
    outside of them. Of two words at the same place, the earlier one in `words` is taken."""
    pattern = "|".join([*words, r"[\s\S]"])
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def tokenizer_of(
    pieces: Sequence[str], split: Any, *, roles: Sequence[str], chat_template: str
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per piece, and the special tokens `<pad>` and `<eos>`.

    Args:
        pieces: texts of the tokens; any other text becomes `<pad>`.
        split: pre-tokenizer that finds the pieces in a text.
        roles: further special tokens, which begin the messages of the chat template.
        chat_template: template in Jinja.
    """
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *roles, *pieces])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=[*roles],
        chat_template=chat_template,
    )


def write_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, positions: int, hidden: int = 128
) -> None:
    """Write a model of the Qwen3 architecture with random weights, and its tokenizer, in the format
    of Hugging Face.

    Args:
        positions: largest number of tokens of a sequence.
        hidden: width of the hidden states; with 128 the model has 0.5 M parameters.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
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
