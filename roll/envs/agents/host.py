"""`AgentHost`: runs agents of other frameworks, whose requests are the turns of the policy.

An agent asks the policy whenever it likes. Each request becomes an observation, so for the rest of
the framework an agent is an environment: it "says" the messages of its request, and "hears" the
answer. An episode has one request at a time; an agent that asks several times at once waits.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from roll.config.sections.environment import EnvironmentConfig
from roll.core.errors import DataError, EnvironmentFailedError, RollError
from roll.core.types import Message
from roll.data.chat.tool_messages import from_user, with_calls_as_text
from roll.data.chat.turns import Turns
from roll.envs.agents import responses
from roll.envs.agents.answers import Answer, answer_of, chunks, response
from roll.envs.agents.api import AgentTask
from roll.envs.agents.conversations import Conversations
from roll.envs.agents.ends import observed_end
from roll.envs.agents.requests import ChatRequest, RequestError
from roll.envs.agents.running import AgentRun, AgentRunner
from roll.envs.contexts import Context, check_history
from roll.envs.hearing import heard
from roll.envs.observed import Observed
from roll.envs.tools.formats.api import Format
from roll.envs.tools.formats.loading import check_marks, load_format, told_format

logger = logging.getLogger(__name__)

MODEL = "policy"
"""Name of the policy at the endpoint."""
ENDED = "the episode has ended"


@dataclass(eq=False)
class _Episode:
    """Agent that runs."""

    name: str
    key: str
    requests: asyncio.Queue[tuple[ChatRequest, asyncio.Future[Answer]]] = field(
        default_factory=asyncio.Queue
    )
    """Requests that wait for the policy, each with the future of its answer."""
    conversations: Conversations = field(default_factory=Conversations)
    last_tokens: dict[int, int | None] = field(default_factory=dict)
    """Last token of the latest turn in each conversation; None if the turn was cut."""
    rows: dict[int, int] = field(default_factory=dict)
    """Row in which the next turn of each conversation is written."""
    lengths: dict[int, int] = field(default_factory=dict)
    """Number of tokens in the context of each conversation, for clients that count them."""
    contexts: dict[int, Context] = field(default_factory=dict)
    """Context of each conversation, with `history: fork`."""
    begun: int = 0
    """Number of rows that have begun."""
    prompt_end: str = ""
    """End of the text before the next turn."""
    asking: tuple[int, ChatRequest, asyncio.Future[Answer]] | None = None
    """Request that the policy answers now, with the number of its conversation."""
    calls: dict[str, int] = field(default_factory=lambda: {"tool_calls": 0, "malformed": 0})
    """Numbers of calls of tools, for metrics."""
    agent: AgentRun | None = None

    def begin_row(self, number: int) -> None:
        """Let a conversation go on in a new row."""
        self.rows[number] = self.begun
        self.begun += 1


@dataclass(eq=False)
class AgentHost:
    """Agents of running episodes, by the name of the episode; all calls come from one event loop.
    It has the methods of `EnvHost`."""

    name: str
    """Name of the environment in the config."""
    config: EnvironmentConfig
    run: Callable[[AgentTask], Any]
    """Function of the user that runs an agent and returns the reward."""
    turns: Turns
    _running: dict[str, _Episode] = field(default_factory=dict, init=False)
    _by_key: dict[str, _Episode] = field(default_factory=dict, init=False)
    _runner: AgentRunner = field(init=False)
    _server: web.AppRunner | None = field(default=None, init=False)
    _url: str = field(default="", init=False)
    _serving: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held while the endpoint starts: several episodes may begin at once."""
    _format: Format = field(init=False)

    def __post_init__(self) -> None:
        """Raise ConfigError if the format of calls does not exist, or the chat template cannot do
        what `history` asks."""
        check_history(self.name, self.config, self.turns)
        self._format = load_format(self.config.tool_format)
        self._runner = AgentRunner(self.name, self.run)

    async def open(self, episode: str, seed: int, options: Mapping[str, Any]) -> Observed:
        """Start the agent of an episode; return its first request.

        Raises:
            EnvironmentFailedError: the agent raised, ended or took too long before its first
                request.
        """
        running = _Episode(episode, secrets.token_urlsafe(16))
        self._running[episode] = self._by_key[running.key] = running
        await self._serve()
        if episode not in self._running:
            raise EnvironmentFailedError(
                f"environment {self.name!r}: episode {episode} was ended before it began"
            )
        task = AgentTask(self._url, running.key, MODEL, seed, dict(options))
        running.agent = self._runner.begin(task, lambda: self._running.get(episode) is running)
        first = await self._next(running, self.config.reset_timeout_s)
        if first.over:
            raise EnvironmentFailedError(
                f"environment {self.name!r}: the agent ended without a request to the policy; does "
                "it ask at task.base_url with task.api_key?"
            )
        return first

    async def act(
        self,
        episode: str,
        action: str | array[int],
        last: int | None,
        wrote: array[int] | None = None,
    ) -> Observed:
        """Answer the request of an agent; return its next one, or its end.

        Args:
            episode: name of the episode.
            action: text of the turn; or its tokens, if the agent sees special tokens.
            last: last token of the turn; None if the turn was cut.
            wrote: all tokens of the turn, which a client is told the number of; needed with
                `history: fork`.

        Raises:
            EnvironmentFailedError: the agent raised or took too long; or no such episode runs here.
        """
        running = self._running.get(episode)
        if running is None or running.asking is None:
            raise EnvironmentFailedError(
                f"environment {self.name!r} does not run episode {episode}; its worker has been "
                "replaced"
            )
        number, request, answer = running.asking
        final = last is None or not request.tools
        said = heard(action, self.turns, self.config, running.prompt_end, final=final)
        try:
            found = replace(
                self._taken(said, request, cut=last is None),
                context_tokens=running.lengths[number],
                tokens=len(wrote or ()),
                tells_tokens=request.tells_tokens,
            )
            running.conversations.answered(number, found, said)
            running.asking = None  # not before: `close` refuses a request without an answer
        except RollError:
            raise
        except Exception as error:  # a border: no text of the policy may end the run
            raise EnvironmentFailedError(
                f"environment {self.name!r}: cannot read what the policy wrote (`tool_format: "
                f"{self.config.tool_format}`): {error!r}"
            ) from error
        running.calls["tool_calls"] += len(found.calls) + found.malformed
        running.calls["malformed"] += found.malformed
        running.last_tokens[number] = last
        running.lengths[number] += found.tokens
        if number in running.contexts:
            assert wrote is not None
            running.contexts[number].wrote(wrote)
        if not answer.done():  # the client may have gone
            answer.set_result(found)
        return await self._next(running, self.config.step_timeout_s)

    def _taken(self, said: str, request: ChatRequest, *, cut: bool) -> Answer:
        """Return the answer to a request that a turn of the policy is."""
        format = None
        if request.tools:
            format = told_format(self._format, self.turns.tokenizer, request.tools)
        return answer_of(said, request, format, cut=cut)

    async def close(self, episode: str) -> None:
        """End the agent of an episode; requests that it still sends are refused."""
        running = self._running.pop(episode, None)
        if running is None:
            return
        self._by_key.pop(running.key, None)
        if running.agent is not None:  # first: a refusal is an error, after which it may go on
            await self._runner.end(running.agent)
        waiting = [running.asking[2]] if running.asking else []
        while not running.requests.empty():
            waiting.append(running.requests.get_nowait()[1])
        for answer in waiting:
            answer.cancel()

    async def shut(self) -> None:
        """End all agents and the endpoint."""
        await asyncio.gather(*(self.close(episode) for episode in list(self._running)))
        await self._runner.close()
        if self._server is not None:
            await self._server.cleanup()

    async def _next(self, running: _Episode, limit_s: float) -> Observed:
        """Wait for the next request of an agent, or for its end.

        Requests of an agent that has ended, or whose clients have gone, get no answer: nobody would
        read it.

        Raises:
            EnvironmentFailedError: neither came within `limit_s` seconds, or the agent failed.
        """
        assert running.agent is not None
        ended, clock = running.agent.ended, asyncio.get_running_loop().time
        ends_s = clock() + limit_s
        while not ended.done() and clock() < ends_s:
            asked = asyncio.ensure_future(running.requests.get())
            try:
                await asyncio.wait(
                    {asked, ended},
                    timeout=ends_s - clock(),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if asked.done():
                    request, answer = asked.result()
                    if ended.done():
                        running.requests.put_nowait((request, answer))  # `close` refuses it
                    elif not answer.done():
                        return self._observed(running, request, answer)
            finally:
                asked.cancel()
        if not ended.done():
            why = await self._runner.why_late(running.agent, limit_s)
            raise EnvironmentFailedError(
                f"environment {self.name!r}: the agent neither asked nor ended within {limit_s:g} s"
                f"{why}"
            )
        return observed_end(self.name, ended, running.calls)

    def _observed(
        self, running: _Episode, request: ChatRequest, answer: asyncio.Future[Answer]
    ) -> Observed:
        """Return a request as what an environment says."""
        if request.tools and self.config.special_tokens == "hide":
            check_marks(self.config.tool_format, self.turns.tokenizer)
        follows: int | None = None
        try:
            number, new, begins = running.conversations.place(request)
            running.asking = (number, request, answer)
            text = "\n".join(message.content for message in new)
            if begins:
                tokens, text = self._begun(running, number, request)
            elif self.config.history == "keep":
                tokens = self.turns.reply(new, last=running.last_tokens[number])
            else:
                tokens, rewritten = running.contexts[number].next(
                    new,
                    request.messages,
                    last=running.last_tokens[number],
                    tools=request.tools,
                )
                if rewritten:
                    follows = running.rows[number]
                    running.begin_row(number)
        except (DataError, TypeError, ValueError, RecursionError) as error:  # of templates, nests
            raise EnvironmentFailedError(
                f"environment {self.name!r}: the chat template of the model does not render what "
                f"the agent sends: {error}"
            ) from error
        anew = begins or follows is not None
        running.lengths[number] = len(tokens) + (0 if anew else running.lengths[number])
        running.prompt_end = self.turns.prompt_end(tokens)
        return Observed(
            tokens,
            text,
            prompt_end=running.prompt_end,
            row=running.rows[number],
            follows=follows,
            stop=request.stop,
            max_new_tokens=request.max_new_tokens,
        )

    def _begun(
        self, running: _Episode, number: int, request: ChatRequest
    ) -> tuple[array[int], str]:
        """Begin a conversation; return its tokens and their text."""
        tokens, text = self.turns.opening(self._known(request), request.tools)
        running.begin_row(number)
        if self.config.history == "fork":
            running.contexts[number] = Context(self.turns, tokens)
        return tokens, text

    def _known(self, request: ChatRequest) -> tuple[Message, ...]:
        """Return the messages of a request as the chat template knows them."""
        if self.turns.knows_results:
            return request.messages
        return from_user(tuple(map(with_calls_as_text, request.messages)))

    async def _serve(self) -> None:
        """Start the endpoint, unless it runs; return when it does."""
        async with self._serving:
            if self._server is not None:
                return
            app = web.Application(client_max_size=64 << 20)
            app.router.add_post("/v1/chat/completions", self._chat)
            app.router.add_post("/v1/responses", self._respond)
            app.router.add_get("/v1/models", self._models)
            app.router.add_route("*", "/{path:.*}", self._elsewhere)
            # A request whose client has gone is cancelled, so that it costs no turn.
            server = web.AppRunner(
                app, access_log=None, shutdown_timeout=0.5, handler_cancellation=True
            )
            await server.setup()
            site = web.TCPSite(server, "127.0.0.1", 0)
            await site.start()
            host, port = server.addresses[0][:2]
            self._server, self._url = server, f"http://{host}:{port}/v1"

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _elsewhere(self, http: web.Request) -> web.Response:
        """Say what there is, to a request for anything else."""
        there = "POST /v1/chat/completions, POST /v1/responses and GET /v1/models"
        return _refusal(404, f"{http.method} {http.path} is not supported; there are {there}")

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        """Answer a request in the form of chat completions."""
        return await self._answer(http, ChatRequest.of, response, chunks)

    async def _respond(self, http: web.Request) -> web.StreamResponse:
        """Answer a request in the form of responses."""
        return await self._answer(http, responses.request_of, responses.body_of, responses.events)

    async def _answer(
        self,
        http: web.Request,
        read: Callable[[Any], ChatRequest],
        whole: Callable[[Answer, str], dict[str, Any]],
        pieces: Callable[[Answer, str], Iterator[bytes]],
    ) -> web.StreamResponse:
        """Answer a request of an agent, once the policy has."""
        running = self._by_key.get(http.headers.get("Authorization", "").removeprefix("Bearer "))
        if running is None:
            return _refusal(401, "no episode has this key; it has ended, or never began")
        try:
            request = read(await http.json())
        except RequestError as error:
            return _refusal(400, str(error))
        except (ValueError, LookupError, RecursionError) as error:
            # LookupError is an unknown charset, RecursionError a list in a list in a list
            return _refusal(400, f"the body is no JSON: {error}")
        if self._running.get(running.name) is not running:  # it was ended while the body came
            return _refusal(410, ENDED)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        running.requests.put_nowait((request, answer))
        try:
            found = await answer
        except asyncio.CancelledError:
            if answer.cancelled() and running.name not in self._running:
                return _refusal(410, ENDED)
            raise
        if not request.stream:
            return web.json_response(whole(found, MODEL))
        streamed = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await streamed.prepare(http)
        for piece in pieces(found, MODEL):
            await streamed.write(piece)
        await streamed.write_eof()
        return streamed


def _refusal(status: int, text: str) -> web.Response:
    """Return an answer with an HTTP status of an error, and the reason as OpenAI's clients read
    it."""
    error = {"message": text, "type": "invalid_request_error", "code": status}
    return web.json_response({"error": error}, status=status)
