"""Table rows of vision towers.

A tower is a module of Hugging Face, so its rows only rename. All ranks of the first pipeline stage
hold all of it. Each function takes the values under `vision_config`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_adapter.convert.table import TOWER, Param
from mcore_adapter.models.common import same
from mcore_adapter.models.config import Size


class Tower:
    """Values under `vision_config`, and rows that are named after a tower's modules."""

    def __init__(self, values: dict[str, Any], theirs: str) -> None:
        """Take the values, and the prefix of the names in Hugging Face."""
        self._values = values
        self._theirs = theirs

    def count(self, key: str) -> Size:
        """Return the count under a key."""
        return Size(self._values[key], f"vision_config.{key}")

    @property
    def blocks(self) -> range:
        return range(self.count("depth"))

    @property
    def merged(self) -> int:
        """Number of patches that become one token."""
        side = self.count("spatial_merge_size")
        return side * side

    @property
    def deepstack(self) -> int:
        """Number of blocks whose output is added to that of a layer of the language model."""
        return len(self._values["deepstack_visual_indexes"])

    def patches(self, width: int) -> Param:
        """Return the row of the projection of patches to `width` dimensions."""
        side, frames = self.count("patch_size"), self.count("temporal_patch_size")
        shape = (width, self.count("in_channels"), frames, side, side)
        return self.row("patch_embed.proj.weight", *shape)

    def row(self, name: str, *shape: int) -> Param:
        return same(TOWER + name, self._theirs + name, shape)

    def linear(self, name: str, out: int, into: int) -> list[Param]:
        """Return the rows of a linear layer with a bias."""
        return [self.row(f"{name}.weight", out, into), self.row(f"{name}.bias", out)]

    def norm(self, name: str, width: int) -> list[Param]:
        """Return the rows of a layer norm."""
        return [self.row(f"{name}.weight", width), self.row(f"{name}.bias", width)]

    def attention(self, block: str, width: int) -> list[Param]:
        """Return the rows of the attention of a block, whose prefix is `block`."""
        qkv = self.linear(f"{block}attn.qkv", 3 * width, width)
        return [*qkv, *self.linear(f"{block}attn.proj", width, width)]


def qwen2(values: dict[str, Any], theirs: str) -> list[Param]:
    """Return the rows of the tower of Qwen2-VL."""
    tower = Tower(values, theirs)
    width = tower.count("embed_dim")
    wide, merged = width * tower.count("mlp_ratio"), width * tower.merged
    rows = [tower.patches(width)]
    for number in tower.blocks:
        block = f"blocks.{number}."
        rows += [*tower.norm(block + "norm1", width), *tower.norm(block + "norm2", width)]
        rows += tower.attention(block, width)
        rows += tower.linear(block + "mlp.fc1", wide, width)
        rows += tower.linear(block + "mlp.fc2", width, wide)
    rows += tower.norm("merger.ln_q", width)
    rows += tower.linear("merger.mlp.0", merged, merged)
    return rows + tower.linear("merger.mlp.2", tower.count("hidden_size"), merged)


def qwen2_5(values: dict[str, Any], theirs: str) -> list[Param]:
    """Return the rows of the tower of Qwen2.5-VL, which has RMS norms and gated MLPs."""
    tower = Tower(values, theirs)
    width, wide = tower.count("hidden_size"), tower.count("intermediate_size")
    merged = width * tower.merged
    rows = [tower.patches(width)]
    for number in tower.blocks:
        block = f"blocks.{number}."
        rows += [tower.row(f"{block}norm{each}.weight", width) for each in (1, 2)]
        rows += tower.attention(block, width)
        rows += tower.linear(block + "mlp.gate_proj", wide, width)
        rows += tower.linear(block + "mlp.up_proj", wide, width)
        rows += tower.linear(block + "mlp.down_proj", width, wide)
    rows.append(tower.row("merger.ln_q.weight", width))
    rows += tower.linear("merger.mlp.0", merged, merged)
    return rows + tower.linear("merger.mlp.2", tower.count("out_hidden_size"), merged)


def qwen3(values: dict[str, Any], theirs: str) -> list[Param]:
    """Return the rows of the tower of Qwen3-VL, which learns positions and has several outputs."""
    tower = Tower(values, theirs)
    width, wide = tower.count("hidden_size"), tower.count("intermediate_size")
    merged, out = width * tower.merged, tower.count("out_hidden_size")
    rows = [tower.patches(width), tower.row("patch_embed.proj.bias", width)]
    rows.append(tower.row("pos_embed.weight", tower.count("num_position_embeddings"), width))
    for number in tower.blocks:
        block = f"blocks.{number}."
        rows += [*tower.norm(block + "norm1", width), *tower.norm(block + "norm2", width)]
        rows += tower.attention(block, width)
        rows += tower.linear(block + "mlp.linear_fc1", wide, width)
        rows += tower.linear(block + "mlp.linear_fc2", width, wide)
    mergers = [f"deepstack_merger_list.{number}." for number in range(tower.deepstack)]
    for merger in ("merger.", *mergers):
        rows += tower.norm(merger + "norm", width if merger == "merger." else merged)
        rows += tower.linear(merger + "linear_fc1", merged, merged)
        rows += tower.linear(merger + "linear_fc2", out, merged)
    return rows


TOWERS: dict[str, Callable[[dict[str, Any], str], list[Param]]] = {
    "qwen2_vl": qwen2,
    "qwen2_5_vl": qwen2_5,
    "qwen3_vl": qwen3,
    "qwen3_vl_moe": qwen3,
}
"""Function of each `model_type` that returns the rows of its tower."""
