"""PyTorch's DataLoader with workers and pin_memory: sums of every batch on the GPU, and the bytes pinned at the peak."""

import torch
from torch.utils.data import DataLoader, Dataset

from places import pinned, report

COUNT, BATCH, EPOCHS = 600, 48, 2


class Pictures(Dataset):
    """A picture, a text of its own length, a label; all small integers, so that sums are exact."""

    def __len__(self):
        return COUNT

    def __getitem__(self, number):
        picture = torch.arange(3 * 160 * 160).mul_(number + 1).remainder_(251).reshape(3, 160, 160).float()
        text = torch.arange(50 + number * 37 % 4000) + number
        return picture, text, number


def together(samples):
    pictures, texts, labels = zip(*samples)
    return torch.stack(pictures), torch.nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(labels)


def main():
    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda")
    begin = peak = pinned()
    # Workers are forked after CUDA was used, as most programs do.
    loader = DataLoader(Pictures(), BATCH, num_workers=4, pin_memory=True, collate_fn=together)
    for epoch in range(EPOCHS):
        total = torch.zeros(3, dtype=torch.int64, device="cuda")
        for number, batch in enumerate(loader):
            there = [part.to("cuda", non_blocking=True) for part in batch]
            total += torch.stack([part.sum(dtype=torch.float64).long() for part in there])
            if number in (0, 7):
                print(f"epoch {epoch}, batch {number}: {[part.is_pinned() for part in batch]}, {total.tolist()}")
            peak = max(peak, pinned())
        print(f"epoch {epoch}: {total.tolist()}", flush=True)
    report(peak=peak - begin)


if __name__ == "__main__":
    main()
