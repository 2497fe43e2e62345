"""An LTX-2 checkpoint of one megabyte."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from .. import _tiny, _tiny_calls, _tiny_encoders

if TYPE_CHECKING:
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2VideoTransformer3DModel
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

LATENT_CHANNELS: Final = 4
PERTURBED_BLOCKS: Final = (1,)
"""The blocks that spatio-temporal guidance perturbs; block 28 in the published model."""

_AUDIO_LATENT_CHANNELS: Final = 2
_MEL_BINS: Final = 8
_STEREO: Final = 2
_AUDIO_CHANNELS: Final = 4
"""Audio latents have two channels of two mel bins, after four mel bins became one."""


def build_tiny(path: Path) -> None:
    """Write a tiny LTX-2 checkpoint, to be read with ``LTX2Pipeline.from_pretrained(path)``.

    The language model that rewrites prompts and the model that guesses a duration are left out, as the pipeline allows.

    Args:
        path: The folder to write to; made if it is not there.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline

    with _tiny.seeded(0):
        pipe = LTX2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(
                use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
            ),
            vae=_video_vae(),
            audio_vae=_audio_vae(),
            text_encoder=_tiny_encoders.gemma3(),
            tokenizer=_tiny_encoders.gemma_tokenizer(),
            connectors=_tiny_encoders.without_zeros(_connectors()),
            transformer=_tiny_encoders.without_zeros(_transformer()),
            vocoder=_vocoder(),
        )
    pipe.save_pretrained(path, safe_serialization=True)


def _video_vae() -> AutoencoderKLLTX2Video:
    """Make a VAE that halves height and width twice and frames once; the published one divides by 32, 32 and 8."""
    from diffusers import AutoencoderKLLTX2Video

    return AutoencoderKLLTX2Video(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(8,),
        decoder_block_out_channels=(8,),
        layers_per_block=(1,),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatial",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=1,
        patch_size_t=1,
    ).eval()


def _audio_vae() -> AutoencoderKLLTX2Audio:
    from diffusers import AutoencoderKLLTX2Audio

    return AutoencoderKLLTX2Audio(
        base_channels=4,
        output_channels=_STEREO,
        ch_mult=(1,),
        num_res_blocks=1,
        in_channels=_STEREO,
        resolution=32,
        latent_channels=_AUDIO_LATENT_CHANNELS,
        mel_bins=_MEL_BINS,
    ).eval()


def _vocoder() -> LTX2Vocoder:
    from diffusers.pipelines.ltx2 import LTX2Vocoder

    return LTX2Vocoder(
        in_channels=_STEREO * _MEL_BINS,
        hidden_channels=16,
        out_channels=_STEREO,
        upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1, 3, 5]],
        output_sampling_rate=16000,
    ).eval()


def _connectors() -> LTX2TextConnectors:
    """Make the layers between the text encoder and the transformer, which reads all the encoder's hidden states."""
    from diffusers.pipelines.ltx2 import LTX2TextConnectors

    return LTX2TextConnectors(
        caption_channels=_tiny.HIDDEN_SIZE,
        text_proj_in_factor=_tiny.LAYERS + 1,
        video_connector_num_attention_heads=4,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=128,
        audio_connector_num_attention_heads=4,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=128,
        connector_rope_base_seq_len=4096,
        rope_theta=10000.0,
        rope_double_precision=True,
        causal_temporal_positioning=False,
        rope_type="split",
    )


def _transformer() -> LTX2VideoTransformer3DModel:
    from diffusers import LTX2VideoTransformer3DModel

    return LTX2VideoTransformer3DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        audio_in_channels=_AUDIO_CHANNELS,
        audio_out_channels=_AUDIO_CHANNELS,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        num_layers=2,
        caption_channels=_tiny.HIDDEN_SIZE,
        rope_type="split",
    )


def example_call(
    *, prompt: str, seed: int, height: int = 32, width: int = 64, steps: int = 2, num_frames: int = 5
) -> dict[str, Any]:
    """Give the keyword arguments of a call with all its guidances: three different transformer calls in each step.

    Args:
        prompt: What to draw; always padded to 1024 tokens.
        seed: Seed of the noise.
        height: In pixels, a multiple of 32.
        width: In pixels, a multiple of 32.
        steps: Denoising steps.
        num_frames: Frames of the video, which also say how long the sound is.

    Returns:
        Keyword arguments of ``pipe(...)``.
    """
    return _tiny_calls.call(
        prompt=prompt,
        seed=seed,
        height=height,
        width=width,
        steps=steps,
        num_frames=num_frames,
        negative_prompt=_tiny_calls.NEGATIVE_PROMPT,
        spatio_temporal_guidance_blocks=list(PERTURBED_BLOCKS),
    )
