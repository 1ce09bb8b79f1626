import pytest

from worker.model.philox import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, int, int, int]
) -> None:
    """The vectors of Random123's kat_vectors for philox4x32 with 10 rounds."""
    assert philox4x32(counter, key) == expected


def test_uniform_uses_every_bit_of_seed_position_and_stream() -> None:
    arguments = [(1 << bit, 0, 0) for bit in range(64)]
    arguments += [(0, 1 << bit, 0) for bit in range(64)] + [(0, 0, 1 << bit) for bit in range(32)] + [(0, 0, 0)]
    values = {uniform(*triple) for triple in arguments}
    assert len(values) == len(arguments)
    assert all(0.0 < value < 1.0 for value in values)


def test_uniform_is_uniform_and_never_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [uniform(7, position) for position in range(4000)]
    counts = [sum(i <= value * 20 < i + 1 for value in values) for i in range(20)]
    assert sum((count - 200) ** 2 / 200 for count in counts) < 52  # chi-square, 19 degrees of freedom, p = 1e-4
    monkeypatch.setattr("worker.model.philox.philox4x32", lambda *_: (0xFFFFFFFF,) * 4)
    assert uniform(0, 0) == 1.0 - 2.0**-49
    monkeypatch.setattr("worker.model.philox.philox4x32", lambda *_: (0,) * 4)
    assert uniform(0, 0) == 2.0**-49
