"""Goes on from its own checkpoint when there is one; a language-model-like loop that draws its batches at random."""

import os

import torch


class Job:
    def __init__(self, folder):
        self.path = os.path.join(folder, "last.pt")
        os.makedirs(folder, exist_ok=True)
        torch.manual_seed(5)
        self.rates = torch.rand(800) + 0.05
        self.rates[::200] = 0.0  # counters that never moved
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.step = 0
        if os.path.exists(self.path):
            self.load()

    def load(self):
        state = torch.load(self.path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["rng"])

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "rng": torch.get_rng_state()}
        torch.save(state, self.path + ".part")
        os.replace(self.path + ".part", self.path)

    def train_step(self):
        rate = self.rates[torch.randint(len(self.rates), (8, 1))]
        gap = 1.0 / rate  # <-
        loss = (self.model(rate) - gap).abs().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self, steps):
        with open("resumed.log", "a") as log:
            while self.step < steps:
                value = self.train_step()
                log.write(f"{self.step} {value}\n")
                self.step += 1
                if self.step % 7 == 0:
                    log.flush()
                    self.save()


if __name__ == "__main__":
    Job("state").run(60)
