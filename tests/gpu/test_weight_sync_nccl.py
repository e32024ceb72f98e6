"""Pushes between two GPUs by NCCL, which takes no two processes on one."""

from __future__ import annotations

import multiprocessing as mp
import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from roll.core.errors import WeightSyncError
from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive, send
from roll.weight_sync.transport_choice import new_channel
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
