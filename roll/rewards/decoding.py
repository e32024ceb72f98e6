"""Decoding of responses into the text that rewards and people read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from roll.rewards.thinking import decode_with_marks, marks_to_show

Decode = Callable[[Sequence[int]], str]
"""Function that turns the token ids of a response into text."""


def make_decode(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return a function that decodes the tokens of a response.

    Special tokens are left out, except the marks around thoughts, which are special tokens in some
    families (Magistral, gpt-oss and others). Without these marks a thought would look like a part
    of the answer.
    """
    special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)) | {
        added.content: token
        for token, added in tokenizer.added_tokens_decoder.items()
        if added.special
    }
    marks = marks_to_show(special)

    def decode(tokens: Sequence[int]) -> str:
        # transformers looks at the type of each item of a list, but not of an array.
        return str(tokenizer.decode(np.asarray(tokens), skip_special_tokens=True))

    return partial(decode_with_marks, marks=marks, decode=decode)
