"""`roll init`: a run file that `roll check` takes."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from roll.commands.begin.answers import Questions
from roll.commands.begin.run_file import run_file
from roll.commands.preflight import inspect
from roll.config.errors import UserError
from roll.config.loading.compose import LoadedConfig, load_config
from roll.config.run import RunConfig


def write_run_file(questions: Questions, gpus: int, out: Path) -> RunConfig:
    """Write the run file that the answers make; return its config. `out` appears whole, or not at
    all.

    Args:
        gpus: number of GPUs of this machine.

    Raises:
        UserError: `out` exists, an answer is wrong or missing, or `roll check` would refuse the
            file, for the reasons in the message.
    """
    if out.exists() or out.is_symlink():
        raise UserError(f"{out} exists already; name another file: --out FILE.yaml")
    if not out.parent.is_dir():
        raise UserError(f"the folder of {out} does not exist; make it first")
    text = run_file(questions.settle(gpus), out)
    loaded: LoadedConfig | None = None
    with tempfile.TemporaryDirectory() as folder:
        aside = Path(folder) / out.name
        aside.write_text(text, encoding="utf-8")
        try:
            loaded = replace(load_config(aside), path=out)
            wrong = [str(found.error) for found in inspect(loaded) if not found.only_here]
        except UserError as error:
            wrong = [str(error).replace(str(aside), str(out))]
    if loaded is None or wrong:
        told = "\n".join(wrong)
        raise UserError(f"nothing was written: `roll check` would refuse the run file\n{told}")
    with out.open("x", encoding="utf-8") as file:  # refuses what has appeared meanwhile
        file.write(text)
    return loaded.config
