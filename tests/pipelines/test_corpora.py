"""A run whose environment searches a corpus of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pipelines.test_agentic import task
from tests.runs import run_local

FINDER = '''
"""An environment that looks up what the policy says."""

class Finder:
    def listen(self, hearing):
        self.search = hearing.search
    async def reset(self, *, seed=None, options=None):
        self.seed = seed
        return "go", {}
    async def step(self, action):
        found = await self.search("facts", f"fact {self.seed % 10}", 3)
        right = found[0] == f"fact {self.seed % 10}"
        return found[0], float(len(action) % 3), self.seed % 2 == 0, True, {
            "right": right, "passages": len(found)
        }
    def close(self):
        pass
'''


def test_an_environment_finds_what_the_corpus_has(tmp_path: Path) -> None:
    corpus: dict[str, Any] = {"path": str(tmp_path / "facts.txt"), "pool": "all"}
    corpus["model"] = {"path": str(tmp_path / "model")}
    path = task(
        tmp_path,
        environment={"env": "test_run_finder:Finder", "cut_turn": "go_on"},
        corpora={"facts": corpus},
    )
    (tmp_path / "test_run_finder.py").write_text(FINDER)
    (tmp_path / "facts.txt").write_text("".join(f"fact {i}\n" for i in range(10)))
    steps = [each for each in run_local(path, ["max_steps=2"]) if "loss/total" in each]
    assert len(steps) == 2
    for step in steps:
        assert step["reward/words/right"] == 1
        assert step["reward/words/passages"] == 3
        assert step["samples/left_out"] == 0
