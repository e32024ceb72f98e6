"""Models, tokenizers, data and YAML from strangers run no code.

Checkpoints of runs: tests/contract/test_hostile_checkpoints.py. Files of `mcore-adapter`:
tests/convert/test_hostile_trainer_files.py. Messages of weight transfers: test_weight_ipc.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from roll.commands.merge import merge
from roll.config import load_config
from roll.config.sections.data import DataConfig, SourceConfig
from roll.config.sections.model import ModelConfig
from roll.core.errors import CheckpointError, ConfigError, DataError, RollError
from roll.data.chat.templates import render_prompt
from roll.data.columns import PromptRow, RawRow
from roll.data.sources import check_source, map_any, read_source
from roll.models.load import load_causal_lm, load_tokenizer
from roll.models.load import load_config as load_model_config
from roll.output_dir.checkpoints import load_state
from roll.output_dir.config_diff import changed_keys
from roll.output_dir.lock_owner import read_owner
from roll.output_dir.resume import exported_step
from roll.output_dir.summary import read_summary
from roll.output_dir.trackers import read_records
from tests.hostile import assert_works, pickled, torch_saved
from tests.runs import ROOT, write_task
from tests.tiny import char_tokenizer, save_tiny_model

PACKAGES = (ROOT / "roll", ROOT / "mcore_adapter" / "src")
UNPICKLES = {
    # From a process that this one started, over a pair of sockets that nobody else holds.
    "roll/rewards/execution/child.py",
    "roll/rewards/execution/child_main.py",
    "roll/strategy/sglang/messages.py",
    # What it has pickled itself, on the line before, or in a file without a name.
    "roll/data/spool.py",
    "roll/rewards/contract.py",
    "roll/distributed/on_ray/bundle_host.py",
    # What a worker of the same run has left in Ray's object store, which Ray itself unpickles.
    "roll/distributed/remote_values.py",
    # Reads texts, numbers and containers only.
    "roll/rewards/code/rows/packing.py",
    # Runs a program where it can do no harm, and evaluates tests and codecs of its judge.
    "roll/sandbox/worker/inside/program.py",
    "roll/sandbox/remote/dialects.py",
    "roll/envs/built_in/code/fix_code.py",
    "roll/rewards/code/asserts.py",
    "roll/rewards/code/calls.py",
    "roll/rewards/code/checker.py",
    "roll/rewards/code/stand_ins.py",
    "roll/rewards/code/values.py",
}


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """The file that hostile code would make; it must not be there at the end."""
    path = tmp_path / "mark"
    assert_works(path)
    yield path
    assert not path.exists(), "code of the file was run"


def test_only_messages_between_a_run_s_own_processes_are_unpickled() -> None:
    wanted = re.compile(
        r"\b(?:pickle|cloudpickle|dill|joblib|marshal|shelve)\.(?:loads?|Unpickler|open)\b"
        r"|torch\.load\(|np\.load\(|read_pickle|weights_only\s*=\s*False|allow_pickle\s*=\s*True"
        r"|\beval\(\s*[\"'\w]|\bexec\(|yaml\.(?:unsafe_load|full_load|load)\("
    )
    found = set()
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            text = path.read_text(encoding="utf-8").replace(".eval(", ".")
            if wanted.search(text):
                found.add(str(path.relative_to(ROOT)))
    assert found == UNPICKLES


def test_a_model_s_pickled_weights_run_no_code(tmp_path: Path, mark: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for how in ("pickle", "torch"):
        if how == "pickle":
            (folder / "pytorch_model.bin").write_bytes(pickled(mark))
        else:
            torch_saved(mark, folder / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
            load_causal_lm(ModelConfig(path=str(folder)))


def test_code_beside_a_model_is_run_only_where_the_run_file_says_so(
    tmp_path: Path, mark: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    (folder / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: pass\n"
    )
    config = json.loads((folder / "config.json").read_text())
    names = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    config |= {"auto_map": names, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    tokenizer |= {"tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    model = ModelConfig(path=str(folder))
    for load in (load_causal_lm, load_model_config):
        with pytest.raises(ConfigError, match=r"model\.trust_remote_code"):
            load(model)
    with suppress(ConfigError):  # transformers may know a tokenizer of its own for the files
        load_tokenizer(model)


def test_a_chat_template_runs_in_a_sandbox(mark: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == 'Popen' %}"
        "{{ c(['touch', '" + str(mark) + "']) }}{% endif %}{% endfor %}"
    )
    source = SourceConfig(path="x.jsonl")
    row = map_any(RawRow("row", {"prompt": "p", "answer": "a"}), source)
    assert isinstance(row, PromptRow)
    data = DataConfig(
        sources=(source,), prompts_per_step=1, samples_per_prompt=1, max_prompt_tokens=8
    )
    with pytest.raises(DataError, match="template"):
        render_prompt(row, tokenizer, data, None)


def test_tags_and_resolvers_of_yaml_run_no_code(tmp_path: Path, mark: Path) -> None:
    path = write_task(tmp_path / "task")
    good = path.read_text()
    for line in (
        f"seed: !!python/object/apply:os.system ['touch {mark}']",
        f"seed: !!python/object/new:os.system ['touch {mark}']",
        f"output_dir: ${{oc.eval:\"__import__('os').system('touch {mark}')\"}}",
        f"output_dir: ${{eval:\"__import__('os').system('touch {mark}')\"}}",
    ):
        path.write_text(re.sub(r"^output_dir:.*$", "", good, flags=re.M) + f"\n{line}\n")
        with pytest.raises(ConfigError):
            load_config(path, [])
    path.write_text(good)
    for override in (
        f"seed=!!python/object/apply:os.system ['touch {mark}']",
        "seed=${oc.eval:1}",
    ):
        with pytest.raises(ConfigError):
            load_config(path, [override])


def test_a_dataset_s_loading_script_is_not_run(tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "org" / "evil"
    folder.mkdir(parents=True)
    script = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\n"
    (folder / "evil.py").write_text(script)
    (folder / "train.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
    with pytest.raises(RollError):
        read_source(SourceConfig(path=str(folder)), map_any)
    # As a hub dataset of that name would be found: in the folder where the run starts.
    code = (
        "from roll.config.sections.data import SourceConfig\n"
        "from roll.core.errors import RollError\n"
        "from roll.data.sources import map_any, read_source\n"
        "try: print(len(read_source(SourceConfig(path='org/evil', format='hub'), map_any)))\n"
        "except RollError as error: print(type(error).__name__)\n"
    )
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(command, cwd=tmp_path, env=env, check=True, timeout=100)


def test_files_of_a_saved_dataset_are_not_unpickled(tmp_path: Path, mark: Path) -> None:
    import datasets

    good = tmp_path / "good"
    datasets.Dataset.from_list([{"prompt": "p", "answer": "a"}]).save_to_disk(str(good))
    assert len(read_source(SourceConfig(path=str(good)), map_any)) == 1
    for file in sorted(p for p in good.iterdir() if p.is_file()):
        before = file.read_bytes()
        file.write_bytes(pickled(mark))
        with pytest.raises(DataError):
            read_source(SourceConfig(path=str(good)), map_any)
        file.write_bytes(before)


def test_a_pickled_type_in_a_parquet_file_stays_a_pickle(tmp_path: Path, mark: Path) -> None:
    names = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    field = pa.field(
        "prompt", pa.string(), metadata=names | {b"ARROW:extension:metadata": pickled(mark)}
    )
    schema = pa.schema([field, pa.field("answer", pa.string())])
    table = pa.table({"prompt": ["p"], "answer": ["a"]}, schema=schema)
    path = tmp_path / "rows.parquet"
    pq.write_table(table, path)
    source = SourceConfig(path=str(path))
    check_source(source)
    assert len(read_source(source, map_any)) == 1


def test_rows_of_every_format_are_not_unpickled(tmp_path: Path, mark: Path) -> None:
    for form in ("jsonl", "json", "csv", "parquet"):
        path = tmp_path / f"rows.{form}"
        path.write_bytes(pickled(mark))
        with pytest.raises(DataError):
            read_source(SourceConfig(path=str(path)), map_any)


def test_the_driver_s_state_is_json(tmp_path: Path, mark: Path) -> None:
    (tmp_path / "state.json").write_bytes(pickled(mark))
    with pytest.raises(RollError):
        load_state(tmp_path)


def test_a_checkpoint_s_own_config_cannot_allow_code(tmp_path: Path, mark: Path) -> None:
    path = write_task(tmp_path / "task")
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    model = f"model: {{path: {tmp_path / 'task' / 'model'}, trust_remote_code: true}}"
    text = re.sub(r"^model:\n  path: .*$", model, path.read_text(), flags=re.M)
    (checkpoint / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match="--trust-remote-code"):
        merge(checkpoint, tmp_path / "merged")


def test_the_settings_in_a_checkpoint_run_no_code(tmp_path: Path, mark: Path) -> None:
    config = load_config(write_task(tmp_path / "task"), []).config
    checkpoint = tmp_path / "step_000002"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    file = checkpoint / "config.yaml"
    for content in (
        f"seed: !!python/object/apply:os.system ['touch {mark}']\n".encode(),
        f"seed: !!python/object/new:os.system ['touch {mark}']\n".encode(),
        pickled(mark),
        b"- no mapping\n",
    ):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.yaml should hold the settings"):
            changed_keys(checkpoint, config)
        with pytest.raises(ConfigError):
            merge(checkpoint, tmp_path / "merged")


def test_what_lies_in_an_output_folder_is_not_unpickled(tmp_path: Path, mark: Path) -> None:
    (tmp_path / "hf").mkdir()
    for name, read in (
        ("hf/roll.json", lambda: exported_step(tmp_path)),
        ("summary.json", lambda: read_summary(tmp_path)),
        ("metrics.jsonl", lambda: read_records(tmp_path / "metrics.jsonl")),
        ("run.lock", lambda: read_owner(tmp_path / "run.lock")),
    ):
        (tmp_path / name).write_bytes(pickled(mark))
        with suppress(ValueError):
            assert not read(), name
