"""Families whose text cannot be padded without changing the picture, each with the reason."""

from __future__ import annotations

from typing import Final

from ..family import Family, Request, TextInputs, TextStream

_NO_MASK: Final = "the transformer takes no text mask"
_FLOAT_MASK: Final = "the mask is added to the attention's logits as zeros and ones, so that padding is attended too"
_SQUARE: Final = (Request(height=1024, width=1024),)


def _text(reason: str, length: int | None = None, names: tuple[str, ...] = ("encoder_hidden_states",)) -> TextInputs:
    stream = TextStream(names=names)
    return TextInputs(streams=(stream,), varies=length is None, default_length=length, reason=reason)


FAMILIES: Final = (
    Family(
        name="Stable Diffusion 3",
        pipelines=(
            "StableDiffusion3Pipeline",
            "StableDiffusion3Img2ImgPipeline",
            "StableDiffusion3InpaintPipeline",
            "StableDiffusion3ControlNetPipeline",
            "StableDiffusion3ControlNetInpaintingPipeline",
            "StableDiffusion3PAGPipeline",
            "StableDiffusion3PAGImg2ImgPipeline",
        ),
        text=_text("the attention ignores a mask", 333),
        default_requests=_SQUARE,
    ),
    Family(
        name="Chroma",
        pipelines=("ChromaPipeline", "ChromaImg2ImgPipeline", "ChromaInpaintPipeline"),
        text=_text(f"{_FLOAT_MASK}; another length than the 512 of the pipeline is another picture", 512),
        default_requests=_SQUARE,
    ),
    Family(
        name="CogView4",
        pipelines=("CogView4Pipeline", "CogView4ControlPipeline"),
        text=_text(_FLOAT_MASK),
        default_requests=_SQUARE,
    ),
    Family(name="GLM-Image", pipelines=("GlmImagePipeline",), text=_text(_FLOAT_MASK), default_requests=_SQUARE),
    Family(
        name="Kandinsky 5 image",
        pipelines=("Kandinsky5T2IPipeline", "Kandinsky5I2IPipeline"),
        text=_text(f"{_NO_MASK}, and all text is attended"),
        default_requests=_SQUARE,
    ),
    Family(
        name="Kandinsky 5 video",
        pipelines=("Kandinsky5T2VPipeline", "Kandinsky5I2VPipeline"),
        text=_text(f"{_NO_MASK}, and all text is attended"),
        default_requests=(Request(height=512, width=768, num_frames=121),),
    ),
    Family(
        name="LongCat-Image",
        pipelines=("LongCatImagePipeline", "LongCatImageEditPipeline"),
        text=_text(_NO_MASK, 512),
        default_requests=_SQUARE,
    ),
    Family(
        name="Bria",
        pipelines=("BriaPipeline",),
        text=_text("the transformer does not hand a mask to its blocks", 128),
        default_requests=_SQUARE,
    ),
    Family(
        name="CogVideoX",
        pipelines=(
            "CogVideoXPipeline",
            "CogVideoXImageToVideoPipeline",
            "CogVideoXVideoToVideoPipeline",
            "CogVideoXFunControlPipeline",
        ),
        text=_text(f"{_NO_MASK}, and all text is attended", 226),
        default_requests=(Request(height=480, width=720, num_frames=49),),
    ),
    Family(
        name="AuraFlow",
        pipelines=("AuraFlowPipeline",),
        text=_text(f"{_NO_MASK}, and padding is attended", 256),
        default_requests=_SQUARE,
    ),
    Family(
        name="HiDream",
        pipelines=("HiDreamImagePipeline",),
        text=_text(
            f"{_NO_MASK}, and the experts count tokens",
            128,
            ("encoder_hidden_states_t5", "encoder_hidden_states_llama3"),
        ),
        default_requests=_SQUARE,
    ),
    Family(
        name="Stable Audio",
        pipelines=("StableAudioPipeline",),
        text=_text("the attention ignores the text mask"),
        default_requests=(),
    ),
    Family(
        name="Qwen-Image 2.1",
        pipelines=("QwenImage21Pipeline",),
        text=_text("text and picture are packed into one sequence by lengths that the forward reads on the host"),
        default_requests=_SQUARE,
    ),
    Family(
        name="Ideogram 4",
        pipelines=("Ideogram4Pipeline",),
        text=_text("text and picture are one sequence, and shapes do not tell where the text ends", 2048),
        default_requests=(Request(height=2048, width=2048),),
    ),
)
