"""Conditions of alarms: what each looks for in the course of a run.

Healthy runs meet none, so a condition that looks at how far a run has come asks `Course.learned`:
a policy that has learned its task also has low entropy, and groups with equal rewards.
"""

from __future__ import annotations

import math
import statistics

from roll.report.health.alarms import Found
from roll.report.health.course import Course

MIN_MEMORY_STEPS = 50
"""Number of steps before growing memory means anything."""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def not_finite(course: Course) -> Found | None:
    for name in ("loss/total", "loss/policy", "grad_norm", "nll", "preference_loss"):
        wrong = [r["step"] for r in course.steps if name in r and not math.isfinite(r[name])]
        if wrong:
            return Found(
                f"{name} is not finite in {len(wrong)} of {len(course.steps)} steps, first in step "
                f"{wrong[0]}",
                name,
                int(wrong[0]),
            )
    return None


def updates_too_far(course: Course) -> Found | None:
    """Find updates that move the policy too far, while the reward gains little or falls."""
    spread = course.end("reward/std")
    dead = spread is not None and spread <= 1e-9
    # 0.25: a few lucky samples in the first step, and none later, are no fall.
    if course.fall is not None and course.fall > (0.25 if dead else 0.8):
        first, end = course.points("reward/mean")[0][1], course.end("reward/mean")
        return Found(
            f"the updates ruin the policy: its reward fell from {first:.3g} in the first step to "
            f"{end:.3g}",
            "reward/mean",
            course.since_below("reward/mean", (first + (end or 0.0)) / 2),
        )
    if course.gain is None or course.learned:
        return _loss_grows(course)
    for name, limit, said in (
        ("clip_fraction", 0.3, "of the tokens are clipped"),
        ("approx_kl", 0.3, "nats of KL in one step"),
    ):
        value = course.end(name)
        if value is not None and value > limit:
            shown = percent(value) if name == "clip_fraction" else f"{value:.2g}"
            since = course.since_above(name, limit)
            return Found(
                f"updates move the policy too far: {shown} {said}, and the reward does not gain",
                name,
                since,
            )
    far = course.end("kl/ref")
    if far is not None and far > 1 and course.gain < -0.3:
        return Found(
            f"the policy ran away: {far:.2g} nats a token from the reference, while the reward "
            f"fell from {course.start('reward/mean'):.3g} to {course.end('reward/mean'):.3g}",
            "kl/ref",
            course.since_above("kl/ref", 1),
        )
    return None


def _loss_grows(course: Course) -> Found | None:
    """Find a loss of a run on rows that grows."""
    for name in ("nll", "preference_loss"):
        start, end = course.start(name), course.end(name)
        if start is not None and end is not None and end > 1.2 * start > 0:
            grown = course.since_above(name, 1.1 * start)
            return Found(f"{name} grew from {start:.3g} to {end:.3g}", name, grown)
    return None


def engine_mismatch(course: Course) -> Found | None:
    name = "mismatch/logprob_abs_mean"
    value = course.end(name)
    if value is None or value <= 0.05 or course.end("staleness/max"):
        return None
    return Found(
        f"engine and trainer disagree: the log-prob of a token differs by {value:.2g} in the mean, "
        "with the same weights",
        name,
        course.since_above(name, 0.05),
    )


def stale_samples(course: Course) -> Found | None:
    if not course.end("staleness/max"):
        return None
    name = "mismatch/logprob_abs_mean"
    # A policy that stale samples have ruined moves no more, so the end alone says too little.
    found = [value for value in (course.end(name), course.middle(name)) if value is not None]
    if found and max(found) > 0.2:
        return Found(
            f"samples are too old: {course.end('staleness/mean'):.2g} versions in the mean, in "
            f"which the log-prob of a token changed by {max(found):.2g}",
            name,
            course.since_above(name, 0.2),
        )
    aborted = course.late_sum("rollout/aborted_groups")
    started = course.late_sum("rollout/started_groups")
    if aborted > 0.3 * started > 0:
        return Found(
            f"{percent(aborted / started)} of the groups grow too old and are thrown away",
            "rollout/aborted_groups",
        )
    return None


def constant_reward(course: Course) -> Found | None:
    points = course.points("reward/std")[-max(course.window, len(course.steps) // 2) :]
    if not course.long_enough or not points or course.learned:
        return None
    if sum(value <= 1e-9 for _, value in points) < 0.9 * len(points):
        return None
    return Found(
        f"every sample has the same reward, {course.end('reward/mean'):.3g}: nothing is learned",
        "reward/std",
        course.since_below("reward/std", 1e-9),
    )


def reward_hacked(course: Course) -> Found | None:
    """Find held-out scores that fall while the reward of training rises."""
    if course.gain is None or course.gain < 0.3:
        return None
    for name, points in course.held_out.items():
        at, best = max(points[:-2], key=lambda point: point[1])
        last = max(value for _, value in points[-2:])
        if last < best - max(0.05, 0.2 * abs(best)):
            return Found(
                f"the reward rises, but {name} fell from {best:.3g} (step {at}) to {last:.3g}: the "
                "policy learns to please the reward, not the task",
                name,
                at,
            )
    return None


def reward_leaks(course: Course) -> Found | None:
    """Find a reward that rises while no held-out score follows."""
    start, end = course.start("reward/mean"), course.end("reward/mean")
    if course.gain is None or course.gain < 0.8 or start is None or end is None:
        return None
    gains = {
        name: max(value for _, value in points[-2:]) - points[0][1]
        for name, points in course.held_out.items()
        if points[0][1] < 0.9
    }
    if not gains or max(gains.values()) > 0.15 * (end - start):
        return None
    name = max(gains, key=gains.__getitem__)
    return Found(
        f"the reward rose from {start:.3g} to {end:.3g}, but {name} changed by only "
        f"{gains[name]:+.2g}: the reward may leak (the answer in the prompt, or a way to be paid "
        "without solving)",
        "reward/mean",
    )


def entropy_collapse(course: Course) -> Found | None:
    start, end = course.start("entropy"), course.end("entropy")
    if course.learned or start is None or end is None or not 0 <= end < 0.2 * start:
        return None
    since = course.since_below("entropy", 0.5 * start)
    return Found(
        f"entropy fell by {percent(1 - end / start)}"
        + (f" from step {since} on" if since is not None else "")
        + f", from {start:.2g} to {end:.2g}, and the reward gained little",
        "entropy",
        since,
    )


def length_explosion(course: Course) -> Found | None:
    name = "response_tokens/mean"
    start, end = course.start(name), course.end(name)
    if start is None or end is None or end < 2.5 * start or end < start + 8:
        return None
    if not course.learned:
        vain = "the reward gained little"
    elif course.held_out_gain is not None and course.held_out_gain <= 0.02:
        vain = "no held-out score gained by it"
    else:
        return None
    since = course.since_above(name, 1.5 * start)
    return Found(
        f"responses grew from {start:.0f} to {end:.0f} tokens"
        + (f" from step {since} on" if since is not None else "")
        + f", and {vain}",
        name,
        since,
    )


def truncated(course: Course) -> Found | None:
    value = course.end("truncated_fraction")
    if value is None or value <= 0.1:
        return None
    return Found(
        f"{percent(value)} of the responses are truncated",
        "truncated_fraction",
        course.since_above("truncated_fraction", 0.1),
    )


def dead_filter(course: Course) -> Found | None:
    rejected = course.late_sum("rollout/rejected_groups")
    started = course.late_sum("rollout/started_groups")
    # A step that rejects more than 75 % ends the run by default (`rollout.max_prompts_factor`).
    if not course.long_enough or rejected <= 0.6 * started or not started:
        return None
    return Found(
        f"the filters reject {percent(rejected / started)} of the groups: most samples are "
        "thrown away",
        "rollout/rejected_groups",
    )


def equal_groups(course: Course) -> Found | None:
    value = course.end("groups/equal_rewards_fraction")
    if course.learned or value is None or value < 0.5:
        return None
    return Found(
        f"{percent(value)} of the groups have equal rewards, which teach nothing",
        "groups/equal_rewards_fraction",
        course.since_above("groups/equal_rewards_fraction", 0.5),
    )


def slow_replica(course: Course) -> Found | None:
    """Find one replica that is busy while the others are done, step after step."""
    name = "perf/replicas_busy_min"
    least, most = course.end(name), course.end("perf/replicas_busy_max")
    busiest = [value for _, value in course.points("perf/busiest_replica")[-course.window :]]
    if least is not None and most is not None and least < 0.5 * most and busiest:
        slow = statistics.mode(busiest)
        if busiest.count(slow) >= 0.8 * len(busiest):
            return Found(
                f"the others wait for replica {slow:.0f}: it works {percent(most)} of the time, "
                f"another one {percent(least)}",
                name,
                course.since_below(name, 0.5 * most),
            )
    return None


def lost_replicas(course: Course) -> Found | None:
    lost = math.fsum(value for _, value in course.points("rollout/lost_replicas"))
    if not lost:
        return None
    moved = math.fsum(value for _, value in course.points("rollout/moved_requests"))
    first = next(step for step, value in course.points("rollout/lost_replicas") if value)
    return Found(
        f"lost replicas: {lost:.0f}; requests that were moved: {moved:.0f}",
        "rollout/lost_replicas",
        first,
    )


def _failing(course: Course, kind: str, said: str) -> Found | None:
    rates = {name: course.end(name) or 0.0 for name in course.names(f"reward/*/{kind}")}
    name = max(rates, key=rates.__getitem__, default="")
    if not name or rates[name] <= 0.05:
        return None
    return Found(
        f"reward {name.split('/')[1]} {said} for {percent(rates[name])} of the samples",
        name,
        course.since_above(name, 0.05),
    )


def memory_grows(course: Course) -> Found | None:
    name = "memory/rss_gb_max"
    values = [value for _, value in course.points(name)]
    if len(values) < MIN_MEMORY_STEPS:
        return None
    early, middle, last = (values[int(len(values) * share)] for share in (0.2, 0.6, 0.999))
    if not (last > 1.5 * early and last > 1.1 * middle):
        return None
    return Found(f"memory grew from {early:.1f} to {last:.1f} GB, and still grows", name)


def reward_fails(course: Course) -> Found | None:
    return _failing(course, "error_rate", "fails")


def reward_times_out(course: Course) -> Found | None:
    return _failing(course, "timeout_rate", "takes longer than its timeout_s")
