"""Keep torch's portable compile artifacts in files, so that the next process starts without compiling.

Every process writes a file of its own, all that it compiled or found: processes that run at once never overwrite each
other, and one that compiles a new shape does not lose those that it had no use for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import Any, Final

import torch

_log = logging.getLogger("bcg")
_MAGIC: Final = b"bcg compile artifacts 1\n"
_MAX_FILES: Final = 8
"""Files of one model; the oldest goes first."""


class ArtifactStore:
    """Loads and saves the compile artifacts of one model on one kind of device.

    Args:
        folder: Where its files are. Artifacts are code: the folder must be one that only trusted users write to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / f"{time.time_ns()}-{os.getpid()}.bin"
        self._known: set[tuple[str, str]] = set()
        self._loaded = False

    def load(self) -> None:
        """Give torch what was stored, once; a file that cannot be used is ignored with one warning."""
        if self._loaded:
            return
        self._loaded = True
        for path in self._files():
            try:
                info = torch.compiler.load_cache_artifacts(_payload(path.read_bytes()))
                if info is None:
                    raise ValueError("this torch cannot read it")
                self._known |= _keys(info)
            except Exception as error:
                _log.warning("compile cache %s is ignored: %s: %s", path, type(error).__name__, error)

    def save(self) -> None:
        """Store what this process compiled or found, where any of it is new; failing costs a warning alone."""
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None or _keys(artifacts[1]) <= self._known:
            return
        content, info = artifacts
        partial = self._path.with_suffix(".partial")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(_MAGIC + hashlib.sha256(content).digest() + content)
            partial.replace(self._path)
            for path in self._files()[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("compile cache %s is not written: %s", self._path, error)
        self._known |= _keys(info)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.bin"))  # their names begin with the time


def _payload(content: bytes) -> bytes:
    if not content.startswith(_MAGIC):
        raise ValueError("it was not written by this version of bcg")
    digest, payload = content[len(_MAGIC) :][:32], content[len(_MAGIC) + 32 :]
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError("it is damaged")
    return payload


def _keys(info: Any) -> set[tuple[str, str]]:
    return {(kind, key) for kind, keys in info.artifacts.items() for key in keys}
