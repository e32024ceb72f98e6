"""What a vLLM engine on a GPU is put through, in a process that does nothing else."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from roll.config.sections.model import ModelConfig
from roll.core.batches import TokenBatch
from roll.core.types import WorkerSpec
from tests.contract.backends import SCORE_BACKENDS
from tests.contract.engine_rig import PROMPT, Rig, rescore, shake, start, weights_of

MODEL = "model"
"""Folder of the model, beside that of the job."""
TOKENS = 64


@contextmanager
def engine(path: Path, dtype: str, **options: Any) -> Iterator[Rig]:
    """A running engine; with CUDA graphs, as in a run. Its oracle is on the CPU."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    rig = start("vllm", path, loop, dtype=dtype, platform="cuda", **options)
    try:
        yield rig
    finally:
        rig.run(rig.engine.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def logprobs_job(spec: WorkerSpec, folder: Path, dtype: str) -> dict[str, Tensor]:
    """Log-probs of the same tokens by the engine and by a trainer's model in the same dtype."""
    path = folder.parent / MODEL
    with engine(path, dtype) as rig:
        written = rig.generate(n=8, tokens=TOKENS, ignore_eos=True)
    model = ModelConfig.model_validate({"path": str(path), "dtype": dtype})
    rows = torch.tensor([[*PROMPT, *each.tokens.tolist()] for each in written])
    batch = TokenBatch(tokens=rows, lengths=torch.full((len(rows),), rows.shape[1]))
    scored = SCORE_BACKENDS["hf"].build(spec, model).score(batch).logprobs_BT
    return {
        "engine": torch.tensor([each.logprobs.tolist() for each in written]),
        "trainer": scored[:, len(PROMPT) :],
    }


def push_job(spec: WorkerSpec, folder: Path) -> dict[str, Any]:
    """New weights through GPU memory; how far the engine is from them before and after."""
    with engine(folder.parent / MODEL, "float32") as rig:
        (before,) = rig.generate(tokens=TOKENS, ignore_eos=True)
        shake(rig.oracle, seed=1)
        weights = [(name, value.cuda()) for name, value in weights_of(rig.oracle)]
        sent, loaded = rig.push(weights, transport="cuda_ipc")
        (after,) = rig.generate(tokens=TOKENS, ignore_eos=True)
    found: dict[str, Any] = {"checksums": (sent.checksum, loaded.checksum)}
    for name, completion in (("before", before), ("after", after)):
        expected = rescore(rig.oracle, PROMPT, completion.tokens)
        own = torch.tensor(completion.logprobs, dtype=torch.float64)
        found[name] = float((own - expected).abs().max())
    return found


def sleep_job(spec: WorkerSpec, folder: Path, level: int) -> dict[str, Any]:
    """Memory of the GPU in MiB while an engine is awake, asleep, and has only its weights."""
    used = {"before": used_mib()}
    with engine(folder.parent / MODEL, "bfloat16", sleep_level=level, kv_cache_gb=4.0) as rig:
        (first,) = rig.generate(temperature=0.0)
        used["awake"] = used_mib()
        rig.run(rig.engine.sleep(drop_weights=level > 1))
        used["asleep"] = used_mib()
        rig.run(rig.engine.wake(weights_only=True))
        used["weights"] = used_mib()
        if level > 1:
            rig.push_oracle()
        rig.run(rig.engine.wake())
        used["again"] = used_mib()
        (second,) = rig.generate(temperature=0.0)
    return {"used": used, "tokens": (first.tokens.tolist(), second.tokens.tolist())}


def used_mib() -> int:
    """Memory of the first GPU that is in use, by all processes."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return int(told.stdout)
