"""Megatron models on a GPU compute what Hugging Face computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from mcore_adapter.load import load, read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.model import build_model, init_parallel, leave_parallel
from mcore_adapter.modeling.specs import HAVE_TE
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.tiny_models import MODELS, VOCAB, rows, save_model

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(autouse=True)
def _one_rank(tmp_path: Path) -> Iterator[None]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    leave_parallel()
    dist.destroy_process_group()


def largest_difference(folder: Path, options: BuildOptions) -> float:
    assert not adapt_to_cpu()
    config, sizes = read_config(folder), ParallelSizes()
    init_parallel(sizes)
    (model,) = build_model(config, sizes, options)
    load(folder, [model], table_of(config), sizes)
    tokens_BT = rows().cuda()
    positions_BT = torch.arange(tokens_BT.shape[1]).cuda().expand_as(tokens_BT)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    with torch.no_grad():
        logits = model(tokens_BT, positions_BT, None)[..., :VOCAB]
        expected = theirs(input_ids=tokens_BT, use_cache=False).logits
    return float((logits - expected).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_local_layers_equal_hugging_face(name: str, tmp_path: Path) -> None:
    assert largest_difference(save_model(tmp_path, name), BuildOptions(te=False)) < 1e-4


@pytest.mark.skipif(not HAVE_TE, reason="Transformer Engine is not installed")
def test_layers_of_transformer_engine_are_not_loaded_by_the_tables(tmp_path: Path) -> None:
    """Its layers name their norms differently; whoever adds them, starts here."""
    with pytest.raises(Exception, match="disagree"):
        largest_difference(save_model(tmp_path, "qwen3"), BuildOptions(te=True))
