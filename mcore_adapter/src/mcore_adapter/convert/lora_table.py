"""Table of a LoRA adapter for training.

The row of each adapted weight in the model's table becomes two rows, one for factor A and one for
factor B. Every layer has the same factors, so a row covers all layers. Adapters in files, which
`convert.lora` reads, may have different factors in each layer and need no such table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mcore_adapter.convert.lora import WeightFactors, factor_rows
from mcore_adapter.convert.ops import OrdersRows, Rename
from mcore_adapter.convert.storage.peft import PREFIX
from mcore_adapter.convert.table import ModelTable, Param
from mcore_adapter.errors import ConfigError

_LINEAR = re.compile(r"\.(linear_\w+|in_proj|out_proj)\.weight$|^output_layer\.weight$")
"""Pattern of the names of linear weights that Megatron cuts over tensor parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Options of a LoRA adapter: y = W x + alpha / rank * B A dropout(x); A and B are trained."""

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: Sequence[str] | Literal["all-linear"] = "all-linear"
    """Ends of Hugging Face names of linear layers, such as `q_proj` or `self_attn.q_proj`.
    all-linear: the linear layers of attention, and of MLPs if the model has no experts. Routed
    experts never have factors here. all-linear leaves out the dense and shared MLPs of a model with
    experts, because PEFT 0.21 takes their names for those of routed experts."""

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank

    def chooses(self, module: str, *, sparse: bool) -> bool:
        """Return True if `targets` includes a linear layer.

        Args:
            module: Hugging Face name of the linear layer.
            sparse: True if the model has experts.
        """
        if self.targets == "all-linear":
            return module != "lm_head" and not (sparse and ".mlp." in module)
        return any(_ends(module, target) for target in self.targets)


def adapter_table(table: ModelTable, lora: Lora) -> ModelTable:
    """Return the table of the LoRA factors of a model, of the language model alone if it also sees.
    A head that is trained beside them (`Param.of_head`) is in it, too.

    PEFT names factors after the modules in transformers, which files may name otherwise.

    Raises:
        ConfigError: a target is no linear layer, or a linear layer that cannot have factors.
    """
    rows: list[Param] = []
    table = table.held or table
    sparse = table.shape.num_experts > 0
    for row in _linear_rows(table):
        modules = tuple(m for m in _modules(row) if lora.chooses(m, sparse=sparse))
        if not modules:
            continue
        if not isinstance(row.op, OrdersRows):
            raise ConfigError(
                f"lora.targets: {modules[0]} cannot have factors, its rows are grouped by head in "
                "Hugging Face and by kind in Megatron; name the others"
            )
        target = WeightFactors(modules, (lora.rank,) * len(modules))
        rows += factor_rows(row, row.op.mcore, row.op.hf, target)
    if lora.targets != "all-linear":
        for name in lora.targets:
            _check_target(name, table)
    for row in table.params:
        if row.of_head:
            rows.append(replace(row, op=Rename(row.op.mcore, PREFIX + row.op.hf[0])))
    return replace(table, params=tuple(rows), repeats={}, dropped=(), of_adapter=True, held=None)


def target_modules(adapter: ModelTable, lora: Lora) -> list[str] | str:
    """Return the value of `target_modules` in PEFT's `adapter_config.json`.

    It lists ends of names, sorted. For a model that sees it is a regular expression, because the
    vision tower has linear layers of the same names, and no factors.

    Args:
        adapter: table of the factors, see `adapter_table`.
    """
    if lora.targets != "all-linear":
        ends = sorted(lora.targets)
    else:
        rows = [row for row in adapter.params if not row.of_head]
        ends = sorted({name.split(".")[-3] for row in rows for name in row.op.hf})
    if "vision_config" not in adapter.config:
        return ends
    return rf"model\.language_model\.(.*\.)?({'|'.join(map(re.escape, ends))})"


def _linear_rows(table: ModelTable) -> list[Param]:
    """Return the linear layers that can have factors: not routed experts, MTP, towers, copies or
    heads that are trained in full."""
    return [
        row
        for row in table.params
        if _LINEAR.search(row.op.mcore)
        and not (row.of_expert or row.optional or row.of_tower or row.copy_of is not None)
        and not row.of_head
        # A row may apply to no layer of this model, such as a dense MLP in a model of experts.
        and (row.layers is None or len(row.layers) > 0)
    ]


def _modules(row: Param) -> list[str]:
    return [name.removesuffix(".weight") for name in row.op.hf]


def _ends(module: str, target: str) -> bool:
    """Return True if `target` is the module's name, or its last parts as in `self_attn.q_proj`."""
    return module == target or module.endswith("." + target)


def _check_target(target: str, table: ModelTable) -> None:
    """Raise ConfigError unless `target` ends the name of a linear layer that can have factors."""
    known = [module for row in _linear_rows(table) for module in _modules(row)]
    if any(_ends(module, target) for module in known):
        return
    others = [module for row in table.params if row.of_expert for module in _modules(row)]
    if any(_ends(module, target) for module in others):
        raise ConfigError(
            f"lora.targets: {target} is of routed experts only, which cannot have factors; leave "
            "it out"
        )
    names = sorted({module.split(".")[-1] for module in known})
    raise ConfigError(
        f"lora.targets: {target} is no linear layer of {table.model_type}; it has {names}"
    )
