"""Runs the programs of docs/distributed.md; `torchrun` starts it on every rank."""

import gc

from tests import pages

if __name__ == "__main__":
    pages.run(pages.DOCS / "distributed.md")
    gc.collect()  # the groups end, and with them their threads: one that lets go of a tensor while Python ends aborts the process
