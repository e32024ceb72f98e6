"""The comparison of data paths: rows, proofs and the table."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from typing import Any

import pytest
import torch

from benchmarks.data_path_peers import Step, cells, check, markdown, middle
from benchmarks.peer_paths import CONSUMERS, PRODUCERS, Proof, Rows, halves, shares, wires_watched
from benchmarks.scripted_run import Script
from benchmarks.simulation.lengths import LogNormal


@pytest.mark.parametrize("samples", [4, 7, 256])
def test_each_row_has_one_producer_and_one_consumer(samples: int) -> None:
    parts = shares(samples)
    assert len(parts) == PRODUCERS
    assert [seed for part in parts for seed in part] == list(range(samples))
    rows = list(range(samples))
    assert len(halves(rows)) == CONSUMERS
    assert [row for half in halves(rows) for row in half] == rows


def test_a_proof_of_arrays_is_that_of_equal_tensors_and_parts_add_up() -> None:
    arrays = [(array("i", [257, 2**31 - 1]), array("f", [-0.5, -1.0])), (array("i"), array("f"))]
    tensors = [
        (torch.tensor([257, 2**31 - 1], dtype=torch.int32), torch.tensor([-0.5, -1.0])),
        (torch.tensor([], dtype=torch.int32), torch.tensor([])),
    ]
    assert Proof.of(arrays) == Proof.of(tensors) == Proof(2, 2, 2**31 + 256, -1.5)
    assert Proof.total([Proof(2, 2, 10, -1.5), Proof(1, 4, 7, -0.25)]) == Proof(3, 6, 17, -1.75)


def test_rows_that_are_lost_or_changed_are_found() -> None:
    made = Rows(Script(LogNormal(8.0), longest=32)).make(range(8))
    check(made, made, "a way")
    fewer = Rows(Script(LogNormal(8.0), longest=32)).make(range(7))
    with pytest.raises(ValueError, match=r"a way: the consumers read .* but the producers made"):
        check(fewer, made, "a way")


def test_the_table_has_medians_per_token_and_per_sample() -> None:
    steps = [
        Step(10, 1000, seconds, cpu_s, 400.0, 20.0, 3e6, 4e6)
        for seconds, cpu_s in ((1.0, 9e-6), (2.0, 5e-6), (30.0, 1e-6))
    ]
    row = cells("a way", middle(steps))
    assert row == ["a way", "10", "1,000", "2.00", "5.0", "40", "2", "3", "4"]
    heads, line, values = markdown([row]).splitlines()
    assert heads.count("|") == line.count("|") == values.count("|") == len(row) + 1


def test_all_bytes_of_sockets_are_counted_once_while_they_are_watched() -> None:
    zmq = pytest.importorskip("zmq")
    zmq_asyncio = pytest.importorskip("zmq.asyncio")

    async def exchange(context: Any, address: str) -> None:
        with context.socket(zmq.PAIR) as server, context.socket(zmq.PAIR) as client:
            server.bind(address)
            client.connect(address)
            await client.send_multipart([b"12345", memoryview(array("i", [1, 2]))], copy=False)
            await server.recv_multipart(copy=False)
            await server.send(b"123")
            await client.recv()

    sent, received = Counter[str](), Counter[str]()
    with zmq_asyncio.Context() as context:
        with wires_watched(sent, received):
            asyncio.run(exchange(context, "inproc://watched"))
        asyncio.run(exchange(context, "inproc://not-watched"))
    assert sent == received == {"wires": 5 + 8 + 3}
