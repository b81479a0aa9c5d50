"""CUDA graphs of PyTorch with memory of their own, replayed while other memory is taken, freed and used again.

Every number is a small integer, so that sums are exact and any order gives the same.
"""

import torch

SIDE, ROUNDS = 2048, 4


def captured(x, weight, pool, mode):
    """A graph of `x` to the tensor it returns; its intermediate tensors live in the graph's pool."""

    def work():
        y = (x @ weight).remainder(97)
        z = torch.cat([y, y.flip(0)]).reshape(SIDE, 2 * SIDE)
        return (z[:, ::2] + y).remainder(251)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
        out = work()
    return graph, out, work


def noise(number):
    """Other memory of many sizes, written so that a graph which lost its own would show it."""
    sizes = [(number * 7919 + step * 104729) % (24 << 20) + 1 for step in range(12)]
    return [torch.full((size,), float(step), device="cuda") for step, size in enumerate(sizes)]


def total(tensor):
    return int(tensor.sum(dtype=torch.float64).item())


def main():
    torch.backends.cuda.matmul.allow_tf32 = False
    x = torch.zeros(SIDE, SIDE, device="cuda")
    ramp = torch.arange(SIDE * SIDE, device="cuda").reshape(SIDE, SIDE)
    weight = ramp.remainder(3).float()
    shared = torch.cuda.graph_pool_handle()
    before = noise(0)
    graphs = {
        "global": captured(x, weight, shared, "global"),
        "thread_local": captured(x, weight, shared, "thread_local"),
        "relaxed": captured(x, weight, None, "relaxed"),
    }
    del before
    torch.cuda.empty_cache()
    for number in range(ROUNDS):
        others = noise(number + 1)
        x.copy_((ramp * (number + 3)).remainder(7))
        for name, (graph, out, work) in graphs.items():
            graph.replay()
            first = total(out)
            # Memory that is freed between two replays may be anybody's at the second.
            del others[::2]
            torch.cuda.empty_cache()
            graph.replay()
            others += noise(number + 10)
            print(f"round {number}, {name}: {first}, again {total(out)}, eager {total(work())}", flush=True)
        kept = sum(total(tensor[:1000]) for tensor in others)
        print(f"round {number}: others {kept}, {len(others)} of them")
        if number == 1:
            # Its pool goes back; the one that is shared stays with the other graph.
            del graph, out, work
            del graphs["relaxed"], graphs["global"]
        others.clear()
        torch.cuda.empty_cache()


main()
