"""Small workers that the tests start on Ray and in this process."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import torch
import torch.distributed as dist

from roll.core.batch import Batch, tensor
from roll.core.batches import TokenBatch
from roll.core.completion import Completion, FinishReason
from roll.core.errors import DataError, EngineError, RollError
from roll.core.metrics import Mean, Metrics
from roll.core.types import RankInfo, Sample, WorkerSpec
from roll.distributed.dispatch import SHARD_BATCH, dispatch
from roll.distributed.on_ray.environment import WORKER_TOKEN
from roll.distributed.remote_contents import CONTENTS_APART, fetch_samples
from roll.distributed.remote_values import RemoteValue, fetch, store
from roll.distributed.worker import Follower, Worker
from roll.rewards.api import RewardContext
from roll.workers.reward import RewardWorker

# Workers must be able to import this module by the name that the tests give it.
ROOT = str(Path(__file__).parents[2])
GRANDCHILD = "import time; time.sleep(600)"


@dataclass(frozen=True, kw_only=True)
class Packed(Batch):
    """Rows, and where they lie."""

    tokens: torch.Tensor = tensor("BT", required=True)
    remote_values: list[RemoteValue[torch.Tensor]]


class Spawner(Worker):
    """Leaves traces behind."""

    def say_last_words(self) -> None:
        sys.stderr.write("the last words of this worker\n")
        sys.stderr.flush()

    def spawn_grandchild(self) -> int:
        """A child in a session of its own, whose parent ends at once: nobody's child."""
        code = (
            "import subprocess, sys; print(subprocess.Popen("
            f"[sys.executable, '-c', {GRANDCHILD!r}], start_new_session=True, "
            "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
        )
        told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        return int(told.stdout)

    def share_memory(self) -> tuple[str, str]:
        """Shared memory that is kept; its name in /dev/shm, and the mark of this worker."""
        self.memory = SharedMemory(create=True, size=1)
        return self.memory.name, f"{WORKER_TOKEN}={os.environ[WORKER_TOKEN]}"


class TwinFollower(Follower):
    """The part of a `Twin` on another node; it fails when it finds a file."""

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        super().__init__(spec)
        self.failure = folder / "fail"
        where = (os.getpid(), spec, os.environ["CUDA_VISIBLE_DEVICES"])
        (folder / spec.name).write_bytes(pickle.dumps(where))

    async def follow(self) -> None:
        while not self.failure.exists():
            await asyncio.sleep(0.05)
        self.failure.unlink()
        raise EngineError("the part on the second node has lost process 7")


class Twin(Worker):
    """A worker that may lie on several nodes."""

    follower = TwinFollower

    def __init__(self, spec: WorkerSpec, folder: Path) -> None:
        super().__init__(spec)

    async def where(self) -> tuple[int, WorkerSpec, str]:
        return os.getpid(), self.spec, os.environ["CUDA_VISIBLE_DEVICES"]

    async def never(self) -> None:
        await asyncio.Event().wait()


class Adder(Spawner):
    """Runs one call at a time."""

    def __init__(self, spec: WorkerSpec, offset: int, *, fail: str = "") -> None:
        super().__init__(spec)
        self.offset = offset
        if fail == "user":
            raise DataError("no such file: prompts.jsonl")
        if fail == "bug":
            raise KeyError("offset")

    @dispatch(SHARD_BATCH)
    def add(self, batch: TokenBatch) -> TokenBatch:
        return replace(batch, tokens=batch.tokens + self.offset + 100 * self.spec.rank)

    @dispatch(SHARD_BATCH)
    def pack_rows(self, batch: TokenBatch) -> Packed:
        rows = list(batch.tokens)
        return Packed(tokens=batch.tokens, remote_values=store(rows, [row.nbytes for row in rows]))

    def open_rows(self, remote_values: list[RemoteValue[torch.Tensor]]) -> list[list[int]]:
        rows = fetch(remote_values, timeout_s=120, what="rows")
        return [row.tolist() for row in rows]

    @dispatch(SHARD_BATCH)
    def mean_length(self, batch: TokenBatch) -> Metrics:
        return Metrics({"length": Mean(float(batch.lengths.sum()), len(batch))})

    def where(self) -> tuple[int, WorkerSpec, dict[str, str]]:
        return os.getpid(), self.spec, dict(os.environ)

    def threads(self) -> int:
        return torch.get_num_threads()

    def summed_rank(self) -> float:
        """A collective over all ranks."""
        self.platform.init_process_group(self.spec, timeout_s=300)
        value = torch.tensor(float(self.spec.rank + 1))
        dist.all_reduce(value)
        return float(value)

    def close(self) -> None:
        self.platform.destroy()

    def sleep(self, seconds_by_rank: tuple[float, ...]) -> int:
        time.sleep(seconds_by_rank[self.spec.rank])
        return self.spec.rank

    def hold_the_lock(self, seconds: float) -> int:
        """Of the interpreter, as a long computation in C may: no other thread runs meanwhile."""
        deadline = time.monotonic() + seconds
        sys.setswitchinterval(2 * seconds)
        while time.monotonic() < deadline:
            sum(range(20_000_000))
        return self.spec.rank

    def raise_user_error(self) -> None:
        raise DataError("prompts.jsonl:3: no column 'answer'")

    def raise_bug_on_last_rank(self) -> None:
        if self.spec.rank == self.spec.world_size - 1:
            raise ZeroDivisionError("no tokens in this batch")
        time.sleep(600)


class HalfAdder(Adder):
    """Two ranks share each data-parallel part; only the second one's result counts."""

    @property
    def rank_info(self) -> RankInfo:
        rank, world = self.spec.rank, self.spec.world_size
        return RankInfo(rank, rank // 2, world // 2, is_dp_leader=rank % 2 == 1)

    @dispatch(SHARD_BATCH)
    def remember(self, batch: TokenBatch) -> None:
        batch.tokens.add_(self.spec.rank)  # each rank has memory of its own
        self.remembered = batch.tokens.tolist()

    def recall(self) -> list[list[int]]:
        return self.remembered


class Echo(Spawner):
    """Asynchronous, like an engine."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.loop = asyncio.get_running_loop()
        self.gate = asyncio.Event()

    async def echo(self, text: str) -> str:
        return f"{self.spec.name}: {text}"

    @dispatch(CONTENTS_APART)
    async def write(self, lengths: tuple[int, ...]) -> list[Completion]:
        """Completions of these lengths, as an engine writes them; a negative one is cut off."""
        return [
            Completion.of(
                range(abs(length)),
                [-0.5] * abs(length),
                [4] * abs(length),
                FinishReason.STOP if length >= 0 else FinishReason.ABORT,
            ).with_text(f"{length} tokens")
            for length in lengths
        ]

    async def read(self, samples: list[Sample]) -> list[tuple[int, int, str]]:
        """Number of tokens, last token and text of each sample."""
        return [
            (len(one.completion), one.completion.tokens[-1], one.response_text)
            for one in fetch_samples(samples)
        ]

    async def wait_for_gate(self) -> str:
        await self.gate.wait()
        return "open"

    async def open_gate(self) -> None:
        self.gate.set()

    async def fail(self, kind: str) -> None:
        if kind == "user":
            raise DataError("bad row")
        raise ValueError("bad luck")

    def pid(self) -> int:
        return os.getpid()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class OddError(RollError):
    """Cannot be made again from its message."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"no such {what} in {where}")


class Oracle(Echo):
    """Answers many small questions."""

    async def double(self, number: int, wait_s: float) -> int:
        await asyncio.sleep(wait_s)
        return 2 * number

    async def fail(self, kind: str) -> None:
        if kind == "odd":
            raise OddError("thing", "here")
        if kind == "exit":
            sys.exit(3)
        await super().fail(kind)

    async def unsendable(self) -> threading.Lock:
        return threading.Lock()

    async def process(self) -> int:
        return os.getpid()


class Picky(Echo):
    """Cannot be built while a file exists."""

    def __init__(self, spec: WorkerSpec, veto: str) -> None:
        super().__init__(spec)
        if os.path.exists(veto):
            raise DataError(f"{veto} is in the way")


class Halting(Echo):
    """Is stopped while it is built, if a file exists, into which it writes its process ID."""

    def __init__(self, spec: WorkerSpec, stop: str) -> None:
        super().__init__(spec)
        if os.path.exists(stop):
            with open(stop, "w") as file:
                file.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


class NodeReward(RewardWorker):
    """A reward that tells on which node it was computed."""

    async def score(self, sample: Sample, ctx: RewardContext) -> float:
        return float(self.spec.node)
