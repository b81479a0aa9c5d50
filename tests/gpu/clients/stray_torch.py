"""Works on GPU 1 with PyTorch, and waits for GPU 0, which has nothing to do: that alone makes a context there."""

import torch


def main():
    torch.cuda.set_device(1)
    a = torch.full((1024, 1024), 2.0, device="cuda:1")
    print((a @ a).sum().item())
    torch.cuda.synchronize(0)  # the stray
    print((a + a).sum().item())


main()
