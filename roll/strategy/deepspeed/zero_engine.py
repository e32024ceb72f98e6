"""Construction of DeepSpeed's engine: settings and environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from roll.config.sections.strategy import DeepspeedConfig
from roll.models.deferred.tensor import Deferred, fill
from roll.strategy.deepspeed import compat
from roll.strategy.deepspeed.engine_module import Root

compat.quiet()

import deepspeed  # noqa: E402

T = TypeVar("T")


def start(
    config: DeepspeedConfig,
    model: Root[T],
    optimizer: Optimizer | None,
    *,
    compute: torch.dtype,
    max_grad_norm: float = 0.0,
    device: torch.device,
) -> Any:
    """Build DeepSpeed's engine. Collective; the default process group must exist.

    Sets DeepSpeed's accelerator and the environment variable LOCAL_RANK of this process.

    Args:
        model: model with parameters on the CPU or on the device, to which the engine moves them. In
            stage 3 they may be deferred; the engine partitions them over the ranks.
        optimizer: optimizer of the model's parameters; None for a frozen model. With ZeRO its
            parameters are replaced by this rank's part of the float32 master weights.
        compute: dtype of the forward and backward passes.
        max_grad_norm: gradients are scaled down to this global norm; 0 disables clipping.
        device: device of this process.
    """
    compat.use_accelerator(device.type)
    compat.drop_stale_groups()
    # DeepSpeed reads the number of its device from the environment, ZeRO-3 even repeatedly. This
    # process sees only its own device, which has the number 0.
    os.environ["LOCAL_RANK"] = "0"
    told = settings(config, compute, device) | {"gradient_clipping": max_grad_norm}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    with compat.silent():
        if config.stage == 3:
            _cut(model, config, told, compute, device)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=told)
    return engine


def settings(config: DeepspeedConfig, compute: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return the config dict for DeepSpeed, without gradient clipping."""
    stage = config.stage
    low = compute == torch.bfloat16
    if stage == 0 and low:
        # Without ZeRO DeepSpeed accumulates bfloat16 gradients in bfloat16. ZeRO-1 accumulates them
        # in float32, in full on every rank, and partitions only master weights and moments.
        stage = 1
    host = {"device": "cpu", "pin_memory": device.type != "cpu"}
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_bucket_size": config.bucket_elements,
        "allgather_bucket_size": config.bucket_elements + config.bucket_elements % 2,
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = config.bucket_elements
        zero["stage3_param_persistence_threshold"] = config.whole_below_elements
    if config.offload_optimizer:
        zero["offload_optimizer"] = host
    if config.offload_parameters:
        zero["offload_param"] = host
    return {
        # These three have no effect: micro-batches differ in size, and the trainer marks the last.
        "train_batch_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        # PyTorch's AdamW needs no compiled kernel of DeepSpeed; fused, it is as fast on a CPU.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": low},
        "data_types": {"grad_accum_dtype": "fp32"} if low else {},
        "communication_data_type": {"float32": "fp32", "bfloat16": "bf16"}[config.reduce_dtype],
    }


def gather_whole(layers: Sequence[nn.Module]) -> None:
    """Let ZeRO-3 gather each of these modules as one, with hooks on the module alone.

    Hooks within would cut the compiled code of a layer into pieces.
    """
    for layer in layers:
        deepspeed.utils.set_z3_leaf_module(layer, True)


def _cut(
    model: Root[T],
    config: DeepspeedConfig,
    told: dict[str, Any],
    compute: torch.dtype,
    device: torch.device,
) -> None:
    """Round each parameter to `compute` and partition it; the engine would move all to `device`.

    At most one parameter is whole at any time (`_Arriving`).

    Args:
        told: DeepSpeed's config dict, from `settings`.
        compute: dtype of the forward and backward passes.
    """
    # ZeRO-3 gathers a module's own and registered parameters when the module runs. The head's
    # weight has to be registered, because the root module reads it without running the head.
    head = model.model.get_output_embeddings()
    for parameter in [] if head is None else list(head.parameters()):
        deepspeed.zero.register_external_parameter(model, parameter)
    deepspeed.zero.Init(
        module=_Arriving(model, compute, device),
        config_dict_or_path=told,
        remote_device="cpu" if config.offload_parameters else None,
        pin_memory=device.type != "cpu",
    )
    move_buffers(model, device)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers of a model, such as the biases of routers, to the device: ZeRO-3 moves
    parameters alone, and the engine nothing of a model that is partitioned already."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


class _Arriving(nn.Module):
    """Stands for a model with parameters that are still in the files of its checkpoint.

    ZeRO-3 asks for the parameters one after the other. It partitions each, and so frees it, before
    it asks for the next. It broadcasts the values of rank 0, so no other rank has to read them.
    """

    def __init__(self, model: nn.Module, compute: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.model = model
        self._compute, self._device = compute, device

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters, each with its values in the compute dtype."""
        for parameter in self.model.parameters(recurse):
            if isinstance(parameter, Deferred):
                fill(parameter, self._compute, self._device, read=dist.get_rank() == 0)
            else:
                parameter.data = parameter.data.to(self._compute)
            yield parameter
