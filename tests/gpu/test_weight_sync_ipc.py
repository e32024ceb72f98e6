"""Pushes between two processes on one GPU through CUDA IPC."""

from __future__ import annotations

import multiprocessing as mp
from multiprocessing.connection import Connection

import pytest
import torch

from roll.weight_sync.channel import Channel
from roll.weight_sync.manifest import Manifest
from roll.weight_sync.transfer import receive, send
from roll.weight_sync.transport_choice import new_channel


def accept_all(manifest: Manifest) -> None:
    """Any push is fine."""


def child(channel: Channel, pipe: Connection) -> None:
    with receive(channel, 0, check=accept_all) as incoming:
        tensors = list(incoming.tensors())
    sums = {name: tensor.double().sum().item() for name, tensor in tensors}
    pipe.send((sums, incoming.checksum, all(t.is_cuda for _, t in tensors if t.numel())))


@pytest.mark.gpu(1)
@pytest.mark.parametrize("bucket_bytes", [1 << 10, 1 << 24])
def test_tensors_reach_another_process_of_the_gpu_unchanged(bucket_bytes: int) -> None:
    tensors = {
        "large": torch.randn(1000, 130, device="cuda"),
        "bf16": torch.randn(77, device="cuda").bfloat16(),
        "empty": torch.empty(0, device="cuda"),
    }
    channel = new_channel("cuda_ipc", num_receivers=1, bucket_bytes=bucket_bytes, timeout_s=60)
    context = mp.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=child, args=(channel, theirs))
    process.start()
    try:
        report = send(channel, iter(tensors.items()), Manifest.of(tensors.items()), verify=True)
        assert mine.poll(60)
        sums, checksum, on_gpu = mine.recv()
    finally:
        process.kill()
        process.join()
    assert on_gpu
    assert checksum == report.checksum
    assert sums == {name: tensor.double().sum().item() for name, tensor in tensors.items()}
