"""The effects of a call on the GPU: how many kernels it launches and on which device; and that the CUDA kernels were
built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cmab_kernels as ck
from cmab_kernels.attention.contract import Attention
from cmab_kernels.intention.contract import ApplyRows, Gram
from cmab_kernels.nystrom.contract import LandmarkValues, Pinv, PinvBackward
from cmab_kernels.runtime.backends import implementation
from cmab_kernels.runtime.extension import load_cuda

from . import DEVICE

pytestmark = pytest.mark.gpu


def launches(call: Callable[[], Any]) -> int:
    """Return the number of kernels and copies that run on the GPU in a call. The call has been made once before.

    Memory is not poisoned during this call, because filling memory is also a launch.
    """
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def test_the_cuda_kernels_are_there() -> None:
    """A GPU check without the CUDA kernels would not test them: build the package with CMAB_KERNELS_CUDA=1."""
    assert load_cuda().MAX_WIDTH >= 128


def _calls() -> dict[str, Callable[[], Any]]:
    attention, ridge, nystrom = (
        implementation(operator_set, "triton") for operator_set in ("attention", "intention", "nystrom")
    )
    q, k = (torch.randn(2, 2, n, 64, device=DEVICE) for n in (128, 1024))
    narrow = k[..., :16]
    a = torch.randn(8, 16, 16, device=DEVICE).softmax(-1)
    solution = a.double()[:4].view(2, 2, 16, 16)
    return {
        "attention over 1,024 keys": lambda: attention.attention_forward(Attention(q, k, k, scale=0.125)),
        "both sums of 1,024 keys of 16": lambda: ridge.gram(
            Gram(narrow, narrow, None, None, None, (True, True), False)
        ),
        "rows times a solution": lambda: ridge.apply_rows(ApplyRows(narrow, solution)),
        "pinv": lambda: nystrom.iterative_pinv(Pinv(a, 6)),
        "its gradient": lambda: nystrom.iterative_pinv_backward(PinvBackward(a, a, 6)),
        "landmark values": lambda: nystrom.landmark_values(LandmarkValues(a, a, a, None, 0.25, 6)),
    }


@pytest.mark.parametrize(
    "name",
    [
        "attention over 1,024 keys",
        "both sums of 1,024 keys of 16",
        "rows times a solution",
        "pinv",
        "its gradient",
        "landmark values",
    ],
)
def test_one_launch(name: str) -> None:
    call = _calls()[name]
    call()
    assert launches(call) == 1


def test_the_current_device_is_restored() -> None:
    """Calls on another GPU do not change the current device."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    q, k = (torch.randn(1, 2, n, 16, device="cuda:1") for n in (3, 40))
    with torch.cuda.device(0):
        outs = [ck.latent_attention(q, k, k), ck.intention(q, k, k, 1.0), ck.iterative_pinv(k[:, :, :16].softmax(-1))]
        state = ck.continual_nystrom_init(k, k, k, 4)
        outs.append(ck.continual_nystrom_step(state, q, q, q).out)
        assert torch.cuda.current_device() == 0 and all(out.device == q.device for out in outs)
