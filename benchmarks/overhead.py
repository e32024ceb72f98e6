"""Benchmark of the framework's overhead: time of a step, compared with engine and trainer alone.

There are two cases: a model of 4 M parameters with 64 samples of 128 tokens, and the quickstart's
model and batch. The script runs the real pipeline and, between its runs, the bare parts:

* the same vLLM engine, which answers the same kind of requests;
* a plain PyTorch loop with forward pass, backward pass, clipping and AdamW on the same number of
  tokens, and the forward pass of the reference if the run has one.

Parts and runs take turns, because a shared machine changes its speed within minutes. Results are
medians over all rounds, without the first steps of each round.

With `--device cuda` all of it is on one GPU, where trainer and engine take turns, and there is a
third case: a model of 0.6 B parameters in bfloat16 (float32 masters) with 128 samples of 512
tokens. The bare engine and the bare trainer each have the GPU to themselves.

    python benchmarks/overhead.py [--steps 8] [--rounds 3] [--case large|quickstart|0.6B]
        [--device cpu|cuda]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that the script also runs by its path
SKIP = 2
LIMITS = {"large": 1.15, "quickstart": 1.5}
"""Limit of each case on a CPU; on a GPU there is none yet."""
LIMIT_S = 600
"""Longest time that a bare part may take."""
BIG = "0.6B"
"""Case for GPUs: a size of benchmarks/gpu/models.py."""


@dataclass(frozen=True)
class Case:
    name: str
    model: Path
    run: dict[str, Any]
    reference: bool
    device: str = "cpu"
    dtype: str = "float32"


def make_cases(folder: Path, device: str = "cpu") -> list[Case]:
    quick = folder / "quickstart"
    prepare = [sys.executable, "examples/sorting.py", "quickstart", "--out", str(quick)]
    subprocess.run(prepare, cwd=ROOT, check=True)
    run = yaml.safe_load((ROOT / "examples/rlvr_quickstart/run.yaml").read_text())
    run["model"] = {"path": str(quick / "model")}
    run["data"]["sources"] = [{"path": str(quick / "train.jsonl"), "tag": "sort"}]
    run |= {"validation": {}, "checkpoint": {"export_hf": False}}
    run["cluster"] = {"platform": device}
    cases = [Case("quickstart", quick / "model", run, reference=True, device=device)]
    large = dict(run)
    large["model"] = {"path": str(make_large_model(folder / "large", quick / "model"))}
    large.pop("reference")
    large["algorithm"] = {"advantage": {"kind": "grpo"}}
    large["data"] = run["data"] | {"prompts_per_step": 8, "samples_per_prompt": 8}
    large["sampling"] = {"max_new_tokens": 128, "ignore_eos": True}
    large["actor_train"] = run["actor_train"] | {"optimizer": {"lr": 1e-6}}
    cases.append(Case("large", Path(large["model"]["path"]), large, False, device))
    if device == "cuda":
        cases.append(make_big_case(folder / "big", large))
    return cases


def make_big_case(folder: Path, like: dict[str, Any]) -> Case:
    """Write a model of a size that people train; return its case, with other settings as `like`.

    Its tokenizer knows all the digits of the quickstart's problems.
    """
    from benchmarks.gpu.models import write_model

    run = like | {"model": {"path": str(write_model(folder, BIG)), "dtype": "bfloat16"}}
    run["data"] = like["data"] | {"prompts_per_step": 16}
    run["sampling"] = {"max_new_tokens": 512, "ignore_eos": True}
    # The bare trainer has the logits of all tokens of a micro-batch.
    run["actor_train"] = like["actor_train"] | {"max_tokens_per_microbatch": 4096}
    return Case(BIG, folder, run, False, "cuda", "bfloat16")


def make_large_model(path: Path, tokenizer_from: Path) -> Path:
    """Write a Qwen3 model with about 4 M parameters and random weights."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256,
        tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        dtype="float32",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    print(f"large: {model.num_parameters() / 1e6:.1f} M parameters")
    return path


def framework_steps(case: Case, folder: Path, steps: int) -> list[dict[str, float]]:
    """Run the real pipeline in a separate process; return the metrics of its steps."""
    run = case.run | {
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "track": {"rollouts_every": None, "verify_weights": "never"},
    }
    file = folder / "run.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(run))
    subprocess.run([sys.executable, "-m", "roll.cli", "run", str(file)], cwd=ROOT, check=True)
    lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][SKIP:]


def bare_engine_s(case: Case, repeats: int, queue: Any) -> None:
    """Put into `queue` a list of the seconds in which an engine alone answers the requests of one
    step."""
    from roll.config import load_config
    from roll.config.sections.roles import Role
    from roll.core.types import GenerateRequest, SamplingParams, WorkerSpec
    from roll.platform.machine import cores
    from roll.strategy.backend_setup import EngineSetup
    from roll.strategy.vllm.engine import VllmEngine

    config = load_config_of(case, load_config)
    spec = WorkerSpec(Role.ACTOR_INFER, 0, 1, (0,), cores(), 0, "127.0.0.1:1", 0, case.device)
    longest = config.max_sequence_tokens
    setup = EngineSetup(
        spec=spec, model=config.train_model, dtype=case.dtype, max_model_len=longest
    )
    engine = VllmEngine(config.actor_infer.strategy, setup)
    sampling = SamplingParams(**config.sampling.model_dump())

    async def measure() -> list[float]:
        await engine.start()
        times = []
        for repeat in range(repeats + SKIP):
            requests = [
                GenerateRequest(
                    f"{repeat}-{i}", (2, *prompt, 3), sampling, config.data.samples_per_prompt,
                    seed=1000 * repeat + i,
                )
                for i, prompt in enumerate(random_prompts(repeat, config.data.prompts_per_step))
            ]  # fmt: skip
            begun = time.perf_counter()
            await asyncio.gather(*(engine.generate(request) for request in requests))
            times.append(time.perf_counter() - begun)
        await engine.close()
        return times[SKIP:]

    queue.put(asyncio.run(measure()))


def random_prompts(seed: int, count: int) -> list[list[int]]:
    """Return prompts of five digits each (tokens 4 to 13 of the quickstart's vocabulary)."""
    import random

    rng = random.Random(seed)
    return [[rng.randrange(4, 14) for _ in range(5)] for _ in range(count)]


def load_config_of(case: Case, load_config: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(case.run | {"output_dir": "unused"}))
        return load_config(file).config


def bare_trainer_s(case: Case, tokens_per_row: int, repeats: int, queue: Any) -> None:
    """Put into `queue` a list of the seconds in which a plain loop does one step: forward pass,
    loss, backward pass, clipping and AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    from roll.config import load_config

    config = load_config_of(case, load_config)
    kind = torch.float32  # masters
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=kind).to(case.device)
    if case.reference:
        frozen = AutoModelForCausalLM.from_pretrained(case.model, dtype=kind).to(case.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    rows = config.samples_per_step
    budget = max(1, config.actor_train.max_tokens_per_microbatch // tokens_per_row)
    low = torch.autocast(case.device, torch.bfloat16, enabled=case.dtype == "bfloat16")
    times = []
    for _ in range(repeats + SKIP):
        tokens = torch.randint(4, 14, (rows, tokens_per_row), device=case.device)
        begun = time.perf_counter()
        if case.reference:
            with torch.no_grad(), low:
                for part in tokens.split(budget):
                    frozen(part).logits[:, :-1].log_softmax(-1).gather(-1, part[:, 1:, None])
        for part in tokens.split(budget):
            with low:
                logprobs = model(part).logits[:, :-1].float().log_softmax(-1)
                loss = -logprobs.gather(-1, part[:, 1:, None]).sum() / tokens.numel()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if case.device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    queue.put(times[SKIP:])


def in_process(target: Any, *args: Any) -> list[float]:
    """Call `target` in a new process, with a queue as its last argument; return what it puts there.

    Raises:
        RuntimeError: the process ended without an answer, or has none after `LIMIT_S`.
    """
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=target, args=(*args, queue))
    process.start()
    last = time.monotonic() + LIMIT_S
    while process.is_alive() and queue.empty() and time.monotonic() < last:
        time.sleep(0.1)
    if queue.empty():
        late = f"no answer in {LIMIT_S} s"
        why = late if process.is_alive() else f"ended with exit code {process.exitcode}"
        process.kill()
        raise RuntimeError(f"{target.__name__}: {why}; see its output above")
    times: list[float] = queue.get()
    process.join(60)
    return times


def measure(case: Case, folder: Path, steps: int, rounds: int) -> bool:
    """Measure one case and print its table; return whether the case is within its limit."""
    engine, trainer, records = [], [], []
    for number in range(rounds):
        engine += in_process(bare_engine_s, case, steps)
        records += framework_steps(case, folder / f"{case.name}-{number}", steps + SKIP)
        width = round(median(records, "prompt_tokens/mean", "response_tokens/mean"))
        trainer += in_process(bare_trainer_s, case, width, steps)
    engine += in_process(bare_engine_s, case, steps)
    step = median(records, "time/step_s")
    bare = [statistics.median(times) for times in (engine, trainer)]
    ratio = step / sum(bare)
    print(f"\n{case.name}: {len(records)} steps, rows of {width} tokens")
    print(f"  bare engine   {bare[0]:.3f} s")
    print(f"  bare trainer  {bare[1]:.3f} s")
    limit = LIMITS[case.name] if case.device == "cpu" else None
    told = "" if limit is None else f" (limit {limit})"
    print(f"  step          {step:.3f} s = {ratio:.2f} x the sum{told}")
    samples = case.run["data"]["prompts_per_step"] * case.run["data"]["samples_per_prompt"]
    written = samples * median(records, "response_tokens/mean")
    print(f"  tokens/s      {written / step:,.0f}, of the bare engine {written / bare[0]:,.0f}")
    for phase in ("rollout", "generate", "reward", "logprob", "train", "weight_sync"):
        print(f"    {phase:12}{median(records, f'time/{phase}_s'):.3f} s")
    return limit is None or ratio <= limit


def median(records: list[dict[str, float]], *names: str) -> float:
    """Return the median over all records of the sum of the named metrics."""
    return statistics.median(sum(record[name] for name in names) for record in records)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=[*LIMITS, BIG], help="only this one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = make_cases(Path(folder), args.device)
        cases = [case for case in made if args.case in (None, case.name)]
        within = [measure(case, Path(folder), args.steps, args.rounds) for case in cases]
    sys.exit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
