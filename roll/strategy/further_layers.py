"""Layers that predict further tokens (MTP), which a folder of trained weights takes over.

Only `megatron` with `mtp_loss_weight` trains these layers: transformers leaves them out when it
loads a model. Engines speculate with them. So a saved folder has them, if they are not trained, as
they are in the checkpoint that the run began with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from roll.config.sections.model import ModelConfig
from roll.models.deferred.files import weight_files
from roll.models.load import load_config
from roll.strategy.hf_folder import folder_of, is_further
from roll.weight_sync.manifest import TensorMeta

LOGGER = logging.getLogger(__name__)
_ROWS = 4096
"""Rows that are compared at once; two tensors of a whole vocabulary would take several GB."""


@dataclass(frozen=True, slots=True)
class FurtherLayers:
    """Tensors that a saved folder has besides the trained ones."""

    metas: tuple[TensorMeta, ...]
    _kept: Mapping[str, Path]
    """File of each tensor that is taken over as it is, by name."""
    _copies: Mapping[str, str]
    """Name of the trained tensor that another one repeats, by the name of the other."""

    def added_to(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the trained tensors, and the further ones.

        Raises:
            OSError: a file of the checkpoint is gone.
        """
        for name, tensor in weights:
            yield name, tensor
            yield from ((other, tensor) for other, of in self._copies.items() if of == name)
        with _Files() as files:
            for name, path in self._kept.items():
                yield name, files.open(path).get_tensor(name)


NONE = FurtherLayers((), {}, {})


def further_layers(model: ModelConfig, trained: Sequence[TensorMeta]) -> FurtherLayers:
    """Find the tensors of the layers that predict further tokens in the checkpoint of `model`.

    These layers share the embedding and the head with the model, which some checkpoints store again
    for them. Such a copy is not taken over: it gets the trained values of what it repeats.

    Args:
        trained: tensors that the backend writes itself.

    Raises:
        OSError: the checkpoint is gone.
    """
    folder = folder_of(model)
    files = weight_files(folder)
    source = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    own = {meta.name: meta for meta in trained}
    with _Files() as opened:
        stored = {
            name: path
            for path in files or ()
            for name in opened.open(path).keys()  # noqa: SIM118
        }
        found = [name for name in stored if name not in own and is_further(name, _text(source))]
        why = _what_prevents(source, found, model, is_safetensors=files is not None)
        if why is not None:
            LOGGER.warning(
                "the layers of %s that predict further tokens (MTP) are left out of the saved "
                "model, so engines cannot speculate with them: %s",
                folder,
                why,
            )
            return NONE
        copies = dict(_copies(found, own, _text(source).vocab_size, opened, stored))
        kept = {name: stored[name] for name in found if name not in copies}
        metas = [_meta(name, opened.open(path)) for name, path in kept.items()]
    metas += [TensorMeta(name, own[of].shape, own[of].dtype) for name, of in copies.items()]
    return FurtherLayers(tuple(metas), kept, copies)


def _what_prevents(
    source: PreTrainedConfig, found: Sequence[str], model: ModelConfig, *, is_safetensors: bool
) -> str | None:
    """Return why the tensors `found` cannot be taken over; None: they can, or there are none."""
    if not is_safetensors:
        told = _text(source).to_dict()
        has = any(value for key, value in told.items() if "nextn" in key or "mtp_num" in key)
        return "they are no safetensors files" if has else None
    if not found:
        return None
    if source.to_dict().get("quantization_config"):
        return "they are quantised, and the trained weights are not"
    saved = _text(load_config(model))
    moved = [name for name in found if not is_further(name, saved)]
    return f"model.overrides makes {moved[0]} another layer" if moved else None


def _text(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config()


def _copies(
    found: Iterable[str],
    own: Mapping[str, TensorMeta],
    vocab: int,
    opened: _Files,
    stored: Mapping[str, Path],
) -> Iterator[tuple[str, str]]:
    """Yield names of tensors over the whole vocabulary that repeat a trained tensor of the
    checkpoint, and the name of the trained one."""

    def shape_of(name: str) -> tuple[int, ...]:
        return tuple(opened.open(stored[name]).get_slice(name).get_shape())

    def are_equal(one: str, other: str) -> bool:
        a, b = (opened.open(stored[name]).get_slice(name) for name in (one, other))
        return a.get_dtype() == b.get_dtype() and all(
            torch.equal(a[row : row + _ROWS], b[row : row + _ROWS])
            for row in range(0, vocab, _ROWS)
        )

    wide = [name for name in own if name in stored and own[name].shape[:1] == (vocab,)]
    for name in found:
        shape = shape_of(name)
        if len(shape) != 2 or shape[0] != vocab:
            continue
        for of in wide:
            if shape_of(of) == shape and are_equal(name, of):
                yield name, of
                break


def _meta(name: str, file: Any) -> TensorMeta:
    """Return shape and dtype of a tensor of an open file."""
    known = file.get_slice(name)
    # An empty range of rows has the dtype, and needs no reading; a number has no rows.
    shape = tuple(known.get_shape())
    part: Tensor = known[:0] if shape else file.get_tensor(name)
    return TensorMeta(name, shape, str(part.dtype).removeprefix("torch."))


class _Files:
    """Open safetensors files, closed at the end of the block."""

    def __init__(self) -> None:
        self._opened: dict[Path, Any] = {}
        self._stack = ExitStack()

    def open(self, path: Path) -> Any:
        """Return an open file."""
        if path not in self._opened:
            self._opened[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._opened[path]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
