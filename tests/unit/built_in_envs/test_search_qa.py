"""Search and questions: BM25 by its formula, and answers that follow from the passages alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest

from roll.envs.built_in.text.bm25 import Bm25
from roll.envs.built_in.text.made_corpus import make_corpus
from roll.envs.built_in.text.search_qa import SearchQa
from roll.envs.contract import check_env

TEXTS = ["the red fox", "a red, red rose in the garden of roses", "Blue sky", "the sky is red"]


def score(query: str, text: str) -> float:
    """Formula of BM25 with k1 = 1.5, b = 0.75, and the idf of Lucene."""
    split = [re.findall(r"\w+", each.lower()) for each in TEXTS]
    words, mean = re.findall(r"\w+", text.lower()), sum(map(len, split)) / len(split)
    total = 0.0
    for term in query.lower().split():
        holding = sum(term in each for each in split)
        idf = math.log((len(split) - holding + 0.5) / (holding + 0.5) + 1)
        count = words.count(term)
        norm = 1.5 * (1 - 0.75 + 0.75 * len(words) / mean)
        total += idf * count * 2.5 / (count + norm)
    return total


@pytest.mark.parametrize("query", ["red", "RED sky", "the rose", "sky", "nothing", ""])
def test_the_best_texts_are_those_of_the_formula(query: str) -> None:
    scores = [score(query, text) for text in TEXTS]
    wanted = sorted((i for i in range(4) if scores[i] > 0), key=lambda i: -scores[i])
    assert Bm25(TEXTS).search(query, 4) == wanted
    assert Bm25(TEXTS).search(query, 1) == wanted[:1]


def test_an_empty_corpus_has_no_answer() -> None:
    assert Bm25([]).search("red", 3) == []


READ = (
    (r"the founder of (.+)", r"{} was founded by (.+?)\."),
    (r"the town of the head office of (.+)", r"{} has its head office in (.+?)\."),
    (r"the town in which (.+) was born", r"{} was born in (.+?)\."),
    (r"the teacher of (.+)", r"{} learnt the trade from (.+?)\."),
    (r"the river on which (.+) lies", r"{} lies on the river (.+?)\."),
    (r"the mayor of (.+)", r"The mayor of {} is (.+?)\."),
)
"""Descriptions, and the sentences that tell of whom they speak."""


def reader() -> Callable[[str], str]:
    """A policy that searches for the innermost name, and replaces what it has found."""
    described: list[str] = []
    sought: list[tuple[str, str]] = []

    def act(said: str) -> str:
        asked = re.search(r"What is the name of (.+)\?", said)
        if asked:
            described[:] = [asked[1]]
        else:
            told, wanted = sought[-1]
            found = re.search(wanted, said)
            assert found, (wanted, said)
            described[0] = described[0].replace(told, found[1])
        for form, sentence in READ:
            inner = re.search(
                form.replace("(.+)", r"((?!the )\S.*?)") + r"(?=$| was born| lies)", described[0]
            )
            if inner:
                phrase = re.search(form.replace("(.+)", re.escape(inner[1])), described[0])
                assert phrase
                sought.append((phrase[0], sentence.format(re.escape(inner[1]))))
                return f"I look for it.\nsearch: {inner[1]}"
        return f"answer: {described[0]}"

    return act


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_the_passages_answer_every_question(hops: int) -> None:
    trial = check_env(
        SearchQa,
        kwargs={"hops": hops, "size": 60, "shown": 5},
        solver=reader,
        seeds=range(12),
        actions=["search: mayor", "answer: Tor"],
        reward_range=(0, 1),
    )
    assert trial.tasks >= 11
    for one in trial.episodes["solver"]:
        assert one.turns[-1].info["searches"] == hops
        assert re.sub(r"^answer: ", "", one.actions[-1]) not in one.opening


def test_names_are_those_of_one_thing_and_the_seed_is_one_corpus() -> None:
    corpus = make_corpus(3, 3000)
    names = [name for kind in corpus.names.values() for name in kind]
    assert len(names) == len(set(names))
    assert len(corpus.passages) == 3000
    assert make_corpus(3, 60) == make_corpus(3, 60) != make_corpus(4, 60)


def test_answers_are_compared_as_words() -> None:
    env = SearchQa(size=60)
    env.reset(seed=1)
    wanted = env._answer
    for answer, reward in ((f"The {wanted.upper()}!", 1.0), ("", 0.0), ("nobody", 0.0)):
        env.reset(seed=1)
        _, found, over, _, _ = env.step(f"answer: {answer}")
        assert (found, over) == (reward, True)
    env.reset(seed=1)
    assert env.step("search: qqq")[0] == "Nothing was found."
    assert env.step("hm")[4]["invalid"] == 1
    with pytest.raises(ValueError, match="hops = 7"):
        SearchQa(hops=7)
