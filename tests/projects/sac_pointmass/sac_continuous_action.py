# docs and reference numbers: see the wiki page "SAC, point mass"
import argparse
import random
import time

import numpy as np
import torch
import torch.nn.functional as F
import torch.optim as optim

from buffers import ReplayBuffer
from envs import PointMass
from networks import Actor, SoftQNetwork


def parse_args():
    # fmt: off
    parser = argparse.ArgumentParser()
    parser.add_argument("--exp-name", type=str, default="sac_pointmass")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=420)
    parser.add_argument("--buffer-size", type=int, default=int(1e4))
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--tau", type=float, default=0.005)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-starts", type=int, default=100)
    parser.add_argument("--policy-lr", type=float, default=3e-3)
    parser.add_argument("--q-lr", type=float, default=1e-3)
    parser.add_argument("--adam-eps", type=float, default=1e-8)
    parser.add_argument("--policy-frequency", type=int, default=2)
    parser.add_argument("--target-network-frequency", type=int, default=1)
    parser.add_argument("--alpha", type=float, default=0.2)
    parser.add_argument("--autotune", type=lambda x: x.lower() == "true", default=True)
    # fmt: on
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    run_name = f"{args.exp_name}__{args.seed}"
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")

    env = PointMass(seed=args.seed)
    actor = Actor(env).to(device)
    qf1 = SoftQNetwork(env).to(device)
    qf2 = SoftQNetwork(env).to(device)
    qf1_target = SoftQNetwork(env).to(device)
    qf2_target = SoftQNetwork(env).to(device)
    qf1_target.load_state_dict(qf1.state_dict())
    qf2_target.load_state_dict(qf2.state_dict())
    q_optimizer = optim.Adam(list(qf1.parameters()) + list(qf2.parameters()), lr=args.q_lr, eps=args.adam_eps)
    actor_optimizer = optim.Adam(list(actor.parameters()), lr=args.policy_lr)

    # Automatic entropy tuning
    if args.autotune:
        target_entropy = -float(np.prod(env.action_space.shape))
        log_alpha = torch.zeros(1, requires_grad=True, device=device)
        alpha = log_alpha.exp().item()
        a_optimizer = optim.Adam([log_alpha], lr=args.q_lr)
    else:
        alpha = args.alpha

    rb = ReplayBuffer(args.buffer_size, env.observation_space, env.action_space, device, seed=args.seed)
    start_time = time.time()

    # TRY NOT TO MODIFY: start the game
    obs, _ = env.reset()
    episodic_return = 0.0
    for global_step in range(args.total_timesteps):
        # ALGO LOGIC: put action logic here
        if global_step < args.learning_starts:
            action = env.action_space.sample()
        else:
            with torch.no_grad():
                action, _, _ = actor.get_action(torch.Tensor(obs).unsqueeze(0).to(device))
            action = action[0].cpu().numpy()

        next_obs, reward, terminated, truncated, info = env.step(action)
        episodic_return += reward
        rb.add(obs, next_obs, action, reward, terminated)
        obs = next_obs
        if terminated or truncated:
            print(f"global_step={global_step}, episodic_return={episodic_return:.3f}")
            obs, _ = env.reset()
            episodic_return = 0.0

        # ALGO LOGIC: training.
        if global_step > args.learning_starts:
            data = rb.sample(args.batch_size)
            with torch.no_grad():
                next_actions, next_log_pi, _ = actor.get_action(data.next_observations)
                qf1_next = qf1_target(data.next_observations, next_actions)
                qf2_next = qf2_target(data.next_observations, next_actions)
                min_qf_next = torch.min(qf1_next, qf2_next) - alpha * next_log_pi
                next_q_value = data.rewards + (1 - data.dones) * args.gamma * min_qf_next.view(-1)

            qf1_loss = F.mse_loss(qf1(data.observations, data.actions).view(-1), next_q_value)
            qf2_loss = F.mse_loss(qf2(data.observations, data.actions).view(-1), next_q_value)
            qf_loss = qf1_loss + qf2_loss

            # optimize the model
            q_optimizer.zero_grad()
            qf_loss.backward()
            q_optimizer.step()

            if global_step % args.policy_frequency == 0:  # TD 3 Delayed update support
                for _ in range(args.policy_frequency):
                    pi, log_pi, _ = actor.get_action(data.observations)
                    min_qf_pi = torch.min(qf1(data.observations, pi), qf2(data.observations, pi))
                    actor_loss = ((alpha * log_pi) - min_qf_pi).mean()

                    actor_optimizer.zero_grad()
                    actor_loss.backward()
                    actor_optimizer.step()

                    if args.autotune:
                        with torch.no_grad():
                            _, log_pi, _ = actor.get_action(data.observations)
                        alpha_loss = (-log_alpha.exp() * (log_pi + target_entropy)).mean()

                        a_optimizer.zero_grad()
                        alpha_loss.backward()
                        a_optimizer.step()
                        alpha = log_alpha.exp().item()

            # update the target networks
            if global_step % args.target_network_frequency == 0:
                for param, target_param in zip(qf1.parameters(), qf1_target.parameters()):
                    target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)
                for param, target_param in zip(qf2.parameters(), qf2_target.parameters()):
                    target_param.data.copy_(args.tau * param.data + (1 - args.tau) * target_param.data)

            if global_step % 50 == 0:
                sps = int(global_step / (time.time() - start_time))
                print(f"step {global_step} qf_loss {qf_loss.item():.4f} alpha {alpha:.3f} SPS {sps}")
