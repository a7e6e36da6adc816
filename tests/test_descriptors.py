"""The check of the descriptors of Hopper's matrix instructions, on disassemblies of a few lines."""

from __future__ import annotations

import pytest

pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)

from cmab_kernels.testing.descriptors import lost_descriptors

ADDRESS = (
    "S2UR UR5, SR_CgaCtaId",
    "UMOV UR4, 0x400",
    "ULEA UR4, UR5, UR4, 0x18",
    "USHF.R.U32.HI UR6, URZ, 0x4, UR4",
    "UMOV UR7, 0x40000040",
)
"""The address of shared memory in UR4, and a descriptor of it in UR6 and UR7."""
PRODUCT = "HGMMA.64x16x8.F32.TF32 R24, R32, gdesc[UR4], R24"
"""A product whose second factor UR6 and UR7 describe."""


def _found(*instructions: str) -> list[str]:
    return lost_descriptors(
        "\n".join(f"        /*{16 * i:04x}*/                   {text} ;" for i, text in enumerate(instructions))
    )


@pytest.mark.parametrize(
    "between",
    [
        (),
        ("UIADD3.64 UR6, UR6, 0x2, URZ",),
        ("IMAD.U32 R8, RZ, RZ, UR6", "FADD R9, R9, R9", "R2UR UR6, R8"),
        (
            "MOV R8, UR6",
            "MOV R9, UR7",
            "STL.64 [R1+0x8], R8",
            "CS2R R8, SRZ",
            "LDL.64 R8, [R1+0x8]",
            "R2UR UR6, R8.reuse",
            "R2UR UR7, R9",
        ),
        ("IADD3 R8, P1, R9, 0x2, RZ", "FMUL R9, R9, R9"),
        ("FADD R9, R9, R9", "CS2R R8, SRZ", "R2UR UR7, R9"),  # zeros in two registers
        ("HGMMA.64x8x16.F16 RZ, gdesc[URZ], RZ, !UPT, gsb0",),  # multiplies nothing
    ],
)
def test_what_is_right_is_not_reported(between: tuple[str, ...]) -> None:
    assert _found(*ADDRESS, *between, PRODUCT) == []


@pytest.mark.parametrize(
    "between",
    [
        ("UIADD3 UR6, UP1, UR54, 0x40, URZ",),  # of a register that nothing has written
        ("UMOV UR6, 0x2",),
        ("FADD R8, R9, R9", "R2UR UR6, R8"),
        ("LDS R8, [R9]", "R2UR UR6, R8"),
        ("UIADD3.64 UR6, UR6, -UR12, URZ",),
        ("LDL R8, [R1+0x8]", "R2UR UR6, R8"),
    ],
)
def test_lost_descriptors_are_reported(between: tuple[str, ...]) -> None:
    (fault,) = _found(*ADDRESS, *between, PRODUCT)
    assert fault.startswith("HGMMA.64x16x8.F32.TF32 at 00") and fault.endswith("no address in the descriptor UR6")


def test_both_factors_have_descriptors() -> None:
    """A first factor in shared memory has its own descriptor, before that of the second factor."""
    both = "HGMMA.64x16x8.F32.TF32 R24, gdesc[UR4].tnspA, R24, gsb0"
    assert _found(*ADDRESS, both) == []
    assert [fault.split()[-1] for fault in _found(*ADDRESS, "UMOV UR4, 0x1", "UMOV UR5, 0x40000040", both)] == ["UR4"]
    assert [fault.split()[-1] for fault in _found(*ADDRESS, "UMOV UR6, 0x1", both)] == ["UR6"]
