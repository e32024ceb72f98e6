"""`roll chat`: from a run or a model to a session with one engine."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from roll.commands.chat.conversation import Conversation
from roll.commands.chat.judging import Judges
from roll.commands.chat.session import COMMANDS, Session, piped_lines, typed, typed_lines
from roll.commands.chat.speaker import speaking
from roll.commands.eval.models import Examinee, find_models, make_folder
from roll.config import load_config as load_run_file
from roll.config.evaluation import ChatConfig, ServedConfig
from roll.config.loading.question_sets import load_chat
from roll.config.offline_base import OfflineConfig
from roll.config.rlvr_base import RlvrBase
from roll.config.run import RunConfig
from roll.config.sections.data import OwnTemplateConfig, RenderConfig
from roll.core.errors import ConfigError
from roll.core.threads.loop_thread import LoopThread
from roll.core.types import SamplingParams
from roll.data.chat.variables import check_variables
from roll.distributed.cluster import Launcher
from roll.distributed.local import LocalLauncher
from roll.distributed.on_ray.resources import ResourceManager
from roll.distributed.processes.shutdown import exit_at_hangup
from roll.models.fetch import fetch
from roll.models.load import load_config, load_tokenizer
from roll.models.vocabulary import check_token_ids
from roll.platform.machine import count_gpus
from roll.rewards.decoding import make_decode
from roll.strategy.installed import check_backend


@dataclass(frozen=True, slots=True)
class Wish:
    """Model and settings of a session, as the user names them."""

    model: str
    """Output folder of a run, folder of a model, or a name on the hub."""
    overrides: tuple[str, ...] = ()
    """Values `key=value` of `ChatConfig`, which win over the run."""
    checkpoint: int | None = None
    engine: str | None = None
    """None: hf without a GPU, else that of the run, or vllm."""


@dataclass(frozen=True, slots=True)
class Shown:
    """Choice of what is shown of an answer beside its text."""

    logprobs: bool = False
    reward: bool = False
    as_json: bool = False
    rows: bool = False
    """Lines are JSON objects."""


def chat(wish: Wish, shown: Shown, out: Console, remarks: Console) -> None:
    """Talk until the input ends.

    Args:
        out: gets the answers.
        remarks: gets everything else.

    Raises:
        RollError: the model cannot be served, or a line of a pipe cannot be answered.
    """
    in_terminal = sys.stdin.isatty()
    with exit_at_hangup(), ExitStack() as undo:
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="roll-chat-")))
        steps = () if wish.checkpoint is None else (wish.checkpoint,)
        [model] = find_models([wish.model], steps, scratch)
        run = _run_of(wish.model)
        judges = None
        if shown.reward:
            if run is None:
                raise ConfigError(f"--reward: {wish.model} is no run; only a run has rewards")
            judges = Judges(run, Path.cwd())
        config = config_of(wish, model, run)
        check_backend(config.actor_infer.strategy)
        with redirect_stdout(sys.stderr):  # DeepSpeed logs to it, and answers may be JSON there
            make_folder(model, trust_remote_code=config.model.trust_remote_code)
        fetch([config.model])
        tokenizer = load_tokenizer(config.model)
        check_token_ids({"sampling": config.sampling}, tokenizer)
        check_variables("data.chat_template_kwargs", config.data.chat_template_kwargs, tokenizer)
        own = getattr(config.actor_infer.strategy, "max_model_len", None)
        max_tokens = min(filter(None, (config.context, _positions(config), own)))
        conversation = Conversation(tokenizer, config.data, max_tokens)
        launcher = undo.enter_context(_launching(config))
        loop = undo.enter_context(LoopThread("roll-chat"))
        speaker = undo.enter_context(speaking(config, launcher, loop, max_tokens))
        session = Session(
            speaker,
            conversation,
            SamplingParams(**config.sampling.model_dump()),
            tokenizer,
            make_decode(tokenizer),
            out,
            remarks,
            judges=judges,
            logprobs=shown.logprobs,
            as_json=shown.as_json,
            seed=config.seed,
            ask=typed if in_terminal and not shown.rows else None,
        )
        if in_terminal:
            kind = config.actor_infer.strategy.kind
            remarks.print(f"{model.name} on {kind}\n{COMMANDS}", markup=False, style="dim")
        lines = typed_lines() if in_terminal else piped_lines(sys.stdin)
        session.run(lines, rows=shown.rows, goes_on=in_terminal)


def _run_of(folder: str) -> RunConfig | None:
    """Return the settings of the run in a folder; None if it holds none."""
    file = Path(folder).expanduser() / "config.yaml"
    return load_run_file(file, import_code=False).config if file.is_file() else None


def config_of(wish: Wish, model: Examinee, run: RunConfig | None) -> ChatConfig:
    """Return how the model talks: sampling and prompts as in the run, on one device, by the engine
    that the user, the machine or the run names."""
    settings: dict[str, Any] = {"model": {"path": model.path}}
    engine: dict[str, Any] = {"kind": wish.engine or ("vllm" if count_gpus() else "hf")}
    if run is not None:
        settings["model"]["dtype"] = run.train_model.dtype
    if isinstance(run, RlvrBase | OfflineConfig):
        settings["data"] = _template_of(run.data, wish.overrides)
    if isinstance(run, RlvrBase):
        role = run.actor_infer
        if wish.engine is None and count_gpus():
            engine = role.strategy.model_dump(mode="json")
        settings["model"]["dtype"] = role.dtype or run.train_model.dtype
        settings["sampling"] = run.sampling.model_dump(mode="json")
    devices = engine.get("tp", 1) * engine.get("pp", 1)
    settings["pools"] = {"all": f"0-{devices - 1}" if devices > 1 else "0"}
    settings["actor_infer"] = {"pool": "all", "strategy": engine}
    return load_chat(settings, wish.overrides)


def _template_of(data: RenderConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Return how the run makes a text of messages; ConfigError if a class of the user's does it,
    and no override names something else."""
    found: dict[str, Any] = {"chat_template_kwargs": data.chat_template_kwargs}
    own: object = data.chat_template
    if isinstance(own, bool):
        return found | {"chat_template": own}
    assert isinstance(own, OwnTemplateConfig)
    if not any(re.match(r"data\.chat_template[.=]", text) for text in overrides):
        raise ConfigError(
            f"the run renders messages with {own.kind!r} (data.chat_template), and `roll chat` "
            "imports no code of a run; set data.chat_template=true to talk by the template of "
            "the tokenizer"
        )
    return found


def _positions(config: ServedConfig) -> int | None:
    """Return the largest number of tokens that the model was made for; None if it does not say."""
    settings = load_config(config.model).get_text_config().to_dict()
    found = settings.get("max_position_embeddings")
    return found if isinstance(found, int) else None


@contextmanager
def _launching(config: ServedConfig) -> Iterator[Launcher]:
    """Start the launcher of the engine: hf runs in this process, the others in one of their own."""
    if config.actor_infer.strategy.kind == "hf":
        with LocalLauncher() as local:
            yield local
    else:
        with ResourceManager(config.cluster, config.pools) as ray:
            yield ray
