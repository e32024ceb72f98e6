"""Benchmark of the pure functions of algorithms and data against those of verl 0.9.1.

verl is installed, without its dependencies, into a separate folder and imported from there. Both
sides get the same tensors and must agree. They are timed in turns, and medians are printed. Freed
memory stays with the process, as in the driver of a run, for both sides.

    python benchmarks/algorithms.py [--repeats 30]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roll.algorithms import Gae, Grpo, PpoClip, Shaping, WhitenAdvantage, token_weights
from roll.algorithms.loss_interface import PolicyTerms
from roll.config.algorithm import (
    Aggregation,
    GaeConfig,
    GrpoConfig,
    PpoClipConfig,
    WhitenAdvantageConfig,
)
from roll.core.batches import RolloutBatch
from roll.data.balance import balanced_order
from roll.data.packing import pack
from roll.platform.allocator import keep_freed_memory

ROOT = Path(__file__).parents[1]
PACKAGES = ("verl==0.9.1", "tensordict", "pyvers", "orjson", "codetiming")
ROWS, WIDTH, GROUP = 512, 1024, 8


def import_verl() -> Any:
    """Install verl if it is missing, and return its module of algorithms. Its folder comes last on
    the import path, so that both sides use the same torch."""
    folder = ROOT / "outputs" / "verl-0.9.1"
    if not (folder / "verl").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), *PACKAGES], check=True)
    sys.path.append(str(folder))
    warnings.simplefilter("ignore")
    from verl.trainer.ppo import core_algos

    return core_algos


def make_batch() -> RolloutBatch:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(WIDTH // 4, WIDTH + 1, (ROWS,), generator=g)
    mask_BT = torch.arange(WIDTH) < lengths[:, None]
    old_BT = -torch.rand(ROWS, WIDTH, generator=g) * mask_BT
    return RolloutBatch(
        tokens=torch.zeros(ROWS, WIDTH, dtype=torch.int64),
        lengths=lengths,
        sample_ids=[str(row) for row in range(ROWS)],
        tags=["x"] * ROWS,
        group_ids=torch.arange(ROWS) // GROUP,
        loss_mask=mask_BT,
        rewards=torch.randint(0, 2, (ROWS,), generator=g).float(),
        old_logprobs=old_BT,
        values=torch.randn(ROWS, WIDTH, generator=g) * mask_BT,
        advantages=torch.randn(ROWS, WIDTH, generator=g) * mask_BT,
        token_weights=token_weights(mask_BT, Aggregation.TOKEN_MEAN),
    )


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], repeats: int) -> list[float]:
    """Time both functions in turns; return the median of each, in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 2):
        for work, taken in zip((ours, theirs), times, strict=True):
            begun = time.perf_counter()
            work()
            taken.append(1000 * (time.perf_counter() - begun))
    return [statistics.median(taken[2:]) for taken in times]


def token_level(batch: RolloutBatch) -> Tensor:
    """Return float32 `[B, T]` with the reward on the last token of each row, as verl expects it."""
    rewards_BT = torch.zeros(batch.tokens.shape)
    assert batch.rewards is not None
    rewards_BT[torch.arange(len(batch)), batch.lengths - 1] = batch.rewards
    return rewards_BT


def gae(batch: RolloutBatch, verl: Any, repeats: int) -> tuple[list[float], float]:
    """Compare GAE: advantages and returns. Our side is the whole call that the driver of a run
    makes.

    Returns:
        The times of both sides in milliseconds, and the distance of their results.
    """
    estimator = Gae(GaeConfig(gamma=1.0, policy_lambda=0.95))
    shaping = Shaping(advantage_parts={"whiten": WhitenAdvantage(WhitenAdvantageConfig())})
    rewards_BT, mask_BT = token_level(batch), batch.loss_mask.float()

    def ours() -> Tensor:
        shaped, _ = shaping.add_advantages(batch, estimator)
        assert shaped.advantages is not None
        return shaped.advantages

    def theirs() -> Tensor:
        found_BT, _ = verl.compute_gae_advantage_return(
            rewards_BT, batch.values, mask_BT, 1.0, 0.95
        )
        return found_BT * mask_BT

    return in_turns(ours, theirs, repeats), distance(ours(), theirs())


def grpo(batch: RolloutBatch, verl: Any, repeats: int) -> tuple[list[float], float]:
    estimator = Grpo(GrpoConfig())
    rewards_BT, mask_BT = token_level(batch), batch.loss_mask.float()
    index = np.array([str(group) for group in batch.group_ids.tolist()])

    def ours() -> Tensor:
        return estimator(batch).advantages_BT

    def theirs() -> Tensor:
        found_BT, _ = verl.compute_grpo_outcome_advantage(rewards_BT, mask_BT, index)
        return found_BT

    return in_turns(ours, theirs, repeats), distance(ours(), theirs())


def ppo_loss(batch: RolloutBatch, verl: Any, repeats: int) -> tuple[list[float], float]:
    """Compare the forward and backward pass of the PPO loss, with the metrics that each side
    reports.

    Returns:
        The times of both sides in milliseconds, and the distance of their gradients.
    """
    loss, mask_BT = PpoClip(PpoClipConfig(dual_clip=3.0)), batch.loss_mask.float()
    weights_BT = batch.token_weights
    assert batch.old_logprobs is not None
    assert weights_BT is not None
    g = torch.Generator().manual_seed(1)
    new_BT = batch.old_logprobs + 0.2 * torch.randn(ROWS, WIDTH, generator=g) * mask_BT

    def ours() -> Tensor:
        leaf_BT = new_BT.clone().requires_grad_()
        found = loss(PolicyTerms(leaf_BT), batch)
        (found.loss_BT * weights_BT).sum().backward()
        for value_BT in found.metrics_BT.values():
            (value_BT * mask_BT).sum() / mask_BT.sum()
        assert leaf_BT.grad is not None
        return leaf_BT.grad

    def theirs() -> Tensor:
        leaf_BT = new_BT.clone().requires_grad_()
        total, *_ = verl.compute_policy_loss(
            batch.old_logprobs, leaf_BT, batch.advantages, mask_BT, cliprange=0.2,
            clip_ratio_c=3.0, loss_agg_mode="token-mean",
        )  # fmt: skip
        total.backward()
        assert leaf_BT.grad is not None
        return leaf_BT.grad

    return in_turns(ours, theirs, repeats), distance(ours(), theirs())


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference, divided by the largest absolute value of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def balance(repeats: int) -> tuple[list[float], list[float]]:
    """Compare the balancing of 4096 rows over 64 ranks.

    Returns:
        For both sides, the time in milliseconds, and by how much the tokens of the largest rank
        exceed the mean, relative to the mean.
    """
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    lengths = lognormal(4096)
    times = in_turns(
        lambda: balanced_order(lengths, 64),
        lambda: get_seqlen_balanced_partitions(lengths, 64, equal_size=True),
        max(3, repeats // 3),
    )
    order = balanced_order(lengths, 64)
    parts = [order[i : i + 64] for i in range(0, 4096, 64)]
    uneven = []
    for found in (parts, get_seqlen_balanced_partitions(lengths, 64, equal_size=True)):
        totals = [sum(lengths[row] for row in part) for part in found]
        uneven.append(64 * max(totals) / sum(totals) - 1)
    return times, uneven


def first_fit_decreasing(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = next((i for i, room in enumerate(rooms) if room >= length), None)
        if at is None:
            rooms.append(capacity - length)
        else:
            rooms[at] -= length
    return len(rooms)


def lognormal(count: int) -> list[int]:
    drawn = np.random.default_rng(0).lognormal(6.0, 0.9, count)
    return np.clip(drawn, 1, 4096).astype(int).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    keep_freed_memory()
    verl, batch, failed = import_verl(), make_batch(), []
    print(f"{'':24}{'roll':>10}{'verl':>10}   ratio   difference")
    for name, case, faster in (
        ("GAE, whitened", gae, 10),
        ("GRPO advantage", grpo, 1),
        ("PPO loss", ppo_loss, 1),
    ):
        (ours, theirs), apart = case(batch, verl, repeats)
        print(f"{name:24}{ours:8.2f}ms{theirs:8.2f}ms{theirs / ours:8.1f}   {apart:.1e}")
        if theirs / ours < faster or apart > 1e-4:
            failed.append(name)
    (ours, theirs), (our_excess, their_excess) = balance(repeats)
    print(f"{'balance 4096 over 64':24}{ours:8.2f}ms{theirs:8.2f}ms{theirs / ours:8.1f}")
    print(f"  largest rank above the mean: {our_excess:.2e}, {their_excess:.2e}")
    if ours > theirs or our_excess > their_excess:
        failed.append("balance")
    lengths = lognormal(4096)
    (taken, _) = in_turns(lambda: pack(lengths, 4096), lambda: None, repeats)
    bins, best = len(pack(lengths, 4096)), first_fit_decreasing(lengths, 4096)
    print(f"{'packing 4096 into 4096':24}{taken:8.2f}ms   {bins} bins, first fit decreasing {best}")
    if taken > 10 or bins > best:
        failed.append("packing")
    print("all within their limits" if not failed else f"outside: {', '.join(failed)}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
