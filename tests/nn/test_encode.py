"""`nn.CMABStack.encode` reads any source chunk by chunk, and has the state and the gradients of all inputs at once."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cmab_kernels import AttentionState, use_impl
from cmab_kernels.nn import CMAB, CMABStack
from cmab_kernels.nn.cmab import chunks
from cmab_kernels.runtime.backends import current_impl

from .test_cmab_stack import BATCH, DIM, close, points, same, stack


def batch_of_arrow(inputs: Tensor) -> Any:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Arrow tables are not tested")
    return arrow.table({f"c{i}": column.numpy() for i, column in enumerate(inputs.T)})


def arrow_file(inputs: Tensor, folder: Path) -> Any:
    table = batch_of_arrow(inputs)
    import pyarrow

    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, 10)
    return pyarrow.ipc.open_file(pyarrow.memory_map(str(folder / "rows.arrow")))


def memory_mapped(inputs: Tensor, folder: Path) -> Any:
    np.save(folder / "rows.npy", inputs.numpy())
    return np.load(folder / "rows.npy", mmap_mode="r")


class Refilling(list[Any]):
    """A list that writes each of its rows to the same memory."""

    def __iter__(self) -> Iterator[Tensor]:
        memory = torch.empty_like(self[0])
        for index in range(len(self)):
            yield memory[: len(self[index])].copy_(self[index])


SOURCES = {
    "a tensor": lambda rows, _: rows,
    "an array": lambda rows, _: rows.numpy(),
    "a memory-mapped array": memory_mapped,
    "an Arrow table": lambda rows, _: batch_of_arrow(rows),
    "an Arrow file": arrow_file,
    "a loader": lambda rows, _: DataLoader(TensorDataset(rows), batch_size=10),
    "a list of arrays": lambda rows, _: np.array_split(rows.numpy(), 5),
    "a list of tensors": lambda rows, _: rows.split(10),
    "a list that refills its memory": lambda rows, _: Refilling(rows.split(10)),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_source_gives_the_state_and_its_gradients(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "CHUNK", 16)
    module, (inputs, latents) = stack(), points()
    given = SOURCES[source](inputs[0], tmp_path)
    state, expected = module.encode(given), module.update(inputs[:1], latents[:1], module.init_state(1))
    close(state, expected.state, 1e-11)
    result, leaves = module.retrieve(latents[:1], state), list(module.parameters())
    close(
        torch.autograd.grad(result.sin().sum(), leaves),
        torch.autograd.grad(expected.latents.sin().sum(), leaves),
        1e-11,
    )


@pytest.mark.parametrize("source", [torch.Tensor.numpy, torch.Tensor.clone])
def test_an_array_of_no_rows_is_one_chunk(source: Any) -> None:
    module, (inputs, _) = stack(), points()
    assert same(module.encode(source(inputs[:, :0])), module.init_state(BATCH))


def test_gradients_flow_through_the_incoming_state() -> None:
    module, (inputs, latents) = stack(), points()
    first = AttentionState(*(part.detach().requires_grad_() for part in module.encode([inputs[:, :20]])))
    leaves = [*first, *module.parameters()]
    ours = module.retrieve(latents, module.encode(inputs[:, 20:].split(8, 1), first))
    theirs = module.update(inputs[:, 20:], latents, first).latents
    close(torch.autograd.grad(ours.sin().sum(), leaves), torch.autograd.grad(theirs.sin().sum(), leaves), 1e-11)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        torch.autograd.grad(module.encode([inputs]).out.sum(), leaves[2:], create_graph=True, allow_unused=True)


@torch.no_grad()
def test_stopped_and_resumed_it_has_the_same_bits() -> None:
    module, (inputs, _) = stack(torch.float32), points(torch.float32)
    parts, reached = inputs.split(7, 1), []

    def stop(count: int, state: AttentionState) -> None:
        reached.append(state)
        if count == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.encode(parts, progress=stop)
    assert same(module.encode(itertools.islice(parts, 3, None), reached[-1]), module.encode(parts))
    assert same(module.encode([], reached[-1]), reached[-1])


def test_the_next_chunk_is_fetched_meanwhile_and_no_more() -> None:
    module, (inputs, _) = stack(), points()
    parts = inputs.split(5, 1)
    asked = [threading.Event() for _ in (*parts, None)]

    def source() -> Iterator[Tensor]:
        for chunk, event in zip(parts, asked, strict=False):
            event.set()
            yield chunk
        asked[-1].set()

    def meanwhile(count: int, _: AttentionState) -> None:
        assert asked[count].wait(10) and not any(event.is_set() for event in asked[count + 1 :])

    with torch.no_grad():
        module.encode(source(), progress=meanwhile)


def test_a_source_may_write_each_chunk_to_the_same_memory() -> None:
    weight, parts = stack().blocks[0].latents, torch.randn(4, BATCH, 5, DIM, dtype=torch.float64)
    written = [threading.Event() for _ in (*parts, None)]

    def source() -> Iterator[Tensor]:
        memory = torch.empty_like(parts[0])
        for part, event in zip(parts, written, strict=False):
            memory.copy_(part)
            event.set()
            yield memory
        written[-1].set()

    with torch.no_grad():
        read = chunks.read_chunks(source(), weight, chunks.callers_modes(weight.device), None)
        for chunk, part, after in zip(read, parts, written[1:], strict=True):
            assert after.wait(10) and torch.equal(chunk, part)


@pytest.mark.parametrize("grad", [False, True])
def test_a_source_runs_in_the_callers_modes(grad: bool) -> None:
    """The forward pass and the backward pass, which reads the source again, run the source in the caller's modes."""
    module, project, found = stack(torch.float32), torch.nn.Linear(DIM, DIM), []
    parts = points(torch.float32)[0].bfloat16().split(20, 1)

    class Source:
        def __iter__(self) -> Iterator[Tensor]:
            for part in parts:
                found.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), current_impl()))
                yield project(part).float()

    with torch.set_grad_enabled(grad), torch.autocast("cpu"), use_impl("reference"):
        state = module.encode(Source())
        assert same(state, module.encode([project(part).float() for part in parts]))
    if grad:
        state.out.sum().backward()
    assert found == [(grad, True, "reference")] * len(parts) * (1 + grad)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    with torch.inference_mode():
        module.encode(project(part) for part in parts[0].float().split(1))


class Streamed(IterableDataset):
    """An unknown number of rows."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


def choose_bar(with_tqdm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if with_tqdm:
        pytest.importorskip("tqdm", reason="tqdm is not installed: its bar is not tested")
    else:
        monkeypatch.setitem(__import__("sys").modules, "tqdm.auto", None)


COUNTED: dict[str, tuple[Callable[[Tensor, Path], Any], str]] = {
    "a list": (lambda rows, _: rows.split(9), "5"),
    "a tensor": (lambda rows, _: rows, "3"),
    "a memory-mapped array": (memory_mapped, "3"),
    "an Arrow table": (lambda rows, _: batch_of_arrow(rows), "3"),
    "an Arrow file": (arrow_file, "5"),
    "a loader": (lambda rows, _: DataLoader(TensorDataset(rows), batch_size=9), "5"),
    "a loader of a stream": (lambda rows, _: DataLoader(Streamed(rows), batch_size=9), "?"),
    "a generator": (lambda rows, _: iter(rows.split(9)), "?"),
}


@pytest.mark.parametrize("with_tqdm", [False, True])
@pytest.mark.parametrize("source", COUNTED)
def test_progress(
    source: str, with_tqdm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose_bar(with_tqdm, monkeypatch)
    monkeypatch.setattr(chunks, "CHUNK", 16)
    module, (inputs, _), (given, total) = stack(), points(), COUNTED[source]
    with torch.no_grad():
        module.encode(given(inputs[0], tmp_path), progress=True)
    shown, read = capsys.readouterr().err, "5" if total == "?" else total
    assert (
        ("5chunk [" if total == "?" else f"{read}/{total}") in shown
        if with_tqdm
        else f"{read} of {total} chunks\n" in shown
    )
    assert shown.endswith("\n")


@pytest.mark.parametrize("with_tqdm", [False, True])
def test_an_error_ends_the_bar(
    with_tqdm: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    choose_bar(with_tqdm, monkeypatch)
    module, (inputs, _) = stack(), points()
    with pytest.raises(TypeError, match=r"^chunks\[1\]: got torch.float32") as refused:
        module.encode([inputs, inputs.float()], progress=True)
    assert refused.value.__context__ is None and capsys.readouterr().err.endswith("\n")


def test_chunks_that_do_not_fit_are_named() -> None:
    module, (inputs, _) = stack(), points()
    cases: dict[str, tuple[Any, type[Exception]]] = {
        r"^chunks: got an int, expected ": (3, TypeError),
        r"^chunks: got shape \(2, 2, 41, 12\), expected ": (inputs.expand(2, -1, -1, -1), ValueError),
        r"chunks: got a generator, which can be read only once, expected ": (
            (c for c in inputs.split(9, 1)),
            ValueError,
        ),
        r"^chunks: got no chunk, expected ": ([], ValueError),
        r"^chunks\[1\]: got shape \(2, 41, 3\), expected ": ([inputs, inputs[..., :3]], ValueError),
        r"^chunks\[1\]: got batch 1, expected ": ([inputs, inputs[:1]], ValueError),
        r"^chunks\[0\]: got torch.float32, expected ": ([inputs.float()], TypeError),
        r"^chunks\[0\]: got a str, expected ": (["rows"], TypeError),
        r"^chunks\[0\]: got device meta, expected ": (inputs.to("meta"), ValueError),
    }
    for message, (given, error) in cases.items():
        with pytest.raises(error, match=rf"^{message}"):
            module.encode(given)
    with pytest.raises(ValueError, match=r"^state.out: got shape"):
        module.encode([inputs], module.blocks[0].init_state(BATCH))


ROWS = np.zeros((4, DIM))
UNREADABLE: dict[str, tuple[Any, str]] = {
    "objects": (ROWS.astype(object), "got an array of object, expected real numbers"),
    "text": (ROWS.astype(str), "got an array of <U"),
    "times": (ROWS.astype("datetime64[s]"), "got an array of datetime64"),
    "complex": (ROWS + 1j, "got an array of complex128"),
    "long": (ROWS.astype(np.longdouble), "got an array of float"),
    "masked": (np.ma.masked_array(ROWS, ROWS == 0), "got an array with masked entries, expected an array without"),
    "sparse": (torch.tensor(ROWS).to_sparse(), "got torch.sparse_coo, expected a dense tensor"),
    "nested": (
        torch.nested.nested_tensor([torch.tensor(ROWS)] * 2, layout=torch.jagged),
        "got a nested tensor, expected a dense tensor",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_arrays_that_are_no_numbers_are_named(kind: str) -> None:
    module, (given, said) = stack(), UNREADABLE[kind]
    if kind == "long" and np.dtype(np.longdouble).itemsize == 8:
        pytest.skip("this platform's long double is its double")
    for name, source in (("chunks", given), (r"chunks\[1\]", [ROWS, given]), (r"chunks\[0\]", [(given, 3)])):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: {said}"):
            module.encode(source)


def test_an_array_without_masked_entries_is_read() -> None:
    module, given = stack(), np.random.default_rng(0).standard_normal((4, DIM))
    with torch.no_grad():
        assert same(module.encode(np.ma.masked_array(given)), module.encode(given))


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1.0, None], "nulls in its column 'last'"),
        ([1, None], "nulls in its column 'last'"),
        (["a", "b"], "a column 'last' of string: numbers"),
    ],
)
def test_columns_that_are_no_numbers_are_named(column: list[Any], said: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Arrow tables are not tested")
    table = arrow.table({f"c{i}": [1.0, 2.0] for i in range(DIM - 1)} | {"last": column})
    for source in (table, table.to_batches()):
        with pytest.raises((TypeError, ValueError), match=rf"^chunks\[0\]: got {said}"):
            stack().encode(source)


def test_a_file_of_several_arrays_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", rows=ROWS)
    with np.load(tmp_path / "rows.npz") as file, pytest.raises(TypeError, match=r"^chunks\[0\]: got a str, expected "):
        stack().encode(file)


@pytest.mark.parametrize("kind", [CMAB, CMABStack])
def test_a_state_to_go_on_from_is_checked(kind: type[CMAB] | type[CMABStack]) -> None:
    """An lse of another shape would be broadcast."""
    module, (inputs, latents) = (stack() if kind is CMABStack else stack().blocks[0]), points()
    state = module.update(inputs, latents, module.init_state(BATCH)).state
    wrong: list[tuple[Any, str]] = [
        (state._replace(lse=state.lse[..., :1]), "state.lse"),
        (state._replace(lse=state.lse.float()), "state.lse"),
        (state._replace(lse=torch.zeros((), dtype=torch.float64)), "state.lse"),
        (state._replace(out=None), "state.out"),
        (state._replace(lse=None), "state.lse"),
        (AttentionState(None, None), "state.out"),
        (tuple(state), "state"),
    ]
    taking = [lambda given: module.remove(inputs, latents, given)]
    if isinstance(module, CMABStack):
        taking += [lambda given: module.retrieve(latents, given), lambda given: module.unread(inputs, given)]
        taking += [lambda given: module.encode([inputs], given)]
    for given, name in wrong:
        for call in taking:
            with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
                call(given)


def test_progress_is_a_choice_or_a_function() -> None:
    with pytest.raises(TypeError, match=r"^progress: got a str, expected True, False or a function"):
        stack().encode(ROWS, progress="yes")


def test_a_table_of_no_rows_is_the_state_of_no_inputs() -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed: Arrow tables are not tested")
    module, table = stack(), arrow.table({f"c{i}": [1.0] for i in range(DIM)}).slice(0, 0)
    with torch.no_grad():
        assert same(module.encode(table), module.init_state(1))


def test_latents_that_are_not_dense_are_named() -> None:
    module, (inputs, latents) = stack(), points()
    for name, given in {"inputs": (inputs.to_sparse(), latents), "latents": (inputs, latents.to_sparse())}.items():
        with pytest.raises(TypeError, match=rf"^{name}: got torch.sparse_coo, expected a dense tensor"):
            module(*given)


def test_a_state_of_another_batch_is_named() -> None:
    module = stack()
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"^chunks\[0\]: got batch 3, expected batch 2, as in the state"),
    ):
        module.encode(torch.randn(3, 5, DIM, dtype=torch.float64), module.init_state(2))


@pytest.mark.parametrize(
    "given", [lambda rows: rows[::-1], lambda rows: rows.astype(">f8")], ids=["backwards", "other byte order"]
)
def test_arrays_that_torch_does_not_read(given: Callable[[Any], Any]) -> None:
    module, every = stack(), np.random.default_rng(0).standard_normal((50, DIM))
    for rows in (given(every), given(every[:1])):  # NumPy accepts a single reversed row, and torch does not
        with torch.no_grad():
            assert same(
                module.encode(rows),
                module.encode(torch.tensor(rows.astype(np.float64, order="C").tolist(), dtype=torch.float64)),
            )


def test_a_source_that_changes_is_refused() -> None:
    module, (inputs, _) = stack(), points()
    source = [inputs]
    state = module.encode(source)
    source.append(inputs)
    with pytest.raises(
        RuntimeError, match=r"^chunks: got 2 chunks in the second reading, expected 1, as in the first reading"
    ):
        state.out.sum().backward()
