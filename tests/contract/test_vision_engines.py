"""Engines that see, in every family: real engines, tiny models, transformers' own pass as the
oracle."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from roll.core.completion import Completion, FinishReason
from roll.core.errors import EngineError
from roll.core.types import GenerateRequest
from roll.rollout.fleet.partial_completions import remaining_request
from tests.contract.engine_rig import (
    PROMPT,
    SEEN_WITHIN,
    Rig,
    assert_sees,
    request,
    rescore,
    shake,
    start,
)
from tests.tiny import save_tiny_model
from tests.turns import in_groups
from tests.vision_models import IMAGE, Held, SeenRow, oracle_logprobs, save_vision_model, seen_row

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
ONE = ((2, 3),)
SEVERAL = ((2, 2), (1, 3), (4, 2))
LONG = ((8, 8), (8, 8), (2, 8))
"""More tokens than a block of vLLM's prefix cache."""


@dataclass
class SeeingRig:
    """An engine of a family, and rows of it."""

    rig: Rig
    family: str
    folder: Path

    def row(self, sizes: Sequence[tuple[int, int]] = ONE, seed: int = 0) -> SeenRow:
        return seen_row(self.family, sizes, seed=seed)

    def generate(self, row: SeenRow, **changes: Any) -> list[Completion]:
        return self.rig.run(self.rig.engine.generate(ask(row, **changes)))

    def push(self) -> None:
        """What `save_pretrained` writes: the names of a checkpoint are not those in memory."""
        pushed = self.folder / f"pushed-{self.rig.version}"
        self.rig.oracle.save_pretrained(pushed)
        self.rig.push(list(load_file(pushed / "model.safetensors").items()))


@pytest.fixture(
    scope="module",
    params=[
        *in_groups([f"hf-{family}" for family in FAMILIES]),
        *in_groups([f"vllm-{family}" for family in FAMILIES], pytest.mark.slow),
    ],
)
def seeing(
    request: pytest.FixtureRequest,
    loop: asyncio.AbstractEventLoop,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SeeingRig]:
    kind, _, family = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    tied = family == "qwen2_vl"
    rig = start(kind, save_vision_model(folder / "model", family, tied=tied), loop)
    yield SeeingRig(rig, family, folder)
    rig.run(rig.engine.close())


def ask(row: SeenRow, **changes: Any) -> GenerateRequest:
    return request(prompt=row.tokens, pictures=row.pictures, **changes)


def assert_sees_by_version(
    completion: Completion, row: SeenRow, models: Mapping[int, PreTrainedModel]
) -> None:
    written = completion.tokens.tolist()
    assert set(completion.versions) == set(models)
    scores = {v: oracle_logprobs(model, row, written) for v, model in models.items()}
    expected = torch.stack([scores[v][i] for i, v in enumerate(completion.versions)])
    found = torch.tensor(completion.logprobs, dtype=torch.float64)
    assert (found - expected).abs().max() < SEEN_WITHIN


@pytest.mark.parametrize("sizes", [ONE, SEVERAL], ids=["one", "several"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_pass_over_the_pictures(
    seeing: SeeingRig, sizes: Sequence[tuple[int, int]], temperature: float
) -> None:
    row = seeing.row(sizes)
    for completion in seeing.generate(row, n=3, temperature=temperature, ignore_eos=True):
        assert len(completion) == 24
        assert_sees(completion, row, seeing.rig.oracle, temperature)


def test_a_picture_changes_what_is_written(seeing: SeeingRig) -> None:
    """Or no other test here would notice that pictures are lost."""
    row = seeing.row()
    (completion,) = seeing.generate(row, ignore_eos=True)
    blank = torch.zeros_like(row.pixel_values)
    written = completion.tokens.tolist()
    seen, unseen = (
        oracle_logprobs(seeing.rig.oracle, each, written)
        for each in (row, replace(row, pixel_values=blank))
    )
    assert (seen - unseen).abs().max() > 1e-2


def test_a_known_picture_is_seen_anew_after_a_push_that_changes_the_tower(
    seeing: SeeingRig,
) -> None:
    row = seeing.row()
    seeing.generate(row)
    shake(seeing.rig.oracle, seed=1)
    seeing.push()
    for completion in seeing.generate(row, n=2, ignore_eos=True):
        assert set(completion.versions) == {seeing.rig.version}
        assert_sees(completion, row, seeing.rig.oracle)


def test_a_response_that_spans_a_push_agrees_with_both_models(seeing: SeeingRig) -> None:
    row = seeing.row(SEVERAL, seed=3)
    models = {seeing.rig.version: copy.deepcopy(seeing.rig.oracle)}
    asked = ask(row, n=2, tokens=300, ignore_eos=True)
    future = seeing.rig.submit(seeing.rig.engine.generate(asked))
    seeing.rig.wait_until_written(30)
    shake(seeing.rig.oracle, seed=2)
    seeing.push()
    models[seeing.rig.version] = seeing.rig.oracle
    for completion in future.result(timeout=600):
        assert (completion.finish, len(completion)) == (FinishReason.LENGTH, 300)
        assert_sees_by_version(completion, row, models)


def test_equal_tokens_with_other_pictures_share_no_cache(seeing: SeeingRig) -> None:
    first = seeing.row(LONG, seed=4)
    other = seeing.row(LONG, seed=5)
    other = replace(other, tokens=first.tokens)
    assert other.pictures.places == first.pictures.places
    for row in (first, other, first):
        (completion,) = seeing.generate(row, ignore_eos=True)
        assert_sees(completion, row, seeing.rig.oracle)


def test_a_policy_may_write_the_token_that_stands_for_pictures(seeing: SeeingRig) -> None:
    row = seeing.row(SEVERAL, seed=6)
    completions = seeing.generate(row, n=4, tokens=150, ignore_eos=True)
    assert any(IMAGE in completion.tokens for completion in completions)
    for completion in completions:
        assert_sees(completion, row, seeing.rig.oracle)
        # And as a part of the prompt of a later turn.
        longer = replace(row, tokens=(*row.tokens, *completion.tokens))
        (turn,) = seeing.generate(longer, tokens=8, ignore_eos=True)
        both = oracle_logprobs(
            seeing.rig.oracle, row, [*completion.tokens.tolist(), *turn.tokens.tolist()]
        )
        found = torch.tensor(turn.logprobs, dtype=torch.float64)
        assert (found - both[len(completion) :]).abs().max() < SEEN_WITHIN


def test_requests_side_by_side_keep_their_own_positions(seeing: SeeingRig) -> None:
    """One of a tall picture, one of several, one of text: each counts on in its own way."""
    rows = [seeing.row(((6, 1),), seed=7), seeing.row(SEVERAL, seed=8)]
    asked = [ask(row, n=2, tokens=40, ignore_eos=True) for row in rows]
    text = request(tokens=40, ignore_eos=True)

    async def all_at_once() -> list[list[Completion]]:
        generate = seeing.rig.engine.generate
        return await asyncio.gather(*(generate(each) for each in (*asked, text)))

    *seen, (unseen,) = seeing.rig.run(all_at_once())
    for row, completions in zip(rows, seen, strict=True):
        for completion in completions:
            assert_sees(completion, row, seeing.rig.oracle)
    expected = rescore(seeing.rig.oracle, PROMPT, unseen.tokens)
    found = torch.tensor(unseen.logprobs, dtype=torch.float64)
    assert (found - expected).abs().max() < SEEN_WITHIN


def test_another_replica_continues_a_request_with_its_pictures(seeing: SeeingRig) -> None:
    row = seeing.row(SEVERAL, seed=9)
    whole = ask(row, n=2, tokens=40, ignore_eos=True)
    begun = seeing.rig.run(seeing.rig.engine.generate(whole))[1].part(0, 25)
    rest = remaining_request(whole, 1, begun)
    (completion,) = seeing.rig.run(seeing.rig.engine.generate(rest))
    assert len(completion) == 15
    written = [*begun.tokens.tolist(), *completion.tokens.tolist()]
    expected = oracle_logprobs(seeing.rig.oracle, row, written)
    found = torch.tensor([*begun.logprobs, *completion.logprobs], dtype=torch.float64)
    assert (found - expected).abs().max() < SEEN_WITHIN


def changed(row: SeenRow, fault: str) -> SeenRow:
    pictures = row.pictures
    patches = pictures.patches.get()
    if fault == "not expanded":
        place = pictures.places[0]
        return replace(row, tokens=(*row.tokens[: place + 1], *row.tokens[place + 8 :]))
    if fault == "normalised":
        pictures = replace(pictures, patches=Held(patches.astype("float32") / 255))
    elif fault == "of another size":
        pictures = replace(pictures, patches=Held(patches[:, :-2]))
    elif fault == "missing":
        pictures = replace(pictures, patches=Held(patches[:-4]))
    elif fault == "a video":
        frames, rows, columns = pictures.grids[0]
        pictures = replace(pictures, grids=((2 * frames, rows // 2, columns),))
    else:
        pictures = replace(pictures, places=(len(row.tokens) - 2,))
    return replace(row, pictures=pictures)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("not expanded", "once for each merged patch"),
        ("normalised", "patches are float32"),
        ("of another size", "expected uint8"),
        ("missing", "expected uint8"),
        ("a video", "frames of a video"),
        ("at the end", "once for each merged patch"),
    ],
)
def test_pictures_that_do_not_fit_are_refused_and_the_engine_goes_on(
    seeing: SeeingRig, fault: str, message: str
) -> None:
    row = seeing.row(((2, 4),))
    with pytest.raises(EngineError, match=message):
        seeing.generate(changed(row, fault))
    assert_sees(seeing.generate(row)[0], row, seeing.rig.oracle)


def test_a_model_that_reads_text_alone_refuses_pictures(
    loop: asyncio.AbstractEventLoop, tmp_path: Path
) -> None:
    rig = start("hf", save_tiny_model(tmp_path), loop)
    try:
        row = seen_row("qwen2_vl")
        with pytest.raises(EngineError, match="'qwen3' reads none"):
            rig.run(rig.engine.generate(ask(row)))
        assert len(rig.generate(tokens=3, ignore_eos=True)[0]) == 3
    finally:
        rig.run(rig.engine.close())
