"""Critics and reward models on Megatron-Core, in every layout: the numbers of one rank of fsdp2 and
of plain Hugging Face, in their folders, too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from mcore_adapter.checkpoint_reader import WEIGHT, Saved
from mcore_adapter.convert.conversion_plan import tasks
from mcore_adapter.load import table_in
from mcore_adapter.models.scores import ScoreHead as Names
from mcore_adapter.optimizer_state import MOMENTS
from mcore_adapter.parallel_sizes import ParallelSizes
from roll.core.errors import ConfigError
from roll.core.metrics import Metrics
from roll.strategy.megatron.outputs import classifier_of
from roll.strategy.training.heads import PolicyHead, ScoreHead, ValueHead
from tests.contract.critic_job import critic_batch
from tests.contract.heads_job import (
    ADAM,
    ADAPTED,
    CASES,
    LAYOUTS,
    STEPS,
    families_job,
    job,
    reference_job,
    save_models,
)
from tests.contract.ranks import run_ranks
from tests.contract.train_job import gradient, leaders, relative_distance
from tests.convert.tiny_models import MODELS
from tests.families import config_of, save

RUNS = [
    (ranks, layout, case)
    for ranks, layouts in LAYOUTS.items()
    for layout, (_, cases) in layouts.items()
    for case in cases
]
every_run = pytest.mark.parametrize(("ranks", "layout", "case"), RUNS)
Found = dict[int, list[dict[Any, Any]]]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    save_models(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    return run_ranks(1, reference_job, folder / "reference", timeout_s=250)[0]


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return {ranks: run_ranks(ranks, job, folder / str(ranks), timeout_s=250) for ranks in LAYOUTS}


def joined(ranks: list[dict[str, Any]], name: str) -> Tensor:
    return torch.cat([result[name] for result in leaders(ranks)])


def numbers(model: nn.Module, *, scores: bool) -> Tensor:
    """What transformers says of whole rows without padding: scores of texts that end with a token,
    or values before it; `[B, T]`, 0 at the first token."""
    batch = critic_batch()
    out_BT = torch.zeros(batch.tokens.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        tokens = batch.tokens[row, :length]
        if scores:
            for end in range(1, length):
                out_BT[row, end] = model(tokens[None, : end + 1]).logits[0, 0]
        else:
            out_BT[row, 1:length] = model(tokens[None]).logits[0, :-1, 0]
    return out_BT


@every_run
def test_loss_and_gradients_are_those_of_fsdp2(
    reference: dict[str, Any], found: Found, ranks: int, layout: str, case: str
) -> None:
    alone, together = reference[case], [rank[layout, case] for rank in found[ranks]]
    want = gradient(alone, alone["start"])
    assert float(want["score.weight"].abs().max()) > 1e-3
    for rank in together:
        for name, tensor in alone["start"].items():
            assert torch.equal(rank["start"][name], tensor), name
        assert relative_distance(gradient(rank, alone["start"]), want) < 2e-6
    wanted = alone["metrics"].values_by_name()
    got = Metrics.concat([rank["metrics"] for rank in leaders(together)]).values_by_name()
    for key in ("loss/total", "grad_norm", "trained_tokens"):
        assert got[key] == pytest.approx(wanted[key], rel=1e-6, abs=1e-7), key


@every_run
def test_what_is_saved_gives_the_same_numbers_in_transformers(
    reference: dict[str, Any], found: Found, folder: Path, ranks: int, layout: str, case: str
) -> None:
    together = [rank[layout, case] for rank in found[ranks]]
    before = joined(together, "before")
    torch.testing.assert_close(before, reference[case]["before"], atol=1e-5, rtol=0)
    if together[0]["info"].dp_size == 1:
        for rank in together:  # ranks that share rows have copies of the head
            assert torch.equal(rank["after"], together[0]["after"])
    saved, like = folder / str(ranks) / layout / case, folder / "reference" / case
    assert _settings(saved) == _settings(like)
    assert {path.name for path in saved.iterdir()} == {path.name for path in like.iterdir()}
    scores = not isinstance(CASES[case].head, ValueHead)
    factory = AutoModelForSequenceClassification if scores else AutoModelForTokenClassification
    model, info = factory.from_pretrained(saved, dtype=torch.float32, output_loading_info=True)
    assert not {*info["missing_keys"], *info["unexpected_keys"]}
    with torch.no_grad():
        want = numbers(model.eval(), scores=scores)
    # The step was large, so that weights are, and what is rounded.
    scale = float(want.abs().max())
    torch.testing.assert_close(joined(together, "after") / scale, want / scale, atol=5e-5, rtol=0)


def _settings(folder: Path) -> dict[str, Any]:
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return settings


def test_a_new_head_begins_at_zero(found: Found) -> None:
    for case in ("new scorer", "critic of a scorer"):
        for rank in found[2]:
            run = rank["pp 2", case]
            assert not run["start"]["score.weight"].any()
            assert not run["before"].any()
            assert run["after"].any()


def test_a_head_computes_in_float32_whatever_the_model_does(
    reference: dict[str, Any], found: Found
) -> None:
    for rank in found[2]:
        got = rank["bf16"]["before"]
        assert not torch.equal(got, got.bfloat16().float())
        torch.testing.assert_close(got, reference["bf16"], atol=0.03, rtol=0.03)


def test_a_checkpoint_of_a_critic_goes_on_in_other_layouts(found: Found, folder: Path) -> None:
    """Tensor parallel ranks wrote it; stages and a distributed optimizer write it again."""
    written = _contents(folder / "2" / "bf16", folder / "critic")
    head = written["output_layer.weight weight"]
    assert not torch.equal(head, head.bfloat16().float())
    assert written["output_layer.bias exp_avg_sq"].any()
    for other in ("dp", "pp"):
        again = _contents(folder / "2" / f"bf16 {other}", folder / "critic")
        assert again.keys() == written.keys()
        for name, tensor in written.items():
            assert torch.equal(again[name], tensor), name
        for rank in found[2]:
            for name, tensor in found[2][0]["bf16"]["trained"].items():
                assert torch.equal(rank["bf16"][other][name], tensor), name


def _contents(checkpoint: Path, model: Path) -> dict[str, Tensor]:
    """Masters and moments as in the whole model."""
    table = table_in(model, Names(weight="score.weight", bias="score.bias"))
    saved = Saved(checkpoint / "model", table)
    return {
        f"{task.name} {kind}": saved.full(task, kind)
        for task in tasks(table, ParallelSizes())
        for kind in (WEIGHT, *MOMENTS)
    }


@pytest.mark.parametrize("layout", ADAPTED)
def test_an_adapter_and_the_head_beside_it_are_trained_as_by_peft(
    found: Found, folder: Path, layout: str
) -> None:
    saved = folder / "2" / f"adapter, {layout}"
    base = AutoModelForTokenClassification.from_pretrained(folder / "critic", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base.eval(), saved / "fresh", is_trainable=True)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    assert any(parameter.shape == (1, 64) for parameter in trained)  # the head
    # Biases do not decay.
    groups = [{"params": [p], "weight_decay": ADAM.weight_decay * (p.ndim > 1)} for p in trained]
    optimizer = torch.optim.AdamW(groups, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps)
    batch = critic_batch()
    assert batch.returns is not None
    assert batch.token_weights is not None
    for _ in range(STEPS):
        errors_BT = (numbers(adapted, scores=False) - batch.returns).square()
        (errors_BT * batch.token_weights).sum().backward()
        nn.utils.clip_grad_norm_(trained, ADAM.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    whole = AutoModelForTokenClassification.from_pretrained(saved / "merged", dtype=torch.float32)
    fresh = AutoModelForTokenClassification.from_pretrained(folder / "critic", dtype=torch.float32)
    loaded = PeftModel.from_pretrained(fresh, saved / "adapter").eval()
    with torch.no_grad():
        want = numbers(adapted, scores=False)
        by_peft, merged = (numbers(each, scores=False) for each in (loaded, whole.eval()))
    got = joined([rank["adapters"][layout] for rank in found[2]], "after")
    for numbers_BT in (got, by_peft, merged):
        torch.testing.assert_close(numbers_BT, want, atol=2e-5, rtol=1e-4)
    settings = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["score"]
    assert "score" not in settings["target_modules"]


@pytest.mark.parametrize("layout", ADAPTED)
def test_an_adapter_and_its_head_go_on_on_as_many_ranks_and_on_one(
    found: Found, folder: Path, layout: str
) -> None:
    runs = [rank["adapters"][layout] for rank in found[2]]
    want = Metrics.concat([run["next"] for run in leaders(runs)]).values_by_name()
    for run in runs:
        assert {"score.weight", "score.bias"}.isdisjoint(run["frozen"])
        assert "model.embed_tokens.weight" in run["frozen"]
        assert run["resumed"]["metrics"].values_by_name() == run["next"].values_by_name()
    on_one = found[1][0]["adapters"][layout]
    for name, tensor in runs[0]["weights"].items():
        assert torch.equal(runs[0]["resumed"]["weights"][name], tensor), name
        torch.testing.assert_close(on_one["weights"][name], tensor, atol=1e-7, rtol=1e-6)
    got = on_one["metrics"].values_by_name()
    for key in ("loss/total", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-5), key
    checkpoint = folder / "2" / f"adapter, {layout}" / "checkpoint"
    kept = json.loads((checkpoint / "meta.json").read_text())["tensors"]
    assert kept["base_model.model.score.weight"] == [1, 64]
    assert all("lora_" in name or ".score." in name for name in kept)


def kinds_of_families() -> dict[str, Any]:
    """A head for each family that transformers has classifiers of."""
    tokens, sequences = (
        each._model_mapping.keys()
        for each in (AutoModelForTokenClassification, AutoModelForSequenceClassification)
    )
    heads: dict[str, Any] = {}
    for name, settings in MODELS.items():
        kind = type(AutoConfig.for_model(settings["model_type"]))
        if kind in sequences:
            heads[name] = ValueHead() if kind in tokens else ScoreHead()
    return heads


def test_every_family_with_classifiers_gives_the_numbers_of_transformers(tmp_path: Path) -> None:
    heads = kinds_of_families()
    assert {"gemma3", "gpt_oss", "deepseek_v3", "mixtral", "qwen3_moe"} <= heads.keys()
    assert len(set(map(type, heads.values()))) == 2
    for name, head in heads.items():
        save(tmp_path / name, name, factory=head.classifier.factory, num_labels=1)
    job_of_all = partial(families_job, heads=heads)
    (found,) = run_ranks(1, job_of_all, tmp_path / "job", timeout_s=250)
    for name, head in heads.items():
        config = config_of(tmp_path / name, name)
        model = head.classifier.factory.from_pretrained(
            config.path, dtype=torch.float32, attn_implementation=config.attention
        )
        with torch.no_grad():
            want = numbers(model.eval(), scores=isinstance(head, ScoreHead))
        apart = float((found[name] - want).abs().max() / want.abs().max())
        assert apart < 1e-5, (name, apart)


def test_a_head_that_this_backend_lacks_is_refused() -> None:
    assert classifier_of(PolicyHead(1.0, 8)) is None
    with pytest.raises(ConfigError, match="megatron has no object: it has policies, critics"):
        classifier_of(object())
