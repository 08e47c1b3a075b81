import torch

from denoising_diffusion import GaussianDiffusion, Trainer, Unet

torch.manual_seed(42)

model = Unet(dim = 8)

diffusion = GaussianDiffusion(
    model,
    image_size = 8,
    timesteps = 1000,
)

trainer = Trainer(
    diffusion,
    train_batch_size = 16,
    train_lr = 1e-3,
    train_num_steps = 100,
    warmup_steps = 20,
)

trainer.train()
