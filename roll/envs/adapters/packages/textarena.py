"""Games of textarena: `textarena:ID`.

The policy reads each message of the game once, as the conversation keeps what it has read. In games
of several players it has one seat; an opponent without a model plays the others.
"""

from __future__ import annotations

import importlib
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import AdapterError

MOVE = re.compile(r"\[[^\[\]\n]{1,40}\]")
MAX_OPPONENT_TURNS = 200
"""Largest number of turns that the opponents take before the policy has its next one."""


def prepare(
    name: str,
    kwargs: Mapping[str, Any],
    players: int = 1,
    seat: int = 0,
    opponent: str | None = None,
) -> Callable[[], TextArenaEnv]:
    """Return the function that makes the game of one episode; one is made to look at it.

    Args:
        name: ID of the game. Wrappers of the ID that change observations are left out.
        kwargs: keyword arguments for it.
        players: number of players.
        seat: number of the player that the policy is, from 0.
        opponent: who plays the others: `random` (one of the moves in brackets that the last message
            of the game names, as `Available Moves: '[0]', '[4]'`), or the import path of a function
            from the text that a player reads to the text of its move.

    Raises:
        AdapterError: there is no such game, or the players do not fit.
    """
    import textarena

    registry = textarena.envs.registration.ENV_REGISTRY
    if name not in registry:
        stem = name.split("-")[0].lower()
        like = [known for known in registry if known.lower().startswith(stem)]
        raise AdapterError(f"textarena has no {name!r} (it has {', '.join(like or registry)})")
    if not 0 <= seat < players:
        raise AdapterError(
            f"adapter.seat: found {seat}; a game of {players} has 0 to {players - 1}"
        )
    if players > 1 and opponent is None:
        raise AdapterError(
            "adapter.opponent: a game of several players needs one: random, or the import path of "
            "a function from the text of the game to a move"
        )
    move = None if opponent is None else _mover(opponent)
    first = textarena.make(name, **kwargs)
    try:
        first.reset(num_players=players, seed=0)
    except AssertionError as error:
        raise AdapterError(
            f"{name} refuses {players} players ({error}); set the number of its players, and who "
            "plays the others (adapter: {players: 2, opponent: random})"
        ) from None
    return lambda: TextArenaEnv(textarena.make(name, **kwargs), players, seat, move)


def _mover(opponent: str) -> Callable[[str], str]:
    """Return the function that makes the moves of the opponents.

    AdapterError if `opponent` is neither `random` nor an import path.
    """
    if opponent == "random":
        return _random_move
    module, _, attribute = opponent.partition(":")
    if not (module and attribute.isidentifier()):
        raise AdapterError(
            f"adapter.opponent: found {opponent!r}; expected random, or 'package.module:function'"
        )
    found: Callable[[str], str] = getattr(importlib.import_module(module), attribute)
    return found


def _random_move(text: str) -> str:
    """Return one of the moves in brackets behind the last `Available`, or else of the text; an
    empty text if there are none."""
    moves = MOVE.findall(text[max(text.lower().rfind("available"), 0) :]) or MOVE.findall(text)
    return random.choice(moves) if moves else text[:0]


class TextArenaEnv:
    """Game of textarena from the seat of one player."""

    def __init__(
        self, game: Any, players: int, seat: int, move: Callable[[str], str] | None
    ) -> None:
        """Take a game, and the seat of the policy.

        Args:
            game: game that is not reset yet.
            players: number of players.
            seat: number of the policy's player, from 0.
            move: function from what an opponent reads to its move; None: there are no opponents.
        """
        self._game = game
        """Game with its wrappers, which change actions."""
        self._bare = game
        while hasattr(self._bare, "env"):
            self._bare = self._bare.env
        self._players = players
        self._seat = seat
        self._move = move
        self._invalid = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin the game, with the moves of opponents before the policy's first turn.

        `options` are ignored. RuntimeError if the game is over before that turn.
        """
        self._game.reset(num_players=self._players, seed=seed)
        if self._play_others():
            raise RuntimeError("the game was over before the policy had a turn")
        return self._read(), {"invalid": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Make the policy's move and those of the opponents.

        The reward is that of the policy's seat at the end of the game, 0 before. `info` has
        `invalid`, the number of refused moves, and at the end `success` and `invalid_end`.
        """
        done, _ = self._game.step(action=action)
        done = done or self._play_others()
        text = self._read()
        info: dict[str, Any] = {"invalid": self._invalid}
        if not done:
            return text, 0.0, False, False, info
        rewards, told = self._bare.close()
        reward = float((rewards or {}).get(self._seat, 0.0))
        told = (told or {}).get(self._seat, {})
        info |= {"success": reward >= 1, "invalid_end": bool(told.get("invalid_move", False))}
        reason = str(told.get("reason", ""))
        return f"{text}\n{reason}".strip(), reward, True, False, info

    def close(self) -> None:
        """Do nothing: games hold no resources, and their `close` is for the end of a game."""

    def _play_others(self) -> bool:
        """Let the others move until it is the policy's turn; return whether the game is over.
        RuntimeError after `MAX_OPPONENT_TURNS`."""
        for _ in range(MAX_OPPONENT_TURNS):
            state = self._bare.state
            if getattr(state, "done", False):
                return True
            if self._move is None or state.current_player_id == self._seat:
                return False
            player, said = self._bare.get_observation()
            done, _ = self._game.step(action=self._move(self._text(said, player)))
            if done:
                return True
        raise RuntimeError(f"the opponents took {MAX_OPPONENT_TURNS} turns in a row")

    def _read(self) -> str:
        """Return what the policy's player has been told since its last turn."""
        said = self._bare.state.observations[self._seat]
        self._bare.state.observations[self._seat] = []
        for _, message, kind in said:
            self._invalid += kind.name == "GAME_ADMIN" and "invalid" in message.lower()
        return self._text(said, self._seat)

    def _text(self, said: list[tuple[int, str, Any]], player: int) -> str:
        """Return messages of a game as text, without those that `player` wrote."""
        names = self._bare.state.role_mapping
        lines = []
        for speaker, message, _ in said:
            if speaker == player:
                continue
            by_game = speaker == -1
            lines.append(
                message if by_game else f"[{names.get(speaker, f'Player {speaker}')}] {message}"
            )
        return "\n".join(lines)
