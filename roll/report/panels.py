"""The charts of a page: which metrics each shows, in which section, and what to look for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart."""

    section: str
    title: str
    patterns: tuple[str, ...]
    """Names of metrics; `*` stands for any text."""
    hint: str = ""
    """What to look for, in a sentence."""
    kind: Literal["lines", "stack"] = "lines"
    log: bool = False
    without: tuple[str, ...] = ()
    """Patterns of names that are left out."""

    def names(self, metrics: Sequence[str]) -> list[str]:
        """Return the metrics that the chart shows, in the order of its patterns."""
        return list(
            dict.fromkeys(
                name
                for pattern in self.patterns
                for name in metrics
                if fnmatchcase(name, pattern)
                and not any(fnmatchcase(name, other) for other in self.without)
            )
        )


LEARNING = "Does it learn?"
POLICY = "What the updates do"
RESPONSES = "Responses and groups"
AGREEMENT = "Engine and trainer"
TIME = "Time"
MACHINES = "Replicas, rewards, memory"
HARDWARE = "Machines and GPUs"
REST = "All other metrics"

_BESIDE = ("critic", "process_reward")
"""Roles that learn beside the policy."""


def _beside(name: str) -> tuple[str, ...]:
    """Return the names that a metric of the policy's training has for the roles beside it."""
    return tuple(f"{role}/{name}" for role in _BESIDE)


_RATES = ("reward/*/error_rate", "reward/*/timeout_rate")

STEP_PARTS = (
    "time/rollout_s",
    "time/logprob_s",
    "time/values_s",
    "time/teach_s",
    "time/train_s",
    "time/weight_sync_s",
    "time/validate_s",
    "time/checkpoint_s",
)
"""Times of the parts of a step, which follow one another."""

PANELS = (
    Panel(LEARNING, "Held-out score", ("val/*/mean@*", "val/*/accuracy"), "should rise"),
    Panel(LEARNING, "Reward", ("reward/mean",), "should rise"),
    Panel(
        LEARNING,
        "Held-out loss",
        ("val/*/loss", "val/*/divergence"),
        "should fall",
    ),
    Panel(LEARNING, "Loss on rows", ("nll", "preference_loss", "accuracy"), "loss should fall"),
    Panel(LEARNING, "Reward by tag", ("reward/tag/*/mean",)),
    Panel(
        LEARNING,
        "Rewards and their parts",
        ("reward/*/mean", "reward/*"),
        "a part that falls while the reward rises is suspicious",
        without=(
            "reward/mean",
            "reward/std",
            "reward/tag/*",
            *_RATES,
            "reward/*/turns",
            "reward/*/tool_calls",
            "reward/*/rows",
            "reward/*/conversations",
        ),
    ),
    Panel(LEARNING, "Spread of rewards", ("reward/std",), "0: nothing can be learned"),
    Panel(LEARNING, "Held-out pass@k and maj@n", ("val/*/pass@*", "val/*/maj@*")),
    Panel(POLICY, "Entropy", ("entropy",), "a fall without reward: collapse"),
    Panel(POLICY, "KL from the reference", ("kl/ref",), "should stay far below 1"),
    Panel(POLICY, "Clipped tokens", ("clip_fraction",), "above 0.3: steps too large"),
    Panel(POLICY, "KL of a step", ("approx_kl",)),
    Panel(POLICY, "Gradient norm", ("grad_norm", *_beside("grad_norm")), log=True),
    Panel(POLICY, "Loss", ("loss/*", *_beside("loss/*"))),
    Panel(POLICY, "Factors of loss terms", ("coef/*",)),
    Panel(POLICY, "Learning rate", ("lr", *_beside("lr"))),
    Panel(POLICY, "Skipped updates", ("skipped_steps",), "gradient 0 or not finite"),
    Panel(RESPONSES, "Tokens of a response", ("response_tokens/mean", "response_tokens/max")),
    Panel(RESPONSES, "Truncated responses", ("truncated_fraction", "tag/*/truncated_fraction")),
    Panel(
        RESPONSES,
        "Groups with equal rewards",
        ("groups/equal_rewards_fraction", "tag/*/groups/equal_rewards_fraction"),
        "teach nothing",
    ),
    Panel(
        RESPONSES,
        "Groups started, rejected, aborted",
        ("rollout/started_groups", "rollout/rejected_groups", "rollout/aborted_groups"),
    ),
    Panel(
        RESPONSES,
        "Turns of an episode",
        ("reward/*/turns", "reward/*/tool_calls", "reward/*/rows", "reward/*/conversations"),
    ),
    Panel(RESPONSES, "Samples without reward", ("samples/left_out", "samples/dropped")),
    Panel(
        AGREEMENT,
        "Difference of log-probs",
        ("mismatch/logprob_abs_mean", "mismatch/logprob_abs_max"),
        "mean above 0.05 without staleness: a fault",
        log=True,
    ),
    Panel(AGREEMENT, "KL(engine || trainer)", ("mismatch/kl",), log=True),
    Panel(AGREEMENT, "Age of tokens in versions", ("staleness/mean", "staleness/max")),
    Panel(
        AGREEMENT,
        "Effective sample size",
        ("correction/effective_sample_size",),
        "near 0: few tokens have all the weight",
    ),
    Panel(
        TIME,
        "Time of a step by phase, s",
        STEP_PARTS,
        kind="stack",
    ),
    Panel(
        TIME,
        "What a rollout waits for, s",
        ("time/rollout_s", "time/generate_s", "time/reward_s"),
        "generation and rewards overlap, and run ahead if staleness is allowed",
    ),
    Panel(TIME, "Whole step, s", ("time/step_s",)),
    Panel(TIME, "Tokens per second", ("perf/generated_tokens_per_s", "perf/trained_tokens_per_s")),
    Panel(
        TIME,
        "Share of the devices' peak speed (MFU)",
        ("perf/*_mfu",),
        "of training and of forward passes alone, while they run",
    ),
    Panel(TIME, "Speed of a device, TFLOP/s", ("perf/*_tflops",)),
    Panel(
        MACHINES,
        "Share of time that replicas work",
        ("perf/replicas_busy_min", "perf/replicas_busy_mean", "perf/replicas_busy_max"),
        "far apart: one is slow",
    ),
    Panel(MACHINES, "Busiest replica", ("perf/busiest_replica",), "always the same: it is slow"),
    Panel(MACHINES, "Lost replicas, moved requests", ("rollout/lost_replicas", "rollout/moved_*")),
    Panel(
        MACHINES,
        "Memory of workers and driver, GB",
        ("memory/rss_gb_max", "memory/driver_gb", "memory/*/gb_sum"),
        "pages that processes share count once for each",
    ),
    Panel(MACHINES, "Memory of the largest worker of a role, GB", ("memory/*/gb_max",)),
    Panel(
        MACHINES,
        "Latency of rewards, s",
        ("rewards/*/run_s", "rewards/*/queue_s", "rewards/*_s"),
    ),
    Panel(MACHINES, "Share of a step with a reward at work", ("rewards/*/share_of_step",)),
    Panel(MACHINES, "Failures of rewards", _RATES, "above 0.05: look at the errors"),
    Panel(
        HARDWARE,
        "Share of time that GPUs compute",
        ("gpu/utilisation", "gpu/utilisation_min"),
        "a kernel runs; how well it uses the GPU is told by the share of the peak",
    ),
    Panel(HARDWARE, "Memory of GPUs, GB", ("gpu/memory_*",)),
    Panel(
        HARDWARE,
        "Memory of PyTorch on a GPU, by role, GB",
        ("gpu/*/largest_gb", "gpu/*/allocated_gb", "gpu/*/reserved_gb"),
        "reserved far above the largest: holes",
    ),
    Panel(
        HARDWARE,
        "Memory of machines, GB",
        ("machine/memory_*", "machine/container_*"),
        "at the total or the container's limit, processes are killed",
    ),
    Panel(HARDWARE, "Share of cores that work", ("machine/cpu_share*",)),
    Panel(HARDWARE, "Network, MB/s", ("machine/network_*",)),
    Panel(HARDWARE, "Disks, MB/s", ("machine/disk_read_*", "machine/disk_write_*")),
    Panel(HARDWARE, "Free space on the disk of the run, GB", ("machine/disk_free_gb",)),
)


def panels_of(metrics: Sequence[str]) -> list[tuple[Panel, list[str]]]:
    """Return the charts that have something to show, with their metrics. Each metric that is in no
    other chart gets one in the last section."""
    found = [(panel, names) for panel in PANELS if (names := panel.names(metrics))]
    seen = {name for _, names in found for name in names}
    rest = sorted(name for name in metrics if name not in seen)
    return found + [(Panel(REST, name, (name,)), [name]) for name in rest]


def section_id(section: str) -> str:
    """Return the id of the element that holds the charts of a section."""
    return re.sub(r"\W+", "-", section).strip("-").lower()
