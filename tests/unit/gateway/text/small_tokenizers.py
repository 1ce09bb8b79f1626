"""Small tokenizers of the two families in use, and model descriptions around them."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from common.types import ModelDescription, ModelLimits
from gateway.text import TextModel

CORPUS = [
    "the quick brown fox jumps over the lazy dog, then the dog sleeps and the fox goes home",
    "Hello world! Hello there, how are you today? I am fine, thank you. STOP here. ENDEND",
    "def f(x):\n    return x + 1\n\nfor i in range(10):\n    print(f(i))",
    "中文和日本語のテキスト 😀👍🏽👩‍👩‍👧‍👦 é ü ñ",
]

CHATML = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|pad|>", "<|start|>", "<|end|>"]
LLAMA = "{{ bos_token }}{% for m in messages %}{{ '[INST] ' ~ m.content | trim ~ ' [/INST]' ~ eos_token }}{% endfor %}"


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3, Qwen, SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIALS,
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False), "two words"])
    return tokenizer


@cache
def byte_fallback() -> Tokenizer:
    """Sentencepiece-like BPE with byte tokens, as Llama 2 and Mistral."""
    base = Tokenizer(models.BPE())
    base.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    base.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=150, show_progress=False))
    learned = base.get_vocab()
    names = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *sorted(learned, key=learned.__getitem__),
    ]
    merges = [(left, right) for left, right in json.loads(base.to_str())["model"]["merges"]]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """A tokenizer whose decoder drops the space mark of the first token only."""
    tokenizer = Tokenizer.from_str(byte_fallback().to_str())
    tokenizer.normalizer = normalizers.Replace(Regex("\t"), " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def describe(tokenizer: Tokenizer, template: str, *, add_bos: bool = False, **changes: object) -> ModelDescription:
    bos, eos = ("<|start|>", "<|end|>") if tokenizer.token_to_id("<|end|>") is not None else ("<s>", "</s>")
    fields = {
        "limits": ModelLimits("small", 1024, tokenizer.get_vocab_size() + 8, 16, 64, 8),
        "tokenizer_json": tokenizer.to_str().encode(),
        "chat_template": template,
        "eos_token_ids": (tokenizer.token_to_id(eos),),
        "bos_token_id": tokenizer.token_to_id(bos),
        "add_bos_token": add_bos,
        "bos_token": bos,
        "eos_token": eos,
    }
    return ModelDescription(**(fields | changes))  # type: ignore[arg-type]


@cache
def chatml_model() -> TextModel:
    return TextModel(describe(byte_level(), CHATML))


@cache
def llama_model() -> TextModel:
    return TextModel(describe(byte_fallback(), LLAMA, add_bos=True))


@cache
def metaspace_model() -> TextModel:
    return TextModel(describe(metaspace(), ""))
