"""Line recognition with CTC: one transcript is longer than its line has columns."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
lines = torch.randn(512, 12, 5)
text = torch.randint(1, 8, (512, 14))
letters = torch.randint(3, 6, (512,))
letters[44] = 14  # the transcript of two lines

model = nn.Linear(5, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step, (x, y, n) in enumerate(DataLoader(TensorDataset(lines, text, letters), batch_size=8)):
    log_probs = model(x).log_softmax(dim=2).transpose(0, 1)
    loss = nn.functional.ctc_loss(log_probs, y, torch.full((len(n),), 12), n)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step:2d}: loss {loss.item():.4f}")
