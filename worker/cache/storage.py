"""The memory behind the KV blocks: one tensor, block-major, so that a block is one contiguous piece over its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.cache.groups import group_layers
from worker.kernels import LayerCache
from worker.model.config import ModelConfig

_MIB = 1024 * 1024
_READABLE_TAIL_BYTES = 128  # kernels load whole vectors at the end of the last block


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a KV block: [layer of its group, key or value, kv_head, block_size * head_dim]."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.block_size % 8 or not 8 <= self.block_size <= 64:
            raise ValueError(f"block_size is {self.block_size}, allowed: multiples of 8 from 8 to 64")
        if self.head_dim % 8 or not 16 <= self.head_dim <= 256:
            raise ValueError(f"head_dim is {self.head_dim}, allowed: multiples of 8 from 16 to 256")
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"KV dtype is {self.dtype}, allowed: float32, bfloat16")

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, dtype: torch.dtype) -> KVLayout:
        """The layout for a model."""
        layers = group_layers(config.windows).layers_per_block
        return cls(layers, config.num_kv_heads, config.head_dim, block_size, dtype)

    @property
    def block_elements(self) -> int:
        """Elements of one block over all layers of a group."""
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group."""
        return self.block_elements * self.dtype.itemsize

    def num_blocks_in(self, kv_cache_mib: int) -> int:
        """Blocks that fit into `kv_cache_mib` MiB.

        Raises ValueError if none does.
        """
        count = kv_cache_mib * _MIB // self.block_bytes
        if count < 1:
            raise ValueError(f"kv_cache_mib is {kv_cache_mib}, one block alone needs {self.block_bytes / _MIB:.2f} MiB")
        return count


class KVStorage:
    """Owns the cache tensor; kernels write to it through `layer`, swapping copies whole blocks through `block`."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, at least 1 is needed")
        self.layout = layout
        self.num_blocks = num_blocks
        tail = _READABLE_TAIL_BYTES // layout.dtype.itemsize
        # Zeroed, since 0 * garbage may be NaN; the operating system maps pages only when they are first written.
        flat = torch.zeros(num_blocks * layout.block_elements + tail, dtype=layout.dtype)
        self._blocks = flat[: num_blocks * layout.block_elements].view(num_blocks, layout.num_layers, 2, -1)

    def __repr__(self) -> str:
        return f"KVStorage(num_blocks={self.num_blocks}, block_bytes={self.layout.block_bytes})"

    def layer(self, index: int) -> LayerCache:
        """Keys and values of the layers at one place in their groups, as views."""
        layout = self.layout
        pack = 4 // layout.dtype.itemsize
        heads, dim, size = layout.num_kv_heads, layout.head_dim, layout.block_size
        keys = self._blocks[:, index, 0].view(self.num_blocks, heads, dim // pack, size, pack)
        values = self._blocks[:, index, 1].view(self.num_blocks, heads, size // pack, dim, pack)
        return LayerCache(keys, values)

    def block(self, block_id: int) -> torch.Tensor:
        """All of one block: contiguous, [block_elements]."""
        return self._blocks[block_id].view(-1)
