"""What kernels compile to, read without a GPU: the reader, the model, and that nothing has become worse than what is recorded."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from bench.gpu import readiness, readiness_amd, readiness_cuda
from bench.gpu.readiness import PAGE, ROOT, complaints, in_child, of_launch, recorded, regressions, targets
from bench.gpu.readiness_cases import WHOLE, _solve, cases
from bench.gpu.readiness_model import CHIPS, occupancy, seconds
from bench.gpu.readiness_page import page
from bench.gpu.readiness_passes import LEFT_OUT, PASSES, MultiplyAdds, Pass, counted
from bench.gpu.readiness_sass import Code, Counts
from cmab_kernels.attention.kernels import launch as attention_launch
from cmab_kernels.attention.kernels.launch import Tiles
from cmab_kernels.testing.cubin import Launch

CASES = {case.name: case for case in cases()}
ATTENTION = "latent_attention forward, 1 head of 64, L 128, N 1e6, bfloat16"
CHEAP = [
    ("latent_attention forward, 4 heads of 16, L 128, N 1e6, bfloat16", "sm_90"),
    ("latent_attention backward, 4 heads of 16, L 128, N 1e6, bfloat16", "sm_80"),
    ("latent_attention forward, 4 heads of 16, L 128, N 1e6, bfloat16", "sm_120"),
    ("latent_attention forward, 4 heads of 16, L 128, N 1e6, bfloat16", "gfx942"),
    ("ridge_state sums, 256 x (N 1,024, d 64), bfloat16", "sm_90"),
    ("ridge_state sums, 256 x (N 1,024, d 64), float32", "sm_86"),
    ("ridge_state rows, 1,024 x (N 256, d 16), float32", "sm_100"),
    ("iterative_pinv forward, 1,024 x (m 16), float32", "sm_80"),
    ("iterative_pinv forward, 1,024 x (m 16), float32", "sm_89"),
]
EVERY = [(case.name, arch) for case in CASES.values() for arch in targets(case)]


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return recorded()


def _row(record: dict[str, Any], case: str, kernel: str, capability: int) -> dict[str, Any]:
    return next(row for row in record["rows"] if readiness.key_of(row) == (case, kernel, f"sm_{capability}"))


def _sound(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if "problem" not in row]


# ---- what a multiprocessor holds


@pytest.mark.parametrize(
    "capability, threads, registers, shared, blocks, limit",
    [
        (80, 128, 140, 16384, 3, "registers"),
        (80, 64, 40, 1024, 24, "registers"),
        (80, 96, 33, 5000, 16, "registers"),
        (80, 32, 16, 0, 32, "blocks"),
        (80, 1024, 64, 0, 1, "registers"),
        (80, 256, 96, 100 * 1024, 1, "shared memory"),
        (80, 256, 128, 227 * 1024, 0, "shared memory"),
        (90, 256, 96, 100 * 1024, 2, "registers"),
        (90, 128, 128, 114 * 1024, 1, "shared memory"),
        (90, 256, 255, 80 * 1024, 1, "registers"),
        (90, 128, 32, 0, 16, "registers"),
        (100, 256, 128, 227 * 1024, 1, "shared memory"),
        (100, 512, 130, 0, 0, "registers"),
        (86, 128, 140, 16384, 3, "registers"),
        (86, 32, 16, 0, 16, "blocks"),
        (89, 32, 16, 0, 24, "blocks"),
        (89, 256, 96, 49 * 1024, 2, "registers"),
        (120, 256, 40, 33 * 1024, 2, "shared memory"),
        (120, 512, 40, 0, 3, "registers"),
        (120, 256, 128, 100 * 1024, 0, "shared memory"),
    ],
)
def test_occupancy(capability: int, threads: int, registers: int, shared: int, blocks: int, limit: str) -> None:
    """Blocks as cudaOccMaxActiveBlocksPerMultiprocessor of NVIDIA's cuda_occupancy.h (CUDA 13.0) gives them."""
    held = occupancy(capability, registers, shared, threads // 32)
    assert (held.blocks, held.limit) == (blocks, limit) and held.share == blocks * threads / (1536 if capability in (86, 89, 120) else 2048)


def test_tensor_memory_limits_blocks() -> None:
    assert occupancy(100, 32, 0, 4, tensor_columns=256)[::2] == (2, "tensor memory")
    assert occupancy(100, 32, 0, 4, tensor_columns=640)[::2] == (0, "tensor memory")


# ---- loops in machine code


def _sass(*lines: str) -> str:
    return "".join(f"        /*{16 * i:04x}*/  {line} ;  /* 0x0 */\n" for i, line in enumerate(lines))


PROGRAM = _sass(
    "MOV R1, c[0x0][0x28]",  # 00
    "FADD R2, R2, R3",  # 10: the outer loop
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4",  # 20
    "@!P1 BRA 0xe0",  # 30
    "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0",  # 40: the inner loop
    "MUFU.EX2 R5, R5",  # 50
    "@P2 BRA 0x80",  # 60
    "F2F.F64.F32 R6, R5",  # 70: once in many passes
    "LDS.128 R8, [R9]",  # 80
    "@P0 BRA 0x40",  # 90
    "@P3 CALL.REL.NOINC 0xc0",  # a0: leaves the outer loop
    "BRA 0x10",  # b0
    "FADD R2, R2, R2",  # c0
    "EXIT",  # d0
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4",  # e0: waits, out of the way
    "@!P1 BRA 0xe0",  # f0
    "BRA 0x40",  # 100
)


def test_loops_are_found() -> None:
    code = Code(PROGRAM, 4)
    (outer,) = code.outermost()
    (inner,) = code.innermost()
    assert (code.blocks[outer.head].start, code.blocks[inner.head].start) == (1, 4)
    assert code.main_loops(2) == [outer], "the wait is none"
    once = code.count(inner)
    assert once.instructions == {"matrix": 1, "special": 2, "shared": 1, "barrier": 2} and once.wavefronts == 2
    assert once.flops == {"half": 2 * 64 * 64 * 16}


def test_waits_behind_operands_hide_no_jump() -> None:
    """As cuobjdump writes code for sm_120."""
    waits = PROGRAM.replace(" ;", "    &req={2,1}    ?trans5;")
    assert waits != PROGRAM and Code(waits, 4).loops == Code(PROGRAM, 4).loops and Code(PROGRAM, 4).loops


def test_loops_within_count_as_often_as_they_run() -> None:
    code = Code(PROGRAM, 4)
    counts = code.count(code.outermost()[0], trips=8, rare={"F2F.F64": 1 / 16})
    assert counts.instructions["matrix"] == 8 and counts.instructions["special"] == 8.5 and counts.instructions["fp32"] == 1


def test_loops_around_exponentials_have_lengths_of_their_own() -> None:
    """A loop of 2 passes beside one of 4, in which one of 2 is beside one of 8 with the exponential."""
    first, second = (["MOV R3, R4", "FADD R1, R1, R1", f"@P0 BRA {at}"] for at in ("0x10", "0x40"))
    code = Code(_sass(*first, *second, "MUFU.EX2 R2, R2", "@P1 BRA 0x60", "@P2 BRA 0x30", "@P3 BRA 0x0", "EXIT"), 4)
    counts = code.count(code.outermost()[0], trips=2, peeled=False, around=(4, 8))
    assert counts.instructions["special"] == 4 * 8 and counts.instructions["fp32"] == 2 + 4 * 2


def test_passes_that_were_peeled_off_count_once() -> None:
    """The first product of a loop before it, so that it overlaps with loads."""
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0"
    code = Code(_sass("FADD R1, R1, R1", product, product, "@P0 BRA 0x20", "@P1 BRA 0x0", "EXIT"), 4)
    assert code.count(code.outermost()[0], trips=8).instructions["matrix"] == 8


def test_products_around_pieces_are_their_own() -> None:
    """The main loop goes through pieces, and multiplies once more itself. A ragged end with as many products follows it."""
    product, other = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "FADD R1, R1, R1"
    main = [other, product, "@P0 BRA 0x20", product, "@P1 BRA 0x10"]
    code = Code(_sass(other, *main, other, other, other, product, product, "@P2 BRA 0x60", "@P3 BRA 0x0", "EXIT"), 4)
    (outer,) = code.outermost()
    loop = code.around_products(outer)
    assert code.blocks[loop.head].start == 1 and code.size(loop) == len(main)
    assert code.count(loop, trips=4, peeled=False).instructions["matrix"] == 5, "four pieces, and one product between them"
    assert code.count(loop, trips=4).instructions["matrix"] == 4


@pytest.mark.parametrize(
    "lines, warps, kind, flops",
    [
        (["HMMA.16816.F32.BF16 R4, R8, R12, R4"], 4, "half", 4 * 2 * 16 * 8 * 16),
        (["HMMA.1688.F32.TF32 R4, R8, R12, R4"], 1, "tf32", 2 * 16 * 8 * 8),
        (["DMMA.884 R4, R8, R12, R4"], 2, "double", 2 * 2 * 8 * 8 * 4),
        (["DMMA.16x8x16 R4, R8, R12, R4"], 1, "double", 2 * 16 * 8 * 16),
        (["HGMMA.64x128x8.F32.TF32 R24, gdesc[UR4], R24, gsb0"], 8, "tf32", 2 * 2 * 64 * 128 * 8),
        (["UMOV UR7, 0x8100490", "UTCHMMA gdesc[UR2], gdesc[UR4], tmem[UR5], tmem[UR6], idesc[UR7], UPT"], 8, "half", 2 * 128 * 64 * 16),
    ],
)
def test_flops_of_matrix_instructions(lines: list[str], warps: int, kind: str, flops: int) -> None:
    assert Code(_sass(*lines), warps).count(None).flops == {kind: flops}


def test_a_solve_is_counted_by_its_loop_with_the_most_multiply_adds() -> None:
    """Two lines of a loop of its own, and three of another; packed ones are two."""
    code = Code(_sass("FFMA R1, R1, R1", "@P0 BRA 0x0", "FFMA2 R2, R2, R2", "FFMA R4, R4, R4", "LDS R3, [R5]", "@P1 BRA 0x20", "EXIT"), 4)
    counts, passing = counted(code, MultiplyAdds(count=3e6, moved=8.0))
    assert counts.instructions == {"fp32": 2, "shared": 1, "barrier": 1}
    assert passing == Pass("multiply-add", 3 * 4 * 32, 3e6 / (3 * 4 * 32), 8.0)
    assert counted(code, MultiplyAdds(None))[1].passes == 0.0, "a step has no time"


def test_eliminations_of_a_solve_are_those_of_its_loops() -> None:
    """Order 100 has 7 tiles of lines, and 100 + 200 columns are two pieces of 256."""
    launch = next(iter(_solve(3, 100, 200, "float32").launches(90).values()))
    before = sum(16 * k for k in range(0, 112, 16))
    within = 7 * sum(15 - j for j in range(16))
    assert PASSES["_solve"](launch) == MultiplyAdds(3 * (1 + 2 * 2) * 256 * (before + within), 4 * 3 * (100 * 100 + 2 * 100 * 200))


def test_time_is_that_of_the_busiest_unit() -> None:
    """An exponential a thread, of a million warps, takes what the special function units of the whole chip take for it."""
    chip = CHIPS[90]
    times = seconds(chip, Counts({"special": 1.0, "alu": 2.0}), warps=4, passes=250_000, moved=4.8e9)
    assert times["special"] == pytest.approx(32e6 / (16 * 132 * 1.83e9)) and times["alu"] == pytest.approx(times["special"] / 2)
    assert times["issue"] == pytest.approx(3e6 / (4 * 132 * 1.83e9)) and times["memory"] == pytest.approx(1e-3)
    assert max(times, key=lambda unit: times[unit]) == "memory"


# ---- what is recorded


def test_the_page_is_what_the_record_says(record: dict[str, Any]) -> None:
    """`python -m bench.gpu.readiness --write` writes both; with `--kernels _pinv`, where a floor or the page has changed, in seconds."""
    assert PAGE.read_text() == page(record)
    assert record["operators"] == readiness.operators(record["rows"])


def test_every_kernel_is_there(record: dict[str, Any]) -> None:
    sources = (path.read_text() for path in ROOT.glob("cmab_kernels/**/kernels/*.py"))
    launched = {name for text in sources for name in re.findall(r"(?m)^@kernel\(.*\)\ndef (_\w+)", text)} - set(LEFT_OUT)
    by_nvcc = {name for path in ROOT.glob("csrc/*/*.cu") for name in re.findall(r"(\w+)\(const __grid_constant__", path.read_text())}
    assert launched == set(PASSES) and by_nvcc == set(readiness_cuda.KERNELS) and len(launched) > 10 and len(by_nvcc) == 4
    found, sound = ({(row["kernel"].split()[0], row["arch"]) for row in rows} for rows in (record["rows"], _sound(record["rows"])))
    archs = {f"sm_{capability}" for capability in CHIPS}
    wanted = {(name, arch) for name in launched for arch in (*archs, readiness_amd.ARCH)}
    assert found == wanted | {(name, arch) for name in by_nvcc for arch in archs}
    assert sound == found, "each compiles for every target, at some shape"


def test_every_launch_is_there(record: dict[str, Any]) -> None:
    """And none that is no longer made: it would be added to the time of its operator."""
    assert {readiness.key_of(row) for row in record["rows"]} == readiness.launched()
    assert all(row["compiler"] for row in record["rows"])


def test_the_loop_is_the_one_that_was_meant(record: dict[str, Any]) -> None:
    """The loop is known by its products: as many flops a score as the two of attention have, and one exponential with little beside."""
    for case, width in ((f"4 heads of 16, L 128, N 1e6, {kind}", 16) for kind in ("bfloat16", "float16", "tf32")):
        for capability in WHOLE:
            row = _row(record, f"latent_attention forward, {case}", "_forward", capability)
            assert list(row["flops"].values()) == [4 * width] and 1 <= row["counts"]["special"] < 1.1, row
    row = _row(record, "projected_attention_state forward, 4 heads of 16, C 64, L 128, N 1e6, bfloat16", "_projected_forward", 90)
    assert row["flops"] == {"half": 2 * 16 * (3 + 1 + 64 / 128), "tf32": 2 * 16 * 3 * 64 / 128}, "scores and keys in three products"
    for capability in (90, 100):
        row = _row(record, "latent_attention backward, 4 heads of 16, L 128, N 1e6, bfloat16", "_backward", capability)
        assert row["flops"] == {"half": 10 * 16}
        for heads, width in (("4 heads of 16", 16), ("1 head of 64", 64)):
            row = _row(record, f"latent_attention backward, {heads}, L 128, N 1e6, float32", "_backward_in_parts", capability)
            assert row["flops"] == {"tf32": pytest.approx(30 * width, rel=0.01)}, "five products, each three of parts"


def test_no_time_is_below_what_the_work_needs(record: dict[str, Any]) -> None:
    """But where the units are others than the floor is of: it multiplies at the best rate that the operands have."""
    for row in record["operators"]:
        if "implied" in row:
            assert row["implied"] >= 0.99 * row["floor"], row


def test_shared_memory_of_nvcc_kernels_is_as_the_code_has_it() -> None:
    try:
        from cmab_kernels.runtime.cuda_launch import CUDA
    except ImportError as error:
        pytest.skip(str(error))
    for wide, size in ((False, 4), (True, 8)):
        ours = {name: kernel.shared(size) for name, kernel in readiness_cuda.KERNELS.items()}
        assert ours["ridge_kernel"] == CUDA.ridge_shared_bytes(64, 64, wide) and ours["solve_kernel"] == CUDA.solve_shared_bytes(
            64, 64, wide
        )
        assert ours["attention_step_kernel"] == CUDA.step_shared_bytes(64, 0, wide)
        assert ours["nystrom_step_kernel"] == CUDA.step_shared_bytes(64, 16, wide)


# ---- nothing has become worse


def _compiled_anew(name: str, arch: str, row: Callable[[Launch], dict[str, Any]]) -> list[dict[str, Any]]:
    heading = {"case": name, "arch": arch, "compiler": readiness.COMPILER}
    capability, _ = targets(CASES[name])[arch]
    return [heading | {"kernel": label} | row(launch) for label, launch in CASES[name].launches(capability).items()]


def _same_triton(record: dict[str, Any], name: str) -> None:
    compiler = next(row["compiler"] for row in record["rows"] if row["case"] == name)
    if compiler != readiness.COMPILER:
        pytest.skip(f"recorded with {compiler}, and here is {readiness.COMPILER}: record anew")


@pytest.mark.parametrize("name, arch", [pytest.param(*case, marks=[] if case in CHEAP else pytest.mark.nightly) for case in EVERY])
def test_no_kernel_is_worse(record: dict[str, Any], name: str, arch: str) -> None:
    _same_triton(record, name)
    _, row = targets(CASES[name])[arch]
    rows = _compiled_anew(name, arch, lambda launch: in_child(partial(row, launch), readiness.LIMIT))
    assert complaints(record["rows"], rows) == []


def test_no_kernel_of_nvcc_is_worse(record: dict[str, Any]) -> None:
    """Registers and spills of them all, as ptxas reported them when the package was built."""
    before = {readiness.key_of(row): row for row in record["rows"]}
    compiler = readiness_cuda.compiler()
    if compiler is None:
        pytest.skip("the package was built without nvcc")
    compared = 0
    for one in readiness_cuda.compiled():
        row = before[readiness_cuda.case(one.kernel, one.dtype).name, one.kernel, f"sm_{one.capability}"]
        if row["compiler"] != compiler:
            pytest.skip(f"recorded with {row['compiler']}, and the package was built with {compiler}: record anew")
        assert regressions(row, row | {"registers": one.registers, "spilled": one.spilled}) == [], one
        compared += 1
    assert compared == len(readiness_cuda.cases()) * len(CHIPS)


@pytest.mark.nightly
def test_no_code_of_nvcc_is_worse(record: dict[str, Any]) -> None:
    """The instructions of nvcc's kernels too, disassembled."""
    if readiness_cuda.compiler() is None:
        pytest.skip("the package was built without nvcc")
    assert complaints(record["rows"], list(readiness.rows(list(readiness_cuda.KERNELS), print))) == []


# ---- each refusal fires


@pytest.mark.parametrize(
    "change, says",
    [
        ({"registers": 109}, "registers 100 -> 109"),
        ({"local": 1}, "instructions to local memory 0 -> 1"),
        ({"spilled": 4}, "spilled values or bytes 0 -> 4"),
        ({"total": 10.4}, "instructions per score 10.0 -> 10.4"),
        ({"occupancy": 0.125}, "occupancy 0.250 -> 0.125"),
        ({"seconds": {"special": 3e-6, "alu": 2e-6}}, "implied time 2 us -> 3 us"),
        ({"problem": "no"}, "it compiled, and now: no"),
    ],
)
def test_regressions_are_seen(change: dict[str, Any], says: str) -> None:
    before = {"case": "some", "kernel": "_k 2", "arch": "sm_90", "compiler": "c", "per": "score"}
    before |= {"registers": 100, "local": 0, "spilled": 0, "total": 10.0, "occupancy": 0.25, "seconds": {"special": 1e-6, "alu": 2e-6}}
    within = before | {"registers": 108, "total": 10.3}
    assert regressions(before, within) == [] and regressions(before, before | change) == [says]
    (line,) = complaints([before], [before | change])
    assert line == f"_k 2 sm_90, some: {says}. If that is meant: python -m bench.gpu.readiness --kernels _k --write"
    assert complaints([before], [before | change | {"compiler": "another"}]) == []
    assert "not recorded" in complaints([], [before])[0]


def test_a_tile_that_spills_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    _same_triton(record, ATTENTION)
    with mock.patch.dict(attention_launch._FORWARD, {"half": {64: Tiles(128, 128, 4, 2)}}):
        lines = complaints(record["rows"], _compiled_anew(ATTENTION, "sm_90", lambda launch: of_launch(launch, tmp_path, 90)))
    assert len(lines) == 1 and lines[0].startswith(f"_forward sm_90, {ATTENTION}: ") and "instructions to local memory 0 -> " in lines[0]


def test_a_lost_multiply_add_is_refused(record: dict[str, Any], tmp_path: Path) -> None:
    """Scale and maximum in two instructions a score in place of one."""
    _same_triton(record, ATTENTION)

    def split(launch: Launch) -> dict[str, Any]:
        return of_launch(launch._replace(options=launch.options | {"enable_fp_fusion": False}), tmp_path, 90)

    first, *_ = complaints(record["rows"], _compiled_anew(ATTENTION, "sm_90", split))
    assert first.startswith("_forward sm_90") and "instructions per score" in first


def test_what_hangs_or_dies_is_a_row_that_says_so() -> None:
    assert in_child(lambda folder: {"folder": folder.is_dir()}, 20.0) == {"folder": True}
    start = time.monotonic()
    assert in_child(lambda _: time.sleep(60) or {}, 0.2) == {"problem": "not compiled within 0 s"}
    assert time.monotonic() - start < 20
    assert in_child(lambda _: os._exit(3), 20.0) == {"problem": "the compiler ended its process with 3"}
    assert in_child(lambda _: {}["some"], 20.0) == {"problem": "'some'"}


def test_an_unknown_kernel_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        readiness.main(["--kernels", "_nothing"])
    assert refused.value.code == 2 and "'_nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cmab_kernels_readiness": 0}'])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text)
    with (
        mock.patch.object(readiness, "RESULTS", tmp_path / "some.json"),
        pytest.raises(SystemExit, match=r"some.json: not a record of format 1; remove"),
    ):
        readiness.main(["--kernels", "_pinv"])
