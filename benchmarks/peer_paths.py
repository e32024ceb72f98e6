"""Ways of a step's rows from producers through the driver to consumers: this project's, and those
of peers, with the peers' own libraries.

Rows are scripted completions (`scripted_run.py`): tokens int32 and log-probs float32. Each way does
only these steps: the producers hand over rows that they have made before; the driver learns of them
and cuts them in halves; the consumers read every row once; the rows are freed.
"""

from __future__ import annotations

import asyncio
import pathlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import ray
import torch

from benchmarks.scripted_run import Script, scripted_completion
from roll.config.sections.placement import ClusterConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, Content
from roll.core.pickling import Columns
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import WorkerSpec
from roll.distributed.cluster import Placement
from roll.distributed.dispatch import dispatch
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.remote_contents import CONTENTS_APART, contents_here
from roll.distributed.worker import Worker

PRODUCERS, CONSUMERS = 4, 2
ROOT = pathlib.Path(__file__).parents[1]
PARTITION = "train"
"""Name of TransferQueue's partition with the rows."""
PROTO_COPIES = 14
"""Memory of a step with `DataProto`, as a multiple of its padded rows: copies in producers, store,
driver and consumers. Ten were seen in the middle of a step."""
CALL_TIMEOUT_S = 300.0
"""Time limit of each call to a peer's actors, in seconds."""


@dataclass(frozen=True)
class Proof:
    """Sums over rows: equal ones say that all rows have arrived."""

    rows: int
    tokens: int
    token_sum: int
    logprob_sum: float

    @classmethod
    def of(cls, columns: Sequence[tuple[Any, Any]]) -> Proof:
        """Read all rows, given as pairs of the arrays or tensors of tokens and log-probs."""
        arrays = [(np.asarray(tokens), np.asarray(logprobs)) for tokens, logprobs in columns]
        return cls(
            len(arrays),
            sum(len(tokens) for tokens, _ in arrays),
            sum(int(tokens.sum(dtype=np.int64)) for tokens, _ in arrays),
            sum(float(logprobs.sum(dtype=np.float64)) for _, logprobs in arrays),
        )

    @classmethod
    def total(cls, parts: Sequence[Proof]) -> Proof:
        """Return the sums of the sums."""
        return cls(
            sum(part.rows for part in parts),
            sum(part.tokens for part in parts),
            sum(part.token_sum for part in parts),
            round(sum(part.logprob_sum for part in parts), 3),
        )


def shares(samples: int) -> list[range]:
    """Return the seeds of the rows of each producer; there are `samples` of them together."""
    bounds = [samples * i // PRODUCERS for i in range(PRODUCERS + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def halves(values: Sequence[Any]) -> list[Sequence[Any]]:
    """Return consecutive parts of the values, one for each consumer."""
    bounds = [len(values) * i // CONSUMERS for i in range(CONSUMERS + 1)]
    return [values[begin:end] for begin, end in pairwise(bounds)]


class Rows:
    """Rows of one producer."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.completions: list[Completion] = []

    def make(self, seeds: range) -> Proof:
        """Make a row for each seed, and return what a consumer of them would find."""
        self.completions = [scripted_completion(seed, 0, self.script) for seed in seeds]
        return Proof.of([(one.tokens, one.logprobs) for one in self.completions])


class Path(ABC):
    """One way from the producers to the consumers; the driver's methods."""

    name: str

    def memory(self, samples: int) -> int:
        """Return about how many bytes of memory a step takes in all processes together, if they are
        many more than its rows."""
        return 0

    @abstractmethod
    def make(self, samples: int) -> Proof:
        """Let the producers make the rows of a step."""

    @abstractmethod
    def bring(self) -> Proof:
        """Bring the rows from the producers to the consumers and free them; return what the
        consumers found."""

    @abstractmethod
    def close(self) -> None:
        """End the actors."""


class Producer(Worker):
    """A producer whose rows stay in the object store."""

    def __init__(self, spec: WorkerSpec, script: Script) -> None:
        super().__init__(spec)
        self.rows = Rows(script)

    async def make(self, shares: Sequence[range]) -> Proof:
        return self.rows.make(shares[self.spec.rank])

    @dispatch(CONTENTS_APART)
    async def hand_over(self) -> list[Completion]:
        return self.rows.completions


class Consumer(Worker):
    """A consumer that fetches its rows."""

    def read(self, contents: list[Content]) -> Proof:
        return Proof.of([(one.tokens, one.logprobs) for one in contents_here(contents)])


class OwnPath(Path):
    """This project's way: the driver has the addresses of the rows."""

    name = "this project"

    def __init__(self, script: Script) -> None:
        devices = PRODUCERS + CONSUMERS
        config = ClusterConfig(devices_per_node=devices, platform="cpu")
        pools = {"producers": f"0-{PRODUCERS - 1}", "consumers": f"{PRODUCERS}-{devices - 1}"}
        self._manager = ResourceManager(config, pools, python_path=[str(ROOT)])
        self._producers = self._manager.start(
            Producer, Placement(Role.ACTOR_INFER, pool="producers"), script
        )
        self._consumers = self._manager.start(
            Consumer, Placement(Role.ACTOR_TRAIN, pool="consumers")
        )
        self._loop = LoopThread("rows")

    def make(self, samples: int) -> Proof:
        return Proof.total(self._producers.call_each(Producer.make, shares(samples)))

    def bring(self) -> Proof:
        async def gather() -> list[list[Completion]]:
            asks = (self._producers.ask(i, Producer.hand_over) for i in range(PRODUCERS))
            return await asyncio.gather(*asks)

        found = [one.content for part in self._loop.run(gather()) for one in part]
        reads = [
            self._consumers.on([rank]).submit(Consumer.read, Columns(part))
            for rank, part in enumerate(halves(found))
        ]
        return Proof.total([read.result() for read in reads])

    def close(self) -> None:
        self._loop.close()
        self._manager.close()


class QueueActor:
    """A producer and consumer of TransferQueue, with a client of its own."""

    def __init__(self, script: Script) -> None:
        import transfer_queue

        self.rows = Rows(script)
        transfer_queue.init()
        self.queue = transfer_queue

    def make(self, seeds: range) -> Proof:
        return self.rows.make(seeds)

    def hand_over(self, first: int) -> None:
        from tensordict import TensorDict

        found = self.rows.completions
        fields = {
            "tokens": [torch.frombuffer(one.tokens, dtype=torch.int32) for one in found],
            "logprobs": [torch.frombuffer(one.logprobs, dtype=torch.float32) for one in found],
        }
        jagged = {
            name: torch.nested.as_nested_tensor(column, layout=torch.jagged)
            for name, column in fields.items()
        }
        self.queue.kv_batch_put(
            keys=[str(first + i) for i in range(len(found))],
            partition_id=PARTITION,
            fields=TensorDict(jagged, batch_size=len(found)),
            tags=[{"status": "success", "seq_len": len(one)} for one in found],
        )

    def read(self, meta: Any) -> Proof:
        found = self.queue.kv_batch_get_by_meta(meta)
        columns = [found[name].unbind() for name in ("tokens", "logprobs")]
        return Proof.of(list(zip(*columns, strict=True)))


class QueuePath(Path):
    """TransferQueue's way: the rows are in its storage units, and the driver has keys and tags, for
    which it asks the controller. One put for the rows of a producer, one list, one get for the rows
    of a consumer, one clear."""

    name = "TransferQueue"

    def __init__(self, script: Script) -> None:
        import transfer_queue

        self._queue = transfer_queue
        self._queue.init()
        actor = ray.remote(num_cpus=0)(QueueActor)
        self._producers = [actor.remote(script) for _ in range(PRODUCERS)]
        self._consumers = [actor.remote(script) for _ in range(CONSUMERS)]
        self._firsts: list[int] = []

    def make(self, samples: int) -> Proof:
        self._firsts = [share.start for share in shares(samples)]
        pairs = zip(self._producers, shares(samples), strict=True)
        return Proof.total(_results([actor.make.remote(seeds) for actor, seeds in pairs]))

    def bring(self) -> Proof:
        from transfer_queue import KVBatchMeta

        pairs = zip(self._producers, self._firsts, strict=True)
        _results([actor.hand_over.remote(first) for actor, first in pairs])
        tags = self._queue.kv_list(PARTITION)[PARTITION]
        meta = KVBatchMeta(
            keys=list(tags),
            tags=list(tags.values()),
            partition_id=PARTITION,
            fields=["tokens", "logprobs"],
        )
        parts = zip(self._consumers, meta.chunk(CONSUMERS), strict=True)
        proofs = _results([actor.read.remote(part) for actor, part in parts])
        self._queue.kv_clear(keys=meta.keys, partition_id=PARTITION)
        return Proof.total(proofs)

    def close(self) -> None:
        for actor in (*self._producers, *self._consumers):
            ray.kill(actor)
        self._queue.close()


class ProtoActor:
    """A producer and consumer of `DataProto`."""

    def __init__(self, script: Script) -> None:
        self.rows = Rows(script)

    def make(self, seeds: range) -> Proof:
        return self.rows.make(seeds)

    def hand_over(self) -> Any:
        from verl import DataProto

        found, longest = self.rows.completions, self.rows.script.longest
        tokens = torch.zeros(len(found), longest, dtype=torch.int32)
        logprobs = torch.zeros(len(found), longest)
        for i, one in enumerate(found):
            tokens[i, : len(one)] = torch.frombuffer(one.tokens, dtype=torch.int32)
            logprobs[i, : len(one)] = torch.frombuffer(one.logprobs, dtype=torch.float32)
        return DataProto.from_dict({"tokens": tokens, "logprobs": logprobs})

    def read(self, part: Any) -> Proof:
        tokens, logprobs = part.batch["tokens"], part.batch["logprobs"]
        counts = (tokens != 0).sum(dim=1).tolist()
        return Proof.of(
            [(tokens[i, :count], logprobs[i, :count]) for i, count in enumerate(counts)]
        )


class ProtoPath(Path):
    """The way of verl's `DataProto`: the driver gathers the rows, padded to the longest response
    that is allowed, concatenates them, and sends each consumer its part."""

    name = "verl `DataProto`"

    def __init__(self, script: Script) -> None:
        from verl import DataProto

        self._proto = DataProto
        self._row_bytes = 8 * script.longest
        actor = ray.remote(num_cpus=0)(ProtoActor)
        self._producers = [actor.remote(script) for _ in range(PRODUCERS)]
        self._consumers = [actor.remote(script) for _ in range(CONSUMERS)]

    def memory(self, samples: int) -> int:
        return PROTO_COPIES * self._row_bytes * samples

    def make(self, samples: int) -> Proof:
        pairs = zip(self._producers, shares(samples), strict=True)
        return Proof.total(_results([actor.make.remote(seeds) for actor, seeds in pairs]))

    def bring(self) -> Proof:
        found = _results([actor.hand_over.remote() for actor in self._producers])
        parts = self._proto.concat(found).chunk(CONSUMERS)
        pairs = zip(self._consumers, parts, strict=True)
        return Proof.total(_results([actor.read.remote(part) for actor, part in pairs]))

    def close(self) -> None:
        for actor in (*self._producers, *self._consumers):
            ray.kill(actor)


PATHS: dict[str, Callable[[Script], Path]] = {
    "own": OwnPath,
    "transfer_queue": QueuePath,
    "verl": ProtoPath,
}


def _results(refs: Sequence[Any]) -> list[Any]:
    return list(ray.get(list(refs), timeout=CALL_TIMEOUT_S))


@contextmanager
def wires_watched(sent: Counter[str], received: Counter[str]) -> Iterator[None]:
    """Count the bytes of all ZeroMQ messages of this process inside the block, under "wires".

    pyzmq has no hook at this place, so two methods of its sockets are wrapped; those of its
    asynchronous sockets and of messages of several parts end in them.
    """
    try:
        import zmq
    except ImportError:  # then no way uses it
        yield
        return
    send, receive = zmq.Socket.send, zmq.Socket.recv

    def counted_send(socket: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        sent["wires"] += memoryview(data).nbytes
        return send(socket, data, *args, **kwargs)

    def counted_receive(socket: Any, *args: Any, **kwargs: Any) -> Any:
        data = receive(socket, *args, **kwargs)
        received["wires"] += memoryview(data).nbytes
        return data

    zmq.Socket.send, zmq.Socket.recv = counted_send, counted_receive  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        zmq.Socket.send, zmq.Socket.recv = send, receive  # type: ignore[method-assign]
