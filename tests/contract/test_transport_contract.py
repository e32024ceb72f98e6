"""One suite for every way weights travel that this machine has; the senders and receivers are
threads, or processes where one of them is to die."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.abort import Abort
from roll.weight_sync.channel import Channel, TransportKind
from roll.weight_sync.manifest import Manifest, even_cuts
from roll.weight_sync.transfer import SendReport, receive, send
from roll.weight_sync.transport_choice import new_channel
from roll.weight_sync.transports.files import FOLDER_PREFIX

KINDS: list[TransportKind] = ["shared_memory", "broadcast", "files"]
ALL = pytest.mark.parametrize("kind", KINDS)
Received = tuple[dict[str, Tensor], str | None]


@pytest.fixture
def open_channel(tmp_path: Path) -> Callable[..., Channel]:
    def opened(kind: TransportKind, **settings: int | float) -> Channel:
        wanted: dict[str, Any] = {"num_receivers": 1, "bucket_bytes": 1024, "timeout_s": 20}
        return new_channel(kind, folder=tmp_path, **wanted | settings)

    return opened


def some_tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "a.q.bf16": torch.randn(7, 3, generator=g).bfloat16(),
        "a.k.large": torch.randn(50, 41, generator=g),
        "scalar": torch.tensor(3.5),
        "b.ints": torch.randint(-9, 9, (5,), generator=g),
        "b.empty": torch.empty(0, 4),
        "strided": torch.randn(6, 8, generator=g).T,
        "c.mlp.bools": torch.tensor([True, False, True]),
        "last_empty": torch.empty(0),
    }


def shared_out(tensors: dict[str, Tensor], senders: int) -> Manifest:
    """By rows, as a sharded trainer holds them; what has no rows belongs to sender 0."""
    manifest = Manifest.of(tensors.items())
    cuts = [
        even_cuts(t.shape[0], t.shape[1:].numel(), senders) if t.dim() else (0, *[1] * senders)
        for t in tensors.values()
    ]
    return replace(manifest, cuts=tuple(cuts))


def parts_of(
    tensors: dict[str, Tensor], manifest: Manifest, sender: int
) -> Iterator[tuple[str, Tensor]]:
    for position, (name, tensor) in enumerate(tensors.items()):
        cuts = manifest.cuts_of(position)
        part = tensor.reshape(-1)[cuts[sender] : cuts[sender + 1]]
        yield name, part.reshape(tensor.shape) if part.numel() == tensor.numel() else part


def accept_all(manifest: Manifest) -> None:
    """Any push is fine."""


def refuse_all(manifest: Manifest) -> None:
    raise WeightSyncError("this model has no such tensors")


def collect(channel: Channel, index: int) -> Received:
    with receive(channel, index, check=accept_all) as incoming:
        # Kept to the end, like an engine that needs several of them at once.
        tensors = dict(incoming.tensors())
    return {name: tensor.clone() for name, tensor in tensors.items()}, incoming.checksum


def push(
    channel: Channel, tensors: dict[str, Tensor], manifest: Manifest
) -> tuple[list[SendReport], list[Received]]:
    """Every sender and every receiver in a thread of its own."""
    with ThreadPoolExecutor(channel.num_senders + channel.num_receivers) as pool:
        receiving = [pool.submit(collect, channel, i) for i in range(channel.num_receivers)]
        sending = [
            pool.submit(
                send, channel, parts_of(tensors, manifest, i), manifest, verify=True, sender=i
            )
            for i in range(channel.num_senders)
        ]
        return [s.result(60) for s in sending], [r.result(60) for r in receiving]


def assert_same(received: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(received) == list(expected)
    for name, tensor in expected.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor), name


@ALL
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (3, 2)])
def test_every_receiver_gets_every_tensor_unchanged(
    kind: TransportKind, senders: int, receivers: int, open_channel: Callable[..., Channel]
) -> None:
    tensors = some_tensors()
    channel = open_channel(kind, num_senders=senders, num_receivers=receivers)
    reports, received = push(channel, tensors, shared_out(tensors, senders))
    assert reports[0].num_tensors == len(tensors)
    assert reports[0].num_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
    for got, checksum in received:
        assert_same(got, tensors)
        assert checksum == reports[0].checksum


@ALL
def test_float32_masters_arrive_in_the_announced_bfloat16(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    masters = {"layers.0.mlp.up.weight": torch.randn(61, 33), "norm.weight": torch.randn(9)}
    announced = {name: tensor.bfloat16() for name, tensor in masters.items()}
    channel = open_channel(kind, num_senders=2)
    _, [(got, _)] = push(channel, masters, shared_out(announced, 2))
    assert_same(got, announced)


@pytest.mark.parametrize("kind", ["shared_memory", "broadcast"])
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=9),
    senders=st.integers(1, 3),
    bucket_bytes=st.integers(64, 700),
)
def test_any_sizes_survive_any_bucket_size_and_number_of_senders(
    kind: TransportKind,
    rows: list[tuple[int, int]],
    senders: int,
    bucket_bytes: int,
    open_channel: Callable[..., Channel],
) -> None:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]
    tensors = {
        f"layers.{i // 3}.mlp.t{i}.weight": torch.arange(a * b).reshape(a, b).to(kinds[i % 4])
        for i, (a, b) in enumerate(rows)
    }
    channel = open_channel(kind, num_senders=senders, bucket_bytes=bucket_bytes)
    reports, [(got, checksum)] = push(channel, tensors, shared_out(tensors, senders))
    assert_same(got, tensors)
    assert checksum == reports[0].checksum


@ALL
def test_tensors_go_straight_into_the_receivers_own_memory(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    tensors = {"small.w": torch.randn(5, 5), "larger_than_a_bucket.w": torch.randn(50, 30)}
    own = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    channel = open_channel(kind)

    def take() -> dict[str, int]:
        with receive(channel, 0, check=accept_all) as incoming:
            taken = incoming.tensors(into=lambda meta: own[meta.name])
            return {name: tensor.data_ptr() for name, tensor in taken}

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(take)
        send(channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=True)
        pointers = receiving.result(20)
    assert_same(own, tensors)
    assert pointers == {name: tensor.data_ptr() for name, tensor in own.items()}


@pytest.mark.timeout(120)
def test_no_receiver_leaves_a_broadcast_before_the_others_have_all_bytes(
    open_channel: Callable[..., Channel],
) -> None:
    """With NCCL they pass the bytes on, and one that left would drop those on their way."""
    tensors = {"first": torch.randn(200), "last": torch.randn(200)}
    channel = open_channel("broadcast", num_receivers=2)  # a bucket for each of them
    read, over, go_on = threading.Event(), threading.Event(), threading.Event()

    def fast() -> None:
        with receive(channel, 0, check=accept_all) as incoming:
            for name, _ in incoming.tensors():
                if name == "last":
                    read.set()
            over.set()

    def slow() -> None:
        with receive(channel, 1, check=accept_all) as incoming:
            for _ in incoming.tensors():
                go_on.wait(30)

    with ThreadPoolExecutor(3) as pool:
        receiving = [pool.submit(fast), pool.submit(slow)]
        sending = pool.submit(
            send, channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=True
        )
        try:
            assert read.wait(30)
            assert not over.wait(1)
        finally:
            go_on.set()
        sending.result(30)
        for receiver in receiving:
            receiver.result(30)
    assert over.is_set()


def child(channel: Channel, index: int, behaviour: str, pipe: Connection) -> None:
    """A receiver process; answers with what it got, or the error."""
    check = refuse_all if behaviour == "refuse" else accept_all
    try:
        with receive(channel, index, check=check) as incoming:
            tensors = incoming.tensors()
            if behaviour in ("die", "hang"):
                next(tensors)
            if behaviour == "die":
                os._exit(9)
            if behaviour == "hang":
                time.sleep(channel.timeout_s + 2)
            got = {
                name: tensor.clone().view(torch.uint8) for name, tensor in tensors if "a." in name
            }
        pipe.send(("ok", pickle.dumps(got), incoming.checksum))
    except WeightSyncError as error:
        pipe.send(("error", str(error), None))


def push_to_children(
    channel: Channel, behaviours: list[str]
) -> tuple[SendReport | WeightSyncError, list[tuple[str, object, str | None]]]:
    context = mp.get_context("forkserver")  # a plain fork would copy locks of torch's threads
    pipes, children = [], []
    for index, behaviour in enumerate(behaviours):
        mine, theirs = context.Pipe()
        process = context.Process(target=child, args=(channel, index, behaviour, theirs))
        process.start()
        theirs.close()
        pipes.append(mine)
        children.append(process)
    tensors = some_tensors()
    result: SendReport | WeightSyncError
    try:
        result = send(channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=True)
    except WeightSyncError as error:
        result = error
    answers = []
    for process, pipe in zip(children, pipes, strict=True):
        try:
            answers.append(pipe.recv() if pipe.poll(channel.timeout_s) else ("silent", None, None))
        except EOFError:
            answers.append(("died", None, None))
        process.kill()
        process.join()
        process.close()
        pipe.close()
    return result, answers


@ALL
def test_other_processes_receive_what_was_sent(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    report, answers = push_to_children(open_channel(kind, num_receivers=2), ["ok", "ok"])
    assert isinstance(report, SendReport)
    expected = some_tensors()
    for verdict, payload, checksum in answers:
        assert verdict == "ok", payload
        assert checksum == report.checksum
        assert isinstance(payload, bytes)
        for name, raw in pickle.loads(payload).items():
            assert torch.equal(raw, expected[name].view(torch.uint8))


@ALL
def test_one_refusal_stops_the_push_for_all_before_the_first_byte(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    channel = open_channel(kind, num_receivers=2)
    result, answers = push_to_children(channel, ["ok", "refuse"])
    assert isinstance(result, WeightSyncError)
    assert "receiver 1: this model has no such tensors" in str(result)
    assert [answer[0] for answer in answers] == ["error", "error"]
    assert "receiver 1" in str(answers[0][1])


@ALL
def test_a_receiver_that_dies_is_an_error_in_time(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    timeout_s = 4 if kind == "files" else 60  # only the others notice a death by itself
    result, _ = push_to_children(open_channel(kind, timeout_s=timeout_s), ["die"])
    assert isinstance(result, WeightSyncError)
    assert "died" in str(result)


@pytest.mark.parametrize("kind", ["shared_memory", "files"])
def test_a_receiver_that_hangs_ends_in_a_timeout_that_names_it(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    result, _ = push_to_children(open_channel(kind, timeout_s=2), ["hang"])
    assert isinstance(result, WeightSyncError)
    assert "2 s" in str(result)
    assert "receiver 0" in str(result)


@ALL
def test_a_receiver_that_never_comes_ends_in_a_timeout_that_names_it(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    tensors = some_tensors()
    channel = open_channel(kind, timeout_s=0.5)
    with pytest.raises(WeightSyncError, match=r"receiver 0"):
        send(channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=False)


@ALL
def test_a_sender_that_never_comes_ends_in_a_timeout_that_names_it(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    with pytest.raises(WeightSyncError, match=r"sender"):
        collect(open_channel(kind, timeout_s=0.5), 0)
    tensors = some_tensors()
    manifest = shared_out(tensors, 2)
    channel = open_channel(kind, timeout_s=2, num_senders=2)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(collect, channel, 0)
        with pytest.raises(WeightSyncError, match=r"sender 1|receiver 0"):
            send(channel, parts_of(tensors, manifest, 0), manifest, verify=False)
        assert isinstance(receiving.exception(20), WeightSyncError)


@ALL
@pytest.mark.parametrize("failing", [0, 1])
def test_a_sender_that_fails_midway_is_an_error_for_all_others(
    kind: TransportKind, failing: int, open_channel: Callable[..., Channel]
) -> None:
    tensors = some_tensors()
    manifest = shared_out(tensors, 2)
    channel = open_channel(kind, num_senders=2, timeout_s=8)

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield next(parts_of(tensors, manifest, failing))
        raise MemoryError("no more")

    def run(sender: int) -> SendReport:
        parts = broken() if sender == failing else parts_of(tensors, manifest, sender)
        return send(channel, parts, manifest, verify=False, sender=sender)

    with ThreadPoolExecutor(3) as pool:
        receiving = pool.submit(collect, channel, 0)
        sending: list[Future[SendReport]] = [pool.submit(run, sender) for sender in range(2)]
        assert isinstance(sending[failing].exception(30), MemoryError)
        assert isinstance(sending[1 - failing].exception(30), WeightSyncError)
        assert isinstance(receiving.exception(30), WeightSyncError)


@ALL
def test_senders_with_different_manifests_are_an_error_before_the_first_byte(
    kind: TransportKind, open_channel: Callable[..., Channel]
) -> None:
    tensors = some_tensors()
    manifest = shared_out(tensors, 2)
    other = manifest.without(["scalar"])
    channel = open_channel(kind, num_senders=2, timeout_s=8)
    with ThreadPoolExecutor(3) as pool:
        receiving = pool.submit(collect, channel, 0)
        leading = pool.submit(send, channel, parts_of(tensors, manifest, 0), manifest, verify=False)
        with pytest.raises(WeightSyncError, match="another manifest"):
            send(channel, parts_of(tensors, manifest, 1), other, verify=False, sender=1)
        assert "another manifest" in str(leading.exception(20))
        assert isinstance(receiving.exception(20), WeightSyncError)


@ALL
def test_nothing_is_left_in_the_file_system_or_open_after_errors(
    kind: TransportKind, open_channel: Callable[..., Channel], tmp_path: Path
) -> None:
    def state() -> tuple[list[str], int]:
        gc.collect()  # errors hold their frames
        left = [*Path("/dev/shm").glob("roll*"), *tmp_path.iterdir()]
        return [path.name for path in left], len(os.listdir("/proc/self/fd"))

    push_to_children(open_channel(kind), ["ok"])
    files, most = state()  # some of what is open may belong to an earlier test, and end meanwhile
    push_to_children(open_channel(kind, timeout_s=2), ["die"])
    push_to_children(open_channel(kind, num_receivers=2), ["refuse", "ok"])
    push_to_children(open_channel(kind), ["ok"])
    deadline = time.monotonic() + 60  # the dead one could come late, on a busy machine later still
    while (found := state())[0] != files or found[1] > most:
        assert time.monotonic() < deadline, f"left: {found}; before: {files}, {most}"
        time.sleep(0.05)
    assert files == []


class Waiting:
    """How far a transfer is when it is given up, and who is missing."""

    def __init__(self, channel: Channel) -> None:
        self.abort = Abort()
        self.channel = channel
        self.pool = ThreadPoolExecutor(8)
        tensors = some_tensors()
        manifest = shared_out(tensors, channel.num_senders)
        self.sending = [
            self.pool.submit(
                send,
                channel,
                parts_of(tensors, manifest, sender),
                manifest,
                verify=True,
                sender=sender,
                abort=self.abort,
            )
            for sender in range(channel.num_senders)
        ]

    def reasons(self, *receiving: Future[Received]) -> list[str]:
        transfers: list[Future[SendReport] | Future[Received]] = [*self.sending, *receiving]
        errors = [future.exception(10) for future in transfers]
        self.pool.shutdown()
        assert all(isinstance(error, WeightSyncError) for error in errors), errors
        return [str(error) for error in errors]


@ALL
@pytest.mark.parametrize("early", [False, True], ids=["before it connects", "before all begins"])
def test_a_push_that_is_given_up_ends_at_once_everywhere(
    kind: TransportKind, early: bool, open_channel: Callable[..., Channel]
) -> None:
    channel = open_channel(kind, num_senders=2, num_receivers=2, timeout_s=600)
    waiting = Waiting(channel)
    if early:
        waiting.abort.give_up("receiver 1 is dead")
    one = waiting.pool.submit(collect, channel, 0)
    if not early:
        time.sleep(0.3)
        assert not any(future.done() for future in waiting.sending)
        waiting.abort.give_up("receiver 1 is dead")
    begun = time.monotonic()
    reasons = waiting.reasons(one)
    assert time.monotonic() - begun < 3
    assert all("receiver 1 is dead" in reason for reason in reasons), reasons
    with pytest.raises(WeightSyncError, match="receiver 1 is dead"):
        collect(channel, 1)  # not dead, but late


def agree_and_stop(channel: Channel, index: int, stage: str, ready: Connection) -> None:
    """A receiver that stops itself, as by SIGSTOP, in the middle."""

    def check(manifest: Manifest) -> None:
        if stage == "manifest":
            ready.send("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)

    with receive(channel, index, check=check) as incoming:
        for name, _ in incoming.tensors():
            if name == "a.q.bf16":
                ready.send("stopping")
                os.kill(os.getpid(), signal.SIGSTOP)


@ALL
@pytest.mark.parametrize("stage", ["manifest", "tensors"])
def test_a_push_to_a_stopped_receiver_can_be_given_up(
    kind: TransportKind, stage: str, open_channel: Callable[..., Channel]
) -> None:
    channel = open_channel(kind, num_receivers=2, timeout_s=600, bucket_bytes=128)
    context = mp.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=agree_and_stop, args=(channel, 1, stage, there))
    process.start()
    try:
        waiting = Waiting(channel)
        living = waiting.pool.submit(collect, channel, 0)
        assert here.poll(60)
        time.sleep(0.2)
        waiting.abort.give_up("receiver 1 is stopped")
        begun = time.monotonic()
        reasons = waiting.reasons(living)
        assert time.monotonic() - begun < 3
        assert "receiver 1 is stopped" in reasons[0]
    finally:
        process.kill()
        process.join()


def test_the_folder_of_a_killed_sender_goes_with_the_next_push(tmp_path: Path) -> None:
    channel = new_channel("files", num_receivers=1, timeout_s=60, folder=tmp_path)
    context = mp.get_context("forkserver")
    process = context.Process(target=send_nothing, args=(channel,))
    process.start()
    while not (Path(channel.address) / "offer.json").exists():
        time.sleep(0.01)
    process.kill()
    process.join()
    assert Path(channel.address).exists()
    # Others were killed between making their folder and giving it its name: one long ago.
    for name, age_s in (("long-ago", 3600.0), ("just-now", 0.0)):
        (hidden := tmp_path / f".{FOLDER_PREFIX}{name}").mkdir()
        (hidden / "lock").touch()
        os.utime(hidden, (time.time() - age_s,) * 2)
    tensors = some_tensors()
    push(
        new_channel("files", num_receivers=1, timeout_s=20, folder=tmp_path),
        tensors,
        shared_out(tensors, 1),
    )
    assert [path.name for path in tmp_path.iterdir()] == [f".{FOLDER_PREFIX}just-now"]


def send_nothing(channel: Channel) -> None:
    """A sender that waits for its receiver."""
    send(channel, iter(()), Manifest(()), verify=False)


@pytest.mark.parametrize("fault", ["missing", "extra", "other shape", "other name", "other kind"])
def test_tensors_that_differ_from_the_manifest_are_an_error_on_both_sides(
    fault: str, open_channel: Callable[..., Channel]
) -> None:
    announced = {"a": torch.ones(3), "b": torch.ones(4)}
    sent = {
        "missing": {"a": torch.ones(3)},
        "extra": {**announced, "c": torch.ones(1)},
        "other shape": {"a": torch.ones(3), "b": torch.ones(2, 2)},
        "other name": {"a": torch.ones(3), "c": torch.ones(4)},
        "other kind": {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.int64)},
    }[fault]
    channel = open_channel("shared_memory")
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(collect, channel, 0)
        with pytest.raises(WeightSyncError, match="announced"):
            send(channel, iter(sent.items()), Manifest.of(announced.items()), verify=False)
        with pytest.raises(WeightSyncError, match="announced"):
            receiver.result(timeout=20)


def test_the_parts_are_exhausted_also_when_the_push_is_refused(
    open_channel: Callable[..., Channel],
) -> None:
    """Making a part may be a collective; ranks that are left alone in it would hang."""
    made = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            made.append(name)
            yield name, torch.ones(1)

    channel = open_channel("shared_memory", timeout_s=0.2)
    with pytest.raises(WeightSyncError):
        send(channel, tensors(), Manifest.of((n, torch.ones(1)) for n in "abc"), verify=False)
    assert made == ["a", "b", "c"]
