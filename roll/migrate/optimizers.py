"""The kind of an optimizer, by the names that other frameworks have for it."""

from __future__ import annotations

from roll.config.sections.optimizers.kinds import OPTIMIZERS
from roll.migrate.job import Job

NAMES = {
    "adam": "adamw",
    "adamw": "adamw",
    "adam8bit": "adamw_8bit",
    "adamw8bit": "adamw_8bit",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adamw_hf": "adamw",
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "fusedadam": "adamw",
    "adafactor": "adafactor",
    "muon": "muon",
    "sgd": "sgd",
}
"""Last part of a name, in small letters -> our kind."""
LOOK = {
    "adafactor": "is relative to the root mean square of each parameter here (the paper has 0.01)",
    "muon": "is multiplied by 0.2 times the root of a matrix's longer side (scale: "
    "match_rms_adamw), so that it can be that of AdamW; scale: original has larger ones",
}
"""Kind -> what its learning rate is."""


def put_kind(job: Job, key: str, target: str) -> None:
    """Write the kind of optimizer of a role, of which backend and settings of AdamW are written
    already. Settings that the kind does not have go to its AdamW, or are left out.

    Args:
        key: key with the name of the optimizer.
    """
    name, out = job.keys.text(key), f"{target}.optimizer"
    if name is None:
        return
    kind = NAMES.get(name.rpartition(".")[2].lower())
    if kind is None:
        job.why(key, f"{name} has no counterpart (known: {', '.join(sorted(set(NAMES.values())))})")
        job.ask(f"{out}.kind: adamw in place of {name}, which does not exist here")
        return
    if kind != "adamw" and job.draft.get(f"{target}.strategy.kind") != "fsdp2":
        job.why(key, f"of the backends only fsdp2 trains with {kind}")
        job.ask(f"{out}.kind: adamw in place of {kind}, which needs {target}.strategy.kind: fsdp2")
        return
    (known,) = (each for each in OPTIMIZERS if each.model_fields["kind"].default == kind)
    for setting, value in list(job.draft.get(out, {}).items()):
        if setting in known.model_fields:
            continue
        if kind == "muon":
            comment = job.draft.comment(f"{out}.{setting}")
            job.draft.put(f"{out}.others.{setting}", value, comment)
        job.draft.drop(f"{out}.{setting}")
    job.put(f"{out}.kind", kind, key)
    if kind in LOOK:
        job.ask(f"{out}.lr: look at it; that of {kind} {LOOK[kind]}")
