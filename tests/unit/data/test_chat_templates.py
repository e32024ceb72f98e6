"""Rows through chat templates as they were published, reduced to plain conversations."""

from __future__ import annotations

import json
import logging
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from roll.config.sections.data import DataConfig, TextDataConfig
from roll.core.types import Message
from roll.data.chat.conversations import Conversation
from roll.data.chat.end_mark import end_mark
from roll.data.chat.templates import DatedTokenizer
from roll.data.chat.tokenization import pieces, tokenized
from roll.data.datasets import load_prompts
from roll.data.examples import load_texts

TEMPLATES = Path(__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
MARKS = {
    "deepseek_r1_distill_first": "<\uff5cend▁of▁sentence\uff5c>",
    "deepseek_v3_1": "<\uff5cend▁of▁sentence\uff5c>",
    "glm_4_5": "",
    "gpt_oss": "<|return|>",
    "llama_3_2": "<|eot_id|>",
    "mistral_small_3_1": "</s>",
    "qwen3": "<|im_end|>",
    "qwen3_thinking_2507": "<|im_end|>",
}
DATED = ["gpt_oss", "llama_3_2", "mistral_small_3_1"]
DROPS_REASONING = ["deepseek_r1_distill_first", "deepseek_v3_1"]
REASONED = "<think>\nfirst\n</think>\n\nAnswer 5"


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per byte, so that every text is told exactly."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=(TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8"),
    )


def settings_of(**changes: Any) -> TextDataConfig:
    return TextDataConfig.model_validate(
        {"sources": ({"path": "x"},), "rows_per_step": 1, **changes}, strict=False
    )


def trained(template: str, answer: str) -> str:
    """What the last turn of a conversation teaches, as text."""
    tokenizer = byte_tokenizer(template)
    said = (Message("user", "Which number?"), Message("assistant", answer))
    found = pieces(Conversation((), said), tokenizer, settings_of(), system=None, place="here")
    [sequence] = tokenized([found], tokenizer, tokenizer.eos_token_id)
    ((start, stop),) = sequence.trained
    assert stop == len(sequence)
    return str(tokenizer.decode(list(sequence.tokens[start:stop])))


def test_the_end_of_an_answer_is_read_off_the_template() -> None:
    assert sorted(MARKS) == NAMES
    for name, mark in MARKS.items():
        assert end_mark(byte_tokenizer(name), settings_of()).strip() == mark, name


@pytest.mark.parametrize("answer", ["5", "Answer 5", REASONED, " padded \n"])
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_trained_with_one_end(name: str, answer: str) -> None:
    text = trained(name, answer)
    end = MARKS[name] or "</s>"
    assert text.endswith(end)
    assert text.count(end) == 1
    kept = answer.split("</think>")[-1] if name in DROPS_REASONING else answer
    assert "".join(kept.removeprefix("<think>").split()) in "".join(text.split())


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_reasoning_that_a_template_drops_is_counted(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = ["4", REASONED, REASONED]
    rows = [{"prompt": "Which number?", "completion": answer} for answer in answers]
    data = settings_of(
        sources=(
            {
                "path": str(write(tmp_path / "t.jsonl", rows)),
                "columns": {"messages": None, "prompt": "prompt", "completion": "completion"},
            },
        )
    )
    with caplog.at_level(logging.INFO, logger="roll"):
        dataset = load_texts(data.sources, data, byte_tokenizer(name))
    (report,) = dataset.report
    assert report.kept == 3
    assert report.altered == (2 if name in DROPS_REASONING else 0)
    told = "2 with an answer of which the chat template leaves out a part (first: "
    assert (told in caplog.text) == (name in DROPS_REASONING)
    if name in DROPS_REASONING:
        assert "t.jsonl:2)" in caplog.text


def test_an_answer_that_a_template_drops_altogether_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": _turns("4")}, {"messages": _turns("<think>only</think>")}]
    data = settings_of(sources=({"path": str(write(tmp_path / "t.jsonl", rows))},))
    dataset = load_texts(data.sources, data, byte_tokenizer("deepseek_r1_distill_first"))
    assert [example.id for example in dataset.items] == ["t:0"]
    assert "1 with an answer that the chat template leaves out (first: " in caplog.text


def _turns(answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize("name", NAMES)
def test_a_moment_that_is_pinned_gives_the_same_rows_on_every_day(
    tmp_path: Path, name: str
) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    data = DataConfig.model_validate(
        {"sources": ({"path": str(path)},), "prompts_per_step": 1}, strict=False
    )

    def fingerprint(moment: datetime) -> str:
        dated = DatedTokenizer(byte_tokenizer(name), moment)
        return load_prompts(data.sources, data, dated).fingerprint

    evening, midnight = datetime(2031, 5, 6, 23, 59), datetime(2031, 5, 7)
    assert fingerprint(evening) == fingerprint(evening)
    assert (fingerprint(evening) != fingerprint(midnight)) == (name in DATED)


@pytest.mark.parametrize("name", DATED)
def test_a_date_that_the_config_sets_wins(name: str) -> None:
    dated = DatedTokenizer(byte_tokenizer(name), datetime(2031, 5, 6))
    text = dated.apply_chat_template(_turns("4"), tokenize=False)
    assert "2031" in text
    own = byte_tokenizer("llama_3_2")
    text = DatedTokenizer(own, datetime(2031, 5, 6)).apply_chat_template(
        _turns("4"), tokenize=False, date_string="1 Jan 1990"
    )
    assert "Today Date: 1 Jan 1990" in text


PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\n"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
CORPUS = ["[INST] a b [/INST]\n\nSo it is 5 .\n\n\n\nYes , 5", "a  b\n\n\nc", "12 34 Yes No"] * 9


def sentencepiece_like(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that begins texts with "▁", in one of the ways of Llama's descendants."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if kind == "normalizer":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        chat_template=PLAIN,
    )


TOKENIZERS = {kind: sentencepiece_like(kind) for kind in ("normalizer", "first", "always")}


@pytest.mark.parametrize("end", ["\n", " ", ""])
@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    answers=st.lists(
        st.text("aY5 \n.,(", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=3
    )
)
@settings(max_examples=50)
def test_the_tokens_of_a_dialogue_decode_to_its_text(
    kind: str, end: str, answers: list[str]
) -> None:
    tokenizer = TOKENIZERS[kind]
    tokenizer.chat_template = PLAIN.replace("[/INST]\n", f"[/INST]{end}")
    said = [
        message
        for answer in answers
        for message in (Message("user", "a b"), Message("assistant", answer))
    ]
    found = pieces(
        Conversation((), tuple(said)), tokenizer, settings_of(), system=None, place="here"
    )
    [sequence] = tokenized([found], tokenizer, tokenizer.eos_token_id)
    text = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in said], tokenize=False
    )
    if kind != "first":
        # These write a "▁" behind every special token, also in the middle of a text.
        text = text.replace("</s>", "</s> ").removesuffix(" ")
    assert tokenizer.decode(list(sequence.tokens)) == text
    for (start, stop), answer in zip(sequence.trained, answers, strict=True):
        before = tokenizer.decode(list(sequence.tokens[:start]))
        through = tokenizer.decode(list(sequence.tokens[:stop]))
        assert through.removeprefix(before) == f"{answer}</s>"
