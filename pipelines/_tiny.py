"""Parts of tiny checkpoints: text encoders, tokenizers and VAEs of the published classes, a few kilobytes each.

A tiny checkpoint has every component that the published one has, in the same classes and file layout, so that
``from_pretrained`` runs the same code on it. Weights are random but seeded; tokenizers are made here, from the alphabet
alone: every character is a token. Nothing is downloaded.

The libraries behind the components are imported inside the functions, so that importing an adapter costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5Tokenizer

HIDDEN_SIZE: Final = 32
HEADS: Final = 4
LAYERS: Final = 2
CLIP_LENGTH: Final = 77
T5_LENGTH: Final = 512

_CLIP_START: Final = "<|startoftext|>"
_CLIP_END: Final = "<|endoftext|>"
_CLIP_WORD_END: Final = "</w>"
_T5_SPACE: Final = "▁"
_T5_SPACE_SCORE: Final = -2.0
_T5_CHARACTER_SCORE: Final = -3.0
_PRINTABLE_ASCII: Final = tuple(chr(code) for code in range(0x21, 0x7F))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw the weights made inside from a fixed seed, and leave the caller's CPU generator as it was.

    Args:
        seed: The seed; one seed gives one checkpoint, bit for bit.

    Yields:
        Nothing.

    Example:
        >>> with seeded(0):
        ...     first = torch.rand(2)
        >>> with seeded(0):
        ...     second = torch.rand(2)
        >>> torch.equal(first, second)
        True
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def clip_tokenizer(length: int = CLIP_LENGTH) -> CLIPTokenizer:
    """Make a CLIP tokenizer whose tokens are the 256 bytes, inside a word and at its end.

    Args:
        length: Tokens that a prompt is padded or cut to, start and end included.

    Returns:
        The tokenizer; its two special tokens have the highest ids, as in the published one.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + _CLIP_WORD_END for letter in alphabet), _CLIP_START, _CLIP_END]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=length)


def clip_text_model(tokenizer: CLIPTokenizer, hidden_size: int = HIDDEN_SIZE) -> CLIPTextModel:
    """Make a CLIP text encoder that reads the tokens of `tokenizer`.

    Args:
        tokenizer: A tokenizer of `clip_tokenizer`.
        hidden_size: Width of the last hidden state ``[B, S, hidden_size]`` and of the pooled output.

    Returns:
        The encoder, in evaluation mode.
    """
    from transformers import CLIPTextModel

    return CLIPTextModel(_clip_config(tokenizer, hidden_size)).eval()


def clip_text_model_with_projection(
    tokenizer: CLIPTokenizer, hidden_size: int = HIDDEN_SIZE
) -> CLIPTextModelWithProjection:
    """Make a CLIP text encoder with a projected pooled output, as Stable Diffusion 3 has two of.

    Args:
        tokenizer: A tokenizer of `clip_tokenizer`.
        hidden_size: Width of the hidden states and of the projection.

    Returns:
        The encoder, in evaluation mode.
    """
    from transformers import CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(_clip_config(tokenizer, hidden_size)).eval()


def _clip_config(tokenizer: CLIPTokenizer, hidden_size: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        projection_dim=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_tokenizer(length: int = T5_LENGTH) -> T5Tokenizer:
    """Make a T5 tokenizer whose tokens are the printable ASCII characters.

    Args:
        length: Tokens that a prompt is cut to by default, the end token included.

    Returns:
        The tokenizer; padding, end and unknown have the ids 0, 1 and 2, as in the published one.
    """
    from transformers import T5Tokenizer

    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    letters = [(letter, _T5_CHARACTER_SCORE) for letter in _PRINTABLE_ASCII]
    vocabulary = [*special, (_T5_SPACE, _T5_SPACE_SCORE), *letters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=length)


def t5_encoder(tokenizer: T5Tokenizer, hidden_size: int = HIDDEN_SIZE) -> T5EncoderModel:
    """Make a T5 encoder that reads the tokens of `tokenizer`.

    Args:
        tokenizer: A tokenizer of `t5_tokenizer`.
        hidden_size: Width of the hidden states ``[B, S, hidden_size]``.

    Returns:
        The encoder, in evaluation mode.
    """
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        d_kv=hidden_size // HEADS,
        d_ff=2 * hidden_size,
        num_layers=LAYERS,
        num_heads=HEADS,
        feed_forward_proj="gated-gelu",
        is_encoder_decoder=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return T5EncoderModel(config).eval()


def image_vae(latent_channels: int = 4, width: int = 8, **config: Any) -> AutoencoderKL:
    """Make an image VAE that scales height and width by 8.

    Args:
        latent_channels: Channels of a latent ``[B, latent_channels, H/8, W/8]``.
        width: Channels of each of its four levels, a multiple of 4.
        **config: More ``AutoencoderKL`` arguments, such as ``shift_factor``.

    Returns:
        The VAE, in evaluation mode.
    """
    from diffusers import AutoencoderKL

    levels = 4
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=(width,) * levels,
        latent_channels=latent_channels,
        norm_num_groups=4,
        **config,
    ).eval()
