"""Notices about settings that are valid but have consequences that a user should know.

`roll check` prints the notices and a run logs them; no config is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roll.config.algorithm import DistillConfig, Need
from roll.config.algorithm.loss_choice import PolicyChoice
from roll.config.algorithm.losses import LossTermConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig

WITHOUT_RATIO = ("pg", "dro")
"""Policy terms that do not compare the policy with an older one."""
SUGGESTED_UPDATES = 4
"""Number of updates per step that a notice suggests, if it divides the samples."""


def notices(config: RunConfig) -> list[str]:
    """Return the notices about a config, one line each, `key: what and what to set`."""
    if not isinstance(config, RlvrBase):
        return []
    return [*_stale(config), *_idle_ratio(config), *_cut_sampling(config)]


def _policy_term(config: RlvrBase) -> tuple[str, LossTermConfig] | None:
    """Return the key and the term that estimates the policy gradient; None if there is none."""
    for i, term in enumerate(config.algorithm.loss):
        if isinstance(term, PolicyChoice):
            return f"algorithm.loss.{i}", term
    return None


def _stale(config: RlvrBase) -> Iterator[str]:
    """Yield a notice if samples come from older weights and nothing in the loss corrects for
    that."""
    steps, algorithm, found = config.rollout.max_staleness, config.algorithm, _policy_term(config)
    if not steps or algorithm.correction is not None or found is None:
        return
    _, term = found
    by_engine = algorithm.old_logprobs == "rollout"
    if by_engine and term.kind not in WITHOUT_RATIO:
        return
    weight = "algorithm.correction={weight: {level: token, upper: 2.0}}"
    if term.kind in WITHOUT_RATIO:
        why = f"{term.kind} has no ratio to older weights"
        auto = " and algorithm.old_logprobs=auto" if by_engine else ""
        advice = f"set {weight}{auto}"
    else:
        why = (
            f"with algorithm.old_logprobs={algorithm.old_logprobs} the ratio of {term.kind} begins "
            "at the present weights, not at those that drew the samples"
        )
        if term.couples_tokens:
            weight = weight.replace("token", "sequence")
        advice = f"set algorithm.old_logprobs=rollout, or {weight}"
    yield (
        f"rollout.max_staleness: samples are up to {steps} step(s) older than the weights that "
        f"train on them, and nothing corrects for it: {why}; {advice}"
    )


def _idle_ratio(config: RlvrBase) -> Iterator[str]:
    """Yield a notice if the loss depends on a ratio that is always 1."""
    found = _policy_term(config)
    if found is None or Need.RATIO not in found[1].needs:
        return
    if config.updates_per_step() > 1 or config.algorithm.old_logprobs == "rollout":
        return
    key, term = found
    several = _samples_per_update(config)
    set_updates = (
        f"actor_train.samples_per_update={several} for {config.samples_per_step // several} "
        f"updates of the {config.samples_per_step} samples of a step"
        if several
        else "actor_train.epochs=2 for two updates per step"
    )
    yield (
        f"{key}: {term.kind} is about the ratio of new to old probabilities, which is always 1 "
        f"with one update per step, so it does nothing that `pg` would not; set {set_updates}, or "
        "algorithm.old_logprobs=rollout"
    )


def _samples_per_update(config: RlvrBase) -> int | None:
    """Return the size of an update that divides the samples of a step and can be divided over the
    ranks, as near as possible to a quarter of the samples; None if there is no such size."""
    samples, ranks = config.samples_per_step, config.num_parts("actor_train")
    parts = [n for n in range(2, samples + 1) if samples % n == 0 and samples // n % ranks == 0]
    best = min(parts, key=lambda n: abs(n - SUGGESTED_UPDATES), default=None)
    return None if best is None else samples // best


def _cut_sampling(config: RlvrBase) -> Iterator[str]:
    """Yield a notice if the engine's log-probs, which are those of a truncated distribution, are
    compared with the trainer's, which are those of the whole one."""
    for key, sampling in config.samplings.items():
        inherited = key != "sampling" and (sampling.top_p, sampling.top_k) == (
            config.sampling.top_p,
            config.sampling.top_k,
        )
        cut = [
            f"{name}={value:g}"
            for name, value, whole in (
                ("top_p", sampling.top_p, 1.0),
                ("top_k", sampling.top_k, -1),
            )
            if value not in (whole, 0)
        ]
        if cut and not inherited:
            yield from _compared(config, key, cut)


def _compared(config: RlvrBase, key: str, cut: Sequence[str]) -> Iterator[str]:
    """Yield a notice if something compares log-probs of the engine, which are those of a truncated
    distribution, with the trainer's.

    Args:
        key: key of the sampling in the config.
        cut: settings that truncate the distribution, at least one, as text: `top_p=0.9`.
    """
    algorithm, readers = config.algorithm, []
    if algorithm.old_logprobs == "rollout":
        readers.append("algorithm.old_logprobs=rollout")
    if algorithm.correction is not None:
        readers.append("algorithm.correction")
    if not config.scores_old_logprobs:
        if algorithm.kl_in_reward is not None:
            readers.append("algorithm.kl_in_reward")
        readers += _distilled(config, key)
    if readers:
        yield (
            f"{key}.{cut[0].split('=')[0]}: with {' and '.join(cut)} the engine's log-probs are "
            f"those of the distribution that was cut, the trainer's of the whole one, and "
            f"{' and '.join(readers)} takes the difference for one of the weights; set "
            f"{key}.top_p=1 and {key}.top_k=-1, or "
            + (
                "algorithm.old_logprobs=recompute"
                if algorithm.correction is None
                else "drop the correction"
            )
        )


def _distilled(config: RlvrBase, key: str) -> list[str]:
    """Return the keys of the advantages that compare the policy's log-probs with a teacher's in
    samples that are drawn as `key`, a key of `samplings`, says."""
    if key == "sampling":
        cut = config.sampling.top_p, config.sampling.top_k
        tags = [t for t, own in config.domain_sampling.items() if (own.top_p, own.top_k) == cut]
        keys = {"algorithm.advantage": None} | dict.fromkeys(
            f"domains.{tag}.advantage" for tag in tags
        )
    else:
        own = key.removesuffix(".sampling") + ".advantage"
        keys = {own if own in config.advantages else "algorithm.advantage": None}
    return [
        f"{each} (distill)"
        for each in keys
        if isinstance(config.advantages.get(each), DistillConfig)
    ]
