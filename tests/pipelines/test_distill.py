"""Distillation end to end, on texts at hand and on samples of the student's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from roll.core.errors import ConfigError, DataError
from tests.runs import run_local, without_times, write_rows_task, write_task
from tests.tiny import ALPHABET, SPECIAL, char_tokenizer, save_tiny_model

TEXTS = [{"prompt": f"{i}+{i}=", "completion": str(2 * i) * 3} for i in range(24)]
COLUMNS = {"messages": None, "prompt": "prompt", "completion": "completion"}


def task(folder: Path, rows: list[Any] = TEXTS, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_model(folder / "teacher", seed=7)
    teacher = {"pool": "all", "model": {"path": str(folder / "teacher")}}
    settings: dict[str, Any] = {
        "teachers": {"t": teacher},
        "columns": COLUMNS,
        "actor_train": {"pool": "all", "optimizer": {"lr": 3e-3}},
        **changes,
    }
    halves = {"train": rows[:-8], "held_out": rows[-8:]}
    return write_rows_task(folder, "distill", halves, **settings)


@pytest.mark.parametrize("loss", [{}, {"top_k": 4, "divergence": {"kind": "reverse"}}])
def test_a_student_comes_to_expect_what_its_teacher_expects(
    tmp_path: Path, loss: dict[str, Any]
) -> None:
    path = task(tmp_path, max_steps=40, loss=loss)
    records = run_local(path)
    first, last = records[0], records[-1]
    assert first["loss/total"] == pytest.approx(first["divergence"], rel=1e-6)
    assert last["val/held_out/divergence"] < 0.3 * first["val/held_out/divergence"]


def test_a_student_that_is_its_teacher_has_nothing_to_learn(tmp_path: Path) -> None:
    path = task(tmp_path)
    same = [f"teachers.t.model.path={tmp_path / 'model'}", "actor_train.optimizer.lr=1e-30"]
    records = run_local(path, same)
    assert all(abs(record["divergence"]) < 1e-6 for record in records[:-1])
    assert all(record["grad_norm"] < 1e-5 for record in records[:-1])


def test_each_row_has_the_teacher_of_its_tag_and_the_text_counts_too(tmp_path: Path) -> None:
    rows = [{**row, "who": "ab"[i % 2]} for i, row in enumerate(TEXTS)]
    path = task(tmp_path, rows, columns={**COLUMNS, "tag": "who"}, loss={"sft_coef": 0.5})
    save_tiny_model(tmp_path / "other", seed=8)
    two = [
        "teachers.t.tags=[a]",
        f"teachers.u={{pool: all, tags: [b], model: {{path: '{tmp_path / 'other'}'}}}}",
    ]
    first = run_local(path, two)[0]
    assert first["loss/total"] == pytest.approx(first["loss/distill"] + first["loss/sft"])
    assert first["loss/sft"] == pytest.approx(0.5 * first["nll"])
    with pytest.raises(DataError, match="tag 'b', which no teacher takes"):
        run_local(path, ["teachers.t.tags=[a]", "resume=never"])


def test_a_teacher_of_two_workers_teaches_what_one_teaches(tmp_path: Path) -> None:
    one = run_local(task(tmp_path / "one"), ["max_steps=1"])
    both = ["max_steps=1", "pools.pair=0-1", "teachers.t.pool=pair"]
    two = run_local(task(tmp_path / "two"), both)
    assert two[0]["loss/total"] == pytest.approx(one[0]["loss/total"], rel=1e-6)


@pytest.mark.parametrize("kind", ["forward", "uld"])
def test_megatron_teaches_and_learns_what_other_backends_do(tmp_path: Path, kind: str) -> None:
    found = []
    for backend in ("fsdp2", "megatron"):
        loss = {"divergence": {"kind": kind}, "sft_coef": 0.5}
        path = task(tmp_path / backend, max_steps=2, loss=loss)
        if kind == "uld":
            other_tokens(tmp_path / backend / "teacher")
        strategy = f"strategy={{kind: {backend}}}"
        found.append(run_local(path, [f"actor_train.{strategy}", f"teachers.t.{strategy}"]))
    for ours, theirs in zip(*found, strict=True):
        for name in ("loss/total", "divergence", "nll", "val/held_out/divergence", "grad_norm"):
            assert ours.get(name) == pytest.approx(theirs.get(name), rel=1e-4), name
    assert "divergence" in found[0][0]


def test_two_halves_are_the_whole(tmp_path: Path) -> None:
    whole = run_local(task(tmp_path / "whole"))
    halves = task(tmp_path / "halves")
    run_local(halves, ["max_steps=2"])
    resumed = run_local(halves)
    assert list(map(without_times, resumed)) == list(map(without_times, whole))


def test_a_teacher_with_other_tokens_is_refused_with_the_first_difference(tmp_path: Path) -> None:
    path = task(tmp_path)
    file = tmp_path / "teacher" / "tokenizer.json"
    file.write_text(file.read_text().replace('"7": 11', '"7": 12').replace('"8": 12', '"8": 11'))
    with pytest.raises(ConfigError, match="its token 11 is '8', the trained model's is '7'"):
        run_local(path)


def other_tokens(folder: Path) -> None:
    """Give a model other ids, and tokens of two digits; and opinions, because the probabilities of
    two undecided models, once sorted, are much the same."""
    model = Qwen3ForCausalLM.from_pretrained(folder)
    model.lm_head.weight.data *= 4
    model.save_pretrained(folder)
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *reversed(ALPHABET)])}
    merges = [("1", "2"), ("2", "4"), ("4", "4")]
    for piece, pair in zip("$|_", merges, strict=True):  # the model has no more logits
        vocab["".join(pair)] = vocab.pop(piece)
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>", unk_token="<pad>",
        additional_special_tokens=SPECIAL[2:], chat_template=char_tokenizer().chat_template,
    )  # fmt: skip
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_teacher_with_other_tokens_teaches_by_sorted_probabilities(
    tmp_path: Path, top_k: int | None
) -> None:
    path = task(tmp_path, max_steps=30, loss={"top_k": top_k, "divergence": {"kind": "uld"}})
    other_tokens(tmp_path / "teacher")
    records = run_local(path)
    first, last = records[0], records[-1]
    assert last["val/held_out/divergence"] < 0.5 * first["val/held_out/divergence"]
    with pytest.raises(ConfigError, match=r"or, for a distill loss, `divergence: \{kind: uld\}`"):
        run_local(path, ["loss.divergence={kind: forward}", "resume=never"])


def test_a_policy_learns_from_a_teacher_with_other_tokens(tmp_path: Path) -> None:
    torch.manual_seed(0)
    other_tokens(save_tiny_model(tmp_path / "teacher", seed=7))
    path = write_task(
        tmp_path,
        teachers={"t": {"pool": "all", "model": {"path": str(tmp_path / "teacher")}}},
        reference=None,
        rewards={},
        validation={},
        algorithm={"loss": [{"kind": "distill", "divergence": {"kind": "uld"}}]},
        actor_train={"pool": "all", "optimizer": {"lr": 2e-3}},
    )
    apart = [r["distill/divergence"] for r in run_local(path, ["max_steps=40"]) if "lr" in r]
    assert sum(apart[-10:]) < 0.7 * sum(apart[:10]), apart


def test_too_many_likeliest_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss\.top_k: 65 of 65 tokens are all of them"):
        run_local(task(tmp_path), ["loss.top_k=65"])


@pytest.mark.parametrize(("top_k", "backend"), [(None, "fsdp2"), (4, "megatron")])
def test_a_student_learns_from_its_own_samples(
    tmp_path: Path, top_k: int | None, backend: str
) -> None:
    torch.manual_seed(0)
    save_tiny_model(tmp_path / "teacher", seed=7)
    strategy, model = {"kind": backend}, {"path": str(tmp_path / "teacher")}
    path = write_task(
        tmp_path,
        teachers={"t": {"pool": "all", "model": model, "strategy": strategy}},
        reference=None,
        rewards={},
        validation={},
        algorithm={"loss": [{"kind": "distill", "top_k": top_k}]},
        actor_train={"pool": "all", "optimizer": {"lr": 2e-3}, "strategy": strategy},
    )
    apart = [r["distill/divergence"] for r in run_local(path, ["max_steps=25"]) if "lr" in r]
    assert sum(apart[-3:]) < 0.5 * sum(apart[:3]), apart
    first = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss/total"] == pytest.approx(first["distill/divergence"], rel=1e-5)


def test_a_critic_and_a_teacher_go_together(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "teacher", seed=7)
    path = write_task(
        tmp_path,
        teachers={"t": {"pool": "all", "model": {"path": str(tmp_path / "teacher")}}},
        critic={"pool": "all"},
        reference=None,
        algorithm={
            "advantage": {"kind": "gae"},
            "loss": [{"kind": "ppo_clip"}, {"kind": "distill", "coef": 0.5}],
        },
    )
    first = run_local(path, ["max_steps=2"])[0]
    assert first["loss/distill"] == pytest.approx(0.5 * first["distill/divergence"], rel=1e-5)
    assert first["critic/loss/total"] > 0
