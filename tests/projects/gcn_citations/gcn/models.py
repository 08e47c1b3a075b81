import torch
import torch.nn as nn
import torch.nn.functional as F

from gcn.layers import GraphAttention, GraphConvolution


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout):
        super(GCN, self).__init__()
        self.gc1 = GraphConvolution(nfeat, nhid)
        self.att = GraphAttention(nhid, nhid)
        self.gc2 = GraphConvolution(nhid, nclass)
        self.dropout = dropout

    def embed(self, x, adj_norm, adj):
        x = F.relu(self.gc1(x, adj_norm))
        x = F.dropout(x, self.dropout, training=self.training)
        return self.att(x, adj)

    def forward(self, x, adj_norm, adj):
        z = self.embed(x, adj_norm, adj)
        return F.log_softmax(self.gc2(z, adj_norm), dim=1), z


def link_loss(z, adj, n_neg, generator):
    """Papers that cite each other should be close, random pairs should not."""
    src, dst = adj.nonzero(as_tuple=True)
    neg = torch.randint(0, z.size(0), (2, n_neg), generator=generator)
    pos_score = (z[src] * z[dst]).sum(1)
    neg_score = (z[neg[0]] * z[neg[1]]).sum(1)
    return -F.logsigmoid(pos_score).mean() - F.logsigmoid(-neg_score).mean()
