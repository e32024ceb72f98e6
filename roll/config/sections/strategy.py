"""Backends, one class each; a role names one by `kind`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config
from roll.config.sections.engine_options import EndpointConfig, SpeculationConfig


class HfScoreConfig(Config):
    """Plain Hugging Face forward passes: the numbers every other backend is tested against."""

    kind: Literal["hf"] = "hf"


class Fsdp2Config(Config):
    """PyTorch FSDP2: parameters, gradients and optimizer state sharded over the ranks."""

    kind: Literal["fsdp2"] = "fsdp2"
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after each forward pass, and after each backward pass; or
    keep them until the update: more memory, one gather per update instead of two per
    micro-batch."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradient reduction across ranks."""
    ulysses: int = Field(default=1, ge=1)
    """Ranks that share each row, a slice of its tokens each, and exchange tokens for heads in
    attention (arXiv 2309.14509): for rows that are too long for one."""
    tp: int = Field(default=1, ge=1)
    """Ranks that share each matrix of attention and MLP, and each row."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the model, each sharded over its part of the ranks (HSDP): gathers stay within a
    copy, for example on one node; gradients are summed over all."""

    @property
    def ranks_per_part(self) -> int:
        """Devices that get the same part of a batch."""
        return self.ulysses * self.tp


class DeepspeedConfig(Config):
    """DeepSpeed ZeRO: what a training step needs, shared out over the ranks by stages."""

    kind: Literal["deepspeed"] = "deepspeed"
    stage: Literal[0, 1, 2, 3] = 2
    """What the ranks share out: nothing (in bfloat16: as 1), masters and moments (1), gradients
    too (2), parameters too (3). A frozen model is shared out with 3, else whole on every rank."""
    offload_optimizer: bool = False
    """Keep masters and moments in host memory and update them there; stage 1 and above."""
    offload_parameters: bool = False
    """Keep this rank's part of the parameters in host memory; stage 3."""
    activation_checkpointing: bool = False
    """Recompute each layer's activations in the backward pass."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradient reduction across ranks."""
    bucket_elements: int = Field(default=50_000_000, ge=1)
    """Elements that one reduction or gather takes together; the buffer for them always exists."""
    whole_below_elements: int = Field(default=100_000, ge=0)
    """Stage 3: parameters up to this size stay whole on every rank, which saves small gathers."""

    @model_validator(mode="after")
    def _check_offload(self) -> Self:
        if self.offload_optimizer and self.stage == 0:
            raise ValueError(
                "offload_optimizer needs stage 1 or above; raise stage or leave it out"
            )
        if self.offload_parameters and self.stage != 3:
            raise ValueError(
                f"offload_parameters needs stage 3, stage is {self.stage}; set stage: 3 or leave "
                "it out"
            )
        return self


class MegatronConfig(Config):
    """Megatron-Core: layers cut over tensor, pipeline and expert parallel ranks.

    Ranks that are left over are data parallel: tp 2 and pp 2 on eight devices make two copies.
    """

    kind: Literal["megatron"] = "megatron"
    tp: int = Field(default=1, ge=1)
    """Ranks that share each matrix."""
    pp: int = Field(default=1, ge=1)
    """Stages that the layers are spread over."""
    vpp: int = Field(default=1, ge=1)
    """Chunks of layers on each stage, which take turns: less idling, more exchange."""
    cp: Literal[1] = 1
    """Context parallelism; there is none yet."""
    ep: int = Field(default=1, ge=1)
    """Ranks that share the experts of a layer."""
    etp: int | None = Field(default=None, ge=1)
    """Ranks that share each matrix of an expert; left out: tp."""
    layers: tuple[int, ...] | None = None
    """Layers of each of the pp * vpp chunks, in the order of the model; left out: the same."""
    sequence_parallel: bool | None = None
    """Spread norms and residuals over the tensor parallel ranks too; left out: where there are
    experts and tp is above 1."""
    recompute: Literal["none", "attention", "full"] = "none"
    """Activations that the backward pass computes again: those of attention, or of whole layers."""
    distributed_optimizer: bool = False
    """Each data parallel rank keeps and updates its part of the float32 masters and moments: less
    memory where several hold the same, and the weights are gathered after each update."""
    aux_loss_coef: float = Field(default=0.0, ge=0)
    """Of the loss that balances the load of experts; not part of `loss/total`."""

    @property
    def ranks_per_part(self) -> int:
        """Devices that get the same part of a batch."""
        return self.tp * self.pp

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.vpp > 1 and self.pp == 1:
            raise ValueError(
                f"vpp is {self.vpp} but pp is 1: chunks take turns between stages; raise pp or "
                "leave vpp out"
            )
        if self.layers is not None and len(self.layers) != self.pp * self.vpp:
            raise ValueError(
                f"layers names {len(self.layers)} chunks, expected pp * vpp = "
                f"{self.pp * self.vpp}; give one number of layers for each"
            )
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel needs tp above 1; raise tp or leave it out")
        return self


class HfEngineConfig(Config):
    """Hugging Face generate inside the worker: slow, exact and always there."""

    kind: Literal["hf"] = "hf"
    max_num_seqs: int = Field(default=64, ge=1)
    """Sequences generated at once; requests beyond it wait on the driver."""

    @property
    def processes(self) -> int:
        """Of one replica, with a device each."""
        return 1


Quantization = Literal[
    "fp8_per_tensor",
    "fp8_per_block",
    "fp8_per_channel",
    "mxfp8",
    "mxfp4",
    "nvfp4_per_token",
    "int8_per_channel_weight_only",
]
"""Those that vLLM makes itself out of unquantised weights."""
LoraRank = Literal[0, 1, 8, 16, 32, 64, 128, 256, 320, 512]


class VllmConfig(Config):
    """vLLM, asynchronous engine."""

    kind: Literal["vllm"] = "vllm"
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size of one replica."""
    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel size of one replica, which takes tp * pp devices."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus response; left out: data.max_prompt_tokens + sampling.max_new_tokens."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """Share of each GPU for weights and KV cache."""
    kv_cache_gb: float | None = Field(default=None, gt=0)
    """KV cache in GiB, instead of a share; without a GPU 0.0625 unless set."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoded at once; requests beyond it wait on the driver."""
    enforce_eager: bool = False
    """No CUDA graphs; always so without a GPU."""
    prefix_caching: bool = True
    """Share the KV cache of equal prompt prefixes."""
    speculation: SpeculationConfig | None = None
    """Guess several tokens ahead; what is sampled keeps the policy's distribution."""
    quantization: Quantization | None = None
    """Quantise the policy's weights as they come in, from the checkpoint and from each push.
    Formats that need a checkpoint quantised beforehand cannot be pushed to."""
    sleep_level: Literal[1, 2] = 1
    """What sleep does with the weights: 1 keeps them in host memory, 2 drops them, which is enough
    where a push comes before the next request."""
    max_lora_rank: LoraRank = 0
    """Above 0 the engine takes pushes of LoRA adapters up to this rank, beside those of weights."""
    endpoint: EndpointConfig | None = None
    """Serve requests from outside too."""
    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's `AsyncEngineArgs`, by vLLM's names."""

    @property
    def processes(self) -> int:
        """Of one replica, with a device each."""
        return self.tp * self.pp


class SglangConfig(Config):
    """SGLang, in a process of its own."""

    kind: Literal["sglang"] = "sglang"
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel size of one replica."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Longest prompt plus response; left out: data.max_prompt_tokens + sampling.max_new_tokens."""
    gpu_memory_utilization: float = Field(default=0.85, gt=0, lt=1)
    """Share of each GPU for weights and KV cache."""
    kv_cache_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the KV cache holds, instead of a share; without a GPU 16384 unless set."""
    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences decoded at once; requests beyond it wait on the driver."""
    enforce_eager: bool = False
    """No CUDA graphs; always so without a GPU."""
    prefix_caching: bool = True
    """Share the KV cache of equal prompt prefixes."""
    engine_args: dict[str, Any] = {}
    """Further arguments of SGLang's `Engine`, by SGLang's names."""

    @property
    def processes(self) -> int:
        """Of one replica, with a device each."""
        return self.tp


TrainStrategyConfig = Annotated[
    Fsdp2Config | DeepspeedConfig | MegatronConfig, Field(discriminator="kind")
]
ScoreStrategyConfig = Annotated[
    HfScoreConfig | Fsdp2Config | DeepspeedConfig | MegatronConfig, Field(discriminator="kind")
]
EngineConfig = Annotated[HfEngineConfig | VllmConfig | SglangConfig, Field(discriminator="kind")]
