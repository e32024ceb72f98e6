"""The trainer trains adapters as LoRA by hand does, keeps nothing else, and goes on with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mcore_adapter.errors import ConfigError
from mcore_adapter.train.settings import Settings
from tests.convert.lora_by_hand import ALPHA, RANK, adapted, load_adapter_into
from tests.convert.spawned import run_ranks
from tests.convert.test_trainer_losses import assert_steps
from tests.convert.test_trainer_resume import same_in_both, stop_in_third_step
from tests.convert.trainer_runs import (
    EXAMPLES,
    STEPS,
    chat_rows,
    hf_model,
    likelihood_by_hand,
    logprobs_by_hand,
    pair_rows,
    preference_by_hand,
    run_all,
    sequences_by_hand,
    settings,
    steps_of,
    train_by_hand,
    trainable,
    write_rows,
)

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj")
LORA = {"rank": RANK, "alpha": ALPHA, "targets": list(TARGETS)}
FACTORS = "adapter_model.safetensors"


def save_start(run: Settings, folder: Path) -> None:
    """The adapter that a run starts with."""
    from mcore_adapter.lora_io import write_adapter
    from mcore_adapter.train.policy import load_policy
    from mcore_adapter.train.processes import joined

    with joined(run.layout.sizes, run.seed) as device:
        policy = load_policy(run, device)
        assert policy.adapter is not None
        write_adapter(folder, run.model, policy.chunks, policy.adapter, policy.sizes)


def model_with(folder: Path, adapter: Path) -> tuple[Any, dict[str, Any]]:
    model, factors = adapted(folder, TARGETS)
    load_adapter_into(factors, adapter)
    return model, factors


@pytest.mark.slow
def test_adapters_are_trained_as_by_hand_in_every_layout(tmp_path: Path) -> None:
    chats, pairs = chat_rows(EXAMPLES * STEPS), pair_rows(EXAMPLES * STEPS)
    chat_data = write_rows(tmp_path / "chats.jsonl", chats)
    pair_data = write_rows(tmp_path / "pairs.jsonl", pairs)
    model, begin = trainable(tmp_path, "qwen3_tied"), tmp_path / "begin"
    dpo: dict[str, Any] = {"method": "dpo", "dpo": {"beta": 0.5, "label_smoothing": 0.1}}
    runs = [
        settings(model, chat_data, tmp_path / "0", lora=LORA),
        settings(model, chat_data, tmp_path / "1", lora=LORA, layout={"tp": 2}),
        settings(
            model,
            chat_data,
            tmp_path / "2",
            lora=LORA,
            layout={"pp": 2, "distributed_optimizer": True, "recompute": "full"},
        ),
        settings(model, pair_data, tmp_path / "3", lora=LORA, **dpo),
        settings(model, pair_data, tmp_path / "4", lora=LORA, **dpo, layout={"tp": 2}),
    ]
    run_ranks(save_start, 1, runs[0], begin)
    run_ranks(run_all, 2, runs)
    preference = preference_by_hand(0.5, 0.1, hf_model(model))
    for rows, loss, same in (
        (chats, likelihood_by_hand, runs[:3]),
        (pairs, preference, runs[3:]),
    ):
        by_hand, factors = model_with(model, begin)
        expected, after = train_by_hand(model, rows, loss, by_hand)
        for run in same:
            assert_steps(run, expected)
            trained, found = model_with(model, run.output / "adapter")
            with torch.no_grad():
                assert loss(trained, rows).item() == pytest.approx(after, abs=1e-5), run
            moved = max(float((found[n] - factors[n]).detach().abs().max()) for n in factors)
            assert moved < 2e-5, run
            assert not (run.output / "model").exists()


def go_on(run: Settings, others: list[Settings]) -> list[str]:
    """After a stop in the third step: what other settings are told, then to the end."""
    from mcore_adapter.train.setup import train

    assert not stop_in_third_step(run)
    said = []
    for other in others:
        with pytest.raises(ConfigError) as caught:
            train(other)
        said.append(str(caught.value))
    run_all([run.model_copy(update={"resume": "auto"})])
    return said


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"distributed_optimizer": True}])
def test_a_run_that_goes_on_is_the_same_to_the_bit_and_kept_the_adapter_alone(
    layout: dict[str, Any], tmp_path: Path
) -> None:
    model = trainable(tmp_path, "qwen3_moe")
    data = write_rows(tmp_path / "rows.jsonl", chat_rows(10))
    lora = {"rank": RANK, "alpha": ALPHA, "dropout": 0.2}
    how: dict[str, Any] = {"layout": layout, "dtype": "bf16", "steps": 5, "save_every": 2}
    through = settings(model, data, tmp_path / "through", lora=lora, **how)
    stopped = settings(model, data, tmp_path / "stopped", lora=lora, **how)
    other = settings(
        model, data, tmp_path / "stopped", lora={**lora, "alpha": 1.0}, **how, resume="auto"
    )
    run_ranks(run_all, 2, [through])
    for (said,) in run_ranks(go_on, 2, stopped, [other]):
        assert "is of a run with lora" in said
    assert same_in_both(stopped) == same_in_both(through)
    assert len(steps_of(through)) == 5
    ends = [load_file(run.output / "adapter" / FACTORS) for run in (through, stopped)]
    assert ends[0].keys() == ends[1].keys()
    assert all(ends[0][key].equal(ends[1][key]) for key in ends[0])
    newest = max((stopped.output / "checkpoints").iterdir())
    index = json.loads((newest / "index.json").read_text())
    names = {key.split("#")[0] for key in index["tensors"]}
    assert names
    assert all("self_attention" in name and ".lora_" in name for name in names)
    assert {key.split("#")[1] for key in index["tensors"]} == {"weight", "exp_avg", "exp_avg_sq"}


def test_settings_of_an_adapter_that_make_no_sense_are_named(tmp_path: Path) -> None:
    for lora, said in (
        ({"dropout": 1.0}, "lora.dropout is 1.0"),
        ({"targets": []}, "lora.targets is empty"),
    ):
        with pytest.raises(ValueError, match=said):
            settings(tmp_path, tmp_path, tmp_path, lora=lora)


def references_of(run: Settings) -> Any:
    """Of an adapter that is no longer zero."""
    from mcore_adapter.train.data import dataset
    from mcore_adapter.train.policy import load_policy
    from mcore_adapter.train.processes import joined
    from mcore_adapter.train.references import references

    with joined(run.layout.sizes, run.seed) as device:
        policy, data = load_policy(run, device), run.output / "tokens"
        for name, parameter in policy.chunks[0].named_parameters():
            if "lora_B" in name:
                parameter.data.fill_(0.1)
        dataset.prepare(run.data.train, data, run)
        pairs = dataset.read(data, "pairs", run.sequences_per_example)
        return references(policy, pairs, range(len(pairs)), run.output / "references", 4)


def test_the_reference_of_preferences_is_the_model_without_adapter(tmp_path: Path) -> None:
    rows = pair_rows(EXAMPLES)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    model = trainable(tmp_path, "qwen3_tied")
    run = settings(model, data, tmp_path / "out", "dpo", lora=LORA)
    (found_S,) = run_ranks(references_of, 1, run)
    frozen = hf_model(model)
    with torch.no_grad():
        sequences = [sequence for row in rows for sequence in sequences_by_hand(row)]
        expected_S = torch.stack([logprobs_by_hand(frozen, each).sum() for each in sequences])
    torch.testing.assert_close(found_S, expected_S, atol=1e-5, rtol=0)
