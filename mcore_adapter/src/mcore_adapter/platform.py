"""Machines without CUDA: the one place that adapts Megatron-Core to them.

Megatron-Core asks for CUDA in places where it only means "this rank's device". `adapt_to_cpu()`
gives its modules, and only those, a `torch` of their own in which such a question is answered with
the CPU. Nothing happens at import, and nothing happens where CUDA exists.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MODULES = (
    "megatron.core.dist_checkpointing",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.ssm.gated_delta_net",
)
"""They import all others that a model needs."""

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros", "empty_like")
"""Makers of tensors that Megatron-Core calls with `device="cuda"`."""


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Megatron-Core warns at import, nine times, that Transformer Engine and Apex are missing; that
    is the normal state of a machine without CUDA and of the local layer spec."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer ?Engine|Apex|transformer_engine)")
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def adapt_to_cpu(*, has_cuda: bool | None = None) -> bool:
    """Let Megatron-Core run on this process's CPU. Calling it again does nothing more.

    Args:
        has_cuda: whether this machine has CUDA; asked of PyTorch by default.

    Returns:
        Whether Megatron-Core is adapted: False where CUDA exists, and then nothing was touched.
    """
    if torch.cuda.is_available() if has_cuda is None else has_cuda:
        return False
    # Read by Megatron-Core when CUDA kernels overlap with communication; there are none here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with quiet_imports():
        for name in MODULES:
            importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            _adapt_module(module)
    _adapt_tensors()
    _adapt_rng()
    _adapt_dispatcher()
    return True


def mend_missing_te() -> None:
    """Two slips of megatron-core 0.16.1 where Transformer Engine is not installed, and only there
    to be mended. To be removed with the version that runs without."""
    with quiet_imports():
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils
    # Every router compares this name with None, and nothing defines it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Latent attention takes the stand-ins for Transformer Engine's classes for the classes.
    multi_latent_attention.HAVE_TE = False


class _Idle:
    """A stream or an event of a device that finishes everything before it returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None: ...

    def nothing(self, *_: object, **__: object) -> None: ...

    record = wait = synchronize = wait_stream = wait_event = nothing

    def record_event(self, *_: object) -> _Idle:
        return self


class _Fallthrough(types.ModuleType):
    """A copy of a module with some names replaced; what is not in the copy is in the module."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, object]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__.update(replaced)
        # Submodules that are imported later appear on the original only.
        self.__dict__["__getattr__"] = lambda name: getattr(original, name)


def _nothing(*_: object, **__: object) -> None: ...


def _itself(tensor: Tensor, *_: object, **__: object) -> Tensor:
    return tensor


def _cpu_cuda() -> types.ModuleType:
    """`torch.cuda` as Megatron-Core sees it."""
    cpu = torch.device("cpu")
    return _Fallthrough(
        torch.cuda,
        {
            # Given as `device=` to makers of parameters, buffers and rotary frequencies.
            "current_device": lambda: cpu,
            "set_device": _nothing,
            # All operations of a CPU are finished when they return.
            "synchronize": _nothing,
            "Stream": _Idle,
            "Event": _Idle,
            "stream": lambda _: _Idle(),
            "current_stream": _Idle,
            "default_stream": _Idle,
            "set_stream": _nothing,
            # A process has one generator, the CPU's: dropout draws from it.
            "get_rng_state": lambda *_: torch.get_rng_state(),
            "set_rng_state": lambda state, *_: torch.set_rng_state(state),
            "manual_seed": torch.manual_seed,
            "initial_seed": torch.initial_seed,
            # There is no caching allocator to empty or to ask.
            "empty_cache": _nothing,
            "memory_allocated": lambda *_: 0,
            "max_memory_allocated": lambda *_: 0,
            "memory_reserved": lambda *_: 0,
            "memory_stats": lambda *_: {},
        },
    )


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`device="cuda"` is written out in the pipeline schedules, the gradient clipping, the
    optimizer and the tracker of auxiliary losses."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


_cpu_torch: types.ModuleType | None = None


def _adapt_module(module: types.ModuleType) -> None:
    global _cpu_torch
    if _cpu_torch is None:
        makers = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
        _cpu_torch = _Fallthrough(torch, {"cuda": _cpu_cuda(), **makers})
    names = vars(module)
    if names.get("torch") is torch:
        names["torch"] = _cpu_torch
    for owner in [module, *(x for x in names.values() if isinstance(x, type))]:
        for name, value in list(vars(owner).items()):
            # Little functions under torch.compile: on a CPU they start a C++ compiler each.
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if plain is not None and value.__module__.startswith("megatron."):
                setattr(owner, name, plain)


def _adapt_tensors() -> None:
    """Methods of tensors cannot be given to Megatron-Core alone. Without CUDA the first two only
    raise; the third answers Megatron-Core's optimizers alone."""
    # The embedding is moved to "the device" before the two ends of a pipeline share it.
    Tensor.cuda = _itself  # type: ignore[method-assign, assignment]
    # Token dispatchers tell the allocator which stream still reads a tensor.
    Tensor.record_stream = _nothing  # type: ignore[method-assign]
    # Optimizers sort parameters by the name of their type, and know those of GPUs only.
    if Tensor.type is not _type_for_optimizers:
        Tensor.type = _type_for_optimizers  # type: ignore[method-assign, assignment]


_type_of = Tensor.type


def _type_for_optimizers(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    found = _type_of(tensor, *args, **kwargs)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if isinstance(found, str) and caller.startswith("megatron.core.optimizer"):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


def _adapt_rng() -> None:
    """The tracker of random states reaches into CUDA's generators through private functions, whose
    replacements are the public ones of the CPU. It must still be seeded, by `init_parallel`."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # It warns when the CPU's generator is drawn from in place of the GPU's, as it must be here.
    logging.getLogger(random.__name__).addFilter(_not_about_the_generator)


def _not_about_the_generator(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("CPU RNG state changed")


def _adapt_dispatcher() -> None:
    """The all-to-all dispatcher turns counts of tokens into numbers when it copies them from the
    GPU, and so leaves tensors where they are on the CPU already; collectives want numbers."""
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _counts


def _counts(tensor: object, as_numpy: bool = False, **_: object) -> object:
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _get_rng_state(*_: object, **__: object) -> Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(new_state)
