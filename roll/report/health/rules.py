"""The table of rules of alarms: condition, and what to try. Causes come before what follows from
them."""

from __future__ import annotations

from roll.report.health import conditions
from roll.report.health.alarms import Rule

AFTER_WRONG_SAMPLES = (
    "updates_too_far",
    "constant_reward",
    "reward_hacked",
    "reward_leaks",
    "length_explosion",
    "entropy_collapse",
    "truncated",
    "equal_groups",
)
"""Rules whose alarms may follow from training on samples of another policy."""

RULES = (
    Rule(
        "not_finite",
        conditions.not_finite,
        "lower the learning rate; look at the data and the rewards of the first such step; train "
        "in float32 to see whether bfloat16 is to blame",
        explains=("engine_mismatch", "stale_samples", *AFTER_WRONG_SAMPLES),
    ),
    Rule(
        "engine_mismatch",
        conditions.engine_mismatch,
        "compare dtype and quantization of engine and trainer, use no sampling settings that "
        "change the logits (top_p, top_k), set track.verify_weights: always, or weigh tokens by "
        "algorithm.correction",
        explains=AFTER_WRONG_SAMPLES,
    ),
    Rule(
        "stale_samples",
        conditions.stale_samples,
        "lower rollout.max_staleness or the learning rate, or set algorithm.correction",
        explains=AFTER_WRONG_SAMPLES,
    ),
    Rule(
        "updates_too_far",
        conditions.updates_too_far,
        "lower the learning rate (try a tenth), take fewer epochs on each batch, lower "
        "optimizer.max_grad_norm, or add a KL loss",
        explains=(
            "constant_reward",
            "entropy_collapse",
            "length_explosion",
            "truncated",
            "equal_groups",
        ),
    ),
    Rule(
        "constant_reward",
        conditions.constant_reward,
        "try the reward on responses (`roll reward try`), look at answers and tags of the data, "
        "and at the samples below",
        explains=("entropy_collapse", "equal_groups"),
    ),
    Rule(
        "reward_hacked",
        conditions.reward_hacked,
        "read the best samples below, and close the way by which they are paid; add a KL loss, or "
        "stop at the best step",
        explains=("reward_leaks",),
    ),
    Rule(
        "reward_leaks",
        conditions.reward_leaks,
        "read the best samples below, and look in the prompts for their answers; see whether the "
        "held-out prompts are of the same kind",
    ),
    Rule(
        "length_explosion",
        conditions.length_explosion,
        "penalise length (reward_shaping: [{kind: overlong_penalty}]), look for loops in the "
        "longest samples, or choose an aggregation that does not favour long responses",
        explains=("truncated",),
    ),
    Rule(
        "entropy_collapse",
        conditions.entropy_collapse,
        "lower the learning rate, raise clip_high, add an entropy or KL loss, or raise "
        "sampling.temperature",
        explains=("equal_groups",),
    ),
    Rule(
        "truncated",
        conditions.truncated,
        "raise sampling.max_new_tokens (for agents, the limits of turns and tokens), or look below "
        "at what keeps the model from ending",
    ),
    Rule(
        "dead_filter",
        conditions.dead_filter,
        "choose prompts of fitting difficulty (data.curriculum), take more samples of a prompt, "
        "or loosen rollout.filters",
        explains=("equal_groups",),
    ),
    Rule(
        "equal_groups",
        conditions.equal_groups,
        "choose prompts of fitting difficulty (data.curriculum), take more samples of a prompt, "
        "raise sampling.temperature, or set rollout.filters: [{kind: equal_rewards}]",
    ),
    Rule(
        "slow_replica",
        conditions.slow_replica,
        "look at the device and at the other processes of the replica's machine, and at "
        "rollout.routing; rollout.health.slow_factor decides from when on it is restarted",
    ),
    Rule(
        "lost_replicas",
        conditions.lost_replicas,
        "read the warnings in the run's log, which say why; look at the memory of the devices",
    ),
    Rule(
        "reward_fails",
        conditions.reward_fails,
        "run `roll reward try` on the samples in rollouts/ to see the errors",
    ),
    Rule(
        "reward_times_out",
        conditions.reward_times_out,
        "raise timeout_s of the reward, or give it more workers",
    ),
    Rule(
        "memory_grows",
        conditions.memory_grows,
        "look for what a reward, an environment or a tool keeps; checkpoints let the run go on "
        "after a restart",
    ),
)
