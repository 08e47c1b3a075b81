import torch
from torch import nn


class UtteranceNorm(nn.Module):
    """Mean and variance normalisation of each utterance over its own frames."""

    def __init__(self, n_mels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(torch.ones(n_mels))

    def forward(self, feats, lengths):
        out = torch.zeros_like(feats)
        for b, n in enumerate(lengths.tolist()):
            x = feats[b, :n]
            std = x.std(dim=0, unbiased=False)
            out[b, :n] = (x - x.mean(dim=0)) / (std + self.eps)
        return out * self.gain


class AcousticModel(nn.Module):
    def __init__(self, n_mels, hidden, subsampling, n_symbols=6):
        super().__init__()
        self.subsampling = subsampling
        self.reduce = nn.Conv1d(n_mels, hidden, subsampling + 1, stride=subsampling, padding=1)
        self.norm = UtteranceNorm(hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, n_symbols)

    def output_lengths(self, lengths):
        return torch.div(lengths, self.subsampling, rounding_mode="floor")

    def forward(self, feats, lengths):
        x = torch.relu(self.reduce(feats.transpose(1, 2))).transpose(1, 2)
        n = self.output_lengths(lengths)
        x = self.norm(x[:, : int(n.max())], n)
        packed = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True)
        h, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.out(h).log_softmax(-1), n
