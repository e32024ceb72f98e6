"""TRL's side of `losses_vs_trl.py`: loss and gradient norm of a batch, in TRL's environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main(folder: Path) -> None:
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )
    from trl import (
        DPOConfig,
        DPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    shared: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 8,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "max_length": None,
        "gradient_checkpointing": False,
    }

    def rows(name: str) -> Any:
        return load_dataset("json", data_files=str(folder / f"{name}.jsonl"), split="train")

    def policy(name: str = "policy") -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)

    found: dict[str, Any] = {}

    def note(name: str, trainer: Any) -> None:
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.model.train()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
        grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        found[name] = {"loss": float(loss), "grad_norm": float(norm)}

    common = {"processing_class": tokenizer}
    sft = SFTConfig(**shared, completion_only_loss=True, packing=False)
    note("sft", SFTTrainer(policy(), sft, train_dataset=rows("texts"), **common))
    for kind, options in json.loads((folder / "dpo.json").read_text()).items():
        settings = DPOConfig(**shared, loss_type=[kind], **options)
        trainer = DPOTrainer(
            policy(), policy("reference"), settings, train_dataset=rows("pairs"), **common
        )
        note(f"dpo {kind}", trainer)
    kto = KTOConfig(
        **shared,
        beta=0.3,
        desirable_weight=1.5,
        undesirable_weight=0.5,
        train_sampling_strategy="sequential",
    )
    trainer = KTOTrainer(
        policy(), policy("reference"), kto, train_dataset=rows("labelled"), **common
    )
    note("dpo kto", trainer)
    simpo = CPOConfig(
        **(shared | {"max_length": 64}), loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.5
    )
    note("dpo simpo", CPOTrainer(policy(), simpo, train_dataset=rows("pairs"), **common))
    orpo = ORPOConfig(**(shared | {"max_length": 64}), beta=0.3)
    note("dpo orpo", ORPOTrainer(policy(), orpo, train_dataset=rows("alike"), **common))
    judge = AutoModelForSequenceClassification.from_pretrained(
        folder / "judge", dtype=torch.float32
    )
    reward = RewardConfig(**shared, center_rewards_coefficient=0.01)
    note("reward_model", RewardTrainer(judge, reward, train_dataset=rows("pairs"), **common))
    (folder / "trl.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
