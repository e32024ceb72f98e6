"""Which tokens of a conversation are trained, checked against the chat template itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from roll.config.sections.data import PreferenceDataConfig, TextDataConfig
from roll.core.errors import DataError, RowError
from roll.core.types import Message
from roll.data.chat.conversations import Conversation
from roll.data.chat.tokenization import NothingToLearnError, TokenSequence, pieces, tokenized
from roll.data.collate import mismatched
from roll.data.columns import messages_of
from roll.data.examples import Example, load_preferences, load_texts
from tests.tiny import char_tokenizer

CHATML = (
    "{% for m in messages %}<user>{{ m.role }}\n{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}"
    "{% elif loop.last %}<assistant>think {{ m.content }}<eos>"
    "{% else %}<assistant>{{ m.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat(template: str) -> Any:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def settings_of(**changes: Any) -> TextDataConfig:
    return TextDataConfig.model_validate(
        {"sources": ({"path": "x"},), "rows_per_step": 1, **changes}, strict=False
    )


def said(*turns: str) -> tuple[Message, ...]:
    roles = ("user", "assistant")
    return tuple(Message(role=roles[i % 2], content=turn) for i, turn in enumerate(turns))


def encode(
    after: tuple[Message, ...],
    template: str,
    *,
    before: tuple[Message, ...] = (),
    last: bool = False,
) -> tuple[TokenSequence, Any]:
    tokenizer = chat(template)
    found = pieces(
        Conversation(before, after),
        tokenizer,
        settings_of(),
        system=None,
        place="here",
        last_turn_only=last,
    )
    return tokenized([found], tokenizer, tokenizer.eos_token_id)[0], tokenizer


def trained_texts(sequence: TokenSequence, tokenizer: Any) -> list[str]:
    return [tokenizer.decode(list(sequence.tokens[a:b])) for a, b in sequence.trained]


def test_every_turn_of_the_assistant_is_trained_up_to_its_end() -> None:
    sequence, tokenizer = encode(said("1+1=", "2", "and 3?", "4 ."), CHATML)
    assert trained_texts(sequence, tokenizer) == ["2<eos>", "4 .<eos>"]
    whole = tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in said("1+1=", "2", "and 3?", "4 .")],
        tokenize=False,
    )
    assert tokenizer.decode(list(sequence.tokens)) == whole.rstrip()


def test_a_template_that_ends_no_turn_gets_an_end_of_sequence() -> None:
    template = char_tokenizer().chat_template
    sequence, tokenizer = encode(said("1+1=", "2"), template)
    assert trained_texts(sequence, tokenizer) == ["2<eos>"]
    assert sequence.tokens[-1] == tokenizer.eos_token_id


def test_what_comes_before_is_not_trained_and_the_last_turn_can_be_alone() -> None:
    before = said("1+1=", "2")
    sequence, tokenizer = encode(said("3+3=", "6"), CHATML, before=before)
    assert trained_texts(sequence, tokenizer) == ["6<eos>"]
    sequence, tokenizer = encode(said("1+1=", "2", "3+3=", "6"), CHATML, last=True)
    assert trained_texts(sequence, tokenizer) == ["6<eos>"]


def test_a_template_that_forgets_is_refused_unless_the_last_turn_alone_is_trained() -> None:
    conversation = said("1+1=", "2", "3+3=", "6")
    with pytest.raises(DataError, match=r"here: .*turn 1.*last_assistant"):
        encode(conversation, FORGETS)
    sequence, tokenizer = encode(conversation, FORGETS, last=True)
    assert trained_texts(sequence, tokenizer) == ["think 6<eos>"]


@given(st.lists(st.text("abc12 ", min_size=1).filter(str.strip), min_size=2, max_size=8))
@settings(max_examples=50)
def test_what_stands_before_a_trained_turn_is_what_the_model_would_be_asked(
    turns: list[str],
) -> None:
    turns = turns[: len(turns) // 2 * 2]
    sequence, tokenizer = encode(said(*turns), CHATML)
    for number, (start, stop) in enumerate(sequence.trained):
        asked = tokenizer.apply_chat_template(
            [{"role": m.role, "content": m.content} for m in said(*turns)[: 2 * number + 1]],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
        )
        assert list(sequence.tokens[:start]) == asked
        written = tokenizer.decode(list(sequence.tokens[start:stop]))
        assert written == turns[2 * number + 1] + "<eos>"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(path: Path, **changes: Any) -> Sequence[Example]:
    columns = {"messages": None, "prompt": "prompt", "completion": "completion"}
    data = settings_of(sources=({"path": str(path), "columns": columns},), **changes)
    return load_texts(data.sources, data, chat(CHATML)).items


ROW = {"prompt": "1+1=", "completion": "2"}


def test_rows_with_nothing_to_learn_are_left_out_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asking = [{"role": "user", "content": "hm?"}]
    path = write(tmp_path / "t.jsonl", [ROW, {**ROW, "completion": " "}, ROW])
    assert [example.id for example in texts(path)] == ["t:0", "t:2"]
    assert "source t: 2 of 3 rows; 1 with an empty answer (first: " in caplog.text
    assert f"{path}:2" in caplog.text
    with pytest.raises(DataError, match=r"none of 1 rows is left: 1 with no turn of the assistant"):
        texts(write(tmp_path / "n.jsonl", [{**ROW, "completion": asking}]))


@pytest.mark.parametrize(
    ("how", "kept", "trained"),
    [("drop", 1, "2<eos>"), ("cut_start", 2, "22<eos>"), ("cut_end", 1, "2<eos>")],
)
def test_long_rows_become_what_the_config_says(
    tmp_path: Path, how: str, kept: int, trained: str
) -> None:
    path = write(tmp_path / "t.jsonl", [ROW, {"prompt": "1+" * 20, "completion": "22"}])
    found = texts(path, max_tokens=30, too_long=how)
    assert len(found) == kept
    last = found[-1].sequences[0]
    assert len(last) <= 30
    assert trained_texts(last, chat(CHATML)) == [trained]


def test_a_long_answer_is_cut_at_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [{"prompt": "1", "completion": "2" * 90}])
    [only] = texts(path, max_tokens=40, too_long="cut_end")
    assert len(only.sequences[0]) == 40
    assert set(trained_texts(only.sequences[0], chat(CHATML))[0]) == {"2"}
    with pytest.raises(DataError, match=r"t\.jsonl:1: \d+ tokens are more than data\.max_tokens"):
        texts(path, max_tokens=40, too_long="refuse")


def preferences(path: Path, **columns: Any) -> Sequence[Example]:
    data = PreferenceDataConfig.model_validate(
        {"sources": ({"path": str(path), "columns": columns},), "rows_per_step": 1}, strict=False
    )
    return load_preferences(data.sources, data, chat(CHATML)).items


def test_pairs_may_be_texts_messages_or_whole_conversations(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = write(tmp_path / "p.jsonl", [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
    whole = [
        {
            "chosen": [vars_of(m) for m in said("1+1=", "2")],
            "rejected": [vars_of(m) for m in said("1+1=", "3")],
        }
    ]
    apart = write(tmp_path / "w.jsonl", whole)
    [one], [other] = preferences(plain), preferences(apart, prompt=None)
    assert one.sequences == other.sequences
    assert [trained_texts(s, chat(CHATML)) for s in one.sequences] == [["2<eos>"], ["3<eos>"]]
    same = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert len(preferences(write(tmp_path / "e.jsonl", [same, row]))) == 1
    assert "1 with equal answers" in caplog.text


SYSTEM = Message(role="system", content="add")


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        ("1+1=", said("1+1=")),
        ("1+1= ", said("1+1=")),
        ("1+1=", (SYSTEM, *said("1+1="))),
        ((SYSTEM, *said("1+1=")), said("1+1=")),
        ((SYSTEM, *said("1+1=")), (SYSTEM, *said("1+1="))),
        ((SYSTEM, *said("1+1=")), (SYSTEM,)),
        (said("3", "4", "1+1="), said("3", "4", "1+1=")),
        (said("3", "4", "1+1="), said("1+1=")),
    ],
)
def test_a_prompt_that_responses_repeat_is_there_once(
    tmp_path: Path, prompt: Any, start: tuple[Message, ...]
) -> None:
    turns = said(prompt) if isinstance(prompt, str) else prompt
    asked = [vars_of(turn) for turn in turns]
    if start[0] == SYSTEM != turns[0]:
        asked = [vars_of(SYSTEM), *asked]
    answers = {
        name: [*map(vars_of, start), {"role": "assistant", "content": text}]
        for name, text in (("chosen", "2"), ("rejected", "3"))
    }
    told = prompt if isinstance(prompt, str) else asked
    pairs = write(tmp_path / "p.jsonl", [{"prompt": told, **answers}])
    single = write(
        tmp_path / "s.jsonl", [{"prompt": told, "completion": answers["chosen"], "ok": True}]
    )
    judged = {"chosen": None, "rejected": None, "completion": "completion", "label": "ok"}
    found = [*preferences(pairs), *preferences(single, **judged), *texts(single)]
    tokenizer = chat(CHATML)
    for sequence, answer in zip(
        [each for example in found for each in example.sequences], "2322", strict=True
    ):
        whole = "".join(f"<user>{m['role']}\n{m['content'].strip()}<eos>\n" for m in asked)
        read = tokenizer.decode(list(sequence.tokens)).replace("= <eos>", "=<eos>")
        assert read == tokenizer.decode(
            tokenizer(f"{whole}<user>assistant\n{answer}<eos>")["input_ids"]
        )
        assert trained_texts(sequence, tokenizer) == [f"{answer}<eos>"]


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        (said("1+1="), said("3", "4", "1+1=")),
        ((Message(role="system", content="sum"), *said("1+1=")), (SYSTEM, *said("1+1="))),
    ],
)
def test_a_response_that_may_or_may_not_hold_the_prompt_is_refused(
    tmp_path: Path, prompt: tuple[Message, ...], start: tuple[Message, ...]
) -> None:
    whole = [*map(vars_of, start), {"role": "assistant", "content": "2"}]
    row = {"prompt": [*map(vars_of, prompt)], "chosen": "2", "rejected": whole}
    path = write(tmp_path / "p.jsonl", [row])
    says = r"p\.jsonl:1: column 'rejected' begins with .*`columns.prompt: null`"
    with pytest.raises(DataError, match=says):
        preferences(path)
    with pytest.raises(DataError, match=says.replace("rejected", "completion")):
        texts(write(path, [{"prompt": row["prompt"], "completion": whole}]))


def vars_of(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


@pytest.mark.parametrize(
    ("row", "columns", "says"),
    [
        ({"prompt": "1", "chosen": "2"}, {}, r"no column 'rejected'"),
        ({"prompt": "1", "chosen": "2", "rejected": 3}, {}, r"must be text or a list of messages"),
        (
            {"prompt": "1", "chosen": "2", "rejected": "3", "m": "big"},
            {"margin": "m"},
            r"column 'm' must be a number, found str 'big'",
        ),
        (
            {"prompt": "1", "completion": "2", "ok": 2},
            {"chosen": None, "rejected": None, "completion": "completion", "label": "ok"},
            r"column 'ok' must be true or false, found int 2",
        ),
    ],
)
def test_bad_rows_name_file_line_and_column(
    tmp_path: Path, row: Any, columns: Any, says: str
) -> None:
    path = write(tmp_path / "bad.jsonl", [row])
    with pytest.raises(DataError, match=r"bad\.jsonl:1: (column .* )?.*" + says):
        preferences(path, **columns)


def test_text_that_looks_like_a_list_stays_text(tmp_path: Path) -> None:
    deep, long = "[" * 20_000, "[" + "1" * 5_000 + "]"
    cells = ('[{"x": 1}]', deep, long)
    path = write(tmp_path / "t.jsonl", [{"prompt": "[{a}]", "completion": c} for c in cells])
    only, *others = texts(path, max_tokens=30_000)
    assert trained_texts(only.sequences[0], chat(CHATML)) == ["[{<pad>x<pad>: 1}]<eos>"]
    found = [trained_texts(other.sequences[0], chat(CHATML)) for other in others]
    assert found == [[f"{cell}<eos>"] for cell in (deep, long)]


def test_json_that_python_does_not_read_is_named_with_its_place(tmp_path: Path) -> None:
    number = "1" * 5_000
    path = tmp_path / "n.jsonl"
    path.write_text(json.dumps({"prompt": "1", "completion": "2"}) + f'\n{{"x": {number}}}\n')
    with pytest.raises(DataError, match=r"n\.jsonl:2: JSON that cannot be read: Exceeds the limit"):
        texts(path)
    for text in (f"[{number}]", "[" * 20_000):
        with pytest.raises(RowError, match=r"^here is JSON that cannot be read: "):
            messages_of(text, "here", tmp_path)


def test_what_a_message_says_beside_its_content_is_not_lost_in_silence(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "2", "reasoning_content": "9"}
    path = write(tmp_path / "t.jsonl", [{**ROW, "completion": [turn]}])
    with pytest.raises(DataError, match=r"'completion'\[0\] has 'reasoning_content'"):
        texts(path)


def test_a_turn_that_nothing_asks_for_is_not_trained() -> None:
    turns = (Message("assistant", "hello"), *said("1+1=", "2"))
    sequence, tokenizer = encode(turns, CHATML)
    assert trained_texts(sequence, tokenizer) == ["2<eos>"]
    with pytest.raises(NothingToLearnError, match="nothing asks for"):
        encode(turns[:1], CHATML)


def test_a_token_that_begins_every_text_begins_no_answer() -> None:
    tokenizer = chat(CHATML)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend("=")
    found = pieces(
        Conversation((), said("1", "2", "3", "4")),
        tokenizer,
        settings_of(),
        system=None,
        place="here",
    )
    [sequence] = tokenized([found], tokenizer, tokenizer.eos_token_id)
    assert trained_texts(sequence, tokenizer) == ["2<eos>", "4<eos>"]


def test_mismatched_prompts_take_responses_of_others_and_fit(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "chosen": "a" * (i + 1), "rejected": "b" * 9} for i in range(3)]
    pairs = preferences(write(tmp_path / "p.jsonl", rows))
    made = mismatched(pairs, max_tokens=len(pairs[0].sequences[1]) - 2)
    told = [trained_texts(example.sequences[0], chat(CHATML))[0] for example in made]
    assert told == ["aaa<eos>", "b" * 8, "a<eos>", "b" * 8, "aa<eos>", "b" * 8]
