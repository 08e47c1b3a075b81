"""Blame on short pieces of training code, written the way different people write it.

What stands before `# step` runs untraced; the guilty line is marked; a snippet without a guilty operator must end
with everything finite.
"""

from __future__ import annotations

from typing import Any

import pytest
from traced import marked_line, run_snippet


def _snippet(name: str, phase: str, op: str | None, source: str) -> Any:
    return pytest.param(phase, op, source, id=name)


FORWARD = [
    _snippet("saturated_bce", "forward", "log", """
        w = torch.tensor([200.0, -200.0, 0.3], requires_grad=True)
        y = torch.tensor([1.0, 0.0, 1.0])
        # step
        p = torch.sigmoid(w)
        pos = y * torch.log(p)  # <-- here
        neg = (1 - y) * torch.log(1 - p)
        loss = -(pos + neg).mean()
        loss.backward()
    """),
    _snippet("all_probabilities_saturated", "forward", "log", """
        w = torch.tensor([-200.0, 200.0], requires_grad=True)
        # step
        p = torch.sigmoid(w)
        loss = -(torch.tensor([0.0, 1.0]) * torch.log(p)).sum()  # <-- here
        loss.backward()
    """),
    _snippet("entropy_of_a_one_hot", "forward", "log", """
        x = torch.tensor([[0.0, 0.0, 300.0]], requires_grad=True)
        # step
        probs = F.softmax(x, dim=-1)
        loss = -(probs * probs.log()).sum()  # <-- here
        loss.backward()
    """),
    _snippet("kl_with_one_hot_target", "forward", "log", """
        logits = torch.randn(2, 3, requires_grad=True)
        target = F.one_hot(torch.tensor([0, 2]), 3).float()
        # step
        logp = logits.log_softmax(-1)
        loss = (target * (target.log() - logp)).sum(-1).mean()  # <-- here
        loss.backward()
    """),
    _snippet("exp_then_inf_minus_inf", "forward", "exp", """
        x = torch.tensor([1.0, 100.0], requires_grad=True)
        # step
        e = torch.exp(x)  # <-- here
        loss = (e - e).sum()
        loss.backward()
    """),
    _snippet("handmade_softmax", "backward", "exp", """
        x = torch.tensor([[1.0, 2.0, 1000.0]], requires_grad=True)
        # step
        e = x.exp()  # <-- here
        z = e.sum(-1, keepdim=True)
        loss = (e / z)[0, 0]
        loss.backward()
    """),
    _snippet("logsumexp_by_hand_underflow", "forward", "log", """
        x = torch.tensor([-1000.0, -1200.0], requires_grad=True)
        # step
        loss = x.exp().sum().log()  # <-- here
        loss.backward()
    """),
    _snippet("fully_masked_softmax", "forward", "softmax", """
        q = torch.randn(2, 4, requires_grad=True)
        keep = torch.tensor([[1, 1, 1], [0, 0, 0]], dtype=torch.bool)
        k = torch.randn(3, 4)
        # step
        scores = q @ k.T
        scores = scores.masked_fill(~keep, float("-inf"))
        att = scores.softmax(dim=-1)  # <-- here
        loss = (att @ k).pow(2).mean()
        loss.backward()
    """),
    _snippet("additive_mask_buffer", "forward", "softmax", """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                mask = torch.zeros(3, 3)
                mask[1] = -math.inf
                self.register_buffer("mask", mask)
                self.q = nn.Linear(4, 4)
            def forward(self, x):
                s = self.q(x) @ x.transpose(-1, -2) + self.mask
                return torch.softmax(s, -1) @ x  # <-- here
        model = Attention()
        batch = torch.randn(2, 3, 4)
        # step
        loss = model(batch).square().mean()
        loss.backward()
    """),
    _snippet("log_of_mask_as_additive_mask", "forward", "softmax", """
        keep = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        x = torch.randn(2, 2, requires_grad=True)
        # step
        bias = keep.log()
        loss = F.softmax(x + bias, dim=1)[:, 0].sum()  # <-- here
        loss.backward()
    """),
    _snippet("nan_constant_in_where", "forward", "where", """
        x = torch.randn(4, requires_grad=True)
        # step
        missing = torch.tensor(float("nan"))
        y = torch.where(x > 100, x, missing)  # <-- here
        loss = y.mean()
        loss.backward()
    """),
    _snippet("nan_fill", "forward", "masked_fill", """
        x = torch.randn(4, requires_grad=True)
        # step
        y = x.masked_fill(x < 100, float("nan"))  # <-- here
        loss = y.mean()
        loss.backward()
    """),
    _snippet("zero_times_inf_constant", "forward", "mul", """
        x = torch.tensor([0.0, 1.0], requires_grad=True)
        # step
        penalty = torch.full((2,), float("inf"))
        loss = (x * penalty).sum()  # <-- here
        loss.backward()
    """),
    _snippet("mask_times_minus_inf", "forward", "mul", """
        x = torch.randn(2, 3, requires_grad=True)
        pad = torch.tensor([[0.0, 0.0, 1.0], [0.0, 1.0, 1.0]])
        # step
        bias = pad * float("-inf")  # <-- here
        loss = (x + bias).softmax(-1).max()
        loss.backward()
    """),
    _snippet("inf_minus_inf_of_two_masks", "forward", "sub", """
        a = torch.randn(3, requires_grad=True)
        m = torch.tensor([False, True, False])
        # step
        left = a.masked_fill(m, -math.inf)
        right = (2 * a).masked_fill(m, -math.inf)
        loss = (left - right).sum()  # <-- here
        loss.backward()
    """),
    _snippet("masked_label", "forward", "nll_loss", """
        logits = torch.randn(2, 4, requires_grad=True)
        legal = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]]).bool()
        # step
        scores = torch.where(legal, logits, torch.tensor(-math.inf))
        loss = F.cross_entropy(scores, torch.tensor([2, 0]))  # <-- here
        loss.backward()
    """),
    _snippet("gather_of_masked_label", "forward", "gather", """
        logits = torch.randn(2, 4, requires_grad=True)
        legal = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]]).bool()
        actions = torch.tensor([[2], [0]])
        # step
        logp = logits.masked_fill(~legal, -math.inf).log_softmax(-1)
        chosen = logp.gather(1, actions)  # <-- here
        loss = -chosen.mean()
        loss.backward()
    """),
    _snippet("categorical_log_prob", "forward", "gather", """
        logits = torch.randn(2, 4, requires_grad=True)
        legal = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]]).bool()
        # step
        pi = torch.distributions.Categorical(
            logits=logits.masked_fill(~legal, -math.inf), validate_args=False)
        loss = -pi.log_prob(torch.tensor([2, 0])).mean()  # <-- here
        loss.backward()
    """),
    _snippet("two_origins_the_earlier", "forward", "log", """
        x = torch.tensor([0.0, -1.0], requires_grad=True)
        # step
        a = torch.log(x[0])  # <-- here
        b = torch.sqrt(x[1])
        loss = a + b
        loss.backward()
    """),
    _snippet("two_origins_written_into_one_tensor", "forward", "log", """
        x = torch.tensor([[0.0, 1.0], [-1.0, 1.0]], requires_grad=True)
        # step
        out = torch.empty(2, 2)
        out[0] = x[0].log()  # <-- here
        out[1] = x[1].sqrt()
        loss = out.sum()
        loss.backward()
    """),
    _snippet("rows_read_one_by_one", "forward", "sqrt", """
        x = torch.tensor([[0.0, 1.0], [-1.0, 1.0]], requires_grad=True)
        # step
        out = torch.zeros(2, 2)
        out[0] = x[1].sqrt()  # <-- here
        out[1] = x[0].log()
        loss = out[0].sum()
        loss.backward()
    """),
    _snippet("columns_filled_in_a_loop", "forward", "reciprocal", """
        x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.0, 3.0]], requires_grad=True)
        # step
        table = x.new_zeros(2, 3)
        for t in range(3):
            table[:, t] = 1.0 / x[:, t]  # <-- here
        loss = (table * 2).sum()
        loss.backward()
    """),
    _snippet("nan_overwritten_then_another", "forward", "sqrt", """
        x = torch.tensor([0.0, -1.0], requires_grad=True)
        # step
        buf = torch.zeros(2)
        buf[0] = torch.log(x[0])
        buf[0] = 1.0
        buf[1] = torch.sqrt(x[1])  # <-- here
        loss = buf.sum()
        loss.backward()
    """),
    _snippet("healthy_write_after_the_bad_one", "forward", "log", """
        x = torch.tensor([0.0, 3.0], requires_grad=True)
        # step
        buf = torch.zeros(2)
        buf[0] = torch.log(x[0])  # <-- here
        buf[1] = torch.sqrt(x[1])
        loss = buf.sum()
        loss.backward()
    """),
    _snippet("copy_over_an_old_nan", "forward", "sqrt", """
        x = torch.tensor([-1.0, 3.0], requires_grad=True)
        # step
        slot = torch.zeros(2)
        slot.copy_(torch.log(x * 0 - 1).detach())
        slot.copy_(torch.sqrt(x))  # <-- here
        loss = slot.sum()
        loss.backward()
    """),
    _snippet("out_argument_over_garbage", "forward", "log", """
        x = torch.tensor([0.0, 3.0])
        w = torch.ones(2, requires_grad=True)
        # step
        scratch = torch.full((2,), float("nan"))
        torch.log(x, out=scratch)  # <-- here
        loss = (scratch * w).sum()
        loss.backward()
    """),
    _snippet("inplace_relu_behind_overflow", "forward", "mul", """
        w = torch.tensor([3e38, 1.0], requires_grad=True)
        # step
        h = w * 10  # <-- here
        h = F.relu(h, inplace=True)
        loss = h.sum()
        loss.backward()
    """),
    _snippet("inplace_on_a_big_activation", "forward", "log", """
        x = torch.ones(1100, 1000)
        x[5, 7] = -1
        w = torch.ones(1000, requires_grad=True)
        # step
        h = torch.log(x * w)  # <-- here
        h = h.mul_(2.0).clamp_(max=50.0)
        loss = h.mean()
        loss.backward()
    """),
    _snippet("inplace_div", "forward", "div", """
        x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
        # step
        v = x.clone()
        n = x.norm(dim=1, keepdim=True)
        v /= n  # <-- here
        loss = v.sum()
        loss.backward()
    """),
    _snippet("half_sum_overflow", "forward", "sum", """
        x = torch.full((200,), 1000.0, dtype=torch.float16, requires_grad=True)
        # step
        total = x.sum()  # <-- here
        loss = total / 200
        loss.backward()
    """),
    _snippet("half_square_overflow_under_autocast", "forward", "pow", """
        lin = nn.Linear(4, 4)
        nn.init.constant_(lin.weight, 100.0)
        batch = torch.full((2, 4), 10.0)
        # step
        with torch.autocast("cpu", dtype=torch.float16):
            out = lin(batch)
            energy = out ** 2  # <-- here
        loss = energy.float().mean()
        loss.backward()
    """),
    _snippet("cast_to_half", "forward", "to", """
        x = torch.tensor([1e5, 1.0], requires_grad=True)
        # step
        y = x.half()  # <-- here
        loss = y.float().sum()
        loss.backward()
    """),
    _snippet("index_add_of_a_bad_row", "forward", "rsqrt", """
        deg = torch.tensor([2.0, 0.0, 1.0])
        feat = torch.randn(3, 2, requires_grad=True)
        src, dst = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0])
        # step
        norm = deg.rsqrt()  # <-- here
        msg = feat[src] * norm[src].unsqueeze(-1)
        agg = torch.zeros(3, 2).index_add(0, dst, msg)
        loss = agg.square().sum()
        loss.backward()
    """),
    _snippet("scatter_mean_of_an_empty_group", "forward", "div", """
        x = torch.randn(4, 3, requires_grad=True)
        group = torch.tensor([0, 0, 2, 2])
        # step
        sums = torch.zeros(3, 3).scatter_add(0, group[:, None].expand(-1, 3), x)
        counts = torch.bincount(group, minlength=3).unsqueeze(1)
        means = sums / counts  # <-- here
        loss = means.sum()
        loss.backward()
    """),
    _snippet("einsum_overflow", "forward", "bmm", """
        a = torch.full((2, 3), 1e30, requires_grad=True)
        b = torch.full((3, 2), 1e30)
        # step
        c = torch.einsum("ij,jk->ik", a, b)  # <-- here
        loss = c.tanh().sum() + c.sum()
        loss.backward()
    """),
    _snippet("cumprod_overflow", "forward", "cumprod", """
        g = torch.full((50,), 1e3, requires_grad=True)
        # step
        ret = torch.cumprod(g, dim=0)  # <-- here
        loss = (ret[-1] - ret[-2]).abs()
        loss.backward()
    """),
    _snippet("minimum_that_found_nothing", "forward", "mul", """
        d = torch.randn(3, requires_grad=True)
        # step
        best = torch.full((), float("inf"))
        for i in range(0):
            best = torch.minimum(best, d[i])
        weight = torch.zeros(())
        loss = d.sum() + weight * best  # <-- here
        loss.backward()
    """),
    _snippet("topk_over_excluded", "forward", "sub", """
        s = torch.randn(5, requires_grad=True)
        seen = torch.tensor([True, True, True, True, False])
        # step
        top = s.masked_fill(seen, float("-inf")).topk(3).values
        gap = top[1] - top[2]  # <-- here
        loss = gap + s.sum()
        loss.backward()
    """),
    _snippet("std_of_one", "forward", "std", """
        x = torch.randn(1, 3, requires_grad=True)
        # step
        z = (x - x.mean(0)) / (x.std(0) + 1e-6)  # <-- here
        loss = z.sum()
        loss.backward()
    """),
    _snippet("mean_of_no_positive", "forward", "mean", """
        x = torch.randn(4, requires_grad=True)
        hit = torch.zeros(4, dtype=torch.bool)
        # step
        pos = x[hit]
        loss = pos.mean() + x.pow(2).mean()  # <-- here
        loss.backward()
    """),
    _snippet("all_targets_ignored", "forward", "nll_loss", """
        x = torch.randn(2, 3, requires_grad=True)
        y = torch.tensor([-100, -100])
        # step
        loss = F.cross_entropy(x, y)  # <-- here
        loss.backward()
    """),
    _snippet("zscore_in_place_on_the_batch", "forward", "div", """
        model = nn.Linear(2, 1)
        batch = torch.tensor([[1.0, 5.0], [2.0, 5.0]])
        # step
        batch -= batch.mean(0)
        batch /= batch.std(0)  # <-- here
        loss = model(batch).sum()
        loss.backward()
    """),
    _snippet("parameter_clamped_before_use", "forward", "log", """
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.tensor([-1.0, 2.0]))
            def forward(self, x):
                s = self.scale.clamp(min=0)
                return x + s.log()  # <-- here
        model = M()
        batch = torch.ones(2)
        # step
        loss = model(batch).sum()
        loss.backward()
    """),
    _snippet("running_statistics_of_one", "forward", "var", """
        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("v", torch.ones(3))
                self.w = nn.Parameter(torch.ones(3))
            def forward(self, x):
                with torch.no_grad():
                    self.v.mul_(0.9).add_(0.1 * x.var(0))  # <-- here
                return x * self.w / (self.v + 1e-5).sqrt()
        model = Norm()
        batch = torch.randn(1, 3)
        # step
        loss = model(batch).sum()
        loss.backward()
    """),
    _snippet("chained_one_liner", "forward", "log", """
        x = torch.tensor([0.5, 0.0], requires_grad=True)
        # step
        loss = x.clamp(min=0).log().neg().mean()  # <-- here
        loss.backward()
    """),
    _snippet("multi_line_chain", "forward", "log", """
        x = torch.tensor([0.5, 0.0], requires_grad=True)
        # step
        loss = (
            x.clamp(min=0)
            .log()  # <-- here
            .neg()
            .mean()
        )
        loss.backward()
    """),
    _snippet("comprehension_and_stack", "forward", "sqrt", """
        xs = [torch.tensor(4.0), torch.tensor(-1.0)]
        w = torch.ones(2, requires_grad=True)
        # step
        roots = torch.stack([torch.sqrt(v) for v in xs])  # <-- here
        loss = (roots * w).sum()
        loss.backward()
    """),
    _snippet("lambda_activation", "forward", "log", """
        act = lambda t: torch.log(t)  # <-- here
        w = torch.tensor([1.0, -1.0], requires_grad=True)
        # step
        loss = act(w).sum()
        loss.backward()
    """),
    _snippet("decorated_no_grad_target", "forward", "div", """
        w = torch.tensor([1.0, 2.0], requires_grad=True)
        @torch.no_grad()
        def advantage(r):
            return (r - r.mean()) / r.std()  # <-- here
        # step
        adv = advantage(torch.tensor([3.0, 3.0]))
        loss = (adv * w).sum()
        loss.backward()
    """),
    _snippet("nan_survives_max_with_zero", "forward", "sqrt", """
        x = torch.tensor([-1.0, 4.0], requires_grad=True)
        # step
        r = x.sqrt()  # <-- here
        loss = torch.maximum(r, torch.zeros(2)).sum()
        loss.backward()
    """),
    _snippet("cosine_by_hand", "forward", "div", """
        a = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
        b = torch.ones(2, 2)
        # step
        cos = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))  # <-- here
        loss = (1 - cos).mean()
        loss.backward()
    """),
    _snippet("complex_division", "forward", "div", """
        z = torch.tensor([1 + 1j, 0j], requires_grad=True)
        # step
        u = z / z.abs()  # <-- here
        loss = u.real.sum()
        loss.backward()
    """),
    _snippet("lstm_then_log", "forward", "log", """
        rnn = nn.LSTM(3, 4, batch_first=True)
        batch = torch.randn(2, 5, 3)
        # step
        h, _ = rnn(batch)
        loss = (h - 2).log().mean()  # <-- here
        loss.backward()
    """),
    _snippet("vmap_per_sample", "forward", "log", """
        w = torch.tensor([1.0, 0.0], requires_grad=True)
        def one(v):
            return torch.log(v)  # <-- here
        # step
        loss = torch.vmap(one)(w).sum()
        loss.backward()
    """),
    _snippet("poisoned_running_statistics_are_no_reason", "forward", "log", """
        model = nn.BatchNorm1d(2)
        model.running_mean.fill_(math.nan)
        batch = torch.tensor([[1.0, 2.0], [-1.0, 3.0]])
        # step
        h = torch.log(batch)  # <-- here
        loss = model(h).sum()
        loss.backward()
    """),
    _snippet("masked_scores_that_overflow_in_half", "forward", "baddbmm", """
        q = torch.full((1, 2, 4), 200.0, dtype=torch.float16, requires_grad=True)
        mask = torch.zeros(1, 2, 2, dtype=torch.float16)
        mask[0, 0, 1] = -math.inf
        # step
        scores = torch.baddbmm(mask, q, q.transpose(1, 2))  # <-- here
        loss = scores.softmax(-1).sum()
        loss.backward()
    """),
    _snippet("in_place_scaling_of_masked_scores", "forward", "mul", """
        s = torch.randn(300, 300, requires_grad=True)
        upper = torch.ones(300, 300).triu(1).bool()
        # step
        a = s.masked_fill(upper, -math.inf)
        a = a.mul_(1e38).mul_(1e3)  # <-- here
        loss = a.softmax(-1).sum()
        loss.backward()
    """),
    _snippet("focal_loss", "forward", "log", """
        logits = torch.tensor([-120.0, 120.0], requires_grad=True)
        y = torch.tensor([1.0, 1.0])
        # step
        pt = logits.sigmoid() * y + (1 - logits.sigmoid()) * (1 - y)
        loss = (-(1 - pt) ** 2 * pt.log()).mean()  # <-- here
        loss.backward()
    """),
    _snippet("dice_of_two_empty_masks", "forward", "div", """
        pred = torch.zeros(2, 4, requires_grad=True)
        true = torch.zeros(2, 4)
        # step
        inter = (pred * true).sum(1)
        dice = 2 * inter / (pred.sum(1) + true.sum(1))  # <-- here
        loss = 1 - dice.mean()
        loss.backward()
    """),
    _snippet("reparameterised_gaussian", "forward", "exp", """
        logvar = torch.tensor([200.0, 0.0], requires_grad=True)
        # step
        std = torch.exp(logvar)  # <-- here
        z = std * torch.randn(2)
        kl = 0.5 * (std - logvar - 1)
        loss = kl.sum() + z.sum()
        loss.backward()
    """),
    _snippet("ratio_of_a_policy", "forward", "exp", """
        new = torch.tensor([5.0, 300.0], requires_grad=True)
        old = torch.tensor([5.0, 1.0])
        adv = torch.tensor([1.0, 0.0])
        # step
        ratio = (new - old).exp()  # <-- here
        surr = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        loss = -surr.mean()
        loss.backward()
    """),
    _snippet("a_tensor_made_of_python_numbers", "forward", "tensor", """
        w = torch.ones(2, requires_grad=True)
        weights = [1.0, float("inf")]
        # step
        k = torch.tensor([1.0, weights[1] - weights[1]])  # <-- here
        loss = (w * k).sum()
        loss.backward()
    """),
    _snippet("list_of_losses", "forward", "div", """
        w = torch.ones(3, requires_grad=True)
        counts = [2, 0, 1]
        # step
        parts = []
        for i, n in enumerate(counts):
            parts.append(w[i] / n)  # <-- here
        loss = sum(parts)
        loss.backward()
    """),
    _snippet("nested_helper_functions", "forward", "rsqrt", """
        def inverse_root(v):
            return torch.rsqrt(v)  # <-- here
        def normalise(v):
            return v * inverse_root((v * v).sum(-1, keepdim=True))
        w = torch.zeros(2, 3, requires_grad=True)
        # step
        loss = normalise(w).sum()
        loss.backward()
    """),
    _snippet("attention_mask_used_twice", "forward", "reciprocal", """
        q = torch.randn(1, 1, 2, 4, requires_grad=True)
        bias = torch.tensor([[[[0.0, 0.0], [-math.inf, -math.inf]]]])
        # step
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
        out = out * (1 / bias.exp().sum(-1, keepdim=True))  # <-- here
        loss = out.sum()
        loss.backward()
    """),
    _snippet("sort_and_difference", "forward", "sub", """
        s = torch.randn(4, requires_grad=True)
        # step
        padded = F.pad(s, (2, 0), value=float("inf"))
        ordered, _ = padded.sort()
        gaps = ordered[1:] - ordered[:-1]  # <-- here
        loss = gaps.mean()
        loss.backward()
    """),
    _snippet("argument_of_the_wrong_sign_in_a_module", "forward", "log", """
        class Head(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.Linear(2, 1)
                nn.init.constant_(self.fc.weight, -1.0)
            def forward(self, x):
                rate = self.fc(x)
                return torch.log(rate)  # <-- here
        model = nn.Sequential(nn.Identity(), Head())
        batch = torch.ones(2, 2)
        # step
        loss = -model(batch).mean()
        loss.backward()
    """),
    _snippet("index_put_of_a_bad_value", "forward", "reciprocal", """
        w = torch.tensor([0.0, 2.0], requires_grad=True)
        # step
        grid = torch.zeros(3, 3)
        rows, cols = torch.tensor([0, 2]), torch.tensor([1, 1])
        grid[rows, cols] = 1 / w  # <-- here
        loss = grid.sum()
        loss.backward()
    """),
    _snippet("running_maximum_from_minus_inf", "forward", "exp", """
        x = torch.tensor([[1.0, 100.0]], requires_grad=True)
        # step
        m = torch.full((1,), -math.inf)
        total = torch.zeros(1)
        for t in range(2):
            m = torch.maximum(m, x[:, t])
            total = total + torch.exp(x[:, t])  # <-- here
        loss = (total - total.detach()).sum() + m.sum()
        loss.backward()
    """),
    _snippet("embedding_bag_of_inf_row", "parameter", "", """
        class Bag(nn.Module):
            def __init__(self):
                super().__init__()
                self.table = nn.Embedding(3, 2)
            def forward(self, ids):
                return self.table(ids).sum(1)  # <-- here
        model = Bag()
        with torch.no_grad():
            model.table.weight[1] = math.nan
        batch = torch.tensor([[0, 1], [2, 2]])
        # step
        loss = model(batch).sum()
        loss.backward()
    """),
]

OUTSIDE = [
    _snippet("nan_batch", "input", "", """
        model = nn.Linear(3, 1)
        batch = torch.tensor([[1.0, 2.0, math.nan]])
        # step
        loss = model(batch).sum()  # <-- here
        loss.backward()
    """),
    _snippet("nan_batch_partly_overwritten", "input", "", """
        model = nn.Linear(3, 1)
        batch = torch.tensor([[1.0, 2.0, math.nan], [0.0, 1.0, 2.0]])
        # step
        batch[1] = 0.0
        loss = model(batch).sum()  # <-- here
        loss.backward()
    """),
    _snippet("nan_label", "input", "", """
        model = nn.Linear(3, 1)
        batch = (torch.ones(2, 3), torch.tensor([[1.0], [math.nan]]))
        # step
        x, y = batch
        out = model(x)
        loss = ((out - y) ** 2).mean()  # <-- here
        loss.backward()
    """),
    _snippet("inf_and_numbers_in_the_batch", "input", "", """
        model = nn.Linear(3, 1)
        batch = torch.tensor([[1.0, 2.0, math.inf], [0.5, 1.0, 1.0]])
        # step
        h = batch - batch.mean(0)  # <-- here
        loss = model(h).sum()
        loss.backward()
    """),
    _snippet("nan_parameter", "parameter", "", """
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        with torch.no_grad():
            model[1].weight[0, 1] = math.nan
        batch = torch.ones(3, 2)
        # step
        loss = model(batch).sum()  # <-- here
        loss.backward()
    """),
    _snippet("nan_buffer", "input", "", """
        model = nn.BatchNorm1d(2).eval()
        model.running_var[1] = math.nan
        batch = torch.ones(3, 2)
        # step
        loss = model(batch).sum()  # <-- here
        loss.backward()
    """),
    _snippet("array_from_a_generator", "input", "from_numpy", """
        import numpy as np
        model = nn.Linear(2, 1)
        rows = iter([np.ones((2, 2), "float32"), np.array([[1, 2], [np.nan, 4]], "float32")])
        # step
        for row in rows:
            x = torch.from_numpy(row)  # <-- here
            loss = model(x).sum()
            loss.backward()
    """),
    _snippet("uninitialised_parameter", "parameter", "empty", """
        w2 = torch.ones(2, requires_grad=True)
        torch.use_deterministic_algorithms(True)  # torch then fills new memory with NaN
        # step
        class M(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(torch.empty(2))  # <-- here
            def forward(self, x):
                return x * self.w
        model = M()
        torch.use_deterministic_algorithms(False)
        loss = model(w2).sum()
        loss.backward()
    """),
]

BACKWARD = [
    _snippet("where_trap_log", "backward", "log", """
        x = torch.tensor([0.0, 2.0], requires_grad=True)
        # step
        y = torch.where(x > 0, torch.log(x), torch.zeros_like(x))  # <-- here
        loss = y.sum()
        loss.backward()
    """),
    _snippet("where_trap_div", "backward", "div", """
        n = torch.tensor([1.0, 2.0], requires_grad=True)
        d = torch.tensor([0.0, 2.0], requires_grad=True)
        # step
        ratio = n / d  # <-- here
        loss = torch.where(d == 0, 0.0, ratio).sum()
        loss.backward()
    """),
    _snippet("nan_to_num_trap", "backward", "div", """
        a = torch.tensor([0.0, 2.0], requires_grad=True)
        # step
        r = a / a.sum(dim=0, keepdim=True).mul(0)  # <-- here
        loss = torch.nan_to_num(r, 0.0, 0.0, 0.0).sum()
        loss.backward()
    """),
    _snippet("masked_fill_trap", "backward", "sqrt", """
        v = torch.tensor([-1.0, 4.0], requires_grad=True)
        # step
        s = torch.sqrt(v)  # <-- here
        loss = s.masked_fill(v < 0, 0.0).sum()
        loss.backward()
    """),
    _snippet("sqrt_at_zero", "backward", "sqrt", """
        v = torch.tensor([0.0, 4.0], requires_grad=True)
        # step
        loss = v.sqrt().sum()  # <-- here
        loss.backward()
    """),
    _snippet("norm_pairwise_diagonal", "backward", "sqrt", """
        e = torch.randn(3, 2, requires_grad=True)
        # step
        diff = e[:, None] - e[None]
        dist = diff.pow(2).sum(-1).sqrt()  # <-- here
        loss = dist.mean()
        loss.backward()
    """),
    _snippet("pow_at_zero", "backward", "pow", """
        v = torch.tensor([0.0, 4.0], requires_grad=True)
        # step
        loss = (v ** 0.5).sum()  # <-- here
        loss.backward()
    """),
    _snippet("acos_at_one", "backward", "acos", """
        c = torch.tensor([1.0, 0.2], requires_grad=True)
        # step
        angle = torch.acos(c.clamp(-1, 1))  # <-- here
        loss = angle.sum()
        loss.backward()
    """),
    _snippet("logsumexp_all_masked", "backward", "logsumexp", """
        s = torch.randn(2, 3, requires_grad=True)
        m = torch.tensor([[True, True, True], [False, False, True]])
        # step
        bias = torch.where(m, -math.inf, 0.0)
        lse = (s + bias).logsumexp(-1)  # <-- here
        loss = torch.sigmoid(lse).sum()
        loss.backward()
    """),
    _snippet("hypot_at_the_origin", "backward", "hypot", """
        p = torch.zeros(2, requires_grad=True)
        # step
        loss = torch.hypot(p[0], p[1])  # <-- here
        loss.backward()
    """),
    _snippet("gradient_overflow", "backward", "pow", """
        x = torch.tensor([1e-30], requires_grad=True)
        # step
        loss = (x.pow(-1) * 1e-20).sum()  # <-- here
        loss.backward()
    """),
    _snippet("custom_backward", "backward", "div", """
        class Unit(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.clone()
            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return g / x  # <-- here
        w = torch.tensor([0.0, 1.0], requires_grad=True)
        # step
        loss = Unit.apply(w).sum()
        loss.backward()
    """),
    _snippet("tensor_hook", "backward", "log", """
        w = torch.tensor([0.0, 1.0], requires_grad=True)
        # step
        h = w * 2
        h.register_hook(lambda g: g * torch.log(h.detach()))  # <-- here
        loss = h.sum()
        loss.backward()
    """),
    _snippet("shared_function_called_twice", "backward", "sqrt", """
        w = torch.tensor([0.0, 1.0], requires_grad=True)
        # step
        def root(t):
            return torch.sqrt(t)  # <-- here
        loss = root(w + 1).sum() + root(w).sum()
        loss.backward()
    """),
    _snippet("gradient_penalty", "backward", "sqrt", """
        net = nn.Linear(2, 1)
        nn.init.zeros_(net.weight)
        batch = torch.ones(3, 2)
        # step
        x = batch.clone().requires_grad_()
        (g,) = torch.autograd.grad(net(x).tanh().sum(), x, create_graph=True)
        loss = ((g.pow(2).sum(1).sqrt() - 1) ** 2).mean()  # <-- here
        loss.backward()
    """),
    _snippet("double_backward_of_pow", "backward", "pow", """
        v = torch.tensor([0.0, 1.0], requires_grad=True)
        # step
        y = v.pow(1.5).sum()  # <-- here
        (g,) = torch.autograd.grad(y, v, create_graph=True)
        loss = g.sum()
        loss.backward()
    """),
    _snippet("checkpointed_block", "backward", "sqrt", """
        from torch.utils.checkpoint import checkpoint
        w = torch.tensor([0.0, 1.0], requires_grad=True)
        def block(t):
            return torch.sqrt(t)  # <-- here
        # step
        loss = checkpoint(block, w, use_reentrant=False).sum()
        loss.backward()
    """),
    _snippet("checkpointed_block_reentrant", "backward", "sqrt", """
        from torch.utils.checkpoint import checkpoint
        w = torch.tensor([0.0, 1.0], requires_grad=True)
        def block(t):
            return torch.sqrt(t)  # <-- here
        # step
        loss = checkpoint(block, w, use_reentrant=True).sum()
        loss.backward()
    """),
    _snippet("inplace_on_a_view", "backward", "sqrt", """
        w = torch.tensor([[0.0, 1.0], [2.0, 3.0]], requires_grad=True)
        # step
        h = w.clone()
        h[0].sqrt_()  # <-- here
        unrelated = torch.ones(3) * 2
        loss = h.sum()
        loss.backward()
    """),
    _snippet("after_a_custom_function", "backward", "sqrt", """
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2
            @staticmethod
            def backward(ctx, g):
                return g * 2
        w = torch.tensor([0.0, 1.0], requires_grad=True)
        # step
        h = Double.apply(w)
        ones = torch.ones(2)
        loss = (torch.sqrt(h) * ones).sum()  # <-- here
        loss.backward()
    """),
    _snippet("accumulated_micro_batches", "backward", "sqrt", """
        w = torch.tensor([1.0, 1.0], requires_grad=True)
        # step
        for k in (1.0, 0.0):
            loss = torch.sqrt(w * k).sum() / 2  # <-- here
            loss.backward()
    """),
    _snippet("clip_by_infinite_norm", "backward", "sqrt", """
        lin = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(lin.weight)
        batch = torch.ones(1, 2)
        # step
        loss = lin(batch).pow(2).sqrt().sum()  # <-- here
        loss.backward()
        nn.utils.clip_grad_norm_(lin.parameters(), 1.0)
    """),
    _snippet("log_of_a_tiny_number", "backward", "log", """
        w = torch.tensor([1e-30, 1.0], requires_grad=True)
        # step
        loss = (torch.log(w * 1e-10) * 1e3).sum()  # <-- here
        loss.backward()
    """),
]

OPTIMIZER = [
    _snippet("adam_without_eps", "optimizer", "addcdiv", """
        model = nn.Linear(2, 1, bias=False)
        opt = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0, foreach=False)
        batch = torch.tensor([[0.0, 1.0]])
        # step
        loss = model(batch).sum()
        loss.backward()
        opt.step()  # <-- here
    """),
    _snippet("adam_without_eps_foreach", "optimizer", "addcdiv", """
        model = nn.Linear(2, 1)
        opt = torch.optim.Adam(model.parameters(), lr=0.1, eps=0.0, foreach=True)
        batch = torch.tensor([[0.0, 1.0]])
        # step
        loss = model(batch).sum()
        loss.backward()
        opt.step()  # <-- here
    """),
    _snippet("sgd_overflow", "optimizer", "add", """
        model = nn.Linear(1, 1, bias=False)
        opt = torch.optim.SGD(model.parameters(), lr=1e30, foreach=False)
        batch = torch.tensor([[1e20]])
        # step
        loss = model(batch).sum()
        loss.backward()
        opt.step()  # <-- here
    """),
]

HEALTHY = [
    _snippet("causal_mask", "", None, """
        q = torch.randn(4, 4, requires_grad=True)
        # step
        mask = torch.full((4, 4), float("-inf")).triu(1)
        loss = (q + mask).softmax(-1).pow(2).sum()
        loss.backward()
    """),
    _snippet("running_minimum", "", None, """
        d = torch.randn(3, requires_grad=True)
        # step
        best = torch.tensor(float("inf"))
        for v in d:
            best = torch.minimum(best, v)
        loss = best * 2
        loss.backward()
    """),
    _snippet("scratch_memory", "", None, """
        d = torch.randn(3, requires_grad=True)
        # step
        out = torch.empty(2, 3)
        torch.stack([d.detach(), d.detach()], out=out)
        loss = (out * d).sum()
        loss.backward()
    """),
    _snippet("nan_replaced_without_gradient", "", None, """
        w = torch.ones(2, requires_grad=True)
        # step
        r = torch.tensor([0.0, 1.0]) / torch.tensor([0.0, 1.0])
        loss = (torch.nan_to_num(r) * w).sum()
        loss.backward()
    """),
    _snippet("nanmean_of_missing", "", None, """
        w = torch.ones(3, requires_grad=True)
        # step
        y = torch.tensor([1.0, math.nan, 2.0])
        keep = ~y.isnan()
        loss = ((w[keep] - y[keep]) ** 2).mean()
        loss.backward()
    """),
    _snippet("masked_logits_and_legal_labels", "", None, """
        x = torch.randn(2, 3, requires_grad=True)
        # step
        x2 = x.masked_fill(torch.tensor([[False, True, False], [True, False, False]]), -math.inf)
        loss = F.cross_entropy(x2, torch.tensor([0, 1]))
        loss.backward()
    """),
]

SNIPPETS = FORWARD + OUTSIDE + BACKWARD + OPTIMIZER + HEALTHY


@pytest.mark.parametrize(("phase", "op", "source"), [s for s in SNIPPETS if s.values[1] is not None])
def test_the_marked_line_is_blamed(phase: str, op: str, source: str) -> None:
    assert run_snippet(source).place == (phase, op, marked_line(source))


@pytest.mark.parametrize(("phase", "op", "source"), HEALTHY)
def test_nothing_is_noticed_in_healthy_code(phase: str, op: None, source: str) -> None:
    outcome = run_snippet(source)
    assert outcome.verdict.origin is None
    assert outcome.noticed == "buffer"  # the last thing looked at: nothing before it was bad
    assert torch_is_finite(outcome.names["loss"])


def torch_is_finite(loss: Any) -> bool:
    return bool(loss.isfinite().all())
