"""Comparison of RL with TRL's GRPOTrainer: same model, prompts, reward, loss and cores, in turns.

A Qwen2 of 4 layers and hidden size 256 (3.9 M parameters, float32, random weights, a vocabulary of
64 tokens) is trained by GRPO without KL on 8 prompts x 8 samples per step, with one optimizer step
per batch, on two cores. There are two workloads:

- fixed: every sample has 128 tokens;
- geometric: a sample ends when the model draws the end token, with probability 1/64 per token, and
  after 512 tokens at the latest.

Settings of both sides:

- AdamW (0.9, 0.999, no decay) with a constant learning rate of 1e-6, so that the model stays
  random. Gradients are clipped at 1, ratios at 0.2. Temperature 1, no reference. Every response
  counts the same (`loss_type: grpo` in TRL, `sequence_mean` in ours). No separate forward pass for
  old log-probs.
- Nothing is recomputed in the backward pass. TRL recomputes by default, which takes less memory and
  more time.
- TRL processes the batch in one piece, which is its fastest way, and pads to the longest response.
  Our side processes pieces of 1024 tokens, which gives the same gradient. `--trl-small` measures
  TRL with recomputed activations and the batch in 8 pieces, which takes the least memory.
- Threads spin between parallel regions for about 10 ms (`GOMP_SPINCOUNT`). This is the default for
  a single process, as TRL is. Ours, by default, spin for about 1 ms and leave their cores to
  others.
- In the fixed workload TRL writes 128 tokens because of `min_new_tokens`, vLLM because of
  `ignore_eos`.

Wall-clock time is measured from one record of a step to the next. CPU time is user and system time
of all processes of a side. Memory is the largest sum of their proportional set sizes (see
process_meter.py). The sides take turns; results are medians over all rounds, without the first two
steps of each. TRL has a separate environment, which the first run makes. Results of finished rounds
are kept in `--out` and not measured again, unless `--fresh` is given. The exit code is 0 if the
goals are met.

    python benchmarks/vs_trl.py [--steps 7] [--rounds 2] [--case fixed|geometric] [--fresh]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import string
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

from benchmarks.process_meter import adopt_orphans, run_measured, two_cores

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
SKIP = 2
"""Number of steps at the start of a round that are not counted."""
PROMPT_TOKENS = 8
LETTERS = string.digits + string.ascii_letters
TRL_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0")
RUN_TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Case:
    name: str
    max_new_tokens: int
    fixed: bool
    speedup: float
    """Goal: smallest allowed ratio of TRL's time per step to ours."""
    memory: float | None
    """Goal: largest allowed ratio of our peak memory to TRL's; None if there is no goal."""


CASES = {
    "fixed": Case("fixed", 128, fixed=True, speedup=1.0, memory=None),
    "geometric": Case("geometric", 512, fixed=False, speedup=5.0, memory=0.5),
}


def make_model(path: Path) -> Path:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    torch.manual_seed(0)
    # Not tied: a random model with tied embeddings repeats its last token, instead of drawing all
    # 64 with equal probability.
    config = Qwen2Config(
        vocab_size=len(vocab), hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        dtype="float32",
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def make_prompts(path: Path, count: int = 1024) -> Path:
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices(LETTERS, k=PROMPT_TOKENS))} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_trl_python(folder: Path) -> Path:
    """Make an environment with TRL and without our package, if it is missing; return the path of
    its Python."""
    python = folder / "bin" / "python"
    if not python.exists():
        uv = str(Path(sys.executable).parent / "uv")
        wheels = os.environ.get("PIP_FIND_LINKS")
        torch = ["--find-links", wheels] if wheels else ["--torch-backend=cpu"]
        packages = [p + "+cpu" if wheels and p.startswith("torch=") else p for p in TRL_PACKAGES]
        subprocess.run([uv, "venv", "--python", sys.executable, str(folder)], check=True)
        install = [uv, "pip", "install", "--python", str(python), *torch, *packages]
        subprocess.run(install, check=True)
    return python


@dataclass(frozen=True)
class Bench:
    """Paths and settings of all rounds."""

    out: Path
    model: Path
    prompts: Path
    trl_python: Path
    steps: int
    trl_small: bool

    def trl(self, case: Case, folder: Path) -> tuple[list[str], Path]:
        """Write TRL's job file; return TRL's command, and the file that gets one line per step."""
        settings: dict[str, Any] = {
            "output_dir": str(folder / "trl"),
            "max_steps": self.steps,
            "per_device_train_batch_size": 8 if self.trl_small else 64,
            "gradient_accumulation_steps": 8 if self.trl_small else 1,
            "num_generations": 8,
            "max_completion_length": case.max_new_tokens,
            "loss_type": "grpo",
            "beta": 0.0,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": self.trl_small,
            "use_cpu": True,
            "bf16": False,
            "dataloader_pin_memory": False,
            "model_init_kwargs": {"dtype": "float32"},
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }
        if case.fixed:
            settings["generation_kwargs"] = {"min_new_tokens": case.max_new_tokens}
        steps_file = folder / "steps.jsonl"
        job = {
            "model": str(self.model), "prompts": str(self.prompts), "settings": settings,
            "steps_file": str(steps_file),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        command = [str(self.trl_python), str(HERE / "vs_trl_job.py"), str(folder / "job.json")]
        return command, steps_file

    def roll(self, case: Case, folder: Path) -> tuple[list[str], Path]:
        """Write our run file; return our command, and the file that gets one line per step."""
        optimizer = {"lr": 1e-6, "betas": [0.9, 0.999]}
        run: dict[str, Any] = {
            "output_dir": str(folder / "run"),
            "max_steps": self.steps,
            "model": {"path": str(self.model), "dtype": "float32"},
            "pools": {"all": "0"},
            "actor_train": {
                "pool": "all",
                "optimizer": optimizer,
                "max_tokens_per_microbatch": 1024,
                "packing": True,
            },
            "actor_infer": {"pool": "all", "strategy": {"kind": "vllm", "max_num_seqs": 64}},
            "data": {
                "sources": [{"path": str(self.prompts), "columns": {"answer": None}}],
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "max_prompt_tokens": PROMPT_TOKENS,
                "chat_template": False,
            },
            "sampling": {"max_new_tokens": case.max_new_tokens, "ignore_eos": case.fixed},
            "rewards": {"digits": {"fn": "vs_trl_job:roll_reward"}},
            "algorithm": {"advantage": {"kind": "grpo"}, "aggregation": "sequence_mean"},
            "track": {"rollouts_every": None, "tensorboard": False},
            "checkpoint": {"export_hf": False},
        }
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        command = [sys.executable, "-m", "roll.cli", "run", str(file)]
        return command, folder / "run" / "metrics.jsonl"


def measure(bench: Bench, case: Case, side: str, number: int) -> dict[str, Any]:
    """Measure one round of one side and keep the result in a file. If that file exists already,
    return its content.

    Args:
        side: `trl` or `roll`.
        number: number of the round.
    """
    name = f"{case.name}-{bench.steps}-{side}-{number}"
    result_file = bench.out / f"{name}.json"
    if result_file.exists():
        found: dict[str, Any] = json.loads(result_file.read_text())
        return found
    folder = bench.out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command, steps_file = (bench.trl if side == "trl" else bench.roll)(case, folder)
    env = os.environ | {
        "OMP_NUM_THREADS": "2",
        "GOMP_SPINCOUNT": "300000",
        "PYTHONPATH": f"{ROOT}:{HERE}" if side == "roll" else "",
        "HF_HUB_OFFLINE": "1",
    }
    measured = run_measured(
        command,
        steps_file,
        env=env,
        log=folder / "log.txt",
        timeout_s=RUN_TIMEOUT_S,
    )
    records = [json.loads(line) for line in steps_file.read_text().splitlines()]
    result = asdict(measured) | {"phases": phases(side, records[SKIP:])}
    result_file.write_text(json.dumps(result, indent=1))
    return result


def phases(side: str, records: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return, for each step, the seconds of generation and the mean tokens per response, which both
    sides report under different names."""
    names = {
        "trl": ("generate_s", "completions/mean_length"),
        "roll": ("time/rollout_s", "response_tokens/mean"),
    }
    generate, tokens = names[side]
    return {
        "generate_s": [record[generate] for record in records],
        "tokens": [record[tokens] for record in records],
    }


@dataclass(frozen=True)
class Row:
    """Results of one side in one case: medians over steps, except `peak_mb` (largest value) and
    `tokens` (mean)."""

    step_s: float
    generate_s: float
    cpu_s: float
    peak_mb: float
    tokens: float
    steps: int


def summarise(results: list[dict[str, Any]]) -> Row:
    # `step_s` and `step_cpu_s` have no entry for the first step.
    steps = [s for result in results for s in result["step_s"][SKIP - 1 :]]
    cpu = [s for result in results for s in result["step_cpu_s"][SKIP - 1 :]]
    generate = [s for result in results for s in result["phases"]["generate_s"]]
    return Row(
        step_s=statistics.median(steps),
        generate_s=statistics.median(generate),
        cpu_s=statistics.median(cpu),
        peak_mb=max(result["peak_mb"] for result in results),
        tokens=statistics.mean(t for result in results for t in result["phases"]["tokens"]),
        steps=len(steps),
    )


def report(case: Case, trl: Row, roll: Row) -> bool:
    """Print the case's rows of the table and its verdict; return whether the goals are met."""
    for name, row in (("TRL 1.16.0", trl), ("roll", roll)):
        print(
            f"| {case.name} | {name} | {row.step_s:.2f} s | {row.generate_s:.2f} s "
            f"| {row.cpu_s:.2f} s | {row.peak_mb / 1000:.2f} GB | {row.tokens:.0f} | {row.steps} |"
        )
    speedup, memory = trl.step_s / roll.step_s, roll.peak_mb / trl.peak_mb
    good = speedup >= case.speedup and (case.memory is None or memory <= case.memory)
    goal = f"at least {case.speedup:g} x as fast"
    if case.memory is not None:
        goal += f", at most {case.memory:g} x the memory"
    verdict = "pass" if good else "FAIL"
    print(
        f"{case.name}: {speedup:.2f} x as fast, {memory:.2f} x the memory; goal {goal}: {verdict}"
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--case", choices=CASES, help="only this one")
    parser.add_argument("--out", type=Path, help="default: outputs/vs_trl or outputs/vs_trl_small")
    parser.add_argument("--trl-small", action="store_true", help="TRL at its smallest")
    parser.add_argument("--fresh", action="store_true", help="measure finished rounds again")
    args = parser.parse_args()
    if args.steps <= SKIP:
        parser.error(f"--steps {args.steps} leaves none to time; give {SKIP + 1} or more")
    two_cores()
    adopt_orphans()
    default = ROOT / "outputs" / ("vs_trl_small" if args.trl_small else "vs_trl")
    out = (args.out or default).absolute()
    if args.fresh:
        for found in out.glob("*.json"):
            found.unlink()
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(
        out=out,
        model=make_model(out / "model"),
        prompts=make_prompts(out / "prompts.jsonl"),
        trl_python=make_trl_python(out.parent / "trl-venv"),
        steps=args.steps,
        trl_small=args.trl_small,
    )
    rows = []
    for case in [CASES[args.case]] if args.case else CASES.values():
        results: dict[str, list[dict[str, Any]]] = {"trl": [], "roll": []}
        for number in range(args.rounds):
            for side, found in results.items():
                print(f"{case.name}: {side}, round {number + 1}", file=sys.stderr)
                found.append(measure(bench, case, side, number))
        rows.append((case, summarise(results["trl"]), summarise(results["roll"])))
    print("| lengths | | step | of it generating | CPU | peak memory | tokens/response | steps |")
    print("|---|---|---|---|---|---|---|---|")
    within = [report(*each) for each in rows]
    sys.exit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
