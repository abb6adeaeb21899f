"""What an emulated engine says: tokens that are a pure function of the text so far.

The state of a text is a polynomial hash over its tokens, so that a prompt is read in one numpy
pass and one more token costs one multiplication. Because a token depends on nothing but the text
before it, any engine goes on exactly where another stopped, as greedy decoding does, and a wrong
KV cache (another text's state) shows as wrong tokens.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MASK = (1 << 64) - 1
MULTIPLIER = 6364136223846793005
"""Knuth's multiplier for 64-bit linear congruential generators; odd, hence invertible."""
_CHUNK_TOKENS = 4096


def _powers(count: int) -> npt.NDArray[np.uint64]:
    """Return MULTIPLIER^(count-1) … MULTIPLIER^0, modulo 2^64."""
    ascending = np.full(count, MULTIPLIER, dtype=np.uint64)
    ascending[0] = 1
    return np.multiply.accumulate(ascending)[::-1]


_POWERS = _powers(_CHUNK_TOKENS)


def text_state(token_ids: Sequence[int], state: int = 0) -> int:
    """Return the 64-bit state after `token_ids`, going on from `state`; 0 is the empty text."""
    ids = np.asarray(token_ids, dtype=np.uint64) + np.uint64(1)
    for start in range(0, len(ids), _CHUNK_TOKENS):
        chunk = ids[start : start + _CHUNK_TOKENS]
        part = int(np.sum(chunk * _POWERS[_CHUNK_TOKENS - len(chunk) :], dtype=np.uint64))
        state = (state * pow(MULTIPLIER, len(chunk), 1 << 64) + part) & MASK
    return state


def corrupt(state: int, salt: int) -> int:
    """Return the state of a KV cache that holds something else; never `state` itself."""
    return state ^ (mix(salt) | 1)


def mix(value: int) -> int:
    """Scramble 64 bits (the finaliser of splitmix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What an emulated model may say.

    Attributes:
        alphabet: Ids that it draws from; not empty.
        eos_token_id: The id that ends a text; not in the alphabet.
        mean_output_tokens: Mean of the geometric length of texts that end by themselves; >= 1.
    """

    alphabet: Sequence[int]
    eos_token_id: int
    mean_output_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRules:
    """When a text ends.

    Attributes:
        max_tokens: At the latest after that many; >= 1.
        min_tokens: Not by itself before that many.
        ignore_eos: Never by end of sequence.
        stop_token_ids: With any of these.
        seed_state: Mixed into every draw; 0 for greedy texts.
        output_tokens: Ends by end of sequence after exactly that many, and not before; None leaves
            it to the text. An experiment's way to fix a length that no router is told.
    """

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: AbstractSet[int] = frozenset()
    seed_state: int = 0
    output_tokens: int | None = None

    @property
    def open_ended(self) -> bool:
        """Whether only max_tokens ends the text."""
        return self.ignore_eos and not self.stop_token_ids and self.output_tokens is None


class Continuation:
    """The text that an emulated model says after a prompt, made as far as it is asked for."""

    __slots__ = ("_draw_state", "_eos_below", "_rules", "_tokens", "_vocabulary", "stop_token_id")

    def __init__(self, prompt_state: int, rules: StopRules, vocabulary: Vocabulary) -> None:
        self._draw_state = prompt_state
        self._rules = rules
        self._vocabulary = vocabulary
        self._eos_below = int((1 << 32) / vocabulary.mean_output_tokens)
        self._tokens: list[int] = []
        self.stop_token_id: int | None = None

    def __repr__(self) -> str:
        """Show how far it was made and what ended it."""
        return f"Continuation(made={len(self._tokens)}, stop_token_id={self.stop_token_id})"

    def length_tokens(self) -> int:
        """Return how many tokens the whole text has, at most max_tokens, at least 1."""
        if self._rules.open_ended:
            return self._rules.max_tokens
        return len(self._extended(self._rules.max_tokens))

    def between(self, start: int, end: int) -> list[int]:
        """Return tokens `start` to `end` of the text; fewer where it is shorter."""
        return self._extended(end)[start:end]

    def _extended(self, count: int) -> list[int]:
        """Make the text at least `count` tokens long, unless it ends before."""
        tokens, state = self._tokens, self._draw_state
        while len(tokens) < count and self.stop_token_id is None:
            token = self._draw(state, len(tokens))
            tokens.append(token)
            state = (state * MULTIPLIER + token + 1) & MASK
        self._draw_state = state
        return tokens

    def _draw(self, state: int, position: int) -> int:
        """Return the token after `state`; sets `stop_token_id` where it ends the text."""
        bits = mix(state ^ self._rules.seed_state)
        alphabet = self._vocabulary.alphabet
        token = alphabet[(bits >> 32) % len(alphabet)]
        if self._rules.open_ended or position < self._rules.min_tokens:
            return token
        if self._ends(bits, position):
            token = self._vocabulary.eos_token_id
            self.stop_token_id = token
        elif token in self._rules.stop_token_ids:
            self.stop_token_id = token
        return token

    def _ends(self, bits: int, position: int) -> bool:
        if self._rules.output_tokens is not None:
            return position + 1 == self._rules.output_tokens
        return not self._rules.ignore_eos and (bits & 0xFFFFFFFF) < self._eos_below
