"""What a capture is made of: the module's own code, or something that stands in for parts of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Recipe:
    """How a call is captured.

    Attributes:
        compiled: With the compiled forwards that the config asks for.
        static_shapes: Compile for the shapes of this call alone, whatever was compiled before it.
        attention: diffusers' attention backend in place of the module's own; None leaves that.

    Example:
        >>> Recipe().is_exact, Recipe(compiled=True).is_exact
        (True, False)
    """

    compiled: bool = False
    static_shapes: bool = False
    attention: str | None = None

    @property
    def is_exact(self) -> bool:
        """Whether the result must equal eager's bit for bit."""
        return not self.compiled and self.attention is None


PLAIN: Final = Recipe()
