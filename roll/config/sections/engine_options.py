"""Options of inference engines that have sections of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from roll.config.base import Config

Quantization = Literal[
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
]
"""Quantization formats that vLLM can produce from unquantised weights."""
LoraRank = Literal[0, 1, 8, 16, 32, 64, 128, 256, 320, 512]

CPU_BLOCK_TOKENS = 32
"""Tokens of a block of vLLM's KV cache without a GPU, the fewest that its kernels allow. Only full
blocks are found again by prefix caching, and many prompts and turns are shorter than vLLM's 128."""
CPU_CACHE_BYTES = 1 << 26, 1 << 30
"""Bounds of the KV cache of a process of vLLM without a GPU, unless its size is set."""


class NgramSpeculationConfig(Config):
    """Speculative decoding without a model: the next tokens are guessed from an earlier place in
    the same text where the same tokens occur."""

    kind: Literal["ngram"] = "ngram"
    num_tokens: int = Field(default=4, ge=1)
    """Number of tokens guessed at once. The policy's own forward pass accepts or rejects them."""
    min_match: int = Field(default=1, ge=1)
    """Smallest number of last tokens that must also occur earlier in the text."""
    max_match: int = Field(default=4, ge=1)
    """Largest number of last tokens that are looked for."""


class DraftSpeculationConfig(Config):
    """Speculative decoding with a small model that guesses the next tokens. The small model keeps
    its own weights: weight pushes do not change it."""

    kind: Literal["draft_model"] = "draft_model"
    model: str
    """Folder or hub name of the small model, which must have the policy's tokenizer."""
    num_tokens: int = Field(default=4, ge=1)
    """Number of tokens guessed at once. The policy's own forward pass accepts or rejects them."""


SpeculationConfig = Annotated[
    NgramSpeculationConfig | DraftSpeculationConfig, Field(discriminator="kind")
]


class EndpointConfig(Config):
    """OpenAI-compatible server (`/v1/completions`, `/v1/chat/completions`) in front of the
    engine."""

    host: str = "127.0.0.1"
    """Network address that the server listens on. The server has no password: only the network
    protects it."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port of replica 0; replica i listens on `port` + i."""
    model_name: str = "policy"
    """Name by which requests refer to the model."""
