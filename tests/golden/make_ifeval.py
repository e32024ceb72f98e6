"""Writes ifeval.jsonl.gz: 1,000 pairs of instructions and answers, and the original's verdicts.

The original is IFEval's code as lm-evaluation-harness has it. It needs an environment of its own:

    pip install lm-eval==0.4.13 langdetect==1.0.9 nltk==3.10.4
    NLTK_DATA=FOLDER python -m tests.golden.make_ifeval      # FOLDER has tokenizers/punkt_tab

The original detects languages with random samples; here langdetect gets the seed 0.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

from langdetect import DetectorFactory
from lm_eval.tasks.ifeval import utils

from tests.golden.ifeval_answers import pairs

OUT = Path(__file__).with_name("ifeval.jsonl.gz")
COUNT, SEED = 1000, 0


def main() -> None:
    DetectorFactory.seed = 0
    random.seed(0)
    lines = []
    for key, row in enumerate(pairs(COUNT, SEED)):
        example = utils.InputExample(key, row["instruction_id_list"], "", row["kwargs"])
        verdicts: dict[str, Any] = {
            "strict": utils.test_instruction_following_strict(example, row["response"]),
            "loose": utils.test_instruction_following_loose(example, row["response"]),
        }
        lines.append(row | {mode: v.follow_instruction_list for mode, v in verdicts.items()})
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    OUT.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
