"""torch.compile of the layers of a Hugging Face model, one by one (regional compilation).

All layers of a kind share their code, so each part of it is compiled once, whatever the number of
layers. Embeddings, head and kernels of attention stay as they are; `attention: eager` has none, and
is compiled. What is read of the logits is compiled in `roll.strategy.training.compiled_logits`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from roll.config.sections.model import ModelConfig
from roll.core.errors import ConfigError
from roll.models import packing, ulysses
from roll.models.kernels.attention import FLASH
from roll.models.vision.parts import language_model

CACHE = "~/.cache/roll/inductor"
"""Folder of compiled code, unless TORCHINDUCTOR_CACHE_DIR names another. PyTorch's own default lies
in /tmp, where another user could put code in the way."""
FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable that names the folder of compiled code."""
MOST_VARIANTS = 64
"""Largest number of times that one part of a layer is compiled: for passes with and without
gradients, for one row and for several, with the adapter and without. Beyond it, PyTorch would run
the part uncompiled and go on; here that is an error."""
_EXPERTS = "experts"
"""Name of the module of all experts of a layer in transformers. It is not compiled: how many tokens
each expert gets is known only when it runs."""
_left_as_they_are: set[str] = set()
"""Attention functions of this process that are not compiled."""


def compile_layers(model: PreTrainedModel, config: ModelConfig) -> list[nn.Module]:
    """Let each decoder layer be compiled when it first runs, if `config.compile` says so.

    Sizes of rows and their number are unknowns of the compiled code, so other lengths do not
    compile it again. Modules and parameters keep their names. What runs around a layer stays
    outside: hooks of FSDP and DeepSpeed, and activation checkpointing, which runs the compiled
    layer a second time.

    Returns:
        The compiled layers; none if they are not to be compiled.

    Raises:
        ConfigError: PyTorch's compiler is switched off in this process, the model declares no
            layers, or they mix tokens in another way than by attention.
    """
    if not config.compile:
        return []
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise ConfigError(
            "model.compile: TORCHDYNAMO_DISABLE=1 is set, so nothing would be compiled; unset it, "
            "or leave out `compile`"
        )
    kind = model.config.get_text_config().model_type
    if why := packing.other_mixers(model):
        raise ConfigError(
            f"model.compile: model type {kind!r} has {why}, whose code would be compiled for each "
            "length of rows anew; leave out `compile`"
        )
    layers = decoder_layers(model)
    if not layers:
        raise ConfigError(
            f"model.compile: model type {kind!r} does not say what its layers are; leave out "
            "`compile`"
        )
    prepare()
    for layer in layers:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == _EXPERTS:
                module.forward = torch.compiler.disable(module.forward)
        # Not `layer.compile()`, which would compile the hooks, too.
        layer.forward = torch.compile(layer.forward, dynamic=True)
    return layers


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """List the modules of the language model that Hugging Face declares as units."""
    units = set(model._no_split_modules or ())
    return [module for module in language_model(model).modules() if type(module).__name__ in units]


def cache_folder(environ: Mapping[str, str]) -> str:
    """Return the folder of compiled code: the one that `FOLDER` names, or else `CACHE`. PyTorch
    reads it from that variable alone, and writes its own default there when it is imported.

    Args:
        environ: environment variables of the process that compiles.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    own = default_cache_dir()
    named = environ.get(FOLDER, own)
    return str(Path(CACHE).expanduser()) if named == own else named


def prepare() -> None:
    """Set PyTorch's compiler up for this thread."""
    from torch._dynamo import config as dynamo
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    os.environ[FOLDER] = cache_folder(os.environ)
    # Compile here instead of in a pool of processes, which would outlive the first step.
    inductor.compile_threads = 1
    # Settings are those of a thread, and the backward pass of a GPU has a thread of its own. So all
    # is compiled in the forward pass, which is else the case for unknown sizes only.
    functorch.force_non_lazy_backward_lowering = True
    dynamo.recompile_limit = MOST_VARIANTS
    dynamo.fail_on_recompile_limit_hit = True
    # The lengths of packed rows, and exchanges between ranks, are no constants of compiled code.
    # Kernels of attention would run as they are in any case.
    for name in {"sdpa", *FLASH, packing.ATTENTION, ulysses.ATTENTION} - _left_as_they_are:
        function = ALL_ATTENTION_FUNCTIONS[name]
        AttentionInterface.register(name, torch.compiler.disable(function))
        _left_as_they_are.add(name)
