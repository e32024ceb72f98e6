"""Ids of tokens that a user names, against the vocabulary of the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from roll.config.sections.sampling import SamplingConfig
from roll.core.errors import ConfigError


def num_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest token id in the tokenizer's vocabulary, plus one."""
    return 1 + max(int(number) for number in tokenizer.get_vocab().values())


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
