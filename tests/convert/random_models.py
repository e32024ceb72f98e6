"""Random legal models of every family, as transformers names and shapes them, with random bits."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from mcore_adapter.convert.conversion_plan import check_layout
from mcore_adapter.errors import LayoutError
from mcore_adapter.models import FAMILIES, table_of
from mcore_adapter.parallel_sizes import ParallelSizes
from tests.convert.hf_classes import (
    TOWERS,
    config_of,
    in_transformers,
    language_class,
    model_of,
    name_type,
)

logging.set_verbosity_error()
logging.disable_progress_bar()

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.int64,
    torch.bool,
)
WITH_HEAD_DIM = (
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "gpt_oss",
    "minimax_m2",
    "ministral3",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "seed_oss",
)
Values = dict[str, Any]


def random_values(kind: str, draw: random.Random) -> Values:
    """Arguments of a config class: odd sizes, and now and then what is rare in the wild."""
    declared = language_class(kind)().to_dict()
    groups, each = draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 1, 2, 3])
    layers = draw.randint(1, 4)
    found: Values = {
        "vocab_size": draw.randint(3, 23),
        "hidden_size": groups * each * draw.choice([2, 3, 4]),
        "intermediate_size": draw.choice([3, 5, 8, 12]),
        "num_hidden_layers": layers,
        "num_attention_heads": groups * each,
        "num_key_value_heads": groups,
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw.random() < 0.3,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    # Of the others, some derive it; with `mlp_layer_types`, it is the width that is rotated.
    if kind in WITH_HEAD_DIM or ("mlp_layer_types" not in declared and draw.random() < 0.7):
        found["head_dim"] = draw.choice([2, 4, 6])
    experts = draw.choice([1, 2, 3, 4, 6])

    def some(name: str, make: Callable[[], Any]) -> None:
        if name in declared and name not in found:
            found[name] = make()

    for name in ("attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_qk_norm"):
        some(name, lambda: draw.random() < 0.5)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        some(name, lambda: draw.choice([2, 3, 4, 6]))
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        some(name, lambda: experts)
    some("num_experts_per_tok", lambda: 1)
    some("n_shared_experts", lambda: draw.choice([1, 1, 2]))
    some("n_group", lambda: 1)
    some("topk_group", lambda: 1)
    some("first_k_dense_replace", lambda: draw.choice([0, 1, 3, layers]))
    some("decoder_sparse_step", lambda: draw.choice([1, 1, 2]))
    some("mlp_only_layers", lambda: draw.choice([[], [0], [layers - 1]]))
    # Indexers of sparse attention take narrow queries.
    narrow = [3, 4] if "index_topk" in declared else [None, 3, 4]
    some("q_lora_rank", lambda: draw.choice(narrow))
    some("index_head_dim", lambda: draw.choice([4, 6]))
    some("index_n_heads", lambda: draw.choice([1, 3]))
    some("indexer_types", lambda: [draw.choice(["full", "shared"]) for _ in range(layers)])
    some("kv_lora_rank", lambda: draw.choice([2, 4, 5]))
    for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
        some(name, lambda: draw.choice([2, 4]))
    some("linear_num_key_heads", lambda: draw.choice([1, 2]))
    if "linear_num_key_heads" in found:
        found["linear_num_value_heads"] = found["linear_num_key_heads"] * draw.choice([1, 2, 3])
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        some(name, lambda: draw.choice([2, 3]))
    some("linear_conv_kernel_dim", lambda: draw.choice([1, 4]))
    if kind == "gemma4_text":
        found |= {
            "attention_bias": False,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": draw.choice([2, 4, 8]),
            "attention_k_eq_v": draw.random() < 0.5,
            "num_global_key_value_heads": draw.choice([None, 1, groups]),
        }
    if kind in ("qwen2_moe", "qwen3_moe", "qwen3_next") and draw.random() < 0.1:
        found["num_experts"] = 0
    if kind in TOWERS:
        found["vision_config"] = {"depth": draw.randint(1, 3), "embed_dim": 8, "patch_size": 3}
        if kind != "qwen2_vl":
            found["vision_config"] = {"depth": draw.randint(1, 3), "hidden_size": 8}
    if kind in ("gemma3_text", "gemma4_text") and draw.random() < 0.5:
        kinds = ["sliding_attention", "full_attention"]
        found["layer_types"] = [draw.choice(kinds) for _ in range(layers - 1)] + kinds[1:]
    some("mlp_layer_types", lambda: [draw.choice(["dense", "sparse"]) for _ in range(layers)])
    if "linear_num_key_heads" in found and draw.random() < 0.5:
        kinds = ["linear_attention", "full_attention"]
        found["layer_types"] = [draw.choice(kinds) for _ in range(layers)]
    return found


def without_some(kind: str, config: Values, draw: random.Random) -> Values:
    """Keys left out whose absence changes nothing for transformers."""
    left = dict(config)
    theirs = CONFIG_MAPPING[in_transformers(kind)]
    given = {k: v for k, v in config.items() if k != "dtype"}
    whole = theirs(**given).to_dict()
    for name in list(config):
        if name in ("model_type", "architectures", "dtype", "vision_config") or draw.random() < 0.3:
            continue
        trial = {k: v for k, v in left.items() if k not in (name, "dtype")}
        try:
            same = theirs(**trial).to_dict() == whole
        except StrictDataclassClassValidationError:
            continue
        if same:
            del left[name]
    return left


def random_checkpoint(
    folder: Path, draw: random.Random, kind: str | None = None, *, floats: bool = False
) -> Path:
    """As `save_pretrained` writes it, its tensors' bits drawn anew.

    Args:
        floats: only types that models can be loaded in.
    """
    kind = kind or draw.choice(list(FAMILIES))
    made = config_of(kind, random_values(kind, draw))
    model = model_of(made)
    model.save_pretrained(folder, save_original_format=draw.random() < 0.7)
    config = json.loads((folder / "config.json").read_text())
    config = _flat(config, draw) if kind in ("qwen2_vl", "qwen2_5_vl") else config
    (folder / "config.json").write_text(json.dumps(without_some(kind, config, draw)))
    name_type(folder, kind)
    single = folder / "model.safetensors"
    shapes = {name: tuple(tensor.shape) for name, tensor in read(single).items()}
    dtype = draw.choice(DTYPES[:3] if floats else DTYPES)
    tensors = {name: random_bits(shape, dtype, draw) for name, shape in shapes.items()}
    if made.tie_word_embeddings and draw.random() < 0.3:
        tensors["lm_head.weight"] = embedding_of(tensors).clone()
    single.unlink()
    write_files(folder, tensors, draw.choice([1, 1, 2, 3]))
    (folder / "tokenizer.json").write_text("{}")
    if draw.random() < 0.2:
        (folder / "templates").mkdir()
        (folder / "templates" / "chat.jinja").write_text("{{ messages }}")
    return folder


def embedding_of(tensors: dict[str, Tensor]) -> Tensor:
    """The embedding of tokens, whatever its name."""
    return next(t for name, t in tensors.items() if name.endswith("embed_tokens.weight"))


def _flat(config: Values, draw: random.Random) -> Values:
    """Now and then as early checkpoints have it, with the keys of the language model at the top."""
    if draw.random() < 0.6:
        return config
    text = {k: v for k, v in config["text_config"].items() if k not in ("model_type", "dtype")}
    return {**text, **{k: v for k, v in config.items() if k != "text_config"}}


def write_files(folder: Path, tensors: dict[str, Tensor], count: int) -> None:
    """In one file, or in several with an index."""
    if count == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(count):
        name = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[number::count]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, draw: random.Random) -> Tensor:
    """Not a number, infinities and denormals among them."""
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        raw = bytearray(draw.choices([0, 1], k=count))
    else:
        raw = bytearray(draw.randbytes(count * dtype.itemsize))
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(each.contiguous().view(-1).view(torch.uint8) for each in (one, other)))


def read(file: Path) -> dict[str, Tensor]:
    """As the safetensors library reads it."""
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def weights_as_hugging_face_reads(folder: Path) -> dict[str, Tensor]:
    """All tensors of the files that `from_pretrained` opens."""
    single = folder / "model.safetensors"
    if single.is_file():
        return read(single)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        found |= read(folder / name)
    return found


def random_sizes(folder: Path, draw: random.Random) -> ParallelSizes:
    """Any that heads, layers and experts divide over; widths may not."""
    table = table_of(json.loads((folder / "config.json").read_text()))
    layers, experts = int(table.shape.num_layers), int(table.shape.num_experts)
    while True:
        pp = draw.choice([1, 1, 2, 3])
        vpp = draw.choice([1, 2]) if pp > 1 else 1
        cuts = sorted(draw.randint(0, layers) for _ in range(pp * vpp - 1))
        lengths = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
        sizes = ParallelSizes(
            tp=draw.choice([1, 1, 2, 3, 4]),
            pp=pp,
            vpp=vpp,
            ep=draw.choice([1, 1, 2, 3]) if experts else 1,
            etp=draw.choice([None, 1, 2]) if experts else None,
            layers=lengths,
        )
        try:
            check_layout(table, sizes)
        except LayoutError:
            continue
        return sizes
