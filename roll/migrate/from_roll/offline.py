"""Runs of ROLL on existing rows: SFT, DPO, distillation."""

from __future__ import annotations

from typing import Any

from roll.migrate.from_roll.roles import (
    put_batches,
    put_model,
    put_optimizer,
    put_pool,
    put_scorer,
)
from roll.migrate.from_roll.strategies import train_strategy
from roll.migrate.job import Job

DIVERGENCES = {
    "forward_kl": "forward",
    "reverse_kl": "reverse",
    "adaptive_kl": "adaptive",
    "skewed_forward_kl": "skewed_forward",
    "skewed_reverse_kl": "skewed_reverse",
    "js_divergence": "jensen_shannon",
}


def translate_sft(job: Job) -> None:
    """Translate the file of supervised fine-tuning."""
    role = "sft_train" if job.keys.has("sft_train") else "actor_train"
    _put_learner(job, role, "pretrain")
    completion, prompt = job.keys.text("response_key"), job.keys.text("prompt_key")
    if completion is None and prompt is None:
        args = f"{role}.data_args.messages"
        columns: dict[str, Any] = {"messages": job.keys.text(args) or "messages"}
        _put_rows(job, role, columns, args)
    else:
        columns = {"messages": None, "completion": completion or "response"}
        columns |= {"prompt": prompt or "instruction"}
        _put_rows(job, role, columns, "response_key", "prompt_key")
    job.why("query_key", "join the columns of the question into one")
    job.why("system_key", "`system` of a source has one text for all rows")
    job.put("data.shuffle", False, note="ROLL keeps the order of the rows")


def translate_dpo(job: Job) -> None:
    """Translate the file of a DPO run."""
    _put_learner(job, "actor_train", "pretrain")
    columns: dict[str, Any] = {}
    for name, default in (("chosen", "chosen"), ("rejected", "rejected")):
        columns[name] = job.keys.text(f"{name}_key") or default
    prompt = "actor_train.data_args.prompt"
    prompt = prompt if job.keys.text(prompt) else "prompt_key"
    columns["prompt"] = job.keys.text(prompt) or "prompt"
    _put_rows(job, "actor_train", columns, "chosen_key", "rejected_key", prompt)
    beta = job.keys.number("beta")
    loss: dict[str, Any] = {"kind": "ipo" if job.keys.flag("ipo") else "sigmoid"}
    loss["beta"] = float(beta) if beta is not None and beta > 0 else 0.1
    smoothing = job.keys.number("label_smoothing")
    keys = ["ipo", "beta"]
    if loss["kind"] == "sigmoid" and smoothing is not None and 0 <= smoothing < 0.5:
        loss["label_smoothing"] = float(smoothing)
        keys.append("label_smoothing")
    job.put("loss", loss, *keys)
    job.why("label_smoothing", "ipo has none, or it is out of range")
    if job.draft.get("model.lora") is not None:
        job.why("reference", "the base of the adapter (model.lora) is the reference")
        return
    put_scorer(
        job, "reference", "reference", "reference", job.draft.get("data.max_tokens"), "actor_train"
    )


def translate_distill(job: Job) -> None:
    """Translate the file of a distillation run."""
    _put_learner(job, "student", "student_pretrain", "pretrain")
    columns = {
        "messages": None,
        "prompt": job.keys.text("question_key") or "question",
        "completion": job.keys.text("answer_key") or "answer",
    }
    _put_rows(job, "student", columns, "question_key", "answer_key")
    tokens = job.draft.get("data.max_tokens")
    put_scorer(job, "teacher", "teachers.teacher", "teacher", tokens, "student")
    put_model(job, "teacher", "teachers.teacher.model", "teacher_pretrain")
    for dropped in ("lora", "freeze"):
        job.draft.drop(f"teachers.teacher.model.{dropped}")
    _put_divergence(job)
    share = job.keys.number("distill_loss_weight")
    share = 0.5 if share is None else min(max(float(share), 0.0), 1.0)
    note = "the rest is the share of the text itself"
    job.put("loss.coef", share or 1e-6, "distill_loss_weight", note=note)
    job.put("loss.sft_coef", round(1 - share, 12), "distill_loss_weight")
    top = job.keys.whole("logits_topk")
    if top is None or top > 0:
        job.put("loss.top_k", top or 64, "logits_topk")
    else:
        job.put("loss.top_k", None, "logits_topk", note="0: the whole distribution")
    for key, target in (("kd", "student"), ("teacher", "teacher")):
        name = f"{key}_temperature"
        job.move(name, f"loss.{target}_temperature", "number", _positive)


def _put_divergence(job: Job) -> None:
    """Write the divergence from the teacher."""
    name = job.keys.text("kd_objective") or "forward_kl"
    kind = DIVERGENCES.get(name)
    keys = ["kd_objective"]
    if kind is None:
        job.ask(f"loss.divergence: forward in place of {name}, which does not exist here")
        kind = "forward"
    divergence: dict[str, Any] = {"kind": kind}
    for key, field, kinds in (
        ("skew_lambda", "alpha", ("skewed_forward", "skewed_reverse")),
        ("adaptive_kl_alpha", "head_mass", ("adaptive",)),
    ):
        value = job.keys.number(key)
        if kind in kinds and value is not None and 0 < value < 1:
            divergence[field] = float(value)
            keys.append(key)
        job.why(key, f"the divergence {kind} has no such number")
    job.put("loss.divergence", divergence, *keys)


def _put_learner(job: Job, role: str, *paths: str) -> None:
    """Write model, length of the run, and the role that trains.

    Args:
        paths: keys of the model's path.
    """
    args = f"{role}.training_args"
    steps = job.count("max_steps", "max_steps")
    epochs = job.keys.number(f"{args}.num_train_epochs")
    if epochs is not None and epochs > 0:
        job.put("epochs", float(epochs), f"{args}.num_train_epochs")
    elif steps is None:
        job.put("epochs", 3.0)
    put_model(job, role, "model", *paths)
    number = put_pool(job, role, "actor_train", "train")
    train_strategy(job, role, "actor_train", number)
    put_optimizer(job, role, "actor_train", rl=False)
    tokens = _put_length(job)
    put_batches(job, role, "actor_train", number, tokens)
    rows = job.draft.get("actor_train.samples_per_update")
    comment = job.draft.comment("actor_train.samples_per_update")
    job.draft.drop("actor_train.samples_per_update")
    job.draft.put("data.rows_per_step", rows, comment)


def _put_length(job: Job) -> int:
    """Write the longest sequence; return it."""
    whole = job.keys.whole("sequence_length")
    prompt, response = job.keys.whole("prompt_length"), job.keys.whole("response_length")
    tokens = whole or ((prompt or 0) + (response or 0)) or 2048
    keys = ["sequence_length"] if whole else ["prompt_length", "response_length"]
    job.put("data.max_tokens", max(tokens, 2), *keys)
    for key in ("prompt_length", "response_length"):
        job.why(key, "sequence_length is the longest row")
    return max(tokens, 2)


def _put_rows(job: Job, role: str, columns: dict[str, Any], *keys: str) -> None:
    """Write sources and validation sets of a run on rows.

    Args:
        columns: names of their columns.
        keys: keys that say these names.
    """
    key = f"{role}.data_args.file_name"
    files = job.keys.texts(key)
    if not files:
        files = ["NAME/THE-DATA"]
        job.ask("data.sources: the file names no data; name it")
    sources = [{"path": file, "columns": columns} for file in files]
    job.put("data.sources", sources, key, *keys)
    key = "validation.data_args.file_name"
    held = job.keys.texts(key)
    if held:
        sets = {f"held_out_{i}": {"path": p, "columns": columns} for i, p in enumerate(held)}
        job.put("validation.sets", sets, key)
        job.count("eval_steps", "validation.every")
    job.why("eval_steps", "there is no validation set")
    job.why("validation", "validation is by the loss of held-out rows")


def _positive(value: float) -> float | None:
    return float(value) if value > 0 else None
