"""Layers that predict further tokens (MTP), trained on Megatron: their gradients are those of the
same layers made of Hugging Face's, and by themselves they change nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.backends import PACKING, gradient_of_step
from tests.contract.mtp_job import LONGER, WEIGHT, batch, job
from tests.contract.ranks import run_ranks
from tests.contract.train_job import leaders, relative_distance
from tests.convert.further_by_hand import COUNTS, Further, save_further, tensors_of
from tests.tiny import char_tokenizer

FAMILIES = ["deepseek_v3", "glm4_moe"]
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pp 2": {"pp": 2},
        "tp 2": {"tp": 2, "etp": 1},
        "pp 2, vpp 2, recomputed": {"pp": 2, "vpp": 2, "recompute": "full"},
        "ep 2, distributed": {"ep": 2, "distributed_optimizer": True},
        "tp 2, packed": {"tp": 2, "etp": 1, PACKING: True},
        "pp 2, vpp 2, packed, recomputed": {
            "pp": 2,
            "vpp": 2,
            "recompute": "full",
            PACKING: True,
        },
    },
    1: {"one rank": {}},
}
CASES = [(name, layout) for name in FAMILIES for many in LAYOUTS.values() for layout in many]
Runs = dict[tuple[str, str, str], list[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp")
    for name in FAMILIES:
        save_further(made, name)
        char_tokenizer().save_pretrained(made / name)
    return made


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    """By family, layout and what was done, of all ranks."""
    found: Runs = {}
    for ranks, layouts in LAYOUTS.items():
        work = partial(job, names=FAMILIES, layouts=layouts)
        every = run_ranks(ranks, work, folder / str(ranks), timeout_s=300)
        found |= {key: [each[key] for each in every] for key in every[0]}
    return found


def losses(model: Further) -> tuple[Tensor, Tensor]:
    """The policy's, of `EntropyBonusLoss`, and that of the further layers: row by row, without
    padding."""
    rows = batch()
    assert rows.advantages is not None
    assert rows.token_weights is not None
    policy, further = torch.zeros(()), torch.zeros(())
    for row, length in enumerate(rows.lengths.tolist()):
        tokens, weights = rows.tokens[row, :length], rows.token_weights[row, :length]
        for ahead, logits_TV in enumerate((each[0] for each in model(tokens[None])), 1):
            logp = logits_TV[:-ahead].log_softmax(-1)
            chosen = logp.gather(1, tokens[ahead:, None])[:, 0]
            if ahead == 1:
                entropy = -(logp.exp() * logp).sum(-1)
                each = -chosen * rows.advantages[row, 1:length] - 0.1 * entropy
                policy = policy + (each * weights[1:]).sum()
            else:
                further = further - (chosen * weights[ahead:]).sum() / len(model.layers)
    return policy, further


@pytest.fixture(scope="module")
def by_hand(folder: Path) -> dict[str, tuple[float, float, dict[str, Tensor]]]:
    """Of each family both losses, and the gradients as if these were weights."""
    found = {}
    for name in FAMILIES:
        model = Further(name)
        policy, further = losses(model)
        (policy + WEIGHT * further).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        gradients = tensors_of(model, name, folder / "gradients" / name)
        found[name] = policy.item(), further.item(), gradients
    return found


def metrics_of(ranks: list[dict[str, Any]]) -> dict[str, float]:
    parts = [each["metrics"] for each in leaders(ranks)]
    values: dict[str, float] = type(parts[0]).concat(parts).values_by_name()
    return values


def start_of(folder: Path, name: str) -> dict[str, Tensor]:
    return tensors_of(Further(name), name, folder / "start" / name)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_by_themselves_they_change_nothing_of_the_policy(
    runs: Runs, name: str, layout: str
) -> None:
    without, detached = (runs[name, layout, mode] for mode in ("without", "detached"))
    was, now = metrics_of(without), metrics_of(detached)
    assert now.keys() == was.keys() | {"loss/mtp"}
    for one, other in zip(without, detached, strict=True):
        if "distributed" in layout:  # which cuts the gradients in other places for the norm
            assert relative_distance(other["weights"], one["weights"]) < 1e-6
            continue
        assert equal(one["weights"], other["weights"])
        assert torch.equal(one["scores"], other["scores"])
        assert {key: now[key] for key in was} == was


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_losses_and_gradients_are_those_by_hand(
    runs: Runs,
    folder: Path,
    by_hand: dict[str, tuple[float, float, dict[str, Tensor]]],
    name: str,
    layout: str,
) -> None:
    policy, further, want = by_hand[name]
    start = start_of(folder, name)
    trained = {key for key, tensor in want.items() if "e_score_correction_bias" not in key}
    alone = {key for key in trained if key not in runs[name, layout, "without"][0]["weights"]}
    for mode in ("attached", "detached"):
        found = metrics_of(runs[name, layout, mode])
        assert found["loss/total"] == pytest.approx(policy, abs=1e-6)
        assert found["loss/mtp"] == pytest.approx(further, rel=1e-6)
        saved = runs[name, layout, mode][0]["saved"]
        assert saved.keys() == start.keys()
        gradient = {key: gradient_of_step(start[key] - saved[key]) for key in trained}
        # The copies of embedding and head in these layers follow the model's own.
        copies = {key for key in alone if "embed_tokens" in key or "shared_head.head" in key}
        assert len(copies) == 2 * COUNTS[name]
        keys = trained - copies if mode == "attached" else alone - copies
        one, other = ({key: each[key] for key in keys} for each in (gradient, want))
        assert relative_distance(one, other) < 1e-5
        for key in copies:
            of = "model.embed_tokens.weight" if "embed" in key else "lm_head.weight"
            assert torch.equal(saved[key], saved[of])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), LONGER.items())
def test_large_gradients_of_theirs_do_not_scale_those_of_the_policy_down(
    runs: Runs, name: str, layout: str
) -> None:
    without, detached = (runs[name, layout, f"{m}, clipped"] for m in ("without", "detached"))
    assert metrics_of(without)["grad_norm"] > 1e-3
    assert equal(without[0]["weights"], detached[0]["weights"])
    assert metrics_of(without)["grad_norm"] == metrics_of(detached)["grad_norm"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), LONGER.items())
def test_they_can_be_all_that_is_trained(runs: Runs, folder: Path, name: str, layout: str) -> None:
    start = start_of(folder, name)
    for mode in ("detached", "attached"):
        frozen = runs[name, layout, f"{mode}, frozen"][0]
        assert all(torch.equal(tensor, start[key]) for key, tensor in frozen["weights"].items())
        # They learn what they learn beside the policy.
        whole = runs[name, layout, "detached"][0]["saved"]
        alone = {key for key in start if key not in frozen["weights"] and "shared" not in key}
        moved = {key for key in alone if not torch.equal(frozen["saved"][key], start[key])}
        assert any("eh_proj" in key for key in moved)
        assert all(torch.equal(frozen["saved"][key], whole[key]) for key in moved)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), LONGER.items())
def test_a_resumed_run_goes_on_with_them(runs: Runs, name: str, layout: str) -> None:
    first, *_ = runs[name, layout, "gone on"]
    assert equal(first["begun"], first["loaded"])
    assert equal(first["straight"]["saved"], first["resumed"]["saved"])
    assert all("mtp_loss_weight" in said for said in runs[name, layout, "refused"])


@pytest.mark.slow
def test_another_layout_goes_on_with_them(runs: Runs) -> None:
    before = runs["deepseek_v3", "pp 2", "gone on"][0]
    (moved,) = runs["deepseek_v3", "one rank", "moved"]
    assert equal(moved["loaded"], before["begun"])
    assert relative_distance(moved["resumed"]["saved"], before["straight"]["saved"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_engines_do_not_get_them(runs: Runs, name: str, layout: str) -> None:
    without, detached = (runs[name, layout, mode][0] for mode in ("without", "detached"))
    assert detached["pushed"] == detached["parts"] == list(without["weights"])
    assert not any(".layers.4." in key for key in detached["pushed"])
