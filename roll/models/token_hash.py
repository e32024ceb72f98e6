"""Hash of a vocabulary, which says whether two models read the same token ids."""

from __future__ import annotations

import hashlib
import json

from transformers import PreTrainedTokenizerBase


def token_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all tokens and their ids, 32 hexadecimal digits."""
    vocabulary = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:32]
