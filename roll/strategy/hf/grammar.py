"""Grammars of JSON schemas: which tokens may come next (xgrammar)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from roll.core.errors import EngineError


class Grammars:
    """Compiler of JSON schemas for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> None:
        """Keep the tokenizer; xgrammar is imported when the first grammar is needed.

        Args:
            vocab_size: number of logits of the model.
        """
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: Any = None

    def matchers(self, schema: str, siblings: int, eos: frozenset[int]) -> list[Matcher]:
        """Return a matcher for each sibling of a request.

        Args:
            schema: JSON schema, as JSON text.
            siblings: number of siblings.
            eos: ids of the tokens that end a response; they are allowed at the end of the value.

        Raises:
            EngineError: xgrammar is missing, or does not know a part of the schema.
        """
        try:
            import xgrammar
        except ModuleNotFoundError:
            raise EngineError(
                "the hf engine follows a grammar with the package xgrammar, which is missing: pip "
                "install xgrammar"
            ) from None
        if self._compiler is None:
            info = xgrammar.TokenizerInfo.from_huggingface(
                self._tokenizer, vocab_size=self._vocab_size, stop_token_ids=sorted(eos)
            )
            self._compiler = xgrammar.GrammarCompiler(info)
        try:
            compiled = self._compiler.compile_json_schema(schema, any_whitespace=False)
        except RuntimeError as error:
            raise EngineError(f"xgrammar refuses the schema {schema:.200}: {error}") from None
        return [Matcher(compiled, self._vocab_size) for _ in range(siblings)]


class Matcher:
    """State of the grammar of one sibling.

    Args:
        compiled: a grammar that xgrammar has compiled.
        vocab_size: number of logits of the model.
    """

    def __init__(self, compiled: Any, vocab_size: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        self._state = xgrammar.GrammarMatcher(compiled)
        self._mask_1V = xgrammar.allocate_token_bitmask(1, vocab_size)

    def restrict(self, logits_1V: Tensor) -> None:
        """Set the logits of tokens that may not come next to -inf, in place."""
        self._state.fill_next_token_bitmask(self._mask_1V)
        mask_1V = self._mask_1V.to(logits_1V.device)
        self._xgrammar.apply_token_bitmask_inplace(logits_1V, mask_1V)

    def accept(self, token: int) -> None:
        """Advance the grammar by the token that was generated.

        Raises:
            EngineError: the token is not one that may come next.
        """
        if not self._state.accept_token(token):
            raise EngineError(f"the grammar does not allow token {token}")


def restrict(logits_NV: Tensor, matchers: Sequence[Matcher]) -> Tensor:
    """Return the logits `[N, V]` of which each row is restricted by its matcher, float32."""
    logits_NV = logits_NV.float().clone()
    for row, matcher in enumerate(matchers):
        matcher.restrict(logits_NV[row : row + 1])
    return logits_NV
