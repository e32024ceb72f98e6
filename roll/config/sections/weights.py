"""How trained weights reach the engines."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config


class WeightSyncConfig(Config):
    """The transport between `actor_train` and `actor_infer`."""

    transport: Literal["auto", "files"] = "auto"
    """`auto` takes the best way for where the workers run: shared memory or CUDA IPC on one host,
    a collective broadcast across hosts; `files` goes through `folder`."""
    folder: str | None = None
    """Only for `files`: a folder that all hosts see under this path."""
    bucket_mb: int | None = Field(default=None, ge=1)
    """MiB that travel at once; each process holds two such buckets at most. By default 4 through
    shared memory and files, so that they are read while the cache still has them, and 32 else."""

    @model_validator(mode="after")
    def _folder_for_files(self) -> Self:
        if (self.transport == "files") != (self.folder is not None):
            raise ValueError("`folder` and `transport: files` need each other")
        return self
