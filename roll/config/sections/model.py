"""The model of a role."""

from typing import Literal

from pydantic import Field

from roll.config.base import Config


class LoraConfig(Config):
    """A low-rank adapter beside frozen weights (arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1)
    """Of the two factors of each adapted weight."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapter adds alpha / rank * B A to each weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Of what goes into the adapter, in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Layers by their last name, such as q_proj; or all linear ones but the head (on megatron, of a
    model with experts, those of attention)."""
    serve: Literal["merged", "adapter"] = "merged"
    """What engines get in each push: weights with the adapter added, or the adapter alone, which
    vllm keeps beside weights of its own (`actor_infer.strategy.max_lora_rank`)."""


class ModelConfig(Config):
    path: str
    """Folder of a Hugging Face checkpoint, or `org/name` on the hub."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; left out: the model's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward passes; the optimizer keeps float32 weights in any case."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of the Hugging Face model; megatron has its own, and takes no other."""
    lora: LoraConfig | None = None
    """Train an adapter and leave the weights as they are; a role that does not train loads the
    model without it."""
    trust_remote_code: bool = False
    """Run the model code that comes with the checkpoint."""
    made_by: str | None = Field(default=None, min_length=1)
    """Command that makes `path`; named in the message when `path` does not exist yet."""

    @property
    def serves_adapter(self) -> bool:
        """Whether engines get an adapter as it is, and no weights."""
        return self.lora is not None and self.lora.serve == "adapter"
