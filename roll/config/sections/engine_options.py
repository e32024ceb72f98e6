"""Options of an inference engine that are groups of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.base import Config


class NgramSpeculationConfig(Config):
    """Guess the next tokens from an earlier place in the same text that reads like its end."""

    kind: Literal["ngram"] = "ngram"
    num_tokens: int = Field(default=4, ge=1)
    """Tokens guessed at once; the policy's own forward pass accepts or rejects them."""
    min_match: int = Field(default=1, ge=1)
    """Fewest tokens that must read alike."""
    max_match: int = Field(default=4, ge=1)
    """Most tokens that are compared."""


class DraftSpeculationConfig(Config):
    """Let a small model guess the next tokens. It keeps its own weights: pushes do not reach it."""

    kind: Literal["draft_model"] = "draft_model"
    model: str
    """Folder or hub name of the small model; it must have the policy's tokenizer."""
    num_tokens: int = Field(default=4, ge=1)
    """Tokens guessed at once; the policy's own forward pass accepts or rejects them."""


SpeculationConfig = Annotated[
    NgramSpeculationConfig | DraftSpeculationConfig, Field(discriminator="kind")
]


class EndpointConfig(Config):
    """An OpenAI-compatible server (`/v1/completions`, `/v1/chat/completions`) over the engine."""

    host: str = "127.0.0.1"
    """Where it listens; nothing but the network protects it."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Of replica 0; replica i has `port` + i."""
    model_name: str = "policy"
    """What requests call the model."""
