"""The engine arguments that SGLang knows, read from its source: importing SGLang takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import partial

from roll.core.errors import EngineMissingError
from roll.strategy.serving.engine_args import check_engine_args, parsed_source
from roll.strategy.sglang.interpreter import package_folder

RESERVED_ARGUMENTS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "actor_infer.dtype",
    "random_seed": "seed",
    "json_model_override_args": "model.overrides",
    "context_length": "actor_infer.strategy.max_model_len",
    "max_running_requests": "actor_infer.strategy.max_num_seqs",
    "tp_size": "actor_infer.strategy.tp",
    "disable_radix_cache": "actor_infer.strategy.prefix_caching",
    "disable_cuda_graph": "actor_infer.strategy.enforce_eager",
    "mem_fraction_static": "actor_infer.strategy.gpu_memory_utilization",
    "max_total_tokens": "actor_infer.strategy.kv_cache_tokens",
    "dp_size": "more devices in the pool of actor_infer: each replica is one",
    "pp_size": "",
    "nnodes": "",
    "weight_version": "",
    "custom_weight_loader": "",
    "skip_tokenizer_init": "",
    "skip_server_warmup": "",
    "log_level": "",
    "stream_interval": "",
    "incremental_streaming_output": "",
    "sampling_backend": "",
    "sampling_mask_max_tokens": "",
    "enable_memory_saver": "",
    "enable_weights_cpu_backup": "",
}
"""Arguments that a user may not set; see `ours` of `check_engine_args`."""


def known_arguments(python: str | None = None) -> frozenset[str]:
    """Read the names of the arguments of the installed `ServerArgs`.

    Args:
        python: `strategy.python`; None: the Python of the run.

    Raises:
        EngineMissingError: SGLang is not installed, or lists no arguments.
    """
    for node in parsed_source(package_folder(python), "srt", "arg_groups", "field_order.py"):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "POSITIONAL_FIELD_ORDER"
        ):
            return frozenset(ast.literal_eval(node.value))
    raise EngineMissingError("the installed sglang lists no arguments; see `roll doctor`")


def check_arguments(names: Iterable[str], python: str | None = None) -> None:
    """Run `check_engine_args`, with its errors, on arguments for the SGLang of a Python."""
    known = partial(known_arguments, python)
    check_engine_args(names, engine="SGLang", ours=RESERVED_ARGUMENTS, known=known)
