"""`python -m cmab_kernels info | demo [cmab | intention]`."""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cmab_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what was built, and which implementation `auto` takes for each operator")
    demo = commands.add_parser("demo", help="what the operators do, measured and drawn")
    demo.add_argument(
        "what",
        choices=("cmab", "intention"),
        nargs="?",
        default="cmab",
        help="cmab (default): a CMAB over the 2 million pixels of a photograph, in constant memory; "
        "intention: ten classes of digits from 5 examples each, and a transformation of a cloud from 5 pairs",
    )
    demo.add_argument("--output", help="where to draw (default: demo.png, demo_intention.png)")
    demo.add_argument("--points", type=int, nargs="+", help="of cmab: numbers of pixels to read (default: 1e4, 1e5, 1e6 and all)")
    arguments = parser.parse_args()
    if arguments.command == "info":
        from .info import report

        print(report())
    elif arguments.what == "cmab":
        from .demo import cmab

        cmab.run(arguments.output or "demo.png", arguments.points)
    elif arguments.points:
        parser.error("--points is of the demo cmab: intention takes none")
    else:
        from .demo import intention

        intention.run(arguments.output or "demo_intention.png")


if __name__ == "__main__":
    main()
