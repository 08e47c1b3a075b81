import torch
from torch.utils.data import Dataset


class StreetScenes(Dataset):
    """Images with zero to three axis-aligned boxes; targets are dicts like in torchvision."""

    def __init__(self, n=256, size=16, seed=0, min_size=1):
        self.size = size
        g = torch.Generator().manual_seed(seed)
        self.records = []
        for i in range(n):
            k = int(torch.randint(1, 4, (1,), generator=g))
            if i % 61 == 17:
                k = 0  # empty street
            xy = torch.rand(k, 2, generator=g) * (size - 9)
            wh = 3 + 5 * torch.rand(k, 2, generator=g)
            boxes = torch.cat([xy, xy + wh], dim=1)
            if i == 141:
                boxes[-1, 2] = boxes[-1, 0]  # annotator clicked twice on the same spot
            labels = (wh[:, 0] > wh[:, 1]).long() if k else torch.zeros(0, dtype=torch.long)
            self.records.append((boxes, labels))
        self.noise = torch.randn(n, 1, size, size, generator=g) * 0.1
        self.min_size = min_size

    def __len__(self):
        return len(self.records)

    def __getitem__(self, idx):
        boxes, labels = self.records[idx]
        image = self.noise[idx].clone()
        for (x1, y1, x2, y2), label in zip(boxes.round().int().tolist(), labels.tolist()):
            image[0, y1:y2, x1:x2] += 1.0 + label
        keep = ((boxes[:, 2:] - boxes[:, :2]) >= self.min_size).all(1)
        target = {"boxes": boxes[keep], "labels": labels[keep], "image_id": idx}
        return image, target


def collate_fn(batch):
    # images with many boxes first, keeps the padded targets compact
    batch = sorted(batch, key=lambda pair: -len(pair[1]["labels"]))
    images, targets = zip(*batch)
    return torch.stack(images), list(targets)
