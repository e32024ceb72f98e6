"""Numbers of a step that this framework wants to divide over ranks, made to fit where they do not;
each change is named."""

from __future__ import annotations

import math

from roll.config.sections.placement import parse_devices
from roll.migrate.job import Job


def ranks_of(job: Job, role: str) -> int:
    """Return the number of data-parallel ranks of a role of the draft."""
    strategy = job.draft.get(f"{role}.strategy", {})
    kind = strategy.get("kind")
    further = ("cp", "pp") if kind == "megatron" else ("ulysses",)
    sharers: int = math.prod(strategy.get(key, 1) for key in ("tp", *further))
    pool = job.draft.get(f"pools.{job.draft.get(f'{role}.pool')}")
    devices = len(parse_devices(str(pool))) if pool is not None else 1
    return max(1, devices // sharers)


def fit_to_devices(job: Job) -> None:
    """Change prompts, updates and warm-ups of the draft that do not divide over ranks or steps."""
    if job.draft.get("data.prompts_per_step") is not None:
        _fit_prompts(job)
        for role in ("actor_train", "critic"):
            if job.draft.get(role) is not None:
                _fit_update(job, role)
    elif job.draft.get("data.rows_per_step") is not None:
        roles = [name for name in ("actor_train", "reference") if job.draft.get(name) is not None]
        unit = math.lcm(*(ranks_of(job, name) for name in roles))
        _round(job, "data.rows_per_step", unit, f"divides over {unit} data-parallel ranks")
    for role in ("actor_train", "critic"):
        if job.draft.get(role) is not None:
            _fit_warmup(job, role)


def _fit_prompts(job: Job) -> None:
    """Round the prompts of a step so that its samples divide over the ranks of each role."""
    per_prompt = job.draft.get("data.samples_per_prompt", 8)
    unit = 1
    for role in ("actor_train", "reference", "critic"):
        if job.draft.get(role) is not None:
            ranks = ranks_of(job, role)
            unit = math.lcm(unit, ranks // math.gcd(ranks, per_prompt))
    what = f"the samples of a step divide over all data-parallel ranks in multiples of {unit}"
    _round(job, "data.prompts_per_step", unit, what)


def _round(job: Job, target: str, unit: int, what: str) -> None:
    """Round a number to the nearest multiple of `unit`, at least `unit`, and say so."""
    wanted = job.draft.get(target)
    if wanted % unit:
        near = max(unit, unit * ((2 * wanted + unit) // (2 * unit)))
        job.draft.put(target, near, f"{job.draft.comment(target)}; was {wanted}")
        job.ask(f"{target} is {near} in place of {wanted}: {what}")


def _fit_update(job: Job, role: str) -> None:
    """Replace a size of an update that divides neither the samples of a step nor over ranks by the
    nearest that does; drop it if it is all samples."""
    target = f"{role}.samples_per_update"
    wanted = job.draft.get(target)
    if wanted is None:
        return
    samples = job.draft.get("data.prompts_per_step") * job.draft.get("data.samples_per_prompt", 8)
    ranks = ranks_of(job, role)
    known = [n for n in range(ranks, samples + 1, ranks) if samples % n == 0]
    if wanted in known:
        return
    near = min(known, key=lambda n: (abs(n - wanted), n), default=samples)
    job.draft.put(target, near, f"{job.draft.comment(target)}; was {wanted}")
    if wanted < samples:
        job.ask(
            f"{target} is {near} in place of {wanted}, which does not divide the {samples} samples "
            f"of a step over {ranks} rank(s)"
        )


def _fit_warmup(job: Job, role: str) -> None:
    """Make a schedule constant if the warm-up leaves none of the run's optimizer steps."""
    optimizer = job.draft.get(f"{role}.optimizer", {})
    steps = job.draft.get("max_steps")
    if optimizer.get("schedule", "constant") == "constant" or steps is None:
        return
    if job.draft.get("data.prompts_per_step") is not None:
        samples = job.draft.get("data.prompts_per_step") * job.draft.get(
            "data.samples_per_prompt", 8
        )
        update = job.draft.get(f"{role}.samples_per_update", samples)
        waits = job.draft.get("critic.warmup_steps", 0) if role == "actor_train" else 0
        steps = max(steps - waits, 0) * (samples // update) * job.draft.get(f"{role}.epochs", 1)
    share = optimizer.get("warmup_ratio", 0.0)
    warmup = math.ceil(share * steps) if share else optimizer.get("warmup_steps", 0)
    if warmup >= max(steps, 1):
        job.draft.put(f"{role}.optimizer.schedule", "constant", "the warm-up leaves no other step")
        job.draft.drop(f"{role}.optimizer.min_lr_ratio")
        job.ask(
            f"{role}.optimizer.schedule is constant: the warm-up of {warmup} "
            f"steps leaves none of the run's {steps} optimizer steps to decay"
        )
