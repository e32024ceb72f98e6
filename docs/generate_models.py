"""Generator of docs/models.md: makes the table of model families from the parameters of the tests.

    python -m docs.generate_models

A test fails if the file differs from what this script would write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_adapter.models import FAMILIES, REFUSED
from roll.strategy.vllm.cpu_limits import UNSERVED
from tests.contract import (
    test_vision_contract,
    test_vision_engines,
    test_vision_names,
    test_vllm_families,
)
from tests.convert import (
    test_families,
    test_lora_model,
    test_model_dense,
    test_model_moe,
    test_model_vision,
)
from tests.convert.tiny_checkpoints import FAMILIES as CONVERTED
from tests.convert.tiny_models import MODELS
from tests.families import FAMILIES as TRAINED

TARGET = Path(__file__).parent / "models.md"

INTRO = """\
# Model families

What is tested of each family, on tiny random models and without a GPU. A number is that of the test
below, a letter that of a remark. An empty cell has no test.

* *convert*: Hugging Face to Megatron-Core and back, byte for byte, in layouts of TP, PP, EP and
  expert TP.
* *fsdp2*, *deepspeed*: what leaves the trainer is the checkpoint, bit for bit; a pass in training
  computes what one that scores does.
* *megatron*: the same; and logits and gradients are those of Hugging Face in layouts of TP, PP and,
  with experts, EP.
* *vLLM*, *SGLang*: log-probs are those of the trainer's model within 1e-4, before and after a push.
* *LoRA*: logits or gradients, and steps, are those of factors beside Hugging Face's layers.
* *vision*: rows with pictures. Families that end in `_text` are language models, saved by
  themselves or trained without the tower of the checkpoint.
"""

MODELS_OF: Mapping[str, str] = {
    "deepseek_v3": "DeepSeek V3, V3.1, R1",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma4_text": "Gemma 4 31B",
    "glm4": "GLM-4-0414, GLM-Z1",
    "glm4_moe": "GLM-4.5, 4.6, 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "gpt_oss": "gpt-oss",
    "granite": "Granite 3",
    "granitemoe": "Granite 3 MoE",
    "kimi_k2": "Kimi K2",
    "llama": "Llama 2, 3",
    "minimax_m2": "MiniMax M2",
    "ministral3": "Ministral 3",
    "mistral": "Mistral 7B",
    "mixtral": "Mixtral",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "olmo2": "OLMo 2",
    "olmoe": "OLMoE",
    "phi3": "Phi-3, Phi-4",
    "phimoe": "Phi-3.5-MoE",
    "qwen2": "Qwen 2, 2.5",
    "qwen2_5_vl": "Qwen2.5-VL",
    "qwen2_moe": "Qwen 1.5 and 2 MoE",
    "qwen2_vl": "Qwen2-VL",
    "qwen3": "Qwen 3",
    "qwen3_5": "Qwen 3.5, with its tower",
    "qwen3_5_moe_text": "Qwen 3.5 MoE",
    "qwen3_5_text": "Qwen 3.5",
    "qwen3_moe": "Qwen 3 MoE",
    "qwen3_next": "Qwen3-Next",
    "qwen3_vl": "Qwen3-VL",
    "qwen3_vl_moe": "Qwen3-VL MoE",
    "seed_oss": "Seed-OSS",
    "smollm3": "SmolLM3",
}
"""Published models of a `model_type`."""
COLUMNS = ("convert", "fsdp2", "deepspeed", "megatron", "vLLM", "SGLang", "LoRA", "vision")


def types_of(names: Iterable[str], models: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    """Return the model types of tiny models, given their names and settings."""
    return frozenset(str(models[name]["model_type"]) for name in names)


def parameters(test: Callable[..., object]) -> list[str]:
    """Return the values that pytest passes to a test with one parameter."""
    (mark,) = (m for m in test.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    return list(mark.args[1])


def of_backend(backend: str) -> frozenset[str]:
    """Return the families with which `test_vision_contract` tests the layouts of a backend."""
    layouts = test_vision_contract.FAMILIES
    return frozenset(
        family for layout in layouts for family in layouts[layout] if layout.startswith(backend)
    )


@dataclass(frozen=True)
class Proof:
    """A test, and the cells that it proves."""

    test: str
    columns: tuple[str, ...]
    kinds: frozenset[str]
    """Model types."""


_DENSE = types_of(test_model_dense.NAMES, MODELS)
_MOE = types_of(test_model_moe.NAMES, MODELS)
_SERVED = types_of([*test_vllm_families.FAMILIES, *test_vllm_families.IN_BFLOAT16], TRAINED)
_ENGINES = frozenset(test_vision_engines.FAMILIES)
_ADAPTED = parameters(test_model_vision.test_an_adapter_of_the_language_model_is_trained_as_by_hand)
PROOFS = (
    Proof(
        "tests/convert/test_families.py",
        ("convert",),
        types_of(
            parameters(test_families.test_a_family_comes_back_byte_for_byte_from_every_layout),
            CONVERTED,
        ),
    ),
    Proof("tests/convert/test_model_dense.py", ("megatron",), _DENSE),
    Proof("tests/convert/test_model_moe.py", ("megatron",), _MOE),
    Proof(
        "tests/contract/test_family_contract.py",
        ("fsdp2", "deepspeed"),
        types_of(TRAINED, TRAINED),
    ),
    Proof("tests/contract/test_family_contract.py", ("megatron",), types_of(MODELS, MODELS)),
    Proof(
        "tests/contract/test_vision_names.py",
        ("fsdp2", "deepspeed"),
        frozenset(test_vision_names.FAMILIES),
    ),
    Proof(
        "tests/contract/test_vision_contract.py",
        ("fsdp2", "LoRA", "vision"),
        of_backend("fsdp2"),
    ),
    Proof("tests/contract/test_vision_contract.py", ("deepspeed",), of_backend("deepspeed")),
    Proof("tests/contract/test_vision_contract.py", ("megatron",), of_backend("megatron")),
    Proof(
        "tests/convert/test_model_vision.py",
        ("megatron", "vision"),
        frozenset(test_model_vision.MODELS),
    ),
    Proof("tests/convert/test_model_vision.py", ("LoRA",), frozenset(_ADAPTED)),
    Proof("tests/convert/test_lora_model.py", ("LoRA",), types_of(test_lora_model.MODELS, MODELS)),
    Proof("tests/contract/test_vllm_families.py", ("vLLM",), _SERVED),
    Proof("tests/contract/test_vision_engines.py", ("vLLM", "vision"), _ENGINES),
    # The models of these tests are named in their code.
    Proof("tests/contract/test_vllm_contract.py", ("vLLM",), frozenset({"qwen3_5"})),
    Proof("tests/pipelines/test_experts.py", ("vLLM",), frozenset({"qwen3_moe"})),
    Proof("tests/contract/test_engine_contract.py", ("vLLM", "SGLang"), frozenset({"qwen3"})),
)

_NO_PICTURES = "SGLang gets no pictures"
_BY_ITSELF = (
    "its language model is a qwen3_5_text, which is supported if it is "
    "[saved by itself](../mcore_adapter/README.md#families)"
)
_NAMES = ("fsdp2", "deepspeed", "megatron", "vLLM", "SGLang", "LoRA")
REMARKS: Mapping[tuple[str, str], str] = {
    **{("vLLM", kind): f"without a GPU: {reason}" for kind, reason in UNSERVED.items()},
    **{
        (column, kind): reason
        for kind, reason in REFUSED.items()
        for column in ("convert", "megatron")
    },
    **{
        (column, "kimi_k2"): "transformers has no such type: write deepseek_v3, which is the same "
        "model, as model_type into config.json"
        for column in _NAMES
    },
    **{("SGLang", kind): _NO_PICTURES for kind in test_model_vision.MODELS},
    **{(column, "qwen3_5"): _BY_ITSELF for column in ("convert", "megatron")},
    **{
        ("vLLM", kind): "in bfloat16, in which alone vLLM computes delta nets without a GPU: "
        "log-probs differ by less than 0.1 on average"
        for kind in ("qwen3_5", *types_of(test_vllm_families.IN_BFLOAT16, TRAINED))
    },
    ("vision", "qwen3_5"): "the tower stays as the engine has loaded it, and rows with pictures "
    "are refused",
}
"""What else is to say of a cell, or why nothing proves it, by column and model type."""


def text() -> str:
    """Return the whole document, in Markdown."""
    tests = list(dict.fromkeys(proof.test for proof in PROOFS))
    remarks = list(dict.fromkeys(REMARKS.values()))
    kinds = sorted({*FAMILIES, *REFUSED, *(kind for proof in PROOFS for kind in proof.kinds)})
    rows = [f"| {_row(kind, tests, remarks)} |" for kind in kinds]
    return "\n".join(
        [
            INTRO,
            f"| `model_type` | models | {' | '.join(COLUMNS)} |",
            "|---" * (len(COLUMNS) + 2) + "|",
            *rows,
            "",
            *(f"{number}. `{test}`" for number, test in enumerate(tests, 1)),
            "",
            *(f"* {_letter(i)}: {remark}" for i, remark in enumerate(remarks)),
            "",
        ]
    )


def _row(kind: str, tests: list[str], remarks: list[str]) -> str:
    """Return the cells of a model type."""
    cells = [f"`{kind}`", MODELS_OF[kind]]
    for column in COLUMNS:
        proven = {p.test for p in PROOFS if column in p.columns and kind in p.kinds}
        cell = [str(number) for number, test in enumerate(tests, 1) if test in proven]
        remark = REMARKS.get((column, kind))
        if remark is not None:
            letter = _letter(remarks.index(remark))
            cell.append(letter if proven else f"no ({letter})")
        cells.append(", ".join(cell))
    return " | ".join(cells)


def _letter(number: int) -> str:
    """Return the letter of a remark."""
    return "abcdefghijklmnopqrstuvwxyz"[number]


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
