"""Survey satisfaction model; the scoring layer comes from a small in-house library."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from v31_survey_base_lib import ScoredModel, fit


class Satisfaction(ScoredModel):
    def __init__(self):
        super().__init__(questions=6, width=20)
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, answers):
        return super().forward(self.answered(answers)) + self.bias


def main():
    torch.manual_seed(431)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(18)
    answers = torch.randint(1, 6, (200, 6), generator=g).float()
    answers[151] = 3.0  # ticked the middle everywhere
    score = answers[:, :1] - answers[:, 1:2]
    model = Satisfaction()
    fit(model, DataLoader(TensorDataset(answers, score), batch_size=20), epochs=2)


if __name__ == "__main__":
    main()
