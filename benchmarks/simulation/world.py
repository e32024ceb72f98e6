"""Simulated run: real scheduler, buffer, fleet and health checks; scripted engines and trainer.

No part of `roll.rollout` is replaced or copied.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil

from benchmarks.simulation.clock import run_virtually, virtual_loop
from benchmarks.simulation.engine import PROMPT_TOKENS, EngineModel, ScriptedEngine
from benchmarks.simulation.faults import FaultLog, Faults, Sickness
from benchmarks.simulation.lengths import Lengths
from benchmarks.simulation.oracle import StepWork
from roll.config.sections.rollout import HealthConfig
from roll.core.errors import WaitTimeoutError
from roll.core.types import Prompt, Sample, SamplingParams
from roll.data.datasets import Dataset, Source
from roll.data.mixing import Sampler
from roll.rollout.budget import Budget
from roll.rollout.fleet.fleet import Fleet
from roll.rollout.fleet.health import Health
from roll.rollout.fleet.replica import Replica
from roll.rollout.fleet.routing import Sticky
from roll.rollout.scheduler import GenerateScheduler
from roll.rollout.single_turn import SingleTurn
from roll.rollout.types import Group, ScoredSample

PUSH_TIMEOUT_S = 600.0
"""Time limit of a push of weights, in virtual seconds, as in the pipeline. A replica that begins to
hang during a push is given up after this time."""


@dataclass(frozen=True)
class Scenario:
    """Settings of a simulated run. Lengths are in tokens of the scripted engines, times in virtual
    seconds."""

    replicas: int
    lengths: Lengths
    staleness: int = 0
    train_s: float = 0.0
    steps: int = 12
    prompts_per_step: int = 64
    samples_per_prompt: int = 8
    max_new_tokens: int = 1024
    separate_siblings: bool = True
    queue: int = 0
    """Number of sequences that may wait on a replica, beyond those that it decodes."""
    max_in_flight: int = 1_000_000
    """Largest number of groups that are generated at the same time."""
    model: EngineModel = field(default_factory=EngineModel)
    faults: Faults = field(default_factory=Faults)
    sickness: Sickness | None = None
    limits: HealthConfig = field(default_factory=HealthConfig)
    sample_s: float = 5.0
    """Time between two records of the number of decoding sequences."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of one training step; times are in virtual seconds from the start of the run."""

    begin_s: float
    """Time at which all groups of the step were collected and training began."""
    end_s: float
    """Time at which the new weights had reached all engines."""
    work: StepWork
    in_flight: int
    """Number of groups of later steps that ran or waited when training began."""
    resident_mb: float
    """Resident memory of this process when training began, in MiB."""


@dataclass(frozen=True)
class Outcome:
    """Results of a simulated run."""

    scenario: Scenario
    steps: list[StepRecord]
    staleness: dict[int, int]
    """Staleness -> number of trained tokens. Staleness is the number of steps between the weights
    that wrote a token and the weights that are trained on it."""
    busy_slots: float
    """Mean share of the engines' slots that held a sequence, over the run."""
    written_share: float
    """Number of tokens written, divided by the number that the engines could have written."""
    requests: int
    """Number of requests that the engines received."""
    scheduler_cpu_s: float
    """CPU time of this process without that of the scripted engines and of the checks, in
    seconds."""
    collector_cpu_s: float
    """Part of `scheduler_cpu_s` that Python's garbage collector took, in seconds."""
    decoding: list[tuple[float, int]]
    """Pairs of a time, in virtual seconds, and the number of decoding sequences."""
    faults: FaultLog
    losses: list[tuple[float, int]]
    """Pairs of a time, in virtual seconds, and the index of a replica that was lost then."""
    moved_requests: int

    @property
    def lost_replicas(self) -> int:
        return len(self.losses)

    @property
    def makespan_s(self) -> float:
        return self.steps[-1].end_s

    @property
    def step_s(self) -> float:
        """Mean time per step, in virtual seconds, from the start of the run to its end."""
        return self.makespan_s / len(self.steps)

    @property
    def scheduler_step_s(self) -> float:
        """CPU time of the scheduler per step, in seconds."""
        return self.scheduler_cpu_s / len(self.steps)

    @property
    def scheduler_us(self) -> float:
        """CPU time of the scheduler per request, in microseconds."""
        return 1e6 * self.scheduler_cpu_s / self.requests

    @property
    def collector_us(self) -> float:
        """Part of `scheduler_us` that Python's garbage collector took."""
        return 1e6 * self.collector_cpu_s / self.requests

    @property
    def work(self) -> list[StepWork]:
        return [step.work for step in self.steps]


class World:
    """All parts of a simulated run, connected as in the pipeline. It must be made inside a running
    `VirtualLoop`."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.meter = virtual_loop().meter
        self._process = psutil.Process()
        self.engines = [
            ScriptedEngine(index, scenario.model, scenario.lengths)
            for index in range(scenario.replicas)
        ]
        capacity = scenario.model.capacity
        self.fleet = Fleet(
            [Replica(e.index, e, capacity, scenario.queue) for e in self.engines],
            Sticky(),
            answer_s=scenario.limits.timeout_s,
        )
        self.trainer = asyncio.Lock()
        self.health = Health(self.fleet, scenario.limits, self._restart, self._rejoin)
        single_turn = SingleTurn(
            fleet=self.fleet,
            decode=lambda tokens: "",
            score=_score,
            sampling=SamplingParams(temperature=1.0, max_new_tokens=scenario.max_new_tokens),
            samples_per_prompt=scenario.samples_per_prompt,
            seed=scenario.seed,
            request_timeout_s=1e9,
            separate_siblings=scenario.separate_siblings,
        )
        prompts = Sampler(_dataset(scenario), seed=scenario.seed)
        budget = Budget(
            scenario.prompts_per_step,
            scenario.staleness,
            max_in_flight=scenario.max_in_flight,
        )
        self.scheduler = GenerateScheduler(prompts, single_turn.run, budget)
        self.staleness: Counter[int] = Counter()
        self.decoding: list[tuple[float, int]] = []
        self.losses: list[tuple[float, int]] = []

    async def run(self) -> Outcome:
        """Run all steps; return the results."""
        scenario = self.scenario
        self.health.start()
        told = self.fleet.on_lost
        assert told is not None  # set by `health.start`
        self.fleet.on_lost = partial(self._lost, told)
        if scenario.sickness is not None:
            scenario.sickness.unleash(self.engines)
        log = scenario.faults.unleash(self.engines)
        looking = asyncio.ensure_future(self._look())
        cpu_s = time.process_time() - self.meter.spent_s
        with self.meter.watch_collector():
            records = [await self._step(step) for step in range(scenario.steps)]
        cpu_s = time.process_time() - self.meter.spent_s - cpu_s
        looking.cancel()
        for engine in self.engines:
            engine.settle()
        books = self.fleet.take_metrics().values_by_name()
        await self.health.close()
        await self.scheduler.close()
        slots_s = records[-1].end_s * scenario.replicas
        most = slots_s * scenario.model.max_tokens_per_s
        return Outcome(
            scenario,
            records,
            staleness=dict(sorted(self.staleness.items())),
            busy_slots=sum(e.busy_slot_s for e in self.engines)
            / (slots_s * scenario.model.capacity),
            written_share=sum(e.written_tokens for e in self.engines) / most,
            requests=sum(e.requests for e in self.engines),
            scheduler_cpu_s=cpu_s,
            collector_cpu_s=self.meter.collector_s,
            decoding=self.decoding,
            faults=log,
            losses=self.losses,
            moved_requests=int(books["rollout/moved_requests"]),
        )

    async def _step(self, step: int) -> StepRecord:
        loop = asyncio.get_running_loop()
        result = await self.scheduler.collect(step)
        begin_s = loop.time()
        with self.meter:
            work = self._check(result.groups, step)
            in_flight, resident_mb = len(self.scheduler.buffer), self._process.memory_info().rss
        async with self.trainer:
            await asyncio.sleep(self.scenario.train_s)
            await self.fleet.update_weights(step + 1, self._push)
        return StepRecord(begin_s, loop.time(), work, in_flight, resident_mb / 2**20)

    async def _look(self) -> None:
        while True:
            with self.meter:
                moment_s = asyncio.get_running_loop().time()
                self.decoding.append((moment_s, sum(engine.batch for engine in self.engines)))
            await asyncio.sleep(self.scenario.sample_s)

    async def _push(self, indices: Sequence[int]) -> None:
        version = self.fleet.version
        loads = [self.engines[index].load_weights(version) for index in indices]
        try:
            async with asyncio.timeout(PUSH_TIMEOUT_S):
                await asyncio.gather(*loads)
        except TimeoutError as error:
            raise WaitTimeoutError(f"a push took more than {PUSH_TIMEOUT_S:g} s") from error

    def _lost(self, told: Callable[[Replica, str], None], replica: Replica, reason: str) -> None:
        self.losses.append((asyncio.get_running_loop().time(), replica.index))
        told(replica, reason)

    async def _restart(self, replica: Replica) -> None:
        async with asyncio.timeout(self.scenario.limits.restart_timeout_s):
            await self.engines[replica.index].restart()

    async def _rejoin(self, replica: Replica) -> None:
        async with self.trainer:  # the push must wait until the trainer is free
            replica.reset_for_new_engine()
            await self._push([replica.index])
            replica.mark_weights_complete()
            self.fleet.join([replica.index])

    def _check(self, groups: Sequence[Group], step: int) -> StepWork:
        """Check that every sample is complete, was written once, and has no token that is older
        than allowed. Return the amount of work.

        Raises:
            AssertionError: a check failed.
        """
        scenario, lengths = self.scenario, []
        if len(groups) != scenario.prompts_per_step:
            raise AssertionError(f"step {step} got {len(groups)} groups")
        for group in groups:
            if len(group.samples) != scenario.samples_per_prompt:
                raise AssertionError(f"a group of step {step} has {len(group.samples)} samples")
            for scored in group.samples:
                lengths.append(self._check_sample(scored.sample, step))
        return StepWork(sum(lengths), max(lengths), len(groups))

    def _check_sample(self, sample: Sample, step: int) -> int:
        written = sample.completion
        length, runs = len(written), written.versions.runs
        tokens = written.tokens
        if len(tokens) != length or set(tokens) != {length}:
            raise AssertionError(f"{sample.id} should have {tokens[0]} tokens: {written}")
        if list(runs) != sorted(runs):
            raise AssertionError(f"{sample.id} goes back to older weights: {written.versions}")
        if step - runs[0][0] > self.scenario.staleness:
            raise AssertionError(f"{sample.id} is too old for step {step}: {written.versions}")
        for version, count in runs:
            self.staleness[step - version] += count
        return length


def simulate(scenario: Scenario) -> Outcome:
    """Simulate a run, from the start to its last push of weights; return the results.

    Raises:
        AssertionError: a sample is missing, incomplete or too old.
    """

    async def live() -> Outcome:
        return await World(scenario).run()

    return run_virtually(live())


async def _score(samples: list[Sample]) -> list[ScoredSample]:
    return [ScoredSample(sample, 1.0) for sample in samples]


def _dataset(scenario: Scenario) -> Dataset[Prompt]:
    """Return a dataset of two sources, one of which is drawn three times as often."""
    count = scenario.prompts_per_step
    tokens = (0,) * PROMPT_TOKENS
    sources = [
        Source(
            name,
            weight,
            tuple(Prompt(f"{name}:{row}", tokens, "", "", "") for row in range(count)),
        )
        for name, weight in (("often", 3.0), ("seldom", 1.0))
    ]
    return Dataset(tuple(sources), (), "simulated")
