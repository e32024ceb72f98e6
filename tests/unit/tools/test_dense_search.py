"""Search by meaning: the vectors of an encoder, parts of a corpus, and the tool."""

from __future__ import annotations

import asyncio
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModel

from roll.config import load_config
from roll.config.errors import ConfigError
from roll.config.sections.environment import EnvironmentConfig
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.config.sections.services.corpus import CorpusConfig
from roll.core.completion import FinishReason
from roll.core.errors import EnvironmentFailedError
from roll.core.types import GenerateRequest, Prompt
from roll.data.chat.turns import Turns
from roll.distributed.cluster import Placement
from roll.distributed.local import LocalLauncher
from roll.envs.host import EnvHost
from roll.envs.loading import load_env
from roll.envs.tools.loading import load_kits
from roll.models.encoder import Encoder, Pooling
from roll.output_dir.path_resolution import absolute_paths
from roll.rollout.types import GroupTask
from roll.runtime.side_engines.corpora import search
from roll.workers.search import SearchWorker
from tests.episodes import Writer, played
from tests.pipelines.test_agentic import task as task_file
from tests.tiny import char_tokenizer, save_tiny_model
from tests.unit.data.test_chat_templates import settings_of

PASSAGES = [f"fact {i}: {'ab' * (i % 7)} {i * 37 % 101} x{i % 3}" for i in range(40)]
QUERIES = ["fact 3", "ababab 50", "x1 and x2 and a long tail of words", "?"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("encoder") / "model")


def by_hand(model: Path, texts: list[str], pooling: Pooling, limit: int) -> Tensor:
    """Vectors of texts that are read one by one, float64."""
    loaded, tokenizer = AutoModel.from_pretrained(model, dtype=torch.float32), char_tokenizer()
    found = []
    for text in texts:
        tokens = torch.tensor([tokenizer.encode(text)[:limit]])
        with torch.no_grad():
            hidden_TD = loaded(tokens).last_hidden_state[0].double()
        one = {"mean": hidden_TD.mean(0), "first": hidden_TD[0], "last": hidden_TD[-1]}[pooling]
        found.append(one / one.norm())
    return torch.stack(found)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_vectors_are_those_of_texts_read_one_by_one(pooling: Pooling, model: Path) -> None:
    encoder = Encoder(
        ModelConfig(path=str(model)),
        pooling=pooling,
        max_tokens=20,
        batch=3,
        device=torch.device("cpu"),
    )
    found_ND = encoder.encode(PASSAGES[:10])
    assert (found_ND - by_hand(model, PASSAGES[:10], pooling, 20)).abs().max() < 1e-5
    encoder.move("cpu")
    encoder.move("own")
    assert torch.equal(encoder.encode(PASSAGES[:10]), found_ND)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_search_finds_the_nearest_passages_of_all_parts(
    workers: int, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "facts.txt").write_text("\n".join(PASSAGES) + "\n\n")
    config = CorpusConfig(
        path=str(tmp_path / "facts.txt"),
        pool="all",
        model=ModelConfig(path=str(model)),
        query_prefix="q ",
        passage_prefix="p ",
        batch=7,
    )
    with LocalLauncher(world_size=workers) as launcher:
        cluster = launcher.start(SearchWorker, Placement(Role.SEARCH, pool="all"), "facts", config)
        cluster.call(SearchWorker.start)
        asked = [(text, count) for text in QUERIES for count in (1, 4, 100)]
        found = asyncio.run(search(cluster, asked))
        cluster.call(SearchWorker.offload)

        async def while_away() -> Any:
            waiting = asyncio.ensure_future(search(cluster, asked[:1]))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await asyncio.to_thread(cluster.call, SearchWorker.onload)
            return await asyncio.wait_for(waiting, 10)

        assert asyncio.run(while_away()) == found[:1]
    theirs = by_hand(model, [f"p {each}" for each in PASSAGES], "mean", 512)
    mine = by_hand(model, [f"q {text}" for text, _ in asked], "mean", 512)
    for cosines_N, (_, count), passages in zip(mine @ theirs.T, asked, found, strict=True):
        best = cosines_N.sort(descending=True).values[:count]
        got = torch.stack([cosines_N[PASSAGES.index(each)] for each in passages])
        assert len(set(passages)) == min(count, len(PASSAGES))
        assert (best - got).abs().max() < 1e-5


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4), st.integers(1, 8))
def test_parts_are_joined_by_their_cosines_and_then_by_their_places(
    parts: list[list[int]], count: int
) -> None:
    class Parts:
        world_size = len(parts)

        async def ask(self, rank: int, method: Any, queries: Any) -> Any:
            hits = [(float(c), rank + i * len(parts), f"{c}") for i, c in enumerate(parts[rank])]
            return [sorted(hits, key=lambda hit: (-hit[0], hit[1]))]

    [found] = asyncio.run(search(Parts(), [("q", count)]))  # type: ignore[arg-type]
    every = [
        (-c, rank + i * len(parts)) for rank, own in enumerate(parts) for i, c in enumerate(own)
    ]
    assert found == [f"{-c}" for c, _ in sorted(every)[:count]]


def test_the_tool_asks_the_corpora_of_the_run() -> None:
    asked = list[tuple[str, str, int]]()

    async def found(corpus: str, query: str, count: int) -> list[str]:
        asked.append((corpus, query, count))
        return ["the sky is blue", "grass is green"]

    call = '<tool_call>{"name": "search", "arguments": {"query": "colours"}}</tool_call>'
    tokenizer = char_tokenizer(string_of(call))
    turns = [call, "blue"]
    config = EnvironmentConfig(
        env="tools",
        kwargs={"tools": [{"search": {"dense": "facts", "results": 2}}]},
        special_tokens="show",
    )

    def answer(request: GenerateRequest) -> tuple[list[int], FinishReason]:
        number = int(request.id.rpartition(".")[2])
        return [*tokenizer.encode(turns[number]), 1], FinishReason.STOP

    async def run() -> Any:
        rendered = Turns(tokenizer, settings_of(), frozenset({1}))
        host = EnvHost("q", config, load_env("q", config), rendered, found)
        task = GroupTask(Prompt("q:0", (), "what is the sky", "blue", "q"), 0)
        return await played(Writer(answer), host, task)

    (one,) = asyncio.run(run()).samples
    assert asked == [("facts", "colours", 2)]
    assert one.reward == 1.0
    said = tokenizer.decode(list(one.sample.completion.tokens))
    assert "[1] the sky is blue\n\n[2] grass is green" in said


def string_of(*texts: str) -> str:
    """All characters of these texts and of plain English, each once."""
    return "".join(dict.fromkeys(string.printable + "".join(texts)))


def test_the_tool_says_where_it_has_no_corpus() -> None:
    (make,) = load_kits([{"search": {"dense": "facts"}}], {})

    async def call() -> None:
        (tool,) = await make().open({})
        await tool.call({"query": "x"})

    with pytest.raises(EnvironmentFailedError, match="belongs to a run, and there is none here"):
        asyncio.run(call())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "exactly one of `corpus`"),
        ({"corpus": "a.txt", "dense": "facts"}, "exactly one of `corpus`"),
        ({"dense": "facts", "text": "body"}, "are those of its corpus"),
    ],
)
def test_a_search_is_of_a_file_or_of_a_corpus(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_kits([{"search": given}], {})


@pytest.mark.parametrize(
    ("corpus", "environment", "message"),
    [
        ({"pool": "al"}, {}, "corpora.facts.pool: no pool 'al'; did you mean 'all'"),
        ({"model": {"path": "m", "lora": {}}}, {}, "an encoder is not trained"),
        ({}, {"process": True}, "does not reach the corpora"),
        ({}, {"kwargs": {"tools": [{"search": {"dense": "fact"}}]}}, "did you mean 'facts'"),
    ],
)
def test_tools_and_corpora_must_fit(
    corpus: dict[str, Any], environment: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tools = {"env": "tools", "kwargs": {"tools": [{"search": {"dense": "facts"}}]}, **environment}
    given = {"path": "facts.txt", "pool": "all", "model": {"path": "m"}, **corpus}
    path = task_file(tmp_path, environment=tools, corpora={"facts": given})
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)


def test_workers_get_the_place_of_the_file(tmp_path: Path) -> None:
    given = {"path": "facts.txt", "pool": "all", "model": {"path": str(tmp_path / "model")}}
    config = load_config(task_file(tmp_path, corpora={"facts": given})).config
    found: Any = absolute_paths(config)
    assert found.corpora["facts"].path == str(Path.cwd() / "facts.txt")
    assert found.corpora["facts"].model.path == str(tmp_path / "model")


def test_no_limit_counts_a_search_whose_encoder_is_off_its_device() -> None:
    async def found(corpus: str, query: str, count: int) -> list[str]:
        await asyncio.sleep(0.6)
        return ["the sky is blue"]

    call = '<tool_call>{"name": "search", "arguments": {"query": "colours"}}</tool_call>'
    kwargs = {"tools": [{"search": {"dense": "facts"}}], "limits": {"call_s": 0.1}}
    config = EnvironmentConfig(
        env="tools", kwargs=kwargs, special_tokens="show", step_timeout_s=0.4
    )
    tokenizer = char_tokenizer(string_of(call))

    async def run() -> Any:
        rendered = Turns(tokenizer, settings_of(), frozenset({1}))
        host = EnvHost("q", config, load_env("q", config), rendered, found)
        try:
            await host.open("e", 0, {"prompt": "what is the sky", "answer": "blue"})
            return await host.act("e", call, 1)
        finally:
            await host.shut()

    assert "[1] the sky is blue" in asyncio.run(run()).text
