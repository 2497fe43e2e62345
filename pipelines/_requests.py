"""Turn a request of a plan into the arguments of a pipeline call, with made-up text where the pipeline takes it.

What a pipeline takes is read from the signatures of its ``__call__`` and ``encode_prompt``, and the shapes from
encoding two short prompts, so that no table of families is needed.
"""

from __future__ import annotations

import ast
import functools
import inspect
import math
import textwrap
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from torch import Tensor

from bcg.errors import PlanError

from .plan import WarmupRequest

TextKind = Literal["fixed", "masked", "varies"]
"""How a pipeline makes one shape of prompts: always one length, one length with a mask, or as long as the prompt is."""

SHORT_PROMPT: Final = "a fox"
LONGER_PROMPT: Final = "a photograph of a lighthouse in a storm, seen from the sea"
USUAL_TRUE_GUIDANCE: Final = 4.0
_FALLBACK_PIXELS: Final = 512
_MAX_EXTRA_LETTERS: Final = 8
_MAX_TRUNCATION_STEPS: Final = 50
_LATE_ENDINGS: Final = ("_stop", "_end", "_ratio", "_truncation")
_IMAGE_CLASSES: Final = ("Edit", "Kontext", "ImageToVideo", "Img2Img", "I2V")
_REPEATS: Final = ("num_images_per_prompt", "num_videos_per_prompt")
_SECOND_STREAM: Final = ("_2", "_3")
_SEED: Final = 7_919

_Encoded = dict[str, Any]


class CallBuilder:
    """Build the arguments of a pipeline's calls.

    Args:
        pipe: The pipeline.
        full: Encode and decode for real, instead of passing made-up embeddings and leaving the result in latent space.
        arguments: Further arguments of the calls, some of which the text encoder takes too.
    """

    def __init__(self, pipe: Any, *, full: bool = False, arguments: Mapping[str, Any] | None = None) -> None:
        self._pipe = pipe
        self._full = full
        self._arguments = dict(arguments or {})
        self._encoded: dict[str, _Encoded] = {}
        self.parameters: Mapping[str, inspect.Parameter] = inspect.signature(type(pipe).__call__).parameters
        self._text_of_length = functools.cache(self._find_text)

    # -- what the pipeline is like ---------------------------------------------------------------------------------

    @functools.cached_property
    def text_kind(self) -> TextKind:
        """How the pipeline makes one shape of prompts."""
        short, longer = self._encode(SHORT_PROMPT, None), self._encode(LONGER_PROMPT, None)
        if self.natural_length(SHORT_PROMPT) != self.natural_length(LONGER_PROMPT):
            return "varies"
        masks = [name for name in short if "mask" in name and isinstance(short[name], Tensor)]
        return "masked" if any(not torch.equal(short[name], longer[name]) for name in masks) else "fixed"

    @functools.cached_property
    def takes_embeddings(self) -> bool:
        """Whether all that the text encoder makes can be passed to a call, so that it need not run."""
        if self._full or self._is_image_pipeline:
            return False
        names = [name for name in self._encode(SHORT_PROMPT, None) if not name.endswith("text_ids")]
        return "prompt_embeds" in names and all(name in self.parameters for name in names)

    @property
    def _has_true_guidance(self) -> bool:
        return "true_cfg_scale" in self.parameters

    @property
    def _is_image_pipeline(self) -> bool:
        parameter = self.parameters.get("image")
        if parameter is None:
            return False
        return parameter.default is parameter.empty or any(part in type(self._pipe).__name__ for part in _IMAGE_CLASSES)

    # -- a call ----------------------------------------------------------------------------------------------------

    def arguments(self, request: WarmupRequest, *, steps: int, seed: int = 0) -> dict[str, Any]:
        """Build the arguments of one call.

        Args:
            request: What is asked for.
            steps: Denoising steps.
            seed: Seed of noise and embeddings.

        Returns:
            Keyword arguments of ``pipe(...)``.

        Raises:
            PlanError: The pipeline cannot do what the request asks.
        """
        common = {
            "height": request.height,
            "width": request.width,
            "num_frames": request.num_frames,
            "num_inference_steps": steps,
            "generator": torch.Generator().manual_seed(seed),
            "output_type": None if self._full else "latent",
            "return_dict": False,
        }
        known = {name: value for name, value in common.items() if value is not None and name in self.parameters}
        further = {name: self._of_its_type(name, value) for name, value in request.arguments.items()}
        asked = {**known, **self._guidance(request), **self._image(request), **further}
        unknown = sorted(set(asked) - set(self.parameters))
        if unknown:
            raise PlanError(f"{type(self._pipe).__name__} takes no {', '.join(unknown)}, which {request} asks for.")
        return {**self._text(request, seed), **asked}

    def _of_its_type(self, name: str, value: Any) -> Any:
        """Make a tuple of what JSON wrote as a list, where the pipeline's own default is one."""
        parameter = self.parameters.get(name)
        is_tuple = parameter is not None and isinstance(parameter.default, tuple)
        return tuple(value) if is_tuple and isinstance(value, list) else value

    def steps(self, request: WarmupRequest) -> int:
        """Return how many steps a request needs so that some lie on either side of where it stops guiding."""
        words = {name.split("_")[0] for name in request.arguments}
        defaults = {
            name: parameter.default
            for name, parameter in self.parameters.items()
            if name.split("_")[0] in words and isinstance(parameter.default, float)
        }
        values = {**defaults, **request.arguments}
        late = [value for name, value in values.items() if name.endswith(_LATE_ENDINGS) and isinstance(value, float)]
        needed = [math.ceil(1 / min(value, 1 - value)) + 1 for value in late if 0 < value < 1]
        return max([request.steps, *(min(count, _MAX_TRUNCATION_STEPS) for count in needed)])

    def _guidance(self, request: WarmupRequest) -> dict[str, float]:
        if request.guidance is None:
            return {}
        name = "true_cfg_scale" if self._has_true_guidance else "guidance_scale"
        if name not in self.parameters:
            raise PlanError(
                f"{type(self._pipe).__name__} takes no guidance in its calls: leave guidance out of the plan and set "
                "the pipeline's guider instead."
            )
        if request.guidance is False:
            return {name: self._guidance_off()}
        if request.guidance is not True:
            return {name: float(request.guidance)}
        usual = self.parameters[name].default
        return {name: usual if isinstance(usual, float) and usual > 1 else USUAL_TRUE_GUIDANCE}

    def _guidance_off(self) -> float:
        """Return a scale that means no guidance: nearly everywhere 1, where it is compared with 0 that."""
        rule = getattr(type(self._pipe), "do_classifier_free_guidance", None)
        if self._has_true_guidance or not isinstance(rule, property) or rule.fget is None:
            return 1.0
        seen = SimpleNamespace(_guidance_scale=1.0, guidance_scale=1.0, config=getattr(self._pipe, "config", None))
        try:
            return 0.0 if rule.fget(seen) else 1.0
        except AttributeError:
            return 1.0

    def _image(self, request: WarmupRequest) -> dict[str, Any]:
        if not self._is_image_pipeline or "image" in request.arguments:
            return {}
        from PIL import Image

        size = (request.width or _FALLBACK_PIXELS, request.height or _FALLBACK_PIXELS)
        return {"image": Image.new("RGB", size, (127, 96, 64))}

    # -- its text --------------------------------------------------------------------------------------------------

    def _text(self, request: WarmupRequest, seed: int) -> dict[str, Any]:
        if any(name.startswith("prompt_embeds") for name in request.arguments):
            return {}
        negative = self._negative(request)
        # Some pipelines repeat the embeddings that they made for several images, and not those that they were given.
        is_repeated = any(request.arguments.get(name, 1) != 1 for name in _REPEATS)
        if self.takes_embeddings and not is_repeated:
            return self._embeddings(request, negative, seed)
        text = SHORT_PROMPT if request.text_length is None else self._text_of_length(request.text_length)
        given: dict[str, Any] = {"prompt": [text] * request.batch_size if request.batch_size > 1 else text}
        if negative is not None and "negative_prompt" in self.parameters:
            text = negative if isinstance(negative, str) else self._text_of_length(negative)
            given["negative_prompt"] = [text] * request.batch_size if request.batch_size > 1 else text
        return given

    def _negative(self, request: WarmupRequest) -> str | int | None:
        """Return the negative prompt that a request passes, if any: true guidance is on only where there is one."""
        if request.negative_prompt is None and self._has_true_guidance:
            guided = request.guidance is True or (request.guidance is not False and (request.guidance or 0) > 1)
            return " " if guided else None
        return request.negative_prompt

    def _embeddings(self, request: WarmupRequest, negative: str | int | None, seed: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(_SEED + seed)
        encoded = self._encode(SHORT_PROMPT, None)
        positive = {name: value for name, value in encoded.items() if not name.startswith("negative_")}
        made = self._of_length(positive, request.text_length)
        if negative is not None or not self._has_true_guidance:
            made |= self._negatives(request, negative)
        taken = {name: value for name, value in made.items() if name in self.parameters}
        given = {name: _repeated(_drawn(name, value, generator), request.batch_size) for name, value in taken.items()}
        # Some pipelines have "" as the default of the text that the embeddings replace, and refuse to be given both.
        replaced = ("prompt", "negative_prompt") if "negative_prompt_embeds" in given else ("prompt",)
        return {**given, **{name: None for name in replaced if name in self.parameters}}

    def _negatives(self, request: WarmupRequest, negative: str | int | None) -> _Encoded:
        text = negative if isinstance(negative, str) else None
        if "negative_prompt" in inspect.signature(self._pipe.encode_prompt).parameters:
            encoded = self._encode(SHORT_PROMPT, text, True)
            found = {name: value for name, value in encoded.items() if name.startswith("negative_")}
        else:
            found = {f"negative_{name}": value for name, value in self._encode(text or "", None).items()}
        if isinstance(negative, int):
            return self._of_length(found, negative)
        # Where all prompts have one shape, another shape is one of both halves of guidance.
        is_reshaped = self.text_kind == "fixed" or (request.text_length or 0) > _rows(found)
        return self._of_length(found, request.text_length) if is_reshaped and self.text_kind != "varies" else found

    def _of_length(self, encoded: _Encoded, length: int | None) -> _Encoded:
        if length is None:
            return dict(encoded)
        first = {name: value for name, value in encoded.items() if not name.endswith(_SECOND_STREAM)}
        resize = _masked_to if self.text_kind == "masked" and length <= _rows(first) else _resized_to
        return {**encoded, **{name: resize(name, value, length) for name, value in first.items()}}

    @property
    def short_length(self) -> int:
        """Tokens of the prompt that stands for one of any length."""
        return self.counted_length(SHORT_PROMPT)

    # -- the encoder -----------------------------------------------------------------------------------------------

    def natural_length(self, text: str) -> int:
        """Return how many tokens the pipeline makes of a text, padding and template included."""
        return _rows(self._encode(text, None))

    def counted_length(self, text: str) -> int:
        """Return how many tokens of a text the denoiser attends to: as masked, else all."""
        encoded = self._encode(text, None)
        for name, value in encoded.items():
            if "mask" in name and not name.startswith("negative_") and isinstance(value, Tensor):
                return int((value != 0).sum(-1).max())
        return _rows(encoded)

    def _encode(self, prompt: str, negative: str | None, guided: bool = False) -> _Encoded:
        key = repr((prompt, negative, guided))
        if key not in self._encoded:
            self._encoded[key] = self._encode_now(prompt, negative, guided)
        return self._encoded[key]

    def _encode_now(self, prompt: str, negative: str | None, guided: bool) -> _Encoded:
        encode: Callable[..., Any] = self._pipe.encode_prompt
        given: dict[str, Any] = {"prompt": prompt, "negative_prompt": negative, "do_classifier_free_guidance": guided}
        given |= {"device": self._pipe._execution_device, "num_images_per_prompt": 1, "num_videos_per_prompt": 1}
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(encode).parameters.items():
            if given.get(name) is not None:
                arguments[name] = given[name]
            elif name in self._arguments:
                arguments[name] = self._of_its_type(name, self._arguments[name])
            elif name in self.parameters and _is_told(self.parameters[name]):
                arguments[name] = self.parameters[name].default
            elif parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD:
                arguments[name] = _picture() if name == "image" else None
        try:
            with torch.no_grad():
                result = encode(**arguments)
        except Exception as error:
            raise PlanError(f"{type(self._pipe).__name__} cannot encode {prompt!r}: {error}") from error
        values = result if isinstance(result, tuple) else (result,)
        names = _returned_names(encode)
        if len(names) != len(values):
            names = [f"output_{index}" for index in range(len(values))]
        if len(values) == 1:
            names = ["prompt_embeds"]
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    def _find_text(self, length: int) -> str:
        """Find a text of so many tokens: words give the coarse length, letters at the end the rest."""
        if self.text_kind != "varies":
            return _words(max(1, length - self.counted_length(_words(1)) + 1))
        one, nine = self.counted_length(_words(1)), self.counted_length(_words(9))
        per_word = max(1, (nine - one) // 8)
        for words in (1 + (length - one) // per_word, (length - one) // per_word):
            for letters in range(_MAX_EXTRA_LETTERS):
                text = _words(words) + "a" * letters
                if words > 0 and self.counted_length(text) == length:
                    return text
        raise PlanError(
            f"found no text of {length} tokens for {type(self._pipe).__name__}; an empty one has {one - 1}."
        )


# --- encoded text ----------------------------------------------------------------------------------------------------


def _returned_names(encode: Callable[..., Any]) -> list[str]:
    """Read from the source which variables a function returns; diffusers names them as the call's parameters."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(encode))))
    except (OSError, TypeError, SyntaxError):
        return []
    returned = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    last = returned[-1] if returned else None
    items = last.elts if isinstance(last, ast.Tuple) else [last]
    return [item.id for item in items if isinstance(item, ast.Name)]


def _is_told(parameter: inspect.Parameter) -> bool:
    return parameter.default is not parameter.empty and parameter.default is not None


def _first_rows(encoded: Mapping[str, Any]) -> Tensor | None:
    for name, value in encoded.items():
        tensor = value[0] if isinstance(value, list) and value else value
        if isinstance(tensor, Tensor) and tensor.ndim >= 2 and "pooled" not in name and "mask" not in name:
            return tensor
    return None


def _rows(encoded: Mapping[str, Any]) -> int:
    tensor = _first_rows(encoded)
    return 0 if tensor is None else tensor.shape[-2]


def _resized_to(name: str, value: Any, length: int) -> Any:
    if isinstance(value, list):
        return [_resized_to(name, item, length) for item in value]
    if not isinstance(value, Tensor) or "pooled" in name:
        return value
    if "mask" in name:
        return value.new_ones(*value.shape[:-1], length)
    return value.new_zeros(*value.shape[:-2], length, value.shape[-1]) if value.ndim >= 2 else value


def _masked_to(name: str, value: Any, length: int) -> Any:
    """Change how much of a mask is ones, on the side where the tokenizer puts text."""
    if not isinstance(value, Tensor) or "mask" not in name:
        return value
    columns = torch.arange(value.shape[-1], device=value.device)
    is_left_padded = bool(value.reshape(-1, value.shape[-1])[0, 0] == 0)
    kept = columns >= value.shape[-1] - length if is_left_padded else columns < length
    return kept.to(value.dtype).expand(value.shape).clone()


def _drawn(name: str, value: Any, generator: torch.Generator) -> Any:
    """Draw embeddings anew; masks, and streams that are all zero (no quoted text, no image), stay as they are."""
    if isinstance(value, list):
        return [_drawn(name, item, generator) for item in value]
    is_stream = isinstance(value, Tensor) and value.is_floating_point() and "mask" not in name
    if not is_stream or (name.endswith(_SECOND_STREAM) and not value.any()):
        return value
    return torch.randn(value.shape, generator=generator).to(value.device, value.dtype)


def _repeated(value: Any, times: int) -> Any:
    if isinstance(value, list):
        return value * times
    if not isinstance(value, Tensor) or times == 1:
        return value
    return value.repeat(times, *(1 for _ in value.shape[1:]))


def _words(count: int) -> str:
    return " ".join(["a"] * count)


def _picture() -> Any:
    from PIL import Image

    return Image.new("RGB", (_FALLBACK_PIXELS, _FALLBACK_PIXELS))
