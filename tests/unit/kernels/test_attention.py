"""Kernels of attention: what `auto` comes to, and what a model is loaded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import (
    AutoConfig,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from roll.config import load_config
from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models.kernels.attention import FLASH, implementation
from roll.models.kernels.choice import Offer, choose, settle_attention
from tests.runs import run_local, write_task

AUTO = ModelConfig(path="x", dtype="bfloat16", attention="auto")
BOTH = frozenset({"flash-attn", "flash-attn-3"})
QWEN = Qwen3Config(head_dim=128)
GEMMA4 = AutoConfig.for_model("gemma4_text", head_dim=256, global_head_dim=512)
"""Its layers have heads of two widths."""


@pytest.mark.parametrize(
    ("offer", "kernel", "why"),
    [
        (Offer("cuda", 9.0, BOTH), "flash_attention_3", "flash-attn-3 is installed"),
        (Offer("cuda", 9.0, frozenset({"flash-attn"})), "flash_attention_2", "capability 9.0"),
        (Offer("cuda", 8.0, BOTH), "flash_attention_2", "flash-attn is installed"),
        (Offer("cuda", 10.0, BOTH), "flash_attention_2", "flash-attn is installed"),
        (Offer("cuda", 8.9, frozenset({"flash-attn-3"})), "sdpa", "installed: flash-attn-3"),
        (Offer("cuda", 7.5, BOTH), "sdpa", "no package for GPUs of capability 7.5"),
        (Offer("cuda", 9.0, frozenset()), "sdpa", "installed: none"),
        (Offer("cuda", None, BOTH), "sdpa", "nvidia-smi tells no compute capability"),
        (Offer("cpu", None, BOTH), "sdpa", "there is no GPU"),
    ],
)
def test_auto_is_the_best_kernel_that_the_gpus_run(offer: Offer, kernel: str, why: str) -> None:
    found, reason = choose(AUTO, QWEN, offer)
    assert found == kernel
    assert why in reason


@pytest.mark.parametrize(
    ("config", "dtype", "rows", "why"),
    [
        (QWEN, "float32", "", "the dtype is float32"),
        (QWEN, "bfloat16", "actor_train.strategy.ulysses", "ulysses makes slices of rows"),
        (LlamaConfig(head_dim=320), "bfloat16", "", "heads of 320 are wider than 256"),
        (GEMMA4, "bfloat16", "", "heads of 512 are wider than 256"),
        (GptOssConfig(), "bfloat16", "", "a gpt_oss needs a kernel of its own"),
        (BloomConfig(), "bfloat16", "", "transformers computes no bloom"),
        (PhimoeConfig(sliding_window=512), "bfloat16", "", "a phimoe has its window in a mask"),
    ],
)
def test_auto_is_sdpa_where_flash_attention_does_not_fit(
    config: PreTrainedConfig, dtype: Any, rows: str, why: str
) -> None:
    model = AUTO.model_copy(update={"dtype": dtype})
    kernel, reason = choose(model, config, Offer("cuda", 9.0, BOTH), rows)
    assert kernel == "sdpa"
    assert why in reason


def test_a_bounded_attention_is_refused_when_auto_comes_to_sdpa() -> None:
    config = Gemma2Config()
    assert choose(AUTO, config, Offer("cuda", 9.0, BOTH))[0] == "flash_attention_3"
    for attention, says in (("auto", "which auto comes to"), ("sdpa", "attn_logit_softcapping")):
        model = AUTO.model_copy(update={"attention": attention})
        with pytest.raises(ConfigError, match=rf"model.attention: sdpa.*{says}"):
            implementation(model, config)
    eager = AUTO.model_copy(update={"attention": "eager"})
    assert implementation(eager, config) == "eager"


@pytest.mark.parametrize("kernel", FLASH)
@pytest.mark.parametrize(
    ("config", "window"),
    [
        (PhimoeConfig(sliding_window=512), 512),
        (Qwen2MoeConfig(use_sliding_window=True, sliding_window=64), 64),
        # Without a window, of any layer, or for any row.
        (PhimoeConfig(), None),
        (PhimoeConfig(sliding_window=512, max_position_embeddings=512), None),
        (Qwen2MoeConfig(), None),
        (Qwen2MoeConfig(use_sliding_window=True, layer_types=["full_attention"] * 24), None),
        # Handed to the kernel.
        (MistralConfig(sliding_window=64), None),
    ],
)
def test_a_window_that_only_a_mask_has_is_refused_with_flash_attention(
    config: PreTrainedConfig, window: int | None, kernel: Any
) -> None:
    model = AUTO.model_copy(update={"attention": kernel})
    assert implementation(AUTO, config) == "sdpa"
    if window is None:
        assert implementation(model, config) == kernel
        return
    with pytest.raises(ConfigError, match=rf"{kernel} leaves out the window of {window} tokens"):
        implementation(model, config)


def test_each_model_of_a_run_gets_a_kernel_of_its_own_in_place_of_auto(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"path": str(tmp_path / "model")}
    path = write_task(
        tmp_path,
        model=own | {"attention": "auto"},
        reference={"pool": "all", "model": own | {"attention": "eager"}},
    )
    written = load_config(path).config
    with caplog.at_level("INFO", logger="roll"):
        config = settle_attention(written, "cpu")
    assert {key: model.attention for key, model in config.models.items()} == {
        "model": "sdpa",
        "reference.model": "eager",
    }
    assert caplog.messages == ["model.attention: auto is sdpa (there is no GPU)"]
    assert settle_attention(config, "cpu") is config


def test_the_settings_that_a_run_leaves_name_the_kernel(tmp_path: Path) -> None:
    path = write_task(tmp_path, max_steps=1, validation={}, checkpoint={"export_hf": False})
    records = run_local(path, ["model.attention=auto"])
    assert records
    left = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert left["model"]["attention"] == "sdpa"
