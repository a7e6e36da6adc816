"""Serve many streams from one batch: clients come and go, and a step takes the tokens of all clients that have sent
one.

Each client has a row of the batch. `clean_state(rows)` starts the streams of new clients. `key_padding_mask` marks rows
that have sent no token; their windows keep their bits. The program compares the throughput with that of a separate
stream for each client.
"""

import asyncio
import copy
import random
import time

import torch
from torch import Tensor

from cmab_kernels import nn

WIDTH, WINDOW, ROWS, CLIENTS = 32, 16, 128, 256


class Server:
    def __init__(self, model: nn.ContinualEncoder, rows: int) -> None:
        self.model, self.free, self.places = model, list(range(rows)), asyncio.Semaphore(rows)
        self.tokens, self.new, self.waiting = (
            torch.zeros(rows, WIDTH),
            list[int](),
            dict[int, tuple[Tensor, asyncio.Future]](),
        )

    def join(self) -> int:
        row = self.free.pop()
        self.new.append(row)
        return row

    def leave(self, row: int) -> None:
        self.free.append(row)

    async def send(self, row: int, token: Tensor) -> Tensor | None:
        """Give a client's next token (C,), and wait for its output (C,), or None before the windows are full."""
        future = asyncio.get_running_loop().create_future()
        self.waiting[row] = token, future
        return await future

    async def run(self) -> None:
        while True:
            await asyncio.sleep(0)  # clients send
            waiting, self.waiting = self.waiting, {}
            try:
                if waiting:
                    self.step(waiting)
            except Exception as error:  # for clients that wait, because otherwise they would wait for ever
                for _, future in waiting.values():
                    future.set_exception(error)

    @torch.inference_mode()
    def step(self, waiting: dict[int, tuple[Tensor, asyncio.Future]]) -> None:
        new, self.new = self.new, []
        self.model.clean_state(new)
        rows, absent = list(waiting), torch.ones(len(self.tokens), dtype=torch.bool)
        absent[rows] = False
        self.tokens[rows] = torch.stack([token for token, _ in waiting.values()])
        outs = self.model.forward_step(self.tokens, key_padding_mask=absent).unbind()
        ready = self.model.ready.tolist()
        for row, (_, future) in waiting.items():
            future.set_result(outs[row] if ready[row] else None)


async def served(server: Server, tokens: Tensor) -> list[Tensor | None]:
    """The actions of a client: join, send tokens with pauses, leave."""
    async with server.places:
        row, outs = server.join(), []
        for token in tokens.unbind():
            while random.random() < 0.2:
                await asyncio.sleep(0)
            outs.append(await server.send(row, token))
        server.leave(row)
        return outs


async def all_served(model: nn.ContinualEncoder, streams: list[Tensor]) -> list[list[Tensor | None]]:
    server = Server(model, ROWS)
    running = asyncio.create_task(server.run())
    results = await asyncio.gather(*(served(server, tokens) for tokens in streams))
    running.cancel()
    return results


@torch.inference_mode()
def one_by_one(model: nn.ContinualEncoder, streams: list[Tensor]) -> list[list[Tensor | None]]:
    """The same server with a state for each client: a shallow copy shares the weights, and has its own streams."""
    return [
        [own.forward_step(token[None]) for token in tokens.unbind()] for tokens in streams for own in [copy.copy(model)]
    ]


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    layer = nn.ContinualEncoderLayer(WIDTH, 4, 64, batch_first=True, sequence_len=WINDOW)
    model = nn.ContinualEncoder(layer, num_layers=2).eval()
    streams = [torch.randn(random.randint(20, 60), WIDTH) for _ in range(CLIENTS)]
    count = sum(map(len, streams))

    begin = time.perf_counter()
    results = asyncio.run(all_served(copy.copy(model), streams))
    middle = time.perf_counter()
    alone = one_by_one(model, streams)
    end = time.perf_counter()

    pairs = [
        (mine, other)
        for each, others in zip(results, alone, strict=True)
        for mine, other in zip(each, others, strict=True)
    ]
    assert all((mine is None) == (other is None) for mine, other in pairs)
    difference = max(float((mine - other).abs().max()) for mine, other in pairs if mine is not None)
    print(f"{CLIENTS} clients sent {count:,} tokens, over {ROWS} rows; largest difference {difference:.0e}")
    print(f"one batch:        {count / (middle - begin):,.0f} tokens per second")
    print(f"a state a client: {count / (end - middle):,.0f} tokens per second")


if __name__ == "__main__":
    main()
