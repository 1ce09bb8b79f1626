"""Layers that see the same share blocks, and little memory is left unused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.cache.groups import MAX_WASTE, group_layers


@pytest.mark.parametrize(
    ("windows", "num_tables", "layers_per_block"),
    [
        ((None,) * 30, 1, 30),
        ((4096,) * 32, 1, 32),
        ((512, 512, 512, 512, 512, None) * 4 + (512, 512), 7, 4),  # Gemma 3 of 1B
        ((1024, 1024, 1024, 1024, 1024, None) * 5 + (1024,) * 4, 6, 6),  # of 4B
        ((None,) * 27 + (64,), 10, 3),
        ((None, 8), 2, 1),
    ],
)
def test_groups_of_known_models(windows: tuple[int | None, ...], num_tables: int, layers_per_block: int) -> None:
    groups = group_layers(windows)
    assert (groups.num_tables, groups.layers_per_block) == (num_tables, layers_per_block)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([None, 8, 64]), min_size=1, max_size=40))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows: list[int | None]) -> None:
    groups = group_layers(windows)
    assert len(set(groups.places)) == len(windows)
    assert all(groups.windows[group] == window for (group, _), window in zip(groups.places, windows, strict=True))
    assert all(place < groups.layers_per_block for _, place in groups.places)
    assert groups.num_tables * groups.layers_per_block <= len(windows) * (1 + MAX_WASTE)
