"""Models that see: what Hugging Face computes, and what a rank does to compare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mcore_adapter.convert.lora_table import Lora
from mcore_adapter.gather import export, gradient
from mcore_adapter.load import load, read_config, table_in
from mcore_adapter.lora_io import load_adapter
from mcore_adapter.modeling.data_parallel import data_parallel
from mcore_adapter.modeling.lora import add_adapter
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.modeling.vision.model import SeenPictures
from mcore_adapter.parallel.schedule import run_schedule
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.hf_classes import PATCHES, config_of, loaded, model_of
from tests.convert.lora_by_hand import ALPHA, RANK, adapted, save_adapter
from tests.convert.parity import Case, Difference, compare_passes, mean_loss
from tests.convert.tiny_models import COMMON, VOCAB, targets

IMAGE = VOCAB - 1
LENGTH = 20
MERGED = PATCHES["spatial_merge_size"] ** 2
VALUES = PATCHES["in_channels"] * PATCHES["temporal_patch_size"] * PATCHES["patch_size"] ** 2
"""Number of values of a patch."""
PICTURES: tuple[tuple[tuple[int, tuple[int, int, int]], ...], ...] = (
    ((2, (1, 4, 6)),),
    ((1, (1, 4, 4)), (8, (2, 4, 6))),  # the second one has two frames and ends the row
    (),
    ((5, (1, 6, 4)),),
)
"""Place and grid of each picture of each row."""
TARGETS = ("q_proj", "v_proj", "o_proj")
ROPE = {"rope_type": "default", "rope_theta": 100.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"rope_parameters": {**ROPE, "mrope_section": [1, 2, 1]}},
    "qwen2_5_vl": {
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "num_hidden_layers": 5,
        "head_dim": 12,
        "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2], "mrope_interleaved": True},
    },
    "qwen3_vl_moe": {
        **EXPERTS,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    },
}


def save_model(folder: Path, kind: str) -> Path:
    """A Hugging Face folder with random weights; norms and biases are random too."""
    torch.manual_seed(0)
    config = config_of(kind, {**COMMON, **MODELS[kind]})
    config.image_token_id = IMAGE
    model = model_of(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.05))
    model.save_pretrained(folder / kind)
    return folder / kind


@dataclass(frozen=True)
class Row:
    """One row `[1, T]` with its pictures."""

    tokens_BT: Tensor
    positions_3BT: Tensor
    pictures: SeenPictures | None


def rows() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens `[1, T]`, patches `[P, C]` and grids `[pictures, 3]` of each row."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for pictures in PICTURES:
        tokens = torch.randint(0, IMAGE, (1, LENGTH), generator=generator)
        for place, grid in pictures:
            tokens[0, place : place + _tokens(grid)] = IMAGE
        grids = torch.tensor([grid for _, grid in pictures]).view(-1, 3)
        patches = torch.randn(int(grids.prod(-1).sum()), VALUES, generator=generator)
        made.append((tokens, patches, grids))
    return made


def _tokens(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2] // MERGED


def save_reference(folder: Path) -> None:
    """Logits, mean negative log-likelihood, its gradients, and positions, by Hugging Face."""
    model = loaded(folder, dtype=torch.float32).train()
    logits_BTV, loss, positions = by_hugging_face(model)
    loss.backward()
    save_file({"logits": logits_BTV.detach(), "loss": loss.detach()}, folder / "outputs.st")
    save_file({}, folder / "buffers.st")
    save_file(positions, folder / "positions.st")
    # Saved as if they were weights: names in a checkpoint are not those of the modules.
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder / "gradients")


def by_hugging_face(model: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of all rows, their mean loss, and the positions by number of the row."""
    logits, positions = [], {}
    for number, (tokens, patches, grids) in enumerate(rows()):
        seen: dict[str, Tensor] = {}
        positions[str(number)] = torch.arange(LENGTH).expand(3, 1, -1).clone()
        if len(grids):
            seen = {"mm_token_type_ids": (tokens == IMAGE).int(), "image_grid_thw": grids}
            positions[str(number)], _ = model.model.get_rope_index(tokens, **seen)
            seen["pixel_values"] = patches
        model.model.rope_deltas = None
        logits.append(model(input_ids=tokens, use_cache=False, **seen).logits)
    every, wanted = torch.cat(logits), torch.cat([targets(tokens) for tokens, _, _ in rows()])
    loss = torch.nn.functional.cross_entropy(every.flatten(0, 1), wanted.flatten())
    return every, loss, positions


def save_adapted_reference(folder: Path) -> None:
    """An adapter with random factors, and their gradients by hand."""
    model, factors = adapted(folder, TARGETS)
    save_adapter(folder / "adapter", factors, TARGETS)
    _, loss, _ = by_hugging_face(model)
    loss.backward()
    found = {}
    for name, factor in factors.items():
        assert factor.grad is not None, name
        found[name] = factor.grad
    save_file(found, folder / "factors.st")


def read_rows(folder: Path) -> list[Row]:
    positions = load_file(folder / "positions.st")
    made = []
    for number, (tokens, patches, grids) in enumerate(rows()):
        places = [torch.arange(place, place + _tokens(grid)) for place, grid in PICTURES[number]]
        pictures = None
        if places:
            at = torch.cat(places)
            pictures = SeenPictures(patches, grids, torch.arange(len(at)), at)
        made.append(Row(tokens, positions[str(number)], pictures))
    return made


def compare(case: Case) -> Difference:
    """Largest differences to Hugging Face in a layout; each row is a micro-batch."""
    return compare_passes(case, read_rows(case.folder), forward, lambda row: row.tokens_BT)


def compare_adapted(case: Case) -> tuple[float, bool]:
    """Largest difference of a factor's gradient, and whether the tower has no gradients."""
    adapt_to_cpu()
    from megatron.core import parallel_state

    config, table = read_config(case.folder), table_in(case.folder)
    init_parallel(case.sizes)
    bare = build_model(config, case.sizes, case.options)
    adapter = add_adapter(bare, table, Lora(rank=RANK, alpha=ALPHA, targets=TARGETS), case.sizes)
    load(case.folder, bare, table, case.sizes)
    load_adapter(case.folder / "adapter", bare, adapter, case.sizes)
    chunks = data_parallel(bare)
    rank = parallel_state.get_data_parallel_rank()
    count = parallel_state.get_data_parallel_world_size()
    batches = read_rows(case.folder)[rank::count]
    run_schedule(
        chunks,
        batches,
        forward,
        lambda output, row: mean_loss(output, row.tokens_BT, len(batches)),
        micro_batch_size=1,
        longest=LENGTH,
    )
    expected = load_file(case.folder / "factors.st")
    found = dict(export(chunks, adapter.table, case.sizes, value=gradient))
    assert found.keys() == expected.keys()
    worst = max(float((found[name] - expected[name]).abs().max()) for name in found)
    untouched = [p.grad is None for c in bare for n, p in c.named_parameters() if "visual." in n]
    return worst, all(untouched)


def forward(chunk: nn.Module, row: Row) -> Tensor:
    output: Tensor = chunk(row.tokens_BT, row.positions_3BT, None, pictures=row.pictures)
    return output
