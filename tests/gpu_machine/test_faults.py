"""Planted faults: the machine reports every broken kernel, with the line of the kernel."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)

import triton.language as tl

import cmab_kernels as ck
from cmab_kernels.runtime.triton_launch import kernel
from gpu_machine.launch import on_machine
from gpu_machine.machine import Machine
from gpu_machine.report import Fault

from .test_machine import OUT, execute

KEYS = 405


class Tampered(Machine):
    """A machine that changes the PTX of every kernel, or its parameters, before it runs."""

    def __init__(self, edit: Callable[[str], str], parameter: Callable[[bytes], bytes] = bytes) -> None:
        super().__init__(seed=1)
        self.edit, self.parameter = edit, parameter

    def launch(
        self, ptx: str, name: str, grid: Sequence[int], threads: int, shared_bytes: int, parameters: Sequence[bytes]
    ) -> None:
        super().launch(
            self.edit(ptx), name, grid, threads, shared_bytes, [self.parameter(value) for value in parameters]
        )


def _attention(machine: Machine) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, rows, 16).bfloat16() for rows in (5, KEYS, KEYS))
    with on_machine(machine):
        return tuple(ck.attention_state(query, key, value, impl="triton"))


def _text_of_attention() -> str:
    """Return the PTX of the forward kernel that `_attention` runs."""
    texts: list[str] = []

    def keep(text: str) -> str:
        texts.append(text)
        return text

    _attention(Tampered(keep))
    return texts[0]


def _without(pattern: str, number: int, instead: str = "") -> Callable[[str], str]:
    """Return an edit that replaces one match of a pattern."""

    def edit(text: str) -> str:
        found = list(re.finditer(pattern, text))[number]
        return text[: found.start()] + found.expand(instead) + text[found.end() :]

    return edit


def _what_happens(edit: Callable[[str], str]) -> str:
    """Return the report after a change in the kernels, or "" if no bit of the results changes."""
    right = _attention(Machine(1))
    try:
        results = _attention(Tampered(edit))
    except Fault as fault:
        return str(fault)
    assert all(map(torch.equal, results, right)), "a wrong result without a report"
    return ""


# ---- in kernels of the package


def test_removed_barriers_are_reported() -> None:
    """A missing barrier is reported as a race or as data that have not arrived;
    a few barriers are unneeded and change nothing."""
    pattern = r"bar\.sync\s+0;"
    found = [
        _what_happens(_without(pattern, number)) for number in range(len(re.findall(pattern, _text_of_attention())))
    ]
    reports = [report for report in found if report]
    assert len(reports) >= 6 and all(re.search(r"a race|has not arrived", report) for report in reports)
    assert all(re.search(r"_forward, \w+\.py:\d+:\d+", report) for report in reports), "with the line of the kernel"


def test_dropped_waits_are_reported() -> None:
    pattern = r"cp\.async\.wait_group\s+\d+;"
    found = [
        _what_happens(_without(pattern, number)) for number in range(len(re.findall(pattern, _text_of_attention())))
    ]
    assert any("a copy that has not arrived was read" in report for report in found)


def test_a_wait_for_too_few_copies_is_reported() -> None:
    assert "has not arrived" in _what_happens(_without(r"cp\.async\.wait_group\s+2;", 0, "cp.async.wait_group 4;"))


def test_a_key_too_many_is_reported() -> None:
    """The kernel is told that there is one key more, so its masks are off by one."""
    right, wrong = (struct.pack("<I", n) for n in (KEYS, KEYS + 1))
    with pytest.raises(Fault, match=r"(?s)out of bounds: read 16 bytes at byte 12960 of key.*_forward"):
        _attention(Tampered(str, lambda value: wrong if value == right else value))


def test_swapped_operands_give_wrong_results() -> None:
    """Two registers of a matrix are swapped, or the two sides of a difference."""
    product = r"(mma\.sync\S+ \{[^}]*\}, \{ )(%r\d+), (%r\d+), "
    for edit in (
        _without(product, 0, r"\1\3, \2, "),
        _without(r"(sub\.f32\s+%r\d+, )(%r\d+), (%r\d+);", 0, r"\1\3, \2;"),
    ):
        with pytest.raises(AssertionError, match="a wrong result without a report"):
            _what_happens(edit)


def test_a_store_that_is_left_out_is_seen() -> None:
    """A later kernel, or the caller, finds NaN at this place."""
    (out, _) = _attention(Tampered(_without(r"(@%p\d+ )?st\.global\.v\d\.b32 [^;]*;", 0)))
    assert out.isnan().any()


@kernel("x")
def _copy(x, y, N: int, BLOCK: tl.constexpr, MORE: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + columns, tl.load(x + columns, mask=columns < N + MORE, other=0.0), mask=columns < N)


@pytest.mark.parametrize("more", [0, 1])
def test_a_mask_that_is_off_by_one(more: int) -> None:
    """The line is that of the kernel's source."""
    x = torch.randn(300)
    with on_machine(Machine(1)):
        y = x.new_empty(300)
        if more:
            with pytest.raises(
                Fault,
                match=r"(?s)out of bounds: read 4 bytes at byte 1200 of x \(300, float32\).*_copy, test_faults\.py:\d+",
            ):
                _copy(3, x, y, 300, BLOCK=128, MORE=more, num_warps=2)
        else:
            _copy(3, x, y, 300, BLOCK=128, MORE=more, num_warps=2)
            assert torch.equal(x, y)


def test_results_that_were_not_written_are_reported_when_they_are_read() -> None:
    x = torch.randn(300)
    with on_machine(Machine()):
        y, z = x.new_empty(300), x.new_empty(300)
        _copy(1, x, y, 300, BLOCK=128, MORE=0, num_warps=2)
        with pytest.raises(Fault, match="memory that nobody wrote was read, at byte 512 of a result"):
            _copy(3, y, z, 300, BLOCK=128, MORE=0, num_warps=2)


# ---- in small programs

SHARED = """
    mov.b32 %r10, room;
    mad.lo.s32 %r11, %r0, 4, %r10;
    xor.b32 %r12, %r11, 128;
    and.b32 %r13, %r11, 127;
    shr.u32 %r14, %r0, 5;
    setp.eq.b32 %p1, %r14, 0;
    setp.lt.u32 %p2, %r0, 16;
"""


@pytest.mark.parametrize(
    "code, report",
    [
        ("ld.shared.b32 %r1, [%r11];", "memory that nobody wrote was read, at byte 0 of shared memory"),
        ("st.shared.b32 [%r11], %r0; ld.shared.b32 %r1, [%r12];", "a race: a warp reads what another wrote"),
        ("st.shared.b32 [%r11], %r0; bar.sync 0; ld.shared.b32 %r1, [%r12];", ""),
        ("st.shared.b32 [%r11], 1; bar.sync 0; ld.shared.b32 %r1, [%r12]; st.shared.b32 [%r11], "
         "2;", "a warp writes what another read"),
        ("st.shared.b32 [%r10], %r0;", "two threads write different values at once|two warps write different values"),
        ("st.shared.b32 [%r13], %r14;", "two threads write different values at once|two warps write different values"),
        ("st.shared.b32 [%r13], 7;", ""),
        ("@%p1 st.shared.b32 [%r13], 1; @!%p1 st.shared.b32 [%r13], "
         "2;", "two warps write different values without a barrier"),
        ("st.shared.b32 [%r11+1000], %r0;", "out of bounds: write 4 bytes at byte 1024 of shared memory, which has "
                                            "1024"),
        ("st.shared.v2.b32 [%r11], {%r0, %r0};", "misaligned: write 8 bytes at once, at byte 4"),
        ("ld.global.b64 %rd1, [%rd30+8];", "out of bounds: read 8 bytes at byte 512 of from"),
        ("ld.global.b32 %r1, [%rd30+-520];", "out of bounds"),
        ("ld.global.b32 %r1, [%rd30+2];", "misaligned: read 4 bytes"),
        ("@%p2 bra $END; bar.sync 0; $END:", "a barrier that not all threads reach: 16 of 64 are done"),
        ("@%p1 bra $A; bar.sync 0; bra.uni $B; $A: bar.sync 0; $B:", "threads of a block wait at different barriers"),
        ("@%p2 bra $END; shfl.sync.idx.b32 %r1, %r0, 0, 31, 0xFFFF0000; $END:", "a thread that is not there"),
        ("@%p2 bra $END; shfl.sync.idx.b32 %r1, %r0, 0, 31, -1; $END:", "must be at this instruction together"),
        ("@%p2 ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r10];", "a matrix instruction without all threads"),
        ("cp.async.ca.shared.global [%r11], [%rd30], 0x4; ld.shared.b32 %r1, "
         "[%r11];", "a copy that has not arrived was read"),
        ("cp.async.ca.shared.global [%r11], [%rd30], 0x4; cp.async.wait_all; ld.shared.b32 %r1, [%r11];", ""),
        ("cp.async.ca.shared.global [%r11], [%rd30], 0x4; cp.async.wait_all; ld.shared.b32 %r1, "
         "[%r12];", "a race|has not arrived"),
        ("trap;", "the kernel stopped by itself"),
    ],
)  # fmt: skip
def test_small_programs(code: str, report: str) -> None:
    """Two warps; the report is the same in every order of the two."""
    for seed in range(4):
        if report:
            with pytest.raises(Fault, match=report) as fault:
                execute(SHARED + "\n.loc 1 9 3\n" + code + OUT, np.zeros((64, 1)), threads=64, seed=seed)
            assert "kernel.py:9:3" in str(fault.value)
        else:
            execute(SHARED + code + OUT, np.zeros((64, 1)), threads=64, seed=seed)
