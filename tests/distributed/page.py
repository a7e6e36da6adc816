"""Runs the programs of docs/distributed.md; `torchrun` starts it on every rank."""

import gc

from tests import pages

if __name__ == "__main__":
    pages.run(pages.DOCS / "distributed.md")
    gc.collect()  # ends the groups and their threads: a thread that frees a tensor while Python exits aborts it
