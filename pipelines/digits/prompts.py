"""What the digits model is asked: many ways to name a digit, in words and numerals."""

from __future__ import annotations

import random
from typing import Final

WORDS: Final = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

TEMPLATES: Final = ("a handwritten {word}", "the digit {numeral}", "a drawing of a {word}", "number {numeral}")
"""The prompts that the model is judged by; `random_prompt` makes these among others."""

_OPENINGS: Final = (
    *("", "", "a", "the", "draw", "draw a", "draw the", "write a", "please draw a", "show me the", "this is a"),
    *("a drawing of a", "a drawing of the", "a picture of a", "an image of the", "a sketch of a", "a photo of the"),
)
_STYLES: Final = ("", "", "", "handwritten", "hand drawn", "hand-drawn", "scribbled", "neat", "bold", "large", "white")
_NOUNS: Final = ("", "", "digit", "number", "numeral", "figure")
_ENDS: Final = (
    *("", "", "", ".", "!", ", please", " in white chalk", " on a blackboard", " on black paper", " with a pen"),
    *(" written by hand", " in ink", " drawn by a child", ", black background"),
)


def prompt(digit: int, variant: int = 0) -> str:
    """Name a digit.

    Args:
        digit: From 0 to 9.
        variant: Which of `TEMPLATES`, counted round and round.

    Returns:
        A prompt.

    Example:
        >>> prompt(7)
        'a handwritten seven'
        >>> prompt(3, variant=1)
        'the digit 3'
    """
    return TEMPLATES[variant % len(TEMPLATES)].format(word=WORDS[digit], numeral=digit)


def random_prompt(digit: int, source: random.Random) -> str:
    """Name a digit in one of some thousands of ways.

    Args:
        digit: From 0 to 9.
        source: Where the choices come from.

    Returns:
        A prompt.
    """
    name = source.choice((WORDS[digit], str(digit)))
    parts = (source.choice(_OPENINGS), source.choice(_STYLES), source.choice(_NOUNS), name)
    text = " ".join(part for part in parts if part) + source.choice(_ENDS)
    return text.capitalize() if source.random() < _CAPITALIZED else text


_CAPITALIZED: Final = 0.2


def vocabulary() -> list[str]:
    """List the words of all prompts, each to be one token.

    Returns:
        Lower-case words and numerals, sorted.

    Example:
        >>> "seven" in vocabulary() and "7" in vocabulary()
        True
    """
    numerals = [str(digit) for digit in range(len(WORDS))]
    texts = [*_OPENINGS, *_STYLES, *_NOUNS, *_ENDS, *WORDS, *numerals]
    words = " ".join(texts).replace("-", " ").replace(",", " ").replace(".", " ").replace("!", " ").split()
    return sorted(set(words))
