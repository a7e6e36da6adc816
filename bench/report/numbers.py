"""The numbers to plan with, a section of docs/numerics.md: `python -m bench.report.numbers` writes it from the records.

The section is numbers.md, beside this file; each {place} in it is replaced by a table.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..provenance import ROOT
from .marks import Marks

RESULTS = ROOT / "bench" / "results"
SECTION = Path(__file__).with_suffix(".md")
PLACE = Marks(ROOT / "docs" / "numerics.md", "numbers")

DTYPES = ("float64", "float32", "bfloat16", "float16")
LAWS = {"normal": "N(0, 1)", "ten times": "N(0, 10²)", "one outlier": "one outlier of 1e3", "all equal": "all equal"}
FORMULAS = {
    "AttentionState": r"$L (s E + 8)$",
    "RidgeState": r"$8 D (D + E) + 8$",
    "ContinualNystromState": r"$t (n + 1)(2 D + E) + s (2 m (E + 5) + 2 m D + m^2) + 8$",
    "ContinualAttentionState": r"$t (n + 1)(2 D + E) + 8$",
    "ContinualAttentionState, retroactive": r"$t (n + 1)(2 D + E) + 2 s n (E + 5) + 8$",
}


def read(name: str) -> dict[str, Any]:
    """Return a record of bench/results."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def section(numbers: dict[str, Any], streams: dict[str, Any]) -> str:
    """Return the text of the section."""
    sizes = ", ".join(f"{letter} = {length:,}" for letter, length in numbers["states"]["sizes"].items())
    places = {
        "where": _where(numbers),
        "errors": "\n\n".join(_errors(dtype, numbers["operators"]) for dtype in DTYPES),
        "digits": _digits(numbers["solves"]),
        "flags": _flags(numbers["solves"]),
        "drift": _drift(streams),
        "sizes": sizes,
        "states": _table(("state", "bytes of a head", f"bytes, {sizes}"), _states(numbers["states"]["bytes"])),
    }
    text = SECTION.read_text(encoding="utf-8")
    for place, found in places.items():
        text = text.replace(f"{{{place}}}", found)
    return text.rstrip()


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(figure: float) -> str:
    """Two digits of a figure, without leading zeros in the exponent."""
    if figure == 0 or math.isinf(figure):
        return "∞" if figure else "0"
    mantissa, _, exponent = f"{figure:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def _three(figures: Sequence[float]) -> str:
    return " / ".join(_short(figure) for figure in figures[:3])


def _errors(dtype: str, operators: dict[str, Any]) -> str:
    rows = []
    for operator, dtypes in operators.items():
        for kind, what in (("results", f"`{operator}`"), ("gradients", f"`{operator}`, gradients")):
            cells = [
                _three(found[kind]) if kind in (found := dtypes.get(dtype, {}).get(law, {})) else "" for law in LAWS
            ]
            if any(cells):
                rows.append([what, *cells])
    return _table((f"{dtype}: median / 99.9 % / largest", *LAWS.values()), rows)


def _digits(solves: dict[str, Any]) -> str:
    kept = {
        dtype: {int(exponent): -math.log10(max(found["error"][1], 1e-17)) for exponent, found in each.items()}
        for dtype, each in solves.items()
    }
    rows = []
    for digits in (12, 10, 8, 6, 5, 4, 3, 2, 1):
        most = [
            max((exponent for exponent, have in each.items() if have >= digits), default=None) for each in kept.values()
        ]
        rows.append([str(digits), *("" if exponent is None else f"1e{exponent}" for exponent in most)])
    return _table(("digits", *kept), rows)


def _flags(solves: dict[str, Any]) -> str:
    exponents = sorted({int(exponent) for each in solves.values() for exponent in each})
    rows = []
    for exponent in exponents:
        found = [each.get(str(exponent)) for each in solves.values()]
        rows.append(
            [
                f"1e{exponent}",
                *(
                    cell
                    for each in found
                    for cell in (("", "") if each is None else (_three(each["error"]), f"{each['flagged']:.0%}"))
                ),
            ]
        )
    return _table(
        (
            "condition number",
            *(cell for dtype in solves for cell in (f"{dtype}: median / 99.9 % / largest", "unsound by `info`")),
        ),
        rows,
    )


def _drift(streams: dict[str, Any]) -> str:
    rows = []
    for operator, laws in streams["streams"].items():
        for law, found in laws.items():
            errors = _three([found[name] for name in ("median", "p999", "largest")])
            rows.append(
                [
                    f"`{operator}`, {law}",
                    f"{found['steps']:,}",
                    errors,
                    f"{found['afresh']:,}" if "afresh" in found else "",
                ]
            )
    return _table(("stream, logits", "calls", "median / 99.9 % / largest", "recomputed rows"), rows)


def _states(sizes: dict[str, int]) -> list[list[str]]:
    return [
        [f"`{name.split(',')[0]}`{name.partition(',')[1]}{name.partition(',')[2]}", FORMULAS[name], f"{size:,}"]
        for name, size in sizes.items()
    ]


def _where(numbers: dict[str, Any]) -> str:
    versions = numbers["versions"]
    where = f"{numbers['processor']} ({numbers['instruction_set']}), torch {versions['torch']}"
    return f"{where}, {numbers['when'][:10]}, commit {numbers['commit'][:10]}."


def main() -> None:
    PLACE.write(section(read("numbers"), read("streams")))
    print(f"{PLACE.page.relative_to(ROOT)}: from {', '.join(f'{name}.json' for name in ('numbers', 'streams'))}")


if __name__ == "__main__":
    main()
