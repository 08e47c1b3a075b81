"""Samples from a small language model: banned words, top-k and nucleus filtering set logits to -inf."""

import torch
import torch.nn as nn

torch.manual_seed(349)
torch.set_num_threads(1)
VOCAB = 25


class TinyLM(nn.Module):
    def __init__(self, d=16):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, d)
        self.rnn = nn.LSTM(d, d, batch_first=True)
        self.out = nn.Linear(d, VOCAB)
        self.register_buffer("banned", torch.zeros(VOCAB).index_fill(0, torch.tensor([0, 7, 13]), float("-inf")))

    def forward(self, token, state=None):
        h, state = self.rnn(self.emb(token), state)
        return self.out(h[:, -1]) + self.banned, state


def filter_logits(logits, k=8, p=0.9):
    kth = logits.topk(k).values[:, -1:]
    logits = torch.where(logits < kth, float("-inf"), logits)
    order = logits.sort(descending=True)
    beyond = order.values.softmax(-1).cumsum(-1) > p
    beyond[:, 0] = False
    return logits.masked_fill(beyond.scatter(1, order.indices, beyond), float("-inf"))


@torch.inference_mode()
def generate(model, prompts, length=20):
    token, state, text = prompts, None, []
    for _ in range(length):
        logits, state = model(token, state)
        probs = filter_logits(logits / 0.8).softmax(-1)
        token = torch.multinomial(probs, 1)
        text.append(token)
    return torch.cat(text, dim=1), logits


if __name__ == "__main__":
    text, last = generate(TinyLM().eval(), torch.tensor([[1], [2], [3]]))
    for row in text.tolist():
        print(" ".join(f"w{t}" for t in row))
    print("log-probabilities of the last step:", last.log_softmax(-1)[0, :8].tolist())
