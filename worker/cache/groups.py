"""Which layers keep their KV in the same blocks: those that see the same tokens, so that the blocks end together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_WASTE = 1 / 8
"""Of a model's layers, places in blocks that may stay empty, for fewer block tables."""


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Every group has a block table of its own; all blocks hold as many layers, so that one pool serves all groups."""

    windows: tuple[int | None, ...]  # of each group, in tokens; None: its layers see everything
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in the group's blocks
    layers_per_block: int

    @property
    def num_tables(self) -> int:
        """Block tables of a request."""
        return len(self.windows)


def group_layers(windows: Sequence[int | None]) -> LayerGroups:
    """Groups layers by their windows, in as few groups as leave no more than `MAX_WASTE` of the memory unused.

    Layers of one kind may be several groups, and the last group of a kind may have empty places.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    most = len(windows) * (1 + MAX_WASTE)
    size = max(n for n in range(1, max(counts) + 1) if n * sum(-(-count // n) for count in counts) <= most)
    places: dict[int, tuple[int, int]] = {}
    of_groups: list[int | None] = []
    for window, layers in kinds.items():
        for index, layer in enumerate(layers):
            places[layer] = (len(of_groups) + index // size, index % size)
        of_groups += [window] * -(-len(layers) // size)
    return LayerGroups(tuple(of_groups), tuple(places[layer] for layer in range(len(windows))), size)
