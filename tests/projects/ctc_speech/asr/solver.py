import torch
from torch import nn
from torch.utils.data import DataLoader

from asr.corpus import collate, train_set
from asr.model import AcousticModel


class Solver:
    def __init__(self, conf):
        torch.manual_seed(conf["data"]["seed"])
        self.conf = conf
        self.loader = DataLoader(train_set(conf["data"]), batch_size=conf["data"]["batch_size"], shuffle=True,
                                 collate_fn=collate)
        self.model = AcousticModel(**conf["model"])
        self.ctc = nn.CTCLoss(blank=0, zero_infinity=conf["zero_infinity"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=conf["optim"]["lr"])
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=conf["optim"]["lr"], epochs=conf["optim"]["epochs"],
            steps_per_epoch=len(self.loader))

    def train_step(self, feats, lengths, labels, label_lengths):
        logp, n = self.model(feats, lengths)
        loss = self.ctc(logp.transpose(0, 1), labels, n, label_lengths)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.conf["optim"]["grad_clip"])
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def train(self):
        for epoch in range(self.conf["optim"]["epochs"]):
            losses = [self.train_step(*batch) for batch in self.loader]
            print(f"epoch {epoch}: ctc {torch.stack(losses).mean():.3f}")
