"""Synthetic speech: every letter is a tone of a few frames, words are separated by silence."""
import math

import torch
from torch.utils.data import ConcatDataset, Dataset

from asr.features import logmel

LETTERS = "abcde"
HOP = 16


class Utterances(Dataset):
    def __init__(self, manifest, n_mels):
        self.manifest = manifest
        self.n_mels = n_mels

    def __len__(self):
        return len(self.manifest)

    def synthesize(self, item):
        g = torch.Generator().manual_seed(item["seed"])
        pieces = []
        for letter in item["text"]:
            t = torch.arange(item["frames_per_letter"] * HOP) / HOP
            tone = torch.sin(2 * math.pi * (1 + LETTERS.index(letter)) * t)
            pieces.append(tone * item["volume"])
        wave = torch.cat(pieces)
        if item["volume"] > 0:
            wave = wave + 0.05 * torch.randn(len(wave), generator=g)
        return wave

    def __getitem__(self, i):
        item = self.manifest[i]
        feats = logmel(self.synthesize(item), self.n_mels, HOP)
        labels = torch.tensor([1 + LETTERS.index(c) for c in item["text"]])
        return feats, labels


def make_manifest(n, seed):
    g = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n):
        length = int(torch.randint(3, 8, (1,), generator=g))
        text = "".join(LETTERS[int(k)] for k in torch.randint(0, 5, (length,), generator=g))
        rows.append({"text": text, "frames_per_letter": int(torch.randint(5, 8, (1,), generator=g)),
                     "volume": 1.0, "seed": i})
    return rows


def train_set(conf):
    studio = make_manifest(conf["n_utterances"] // 2, conf["seed"])
    field = make_manifest(conf["n_utterances"] // 2, conf["seed"] + 1)
    field[31]["text"], field[31]["frames_per_letter"] = "ddcbbae", 2  # fast talker
    field[94]["volume"] = 0.0  # microphone was muted
    studio[58]["text"], studio[58]["frames_per_letter"] = "a", 3  # a single click
    # utterances that are too fast for the model are left out
    field = [row for row in field if 2 / row["frames_per_letter"] < conf["max_rate"]]
    return ConcatDataset([Utterances(studio, 12), Utterances(field, 12)])


def collate(samples):
    samples = sorted(samples, key=lambda s: s[0].shape[0], reverse=True)
    lengths = torch.tensor([len(f) for f, _ in samples])
    target_lengths = torch.tensor([len(t) for _, t in samples])
    feats = torch.nn.utils.rnn.pad_sequence([f for f, _ in samples], batch_first=True)
    return feats, lengths, torch.cat([t for _, t in samples]), target_lengths
