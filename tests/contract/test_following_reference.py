"""A reference that follows the policy, as a copy in the workers that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from roll.config.sections.model import ModelConfig
from roll.config.sections.optimizers.kinds import AdamWConfig
from roll.config.sections.strategy import Fsdp2Config
from roll.config.sections.training import TrainRole
from roll.core.errors import CheckpointError
from roll.core.types import WorkerSpec
from roll.strategy.build import build_train
from roll.strategy.fsdp2.train import Fsdp2Strategy
from roll.strategy.training.group import GroupMembership
from roll.strategy.training.heads import PolicyHead
from tests.contract.ranks import run_ranks
from tests.contract.train_job import EntropyBonusLoss, exported, rows_of, train_batch
from tests.tiny import save_tiny_model

DECAY = 0.75
LAYOUTS: dict[str, dict[str, Any]] = {"shards": {}, "tp": {"tp": 2}, "copies": {"replicas": 2}}


def build(spec: WorkerSpec, folder: Path, layout: str, *, keeps: bool = True) -> Fsdp2Strategy[Any]:
    sizes = LAYOUTS[layout] if spec.world_size > 1 else {}
    role = TrainRole(
        pool="p", strategy=Fsdp2Config(**sizes), optimizer=AdamWConfig(lr=1e-2, eps=1e-4)
    )
    model = ModelConfig(path=str(folder.parent / "model"))
    made = build_train(role, model, spec, PolicyHead(1.0, 64), total_steps=9, keeps_reference=keeps)
    assert isinstance(made, Fsdp2Strategy)
    return made


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    group = GroupMembership(spec)
    layouts = list(LAYOUTS) if spec.world_size > 1 else ["shards"]
    found = {layout: _moves(spec, folder, layout) for layout in layouts}
    group.leave()
    return found


def _moves(spec: WorkerSpec, folder: Path, layout: str) -> dict[str, Any]:
    strategy = build(spec, folder, layout)
    rows = rows_of(strategy, train_batch())

    def reference() -> Tensor:
        return strategy.score_base(rows).logprobs_BT

    def policy() -> Tensor:
        return strategy.score(rows).logprobs_BT

    def step() -> dict[str, Tensor]:
        strategy.train(rows, EntropyBonusLoss())
        return exported(strategy)

    found: dict[str, Any] = {"info": strategy.rank_info, "start": policy()}
    first = step()
    found["still"] = reference()
    found["unchanged"] = all(torch.equal(w, first[name]) for name, w in exported(strategy).items())
    found["policy"] = policy()
    strategy.move_reference(0.0)
    found["moved"] = reference()
    second = step()
    strategy.move_reference(DECAY)
    found["mean"] = reference()
    found["weights"] = (first, second)
    checkpoint = folder / layout
    strategy.save(checkpoint)
    found["next"] = step()
    strategy.move_reference(DECAY)
    found["last"] = reference()
    resumed = build(spec, folder, layout)
    resumed.load(checkpoint)
    found["resumed mean"] = resumed.score_base(rows).logprobs_BT
    resumed.train(rows, EntropyBonusLoss())
    resumed.move_reference(DECAY)
    found["resumed next"] = exported(resumed)
    found["resumed last"] = resumed.score_base(rows).logprobs_BT
    plain = build(spec, folder, layout, keeps=False)
    plain.save(folder / f"{layout} without")
    with pytest.raises(CheckpointError) as caught:
        resumed.load(folder / f"{layout} without")
    found["without"] = str(caught.value)
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("reference")
    save_tiny_model(folder / "model", tied=False, seed=1)
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for world in (1, 2):
        ranks = run_ranks(world, job, folder / str(world), timeout_s=300)
        found |= {(world, layout): [rank[layout] for rank in ranks] for layout in ranks[0]}
    found[0, ""] = [{"model": folder / "model"}]
    return found


CASES = [(1, "shards"), *((2, layout) for layout in LAYOUTS)]


@pytest.mark.parametrize(("world", "layout"), CASES)
def test_it_stays_until_it_is_moved_and_is_the_policy_then(
    runs: dict[tuple[int, str], list[dict[str, Any]]], world: int, layout: str
) -> None:
    for rank in runs[world, layout]:
        assert torch.equal(rank["still"], rank["start"])
        assert not torch.equal(rank["policy"], rank["start"])
        assert torch.equal(rank["moved"], rank["policy"])
        assert rank["unchanged"]


@pytest.mark.parametrize(("world", "layout"), CASES)
def test_a_move_with_decay_is_a_mean_of_weights(
    runs: dict[tuple[int, str], list[dict[str, Any]]], world: int, layout: str
) -> None:
    path = runs[0, ""][0]["model"]
    for rank in runs[world, layout]:
        first, second = rank["weights"]
        mean = {name: DECAY * first[name] + (1 - DECAY) * second[name] for name in first}
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.load_state_dict(mean, strict=True)
        info = rank["info"]
        part = train_batch().split(info.dp_size)[info.dp_rank]
        for row, length in enumerate(part.lengths.tolist()):
            tokens = part.tokens[row, :length]
            with torch.no_grad():
                logp = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            want = logp[torch.arange(length - 1), tokens[1:]]
            torch.testing.assert_close(rank["mean"][row, 1:length], want, atol=1e-5, rtol=2e-5)


@pytest.mark.parametrize(("world", "layout"), CASES)
def test_a_resumed_run_has_the_same_reference_to_the_bit(
    runs: dict[tuple[int, str], list[dict[str, Any]]], world: int, layout: str
) -> None:
    for rank in runs[world, layout]:
        assert torch.equal(rank["resumed mean"], rank["mean"])
        assert torch.equal(rank["resumed last"], rank["last"])
        assert not torch.equal(rank["last"], rank["mean"])
        for name, tensor in rank["next"].items():
            assert torch.equal(rank["resumed next"][name], tensor), name
        assert "without a reference that follows" in rank["without"]
