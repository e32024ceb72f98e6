"""Pushes between two GPUs by NCCL, which takes no two processes on one."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive, send
from roll.weight_sync.transport_choice import new_channel
from roll.weight_sync.transports.kept_groups import KEPT
from roll.weight_sync.transports.process_groups import CLOSE_S
from tests.gpu.test_weight_sync_ipc import accept_all

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(300)]

WAIT_S = 120


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(1000, 130, generator=generator).cuda(),
        "bf16": torch.randn(77, generator=generator).bfloat16().cuda(),
        "empty": torch.empty(0, device="cuda"),
    }


def sender(channel: Channel, pipe: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    torch.cuda.set_device(0)
    own = tensors()
    report = send(channel, iter(own.items()), Manifest.of(own.items()), verify=True)
    pipe.send((report.checksum, {name: value.double().sum().item() for name, value in own.items()}))


def receiver(channel: Channel, pipe: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    torch.cuda.set_device(0)
    with receive(channel, 0, check=accept_all) as incoming:
        own = [(name, value.clone()) for name, value in incoming.tensors()]
    assert all(value.is_cuda for _, value in own if value.numel())
    pipe.send((incoming.checksum, {name: value.double().sum().item() for name, value in own}))


def dying(channel: Channel, pipe: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    torch.cuda.set_device(0)
    with receive(channel, 0, check=accept_all) as incoming:
        next(incoming.tensors())
        os._exit(1)


def left_alone(channel: Channel, pipe: Connection) -> None:
    try:
        sender(channel, pipe)
    except WeightSyncError as error:
        names = [comm.read_text() for comm in Path("/proc/self/task").glob("*/comm")]
        watchdogs = [name for name in names if "pt_nccl" in name]
        pipe.send((str(error), torch.ones(4, device="cuda").sum().item(), watchdogs))


def channel_of(bucket_bytes: int, timeout_s: float) -> Channel:
    return new_channel(
        "broadcast",
        num_receivers=1,
        bucket_bytes=bucket_bytes,
        timeout_s=timeout_s,
        collective="nccl",
    )


def test_a_receiver_that_dies_leaves_the_sender_alive() -> None:
    """A watchdog of the group would end its process, a minute later."""
    channel = channel_of(1 << 10, timeout_s=20)
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    processes = [
        context.Process(target=target, args=(channel, theirs)) for target in (left_alone, dying)
    ]
    for process in processes:
        process.start()
    try:
        assert mine.poll(WAIT_S)
        error, total, watchdogs = mine.recv()
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert "weight transfer" in error
    assert total == 4
    assert not watchdogs


@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 24])
def test_tensors_reach_another_gpu_unchanged(bucket_bytes: int) -> None:
    channel = channel_of(bucket_bytes, WAIT_S)
    context = mp.get_context("spawn")
    ends, processes = [], []
    for target in (sender, receiver):
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=(channel, theirs))
        process.start()
        ends.append(mine)
        processes.append(process)
    try:
        assert all(end.poll(WAIT_S) for end in ends)
        sent, received = (end.recv() for end in ends)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert sent[0] is not None
    assert sent == received


def sends_twice(channels: tuple[Channel, Channel], pipe: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    torch.cuda.set_device(0)
    own = tensors()
    for channel in channels:
        report = send(channel, iter(own.items()), Manifest.of(own.items()), verify=True)
        pipe.send((report.groups_made, report.checksum))
    begun = time.monotonic()
    KEPT.close()
    pipe.send((time.monotonic() - begun, KEPT.held()))


def receives_twice(channels: tuple[Channel, Channel], pipe: Connection) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"
    torch.cuda.set_device(0)
    for channel in channels:
        with receive(channel, 0, check=accept_all) as incoming:
            for _ in incoming.tensors():
                pass
        pipe.send(incoming.checksum)
    KEPT.close()


def test_a_second_push_connects_nothing_and_the_end_closes_all() -> None:
    first, second = (replace(channel_of(1 << 16, WAIT_S), kept_groups=1) for _ in range(2))
    context = mp.get_context("spawn")
    ends, processes = [], []
    for target in (sends_twice, receives_twice):
        mine, theirs = context.Pipe()
        process = context.Process(target=target, args=((first, second), theirs))
        process.start()
        ends.append(mine)
        processes.append(process)
    try:
        sent, received = [], []
        for _ in range(2):
            assert all(end.poll(WAIT_S) for end in ends)
            sent.append(ends[0].recv())
            received.append(ends[1].recv())
        assert [made for made, _ in sent] == [1, 0]
        assert [checksum for _, checksum in sent] == received
        assert ends[0].poll(WAIT_S)
        closed_s, held = ends[0].recv()
        assert closed_s < CLOSE_S
        assert held == []
        for process in processes:
            process.join(WAIT_S)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
