"""Time that the log-prob of a token takes between vLLM's sampler and the owner of the engine.

The stations of a step of vLLM are run here in one process, one after the other: the sampler's
arrays are cut into those of the requests, packed, unpacked, and added to each request's log-probs.
The table has tokens without log-probs, vLLM as it is, and vLLM with plain numbers
(roll/strategy/vllm/outputs/plain_logprobs.py), in microseconds of a token: medians over all rounds.

    python benchmarks/plain_logprobs.py [--requests 64] [--rounds 300]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path
STATIONS = ("cut", "pack", "unpack", "add")


def measure(requests: int, rounds: int, *, logprobs: bool) -> list[float]:
    """Return the median time of each station, in microseconds of a token."""
    import torch
    from vllm.logprobs import create_sample_logprobs
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    tensors = LogprobsTensors(
        torch.randint(0, 1000, (requests, 1), dtype=torch.int32),
        -torch.rand(requests, 1),
        torch.randint(1, 50, (requests,)),
    )
    packer, unpacker = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
    kept = [
        LogprobsProcessor(None, create_sample_logprobs(True), None, 0.0, 0, None)
        for _ in range(requests)
    ]
    times: list[list[float]] = []
    for _ in range(rounds):
        marks = [time.perf_counter()]
        found = tensors.tolists() if logprobs else None
        outputs = [
            EngineCoreOutput(
                f"request-{i}", [5], None if found is None else found.slice_request(i, 1)
            )
            for i in range(requests)
        ]
        marks.append(time.perf_counter())
        packed = [bytes(part) for part in packer.encode(EngineCoreOutputs(outputs=outputs))]
        marks.append(time.perf_counter())
        unpacked = unpacker.decode(packed)
        marks.append(time.perf_counter())
        for processor, output in zip(kept, unpacked.outputs, strict=True):
            processor.update_from_output(output)
        marks.append(time.perf_counter())
        times.append([(b - a) / requests * 1e6 for a, b in pairwise(marks)])
    return [statistics.median(station) for station in zip(*times, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=64, help="that a step has")
    parser.add_argument("--rounds", type=int, default=300)
    args = parser.parse_args()
    rows = {
        "no log-probs": measure(args.requests, args.rounds, logprobs=False),
        "vLLM's arrays": measure(args.requests, args.rounds, logprobs=True),
    }
    from roll.strategy.vllm.outputs.plain_logprobs import PlainLogprobs, receive_plain_logprobs

    receive_plain_logprobs()
    PlainLogprobs().roll_send_plain_logprobs()
    rows["plain numbers"] = measure(args.requests, args.rounds, logprobs=True)
    print(f"| us of a token | {' | '.join(STATIONS)} | sum |\n|---{'|---:' * 5}|")
    for name, times in rows.items():
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in times)} | {sum(times):.1f} |")


if __name__ == "__main__":
    main()
