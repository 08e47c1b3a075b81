"""Hand pose: per-joint quaternions trained on the angle between predicted and measured rotation."""

import argparse

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--joints", type=int, default=5)
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch", type=int, default=10)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()

torch.manual_seed(304)
torch.set_num_threads(1)


class PoseNet(nn.Module):
    def __init__(self, joints):
        super().__init__()
        self.joints = joints
        self.net = nn.Sequential(nn.Linear(18, 40), nn.SiLU(), nn.Linear(40, joints * 3))

    def forward(self, glove, free):
        bend = self.net(glove).view(-1, self.joints, 3) * free.unsqueeze(-1)
        quat = torch.cat([torch.ones_like(bend[..., :1]), bend], dim=-1)
        return quat / quat.pow(2).sum(-1, keepdim=True).sqrt()


def angle(q, r):
    cosine = (q * r).sum(-1).abs().clamp(max=1.0)
    return 2.0 * torch.acos(cosine)


def recordings(gen):
    mixing = torch.randn(args.joints * 3, 18, generator=gen)
    take = 0
    while True:
        bend = 0.4 * torch.randn(args.batch, args.joints, 3, generator=gen)
        free = torch.ones(args.batch, args.joints)
        if take % 16 == 13:
            free[7, 2] = 0.0  # splinted finger
        quat = torch.cat([torch.ones(args.batch, args.joints, 1), bend * free.unsqueeze(-1)], dim=-1)
        glove = bend.flatten(1) @ mixing + 0.05 * torch.randn(args.batch, 18, generator=gen)
        yield glove, free, quat / quat.norm(dim=-1, keepdim=True)
        take += 1


net = PoseNet(args.joints)
opt = torch.optim.Adam(net.parameters(), lr=args.lr)
stream = recordings(torch.Generator().manual_seed(5))
step = 0
while step < args.steps:
    glove, free, truth = next(stream)
    loss = angle(net(glove, free), truth).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 6 == 0:
        print(f"{step}: {torch.rad2deg(loss.detach()):.1f} degrees")
    step += 1
