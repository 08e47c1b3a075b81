"""House prices from JSON lines; a missing field becomes float('nan'). Batches by random indices, no DataLoader."""
import io, json, random
import torch
from torch import nn

random.seed(3); torch.manual_seed(3)
text = io.StringIO()
for i in range(100):
    rec = {"rooms": random.randint(1, 6), "area": random.uniform(30, 200), "price": random.uniform(1, 9)}
    if i == 57:
        del rec["area"]
    text.write(json.dumps(rec) + "\n")
text.seek(0)
records = [json.loads(line) for line in text]
X = torch.tensor([[r["rooms"], r.get("area", float("nan")) / 100] for r in records])
y = torch.tensor([r["price"] for r in records])


def get_batch(n=6):
    ix = torch.randint(len(X), (n,))
    return X[ix], y[ix]


model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(model.parameters(), lr=3e-3)
for it in range(60):
    xb, yb = get_batch()
    pred = model(xb).squeeze(-1)
    loss = ((pred - yb) ** 2).mean()
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    if it % 10 == 0:
        print(f"iter {it}: {loss.item():.4f}")
