"""vLLM's CPU engine on the measured workloads; runs in vLLM's own virtual environment (see bench/peers.py)."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.report import Measurement
from bench.workload import SUITE, Work, decode_only

if TYPE_CHECKING:
    from vllm import LLM  # type: ignore[import-not-found]


def measure(engine: LLM, name: str, work: list[Work]) -> Measurement:
    """Submits everything at once and waits for the last token."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(request.prompt)} for request in work]
    params = [
        SamplingParams(temperature=0, max_tokens=request.num_output, ignore_eos=True, detokenize=False)
        for request in work
    ]
    engine.reset_prefix_cache()
    start = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Measurement("vllm cpu, bf16", name, seconds, sum(len(request.prompt) for request in work), made)


def main() -> None:
    """Prints one line per measured workload."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="Hugging Face folder with bfloat16 weights")
    parser.add_argument("--workload", action="append", choices=SUITE, help="only these; default: all")
    arguments = parser.parse_args()
    from vllm import LLM

    engine = LLM(
        str(arguments.weights),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=64,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
    )
    measure(engine, "warm-up", decode_only(1, num_output=8))
    for name in arguments.workload or SUITE:
        print(measure(engine, name, SUITE[name]()).to_line(), flush=True)


if __name__ == "__main__":
    main()
