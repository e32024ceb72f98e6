"""Run files of ROLL: which pipeline they are of, and what all of them have."""

from __future__ import annotations

from roll.config.errors import ConfigError
from roll.config.sections.lifecycle import SERVICES
from roll.migrate.from_roll import agentic, offline, rlvr
from roll.migrate.from_roll.reasons import LAST_PARTS, PREFIXES, WHOLE_KEYS
from roll.migrate.job import Job

PIPELINES = {
    "rlvr": rlvr.translate,
    "agentic": agentic.translate,
    "sft": offline.translate_sft,
    "dpo": offline.translate_dpo,
    "distill": offline.translate_distill,
}


def translate_roll(job: Job) -> None:
    """Translate a run file of ROLL; ConfigError if there is no such pipeline here."""
    name = pipeline_of(job)
    job.draft.put("pipeline", name, "by the roles of the file")
    _put_general(job)
    PIPELINES[name](job)
    per_node = job.keys.whole("num_gpus_per_node")
    job.put_pools(per_node if per_node and per_node > 0 else None, ["num_gpus_per_node"])
    _name_rest(job)


def pipeline_of(job: Job) -> str:
    """Return our name of the pipeline that a file is for.

    Raises:
        ConfigError: it is for the diffusion pipeline.
    """
    keys = job.keys
    words = ("strategy_args.strategy_name", "worker_cls", "model_args.model_name_or_path")
    told = " ".join(
        [keys.text("pretrain") or ""]
        + [keys.text(f"{role}.{word}") or "" for role in keys.source.tree for word in words]
    ).lower()
    if any(mark in told for mark in ("diffsynth", "diffusion", "wan2")) or keys.has("reward_fl"):
        raise ConfigError(
            f"{keys.source.path}: is for a diffusion pipeline (reward feedback learning); roll "
            "trains language models, and has no such pipeline"
        )
    opd = keys.text("pure_opd_pipeline_type")
    if opd == "agentic" or keys.has("custom_envs") or keys.has("train_env_manager"):
        return "agentic"
    if keys.has("sft_train"):
        return "sft"
    if keys.has("student") and keys.has("teacher"):
        return "distill"
    if keys.has("student_train") or keys.has("rewards") or keys.has("actor_infer"):
        return "rlvr"
    if keys.has("chosen_key") or keys.has("rejected_key") or keys.has("beta"):
        return "dpo"
    if keys.has("reference") and keys.has("actor_train"):
        return "dpo"
    return "sft" if keys.has("actor_train") else "rlvr"


def _put_general(job: Job) -> None:
    """Write what runs of all pipelines have."""
    keys = job.keys
    name = keys.text("exp_name")
    folder = keys.text("output_dir") or "./output"
    job.put(
        "output_dir",
        f"{folder.rstrip('/')}/{name}" if name else folder,
        "output_dir",
        "exp_name",
        note="a run has a folder of its own",
    )
    if job.count("seed", "seed", low=0) is None:
        job.put("seed", 42)
    _put_resume(job)
    job.count("save_steps", "checkpoint.every")
    job.count("max_ckpt_to_keep", "checkpoint.keep_last")
    job.move(
        "rpc_timeout", "cluster.call_timeout_s", "number", lambda v: float(v) if v > 0 else None
    )
    _put_trackers(job)


def _put_resume(job: Job) -> None:
    """Write where a run continues from; ROLL's checkpoints cannot be read."""
    key = "resume_from_checkpoint"
    value = job.keys.raw(key)
    if isinstance(value, str) and value.lower() not in ("true", "false", ""):
        job.why(key, "checkpoints of ROLL are not read; start from its exported model")
        job.ask(f"model.path: the file continues from {value}; name the model exported from it")
        return
    job.put("resume", "auto" if str(value).lower() == "true" else "never", key)


def _put_trackers(job: Job) -> None:
    """Write the trackers; metrics.jsonl and the terminal have all metrics in any case."""
    names = job.keys.texts("track_with")
    known = {"tensorboard", "stdout", *SERVICES}
    if names and any(name in known for name in names):
        job.put("track.tensorboard", "tensorboard" in names, "track_with")
    project = "tracker_kwargs.project"
    value = job.keys.text(project) or job.keys.text("exp_name") or "roll"
    job.put_services(names, value, "track_with", project)
    others = [name for name in names if name not in known]
    if others:
        job.why("track_with", f"there is no tracker {', '.join(others)}; metrics.jsonl has all")
    job.why("tracker_kwargs", "trackers have no further settings; tensorboard is in `output_dir`")


def _name_rest(job: Job) -> None:
    """Say why, for every key of which nothing was made."""
    for leaf in job.keys.unanswered():
        dotted = ".".join(leaf)
        if not job.keys.has(dotted):
            continue
        reason = WHOLE_KEYS.get(leaf[0]) or WHOLE_KEYS.get(leaf[-1])
        for part in reversed(leaf):
            reason = reason or LAST_PARTS.get(part)
            starts = (why for start, why in PREFIXES.items() if part.startswith(start))
            reason = reason or next(starts, None)
        if reason is not None:
            job.why(dotted, reason)
