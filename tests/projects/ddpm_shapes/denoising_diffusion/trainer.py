import torch
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from denoising_diffusion.data import ShapesDataset
from denoising_diffusion.ema import EMA

def cycle(dl):
    while True:
        for data in dl:
            yield data

class Trainer:
    def __init__(
        self,
        diffusion_model,
        *,
        train_batch_size = 16,
        gradient_accumulate_every = 1,
        train_lr = 1e-3,
        train_num_steps = 100,
        warmup_steps = 20,
        ema_decay = 0.995,
        adam_betas = (0.9, 0.99),
        max_grad_norm = 1.,
        log_every = 20
    ):
        self.model = diffusion_model
        self.batch_size = train_batch_size
        self.gradient_accumulate_every = gradient_accumulate_every
        self.max_grad_norm = max_grad_norm
        self.train_num_steps = train_num_steps
        self.log_every = log_every

        self.ds = ShapesDataset(image_size = diffusion_model.image_size)
        g = torch.Generator().manual_seed(7)
        self.dl = cycle(DataLoader(self.ds, batch_size = train_batch_size, shuffle = True, drop_last = True, generator = g))

        self.opt = Adam(diffusion_model.parameters(), lr = train_lr, betas = adam_betas)
        self.sched = LambdaLR(self.opt, lambda step: min(1., 1.5 ** (step - warmup_steps)))
        self.ema = EMA(diffusion_model, beta = ema_decay)
        self.step = 0

    def train(self):
        while self.step < self.train_num_steps:
            total_loss = 0.
            for _ in range(self.gradient_accumulate_every):
                data = next(self.dl)
                loss = self.model(data)
                loss = loss / self.gradient_accumulate_every
                total_loss += loss.item()
                loss.backward()

            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
            self.opt.step()
            self.opt.zero_grad()
            self.sched.step()

            self.step += 1
            self.ema.update()
            if self.step % self.log_every == 0:
                print(f'[{self.step}/{self.train_num_steps}] loss: {total_loss:.4f} lr: {self.sched.get_last_lr()[0]:.2e}')

        print('training complete')
