"""Wrap a pipeline: put a runner in the place of each denoiser, and take it away again."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeVar

from torch import nn

from bcg.errors import ConfigError
from bcg.runner import BreakableCudaGraphRunner, unwrap, wrap

from .family import Family, family_of
from .text_buckets import TextBuckets

__all__ = ["from_pipe", "runners_of", "unwrap_pipeline", "wrap_pipeline"]

_log = logging.getLogger("bcg")

_Pipeline = TypeVar("_Pipeline")

_DECODE: Final = ".decode"  # `vae.decode` is a method; the module that does its work is `vae.decoder`
_DECODER: Final = "decoder"


def wrap_pipeline(
    pipe: _Pipeline,
    *,
    components: Sequence[str] | None = None,
    text_buckets: Sequence[int] | None = None,
    **options: Any,
) -> _Pipeline:
    """Wrap the denoisers of a diffusers pipeline, so that its calls replay after a warm-up.

    Runners of one pipeline share the scratch memory of their graphs, as they never run at the same time. The pipeline's
    class is not changed, and everything but the calls reaches the modules: ``pipe.to``, ``save_pretrained``, LoRA,
    offload (which makes calls run eagerly). Only ``OtherPipeline.from_pipe(pipe)`` looks at the very type of components
    and would leave runners behind: use `from_pipe` of this module, or hand them over, ``from_pipe(pipe,
    transformer=pipe.transformer)``.

    Args:
        pipe: The pipeline. A wrapped one is wrapped anew, without its graphs.
        components: What to wrap instead of all denoisers: names of components that are modules, and ``"vae.decode"``
            for the decoder of a VAE.
        text_buckets: Lengths in tokens, such as ``(64, 128, 256, 512, 1024)``: the text of the denoisers is padded to
            the next of them and a mask is passed, so that few graphs serve all prompts. Only where padding does not
            change the picture (beyond rounding: a mask takes other kernels); elsewhere ``family_of(pipe).text_reason``
            tells why not, and the option is ignored with a warning.
        **options: Fields of `bcg.RunnerConfig`, or other arguments of `bcg.wrap`.

    Returns:
        The same pipeline.

    Raises:
        ConfigError: The pipeline has no such component, or an option is not accepted.
        NotAModuleError: A component is not a callable module.

    Example:
        >>> class FluxPipeline:
        ...     transformer = nn.Linear(4, 2)
        >>> pipe = wrap_pipeline(FluxPipeline(), max_entries=4)
        >>> runners_of(pipe)
        {'transformer': BreakableCudaGraphRunner(Linear, 0 graphs, 0 breaks, 0 replays)}
    """
    family = family_of(pipe)
    paths = _denoisers(pipe, family) if components is None else tuple(components)
    shared = options.pop("pool", None)
    runners: dict[str, BreakableCudaGraphRunner] = {}
    for path in paths:
        module = unwrap(_module(pipe, path))
        prepare = _prepare(pipe, family, path, text_buckets, module)
        runners[path] = wrap(module, pool=shared, prepare=prepare, **options)
        shared = shared if shared is not None else runners[path]
    for path, runner in runners.items():
        _put(pipe, path, runner)
    return pipe


def runners_of(pipe: Any) -> dict[str, BreakableCudaGraphRunner]:
    """Find the runners in a pipeline.

    Args:
        pipe: A pipeline, wrapped or not.

    Returns:
        Runners by the name of their component, ``"vae.decode"`` among them.
    """
    return {path: module for path, module in _modules(pipe) if isinstance(module, BreakableCudaGraphRunner)}


def unwrap_pipeline(pipe: _Pipeline) -> _Pipeline:
    """Put the modules back in the place of their runners.

    Args:
        pipe: A pipeline, wrapped or not.

    Returns:
        The same pipeline.
    """
    for path, runner in runners_of(pipe).items():
        _put(pipe, path, runner.transformer)
    return pipe


def from_pipe(pipeline_class: type[_Pipeline], pipe: Any, **arguments: Any) -> _Pipeline:
    """Make a pipeline of another class from the components of a wrapped one, runners and their graphs included.

    ``pipeline_class.from_pipe(pipe)`` compares the types of components with those that it expects, and so would leave a
    runner behind: with an error where the component is required, else with nothing but a warning.

    Args:
        pipeline_class: The diffusers pipeline to make.
        pipe: The pipeline to take the components from. It stays as it is, and shares them.
        **arguments: More arguments of ``pipeline_class.from_pipe``; diffusers casts the shared components to
            ``torch_dtype``, by default to float32.

    Returns:
        The new pipeline.
    """
    runners = {name: runner for name, runner in runners_of(pipe).items() if not name.endswith(_DECODE)}
    expected = set(pipeline_class._get_signature_keys(pipeline_class)[0])  # type: ignore[attr-defined]
    taken = {name: runner for name, runner in runners.items() if name in expected and name not in arguments}
    made: _Pipeline = pipeline_class.from_pipe(pipe, **taken, **arguments)  # type: ignore[attr-defined]
    return made


def _denoisers(pipe: Any, family: Family) -> tuple[str, ...]:
    found = tuple(name for name in family.denoisers if isinstance(getattr(pipe, name, None), nn.Module))
    if not found:
        raise ConfigError(
            f"{type(pipe).__name__} has none of the denoisers {', '.join(family.denoisers)}. Name the modules to wrap, "
            f"wrap_pipeline(pipe, components=(...)); it has {_supported(pipe)}."
        )
    return found


def _module(pipe: Any, path: str) -> nn.Module:
    owner, name = _place(pipe, path)
    module = getattr(owner, name, None)
    if not isinstance(module, nn.Module):
        raise ConfigError(f"components: {type(pipe).__name__} has no module {path!r}; it has {_supported(pipe)}.")
    return module


def _put(pipe: Any, path: str, module: Any) -> None:
    owner, name = _place(pipe, path)
    setattr(owner, name, module)


def _place(pipe: Any, path: str) -> tuple[Any, str]:
    """Return the object whose attribute a component is, and the attribute's name."""
    if path.endswith(_DECODE):
        return getattr(pipe, path.removesuffix(_DECODE), None), _DECODER
    return pipe, path


def _modules(pipe: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield what can be wrapped, by component name."""
    names = dict.fromkeys((*family_of(pipe).denoisers, *(getattr(pipe, "components", None) or ())))
    for name in names:
        module = getattr(pipe, name, None)
        if isinstance(module, nn.Module):
            yield name, module
            decoder = getattr(module, _DECODER, None)
            if hasattr(module, "decode") and isinstance(decoder, nn.Module):
                yield name + _DECODE, decoder


def _supported(pipe: Any) -> str:
    return ", ".join(name for name, _ in _modules(pipe)) or "no modules"


def _prepare(
    pipe: Any, family: Family, path: str, text_buckets: Sequence[int] | None, module: nn.Module
) -> TextBuckets | None:
    if text_buckets is None or path not in family.denoisers:
        return None
    if family.text is None or not family.text.is_exact:
        _log.warning("%s: text_buckets is ignored: %s", type(pipe).__name__, family.text_reason)
        return None
    return TextBuckets(family.text, text_buckets, module)
