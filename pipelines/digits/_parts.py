"""The components of the digits model before training: tokenizers of words, text encoders, a VAE set by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from .. import _tiny

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
    from transformers import CLIPTokenizer, T5Tokenizer

VAE_SCALE: Final = 8
INK_MEAN: Final = 0.25
INK_SCALE: Final = 2.5
"""Bring ink, from 0 to 1, to about zero mean and unit deviation, which is what the noise has."""

_LEVELS: Final = 4
_CHANNELS: Final = 4
_INK, _MINUS_INK, _ANCHOR, _MINUS_ANCHOR = range(_CHANNELS)
_ANCHOR_VALUE: Final = 32.0
_SHARPEN: Final = 0.17
_NO_VARIANCE: Final = -30.0
_WORD_END: Final = "</w>"
_FINAL_LETTERS: Final = "0123456789adehkglorstnfwxy"
"""What words end in. The order decides between merges that are equally frequent: it is that of the checkpoint."""


def untrained(words: Sequence[str], seed: int) -> FluxPipeline:
    """Put the pipeline together; all but the VAE is to be trained.

    Args:
        words: Words that are to be one token each; all others fall apart into characters.
        seed: Seed of the weights.

    Returns:
        A pipeline of the FLUX.1-schnell kind: without guidance, in float32.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    clip_tokenizer, t5_tokenizer = _clip_tokenizer(words), _t5_tokenizer(words)
    with _tiny.seeded(seed):
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=_vae(),
            text_encoder=_tiny.clip_text_model(clip_tokenizer),
            tokenizer=clip_tokenizer,
            text_encoder_2=_tiny.t5_encoder(t5_tokenizer),
            tokenizer_2=t5_tokenizer,
            transformer=_transformer(),
        )


def _transformer() -> FluxTransformer2DModel:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,  # one latent channel, in patches of 2x2
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=_tiny.HIDDEN_SIZE,
        pooled_projection_dim=_tiny.HIDDEN_SIZE,
        guidance_embeds=False,
        axes_dims_rope=(4, 6, 6),
    ).eval()


# ------------------------------------------------------------------------------------------------------- tokenizers
def _clip_tokenizer(words: Sequence[str]) -> CLIPTokenizer:
    """Make a CLIP tokenizer with a token for each of `words`, and the bytes for all else."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.trainers import BpeTrainer
    from transformers import CLIPTokenizer

    characters = _tiny.clip_tokenizer()
    trained = Tokenizer(BPE(end_of_word_suffix=_WORD_END))
    trained.pre_tokenizer = WhitespaceSplit()
    # The trainer meets letters in a random order and breaks ties by it, unless they have their ids before it starts.
    letters = [*sorted(set("".join(words))), *(letter + _WORD_END for letter in _FINAL_LETTERS)]
    trainer = BpeTrainer(
        vocab_size=4096, min_frequency=1, end_of_word_suffix=_WORD_END, special_tokens=letters, show_progress=False
    )
    trained.train_from_iterator([" ".join(words)] * 2, trainer)
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]

    special = [characters.bos_token, characters.eos_token]
    plain = [token for token, _ in sorted(characters.get_vocab().items(), key=lambda item: item[1])]
    tokens = [*(token for token in plain if token not in special), *("".join(merge) for merge in merges), *special]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=characters.model_max_length)


def _t5_tokenizer(words: Sequence[str]) -> T5Tokenizer:
    """Make a T5 tokenizer with a token for each of `words`, and the characters for all else."""
    from transformers import T5Tokenizer

    characters = _tiny.t5_tokenizer()
    scored = [(token, float(score)) for token, score in characters._vocab_scores]
    # Better than any sequence of characters, so that a known word is never spelled out.
    vocabulary = [*scored, *(("▁" + word, -1.0) for word in words)]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=characters.model_max_length)


# -------------------------------------------------------------------------------------------------------------- VAE
def _vae() -> AutoencoderKL:
    """Make a VAE that averages 8x8 pixels into one latent, and draws a latent as a smooth spot of ink.

    Nothing needs to be learnt, so the weights are set by hand. The residual blocks add zero. A group norm would
    rescale each image by its own ink; two constant channels of opposite sign are so much larger that they alone set the
    scale. The activation is undone by carrying the ink twice, since ``silu(x) - silu(-x) == x``.
    """
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * _LEVELS,
        up_block_types=("UpDecoderBlock2D",) * _LEVELS,
        block_out_channels=(_CHANNELS,) * _LEVELS,
        norm_num_groups=1,
        latent_channels=1,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=INK_MEAN,
        scaling_factor=INK_SCALE,
    ).eval()
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
        _set_encoder(vae.encoder)
        _set_decoder(vae.decoder)
    return vae


def _set_encoder(encoder: Any) -> None:
    """Take the mean of red, green and blue as ink from 0 to 1, and average 2x2 pixels three times."""
    for channel, sign in ((_INK, 1.0), (_MINUS_INK, -1.0)):
        encoder.conv_in.weight[channel, :, 1, 1] = sign / 6
        encoder.conv_in.bias[channel] = sign / 2
    _set_anchors(encoder.conv_in)
    for block in encoder.down_blocks[:-1]:
        conv = block.downsamplers[0].conv
        _pass_through(conv)
        for channel in (_INK, _MINUS_INK):
            # FLUX's VAE pads right and below only: the kernel's upper left corner lies on the pixels to be averaged.
            conv.weight[channel, channel] = 0.0
            conv.weight[channel, channel, :2, :2] = 0.25
    _undo_norm(encoder.conv_norm_out)
    _undo_activation(encoder.conv_out.weight[0])
    encoder.conv_out.bias[1] = _NO_VARIANCE


def _set_decoder(decoder: Any) -> None:
    """Sharpen a little, then enlarge by two with linear interpolation three times, which blurs as much."""
    spread = torch.tensor([-_SHARPEN, 1 + 2 * _SHARPEN, -_SHARPEN])
    linear = torch.tensor([0.25, 0.5, 0.25])
    for channel, sign in ((_INK, 1.0), (_MINUS_INK, -1.0)):
        decoder.conv_in.weight[channel, 0] = sign * torch.outer(spread, spread)
    _set_anchors(decoder.conv_in)
    for block in decoder.up_blocks[:-1]:
        conv = block.upsamplers[0].conv
        _pass_through(conv)
        for channel in (_INK, _MINUS_INK):
            conv.weight[channel, channel] = torch.outer(linear, linear)
    _undo_norm(decoder.conv_norm_out)
    for colour in range(3):
        _undo_activation(decoder.conv_out.weight[colour], scale=2.0)
    decoder.conv_out.bias.fill_(-1.0)


def _set_anchors(conv: nn.Conv2d) -> None:
    assert conv.bias is not None
    conv.bias[_ANCHOR], conv.bias[_MINUS_ANCHOR] = _ANCHOR_VALUE, -_ANCHOR_VALUE


def _pass_through(conv: nn.Conv2d) -> None:
    for channel in range(_CHANNELS):
        conv.weight[channel, channel, 1, 1] = 1.0


def _undo_norm(norm: nn.GroupNorm) -> None:
    """Multiply by the deviation, of which the ink's own share is negligible."""
    norm.weight.fill_(_ANCHOR_VALUE / 2**0.5)


def _undo_activation(weight: torch.Tensor, scale: float = 1.0) -> None:
    weight[_INK, 1, 1], weight[_MINUS_INK, 1, 1] = scale, -scale
