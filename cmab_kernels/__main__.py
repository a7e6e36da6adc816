"""`python -m cmab_kernels info | demo`."""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cmab_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what was built, and which implementation `auto` takes for each operator")
    demo = commands.add_parser("demo", help="a CMAB over the 2 million pixels of a photograph, in constant memory")
    demo.add_argument("--output", default="demo.png", help="where to draw memory and time against N (default: %(default)s)")
    demo.add_argument("--points", type=int, nargs="+", help="numbers of pixels to read (default: 1e4, 1e5, 1e6 and all)")
    arguments = parser.parse_args()
    if arguments.command == "info":
        from .info import report

        print(report())
    else:
        from .demo import run

        run(arguments.output, arguments.points)


if __name__ == "__main__":
    main()
