"""Parts of tiny checkpoints whose text encoder is a language model: word tokenizers, Qwen, Gemma, GLM, Llama, Mistral.

The tokenizers are byte-pair encodings trained here on the pipeline's own prompt template, so that each word of the
template is one token, as with the published tokenizer. This matters: several pipelines drop the first so many tokens of
the encoded prompt, a number counted with the published tokenizer, and would otherwise drop the user's words as well.
Words that are not in the template fall apart into bytes, so every prompt has its own tokens and no prompt is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from torch import nn

from ._tiny import HEADS, HIDDEN_SIZE, LAYERS

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import (
        Gemma2Model,
        Gemma3ForConditionalGeneration,
        GemmaTokenizer,
        GlmModel,
        LlamaModel,
        LlamaTokenizer,
        Mistral3Model,
        PreTrainedTokenizerFast,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLTextModel,
        Qwen2Tokenizer,
        Qwen3ForCausalLM,
        Qwen3Model,
        SmolLM3ForCausalLM,
        T5Tokenizer,
        UMT5EncoderModel,
    )

_Module = TypeVar("_Module", bound=nn.Module)

VOCABULARY_SIZE: Final = 1024
"""Most tokens of a tokenizer made here, and rows of the encoders' embedding tables."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""ChatML, as the Qwen tokenizers have it, without tools."""

_QWEN_SPECIAL: Final = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
_GEMMA_SPECIAL: Final = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<image_soft_token>", "<boi>", "<eoi>")
_LLAMA_SPECIAL: Final = ("<unk>", "<s>", "</s>", "<pad>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_GLM_SPECIAL: Final = ("<|endoftext|>", "[gMASK]", "<sop>")
_PLAIN_SPECIAL: Final = ("<pad>", "<s>", "</s>")
_BYTE_TOKENS: Final = tuple(f"<0x{byte:02X}>" for byte in range(256))
_SPACE: Final = "▁"
_ZERO_REPLACEMENT_SCALE: Final = 0.05


def without_zeros(module: _Module, seed: int = 0) -> _Module:
    """Give every all-zero parameter small random values, in place.

    Several denoisers start with their modulation and output layers at zero; they would draw the same image whatever
    came in, and an error in what went in would not show.

    Args:
        module: A newly made module.
        seed: Seed of the values.

    Returns:
        The module, in evaluation mode.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> _ = nn.init.zeros_(layer.weight)
        >>> bool(without_zeros(layer).weight.any())
        True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.numel() and not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * _ZERO_REPLACEMENT_SCALE)
    return module.eval()


# ------------------------------------------------------------------------------------------------------- tokenizers
def _train(
    texts: Iterable[str], pre_tokenizer: PreTokenizer, special: Sequence[str], alphabet: Sequence[str]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a byte-pair encoding; the special tokens get the first ids, in their order."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(special),
        initial_alphabet=list(alphabet),
        min_frequency=1,
        show_progress=False,
    )
    # Every text twice: a pair must be seen more than once to be merged.
    tokenizer.train_from_iterator([text for text in texts for _ in range(2)], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]


def _train_on_bytes(texts: Iterable[str], special: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    return _train(texts, Qwen2Tokenizer().backend_tokenizer.pre_tokenizer, special, sorted(ByteLevel.alphabet()))


def _train_on_words(texts: Iterable[str], special: Sequence[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train a SentencePiece-like encoding: a space is part of the word after it, unseen characters become bytes."""
    from tokenizers.pre_tokenizers import Digits, Metaspace, Punctuation, Split
    from tokenizers.pre_tokenizers import Sequence as InOrder

    words = InOrder(
        [
            Metaspace(replacement=_SPACE, split=True),
            Split("\n\n", behavior="isolated"),
            Punctuation(behavior="isolated"),
            Digits(individual_digits=True),
        ]
    )
    return _train(texts, words, [*special, *_BYTE_TOKENS, _SPACE], [])


def qwen_tokenizer(*templates: str, length: int = 1024) -> Qwen2Tokenizer:
    """Make a Qwen tokenizer with a chat template and the vision tokens.

    Args:
        *templates: Texts whose words become single tokens.
        length: Tokens that a prompt is cut to by default.

    Returns:
        The tokenizer; the special tokens have the first ids.
    """
    from transformers import Qwen2Tokenizer

    vocabulary, merges = _train_on_bytes(templates, _QWEN_SPECIAL)
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        extra_special_tokens=list(_QWEN_SPECIAL[1:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=length,
    )


def gemma_tokenizer(*templates: str, length: int = 1024) -> GemmaTokenizer:
    """Make a Gemma tokenizer that puts a start token first.

    Args:
        *templates: Texts whose words become single tokens.
        length: Tokens that a prompt is cut to by default.

    Returns:
        The tokenizer; padding is token 0.
    """
    from transformers import GemmaTokenizer

    vocabulary, merges = _train_on_words(templates, _GEMMA_SPECIAL)
    return GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True, model_max_length=length)


def llama_tokenizer(*templates: str, length: int = 1024) -> LlamaTokenizer:
    """Make a Llama tokenizer with Llama 3's header tokens, padded on the right.

    Args:
        *templates: Texts whose words become single tokens.
        length: Tokens that a prompt is cut to by default.

    Returns:
        The tokenizer.
    """
    from transformers import LlamaTokenizer

    vocabulary, merges = _train_on_words(templates, _LLAMA_SPECIAL)
    return LlamaTokenizer(
        vocab=vocabulary,
        merges=merges,
        pad_token="<pad>",
        extra_special_tokens=list(_LLAMA_SPECIAL[4:]),
        add_bos_token=True,
        padding_side="right",
        model_max_length=length,
    )


def glm_tokenizer(length: int = 1024) -> PreTrainedTokenizerFast:
    """Make a GLM tokenizer: it puts ``[gMASK]<sop>`` first and pads on the left.

    Args:
        length: Tokens that a prompt is cut to by default.

    Returns:
        The tokenizer.
    """
    return _byte_tokenizer(
        _GLM_SPECIAL, prefix=_GLM_SPECIAL[1:], pad_token=_GLM_SPECIAL[0], padding_side="left", model_max_length=length
    )


def plain_tokenizer(*, start: bool = True, length: int = 1024) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose tokens are the bytes, for a pipeline that asks for no class in particular.

    Args:
        start: Whether a start token is put first, as Mistral has it.
        length: Tokens that a prompt is cut to by default.

    Returns:
        The tokenizer; padding is token 0, on the right.
    """
    pad, begin, end = _PLAIN_SPECIAL
    prefix = (begin,) if start else ()
    return _byte_tokenizer(
        _PLAIN_SPECIAL, prefix=prefix, pad_token=pad, bos_token=begin, eos_token=end, model_max_length=length
    )


def _byte_tokenizer(special: Sequence[str], *, prefix: Sequence[str], **options: Any) -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    backend.post_processor = TemplateProcessing(
        single=[*prefix, "$A"], special_tokens=[(token, tokens.index(token)) for token in prefix]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


# --------------------------------------------------------------------------------------------------------- encoders
def _decoder_sizes(hidden_size: int, layers: int = LAYERS) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": hidden_size // HEADS,
    }


def umt5_encoder(tokenizer: T5Tokenizer, hidden_size: int = HIDDEN_SIZE) -> UMT5EncoderModel:
    """Make a UMT5 encoder, as Wan has it: T5 with its own position bias in every layer.

    Args:
        tokenizer: A tokenizer of ``_tiny.t5_tokenizer``.
        hidden_size: Width of the hidden states ``[B, S, hidden_size]``.

    Returns:
        The encoder, in evaluation mode.
    """
    from transformers import UMT5Config, UMT5EncoderModel

    config = UMT5Config(
        vocab_size=len(tokenizer),
        d_model=hidden_size,
        d_kv=hidden_size // HEADS,
        d_ff=2 * hidden_size,
        num_layers=LAYERS,
        num_heads=HEADS,
    )
    return UMT5EncoderModel(config).eval()


def qwen3_causal_lm(hidden_size: int = HIDDEN_SIZE, layers: int = LAYERS) -> Qwen3ForCausalLM:
    """Make a Qwen3 with its language head, as FLUX.2 Klein has it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_decoder_sizes(hidden_size, layers))).eval()


def qwen3_model(hidden_size: int = HIDDEN_SIZE) -> Qwen3Model:
    """Make a Qwen3 without a language head, as Z-Image has it."""
    from transformers import Qwen3Config, Qwen3Model

    return Qwen3Model(Qwen3Config(**_decoder_sizes(hidden_size))).eval()


def _qwen_vl_text_config(hidden_size: int) -> dict[str, Any]:
    pairs = hidden_size // HEADS // 2
    sections = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    sizes = _decoder_sizes(hidden_size)
    sizes.pop("head_dim")
    # The published ids lie outside this vocabulary.
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return {**sizes, **tokens, "rope_parameters": {"rope_type": "default", "mrope_section": sections}}


def qwen25_vl(hidden_size: int = HIDDEN_SIZE) -> Qwen2_5_VLForConditionalGeneration:
    """Make a Qwen2.5-VL with its vision tower, as Qwen-Image and Kandinsky 5 have it."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size,
        "num_heads": HEADS,
        "out_hidden_size": hidden_size,
        "fullatt_block_indexes": [0],
    }
    config = Qwen2_5_VLConfig(
        text_config=_qwen_vl_text_config(hidden_size),
        vision_config=vision,
        vision_start_token_id=_QWEN_SPECIAL.index("<|vision_start|>"),
        vision_end_token_id=_QWEN_SPECIAL.index("<|vision_end|>"),
        image_token_id=_QWEN_SPECIAL.index("<|image_pad|>"),
        video_token_id=_QWEN_SPECIAL.index("<|video_pad|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen25_vl_text_model(hidden_size: int = HIDDEN_SIZE) -> Qwen2_5_VLTextModel:
    """Make the language half of a Qwen2.5-VL, as HunyuanVideo 1.5 has it."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**_qwen_vl_text_config(hidden_size))).eval()


def gemma2_model(hidden_size: int = HIDDEN_SIZE) -> Gemma2Model:
    """Make a Gemma 2, as Sana and Lumina 2 have it."""
    from transformers import Gemma2Config, Gemma2Model

    return Gemma2Model(Gemma2Config(**_decoder_sizes(hidden_size))).eval()


def gemma3(hidden_size: int = HIDDEN_SIZE) -> Gemma3ForConditionalGeneration:
    """Make a Gemma 3 with its vision tower, as LTX-2 has it."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(
        text_config=_decoder_sizes(hidden_size),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=_GEMMA_SPECIAL.index("<image_soft_token>"),
        boi_token_index=_GEMMA_SPECIAL.index("<boi>"),
        eoi_token_index=_GEMMA_SPECIAL.index("<eoi>"),
    )
    return Gemma3ForConditionalGeneration(config).eval()


def glm_model(hidden_size: int = HIDDEN_SIZE) -> GlmModel:
    """Make a GLM-4, as CogView 4 has it."""
    from transformers import GlmConfig, GlmModel

    return GlmModel(GlmConfig(**_decoder_sizes(hidden_size), pad_token_id=0, eos_token_id=0)).eval()


def llama_model(hidden_size: int = HIDDEN_SIZE, layers: int = LAYERS) -> LlamaModel:
    """Make a Llama, as HunyuanVideo has it."""
    from transformers import LlamaConfig, LlamaModel

    return LlamaModel(LlamaConfig(**_decoder_sizes(hidden_size, layers))).eval()


def mistral3_model(hidden_size: int = HIDDEN_SIZE) -> Mistral3Model:
    """Make a Mistral 3 with its vision tower, as ERNIE-Image has it."""
    from transformers import Mistral3Config, Mistral3Model

    vision = {
        "model_type": "pixtral",
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "head_dim": hidden_size // HEADS,
        "image_size": 28,
        "patch_size": 14,
    }
    text = {"model_type": "ministral3", **_decoder_sizes(hidden_size)}
    return Mistral3Model(Mistral3Config(text_config=text, vision_config=vision, image_token_index=0)).eval()


def smollm3(hidden_size: int, vocabulary_size: int) -> SmolLM3ForCausalLM:
    """Make a SmolLM3, as Bria-Fibo has it.

    Args:
        hidden_size: Width of the hidden states.
        vocabulary_size: Rows of the embedding table.

    Returns:
        The model, in evaluation mode.
    """
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    sizes = {**_decoder_sizes(hidden_size), "vocab_size": vocabulary_size}
    config = SmolLM3Config(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True)
    return SmolLM3ForCausalLM(config).eval()
