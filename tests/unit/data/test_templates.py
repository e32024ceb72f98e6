"""Rows to tokens, and whole datasets with their report and fingerprint."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from roll.config.sections.data import ColumnsConfig, DataConfig, SourceConfig
from roll.core.errors import ConfigError, DataError
from roll.core.types import Prompt
from roll.data.chat.variables import check_variables
from roll.data.datasets import Dataset, load_prompts
from tests.tiny import char_tokenizer


def test_variables_may_be_of_any_of_the_templates_and_are_words_of_it() -> None:
    tokenizer = char_tokenizer()
    check_variables("k", {"messages": 1, "documents": []}, tokenizer)
    with pytest.raises(ConfigError, match=r"k\.message: .*does not mention 'message'"):
        check_variables("k", {"message": 1}, tokenizer)
    tokenizer.chat_template = {"default": "{{ a }}", "tools": "{% generation %}{{ b }}"}
    check_variables("k", {"a": 1, "b": 2}, tokenizer)
    tokenizer.chat_template = None  # which is told elsewhere
    check_variables("k", {"a": 1}, tokenizer)


def _write(path: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return SourceConfig(path=str(path))


def _sums(path: Path, count: int = 3) -> SourceConfig:
    return _write(path, [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(count)])


def _data(source: SourceConfig, **settings: Any) -> DataConfig:
    return DataConfig(sources=(source,), prompts_per_step=1, **settings)


def _load(source: SourceConfig, **settings: Any) -> Dataset[Prompt]:
    data = _data(source, **settings)
    return load_prompts(data.sources, data, char_tokenizer())


def test_a_prompt_goes_through_the_chat_template(tmp_path: Path) -> None:
    [prompt] = _load(_sums(tmp_path / "sums.jsonl", 1)).items
    assert prompt.text == "<user>0+1=<assistant>"
    assert char_tokenizer().decode(prompt.tokens, skip_special_tokens=False) == prompt.text
    assert (prompt.id, prompt.answer, prompt.tag) == ("sums:0", "1", "default")


def test_tokens_equal_those_of_the_tokenizers_own_rendering(tmp_path: Path) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    source = _write(tmp_path / "a.jsonl", [{"messages": turns, "answer": "1"}])
    columns = ColumnsConfig(prompt=None, messages="messages")
    source = source.model_copy(update={"columns": columns})
    [prompt] = _load(source).items
    own = char_tokenizer().apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert list(prompt.tokens) == own


def test_template_arguments_and_the_system_message_reach_the_template(tmp_path: Path) -> None:
    source = _sums(tmp_path / "a.jsonl", 1).model_copy(update={"system": "be brief "})
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{{ flavour }}:{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
    )
    data = _data(source, chat_template_kwargs={"flavour": "plain"})
    [prompt] = load_prompts(data.sources, data, tokenizer).items
    assert prompt.text == "plain:system=be brief ;user=0+1=;"


def test_plain_text_is_taken_as_it_is(tmp_path: Path) -> None:
    [prompt] = _load(_sums(tmp_path / "a.jsonl", 1), chat_template=False).items
    assert prompt.text == "0+1="
    assert len(prompt.tokens) == 4


def test_a_tokenizer_without_a_template_says_what_to_set(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = None
    data = _data(_sums(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"data\.chat_template: false"):
        load_prompts(data.sources, data, tokenizer)


def test_a_row_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    data = _data(_sums(tmp_path / "a.jsonl"))
    with pytest.raises(DataError, match=r"a\.jsonl:1: .*no such role"):
        load_prompts(data.sources, data, tokenizer)


def test_what_plain_text_cannot_hold_is_refused(tmp_path: Path) -> None:
    source = _sums(tmp_path / "a.jsonl").model_copy(update={"system": "be brief"})
    with pytest.raises(DataError, match="`system` needs a chat template"):
        _load(source, chat_template=False)
    rows = [{"messages": [{"role": "user", "content": "x"}], "answer": "1"}]
    columns = ColumnsConfig(prompt=None, messages="messages")
    source = _write(tmp_path / "b.jsonl", rows).model_copy(update={"columns": columns})
    with pytest.raises(DataError, match=r"b\.jsonl:1: messages need a chat template"):
        _load(source, chat_template=False)


def test_long_prompts_are_counted_and_keep_the_ids_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "x" * n, "answer": "1"} for n in (3, 50, 5, 60)]
    with caplog.at_level(logging.WARNING, logger="roll"):
        dataset = _load(_write(tmp_path / "a.jsonl", rows), max_prompt_tokens=10)
    [report] = dataset.report
    assert (report.kept, report.too_long, report.longest_tokens) == (2, 2, 62)
    assert [p.id for p in dataset.items] == ["a:0", "a:2"]
    assert "2 left out" in caplog.text


def test_a_source_of_long_prompts_only_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 3 prompts are longer than max_prompt_tokens = 2"):
        _load(_sums(tmp_path / "a.jsonl"), max_prompt_tokens=2)


def test_two_files_of_one_name_get_different_ids(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    sources = (_sums(tmp_path / "x" / "train.jsonl"), _sums(tmp_path / "y" / "train.jsonl"))
    dataset = load_prompts(sources, _data(sources[0]), char_tokenizer())
    assert [source.name for source in dataset.sources] == ["train", "train-2"]
    assert len({p.id for p in dataset.items}) == len(dataset) == 6


def test_validation_sets_are_named_by_their_key(tmp_path: Path) -> None:
    source = _sums(tmp_path / "a.jsonl", 1)
    dataset = load_prompts({"held_out": source}, _data(source), char_tokenizer())
    assert [p.id for p in dataset.items] == ["held_out:0"]


def test_the_fingerprint_follows_every_field(tmp_path: Path) -> None:
    base = {"prompt": "1+1=", "answer": "2"}
    prints = {
        _load(_write(tmp_path / "a.jsonl", rows)).fingerprint
        for rows in ([base], [base | {"answer": "3"}], [base | {"prompt": "1+2="}], [base, base])
    }
    for further in ({"tests": ["a"]}, {"tests": ["b"]}):  # rewards read such columns
        prints.add(_load(_write(tmp_path / "a.jsonl", [base | further])).fingerprint)
    tagged = _write(tmp_path / "a.jsonl", [base]).model_copy(update={"tag": "other"})
    prints.add(_load(tagged).fingerprint)
    assert len(prints) == 7
    same = _write(tmp_path / "a.jsonl", [base])
    assert _load(same).fingerprint == _load(same).fingerprint
