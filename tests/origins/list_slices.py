"""Molecules of different sizes in a list; a slice of it is packed with cat inside the step."""
import torch

torch.manual_seed(0)
molecules = [{"atoms": torch.randn(2 + i % 4, 3), "energy": torch.rand(())} for i in range(40)]
molecules[27]["atoms"][1] = molecules[27]["atoms"][0]
net = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.001)


def step(chosen):
    atoms = torch.cat([m["atoms"] for m in chosen])
    owner = torch.cat([torch.full((len(m["atoms"]),), i) for i, m in enumerate(chosen)])
    first, second = torch.triu((owner[:, None] == owner).float(), 1).nonzero(as_tuple=True)
    distance = (atoms[first] - atoms[second]).square().sum(1, keepdim=True)
    pairs = net(1 / distance)  # ORIGIN
    energy = torch.zeros(len(chosen)).index_add(0, owner[first], pairs.squeeze(1))
    loss = (energy - torch.stack([m["energy"] for m in chosen])).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


for start in range(0, 40, 4):
    step(molecules[start : start + 4])
