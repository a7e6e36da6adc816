"""Figures show the contents of a run, and never mix with each other on a page."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from PIL import Image

from bench import runs
from bench.report import drawing, plots
from bench.report.series import series

from . import synthetic
from .synthetic import EAGER, SDPA


def axes_of(panel: drawing.Panel):
    figure = Figure()
    axes = figure.add_subplot()
    panel.draw(axes)
    return axes


def titles(run: runs.Run, scan: str) -> Counter[str]:
    return Counter(panel.title for panel in plots.panels(run, scan))


def test_each_operator_has_its_curves(run: runs.Run):
    assert titles(run, "latent_attention") == {
        "Memory against keys": 2,  # forward, and with backward
        "Time against keys": 2,
        "Time against width of a head": 1,  # rows name dtypes
    }
    assert titles(run, "continual_nystrom_step")["Time against tokens of the window"] == 2
    assert not plots.panels(run, "iterative_pinv")


def test_times_are_drawn_where_they_were_measured(run: runs.Run):
    panel = next(
        panel for panel in plots.panels(run, "latent_attention") if panel.title.startswith("Time against keys")
    )
    axes = axes_of(panel)
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    rows = series(run, "latent_attention", "N")[0].lines
    drawn = {(tuple(line.get_xdata()), tuple(line.get_ydata())) for line in axes.lines}
    expected = {
        (tuple(row.parameters["N"] for row in line), tuple(row.seconds.median for row in line))
        for line in rows.values()
    }
    assert drawn == expected
    assert len(axes.collections) == len(rows)  # the quartiles of each
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1k", "10k", "100k", "1M"]


def test_memory_that_cannot_be_measured_is_drawn_as_the_least_that_can(run: runs.Run):
    panel = next(panel for panel in plots.panels(run, "latent_attention") if panel.title.startswith("Memory"))
    (sdpa,) = (line for line in axes_of(panel).lines if line.get_color() == panel.legend[SDPA].colour)
    assert list(sdpa.get_ydata()) == [plots.RESOLUTION["cpu"]] * 4


def test_an_implementation_looks_alike_everywhere_and_ours_is_ours(run: runs.Run):
    styles = drawing.styles(run)
    assert {name for name, style in styles.items() if style.colour == drawing.OURS} == {"native", "native, exact"}
    assert styles["native"].width > max(styles[name].width for name in (SDPA, EAGER, "naive", "reference"))
    assert len({(style.colour, style.marker, str(style.dashes)) for style in styles.values()}) == len(styles)
    for scan in run.scans:
        for panel in plots.panels(run, scan):
            assert all(style == styles[name.removeprefix("cmab_kernels, ")] for name, style in panel.legend.items())


def luminance(colour: str) -> float:
    """The relative luminance of a colour by the Web Content Accessibility Guidelines."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return sum(
        w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
        for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
    )


@pytest.mark.parametrize("ground", ["#ffffff", "#14171c"])
def test_colours_stand_out_on_light_and_on_dark_pages(ground: str):
    for colour in (drawing.OURS, *drawing.PEERS, drawing.GREY):
        low, high = sorted((luminance(colour), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) >= 3, colour


def test_the_overview_has_a_dot_for_each_group_with_a_peer(run: runs.Run):
    panel = plots.overview(run)
    dots = [line for line in axes_of(panel).lines if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in dots] == [13, 8]
    assert "continual_nystrom_step: 0.78x to 4.2x" in panel.alt


def test_what_is_ours_is_no_peer_of_ours(run: runs.Run):
    """If the baseline is another kernel of this package, there is no speed-up to show."""
    rows = (replace(row, baseline="native, exact") if row.scan == "continual_nystrom_step" else row for row in run.rows)
    run = replace(run, rows=tuple(rows))
    assert not plots.gains(run, "continual_nystrom_step") and plots.gains(run, "latent_attention")


# ---- pages and files -------------------------------------------------------------------------------------------------


def test_figures_of_a_page_share_no_identifier(run: runs.Run):
    panels = [plots.overview(run), *(panel for scan in run.scans for panel in plots.panels(run, scan))]
    texts = [drawing.svg(panel) for panel in panels]
    found = Counter(name for text in texts for name in re.findall(r'\bid="([^"]*)"', text))
    assert len(found) > 500 and max(found.values()) == 1
    for text in texts:
        ids = set(re.findall(r'\bid="([^"]*)"', text))
        assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', text)) <= {(name, "") for name in ids} | {
            ("", name) for name in ids
        }


def test_text_stays_text_and_takes_the_colour_of_the_page(run: runs.Run):
    panel = plots.panels(run, "latent_attention")[0]
    text = drawing.svg(panel)
    root = ElementTree.fromstring(text)
    words = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
    assert panel.title in words and "cmab_kernels, native" in words and "100 MiB" in words
    assert root.attrib["role"] == "img" and root.attrib["aria-label"] == panel.alt and "width" not in root.attrib
    assert "currentColor" in text and drawing.INK not in text and drawing.FAINT not in text and "<metadata" not in text


def test_what_a_run_says_cannot_become_markup(run: runs.Run):
    hostile = '"><script>x</script>'
    run = replace(
        run, rows=tuple(replace(row, implementation=row.implementation.replace("naive", hostile)) for row in run.rows)
    )
    for panel in plots.panels(run, "latent_attention"):
        text = drawing.svg(panel)
        assert "<script" not in text
        ElementTree.fromstring(text)


def test_pictures_are_not_blank(run: runs.Run, tmp_path: Path):
    panels = plots.panels(run, "latent_attention")
    drawing.sheet(panels, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.width == pytest.approx(4 * drawing.WIDTH * drawing.DPI, abs=2)
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24)}
    for hexadecimal in (drawing.OURS, drawing.PEERS[0], drawing.INK):
        assert tuple(int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5)) in colours


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1e-6, 1e-3, [1e-6, 1e-5, 1e-4, 1e-3]), (2e-3, 8e-3, [2e-3, 5e-3]), (0.9, 4.0, [1, 2]), (1.0, 1e12, None)],
)
def test_ticks_are_few_and_round(low: float, high: float, ticks: list[float] | None):
    found = drawing.log_ticks(low, high)
    assert 2 <= len(found) <= 6 and all(low <= tick <= high for tick in found)
    assert ticks is None or all(any(tick == pytest.approx(one) for one in found) for tick in ticks)


@pytest.mark.parametrize(("value", "text"), [(1_000, "1k"), (1_024, "1,024"), (2_000_000, "2M"), (197, "197")])
def test_sizes_are_short(value, text):
    assert drawing.size(value) == text


# ---- plots for the pages ---------------------------------------------------------------------------------------------


SCAN = "latent_attention"


def test_a_picture_says_what_it_shows(run: runs.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(plots.TITLES, SCAN, "Attention")
    plots.picture(run, SCAN, tmp_path / "measured.png")
    with Image.open(tmp_path / "measured.png") as picture:
        assert (picture.text["Run"], picture.text["Digest"]) == ("some", plots.digest(run, SCAN))
        assert picture.width == 1600


def test_each_line_of_a_picture_has_its_name_beside_it(run: runs.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(plots.TITLES, SCAN, "Attention")
    monkeypatch.setitem(plots.LINES, SCAN, {"native": "ours,\nin words"})
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    plots.picture(run, SCAN, tmp_path / "measured.png")
    for axes in drawn[0].axes:
        names = [text for text in axes.texts if text.get_position()[0] > 1]
        colours = {text.get_text(): text.get_color() for text in names}
        assert colours["ours,\nin words"] == drawing.OURS and SDPA in colours
        assert set(colours.values()) <= {line.get_color() for line in axes.lines}
        heights = sorted((text.get_window_extent().y0, text.get_window_extent().y1) for text in names)
        assert all(upper[0] > lower[1] - 1 for lower, upper in itertools.pairwise(heights))


def test_the_digest_changes_with_the_rows_that_are_shown_only(run: runs.Run):
    def digest(group: str) -> str:
        row = next(row for row in run.groups[group] if row.implementation == "native")
        return plots.digest(
            synthetic.edited(run, group, "native", seconds=row.seconds._replace(median=1.001 * row.seconds.median)),
            SCAN,
        )

    assert digest("pinv-m16") == plots.digest(run, SCAN) == digest("latent-forward+backward-float32-D16-N1000")
    assert digest("latent-forward-float32-D16-N1000") != plots.digest(run, SCAN)


def test_a_picture_may_be_of_chosen_curves(run: runs.Run, monkeypatch: pytest.MonkeyPatch):
    usual = plots.digest(run, SCAN)
    monkeypatch.setitem(plots.SHOWN, SCAN, {"pass": "forward + backward"})
    assert plots.digest(run, SCAN) != usual


def test_a_run_without_curves_has_no_picture(run: runs.Run, tmp_path: Path):
    assert plots.overview(synthetic.only(run, lambda row: row.scan == "iterative_pinv")) is None
    with pytest.raises(runs.BadRun, match=r"no curve of nn\.CMAB for its plot"):
        plots.picture(run, plots.FIRST, tmp_path / "measured.png")
