"""Defaults for keys that a `config.json` leaves out: those of the config classes of transformers.

Only keys that tables and fields read are listed. A key without a default must be in the file. The
defaults are copied here because importing transformers takes seconds; a test compares them with the
classes of transformers.
"""

from __future__ import annotations

from mcore_adapter.models.defaults.common import Defaults
from mcore_adapter.models.defaults.dense import DENSE
from mcore_adapter.models.defaults.sparse import SPARSE
from mcore_adapter.models.defaults.vision import LANGUAGE

DEFAULTS: dict[str, Defaults] = {**DENSE, **SPARSE, **LANGUAGE}
"""Defaults of each `model_type`."""
