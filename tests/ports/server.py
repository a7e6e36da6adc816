"""The native extension as a process: it reads calls from standard input, runs them, and writes results and changed
memory.

`remote.py` starts this file with the Python of another machine, or with one under emulation, where the package is
installed.
"""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import sys
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

Place = tuple[int, int]
"""An address in the sender's memory, and a number of bytes from there."""


class Subclass(Tensor):
    """Represents any subclass of Tensor, for which a step of a stream uses the path with checks."""


class Sent(NamedTuple):
    """A message: its parts without the elements of tensors, and the memory that holds these elements."""

    body: bytes
    memory: dict[Place, bytes]


class Packer(pickle.Pickler):
    """Pickles a message.

    `tensors` are those that it holds, in order; a tensor that the receiver `has` is sent as its number.
    """

    def __init__(self, file: BinaryIO, has: dict[int, int]) -> None:
        super().__init__(file)
        self.has, self.tensors, self.places = has, list[Tensor](), set[Place]()

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        if id(item) in self.has:
            return self.has[id(item)]
        if item.device.type != "cpu":
            raise NotImplementedError(f"a tensor on {item.device}")
        self.has[id(item)] = len(self.tensors)
        self.tensors.append(item)
        storage = item.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        if place[1] >= 2**31:
            raise OverflowError(f"a memory of {place[1]} bytes is too large to be sent")
        self.places.add(place)
        layout = (item.storage_offset(), tuple(item.shape), item.stride())
        return place, item.dtype, layout, item.is_neg(), type(item) is not Tensor, item.requires_grad


class Unpacker(pickle.Unpickler):
    """Reads a message: its tensors have their own memory here, `storages`, or are `known` by their number."""

    def __init__(self, sent: Sent, known: list[Tensor]) -> None:
        super().__init__(io.BytesIO(sent.body))
        self.sent, self.known, self.tensors = sent, known, list[Tensor]()
        self.storages: dict[Place, torch.UntypedStorage] = {}

    def persistent_load(self, name: Any) -> Tensor:
        if isinstance(name, int):
            return (self.known or self.tensors)[name]
        place, dtype, layout, negated, subclass, graded = name
        if place not in self.storages:
            self.storages[place] = torch.UntypedStorage(place[1])
            write(self.storages[place].data_ptr(), self.sent.memory[place])
        tensor = torch.empty(0, dtype=dtype, device="cpu").set_(self.storages[place], *layout)
        tensor = torch._neg_view(tensor) if negated else tensor
        self.tensors.append((tensor.as_subclass(Subclass) if subclass else tensor).requires_grad_(graded))
        return self.tensors[-1]


def write(address: int, content: bytes) -> None:
    ctypes.memmove(address, content, len(content))


def pack(message: Any, has: dict[int, int]) -> tuple[Sent, list[Tensor]]:
    """Return a message that can be sent, and its tensors."""
    body = io.BytesIO()
    packer = Packer(body, has)
    packer.dump(message)
    return Sent(body.getvalue(), {place: ctypes.string_at(*place) for place in packer.places}), packer.tensors


def unpack(sent: Sent, known: list[Tensor]) -> tuple[Any, list[Tensor], dict[Place, torch.UntypedStorage]]:
    """Return a message, its tensors and their memory; nothing else refers to them."""
    unpacker = Unpacker(sent, known)
    return unpacker.load(), unpacker.tensors, unpacker.storages


class Call(NamedTuple):
    """A request of the client: an attribute of the extension, called with these arguments if it is a function."""

    name: str
    arguments: Sent
    threads: int
    instruction_set: str | None


class Reply(NamedTuple):
    """The result of a call, or its exception, and the memory of its arguments that it changed."""

    result: Sent
    changed: dict[Place, bytes]


# Both sides know these classes by the same name, whatever name each side has given this file.
sys.modules["cmab_server"] = sys.modules[__name__]
Sent.__module__ = Call.__module__ = Reply.__module__ = "cmab_server"


def answer(native: Any, call: Call) -> Reply:
    """Run a call."""
    (arguments, named), tensors, storages = unpack(call.arguments, [])
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    torch.set_num_threads(call.threads)
    os.environ.pop("CMAB_KERNELS_ISA", None)
    if call.instruction_set is not None:
        os.environ["CMAB_KERNELS_ISA"] = call.instruction_set
    try:
        found = getattr(native, call.name)
        result = found(*arguments, **named) if callable(found) else found
    except Exception as error:
        result = error
    after = {place: ctypes.string_at(storage.data_ptr(), place[1]) for place, storage in storages.items()}
    return Reply(
        pack(result, numbers)[0], {place: now for place, now in after.items() if now != call.arguments.memory[place]}
    )


def main() -> None:
    from cmab_kernels.runtime.extension import load

    native, replies = load(), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text goes elsewhere
    pickle.dump(os.uname().machine, replies)
    replies.flush()
    while True:
        try:
            call = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(native, call), replies)
        replies.flush()


if __name__ == "__main__":
    main()
