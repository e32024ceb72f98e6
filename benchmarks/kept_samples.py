"""Cost of keeping the samples of a step (`track.samples: all`): CPU time and bytes per token.

The samples have log-normal lengths, like those of `data_path.py`, random tokens and log-probs, and
words as texts. `writer` is the CPU time of the worker of `samples`, which works beside the run:
conversion, compression and the file. `driver` is the CPU time that a step itself spends: leaving
out what no file has, and pickling. Bytes on disk are per token of a response, text, prompt and all
other columns included. Random tokens and log-probs compress badly, so real files are not larger.

    python benchmarks/kept_samples.py [--samples 64,1024,4096] [--median 1024]
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from array import array
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.simulation.lengths import LogNormal
from roll.config.sections.model import ModelConfig
from roll.config.sections.roles import Role
from roll.core.completion import Completion, FinishReason, VersionRuns, Written
from roll.core.types import Prompt, Sample, WorkerSpec
from roll.distributed.remote_values import RemoteValue
from roll.output_dir.sample_files import Origin
from roll.rollout.types import Group, ScoredSample
from roll.runtime.sample_keeper import slim
from roll.workers.sample_writer.worker import SampleJob, SampleWriter

SIBLINGS, PROMPT, LONGEST, VOCABULARY = 16, 200, 32_768, 150_000
WORDS = ("the", "sum", "of", "two", "numbers", "is", "a", "number", "that", "we", "can", "find")
TRIES = 3


def groups_of(samples: int, median: int, dice: np.random.Generator) -> list[Group]:
    """Return the groups of a step."""
    lengths = LogNormal(median, 1.0)
    found = []
    for number in range(samples // SIBLINGS):
        tokens = tuple(dice.integers(0, VOCABULARY, PROMPT).tolist())
        prompt = Prompt(f"data:{number}", tokens, "word " * PROMPT, "42", "math")
        scored = []
        for sibling in range(SIBLINGS):
            count = min(max(round(lengths.draw(number * SIBLINGS + sibling)), 1), LONGEST)
            written = Written(
                array("i", dice.integers(0, VOCABULARY, count, dtype=np.int32).tobytes()),
                array("f", (-dice.exponential(0.5, count)).astype(np.float32).tobytes()),
                " ".join(dice.choice(WORDS, count)),
            )
            completion = Completion(written, VersionRuns(((3, count),)), FinishReason.STOP)
            group = f"3/{prompt.id}"
            sample = Sample(f"{group}/{sibling}", group, prompt, completion)
            scored.append(ScoredSample(sample, 1.0, {"math/formatted": 1.0}, {"math": 1.0}))
        found.append(Group(prompt, tuple(scored), 3))
    return found


def row(samples: int, median: int) -> list[str]:
    """Measure one row of the table."""
    groups = groups_of(samples, median, np.random.default_rng(0))
    rows = [one for group in groups for one in group.samples]
    tokens = sum(one.sample.num_response_tokens for one in rows)
    spec = WorkerSpec(
        role=Role.SAMPLES,
        rank=0,
        world_size=1,
        devices=(),
        cores=(),
        node=0,
        rendezvous="",
        seed=0,
        platform="cpu",
    )
    with tempfile.TemporaryDirectory() as folder:
        writer = SampleWriter(
            spec, Path(folder), ModelConfig(path=folder), Origin("hash", "qwen3", pictures=False)
        )
        driver_s, writer_s = [], []
        for step in range(TRIES + 1):  # the first one imports
            begun_s = time.process_time()
            none = [None] * len(rows)
            job = SampleJob(step, "train", list(slim(groups)), none, none)
            pickle.dumps(replace(job, samples=[far(one) for one in job.samples]))
            sent_s = time.process_time()
            failed = writer.write_file(job)
            assert failed is None, failed
            writer_s.append(time.process_time() - sent_s)
            driver_s.append(sent_s - begun_s)
        size = (Path(folder) / f"samples/train/step_{TRIES:06d}.parquet").stat().st_size
    return [
        f"{samples:,}",
        f"{tokens:,}",
        f"{min(driver_s[1:]) / samples * 1e6:.0f}",
        f"{min(writer_s[1:]) / tokens * 1e9:.0f}",
        f"{size / tokens:.1f}",
    ]


def far(scored: ScoredSample) -> ScoredSample:
    """Return the sample with an address in place of its tokens, as the driver has it."""
    completion = replace(scored.sample.completion, content=RemoteValue([], 0, "node"))
    return replace(scored, sample=replace(scored.sample, completion=completion))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", default="64,1024,4096")
    parser.add_argument("--median", type=int, default=1024)
    args = parser.parse_args()
    heads = ["samples", "tokens", "driver, us/sample", "writer, ns/token", "bytes/token"]
    rows = [row(int(samples), args.median) for samples in args.samples.split(",")]
    for cells in (heads, ["---:"] * len(heads), *rows):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
