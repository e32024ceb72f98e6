"""What the fork server imports once; a process that a test starts from it is there in milliseconds.

Such a process is a fork of a server that has imported these modules and has run nothing: it shares
no state with the test, with its siblings or with the jobs before it, and its death touches none of
them. `conftest.py` names this module, because Python has one fork server and reads the list when
the first process is started from it.
"""

import gc
import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import peft  # noqa: F401
from transformers import AutoModelForCausalLM  # noqa: F401

import roll.strategy.build

# Importing a backend changes nothing outside of it; building one does, in the fork.
import roll.strategy.deepspeed.train
import roll.strategy.fsdp2.train
import roll.strategy.hf.score
import roll.strategy.megatron.train
import roll.weight_sync.transfer  # noqa: F401
from mcore_adapter.platform import quiet_imports

with quiet_imports():
    import megatron.core.ssm.gated_delta_net  # noqa: F401

# A full collection of all this takes half a second, and DeepSpeed asks for one for each engine.
gc.collect()
gc.freeze()
