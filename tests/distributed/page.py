"""Runs the programs of docs/distributed.md; `torchrun` starts it on every rank."""

from tests import pages

if __name__ == "__main__":
    pages.run(pages.DOCS / "distributed.md")
