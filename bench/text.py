"""Measures the gateway's way from token ids to text on one core: `python -m bench.text [MODEL]`.

Many streams take one token per push, in turn, as they come from a worker's steps. MODEL is a `tokenizers` file
(tokenizer.json) or a GGUF file; without it a small byte-level tokenizer is made on the spot.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.types import ModelDescription, ModelLimits
from gateway.text import TextModel, TextStream

TEXT = (
    "Continuous batching admits and evicts requests after every step, so that no slot waits for the longest answer. "
    "Eine Anfrage wird gestellt; 请求在队列中等待 😀. The quick brown fox jumps over the lazy dog:\n\n    return x\n"
)
STOPS: dict[str, Sequence[str]] = {
    "no stop string": (),
    "2 stop strings": ("\nUser:", "</answer>"),
    "16 stop strings": tuple(f"{mark} stop {index} {mark}" for index, mark in enumerate("#*=~+|@$%^&_?!<>")),
}


def small_tokenizer() -> bytes:
    """Byte-level, without merges: a token per byte, the worst case of unfinished characters."""
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def tokenizer_of(path: Path | None) -> bytes:
    """The tokenizer file of a model."""
    if path is None:
        return small_tokenizer()
    if path.suffix != ".gguf":
        return path.read_bytes()
    from worker.model.gguf_header import read_header
    from worker.model.gguf_tokenizer import text_parts

    header = read_header(path)
    return text_parts(header.metadata, len(header.metadata["tokenizer.ggml.tokens"])).tokenizer_json


def text_model(tokenizer_json: bytes) -> TextModel:
    limits = ModelLimits("bench", 8192, 0, 16, 1, 1)
    return TextModel(ModelDescription(limits, tokenizer_json, "", (), None, False, "", ""))


def push_rate(model: TextModel, stop: Sequence[str], num_streams: int, num_tokens: int, max_push: int) -> float:
    """Tokens per second of `num_streams` streams that each take `num_tokens` in pushes of 1 to `max_push` tokens."""
    ids = model.encode_text(TEXT * (num_tokens // 20))[:num_tokens]
    rng = random.Random(0)
    streams = [TextStream(model, stop) for _ in range(num_streams)]
    start = time.perf_counter()
    at = 0
    while at < len(ids):
        size = rng.randint(1, max_push)
        for stream in streams:
            stream.push(ids[at : at + size])
        at += size
    for stream in streams:
        stream.flush()
    return num_streams * len(ids) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, help="tokenizer.json or a .gguf file")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1000, help="per stream")
    parser.add_argument("--repeats", type=int, default=3, help="the best is shown")
    options = parser.parse_args()
    model = text_model(tokenizer_of(options.model))
    table = Table("tokens/s on one core", "one token per push", "merged, 1 to 16 per push")
    for name, stop in STOPS.items():
        best = [
            max(push_rate(model, stop, options.streams, options.tokens, max_push) for _ in range(options.repeats))
            for max_push in (1, 16)
        ]
        table.add_row(name, *(f"{rate:,.0f}" for rate in best))
    console = Console()
    console.print(table)
    megabyte = TEXT * (1_000_000 // len(TEXT.encode()))
    start = time.perf_counter()
    num_tokens = len(model.encode_text(megabyte))
    console.print(f"encoding 1 MB of plain text: {time.perf_counter() - start:.2f} s, {num_tokens:,} tokens")


if __name__ == "__main__":
    main()
