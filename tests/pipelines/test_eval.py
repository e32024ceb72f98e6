"""`roll eval` on a real engine, from the command line: its figures against a count of the responses
that it leaves, and what happens when it is killed and started again."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples.sorting import make_model
from tests.runs import ROOT

ROWS, SAMPLES = 200, 6


def write_set(folder: Path) -> Path:
    """Write a model of digits with random weights, and a set that it answers right now and then:
    the answer is one digit, and so is the response."""
    torch.manual_seed(0)
    make_model(folder / "model")
    rows = [{"prompt": str(i), "answer": str(i % 10)} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "digits.yaml"
    file.write_text(
        f"data: {{sources: [{{path: {folder / 'rows.jsonl'}}}], max_prompt_tokens: 8}}\n"
        "rewards: {math: {fn: math}}\n"
        # A response ends behind its first digit: one that is cut off has no final answer.
        f"sampling: {{max_new_tokens: 4, stop: {list(map(str, range(10)))}}}\n"
        f"samples_per_prompt: {SAMPLES}\n"
    )
    return file


def evaluate(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "roll.cli", "eval", str(folder / "model")]
    command += ["--engine", "hf", "--sets", str(folder / "digits.yaml"), "--out", "out", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def majority(texts: list[str], answer: str) -> float:
    """Return the share of the most frequent texts that is right; empty texts do not vote."""
    counts = Counter(text for text in texts if text)
    best = [text for text, count in counts.items() if count == max(counts.values())]
    return float(np.mean([text == answer for text in best])) if best else 0.0


def pass_at(k: int, counts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return pass@k of questions with so many right responses (Chen et al. 2021, arXiv
    2107.03374: the product that the paper computes)."""
    return np.array(
        [
            1.0
            if SAMPLES - c < k
            else 1.0 - np.prod(1.0 - k / np.arange(SAMPLES - c + 1, SAMPLES + 1))
            for c in counts
        ]
    )


def counted(lines: list[dict[str, Any]]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the value of each question by the name of the figure, from the responses alone."""
    right = np.array([[text == line["target"] for text in line["resps"]] for line in lines])
    assert right.shape == (ROWS, SAMPLES)
    votes = [majority(line["resps"], line["target"]) for line in lines]
    return {
        f"mean@{SAMPLES}": right.mean(axis=1),
        **{f"pass@{k}": pass_at(k, right.sum(axis=1)) for k in (1, 2, 4, 6)},
        f"maj@{SAMPLES}": np.array(votes),
        "truncated": np.array([np.mean(line["truncated"]) for line in lines]),
    }


@pytest.mark.slow
def test_figures_equal_a_count_of_the_responses_and_nothing_is_generated_twice(
    tmp_path: Path,
) -> None:
    write_set(tmp_path)
    first = evaluate(tmp_path)
    assert first.returncode == 0, first.stderr
    file = tmp_path / "out" / "model" / "digits-t1" / "samples.jsonl"
    lines = lines_of(file)
    assert sorted(line["id"] for line in lines) == sorted(f"digits:{i}" for i in range(ROWS))
    expected = counted(lines)
    mean = expected[f"mean@{SAMPLES}"].mean()
    assert 0.02 < mean < 0.5  # so that the figures say something
    told = json.loads((tmp_path / "out" / "model" / "results.json").read_text())
    found, intervals = told["results"]["digits"], told["intervals"]["values"]["digits"]
    for name, values in expected.items():
        error = values.std(ddof=1) / math.sqrt(ROWS)
        assert found[f"{name},none"] == pytest.approx(values.mean()), name
        assert found[f"{name}_stderr,none"] == pytest.approx(error), name
        margin = np.array([-1.96, 1.96]) * error
        assert intervals[name] == pytest.approx(values.mean() + margin, abs=1e-4), name
    assert told["n-samples"]["digits"] == {"original": ROWS, "effective": ROWS}
    assert f"{mean:.4f} +- " in first.stdout

    # As a kill leaves it: some lines, and a part of one.
    text = file.read_text().splitlines(keepends=True)
    file.write_text("".join(text[:150]) + text[150][:40])
    again = evaluate(tmp_path)
    assert again.returncode == 0, again.stderr
    assert "50 of 200 questions to answer" in again.stderr
    assert lines_of(file)[:150] == lines[:150]
    by_id = {line["id"]: line for line in lines}
    assert {line["id"]: line for line in lines_of(file)} == by_id
    done = evaluate(tmp_path)
    assert "to answer" not in done.stderr
    assert done.stdout == first.stdout

    other = evaluate(tmp_path, "seed=1")
    assert other.returncode == 1
    assert "model.seed: 0 -> 1" in other.stderr
