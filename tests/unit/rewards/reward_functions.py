"""Rewards for the tests of the pool, importable by child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

from roll.core.types import Sample
from roll.rewards.api import Reward, RewardContext

RELEASE = threading.Event()
"""Set by a test that wants its hung threads back."""


def length(sample: Sample, *, factor: float = 1.0) -> float:
    return len(sample.response_text) * factor


async def length_async(sample: Sample, ctx: RewardContext) -> Reward:
    await asyncio.sleep(0)
    return Reward(float(len(sample.response_text)), {"seed": float(ctx.seed)})


def process_id(sample: Sample) -> Reward:
    return Reward(0.0, {"pid": float(os.getpid())})


def obey(sample: Sample) -> object:
    """Do what the response says."""
    match sample.response_text:
        case "raise":
            raise KeyError("no such column")
        case "nan":
            return float("nan")
        case "text":
            return "good"
        case "hang":
            time.sleep(600)
        case "wait":
            RELEASE.wait(30)
        case "nap":
            time.sleep(1.0)
        case "spin":
            return 9**9**9
        case "exit":
            os._exit(3)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "cancel":
            raise asyncio.CancelledError
        case "quit":
            raise SystemExit(1)
        case "print":
            os.write(1, b"not a message of the protocol\n")
    return 1.0


async def obey_async(sample: Sample) -> object:
    if sample.response_text == "hang":
        await asyncio.sleep(600)
    return obey(sample)


async def blocking_async(sample: Sample) -> float:
    if sample.response_text == "block":
        time.sleep(1.0)
    return 1.0


class Stateful:
    def __call__(self, sample: Sample) -> bool:
        return True


stateful = Stateful()
not_a_function = 3


def rank(samples: list[Sample]) -> list[Reward]:
    """Score each sample by how many of its group have shorter responses."""
    lengths = [len(sample.response_text) for sample in samples]
    size = float(len(samples))
    return [Reward(float(sum(x < n for x in lengths)), {"size": size}) for n in lengths]


async def rank_async(samples: list[Sample]) -> list[Reward]:
    await asyncio.sleep(0)
    return rank(samples)


def obey_group(samples: list[Sample]) -> object:
    """Do what the first response says."""
    match samples[0].response_text:
        case "too few":
            return [1.0]
        case "number":
            return 1.0
        case "hang":
            RELEASE.wait(1)
    return [obey(sample) for sample in samples]
