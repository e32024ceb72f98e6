"""No file that `mcore-adapter` is given, to convert or to train, runs code; and who reaches it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mcore_adapter.checkpoint_reader import INDEX, Saved
from mcore_adapter.convert import commands
from mcore_adapter.errors import ConfigError, ConversionError, DataError, McoreAdapterError
from mcore_adapter.load import read_config
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from mcore_adapter.train.data import dataset
from mcore_adapter.train.processes import stay_on_loopback
from mcore_adapter.train.settings import read_settings
from tests.convert.tiny_checkpoints import ALONE, by_transformers
from tests.convert.trainer_runs import chat_rows, settings, tokenizer, write_rows
from tests.hostile import assert_works, pickled, torch_saved


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[Path]:
    """The file that hostile code would make; it must not be there at the end."""
    path = tmp_path / "mark"
    assert_works(path)
    yield path
    assert not path.exists(), "code of the file was run"


def assert_each_is_refused(
    folder: Path, mark: Path, load: Callable[[], object], optional: tuple[str, ...] = ()
) -> None:
    """With each file of the folder replaced in turn, but for those that are only copied."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in optional)
    assert files
    for file in files:
        before = file.read_bytes()
        for how in ("pickle", "torch"):
            if how == "pickle":
                file.write_bytes(pickled(mark))
            else:
                torch_saved(mark, file)
            with pytest.raises(McoreAdapterError):
                load()
            assert not mark.exists(), file
        file.write_bytes(before)


def test_checkpoints_to_convert_are_not_unpickled(tmp_path: Path, mark: Path) -> None:
    hf, mcore = by_transformers(tmp_path / "hf", "llama"), tmp_path / "mcore"
    out = tmp_path / "out"

    def to_mcore() -> None:
        shutil.rmtree(out, ignore_errors=True)
        commands.to_mcore(hf, out, ParallelSizes(tp=2), ALONE)

    def to_hf() -> None:
        shutil.rmtree(out, ignore_errors=True)
        commands.to_hf(mcore, out, ALONE)

    copied = ("generation_config.json",)
    assert_each_is_refused(hf, mark, to_mcore, copied)
    commands.to_mcore(hf, mcore, ParallelSizes(tp=2), ALONE)
    assert_each_is_refused(mcore, mark, to_hf, copied)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """As the trainer writes it, of one tensor."""
    folder = tmp_path / "step-00000001"
    folder.mkdir()
    save_file({"a#weight#0": torch.zeros(6)}, folder / "rank00000.safetensors")
    index = {
        "sizes": asdict(ParallelSizes()),
        "step": 1,
        "tensors": {"a#weight#0": {"shape": [2, 3], "parts": [0]}},
        "extra": {"step": 1},
    }
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_the_trainer_s_checkpoints_are_not_unpickled(
    checkpoint: Path, tmp_path: Path, mark: Path
) -> None:
    table = table_of(read_config(by_transformers(tmp_path / "hf", "llama")))
    assert Saved(checkpoint, table).extra == {"step": 1}
    assert_each_is_refused(checkpoint, mark, lambda: Saved(checkpoint, table))


@pytest.mark.parametrize(
    "change",
    [
        {"tensors": []},
        {"tensors": {"a#weight#0": {"shape": [2, 3]}}},
        {"tensors": {"a#weight#0": {"shape": [2, 3], "parts": ["/../../../etc/passwd"]}}},
        {"tensors": {"a#weight#0": {"shape": [2, 3], "parts": [True]}}},
        {"tensors": {"a#weight#0": {"shape": [-2, -3], "parts": [0]}}},
        {"tensors": {"a#weight#0": {"shape": "23", "parts": [0]}}},
        {"sizes": {"tp": "2", "layers": None}},
        {"sizes": {"tp": 0, "layers": None}},
        {"sizes": asdict(ParallelSizes()) | {"tp": 2.0}},
        {"sizes": asdict(ParallelSizes()) | {"layers": [1.0]}},
        {"sizes": None},
        {"step": "1"},
        {"extra": 7},
    ],
)
def test_a_damaged_index_is_named(checkpoint: Path, tmp_path: Path, change: Any) -> None:
    table = table_of(read_config(by_transformers(tmp_path / "hf", "llama")))
    path = checkpoint / INDEX
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConversionError, match=r"index\.json is damaged"):
        Saved(checkpoint, table)


def test_settings_of_the_trainer_run_no_code(tmp_path: Path, mark: Path) -> None:
    path = tmp_path / "train.yaml"
    for text in (
        f"seed: !!python/object/apply:os.system ['touch {mark}']",
        f"seed: !!python/object/new:os.system ['touch {mark}']",
        f"model: ${{oc.eval:\"__import__('os').system('touch {mark}')\"}}",
        f"model: ${{eval:\"__import__('os').system('touch {mark}')\"}}",
    ):
        path.write_text(text + "\n")
        with pytest.raises(ConfigError):
            read_settings(path)
    path.write_text("seed: 1\n")
    for override in (f"seed=!!python/object/apply:os.system ['touch {mark}']", "seed=${oc.eval:1}"):
        with pytest.raises(ConfigError):
            read_settings(path, [override])
    path.write_bytes(pickled(mark))
    with pytest.raises(ConfigError):
        read_settings(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """All of a model that data needs."""
    folder = tmp_path / "model"
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 67}))
    return folder


def test_rows_and_what_was_made_of_them_are_not_unpickled(
    model: Path, tmp_path: Path, mark: Path
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", chat_rows(3))
    run, target = settings(model, rows, tmp_path / "out"), tmp_path / "tokens.safetensors"
    dataset.prepare(rows, target, run)
    assert len(dataset.read(target, "name", 1)) == 3
    for how in ("pickle", "torch"):
        for file in (target, rows):
            if how == "pickle":
                file.write_bytes(pickled(mark))
            else:
                torch_saved(mark, file)
        with pytest.raises(DataError, match="is damaged"):
            dataset.read(target, "name", 1)
        with pytest.raises(DataError, match=r"rows\.jsonl:1: no JSON"):
            dataset.prepare(rows, tmp_path / how, run)


def test_code_beside_a_tokenizer_is_not_run(model: Path, tmp_path: Path, mark: Path) -> None:
    (model / "evil.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: pass\n"
    )
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    config |= {"tokenizer_class": "Evil"}
    file.write_text(json.dumps(config))
    (model / "config.json").write_text(
        json.dumps(
            {"vocab_size": 67, "model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
        )
    )
    rows = write_rows(tmp_path / "rows.jsonl", chat_rows(3))
    with pytest.raises(ConfigError, match="no tokenizer that can be used"):
        dataset.prepare(rows, tmp_path / "tokens", settings(model, rows, tmp_path / "out"))


def test_a_trainer_without_other_ranks_listens_on_the_loopback_interface() -> None:
    environ: dict[str, str] = {}
    stay_on_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environ = {"GLOO_SOCKET_IFNAME": "eth7"}
    stay_on_loopback(environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "lo"}
