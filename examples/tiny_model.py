"""Tiny models for the examples: tokenizers, random weights, and a start by SFT."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)


def splitter(words: Sequence[str] = ()) -> Any:
    """Return a pre-tokenizer that makes one piece of each of the words, and of each character
    outside of them. Of two words at the same place, the earlier one in `words` is taken."""
    pattern = "|".join([*words, r"[\s\S]"])
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def tokenizer_of(
    pieces: Sequence[str], split: Any, *, roles: Sequence[str], chat_template: str
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per piece, and the special tokens `<pad>` and `<eos>`.

    Args:
        pieces: texts of the tokens; any other text becomes `<pad>`.
        split: pre-tokenizer that finds the pieces in a text.
        roles: further special tokens, which begin the messages of the chat template.
        chat_template: template in Jinja.
    """
    vocab = {piece: i for i, piece in enumerate(["<pad>", "<eos>", *roles, *pieces])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = split
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        additional_special_tokens=[*roles],
        chat_template=chat_template,
    )


def write_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, positions: int, hidden: int = 128
) -> None:
    """Write a model of the Qwen3 architecture with random weights, and its tokenizer, in the format
    of Hugging Face.

    Args:
        positions: largest number of tokens of a sequence.
        hidden: width of the hidden states; with 128 the model has 0.5 M parameters.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    tokenizer.save_pretrained(folder)
    # The output head is tied to the embedding. Engines expect these weights under the name of the
    # embedding alone.
    weights = Qwen3ForCausalLM(config).state_dict()
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)


VISION_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
"""Special tokens of a model that sees."""


def write_vision_model(
    folder: Path, tokenizer: PreTrainedTokenizerFast, *, positions: int, patch_size: int
) -> None:
    """Write a model of the Qwen3-VL architecture with random weights (0.8 M parameters), its
    tokenizer and its processors, in the format of Hugging Face.

    Args:
        tokenizer: tokenizer with `VISION_TOKENS`.
        positions: largest number of tokens of a sequence.
        patch_size: pixels of a side of a patch; 2 x 2 patches are merged into one token.
    """
    start, image, end, video = tokenizer.convert_tokens_to_ids(VISION_TOKENS)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": positions,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 128,
            "patch_size": patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        dtype="float32",
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = 2 * patch_size
    cut: dict[str, Any] = {"patch_size": patch_size, "merge_size": 2, "temporal_patch_size": 2}
    cut |= {"size": {"shortest_edge": side**2, "longest_edge": 64 * side**2}}
    cut |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    for kind, name in (("image", "preprocessor"), ("video", "video_preprocessor")):
        made_by = {"image": "Qwen2VLImageProcessor", "video": "Qwen3VLVideoProcessor"}[kind]
        text = json.dumps({f"{kind}_processor_type": made_by, **cut}, indent=2)
        (folder / f"{name}_config.json").write_text(text)


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows, one a line; make the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def given(key: str, path: Path) -> str:
    """Return the argument of `roll run` that sets a path. It is in quotes, because values are read
    as YAML, in which ` #` and `: ` have a meaning."""
    return f"{key}={json.dumps(str(path), ensure_ascii=False)}"


def warm_start(example: str, out: Path, seed: int, data: str = "train.jsonl") -> None:
    """Train `<out>/warm_start/model` on `<out>/warm_start/<data>`, as the example's
    `warm_start.yaml` says; the result is `<out>/model`."""
    warm = out / "warm_start"
    command = [sys.executable, "-m", "roll.cli", "run"]
    command += [str(Path(__file__).parent / example / "warm_start.yaml"), f"seed={seed}"]
    command += [given("model.path", warm / "model"), given("output_dir", warm / "run")]
    command += ["resume=never", given("data.sources.0.path", warm / data)]
    subprocess.run(command, check=True)
    shutil.rmtree(out / "making", ignore_errors=True)
    shutil.copytree(warm / "run" / "hf", out / "making")
    (out / "making").rename(out / "model")  # last: an existing model means that all files exist


def run_script(make: Callable[[Path, int], None], out: str, purpose: str) -> None:
    """Run a script that makes a model, unless the model exists.

    Args:
        make: function of the output folder and the seed.
        out: output folder if the user names none.
        purpose: sentence for `--help`.
    """
    parser = argparse.ArgumentParser(description=purpose)
    parser.add_argument("--out", type=Path, default=Path(out))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model" / "config.json").exists():
        print(f"{args.out} is made already")
        return
    start = time.perf_counter()
    try:
        make(args.out, args.seed)
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command begins anew") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(error.returncode) from None  # the run has already printed its error
    print(f"{args.out}: made in {time.perf_counter() - start:.0f} s")
