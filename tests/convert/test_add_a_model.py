"""docs/add_a_model.md, done: phi3, which fuses what llama does not, becomes a family."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mcore_adapter.convert import commands
from mcore_adapter.convert.arrays import A, cut, join
from mcore_adapter.convert.ops import FuseQKV, Rename, Shape
from mcore_adapter.convert.shards import Sharded
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import UnknownModelError
from mcore_adapter.models import FAMILIES
from mcore_adapter.models.common import HF, MCORE, ends, norms, same, shape_of, tied_output
from mcore_adapter.models.config import Config
from mcore_adapter.models.families import llama
from mcore_adapter.models.fields import Attention, Fields
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.parity import Case, Difference, assert_equal, compare
from tests.convert.tiny_checkpoints import ALONE, assert_same, contents, rewrite, there_and_back
from tests.convert.tiny_models import rows, save_model, save_reference

DOC = Path(__file__).parents[2] / "docs" / "add_a_model.md"


@dataclass(frozen=True)
class RegroupQKV:
    """All queries, then all keys, then all values <-> `[q..q k v]` per KV group."""

    mcore: str
    source: str

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.source,)

    def to_mcore(self, hf: Sequence[A], shape: Shape) -> A:
        width = shape.head_dim
        heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
        parts = cut(hf[0], [count * width for count in heads])
        return self._fuse().to_mcore(parts, shape)

    def to_hf(self, mcore: A, shape: Shape) -> list[A]:
        return [join(self._fuse().to_hf(mcore, shape))]

    def _fuse(self) -> FuseQKV:
        return FuseQKV(self.mcore, ("q", "k", "v"))


def table(config: Config) -> ModelTable:
    shape = shape_of(config)
    attention, mlp, hidden = MCORE + "self_attention.", MCORE + "mlp.", shape.hidden
    width, queries = config.count("intermediate_size"), shape.num_heads * shape.head_dim
    of_qkv = (queries + 2 * shape.num_kv_heads * shape.head_dim, hidden)
    qkv = RegroupQKV(attention + "linear_qkv.weight", HF + "self_attn.qkv_proj.weight")
    fc1 = Rename(mlp + "linear_fc1.weight", HF + "mlp.gate_up_proj.weight")
    out = attention + "linear_proj.weight", HF + "self_attn.o_proj.weight"
    fc2 = mlp + "linear_fc2.weight", HF + "mlp.down_proj.weight"
    return ModelTable(
        model_type=config["model_type"],
        shape=shape,
        params=(
            *ends(shape),
            *norms(shape),
            Param(op=qkv, shapes=(of_qkv,), shard=Sharded()),
            same(*out, (hidden, queries), Sharded(dim=1)),
            Param(op=fc1, shapes=((2 * width, hidden),), shard=Sharded(blocks=2)),
            same(*fc2, (hidden, width), Sharded(dim=1)),
        ),
        repeats=tied_output(shape),
        config=config,
    )


def fields(config: Config) -> Fields:
    return llama.dense_fields(config, Attention())


@pytest.fixture
def phi3(tmp_path: Path) -> Path:
    return save_model(tmp_path, "phi3").rename(tmp_path / "src")


@pytest.fixture
def _known() -> Iterator[None]:
    FAMILIES["phi3"] = sys.modules[__name__]
    yield
    del FAMILIES["phi3"]


def test_phi3_is_unknown_without_a_table(phi3: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match="'phi3' is not supported"):
        commands.to_mcore(phi3, tmp_path / "mcore", ParallelSizes(), ALONE)


@pytest.mark.usefixtures("_known")
@pytest.mark.parametrize(
    "sizes", [ParallelSizes(), ParallelSizes(tp=2), ParallelSizes(tp=2, pp=2, vpp=2)], ids=str
)
def test_with_one_it_comes_back_byte_for_byte(
    sizes: ParallelSizes, phi3: Path, tmp_path: Path
) -> None:
    assert_same(phi3, there_and_back(phi3, tmp_path, sizes))


@pytest.mark.usefixtures("_known")
def test_its_layout_is_that_of_a_llama_with_the_same_weights(phi3: Path, tmp_path: Path) -> None:
    """An oracle for the operator: unfused by hand, it is a llama."""
    tensors = contents(phi3)
    for layer in range(4):
        at = f"model.layers.{layer}."
        q, k, v = tensors.pop(at + "self_attn.qkv_proj.weight").split([32, 16, 16])
        gate, up = tensors.pop(at + "mlp.gate_up_proj.weight").chunk(2)
        parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "mlp.gate": gate}
        for name, part in {**parts, "mlp.up": up}.items():
            tensors[f"{at}{name}_proj.weight"] = part.contiguous()
    rewrite(phi3, tmp_path / "llama", tensors, model_type="llama")
    for name in ("src", "llama"):
        commands.to_mcore(
            tmp_path / name, tmp_path / f"{name} tp2", ParallelSizes(tp=2, pp=2), ALONE
        )
    assert_same(tmp_path / "src tp2", tmp_path / "llama tp2")


@pytest.mark.slow
def test_two_ranks_compute_what_hugging_face_computes(phi3: Path) -> None:
    save_reference(phi3, rows())
    cases = [Case(phi3, sizes) for sizes in (ParallelSizes(tp=2), ParallelSizes(pp=2))]
    assert_equal(2, cases, work=_compare)


def _compare(case: Case) -> Difference:
    FAMILIES["phi3"] = sys.modules[__name__]
    return compare(case)


def test_the_page_shows_this_very_code() -> None:
    ours = re.sub(r"\s+", " ", Path(__file__).read_text())
    blocks = re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        for part in re.split(r"\n\n\n", block.strip()):
            if not part.startswith(("from ", '"""', "FAMILIES")):
                assert re.sub(r"\s+", " ", part).strip() in ours, part
