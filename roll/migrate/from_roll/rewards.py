"""Rewards of ROLL: each domain has a worker class, which stands for a reward here."""

from __future__ import annotations

import re
from typing import Any

from roll.migrate.devices import devices_of
from roll.migrate.from_roll.engines import put_engine
from roll.migrate.from_roll.roles import put_model
from roll.migrate.job import Job
from roll.migrate.stand_ins import put_stand_in

BUILT_IN: tuple[tuple[str, str], ...] = (
    (r"crossthink", "crossthink"),
    (r"math", "math"),
    (r"code|sandbox", "code"),
    (r"ifeval|generalrule|general_rule", "ifeval"),
    (r"multiple_?choice|general_?val", "multiple_choice"),
    (r"detection", "detection"),
)
"""Built-in reward for a worker class or, without one, for a domain of this name."""
TEMPLATE = (
    "Question:\n{{ prompt }}\nReference answer:\n{{ answer }}\nAnswer to judge:\n{{ response }}\n"
    "Does the answer agree with the reference answer? End with `Verdict: yes` or `Verdict: no`."
)
VERDICT = {"kind": "class", "pattern": "Verdict: (\\w+)", "scores": {"yes": 1.0, "no": 0.0}}


def put_rewards(job: Job) -> list[str]:
    """Write rewards, judges and the filters of their domains; return all tags of rewards."""
    tags: list[str] = []
    filters: dict[str, dict[str, Any] | None] = {}
    for domain in job.keys.names("rewards"):
        if not job.keys.raw(f"rewards.{domain}"):
            job.keys.use(f"rewards.{domain}")
        own = _put_tags(job, domain)
        tags += [tag for tag in own if tag not in tags]
        kind = _put_reward(job, domain)
        _name_rest(job, domain, kind)
        found = _filter(job, domain)
        filters |= dict.fromkeys(own, found)
    _put_filters(job, filters)
    return tags


def _put_tags(job: Job, domain: str) -> list[str]:
    """Write the tags of a domain, which are its name if it names none."""
    key = f"rewards.{domain}.tag_included"
    tags = job.keys.texts(key) or [domain]
    job.put(f"rewards.{domain}.tags", tags, key)
    return tags


def _put_reward(job: Job, domain: str) -> str:
    """Write the reward of a domain; return its kind."""
    at, out = f"rewards.{domain}", f"rewards.{domain}"
    key = f"{at}.worker_cls"
    name = (job.keys.text(key) or domain).rpartition(".")[2].lower()
    fn = next((fn for pattern, fn in BUILT_IN if re.search(pattern, name)), None)
    if "judge" in name:
        _put_judge(job, domain)
        return "judge"
    if fn is not None:
        job.put(f"{out}.fn", fn, key)
        if fn == "crossthink":
            _crossthink(job, at, out)
        _put_workers(job, at, out)
        return fn
    if name in ("rewardworker", "modelrewardworker") and job.keys.has(f"{at}.strategy_args"):
        put_model(job, at, f"{out}.model", "reward_pretrain")
        job.put(f"{out}.pool", _pool(job, f"{at}.device_mapping", domain), f"{at}.device_mapping")
        job.keys.use(key)
        return "model"
    url = job.keys.text(f"{at}.reward_url") or job.keys.text(f"{at}.url")
    put_stand_in(job, domain, None, url, key, f"{at}.reward_url", f"{at}.url")
    return "remote"


def _crossthink(job: Job, at: str, out: str) -> None:
    """Write how strict the reward is about its format."""
    forms = {"soft": "ignored", "loose": "ignored", "strict": "required"}
    job.choose(f"{at}.reward_type", f"{out}.kwargs.format", forms)


def _put_workers(job: Job, at: str, out: str) -> None:
    """Write the number of reward workers."""
    job.count(f"{at}.world_size", f"{out}.workers")


def _put_judge(job: Job, domain: str) -> None:
    """Write a judge, behind a server or on devices of the run, and the question to it."""
    at, judge = f"rewards.{domain}", f"judges.{domain}"
    kind = job.keys.text(f"{at}.judge_model_type") or "api"
    own = job.keys.raw(f"{at}.device_mapping") is not None or kind == "inference"
    if own:
        put_model(job, at, f"{judge}.model", "reward_pretrain", "reward_model.pretrain")
        for dropped in ("lora", "freeze"):
            job.draft.drop(f"{judge}.model.{dropped}")
        key = f"{at}.device_mapping"
        pool = _pool(job, key, "judge")
        job.put(f"{judge}.pool", pool, key)
        devices = _devices(job, key)
        put_engine(job, at, judge, devices, 1)
        job.put(f"{out_of(domain)}.judge.by", domain, f"{at}.worker_cls", f"{at}.judge_model_type")
    else:
        url = job.keys.text(f"{at}.judge_api_url") or ""
        if url.startswith(("http://", "https://")):
            job.put(f"{judge}.url", url.removesuffix("/chat/completions"), f"{at}.judge_api_url")
        else:
            job.put(f"{judge}.url", "http://127.0.0.1:8000/v1", f"{at}.judge_api_url")
            job.ask(f"{judge}.url: name the address of the judge")
        name = job.keys.text(f"{at}.judge_model_name") or "judge"
        job.put(f"{judge}.model", name, f"{at}.judge_model_name")
        job.put(f"{judge}.api_key_env", "JUDGE_API_KEY", note="the variable that holds the key")
        job.why(f"{at}.judge_api_key", "keys are in an environment variable, not in the file")
        job.put(f"{out_of(domain)}.judge.by", domain, f"{at}.worker_cls", f"{at}.judge_model_type")
    note = "ROLL's templates are code; write yours"
    job.put(f"{out_of(domain)}.judge.template", TEMPLATE, f"{at}.judge_prompt", note=note)
    job.put(f"{out_of(domain)}.judge.verdict", VERDICT)
    args = f"{at}.generating_args"
    job.move(f"{args}.temperature", f"{out_of(domain)}.judge.temperature", "number", _at_least_0)
    job.count(f"{args}.max_new_tokens", f"{out_of(domain)}.judge.max_new_tokens")
    job.ask(f"rewards.{domain}.judge.template: write what the judge is asked")


def out_of(domain: str) -> str:
    """Return the key of the reward of a domain."""
    return f"rewards.{domain}"


def _devices(job: Job, key: str) -> tuple[int, ...]:
    """Return the devices at a key; those of actor_infer, or one, if it has none."""
    for each in (key, "reward_model.device_mapping", "actor_infer.device_mapping"):
        try:
            return devices_of(job.keys.raw(each))
        except ValueError:
            continue
    return (0,)


def _pool(job: Job, key: str, wish: str) -> str:
    return job.pool(_devices(job, key), wish)


def _at_least_0(value: float) -> float:
    return max(float(value), 0.0)


def _filter(job: Job, domain: str) -> dict[str, Any] | None:
    """Return the filter of groups of a domain; None if it has none."""
    at = f"rewards.{domain}.query_filter_config"
    kind = job.keys.text(f"{at}.type")
    args = f"{at}.filter_args"
    if kind == "mean_filter":
        low, high = (job.keys.number(f"{args}.threshold_{end}") for end in ("down", "up"))
        low, high = 0.0 if low is None else float(low), 1.0 if high is None else float(high)
        if low < high:
            return {"kind": "mean_reward", "low": low, "high": high}
    if kind == "std_filter":
        if job.keys.number(f"{args}.std_threshold"):
            job.ask(
                f"rollout.filters: groups of {domain} with a small spread of rewards are kept; "
                "only those with equal rewards are rejected"
            )
        return {"kind": "equal_rewards"}
    job.why(at, "no_filter, or a filter that rejects nothing")
    return None


def _put_filters(job: Job, filters: dict[str, dict[str, Any] | None]) -> None:
    """Write the filters: of the run if all tags have the same, else of each tag."""
    found = [each for each in filters.values() if each is not None]
    if not found:
        return
    names = [f"rewards.{domain}.query_filter_config" for domain in job.keys.names("rewards")]
    if job.draft.get("data.samples_per_prompt", 1) < 2:
        for name in names:
            job.why(name, "a prompt has one sample, and nothing to compare")
        return
    there = [name for name in names if job.keys.text(f"{name}.type") not in (None, "no_filter")]
    if len(found) == len(filters) and all(each == found[0] for each in found):
        job.put("rollout.filters", [found[0]], *there)
        return
    domains = {tag: {"filters": [each]} for tag, each in filters.items() if each is not None}
    job.put("domains", domains, *there)
    job.ask("domains: drop the tags that no row of the training data has")


def _name_rest(job: Job, domain: str, kind: str) -> None:
    """Name the settings of a worker class that its counterpart does not have."""
    at = f"rewards.{domain}"
    what = {"judge": "judge", "remote": "server", "model": "model"}.get(kind, f"reward {kind}")
    why = f"the {what} has no such setting"
    if kind not in ("judge", "model"):
        for part in ("model_args", "strategy_args", "generating_args", "data_args"):
            job.why(f"{at}.{part}", f"the {what} needs no model")
        job.why(f"{at}.device_mapping", f"the {what} needs no device")
    known = ("query_filter_config", "tag_included", "model_args", "strategy_args", "data_args")
    for name in job.keys.names(at):
        if name not in (*known, "generating_args", "infer_batch_size", "system_envs"):
            job.why(f"{at}.{name}", why)
