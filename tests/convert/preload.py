"""Imported once by the server of `spawned.run_ranks`."""

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

from transformers import AutoModelForCausalLM  # noqa: F401

import mcore_adapter.build.model
import mcore_adapter.load  # noqa: F401
from mcore_adapter.platform import quiet_imports

with quiet_imports():
    import megatron.core.ssm.gated_delta_net  # noqa: F401
