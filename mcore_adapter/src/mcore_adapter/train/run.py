"""Training loop: updates, validations, checkpoints, and the export of the model at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_adapter.checkpoint import restore, save
from mcore_adapter.errors import ConfigError
from mcore_adapter.lora_io import write_adapter
from mcore_adapter.modeling.model import seed_dropout
from mcore_adapter.shared_results import gather_results
from mcore_adapter.train.data.order import Order
from mcore_adapter.train.folder import Folder
from mcore_adapter.train.objective import Objective, evaluate, train_step
from mcore_adapter.train.policy import Policy
from mcore_adapter.train.processes import StopRequest
from mcore_adapter.train.report import Report
from mcore_adapter.train.schedule import lr_at
from mcore_adapter.train.settings import Settings
from mcore_adapter.write import write_model


@dataclass
class Run:
    """Training run after its setup, with the state of its progress."""

    settings: Settings
    folder: Folder
    policy: Policy
    objective: Objective
    validation: Objective | None
    """Objective on the validation data; None: no validation."""
    order: Order
    done: int = 0
    """Number of steps made, skipped ones included."""
    skipped: int = 0
    """Number of steps without an update, because the gradient was zero or not finite."""

    @cached_property
    def report(self) -> Report:
        """Progress report, created on first use, when `done` is final after `resume`."""
        return Report(
            self.folder.metrics,
            speaks=dist.get_rank() == 0,
            first_step=self.done,
            num_steps=self.order.num_steps,
            every=self.settings.log_every,
        )

    def to_the_end(self, stop: StopRequest) -> bool:
        """Make the remaining steps and export the model.

        Returns:
            True if the run made all its steps; False if it was asked to stop earlier. The model is
            exported only in the first case.
        """
        for name, each in (("train", self.objective), ("validation", self.validation)):
            if each is not None:
                self.report.say(f"{name}: {each.dataset.summary}")
        with self.report.shown():
            finished = self._all_steps(stop)
        if finished:
            self._export()
        return finished

    def _all_steps(self, stop: StopRequest) -> bool:
        """Run the steps left; validate and save when due. Return False if asked to stop early."""
        if self.done == 0:
            self._validate()
        while self.done < self.order.num_steps:
            self._step()
            last = self.done == self.order.num_steps
            stopped = self._agreed(stop.made) and not last
            if last or (_due(self.done, self.settings.validate_every) and not stopped):
                self._validate()
            if last or stopped or _due(self.done, self.settings.save_every):
                self._save()
            if stopped:
                self.report.say(
                    f"stopped after step {self.done}, which {self.folder.checkpoint(self.done)} "
                    "keeps; say resume=auto to go on"
                )
                return False
        return True

    def resume(self, path: Path) -> None:
        """Restore the checkpoint in the folder `path`.

        Raises:
            ConfigError: the run that wrote the checkpoint had other examples or another order of
                them, trained another adapter, or made more steps than this run shall make.
            ConversionError: the folder is not a complete checkpoint of this model.
        """
        policy = self.policy
        extra = restore(path, policy.chunks, policy.optimizer, policy.trained, policy.sizes)
        was, now = extra["order"], self._identity()
        other = [f"{key} was {was[key]!r}, is {now[key]!r}" for key in now if was[key] != now[key]]
        if other:
            raise ConfigError(
                f"{path} is of a run on other examples, or in another order: {'; '.join(other)}; "
                "set them back, or name another output folder"
            )
        # Checkpoints of versions without adapters have no key `lora`.
        if extra.get("lora") != self._lora():
            raise ConfigError(
                f"{path} is of a run with lora {extra.get('lora')}, not {self._lora()}; set it "
                "back, or name another output folder"
            )
        full = extra["step"] * self.order.per_step
        # Checkpoints of earlier versions do not say how many examples their last step took.
        missing = full - extra.get("examples", full)
        self.order = order_of(self.settings, self.order.num_examples, missing)
        if extra["step"] > self.order.num_steps:
            raise ConfigError(
                f"{path} has made {extra['step']} steps, and {self.order.num_steps} are asked for"
            )
        self.done, self.skipped = extra["step"], extra["skipped"]

    def _step(self) -> None:
        """Train on the next step's examples, at its learning rate, and report its metrics."""
        start = time.perf_counter()
        examples = self.order[self.done]
        if self.settings.lora is not None and self.settings.lora.dropout:
            seed_dropout(self.settings.seed, self.done)
        lr = lr_at(self.done, self.settings.optimizer, self.order.num_steps)
        found = train_step(self.policy, self.objective, examples, lr)
        self.done += 1
        self.skipped += found.skipped
        tokens = sum(sum(self.objective.dataset.lengths_of(example)) for example in examples)
        self.report.step(
            self.done,
            {
                **found.means,
                "lr": lr,
                "grad_norm": found.grad_norm,
                "skipped_steps": self.skipped,
                "tokens": tokens,
                "tokens_per_s": tokens / (time.perf_counter() - start),
            },
        )

    def _validate(self) -> None:
        """Evaluate on the validation data, if there are any, and report the result. Collective."""
        if self.validation is not None:
            found = evaluate(self.policy, self.validation, self.settings.batch.examples)
            self.report.validation(self.done, found)

    def _save(self) -> None:
        """Write a checkpoint of this step; keep only the newest `settings.keep`. Collective."""
        policy, path = self.policy, self.folder.checkpoint(self.done)
        extra = {
            "step": self.done,
            "examples": self.order.taken(self.done),
            "skipped": self.skipped,
            "order": self._identity(),
            "lora": self._lora(),
        }
        save(path, policy.chunks, policy.optimizer, policy.trained, policy.sizes, extra)

        def forget() -> None:
            if dist.get_rank() == 0:
                self.folder.forget(self.settings.keep)

        gather_results(forget, str(self.folder.checkpoints))

    def _export(self) -> None:
        """Write the model, or its adapter alone; replace an earlier export. Collective."""
        policy = self.policy
        target = self.folder.model if policy.adapter is None else self.folder.adapter

        def put_in_place() -> None:
            if dist.get_rank() == 0:
                self.folder.put_in_place(target)

        # An earlier part of this run, with fewer steps, may have exported to `target`. That export
        # stays until the new one is complete.
        aside = self.folder.aside(target)
        src, chunks, sizes = self.settings.model, policy.chunks, policy.sizes
        if policy.adapter is None:
            write_model(aside, src, chunks, policy.table, sizes, dtype=self.settings.dtype)
            reader = "AutoModelForCausalLM"
        else:
            write_adapter(aside, src, chunks, policy.adapter, sizes)
            reader = "PeftModel"
        gather_results(put_in_place, str(target))
        self.report.say(f"wrote {target}, for {reader}.from_pretrained")

    def _identity(self) -> dict[str, Any]:
        """Return all values that decide which examples each step takes, by key."""
        return {
            "method": self.settings.method,
            "data": self.objective.dataset.name,
            "data.shuffle": self.settings.data.shuffle,
            "batch.examples": self.settings.batch.examples,
            "seed": self.settings.seed,
        }

    def _lora(self) -> dict[str, Any] | None:
        """Return the options of LoRA in the form that JSON gives back; None: no LoRA."""
        lora = self.settings.lora
        return None if lora is None else lora.model_dump(mode="json")

    def _agreed(self, asked: bool) -> bool:
        """Return True on all ranks if any rank was asked to stop. All ranks must call it."""
        flag = torch.tensor(float(asked), device=self.policy.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


def order_of(settings: Settings, num_examples: int, missing: int = 0) -> Order:
    """Return the order of the examples for `steps` or, without it, for `epochs` (1 by default).

    Args:
        missing: see `Order.missing`.
    """
    seed = settings.seed if settings.data.shuffle else None
    per_step = settings.batch.examples
    if settings.steps is not None:
        return Order(num_examples, per_step, settings.steps, per_step, seed, missing)
    return Order.of_epochs(settings.epochs or 1, num_examples, per_step, seed, missing)


def _due(done: int, every: int | None) -> bool:
    """Return True if `done` is a multiple of `every`; None: never."""
    return every is not None and done % every == 0
