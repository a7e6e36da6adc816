"""The errors that the machine reports: a fault of a kernel, or an instruction that the machine does not know."""

from __future__ import annotations


class Stop(Exception):
    """The execution of a kernel stopped; the message says where and why."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.where = what, ""

    def at(self, where: str) -> None:
        """Add the place in the kernel's source, once."""
        if not self.where:
            self.where = where
            self.args = (f"{self.what}\n    {where}",)


class Fault(Stop):
    """A kernel violated a rule: it read unwritten memory, accessed memory outside of an allocation, raced, or missed a
    barrier."""


class Unknown(Stop):
    """The machine does not model an instruction, or this form of it."""
