"""Soft actor-critic on a one-dimensional parking task: replay buffer, twin updates, learned temperature."""

import random
from collections import deque

import torch
import torch.nn as nn

torch.manual_seed(4)
torch.set_num_threads(1)
rng = random.Random(1)


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, o))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp(2, 2)

    def forward(self, state):
        mean, log_std = self.net(5 * state).chunk(2, 1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = torch.tanh(raw)
        density = normal.log_prob(raw) - torch.log(1 - action.pow(2))
        return action, density


actor, critic, target = Actor(), mlp(3, 1), mlp(3, 1)
target.load_state_dict(critic.state_dict())
log_alpha = torch.tensor(-1.0, requires_grad=True)
actor_opt = torch.optim.Adam(actor.parameters(), lr=3e-2)
critic_opt = torch.optim.Adam(critic.parameters(), lr=3e-2)
alpha_opt = torch.optim.Adam([log_alpha], lr=3e-2)
memory = deque(maxlen=500)
position, speed = 1.0, 0.0
for tick in range(200):
    state = torch.tensor([[position, speed]])
    with torch.no_grad():
        push = actor(state)[0].item()
    speed = 0.9 * speed + 0.1 * push
    position += speed
    reward = -20 * abs(position)
    memory.append((state[0], torch.tensor([push]), reward, torch.tensor([position, speed])))
    if abs(position) > 3:
        position, speed = rng.uniform(-1, 1), 0.0
    if len(memory) < 40:
        continue
    s, a, r, s2 = zip(*rng.sample(list(memory), 24), strict=True)
    s, a, r, s2 = torch.stack(s), torch.stack(a), torch.tensor(r)[:, None], torch.stack(s2)
    with torch.no_grad():
        a2, density = actor(s2)
        goal = r + 0.95 * (target(torch.cat([s2, a2], 1)) - log_alpha.exp() * density)
    critic_loss = nn.functional.mse_loss(critic(torch.cat([s, a], 1)), goal)
    critic_opt.zero_grad()
    critic_loss.backward()
    critic_opt.step()
    action, density = actor(s)
    actor_loss = (log_alpha.exp().detach() * density - critic(torch.cat([s, action], 1))).mean()
    actor_opt.zero_grad()
    actor_loss.backward()
    actor_opt.step()
    alpha_loss = -(log_alpha * (density.detach() - 1)).mean()
    alpha_opt.zero_grad()
    alpha_loss.backward()
    alpha_opt.step()
    for old, new in zip(target.parameters(), critic.parameters(), strict=True):
        old.data.lerp_(new.data, 0.05)
    if tick % 20 == 0:
        print(f"tick {tick} critic {critic_loss.item():.3f} actor {actor_loss.item():.3f}")
