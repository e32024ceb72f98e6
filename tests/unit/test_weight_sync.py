"""Pushes between real processes, through shared memory and by broadcast."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from roll.core.errors import WeightSyncError
from roll.weight_sync.buckets import layout, used_bytes
from roll.weight_sync.channel import Channel, TransportKind
from roll.weight_sync.checksum import Checksum
from roll.weight_sync.manifest import Manifest, check_shapes
from roll.weight_sync.plan import Place, Route, choose_transport, new_channel
from roll.weight_sync.transfer import SendReport, receive, send

KINDS: list[TransportKind] = ["shared_memory", "broadcast"]
BOTH = pytest.mark.parametrize("kind", KINDS)


def some_tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {
        "bf16": torch.randn(7, 3, generator=g).bfloat16(),
        "large": torch.randn(50, 41, generator=g),
        "scalar": torch.tensor(3.5),
        "ints": torch.randint(-9, 9, (5,), generator=g),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(6, 8, generator=g).T,
        "bools": torch.tensor([True, False, True]),
        "last_empty": torch.empty(0),
    }


def accept_all(manifest: Manifest) -> None:
    """Any push is fine."""


def refuse_all(manifest: Manifest) -> None:
    raise WeightSyncError("this model has no such tensors")


def collect(channel: Channel, index: int) -> tuple[dict[str, Tensor], str | None]:
    with receive(channel, index, check=accept_all) as incoming:
        tensors = dict(incoming.tensors())
    return tensors, incoming.checksum


def child(channel: Channel, index: int, behaviour: str, pipe: Connection) -> None:
    """A receiver process; answers with what it got, or the error."""
    try:
        with receive(
            channel, index, check=refuse_all if behaviour == "refuse" else accept_all
        ) as incoming:
            tensors = incoming.tensors()
            if behaviour == "die":
                next(tensors)
                os._exit(9)
            if behaviour == "hang":
                next(tensors)
                time.sleep(channel.timeout_s + 1)
            got = {
                name: tensor.numpy(force=True)
                if tensor.dtype != torch.bfloat16
                else tensor.float().numpy()
                for name, tensor in tensors
            }
        pipe.send(("ok", pickle.dumps(got), incoming.checksum))
    except WeightSyncError as error:
        pipe.send(("error", str(error), None))


def push_to_children(
    kind: TransportKind, behaviours: list[str], *, bucket_bytes: int = 1000, timeout_s: float = 30
) -> tuple[SendReport | WeightSyncError, list[tuple[str, object, str | None]]]:
    channel = new_channel(
        kind, num_receivers=len(behaviours), bucket_bytes=bucket_bytes, timeout_s=timeout_s
    )
    context = mp.get_context("forkserver")  # a plain fork would copy locks of torch's threads
    context.set_forkserver_preload(["torch", "roll.weight_sync.transfer"])
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
            answers.append(pipe.recv() if pipe.poll(timeout_s) else ("silent", None, None))
        except EOFError:
            answers.append(("died", None, None))
        process.kill()
        process.join()
        process.close()
        pipe.close()
    return result, answers


@BOTH
def test_two_processes_receive_every_tensor_unchanged(kind: TransportKind) -> None:
    report, answers = push_to_children(kind, ["ok", "ok"])
    assert isinstance(report, SendReport)
    expected = some_tensors()
    assert report.num_tensors == len(expected)
    assert report.num_bytes == sum(t.numel() * t.element_size() for t in expected.values())
    for verdict, payload, checksum in answers:
        assert verdict == "ok", payload
        assert checksum == report.checksum
        assert isinstance(payload, bytes)
        got = pickle.loads(payload)
        assert list(got) == list(expected)
        for name, tensor in expected.items():
            wanted = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert got[name].shape == tuple(tensor.shape)
            assert torch.equal(torch.from_numpy(got[name].copy()), wanted)


@BOTH
def test_one_refusal_stops_the_push_for_all_before_the_first_byte(kind: TransportKind) -> None:
    result, answers = push_to_children(kind, ["ok", "refuse"])
    assert isinstance(result, WeightSyncError)
    assert "receiver 1: this model has no such tensors" in str(result)
    assert [answer[0] for answer in answers] == ["error", "error"]
    assert "receiver 1" in str(answers[0][1])


@BOTH
def test_a_receiver_that_dies_is_an_error_in_time(kind: TransportKind) -> None:
    start = time.monotonic()
    result, _ = push_to_children(kind, ["die"], timeout_s=8)
    assert isinstance(result, WeightSyncError)
    assert "died" in str(result)
    assert time.monotonic() - start < 30


def test_a_receiver_that_hangs_ends_in_a_timeout_that_names_it() -> None:
    result, _ = push_to_children("shared_memory", ["hang"], timeout_s=4)
    assert isinstance(result, WeightSyncError)
    assert "receiver 0 within 4 s" in str(result)


@BOTH
def test_a_receiver_that_never_comes_ends_in_a_timeout_that_names_it(kind: TransportKind) -> None:
    channel = new_channel(kind, num_receivers=1, timeout_s=0.5)
    tensors = some_tensors()
    with pytest.raises(WeightSyncError, match=r"receiver"):
        send(channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=False)


@BOTH
def test_a_sender_that_never_comes_ends_in_a_timeout(kind: TransportKind) -> None:
    channel = new_channel(kind, num_receivers=1, timeout_s=0.5)
    with pytest.raises(WeightSyncError, match=r"sender"):
        collect(channel, 0)


@BOTH
def test_a_sender_that_fails_midway_is_an_error_for_the_receiver(kind: TransportKind) -> None:
    channel = new_channel(kind, num_receivers=1, bucket_bytes=64, timeout_s=10)
    tensors = some_tensors()

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield "bf16", tensors["bf16"]
        yield "large", tensors["large"]
        raise RuntimeError("out of memory")

    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(collect, channel, 0)
        with pytest.raises(RuntimeError, match="out of memory"):
            send(channel, broken(), Manifest.of(tensors.items()), verify=False)
        with pytest.raises(WeightSyncError):
            receiver.result(timeout=20)


def roundtrip(tensors: dict[str, Tensor], bucket_bytes: int) -> dict[str, Tensor]:
    channel = new_channel("shared_memory", num_receivers=1, bucket_bytes=bucket_bytes, timeout_s=10)
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(collect, channel, 0)
        report = send(channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=True)
        received, checksum = receiver.result(timeout=20)
    assert report.checksum == checksum
    return received


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 300), max_size=12),
    dtypes=st.lists(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]),
        min_size=12,
        max_size=12,
    ),
    bucket_bytes=st.integers(1, 700),
)
def test_any_sizes_survive_any_bucket_size(
    sizes: list[int], dtypes: list[torch.dtype], bucket_bytes: int
) -> None:
    tensors = {
        f"t{i}": torch.arange(size).to(dtype)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=False))
    }
    received = roundtrip(tensors, bucket_bytes)
    assert list(received) == list(tensors)
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.integers(0, 5000), max_size=20), bucket_bytes=st.integers(1, 4096))
def test_pieces_cover_every_byte_once_within_their_bucket(
    sizes: list[int], bucket_bytes: int
) -> None:
    manifest = Manifest.of(
        (f"t{i}", torch.empty(size, dtype=torch.uint8)) for i, size in enumerate(sizes)
    )
    covered = dict.fromkeys(range(len(sizes)), 0)
    for bucket in layout(manifest, bucket_bytes):
        end = 0
        for piece in bucket:
            assert piece.start == covered[piece.tensor]
            assert piece.offset >= end
            end = piece.offset + piece.num_bytes
            covered[piece.tensor] += piece.num_bytes
        assert used_bytes(bucket) == end <= bucket_bytes
    assert [covered[i] for i in range(len(sizes))] == sizes


@pytest.mark.parametrize("fault", ["missing", "extra", "other shape", "other name"])
def test_tensors_that_differ_from_the_manifest_are_an_error_on_both_sides(fault: str) -> None:
    announced = {"a": torch.ones(3), "b": torch.ones(4)}
    sent = {
        "missing": {"a": torch.ones(3)},
        "extra": {**announced, "c": torch.ones(1)},
        "other shape": {"a": torch.ones(3), "b": torch.ones(2, 2)},
        "other name": {"a": torch.ones(3), "c": torch.ones(4)},
    }[fault]
    channel = new_channel("shared_memory", num_receivers=1, timeout_s=10)
    with ThreadPoolExecutor(1) as pool:
        receiver = pool.submit(collect, channel, 0)
        with pytest.raises(WeightSyncError, match="announced"):
            send(channel, iter(sent.items()), Manifest.of(announced.items()), verify=False)
        with pytest.raises(WeightSyncError, match="announced"):
            receiver.result(timeout=20)


def test_the_tensor_iterator_is_exhausted_also_when_the_push_is_refused() -> None:
    """Making a tensor may be a collective; ranks that are left alone in it would hang."""
    made = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in "abc":
            made.append(name)
            yield name, torch.ones(1)

    channel = new_channel("shared_memory", num_receivers=1, timeout_s=0.2)
    with pytest.raises(WeightSyncError):
        send(channel, tensors(), Manifest.of((n, torch.ones(1)) for n in "abc"), verify=False)
    assert made == ["a", "b", "c"]


def test_nothing_is_left_in_the_file_system_or_open_after_errors() -> None:
    def state() -> tuple[set[str], int]:
        gc.collect()  # errors hold their frames
        return {p.name for p in Path("/dev/shm").glob("roll*")}, len(os.listdir("/proc/self/fd"))

    push_to_children("shared_memory", ["ok"])
    before = state()
    push_to_children("shared_memory", ["die"])
    push_to_children("shared_memory", ["refuse", "ok"])
    push_to_children("shared_memory", ["ok"])
    assert state() == before


def test_a_name_announced_twice_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="twice"):
        Manifest.of([("a", torch.ones(1)), ("a", torch.ones(1))])


def test_a_manifest_is_checked_against_the_model() -> None:
    expected = {"a": (2, 3), "b": (4,), "head": (5,)}
    optional = frozenset({"head"})

    def check(**shapes: tuple[int, ...]) -> None:
        manifest = Manifest.of((n, torch.empty(s, device="meta")) for n, s in shapes.items())
        check_shapes(manifest, expected, optional=optional)

    check(a=(2, 3), b=(4,))
    check(b=(4,), a=(2, 3), head=(5,))
    with pytest.raises(WeightSyncError, match=r"1 tensors are missing, e.g. 'b'"):
        check(a=(2, 3))
    with pytest.raises(WeightSyncError, match=r"1 tensors are unknown, e.g. 'c'"):
        check(a=(2, 3), b=(4,), c=(1,))
    with pytest.raises(WeightSyncError, match=r"'a' has shape \[3, 2\], expected \[2, 3\]"):
        check(a=(3, 2), b=(4,))


def test_the_checksum_sees_names_shapes_dtypes_and_bits_but_no_order() -> None:
    def digest(*items: tuple[str, Tensor]) -> str:
        checksum = Checksum()
        for name, tensor in items:
            checksum.add(name, tensor)
        return checksum.hexdigest()

    a, b = ("a", torch.tensor([1.0, 2.0])), ("b", torch.tensor([3.0, 4.0]))
    base = digest(a, b)
    assert digest(b, a) == base
    flipped = a[1].view(torch.int32).clone()
    flipped[0] ^= 1
    others = [
        digest(("a", b[1]), ("b", a[1])),
        digest(("a", a[1][None]), b),
        digest(("a", a[1].view(torch.int32)), b),
        digest(("a", flipped.view(torch.float32)), b),
        digest(a),
    ]
    assert len({base, *others}) == 6


def test_the_transport_follows_from_the_places() -> None:
    here, beside, there = Place(0, 0), Place(0, 1), Place(1, 0)
    assert choose_transport("cpu", here, [here, beside]).kind == "shared_memory"
    assert choose_transport("cuda", here, [here]).kind == "cuda_ipc"
    assert choose_transport("cuda", here, [here, beside]).kind == "shared_memory"
    assert choose_transport("cpu", here, [beside, there]) == Route("broadcast", "gloo")


def test_nccl_carries_a_broadcast_only_where_every_process_has_a_gpu_of_its_own() -> None:
    here, beside, there = Place(0, 0), Place(0, 1), Place(1, 0)
    assert choose_transport("cuda", here, [beside, there]) == Route("broadcast", "nccl")
    assert choose_transport("cuda", here, [here, there]) == Route("broadcast", "gloo")
    assert choose_transport("cuda", here, [there, there]) == Route("broadcast", "gloo")
