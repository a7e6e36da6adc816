"""The numbers to plan with on the page equal those that the generator makes from the records."""

from __future__ import annotations

import pytest

from bench.report import numbers


def test_the_page_is_what_the_records_say() -> None:
    assert numbers.PLACE.have(numbers.section(numbers.read("numbers"), numbers.read("streams"))), (
        "run python -m bench.report.numbers"
    )


def test_a_figure_that_was_changed_by_hand_is_seen() -> None:
    record, streams = numbers.read("numbers"), numbers.read("streams")
    before = numbers.section(record, streams)
    record["operators"]["intention"]["float32"]["normal"]["results"][0] *= 3
    assert numbers.section(record, streams) != before
    assert "{" not in numbers.LAWS and "{" not in before.replace("{where}", ""), "every place is filled"


@pytest.mark.parametrize("figure, shown", [(1.23e-7, "1.2e-7"), (2e-10, "2e-10"), (0.0, "0"), (0.031, "3.1e-2")])
def test_figures_are_short(figure: float, shown: str) -> None:
    assert numbers._short(figure) == shown
