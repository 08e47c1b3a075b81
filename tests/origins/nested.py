"""NestedTensor: variable-length sequences, one of length 0 averaged."""
import torch
from torch import nn

torch.manual_seed(0)
lengths = [3, 5, 2, 0, 4, 6]
model = nn.Linear(8, 1)
opt = torch.optim.SGD(model.parameters(), 0.1)
for step in range(12):
    ls = lengths if step == 7 else [max(1, n) for n in lengths]
    nt = torch.nested.nested_tensor([torch.randn(n, 8) for n in ls], layout=torch.jagged)
    h = model(nt)
    total = torch.stack([t.sum() for t in h.unbind()])
    mean = total / torch.tensor(ls).float()  # ORIGIN
    loss = mean.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
