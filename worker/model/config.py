"""The shape of a decoder of the llama or Gemma 3 family, whatever file it came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts; fields as in Hugging Face configs."""

    kind: str  # "linear", "dynamic", "llama3" or "yarn"
    factor: float
    original_max_positions: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: computed from factor


class Activation(Enum):
    """What the gate of the MLP passes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder: Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma 3.

    Weights come as a mapping of canonical names to tensors, shapes [out, in] for matrices:
    `embed` [vocab, hidden]; `norm` [hidden]; `lm_head` [vocab, hidden] (absent if `tie_embeddings`); for layer i
    `layers.{i}.` + `attn_norm`, `mlp_norm` [hidden]; `q` [heads*head_dim, hidden]; `k`, `v` [kv_heads*head_dim,
    hidden]; `o` [hidden, heads*head_dim]; `q_bias`, `k_bias`, `v_bias` (if `attention_bias`), `o_bias` (if `o_bias`);
    `q_norm`, `k_norm` [head_dim] (if `qk_norm`); `gate`, `up` [intermediate, hidden], `down` [hidden, intermediate].
    `attn_post_norm`, `mlp_post_norm` [hidden] (if `post_norms`). Q and K rows are in Hugging Face's order (the two
    rotary halves apart). What every norm multiplies with is `norm_offset` + its weight.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    o_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()  # tokens that each layer's queries see, themselves included; None: all
    local_rope_theta: float | None = None  # of layers with a window, without scaling; None: as in the others
    activation: Activation = Activation.SILU
    post_norms: bool = False  # on what attention and MLP add to the residual stream
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return self.layer_windows or (None,) * self.num_layers


def stretched_positions(max_positions: int, scaling: RopeScaling | None) -> int:
    """The context of a model whose file names `max_positions`: the kinds that are switched on for longer text say so.

    A file with "dynamic" names the original length. One with "yarn" names either, for the same weights serve both.
    """
    if scaling is None or scaling.kind not in ("dynamic", "yarn"):
        return max_positions
    return max(max_positions, round(scaling.original_max_positions * scaling.factor))
