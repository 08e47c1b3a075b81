import math

import torch


def filterbank(n_mels, n_bins):
    centers = torch.linspace(0, n_bins - 1, n_mels)
    bins = torch.arange(n_bins)[None]
    return (1 - (bins - centers[:, None]).abs() / 1.5).clamp(min=0)


def logmel(wave, n_mels, hop, floor=1e-6):
    """[frames, n_mels] log energies of non-overlapping windows."""
    frames = wave.unfold(0, hop, hop)
    window = torch.hann_window(hop)
    power = torch.fft.rfft(frames * window, n=4 * hop).abs() ** 2
    mel = power @ filterbank(n_mels, power.shape[1]).T
    return torch.log(mel.clamp(min=floor)) / math.log(10)
