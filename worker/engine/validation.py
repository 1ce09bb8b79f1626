"""Can this submission ever be served here?"""

from __future__ import annotations

from collections.abc import Sequence

from common.errors import InvalidRequestError
from common.types import ModelLimits, Reason, SamplingParams
from common.window import num_held_blocks


def check_submission(
    limits: ModelLimits,
    max_kv_tokens: int,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    sampling: SamplingParams,
) -> None:
    """Raises InvalidRequestError, saying what is needed and what there is, if it can never be served.

    `max_kv_tokens` of this request fit into the pool.
    """
    _check_lengths(limits, max_kv_tokens, len(prompt_token_ids), len(output_token_ids), sampling)
    for name, token_ids in (
        ("prompt_token_ids", prompt_token_ids),
        ("output_token_ids", output_token_ids),
        ("sampling.stop_token_ids", sampling.stop_token_ids),
        ("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size)
            raise InvalidRequestError.of_field(
                name, f"{wrong} is not a token id; allowed are 0 to {limits.vocab_size - 1}", Reason.INVALID_TOKEN_ID
            )


def check_window(limits: ModelLimits, sampling: SamplingParams) -> None:
    """Raises InvalidRequestError if the request asks to see nothing, or more than the model sees."""
    tokens, sinks = sampling.kv_window_tokens, sampling.kv_sink_tokens
    if tokens is None:
        return
    if not 1 <= tokens <= limits.max_window_tokens:
        what = f"{tokens}; allowed are 1 to {limits.max_window_tokens}"
        raise InvalidRequestError.of_field("sampling.kv_window_tokens", what)
    if not 0 <= sinks <= tokens:
        what = f"{sinks}; allowed are 0 to kv_window_tokens = {tokens}"
        raise InvalidRequestError.of_field("sampling.kv_sink_tokens", what)


def _check_lengths(
    limits: ModelLimits, max_kv_tokens: int, num_prompt: int, num_output: int, sampling: SamplingParams
) -> None:
    if num_prompt == 0:
        raise InvalidRequestError.of_field("prompt_token_ids", "empty; at least 1 is needed", Reason.EMPTY_PROMPT)
    if sampling.max_tokens < 1:
        raise InvalidRequestError.of_field("sampling.max_tokens", f"{sampling.max_tokens}; at least 1 is needed")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise InvalidRequestError.of_field(
            "sampling.min_tokens", f"{sampling.min_tokens}; allowed are 0 to max_tokens = {sampling.max_tokens}"
        )
    if num_output >= sampling.max_tokens:
        raise InvalidRequestError.of_field(
            "output_token_ids", f"{num_output} tokens; nothing is left of max_tokens = {sampling.max_tokens}"
        )
    if num_prompt + num_output >= limits.context_length:
        raise InvalidRequestError.of_field(
            "prompt_token_ids",
            f"{num_prompt} tokens, and {num_output} of output; the context holds {limits.context_length} with at least "
            "one that is new",
            Reason.PROMPT_TOO_LONG,
        )
    # The prompt and its first output token; the last token's own KV is never needed, so a resumed one may be full.
    num_needed = max(num_prompt + 1, num_prompt + num_output)
    if num_needed > max_kv_tokens:
        num_blocks = num_held_blocks(limits.narrowed(sampling.window), num_needed, 1, limits.block_size)
        raise InvalidRequestError.of_field(
            "prompt_token_ids",
            f"{num_prompt} tokens, and {max(1, num_output)} of output, need {num_blocks} KV blocks of "
            f"{limits.block_size} tokens; the pool has {limits.num_blocks}",
            Reason.NEVER_FITS,
        )
