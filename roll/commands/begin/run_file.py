"""The text of a commented run file, made of the answers to the questions of `roll init`."""

from __future__ import annotations

import json
import re
from pathlib import Path

from roll.commands.begin.answers import GENERATING, Answers
from roll.commands.begin.columns import CLASSES
from roll.config.loading.written import in_one_line

TRAINED, HELD_OUT = "[0, 0.98]", "[0.98, 1]"
"""Parts of the data, of which the second is for validation."""
_HEAD = """\
# Written by `roll init`. All keys, with their defaults: roll show {name}. What is wrong in here:
# roll check {name}.
pipeline: {pipeline}
output_dir: {output_dir}   # everything that the run writes; the same command again continues it
seed: 0
{length}

model:
  path: {model}
{precision}  # lora: {{rank: 16}}       # train an adapter in place of all weights

{pools}
"""
_GENERATING = """\
actor_train:                # trains the policy
  pool: {train}
  strategy: {{kind: fsdp2}}   # or deepspeed, megatron
  optimizer: {{lr: 1.0e-6, warmup_ratio: 0.05}}   # tiny models want 100 times as much
actor_infer:                # writes the responses
  pool: {infer}
  strategy: {{kind: {engine}}}

"""
_ROWS = """\
actor_train:
  pool: {train}
  strategy: {{kind: {engine}}}
  # tiny models want 100 times as much
  optimizer: {{lr: {lr}, warmup_ratio: 0.05, schedule: cosine}}
"""
_REFERENCE = """\
reference:                  # the start model, frozen
  pool: {train}
"""
_TEACHER = """\
teachers:
  teacher:                  # needs the vocabulary of the model
    pool: {train}
    model: {{path: {reward}}}
"""
_ALGORITHM = """\
# GRPO without a KL term. With one: add {{kind: kl, coef: 0.001}} to `loss`, and a role
# `reference: {{pool: {train}}}`.
algorithm:
  advantage: {{kind: grpo}}
  loss: [{{kind: ppo_clip}}]
  aggregation: token_mean

"""
_END = """\
# Rows that are in no training data tell how much is learned.
{parts}# validation:
#   every: 20
#   sets:
#     held_out: {{{held_out}}}

checkpoint: {{every: 20, keep_last: 2}}
"""
_PARTS = """\
# A hash of the question can choose them: remove the `#` here, and before `part` in `data.sources`.
# Small data needs a larger part, such as [0.8, 1] here and [0, 0.8] there; or name another file.
"""


def run_file(answers: Answers, out: Path) -> str:
    """Return the text of a run file.

    Args:
        out: file that it is for.
    """
    ranks = max(1, answers.gpus // 2 if answers.pipeline in GENERATING else answers.gpus)
    split = answers.pipeline in GENERATING and answers.gpus > 1
    values = {
        "name": out.name,
        "pipeline": answers.pipeline,
        "output_dir": quoted(f"outputs/{out.stem}"),
        "length": _length(answers.pipeline),
        "model": quoted(answers.model),
        "precision": "  dtype: bfloat16\n" if answers.gpus else "",
        "pools": _pools(answers, split),
        "train": "train" if split else "all",
        "infer": "infer" if split else "all",
        "engine": answers.engine,
        "lr": "1.0e-6" if answers.pipeline == "dpo" else "1.0e-5",
        "reward": quoted(answers.reward or ""),
        "held_out": _held_out(answers),
        "parts": "" if answers.data.seeds is not None else _PARTS,
    }
    parts = [_HEAD]
    if answers.pipeline in GENERATING:
        parts += [_GENERATING, _braced(_prompts(answers, ranks)), _ALGORITHM]
    else:
        parts += [_ROWS, *_others(answers), _braced(_rows(answers, ranks))]
    return "".join(part.format(**values) for part in (*parts, _END))


def quoted(text: str) -> str:
    """Return a text as YAML that also fits between braces: as it is if it can only be a text."""
    plain = re.fullmatch(r"[A-Za-z_./~][\w./~-]*(:\w[\w.]*)?", text, re.ASCII)
    unsure = re.fullmatch(r"(yes|no|on|off|y|n|.*:\d.*)", text.lower())
    if plain and not unsure and in_one_line(text) == text:
        return text
    return json.dumps(text, ensure_ascii=False)


def _braced(text: str) -> str:
    """Return a finished text as a template of itself."""
    return text.replace("{", "{{").replace("}", "}}")


def _length(pipeline: str) -> str:
    return (
        "max_steps: 200" if pipeline in GENERATING else "epochs: 1                   # or max_steps"
    )


def _pools(answers: Answers, split: bool) -> str:
    """Return the lines of the cluster and its pools."""
    if not answers.gpus:
        return (
            "# No GPU: the one device stands for all cores, and roles take turns on it.\n"
            "cluster: {platform: cpu}\n"
            'pools: {all: "0"}\n'
        )
    cluster = f"cluster: {{platform: cuda, devices_per_node: {answers.gpus}}}\n"
    if not split:
        return f'{cluster}pools: {{all: "{_span(0, answers.gpus)}"}}   # numbers of GPUs\n'
    half = answers.gpus // 2
    train, infer = _span(0, half), _span(half, answers.gpus)
    return f'{cluster}# Half of the GPUs train.\npools: {{train: "{train}", infer: "{infer}"}}\n'


def _span(first: int, end: int) -> str:
    """Return the devices from `first` to the one before `end`, as pools list them."""
    return str(first) if end == first + 1 else f"{first}-{end - 1}"


def _columns(answers: Answers) -> str:
    """Return the mapping of columns where it differs from the defaults; else an empty text."""
    if answers.data.seeds is not None:
        return ""
    fields = CLASSES[answers.pipeline].model_fields
    changed = {
        field: answers.columns.get(field)
        for field, known in fields.items()
        if answers.columns.get(field) != known.default
    }
    pairs = (f"{f}: {'null' if name is None else quoted(name)}" for f, name in changed.items())
    return f"{{{', '.join(pairs)}}}" if changed else ""


def _source(answers: Answers) -> str:
    """Return the lines of `data.sources`."""
    data, columns = answers.data, _columns(answers)
    if data.seeds is not None:
        return f"    - seeds: {data.seeds}         # tasks that the environment makes\n"
    lines = [f"    - path: {quoted(data.path)}"]
    lines.append(f"      # part: {TRAINED}   # the other rows are for `validation`, below")
    if columns:
        lines.append(f"      columns: {columns}")
    others = [name for name in data.first or () if name not in answers.columns.values()]
    if data.first is None:
        lines.append("      # The columns were not looked at; `columns` names others.")
    elif others and answers.pipeline in GENERATING:
        told = ", ".join(others[:8]).encode("ascii", "replace").decode()
        lines.append(
            f"      # Rewards also see: {''.join(c if c.isprintable() else '?' for c in told)}"
        )
    return "\n".join(lines) + "\n"


def _held_out(answers: Answers) -> str:
    """Return the settings of a set for validation, as a comment shows them."""
    if answers.data.seeds is not None:
        return "seeds: 100, first_seed: 1000000"
    columns = _columns(answers)
    path = f"path: {quoted(answers.data.path)}, part: {HELD_OUT}"
    return path + (f", columns: {columns}" if columns else "")


def _prompts(answers: Answers, ranks: int) -> str:
    """Return `data`, `sampling` and what rewards, for a pipeline with an engine."""
    agentic = answers.pipeline == "agentic"
    longest = "max_episode_tokens: 4096" if agentic else "max_prompt_tokens: 1024"
    text = f"""\
data:
  sources:
{_source(answers)}  prompts_per_step: {ranks * -(-32 // ranks)}      # prompts, not samples
  samples_per_prompt: 8
  {longest}   # longer ones are counted and reported
sampling: {{temperature: 1.0, max_new_tokens: 512}}

"""
    reward = quoted(answers.reward or "")
    if agentic:
        return f"{text}environments:\n  main:\n    env: {reward}\n    max_turns: 16\n\n"
    main = f"{{fn: {reward}{_kwargs(answers)}}}"
    return f"{text}rewards:\n  main: {main}   # docs/rewards.md lists the built-in ones\n\n"


def _kwargs(answers: Answers) -> str:
    """Return the `kwargs` of the reward: of `multiple_choice`, where the options are, and what the
    answer of the first row is."""
    row = answers.data.first
    if answers.reward != "multiple_choice" or row is None:
        return ""
    column = next((name for name in ("choices", "options") if name in row), "choices")
    answer, options = row.get(answers.columns.get("answer") or ""), row.get(column)
    kwargs = {} if column == "choices" else {"choices": column}
    if isinstance(answer, int):
        kwargs["truth"] = "index"
    elif isinstance(options, list) and answer in options:
        kwargs["truth"] = "text"
    pairs = ", ".join(f"{name}: {value}" for name, value in kwargs.items())
    return f", kwargs: {{{pairs}}}" if kwargs else ""


def _others(answers: Answers) -> list[str]:
    """Return the templates of the other roles of a pipeline on rows, and of its loss."""
    if answers.pipeline == "distill":
        return [_TEACHER]
    if answers.pipeline != "dpo":
        return []
    single = answers.columns.get("label") is not None
    kind = "kto}}" if single else "sigmoid, beta: 0.1}}"
    return [_REFERENCE, f"loss: {{{{kind: {kind}\n"]


def _rows(answers: Answers, ranks: int) -> str:
    """Return `data` for a pipeline on rows."""
    return f"""\

data:
  sources:
{_source(answers)}  rows_per_step: {ranks * -(-32 // ranks)}
  max_tokens: 2048          # longer rows are left out and counted (`too_long`)

"""
