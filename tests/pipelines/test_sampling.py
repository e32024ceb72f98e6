"""Settings of sampling from the run file to what is trained and what rewards read."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from roll.core.errors import ConfigError
from tests.runs import run_local, write_task
from tests.tiny import ALPHABET, SPECIAL

DIGITS = [len(SPECIAL) + ALPHABET.index(digit) for digit in "0123456789"]


def test_a_stop_token_is_trained_and_read_by_rewards_as_the_last_of_its_response(
    tmp_path: Path,
) -> None:
    run = ["max_steps=2", "track.samples=all"]
    path = write_task(tmp_path)
    records = run_local(path, [*run, f"sampling.stop_token_ids={DIGITS}"])
    for record in records[:-1]:
        assert record["mismatch/logprob_abs_max"] < 1e-5
    kept = pd.read_parquet(tmp_path / "out" / "samples" / "train")
    stopped = kept[kept["finish_reason"] == "stop"]
    assert len(stopped) > len(kept) / 2
    for ids, text, logprobs in zip(
        stopped["response_ids"], stopped["response"], stopped["logprobs"], strict=True
    ):
        assert not set(ids[:-1]) & {*DIGITS, 1}
        assert ids[-1] in {*DIGITS, 1}
        assert text.endswith(tuple("0123456789")) or ids[-1] == 1
        assert len(ids) == len(logprobs)
    with pytest.raises(ConfigError, match=r"sampling\.stop_token_ids: there is no token 6500"):
        run_local(path, [*run, "sampling.stop_token_ids=[6500]", "resume=never"])


def test_rewards_read_a_text_without_its_stop_string_while_its_token_is_trained(
    tmp_path: Path,
) -> None:
    stops = "[" + ",".join(f"'{digit}'" for digit in "0123456789") + "]"
    run = ["max_steps=2", "track.samples=all", f"sampling.stop={stops}"]
    records = run_local(write_task(tmp_path), [*run, "sampling.stop_in_text=false"])
    assert all(record["reward/digits/mean"] == 0 for record in records[:-1])
    assert all(record["mismatch/logprob_abs_max"] < 1e-5 for record in records[:-1])
    kept = pd.read_parquet(tmp_path / "out" / "samples")
    assert not kept["response"].str.contains(r"\d").any()
    ends = [ids[-1] for ids in kept["response_ids"]]
    assert sum(end in DIGITS for end in ends) > len(kept) / 2
