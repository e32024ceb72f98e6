"""Replaced values of config.json (`model.overrides`): all backends and engines compute as a model
whose config.json has them."""

from __future__ import annotations

import asyncio
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from roll.config.sections.model import ModelConfig
from roll.core.types import WorkerSpec
from roll.strategy.available import status
from roll.strategy.training.group import GroupMembership
from tests.contract.backends import SCORE_BACKENDS, TRAIN_BACKENDS
from tests.contract.engine_rig import assert_agrees, rescore, start
from tests.contract.ranks import run_ranks
from tests.contract.train_job import ADAM, EntropyBonusLoss, rows_of, train_batch
from tests.tiny import save_tiny_model
from tests.turns import in_groups

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OVERRIDES: dict[str, Any] = {"rope_scaling": YARN, "max_position_embeddings": 1024}
GENERATION = '{"temperature": 0.6, "pad_token_id": -1}\n'
"""Settings of generation that transformers reads and refuses to write."""
SCORING = ("hf", "fsdp2", "fsdp2-tp2", "deepspeed-zero3", "megatron")
TRAINING = ("fsdp2", "deepspeed-zero2", "megatron-dp2")
WITHOUT_SGLANG = pytest.mark.skipif(not status("sglang").ok, reason=status("sglang").advice)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `plain`, and `by_hand`: the same with other values in config.json."""
    folder = tmp_path_factory.mktemp("overrides")
    save_tiny_model(folder / "plain")
    (folder / "plain" / "generation_config.json").write_text(GENERATION)
    shutil.copytree(folder / "plain", folder / "by_hand")
    file = folder / "by_hand" / "config.json"
    values = json.loads(file.read_text())
    values["rope_parameters"] = {**YARN, "rope_theta": values["rope_parameters"]["rope_theta"]}
    values["max_position_embeddings"] = 1024
    file.write_text(json.dumps(values))
    return folder


def job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    group = GroupMembership(spec)
    model = ModelConfig(path=str(folder.parent / "plain"), overrides=OVERRIDES)
    for name in SCORING:
        scorer = SCORE_BACKENDS[name].build(spec, model)
        info = scorer.rank_info
        rows = train_batch().split(info.dp_size)[info.dp_rank]
        results[name] = rows, scorer.score(rows).logprobs_BT
        scorer.close()
    for name in TRAINING:
        made = next(each for each in TRAIN_BACKENDS if each.name == name)
        trainer = made.build(spec, model, optimizer=ADAM, total_steps=4)
        own = rows_of(trainer, train_batch())
        results[f"{name} trains"] = own, trainer.score(own).logprobs_BT
        trainer.train(own, EntropyBonusLoss())
        trainer.save_hf(folder / name)
        results[f"{name} trained"] = own, trainer.score(own).logprobs_BT
        trainer.close()
    group.leave()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_trainers_score_as_the_model_by_hand_and_export_its_settings(
    folder: Path, world: int
) -> None:
    ranks = run_ranks(world, partial(job), folder / str(world), timeout_s=250)
    oracles = {
        "": AutoModelForCausalLM.from_pretrained(folder / "by_hand"),
        **{
            f"{name} trained": AutoModelForCausalLM.from_pretrained(folder / str(world) / name)
            for name in TRAINING
        },
    }
    plain = AutoModelForCausalLM.from_pretrained(folder / "plain")
    for rank in ranks:
        for name, (rows, found_BT) in rank.items():
            oracle = oracles.get(name, oracles[""])
            far = 0.0
            for row, length in enumerate(rows.lengths.tolist()):
                prompt, *tokens = rows.tokens[row, :length].tolist()
                found = found_BT[row, 1:length].double()
                with torch.no_grad():
                    expected = rescore(oracle, (prompt,), tokens)
                    far += float((rescore(plain, (prompt,), tokens) - found).abs().max())
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=2e-5, msg=name)
            assert far > 1e-3, "the plain model would have been as good"
    for name in TRAINING:
        written = (folder / str(world) / name / "generation_config.json").read_text()
        assert written == GENERATION
        config = AutoConfig.from_pretrained(folder / str(world) / name)
        assert config.rope_parameters.items() >= YARN.items()
        assert config.max_position_embeddings == 1024


ENGINES = [*in_groups(["hf", "vllm"]), *in_groups(["sglang"], pytest.mark.slow, WITHOUT_SGLANG)]


@pytest.mark.parametrize("kind", ENGINES)
def test_engines_agree_with_the_model_by_hand(
    folder: Path, loop: asyncio.AbstractEventLoop, kind: str
) -> None:
    rig = start(kind, folder / "plain", loop, overrides=OVERRIDES, oracle=folder / "by_hand")
    try:
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
        rig.push_oracle()
        assert_agrees(rig.generate(n=2)[0], rig.oracle)
    finally:
        rig.run(rig.engine.close())
