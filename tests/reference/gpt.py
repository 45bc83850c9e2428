"""A dense GPT on one process in plain torch: the answer that every parallel layout has to give.

It imports nothing from minimeg and shares no code with it, so a mistake would have to be made twice to go unseen. Full
tensors live in one dictionary by their global names, the arithmetic is written out, nothing is fast. The model is GPT-2
(Radford et al. 2019) without dropout: pre-norm blocks, learned positions, tanh-GELU; its weights lie as in Megatron-LM, where the
rows of the fused QKV projection go head by head (q_0 k_0 v_0 q_1 k_1 v_1 ...).

Run: python -m pytest tests/test_reference.py
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # ids [b, s] int64, targets [b, s] int64, valid [b, s] bool


def parameter_shapes(num_layers, hidden, vocab_size, max_sequence, ffn_hidden=None, tied=True) -> dict[str, tuple]:
    """The global name and full shape of every parameter."""
    h = hidden
    ffn = 4 * h if ffn_hidden is None else ffn_hidden
    shapes = {
        "embedding.word_embeddings.weight": (vocab_size, h),
        "embedding.position_embeddings.weight": (max_sequence, h),
    }
    for i in range(num_layers):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.input_layernorm.bias": (h,),
            f"layers.{i}.self_attention.linear_qkv.weight": (3 * h, h),
            f"layers.{i}.self_attention.linear_qkv.bias": (3 * h,),
            f"layers.{i}.self_attention.linear_proj.weight": (h, h),
            f"layers.{i}.self_attention.linear_proj.bias": (h,),
            f"layers.{i}.pre_mlp_layernorm.weight": (h,),
            f"layers.{i}.pre_mlp_layernorm.bias": (h,),
            f"layers.{i}.mlp.linear_fc1.weight": (ffn, h),
            f"layers.{i}.mlp.linear_fc1.bias": (ffn,),
            f"layers.{i}.mlp.linear_fc2.weight": (h, ffn),
            f"layers.{i}.mlp.linear_fc2.bias": (h,),
        }
    shapes |= {"final_layernorm.weight": (h,), "final_layernorm.bias": (h,)}
    if not tied:
        shapes["output_layer.weight"] = (vocab_size, h)
    return shapes


def random_state(shapes: dict[str, tuple], seed: int, dtype=torch.float64, std=0.2) -> State:
    """Normal numbers everywhere, around 1 for the gains of the norms: no bias is zero, so none can be lost unseen."""
    generator = torch.Generator().manual_seed(seed)
    state = {name: std * torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    return {name: x + 1 if name.endswith("layernorm.weight") else x for name, x in state.items()}


class ReferenceGPT:
    """A GPT over a dictionary of full tensors. ValueError names every missing, unknown or misshapen one.

    The tensors are used as they are (not copied): give leaves with requires_grad to have gradients.
    """

    def __init__(self, state: State, *, num_layers: int, num_attention_heads: int, tied: bool = True):
        faults = []
        h, vocab, longest, ffn = 0, 0, 0, None
        if "embedding.word_embeddings.weight" in state:
            vocab, h = state["embedding.word_embeddings.weight"].shape
        if "embedding.position_embeddings.weight" in state:
            longest = len(state["embedding.position_embeddings.weight"])
        if "layers.0.mlp.linear_fc1.weight" in state:
            ffn = len(state["layers.0.mlp.linear_fc1.weight"])
        expected = parameter_shapes(num_layers, h, vocab, longest, ffn, tied)
        faults += [f"missing: {name}" for name in expected if name not in state]
        faults += [f"unknown: {name}" for name in state if name not in expected]
        if not faults:
            for name, shape in expected.items():
                if tuple(state[name].shape) != shape:
                    faults.append(f"shape of {name}: {tuple(state[name].shape)}, not {shape}")
            if h % num_attention_heads != 0:
                faults.append(f"hidden size {h} is not divisible by num_attention_heads {num_attention_heads}")
        if faults:
            raise ValueError("not the state of this GPT: " + "; ".join(faults))
        self.state, self.num_layers, self.heads = state, num_layers, num_attention_heads
        self.head_dim = h // num_attention_heads
        self.longest, self.tied = longest, tied

    def linear(self, x, name):
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def layer_norm(self, x, name):
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def attention(self, x, name):
        s = x.shape[0]
        hidden = self.linear(x, f"{name}.linear_qkv")  # [s, b, 3h]
        later = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)  # [query, key]: key after query
        outputs = []
        for head in range(self.heads):
            start, d = 3 * self.head_dim * head, self.head_dim
            q = hidden[:, :, start : start + d]  # [s, b, d]
            k = hidden[:, :, start + d : start + 2 * d]
            v = hidden[:, :, start + 2 * d : start + 3 * d]
            scores = torch.einsum("qbd,kbd->bqk", q, k) / math.sqrt(d)
            weights = torch.softmax(scores.masked_fill(later, -math.inf), dim=-1)
            outputs.append(torch.einsum("bqk,kbd->qbd", weights, v))
        return self.linear(torch.cat(outputs, dim=-1), f"{name}.linear_proj")

    def mlp(self, x, name):
        return self.linear(F.gelu(self.linear(x, f"{name}.linear_fc1"), approximate="tanh"), f"{name}.linear_fc2")

    def forward(self, ids):
        """ids [b, s] -> logits [s, b, v]."""
        s = ids.shape[1]
        if s > self.longest:
            raise ValueError(f"sequence of {s} tokens, but only {self.longest} positions")
        words = F.embedding(ids, self.state["embedding.word_embeddings.weight"]).transpose(0, 1)  # [s, b, h]
        x = words + self.state["embedding.position_embeddings.weight"][:s, None, :]
        for i in range(self.num_layers):
            x = x + self.attention(self.layer_norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attention")
            x = x + self.mlp(self.layer_norm(x, f"layers.{i}.pre_mlp_layernorm"), f"layers.{i}.mlp")
        x = self.layer_norm(x, "final_layernorm")
        head = "embedding.word_embeddings.weight" if self.tied else "output_layer.weight"
        return x @ self.state[head].T

    def loss(self, ids, targets, valid, normaliser: int | None = None):
        """Sum of the valid tokens' losses / normaliser (their number in the given batch, if none is given).

        Targets at invalid places are not looked at. No valid token: 0.
        """
        targets = torch.where(valid, targets, 0)
        log_probability = torch.log_softmax(self.forward(ids), dim=-1).transpose(0, 1)  # [b, s, v]
        token_loss = -log_probability.gather(-1, targets.unsqueeze(-1)).squeeze(-1)  # [b, s]
        count = int(valid.sum()) if normaliser is None else normaliser
        return torch.where(valid, token_loss, 0.0).sum() / max(count, 1)


@dataclass
class Training:
    losses: list[float]  # before the update of each step
    norms: list[float]  # of the whole gradient, before clipping
    gradients: State  # of the first step, before clipping
    parameters: State  # after the last step


def train_reference(
    state: State,
    steps: list[list[Batch]],  # per step all its micro-batches, those of all data-parallel ranks
    *,
    num_layers: int,
    num_attention_heads: int,
    learning_rates: list[float],  # one a step
    tied: bool = True,
    weight_decay: float = 0.01,
    max_norm: float | None = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> Training:
    """AdamW (Loshchilov and Hutter 2019) on the loss over each global batch; `state` itself is left alone."""
    params = {name: x.detach().clone().requires_grad_() for name, x in state.items()}
    model = ReferenceGPT(params, num_layers=num_layers, num_attention_heads=num_attention_heads, tied=tied)
    first = {name: torch.zeros_like(x) for name, x in state.items()}
    second = {name: torch.zeros_like(x) for name, x in state.items()}
    result = Training([], [], {}, {})
    for step, (microbatches, lr) in enumerate(zip(steps, learning_rates, strict=True), start=1):
        normaliser = sum(int(valid.sum()) for _, _, valid in microbatches)
        total = 0.0
        for ids, targets, valid in microbatches:
            loss = model.loss(ids, targets, valid, normaliser)
            loss.backward()
            total += loss.item()
        gradients = {name: x.grad for name, x in params.items()}
        norm = math.sqrt(sum((g**2).sum().item() for g in gradients.values()))
        result.losses.append(total)
        result.norms.append(norm)
        if step == 1:
            result.gradients = {name: g.clone() for name, g in gradients.items()}
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        with torch.no_grad():
            for name, x in params.items():
                g = gradients[name] * clip
                first[name] = betas[0] * first[name] + (1 - betas[0]) * g
                second[name] = betas[1] * second[name] + (1 - betas[1]) * g**2
                mean = first[name] / (1 - betas[0] ** step)
                spread = second[name] / (1 - betas[1] ** step)
                decay = weight_decay if x.dim() >= 2 else 0.0  # matrices only: no bias, no norm
                x.copy_(x - lr * decay * x - lr * mean / (torch.sqrt(spread) + eps))
                x.grad = None
    result.parameters = {name: x.detach().clone() for name, x in params.items()}
    return result
