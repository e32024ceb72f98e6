"""A judge on devices of the run."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from roll.config.sections.services.judge import ClusterJudgeConfig, JudgedConfig
from roll.core.completion import Completion, FinishReason
from roll.core.errors import ConfigError
from roll.core.threads.mailbox import Mailbox, NoAnswerError
from roll.core.types import GenerateRequest, SamplingParams
from roll.data.chat.variables import check_variables
from roll.rewards.judge.question import Answer, Question


class ClusterJudge:
    """Implementation of `Judge` by engines that the driver asks."""

    def __init__(
        self,
        name: str,
        config: ClusterJudgeConfig,
        asked: JudgedConfig,
        mailbox: Mailbox[GenerateRequest, Completion],
    ) -> None:
        """Prepare the judge.

        Args:
            name: name of this worker; ids of requests begin with it.
            config: the judge.
            asked: what the reward asks it.
            mailbox: takes the requests, and gives the answers.
        """
        self._name = name
        self._config = config
        self._asked = asked
        self._mailbox = mailbox
        self._numbers = itertools.count()
        self.identity = {
            "model": config.model.path,
            "dtype": config.dtype or config.model.dtype,
            "temperature": asked.temperature,
            "max_tokens": asked.max_new_tokens,
            "grammar": config.grammar,
            "template_args": config.template_args,
        }

    async def open(self) -> None:
        """Load the tokenizer of the judge.

        Raises:
            ConfigError: it cannot be loaded, has no chat template, or this does not mention one of
                the variables that are set.
        """
        await asyncio.to_thread(self._load)

    async def ask(self, question: Question) -> Answer:
        """Answer a question.

        Raises:
            NoAnswerError: the question is too long, or the engines gave no answer.
        """
        clock = asyncio.get_running_loop().time
        begun_s = clock()
        tokens = await asyncio.to_thread(self._tokens, question.text)
        limit = self._config.max_question_tokens
        if len(tokens) > limit:
            raise NoAnswerError(
                f"the question has {len(tokens)} tokens, more than max_question_tokens = {limit} "
                f"of judge {self._asked.by!r}; raise it, or set longest_response"
            )
        schema = None if question.schema is None else json.dumps(question.schema)
        sampling = SamplingParams(
            temperature=self._asked.temperature,
            max_new_tokens=self._asked.max_new_tokens,
            json_schema=schema if self._config.grammar else None,
        )
        number = next(self._numbers)
        request = GenerateRequest(f"{self._name}/{number}", tokens, sampling, seed=question.seed)
        written = await self._mailbox.ask(request)
        return Answer(
            await asyncio.to_thread(self._text, written),
            complete=written.finish is not FinishReason.LENGTH,
            input_tokens=len(tokens),
            output_tokens=len(written),
            latency_s=clock() - begun_s,
        )

    async def close(self) -> None:
        """Do nothing: the engines are the driver's."""

    def _load(self) -> None:
        """Load the judge's tokenizer; ConfigError if it has no chat template, or this does not know
        the variables that are set."""
        # Most rewards need no tokenizer, which takes memory in each worker.
        from roll.models.load import load_tokenizer
        from roll.rewards.decoding import make_decode

        self._tokenizer: Any = load_tokenizer(self._config.model)
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"judges.{self._asked.by}.model: {self._config.model.path} has no chat template; "
                "use an instruction-tuned model"
            )
        key = f"judges.{self._asked.by}.template_args"
        check_variables(key, self._config.template_args, self._tokenizer)
        self._decode = make_decode(self._tokenizer)
        self._special = sorted(self._tokenizer.all_special_tokens, key=len, reverse=True)

    def _tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens of the question, as the judge's chat template says. Special tokens that
        the text spells out become ordinary text."""
        for special in self._special:
            text = text.replace(special, f"{special[:1]} {special[1:]}")
        tokens = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **self._config.template_args,
        )
        return tuple(tokens)

    def _text(self, written: Completion) -> str:
        """Return the text of an answer, which may be in the object store."""
        text = written.text
        return self._decode(written.tokens) if text is None else text
