"""Comparison of losses and gradients with TRL: `python benchmarks/losses_vs_trl.py [--out DIR]`

Both sides compute the loss before the first update, and the norm of its gradient: we by a run of
our pipeline, TRL by its trainer in a separate environment. The batch has eight rows of several
lengths. The models are a random Qwen3 policy, another one as reference, and a random sequence
classifier, all in float32. The script prints the table of docs/losses_vs_trl.md.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.vs_trl import make_trl_python  # noqa: E402 - found once the root is on the path
from roll.commands.launch import PIPELINES  # noqa: E402
from roll.config import load_config  # noqa: E402
from roll.core.threads.loop_thread import LoopThread  # noqa: E402
from roll.distributed.local import LocalLauncher  # noqa: E402
from roll.output_dir.trackers import read_records  # noqa: E402
from tests.tiny import char_tokenizer  # noqa: E402

ROWS = 8
LETTERS = "abcdefghij"
AS_IT_IS = {"chat_template": False, "shuffle": False}
LABELLED = {"chosen": None, "rejected": None, "label": "label"}
KTO = {"kind": "kto", "beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
DPO: dict[str, dict[str, Any]] = {
    "sigmoid": {"beta": 0.3},
    "hinge": {"beta": 0.3},
    "ipo": {"beta": 0.3},
    "robust": {"beta": 0.3, "label_smoothing": 0.2},
}


def make_models(folder: Path) -> None:
    tokenizer = char_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        # Large enough that policy and reference differ clearly.
        initializer_range=0.3,
    )
    for seed, name in enumerate(("policy", "reference", "judge")):
        torch.manual_seed(seed)
        config.num_labels = 1
        kind = Qwen3ForSequenceClassification if name == "judge" else Qwen3ForCausalLM
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def make_rows(folder: Path) -> None:
    rng = random.Random(0)

    def text(low: int, high: int) -> str:
        return "".join(rng.choices(LETTERS, k=rng.randint(low, high)))

    pairs = [
        {"prompt": text(2, 6), "chosen": text(1, 9), "rejected": text(1, 9)} for _ in range(ROWS)
    ]
    texts = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs]
    labelled = [{**row, "label": i % 3 > 0} for i, row in enumerate(texts)]
    # TRL's ORPO also trains on the tokens of the prompt, and takes the mean over the tokens of all
    # rows. If each prompt is one token and all chosen responses have the same length, this equals
    # our loss.
    alike = [{"prompt": text(1, 1), "chosen": text(5, 5), "rejected": text(1, 9)} for _ in pairs]
    for name, rows in (
        ("pairs", pairs),
        ("texts", texts),
        ("labelled", labelled),
        ("alike", alike),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "dpo.json").write_text(json.dumps(DPO))


def ours(folder: Path, name: str, pipeline: str, **changes: Any) -> dict[str, float]:
    """Run one step of a pipeline; return its loss and gradient norm.

    Args:
        name: name of the case, which selects the rows.
        changes: further top-level keys of the run file.
    """
    special = {"sft": "texts", "kto": "labelled", "orpo": "alike"}
    rows = special.get(name, "pairs")
    columns: dict[str, Any] = {"prompt": "prompt", "completion": "completion"}
    others: dict[str, dict[str, Any]] = {"texts": {"messages": None}, "labelled": LABELLED}
    columns |= others.get(rows, {})
    source: dict[str, Any] = {"path": str(folder / f"{rows}.jsonl")}
    if rows in ("texts", "labelled"):
        source["columns"] = columns
    run = {
        "pipeline": pipeline,
        "output_dir": str(folder / "runs" / name),
        "resume": "never",
        "max_steps": 1,
        "model": {"path": str(folder / ("judge" if pipeline == "reward_model" else "policy"))},
        "pools": {"all": "0"},
        "actor_train": {"pool": "all", "packing": True},
        "data": {"sources": [source], "rows_per_step": ROWS, **AS_IT_IS},
        "track": {"tensorboard": False},
        "checkpoint": {"export_hf": False},
        **changes,
    }
    file = folder / "run.yaml"
    file.write_text(json.dumps(run))
    config = load_config(file).config
    with LocalLauncher() as launcher, LoopThread("rollout") as loop:
        made = PIPELINES[pipeline]
        config, data = made.prepare(config)
        made(config, launcher, loop, platform="cpu", data=data).run()
    record = read_records(Path(config.output_dir) / "metrics.jsonl")[0]
    return {"loss": record["loss/total"], "grad_norm": record["grad_norm"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "losses_vs_trl")
    folder: Path = parser.parse_args().out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder)
    make_rows(folder)
    python = make_trl_python(folder.parent / "trl-venv")
    job = Path(__file__).with_name("losses_vs_trl_job.py")
    subprocess.run([str(python), str(job), str(folder)], check=True)
    theirs = json.loads((folder / "trl.json").read_text())
    reference = {"reference": {"pool": "all", "model": {"path": str(folder / "reference")}}}
    mine = {"sft": ours(folder, "sft", "sft")}
    for kind, options in DPO.items():
        loss = {"loss": {"kind": kind, **options}}
        mine[f"dpo {kind}"] = ours(folder, kind, "dpo", **loss, **reference)
    mine["dpo kto"] = ours(folder, "kto", "dpo", loss=KTO, **reference)
    simpo = {"kind": "simpo", "beta": 2.0, "gamma": 0.5}
    mine["dpo simpo"] = ours(folder, "simpo", "dpo", loss=simpo)
    mine["dpo orpo"] = ours(folder, "orpo", "dpo", loss={"kind": "orpo", "beta": 0.3})
    mine["reward_model"] = ours(folder, "judge", "reward_model", loss={"center_coef": 0.01})
    print("| | TRL 1.16.0: loss | gradient norm | roll: loss | gradient norm | difference |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for name, one in mine.items():
        other = theirs[name]
        apart = max(abs(one[key] - other[key]) / max(abs(other[key]), 1e-12) for key in one)
        worst = max(worst, apart)
        print(
            f"| {name} | {other['loss']:.7f} | {other['grad_norm']:.6f} | {one['loss']:.7f} | "
            f"{one['grad_norm']:.6f} | {apart:.1e} |"
        )
    print(
        f"largest relative difference {worst:.1e}; goal 1e-05: {'ok' if worst <= 1e-5 else 'FAIL'}"
    )


if __name__ == "__main__":
    main()
