"""The page holds the contents of the run, and a real browser reads it as intended."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench import runs
from bench.report import compare
from bench.report import page as report
from cmab_kernels.nystrom.costs import SCHEMES

from . import synthetic

HOSTILE = '<script>alert("1")</script>&amp;'


def page_of(run: runs.Run, old: runs.Run | None = None) -> str:
    """The page of a run, without its curves."""
    return report.html(run, compare.compare(old, run) if old else None, dict.fromkeys(run.scans, ()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the report of a run beside an older one; a row is slower than it was."""
    folder = tmp_path_factory.mktemp("report")
    wrong = {"latent-forward-float32-D16-N7-native": "wrong: relative RMS error 1e-01, allowed 2e-05"}
    run = synthetic.run(2, lambda *row: 1.3 if row == ("step-fixed-n64", "native") else 1.0)
    run = synthetic.written(folder, replace(run, not_measured={**run.not_measured, **wrong}))
    old = synthetic.run(1)
    report.write(run, folder, compare.compare(old, run))
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "report.html").read_text()


def text_of(page: str) -> str:
    """The text of a page in one line, without tags."""
    body = re.sub(r"<[^>]*>", " ", page)
    return re.sub(r"\s+", " ", html.unescape(body))


def section(page: str, name: str) -> str:
    found = re.search(rf'<section id="{name}">.*?</section>', page, re.DOTALL)
    assert found, name
    return found[0]


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_the_page_begins_with_what_was_measured(page: str):
    told = text_of(section(page, "run"))
    for expected in (
        "A processor <of 2 cores>",
        "cores 2",
        "native avx2, torch AVX2",
        "torch 2.13.0",
        "0123456789",
        "2026-01-02 03:04",
    ):
        assert expected in told
    assert (
        "threads 2, unless a row says" in told
        and "quick: 3 operators, 22 groups, 75 rows" in told
        and "triton" not in told
    )


def test_sections_come_in_order_and_the_contents_lead_to_them(page: str):
    assert re.findall(r'<section id="(\w+)">', page) == [
        *("run", "summary", "changes", "figures", "counts", "rows", "missing", "definitions")
    ]
    anchors = re.findall(r'href="#([^"]+)"', page[: page.index("<main>")])
    assert len(anchors) == 8 + 3 and all(f'id="{anchor}"' in page for anchor in anchors)


def test_what_is_wrong_and_what_is_slower_is_said_plainly(page: str):
    told = text_of(section(page, "summary"))
    assert told.index(
        "These rows have a wrong result, so their speed is not shown: latent-forward-float32-D16-N7-native"
    ) < told.index("In 19 of 21 groups")
    assert "in 2 it is slower" in told
    slower = told[told.index("Where cmab_kernels is slower") :]
    assert (
        slower.count("times the time of eager torch") == 2
        and "window of 4,096" in slower
        and "window of 64" not in slower
    )


def test_a_run_without_losses_says_so(run: runs.Run):
    told = text_of(section(page_of(synthetic.only(run, lambda row: row.scan == "latent_attention")), "summary"))
    assert "in 0 it is slower" in told and "In no group of this run." in told and "wrong" not in told


def test_noisy_groups_count_neither_as_gain_nor_as_loss(run: runs.Run):
    noisy = replace(
        run, rows=tuple(replace(row, others=0.3 if row.group.endswith("n4096") else 0.01) for row in run.rows)
    )
    page = page_of(noisy)
    told = text_of(section(page, "summary"))
    assert (
        "In 19 of 19 groups" in told
        and "in 0 it is slower" in told
        and "2 more groups are noisy" in told
        and "In no group of" in told
    )
    assert section(page, "rows").count("noisy: other programs took 30% of the processors") == 2
    every = text_of(section(page_of(replace(run, rows=tuple(replace(row, others=0.3) for row in run.rows))), "summary"))
    assert "In 0 of 0 groups" in every and "21 more groups are noisy" in every and "gains most" not in every


def test_a_run_of_changes_without_a_commit_says_so_in_bold(run: runs.Run):
    assert "uncommitted" not in page_of(run)
    assert "0123456789+, <strong>with uncommitted changes</strong>" in section(page_of(replace(run, dirty=True)), "run")


def test_a_ratio_whose_quartiles_hold_one_is_left_open(run: runs.Run):
    def summary(*ratio: float) -> str:
        row = run.rows[0]
        return text_of(
            section(page_of(synthetic.edited(run, row.group, row.implementation, ratio=runs.Spread(*ratio))), "summary")
        )

    told = summary(1.01, 0.99, 1.02)
    assert (
        "in 1 the quartiles do not decide; in 2 it is slower" in told
        and "perhaps, 1.01 (0.99 to 1.02) times the time of" in told
    )
    told = summary(0.99, 0.98, 1.01)
    assert "in 1 the quartiles do not decide" in told and "perhaps" not in told


def test_every_row_is_there_with_its_figures(page: str, folder: Path):
    told = section(page, "rows")
    lines = re.findall(r"<tr[^>]*>(?!<th class=\"group\").*?</tr>", told)
    run = runs.load(folder / "run.json")
    assert sum("<td " in line for line in lines) == len(run.rows)
    row = run.rows[0]
    cells = [
        html.unescape(cell)
        for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", next(line for line in lines if "<td " in line))
    ]
    assert cells == [
        "native",
        report.readable(row.seconds.median),
        f"{row.spread:.1%}",
        f"{row.ratio.median:.3g} ({row.ratio.low:.3g} to {row.ratio.high:.3g})",
        "0.6 MiB",
        "+0.6 MiB",
        f"{row.gflops:,.3g}",
        "50.0% (exponentials)",
        "3e-07",
    ]
    assert all(html.escape(group) in told for group in run.groups)


def test_what_was_not_measured_has_its_reason(page: str):
    assert "latent-forward-N1000000-naive needs 4.0 GiB, of 2.0 available" in text_of(section(page, "missing"))


def test_each_figure_is_defined_and_rates_are_given(page: str):
    told = text_of(defined := section(page, "definitions"))
    for name in ("time", "spread", "ratio", "times as fast", "extra memory", "GFLOP/s", "share of the floor", "error"):
        assert f"<dt>{name}</dt>" in defined
    assert (
        "10 G/s" in told
        and "20 GB/s" in told
        and "100 GFLOP/s" in told
        and "error of a million additions 1.0e-15" in told
    )


def test_changes_are_told_with_the_noise(page: str):
    told = section(page, "changes")
    first = told[: told.index("<details>")]
    assert "step-fixed-n64" in first and "slower" in first and first.count("<tr") == 2
    assert "29 rows without a change" in told and "rows of peers, whose code is the same" in told


def test_without_an_older_run_nothing_is_said_of_changes(run: runs.Run):
    page = page_of(run)
    assert 'id="changes"' not in page and "What changed" not in page


def test_a_gpu_run_speaks_of_its_gpu_and_notes_are_told(run: runs.Run):
    rates = {"cuda": {"exponentials": 1e12, "memory": 3e12, "matrix": {"bfloat16": 9e14}}}
    told = text_of(section(page_of(replace(run, device="cuda", rates=rates, notes=["On a Sunday.", "Twice."])), "run"))
    assert "device GPU" in told and "notes On a Sunday. Twice." in told


# ---- what it is ------------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_else(page: str):
    assert not re.findall(r"<(?:script|link|img|iframe|object)\b|@import|src=", page)
    assert not re.findall(r'https?://(?!www\.w3\.org/)[^"\s<]*', page)  # names in the SVG standard are not addresses
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))


def test_what_a_run_says_is_escaped_everywhere(run: runs.Run, tmp_path: Path):
    reasons = {HOSTILE: HOSTILE, "wrong-" + HOSTILE: "wrong" + HOSTILE}
    runs.save(replace(run, not_measured=reasons, figures={HOSTILE: 1.0}, notes=[HOSTILE]), tmp_path / "run.json")
    text, quoted = (tmp_path / "run.json").read_text(), json.dumps(HOSTILE)[1:-1]
    for name in (
        "latent-forward",
        "native, exact",
        "continual_nystrom",
        "float16",
        "2.13.0",
        "eager torch",
        "avx2",
        "0123",
        "2026",
        "A proc",
    ):
        text = text.replace(f'"{name}', f'"{quoted}{name}')
    (tmp_path / "run.json").write_text(text)
    page = page_of(runs.load(tmp_path / "run.json"), old=run)
    assert "<script" not in page and HOSTILE not in page and html.escape(HOSTILE) in page


VOID = {"meta", "br", "link"}


class Nesting(HTMLParser):
    """Fails where a tag is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[int] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attrs if name == "id" and value]


def test_markup_is_well_formed_and_headings_descend_by_one(page: str):
    seen = Nesting()
    seen.feed(page)
    assert not seen.open and len(set(seen.ids)) == len(seen.ids)
    assert seen.headings[0] == 1 and seen.headings.count(1) == 1
    assert all(after - before <= 1 for before, after in zip(seen.headings, seen.headings[1:], strict=False))


def test_every_figure_is_described(page: str):
    described = re.findall(r'<svg viewBox="[^"]*" role="img" aria-label="([^"]*)">', page)
    assert len(described) == page.count("<svg") == 1 + 5 + 4 and all(len(text) > 60 for text in described)
    assert any("cmab" not in text and "native: 2" in text and "at 1,000 keys," in text for text in described)


def test_pictures_lie_beside_the_page(folder: Path):
    names = {path.name for path in folder.glob("*.png")}
    assert names == {"overview.png", "latent_attention.png", "continual_nystrom_step.png"}


def test_counts_are_those_of_the_formulas(page: str):
    """The paper's printed counts of operations; it counts less memory than our states keep."""
    printed = {
        "full": 11.06e6,
        "nystrom": 0.423e6,
        "single": 0.0925e6,
        "continual single": 0.01178e6,
        "fixed single": 0.00618e6,
    }
    assert [report.counts(scheme)[0] for scheme in printed] == pytest.approx(list(printed.values()), rel=2e-3)
    assert report.counts("fixed single")[2] == 2324 and report.counts("continual single")[4] == 50_072
    assert report.counts("fixed single")[3] == report.counts("continual single")[3] == 72_824 and report.counts("full")[
        2:
    ] == (0, 0, 0)
    assert report.CALLED.keys() == set(SCHEMES) and "72,824" in section(page, "counts")


# ---- in a browser ----------------------------------------------------------------------------------------------------

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PHONE, LAPTOP, DESK = 390, 1280, 1920

MEASURE = """<script>
const wide = document.documentElement.scrollWidth;
const beyond = [...document.querySelectorAll("body *")].filter(e => !e.closest(".scroll") && !e.closest("svg") &&
  e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "#" + e.id);
const pixels = e => parseFloat(getComputedStyle(e).fontSize) * e.ownerSVGElement.getScreenCTM().a;
const small = [...document.querySelectorAll("svg text")].map(pixels);
const tall = [...document.querySelectorAll("svg")].filter(e => e.getBoundingClientRect().height > 100);
const scrolls = [...document.querySelectorAll(".scroll")];
const inside = scrolls.filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel);
const right = Math.max(...[...document.querySelectorAll("main *")].map(e => e.getBoundingClientRect().right));
const left = Math.min(...[...document.querySelectorAll("nav a")].map(e => e.getBoundingClientRect().left));
const row = document.querySelector(".figures").children;
const beside = [...row].filter(e => e.offsetTop == row[0].offsetTop).length;
const drawn = tall.filter(e => e.querySelector("text").getBBox().width > 0);
const headings = [...document.querySelectorAll("h1, h2, h3")].map(e => e.innerText);
const groups = document.querySelectorAll("th.group").length;
const smallest = Math.min(...small);
parent.document.body.dataset.seen = JSON.stringify({
  wide, inner: innerWidth, beyond, inside, beside, used: right - left, smallest, drawn: drawn.length,
  headings, groups});
</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory):
    """Runs chromium on a page; gives what it prints."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        pytest.skip("no chromium is installed: apt-get install chromium")

    def look(page: Path, *flags: str) -> str:
        profile = tmp_path_factory.mktemp("profile")
        command = [chromium, *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    page = tmp_path_factory.mktemp("page") / "page.html"
    page.write_text("<p>it runs</p>")
    try:
        assert "it runs" in look(page, "--dump-dom")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{chromium} does not start: {error}")
    return look


def seen_at(width: int, page: str, browser, folder: Path) -> dict:
    """Return the layout of a page of this width, in a frame, because a browser window has a smallest width."""
    inner = html.escape(page.replace("</body>", MEASURE + "</body>"))
    outer = folder / f"frame{width}.html"
    outer.write_text(
        f'<!doctype html><body style="margin:0"><iframe style="border:0;width:{width}px;height:2000px" '
        f'srcdoc="{inner}"></iframe>'
    )
    found = re.search(r'data-seen="([^"]*)"', browser(outer, "--dump-dom", "--virtual-time-budget=5000"))
    assert found, "the page's script did not run"
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [PHONE, LAPTOP, DESK])
def test_a_browser_shows_everything_within_its_width(width: int, page: str, browser, tmp_path: Path):
    seen = seen_at(width, page, browser, tmp_path)
    assert seen["inner"] == width and seen["wide"] <= width and not seen["beyond"] and not seen["inside"]
    assert seen["used"] > width - 100 and seen["beside"] == {PHONE: 1, LAPTOP: 3, DESK: 4}[width]
    assert seen["drawn"] == page.count("<svg") and seen["smallest"] >= 8.5
    assert seen["groups"] == 22 and seen["headings"][0] == "cmab_kernels, measured"
    for expected in (
        "What was measured",
        "Summary",
        "Where cmab_kernels is slower",
        "latent_attention",
        "Every row",
        "What was not measured",
    ):
        assert expected in seen["headings"]
