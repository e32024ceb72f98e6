"""Text that a tokenizer does not know is counted, named and seen in what is written down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.config.sections.data import DataConfig, TextDataConfig
from roll.data.chat.unknown_text import unknown_pieces
from roll.data.datasets import load_prompts
from roll.data.examples import load_texts
from tests.tiny import ALPHABET, char_tokenizer
from tests.unit.data.test_chat_templates import byte_tokenizer, sentencepiece_like


def words() -> PreTrainedTokenizerFast:
    """Whole words only."""
    vocab = {"<unk>": 0, "one": 1, "two": 2, ",": 3}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def dropping() -> PreTrainedTokenizerFast:
    """Leaves out what it does not know."""
    backend = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<é>")


def lost(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer([text], add_special_tokens=False)["input_ids"]
    return unknown_pieces([text], ids, tokenizer)[0]


def test_what_is_lost_is_named_whatever_the_tokenizer_makes_of_it() -> None:
    assert lost(char_tokenizer(), "<user>1 + 2 Ä=É") == ["Ä", "É"]
    assert lost(words(), "one, three two") == ["three"]
    assert lost(dropping(), "<é>abcab d") == ["c", "d"]


def test_a_text_that_spells_the_unknown_token_has_lost_nothing() -> None:
    assert lost(char_tokenizer(), "1 <pad> 2") == []


@given(st.text(max_size=20))
def test_tokenizers_of_bytes_know_everything(text: str) -> None:
    assert lost(byte_tokenizer("qwen3"), text) == []


def test_tokenizers_with_a_fallback_to_bytes_know_everything() -> None:
    assert lost(sentencepiece_like("first"), "Äé 漢\u0301 [INST]\n") == []


@given(st.lists(st.text(ALPHABET + "ÄÖ漢", max_size=9), min_size=1, max_size=5))
def test_of_characters_those_are_named_that_are_in_no_vocabulary(texts: list[str]) -> None:
    tokenizer = char_tokenizer()
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    expected = [[c for c in text if c not in ALPHABET] for text in texts]
    assert unknown_pieces(texts, ids, tokenizer) == expected


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_prompts_are_counted_with_share_examples_and_first_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": text, "answer": "1"} for text in ("1+1", "Äpfel", "2+2", "Äé?")]
    source = {"path": write(tmp_path / "p.jsonl", rows)}
    data = DataConfig.model_validate({"sources": (source,), "prompts_per_step": 1}, strict=False)
    (report,) = load_prompts(data.sources, data, char_tokenizer()).report
    assert (report.kept, report.unknown) == (4, 2)
    assert "2 of 4 rows (50.0%)" in caplog.text
    assert "reads '<pad>' in its place: 'Ä', 'é' (first: " in caplog.text
    assert "p.jsonl:2)" in caplog.text


def test_texts_are_counted_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "Ä"}]
    source = {"path": write(tmp_path / "t.jsonl", [{"messages": turns}])}
    data = TextDataConfig.model_validate({"sources": (source,), "rows_per_step": 1}, strict=False)
    (report,) = load_texts(data.sources, data, char_tokenizer()).report
    assert report.unknown == 1
    assert "1 of 1 rows (100.0%)" in caplog.text
