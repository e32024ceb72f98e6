"""Layers that predict further tokens compute what the same layers of Hugging Face compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mcore_adapter.convert.conversion_plan import HfRef
from mcore_adapter.errors import ConfigError, ConversionError, LayoutError
from mcore_adapter.load import HfTensors, load, read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.modeling.model import build_model, init_parallel
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.platform import adapt_to_cpu
from tests.convert.further_by_hand import COUNTS, further_loss, save_further, tensors_of
from tests.convert.parity import forward
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import COMMON, MODELS, VOCAB, rows, save_model

WEIGHT = 0.3
LAYOUTS = (
    ParallelSizes(),
    ParallelSizes(tp=2, etp=1),
    ParallelSizes(ep=2),
    ParallelSizes(pp=2),
    ParallelSizes(pp=2, vpp=2),
)
# Gradients of the delta net are sums over all positions of products of decays.
LOOSE = {"qwen3_next": 1e-5}
MTP = BuildOptions(mtp=True)


@dataclass(frozen=True)
class Found:
    logits: float
    gradient: float
    names: tuple[str, ...]
    same_main: bool
    """Whether logits of next tokens are those without further layers, to the bit."""


def compare(folder: Path, sizes: ParallelSizes, options: BuildOptions) -> Found:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from mcore_adapter.gather import export, gradient
    from mcore_adapter.modeling.data_parallel import data_parallel
    from mcore_adapter.modeling.mtp import set_mtp_logits
    from mcore_adapter.parallel.schedule import run_schedule
    from mcore_adapter.write import write_model

    adapt_to_cpu()
    table = table_of(read_config(folder))
    init_parallel(sizes)
    bare = build_model(read_config(folder), sizes, options)
    load(folder, bare, table, sizes)
    for chunk in bare:
        set_mtp_logits(chunk, on=True)
    rank = parallel_state.get_data_parallel_rank()
    count = parallel_state.get_data_parallel_world_size()
    batches = list(rows()[rank::count].split(1))

    def loss(output: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        logits = gather_from_tensor_model_parallel_region(output)[..., :VOCAB]
        return further_loss(list(logits.split(1)), tokens_BT, WEIGHT) / len(batches), logits

    chunks = data_parallel(bare)
    run = partial(run_schedule, micro_batch_size=1, longest=rows().shape[1])
    kept = [logits.detach() for logits in run(chunks, batches, forward, loss)]
    expected = load_file(folder.with_suffix(".st"))
    theirs = expected.pop("logits")[:, rank::count]
    worst, names = 0.0, []
    for name, found in export(chunks, table, sizes, value=gradient):
        names.append(name)
        worst = max(worst, float((found - expected[name]).abs().max()))
    for chunk in bare:
        set_mtp_logits(chunk, on=False)
    alone = run(chunks, batches, forward, loss_of_main, forward_only=True)
    write_model(folder.with_name("back"), folder, bare, table, sizes, dtype="fp32")
    return Found(
        logits=float((torch.stack(kept, dim=1) - theirs).abs().max()) if kept else 0.0,
        gradient=worst,
        names=tuple(sorted(names)),
        same_main=all(
            torch.equal(one[0, ..., :VOCAB], both[0]) for one, both in zip(alone, kept, strict=True)
        ),
    )


def loss_of_main(output: Tensor, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    return output.sum(), gather_from_tensor_model_parallel_region(output)


def save_expected(folder: Path, model: Any, name: str) -> None:
    """Logits and gradients, as if these were weights."""
    logits = model(rows())
    further_loss(logits, rows(), WEIGHT).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
    tensors = tensors_of(model, name, folder.with_suffix(".gradients"))
    tensors["logits"] = torch.stack(logits).detach()
    save_file(tensors, folder.with_suffix(".st"))


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_further_tokens_are_predicted_as_by_hand_in_every_layout(name: str, tmp_path: Path) -> None:
    folder, model = save_further(tmp_path, name)
    save_expected(folder, model, name)
    with HfTensors(folder) as before:
        repeats = table_of(read_config(folder)).repeats
        buffers = {n for n in before.names if n.endswith("e_score_correction_bias")}
        for sizes in LAYOUTS:
            for options in (MTP, BuildOptions(mtp=True, recompute="full", grouped_experts=True)):
                for found in run_ranks(compare, 2, folder, sizes, options):
                    assert found.logits <= 1e-5, (sizes, found)
                    assert found.gradient <= LOOSE.get(name, 1e-6), (sizes, found)
                    assert set(found.names) == before.names - set(repeats) - buffers
                    assert found.same_main, sizes
                with HfTensors(folder.with_name("back")) as after:
                    assert after.names == before.names
                    for each in after.names:
                        ref = HfRef(each)
                        assert torch.equal(after.read(ref), before.read(ref)), each
                for file in folder.with_name("back").iterdir():
                    file.unlink()
                folder.with_name("back").rmdir()


def refused(folder: Path) -> str:
    adapt_to_cpu()
    config = {**read_config(folder), "num_nextn_predict_layers": 1}
    init_parallel(ParallelSizes())
    chunks = build_model(config, ParallelSizes(), MTP)
    with pytest.raises(ConversionError) as error:
        load(folder, chunks, table_of(config), ParallelSizes())
    return str(error.value)


def test_a_checkpoint_without_further_layers_is_named(tmp_path: Path) -> None:
    (said,) = run_ranks(refused, 1, save_model(tmp_path, "glm4_moe"))
    assert "has no model.layers.4." in said
    assert "build the model without" in said


def test_further_layers_that_cannot_be_built_are_named() -> None:
    common = {**COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    with pytest.raises(ConfigError, match="qwen3 has no layers that predict"):
        build_model({**common, **MODELS["qwen3"]}, ParallelSizes(), MTP)
    config = {**common, **MODELS["deepseek_v3"], "num_nextn_predict_layers": 1}
    with pytest.raises(LayoutError, match="pp is 2"):
        build_model({**config, "tie_word_embeddings": True}, ParallelSizes(pp=2), MTP)
