"""The RLVR pipeline end to end on the `hf` engine, in this process: files, identities, resume."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from roll.config import load_config
from roll.core.errors import CheckpointError, DataError
from roll.pipeline.rlvr import RlvrPipeline
from roll.runtime.rollouts.generation import Generation
from roll.runtime.weight_pusher import WeightPusher
from roll.weight_sync.transport_choice import Route
from tests.runs import run_local, without_times, write_task
from tests.tiny import save_tiny_model

KEYS = [
    "step",
    "reward/mean",
    "reward/std",
    "reward/digits/mean",
    "loss/policy",
    "kl/ref",
    "ratio/mean",
    "clip_fraction",
    "grad_norm",
    "entropy",
    "lr",
    "response_tokens/mean",
    "response_tokens/max",
    "truncated_fraction",
    "mismatch/logprob_abs_mean",
    "mismatch/logprob_abs_max",
    "staleness/max",
    "time/step_s",
    "time/rollout_s",
    "time/reward_s",
    "time/logprob_s",
    "time/train_s",
    "time/weight_sync_s",
    "perf/generated_tokens_per_s",
    "perf/trained_tokens_per_s",
    "perf/actor_train/train_tflops",
    "perf/reference/score_tflops",
    "memory/rss_gb_max",
    "memory/driver_gb",
    "memory/actor_infer/gb_sum",
    "machine/memory_used_gb",
    "machine/disk_free_gb",
]


def test_a_run_leaves_the_files_and_keys_it_promises(tmp_path: Path) -> None:
    path = write_task(tmp_path, track={"tensorboard": True, "rollouts_every": 2})
    records = run_local(path)
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4]
    for record in records[:-1]:
        assert not set(KEYS) - set(record)
    assert [("val/held_out/mean@1" in r) for r in records] == [True, False, True, False, True]
    out = tmp_path / "out"
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"step_000002", "step_000004"}
    assert list((out / "tensorboard").iterdir())
    assert load_config(out / "config.yaml").config == load_config(path).config
    rollouts = [json.loads(line) for line in (out / "rollouts/step_000002.jsonl").open()]
    assert len(rollouts) == 16
    assert rollouts[0]["weight_version"] == [2, 2]
    assert {"prompt", "response", "ground_truth", "reward", "parts", "finish_reason"} <= set(
        rollouts[0]
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    AutoTokenizer.from_pretrained(out / "hf")
    exported = AutoModelForCausalLM.from_pretrained(out / "hf").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert exported.keys() == before.keys()
    assert any(not torch.equal(exported[name], before[name]) for name in before)


class AcrossHosts(RlvrPipeline):
    """Pushes weights as if its engines were on other machines."""

    def open(self) -> None:
        super().open()
        assert isinstance(self.runtime.rollouts, Generation)
        inference = self.runtime.rollouts.inference
        old = inference.pusher
        assert old is not None
        inference.pusher = FarPusher(old.actor, old.infer, old.platform, old.config)


class FarPusher(WeightPusher):
    def _route(self, *given: Any) -> Route:
        return replace(super()._route(*given), kind="broadcast")


def test_a_run_makes_the_groups_of_its_pushes_once(tmp_path: Path) -> None:
    path = write_task(tmp_path, validation={}, max_steps=3)
    near = run_local(path, [f"output_dir={tmp_path / 'near'}"])
    far = run_local(path, [f"output_dir={tmp_path / 'far'}"], pipeline=AcrossHosts)
    made = [record.pop("weight_sync/groups_made") for record in far[:3]]
    assert made == [1, 0, 0]
    assert [without_times(record) for record in far] == [without_times(record) for record in near]


def test_the_first_update_is_on_policy(tmp_path: Path) -> None:
    path = write_task(tmp_path, validation={}, max_steps=1)
    for mode in ("auto", "recompute"):
        overrides = [f"algorithm.old_logprobs={mode}", f"output_dir={tmp_path / mode}"]
        (record, *_) = run_local(path, overrides)
        assert record["ratio/mean"] == pytest.approx(1, abs=1e-6)
        assert record["clip_fraction"] == 0
        assert record["kl/ref"] == pytest.approx(0, abs=1e-9)
        assert record["mismatch/logprob_abs_max"] < 1e-5
        assert record["staleness/max"] == 0


def test_ten_steps_equal_five_a_resume_and_five(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=10, checkpoint={"every": 5, "export_hf": False})
    schedule = "actor_train.optimizer.schedule=linear"
    straight = run_local(path, [schedule, f"output_dir={tmp_path / 'straight'}"])
    # The first half is a ten-step run that ends early, as a killed one does.
    first = tmp_path / "halves"
    run_local(path, [schedule, f"output_dir={first}"])
    for late in first.glob("checkpoints/step_000010"):
        late.rename(tmp_path / "gone")
    resumed = run_local(path, [schedule, f"output_dir={first}"])
    assert [r["step"] for r in resumed] == list(range(11))
    for one, other in zip(straight, resumed, strict=True):
        assert without_times(one) == without_times(other)


def test_a_reference_that_follows_the_policy_goes_on_after_a_resume(tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        max_steps=6,
        reference={"follow": {"every": 2, "decay": 0.5}},
        checkpoint={"every": 3, "export_hf": False},
    )
    straight = run_local(path, [f"output_dir={tmp_path / 'straight'}"])
    first = tmp_path / "halves"
    run_local(path, [f"output_dir={first}"])
    (first / "checkpoints/step_000006").rename(tmp_path / "gone")
    resumed = run_local(path, [f"output_dir={first}"])
    for one, other in zip(straight, resumed, strict=True):
        assert without_times(one) == without_times(other)
    # A frozen reference gives the same first two steps, and another third one.
    run = yaml.safe_load(path.read_text())
    frozen = tmp_path / "frozen.yaml"
    frozen.write_text(yaml.safe_dump(run | {"reference": {"pool": run["actor_train"]["pool"]}}))
    still = run_local(frozen, [f"output_dir={tmp_path / 'still'}"])
    distances = [[r["kl/ref"] for r in records[:-1]] for records in (straight, still)]
    assert distances[0][:2] == pytest.approx(distances[1][:2], rel=1e-4, abs=1e-9)
    assert distances[0][2] < distances[1][2]


def test_several_updates_and_epochs_move_the_ratio(tmp_path: Path) -> None:
    path = write_task(tmp_path, validation={}, max_steps=1)
    (record, *_) = run_local(path, ["actor_train.samples_per_update=8", "actor_train.epochs=2"])
    assert record["ratio/mean"] != 1
    assert record["approx_kl"] > 0
    assert record["trained_tokens"] == 2 * 16 * record["response_tokens/mean"]


def test_a_tiny_model_learns_to_write_digits(tmp_path: Path) -> None:
    path = write_task(
        tmp_path, validation={}, max_steps=12, checkpoint={"export_hf": False}, reference=None,
        algorithm={"advantage": {"kind": "grpo"}},
    )  # fmt: skip
    overrides = ["data.prompts_per_step=8", "data.samples_per_prompt=8"]
    records = run_local(path, overrides)
    rewards = [r["reward/mean"] for r in records if "reward/mean" in r]
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards


def test_dynamic_sampling_replaces_groups_without_contrast(tmp_path: Path) -> None:
    path = write_task(
        tmp_path,
        validation={},
        max_steps=2,
        rollout={"filters": [{"kind": "equal_rewards"}], "max_prompts_factor": 20},
        rewards={"exact": {"fn": "test_run_rewards:slow", "concurrency": 64}},
    )
    records = run_local(path)
    for record in records[:-1]:
        assert record["groups/equal_rewards_fraction"] == 0
        started = record["rollout/started_groups"] - record["rollout/rejected_groups"]
        assert started == 4


def test_a_reward_worker_and_a_function_add_up_by_weight(tmp_path: Path) -> None:
    rewards = {
        "digits": {"fn": "test_run_rewards:digits"},
        "owner": {"worker": "test_run_rewards:Owner", "kwargs": {"base": 1.0}, "weight": 0.5,
                  "workers": 2},
    }  # fmt: skip
    path = write_task(tmp_path, validation={}, max_steps=1, rewards=rewards)
    (record, *_) = run_local(path)
    total = record["reward/digits/mean"] + 0.5 * record["reward/owner/mean"]
    assert record["reward/mean"] == pytest.approx(total)
    assert record["reward/owner/mean"] > 1
    assert record["reward/owner/error_rate"] == 0


def test_a_group_reward_sees_all_siblings_beside_filters_and_a_resume(tmp_path: Path) -> None:
    rewards = {
        "digits": {"fn": "test_run_rewards:digits"},
        "longest": {"fn": "test_run_rewards:longest", "per": "group", "weight": 2.0},
    }
    filters = [{"kind": "equal_rewards"}]
    path = write_task(
        tmp_path,
        rewards=rewards,
        rollout={"filters": filters, "max_prompts_factor": 20, "siblings": "separate"},
        checkpoint={"every": 2, "export_hf": False},
    )
    straight = run_local(path, [f"output_dir={tmp_path / 'straight'}"])
    first = tmp_path / "halves"
    run_local(path, [f"output_dir={first}"])
    for late in first.glob("checkpoints/step_000004"):
        late.rename(tmp_path / "gone")
    resumed = run_local(path, [f"output_dir={first}"])
    for one, other in zip(straight, resumed, strict=True):
        assert without_times(one) == without_times(other)
    for record in straight[:-1]:
        total = record["reward/digits/mean"] + 2 * record["reward/longest/mean"]
        assert record["reward/mean"] == pytest.approx(total)
        assert record["reward/longest/size"] == 4
        assert record["reward/longest/error_rate"] == 0


def test_a_finished_run_says_so_and_goes_on_with_more_steps(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=2)
    assert len(run_local(path)) == 3
    assert len(run_local(path)) == 3
    longer = run_local(path, ["max_steps=3"])
    assert [r["step"] for r in longer] == [0, 1, 2, 3]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=2)
    run_local(path)
    save_tiny_model(tmp_path / "other", tied=False)
    with pytest.raises(CheckpointError, match="another model"):
        run_local(path, ["max_steps=3", f"model.path={tmp_path / 'other'}"])


def test_changed_data_is_refused_on_resume(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=2)
    run_local(path)
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "9 + 9 =", "answer": "18"}\n')
    with pytest.raises(CheckpointError, match="data files"):
        run_local(path, ["max_steps=3"])


def test_a_template_that_names_the_time_does_not_end_a_run(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=2)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.chat_template = '{{ strftime_now("%M:%S.%f") }}' + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "model")
    run_local(path)
    state = json.loads((tmp_path / "out/checkpoints/step_000002/state.json").read_text())
    begun = datetime.fromisoformat(state["rendered_at"])
    records = run_local(path, ["max_steps=4"])
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    later = json.loads((tmp_path / "out/checkpoints/step_000004/state.json").read_text())
    assert later["rendered_at"] == state["rendered_at"]
    rollouts = [json.loads(line) for line in (tmp_path / "out/rollouts/step_000002.jsonl").open()]
    assert begun.strftime("%M:%S.%f") in rollouts[0]["prompt"]


def test_a_dumped_prompt_is_what_the_model_read(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=1, reference=None, algorithm={})
    rows = [{"prompt": f"{i} \u00d7 2 =", "answer": str(2 * i)} for i in range(8)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_local(path)
    rollouts = [json.loads(line) for line in (tmp_path / "out/rollouts/step_000000.jsonl").open()]
    assert all(" <pad> 2 =" in row["prompt"] for row in rollouts)


def test_a_tag_from_a_column_without_a_reward_is_refused(tmp_path: Path) -> None:
    path = write_task(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").open()]
    rows[3]["kind"] = "proof"
    text = "".join(json.dumps({"kind": "default", **row}) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"'proof', which no reward takes"):
        run_local(path, ["data.sources.0.columns.tag=kind"])
