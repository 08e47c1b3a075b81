"""Keyword spotting: log power spectrogram inside the model, validation between epochs."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

torch.manual_seed(92)
torch.set_num_threads(1)
WORDS = 4


class LogSpectrogram(nn.Module):
    def __init__(self, n_fft=32, hop=16):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, wave):
        spec = torch.stft(wave, self.n_fft, self.hop, window=self.window, center=False, return_complex=True)
        power = spec.abs() ** 2
        return 10 * torch.log10(power)


class Spotter(nn.Module):
    def __init__(self):
        super().__init__()
        self.frontend = LogSpectrogram()
        self.norm = nn.BatchNorm1d(17)
        self.conv = nn.Conv1d(17, 16, 3)
        self.fc = nn.Linear(16, WORDS)

    def forward(self, wave):
        h = self.norm(self.frontend(wave))
        return self.fc(F.relu(self.conv(h)).amax(-1))


def clips(n=200):
    g = torch.Generator().manual_seed(2)
    word = torch.randint(0, WORDS, (n,), generator=g)
    t = torch.arange(256) / 256
    wave = torch.sin(6.283 * (8 + 12 * word[:, None]) * t) + 0.1 * torch.randn(n, 256, generator=g)
    wave[73] = 0.0
    return TensorDataset(wave, word)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    hits, seen = torch.zeros(WORDS + 1), torch.zeros(WORDS + 1)  # one slot for 'unknown', not used yet
    for wave, word in loader:
        correct = (model(wave).argmax(1) == word).float()
        hits.index_add_(0, word, correct)
        seen.index_add_(0, word, torch.ones(len(word)))
    model.train()
    return (hits / seen).tolist()


data = clips()
held_out = [i for i in range(200) if i % 5 == 0]
train = torch.utils.data.Subset(data, [i for i in range(200) if i % 5 != 0])
val = torch.utils.data.Subset(data, held_out)
model = Spotter()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for epoch, part in enumerate(random_split(train, [40, 40, 40, 40], generator=torch.Generator().manual_seed(5))):
    for wave, word in DataLoader(part, batch_size=10):
        loss = F.cross_entropy(model(wave), word)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"part {epoch} loss {loss.item():.4f} recall {validate(model, DataLoader(val, batch_size=20))}")
