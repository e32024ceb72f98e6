"""`Session`: lines of the user, commands among them, and the answers of the model."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from roll.commands.chat.conversation import Conversation
from roll.commands.chat.judging import Judges, Question, as_data
from roll.commands.chat.show import TextStream, end_of, logprob_line, verdict_lines
from roll.commands.chat.speaker import Speaker
from roll.config.errors import UserError, nearest
from roll.core.completion import Completion
from roll.core.errors import DataError
from roll.core.types import SamplingParams
from roll.rewards.decoding import Decode

COMMANDS = """\
/reset        forget the turns
/system TEXT  begin anew with a system message; without TEXT: with none
/help         this list
/quit         end; so does Ctrl-D. Ctrl-C stops an answer
//...         a line that begins with /"""
LOOK_EVERY_S = 0.25
"""Time between two looks for a signal while the user types, in seconds."""
NAMES = tuple(re.findall(r"^/\w+", COMMANDS, re.MULTILINE))


class Quit(Exception):
    """The user has ended the session."""


@dataclass
class Session:
    """A conversation in a terminal or through a pipe."""

    speaker: Speaker
    conversation: Conversation
    sampling: SamplingParams
    tokenizer: PreTrainedTokenizerBase
    decode: Decode
    out: Console
    """Console that gets the answers."""
    remarks: Console
    """Console that gets everything else."""
    judges: Judges | None = None
    """Rewards that judge each answer; None: nobody does."""
    logprobs: bool = False
    """Print the log-prob of each token."""
    as_json: bool = False
    """Print each answer as a JSON object, with all that is known of it."""
    seed: int = 0
    """Seed of the first answer; later ones have the numbers after it."""
    ask: Callable[[str], str] | None = None
    """Function that asks the user for the expected answer; None: nobody can be asked."""
    _answers: int = field(default=0, init=False)

    def run(self, lines: Iterable[str], *, rows: bool, goes_on: bool) -> None:
        """Answer one line after another.

        Args:
            lines: what the user writes.
            rows: every line is a JSON object with `prompt`, and perhaps `answer` and `tag`, and a
                conversation of its own.
            goes_on: go on after a mistake of the user, as in a terminal.

        Raises:
            UserError: a line cannot be answered, and the session does not go on.
        """
        for line in lines:
            if not line.strip():
                continue
            try:
                if rows:
                    self.conversation.say_first(self.conversation.system)
                    self._answer(question_of(line))
                else:
                    self._take(line)
            except Quit:
                return
            except KeyboardInterrupt:  # while a reward judges, or a question is asked
                if not goes_on:
                    raise
                self.out.print("[stopped]", style="dim", markup=False)
            except UserError as error:
                if not goes_on:
                    raise
                self.out.print(str(error), style="red", markup=False)

    def _take(self, line: str) -> None:
        """Do what a line says: a command, or a turn of the conversation."""
        if not line.startswith("/") or line.startswith("//"):
            self._answer(Question(line.removeprefix("/")))
            return
        command, _, rest = line.strip().partition(" ")
        if command == "/quit":
            raise Quit
        if command == "/reset":
            self.conversation.say_first(self.conversation.system)
        elif command == "/system":
            self.conversation.say_first(rest.strip() or None)
        elif command == "/help":
            self.out.print(COMMANDS, markup=False)
        else:
            # No error, which would end a pipe: the lines after it can still be answered.
            told = f"there is no command {command}{nearest(command, NAMES)}\n{COMMANDS}"
            self.remarks.print(told, style="red", markup=False)

    def _answer(self, question: Question) -> None:
        """Answer a turn, and print what is known of the answer."""
        if self.judges is not None and self.ask is not None and not question.answer:
            try:
                question = replace(question, answer=self.ask("expected answer (or nothing): "))
            except EOFError:  # Ctrl-D
                raise Quit from None
        whole, prompt = self.conversation.prompt_of(question.text)
        room = self.conversation.max_tokens - len(prompt)
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, room))
        seed = self.seed + self._answers
        self._answers += 1
        stream = None if self.as_json else TextStream(self.out, self.decode)
        completion = self.speaker.answer(
            prompt, sampling, seed, stream.take if stream is not None else lambda *_: None
        )
        text = sampling.text_of(completion, self.decode)
        if stream is not None:
            stream.end(text)
        self.conversation.add(question.text, text)
        self._tell(question, whole, prompt, completion, text)

    def _tell(
        self,
        question: Question,
        whole: str,
        prompt: tuple[int, ...],
        completion: Completion,
        text: str,
    ) -> None:
        """Print why an answer ended, its log-probs and its rewards, as far as asked for."""
        verdicts = []
        if self.judges is not None:
            verdicts = self.judges.judge(question, whole, prompt, completion, text)
        if self.as_json:
            told: dict[str, Any] = {
                "prompt": question.text,
                "response": text,
                "finish": completion.finish.value,
                "tokens": list(completion.tokens),
                "logprobs": list(completion.logprobs),
            }
            if self.judges is not None:
                told["rewards"] = {one.reward: as_data(one) for one in verdicts}
            self.out.out(json.dumps(told, ensure_ascii=False), highlight=False)
            return
        if (why := end_of(completion)) is not None:
            self.out.print(why, style="dim", markup=False)
        if self.logprobs:
            pieces = [str(self.tokenizer.decode([token])) for token in completion.tokens]
            colours = self.out.is_terminal and not self.out.no_color
            self.out.print(logprob_line(pieces, completion.logprobs, colours=colours))
        for line in verdict_lines(verdicts):
            self.out.print(line, style="cyan", markup=False)


def question_of(line: str) -> Question:
    """Return the row of a line of `--rows`.

    Raises:
        DataError: it is no JSON object, has no text `prompt`, or a key that looks like `answer`.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"--rows: {line!r} is no JSON: {error}") from None
    known = {"prompt", "answer", "tag"}
    read = {key: row[key] for key in known & row.keys()} if isinstance(row, dict) else {}
    if "prompt" not in read or not all(isinstance(value, str) for value in read.values()):
        raise DataError(
            f"--rows: {line!r}: expected an object with the text `prompt`, and perhaps the texts "
            "`answer` and `tag`; further keys are for the rewards"
        )
    extra = {key: value for key, value in row.items() if key not in known}
    for key in extra:
        if meant := nearest(key, {"answer"} - row.keys()):  # `tags` is a likely column
            raise DataError(f"--rows: {line!r}: unknown key {key!r}{meant}")
    return Question(read["prompt"], read.get("answer", ""), read.get("tag"), extra)


def typed_lines() -> Iterator[str]:
    """Yield the lines that a user types, until Ctrl-D. Ctrl-C drops a line that is not finished."""
    import readline  # noqa: F401 - gives `input` a history and keys to edit with

    while True:
        try:
            yield typed("> ")
        except KeyboardInterrupt:
            sys.stdout.write("\n")
        except EOFError:
            sys.stdout.write("\n")
            return


def typed(question: str) -> str:
    """Return the line that a user types after a question.

    readline looks for signals only when one interrupts its wait. One that comes just before would
    lie there until a key is pressed, so a timer interrupts the wait.
    """
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, LOOK_EVERY_S, LOOK_EVERY_S)
        return input(question)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def piped_lines(stream: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the standard input, without the marks that Windows puts at the begin of a
    text and at the end of each line."""
    for number, line in enumerate(stream):
        yield (line if number else line.removeprefix("\ufeff")).rstrip("\r\n")
