"""The page about a run: its numbers, its size, and that nothing a policy writes becomes code."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.report import write_report
from roll.core.errors import ConfigError, DataError
from roll.report.groups import grouped
from roll.report.page import MAX_BYTES, page
from roll.report.read import read_runs
from roll.report.sample_view import cut
from roll.report.samples import over_training, read_samples, siblings_apart, worth_reading
from roll.report.series import kept_steps
from tests.pictures import coloured, file_of
from tests.unit.output.scripted_runs import SICK, run_records

ATTACK = (
    "</pre></script><script>document.title='owned'</script><img src=x onerror=alert(1)>\x00\ud800"
)
VOID = {"img", "meta", "br"}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """The elements of a page; refuses one that is not well formed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def data(self) -> dict[str, Any]:
        """The object that the page embeds."""
        found: dict[str, Any] = json.loads(
            next(text for tag, text in self.texts if tag == "script")
        )
        return found

    @property
    def read(self) -> str:
        """What a person reads."""
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))


def a_run(
    folder: Path,
    records: Sequence[dict[str, Any]],
    *,
    seed: int = 0,
    lr: float = 1e-3,
    **more: object,
) -> Path:
    """Write what a run of records leaves behind."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    config = {"seed": seed, "max_steps": 120, "output_dir": str(folder), "lr": lr, **more}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def a_sample(name: str, **changed: object) -> dict[str, object]:
    return {
        "id": name,
        "tag": "t",
        "prompt": "2+2?",
        "response": "it is 4",
        "ground_truth": "4",
        "reward": 1.0,
        "parts": {},
        "finish_reason": "stop",
        "response_tokens": 3,
    } | changed


def keep(run: Path, step: int, samples: Sequence[dict[str, object]]) -> Path:
    """Write samples of a step as a run does."""
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in samples))
    return path


def of(*folders: Path) -> str:
    return page(read_runs(folders))


def written(value: float) -> object:
    """Return a value of metrics.jsonl as six digits say it; what JSON lacks, as a text."""
    if isinstance(value, int):
        return value
    six = f"{value:.6g}"
    return {"nan": "NaN", "inf": "inf", "-inf": "-inf"}.get(six) or float(six)


def check_numbers(shown: Page, runs: dict[str, Path]) -> int:
    """Compare every number of the charts and of the table with metrics.jsonl; return how many."""
    on_disk = {}
    for name, folder in runs.items():
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        on_disk[name] = {record["step"]: record for record in map(json.loads, lines)}
    data, compared = shown.data, 0
    for name, groups in data["series"].items():
        for group, found in zip(data["groups"], groups, strict=True):
            rows = found["values"] if found else []
            steps = data["steps"][found["steps"]] if found else []
            for run, values in zip(group["runs"], rows, strict=True):
                for step, value in zip(steps, values, strict=True):
                    there = on_disk[run].get(step, {}).get(name)
                    assert value == (None if there is None else written(there)), (name, step)
                    compared += 1
    (only,) = list(on_disk.values())[:1]
    for _, attributes in shown.elements:
        if len(runs) == 1 and "data-metric" in attributes:
            there = only[int(attributes["data-step"] or "")][attributes["data-metric"] or ""]
            assert attributes["data-value"] == str(written(there)).removesuffix(".0")
            compared += 1
    return compared


def test_every_number_of_a_page_is_that_of_the_records(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", run_records())
    names = {name for record in run_records() for name in record} - {"step"}
    shown = Page(of(run))
    assert shown.data["series"].keys() == names
    assert {n for panel in shown.data["panels"] for n in panel["names"]} == names
    # 120 steps of each metric, 13 validations, and first and last of the table.
    assert check_numbers(shown, {"run": run}) > 120 * (len(names) - 1) + 13


def test_numbers_that_are_not_finite_are_told_and_do_not_break_the_page(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", SICK["not_finite"])
    shown = Page(of(run))
    check_numbers(shown, {"run": run})
    assert "NaN" in shown.data["series"]["loss/total"][0]["values"][0]
    assert "loss/total is not finite" in shown.read
    assert "Try: lower the learning rate" in shown.read


@pytest.mark.slow
def test_a_page_of_three_thousand_steps_stays_small_and_keeps_peaks(tmp_path: Path) -> None:
    records = run_records(steps=3000)
    for number in range(120):
        for record in records[:-1]:
            record[f"reward/part_{number}/mean"] = record["reward/mean"] * number / 7
    records[1234]["grad_norm"] = 77.0
    run = a_run(tmp_path / "run", records)
    for step in range(0, 3000, 100):
        keep(run, step, [a_sample(f"{step}/p:{i}/0", response="x " * 9000) for i in range(8)])
    text = of(run)
    assert 100_000 < len(text.encode()) < MAX_BYTES
    shown = Page(text)
    check_numbers(shown, {"run": run})
    found = shown.data["series"]["grad_norm"][0]
    assert found["values"][0][shown.data["steps"][found["steps"]].index(1234)] == 77
    phases = next(panel for panel in shown.data["panels"] if panel["kind"] == "stack")["names"]
    assert len({shown.data["series"][name][0]["steps"] for name in phases}) == 1 < len(phases)


def test_a_page_of_many_runs_stays_small(tmp_path: Path) -> None:
    assert cut("abcdefgh", 1) == "\n[... 8 characters ...]\n"
    folders = [a_run(tmp_path / f"r{n}", run_records(steps=4), lr=n) for n in range(24)]
    for folder in folders:
        keep(folder, 0, [a_sample(f"{n}", response="long " * 4000) for n in range(4)])
    assert len(of(*folders).encode()) < MAX_BYTES


def test_a_file_that_cannot_be_read_is_not_taken_for_a_page_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    folder = a_run(tmp_path / "r", run_records(steps=4))
    (folder / "rollouts" / "step_000000.jsonl").mkdir(parents=True)
    with pytest.raises(OSError, match=r"step_000000\.jsonl"):
        write_report([folder], None)


def test_thinned_steps_have_the_smallest_and_largest_values() -> None:
    values = {step: float((step * 7919) % 1000) for step in range(1000)}
    kept = kept_steps([values], 100)
    assert 50 <= len(kept) <= 100
    assert {0, 999} <= set(kept)
    assert {min(values.values()), max(values.values())} <= {values[step] for step in kept}
    assert kept_steps([values], 1000) == sorted(values)


class _Read(dict[int, float]):
    """Values that count how often one is read."""

    times = 0

    def __getitem__(self, step: int) -> float:
        self.times += 1
        return super().__getitem__(step)


def test_values_of_a_long_run_are_read_once() -> None:
    runs = [_Read((step, float(step % 7)) for step in range(1000)) for _ in range(2)]
    kept_steps(runs, 100)
    assert [values.times for values in runs] == [1000, 1000]


def test_runs_that_differ_in_the_seed_are_one_curve_and_others_another(tmp_path: Path) -> None:
    records = [run_records(seed=seed) for seed in range(3)]
    runs = [a_run(tmp_path / f"run-{s}", records[s], seed=s) for s in range(3)]
    runs.append(a_run(tmp_path / "fast", run_records(seed=9), seed=9, lr=1e-2))
    shown = Page(of(*runs))
    groups = [group["runs"] for group in shown.data["groups"]]
    assert groups == [["run-0", "run-1", "run-2"], ["fast"]]
    assert shown.data["groups"][0]["label"] == "run (3 seeds)"
    assert check_numbers(shown, {run.name: run for run in runs}) > 4 * 120 * 20
    assert "Settings that differ" in shown.read
    assert "0.01" in shown.read


def test_groups_whose_runs_are_named_alike_have_labels_of_their_own(tmp_path: Path) -> None:
    runs = [
        a_run(tmp_path / f"run{i}", run_records(seed=i), seed=i, lr=1e-2 if i > 1 else 1e-3)
        for i in range(4)
    ]
    assert [group.label for group in grouped(read_runs(runs))] == ["run0, run1", "run2, run3"]


def test_what_a_policy_writes_is_shown_and_never_runs(tmp_path: Path) -> None:
    records = [{**record, f"reward/{ATTACK}/mean": 1.0} for record in run_records()]
    run = a_run(tmp_path / "<b>run", records)
    turns = [{"by": "policy", "text": ATTACK, "reward": 1}, {"by": ATTACK, "text": ATTACK}]
    bad: dict[str, object] = {
        "response": ATTACK,
        "prompt": ATTACK,
        "tag": ATTACK,
        "ground_truth": ATTACK,
    }
    keep(
        run,
        0,
        [
            a_sample(f"0/{ATTACK}/0", **bad, parts={ATTACK: 1.0}),
            a_sample(f"0/{ATTACK}/1", **bad, turns=turns, reward=0.0, pictures=[ATTACK]),
        ],
    )
    keep(run, 10, [a_sample(f"10/{ATTACK}/0", **bad)])
    text = of(run)
    shown = Page(text)
    kinds = Counter(tag for tag, _ in shown.elements)
    assert kinds["script"] == 2
    assert kinds["img"] == 0
    assert not [name for _, attributes in shown.elements for name in attributes if name[:2] == "on"]
    assert "<script>document.title='owned'</script>" in shown.read
    policy = next(a["content"] for _, a in shown.elements if "http-equiv" in a)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_a_page_goes_where_it_is_asked_to(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [{"step": 0, "loss/total": 1.0}])
    assert write_report([run], tmp_path / "new" / "page.html").is_file()
    with pytest.raises(ConfigError, match=r"config.yaml/page.html cannot be written \(.*--out"):
        write_report([run], run / "config.yaml" / "page.html")


def drawn_by_a_browser(run: Path, folder: Path) -> str:
    """The page of a run after its script has drawn the charts."""
    path = write_report([run], None)
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'b'}")
    command = [str(CHROMIUM), *options, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout[done.stdout.index("<html") :]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_chart_without_values_says_so_and_zeros_lie_on_the_axis(tmp_path: Path) -> None:
    unlike = {"entropy": math.nan, "approx_kl": 0.0, "grad_norm": 0.0}
    records = [record | unlike for record in run_records()]
    text = drawn_by_a_browser(a_run(tmp_path / "run", records), tmp_path)

    def chart(title: str) -> Page:
        [found] = re.findall(rf'<svg [^>]*aria-label="{title}".*?</svg>', text)
        return Page(found)

    empty = chart("Entropy")
    assert [said for _, said in empty.texts] == ["no values"]
    assert [tag for tag, _ in empty.elements] == ["svg", "text"]
    for title in ("KL of a step", "Gradient norm"):
        shown = chart(title)
        assert "1" in [said for _, said in shown.texts]
        assert not any(said.startswith("-") for _, said in shown.texts)
        heights = {
            float(point.split(",")[1])
            for tag, attributes in shown.elements
            if tag == "polyline"
            for point in str(attributes["points"]).split()
        }
        assert heights == {160.0}, "the lowest line of the chart"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_draws_the_page_and_runs_nothing_of_the_policy(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", run_records())
    keep(run, 0, [a_sample("0/p:1/0", response=ATTACK), a_sample("0/p:1/1", reward=0.0)])
    text = drawn_by_a_browser(run, tmp_path)
    assert sum(tag == "polyline" for tag, _ in Page(text).elements) > 15
    assert "<title>roll: run</title>" in text


def test_pictures_and_turns_are_shown(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", run_records())
    turns = [
        {"by": "policy", "text": "left", "reward": 0.5},
        {"by": "environment", "text": "a wall"},
    ]
    path = keep(run, 0, [a_sample("0/p:1/0", pictures=["step_000000/a.png"], turns=turns)])
    path.with_suffix("").mkdir()
    path.with_suffix("").joinpath("a.png").write_bytes(file_of(coloured(20, 30)))
    shown = Page(of(run))
    sources = [a["src"] or "" for tag, a in shown.elements if tag == "img"]
    assert len(sources) == 1
    assert sources[0].startswith("data:image/png;base64,")
    assert "policy · reward 0.5" in shown.read
    assert "a wall" in shown.read


def test_files_outside_of_the_run_are_not_read(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", run_records())
    (tmp_path / "secret.png").write_bytes(file_of(coloured(20, 30)))
    keep(run, 0, [a_sample("0/p:1/0", pictures=["../../secret.png", str(tmp_path / "secret.png")])])
    assert "data:image/png;base64" not in of(run)


def test_samples_worth_reading_are_best_worst_and_surprising(tmp_path: Path) -> None:
    def row(name: str, reward: float | None, tokens: int, logprob: float) -> dict[str, object]:
        return a_sample(name, reward=reward, response_tokens=tokens, logprob_mean=logprob)

    rows = [
        row("0/a/0", 1.0, 10, -0.1),
        row("0/a/1", 0.0, 12, -0.2),
        row("0/b/0", 0.0, 90, -0.3),
        row("0/b/1", 1.0, 11, -2.0),
        row("0/c/0", 0.5, 11, -0.2),
        row("0/c/1", None, 11, -0.2),
    ]
    keep(tmp_path, 0, rows)
    kept = read_samples(tmp_path, [])[0]
    found = {choice.why: choice.sample.id for choice in worth_reading(kept)}
    assert found["surprising: long and wrong"] == "0/b/0"
    assert found["surprising: high reward, low probability"] == "0/b/1"
    assert found["no reward: a reward failed"] == "0/c/1"
    better, worse = siblings_apart(kept) or pytest.fail("siblings differ")
    assert (better.reward, worse.reward) == (1.0, 0.0)
    assert better.group == worse.group


def test_the_same_prompt_is_found_in_several_steps(tmp_path: Path) -> None:
    for step in (0, 10, 20):
        keep(tmp_path, step, [a_sample(f"{step}/p:1/0"), a_sample(f"{step}/p:{step + 5}/0")])
    ((first, *later),) = over_training(read_samples(tmp_path, []), prompts=4)
    assert [first.step, *(row.step for row in later)] == [0, 10, 20]
    assert first.prompt_id == "p:1"


def test_a_run_that_is_still_being_written_or_damaged_is_read_as_far_as_it_goes(
    tmp_path: Path,
) -> None:
    run = a_run(tmp_path / "run", run_records())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\nnonsense\n{"step": "x"}\n{"step": 121, "reward/me')
    (run / "config.yaml").write_text("{")
    (run / "summary.json").write_text("[]")
    path = keep(run, 0, [a_sample("0/p:1/0")])
    path.write_bytes(path.read_bytes() + b'\xff{"id"\n' + b"[" * 5000 + b"\n")
    keep(run, 10, [{"id": 3}])
    shown = Page(of(run))
    check = a_run(tmp_path / "clean", run_records())
    check_numbers(shown, {"run": check})
    for said in (
        "3 of 124 lines of metrics.jsonl hold no record",
        "config.yaml cannot be read",
        "should hold the summary of a run",
        "3 lines in rollouts/ hold no sample",
        "unfinished",
    ):
        assert said in shown.read, said


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no run yet"):
        of(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')
    with pytest.raises(DataError, match="no complete record"):
        of(tmp_path)
    with pytest.raises(DataError, match="named twice"):
        of(tmp_path, tmp_path)


def test_the_command_writes_the_page_into_the_folder(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", run_records())
    done = CliRunner().invoke(app, ["report", str(run)])
    assert done.exit_code == 0, done.output
    assert (run / "report.html").read_text().startswith("<!doctype html>")
    assert CliRunner().invoke(app, ["report", str(tmp_path)]).exit_code == 2
