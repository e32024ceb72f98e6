"""Settings of a model."""

from typing import Any, Literal, get_args

from pydantic import Field, field_validator

from roll.config.base import Config
from roll.config.errors import nearest

ModelPart = Literal["vision", "projector", "language"]
"""Part of a model that reads pictures: the tower that looks at patches, the projector that maps its
features to the language model (Qwen calls it merger), and the language model with its head."""


class LoraConfig(Config):
    """Low-rank adapter on frozen weights (arXiv 2106.09685)."""

    rank: int = Field(default=16, ge=1)
    """Rank of the two factors A and B of each adapted weight."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapter, which adds alpha / rank * B A to each weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of the adapter's input, in training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the layers to adapt, by the last part of their names, such as q_proj; or
    `all-linear`: all linear layers except the head (on megatron, for a model with experts: the
    layers of attention)."""
    parts: tuple[ModelPart, ...] = Field(default=("language",), min_length=1)
    """Parts of a model that reads pictures in which `targets` are looked for."""
    serve: Literal["merged", "adapter"] = "merged"
    """Form in which engines get the adapter in each push: `merged` into the weights, or the
    `adapter` alone. With `adapter`, vllm keeps weights of its own beside the adapter
    (`actor_infer.strategy.max_lora_rank`)."""


class ModelConfig(Config):
    """Model: its files, its dtype, and which of its parts are trained."""

    path: str
    """Folder of a Hugging Face checkpoint, or `org/name` on the hub."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer. If left out: that of the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the forward and backward passes. The optimizer always keeps float32 weights."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """Attention kernel of the Hugging Face model. `auto`: FlashAttention 3 or 2 where it is
    installed and the GPUs, the dtype, the model and the rows allow it, else sdpa; config.yaml names
    the kernel that was chosen. Megatron has a kernel of its own and accepts no other."""
    compile: bool = False
    """Compile the layers, and what a policy reads of its logits, with torch.compile when they first
    run, where the model is trained or scored by hf, fsdp2 (without `tp`) or deepspeed. Engines do
    not look at it."""
    lora: LoraConfig | None = None
    """Adapter to train in place of the weights, which stay unchanged. A role that does not train
    loads the model without the adapter."""
    freeze: tuple[str, ...] = ()
    """Parameters that training leaves as they are: patterns of their names in the Hugging Face
    checkpoint, such as `model.embed_tokens.*` or `model.layers.[0-9].*` (`*` stands for any text,
    dots included), and parts of a model that reads pictures, such as `vision`. They have no
    optimizer state, and are pushed to each engine only once."""
    overrides: dict[str, Any] = {}
    """Values of config.json that are replaced, by key, such as `rope_scaling` and
    `max_position_embeddings`; keys of a nested section are merged with what is there. Trainers,
    reference and engines compute with them, and exported models have them."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the checkpoint."""
    made_by: str | None = Field(default=None, min_length=1)
    """Command that creates `path`; shown in the error message if `path` does not exist yet."""

    @field_validator("freeze")
    @classmethod
    def _parts_or_patterns(cls, freeze: tuple[str, ...]) -> tuple[str, ...]:
        parts = get_args(ModelPart)
        for one in freeze:
            if one not in parts and not {".", "*"} & set(one):
                raise ValueError(
                    f"{one!r} is no part of a model ({', '.join(parts)}){nearest(one, parts)}, and "
                    "no pattern of parameter names, such as 'model.embed_tokens.*'"
                )
        return freeze

    @property
    def serves_adapter(self) -> bool:
        """True if engines get only the adapter in a push, and no weights."""
        return self.lora is not None and self.lora.serve == "adapter"
