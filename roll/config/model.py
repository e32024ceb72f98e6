"""The model of a role."""

from typing import Literal

from pydantic import Field

from roll.config.base import Config


class ModelConfig(Config):
    path: str
    """Folder of a Hugging Face checkpoint, or `org/name` on the hub."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; left out: the model's."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the forward and backward passes; the optimizer keeps float32 weights in any case."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of the Hugging Face model."""
    trust_remote_code: bool = False
    """Run the model code that comes with the checkpoint."""
    made_by: str | None = Field(default=None, min_length=1)
    """Command that makes `path`; named in the message when `path` does not exist yet."""
