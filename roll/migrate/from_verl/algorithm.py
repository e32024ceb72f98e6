"""Algorithm of verl: advantage, loss, divergence from the reference, filters."""

from __future__ import annotations

from typing import Any

from roll.migrate.job import Job

ACTOR = "actor_rollout_ref.actor"
KL = {
    "kl": "k1",
    "k1": "k1",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
    "k3+": "k3_k2grad",
    "low_var_kl+": "k3_k2grad",
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "constant",
}
LOSSES = {
    "vanilla": "ppo_clip",
    "gspo": "gspo",
    "geo_mean": "gmpo",
    "sapo": "sapo",
    "cispo": "cispo",
    "dppo_tv": "dppo",
    "dppo_kl": "dppo",
    "clip_cov": "clip_cov",
    "kl_cov": "kl_cov",
    "gpg": "pg",
}
ADVANTAGES: dict[str, dict[str, Any]] = {
    "grpo": {"kind": "grpo", "baseline": "mean", "std": "group"},
    "grpo_vectorized": {"kind": "grpo", "baseline": "mean", "std": "group"},
    "rloo": {"kind": "rloo"},
    "rloo_vectorized": {"kind": "rloo"},
    "remax": {"kind": "remax"},
    "opo": {"kind": "opo"},
    "gpg": {"kind": "gpg"},
    "optimal_token_baseline": {"kind": "otb"},
    "reinforce_plus_plus": {"kind": "reinforce_pp", "baseline": "none"},
    "reinforce_plus_plus_baseline": {"kind": "reinforce_pp", "baseline": "group"},
}


def put_algorithm(job: Job) -> None:
    """Write advantage, loss, divergence and filters."""
    name = job.keys.text("algorithm.adv_estimator") or "gae"
    out = "algorithm.advantage"
    gamma, lam = (job.keys.number(f"algorithm.{key}") for key in ("gamma", "lam"))
    keys = ["algorithm.adv_estimator"]
    value = dict(ADVANTAGES.get(name, {}))
    if name == "gae":
        value = {"kind": "gae", "gamma": float(gamma or 1.0)}
        value["policy_lambda"] = 1.0 if lam is None else float(lam)
        keys += ["algorithm.gamma", "algorithm.lam"]
    elif name == "grpo_passk":
        value = {"kind": "pass_k", "k": max(1, job.draft.get("data.samples_per_prompt") - 1)}
        job.ask(f"{out}: pass_k is near to grpo_passk, which compares the two best")
    elif not value:
        job.ask(f"{out}: grpo stands in for {name}, which has no counterpart")
        value = dict(ADVANTAGES["grpo"])
    std = "algorithm.norm_adv_by_std_in_grpo"
    if value["kind"] == "grpo" and job.keys.flag(std) is not None:
        value["std"] = "group" if job.keys.flag(std) else "none"
        keys.append(std)
    job.put(out, value, *keys)
    if name == "gae":
        job.put("algorithm.advantage_shaping", [{"kind": "whiten"}], note="verl whitens gae")
    for key in ("gamma", "lam"):
        job.why(f"algorithm.{key}", f"{name} does not discount")
    _put_loss(job)
    _put_kl_in_reward(job)
    if job.keys.flag("algorithm.filter_groups.enable"):
        job.put(
            "rollout.filters",
            [{"kind": "equal_rewards"}],
            "algorithm.filter_groups.enable",
            "algorithm.filter_groups.metric",
        )
        tries = job.keys.number("algorithm.filter_groups.max_num_gen_batches")
        if tries and tries >= 1:
            job.put(
                "rollout.max_prompts_factor",
                float(tries),
                "algorithm.filter_groups.max_num_gen_batches",
            )
    job.why("algorithm.filter_groups", "off, or without a limit")


def _put_loss(job: Job) -> None:
    """Write the loss terms and their reduction."""
    mode = f"{ACTOR}.policy_loss.loss_mode"
    kind = LOSSES.get(job.keys.text(mode) or "vanilla", "ppo_clip")
    if job.keys.text(mode) not in (None, *LOSSES):
        job.ask(f"algorithm.loss: ppo_clip stands in for {job.keys.text(mode)}")
    term: dict[str, Any] = {"kind": kind}
    keys = [mode]
    if kind in ("ppo_clip", "gspo", "gmpo", "clip_cov", "cispo", "dppo"):
        both = job.keys.number(f"{ACTOR}.clip_ratio") or 0.2
        ends = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
        low, high = (float(job.keys.number(key) or both) for key in ends)
        term |= {"clip_low": low, "clip_high": high}
        keys += [f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high")]
        if kind == "dppo":
            measure = (job.keys.text(mode) or "").removeprefix("dppo_")
            term = {"kind": kind, "divergence": measure, "threshold": high}
            if low != high:
                job.ask(f"algorithm.loss: dppo has one threshold; clip_ratio_low = {low:g} is lost")
    if kind == "ppo_clip":
        bound = job.keys.number(f"{ACTOR}.clip_ratio_c")
        term["dual_clip"] = float(bound) if bound and bound > 1 else 3.0
        keys.append(f"{ACTOR}.clip_ratio_c")
    loss = [term]
    if job.keys.flag(f"{ACTOR}.use_kl_loss"):
        coef = job.keys.number(f"{ACTOR}.kl_loss_coef")
        kl = {"kind": "kl", "coef": 0.001 if coef is None else max(float(coef), 0.0)}
        kl["estimator"] = KL.get(job.keys.text(f"{ACTOR}.kl_loss_type") or "low_var_kl", "k3")
        loss.append(kl)
        keys += [f"{ACTOR}.{name}" for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type")]
    entropy = job.keys.number(f"{ACTOR}.entropy_coeff")
    if entropy and entropy > 0:
        loss.append({"kind": "entropy", "coef": float(entropy)})
        keys.append(f"{ACTOR}.entropy_coeff")
    job.put("algorithm.loss", loss, *keys)
    for name in ("use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coeff", "clip_ratio_c"):
        job.why(f"{ACTOR}.{name}", "off: the loss has no such term")
    chosen = job.choose(f"{ACTOR}.loss_agg_mode", "algorithm.aggregation", AGGREGATIONS)
    if chosen is None:
        job.put("algorithm.aggregation", "token_mean")


def _put_kl_in_reward(job: Job) -> None:
    """Write the divergence from the reference in the reward of each token."""
    at, out = "algorithm.kl_ctrl", "algorithm.kl_in_reward"
    coef = job.keys.number(f"{at}.kl_coef")
    coef = 0.001 if coef is None else coef
    if job.keys.flag("algorithm.use_kl_in_reward") and coef > 0:
        told = ("algorithm.use_kl_in_reward", f"{at}.kl_coef")
        job.put(f"{out}.coef", float(coef), *told)
        known = {name: each for name, each in KL.items() if each in ("k1", "k2", "k3")}
        job.choose("algorithm.kl_penalty", f"{out}.estimator", known)
        if job.keys.text(f"{at}.type") == "adaptive":
            target = job.keys.number(f"{at}.target_kl") or 0.1
            job.put(f"{out}.target", float(target), f"{at}.type", f"{at}.target_kl")
            prompts = job.draft.get("data.prompts_per_step")
            samples = prompts * job.draft.get("data.samples_per_prompt")
            horizon = job.keys.whole(f"{at}.horizon") or 10_000
            job.put(f"{out}.horizon", max(horizon, samples), f"{at}.horizon")
    for key in ("algorithm.use_kl_in_reward", "algorithm.kl_penalty", at):
        job.why(key, "off, or the coefficient stays as it is")
