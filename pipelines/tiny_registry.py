"""The tiny checkpoints by name, so that a test or a trial can go through all of them.

Example:
    >>> from tempfile import TemporaryDirectory
    >>> tiny = TINY["flux"]
    >>> with TemporaryDirectory() as folder:
    ...     tiny.build(Path(folder))
    ...     pipe = tiny.load(Path(folder))
    >>> latents = pipe(**tiny.example_call(prompt="a fox", seed=0), return_dict=False)[0]
    >>> latents.shape
    torch.Size([1, 6, 16])
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch


@dataclass(frozen=True, kw_only=True)
class TinyPipeline:
    """A tiny checkpoint of one diffusers pipeline; its module, and diffusers, are imported when it is used.

    Attributes:
        name: Its key in `TINY`.
        pipeline_class: The diffusers pipeline that reads it.
        module: The module with ``build_tiny`` and ``example_call``, relative to this package.
        denoisers: The components that are called once or more in every denoising step.
    """

    name: str
    pipeline_class: str
    module: str
    denoisers: tuple[str, ...] = ("transformer",)

    def build(self, path: Path) -> None:
        """Write the checkpoint.

        Args:
            path: The folder to write to; made if it is not there.
        """
        self._import().build_tiny(path)

    def load(self, path: Path, **options: Any) -> Any:
        """Read a checkpoint that `build` wrote.

        Args:
            path: The folder that it was written to.
            **options: More arguments of ``from_pretrained``, such as ``torch_dtype``.

        Returns:
            The pipeline.
        """
        import diffusers

        return getattr(diffusers, self.pipeline_class).from_pretrained(path, **options)

    def example_call(
        self,
        *,
        prompt: str,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        **sizes: int,
    ) -> dict[str, Any]:
        """Give the keyword arguments of a small call of the pipeline.

        Args:
            prompt: What to draw. Prompts of different lengths differ in shape where the pipeline does not pad them.
            seed: Seed of the noise.
            device: Where the pipeline is. It matters where the call brings embeddings, which pipelines do not move.
            dtype: The pipeline's dtype, of which a text encoder's embeddings would be.
            **sizes: ``height``, ``width``, ``steps`` and, for a video, ``num_frames`` other than the module's own.

        Returns:
            Keyword arguments of ``pipe(...)``; they hold a generator, so they serve for one call.
        """
        arguments: dict[str, Any] = self._import().example_call(prompt=prompt, seed=seed, **sizes)
        return {
            name: value.to(device, dtype) if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
        }

    def _import(self) -> Any:
        return import_module(f".{self.module}", __package__)


_ALL: Final = (
    TinyPipeline(name="flux", pipeline_class="FluxPipeline", module="flux.tiny_call"),
    TinyPipeline(name="digits", pipeline_class="FluxPipeline", module="digits.tiny"),
    TinyPipeline(name="flux_kontext", pipeline_class="FluxKontextPipeline", module="flux.tiny_kontext"),
    TinyPipeline(name="flux2_klein", pipeline_class="Flux2KleinPipeline", module="flux2_klein.tiny"),
    TinyPipeline(
        name="stable_diffusion_3", pipeline_class="StableDiffusion3Pipeline", module="stable_diffusion_3.tiny"
    ),
    TinyPipeline(name="qwen_image", pipeline_class="QwenImagePipeline", module="qwen_image.tiny"),
    TinyPipeline(name="qwen_image_edit", pipeline_class="QwenImageEditPipeline", module="qwen_image.tiny_edit"),
    TinyPipeline(name="z_image", pipeline_class="ZImagePipeline", module="z_image.tiny"),
    TinyPipeline(name="sana", pipeline_class="SanaPipeline", module="sana.tiny"),
    TinyPipeline(name="pixart_sigma", pipeline_class="PixArtSigmaPipeline", module="pixart_sigma.tiny"),
    TinyPipeline(name="lumina2", pipeline_class="Lumina2Pipeline", module="lumina2.tiny"),
    TinyPipeline(name="chroma", pipeline_class="ChromaPipeline", module="chroma.tiny"),
    TinyPipeline(name="cogview4", pipeline_class="CogView4Pipeline", module="cogview4.tiny"),
    TinyPipeline(name="hunyuan_video", pipeline_class="HunyuanVideoPipeline", module="hunyuan_video.tiny"),
    TinyPipeline(name="hunyuan_video15", pipeline_class="HunyuanVideo15Pipeline", module="hunyuan_video15.tiny"),
    TinyPipeline(name="wan", pipeline_class="WanPipeline", module="wan.tiny"),
    TinyPipeline(
        name="wan22", pipeline_class="WanPipeline", module="wan.tiny_22", denoisers=("transformer", "transformer_2")
    ),
    TinyPipeline(name="wan_i2v", pipeline_class="WanImageToVideoPipeline", module="wan.tiny_i2v"),
    TinyPipeline(name="ltx", pipeline_class="LTXPipeline", module="ltx.tiny"),
    TinyPipeline(name="ltx2", pipeline_class="LTX2Pipeline", module="ltx2.tiny"),
    TinyPipeline(name="cogvideox", pipeline_class="CogVideoXPipeline", module="cogvideox.tiny"),
    TinyPipeline(name="mochi", pipeline_class="MochiPipeline", module="mochi.tiny"),
    TinyPipeline(name="kandinsky5", pipeline_class="Kandinsky5T2VPipeline", module="kandinsky5.tiny"),
    TinyPipeline(name="bria_fibo", pipeline_class="BriaFiboPipeline", module="bria_fibo.tiny"),
    TinyPipeline(name="ernie_image", pipeline_class="ErnieImagePipeline", module="ernie_image.tiny"),
)

TINY: Final[Mapping[str, TinyPipeline]] = MappingProxyType({tiny.name: tiny for tiny in _ALL})
"""Every tiny checkpoint, by name."""
