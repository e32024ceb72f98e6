"""docs/add_a_model.md shows phi3's very code; unfused by hand, phi3 is a llama."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from mcore_adapter.convert import commands, ops
from mcore_adapter.models.families import phi3
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.tiny_checkpoints import ALONE, assert_same, contents, rewrite
from tests.convert.tiny_models import save_model

DOC = Path(__file__).parents[2] / "docs" / "add_a_model.md"


def test_its_layout_is_that_of_a_llama_with_the_same_weights(tmp_path: Path) -> None:
    """An oracle for the operator."""
    src = save_model(tmp_path, "phi3").rename(tmp_path / "src")
    tensors = contents(src)
    for layer in range(4):
        at = f"model.layers.{layer}."
        q, k, v = tensors.pop(at + "self_attn.qkv_proj.weight").split([32, 16, 16])
        gate, up = tensors.pop(at + "mlp.gate_up_proj.weight").chunk(2)
        parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "mlp.gate": gate}
        for name, part in {**parts, "mlp.up": up}.items():
            tensors[f"{at}{name}_proj.weight"] = part.contiguous()
    rewrite(src, tmp_path / "llama", tensors, model_type="llama")
    for name in ("src", "llama"):
        commands.to_mcore(
            tmp_path / name, tmp_path / f"{name} tp2", ParallelSizes(tp=2, pp=2), ALONE
        )
    assert_same(tmp_path / "src tp2", tmp_path / "llama tp2")


def test_the_page_shows_this_very_code() -> None:
    ours = "".join(inspect.getsource(module) for module in (ops, phi3))
    ours = re.sub(r"\s+", " ", ours)
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        for part in re.split(r"\n\n\n", block.strip()):
            assert re.sub(r"\s+", " ", part).strip() in ours, part
