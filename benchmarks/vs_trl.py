"""Comparison of RL with TRL's GRPOTrainer, and with the bare parts: same model, prompts, reward,
loss and cores, in turns.

A Qwen2 (float32, random weights) is trained by GRPO without KL, with one optimizer step per batch,
on two cores. There are three workloads:

- fixed: 4 layers, hidden size 256 (3.9 M parameters), a vocabulary of 64 tokens; 8 prompts x 8
  samples per step, every sample has 128 tokens;
- geometric: the same model and numbers; a sample ends when the model draws the end token, with
  probability 1/64 per token, and after 512 tokens at the latest;
- 50M: 8 layers, hidden size 512, a vocabulary of 8192 tokens (50 M parameters); 4 prompts x 8
  samples, every sample has 256 tokens.

Settings of both frameworks:

- AdamW (0.9, 0.999, no decay) with a constant learning rate of 1e-6, so that the model stays
  random. Gradients are clipped at 1, ratios at 0.2. Temperature 1, no reference. Every response
  counts the same (`loss_type: grpo` in TRL, `sequence_mean` in ours). No separate forward pass for
  old log-probs.
- Nothing is recomputed in the backward pass. TRL recomputes by default, which takes less memory and
  more time.
- TRL processes the batch in one piece, which is its fastest way, and pads to the longest response.
  Our side processes pieces, which gives the same gradient: of 544 tokens in the second workload,
  whose memory has a goal, of 4352 in the others. It packs rows where they are unlike, not where
  they are equal (docs/training.md says when packing helps). `--trl-small` measures TRL with
  recomputed activations and the batch in 8 pieces, which takes the least memory.
- In the first workload our side has two engines of one core each, which for so small a model are
  faster than one of two (docs/rollout.md), and attention as matrix products (`attention: eager`),
  which compiled are faster with rows this short. TRL was slower by the like of either, two
  processes and that attention, when they were tried by hand.
- TRL compiles with `torch_compile`, our side the layers of trainer and engine; the plain loop of
  the parts does not. None compiles in the second workload, whose memory has a goal.
- Threads of all sides wait as OpenMP lets them by itself: they spin for about 10 ms between
  parallel regions.
- In the fixed workloads TRL writes the tokens because of `min_new_tokens`, vLLM because of
  `ignore_eos`.

The parts (vs_trl_parts_job.py) are what no framework around vLLM and PyTorch can leave out: vLLM
answers the same requests, with a seed each and the log-probs of their tokens, and a plain loop
makes the optimizer step on what it wrote, in micro-batches of 8 rows, sorted by length. Seeds are
those of our run, so both write the same tokens, but for rounding. vLLM is as it is, but that its
processes sleep between messages: otherwise one would spin for a second of the optimizer step. The
last side has vLLM as roll starts it, and so shows what the rest of a run costs.

Wall-clock time is measured from one record of a step to the next. CPU time is user and system time
of all processes of a side. Memory is the largest sum of their proportional set sizes (see
process_meter.py). Both are measured in a round of their own, the first: to read them takes time of
the measured cores, up to 6 % of a step of a side with many processes. The sides take turns; times
are medians over the other rounds, without the first two steps of each. TRL has a separate
environment, which the first run makes. Results of finished rounds are kept in `--out` and not
measured again, unless `--fresh` is given. The exit code is 0 if the goals are met.

    python benchmarks/vs_trl.py [--steps 7] [--rounds 2] [--case fixed|geometric|50M] [--fresh]
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
THREADS = "2"
"""Value of OMP_NUM_THREADS."""
PROMPT_TOKENS = 8
LETTERS = string.digits + string.ascii_letters
TRL_PACKAGES = ("torch==2.13.0", "transformers==5.19.0", "trl==1.16.0")
RUN_TIMEOUT_S = 3600.0
SAMPLES = 8
"""Number of samples of a prompt."""
OF_PARTS = 1.05
"""Goal: largest allowed ratio of our time per step to that of the parts."""
SIDES = {
    "trl": "TRL 1.16.0",
    "roll": "roll",
    "parts": "bare vLLM and PyTorch",
    "engine": "roll's engine alone and PyTorch",
}


@dataclass(frozen=True)
class Case:
    name: str
    layers: int
    hidden: int
    vocab: int
    prompts: int
    """Number of prompts in a step."""
    max_new_tokens: int
    fixed: bool
    piece_tokens: int = 4352
    """Tokens of a piece of our batches."""
    engines: int = 1
    """Number of our engines, which share the cores."""
    attention: str = "sdpa"
    """Our trainer's attention."""
    compiled: bool = True
    """Both frameworks compile, and vLLM alone."""
    memory: float | None = None
    """Goal: largest allowed ratio of our peak memory to TRL's; None if there is no goal."""

    @property
    def rows(self) -> int:
        """Number of samples in a step."""
        return self.prompts * SAMPLES


CASES = {
    "fixed": Case("fixed", 4, 256, 64, 8, 128, fixed=True, engines=2, attention="eager"),
    "geometric": Case(
        "geometric", 4, 256, 64, 8, 512, fixed=False, piece_tokens=544, compiled=False, memory=0.5
    ),
    "50M": Case("50M", 8, 512, 8192, prompts=4, max_new_tokens=256, fixed=True),
}


def make_model(path: Path, case: Case) -> Path:
    """Write a model of the case's size, with a token for each letter, and for Chinese characters up
    to the size of the vocabulary."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    pieces = ["<pad>", "<eos>", *LETTERS]
    pieces += [chr(0x4E00 + i) for i in range(case.vocab - len(pieces))]
    backend = Tokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<pad>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    torch.manual_seed(0)
    # Not tied: a random model with tied embeddings repeats its last token, instead of drawing all
    # with equal probability.
    config = Qwen2Config(
        vocab_size=len(pieces), hidden_size=case.hidden,
        intermediate_size=1024 if case.hidden == 256 else 2688, num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 64, num_key_value_heads=case.hidden // 128,
        max_position_embeddings=1024, tie_word_embeddings=False, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, dtype="float32",
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
    models: dict[str, Path]
    """Name of a case -> folder of its model."""
    prompts: Path
    trl_python: Path
    steps: int
    trl_small: bool

    def trl(self, case: Case, folder: Path) -> tuple[list[str], Path]:
        """Write TRL's job file; return TRL's command, and the file that gets one line per step."""
        settings: dict[str, Any] = {
            "output_dir": str(folder / "trl"),
            "max_steps": self.steps,
            "per_device_train_batch_size": case.rows // 8 if self.trl_small else case.rows,
            "gradient_accumulation_steps": 8 if self.trl_small else 1,
            "num_generations": SAMPLES,
            "max_completion_length": case.max_new_tokens,
            "loss_type": "grpo",
            "beta": 0.0,
            "learning_rate": 1e-6,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": self.trl_small,
            "torch_compile": case.compiled,
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
            "model": str(self.models[case.name]), "prompts": str(self.prompts),
            "settings": settings, "steps_file": str(steps_file),
        }  # fmt: skip
        (folder / "job.json").write_text(json.dumps(job))
        command = [str(self.trl_python), str(HERE / "vs_trl_job.py"), str(folder / "job.json")]
        return command, steps_file

    def roll(self, case: Case, folder: Path) -> tuple[list[str], Path]:
        """Write our run file; return our command, and the file that gets one line per step."""
        file = self.write_run(case, folder)
        command = [sys.executable, "-m", "roll.cli", "run", str(file)]
        return command, folder / "run" / "metrics.jsonl"

    def parts(self, case: Case, folder: Path, engine: str = "vllm") -> tuple[list[str], Path]:
        """Write our run file; return the command of the parts, and the file that gets one line per
        step."""
        file, steps_file = self.write_run(case, folder), folder / "steps.jsonl"
        job = [str(HERE / "vs_trl_parts_job.py"), engine, str(file), str(steps_file)]
        return [sys.executable, *job], steps_file

    def engine(self, case: Case, folder: Path) -> tuple[list[str], Path]:
        """As `parts`, with vLLM as roll starts it."""
        return self.parts(case, folder, "roll")

    def write_run(self, case: Case, folder: Path) -> Path:
        optimizer = {"lr": 1e-6, "betas": [0.9, 0.999]}
        run: dict[str, Any] = {
            "output_dir": str(folder / "run"),
            "max_steps": self.steps,
            "model": {
                "path": str(self.models[case.name]),
                "dtype": "float32",
                "compile": case.compiled,
                "attention": case.attention,
            },
            "pools": {"train": "0", "infer": f"0-{case.engines - 1}"},
            "actor_train": {
                "pool": "train",
                # A device is a share of the cores; while the trainer works, the engines wait.
                "env": {"OMP_NUM_THREADS": THREADS} if case.engines > 1 else {},
                "optimizer": optimizer,
                "max_tokens_per_microbatch": case.piece_tokens,
                "packing": not case.fixed,
            },
            "actor_infer": {
                "pool": "infer",
                "strategy": {
                    "kind": "vllm",
                    "max_num_seqs": 64,
                    "enforce_eager": not case.compiled,
                },
            },
            "data": {
                "sources": [{"path": str(self.prompts), "columns": {"answer": None}}],
                "prompts_per_step": case.prompts,
                "samples_per_prompt": SAMPLES,
                "max_prompt_tokens": PROMPT_TOKENS,
                "chat_template": False,
                "shuffle": False,
            },
            "sampling": {"max_new_tokens": case.max_new_tokens, "ignore_eos": case.fixed},
            "rewards": {"digits": {"fn": "vs_trl_job:roll_reward"}},
            "algorithm": {"advantage": {"kind": "grpo"}, "aggregation": "sequence_mean"},
            "track": {"rollouts_every": None, "tensorboard": False},
            "checkpoint": {"export_hf": False},
        }
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        return file


def measure(bench: Bench, case: Case, side: str, number: int) -> dict[str, Any]:
    """Measure one round of one side and keep the result in a file. If that file exists already,
    return its content.

    Args:
        side: a key of `SIDES`.
        number: number of the round; in the first, CPU time and memory are measured.
    """
    name = f"{case.name}-{bench.steps}-{side}-{number}"
    result_file = bench.out / f"{name}.json"
    if result_file.exists():
        found: dict[str, Any] = json.loads(result_file.read_text())
        return found
    folder = bench.out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command, steps_file = getattr(bench, side)(case, folder)
    env = os.environ | {
        "OMP_NUM_THREADS": THREADS,
        "PYTHONPATH": "" if side == "trl" else f"{ROOT}:{HERE}",
        "HF_HUB_OFFLINE": "1",
    }
    measured = run_measured(
        command,
        steps_file,
        env=env,
        log=folder / "log.txt",
        timeout_s=RUN_TIMEOUT_S,
        only_times=number > 0,
    )
    records = [json.loads(line) for line in steps_file.read_text().splitlines()]
    result = asdict(measured) | {"phases": phases(side, records[SKIP:])}
    result_file.write_text(json.dumps(result, indent=1))
    return result


def phases(side: str, records: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return, for each step, the seconds of generation and the mean tokens per response, which TRL
    reports under other names."""
    names = ("time/rollout_s", "response_tokens/mean")
    generate, tokens = ("generate_s", "completions/mean_length") if side == "trl" else names
    return {
        "generate_s": [record[generate] for record in records],
        "tokens": [record[tokens] for record in records],
    }


@dataclass(frozen=True)
class Row:
    """Results of one side in one case: medians over steps, except `peak_mb` (largest value) and
    `tokens` (mean). CPU time and memory are those of the first round, the rest of the others."""

    step_s: float
    generate_s: float
    cpu_s: float
    peak_mb: float
    tokens: float
    steps: int
    rounds_s: list[float]
    """Median time of a step in each round but the first."""


def summarise(results: list[dict[str, Any]]) -> Row:
    """Make a row of the rounds of a side."""
    metered, *timed = results
    # `step_s` and `step_cpu_s` have no entry for the first step.
    rounds = [result["step_s"][SKIP - 1 :] for result in timed]
    steps = [s for each in rounds for s in each]
    cpu = metered["step_cpu_s"][SKIP - 1 :]
    generate = [s for result in timed for s in result["phases"]["generate_s"]]
    return Row(
        step_s=statistics.median(steps),
        generate_s=statistics.median(generate),
        cpu_s=statistics.median(cpu),
        peak_mb=metered["peak_mb"],
        tokens=statistics.mean(t for result in timed for t in result["phases"]["tokens"]),
        steps=len(steps),
        rounds_s=[statistics.median(each) for each in rounds],
    )


def report(case: Case, rows: dict[str, Row]) -> bool:
    """Print the case's rows of the table and its verdict; return whether the goals are met."""
    for side, row in rows.items():
        print(
            f"| {case.name} | {SIDES[side]} | {row.step_s:.2f} s | {row.generate_s:.2f} s "
            f"| {row.cpu_s:.2f} s | {row.peak_mb / 1000:.2f} GB | {row.tokens:.0f} | {row.steps} |"
        )
    trl, roll, parts, engine = (rows[side] for side in SIDES)
    speedup, of_parts = trl.step_s / roll.step_s, roll.step_s / parts.step_s
    memory = roll.peak_mb / trl.peak_mb
    in_rounds = [theirs / ours for theirs, ours in zip(trl.rounds_s, roll.rounds_s, strict=True)]
    good = min(in_rounds) >= 1 and of_parts <= OF_PARTS
    good = good and (case.memory is None or memory <= case.memory)
    at_most = "" if case.memory is None else f" (at most {case.memory:g})"
    of_engine = roll.step_s / engine.step_s
    print(
        f"{case.name}: {speedup:.2f} x as fast as TRL (in the rounds "
        f"{', '.join(f'{each:.2f}' for each in in_rounds)}; at least 1), {of_parts:.2f} x the time "
        f"of the parts (at most {OF_PARTS}; {of_engine:.2f} x with roll's engine), "
        f"{memory:.2f} x TRL's memory{at_most}: {'pass' if good else 'FAIL'}"
    )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=7, help="of a round")
    parser.add_argument("--rounds", type=int, default=2, help="behind the first")
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
    cases = [CASES[args.case]] if args.case else list(CASES.values())
    bench = Bench(
        out=out,
        models={case.name: make_model(out / f"model-{case.hidden}", case) for case in cases},
        prompts=make_prompts(out / "prompts.jsonl"),
        trl_python=make_trl_python(out.parent / "trl-venv"),
        steps=args.steps,
        trl_small=args.trl_small,
    )
    rows = []
    for case in cases:
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for number in range(args.rounds + 1):
            for side, found in results.items():
                print(f"{case.name}: {side}, round {number + 1}", file=sys.stderr)
                found.append(measure(bench, case, side, number))
        rows.append((case, {side: summarise(found) for side, found in results.items()}))
    print("| lengths | | step | of it generating | CPU | peak memory | tokens/response | steps |")
    print("|---|---|---|---|---|---|---|---|")
    within = [report(*each) for each in rows]
    sys.exit(0 if all(within) else 1)


if __name__ == "__main__":
    main()
