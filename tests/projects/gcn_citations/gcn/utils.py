import numpy as np
import torch


def load_graph(n=160, n_classes=4, n_feat=32, seed=0):
    """Synthetic citation network: papers cite mostly papers of their own field."""
    rng = np.random.RandomState(seed)
    labels = rng.randint(n_classes, size=n)
    prob = np.where(labels[:, None] == labels[None, :], 0.06, 0.004)
    adj = (rng.rand(n, n) < prob).astype(np.float32)
    adj = np.maximum(adj, adj.T)
    order = np.arange(n)
    adj[order, order - 1] = adj[order - 1, order] = 1  # every paper cites the one before it
    np.fill_diagonal(adj, 0)
    adj[77, :] = adj[:, 77] = 0  # nobody cites paper 77

    words = rng.rand(n, n_feat) < 0.08
    for i in range(n):
        words[i, labels[i] * 4:labels[i] * 4 + 4] |= rng.rand(4) < 0.5
    features = words.astype(np.float32)

    idx = rng.permutation(n)
    return (torch.from_numpy(adj), torch.from_numpy(row_normalize(features)), torch.from_numpy(labels),
            torch.from_numpy(idx[:100]), torch.from_numpy(idx[100:]))


def row_normalize(mx):
    """Row-normalize feature matrix"""
    rowsum = mx.sum(1, keepdims=True)
    rowsum[rowsum == 0] = 1
    return mx / rowsum


def normalize_adj(adj):
    """D^-1/2 (A + I) D^-1/2"""
    adj = adj + torch.eye(adj.size(0))
    deg = adj.sum(1)
    d_inv_sqrt = deg.pow(-0.5)
    return d_inv_sqrt[:, None] * adj * d_inv_sqrt[None, :]


def drop_edge(adj, p):
    """DropEdge: removes a share p of the edges, the same in both directions."""
    if p == 0:
        return adj
    keep = torch.triu((torch.rand_like(adj) >= p).float(), diagonal=1)
    return adj * (keep + keep.t())


def accuracy(output, labels):
    preds = output.max(1)[1].type_as(labels)
    return preds.eq(labels).double().mean()
