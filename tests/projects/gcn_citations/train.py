from __future__ import division
from __future__ import print_function

import argparse

import numpy as np
import torch
import torch.nn.functional as F
import torch.optim as optim

from gcn.models import GCN, link_loss
from gcn.utils import accuracy, drop_edge, load_graph, normalize_adj

# Training settings
parser = argparse.ArgumentParser()
parser.add_argument('--seed', type=int, default=42, help='Random seed.')
parser.add_argument('--epochs', type=int, default=120, help='Number of epochs to train.')
parser.add_argument('--lr', type=float, default=0.02, help='Initial learning rate.')
parser.add_argument('--weight_decay', type=float, default=5e-4, help='Weight decay (L2 loss on parameters).')
parser.add_argument('--hidden', type=int, default=16, help='Number of hidden units.')
parser.add_argument('--dropout', type=float, default=0.3, help='Dropout rate (1 - keep probability).')
parser.add_argument('--drop_edge', type=float, default=0.15, help='Share of edges dropped in each epoch.')
parser.add_argument('--link_weight', type=float, default=0.5, help='Weight of the link prediction loss.')
parser.add_argument('--n_neg', type=int, default=400)

args = parser.parse_args()

np.random.seed(args.seed)
torch.manual_seed(args.seed)
negatives = torch.Generator().manual_seed(args.seed)

# Load data
adj, features, labels, idx_train, idx_test = load_graph()
adj_norm = normalize_adj(adj)

# Model and optimizer
model = GCN(nfeat=features.shape[1],
            nhid=args.hidden,
            nclass=labels.max().item() + 1,
            dropout=args.dropout)
optimizer = optim.Adam(model.parameters(),
                       lr=args.lr, weight_decay=args.weight_decay)


def train(epoch):
    model.train()
    optimizer.zero_grad()
    adj_t = drop_edge(adj, args.drop_edge)
    output, z = model(features, adj_norm, adj_t)
    loss_cls = F.nll_loss(output[idx_train], labels[idx_train])
    loss_link = link_loss(z, adj, args.n_neg, negatives)
    loss_train = loss_cls + args.link_weight * loss_link
    acc_train = accuracy(output[idx_train], labels[idx_train])
    loss_train.backward()
    optimizer.step()

    if epoch % 20 == 0:
        print('Epoch: {:04d}'.format(epoch + 1),
              'loss_train: {:.4f}'.format(loss_train.item()),
              'acc_train: {:.4f}'.format(acc_train.item()))


def test():
    model.eval()
    with torch.no_grad():
        output, _ = model(features, adj_norm, adj)
    loss_test = F.nll_loss(output[idx_test], labels[idx_test])
    acc_test = accuracy(output[idx_test], labels[idx_test])
    print("Test set results:",
          "loss= {:.4f}".format(loss_test.item()),
          "accuracy= {:.4f}".format(acc_test.item()))


# Train model
for epoch in range(args.epochs):
    train(epoch)
print("Optimization Finished!")

# Testing
test()
