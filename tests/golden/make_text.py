"""Writes text.json: pairs of texts with ROUGE of rouge-score and BLEU of sacreBLEU.

pip install rouge-score==0.1.2 sacrebleu==2.6.0
python -m tests.golden.make_text
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

OUT = Path(__file__).with_name("text.json")
WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat,",
    "mat.",
    "U.S.",
    "3.5",
    "1,000",
    "9-11",
    "well-known",
    "(see)",
    '"quoted"',
    "don't",
    "&amp;",
    "50%",
    "x=y",
    "end!",
    "Café",
    "今天",
    "A",
    "The",
    "CAT",
    "https://a.org/b",
    "-",
    "...",
    "—",
    "rôle",
]
MEASURES = ("rouge1", "rouge2", "rougeL")


def main() -> None:
    rng = random.Random(0)
    scorer = RougeScorer(list(MEASURES))
    rows = []
    for _ in range(150):
        base = [rng.choice(WORDS) for _ in range(rng.randint(0, 14))]
        references = [_changed(rng, base) for _ in range(rng.choice((1, 1, 2, 3)))]
        text = _changed(rng, base)
        rouge = {name: list(s) for name, s in scorer.score(references[0], text).items()}
        bleu = sacrebleu.sentence_bleu(text, references).score
        chars = sacrebleu.sentence_bleu(text, references, tokenize="char").score
        rows.append(
            {"text": text, "references": references, "rouge": rouge, "13a": bleu, "char": chars}
        )
    OUT.write_text(json.dumps(rows, indent=0) + "\n", encoding="utf-8")


def _changed(rng: random.Random, words: list[str]) -> str:
    kept = [word for word in words if rng.random() < 0.8]
    extra = [rng.choice(WORDS) for _ in range(rng.choice((0, 0, 1, 3)))]
    place = rng.randint(0, len(kept))
    return rng.choice((" ", " ", "\n")).join(kept[:place] + extra + kept[place:])


if __name__ == "__main__":
    main()
