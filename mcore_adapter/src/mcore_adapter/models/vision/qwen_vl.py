"""qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe: a language model of Qwen and a vision tower.

The language models are a qwen2, qwen3 or qwen3_moe whose positions have three axes.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_adapter.convert.fused_experts import fused
from mcore_adapter.convert.ops import FormatOp, FuseGateUp, FuseQKV, Rename, Transpose
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError
from mcore_adapter.models.config import Config
from mcore_adapter.models.defaults.vision import SECTIONS
from mcore_adapter.models.families import llama, qwen2_moe
from mcore_adapter.models.fields import Fields, Vision, expect, rope_parameters
from mcore_adapter.models.vision.towers import TOWERS

_LANGUAGE = {
    "qwen2_vl": ("qwen2", llama),
    "qwen2_5_vl": ("qwen2", llama),
    "qwen3_vl": ("qwen3", llama),
    "qwen3_vl_moe": ("qwen3_moe", qwen2_moe),
}
"""Model type and family of the language model of each `model_type`."""
_ALONE, _BESIDE_TOWER = "model.", "model.language_model."
"""Prefix of the language model in its own family, and beside a tower in transformers 5."""


def table(config: Config) -> ModelTable:
    """Return the table of a model.

    transformers 5 saves Qwen2-VL and Qwen2.5-VL under the names of its earlier versions, and
    Qwen3-VL under those of its modules. In published files of Qwen3-VL with experts, the weights of
    experts are `[in, out]`; transformers holds and saves them as `[out, in]`.
    """
    kind = config["model_type"]
    tower = config["vision_config"]
    language = _LANGUAGE[kind][1].table(_language(config))
    language = replace(language, model_type=kind, config=config)
    beside = _beside_tower(fused(language) if language.shape.num_experts else language)
    held = replace(beside, params=(*beside.params, *TOWERS[kind](tower, "model.visual.")))
    if kind in ("qwen2_vl", "qwen2_5_vl"):
        params = (*language.params, *TOWERS[kind](tower, "visual."))
        return replace(language, params=params, held=held)
    if not language.shape.num_experts:
        return held
    transposed = tuple(_transposed(row) if row.stacked else row for row in held.params)
    return replace(held, params=transposed, fused=False, held=held)


def fields(config: Config) -> Fields:
    """Return the fields of the language model and its tower.

    Raises:
        ConfigError: the sections of the rotated dimensions do not fit the heads, axes are assigned
            to dimensions otherwise than in this family, or the tower has no block of which the
            language model should get the output.
    """
    kind, interleaved = config["model_type"], config["model_type"].startswith("qwen3")
    base = _LANGUAGE[kind][1].fields(_language(config))
    rope = Config(mrope_section=SECTIONS[kind], mrope_interleaved=interleaved)
    rope.update(rope_parameters(config))
    sections, half = rope["mrope_section"], base.rope_width // 2
    if not isinstance(sections, list) or len(sections) != 3 or sum(sections) != half:
        raise ConfigError(
            f"config.json: mrope_section is {sections!r}, expected three numbers that add up to "
            f"{half}, half of the dimensions of a head"
        )
    expect(rope, "mrope_interleaved", interleaved)
    tower = config["vision_config"]
    blocks = tower["deepstack_visual_indexes"] if interleaved else []
    if blocks != sorted(set(blocks)) or any(block >= tower["depth"] for block in blocks):
        raise ConfigError(
            f"config.json: vision_config.deepstack_visual_indexes is {blocks}, expected rising "
            f"numbers of blocks of {tower['depth']}"
        )
    vision = Vision(
        tower=f"{kind}_vision",
        config=tower,
        sections=(sections[0], sections[1], sections[2]),
        interleaved=interleaved,
        deepstack=len(blocks),
    )
    return replace(base, vision=vision)


def _language(config: Config) -> Config:
    """Return the config of the language model, as its own family has it."""
    kind = _LANGUAGE[config["model_type"]][0]
    if kind == "qwen2":
        return config.but(model_type=kind, head_dim=None)  # which these models ignore
    # Qwen3-VL has no windows, and always normalises the probabilities of the chosen experts.
    full = ["full_attention"] * config["num_hidden_layers"]
    return config.but(model_type=kind, sliding_window=None, layer_types=full, norm_topk_prob=True)


def _beside_tower(table: ModelTable) -> ModelTable:
    """Return the table of a language model under the names that it has beside a tower."""
    return replace(
        table,
        params=tuple(replace(row, op=_renamed(row.op)) for row in table.params),
        repeats={name: _name(of) for name, of in table.repeats.items()},
    )


def _name(name: str) -> str:
    """Return the name beside a tower of a tensor of a language model; the output layer keeps its
    name."""
    return _BESIDE_TOWER + name.removeprefix(_ALONE) if name.startswith(_ALONE) else name


def _renamed(op: FormatOp) -> FormatOp:
    """Return the operator with the Hugging Face names beside a tower."""
    if isinstance(op, FuseQKV | FuseGateUp):
        return replace(op, hf=tuple(map(_name, op.hf)))
    assert isinstance(op, Rename)  # no language model of `_LANGUAGE` has others
    return replace(op, source=_name(op.source))


def _transposed(row: Param) -> Param:
    """Return the row of experts' weights that are `[in, out]` in files."""
    ((out, into),) = row.shapes
    op = Transpose(row.op.mcore, row.op.hf[0])
    return replace(row, op=op, shapes=((into, out),))
