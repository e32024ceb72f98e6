"""The engine arguments that vLLM knows, read from its source: importing vLLM takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from roll.core.errors import EngineMissingError
from roll.strategy.serving.engine_args import check_engine_args, package_folder, parsed_source

RESERVED_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "actor_infer.dtype",
    "seed": "seed",
    "max_model_len": "actor_infer.strategy.max_model_len",
    "max_num_seqs": "actor_infer.strategy.max_num_seqs",
    "tensor_parallel_size": "actor_infer.strategy.tp",
    "pipeline_parallel_size": "actor_infer.strategy.pp",
    "enable_prefix_caching": "actor_infer.strategy.prefix_caching",
    "enforce_eager": "actor_infer.strategy.enforce_eager",
    "gpu_memory_utilization": "actor_infer.strategy.gpu_memory_utilization",
    "kv_cache_memory_bytes": "actor_infer.strategy.kv_cache_gb",
    "speculative_config": "actor_infer.strategy.speculation",
    "spec_method": "actor_infer.strategy.speculation",
    "spec_model": "actor_infer.strategy.speculation",
    "spec_tokens": "actor_infer.strategy.speculation",
    "quantization": "actor_infer.strategy.quantization",
    "enable_lora": "actor_infer.strategy.max_lora_rank",
    "max_lora_rank": "actor_infer.strategy.max_lora_rank",
    "served_model_name": "actor_infer.strategy.endpoint.model_name",
    "data_parallel_size": "more devices in the pool of actor_infer: each replica is one",
    # Of all connectors, only that of `kv_offloading_size` drops its keys and values at a push.
    "kv_transfer_config": "",
    "kv_offloading_backend": "",
    "logprobs_mode": "",
    "worker_extension_cls": "",
    "worker_cls": "",
    "enable_sleep_mode": "",
    "disable_log_stats": "",
    "mm_device_do_normalize": "",
    "mm_processor_cache_gb": "",
    "distributed_executor_backend": "",
    "nnodes": "actor_infer.strategy.tp and pp: more than a node's devices take several nodes",
    "node_rank": "",
    "master_addr": "",
    "master_port": "",
    "device_ids": "",
}
"""Arguments that a user may not set; see `ours` of `check_engine_args`."""


def known_arguments() -> frozenset[str]:
    """Read the field names of the installed `EngineArgs`.

    Raises:
        EngineMissingError: vLLM is not installed, or has no `EngineArgs`.
    """
    for node in parsed_source(package_folder("vllm"), "engine", "arg_utils.py"):
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            return frozenset(
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            )
    raise EngineMissingError("the installed vllm has no `EngineArgs`; see `roll doctor`")


def check_arguments(names: Iterable[str]) -> None:
    """Run `check_engine_args`, with its errors, on arguments for vLLM."""
    check_engine_args(names, engine="vLLM", ours=RESERVED_ARGUMENTS, known=known_arguments)
