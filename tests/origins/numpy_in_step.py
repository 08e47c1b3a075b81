"""Returns of an episode of one action, normalised in numpy inside the step: their spread is 0."""
import numpy as np
import torch

np.seterr(all="ignore")
torch.manual_seed(0)


def advantages(returns):
    returns = returns - returns.mean()
    return returns / returns.std()  # ORIGIN


policy = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(policy.parameters())
for episode in range(20):
    length = 1 if episode == 13 else 6
    logits = policy(torch.randn(length, 3)).log_softmax(1)
    adv = advantages(np.arange(length, dtype="float32"))
    loss = -(logits[:, 0] * torch.from_numpy(adv)).mean()  # READ
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
