"""Tables and pictures of simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.simulation.study import Row

COLUMNS = (
    "replicas", "staleness", "step s", "speedup", "of the oracle", "written", "busy slots",
    "mean age", "lost", "moved", "in flight", "us/request", "of it GC", "CPU s/step",
    "resident MB",
)  # fmt: skip


def cells(row: Row) -> list[str]:
    """Return the cells of one line of the table, in the order of `COLUMNS`."""
    outcome = row.outcome
    return [
        f"{outcome.scenario.replicas}",
        f"{outcome.scenario.staleness}",
        f"{outcome.step_s:.1f}",
        f"{row.speedup:.2f}",
        f"{row.of_oracle:.3f}",
        f"{outcome.written_share:.3f}",
        f"{outcome.busy_slots:.3f}",
        f"{row.mean_staleness:.2f}",
        f"{outcome.lost_replicas}",
        f"{outcome.moved_requests}",
        f"{max(step.in_flight for step in outcome.steps)}",
        f"{outcome.scheduler_us:.0f}",
        f"{outcome.collector_us:.0f}",
        f"{outcome.scheduler_step_s:.1f}",
        f"{outcome.steps[-1].resident_mb:.0f}",
    ]


def table(rows: Sequence[Row]) -> Table:
    """Return the table for the terminal."""
    found = Table(title="rollout in virtual time")
    for name in COLUMNS:
        found.add_column(name, justify="right")
    for row in rows:
        found.add_row(*cells(row))
    return found


def markdown(rows: Sequence[Row]) -> str:
    """Return the table for the documentation, in Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + "---:|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Row], target: Path) -> None:
    """Draw three plots into one picture: the share of decoding slots over time (first and last run
    of the first fleet), the throughput by staleness, and the age of the tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (busy, gain, age) = plt.subplots(
        1, 3, figsize=(12, 3.4), layout="constrained", width_ratios=(2.2, 1, 1)
    )
    first = [
        row for row in rows if row.outcome.scenario.replicas == rows[0].outcome.scenario.replicas
    ]
    for row in (first[0], first[-1]):
        scenario = row.outcome.scenario
        slots = scenario.replicas * scenario.model.capacity
        moments, counts = zip(*row.outcome.decoding, strict=True)
        label = f"{scenario.replicas} replicas, staleness {scenario.staleness}"
        busy.fill_between(moments, [count / slots for count in counts], alpha=0.6, label=label)
    busy.set(title="slots that decode", xlabel="virtual seconds", ylim=(0, 1.05))
    shortest_s = min(row.outcome.makespan_s for row in rows)
    busy.set(xlim=(0, shortest_s))
    busy.legend(fontsize="x-small", loc="upper right")
    for replicas in dict.fromkeys(row.outcome.scenario.replicas for row in rows):
        mine = [row for row in rows if row.outcome.scenario.replicas == replicas]
        ages = [row.outcome.scenario.staleness for row in mine]
        (line,) = gain.plot(ages, [row.speedup for row in mine], marker="o", label=f"{replicas}")
        bound = [row.speedup / row.of_oracle for row in mine]
        gain.plot(ages, bound, linestyle=":", color=line.get_color())
    gain.set(title="throughput / synchronous\n(dotted: oracle)", xlabel="staleness", ylim=(0, None))
    gain.legend(fontsize="x-small", title="replicas", title_fontsize="x-small")
    largest = max(row.outcome.scenario.staleness for row in rows)
    for number, row in enumerate(rows):
        left = 0.0
        for steps, share in row.staleness_shares.items():
            shade = str(0.85 - 0.7 * steps / max(1, largest))
            age.barh(number, share, left=left, color=shade)
            left += share
    names = [f"{r.outcome.scenario.replicas} / {r.outcome.scenario.staleness}" for r in rows]
    age.set(title="age of the tokens (dark: old)", xlabel="share")
    age.set_yticks(range(len(rows)), names)
    for axes in (busy, gain):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=110)
