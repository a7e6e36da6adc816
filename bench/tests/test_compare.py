"""Changes between two runs are distinguished from changes of the machine alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bench.report import compare as c
from bench.runs import Run, Spread

from . import synthetic
from .synthetic import EAGER, MIB, SDPA, edited, only

TARGET = "latent-forward-float32-D16-N100000"
OTHER = "latent-forward-float32-D8-N100000"


def planted(factor: float, group: str = TARGET, implementation: str = "native") -> synthetic.Speed:
    return lambda *row: factor if row == (group, implementation) else 1.0


def found(comparison: c.Comparison, group: str = TARGET) -> c.Change:
    (change,) = (one for one in comparison.changes if (one.group, one.implementation) == (group, "native"))
    return change


def notable(comparison: c.Comparison) -> list[tuple[str, str]]:
    return [(change.group, change.implementation) for change in comparison.changes if change.notable]


def without_target(run: Run) -> Run:
    return only(run, lambda row: (row.group, row.implementation) != (TARGET, "native"))


@pytest.mark.parametrize(("factor", "verdict"), [(1.2, "slower"), (1 / 1.2, "faster")])
def test_a_planted_change_of_a_fifth_is_seen(factor, verdict):
    comparison = c.compare(synthetic.run(1), synthetic.run(2, planted(factor)))
    change = found(comparison)
    assert change.verdict == verdict and change.change == pytest.approx(factor, rel=0.08) and 1 < change.noise < 1.18
    assert notable(comparison) == [(TARGET, "native")]
    assert comparison.by == "time" and not comparison.different and comparison.controls > 20


@pytest.mark.parametrize("noise", [0.005, 0.02, 0.05])
def test_noise_is_not_taken_for_a_change(noise):
    for seed in range(10, 40, 2):
        comparison = c.compare(synthetic.run(seed, noise=noise), synthetic.run(seed + 1, noise=noise))
        assert not notable(comparison), seed
        assert comparison.between == pytest.approx(math.sqrt(2) * noise, rel=0.6)


def test_a_slower_machine_is_no_slower_kernel():
    comparison = c.compare(synthetic.run(1), synthetic.run(2, lambda *_: 1.3))
    assert not notable(comparison) and comparison.drift == pytest.approx(1.3, rel=0.03)
    on_top = c.compare(synthetic.run(1), synthetic.run(2, lambda *row: 1.3 * planted(1.2)(*row)))
    assert notable(on_top) == [(TARGET, "native")]
    assert f"took {on_top.drift:.3f} times as long" in "\n".join(c.basis(on_top))


def test_where_peers_moved_ours_may_move_too():
    """If the machine disturbed a group as a whole, nothing is concluded; the same change with unchanged peers
    counts."""
    disturbed = {(TARGET, SDPA): 1.6, (TARGET, "native"): 1.3, (OTHER, "native"): 1.3}
    assert notable(c.compare(synthetic.run(1), synthetic.run(2, lambda *row: disturbed.get(row, 1.0)))) == [
        (OTHER, "native")
    ]


def test_a_peer_that_a_neighbour_disturbed_does_not_hide_a_change():
    comparison = c.compare(
        synthetic.run(1), synthetic.run(2, lambda *row: 3.0 if row == (OTHER, SDPA) else planted(1.2)(*row))
    )
    assert notable(comparison) == [(TARGET, "native")]


def test_noise_within_a_row_is_its_own():
    """If the samples of a row scatter, it must change by more than a row whose samples do not scatter."""
    new = synthetic.run(2)
    median = next(row.seconds.median for row in new.groups[TARGET] if row.implementation == "native")
    comparison = c.compare(
        synthetic.run(1), edited(new, TARGET, "native", seconds=Spread(median, median / 2, 2 * median))
    )
    assert found(comparison).noise > 1.5 > 1.2 > found(comparison, "latent-forward-float32-D16-N10000").noise


def test_other_machines_are_compared_by_ratios():
    other = synthetic.run(2, lambda group, name: 3 * planted(1.5)(group, name))
    comparison = c.compare(synthetic.run(1), replace(other, versions={**other.versions, "torch": "2.14.0"}))
    assert (
        comparison.by == "ratio" and comparison.different == ("torch: 2.13.0, now 2.14.0",) and comparison.drift == 1.0
    )
    assert notable(comparison) == [(TARGET, "native")] and found(comparison).change == pytest.approx(1.5, rel=0.1)
    assert found(comparison, "pinv-m16").verdict == "not comparable"
    told = "\n".join(c.basis(comparison))
    assert "Times cannot be compared (torch: 2.13.0, now 2.14.0)" in told and "DIFFERENT PROCESSORS" not in told


def test_another_processor_is_said_first():
    comparison = c.compare(synthetic.run(1), synthetic.run(2, processor="Another"))
    assert comparison.by == "ratio" and comparison.different[0] == "processor: A processor <of 2 cores>, now Another"
    assert (
        c.basis(comparison)[0] == "THE RUNS COME FROM DIFFERENT PROCESSORS: A processor <of 2 cores>, and now Another."
    )
    assert next(iter(c.table(comparison))) == c.basis(comparison)[0]


@pytest.mark.parametrize("change", [{"threads": 1}, {"device": "cuda"}, {"machine": {"cores": 3}}])
def test_threads_devices_and_cores_make_times_incomparable(change):
    comparison = c.compare(synthetic.run(1), synthetic.run(2, **change))
    assert comparison.by == "ratio" and comparison.different[0].startswith(
        next(iter(change)).replace("machine", "cores")
    )


def test_new_and_gone_rows_are_told():
    old = only(synthetic.run(1), lambda row: row.group != "step-fixed-n64")
    new = without_target(synthetic.run(2, not_measured={f"{TARGET}-native": "needs 9 GiB"}))
    comparison = c.compare(old, new)
    assert found(comparison, "step-fixed-n64").verdict == "new"
    gone = found(comparison)
    assert gone.verdict == "gone" and gone.why == "needs 9 GiB" and not gone.wrong


def test_a_result_that_is_wrong_now_comes_first():
    why = "wrong: relative RMS error 1.0e-01, allowed 2e-05"
    new = without_target(synthetic.run(2, planted(2.0, "step-fixed-n64"), not_measured={f"{TARGET}-native": why}))
    comparison = c.compare(synthetic.run(1), new)
    assert [change.group for change in c.ordered(comparison)[:2]] == [TARGET, "step-fixed-n64"]
    assert "NO RIGHT RESULT ANY MORE (wrong: relative" in "\n".join(c.table(comparison))


def test_rows_that_a_quick_run_leaves_out_are_not_gone():
    comparison = c.compare(synthetic.run(1, quick=False), only(synthetic.run(2), lambda row: row.group != TARGET))
    assert not notable(comparison) and any("1 rows that only the other has" in note for note in comparison.notes)


def test_scans_that_only_one_run_has_are_told_and_not_compared():
    comparison = c.compare(synthetic.run(1), only(synthetic.run(2), lambda row: row.scan == "latent_attention"))
    assert {change.scan for change in comparison.changes} == {"latent_attention"}
    assert "only in the old run: continual_nystrom_step, iterative_pinv" in comparison.notes


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [(1.0, 1.4, ""), (1.0, 1.6, "more"), (3.0, 1.0, "less"), (100.0, 101.5, ""), (100.0, 103.0, "more")],
)
def test_memory_counts_beyond_half_a_mebibyte_and_two_percent(before, after, told):
    sizes = ((1, before), (2, after))
    comparison = c.compare(
        *(edited(synthetic.run(seed), TARGET, "native", extra_memory=int(size * MIB)) for seed, size in sizes)
    )
    assert found(comparison).memory == told and bool(notable(comparison)) == bool(told)
    assert (f"{told} memory: {before:.1f} to {after:.1f} MiB" in "\n".join(c.table(comparison))) == bool(told)


@pytest.mark.parametrize(
    ("before", "after", "told"), [(1e-7, 2.9e-7, False), (1e-7, 3.1e-7, True), (0.0, 1e-16, False), (0.0, 1e-9, True)]
)
def test_an_error_that_grew_threefold_is_told(before, after, told):
    comparison = c.compare(
        *(edited(synthetic.run(seed), TARGET, "native", error=error) for seed, error in ((1, before), (2, after)))
    )
    assert found(comparison).less_exact == told and ("LESS EXACT" in "\n".join(c.table(comparison))) == told


def test_few_controls_leave_the_noise_a_guess():
    few = [
        replace(run, rows=only(run, lambda row: row.implementation in ("native", EAGER)).rows[-12:])
        for run in map(synthetic.run, (1, 2))
    ]
    comparison = c.compare(*few)
    assert comparison.controls < c.CONTROLS and comparison.between == c.UNKNOWN and comparison.drift == 1.0
    assert any("rows of peers are in both" in note for note in comparison.notes)


def test_a_run_beside_itself_has_no_change():
    comparison = c.compare(synthetic.run(1), synthetic.run(1))
    assert not notable(comparison) and comparison.counts.keys() == {"same within noise"}
