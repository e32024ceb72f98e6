"""Data of ROLL: files, columns, domains."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from roll.migrate.job import Job

ROWS = {"answer": "ground_truth", "tag": "tag"}
"""Names of the columns that ROLL's data sets for RLVR have."""


def put_prompts(job: Job, tags: Sequence[str], role: str = "actor_train") -> None:
    """Write sources of prompts and validation sets of an RLVR run.

    Args:
        tags: tags that rewards or teachers take; empty if every row has the same.
        role: role whose `data_args` name the files.
    """
    args = f"{role}.data_args"
    files, key = _files(job, args), f"{args}.file_name"
    weights = _weights(job, args, files)
    sources = [_source(job, args, file, tags, weights.get(file)) for file in files]
    told = [f"{args}.messages", f"{args}.prompt", f"{args}.tag"]
    told += [f"{args}.domain_interleave_probs"] if weights else []
    job.put("data.sources", sources, key, *told)
    job.why(f"{args}.response", "prompts have no responses; the answer is the column ground_truth")
    _put_pictures(job, args)
    if files and tags:
        job.ask(
            "data.sources: rows of ROLL have the columns messages (or prompt), ground_truth and "
            "tag; correct `columns` if yours have others"
        )
    job.why(f"{args}.domain_interleave_probs", "a weight is that of a file here, not of a domain")
    if job.keys.has(f"{args}.domain_interleave_probs") and not weights and len(files) > 1:
        shares = job.keys.raw(f"{args}.domain_interleave_probs")
        job.ask(f"data.sources: give each file its `weight`; ROLL's shares of domains are {shares}")
    template = job.keys.text(f"{args}.template") or job.keys.text("global_template")
    if template in ("empty", "base"):
        own = job.keys.has(f"{args}.template")
        job.put("data.chat_template", False, f"{args}.template" if own else "global_template")


def put_validation(job: Job, tags: Sequence[str]) -> bool:
    """Write validation sets of an RLVR run; return whether there are any.

    Args:
        tags: tags that rewards take.
    """
    args = "validation.data_args"
    files = _files(job, args, ask=False)
    if not files:
        job.why("eval_steps", "there is no validation set")
        return False
    sets: dict[str, Any] = {}
    for file in files:
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", PurePath(file).stem) or "held_out"
        while name in sets:
            name += "_"
        sets[name] = _source(job, args, file, tags, None)
    job.put("validation.sets", sets, f"{args}.file_name", f"{args}.messages", f"{args}.prompt")
    job.count("eval_steps", "validation.every")
    return True


def _files(job: Job, args: str, *, ask: bool = True) -> list[str]:
    """Return the files that `data_args` name; one to be named if there is none and `ask`."""
    files = job.keys.texts(f"{args}.file_name")
    if not files and ask:
        job.ask("data.sources: the file names no data; name it")
        return ["NAME/THE-DATA"]
    return files


def _source(
    job: Job, args: str, file: str, tags: Sequence[str], weight: float | None
) -> dict[str, Any]:
    """Return a source of prompts."""
    prompt = job.keys.text(f"{args}.prompt")
    messages = None if prompt else job.keys.text(f"{args}.messages") or "messages"
    columns: dict[str, Any] = {"prompt": prompt, "messages": messages}
    columns["answer"] = ROWS["answer"]
    if prompt:
        job.why(f"{args}.messages", "`prompt` names the column")
    if tags:
        columns["tag"] = job.keys.text(f"{args}.tag") or ROWS["tag"]
    images = job.keys.text(f"{args}.image") or job.keys.text(f"{args}.images")
    if images:
        columns["images"] = images
    source: dict[str, Any] = {"path": file, "columns": columns}
    if weight is not None:
        source["weight"] = weight
    return source


def _weights(job: Job, args: str, files: Sequence[str]) -> dict[str, float]:
    """Return the weight of each file, if the names of the files tell which domain each is of; else
    nothing."""
    key = f"{args}.domain_interleave_probs"
    shares = {name: job.keys.number(f"{key}.{name}") for name in job.keys.names(key)}
    told = {name: float(share) for name, share in shares.items() if share}
    if len(told) != len(shares) or len(told) != len(files) or len(files) < 2:
        return {}
    found: dict[str, float] = {}
    for domain, share in told.items():
        marks = [_plain(domain), _plain(domain.split("_")[0])]
        for mark in marks:
            fitting = [file for file in files if mark and mark in _plain(PurePath(file).stem)]
            if len(fitting) == 1:
                found[fitting[0]] = share
                break
    if len(found) != len(files):
        return {}
    job.ask("data.sources: weights are those of ROLL's domains, by the names of the files; look")
    return found


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _put_pictures(job: Job, args: str) -> None:
    """Write the sizes of pictures."""
    for end in ("min", "max"):
        for key in (f"{args}.image_{end}_pixels", f"{args}.{end}_pixels"):
            if job.keys.whole(key):
                job.count(key, f"data.pictures.{end}_pixels")
    for key in ("image", "images"):
        if job.keys.text(f"{args}.{key}"):
            job.keys.use(f"{args}.{key}")
