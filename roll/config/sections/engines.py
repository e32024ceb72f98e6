"""Settings of inference engines, one class each, and sections in them; a role selects its engine by
`kind`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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


class HfEngineConfig(Config):
    """Hugging Face `generate` inside the worker: slow and exact, and needs nothing else
    installed."""

    kind: Literal["hf"] = "hf"
    max_num_seqs: int = Field(default=64, ge=1)
    """Number of sequences generated at once. Further requests wait on the driver."""

    @property
    def processes(self) -> int:
        """Number of processes of one replica; each has one device."""
        return 1


class VllmConfig(Config):
    """vLLM, as an asynchronous engine."""

    kind: Literal["vllm"] = "vllm"
    tp: int = Field(default=1, ge=1)
    """Tensor parallel size of one replica."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size of one replica, which takes tp * pp devices. More than a machine has
    are all devices of several: with tp up to `cluster.devices_per_node` each stage stays on one."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Largest number of tokens of prompt and response together. If left out: data.max_prompt_tokens
    + sampling.max_new_tokens; of episodes data.max_episode_tokens; of a judge max_question_tokens +
    the `max_new_tokens` of what it is asked."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """Share of the memory of each GPU for weights and KV cache."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """Size of the KV cache in GiB, in place of a share of the memory. Without a GPU, unless set:
    room for `max_num_seqs` sequences, from 0.0625 to 1, and for one sequence in any case."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Number of sequences decoded at once. Further requests wait on the driver."""
    enforce_eager: bool | None = None
    """Run the model's layers as they are, neither compiled nor in CUDA graphs. If left out: on GPUs
    false, without a GPU true; false compiles them there, too, which takes 5 to 20 s of each start
    and a C++ compiler."""
    prefix_caching: bool = True
    """Share the KV cache between prompts with the same prefix."""
    speculation: SpeculationConfig | None = None
    """Speculative decoding, which guesses several tokens ahead. Samples keep the policy's
    distribution. null: off."""
    quantization: Quantization | None = None
    """Format to which the policy's weights are quantised, when the checkpoint is loaded and in each
    push. Formats that need a checkpoint quantised beforehand cannot be used with pushes. null:
    none."""
    sleep_level: Literal[1, 2] = 1
    """Treatment of the weights while the engine sleeps. 1 keeps them in host memory; 2 drops them
    while a step trains, at whose end new ones are pushed, and keeps them at other times, such as
    during a checkpoint. 2 is for actor_infer only."""
    max_lora_rank: LoraRank = 0
    """Largest rank of LoRA adapters that the engine can receive in pushes, beside pushes of
    weights. 0: no adapters."""
    endpoint: EndpointConfig | None = None
    """Server for requests from outside the run. null: none."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, under vLLM's names."""

    def eager_on(self, platform: str) -> bool:
        """Return True if layers run as they are on this platform, `cpu` or `cuda`."""
        return platform == "cpu" if self.enforce_eager is None else self.enforce_eager

    def cpu_cache_bytes(self, token_bytes: int, tokens: int) -> int:
        """Return the size of the KV cache of a process without a GPU, in bytes.

        Args:
            token_bytes: bytes that a token takes in the cache of this process.
            tokens: largest number of tokens of prompt and response together.
        """
        if self.kv_cache_gb is not None:
            return int(self.kv_cache_gb * (1 << 30))
        sequence = token_bytes * (tokens + CPU_BLOCK_TOKENS)
        least = max(CPU_CACHE_BYTES[0], sequence + token_bytes * CPU_BLOCK_TOKENS)
        return max(least, min(CPU_CACHE_BYTES[1], self.max_num_seqs * sequence))

    @property
    def processes(self) -> int:
        """Number of processes of one replica; each has one device."""
        return self.tp * self.pp


class SglangConfig(Config):
    """SGLang, in a process of its own."""

    kind: Literal["sglang"] = "sglang"
    tp: int = Field(default=1, ge=1)
    """Tensor parallel size of one replica."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Largest number of tokens of prompt and response together. If left out: data.max_prompt_tokens
    + sampling.max_new_tokens; of episodes data.max_episode_tokens; of a judge max_question_tokens +
    the `max_new_tokens` of what it is asked."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """Share of the memory of each GPU for weights and KV cache. Without a GPU it is not read:
    `kv_cache_tokens` is the size of the cache there."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Size of the KV cache in tokens, in place of a share of the memory. Without a GPU: 16384
    unless set."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Number of sequences decoded at once. Further requests wait on the driver."""
    enforce_eager: bool = False
    """Use no CUDA graphs. Without a GPU there are none in any case."""
    prefix_caching: bool = True
    """Share the KV cache between prompts with the same prefix."""
    python: str | None = Field(default=None, min_length=1)
    """Path of the Python in whose environment SGLang is installed, the same on all nodes. It is for
    GPUs, where SGLang needs another PyTorch than the rest of a run. If left out: the Python of the
    run."""
    engine_args: dict[str, Any] = {}
    """Further arguments of SGLang's `Engine`, under SGLang's names."""

    @property
    def processes(self) -> int:
        """Number of processes of one replica; each has one device."""
        return self.tp


NO_PICTURES = (
    "with actor_infer.strategy.kind = sglang, log-probs after pictures would not be those of the "
    "trainer, so it takes none; use vllm or hf"
)
"""Why rows with pictures are refused with SGLang: its log-probs are off in some families, and its
embeddings of pictures outlive a push of weights."""

EngineConfig = Annotated[HfEngineConfig | VllmConfig | SglangConfig, Field(discriminator="kind")]
