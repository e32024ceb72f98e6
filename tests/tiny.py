"""Tiny random models, a character tokenizer and batches, made in milliseconds."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roll.core.batches import RolloutBatch

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=<>:;.,?!()[]{}\\$|_\n"
SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]


def char_tokenizer(alphabet: str = ALPHABET) -> PreTrainedTokenizerFast:
    """One token per character, with a chat template."""
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=(
            "{% for m in messages %}{% if m.role == 'user' %}<user>{% elif m.role == 'assistant' %}"
            "<assistant>{% endif %}{{ m.content }}{% endfor %}"
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        ),
    )


def tiny_qwen3(*, tied: bool = True, layers: int = 2, hidden: int = 64) -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM(Qwen3Config(**_sizes(tied, layers, hidden))).eval()


def tiny_qwen3_moe(*, tied: bool = True, layers: int = 2, number: int = 4) -> Qwen3MoeForCausalLM:
    """Some experts a layer, two for each token."""
    config = Qwen3MoeConfig(
        **_sizes(tied, layers, hidden=64),
        num_experts=number,
        num_experts_per_tok=2,
        moe_intermediate_size=48,  # vLLM pads it on CPUs
        norm_topk_prob=True,
    )
    return Qwen3MoeForCausalLM(config).eval()


def _sizes(tied: bool, layers: int, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": len(SPECIAL) + len(ALPHABET),
        "hidden_size": hidden,
        "intermediate_size": hidden * 2,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "dtype": "float32",
    }


def save_tiny_model(
    path: Path, *, seed: int = 0, tied: bool = True, experts: bool = False, number: int = 4
) -> Path:
    """A Hugging Face folder with weights and tokenizer; `number` experts, if it has them."""
    torch.manual_seed(seed)
    model: PreTrainedModel = (
        tiny_qwen3_moe(tied=tied, number=number) if experts else tiny_qwen3(tied=tied)
    )
    model.save_pretrained(path)
    char_tokenizer().save_pretrained(path)
    return path


def save_tiny_judge(path: Path, *, seed: int = 0) -> Path:
    """A Hugging Face folder with a model that knows the characters of JSON and of questions."""
    torch.manual_seed(seed)
    alphabet = string.printable
    sizes = _sizes(tied=True, layers=1, hidden=32)
    sizes |= {"vocab_size": len(SPECIAL) + len(alphabet), "max_position_embeddings": 4096}
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(path)
    char_tokenizer(alphabet).save_pretrained(path)
    return path


def rollout_batch(
    rows: int = 8, *, prompt: int = 5, longest: int = 12, vocab: int = 60, seed: int = 0
) -> RolloutBatch:
    """Random rows of different lengths, two siblings a group, rewards and engine log-probs set."""
    g = torch.Generator().manual_seed(seed)
    responses = torch.randint(1, longest + 1, (rows,), generator=g)
    width = prompt + longest
    positions = torch.arange(width)[None]
    lengths = prompt + responses
    mask = (positions >= prompt) & (positions < lengths[:, None])
    tokens = torch.randint(4, vocab, (rows, width), generator=g)
    tokens = tokens.masked_fill(positions >= lengths[:, None], 0)
    return RolloutBatch(
        sample_ids=[f"0/p{i // 2}/{i % 2}" for i in range(rows)],
        tags=["default"] * rows,
        group_ids=torch.arange(rows) // 2,
        tokens=tokens,
        lengths=lengths,
        loss_mask=mask,
        rewards=torch.rand(rows, generator=g),
        rollout_logprobs=-torch.rand(rows, width, generator=g) * mask,
    )


def save_deep_model(folder: Path) -> int:
    """Write a model of sixteen equal layers, so that one layer is little of the whole, and its
    tokenizer; return the bytes of its parameters in float32."""
    save_tiny_model(folder)  # its tokenizer
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=16,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return 4 * sum(p.numel() for p in model.parameters())
