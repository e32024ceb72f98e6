"""Answers that are kept, the figures that are made of them, and the models that are found."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from roll.commands.eval.answers import SAMPLES, Answered, Answers
from roll.commands.eval.evaluate import _settings_of
from roll.commands.eval.models import begins_folder, find_models, fingerprint, make_folder
from roll.commands.eval.scores import scores_of
from roll.config.loading.question_sets import load_serving
from roll.config.sections.lifecycle import CheckpointConfig
from roll.core.errors import ConfigError, SettingsChangedError
from roll.output_dir.checkpoints import Checkpoints, RunState
from roll.output_dir.resume import mark_export
from tests.fakes import group
from tests.tiny import save_tiny_model
from tests.unit.runtime.written_checkpoints import writing

SETTINGS = {"model": {"seed": 0}, "rows": "abc"}


def answered(name: str, rewards: list[float | None], tag: str = "a") -> Answered:
    votes = ["x" if reward else "y" for reward in rewards]
    count = len(rewards)
    return Answered(name, tag, rewards, {}, [4] * count, [False] * count, list(votes))


def test_a_line_that_was_not_finished_is_cut_off_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    answers = Answers(tmp_path, SETTINGS)
    answers.add(group("s:0", [1, 0]), {})
    answers.add(group("s:1", [1, 1]), {})
    file = tmp_path / SAMPLES
    whole = file.read_text()
    file.write_text(whole + '{"id": "s:2", "tag"')
    again = Answers(tmp_path, SETTINGS)
    assert again.by_id == answers.by_id
    assert file.read_text() == whole
    again.add(group("s:2", [0, 0]), {})
    assert list(Answers(tmp_path, SETTINGS).by_id) == ["s:0", "s:1", "s:2"]
    file.write_text("{}\n" + whole)
    with pytest.raises(ConfigError, match=r"samples.jsonl:1: holds no answers"):
        Answers(tmp_path, SETTINGS)


def test_a_text_that_is_no_valid_unicode_ends_no_evaluation(tmp_path: Path) -> None:
    """As an answer of a data set with half of a surrogate pair, which JSON can express."""
    given = group("s:0", [1])
    prompt = replace(given.prompt, answer=json.loads(r'"half \ud83d"'))
    Answers(tmp_path, SETTINGS).add(replace(given, prompt=prompt), {})
    assert json.loads((tmp_path / SAMPLES).read_bytes())["target"] == "half ?"
    assert list(Answers(tmp_path, SETTINGS).by_id) == ["s:0"]


def test_answers_with_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    Answers(tmp_path, SETTINGS)
    with pytest.raises(SettingsChangedError, match=r"rows: abc -> abd\n") as raised:
        Answers(tmp_path, {"model": {"seed": 0}, "rows": "abd"})
    assert "seed" not in str(raised.value)


def test_a_failed_reward_counts_neither_way_and_is_reported() -> None:
    some: list[float | None] = [1.0, None, 0.0, None]
    rewards: list[list[float | None]] = [some, [1.0, 1.0, 1.0, 1.0], []]
    rewards[2].extend([None] * 4)
    answers = [answered(f"s:{i}", one) for i, one in enumerate(rewards)]
    found = scores_of(answers, 4, 1.0)
    assert found.questions == 3
    assert found.by_name["mean@4"].value == pytest.approx((0.5 + 1) / 2)
    assert found.by_name["mean@4"].stderr == pytest.approx(0.25)
    assert found.by_name["pass@2"].value == pytest.approx(1)
    assert found.by_name["pass@4"].value == 1  # of the one question with four rewards
    assert found.by_name["pass@4"].stderr is None
    assert found.by_name["left_out"].value == pytest.approx((0.5 + 0 + 1) / 3)
    assert found.by_name["maj@4"].value == pytest.approx((0.5 + 1) / 2)  # 1 : 1, and all


def run_with_checkpoints(folder: Path, steps: list[int]) -> Path:
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(keep_last=9))
    for step in steps:
        with writing(checkpoints, RunState(step=step, sampler={})) as written:
            (written / "config.yaml").write_text(yaml.safe_dump({}))
    return folder


def test_models_are_folders_runs_and_names_on_the_hub(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = run_with_checkpoints(tmp_path / "run", [10, 20])
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text("{}")
    named = [str(base), "org/name", str(run)]
    assert [one.name for one in find_models(named, [], out)] == ["base", "org--name", "run-step20"]
    both = find_models(named, [20, 10], out)
    assert [one.name for one in both[2:]] == ["run-step20", "run-step10"]
    assert both[3].checkpoint == run / "checkpoints" / "step_000010"
    assert both[3].path == str(out / "run-step10" / "hf")
    with pytest.raises(ConfigError, match=r"no complete checkpoint of step \[30\] .*10, 20"):
        find_models([str(run)], [10, 30], out)
    with pytest.raises(ConfigError, match=r"none of .* is a run"):
        find_models([str(base)], [10], out)
    with pytest.raises(ConfigError, match="two of the models have the name 'base'"):
        find_models([str(base), str(base)], [], out)
    with pytest.raises(ConfigError, match="is no model"):
        find_models([str(tmp_path / "nothing")], [], out)


def test_exported_weights_of_a_run_are_taken_as_they_are(tmp_path: Path) -> None:
    run = run_with_checkpoints(tmp_path / "run", [10])
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    mark_export(run / "hf", 10)
    [one] = find_models([str(run)], [], tmp_path)
    assert (one.name, one.path, one.checkpoint) == ("run-step10", str(run / "hf"), None)
    make_folder(one, trust_remote_code=False)  # nothing to do
    run_with_checkpoints(run, [20])  # the run was extended, and has not exported again
    [one] = find_models([str(run)], [], tmp_path)
    assert (one.name, one.checkpoint) == ("run-step20", run / "checkpoints" / "step_000020")


def test_other_weights_of_one_size_have_another_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    weights = tmp_path / "model.safetensors"
    found = []
    for last in (b"a", b"b"):
        weights.write_bytes(bytes(5 << 20) + last)
        found.append(fingerprint(str(tmp_path)))
    assert found[0] != found[1]
    (tmp_path / "notes.md").write_text("not a part of the model")
    assert fingerprint(str(tmp_path)) == found[1]
    assert fingerprint("org/name") is None


def safetensors_file(values: list[bytes]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for number, value in enumerate(values):
        offsets = [at, at + len(value)]
        header[str(number)] = {"dtype": "U8", "shape": [len(value)], "data_offsets": offsets}
        at += len(value)
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told + b"".join(values)


def test_a_change_of_any_tensor_alone_changes_the_fingerprint(tmp_path: Path) -> None:
    frozen = bytes(2 << 20)
    weights = tmp_path / "model.safetensors"
    found = set()
    for middle in (b"aaaa", b"abaa", b"aaab"):
        weights.write_bytes(safetensors_file([frozen, middle, frozen, frozen, frozen]))
        found.add(fingerprint(str(tmp_path)))
    assert len(found) == 3


def test_weights_in_a_file_of_pytorch_are_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    found = set()
    for value in (0.0, 1.0):
        # frozen tensors lie at the begin, in the middle and at the end
        frozen = torch.zeros(1 << 20)
        tensors = {"a": frozen, "b": torch.tensor([value]), "c": frozen.clone()}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        found.add(fingerprint(str(tmp_path)))
    assert len(found) == 2


def test_a_written_model_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    def written(run: Path, weights: bytes) -> Path:
        checkpoint = run_with_checkpoints(run, [10]) / "checkpoints" / "step_000010"
        (checkpoint / "actor_train").mkdir()
        (checkpoint / "actor_train" / "rank_0.safetensors").write_bytes(weights)
        return checkpoint

    def make(run: Path) -> None:
        [model] = find_models([str(run)], [10], out)
        assert model.checkpoint is not None
        target = Path(model.path)
        if begins_folder(model.checkpoint, target):
            target.mkdir()
            weights = (model.checkpoint / "actor_train" / "rank_0.safetensors").read_bytes()
            (target / "weights").write_bytes(weights)

    run, other, out = tmp_path / "run", tmp_path / "other" / "run", tmp_path / "out"
    first = written(run, b"first")
    make(run)
    make(run)  # an earlier session has written it
    assert (out / "run-step10" / "hf" / "weights").read_bytes() == b"first"

    shutil.rmtree(first)
    written(run, b"other")  # trained anew under the same name
    with pytest.raises(SettingsChangedError, match="an earlier state of it"):
        make(run)
    written(other, b"third")
    with pytest.raises(SettingsChangedError, match=f"was written from {first}"):
        make(other)

    (out / "run-step10" / "checkpoint.json").unlink()
    with pytest.raises(SettingsChangedError, match="not known"):
        make(run)
    shutil.rmtree(out / "run-step10")
    make(run)
    assert (out / "run-step10" / "hf" / "weights").read_bytes() == b"other"


def test_answers_of_another_rotation_or_other_arguments_of_the_engine_are_refused(
    tmp_path: Path,
) -> None:
    path = save_tiny_model(tmp_path / "model")

    def settings(*overrides: str) -> dict[str, Any]:
        engine = {"pool": "all", "strategy": {"kind": "vllm"}}
        told = {"model": {"path": str(path)}, "pools": {"all": "0"}, "actor_infer": engine}
        return {"model": _settings_of(load_serving(told, overrides))}

    plain = settings()
    assert {"overrides", "engine_args"}.isdisjoint(plain["model"])
    Answers(tmp_path / "out", plain)
    for changed in (
        "model.overrides={max_position_embeddings: 64}",
        "actor_infer.strategy.engine_args={kv_cache_dtype: fp8}",
    ):
        with pytest.raises(SettingsChangedError, match=r"model\.(overrides|engine_args)"):
            Answers(tmp_path / "out", settings(changed))
