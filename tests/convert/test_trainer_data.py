"""Rows become the tokens that were meant, or an error that names their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_adapter.errors import DataError
from mcore_adapter.train.data import dataset
from mcore_adapter.train.data.dataset import Dataset
from mcore_adapter.train.data.encode import encode_answer, encode_pair, encode_text
from mcore_adapter.train.data.micro_batches import balanced, micro, plan, round_up
from mcore_adapter.train.data.order import Order
from tests.convert.trainer_runs import (
    TEMPLATE,
    chat_rows,
    pair_rows,
    sequences_by_hand,
    settings,
    text_rows,
    tokenizer,
    write_rows,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a model that data needs."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": 67}))
    return folder


def read(model: Path, rows: Path, method: str, **data: Any) -> Dataset:
    run = settings(model, rows, rows.parent / "out", method, data=data)
    name = dataset.digest(rows, run)
    target = rows.parent / f"{name}.safetensors"
    dataset.prepare(rows, target, run)
    return dataset.read(target, name, run.sequences_per_example)


def sequences(found: Dataset) -> list[tuple[list[int], list[bool]]]:
    count = len(found) * found.sequences_per_example
    parts = [found.sequence(i) for i in range(count)]
    return [(tokens.tolist(), trained.tolist()) for tokens, trained in parts]


@pytest.mark.parametrize(
    ("method", "rows"),
    [("pretrain", text_rows(5)), ("sft", chat_rows(5)), ("dpo", pair_rows(5))],
)
def test_rows_become_the_tokens_that_were_meant(
    method: str, rows: list[dict[str, Any]], model: Path, tmp_path: Path
) -> None:
    found = read(model, write_rows(tmp_path / "rows.jsonl", rows), method)
    assert len(found) == found.rows == 5
    assert sequences(found) == [each for row in rows for each in sequences_by_hand(row)]


def test_a_prompt_with_its_completion_is_a_conversation_of_text(tmp_path: Path) -> None:
    (found,) = encode_answer({"prompt": "ab", "completion": "c"}, tokenizer())
    assert found.trained == [False, False, True, True]
    assert found.tokens[-1] == tokenizer().eos_token_id


def test_what_two_conversations_share_is_their_prompt() -> None:
    said = [("user", "a"), ("assistant", "b"), ("user", "c")]
    shared = [{"role": role, "content": content} for role, content in said]
    answers = [[{"role": "assistant", "content": content}] for content in ("yes", "no")]
    whole = {name: shared + a for name, a in zip(("chosen", "rejected"), answers, strict=True)}
    apart = {"prompt": shared, "chosen": answers[0], "rejected": answers[1]}
    spoken = {"prompt": shared, "chosen": "yes", "rejected": "no"}
    found = encode_pair(whole, tokenizer())
    # The answer that both give is not what is preferred.
    assert [sum(each.trained) for each in found] == [len("yes") + 1, len("no") + 1]
    assert found == encode_pair(apart, tokenizer()) == encode_pair(spoken, tokenizer())


MESSAGE = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
BAD: dict[str, list[tuple[Any, str]]] = {
    "pretrain": [
        ("{", "no JSON"),
        ([1], "list, expected an object"),
        ({"txt": "a"}, "it has no 'text', only 'txt'"),
        ({"text": ""}, "text is empty"),
        ({"text": 3}, "text is of type int, expected text"),
    ],
    "sft": [
        ({"messages": [MESSAGE]}, "no turn of the assistant"),
        ({"messages": [MESSAGE, {**ANSWER, "content": ""}]}, "message 2 is an empty answer"),
        ({"messages": "a"}, "messages is no list of messages"),
        ({"messages": [ANSWER], "prompt": "a"}, "expected one of the two"),
        ({"prompt": "a"}, "it has no 'completion', only 'prompt'"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": "b" * 70}, "it has 72 tokens, data.max_length is 64"),
    ],
    "dpo": [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": [MESSAGE, ANSWER], "rejected": [MESSAGE, ANSWER]}, "are the same"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "rejected is empty"),
        ({"prompt": "a", "chosen": "b"}, "it has no 'rejected'"),
        ({"chosen": [MESSAGE, ANSWER], "rejected": [MESSAGE]}, "rejected has no turn"),
    ],
}


@pytest.mark.parametrize(
    ("method", "row", "message"),
    [(method, row, message) for method, faults in BAD.items() for row, message in faults],
)
def test_a_bad_row_is_named_by_file_and_line(
    method: str, row: Any, message: str, model: Path, tmp_path: Path
) -> None:
    good = {"pretrain": text_rows, "sft": chat_rows, "dpo": pair_rows}[method](1)
    path = write_rows(tmp_path / "rows.jsonl", good)
    with path.open("a") as file:
        file.write("\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n")
    with pytest.raises(DataError) as caught:
        read(model, path, method)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert message in str(caught.value)


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    forgetful = tokenizer()
    # Like templates that drop the thoughts of earlier turns.
    forgetful.chat_template = TEMPLATE.replace(
        "{{ m.content }}<eos>", "{{ m.content if loop.last else '' }}<eos>"
    )
    with pytest.raises(DataError, match="message 2 otherwise with the messages after it"):
        encode_answer(chat_rows(1)[0], forgetful)
    leading = tokenizer()
    leading.chat_template = TEMPLATE.replace("<assistant>{{ m.content }}", "{{ m.content }}")
    with pytest.raises(DataError, match="message 2 otherwise as an answer"):
        encode_answer(chat_rows(1)[0], leading)
    leading.chat_template = None
    with pytest.raises(DataError, match="has no chat template"):
        encode_answer(chat_rows(1)[0], leading)


def test_a_tokenizer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tokenizer().save_pretrained(other)
    (other / "config.json").write_text(json.dumps({"vocab_size": 8}))
    with pytest.raises(DataError, match="beyond the vocabulary of 8"):
        read(other, write_rows(tmp_path / "rows.jsonl", text_rows(3)), "pretrain")


def test_what_is_too_long_is_counted(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "a" * 9, "completion": c} for c in ("b", "b" * 9)]
    rows.append({"prompt": "a" * 20, "completion": "b"})
    path = write_rows(tmp_path / "rows.jsonl", rows)
    skipped = read(model, path, "sft", too_long="skip", max_length=12)
    assert (len(skipped), skipped.rows, skipped.skipped, skipped.cut) == (1, 3, 2, 0)
    # Of the last row, no answer would be left.
    cut = read(model, path, "sft", too_long="truncate", max_length=12)
    assert (len(cut), cut.skipped, cut.cut) == (2, 1, 1)
    assert cut.lengths_of(1) == (12,)
    assert "1 skipped as too long, 1 cut to the longest length" in cut.summary


@pytest.mark.parametrize("length", [11, 12, 13, 23, 24])
def test_split_text_is_predicted_once(length: int, model: Path, tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + i) for i in range(length - 1))
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text}])
    found = read(model, path, "pretrain", too_long="split", max_length=12)
    (whole,) = encode_text({"text": text}, tokenizer())
    predicted = [
        token
        for tokens, trained in sequences(found)
        for token, is_trained in zip(tokens, trained, strict=True)
        if is_trained
    ]
    assert predicted == whole.tokens[1:]
    assert max(found.lengths_of(i)[0] for i in range(len(found))) <= 12


@given(
    loads=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    capacity=st.integers(20, 60),
    multiple=st.integers(1, 4),
)
def test_parts_hold_each_example_once(loads: list[int], capacity: int, multiple: int) -> None:
    parts = balanced(loads, capacity, multiple)
    assert sorted(i for part in parts for i in part) == list(range(len(loads)))
    assert len(parts) % multiple == 0
    filled = [sum(loads[i] for i in part) for part in parts]
    assert max(filled) <= capacity
    # Evenly: the part with most has no example that another could have taken to advantage.
    fullest = parts[filled.index(max(filled))]
    assert max(filled) - min(loads[i] for i in fullest) <= min(filled)


def test_a_load_above_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="a load of 9 is above the capacity of 8"):
        balanced([3, 9], 8, 1)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=20),
    more=st.integers(0, 50),
    multiple=st.integers(1, 5),
    packing=st.booleans(),
)
def test_no_micro_batch_has_more_tokens_than_allowed_with_its_padding(
    lengths: list[tuple[int, int]], more: int, multiple: int, packing: bool
) -> None:
    # The settings make sure that one example of the largest length fits.
    largest = round_up(16, multiple) if packing else 2 * round_up(8, multiple)
    shape = plan(
        lengths,
        capacity=largest + more,
        packing=packing,
        width_multiple=multiple,
        count_multiple=2,
    )
    assert shape.rows * shape.width <= largest + more
    assert shape.width % multiple == 0
    assert sorted(i for part in shape.parts for i in part) == list(range(len(lengths)))


@pytest.mark.parametrize("packing", [True, False])
def test_a_micro_batch_says_where_its_trained_tokens_are(
    packing: bool, model: Path, tmp_path: Path
) -> None:
    found = read(model, write_rows(tmp_path / "rows.jsonl", pair_rows(7)), "dpo")
    shape = plan(
        [found.lengths_of(i) for i in range(7)],
        capacity=128,
        packing=packing,
        width_multiple=4,
        count_multiple=2,
    )
    assert shape.width % 4 == 0
    assert shape.rows * shape.width <= 128
    seen = []
    for part in [*shape.parts, []]:
        made = micro(found, part, shape, packing=packing, device=torch.device("cpu"))
        assert made.tokens_BT.shape == made.positions_BT.shape == (shape.rows, shape.width)
        tokens_N = made.tokens_BT.flatten()[made.places_N]
        for place, number in enumerate(made.sequences):
            tokens, trained = found.sequence(number)
            assert torch.equal(tokens_N[made.sequence_N == place], tokens[trained])
            seen.append(number)
        # The token before each, which predicts it, is of the same sequence.
        positions_N = made.positions_BT.flatten()[made.places_N]
        assert torch.equal(made.positions_BT.flatten()[made.places_N - 1], positions_N - 1)
    assert sorted(seen) == list(range(14))


@given(count=st.integers(1, 30), per_step=st.integers(1, 12), epochs=st.integers(1, 3))
def test_an_epoch_takes_each_example_once(count: int, per_step: int, epochs: int) -> None:
    for seed in (None, 3):
        order = Order.of_epochs(epochs, count, per_step, seed)
        taken = [example for step in range(order.num_steps) for example in order[step]]
        for start in range(0, len(taken), count):
            assert sorted(taken[start : start + count]) == list(range(count))
        assert len(taken) == epochs * count


@given(
    count=st.integers(1, 30),
    per_step=st.integers(1, 12),
    epochs=st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
def test_more_epochs_of_a_run_that_has_ended_take_each_example_once(
    count: int, per_step: int, epochs: list[int]
) -> None:
    taken: list[int] = []
    first = missing = total = 0
    for more in epochs:
        total += more
        order = Order.of_epochs(total, count, per_step, 3, missing)
        taken += [example for step in range(first, order.num_steps) for example in order[step]]
        assert order.taken(order.num_steps) == len(taken) == total * count
        first, missing = order.num_steps, order.num_steps * per_step - len(taken)
    for start in range(0, len(taken), count):
        assert sorted(taken[start : start + count]) == list(range(count))


def test_epochs_and_seeds_shuffle_otherwise() -> None:
    one, two = (Order(50, 50, 2, 50, seed) for seed in (0, 1))
    assert len({tuple(order[step]) for order in (one, two) for step in range(2)}) == 4
