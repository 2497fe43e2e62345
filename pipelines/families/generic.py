"""Any pipeline that is not known: its denoisers are wrapped, its prompts stay as long as they are."""

from __future__ import annotations

from typing import Final

from ..family import Family

GENERIC: Final = Family(name="generic", pipelines=(), text=None, default_requests=())
