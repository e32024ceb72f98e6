"""When a sender makes its parts, which may be a collective that the others wait in."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from roll.weight_sync.manifest import Manifest, meta_of
from roll.weight_sync.pack import Packer
from roll.weight_sync.push_plan import layout


def test_a_sender_without_bytes_takes_its_parts_in_step_with_the_buckets() -> None:
    tensors = {f"model.layers.{i}.weight": torch.ones(32) for i in range(4)}
    metas = tuple(meta_of(name, tensor) for name, tensor in tensors.items())
    manifest = Manifest(metas, tuple((0, 32, 32) for _ in metas))  # sender 0 holds everything
    made: list[str] = []

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name in tensors:
            made.append(name)
            yield name, torch.empty(0)

    packer = Packer(manifest, parts(), 1, None)
    buckets = layout(manifest, 128)
    assert len(buckets) == 4
    for done, bucket in enumerate(buckets, start=1):
        packer.fill(bucket, torch.empty(128, dtype=torch.uint8))
        assert len(made) == done
    packer.finish()
