"""The table of tuned block sizes: an entry is used, a missing entry means the default, and an invalid entry raises an
error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward
from cmab_kernels.nystrom.contract import Pinv, PinvBackward
from cmab_kernels.runtime import tiles
from cmab_kernels.runtime.tiles import FIELDS, FILE, HOPPER, Key, as_entry, padded, read, tuned, using

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
KEY = Key("attention.forward", HOPPER, "half", 16)
ENTRY = as_entry(KEY, (64, 32, 8, 2), {"gpu": "some"})


def _file(folder: Path, *entries: Any, **changes: Any) -> Path:
    path = folder / "tiles.json"
    path.write_text(json.dumps({"cmab_kernels_tiles": 1, "entries": list(entries), **changes}))
    return path


def test_the_packages_file_is_valid_and_says_where_it_was_tuned() -> None:
    read(FILE)
    for key, _, evidence in tiles.entries(FILE):
        assert {"gpu", "date", "seconds", "built-in seconds"} <= evidence.keys(), key


def test_a_planted_entry_is_found_by_its_key_alone(tmp_path: Path) -> None:
    table = read(_file(tmp_path, ENTRY))
    assert dict(table) == {KEY: (64, 32, 8, 2)}
    with using(table):
        assert tuned("attention.forward", CPU, "half", 8) == (64, 32, 8, 2), "heads of 8 are padded to 16"
        others = [
            ("attention.backward", "half", 16),
            ("attention.forward", "bf16x6", 16),
            ("attention.forward", "half", 17),
        ]
        assert [tuned(kernel, CPU, kind, width) for kernel, kind, width in others] == [None] * 3
        with using({}):
            assert tuned("attention.forward", CPU, "half", 16) is None, "the built-in tables, whatever the file says"
    with using({KEY._replace(capability=(8, 0)): (64, 32, 8, 2)}):
        assert tuned("attention.forward", CPU, "half", 16) is None, "of another GPU"


@pytest.mark.parametrize("first", [0, 1])
def test_contexts_that_overlap_leave_nothing(first: int) -> None:
    both = [using({KEY: (64, 32, 8, 2)}), using({KEY: (32, 32, 4, 2)})]
    before = tuned("attention.forward", CPU, "half", 16)
    for each in both:
        each.__enter__()
    both[first].__exit__(None, None, None)
    assert tuned("attention.forward", CPU, "half", 16) == ((32, 32, 4, 2), (64, 32, 8, 2))[first]
    both[1 - first].__exit__(None, None, None)
    assert tuned("attention.forward", CPU, "half", 16) == before


def test_the_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _file(tmp_path, ENTRY)
    monkeypatch.setattr(tiles, "FILE", path)
    tiles._tuned.cache_clear()
    try:
        assert tuned("attention.forward", CPU, "half", 16) == (64, 32, 8, 2)
        path.unlink()
        assert tuned("attention.forward", CPU, "half", 16) == (64, 32, 8, 2)
    finally:
        tiles._tuned.cache_clear()


@pytest.mark.parametrize("width, wide", [(1, 16), (16, 16), (17, 32), (64, 64), (65, 128), (256, 256)])
def test_heads_are_padded(width: int, wide: int) -> None:
    assert padded(width) == wide


def _with_tiles(**changes: Any) -> dict[str, Any]:
    return ENTRY | {"tiles": ENTRY["tiles"] | changes}


@pytest.mark.parametrize(
    "entry, says",
    [
        (_with_tiles(BLOCK_N=48), "BLOCK_N: got 48, expected one of "),
        (_with_tiles(BLOCK_N=256), "BLOCK_N: got 256, expected one of "),
        (_with_tiles(num_warps=3), "num_warps: got 3, expected one of "),
        (_with_tiles(num_stages=0), "num_stages: got 0, expected one of "),
        (_with_tiles(num_stages=True), "num_stages: got True, expected one of "),
        (_with_tiles(BLOCK_M=64), "'BLOCK_M': 64"),
        (ENTRY | {"tiles": {"BLOCK_L": 64}}, "tiles: got {'BLOCK_L': 64}, expected BLOCK_"),
        (ENTRY | {"kernel": "attention.sideways"}, "kernel: got 'attention.sideways', expected "),
        (ENTRY | {"kind": "fp8"}, "kind: got 'fp8', expected "),
        (ENTRY | {"width": 48}, "width: got 48, expected one of "),
        (ENTRY | {"capability": "nine"}, "capability: got 'nine', expected "),
        (
            {name: value for name, value in ENTRY.items() if name != "evidence"},
            "evidence: got nothing, expected a value",
        ),
        ("an entry", "entry: got 'an entry', expected a JSON object"),
    ],
)
def test_what_is_no_tile_is_refused(entry: Any, says: str, tmp_path: Path) -> None:
    path = _file(tmp_path, ENTRY | {"width": 32}, entry)
    with pytest.raises(ValueError) as raised:
        read(path)
    assert str(path) in str(raised.value) and "entry 1" in str(raised.value) and says in str(raised.value)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"cmab_kernels_tiles": 2, "entries": []}', '{"cmab_kernels_tiles": 1, "entries": {}}'],
)
def test_what_is_no_table_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"tiles\.json: got .*, expected a table of tiles.*reinstall"):
        read(path)
    with pytest.raises(ValueError, match=r"got a file that cannot be read .*, expected a table of tiles; reinstall"):
        read(tmp_path / "missing.json")


def test_two_entries_of_one_key_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got two entries with one key, expected one"):
        read(_file(tmp_path, ENTRY, ENTRY))


def test_what_cannot_be_read_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="BLOCK_L: got 8, expected one of"):
        as_entry(KEY, (8, 32, 8, 2), {})


# ---- launches


pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)

PLANTED = {
    "attention.forward": (64, 32, 8, 2),
    "attention.backward": (32, 16, 4, 1),
    "attention.backward_keys": (16, 16, 2, 1),
    "intention.gram": (16, 32, 8, 2),
    "intention.backward": (16, 16, 2, 1),
    "intention.apply": (16, 32, 1, 4),
    "nystrom.forward": (2,),
    "nystrom.backward": (1,),
}
LAUNCHED = {
    "attention.forward": "_forward",
    "attention.backward": "_backward",
    "attention.backward_keys": "_backward_keys",
    "intention.gram": "_gram",
    "intention.backward": "_gram_backward",
    "intention.apply": "_apply",
    "nystrom.forward": "_pinv",
    "nystrom.backward": "_pinv_backward",
}


def _everything(dtype: torch.dtype) -> None:
    """Launch each kernel that has a table."""
    from cmab_kernels.attention import triton as attention
    from cmab_kernels.intention import triton as intention
    from cmab_kernels.nystrom import triton as nystrom

    q, k = torch.empty(1, 2, 300, 32, dtype=dtype), torch.empty(1, 2, 5003, 32, dtype=dtype)
    out, lse = (
        torch.empty(1, 2, 300, 32, dtype=torch.promote_types(dtype, torch.float32)),
        torch.empty(1, 2, 300).double(),
    )
    attention.attention_forward(Attention(q, k, k, scale=1.0))
    attention.attention_backward(
        AttentionBackward(out, lse, q, k, k, None, None, out, lse, None, 1.0, (True, True, True, False))
    )
    square = torch.empty(1, 2, 32, 32).double()
    intention.gram(Gram(k, k, None, None, None, (True, True), False))
    intention.gram_backward(GramBackward(square, square, k, k, None, None, None, (True, True, True), False))
    intention.apply_rows(ApplyRows(k, square))
    nystrom.iterative_pinv(Pinv(square[0], 6))
    nystrom.iterative_pinv_backward(PinvBackward(square[0], square[0], 6))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter launches otherwise")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_launchers_take_planted_tiles(dtype: torch.dtype) -> None:
    from cmab_kernels.testing.cubin import record

    def tiles_of() -> dict[str, dict[str, Any]]:
        launches = {launch.kernel.__name__: launch.options for launch in record(lambda: _everything(dtype))}
        return {kernel: {field: launches[LAUNCHED[kernel]].get(field) for field in FIELDS[kernel]} for kernel in FIELDS}

    def as_launched(kernel: str) -> dict[str, Any]:
        named = dict(zip(FIELDS[kernel], PLANTED[kernel], strict=True))
        return named | ({"TILE": None} if "TILE" in named else {})  # TILE_D and TILE_E follow from it and the widths

    kinds = dict.fromkeys(FIELDS, "half" if dtype == torch.bfloat16 else "double") | {
        "nystrom.forward": "double",
        "nystrom.backward": "double",
    }
    if dtype == torch.bfloat16:
        kinds |= {"intention.backward": "tf32", "intention.apply": "tf32"}
    table = {Key(kernel, HOPPER, kinds[kernel], 32): PLANTED[kernel] for kernel in FIELDS}
    with using({}):
        built_in = tiles_of()
    with using(table):
        planted = tiles_of()
    for kernel in FIELDS:
        assert planted[kernel] == as_launched(kernel) != built_in[kernel], kernel
    with using({key._replace(capability=(8, 0)): chosen for key, chosen in table.items()}):
        assert tiles_of() == built_in


def test_blocks_are_no_larger_than_the_queries_need() -> None:
    from cmab_kernels.attention.triton.launch import forward_tiles
    from cmab_kernels.runtime.triton_launch import Products

    with using({KEY: (256, 32, 8, 2)}):
        assert [forward_tiles(Products(torch.bfloat16, "ieee"), CPU, 8, n).BLOCK_L for n in (1, 20, 1000)] == [
            16,
            32,
            256,
        ]


INTERPRETED = """
import itertools, json
import torch
import cmab_kernels as ck
from cmab_kernels.attention import triton as attention
from cmab_kernels.attention.contract import Attention, AttentionBackward
from cmab_kernels.intention import triton as intention
from cmab_kernels.intention.contract import ApplyRows, Gram, GramBackward
from cmab_kernels.nystrom import triton as nystrom
from cmab_kernels.nystrom.contract import Pinv, PinvBackward
from cmab_kernels.runtime.tiles import HOPPER, Key, using
from tests.test_tiles import PLANTED

torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (40, 150, 150))
square = torch.randn(1, 2, 8, 8, dtype=torch.float64)

def everything():
    out, lse = attention.attention_forward(Attention(q, k, v, scale=0.5))
    given = AttentionBackward(out, lse, q, k, v, None, None, out, lse, None, 0.5, (True, True, True, False))
    grads = attention.attention_backward(given)
    sums = intention.gram(Gram(k, v, None, None, None, (True, True), False))
    slopes = intention.gram_backward(GramBackward(square, square, k, v, None, None, None, (True, True, True), False))
    inverse = nystrom.iterative_pinv(Pinv(square[0], 2))
    backward = nystrom.iterative_pinv_backward(PinvBackward(inverse, square[0], 2))
    return (out, lse, *grads[:3], *sums, *slopes, intention.apply_rows(ApplyRows(k, square)), inverse, backward)

table = {Key(kernel, HOPPER, "double", 16): chosen for kernel, chosen in PLANTED.items()}
with using({}):
    built_in = everything()
with using(table):
    planted = everything()
    attend = lambda q, k, v: ck.latent_attention(q, k, v, impl="triton")
    whole = torch.compile(attend, fullgraph=True, backend="aot_eager")
    compiled = torch.equal(whole(q, k, v), attend(q, k, v))
scores = 0.5 * q @ k.mT
print(json.dumps({
    "differences": [float((a - b).abs().max() / b.abs().max()) for a, b in zip(planted, built_in)],
    "against the definition": float((planted[0] - scores.softmax(-1) @ v).abs().max()),
    "compiled": compiled,
    "other bits": sum(not torch.equal(a, b) for a, b in zip(planted, built_in)),
}))
"""


@pytest.mark.thorough
def test_results_are_right_with_other_tiles() -> None:
    """Each kernel with a table is right with other tiles, in the interpreter,
    for several blocks and runs of any length."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    assert max(found["differences"]) < 1e-12 and found["against the definition"] < 1e-12
    assert found["other bits"] > 0, "the planted tiles were not taken"
    assert found["compiled"], "a compiled graph takes the same tiles"
