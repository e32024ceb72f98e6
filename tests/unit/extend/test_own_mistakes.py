"""Mistakes in classes that users bring are refused early, with what to write."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.commands.trials.user_code import wrong_code
from roll.config import load_config
from roll.config.user_code.calls import OwnCode
from roll.config.user_code.own import OwnPart
from roll.core.errors import ConfigError, RollError
from tests.unit.extend.test_own_algorithm import run_file

HEAD = "from roll.extend import ChatTemplate, Curriculum, LossTerm, SampleAdvantage\n"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder for the module `my_parts`, which is forgotten afterwards."""
    yield tmp_path
    sys.modules.pop("my_parts", None)


def refused(folder: Path, code: str, *overrides: str) -> str:
    (folder / "my_parts.py").write_text(code)
    advantage = "algorithm.advantage={kind: 'my_parts:Mine'}"
    with pytest.raises(ConfigError) as caught:
        load_config(run_file(folder), overrides or [advantage])
    return str(caught.value)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            "    def __init__(self, heat=2.0): pass\n    def per_sample(self, samples): ...\n",
            "kind: my_parts:Mine defines __init__; options are fields with types, "
            "`heat: float = 2.0` (docs/extend.md)",
        ),
        (
            "    heat = 2.0\n    def per_sample(self, samples): ...\n",
            "my_parts.py:2: `heat = 2.0` has no type; options are fields with types, "
            "`heat: float = 2.0` (docs/extend.md)",
        ),
        (
            "    def per_sample(self, samples, extra): ...\n",
            "kind: my_parts:Mine: `per_sample(self, samples, extra)` cannot be called as its base "
            "is; expected `per_sample(self, samples: Samples) -> Tensor`",
        ),
        (
            "    async def per_sample(self, samples): ...\n",
            "`async per_sample(self, samples)` cannot be called as its base is",
        ),
    ],
)
def test_a_class_of_another_form_is_refused(folder: Path, body: str, told: str) -> None:
    found = refused(folder, f"{HEAD}class Mine(SampleAdvantage):\n{body}")
    assert found.startswith("command line: algorithm.advantage")
    assert told in found
    assert "Traceback" not in found


def test_a_method_with_other_names_and_more_defaults_is_accepted(folder: Path) -> None:
    (folder / "my_parts.py").write_text(
        f"{HEAD}class Mine(SampleAdvantage):\n    def per_sample(self, found, extra=1): ...\n"
        "class Text(ChatTemplate):\n    def render(self, messages, **options): ...\n"
    )
    load_config(
        run_file(folder),
        [
            "algorithm.advantage={kind: 'my_parts:Mine'}",
            "data.chat_template={kind: 'my_parts:Text'}",
        ],
    )


def test_a_method_that_lacks_a_keyword_of_its_base_is_refused(folder: Path) -> None:
    code = f"{HEAD}class Text(ChatTemplate):\n    def render(self, messages, *, asks): ...\n"
    assert "expected `render(self, messages: " in refused(
        folder, code, "data.chat_template={kind: 'my_parts:Text'}"
    )


def test_only_the_lines_of_the_user_are_shown_when_the_import_fails(folder: Path) -> None:
    found = refused(folder, "x = 1\nclass Mine(x)\n    pass\n")
    assert 'my_parts.py", line 2' in found
    assert found.count("File ") == 1
    sys.modules.pop("my_parts", None)
    found = refused(folder, "from roll.extend import SampleAdvantag\n")
    assert found.count("File ") == 1
    assert found.endswith("; did you mean 'SampleAdvantage'?")


def test_a_part_of_another_sort_is_told_its_place(folder: Path) -> None:
    code = f"{HEAD}class Mine(LossTerm):\n    def __call__(self, terms, batch): ...\n"
    assert refused(folder, code).endswith("; it is a LossTerm: name it in algorithm.loss")


def test_an_unknown_option_lists_those_of_the_part(folder: Path) -> None:
    code = f"{HEAD}class Short(Curriculum):\n    many: int = 3\n    def chance(self, a, b): ...\n"
    found = refused(folder, code, "data.curriculum={kind: 'my_parts:Short', steps: 3}")
    assert found.endswith(
        "data.curriculum.steps = 3: unknown key of my_parts:Short (its options: column, many, "
        "memory, pass_score, sources)"
    )


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "class Mine:\n    def __init__(self, run, digits=2): ...\n"
            "    def log(self, step, record): ...\n    def close(self): ...\n",
            "track.trackers.0.kwargs: my_parts:Mine: got an unexpected keyword argument 'digit'; "
            "its arguments: digits",
        ),
        (
            "class Mine:\n    def __init__(self, run, digit): ...\n    def close(self): ...\n",
            "track.trackers.0.kind: my_parts:Mine is no tracker: it has no method "
            "`log(self, step: int, record: Record) -> None`",
        ),
        (
            "class Mine:\n    def __init__(self, run, digit): raise OSError\n"
            "    def log(self, record): ...\n    def close(self): ...\n",
            "track.trackers.0.kind: my_parts:Mine has `log(self, record)`; expected "
            "`log(self, step: int, record: Record) -> None`",
        ),
    ],
)
def test_a_class_that_is_no_tracker_is_refused(folder: Path, code: str, told: str) -> None:
    (folder / "my_parts.py").write_text(code)
    tracker = "track.trackers=[{kind: 'my_parts:Mine', kwargs: {digit: 3}}]"
    wrong = wrong_code(load_config(run_file(folder), [tracker]).config, folder)
    assert [str(error) for error in wrong] == [told]


def test_a_cancellation_that_a_part_lets_escape_is_told_as_its_error(folder: Path) -> None:
    """Only that of the calling task, which is stopped, passes as it is."""
    part, seen = OwnCode(OwnPart(kind="my_parts:Mine"), "rollout.loop"), []

    async def careless() -> None:
        other = asyncio.ensure_future(asyncio.sleep(60))
        other.cancel()
        await other

    async def stopped() -> None:
        try:
            await part.wait(asyncio.sleep(60), "")
        except asyncio.CancelledError:
            seen.append("stopped")
            raise

    async def play() -> None:
        with pytest.raises(
            RollError, match=r"rollout.loop: my_parts:Mine raised CancelledError on x"
        ):
            await part.wait(careless(), " on x")
        task = asyncio.ensure_future(stopped())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    asyncio.run(play())
    assert seen == ["stopped"]
