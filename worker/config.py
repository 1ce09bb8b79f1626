"""What a worker can be told; environment variables start with TIDEGATE_WORKER_, flags have the same names."""

from __future__ import annotations

import os
import secrets
import socket

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from common.config import Settings
from worker.engine.modes import DEFAULT_MODE, MODES


def _default_worker_id() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


def _default_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class WorkerSettings(Settings):
    """Model, memory, batching, and who is told that this worker exists."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_WORKER_")

    model: str = Field("", description="GGUF file or Hugging Face folder; empty fetches and caches the default model")
    model_name: str = Field("", description="name that clients ask for; empty takes the one in the model's files")
    dtype: str = Field(
        "auto",
        pattern="^(auto|float32|bfloat16)$",
        description="of weights and KV cache; auto: bfloat16 where the CPU multiplies it in hardware, else float32",
    )
    kv_cache_mib: int = Field(
        1024, ge=1, description="MiB of KV cache, taken at start; it bounds how many tokens all requests hold together"
    )
    block_size: int = Field(
        16, ge=8, le=64, multiple_of=8, description="tokens per KV block; larger shares fewer prefix tokens"
    )
    max_num_seqs: int = Field(
        64, ge=1, le=4096, description="requests in a step at most; more raise throughput and the time per token"
    )
    max_num_batched_tokens: int = Field(
        512, ge=1, description="tokens in a step at most; more speed up prompts and lengthen the pause between tokens"
    )
    scheduling_mode: str = Field(
        DEFAULT_MODE,
        pattern=f"^({'|'.join(MODES)})$",
        description="how requests are batched: static and client (a batch comes and goes together; client gathers it "
        "first), continuous (in and out at every step, longest length reserved), paged (blocks as they grow), full "
        "(prefixes shared, new requests first, long ones yield)",
    )
    step_budget_ms: float = Field(
        50.0,
        gt=0,
        description="a step's length while prompts are computed, mode full; less shortens every pause. Up to "
        "first_chunk_ms where an eighth of it would not pay for what a step takes whatever it computes",
    )
    first_chunk_ms: float = Field(
        100.0,
        ge=0,
        description="a new request's wait until long ones make way for it, and a step's longest time, mode full",
    )
    long_after_steps: int = Field(
        128, ge=1, description="decode steps without a break after which a request yields to new ones, mode full"
    )
    hand_back_s: float = Field(
        5.0,
        ge=0,
        description="seconds a preempted long request waits for memory until another worker may have it, mode full",
    )
    gather_ms: float = Field(50.0, ge=0, description="how long the first of a batch waits for others, mode client")
    context_limit: int = Field(
        0, ge=0, description="tokens of prompt and output together; 0: what the model was trained for"
    )
    kv_window_tokens: int = Field(
        0,
        ge=0,
        description="tokens that a token sees of its own sequence; older ones leave the KV cache, so that a request of "
        "any length needs the same memory; 0: what the model was trained for",
    )
    kv_sink_tokens: int = Field(
        4, ge=0, description="first tokens of a sequence that stay visible besides kv_window_tokens, for stable answers"
    )
    swap_mib: int = Field(
        64,
        ge=0,
        description="MiB of host memory for what preempted requests had computed, mode full with prefix_cache; what "
        "does not fit is computed again; 0: none",
    )
    prefix_cache: bool = Field(True, description="keep finished requests' blocks for later prompts that start alike")
    threads: int = Field(
        default_factory=_default_threads, ge=1, description="compute threads; more than cores makes steps slower"
    )
    kernels: str = Field("cpu", description="backend that computes: cpu, or reference (plain torch, slow)")
    trace: str = Field(
        "",
        description="file that every step is recorded in, for chrome://tracing or ui.perfetto.dev; empty: none",
        validation_alias="TIDEGATE_TRACE",
    )
    max_loop_age_s: float = Field(
        30.0, gt=0, description="seconds a step may take; then health says NOT_SERVING until it ends"
    )
    gateways: str = Field("", description="host:port of every gateway, comma-separated, to announce this worker to")
    advertise: str = Field(
        "", description="host:port where gateways dial this worker; empty: the address it reaches them from"
    )
    worker_id: str = Field(
        default_factory=_default_worker_id,
        pattern=r"^[A-Za-z0-9._:-]{1,128}$",
        description="unique in the fleet; keep it over restarts to be recognised",
    )

    @field_validator("gateways")
    @classmethod
    def _check_gateways(cls, value: str) -> str:
        for address in value.split(","):
            if address.strip() and not address.strip().rpartition(":")[2].isdigit():
                raise ValueError(f"'{address.strip()}' is not host:port")
        return value

    @property
    def gateway_addresses(self) -> tuple[str, ...]:
        """The gateways as host:port, without repeats."""
        return tuple(dict.fromkeys(address.strip() for address in self.gateways.split(",") if address.strip()))
