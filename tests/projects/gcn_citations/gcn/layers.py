import math

import torch
import torch.nn.functional as F
from torch.nn.parameter import Parameter
from torch.nn.modules.module import Module


class GraphConvolution(Module):
    """
    Simple GCN layer, similar to https://arxiv.org/abs/1609.02907
    """

    def __init__(self, in_features, out_features, bias=True):
        super(GraphConvolution, self).__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.weight = Parameter(torch.FloatTensor(in_features, out_features))
        if bias:
            self.bias = Parameter(torch.FloatTensor(out_features))
        else:
            self.register_parameter('bias', None)
        self.reset_parameters()

    def reset_parameters(self):
        stdv = 1. / math.sqrt(self.weight.size(1))
        self.weight.data.uniform_(-stdv, stdv)
        if self.bias is not None:
            self.bias.data.uniform_(-stdv, stdv)

    def forward(self, input, adj):
        support = torch.mm(input, self.weight)
        output = torch.mm(adj, support)
        if self.bias is not None:
            return output + self.bias
        else:
            return output

    def __repr__(self):
        return self.__class__.__name__ + ' (' \
               + str(self.in_features) + ' -> ' \
               + str(self.out_features) + ')'


class GraphAttention(Module):
    """Single head GAT layer over a dense adjacency matrix."""

    def __init__(self, in_features, out_features, alpha=0.2):
        super(GraphAttention, self).__init__()
        self.alpha = alpha
        self.W = Parameter(torch.empty(in_features, out_features))
        torch.nn.init.xavier_uniform_(self.W, gain=1.414)
        self.a = Parameter(torch.empty(2 * out_features, 1))
        torch.nn.init.xavier_uniform_(self.a, gain=1.414)

    def forward(self, h, adj):
        Wh = torch.mm(h, self.W)
        d = Wh.size(1)
        e = F.leaky_relu(Wh @ self.a[:d] + (Wh @ self.a[d:]).T, self.alpha)
        adj = adj + torch.eye(adj.size(0))
        attention = torch.where(adj > 0, e, torch.full_like(e, float('-inf')))
        attention = F.softmax(attention, dim=1)
        return F.elu(torch.matmul(attention, Wh))
