"""One rank of a job that never chooses its GPU, so that every rank works on the first one."""

import torch


def main():
    x = torch.ones(1 << 20, device="cuda")  # every rank on GPU 0
    print(x.sum().item())


main()
