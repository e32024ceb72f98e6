"""Adapters of parallel linear layers compute what LoRA on the Hugging Face model computes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from mcore_adapter.convert.lora_table import Lora, adapter_table, target_modules
from mcore_adapter.errors import ConfigError, ConversionError
from mcore_adapter.load import read_config
from mcore_adapter.modeling.config import BuildOptions
from mcore_adapter.models import table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.lora_by_hand import ALPHA, RANK, adapted, save_adapter
from tests.convert.parity import forward, mean_loss
from tests.convert.spawned import run_ranks
from tests.convert.tiny_models import COMMON, LOOSE, rows, save_model, targets
from tests.convert.tiny_models import MODELS as TINY

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
DELTA_NET = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
MODELS = {
    "qwen3_tied": (*ATTENTION, *MLP),
    "llama": ("q_proj", "v_proj", "up_proj", "lm_head"),
    "qwen3_moe": (*ATTENTION, *MLP),
    "deepseek_v3": (*LATENT, *MLP),
    "gpt_oss": ATTENTION,
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "glm4": (*ATTENTION, "gate_up_proj", "down_proj"),
    "gemma3": (*ATTENTION, *MLP),
    "gemma4": (*ATTENTION, *MLP),
    "ministral3": (*ATTENTION, *MLP),
    "qwen3_5": (*ATTENTION, *DELTA_NET, *MLP),
    "qwen3_5_moe": ("q_proj", "in_proj_qkv", "in_proj_a", "out_proj"),
    "minimax_m2": ATTENTION,
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
}
OF_2026 = ("phi3", "glm4", "gemma3", "gemma4", "ministral3", "qwen3_5")
OF_2026_SPARSE = ("qwen3_5_moe", "minimax_m2", "glm4_moe_lite", "glm_moe_dsa")
STEPS, LR, DECAY = 3, 3e-3, 0.1
DELTA_NETS = ("qwen3_5", "qwen3_5_moe")


def eps_of(name: str) -> float:
    """That of AdamW: with less, entries whose gradients are next to zero move by the sign of a
    rounding.

    A change d of such a gradient moves its entry by `LR / eps * d`. Gradients of delta nets change
    by 1e-5 when all weights change by half of their last bit.
    """
    return 1e-3 if name in DELTA_NETS else 1e-4


@dataclass(frozen=True)
class Case:
    folder: Path
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    options: BuildOptions = field(default_factory=BuildOptions)
    distributed: bool = False
    other: Path | None = None
    """Adapter, than that of the folder."""

    @property
    def lora(self) -> Lora:
        return Lora(rank=RANK, alpha=ALPHA, targets=MODELS[self.folder.name])

    @property
    def adapter(self) -> Path:
        return self.other or self.folder / "adapter"


def save_expected(folder: Path) -> None:
    """Logits, gradients of the factors, and the factors after steps of AdamW, by hand."""
    names = MODELS[folder.name]
    model, factors = adapted(folder, names)
    save_adapter(folder / "adapter", factors, names)
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.AdamW(
        factors.values(), lr=LR, weight_decay=DECAY, eps=eps_of(folder.name)
    )
    for step in range(STEPS):
        logits = model(input_ids=rows(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets(rows()).flatten())
        loss.backward()
        if step == 0:
            found["logits"] = logits.detach()
            for name, factor in factors.items():
                assert factor.grad is not None, name
                found[f"gradient {name}"] = factor.grad.clone()
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"after {name}": factor.detach() for name, factor in factors.items()}
    save_file(found, folder / "expected.st")


def build(case: Case) -> Any:
    """Chunks, adapter, optimizer."""
    from mcore_adapter.load import load
    from mcore_adapter.lora_io import load_adapter
    from mcore_adapter.modeling.data_parallel import data_parallel
    from mcore_adapter.modeling.lora import add_adapter
    from mcore_adapter.modeling.model import build_model, init_parallel
    from mcore_adapter.modeling.optimizer import adam
    from mcore_adapter.platform import adapt_to_cpu

    adapt_to_cpu()
    config = read_config(case.folder)
    table = table_of(config)
    init_parallel(case.sizes)
    bare = build_model(config, case.sizes, case.options)
    adapter = add_adapter(bare, table, case.lora, case.sizes)
    load(case.folder, bare, table, case.sizes)
    load_adapter(case.adapter, bare, adapter, case.sizes)
    chunks = data_parallel(bare, distributed_optimizer=case.distributed)
    return chunks, adapter, adam(chunks, lr=LR, weight_decay=DECAY, eps=eps_of(case.folder.name))


def run(chunks: Any, *, forward_only: bool = False) -> Tensor | None:
    """Logits of this rank's rows, on the last stage; gradients of the mean loss of all."""
    from megatron.core import parallel_state

    from mcore_adapter.parallel.schedule import run_schedule

    rank = parallel_state.get_data_parallel_rank()
    count = parallel_state.get_data_parallel_world_size()
    batches = list(rows()[rank::count].split(1))
    kept = run_schedule(
        chunks,
        batches,
        forward,
        partial(mean_loss, count=len(batches)),
        micro_batch_size=1,
        longest=rows().shape[1],
        forward_only=forward_only,
    )
    return torch.cat([logits for logits, _ in kept]) if kept else None


@dataclass(frozen=True)
class Found:
    logits: float
    gradient: float
    after: float
    norm: float
    """Of the gradient, relative to that by hand."""
    base_changed: tuple[str, ...]


def train(case: Case) -> Found:
    """Largest differences to what was computed by hand."""
    from megatron.core import parallel_state

    from mcore_adapter.gather import export, gradient
    from mcore_adapter.modeling.optimizer import step

    chunks, adapter, optimizer = build(case)
    expected = load_file(case.folder / "expected.st")
    base = {
        name: p.detach().clone()
        for chunk in chunks
        for name, p in chunk.named_parameters()
        if not p.requires_grad
    }
    logits = run(chunks)
    rank = parallel_state.get_data_parallel_rank()
    count = parallel_state.get_data_parallel_world_size()
    difference = 0.0
    if logits is not None:
        difference = float((logits - expected["logits"][rank::count]).abs().max())
    gradients = dict(export(chunks, adapter.table, case.sizes, value=gradient))
    by_hand = {n.split()[1]: t for n, t in expected.items() if n.startswith("gradient")}
    assert gradients.keys() == by_hand.keys()
    worst = max(float((gradients[name] - by_hand[name]).abs().max()) for name in by_hand)
    if case.distributed:
        worst = 0.0  # each rank has the sum of its part only
    norm = step(optimizer, chunks).grad_norm
    for _ in range(STEPS - 1):
        run(chunks)
        step(optimizer, chunks)
    after = dict(export(chunks, adapter.table, case.sizes))
    assert after.keys() == by_hand.keys()
    moved = max(float((after[n] - expected[f"after {n}"]).abs().max()) for n in after)
    total = float(torch.stack([g.double().square().sum() for g in by_hand.values()]).sum().sqrt())
    now = {n: p for chunk in chunks for n, p in chunk.named_parameters() if not p.requires_grad}
    changed = tuple(n for n in base if not torch.equal(base[n], now[n]))
    return Found(difference, worst, moved, norm / total, changed)


def assert_as_by_hand(ranks: int, cases: list[Case]) -> None:
    for case in cases:
        for found in run_ranks(train, ranks, case):
            assert found.logits <= 1e-5, (case, found)
            assert found.gradient <= LOOSE.get(case.folder.name, 1e-6), (case, found)
            assert found.after <= 1e-5, (case, found)
            assert found.norm == pytest.approx(1, rel=1e-5), (case, found)
            assert not found.base_changed, (case, found)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: save_model(tmp_path_factory.mktemp("lora"), name) for name in MODELS}
    for folder in made.values():
        save_expected(folder)
    return made


def test_one_rank_trains_adapters_as_by_hand(folders: dict[str, Path]) -> None:
    assert_as_by_hand(1, [Case(folder) for folder in folders.values()])


@pytest.mark.slow
def test_two_ranks_train_adapters_as_by_hand(folders: dict[str, Path]) -> None:
    dense, untied = folders["qwen3_tied"], folders["llama"]
    sequence, full = BuildOptions(sequence_parallel=True), BuildOptions(recompute="full")
    cases = [
        Case(dense, distributed=True),
        Case(dense, ParallelSizes(tp=2)),
        Case(dense, ParallelSizes(tp=2), replace(sequence, recompute="full")),
        Case(dense, ParallelSizes(pp=2), full),
        Case(dense, ParallelSizes(pp=2, vpp=2)),
        Case(untied, ParallelSizes(tp=2)),
        Case(untied, ParallelSizes(tp=2), sequence, distributed=True),
        Case(untied, ParallelSizes(pp=2, layers=(0, 4))),
        *(
            Case(folders[name], sizes)
            for name in ("qwen3_moe", "deepseek_v3", "gpt_oss")
            for sizes in (ParallelSizes(ep=2), ParallelSizes(tp=2, etp=1), ParallelSizes(pp=2))
        ),
        *(Case(folders[name], ParallelSizes(tp=2)) for name in OF_2026),
        *(Case(folders[name], ParallelSizes(tp=2, ep=2, etp=1)) for name in OF_2026_SPARSE),
    ]
    assert_as_by_hand(2, cases)


@pytest.mark.slow
def test_four_ranks_train_adapters_as_by_hand(folders: dict[str, Path]) -> None:
    four = ParallelSizes(tp=2, pp=2)
    assert_as_by_hand(4, [Case(folders[name], four) for name in ("qwen3_tied", "deepseek_v3")])


def start(case: Case) -> dict[str, Any]:
    """Of a fresh adapter: the model's logits without it, with it and with it switched off; its
    factors; those that tensor parallel ranks share; and those after a step with dropout."""
    from mcore_adapter.gather import export
    from mcore_adapter.load import load
    from mcore_adapter.modeling.lora import add_adapter
    from mcore_adapter.modeling.model import build_model, init_parallel
    from mcore_adapter.platform import adapt_to_cpu

    adapt_to_cpu()
    table = table_of(read_config(case.folder))
    init_parallel(case.sizes)
    chunks = build_model(read_config(case.folder), case.sizes, case.options)
    load(case.folder, chunks, table, case.sizes)
    found: dict[str, Any] = {}
    with torch.no_grad():
        # PyTorch folds some products otherwise where a gradient will be wanted.
        found["without"] = run([c.requires_grad_(False) for c in chunks], forward_only=True)
        adapter = add_adapter(chunks, table, replace(case.lora, dropout=0.5), case.sizes)
        found["with"] = run(chunks, forward_only=True)
        found["factors"] = dict(export(chunks, adapter.table, case.sizes))
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.1)
        found["changed"] = run([chunk.eval() for chunk in chunks], forward_only=True)
        with adapter.off():
            found["off"] = run(chunks, forward_only=True)
    run([chunk.train() for chunk in chunks])
    found["shared"] = {
        name: parameter.grad
        for name, parameter in chunks[0].named_parameters()
        if parameter.requires_grad and not hasattr(parameter, "tensor_model_parallel")
    }
    return found


@pytest.mark.slow
def test_a_fresh_adapter_changes_nothing_and_is_the_same_in_every_layout(
    folders: dict[str, Path],
) -> None:
    dense, sparse = folders["qwen3_tied"], folders["deepseek_v3"]
    for folder, layouts in (
        (dense, (ParallelSizes(), ParallelSizes(tp=2), ParallelSizes(pp=2))),
        (sparse, (ParallelSizes(), ParallelSizes(tp=2, etp=1))),
    ):
        factors = []
        for sizes in layouts:
            for found in run_ranks(start, 2, Case(folder, sizes)):
                factors.append(found["factors"])
                if found["without"] is not None:
                    assert torch.equal(found["with"], found["without"]), (folder, sizes)
                    assert torch.equal(found["off"], found["without"]), (folder, sizes)
                    assert not torch.equal(found["changed"], found["without"]), (folder, sizes)
        for other in factors:
            assert other.keys() == factors[0].keys()
            for name, factor in other.items():
                assert torch.equal(factor, factors[0][name]), name
                bound = factor.shape[-1] ** -0.5 if "lora_A" in name else 0.0
                assert factor.abs().max() <= bound, name
                assert not bound or factor.abs().max() > 0.8 * bound, name


def test_ranks_that_share_a_factor_drop_the_same_of_what_they_share(
    folders: dict[str, Path],
) -> None:
    one, other = run_ranks(start, 2, Case(folders["qwen3_tied"], ParallelSizes(tp=2)))
    assert one["shared"].keys() == other["shared"].keys()
    for name, gradient in one["shared"].items():
        assert torch.equal(gradient, other["shared"][name]), name


def test_factors_come_back_from_the_model_byte_for_byte(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    for name, sizes in (("llama", ParallelSizes(tp=2)), ("gpt_oss", ParallelSizes(pp=2))):
        case = Case(folders[name], sizes)
        run_ranks(write, 2, case, tmp_path / name)
        before = load_file(case.adapter / "adapter_model.safetensors")
        after = load_file(tmp_path / name / "adapter_model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        was = json.loads((case.adapter / "adapter_config.json").read_text())
        for key in ("peft_type", "task_type", "r", "lora_alpha", "target_modules", "bias"):
            assert config[key] == was[key]


def write(case: Case, folder: Path) -> None:
    from mcore_adapter.lora_io import write_adapter

    chunks, adapter, _ = build(case)
    write_adapter(folder, case.folder, chunks, adapter, case.sizes)


def refused_there(case: Case, folder: Path) -> str:
    with pytest.raises(ConversionError) as error:
        write(case, folder)
    return str(error.value)


def test_a_target_that_exists_is_refused_on_all_ranks(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    case = Case(folders["llama"], ParallelSizes(tp=2))
    said = run_ranks(refused_there, 2, case, tmp_path)
    assert said == [f"rank 0 cannot write {tmp_path}: {tmp_path} exists; name a folder that does "
                    "not, or remove it"] * 2  # fmt: skip


def refused(case: Case, copies: list[Path]) -> list[str]:
    """What is said of each adapter, and of a target."""
    said = []
    for copy in copies:
        with pytest.raises(ConversionError) as error:
            build(replace(case, other=copy))
        said.append(str(error.value))
    return said


def test_adapters_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    case, copies = Case(folders["qwen3_tied"]), []
    changes: list[dict[str, Any]] = [
        {"lora_alpha": 1},
        {"rank_pattern": {"q_proj": 2}},
        {"use_rslora": True},
    ]
    for i, change in enumerate(changes):
        copies.append(Path(shutil.copytree(case.adapter, tmp_path / str(i))))
        config = json.loads((copies[-1] / "adapter_config.json").read_text())
        (copies[-1] / "adapter_config.json").write_text(json.dumps({**config, **change}))
    words = ["a scale (lora_alpha / r)", "has rank_pattern", "has use_rslora", "unmapped"]
    (said,) = run_ranks(refused, 1, case, [*copies, folders["llama"] / "adapter"])
    for found, word in zip(said, words, strict=True):
        assert word in found


@pytest.mark.parametrize(
    ("name", "targets", "said"),
    [
        ("llama", ("q_proj", "embed_tokens"), "embed_tokens is no linear layer of llama; it has"),
        ("mixtral", ("w1",), "w1 is of routed experts only"),
        ("qwen3_next", "all-linear", "linear_attn.in_proj_qkvz cannot have factors"),
        ("llama_biased_tied", ("lm_head",), "lm_head is no linear layer"),
    ],
)
def test_a_target_that_cannot_have_factors_is_named(name: str, targets: Any, said: str) -> None:
    made = {**COMMON, **TINY[name]}
    config = AutoConfig.for_model(made.pop("model_type"), **made).to_dict()
    with pytest.raises(ConfigError, match=re.escape(said)):
        adapter_table(table_of(config), Lora(rank=2, alpha=2.0, targets=targets))


@pytest.mark.parametrize(
    ("name", "expected"), [("deepseek_v3", LATENT), ("llama", (*ATTENTION, *MLP))]
)
def test_all_linear_layers_are_those_of_attention_and_of_mlps_without_experts(
    name: str, expected: tuple[str, ...]
) -> None:
    made = {**COMMON, **TINY[name]}
    config = AutoConfig.for_model(made.pop("model_type"), **made).to_dict()
    lora = Lora(rank=2, alpha=2.0)
    assert target_modules(adapter_table(table_of(config), lora), lora) == sorted(expected)
