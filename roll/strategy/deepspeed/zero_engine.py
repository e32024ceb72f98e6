"""DeepSpeed's engine around a model: its settings, and the environment that it insists on."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from roll.config.sections.strategy import DeepspeedConfig
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
    """DeepSpeed's engine; collective. The process group exists already.

    Args:
        model: with parameters on the CPU, which become what the stage makes of them.
        optimizer: of the parameters; it will see what this rank holds of the masters instead.
            None for a frozen model.
        max_grad_norm: gradients are scaled down to this global norm; 0 leaves them.
        compute: dtype of the forward and backward passes.
    """
    compat.use_accelerator(device.type)
    compat.forget_left_groups()
    # DeepSpeed reads the number of its device from the environment, ZeRO-3 again and again; a
    # process sees only its own device.
    os.environ["LOCAL_RANK"] = "0"
    told = settings(config, compute, device) | {"gradient_clipping": max_grad_norm}
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    with compat.silent():
        if config.stage == 3:
            _cut(model, config, told, compute, device)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=told)
    return engine


def settings(config: DeepspeedConfig, compute: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What DeepSpeed is told."""
    stage = config.stage
    low = compute == torch.bfloat16
    if stage == 0 and low:
        # Without ZeRO DeepSpeed adds bfloat16 gradients up in bfloat16. Its ZeRO-1 in bfloat16
        # keeps whole float32 gradients on every rank, and shares out masters and moments.
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
        # Of no meaning here: micro-batches differ in size, and we say which is the last.
        "train_batch_size": dist.get_world_size(),
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        # The optimizer is PyTorch's, so that nothing is compiled; fused, it is as good on a CPU.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": low},
        "data_types": {"grad_accum_dtype": "fp32"} if low else {},
        "communication_data_type": {"float32": "fp32", "bfloat16": "bf16"}[config.reduce_dtype],
    }


def _cut(
    model: Root[T],
    config: DeepspeedConfig,
    told: dict[str, Any],
    compute: torch.dtype,
    device: torch.device,
) -> None:
    """Cut parameter by parameter, before the engine moves the whole model to the device."""
    # The head's weight is read by another module than the one that has it; ZeRO-3 gathers the
    # parameters of a module when it runs, and those that it was told of.
    for parameter in _outputs(model):
        deepspeed.zero.register_external_parameter(model, parameter)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute)
    deepspeed.zero.Init(
        module=model,
        config_dict_or_path=told,
        remote_device="cpu" if config.offload_parameters else None,
        pin_memory=device.type != "cpu",
    )


def _outputs(model: Root[T]) -> list[torch.nn.Parameter]:
    head = model.model.get_output_embeddings()
    return [] if head is None else list(head.parameters())
