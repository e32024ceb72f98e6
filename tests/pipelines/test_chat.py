"""`roll chat` on a run that has really trained: answers, turns and log-probs against transformers
alone, rewards against their formula, checkpoints, and Ctrl-C in a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.runs import ROOT, run_local, write_task

pytestmark = pytest.mark.slow
TOKENS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run, beside the code of its rewards."""
    folder = tmp_path_factory.mktemp("chat")
    sampling = {"max_new_tokens": TOKENS, "ignore_eos": True}
    run_local(write_task(folder, sampling=sampling, validation={}, reference=None, algorithm={}))
    return folder / "out"


def command(run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "roll.cli", "chat", str(run), *options]


def chat(run: Path, typed: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Talk through a pipe."""
    return subprocess.run(
        command(run, *options),
        input=typed,
        cwd=run.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def answers(run: Path, typed: str, *options: str) -> list[dict[str, Any]]:
    done = chat(run, typed, "--json", *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def likeliest(model: Path, messages: list[dict[str, str]]) -> tuple[str, list[float]]:
    """Greedy answer of a model and the log-prob of each token, by forward passes alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    before, values = len(tokens), []
    for _ in range(TOKENS):
        with torch.no_grad():
            logprobs = policy(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
        tokens.append(int(logprobs.argmax()))
        values.append(float(logprobs.max()))
    return tokenizer.decode(tokens[before:], skip_special_tokens=True), values


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]


def test_a_pipe_gets_one_answer_a_line_and_turns_follow_one_another(run: Path) -> None:
    typed = "1 + 2 =\nand 3?\n/reset\nand 3?\n/system be brief\n1 + 2 =\n//reset\n/quit\n4\n"
    found = answers(run, typed, "sampling.temperature=0")
    system = [{"role": "system", "content": "be brief"}]
    first, brief = (likeliest(run / "hf", [*s, *turns("1 + 2 =")]) for s in ([], system))
    second = likeliest(run / "hf", turns("1 + 2 =", first[0], "and 3?"))
    alone = likeliest(run / "hf", turns("and 3?"))
    slash = likeliest(run / "hf", [*system, *turns("1 + 2 =", brief[0], "/reset")])
    assert [one["response"] for one in found] == [first[0], second[0], alone[0], brief[0], slash[0]]
    for one, (_, values) in zip(found, (first, second, alone, brief, slash), strict=True):
        assert one["logprobs"] == pytest.approx(values, abs=1e-4)
    assert second[1] != pytest.approx(alone[1], abs=1e-3)
    assert found[1]["finish"] == "length"


def test_answers_are_text_with_log_probs_and_the_rewards_of_the_run(run: Path) -> None:
    done = chat(run, "1 + 2 =\n", "seed=5", "--logprobs", "--reward")
    assert done.returncode == 0, done.stderr
    text, cut, logprobs, reward = done.stdout.splitlines()
    assert cut.startswith("[cut off")
    assert len(text) <= TOKENS
    assert logprobs.startswith("log-probs: ")
    share = sum(char.isdigit() for char in text) / max(1, len(text))
    assert reward == f"reward digits: {share:.4g} (length {len(text)})"
    (again,) = answers(run, "1 + 2 =\n", "seed=5")
    assert again["response"] == text
    mean = sum(again["logprobs"]) / TOKENS
    assert logprobs.endswith(f"mean {mean:.3f}")


def test_rows_are_conversations_of_their_own_and_have_expected_answers(
    run: Path, tmp_path: Path
) -> None:
    (run.parent / "answered.py").write_text(
        "def answered(sample):\n"
        "    return float(sample.answer == '42') + 2 * (sample.extra.get('level') == 'hard')\n"
    )
    config = (run / "config.yaml").read_text()
    changed = tmp_path / "out"
    changed.mkdir()
    (changed / "hf").symlink_to(run / "hf")
    (changed / "config.yaml").write_text(
        config.replace("test_run_rewards:digits", "answered:answered")
    )
    rows = [{"answer": "42"}, {"answer": "3"}, {"answer": "42", "level": "hard"}]
    rows = [{"prompt": "1 + 2 =", **row} for row in rows]
    typed = "".join(json.dumps(row) + "\n\n" for row in rows)  # empty lines are no rows
    done = subprocess.run(
        command(changed, "--json", "--rows", "--reward", "sampling.temperature=0"),
        input=typed,
        cwd=run.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["rewards"]["digits"]["score"] for one in found] == [1.0, 0.0, 3.0]
    expected, _ = likeliest(run / "hf", turns("1 + 2 ="))
    assert [one["response"] for one in found] == [expected] * 3


def test_a_checkpoint_is_the_policy_of_its_step(run: Path) -> None:
    greedy = ("sampling.temperature=0",)
    (last,) = answers(run, "1 + 2 =\n", *greedy)
    (same,) = answers(run, "1 + 2 =\n", *greedy, "--checkpoint", "4")
    (before,) = answers(run, "1 + 2 =\n", *greedy, "--checkpoint", "2")
    assert same["logprobs"] == pytest.approx(last["logprobs"], abs=1e-5)
    assert before["logprobs"] != pytest.approx(last["logprobs"], abs=1e-5)


@pytest.mark.parametrize(
    ("typed", "options", "says"),
    [
        ("1" * 600 + "\n", (), "the model takes 512 with its answer; /reset begins anew"),
        ("no row\n", ("--rows",), "--rows: 'no row' is no JSON"),
        ('{"text": "1"}\n', ("--rows",), "expected an object with the text `prompt`"),
        ('{"prompt": "1", "anwser": "2"}\n', ("--rows",), "did you mean 'answer'?"),
        ("1\n", ("sampling.temperatur=0",), "did you mean"),
        ("1\n", ("--checkpoint", "3"), "has no complete checkpoint of step [3]"),
    ],
)
def test_mistakes_are_told_and_end_a_pipe(
    run: Path, typed: str, options: tuple[str, ...], says: str
) -> None:
    done = chat(run, typed, *options)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.split())


def test_an_unknown_command_in_a_pipe_is_told_and_what_follows_is_answered(run: Path) -> None:
    done = chat(run, "/rest\n1 + 2 =\n", "--json")
    assert done.returncode == 0, done.stderr
    assert "there is no command /rest; did you mean '/reset'?" in " ".join(done.stderr.split())
    assert [json.loads(line)["prompt"] for line in done.stdout.splitlines()] == ["1 + 2 ="]


class Terminal:
    """A chat in a terminal."""

    def __init__(self, run: Path, *options: str, **environment: str) -> None:
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            command(run, *options),
            cwd=run.parent,
            env=os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb"} | environment,
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def write(self, text: str) -> None:
        """Type something, and forget what was seen before."""
        self.seen = ""
        os.write(self._end, text.encode())

    def wait_for(self, text: str, count: int = 1, timeout_s: float = 120) -> None:
        self.wait_until(lambda: self.seen.count(text) >= count, repr(text), timeout_s)

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
        end_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < end_s, f"no {what} in {self.seen[-2000:]!r}"
            if select.select([self._end], [], [], 0.1)[0]:
                self.seen += os.read(self._end, 4096).decode(errors="replace")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._end)


@contextmanager
def terminal(run: Path, *options: str, **environment: str) -> Iterator[Terminal]:
    made = Terminal(run, *options, **environment)
    try:
        yield made
    finally:
        made.close()


def test_ctrl_c_stops_the_answer_and_not_the_session(run: Path) -> None:
    with terminal(run, "sampling.max_new_tokens=480") as shell:
        shell.wait_for("> ")
        shell.write("1 + 2 =\n")
        shell.wait_for("\n")  # the echo
        size = len(shell.seen)
        shell.wait_until(lambda: len(shell.seen) >= size + 5, "the beginning of an answer")
        shell.process.send_signal(signal.SIGINT)
        shell.wait_for("[stopped]")
        assert len(shell.seen) < size + 480
        shell.wait_for("> ")
        shell.write("/reset\n")
        shell.wait_for("> ")
        shell.process.send_signal(signal.SIGINT)  # it drops an unfinished line
        shell.wait_for("> ", count=2)
        shell.write("/nonsense\n")
        shell.wait_for("there is no command /nonsense")
        shell.wait_for("> ")
        shell.write("/quit\n")
        assert shell.process.wait(60) == 0


def test_ctrl_d_ends_the_session_where_an_answer_is_asked_for(run: Path) -> None:
    with terminal(run, "--reward") as shell:
        shell.wait_for("> ")
        shell.write("1 + 2 =\n")
        shell.wait_for("expected answer (or nothing): ")
        shell.write("\x04")
        assert shell.process.wait(60) == 0
        assert "Error" not in shell.seen


def test_a_signal_to_end_leaves_no_model_behind(run: Path, tmp_path: Path) -> None:
    with terminal(run, "--checkpoint", "2", TMPDIR=str(tmp_path)) as shell:
        shell.wait_for("> ")
        assert list(tmp_path.glob("roll-chat-*"))
        shell.process.send_signal(signal.SIGTERM)
        assert shell.process.wait(60) == 128 + signal.SIGTERM
        assert not list(tmp_path.glob("roll-chat-*"))


# The thread takes the signal, so the wait of readline, in the main thread, is not interrupted: as
# if it had come just before the wait.
WAITING = """
import signal, threading, time
from roll.commands.chat.session import typed_lines
from roll.distributed.processes.shutdown import exit_at_hangup

def send():
    time.sleep(1)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

with exit_at_hangup():
    threading.Thread(target=send).start()
    next(typed_lines())
"""


def test_a_signal_that_does_not_interrupt_the_wait_for_a_key_ends_it_nevertheless() -> None:
    end, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], stdin=other, stdout=other, stderr=other
    )
    os.close(other)
    try:
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
        os.close(end)
