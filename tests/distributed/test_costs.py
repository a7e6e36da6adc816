"""The costs on docs/distributed.md follow from its formulas, and the formulas from the messages that are sent."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch.distributed as dist

import cmab_kernels as ck
from cmab_kernels.distributed import all_merge_state, messages

from .. import pages
from .common import counted

PAGE = pages.DOCS / "distributed.md"
SECONDS, BYTES_PER_SECOND = 20e-6, 10e9
BATCH, LATENTS, HEADS, DIM = 16, 128, 4, 64

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed")


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def message(state: ck.AttentionState | ck.RidgeState, size: int, gradient: int) -> None:
    """Assert that a second merge sends `size` bytes in addition to its header, and that its backward pass sends
    `gradient` bytes."""
    part = type(state)(*(field.requires_grad_(field.is_floating_point()) for field in state))
    all_merge_state(part)
    with counted() as calls:
        all_merge_state(part)[0].sum().backward()
    assert [sent for _, sent in calls] == [size + 128, gradient]
    assert 8 * messages.NUMBERS == 128 and messages.FIRST_ROOM == 64 * 1024


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("batch", [1, 3, BATCH])
def test_bytes_of_a_block(batch: int) -> None:
    state = ck.nn.CMAB(DIM, LATENTS, HEADS).init_state(batch)
    heads, width = HEADS, DIM // HEADS
    size = batch * LATENTS * (4 * DIM + 8 * HEADS)
    assert size == batch * heads * LATENTS * (4 * width + 8)
    message(state, size, 8 * batch * heads * LATENTS * (width + 1))
    assert batch != BATCH or f"{size:,} bytes" in PAGE.read_text()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shape", [(1, 1, 3, 5), (2, 3, 16, 4)])
def test_bytes_of_sums(shape: tuple[int, int, int, int]) -> None:
    batch, heads, width, value_width = shape
    sums = 8 * batch * heads * width * (width + value_width)
    message(ck.empty_ridge(*shape), sums + 8 * batch * heads, sums)


@pytest.mark.usefixtures("alone")
def test_a_size_is_rounded_up() -> None:
    message(ck.empty_state(1, 1, 3, 5), 3 * (4 * 5 + 8) + 4, 8 * 3 * 6)
    message(ck.empty_state(1, 1, 1, 21), 4 * 21 + 8 + 4, 8 * 22)


def test_the_table() -> None:
    size = BATCH * LATENTS * (4 * DIM + 8 * HEADS) + 128
    gradient = 8 * BATCH * HEADS * LATENTS * (DIM // HEADS + 1)
    found = re.findall(r"^\| ([\d,]+ \|.*) \|$", PAGE.read_text(), flags=re.MULTILINE)
    rows = [row.split(" | ") for row in found]
    assert [int(row[0].replace(",", "")) for row in rows] == [2, 4, 8, 16, 64, 256, 1024]
    for row in rows:
        world = int(row[0].replace(",", ""))
        levels = math.log2(world)
        received, in_levels = (world - 1) * size, levels * size
        times = (
            (world - 1) * SECONDS + received / BYTES_PER_SECOND,
            levels * SECONDS + received / BYTES_PER_SECOND,
            levels * SECONDS + in_levels / BYTES_PER_SECOND,
            2 * (world - 1) * (SECONDS + gradient / world / BYTES_PER_SECOND),
        )
        ring, tree, level, back = (f"{1e3 * time:.2f} ms" for time in times)
        assert row[1:] == [f"{received / 2**20:.1f} MiB", ring, tree, f"{in_levels / 2**20:.1f} MiB", level, back]


@pytest.mark.parametrize("available", [False, True])
def test_without_a_process_group(available: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing needs neither a process group nor a torch that can make one; only a merge looks for it."""
    monkeypatch.setattr(dist, "is_available", lambda: available)
    with pytest.raises(
        RuntimeError, match=r"^group: .* no process group yet; call torch\.distributed\.init_process_group first"
    ):
        all_merge_state(ck.empty_state(1, 1, 2, 3))
