"""The tokenizer from GGUF metadata gives the ids that `transformers` gives for the original files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import LlamaConverter
from transformers.tokenization_utils_base import generate_merges

from tests.support.gguf import tokenizer_metadata
from tests.support.models import SPECIAL_TOKENS, byte_level_tokenizer, real_model_path, single_digits
from worker.model.gguf_tokenizer import text_parts
from worker.model.loaded_model import ModelLoadError
from worker.model.weights import load_model

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "It's they're WE'LL I'd 'tis ''s",
    "0 12 345 6789 1234567890 3.14159 1,000,000 ¼ ² Ⅷ ٣٤ 1st",
    "a  b   c    d\t\te \t f\n\n\ng\r\nh \n \n i    ",
    "   leading and trailing   ",
    "def f(x):\n    return {x: [i ** 2 for i in range(10)]}  # comment\n\n\tif (a != b) { c += 1; }\n",
    "Größe naïve façade Straße ǅ ﬁ İstanbul",
    "e\u0301 vs \u00e9, \u1e9b\u0323, \u212b",
    "北京市とカタカナ 한국어 עברית العربية हिन्दी ไทย",
    "👍🏽 👩‍👩‍👧‍👦 🇩🇪 ❤️ \U0001f9ff",
    "zero\u200bwidth \u00a0nbsp \u3000ideographic \u2028line \ufeffbom",
    "control \x00\x01\x1b[0m \x7f",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|> <|im_end|> <|endoftext|><|endoftext|>",
    "broken <|im_start and |im_end|> text",
    "https://example.com/a/b?c=d&e=f#g",
    "\ud7ff\ue000\U0010ffff",
]
TRAINING = [
    "the other then there three lethe within another the rest of the weather and the north",
    "a tenth of the earth threw nothing other than bread at the heart there",
    *TEXTS[2:10],
]
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


ORIGINALS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "smollm": single_digits,
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "qwen2": lambda: split(QWEN2_SPLIT),
    "llama-bpe": lambda: split(LLAMA3_SPLIT),
}


def original(variant: str) -> Tokenizer:
    """As the model's own tokenizer.json has it."""
    tokenizer = byte_level_tokenizer(ORIGINALS[variant](), vocab_size=500)
    if variant == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def converted(tokenizer: Tokenizer, variant: str | None) -> Tokenizer:
    return Tokenizer.from_buffer(text_parts(tokenizer_metadata(tokenizer, variant), 500).tokenizer_json)


def check_same(ours: Tokenizer, theirs: PreTrainedTokenizerBase, text: str) -> None:
    ids = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, add_special_tokens=False).ids == ids
    for skip in (False, True):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


def sentence_piece_metadata() -> dict[str, object]:
    """A vocabulary as SentencePiece orders it: control tokens, byte tokens, joined pieces, characters."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.Metaspace()
    learned.train_from_iterator(TRAINING * 3, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    pieces = sorted(learned.get_vocab(), key=lambda piece: (len(piece) == 1, learned.get_vocab()[piece]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(rank) for rank in range(len(pieces))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@pytest.fixture(scope="module")
def sentence_piece_pair() -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    """Ours, and one whose parts `transformers` makes: pair rules from its own derivation, in the Llama 2 tokenizer."""
    metadata = sentence_piece_metadata()
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = dict(zip(vocabulary, metadata["tokenizer.ggml.scores"], strict=True))
    merges = generate_merges(vocabulary, scores, skip_tokens=["<unk>", "<s>", "</s>"])
    theirs = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    converter = LlamaConverter.__new__(LlamaConverter)
    converter.original_tokenizer = None
    theirs.normalizer = converter.normalizer(None)
    theirs.decoder = converter.decoder("▁", True)
    theirs.add_special_tokens(["<unk>", "<s>", "</s>"])
    ours = Tokenizer.from_buffer(text_parts(metadata, 2000).tokenizer_json)
    return ours, PreTrainedTokenizerFast(tokenizer_object=theirs)


@pytest.mark.parametrize("text", [*TEXTS, "<s>Hello</s> <s> again", "<0x41> <unk>"])
def test_sentence_piece_texts(sentence_piece_pair: tuple[Tokenizer, PreTrainedTokenizerBase], text: str) -> None:
    check_same(*sentence_piece_pair, text)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet="abethrn ▁<s>/\n", max_size=60))
def test_any_sentence_piece_text(sentence_piece_pair: tuple[Tokenizer, PreTrainedTokenizerBase], text: str) -> None:
    check_same(*sentence_piece_pair, text)


def test_sentence_piece_settings() -> None:
    metadata = sentence_piece_metadata()
    parts = text_parts(metadata, 2000)
    assert (parts.add_bos_token, parts.bos_token, parts.eos_token_ids) == (True, "<s>", (2,))
    assert Tokenizer.from_buffer(parts.tokenizer_json).encode("the").tokens == ["▁the"]
    bare = text_parts(metadata | {"tokenizer.ggml.add_space_prefix": False}, 2000)
    assert Tokenizer.from_buffer(bare.tokenizer_json).encode("the").tokens == ["the"]
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.ggml\.scores"):
        text_parts(metadata, 2000)


@pytest.fixture(scope="module", params=ORIGINALS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, object]:
    tokenizer = original(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return converted(tokenizer, request.param), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_texts(pair: tuple[Tokenizer, PreTrainedTokenizerBase], text: str) -> None:
    check_same(*pair, text)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet="ab 'sS12\n\t<|im_start>é", max_size=40))
def test_any_text(pair: tuple[Tokenizer, PreTrainedTokenizerBase], text: str) -> None:
    check_same(*pair, text)


def test_without_a_named_variant_punctuation_is_split_first() -> None:
    """The oldest files name none; llama.cpp then splits punctuation, words and groups of three digits."""
    ours = converted(original("gpt-2"), None)
    pieces = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("a+b, it's 12345!")]
    assert pieces == ["a", "+", "b", ",", "Ġit", "'", "s", "Ġ", "123", "45", "!"]


def test_whole_words_need_no_merges_in_llama3_vocabularies() -> None:
    tokenizer = original("llama-bpe")
    metadata = tokenizer_metadata(tokenizer, "llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["zqxj"]  # no merges lead to it
    metadata["tokenizer.ggml.token_type"] += [1]
    ours = Tokenizer.from_buffer(text_parts(metadata, 600).tokenizer_json)
    assert ours.encode("zqxj").ids == [tokenizer.get_vocab_size()]
    metadata["tokenizer.ggml.pre"] = "qwen2"
    assert len(Tokenizer.from_buffer(text_parts(metadata, 600).tokenizer_json).encode("zqxj").ids) == 4


def test_token_types() -> None:
    tokenizer = original("smollm")
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    metadata = tokenizer_metadata(tokenizer, "smollm")
    tool = tokenizer.token_to_id("<tool>")
    metadata["tokenizer.ggml.token_type"][tool] = 4  # found in text, and shown as text
    metadata["tokenizer.ggml.tokens"] += ["[PAD]"]
    metadata["tokenizer.ggml.token_type"] += [5]  # fills a row of the embedding, and is no token
    ours = Tokenizer.from_buffer(text_parts(metadata, 600).tokenizer_json)
    assert ours.encode("x<tool>").ids[-1] == tool
    assert ours.decode([tool]) == "<tool>"
    assert ours.decode([2]) == ""
    assert ours.id_to_token(tool + 1) is None
    assert tool + 1 not in ours.encode("[PAD]").ids


def test_special_tokens_and_template() -> None:
    metadata = tokenizer_metadata(original("smollm"), "smollm")
    parts = text_parts(metadata, 600)
    assert parts.eos_token_ids == (2,)
    assert (parts.bos_token_id, parts.bos_token, parts.eos_token) == (1, SPECIAL_TOKENS[1], SPECIAL_TOKENS[2])
    assert parts.add_bos_token is False
    assert parts.chat_template == "{{ messages[0]['content'] }}"
    metadata |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 0}
    del metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.chat_template"]
    parts = text_parts(metadata, 600)
    assert parts.eos_token_ids == (0, 7, 2), "the end of a turn ends generation even if the file forgets to say so"
    assert parts.chat_template == ""
    assert parts.add_bos_token is False
    assert text_parts(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, 600).add_bos_token is True
    del metadata["tokenizer.ggml.bos_token_id"]
    parts = text_parts(metadata | {"tokenizer.ggml.pre": "llama-bpe"}, 600)
    assert (parts.bos_token_id, parts.bos_token, parts.add_bos_token) == (None, "", False)


@pytest.mark.model
def test_the_real_models_tokenizer() -> None:
    path: Path = real_model_path()
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # It reads no tokenizer.ggml.pre, and splits "¼" or " ٣" otherwise than the model's own tokenizer.json.
    theirs.backend_tokenizer.pre_tokenizer = single_digits()
    parts = load_model(path, torch.bfloat16).text
    ours = Tokenizer.from_buffer(parts.tokenizer_json)
    for text in TEXTS:
        check_same(ours, theirs, text)
    assert parts.eos_token_ids == (theirs.eos_token_id,)
    assert parts.chat_template == theirs.chat_template
    assert ours.get_vocab_size() == 49152
