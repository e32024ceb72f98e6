"""The vocabulary of a tokenizer: its size, its hash, and ids of tokens that a user names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from roll.config.sections.sampling import SamplingConfig
from roll.core.errors import ConfigError


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
