"""Tensors on a GPU that one process sends to another through a queue.

torch_queue.py sender-first | receiver-first: which of the two ends first; the other goes on with the memory.
"""

import sys

import torch
import torch.multiprocessing

LONG = 60


def made():
    """A small tensor, a large one, a view that begins inside it, and rows that are not contiguous."""
    large = torch.arange(24 << 20, dtype=torch.int32, device="cuda:0")
    grid = torch.arange(3000 * 1000, dtype=torch.int32, device="cuda:0").reshape(3000, 1000)
    return [torch.arange(1000, dtype=torch.int32, device="cuda:0"), large, large[3 << 20 : 5 << 20], grid[::2, 5:900]]


def sums(tensors):
    return [tensor.sum(dtype=torch.int64).item() for tensor in tensors]


def send(tensors, queue, received):
    torch.cuda.synchronize()
    queue.put(tensors)
    if not received.wait(LONG):
        print("sender: nobody took the tensors")


def receive(queue, received):
    tensors = queue.get(timeout=LONG)
    print("receiver:", sums(tensors), flush=True)
    # In place, so that the sender sees it, and on the other GPU, if there is one.
    tensors[1].add_(1)
    print("receiver's view:", sums(tensors[2:3]), flush=True)
    if torch.cuda.device_count() > 1:
        print("on the other GPU:", sums([tensors[1].to("cuda:1")]), flush=True)
    torch.cuda.synchronize()
    received.set()
    return tensors


def child_sends(queue, received):
    send(made(), queue, received)


def main():
    context = torch.multiprocessing.get_context("spawn")
    queue, received = context.Queue(), context.Event()
    if sys.argv[1] == "sender-first":
        child = context.Process(target=child_sends, args=(queue, received))
        child.start()
        tensors = receive(queue, received)
        child.join(LONG)
        print("the sender ended with", child.exitcode)
        print("receiver afterwards:", sums(tensors), flush=True)
    else:
        tensors = made()
        child = context.Process(target=receive, args=(queue, received))
        child.start()
        send(tensors, queue, received)
        child.join(LONG)
        print("the receiver ended with", child.exitcode)
        print("sender afterwards:", sums(tensors), flush=True)
    del tensors
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    again = torch.full((24 << 20,), 3, dtype=torch.int32, device="cuda:0")
    print("new memory:", sums([again]))


if __name__ == "__main__":
    main()
