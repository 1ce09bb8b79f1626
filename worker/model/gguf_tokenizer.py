"""Turns the vocabulary in a GGUF file's metadata into a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker.model.loaded_model import ModelLoadError, TextParts

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5  # token types; all others are plain
_END_TEXTS = ("<|im_end|>", "<|eot_id|>")  # end a turn wherever they are control tokens, whatever the metadata says

# The published patterns of the models after which llama.cpp names its pre-tokenizers.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


def _split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": lambda: _split(*_DEFAULT),
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
    "llama-v3": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "deepseek-r1-qwen": lambda: _split(_QWEN2),
    "tekken": lambda: _split(_TEKKEN),
}
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "tekken"}  # a word that is a token needs no merges
_COMPOSED = {"qwen2", "deepseek-r1-qwen"}  # text is brought into Unicode's composed form first
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def text_parts(metadata: Mapping[str, Any], vocab_size: int) -> TextParts:
    """Tokenizer, chat template and special tokens of a file's `tokenizer.*` metadata.

    Args:
        metadata: of the whole file.
        vocab_size: rows of the embedding; the vocabulary may have fewer tokens, not more.

    Raises:
        ModelLoadError: the tokenizer is of a kind that is not supported, or is incomplete.
    """
    kind, variant = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise ModelLoadError(f"tokenizer {kind} is not supported in GGUF files; supported is gpt2 (byte-level BPE)")
    if variant not in _PRE_TOKENIZERS:
        raise ModelLoadError(f"pre-tokenizer {variant} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}")
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        merges: list[str] = metadata["tokenizer.ggml.merges"]
    except KeyError as error:
        raise ModelLoadError(f"the file has no {error.args[0]} in its metadata") from error
    if len(tokens) > vocab_size:
        raise ModelLoadError(f"the vocabulary has {len(tokens)} tokens, the embedding {vocab_size} rows")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    bos = _special(metadata, "bos", tokens)
    eos = _special(metadata, "eos", tokens)
    ends = [eos, *(_special(metadata, name, tokens) for name in ("eot", "eom"))]
    ends += [index for index, token in enumerate(tokens) if token in _END_TEXTS and types[index] == _CONTROL]
    return TextParts(
        tokenizer_json=_tokenizer(tokens, merges, types, variant).to_str().encode(),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=bos,
        add_bos_token=bos is not None
        and bool(metadata.get("tokenizer.ggml.add_bos_token", variant in _BOS_BY_DEFAULT)),
        bos_token="" if bos is None else tokens[bos],
        eos_token="" if eos is None else tokens[eos],
    )


def _special(metadata: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if value is None:
        return None
    if not 0 <= value < len(tokens):
        raise ModelLoadError(f"{name} token id {value} is outside the vocabulary of {len(tokens)} tokens")
    return int(value)


def _tokenizer(tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], variant: str) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=variant in _WHOLE_WORDS))
    except Exception as error:
        raise ModelLoadError(f"the vocabulary is damaged: {error}") from error
    if variant in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[variant]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    return tokenizer


def _added(tokens: Sequence[str], types: Sequence[int], kind: int) -> list[AddedToken]:
    """Tokens that are found in text before anything else happens to it."""
    return [AddedToken(token, normalized=False) for token, its in zip(tokens, types, strict=True) if its == kind]
