"""Settings of weight pushes from the trainer to the engines."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from roll.config.base import Config


class WeightSyncConfig(Config):
    """Transport of weights from `actor_train` to `actor_infer`."""

    transport: Literal["auto", "files"] = "auto"
    """Way that weights take. `auto`: shared memory or CUDA IPC between workers on one host, a
    collective broadcast across hosts. `files`: files in `folder`."""
    folder: str | None = None
    """Folder that all hosts see under this path; only for `files`. On NFS, mount it with
    `lookupcache=positive` (or `actimeo=1`): by default a host may see a new file only after a
    second, which each bucket then waits."""
    bucket_mb: int | None = Field(default=None, ge=1)
    """Size of a bucket in MiB; tensors are sent bucket by bucket, and each process holds at most
    two. If left out: 4 for shared memory, so that buckets are read while still in the CPU cache,
    and 32 otherwise."""
    kept_groups: int = Field(default=6, ge=0)
    """Number of groups of trainer and engines whose connections stay from one push across hosts to
    the next, so that only the first push makes them. On GPUs each costs memory there, of NCCL. 0:
    each push makes its own, for GPUs without room or networks that drop connections out of use."""

    @model_validator(mode="after")
    def _folder_for_files(self) -> Self:
        """Require `folder` with `transport: files`, and refuse it otherwise."""
        if (self.transport == "files") != (self.folder is not None):
            raise ValueError("`folder` and `transport: files` need each other")
        return self
