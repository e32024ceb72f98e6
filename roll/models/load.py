"""Loading of tokenizers, language models and classifiers from a folder or the hub."""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.core.hub import may_be_on_hub, require_hub
from roll.models.deferred.checkpoint import deferred_tensors
from roll.models.deferred.tensor import realize_buffers
from roll.models.kernels.attention import implementation
from roll.models.overrides import overridden
from roll.models.parts.head import split_value_head
from roll.models.vision.parts import generating_class, sees
from roll.models.vocabulary import check_tokenizer_files

UNREADABLE = (OSError, ValueError, KeyError, StrictDataclassError)
"""Errors of transformers on files of a model that are missing or wrong."""
_LOADING = threading.Lock()
"""Lock that all loads of this process take. transformers changes global state while it loads; two
loads at once (an engine and a trainer in `LocalCluster`) would report tied weights as missing."""


def load_tokenizer(model: ModelConfig, *, fetch: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model`.

    Args:
        fetch: if True, files that are not on this machine are downloaded from the hub.

    Raises:
        ConfigError: the folder does not exist or holds no tokenizer, or the hub cannot be reached.
    """
    path = model.tokenizer or model.path
    _check_folder(path, model)
    check_tokenizer_files(path)
    try:
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=model.trust_remote_code, local_files_only=not fetch
        )
    except UNREADABLE as error:
        raise ConfigError(_what_failed("tokenizer", path, error)) from error


def load_config(model: ModelConfig) -> PreTrainedConfig:
    """Load the Hugging Face configuration of `model`, with its `overrides`, and all dropout set to
    0: the probability ratio of two passes must not be random.

    Raises:
        ConfigError: the folder does not exist or is no checkpoint, the hub cannot be reached, or
            `model.overrides` does not fit the model.
    """
    _check_folder(model.path, model)
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except UNREADABLE as error:
        raise ConfigError(_what_failed("model", model.path, error)) from error
    config = overridden(config, model.overrides)
    _without_dropout(config)
    return config


def _without_dropout(config: PreTrainedConfig) -> None:
    """Set dropout to 0 in `config` and in the configs nested in it."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _without_dropout(value)
        elif isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)


def load_causal_lm(
    model: ModelConfig, *, dtype: torch.dtype | None = None, deferred: bool = False
) -> PreTrainedModel:
    """Load a causal language model on the CPU, in evaluation mode and without dropout.

    A model that reads pictures (`vision.parts.FAMILIES`) is loaded with its vision part, also for
    text alone.

    Args:
        dtype: dtype of the parameters; default: `model.dtype`. Training loads float32 parameters.
        deferred: leave the parameters in the files, where that is possible, so that each rank reads
            its part (`deferred/tensor.py`).

    Raises:
        ConfigError: the folder does not exist, is no checkpoint or lacks tensors, or the hub
            cannot be reached.
    """
    config = load_config(model)
    loaded, missing = _load(generating_class(config), model, config, dtype, deferred=deferred)
    if missing:
        raise ConfigError(_incomplete(model, missing))
    return loaded


@dataclass(frozen=True, slots=True)
class Classifier:
    """Kind of classifier with one label that a role needs."""

    factory: Any
    """Auto class of transformers."""
    of: str
    """`Token` or `Sequence`, the thing that is classified; `<of>Classification` in the name of an
    architecture tells that the checkpoint has a head already."""
    what: str
    """Role of the model in error messages, such as `a critic`."""


CRITIC = Classifier(AutoModelForTokenClassification, "Token", "a critic")
REWARD_MODEL = Classifier(AutoModelForSequenceClassification, "Sequence", "a reward model")


@dataclass(frozen=True, slots=True)
class ClassifierOutline:
    """A classifier without its weights, for a backend that has modules of its own."""

    config: PreTrainedConfig
    """Config that belongs into the folder of its weights."""
    head: tuple[str, ...]
    """Names of the head's parameters in a checkpoint: the weight, and the bias if there is one."""
    stored: bool
    """True if the checkpoint says that it is such a classifier, so that it must have the head. Else
    a head of which it lacks a parameter is new and zero."""


def load_value_model(
    model: ModelConfig, *, dtype: torch.dtype | None = None, deferred: bool = False
) -> PreTrainedModel:
    """Load a critic: a token classifier with one label, on the CPU.

    If the checkpoint is a token classifier, its head is used. For any other checkpoint of a
    language model the head is new and set to zero, so that the first values are 0 instead of noise.
    The arguments are those of `load_causal_lm`.

    Raises:
        ConfigError: see `load_causal_lm`; or the architecture has no token classifier, or the
            checkpoint's classifier has several labels.
    """
    return _load_classifier(model, dtype, CRITIC, deferred=deferred)


def load_score_model(
    model: ModelConfig, *, dtype: torch.dtype | None = None, deferred: bool = False
) -> PreTrainedModel:
    """Load a reward model: a sequence classifier with one label, on the CPU.

    Arguments, head and errors are as in `load_value_model`.
    """
    return _load_classifier(model, dtype, REWARD_MODEL, deferred=deferred)


def outline_classifier(model: ModelConfig, kind: Classifier) -> ClassifierOutline:
    """Describe the classifier that `load_value_model` or `load_score_model` would load.

    Raises:
        ConfigError: as they do, if it is not because of a tensor.
    """
    config, stored = _classifier_config(model, kind)
    try:
        with _LOADING, torch.device("meta"):
            made = kind.factory.from_config(config)
    except (ValueError, KeyError, ImportError) as error:
        raise ConfigError(_what_failed("model", model.path, error)) from error
    made.config.architectures = [type(made).__name__]
    return ClassifierOutline(made.config, tuple(_head_names(made)), stored)


def _load_classifier(
    model: ModelConfig, dtype: torch.dtype | None, kind: Classifier, *, deferred: bool
) -> PreTrainedModel:
    """Load a classifier with one label on the CPU; a head that the checkpoint lacks is set to zero.

    Raises:
        ConfigError: see `load_causal_lm`; or the checkpoint's classifier has several labels, or the
            architecture has no such classifier. Tensors may be missing only from a new head.
    """
    config, classifies = _classifier_config(model, kind)
    loaded, missing = _load(kind.factory, model, config, dtype, deferred=deferred)
    if set(missing) - set(_head_names(loaded)) or (classifies and missing):
        raise ConfigError(_incomplete(model, missing))
    if missing:
        _make_zero(split_value_head(loaded)[1])
    return loaded


def _classifier_config(model: ModelConfig, kind: Classifier) -> tuple[PreTrainedConfig, bool]:
    """Return the config of a classifier with one label, and whether the checkpoint is one.

    Raises:
        ConfigError: the model reads pictures, or its checkpoint's classifier has several labels.
    """
    config, things = load_config(model), kind.of.lower()
    if sees(config):
        raise ConfigError(
            f"model {model.path!r}: transformers has no {things} classifier for model type "
            f"{config.model_type!r}, which reads pictures, so it cannot be {kind.what}; name a "
            "language model, or leave the role out"
        )
    classifies = any(f"{kind.of}Classification" in name for name in config.architectures or ())
    if classifies and config.num_labels != 1:
        raise ConfigError(
            f"model {model.path!r} classifies {things}s into {config.num_labels} labels; "
            f"{kind.what} needs 1"
        )
    config.num_labels = 1
    return config, classifies


def _make_zero(head: nn.Module) -> None:
    """Give a head parameters of zeros: some of the old ones may be of another kind of classifier,
    and still be in its files."""
    for module in head.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros(old.shape, dtype=old.dtype)))


def _head_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the parameters of a classifier's head."""
    own = set(split_value_head(model)[1].parameters())
    return [name for name, parameter in model.named_parameters() if parameter in own]


def load_encoder(model: ModelConfig) -> PreTrainedModel:
    """Load a model without its head, on the CPU and in evaluation mode.

    Raises:
        ConfigError: see `load_causal_lm`. A pooler may be missing: nobody reads its output.
    """
    loaded, missing = _load(AutoModel, model, load_config(model), None)
    missing = [name for name in missing if not name.startswith("pooler.")]
    if missing:
        raise ConfigError(_incomplete(model, missing))
    return loaded


def _load(
    factory: Any,
    model: ModelConfig,
    config: PreTrainedConfig,
    dtype: torch.dtype | None,
    *,
    deferred: bool = False,
) -> tuple[PreTrainedModel, list[str]]:
    """Load a model in evaluation mode; return it with the names of tensors that its checkpoint
    lacks, which have initial values. `dtype` None is `model.dtype`.

    With `deferred` all other parameters stay in the files, if `deferred_tensors` finds them.

    Raises:
        ConfigError: the model cannot be loaded, or its attention is more than `sdpa` computes.
    """
    attention = implementation(model, config)
    try:
        tensors = deferred_tensors(model, config) if deferred else None
        with _LOADING:
            if tensors is not None:
                factory, config = _chosen(factory, config)
            loaded, info = factory.from_pretrained(
                model.path if tensors is None else None,
                state_dict=tensors,
                config=config,
                dtype=dtype or getattr(torch, model.dtype),
                attn_implementation=attention,
                trust_remote_code=model.trust_remote_code,
                output_loading_info=True,
            )
    except UnpicklingError as error:
        raise ConfigError(
            f"model {model.path!r}: its weights (pytorch_model.bin) are no plain tensors, or "
            "damaged; pickles can run code, so nothing else is loaded from them. Save the "
            "checkpoint as safetensors"
        ) from error
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(_what_failed("model", model.path, error)) from error
    assert isinstance(loaded, PreTrainedModel)
    if tensors is not None:
        _name(loaded, model.path)
        realize_buffers(loaded)
    loaded.eval()
    return loaded, sorted(info["missing_keys"])


def _chosen(factory: Any, config: PreTrainedConfig) -> tuple[Any, PreTrainedConfig]:
    """Return the class that an auto class chooses, and the part of the config that it takes: the
    language model of a model that sees has one of its own. The auto class itself wants a path of
    files."""
    with torch.device("meta"):
        made = factory.from_config(copy.deepcopy(config))
    same = isinstance(made.config, type(config))
    return type(made), config if same else config.get_text_config()


def _name(loaded: PreTrainedModel, path: str) -> None:
    """Give a model that was made of tensors what it would have from its folder: the path, and
    settings of `generate`, which are saved with it."""
    loaded.config.name_or_path = path
    if loaded.can_generate():
        try:
            found = GenerationConfig.from_pretrained(path)
        except OSError:  # as transformers does
            found = GenerationConfig.from_pretrained(
                path, config_file_name="config.json", _from_model_config=True
            )
        loaded.generation_config = found


def _incomplete(model: ModelConfig, missing: list[str]) -> str:
    """Return the error message for a checkpoint that lacks tensors."""
    return (
        f"model {model.path!r} lacks {len(missing)} tensors, e.g. {missing[0]!r}; they would "
        "start from random values. Is the checkpoint complete?"
    )


def _check_folder(path: str, model: ModelConfig) -> None:
    """Raise ConfigError unless `path`, of a model or of its tokenizer, is a folder, or can be taken
    from the hub. The message names what makes the folder (`made_by`)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return
    if folder.exists():
        raise ConfigError(f"model path {path!r} is a file; expected a Hugging Face folder")
    if model.made_by is not None or not may_be_on_hub(path):
        hint = f"; make it with: {model.made_by}" if model.made_by else ""
        raise ConfigError(f"model path {path!r} does not exist (looked in {Path.cwd()}){hint}")
    require_hub(path)


def _what_failed(what: str, path: str, error: Any) -> str:
    """Return the error message: code of its own, damaged local folder, or not found on the hub.

    Args:
        what: `model` or `tokenizer`.
        path: folder, or name on the hub, from which it was to be loaded.
        error: exception of transformers.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = " ".join(line.strip() for line in lines[: 2 if lines[0].endswith(":") else 1])
    if "custom code" in reason:
        return (
            f"{what} {path!r} has code of its own, which is run only with "
            f"`model.trust_remote_code: true`; read it first ({reason})"
        )
    if Path(path).expanduser().is_dir():
        return f"{path!r} is not a Hugging Face checkpoint with a {what}: {reason}"
    return (
        f"no {what} {path!r}: it is no folder in {Path.cwd()} and could not be taken from the hub "
        f"({reason})"
    )
