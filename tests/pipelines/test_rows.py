"""SFT, DPO and reward models end to end, on rows at hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from roll.core.errors import CheckpointError, ConfigError
from roll.output_dir.resume import exported_step
from roll.output_dir.trackers import read_records
from roll.pipeline.outputs.reference_sums import FILE, KeptSums
from tests.runs import run_local, without_times, write_rows_task, write_task
from tests.tiny import save_tiny_model

TEXTS = [
    {
        "messages": [
            {"role": "user", "content": f"{i}+{i}="},
            {"role": "assistant", "content": str(2 * i)},
            {"role": "user", "content": "and one more?"},
            {"role": "assistant", "content": str(2 * i + 1)},
        ]
    }
    for i in range(24)
]
PAIRS = [
    {"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": "x" * (1 + i % 3)} for i in range(24)
]
LABELLED = [
    {"prompt": row["prompt"], "completion": row[kind], "label": kind == "chosen"}
    for row in PAIRS
    for kind in ("chosen", "rejected")
]


def split(rows: list[Any]) -> dict[str, list[Any]]:
    return {"train": rows[:-8], "held_out": rows[-8:]}


def test_sft_learns_and_its_export_writes_what_it_was_taught(tmp_path: Path) -> None:
    path = write_rows_task(
        tmp_path,
        "sft",
        split(TEXTS),
        max_steps=60,
        actor_train={"pool": "all", "packing": True, "optimizer": {"lr": 5e-3}},
        validation={"every": 60, "sets": {"same": {"path": str(tmp_path / "train.jsonl")}}},
    )
    records = run_local(path)
    first, last = records[0], records[-1]
    assert last["val/same/loss"] < 0.3 * first["val/same/loss"]
    assert first["loss/total"] == pytest.approx(first["nll"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "hf")
    assert model.config.vocab_size


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "simpo", "orpo", "kto"])
def test_preferences_are_learned(tmp_path: Path, kind: str) -> None:
    reference = {} if kind in ("simpo", "orpo") else {"reference": {"pool": "all"}}
    path = write_rows_task(
        tmp_path,
        "dpo",
        split(PAIRS),
        max_steps=20,
        loss={"kind": kind},
        actor_train={"pool": "all", "optimizer": {"lr": 2e-3}},
        validation={"every": 20, "sets": {"held_out": {"path": str(tmp_path / "held_out.jsonl")}}},
        **reference,
    )
    records = run_local(path)
    if kind == "sigmoid":
        assert records[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert records[0]["val/held_out/loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert records[0]["val/held_out/accuracy"] == 0.5
    assert records[-1]["val/held_out/accuracy"] >= 0.9


def test_labelled_responses_are_learned(tmp_path: Path) -> None:
    columns = {"chosen": None, "rejected": None, "completion": "completion", "label": "label"}
    rows = split(LABELLED)
    wanted = next(row for row in rows["held_out"] if row["label"])
    (tmp_path / "one.jsonl").write_text(json.dumps(wanted) + "\n")
    held_out = {
        name: {"path": str(tmp_path / f"{name}.jsonl"), "columns": columns}
        for name in ("held_out", "one")
    }
    path = write_rows_task(
        tmp_path,
        "dpo",
        rows,
        columns=columns,
        validation={"every": 30, "sets": held_out},
        max_steps=30,
        loss={"kind": "kto"},
        reference={"pool": "all"},
        reference_logprobs="once",
        actor_train={"pool": "all", "optimizer": {"lr": 2e-3}},
    )
    records = run_local(path)
    assert records[0]["preference_loss"] == pytest.approx(0.5, abs=1e-6)
    assert records[0]["divergence"] == 0
    assert records[-1]["val/held_out/accuracy"] >= 0.9
    assert records[-1]["val/one/loss"] < 0.49  # a row that is compared with itself has 0.5


def test_reference_log_probs_of_once_are_those_of_every_step(tmp_path: Path) -> None:
    losses = []
    for how in ("per_step", "once"):
        path = write_rows_task(
            tmp_path / how,
            "dpo",
            split(PAIRS),
            max_steps=8,
            reference={"pool": "all"},
            reference_logprobs=how,
        )
        losses.append([record.get("loss/total") for record in run_local(path)])
    # Not to the bit: the rows beside a row in its pass are others, and so may be the kernels.
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][0] == losses[1][0]


def test_a_resumed_run_knows_the_reference_log_probs_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra: dict[str, Any] = {"reference": {"pool": "all"}, "reference_logprobs": "once"}
    extra |= {"max_steps": 8}  # two epochs, in another order each
    whole = run_local(write_rows_task(tmp_path / "whole", "dpo", split(PAIRS), **extra))
    halves = write_rows_task(tmp_path / "halves", "dpo", split(PAIRS), **extra)
    run_local(halves, ["max_steps=6"])
    assert (tmp_path / "halves/out/checkpoints/step_000006" / FILE).is_file()
    resumed = run_local(halves)
    assert list(map(without_times, resumed)) == list(map(without_times, whole))
    assert "the reference scores all rows anew" not in caplog.text
    # Rows of the validation that have changed have the ids of those before.
    (tmp_path / "halves/held_out.jsonl").write_text(json.dumps(PAIRS[0]) + "\n")
    run_local(halves, ["max_steps=9"])
    assert "the reference scores all rows anew" in caplog.text


def test_sums_of_another_reference_or_of_a_damaged_file_are_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sums, own = {"a": [-1.5, -0.1], "b": [2.0**-40]}, KeptSums("ours")
    assert own.read(tmp_path) == {}
    own.write(tmp_path, sums)
    assert own.read(tmp_path) == sums
    assert KeptSums("theirs").read(tmp_path) == {}
    assert "the reference of this run or a row of its validation is another" in caplog.text
    (tmp_path / FILE).write_bytes(b"PAR1")
    with pytest.raises(CheckpointError, match="cannot be read"):
        own.read(tmp_path)


def test_a_reward_model_is_a_sequence_classifier_that_ranks(tmp_path: Path) -> None:
    path = write_rows_task(
        tmp_path,
        "reward_model",
        split(PAIRS),
        max_steps=30,
        loss={"center_coef": 0.01},
        actor_train={"pool": "all", "optimizer": {"lr": 2e-3}},
    )
    records = run_local(path)
    assert records[0]["preference_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert records[0]["val/held_out/accuracy"] == 0.5
    assert records[-1]["val/held_out/accuracy"] >= 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "hf")
    assert model.config.num_labels == 1
    assert model.config.pad_token_id is not None
    # Hugging Face pools the last token that is no padding, as the pipeline does.
    padded = torch.tensor([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    alone = model(input_ids=padded[:1, :3]).logits
    torch.testing.assert_close(model(input_ids=padded).logits[:1], alone)


@pytest.mark.parametrize("pipeline", ["sft", "dpo", "reward_model"])
def test_two_halves_are_the_whole(tmp_path: Path, pipeline: str) -> None:
    rows = TEXTS if pipeline == "sft" else PAIRS
    extra: dict[str, Any] = {"reference": {"pool": "all"}} if pipeline == "dpo" else {}
    whole = run_local(write_rows_task(tmp_path / "whole", pipeline, split(rows), **extra))
    halves = write_rows_task(tmp_path / "halves", pipeline, split(rows), **extra)
    run_local(halves, ["max_steps=2"])
    resumed = run_local(halves)
    assert list(map(without_times, resumed)) == list(map(without_times, whole))


def test_epochs_end_a_run_and_other_data_do_not_resume_it(tmp_path: Path) -> None:
    path = write_rows_task(tmp_path, "sft", split(TEXTS), epochs=1.5, max_steps=100)
    assert len(run_local(path)) == 6 + 1  # 16 rows, 4 a step; the last record is a validation
    write_rows_task(tmp_path, "sft", {"train": TEXTS[:12]}, epochs=8.0, max_steps=100)
    with pytest.raises(CheckpointError, match="content of the data files"):
        run_local(path)


def test_a_run_that_gets_no_better_ends_well_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    """A learning rate that breaks the model: each validation after the first steps is worse."""

    def task(name: str, **stop: Any) -> Path:
        return write_rows_task(
            tmp_path / name,
            "sft",
            split(TEXTS),
            max_steps=12,
            actor_train={"pool": "all", "optimizer": {"lr": 3.0, "max_grad_norm": 1e9}},
            checkpoint={"every": 5},
            validation={
                "every": 1,
                "sets": {"held_out": {"path": str(tmp_path / name / "held_out.jsonl")}},
                "stop": {"metric": "val/held_out/loss", "patience": 2, **stop},
            },
        )

    def summary(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / name / "out/summary.json").read_text())
        return found

    whole = run_local(task("whole"))
    end = summary("whole")
    steps = whole[-1]["step"]
    losses = [record["val/held_out/loss"] for record in whole]
    best = losses.index(min(losses))
    assert steps == best + 2 < 12
    assert (end["status"], end["steps"]) == ("finished", steps)
    assert end["ended_early"].startswith("val/held_out/loss has not improved in 2 validations")
    folder = tmp_path / "whole" / "out"
    assert (folder / "checkpoints" / f"step_{steps:06d}").is_dir()
    assert exported_step(folder) == steps
    assert run_local(task("whole")) == whole  # nothing is left to do
    further = run_local(task("whole", patience=3))
    assert summary("whole")["ended_early"].startswith("val/held_out/loss has not improved in 3")
    assert further[-1]["step"] == steps + 1
    # Stopped in the middle of the wait: the count goes on.
    halves = task("halves")
    run_local(halves, [f"max_steps={best + 1}"])
    assert "ended_early" not in summary("halves")
    resumed = run_local(halves)
    assert list(map(without_times, resumed)) == list(map(without_times, whole))


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    path = write_rows_task(
        tmp_path,
        "sft",
        split(TEXTS),
        max_steps=6,
        actor_train={"pool": "all", "optimizer": {"lr": 3.0, "max_grad_norm": 1e9}},
        checkpoint={
            "every": 2,
            "keep_last": 1,
            "keep_best": 1,
            "best_metric": "val/held_out/loss",
            "higher_is_better": False,
        },
    )
    run_local(path)
    kept = sorted(folder.name for folder in (tmp_path / "out" / "checkpoints").glob("step_*"))
    losses = {
        record["step"]: record["val/held_out/loss"]
        for record in read_records(tmp_path / "out" / "metrics.jsonl")
        if "val/held_out/loss" in record and record["step"]
    }
    best = min(losses, key=lambda step: losses[step])
    assert kept == sorted({f"step_{best:06d}", "step_000006"})


def test_a_reward_model_of_one_run_is_the_reward_of_another(tmp_path: Path) -> None:
    taught = write_rows_task(
        tmp_path / "judge",
        "reward_model",
        split(PAIRS),
        max_steps=20,
        actor_train={"pool": "all", "optimizer": {"lr": 2e-3}},
    )
    run_local(taught)
    judge = tmp_path / "judge" / "out" / "hf"
    path = write_task(
        tmp_path / "rl",
        max_steps=2,
        rewards={"judge": {"model": {"path": str(judge)}, "max_tokens_per_microbatch": 64}},
    )
    records = run_local(path)
    assert math.isfinite(records[0]["reward/judge/mean"])
    # Hugging Face's own classifier says the same of the same text.
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    tokenizer = AutoTokenizer.from_pretrained(judge)
    dump = (tmp_path / "rl" / "out" / "rollouts" / "step_000000.jsonl").read_text()
    rows = [json.loads(line) for line in dump.splitlines()]
    assert len({row["reward"] for row in rows}) > 4
    for row in rows[:6]:
        ends = "" if row["finish_reason"] == "length" else tokenizer.eos_token
        text = row["prompt"] + row["response"] + ends
        ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        if ids.shape[1] != row["prompt_tokens"] + row["response_tokens"]:
            continue  # a special token inside the response, which its text leaves out
        assert row["reward"] == pytest.approx(model(ids).logits.item(), abs=1e-5)


def test_a_reward_model_with_other_tokens_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_tiny_model(other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(other)
    path = write_task(tmp_path / "rl", rewards={"judge": {"model": {"path": str(other)}}})
    with pytest.raises(ConfigError, match=r"judge\.model: its token \d+ is .<new>., .* nothing"):
        run_local(path)
