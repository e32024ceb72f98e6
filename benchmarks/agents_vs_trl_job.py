"""TRL's side of `agents_vs_trl.py`: the frozen lake as an environment of TRL, and the training.

This file runs in TRL's environment, so it must not import roll.

    python benchmarks/agents_vs_trl_job.py job.json
"""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

HOLES = 0.2
"""Share of the fields that are holes."""
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""(rows down, columns to the right) of each move."""


class Lake:
    """Frozen lake, not slippery, as TRL wants an environment: `move` is the tool of the policy, and
    `get_reward` tells the reward of an episode. Maps, rules and limits are those of roll's
    `frozen_lake`.

    TRL has no word for the end of an episode. It ends one whose next result has no room in
    `max_completion_length`, and forgets this result. So the last result is too long. Otherwise TRL
    would ask the model for one more turn, which would take it more time.
    """

    def __init__(self, size: int, max_turns: int, too_long: int) -> None:
        """Take the settings of all episodes.

        Args:
            size: number of rows and columns.
            max_turns: largest number of moves.
            too_long: number of tokens of a result that ends the episode.
        """
        self._size, self._max_turns = size, max_turns
        self._end = "." * too_long

    def reset(self, seed: int, **_: Any) -> str:
        """Begin an episode on the map of a seed; return the map."""
        self._turns, self._at, self._won = 0, (0, 0), False
        self._fields = self._made(random.Random(seed))
        return self._shown()

    def move(self, direction: str) -> str:
        """
        Go one field over the ice.

        Args:
            direction: left, down, right or up.

        Returns:
            The map.
        """
        down, right = MOVES[direction]
        last = self._size - 1
        row, column = self._at[0] + down, self._at[1] + right
        self._at = min(max(row, 0), last), min(max(column, 0), last)
        self._turns += 1
        field = self._fields[self._at[0]][self._at[1]]
        self._won = field == "G"
        over = field in "GO" or self._turns == self._max_turns
        return self._end if over else self._shown()

    def get_reward(self) -> float:
        """Return 1 at the goal, 0 elsewhere."""
        return float(self._won)

    def _made(self, dice: random.Random) -> list[str]:
        """Return a random map with a way to the goal."""
        while True:
            drawn = [[dice.random() < HOLES for _ in range(self._size)] for _ in range(self._size)]
            fields = ["".join("O" if hole else "_" for hole in row) for row in drawn]
            fields[0] = "_" + fields[0][1:]
            fields[-1] = fields[-1][:-1] + "G"
            if self._has_way(fields):
                return fields

    def _has_way(self, fields: list[str]) -> bool:
        reached: set[tuple[int, int]] = set()
        ahead = [(0, 0)]
        while ahead:
            row, column = ahead.pop()
            inside = 0 <= row < self._size and 0 <= column < self._size
            if inside and (row, column) not in reached and fields[row][column] != "O":
                reached.add((row, column))
                ahead += [(row + down, column + right) for down, right in MOVES.values()]
        return (self._size - 1, self._size - 1) in reached

    def _shown(self) -> str:
        rows = [list(row) for row in self._fields]
        rows[self._at[0]][self._at[1]] = "P"
        return "\n".join(map("".join, rows))


def played(
    prompts: list[list[int]], completions: list[list[int]], masks: list[list[int]]
) -> dict[str, float]:
    """Return means over episodes: turns, tokens that the policy wrote, and those of the
    environment.

    Args:
        prompts: tokens before the first turn of each episode.
        completions: all later tokens.
        masks: 1 for each of the later tokens that the policy wrote, 0 for the others.
    """
    count = len(prompts)
    written = sum(map(sum, masks))
    heard = sum(map(len, prompts)) + sum(map(len, completions)) - written
    turns = sum(sum(a < b for a, b in pairwise([0, *mask])) for mask in masks)
    return {"turns": turns / count, "written": written / count, "heard": heard / count}


def train(job: dict[str, Any]) -> None:
    """Train with GRPOTrainer and its `environment_factory`, and write one line to `steps_file`
    after each optimizer step."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    line: dict[str, float] = {}

    class Timed(GRPOTrainer):
        def _generate(self, prompts: list[Any]) -> Any:
            begun = time.perf_counter()
            generated = super()._generate(prompts)
            line["rollout_s"] = time.perf_counter() - begun
            opened, completions, masks = generated[:3]
            line.update(played(opened, completions, masks))
            return generated

    class Lines(TrainerCallback):
        """Callback that writes a line when the trainer logs a step, after its optimizer step."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "completions/mean_length" not in logs:
                return
            numbers = {name: float(value) for name, value in logs.items()}
            with Path(job["steps_file"]).open("a") as file:
                file.write(json.dumps(numbers | line) + "\n")

    trainer = Timed(
        model=job["model"],
        args=GRPOConfig(**job["settings"]),
        train_dataset=Dataset.from_list([{"seed": seed} for seed in range(job["tasks"])]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        environment_factory=lambda: Lake(**job["lake"]),
        callbacks=[Lines()],
    )
    trainer.train()


if __name__ == "__main__":
    train(json.loads(Path(sys.argv[1]).read_text()))
