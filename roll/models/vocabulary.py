"""The vocabulary of a tokenizer: its size, its hash, and ids of tokens that a user names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from roll.config.sections.sampling import SamplingConfig
from roll.core.errors import ConfigError

TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Patterns of the files of tokenizers."""


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id in the tokenizer's vocabulary, plus one."""
    return 1 + max(int(number) for number in tokenizer.get_vocab().values())


def token_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all tokens and their ids, 32 hexadecimal digits. Models with the same hash
    read the same token ids."""
    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:32]


def check_token_ids(
    samplings: Mapping[str, SamplingConfig], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ConfigError if a sampling names a token that the tokenizer does not have.

    Args:
        samplings: key in the file -> sampling.
    """
    for key, sampling in samplings.items():
        named = [("stop_token_ids", token) for token in sampling.stop_token_ids]
        named += [("logit_bias", token) for token in sampling.logit_bias]
        for name, token in named:
            if token >= num_tokens(tokenizer):
                raise ConfigError(
                    f"{key}.{name}: there is no token {token}; the tokenizer has the ids 0 "
                    f"to {num_tokens(tokenizer) - 1}"
                )


def check_tokenizer_files(path: str) -> None:
    """Raise ConfigError if `path` is the folder of a model without any file of a tokenizer.
    transformers would make an empty tokenizer of the family, without a chat template."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        return
    if not any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        raise ConfigError(
            f"{path!r} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is in it; copy the "
            "tokenizer's files of the model that it was made from into it, or set "
            "`model.tokenizer` to a folder that has them"
        )
