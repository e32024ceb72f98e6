"""Cost of tokenizing many conversations for supervised fine-tuning: first start and later starts.

The rows are made here: random words in conversations of about `--tokens` tokens, and a byte-level
BPE tokenizer, which is trained on some of them. Each start is a process of its own. It reads the
rows as a run does (`load_texts`), then draws `--draws` rows in the order of training. Printed are
seconds, CPU seconds of the driver and of its processes, and the largest memory of the driver: all
of it, and without the pages of mapped files, which the kernel takes back when others need memory.

    python benchmarks/rows.py [--rows 100000] [--tokens 1000] [--folder outputs/rows] [--keep]
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the script also runs by its path

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS, TURNS = 20_000, 4


def make_rows(path: Path, rows: int, tokens: int) -> None:
    """Write conversations of `TURNS` turns with about `tokens` tokens each, if they are not there;
    most words are one token."""
    if path.exists():
        return
    drawn = random.Random(0)
    letters = "etaoinshrdlu"
    words = ["".join(drawn.choices(letters, k=drawn.randint(2, 9))) for _ in range(WORDS)]
    part = path.with_suffix(".part")
    with part.open("w") as file:
        for number in range(rows):
            size = tokens // TURNS
            said = (" ".join(drawn.choices(words[:2000], k=size)) for _ in range(TURNS))
            turns = [
                {"role": ("user", "assistant")[i % 2], "content": text}
                for i, text in enumerate(said)
            ]
            turns[0]["content"] = f"{number} {turns[0]['content']}"
            file.write(json.dumps({"messages": turns}) + "\n")
    part.rename(path)


def make_tokenizer(folder: Path, rows: Path) -> None:
    """Write a byte-level BPE tokenizer, trained on the first rows, if it is not there."""
    if folder.exists():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with rows.open() as file:
        some = [line for line, _ in zip(file, range(2000), strict=False)]
    texts = (turn["content"] for line in some for turn in json.loads(line)["messages"])
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = CHATML
    fast.save_pretrained(folder)


def start(folder: Path, rows: Path, draws: int) -> dict[str, Any]:
    """Load the rows as a run does, in this process; return what it cost."""
    began = time.perf_counter()
    from transformers import AutoTokenizer

    from roll.config.sections.data import TextDataConfig
    from roll.data.examples import load_texts
    from roll.data.mixing import Sampler
    from roll.data.store.load import RowStore

    imported = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    told = {"sources": ({"path": str(rows)},), "rows_per_step": 64, "max_tokens": 4096}
    data = TextDataConfig.model_validate(told, strict=False)
    loaded = load_texts(data.sources, data, tokenizer, None, RowStore.at(str(folder / "kept")))
    read = time.perf_counter()
    sampler, tokens = Sampler(loaded, seed=0), 0
    for _ in range(draws):
        row = next(sampler)
        sampler.settle(row)
        tokens += len(row.sequences[0])
    drawn = time.perf_counter()
    own, others = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "rows": len(loaded),
        "tokens_per_row": round(tokens / max(draws, 1)),
        "import_s": imported - began,
        "load_s": read - imported,
        "draw_us_per_row": 1e6 * (drawn - read) / max(draws, 1),
        "driver_cpu_s": own.ru_utime + own.ru_stime,
        "processes_cpu_s": others.ru_utime + others.ru_stime,
        "driver_peak_mb": own.ru_maxrss / 1024,
        "driver_anonymous_mb": int(status["RssAnon"].split()[0]) / 1024,
        "fingerprint": loaded.fingerprint,
    }


def main() -> None:
    """Make the rows, start twice, and print what each start cost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path("outputs/rows"))
    parser.add_argument("--keep", action="store_true", help="Keep the folder for another run.")
    parser.add_argument("--start", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    rows = args.folder / f"{args.rows}x{args.tokens}.jsonl"
    if args.start:
        print(json.dumps(start(args.folder, rows, args.draws)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    make_rows(rows, args.rows, args.tokens)
    make_tokenizer(args.folder / "tokenizer", rows)
    print(f"{rows}: {rows.stat().st_size / 1e9:.2f} GB", flush=True)
    for what in ("first start", "second start"):
        command = [sys.executable, __file__, "--start", *sys.argv[1:]]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        told = json.loads(done.stdout.splitlines()[-1])
        print(
            what,
            json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in told.items()}),
        )
        sys.stdout.flush()
    if not args.keep:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
