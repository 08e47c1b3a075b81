"""Shape matching with zero vectors, constant rows, equal points and empty masks; torch's own functions guard themselves."""

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(441)
torch.set_num_threads(1)


class Matcher(nn.Module):
    def __init__(self, d=10):
        super().__init__()
        self.lift = nn.Linear(4, d, bias=False)
        self.key = nn.Linear(d, d)
        self.angle = nn.Linear(d, 2, bias=False)

    def forward(self, x, seen):
        h = self.lift(x)
        a = F.scaled_dot_product_attention(self.key(h), self.key(h), h, attn_mask=seen[:, None, :].expand(-1, h.size(1), -1))
        unit = F.normalize(h, dim=-1)
        likeness = F.cosine_similarity(h[:, 0], h[:, 1], dim=-1)
        apart = torch.cdist(h, h).mean((1, 2))
        spread = h.std(dim=-1).mean(1)
        length = torch.linalg.vector_norm(h, dim=-1).sum(1)
        turn = torch.atan2(*self.angle(h[:, 2]).unbind(-1))
        return likeness + apart + spread + 0.1 * length + turn + unit.mean((1, 2)) + a.mean((1, 2))


gen = torch.Generator().manual_seed(6)
model = Matcher()
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(25):
    x = torch.randn(6, 5, 4, generator=gen)
    seen = torch.rand(6, 5, generator=gen) < 0.7
    if step % 4 == 1:
        x[2] = 0.0
        x[3, 1] = x[3, 0]
        seen[4] = False
    loss = F.smooth_l1_loss(model(x, seen), x.mean((1, 2)))
    opt.zero_grad()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    opt.step()
print("done", loss.item())
