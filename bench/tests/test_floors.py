"""Floors: the design's table for a GPU, a CPU's units that take turns, and work that is counted and not guessed."""

from __future__ import annotations

import pytest
import torch

from bench import rates
from bench.floors import (
    Rates,
    Work,
    attention_work,
    floor,
    floors,
    inverse_work,
    nystrom_work,
    pinv_work,
    ridge_work,
    rounded,
    step_work,
)
from bench.rates import TF32_AN_EXACT_PRODUCT, rates_of
from bench.scans import attention, intention, projected

H200 = Rates(3.87e12, 4.3e12, {"bfloat16": 790e12, "float32": 395e12})


@pytest.mark.parametrize(
    ("heads", "width", "latents", "dtype", "exponentials", "matrix", "memory", "bound"),
    [
        (4, 16, 128, "bfloat16", 132, 41, 60, "exponentials"),
        (8, 8, 128, "bfloat16", 265, 62, 60, "exponentials"),
        (1, 64, 128, "bfloat16", 33, 41, 60, "memory"),
        (8, 64, 512, "bfloat16", 1060, 1330, 480, "matrix"),
        (4, 16, 128, "float32", 132, 83, 119, "exponentials"),
    ],
)
def test_attention_on_a_gpu(heads, width, latents, dtype, exponentials, matrix, memory, bound):
    """Microseconds at N = 1e6, to the three digits of the design; a GPU pads 8 to 16 when it multiplies."""
    least = floor(attention_work(heads * latents * 10**6, heads * 10**6, width, width, dtype, device="cuda"), H200)
    assert [1e6 * part for part in (least.exponentials, least.matrix, least.memory)] == pytest.approx(
        [exponentials, matrix, memory], rel=0.02
    )
    assert least.bound == bound and least.seconds == max(least.exponentials, least.matrix, least.memory)


def test_backward_takes_five_products_and_twice_the_traffic():
    forward, backward = (
        attention_work(128 * 10**6, 10**6, 64, 64, "bfloat16", pass_, "cuda") for pass_ in (False, True)
    )
    assert backward.products == 2.5 * forward.products == 2 * 128e6 * 320
    assert backward.bytes == 2 * forward.bytes and backward.exponentials == forward.exponentials


def test_passes_follow_one_another():
    """The floor of a training step is the sum of the floors of its forward and backward pass, and not the largest of
    their sums."""
    forward, backward = Work(exponentials=5, products=1, bytes=1), Work(exponentials=1, products=1, bytes=7)
    both = floors([forward, backward], Rates(1, 1, {"float32": 1}))
    assert (both.seconds, both.bound) == (5 + 7, "memory") and floors(forward, Rates(1, 1, {"float32": 1})).seconds == 5


def test_a_training_step_has_two_passes():
    for case in (
        attention.attention(backward=True),
        projected.projected(backward=True),
        intention.layer(8, backward=True),
    ):
        assert [type(one) for one in case.work] == [Work, Work], case
    step = floors(attention.attention(backward=True, keys=1000).work, H200)
    halves = (attention_work(4 * 128 * 1000, 4 * 1000, 16, 16, "float32", backward) for backward in (False, True))
    assert step.seconds == sum(floor(half, H200).seconds for half in halves)


def test_exact_products_are_several_of_tf32(monkeypatch):
    """A product of float32 counts as three on the matrix units, or runs on the float32 units if these are faster; a
    rounded product counts as one."""
    monkeypatch.setattr(rates, "_gpu_exponentials", lambda: 1.0)
    monkeypatch.setattr(rates, "_memory", lambda device: 1.0)
    for exact, expected in ((6.0, 10.0), (20.0, 20.0)):
        monkeypatch.setattr(
            rates,
            "_products",
            lambda dtype, device, exact=exact: 30.0 if torch.get_float32_matmul_precision() == "high" else exact,
        )
        found = rates_of.__wrapped__("cuda")
        assert found.matrix["tf32"] == 30.0 and found.matrix["float32"] == expected
    assert TF32_AN_EXACT_PRODUCT == 3
    work = Work(products=60.0)
    assert [floors(each, Rates(1, 1, {"float32": 10.0, "tf32": 30.0})).seconds for each in (work, rounded(work))] == [
        6,
        2,
    ]


def test_intention_on_a_gpu():
    """The design's row: 256 x (N 1,024, d 64) takes 8 us for products and 31 for memory."""
    least = floor(ridge_work(256 * 1024, 64, 64, "float32"), H200)
    assert [1e6 * least.matrix, 1e6 * least.memory] == pytest.approx([8, 31], rel=0.03) and least.bound == "memory"
    assert ridge_work(10, 4, 4, "float32", backward=True).products == 2 * ridge_work(10, 4, 4, "float32").products
    assert ridge_work(10, 4, 4, "float32", exact=True).dtype == "float64"


@pytest.mark.parametrize(
    ("work", "seconds", "bound"),
    [
        (Work(3, 2, 4), 5, "exponentials"),
        (Work(2, 3, 4), 5, "matrix"),
        (Work(2, 2, 5), 5, "memory"),
    ],
)
def test_exponentials_and_products_take_turns_on_a_cpu(work, seconds, bound):
    least = floor(work, Rates(1, 1, {"float32": 1}, together=True))
    assert (least.seconds, least.bound) == (seconds, bound)
    assert floor(work, Rates(1, 1, {"float32": 1})).seconds == max(work.exponentials, work.products, work.bytes)


def test_work_of_inverses():
    assert inverse_work(5, 6, "float64").products == 5 * 6**3 and inverse_work(5, 6, "float64").bytes == 5 * 2 * 36 * 8


def test_work_of_nystrom_attention():
    assert pinv_work(3, 4, 6, "float32").products == 3 * 6 * 4 * 2 * 4**3
    window = nystrom_work(2, 100, 4, 8, 8, 6, "float32")
    assert window.exponentials == 2 * (2 * 100 * 4 + 16) and window.bytes == 2 * 100 * 32 * 4
    assert step_work("fixed single", 2, 64, 16, 64, "float32").exponentials == 2 * 3 * 16
    assert step_work("single", 2, 64, 16, 64, "float32").exponentials == 2 * 64
    assert (
        step_work("fixed retroactive", 1, 64, 16, 64, "float32").products
        > step_work("fixed single", 1, 64, 16, 64, "float32").products
    )
    with pytest.raises(AssertionError, match="full"):
        step_work("full", 1, 64, 16, 64, "float32")


def test_rates_of_this_machine_are_sensible():
    rates = rates_of("cpu")
    assert rates.together and rates.matrix.keys() == {"float64", "float32", "bfloat16", "float16"}
    assert (
        1e9 < rates.memory < 1e13
        and rates.matrix["float32"] > 1e9
        and rates.matrix["bfloat16"] >= rates.matrix["float32"]
    )
    assert rates.exponentials < rates.matrix["float32"] / 2
