import numpy as np
import torch
from torch import nn

from .agent import Agent
from .env import VecGridWorld
from .storage import RolloutStorage


class PPOTrainer:
    def __init__(self, cfg):
        self.cfg = cfg
        torch.manual_seed(cfg.seed)
        self.env = VecGridWorld(cfg.num_envs, seed=cfg.seed)
        self.agent = Agent(self.env.obs_dim, self.env.n_actions)
        self.optimizer = torch.optim.Adam(self.agent.parameters(), lr=cfg.lr, eps=1e-5)
        self.storage = RolloutStorage(cfg, self.env.obs_dim, self.env.n_actions)
        self.shuffle = torch.Generator().manual_seed(cfg.seed)
        self.n_updates = 0

    def anneal_lr(self, update):
        # polynomial decay, reaches lr_end in the last update
        frac = np.float64(update) / (self.cfg.total_updates - 1)
        lr = self.cfg.lr_end + (self.cfg.lr - self.cfg.lr_end) * (1 - frac) ** self.cfg.lr_power
        for group in self.optimizer.param_groups:
            group["lr"] = float(lr)
        return lr

    @torch.no_grad()
    def collect(self, obs):
        rewards = 0.0
        for t in range(self.cfg.num_steps):
            mask = self.env.legal_actions()
            dist = self.agent.policy(obs, mask)
            action = dist.sample()
            next_obs, reward, done = self.env.step(action)
            self.storage.insert(t, obs, mask, action, dist.log_prob(action), reward, done, self.agent.value(obs))
            obs = next_obs
            rewards += reward.mean().item()
        self.storage.compute_returns(self.agent.value(obs))
        return obs, rewards / self.cfg.num_steps

    def loss(self, mb):
        cfg = self.cfg
        dist = self.agent.policy(mb["obs"], mb["masks"])
        logratio = dist.log_prob(mb["actions"]) - mb["logprobs"]
        ratio = logratio.exp()

        adv = mb["advantages"]
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        pg_loss1 = -adv * ratio
        pg_loss2 = -adv * torch.clamp(ratio, 1 - cfg.clip_coef, 1 + cfg.clip_coef)
        pg_loss = torch.max(pg_loss1, pg_loss2).mean()

        v_loss = 0.5 * ((self.agent.value(mb["obs"]) - mb["returns"].float()) ** 2).mean()
        entropy = dist.entropy().mean()
        return pg_loss - cfg.ent_coef * entropy + cfg.vf_coef * v_loss, (pg_loss, v_loss, entropy)

    def update(self):
        for _ in range(self.cfg.update_epochs):
            for mb in self.storage.minibatches(self.shuffle):
                loss, stats = self.loss(mb)
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.agent.parameters(), self.cfg.max_grad_norm)
                self.optimizer.step()
                self.n_updates += 1
        return [s.item() for s in stats]

    def train(self):
        obs = self.env.reset()
        for update in range(self.cfg.total_updates):
            lr = self.anneal_lr(update)
            obs, mean_reward = self.collect(obs)
            pg, v, ent = self.update()
            print(f"update {update:3d} | lr {lr:.2e} | reward {mean_reward:+.3f} | pg {pg:+.4f} v {v:.4f} ent {ent:.3f}")
