"""REINFORCE with an entropy bonus in a grid game where some moves can be illegal."""
import torch
import torch.nn as nn

torch.manual_seed(9)
torch.set_num_threads(1)
SIZE, MOVES = 12, torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


def make_policy():
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 4))

    def policy(pos, goal):
        obs = torch.cat([pos, goal], -1) / SIZE
        nxt = pos[:, None, :] + MOVES
        legal = ((nxt >= 0) & (nxt < SIZE)).all(-1)
        return net(obs).masked_fill(~legal, float("-inf"))

    return net, policy


def play(policy, starts, goals, horizon=6):
    pos, logps, entropies, rewards = starts.clone(), [], [], []
    for _ in range(horizon):
        logits = policy(pos, goals)
        logp = torch.log_softmax(logits, dim=-1)
        p = logp.exp()
        entropies.append(-(p * logp).sum(-1))
        action = torch.multinomial(p.detach(), 1).squeeze(-1)
        before = (pos - goals).abs().sum(-1)
        pos = pos + MOVES[action]
        rewards.append((before - (pos - goals).abs().sum(-1)).float())
        logps.append(logp.gather(1, action[:, None]).squeeze(-1))
    return torch.stack(logps), torch.stack(entropies), torch.stack(rewards)


def curriculum(g, episode, batch=10):
    """Starts in the middle first, then further and further out."""
    reach = 1 + episode // 6
    centre = SIZE // 2
    starts = centre + torch.randint(-reach, reach + 1, (batch, 2), generator=g)
    goals = centre + torch.randint(-3, 3, (batch, 2), generator=g)
    return starts.clamp(0, SIZE - 1), goals


def train(episodes=30):
    net, policy = make_policy()
    opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(1)
    for episode in range(episodes):
        logp, entropy, reward = play(policy, *curriculum(g, episode), horizon=3)
        returns = reward.flip(0).cumsum(0).flip(0)
        advantage = returns - returns.mean()
        objective = (logp * advantage).mean() + 0.01 * entropy.mean()
        opt.zero_grad()
        (-objective).backward()
        opt.step()
        print(f"episode {episode} return {returns[0].mean():.3f} objective {objective.item():.4f}")


train()
