import sys

from ppo.config import PPOConfig
from ppo.trainer import PPOTrainer

if __name__ == "__main__":
    cfg = PPOConfig.load(sys.argv[1] if len(sys.argv) > 1 else None)
    PPOTrainer(cfg).train()
