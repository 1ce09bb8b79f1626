"""Turns the vocabulary in a GGUF file's metadata into a tokenizer of the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from worker.model.loaded_model import ModelLoadError, TextParts

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # token types; all others are plain
# These end a turn wherever they are control tokens, whatever the metadata says.
_END_TEXTS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")

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
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(
            f"tokenizer {kind} is not supported in GGUF files; supported are gpt2 (byte-level BPE) and llama "
            "(SentencePiece BPE)"
        )
    tokens: list[str] = _need(metadata, "tokenizer.ggml.tokens")
    if len(tokens) > vocab_size:
        raise ModelLoadError(f"the vocabulary has {len(tokens)} tokens, the embedding {vocab_size} rows")
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelLoadError(f"the vocabulary has {len(tokens)} tokens, and types for {len(types)}")
    if kind == "gpt2":
        variant = metadata.get("tokenizer.ggml.pre", "default")
        tokenizer, has_bos = _byte_level(tokens, _need(metadata, "tokenizer.ggml.merges"), types, variant)
    else:
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        tokenizer, has_bos = _sentence_piece(tokens, _need(metadata, "tokenizer.ggml.scores"), types, prefix), True
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL, _UNKNOWN))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    bos = _special(metadata, "bos", tokens)
    eos = _special(metadata, "eos", tokens)
    ends = [eos, *(_special(metadata, name, tokens) for name in ("eot", "eom"))]
    ends += [index for index, token in enumerate(tokens) if token in _END_TEXTS and types[index] == _CONTROL]
    return TextParts(
        tokenizer_json=tokenizer.to_str().encode(),
        chat_template=metadata.get("tokenizer.chat_template", ""),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        bos_token_id=bos,
        add_bos_token=bos is not None and bool(metadata.get("tokenizer.ggml.add_bos_token", has_bos)),
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


def _need(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ModelLoadError(f"the file has no {key} in its metadata")
    return metadata[key]


def _byte_level(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], variant: str
) -> tuple[Tokenizer, bool]:
    """The tokenizer without its added tokens, and whether text starts with bos where the file does not say."""
    if variant not in _PRE_TOKENIZERS:
        raise ModelLoadError(f"pre-tokenizer {variant} is not supported; supported are {', '.join(_PRE_TOKENIZERS)}")
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        pairs.append((left, right))
    try:
        tokenizer = Tokenizer(models.BPE(_vocabulary(tokens, types), pairs, ignore_merges=variant in _WHOLE_WORDS))
    except Exception as error:
        raise ModelLoadError(f"the vocabulary is damaged: {error}") from error
    if variant in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[variant]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, variant in _BOS_BY_DEFAULT


def _sentence_piece(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], prefix: bool) -> Tokenizer:
    """The tokenizer without its added tokens; unknown characters become byte tokens.

    Where SentencePiece joins the neighbours whose union has the best score, this joins by the first rule of a list: all
    ways to split every token in two, the best scored tokens first.
    """
    vocabulary = _vocabulary(tokens, types)
    joined = {token for token, kind in zip(tokens, types, strict=True) if kind not in (_UNKNOWN, _CONTROL, _UNUSED)}
    rules = [
        (scores[vocabulary[token]], at, len(token) - at, token[:at], token[at:])
        for token in tokens
        if token in joined
        for at in range(1, len(token))
        if token[:at] in joined and token[at:] in joined
    ]
    rules.sort(key=lambda rule: rule[:3], reverse=True)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    pairs = [rule[3:] for rule in rules]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _vocabulary(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED}


def _added(tokens: Sequence[str], types: Sequence[int], *kinds: int) -> list[AddedToken]:
    """Tokens that are found in text before anything else happens to it."""
    return [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind in kinds]
