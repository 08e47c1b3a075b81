"""Deep residual-free controller; the initialiser is written by hand."""
import torch
from torch import nn

torch.manual_seed(88)
torch.set_num_threads(1)


class Controller(nn.Module):
    def __init__(self, obs=24, width=64, depth=16, act=3):
        super().__init__()
        sizes = [obs] + [width] * depth
        self.stack = nn.ModuleList([nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
        self.out = nn.Linear(width, act)
        self.apply(self.reset)

    @staticmethod
    def reset(module):
        if isinstance(module, nn.Linear):
            fan_in = module.weight.shape[1]
            nn.init.normal_(module.weight, std=float(fan_in))
            nn.init.zeros_(module.bias)

    def forward(self, obs):
        h = obs
        for layer in self.stack:
            h = nn.functional.leaky_relu(layer(h), 0.2)
        return torch.tanh(self.out(h))


def demonstrations(steps, batch=16):
    g = torch.Generator().manual_seed(17)
    mix = torch.randn(24, 3, generator=g)
    for _ in range(steps):
        obs = torch.randn(batch, 24, generator=g)
        yield obs, torch.sign(obs @ mix)


controller = Controller()
optimizer = torch.optim.Adam(controller.parameters(), lr=1e-4)
for step, (obs, action) in enumerate(demonstrations(10)):
    loss = nn.functional.mse_loss(controller(obs), action)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print("step", step, "imitation loss", loss.item())
