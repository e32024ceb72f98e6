"""Settings of corpora that tools of agents search by meaning."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from roll.config.base import Config
from roll.config.sections.model import ModelConfig


class CorpusConfig(Config):
    """Passages that an encoder turns into vectors, once; a search returns those whose vectors are
    nearest to that of the query (cosine), exactly."""

    path: str
    """File with one passage per line: JSON objects (`.jsonl`), or plain text."""
    text: str = "text"
    """Column of the passage."""
    title: str = "title"
    """Column of its title, if there is one; it is searched and shown."""
    pool: str
    """Pool of the workers, one on each device. Each holds the encoder, and its share of the
    vectors."""
    model: ModelConfig
    """Encoder, with its own tokenizer."""
    pooling: Literal["mean", "first", "last"] = "mean"
    """Vector of a text: the mean over its tokens, or that of its first (CLS) or last token. The
    card of the encoder says which, and so for the prefixes."""
    query_prefix: str = ""
    """Text before each query, such as `query: `."""
    passage_prefix: str = ""
    """Text before each passage, such as `passage: `."""
    max_tokens: int = Field(default=512, ge=1)
    """Number of tokens of a text that the encoder reads; the rest is cut off."""
    batch: int = Field(default=64, ge=1)
    """Number of texts of one forward pass."""
