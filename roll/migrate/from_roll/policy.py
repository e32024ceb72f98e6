"""Algorithm of ROLL: advantage, loss, shaping, masks, correction."""

from __future__ import annotations

from typing import Any

from roll.migrate.job import Job

KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
LEVELS = {"token": "token", "segment": "turn", "geometric": "geometric", "sequence": "sequence"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
_SHAPING = (
    "norm_mean_type",
    "norm_std_type",
    "reward_normalization.norm_mean_type",
    "reward_normalization.norm_std_type",
    "reward_normalization.method",
    "reward_normalization.grouping",
    "reward_clip",
)
"""Keys that the shaping of rewards is made of."""
_NORMS = {"group": "group", "batch": "batch", "running": "running", "none": "none"}
_METHODS = {
    "identity": ("none", "none"),
    "mean": ("group", "none"),
    "mean_std": ("group", "group"),
    "asym_clip": ("group", "group"),
}


def put_algorithm(job: Job, row_tokens: int, *, agentic: bool = False) -> None:
    """Write the section `algorithm`.

    Args:
        row_tokens: largest number of tokens of a sample, its prompt included.
        agentic: the samples are episodes.
    """
    mean, std, asym = _norms(job, agentic)
    shaping = _put_advantage(job, _reward_shaping(job, mean, std, asym))
    if shaping:
        keys = [key for key in _SHAPING if all(leaf in job.keys.used for leaf in job.keys.at(key))]
        job.put("algorithm.reward_shaping", shaping, *keys)
    _put_advantage_shaping(job)
    _put_loss(job)
    _put_aggregation(job, row_tokens)
    _put_kl_in_reward(job)
    _put_masks(job)
    _put_correction(job)


def _norms(job: Job, agentic: bool) -> tuple[str, str, bool]:
    """Return the levels of mean and std by which rewards are normalised, and whether they are
    clipped to [-1, 3] afterwards (`asym_clip`)."""
    at, asym = ("reward_normalization." if agentic else ""), False
    found: list[str | None] = [None, None]
    if agentic:
        method = job.keys.text(f"{at}method")
        grouping = job.keys.text(f"{at}grouping")
        level = "group" if grouping in (None, "traj_group_id") else "batch"
        if method in _METHODS:
            found = [level if each == "group" else each for each in _METHODS[method]]
            asym = method == "asym_clip"
            job.keys.use(f"{at}method")
        if grouping in ("traj_group_id", "batch"):
            job.keys.use(f"{at}grouping")
        job.why(f"{at}grouping", f"normalised by {level}; by tag: `domains` (docs/rewards.md)")
    for i, name in enumerate(("norm_mean_type", "norm_std_type")):
        for key in (f"{at}{name}", name):
            level_told = job.keys.text(key)
            if level_told is not None and level_told.lower() in _NORMS:
                found[i] = _NORMS[level_told.lower()]
                job.keys.use(key)
                break
            job.why(key, "there is no such level")
    levels = [level or "none" for level in found]
    if "group" in levels and _alone(job):
        job.ask("algorithm.reward_shaping: batch in place of group: a prompt has one sample")
        levels = ["batch" if level == "group" else level for level in levels]
    return levels[0], levels[1], asym


def _alone(job: Job) -> bool:
    """Return whether a prompt has a single sample."""
    return bool(job.draft.get("data.samples_per_prompt", 1) < 2)


def _reward_shaping(job: Job, mean: str, std: str, asym: bool) -> list[dict[str, Any]]:
    """Return the shaping of rewards, in ROLL's order: normalise, then clip."""
    shaping: list[dict[str, Any]] = []
    if (mean, std) != ("none", "none"):
        shaping.append({"kind": "normalize", "mean": mean, "std": std})
    if asym:
        shaping.append({"kind": "clip", "low": -1.0, "high": 3.0})
    limit = job.keys.number("reward_clip")
    if limit is not None and limit > 0:
        shaping.append({"kind": "clip", "low": -float(limit), "high": float(limit)})
        job.keys.use("reward_clip")
    job.why("reward_clip", "clips nothing")
    return shaping


def _put_advantage(job: Job, shaping: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the advantage estimator; return the shaping of rewards that is left beside it."""
    key, target = "adv_estimator", "algorithm.advantage"
    name = job.keys.text(key) or "gae"
    gamma = job.keys.number("gamma")
    gamma = float(gamma) if gamma is not None and 0 < gamma <= 1 else 1.0
    group = {"kind": "normalize", "mean": "group", "std": "group"}
    if name in ("grpo", "gigpo") and _alone(job):
        job.ask(f"{target}: reinforce in place of {name}, which compares samples of a prompt")
        name = "reinforce"
    if name == "gae":
        lambd = job.keys.number("lambd")
        lambd = float(lambd) if lambd is not None and 0 <= lambd <= 1 else 0.95
        value: dict[str, Any] = {"kind": "gae", "gamma": gamma, "policy_lambda": lambd}
        job.put(target, value, key, "gamma", "lambd")
    elif name == "gigpo":
        step = job.keys.number("step_reward_gamma")
        outer, inner = (job.keys.number(k) for k in ("episode_reward_weight", "step_reward_weight"))
        coef = (1.0 if inner is None else inner) / (outer or 1.0)
        value = {"kind": "gigpo", "gamma": float(step or 0.95), "step_coef": max(0.0, coef)}
        weights = ("step_reward_gamma", "episode_reward_weight", "step_reward_weight")
        job.put(target, value, key, *weights)
        if any(each["kind"] == "clip" for each in shaping):
            job.ask("algorithm.reward_shaping: gigpo reads rewards of turns, which nothing clips")
        shaping = []
    elif name == "grpo" and gamma == 1 and shaping in ([], [group]):
        shaping = []
        value = {"kind": "grpo", "baseline": "mean", "std": "group"}
        job.put(target, value, key, "gamma", note="ROLL's grpo normalises by group")
    else:
        if name == "grpo":
            shaping = [group, *(each for each in shaping if each["kind"] != "normalize")]
        elif name not in ("reinforce", "agentic_reinforce"):
            job.ask(f"{target}: reinforce stands in for {name}, which has no counterpart")
        note = "group mean and std are in reward_shaping" if name == "grpo" else ""
        job.put(target, {"kind": "reinforce", "gamma": gamma}, key, "gamma", note=note)
    for each in ("gamma", "lambd"):
        job.why(each, f"{name} does not read it")
    return shaping


def _put_advantage_shaping(job: Job) -> None:
    """Write whitening, then clipping, of advantages."""
    parts: list[dict[str, Any]] = []
    if job.keys.flag("whiten_advantages"):
        parts.append({"kind": "whiten"})
        job.keys.use("whiten_advantages")
    limit = job.keys.number("advantage_clip")
    if limit is not None and limit > 0:
        parts.append({"kind": "clip", "limit": float(limit)})
        job.keys.use("advantage_clip")
    if parts:
        job.put("algorithm.advantage_shaping", parts, "whiten_advantages", "advantage_clip")
    job.why("whiten_advantages", "off, as it is here without an entry in advantage_shaping")
    job.why("advantage_clip", "clips nothing")


def _put_loss(job: Job) -> None:
    """Write the loss terms: the policy's, the divergence from the reference, the entropy."""
    term, keys = _policy_term(job)
    scale = job.keys.number("rl_loss_coef")
    if scale is not None and scale > 0 and scale != 1:
        term["coef"] = float(scale)
    if scale:
        keys.append("rl_loss_coef")
    loss = [term]
    if job.keys.flag("use_kl_loss"):
        coef = job.keys.number("kl_loss_coef")
        loss.append({"kind": "kl", "coef": float(max(coef or 0.0, 0.0)), "estimator": "k3"})
        keys += ["use_kl_loss", "kl_loss_coef"]
    entropy = job.keys.number("entropy_loss_coef")
    if entropy is not None and entropy > 0:
        loss.append({"kind": "entropy", "coef": float(entropy)})
        keys.append("entropy_loss_coef")
    job.put("algorithm.loss", loss, *keys)
    job.why("kl_loss_coef", "use_kl_loss is off")
    job.why("use_kl_loss", "off: there is no term kl in the loss")
    job.why("entropy_loss_coef", "0: there is no term entropy in the loss")


def _policy_term(job: Job) -> tuple[dict[str, Any], list[str]]:
    """Return the loss term of the policy, and the keys that it is made of."""
    clip = job.keys.number("pg_clip")
    low = high = float(clip) if clip is not None and 0 < clip < 1 else 0.2
    keys = ["pg_clip"] if job.keys.has("pg_clip") else []
    if job.keys.flag("use_pg_clip_range"):
        ends = [job.keys.number(key) for key in ("pg_clip_low", "pg_clip_high")]
        low = float(ends[0]) if ends[0] is not None and 0 < ends[0] < 1 else low
        high = float(ends[1]) if ends[1] is not None and ends[1] > 0 else high
        keys += ["use_pg_clip_range", "pg_clip_low", "pg_clip_high"]
    for key in ("pg_clip_low", "pg_clip_high", "use_pg_clip_range"):
        if key not in keys:
            job.why(key, "use_pg_clip_range is off")
    variant_key = next(
        (k for k in ("actor_train.pg_variant", "pg_variant") if job.keys.text(k)), None
    )
    variant = (job.keys.text(variant_key) or "ppo") if variant_key else "ppo"
    if variant_key:
        keys.append(variant_key)
    if variant != "ppo":
        keys = [key for key in keys if not key.startswith(("pg_clip", "use_pg"))]
        job.why("pg_clip", f"{variant} does not clip by it")
        job.why("dual_clip_loss", f"{variant} does not clip by it")
        return _variant(job, variant, keys)
    ratio = (job.keys.text("importance_sampling"), job.keys.text("ratio_type"))
    if ratio[0] == "seq" or ratio[1] == "segment":
        keys.append("importance_sampling" if ratio[0] == "seq" else "ratio_type")
        if ratio[1] == "segment":
            job.ask("algorithm.loss: gspo has one ratio for each response, ROLL one for each turn")
        job.why("dual_clip_loss", "gspo has no such bound")
        return {"kind": "gspo", "clip_low": low, "clip_high": high}, keys
    job.why("importance_sampling", "the ratio is that of tokens, as ppo_clip has it")
    term: dict[str, Any] = {"kind": "ppo_clip", "clip_low": low, "clip_high": high}
    if job.keys.flag("dual_clip_loss"):
        term["dual_clip"] = 1 + 2 * (float(clip) if clip is not None and clip > 0 else 0.2)
        keys.append("dual_clip_loss")
    job.why("dual_clip_loss", "off: ppo_clip has no dual_clip then")
    return term, keys


def _variant(job: Job, variant: str, keys: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the loss term of a `pg_variant` other than ppo, and the keys it is made of."""

    def told(name: str, default: float) -> float:
        for key in (f"actor_train.{name}", name):
            value = job.keys.number(key)
            if value is not None and value >= 0:
                keys.append(key)
                return float(value)
        return default

    if variant in ("vanilla", "pg", "reinforce"):
        return {"kind": "pg"}, keys
    if variant == "topr":
        good, bad = told("topr_positive_weight", 1.0), told("topr_negative_weight", 1.0)
        return {"kind": "topr", "positive_weight": good, "negative_weight": bad}, keys
    if variant == "cispo":
        low, high = told("cispo_epsilon_low", 0.1), told("cispo_epsilon_high", 0.1)
        term = {"kind": "cispo", "clip_low": low if 0 < low < 1 else None, "clip_high": high}
        return {k: v for k, v in term.items() if v is not None}, keys
    if variant == "kimi15":
        return {"kind": "kimi", "tau": told("kimi15_tau", 0.1) or 0.1}, keys
    if variant == "tis":
        upper = told("tis_upper_bound", 1.0)
        # A bound of exactly 1 cannot be written as 1 + clip_high.
        return {"kind": "cispo", "clip_high": max(upper - 1, 1e-6)}, keys
    job.ask(f"algorithm.loss: ppo_clip stands in for {variant}, which has no counterpart")
    return {"kind": "ppo_clip"}, keys


def _put_aggregation(job: Job, row_tokens: int) -> None:
    """Write the reduction of the loss; ROLL's default is seq-mean-token-mean."""
    chosen = job.choose("loss_agg_mode", "algorithm.aggregation", AGGREGATIONS)
    if chosen is None:
        job.put("algorithm.aggregation", "sequence_mean")
    elif chosen == "constant":
        note = "ROLL divides by the padded length, prompt and response"
        job.put("algorithm.aggregation_tokens", row_tokens, "loss_agg_mode", note=note)


def _put_kl_in_reward(job: Job) -> None:
    """Write the divergence from the reference in the reward of each token."""
    keys = ("init_kl_coef", "kl_penalty", "target_kl", "kl_horizon")
    coef = job.keys.number("init_kl_coef")
    coef = 0.2 if coef is None else float(coef)
    if not job.keys.flag("add_token_level_kl") or coef <= 0:
        job.why("add_token_level_kl", "off, or its coefficient is 0: there is no kl_in_reward")
        for key in keys:
            job.why(key, "add_token_level_kl is off, or its coefficient is 0")
        return
    if job.draft.get("algorithm.advantage.kind") == "gigpo":
        job.ask("algorithm.loss: a term `kl` in place of the penalty, which gigpo has no place for")
        for key in ("add_token_level_kl", *keys):
            job.why(key, "gigpo has no place for a penalty of tokens")
        return
    job.put("algorithm.kl_in_reward.coef", coef, "add_token_level_kl", "init_kl_coef")
    estimator = job.choose("kl_penalty", "algorithm.kl_in_reward.estimator", KL_ESTIMATORS)
    if estimator is None and job.keys.has("kl_penalty"):
        job.ask("algorithm.kl_in_reward: estimator k1 in place of one that does not exist here")
    target = job.keys.number("target_kl")
    if target is None or target <= 0:
        job.why("target_kl", "the coefficient stays as it is")
        job.why("kl_horizon", "concerns target_kl")
        return
    job.put("algorithm.kl_in_reward.target", float(target), "target_kl")
    prompts = job.draft.get("data.prompts_per_step", 1)
    samples = prompts * job.draft.get("data.samples_per_prompt", 1)
    horizon = job.keys.whole("kl_horizon") or 10_000
    note = f"at least the {samples} samples of a step" if horizon < samples else ""
    job.put("algorithm.kl_in_reward.horizon", max(horizon, samples), "kl_horizon", note=note)


def _put_masks(job: Job) -> None:
    """Write masks and weights of samples."""
    masks: list[dict[str, Any]] = []
    ends = ("difficulty_low_threshold", "difficulty_high_threshold")
    if job.keys.flag("max_len_mask"):
        masks.append({"kind": "overlong"})
        job.keys.use("max_len_mask")
    if job.keys.flag("difficulty_mask"):
        low, high = (job.keys.number(key) for key in ends)
        low, high = 0.1 if low is None else float(low), 0.95 if high is None else float(high)
        masks.append({"kind": "difficulty", "low": low, "high": max(low, high)})
        for key in ("difficulty_mask", *ends):
            job.keys.use(key)
    if masks:
        job.put("algorithm.masks", masks, "max_len_mask", "difficulty_mask", *ends)
    job.why("max_len_mask", "off: `masks` has no overlong")
    for key in ("difficulty_mask", *ends):
        job.why(key, "off: `masks` has no difficulty")
    weights: list[dict[str, Any]] = []
    if job.keys.flag("difficulty_loss_weight"):
        weights.append({"kind": "difficulty", "min": 0.5, "max": 2.0})
    if job.keys.flag("length_loss_weight"):
        weights.append({"kind": "length", "min": 0.5, "max": 1.5})
    if weights:
        job.put("algorithm.sample_weights", weights, "difficulty_loss_weight", "length_loss_weight")
    for key in ("difficulty_loss_weight", "length_loss_weight"):
        job.why(key, "off: `sample_weights` has no such entry")


def _put_correction(job: Job) -> None:
    """Write the correction for the gap between engine and trainer."""
    at, out = "train_infer_correction", "algorithm.correction"
    weight = f"{at}.is_weight"
    level = LEVELS.get(job.keys.text(f"{weight}.weight_type") or "token")
    whole = job.draft.get("algorithm.loss")[0]["kind"] in ("gspo", "gmpo")
    if job.keys.flag(f"{weight}.enabled") and level and not (whole and level in ("token", "turn")):
        upper = job.keys.number(f"{weight}.upper_bound")
        value = {"level": level, "upper": max(1.0, 1.2 if upper is None else float(upper))}
        told = [f"{weight}.{name}" for name in ("enabled", "weight_type", "upper_bound")]
        job.put(f"{out}.weight", value, *told)
    job.why(f"{weight}.detach", "importance weights have no gradient")
    job.why(weight, "off, or of a level that does not go with the loss")
    rules = job.keys.raw(f"{at}.filters")
    listed = rules if isinstance(rules, list) else []
    reject = [rule for each in listed if (rule := _rejection(each))]
    if reject:
        job.put(f"{out}.reject", reject, f"{at}.filters", note="ratios only; no differences")
        if any(isinstance(each, dict) and each.get("diff_enabled") for each in listed):
            job.ask(f"{out}.reject: filters by differences of probabilities have no counterpart")
    job.why(f"{at}.filters", "off, or by differences of probabilities, which have no counterpart")


def _rejection(rule: Any) -> dict[str, Any] | None:
    """Return the rule of rejection that one of ROLL's filters stands for; None if it is off or does
    not look at ratios."""
    if not isinstance(rule, dict) or not rule.get("enabled") or not rule.get("ratio_enabled"):
        return None
    low, high = rule.get("ratio_low"), rule.get("ratio_high")
    found: dict[str, Any] = {"level": LEVELS.get(str(rule.get("agg_type", "token")), "token")}
    if isinstance(low, int | float) and 0 < low <= 1:
        found["lower"] = float(low)
    if isinstance(high, int | float) and high >= 1 and high > found.get("lower", 0):
        found["upper"] = float(high)
    return found if len(found) > 1 else None
