"""The families, one short module each; look one up with `bcg.pipelines.family_of`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from ..family import Family
from . import bria_fibo, ernie_image, flux, ltx, lumina2, masked, no_recipe, qwen_image, wan, z_image
from .generic import GENERIC

FAMILIES: Final[tuple[Family, ...]] = (
    *bria_fibo.FAMILIES,
    *ernie_image.FAMILIES,
    *flux.FAMILIES,
    *ltx.FAMILIES,
    *lumina2.FAMILIES,
    *masked.FAMILIES,
    *no_recipe.FAMILIES,
    *qwen_image.FAMILIES,
    *wan.FAMILIES,
    *z_image.FAMILIES,
)
"""Every family but the generic one."""

BY_PIPELINE: Final[Mapping[str, Family]] = MappingProxyType(
    {pipeline: family for family in FAMILIES for pipeline in family.pipelines}
)
"""Families by the name of a pipeline class."""

__all__ = ["BY_PIPELINE", "FAMILIES", "GENERIC"]
