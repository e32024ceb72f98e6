"""vLLM's fused experts, split over two ranks, answer probes of what was sent and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roll.core.errors import WeightSyncError
from roll.core.types import WorkerSpec
from tests.contract.ranks import run_ranks

NUM_EXPERTS, HIDDEN, INNER = 4, 64, 128
PROJECTIONS = {
    "gate_proj": (INNER, HIDDEN),
    "up_proj": (INNER, HIDDEN),
    "down_proj": (HIDDEN, INNER),
}


class Model(nn.Module):
    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

        super().__init__()
        self.experts = FusedMoEFactory(
            num_experts=NUM_EXPERTS,
            top_k=2,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            params_dtype=torch.float32,
            prefix="experts",
        )

    def load(self, sent: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Through vLLM's own loader; the plain weights that it packed then."""
        layer = self.experts.routed_experts
        for param, name, expert, shard in layer.get_expert_mapping():
            weight = getattr(layer, param.rpartition(".")[2] + "weight")
            layer.weight_loader(weight, sent[f"{name}weight"], f"{param}weight", shard, expert)
        plain = layer.w13_weight.clone(), layer.w2_weight.clone()
        layer.quant_method.process_weights_after_loading(layer)
        return plain


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from roll.strategy.vllm.worker_side.expert_probes import ExpertProbes

    g = torch.Generator().manual_seed(0)
    sent = {
        f"experts.{expert}.{name}.weight": torch.randn(shape, generator=g) * 0.05
        for expert in range(NUM_EXPERTS)
        for name, shape in PROJECTIONS.items()
    }
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = spec.world_size
    with set_current_vllm_config(config):
        address = f"tcp://{spec.rendezvous}"
        init_distributed_environment(spec.world_size, spec.rank, address, spec.rank, "gloo")
        initialize_model_parallel(spec.world_size)
        model = Model()
        plain = model.load(sent)

    def compare(tensors: dict[str, Tensor]) -> int:
        probes = ExpertProbes(model)
        assert all(probes.add(name, tensor) for name, tensor in tensors.items())
        return probes.compare()

    def refusal(tensors: dict[str, Tensor]) -> str:
        try:
            compare(tensors)
        except WeightSyncError as error:
            return str(error)
        return "nothing was noticed"

    found: dict[str, Any] = {
        "whole": compare(sent),
        "sorted": compare(dict(sorted(sent.items()))),
        "part": compare({n: t for n, t in sent.items() if n != "experts.3.up_proj.weight"}),
        "foreign": ExpertProbes(model).add("experts.0.gate_proj.bias", torch.ones(INNER)),
    }
    own = slice(INNER // spec.world_size * spec.rank, None)
    for name, tensor in sent.items():
        other = tensor.clone()
        part = other[:, own] if "down" in name else other[own]
        part[3, 5] += 1.0
        found[name] = refusal(sent | {name: other})
    swapped = {
        f"experts.{3 - expert}.{name}.weight": sent[f"experts.{expert}.{name}.weight"]
        for expert in range(NUM_EXPERTS)
        for name in PROJECTIONS
    }
    found["swapped"] = refusal(swapped)
    layer = model.experts.routed_experts
    for packed, weight in zip((layer.w13_weight, layer.w2_weight), plain, strict=True):
        packed.data.copy_(weight.view_as(packed))
    found["not packed"] = refusal(sent)
    return found


@pytest.mark.slow
def test_each_wrong_element_of_an_expert_is_seen_on_the_rank_that_holds_it(tmp_path: Path) -> None:
    for found in run_ranks(2, job, tmp_path, timeout_s=600):
        assert (found.pop("whole"), found.pop("sorted"), found.pop("part")) == (12, 12, 9)
        assert not found.pop("foreign")
        assert "expert 0 of layer 'experts'" in found.pop("swapped")
        assert "expert 0 of layer 'experts'" in found.pop("not packed")
        assert len(found) == 3 * NUM_EXPERTS
        for name, refusal in found.items():
            assert f"expert {name.split('.')[1]} of layer 'experts' does not hold" in refusal, name
