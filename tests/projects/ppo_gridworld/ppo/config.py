from dataclasses import dataclass, fields
import json


@dataclass
class PPOConfig:
    seed: int = 3
    num_envs: int = 4
    num_steps: int = 32          # rollout length per env
    total_updates: int = 12
    update_epochs: int = 2
    num_minibatches: int = 4
    lr: float = 2.5e-3
    lr_end: float = 2.5e-4
    lr_power: float = 0.9
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    storage_dtype: str = "float32"

    @property
    def batch_size(self):
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self):
        return self.batch_size // self.num_minibatches

    @classmethod
    def load(cls, path=None):
        cfg = cls()
        if path is not None:
            with open(path) as fh:
                raw = json.load(fh)
            known = {f.name for f in fields(cls)}
            unknown = set(raw) - known
            if unknown:
                raise ValueError(f"unknown config keys: {sorted(unknown)}")
            for k, v in raw.items():
                setattr(cfg, k, v)
        return cfg
