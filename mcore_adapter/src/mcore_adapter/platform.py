"""Adaptation of Megatron-Core to machines without CUDA. No other module does this.

Megatron-Core asks for CUDA in places where it only means "this rank's device". `adapt_to_cpu()`
gives the modules of Megatron-Core, and only those, a replacement of `torch` that uses the CPU in
such places. Three methods of `Tensor` must be replaced for all callers, see `_adapt_tensors`.
Importing this module changes nothing, and on a machine with CUDA nothing is changed at all.
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
"""Modules of Megatron-Core that import all others that a model needs."""

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros", "empty_like")
"""Functions that create tensors and that Megatron-Core calls with `device="cuda"`."""


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Suppress warnings while Megatron-Core is imported.

    Megatron-Core warns nine times that Transformer Engine and Apex are missing. Both are normally
    missing on a machine without CUDA, and the local layer spec does not need them.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer ?Engine|Apex|transformer_engine)")
        warnings.filterwarnings("ignore", category=SyntaxWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        yield


def adapt_to_cpu(*, has_cuda: bool | None = None) -> bool:
    """Let Megatron-Core run on this process's CPU. Further calls change nothing.

    Args:
        has_cuda: whether this machine has CUDA; None: ask PyTorch.

    Returns:
        True if Megatron-Core is adapted; False if there is CUDA, and then nothing was changed.
    """
    if torch.cuda.is_available() if has_cuda is None else has_cuda:
        return False
    # Megatron-Core expects this value to overlap CUDA kernels with communication; a CPU has none.
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
    """Correct two errors that megatron-core 0.16.1 has where Transformer Engine is not installed.

    Call it only there. Remove it when a version of Megatron-Core runs without it.
    """
    with quiet_imports():
        from megatron.core.transformer import multi_latent_attention
        from megatron.core.transformer.moe import moe_utils
    # Every router compares this name with None, but nothing defines the name.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Latent attention finds stand-ins for Transformer Engine's classes and takes them as real.
    multi_latent_attention.HAVE_TE = False


class _Idle:
    """Stream or event of a device on which every operation is finished when its call returns."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> _Idle:
        return self

    def __exit__(self, *_: object) -> None: ...

    def nothing(self, *_: object, **__: object) -> None:
        """Do nothing: there is nothing to wait for."""
        ...

    record = wait = synchronize = wait_stream = wait_event = nothing

    def record_event(self, *_: object) -> _Idle:
        return self


class _Fallthrough(types.ModuleType):
    """Copy of a module with some names replaced; names that the copy lacks come from the module."""

    def __init__(self, original: types.ModuleType, replaced: dict[str, object]) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(original.__dict__)
        self.__dict__.update(replaced)
        # Submodules that are imported later appear on the original only.
        self.__dict__["__getattr__"] = lambda name: getattr(original, name)


def _nothing(*_: object, **__: object) -> None:
    """Do nothing, in place of a function that only matters on a GPU."""
    ...


def _itself(tensor: Tensor, *_: object, **__: object) -> Tensor:
    """Return the tensor, in place of its copy on a GPU."""
    return tensor


def _cpu_cuda() -> types.ModuleType:
    """Make the replacement of `torch.cuda` for Megatron-Core."""
    cpu = torch.device("cpu")
    return _Fallthrough(
        torch.cuda,
        {
            # Passed as `device=` when parameters, buffers and rotary frequencies are created.
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
            "get_rng_state": _get_rng_state,
            "set_rng_state": _set_rng_state,
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
    """Wrap a function that creates tensors so that `device="cuda"` means the CPU, and no memory is
    pinned.

    Megatron-Core's pipeline schedules, gradient clipping, optimizer and tracker of auxiliary losses
    name that device literally; rotary angles of context parallel ranks are cut by pinned numbers.
    """

    def made(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


_cpu_torch: types.ModuleType | None = None


def _adapt_module(module: types.ModuleType) -> None:
    """Replace `torch` in a module of Megatron-Core, and compiled functions by plain ones."""
    global _cpu_torch
    if _cpu_torch is None:
        makers = {name: _on_cpu(getattr(torch, name)) for name in FACTORIES}
        _cpu_torch = _Fallthrough(torch, {"cuda": _cpu_cuda(), **makers})
    names = vars(module)
    if names.get("torch") is torch:
        names["torch"] = _cpu_torch
    for owner in [module, *(x for x in names.values() if isinstance(x, type))]:
        for name, value in list(vars(owner).items()):
            # Small functions under torch.compile: on a CPU each of them would start a C++ compiler.
            plain = getattr(value, "_torchdynamo_orig_callable", None)
            if plain is not None and value.__module__.startswith("megatron."):
                setattr(owner, name, plain)


def _adapt_tensors() -> None:
    """Replace three methods of `Tensor`, for all callers.

    Methods of tensors cannot be replaced for Megatron-Core alone. Without CUDA, the first two
    methods could only raise errors; the third returns something else only to Megatron-Core's
    optimizers.
    """
    # Megatron-Core moves the embedding to "the device" before both ends of a pipeline share it.
    Tensor.cuda = _itself  # type: ignore[method-assign, assignment]
    # Token dispatchers call it to tell the CUDA allocator which stream still reads a tensor.
    Tensor.record_stream = _nothing  # type: ignore[method-assign]
    # Optimizers group parameters by the name of their type, and know only types of GPUs.
    if Tensor.type is not _type_for_optimizers:
        Tensor.type = _type_for_optimizers  # type: ignore[method-assign, assignment]


_type_of = Tensor.type


def _type_for_optimizers(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return a tensor's type, named as a CUDA type if an optimizer of Megatron-Core asks."""
    found = _type_of(tensor, *args, **kwargs)
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if isinstance(found, str) and caller.startswith("megatron.core.optimizer"):
        return found.replace("torch.", "torch.cuda.", 1)
    return found


def _adapt_rng() -> None:
    """Let Megatron-Core's tracker of random states use the CPU's generator.

    The tracker accesses CUDA's generators through private functions; public functions for the CPU
    replace them. `init_parallel` must still seed the tracker.
    """
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    # The tracker warns when the state of the CPU's generator changes, which is right here.
    logging.getLogger(random.__name__).addFilter(_not_about_the_generator)


def _not_about_the_generator(record: logging.LogRecord) -> bool:
    """Filter out the warning that the state of the CPU's generator has changed."""
    return not record.getMessage().startswith("CPU RNG state changed")


def _adapt_dispatcher() -> None:
    """Let the all-to-all dispatcher turn token counts into numbers on a CPU, too.

    The dispatcher does so when it copies the counts from the GPU. Counts that are already on the
    CPU would stay tensors, but the collectives need numbers.
    """
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.maybe_move_tensor_to_cpu = _counts


def _counts(tensor: object, as_numpy: bool = False, **_: object) -> object:
    """Return a tensor as a NumPy array if `as_numpy`; anything else unchanged."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


def _get_rng_state(*_: object, **__: object) -> Tensor:
    """Return the state of the CPU's generator, in place of that of a GPU's."""
    return torch.get_rng_state()


def _set_rng_state(new_state: Tensor, *_: object, **__: object) -> None:
    """Set the state of the CPU's generator, in place of that of a GPU's."""
    torch.set_rng_state(new_state)
