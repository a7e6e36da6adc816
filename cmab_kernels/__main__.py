"""The command line of the package:
`python -m cmab_kernels info | demo [cmab | intention | stream] | bench [SCAN ...]`."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import suppress
from pathlib import Path

from . import __version__


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # If the encoding has no such letter, as in ASCII, a replacement is written.
            stream.reconfigure(errors="replace")
    parser = argparse.ArgumentParser(prog="python -m cmab_kernels", description=__doc__)
    parser.add_argument("--version", action="version", version=f"cmab_kernels {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="print versions, what was built, and which implementation `auto` takes for each operator"
    )
    demo = commands.add_parser("demo", help="run the operators on real data, print what was measured, and draw it")
    demo.add_argument(
        "what",
        choices=("cmab", "intention", "stream"),
        nargs="?",
        default="cmab",
        help="cmab (default): a CMAB over the 2 million pixels of a photograph, in constant memory; "
        "intention: ten classes of digits from 5 examples each, and a transformation of a cloud from 5 pairs; "
        "stream: continual Nyström attention takes the noise out of a photograph whose patches arrive one by one",
    )
    demo.add_argument(
        "--output",
        help="the picture to write: .png, .pdf or .svg (default: demo.png, demo_intention.png, demo_stream.png)",
    )
    demo.add_argument(
        "--points",
        type=int,
        nargs="+",
        help="cmab only: numbers of pixels to read (default: 10000 100000 1000000 and all)",
    )
    demo.add_argument(
        "--window", type=int, help="stream only: number of patches that attention looks back on (default: 4096)"
    )
    demo.add_argument(
        "--landmarks", type=int, help="stream only: number of landmarks that represent them (default: 16)"
    )
    bench = commands.add_parser(
        "bench", help="measure the operators beside their peers: time, memory, error; writes a table and a page"
    )
    bench.add_argument("scans", metavar="SCAN", nargs="*", help="operators or modules to measure (default: all)")
    bench.add_argument(
        "--quick", action="store_true", help="measure only the most important cases, in five to fifteen minutes"
    )
    bench.add_argument(
        "--compare", metavar="OLD.json", type=Path, help="list what differs from this saved run by more than the noise"
    )
    bench.add_argument(
        "--from", dest="saved", metavar="RUN.json", type=Path, help="measure nothing, show this saved run"
    )
    bench.add_argument(
        "--output",
        metavar="FOLDER",
        type=Path,
        default=Path("bench_report"),
        help="folder to write (default: %(default)s)",
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), help="device to measure on (default: cpu)")
    bench.add_argument(
        "--threads",
        metavar="K",
        type=int,
        help="number of CPU threads where a case does not name one (default: up to 2)",
    )
    bench.add_argument("--force", action="store_true", help="allow files in the output folder to be replaced")
    arguments = parser.parse_args()
    if arguments.command == "info":
        from .info import report

        with suppress(BrokenPipeError):  # the reader of the pipe, for example `head`, may have closed it
            print(report(), flush=True)
    elif arguments.command == "demo":
        try:
            _demo(parser, arguments)
        except KeyboardInterrupt:
            parser.exit(130, f"{parser.prog} demo: interrupted; nothing was drawn\n")
    else:
        sys.exit(_bench(parser, arguments))


def _bench(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from .bench import Refusal, Request, run

    chosen = {name: value for name, value in vars(arguments).items() if name != "command"}
    try:
        return run(Request(**chosen))
    except Refusal as refusal:
        parser.exit(2, f"{parser.prog} bench: {refusal}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog} bench: interrupted; nothing was written\n")


OPTIONS = {"points": "cmab", "window": "stream", "landmarks": "stream"}
"""option -> the only demo that takes it"""


def _demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for option, demo in OPTIONS.items():
        if getattr(arguments, option) is not None and arguments.what != demo:
            parser.error(f"--{option} belongs to the demo {demo}: the demo {arguments.what} does not take it")
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
