"""Divergences of a student whose vocabulary is cut over ranks, against whole logits in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.peak_memory import PeakMemory, return_freed
from mcore_adapter.parallel.logprobs import token_logprobs
from mcore_adapter.parallel.vocabulary import VocabularyPart
from roll.algorithms.divergences import divergence
from roll.algorithms.teacher_divergence import Comparison, coarse, top_logprobs
from roll.config.algorithm.divergences import (
    AdaptiveKlConfig,
    DivergenceConfig,
    ForwardKlConfig,
    JensenShannonConfig,
    ReverseKlConfig,
    SkewedForwardConfig,
    SkewedReverseConfig,
    UldConfig,
)
from roll.core.teacher_outputs import OutputHead, TeacherRow
from roll.strategy.megatron.divergence import divergences, outputs_here
from tests.convert.spawned import run_ranks

TOKENS, NEEDED, TOP_K = 13, 11, 4
KINDS: list[DivergenceConfig] = [
    ForwardKlConfig(),
    ReverseKlConfig(),
    JensenShannonConfig(beta=0.3),
    SkewedForwardConfig(),
    SkewedReverseConfig(alpha=0.2),
    AdaptiveKlConfig(),
    UldConfig(),
]
HOW = Comparison(ForwardKlConfig(), 1.3, 0.8, TOKENS)
CAP, DIVISOR = 3.0, 0.7


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def heads(kind: DivergenceConfig) -> dict[str, OutputHead]:
    """Those of two teachers, with more logits than tokens. For ULD the second has tokens of its
    own, more than the student."""
    others = TOKENS + 6 if isinstance(kind, UldConfig) else TOKENS
    wide_VD, wide_V = drawn(others + 2, 8, seed=2), drawn(others + 2, seed=3)
    return {
        "small": OutputHead(drawn(TOKENS + 3, 6, seed=1), None, DIVISOR, CAP, TOKENS),
        "wide": OutputHead(wide_VD, wide_V, 1.0, None, others),
    }


def rows(kind: DivergenceConfig, top_k: int | None) -> list[TeacherRow]:
    """What they told of two rows, from whose second the student needs a token that no teacher has
    read."""
    made = []
    for seed, (name, head) in enumerate(heads(kind).items()):
        at = torch.arange(1, NEEDED // 2 + 1)
        states = drawn(len(at), head.weight_VD.shape[1], seed=10 + seed)
        outputs: tuple[Tensor, ...] = (states,)
        if top_k is not None:
            ids, logprobs = top_logprobs(told(head, states), top_k)
            outputs = ids, logprobs.float()
        made.append(TeacherRow(name, at, outputs, None if top_k else head))
    return made


def told(head: OutputHead, states: Tensor) -> Tensor:
    """A teacher's log-probs, float64."""
    logits = states.double() @ head.weight_VD.double().T
    if head.bias_V is not None:
        logits = logits + head.bias_V.double()
    if head.cap is not None:
        logits = head.cap * (logits / head.cap).tanh()
    scaled = logits / head.divisor / HOW.teacher_temperature
    return scaled[:, : head.num_tokens].log_softmax(-1)


def everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def needed() -> Tensor:
    mask = torch.ones(2, NEEDED // 2 + 2, dtype=torch.bool)
    mask[0, -1] = False
    return mask


def student(ranks: int) -> tuple[Tensor, Tensor]:
    """Logits of the needed tokens with the padding of this many ranks, and weights of the
    divergences."""
    width = {1: 16, 2: 8, 5: 4}[ranks]  # of five ranks one has one token, and the last has none
    logits = torch.full((NEEDED, width * ranks), 50.0)
    logits[:, :TOKENS] = drawn(NEEDED, TOKENS, seed=4) * 3
    return logits, drawn(NEEDED, seed=5)


def on_ranks(settings: list[tuple[DivergenceConfig, int | None]]) -> list[tuple[Tensor, Tensor]]:
    """The divergences, and the gradient of this rank's logits, of each."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    logits, weights = student(ranks)
    found = []
    for kind, top_k in settings:
        mine = logits.chunk(ranks, dim=-1)[rank].clone().requires_grad_()
        how = replace(HOW, divergence=kind)
        part = VocabularyPart(everyone(), TOKENS, mine.shape[1])
        outputs = outputs_here(rows(kind, top_k), needed(), torch.device("cpu"), how, part)
        apart = divergences(mine, outputs, how, part, chunk_tokens=3)
        (apart * weights).sum().backward()
        assert mine.grad is not None
        found.append((apart.detach(), mine.grad))
    return found


def by_hand(kind: DivergenceConfig, top_k: int | None) -> tuple[Tensor, Tensor]:
    logits, weights = student(1)
    wide = logits.double().requires_grad_()
    ours = (wide[:, :TOKENS] / HOW.student_temperature).log_softmax(-1)
    whole = torch.zeros(NEEDED, dtype=torch.float64)
    for number, row in enumerate(rows(kind, None)):
        places = torch.arange(len(row.positions_N)) + number * len(row.positions_N)
        assert row.head is not None
        theirs, mine = told(row.head, row.outputs[0]), ours[places]
        if top_k is not None:
            ids, theirs = top_logprobs(theirs, top_k)
            of_uld = isinstance(kind, UldConfig)
            mine = top_logprobs(mine, top_k)[1] if of_uld else coarse(mine, ids)
        if isinstance(kind, UldConfig) and top_k is not None:
            found = (theirs.exp() - mine.exp()).abs().sum(-1)
        else:
            found = divergence(kind, theirs, mine)
        whole = whole.index_put((places,), found)
    (whole * weights).sum().backward()
    assert wide.grad is not None
    return whole.detach(), wide.grad[:, :TOKENS]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_divergence_and_gradient_are_those_of_the_whole_vocabulary(ranks: int) -> None:
    settings = [(kind, top_k) for kind in KINDS for top_k in (None, TOP_K)]
    answers = run_ranks(on_ranks, ranks, settings)
    for number, setting in enumerate(settings):
        wanted, gradient = by_hand(*setting)
        for answer in answers:
            torch.testing.assert_close(answer[number][0].double(), wanted, atol=2e-6, rtol=2e-6)
        found = torch.cat([answer[number][1] for answer in answers], dim=-1).double()
        torch.testing.assert_close(found[:, :TOKENS], gradient, atol=2e-6, rtol=1e-5)
        assert not found[:, TOKENS:].any()


def memory_of(kind: str) -> dict[str, int]:
    """The peak of both passes over logits in bfloat16, and their size, in bytes."""
    return_freed()
    group, tokens, width = everyone(), 1024, 8192
    how = Comparison(ForwardKlConfig(), 1.0, 1.0, 2 * width)
    head = OutputHead(drawn(2 * width, 16, seed=1).bfloat16(), None, 1.0, None, 2 * width)
    states = drawn(tokens, 16, seed=2).bfloat16()
    row = TeacherRow("t", torch.arange(1, tokens + 1), (states,), head)
    logits = drawn(tokens, width, seed=3).bfloat16().requires_grad_()

    def passes() -> None:
        if kind == "divergence":
            part = VocabularyPart(group, 2 * width, width)
            mask = torch.ones(1, tokens + 1, dtype=torch.bool)
            outputs = outputs_here([row], mask, torch.device("cpu"), how, part)
            found = divergences(logits, outputs, how, part, chunk_tokens=16)
        else:
            targets = torch.arange(tokens)
            logprobs, entropy, squares = token_logprobs(
                logits,
                targets,
                vocab=2 * width,
                group=group,
                chunk=16,
                entropy=True,
                squares=True,
            )
            assert entropy is not None
            assert squares is not None
            found = logprobs + entropy + squares
        found.sum().backward()
        logits.grad = None

    passes()  # what is made once
    with PeakMemory() as memory:
        passes()
    return {"peak": memory.peak_bytes, "logits": logits.nbytes}


@pytest.mark.parametrize("kind", ["divergence", "logprobs"])
def test_neither_pass_has_all_logits_in_float32(kind: str) -> None:
    for answer in run_ranks(memory_of, 2, kind):
        # The gradient is as large as the logits. Beside it, logits in float32 would be twice that.
        assert answer["peak"] < 2.5 * answer["logits"], answer
        assert answer["peak"] > 0.5 * answer["logits"], "the meter reads nothing"
