"""`python -m cmab_kernels info | demo [cmab | intention | stream]`."""

from __future__ import annotations

import argparse


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cmab_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what was built, and which implementation `auto` takes for each operator")
    demo = commands.add_parser("demo", help="what the operators do, measured and drawn")
    demo.add_argument(
        "what",
        choices=("cmab", "intention", "stream"),
        nargs="?",
        default="cmab",
        help="cmab (default): a CMAB over the 2 million pixels of a photograph, in constant memory; "
        "intention: ten classes of digits from 5 examples each, and a transformation of a cloud from 5 pairs; "
        "stream: continual Nyström attention takes the noise out of a photograph whose patches arrive one by one",
    )
    demo.add_argument("--output", help="where to draw (default: demo.png, demo_intention.png, demo_stream.png)")
    demo.add_argument("--points", type=int, nargs="+", help="of cmab: numbers of pixels to read (default: 1e4, 1e5, 1e6 and all)")
    demo.add_argument("--window", type=int, help="of stream: patches that attention looks back on (default: 640)")
    demo.add_argument("--landmarks", type=int, help="of stream: landmarks that stand for them (default: 16)")
    arguments = parser.parse_args()
    if arguments.command == "info":
        from .info import report

        print(report())
    else:
        _demo(parser, arguments)


OPTIONS = {"points": "cmab", "window": "stream", "landmarks": "stream"}
"""What only one of the demos takes."""


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for option, demo in OPTIONS.items():
        if getattr(arguments, option) is not None and arguments.what != demo:
            parser.error(f"--{option} is of the demo {demo}: {arguments.what} takes none")
    if arguments.what == "cmab":
        from .demo import cmab

        cmab.run(arguments.output or "demo.png", arguments.points)
    elif arguments.what == "intention":
        from .demo import intention

        intention.run(arguments.output or "demo_intention.png")
    else:
        from .demo import stream

        stream.run(arguments.output or "demo_stream.png", arguments.window, arguments.landmarks)


if __name__ == "__main__":
    main()
