"""Measurements survive the way between processes, and tables say what was measured."""

from pathlib import Path

import pytest

from bench.report import Measurement, comparison, gateway_cost, machine, markdown_table, replace_block


def measured(engine: str, workload: str, output_rate: float, *, prompt_tokens: int = 10) -> Measurement:
    return Measurement(engine, workload, seconds=100 / output_rate, prompt_tokens=prompt_tokens, output_tokens=100)


def test_a_line_carries_a_measurement():
    measurement = measured("tidegate", "decode, batch 1", 40)
    assert Measurement.from_line(measurement.to_line() + "\n") == measurement


@pytest.mark.parametrize("line", ["", "loading weights", "a RESULT {}"])
def test_other_lines_are_no_measurements(line: str):
    assert Measurement.from_line(line) is None


def test_rates():
    measurement = Measurement("e", "w", seconds=2.0, prompt_tokens=30, output_tokens=10)
    assert (measurement.output_rate, measurement.total_rate) == (5.0, 20.0)


def test_comparison_puts_ours_first_and_takes_medians():
    rows = comparison(
        [measured("peer", "decode", rate) for rate in (10, 20, 90)] + [measured("ours", "decode", 50)], ours="ours"
    )
    assert rows == [["output tokens/s", "decode"], ["ours", "50.0"], ["peer", "20.0, ours 2.50x"]]


def test_comparison_shows_total_rates_where_prompts_dominate_and_marks_what_is_missing():
    rows = comparison([measured("ours", "a", 10), measured("peer", "b", 10, prompt_tokens=900)], ours="ours")
    assert rows == [["output tokens/s", "a", "b"], ["ours", "10.0", "-"], ["peer", "-", "10.0 (total 100)"]]


def test_the_cost_of_a_gateway_is_a_ratio_and_what_it_adds():
    def timed(engine: str, rate: float, ttft_ms: float, tpot_ms: float | None) -> Measurement:
        return Measurement(engine, "decode", 100 / rate, 10, 100, ttft_ms=ttft_ms, tpot_ms=tpot_ms)

    alone = [timed("engine", rate, 20.0, 8.0) for rate in (40, 50, 80)]
    behind = [timed("server", 45, 26.5, 9.0), measured("server", "only here", 10), measured("peer", "decode", 10)]
    header, row = gateway_cost([*alone, *behind], alone="engine", behind="server")
    assert row == ["decode", "50.0", "45.0", "0.90", "20.0", "+6.5", "8.0", "+1.0"]
    assert len(header) == len(row)
    *_, untimed = gateway_cost([timed("e", 9, 1.0, None), timed("s", 9, 2.0, None)], alone="e", behind="s")
    assert untimed[-4:] == ["1.0", "+1.0", "-", "-"]


def test_markdown_table_has_one_cell_per_column():
    lines = markdown_table([["x", "y"], ["a", "1"]]).splitlines()
    assert lines == ["| x | y |", "| --- | ---: |", "| a | 1 |"]


def test_replace_block_touches_nothing_else(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- begin t -->\nold\n<!-- end t -->\nbelow\n")
    replace_block(page, "t", "new\n")
    replace_block(page, "t", "newer")
    assert page.read_text() == "above\n<!-- begin t -->\nnewer\n<!-- end t -->\nbelow\n"


@pytest.mark.parametrize(
    "text",
    ["nothing", "<!-- end t --> <!-- begin t -->", "<!-- begin t --> <!-- end t --> <!-- begin t --> <!-- end t -->"],
)
def test_replace_block_refuses_a_page_without_exactly_one_block(tmp_path: Path, text: str):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="must hold one"):
        replace_block(page, "t", "new")
    assert page.read_text() == text


def test_machine_names_cores_and_memory():
    assert "cores" in machine()
    assert "GiB memory" in machine()
