import torch
from torch.utils.data import Dataset

GLYPHS = """
.###. ..#.. .###. ####. #..#.
#...# .##.. #...# ....# #..#.
#...# ..#.. ..##. .###. #####
#...# ..#.. .#... ....# ...#.
.###. .###. ##### ####. ...#.
"""


def glyphs():
    rows = [line.split() for line in GLYPHS.strip().splitlines()]
    return torch.tensor([[[c == "#" for c in row[k]] for row in rows] for k in range(5)]).float()


class Digits(Dataset):
    """The digits 0 to 4 at random places of a 12 x 12 image."""

    def __init__(self, n, noise=0.3, seed=0):
        g = torch.Generator().manual_seed(seed)
        shapes = glyphs()
        self.labels = torch.randint(0, 5, (n,), generator=g)
        self.images = noise * torch.randn(n, 1, 12, 12, generator=g)
        for i, label in enumerate(self.labels.tolist()):
            y, x = torch.randint(0, 8, (2,), generator=g).tolist()
            self.images[i, 0, y:y + 5, x:x + 5] += shapes[label]
        self.images[n - 60] *= 500  # one camera in the lab reports raw counts, see issue #12

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]
