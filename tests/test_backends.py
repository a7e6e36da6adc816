"""The choice of an implementation and its reasons; and importing the package starts nothing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import cmab_kernels as ck
from cmab_kernels.runtime import backends

from .forked import Forks

Q, K = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)


def test_import_starts_nothing(forks: Forks, tmp_path: Path) -> None:
    """Importing loads neither Triton nor the extension, and touches no GPU:
    they are imported when they are first used."""
    code = """
import sys, torch, cmab_kernels, cmab_kernels.nn
late = "triton", "torch._dynamo", "cmab_kernels._C"
print([name for name in late if name in sys.modules], torch.cuda.is_initialized())
"""
    done = forks.run(tmp_path, program=code)
    assert done.stdout.strip() == "[] False", done.stderr


def test_explain_names_every_implementation_with_a_reason() -> None:
    rows = ck.explain("latent_attention", Q, K, K)
    assert [row.impl for row in rows] == ["native", "triton", "reference"]
    assert (
        all(row.reason for row in rows) and not rows[1].usable and re.search("GPU|or newer|No module", rows[1].reason)
    )
    with pytest.raises(ValueError, match=r"^operator: got 'nothing'.*latent_attention"):
        ck.explain("nothing", Q, K, K)
    with pytest.raises(TypeError, match=r"^key_padding_mask: got an option, expected no option.*takes options"):
        ck.explain("latent_attention", Q, K, K, key_padding_mask=None)  # type: ignore[call-overload]  # what is refused


def test_explain_names_the_inputs_that_it_needs() -> None:
    for operator, inputs, said in (
        ("latent_attention", (Q,), "got 1 tensors?, expected query, key, value$"),
        ("latent_attention", (Q, K, K, K), "got 4 tensors?, expected query, key, value$"),
        ("solve_ridge", (Q,), "got 1 tensors?, expected gram, rhs$"),
        ("projected_attention_state", (Q, K), "got 2 tensors?, expected query, inputs, key_weight, value_weight$"),
    ):
        with pytest.raises(TypeError, match=rf"^inputs: {said}"):
            ck.explain(operator, *inputs)


@pytest.mark.parametrize("given", [np.array(["auto", "native"]), np.array("native"), ["auto"], None])
def test_what_is_no_name_is_no_implementation(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^impl: got .*, expected one of auto, "):
        ck.use_impl(given)


def test_explain_sees_what_an_implementation_cannot_do() -> None:
    wide = torch.randn(1, 1, 2, 300)
    native = ck.explain("latent_attention", wide, wide, wide)[0]
    assert not native.usable and "256" in native.reason
    with pytest.raises(RuntimeError, match="256"):
        ck.latent_attention(wide, wide, wide, impl="native")


def test_use_impl_as_context_and_as_call() -> None:
    with ck.use_impl("reference"):
        assert backends.choose("attention", "auto", Q, K, K) == "reference"
        with ck.use_impl("auto"):
            assert backends.choose("attention", "auto", Q, K, K) == "native"
        assert backends.choose("attention", "auto", Q, K, K) == "reference"
        assert backends.choose("attention", "native", Q, K, K) == "native", "the call's own choice wins"
    assert backends.choose("attention", "auto", Q, K, K) == "native"
    try:
        ck.use_impl("reference")
        assert backends.choose("attention", "auto", Q, K, K) == "reference"
    finally:
        ck.use_impl("auto")
    with pytest.raises(ValueError, match=r"^impl: got 'fast'.*auto, cuda, native, reference, triton"):
        ck.use_impl("fast")


def test_use_impl_is_undone_by_an_exception() -> None:
    with pytest.raises(KeyError), ck.use_impl("reference"):
        raise KeyError
    assert backends.current_impl() == "auto"


# ---- the effect of `use_impl`


def _chosen() -> str:
    return backends.choose("attention", "auto", Q, K, K)


def _block(impl: str) -> Iterator[str]:
    """A generator with a block around its two steps."""
    with ck.use_impl(impl):
        yield _chosen()
        yield _chosen()


def test_threads_whose_blocks_overlap_see_their_own_and_leave_nothing() -> None:
    together = Barrier(2, timeout=10)

    def work(impl: str, first_out: bool) -> list[str]:
        seen = [backends.current_impl()]
        with ck.use_impl(impl):
            together.wait()
            seen.append(_chosen())
            together.wait()
            if not first_out:
                together.wait()
        if first_out:
            together.wait()
        return [*seen, backends.current_impl()]

    with ck.use_impl("triton"), ThreadPoolExecutor(2) as threads:
        results = [threads.submit(work, impl, impl == "reference") for impl in ("reference", "native")]
        assert [each.result() for each in results] == [["auto", "reference", "auto"], ["auto", "native", "auto"]]
        again = threads.submit(backends.current_impl), threads.submit(backends.current_impl)
        assert [each.result() for each in again] == ["auto", "auto"]
        assert backends.current_impl() == "triton"
    assert backends.current_impl() == "auto"


@pytest.mark.parametrize("first", [0, 1], ids=["in the order of entry", "in the other order"])
def test_generators_that_overlap_leave_nothing(first: int) -> None:
    both = [_block("reference"), _block("native")]
    assert [next(each) for each in both] == ["reference", "native"]
    both[first].close()
    assert next(both[1 - first]) == backends.current_impl() == ("native", "reference")[first]
    both[1 - first].close()
    assert backends.current_impl() == "auto"


def test_tasks_that_overlap_see_their_own_and_leave_nothing() -> None:
    async def work(impl: str, pause: float) -> list[str]:
        seen = [backends.current_impl()]
        with ck.use_impl(impl):
            await asyncio.sleep(pause)
            seen.append(_chosen())
            seen.append(await asyncio.to_thread(_chosen))
        ck.use_impl("native")
        return [*seen, backends.current_impl()]

    async def main() -> list[list[str]]:
        with ck.use_impl("cuda"):  # attention has no "cuda"
            found = await asyncio.gather(work("reference", 0.02), work("native", 0.01), work("reference", 0.0))
            assert backends.current_impl() == "cuda"
        return found

    assert asyncio.run(main()) == [["cuda", impl, impl, "native"] for impl in ("reference", "native", "reference")]
    assert backends.current_impl() == "auto"


def test_a_generator_that_ends_in_another_task_changes_nothing_there() -> None:
    async def steps() -> Any:
        with ck.use_impl("reference"):
            yield
            yield

    async def main() -> str:
        generator = steps()
        await asyncio.create_task(anext(generator))  # the block begins in a separate task
        with ck.use_impl("native"):
            await generator.aclose()
            return backends.current_impl()

    assert asyncio.run(main()) == "native"


def test_one_object_may_be_entered_again() -> None:
    use = ck.use_impl("reference")
    assert _chosen() == "reference"
    for _ in range(2):
        with use as same:
            assert same is use and _chosen() == "reference"
            with ck.use_impl("native"), use:
                assert _chosen() == "reference"
            assert _chosen() == "reference"
        assert _chosen() == "native" and backends.current_impl() == "auto"
    with ThreadPoolExecutor(1) as thread, use:
        assert thread.submit(backends.current_impl).result() == "auto"

        def enter() -> list[str]:
            with use:
                return [_chosen()]

        assert (
            thread.submit(enter).result() == ["reference"] and thread.submit(backends.current_impl).result() == "auto"
        )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_that_chooses_does_so_in_both_calls(use_reentrant: bool) -> None:
    """The second call is in the backward pass, on a GPU in another thread."""
    seen = []

    def part(query: torch.Tensor) -> torch.Tensor:
        with ck.use_impl("reference"):
            seen.append(_chosen())
            return ck.latent_attention(query, K, K)

    query = Q.clone().requires_grad_()
    right = torch.autograd.grad(part(query).sum(), query)[0]
    loss = torch.utils.checkpoint.checkpoint(part, query, use_reentrant=use_reentrant).sum()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(loss.backward).result()
    assert seen == ["reference"] * 3 and torch.equal(query.grad, right)


def test_a_call_inside_a_block_holds_until_it_ends() -> None:
    with ck.use_impl("native"):
        ck.use_impl("reference")
        assert _chosen() == "reference"
        with ck.use_impl("native"):
            assert _chosen() == "native"
        assert _chosen() == "reference"
    assert backends.current_impl() == "auto"


def test_calls_from_now_on_take_no_memory() -> None:
    with ck.use_impl("auto"):
        for impl in ("reference", "native") * 3:
            ck.use_impl(impl)
        assert backends.setting.now().below.below is None  # type: ignore[union-attr]  # the block has one below


def test_compiled_code_follows_each_thread_and_task() -> None:
    """Compiled code is compiled again if another implementation is chosen, but not if it has been chosen before."""

    @torch.compile(fullgraph=True, backend="eager")
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + {"auto": 1, "reference": 2, "native": 3}[backends.current_impl()]

    @torch.compile(fullgraph=True, backend="eager")
    def inside(x: torch.Tensor) -> torch.Tensor:
        with ck.use_impl("reference"):
            y = x + {"auto": 1, "reference": 2, "native": 3}[backends.current_impl()]
        return 10 * y + {"auto": 1, "reference": 2, "native": 3}[backends.current_impl()]

    def both(impl: str) -> list[float]:
        with ck.use_impl(impl):
            values = [function(torch.zeros(())).item() for function in (chosen, inside)]
            assert backends.current_impl() == impl
            return values

    expected = {"auto": [1, 21], "reference": [2, 22], "native": [3, 23]}

    async def task(impl: str) -> bool:
        await asyncio.sleep(0)
        return both(impl) == expected[impl]

    async def tasks() -> bool:
        return all(await asyncio.gather(*(task(impl) for impl in [*expected] * 2)))

    assert {impl: both(impl) for impl in expected} == expected
    with ThreadPoolExecutor(1) as thread, ck.use_impl("native"):
        assert thread.submit(both, "auto").result() == expected["auto"]
        assert thread.submit(lambda: chosen(torch.zeros(())).item()).result() == 1
    assert asyncio.run(tasks())


# ---- warnings about the reference


def test_the_reference_is_never_taken_silently() -> None:
    wide = torch.randn(1, 1, 2, 300)
    with pytest.warns(RuntimeWarning, match=r"PyTorch reference.*256"):
        ck.latent_attention(wide, wide, wide)


@pytest.fixture(scope="module")
def without_the_extension() -> Iterator[Forks]:
    with Forks(
        'import sys\nsys.modules["cmab_kernels._C"] = None\nimport torch._dynamo\nfrom cmab_kernels import info, nn'
    ) as forks:
        yield forks


def test_without_the_extension_everything_still_runs(without_the_extension: Forks, tmp_path: Path) -> None:
    code = """
import warnings
import torch, cmab_kernels
q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    cmab_kernels.latent_attention(q, k, k)
print(cmab_kernels.explain("latent_attention", q, k, k)[0].usable, len(caught))
"""
    done = without_the_extension.run(tmp_path, program=code)
    assert done.stdout.strip() == "False 1", done.stderr


FIRST_CALLS = {
    "attention": "ck.latent_attention(q, k, k)",
    "a merge": "ck.merge_states(state, state)",
    "a solve": "ck.regularised_solve(torch.eye(3), torch.ones(3, 1), 0.1)",
    "Nyström": "ck.nystrom_attention(k, k, k, 2)",
    "a layer": "ck.feed_forward_layer(torch.randn(1, 9, 8), torch.randn(32, 8), torch.randn(8, 16))",
    "a step": "ck.continual_attention_step(ck.continual_attention_init(k, k, k), k[:, :, :1], k[:, :, :1], k[:, :, "
    ":1])",
    "torch's function": "integrations.scaled_dot_product_attention(q, k, k)",
    "a module": "nn.CMAB(16, 4, 2)(torch.randn(1, 9, 16), torch.randn(1, 3, 16))",
    "attention of torch's form": "nn.MultiheadAttention(16, 2)(*torch.randn(3, 9, 1, 16), need_weights=False)",
    "compiled": "torch.compile(lambda a, b: ck.regularised_solve(a, b, 0.1), fullgraph=True, "
    "backend='eager')(torch.eye(3), torch.eye(3))",
}


@pytest.mark.parametrize("name", FIRST_CALLS)
def test_without_the_extension_the_first_call_says_so_once(
    name: str, without_the_extension: Forks, tmp_path: Path
) -> None:
    """Some calls never run native code, and do not warn: calls with another choice, calls on another device, and calls
    that only ask."""
    code = f"""
import warnings
import torch, cmab_kernels as ck
from cmab_kernels import info, integrations, nn
q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    ck.explain("latent_attention", q, k, k)
    assert "cannot be loaded" in info.report() or "not built" in info.report()
    state = ck.attention_state(q, k, k, impl="reference")
    ck.regularised_solve(torch.eye(3, device="meta"), torch.ones(3, 1, device="meta"), 0.1)
    before = len(caught)
    for _ in range(3):
        {FIRST_CALLS[name]}
said = ["has no native kernels" in str(warning.message) for warning in caught]
print(before, said[0], sum(said))
"""
    done = without_the_extension.run(tmp_path, program=code)
    assert done.stdout.strip() == "0 True 1", done.stderr


def test_without_the_extension_an_exported_graph_says_what_it_needs(
    without_the_extension: Forks, tmp_path: Path
) -> None:
    code = """
import torch, cmab_kernels
q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
try:
    torch.ops.cmab.attention(q, k, k, None, None, None, None, None, 1.0, "native")
except RuntimeError as error:
    print(error)
"""
    said = without_the_extension.run(tmp_path, program=code).stdout
    assert re.search(r"^impl: 'native' cannot run here: .*native extension is not there", said)


def test_without_the_extension_the_choice_can_still_be_traced(without_the_extension: Forks, tmp_path: Path) -> None:
    code = """
import torch, cmab_kernels
q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 9, 8)
compiled = torch.compile(lambda q, k: cmab_kernels.latent_attention(q, k, k), fullgraph=True, backend="eager")
print(torch.allclose(compiled(q, k), cmab_kernels.latent_attention(q, k, k, impl="reference")))
"""
    done = without_the_extension.run(tmp_path, program=code)
    assert done.stdout.strip() == "True", done.stderr


# ---- the choice on a GPU


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> str:
    """Pretend that there is a GPU that can run Triton's kernels, and that the package was built without nvcc."""
    triton_launch = pytest.importorskip("cmab_kernels.runtime.triton_launch", exc_type=ImportError)
    monkeypatch.setattr(triton_launch, "_gpu_problem", lambda index: None)
    for operator_set in backends.IMPLEMENTATIONS.values():
        if "cuda" in operator_set:
            monkeypatch.setitem(backends._PROBLEMS, operator_set["cuda"], "the CUDA kernels were not built")
    return "cuda"


def _there(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    """A tensor on a GPU, with the attributes that the choice of an implementation reads."""
    return SimpleNamespace(
        shape=shape, device=torch.device("cuda", 0), dtype=dtype, is_cuda=True, is_meta=False, dim=lambda: len(shape)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("landmarks", [None, 1, 64, 65, 256])
def test_continual_steps_without_nvcc(gpu: str, landmarks: int | None, dtype: torch.dtype) -> None:
    token, value = _there(2, 4, 1, 300, dtype=dtype), _there(2, 4, 1, 512, dtype=dtype)
    more = [] if landmarks is None else [_there(2, 4, landmarks, 300)]
    assert backends.choose("nystrom.continual", "auto", token, token, value, *more) == "triton"


@pytest.mark.parametrize("landmarks", [1, 64, 65, 256])
def test_matrices_of_landmarks_without_nvcc(gpu: str, landmarks: int) -> None:
    assert backends.choose("nystrom", "auto", _there(8, landmarks, 64)) == "triton"
    assert backends.choose("nystrom", "auto", _there(8, landmarks, landmarks, dtype=torch.float64)) == "triton"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("order", [1, 64, 128, 129, 256])
def test_solves_without_nvcc(gpu: str, order: int, dtype: torch.dtype) -> None:
    assert (
        backends.choose(
            "intention.solve", "auto", _there(8, order, order, dtype=dtype), _there(8, order, 1000, dtype=dtype)
        )
        == "triton"
    )
