"""`roll samples`: what fits is shown, what does not is refused, and no response gets its way."""

from __future__ import annotations

import json
import unicodedata
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest
from typer.testing import CliRunner

from roll.cli import app
from roll.commands.samples.expressions import condition, sort_key
from roll.commands.samples.find import Question, find_samples
from roll.commands.samples.show import SHORT, printable
from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.core.errors import DataError
from roll.core.types import Prompt, Sample, Turn
from roll.output_dir.sample_files import Origin, Split, sample_file, schema, write_samples
from roll.pipeline.outputs.rollout_files import dump_rollouts
from roll.rollout.types import Group, ScoredSample
from roll.workers.sample_writer.table import table_of

ORIGIN = Origin("hash", "qwen3", pictures=False)

ESCAPES = "\x1b[2J\x1b]0;title\x07 \x9b31m \r \u202e \x00 \u2028 step 9  reward 9"


def scored(
    number: int, *, step: int = 0, text: str = "text", tag: str = "math", **more: Any
) -> ScoredSample:
    """Sample `number` of a step, with the reward `number` / 4 - 1."""
    prompt = Prompt(f"data:{number}", (1, 2), f"what is {number}?", str(number), tag)
    written = Written(array("i", [5] * (number + 1)), array("f", [-1.0] * (number + 1)), text)
    finish = FinishReason.LENGTH if number % 2 else FinishReason.STOP
    completion = Completion(written, VersionRuns(((step, number + 1),)), finish)
    sample = Sample(f"{step}/{prompt.id}/0", f"{step}/{prompt.id}", prompt, completion)
    reward = number / 4 - 1
    scores = ({"digits/length": float(number)}, {"digits": reward})
    return replace(ScoredSample(sample, reward, *scores), **more)


def read(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def table(samples: Sequence[ScoredSample], step: int, split: Split = "train") -> Any:
    sets = ["held_out" if split == "validation" else None] * len(samples)
    none = [None] * len(samples)
    return table_of(samples, step=step, split=split, sets=sets, baselines=none, read=read)


def write(folder: Path, samples: Sequence[ScoredSample], step: int, split: Split = "train") -> None:
    write_samples(sample_file(folder, split, step), [table(samples, step, split)], ORIGIN)


def dump(folder: Path, samples: Sequence[ScoredSample], step: int) -> Path:
    path = folder / f"rollouts/step_{step:06d}.jsonl"
    groups = [Group(one.sample.prompt, (one,), step) for one in samples]
    known = {one.sample.prompt.id: one.sample.prompt for one in samples}
    dump_rollouts(path, groups, limit=99, read=read, find=known.__getitem__)
    return path


def shown(*arguments: str | Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["samples", *map(str, arguments)])
    return result.exit_code, result.output


def ids(folder: Path, **question: Any) -> list[str]:
    return [row["id"] for row in find_samples(folder, Question(**question)).rows]


@pytest.mark.parametrize(
    "text",
    [
        "reward < 0",
        "reward <= 0 and tag == 'code'",
        "reward > 0.5 or not truncated",
        "tag != 'math'",
        "-0.5 <= reward < 0.5",
        "tag in ('code', 'other')",
        "response_tokens not in [1, 2, 3]",
        "'is 3' in prompt",
        "'is 3' not in prompt",
        "finish_reason == 'length' and (reward > 0 or reward == -0.75)",
        "parts['digits/length'] * 2 - 1 > response_tokens / 2 + 3",
        "-reward > rewards['digits'] + 1",
        "truncated == True",
        "reward < 1000000000000000000000000",
        "step is not None",
    ],
)
def test_a_condition_means_what_it_means_in_python(text: str) -> None:
    rows = [scored(number, tag=("math", "code")[number % 3 == 0]) for number in range(8)]
    data = table(rows, 4)
    found = ds.dataset(data).to_table(filter=condition(text, schema(), "--where")).to_pylist()
    names = [row | {n: dict(row[n]) for n in ("rewards", "parts")} for row in data.to_pylist()]
    expected = [row["id"] for row in names if eval(text, {}, row)]
    assert [row["id"] for row in found] == expected
    assert expected


def test_samples_without_a_reward_are_neither_good_nor_bad(tmp_path: Path) -> None:
    write(tmp_path, [scored(0), scored(1, failed=("broken",)), scored(7)], 0)
    assert ids(tmp_path, where="reward < 0") == ["0/data:0/0"]
    assert ids(tmp_path, where="not (reward < 0)") == ["0/data:7/0"]
    for missing in ("reward is None", "reward == None"):
        assert ids(tmp_path, where=missing) == ["0/data:1/0"]
    write(tmp_path, [scored(9, parts={"other": 7.0})], 1)
    assert ids(tmp_path, where="parts['other'] < 5") == []
    assert ids(tmp_path, sort="-reward", step=0) == ["0/data:7/0", "0/data:0/0", "0/data:1/0"]


@pytest.mark.parametrize(
    ("option", "text", "told"),
    [
        (
            "--where",
            "reward < 0 or parts['digits/lenght'] > 0",
            "--where: no sample has parts['digits/lenght']; did you mean 'digits/length'? (known: "
            "digits/length, late)",
        ),
        ("--where", "parts['x'] is None", "no sample has parts['x'] (known: digits/length, late)"),
        ("--sort", "rewards['digit']", "--sort: no sample has rewards['digit']; did you mean"),
    ],
)
def test_an_entry_that_no_sample_has_is_refused(
    tmp_path: Path, option: str, text: str, told: str
) -> None:
    write(tmp_path, [scored(0), scored(1)], 0)
    dump(tmp_path, [scored(2, step=1, parts={"late": 1.0})], 1)
    code, said = shown(tmp_path, option, text)
    assert code == 2
    assert told in " ".join(said.split())
    assert ids(tmp_path, where="parts['late'] > 0") == ["1/data:2/0"]
    assert shown(tmp_path, "--step", "0", "--where", "parts['late'] > 0")[0] == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rewrd < 0", r"rewrd is no column; did you mean 'reward'\? \(columns: step, .*parts\['k"),
        ("reward < '0'", "compares 'reward', a number, with \"'0'\", a text"),
        ("tag == 3", "compares 'tag', a text, with '3', a number"),
        ("reward", "is a number, not a condition"),
        ("reward <", "cannot be read"),
        ("", "cannot be read"),
        ("parts > 1", r"write parts\['key'\]"),
        ("other['x'] > 1", r"other\['x'\] is no column"),
        ("reward['x'] > 1", r"reward\['x'\] is no column"),
        ("response_ids == 1", "holds lists"),
        ("__import__('os').system('true')", "which is not understood"),
        ("reward.__class__ == 1", "which is not understood"),
        ("[r for r in reward] == 1", "which is not understood"),
        ("(lambda: reward)() < 1", "which is not understood"),
        ("reward ** 9 < 1", "which is not understood"),
        ("(x := reward) < 1", "which is not understood"),
        ("reward < 1j", "neither a number nor a text"),
        ("reward and tag == 'a'", "has 'reward' where a truth belongs"),
        ("tag + 'a' == 'b'", "has 'tag' where a number belongs"),
        ("prompt in response", "something other than a 'text' before `in`"),
        ("reward in (tag, 1)", "not constants"),
        ("reward is 1", "before something other than None"),
        pytest.param("(" * 900 + "reward" + ")" * 900, "cannot be read", id="parentheses"),
        pytest.param("-" * 1900 + "1 < 2", "cannot be read", id="signs"),
        pytest.param("1 < " + "9" * 3000, "more than 2000 characters", id="long"),
        pytest.param("reward < " + "9" * 500, "cannot be read", id="large number"),
        ("tag == '\0'", "cannot be read"),
    ],
)
def test_what_is_no_condition_is_refused_with_what_could_be_one(text: str, told: str) -> None:
    with pytest.raises(DataError, match=told) as caught:
        condition(text, schema(), "--where")
    assert str(caught.value).startswith("--where")
    assert len(str(caught.value)) < 1000


def test_a_sort_key_is_checked_likewise() -> None:
    with pytest.raises(DataError, match="--sort: lenght is no column"):
        sort_key("lenght", schema(), "--sort")


def test_files_are_read_in_the_order_of_training(tmp_path: Path) -> None:
    """Step 1 has a file of each kind: `samples/` has all of it. Step 2 has only a dump."""
    write(tmp_path, [scored(0, step=1), scored(1, step=1)], 1)
    write(tmp_path, [scored(7, step=1)], 1, "validation")
    dump(tmp_path, [scored(0, step=1)], 1)
    dump(tmp_path, [scored(2, step=2)], 2)
    dump(tmp_path, [scored(3, step=0)], 0)
    all_of_it = ["0/data:3/0", "1/data:7/0", "1/data:0/0", "1/data:1/0", "2/data:2/0"]
    assert ids(tmp_path) == all_of_it
    assert ids(tmp_path, limit=2) == all_of_it[:2]
    assert ids(tmp_path, step=1) == all_of_it[1:4]
    assert ids(tmp_path, where="split == 'validation' and set == 'held_out'") == ["1/data:7/0"]
    assert ids(tmp_path, sort="-reward", limit=2) == ["1/data:7/0", "0/data:3/0"]
    with pytest.raises(DataError, match=r"--step 9: .* \(steps: 0, 1, 2\)"):
        ids(tmp_path, step=9)


def test_the_best_of_many_row_groups_are_found(tmp_path: Path) -> None:
    parts = [table([scored(n) for n in range(i, 60, 7)], 0) for i in range(7)]
    write_samples(sample_file(tmp_path, "train", 0), parts, ORIGIN)
    best = find_samples(tmp_path, Question(sort="-reward", limit=3)).rows
    assert [row["response_tokens"] for row in best] == [60, 59, 58]


def test_a_dump_says_what_a_parquet_file_says(tmp_path: Path) -> None:
    rows = [scored(0), scored(1, failed=("broken",)), scored(2, turns=(Turn(0, 2, 0.5),))]
    write(tmp_path / "parquet", rows, 0)
    path = dump(tmp_path / "dump", rows, 0)
    one = find_samples(tmp_path / "parquet", Question()).rows
    other = find_samples(tmp_path / "dump", Question()).rows
    [turn] = one[2]["turns"]
    turn |= dict.fromkeys(("row", "begin", "end", "state"))  # which no person reads
    # A dump has the text of the prompt's tokens.
    assert [row | {"seat": None, "prompt": "1 2"} for row in one] == other
    with path.open("a") as file:
        file.write('{"id": "half')
    assert find_samples(tmp_path / "dump", Question()).broken == 1
    assert "1 lines in rollouts/ hold no sample" in shown(tmp_path / "dump")[1]


def test_every_character_that_a_terminal_obeys_is_escaped() -> None:
    for number in range(0x110000):
        char = chr(number)
        if (
            unicodedata.category(char) in {"Cc", "Cf", "Cs", "Zl", "Zp"}
            and char not in "\n\u200c\u200d"
        ):
            assert printable(char).startswith("\\")
            assert printable(char).isascii()
    assert printable("é 語 🙂 \u00a0|\n") == "é 語 🙂 \u00a0|\n"


def test_a_response_cannot_move_the_cursor_or_look_like_another_sample(tmp_path: Path) -> None:
    hostile = f"[red]a[/red] :smile: {ESCAPES}\nstep 7  reward 1"
    episode = scored(1, text=hostile, tag=f"t{ESCAPES}\nstep 8")
    write(tmp_path, [episode], 3)
    code, output = shown(tmp_path)
    assert code == 0
    shows = "[red]a[/red] :smile: \\x1b[2J\\x1b]0;title\\x07 \\x9b31m \\r \\u202e \\x00 \\u2028"
    assert shows in output
    assert not set(output) & set("\x1b\x07\x9b\r\u202e\x00\u2028")
    assert [line for line in output.split("\n") if line.startswith("step")] == [
        line for line in output.split("\n") if line.startswith("step 3")
    ]
    code, output = shown(tmp_path, "--json")
    assert output.split("\n")[0].isascii()
    row = json.loads(output.split("\n")[0])
    assert row["response"] == hostile
    assert row["parts"] == {"digits/length": 1.0}
    assert row["response_ids"] == [5, 5]
    assert row["logprobs"] == [-1.0, -1.0]


def test_long_texts_are_cut_in_the_middle_and_full_shows_them(tmp_path: Path) -> None:
    text = "begin " + "x" * 3 * SHORT + " end"
    write(tmp_path, [scored(1, text=text, turns=(Turn(0, 1, 0.5), Turn(1, 2, 0.25)))], 3)
    assert "policy 0.25       | 5" in shown(tmp_path)[1]
    write(tmp_path, [scored(1, text=text)], 3)
    _, output = shown(tmp_path, "--step", "3", "--where", "reward < 0", "--sort", "-reward")
    assert "begin xxx" in output
    assert "xxx end" in output
    assert f"[{len(text) - SHORT} characters are left out; --full shows them]" in output
    assert text in shown(tmp_path, "--full")[1]


def test_mistakes_are_told_in_a_line(tmp_path: Path) -> None:
    code, output = shown(tmp_path)
    assert code == 2
    assert "holds no samples: expected the output_dir of a run" in output
    write(tmp_path, [scored(1)], 3)
    code, output = shown(tmp_path, "--where", "reward > 5")
    assert (code, output) == (0, "no sample of 1 files fits\n")
    path = sample_file(tmp_path, "train", 3)
    path.write_bytes(path.read_bytes()[:-100])
    code, output = shown(tmp_path)
    assert code == 2
    assert f"{path} cannot be read" in output
