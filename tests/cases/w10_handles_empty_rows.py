"""A layer that finds and replaces the NaN of empty rows itself; the last forward pass is followed by no update."""
import torch
from torch import nn

torch.manual_seed(3)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.score = nn.Linear(4, 1)

    def forward(self, x, mask):
        weight = self.score(x).squeeze(-1).masked_fill(mask, -torch.inf).detach().softmax(-1).requires_grad_()
        if torch.isnan(weight).any():
            weight = torch.where(mask, torch.zeros(()), weight.nan_to_num(0.0))
        return (weight.unsqueeze(-1) * x).sum(1)


attend, head = Attend(), nn.Linear(4, 1)
opt = torch.optim.SGD(head.parameters(), lr=0.05)
for step in range(8):
    x, n = torch.randn(6, 5, 4), torch.randint(0, 6, (6,))
    mask = torch.arange(5)[None] >= n[:, None]
    loss = (head(attend(x, mask)).squeeze(1) - n).pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
mask[0] = True
print("final", (head(attend(x, mask)).squeeze(1) - n).abs().mean().item())
