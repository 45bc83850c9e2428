"""The reference against computations more naive than itself: plain Python floats, torch's own modules and optimizer."""

import ast
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.reference import gpt
from tests.reference.gpt import ReferenceGPT, parameter_shapes, random_state, train_reference

L, H, HEADS, VOCAB, LONGEST = 2, 8, 2, 11, 7


def make_state(tied=True, seed=0, num_layers=L, **sizes):
    sizes = {"hidden": H, "vocab_size": VOCAB, "max_sequence": LONGEST, **sizes}
    return random_state(parameter_shapes(num_layers, tied=tied, **sizes), seed)


def make_batch(seed, b=3, s=5, invalid=0.0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (b, s), generator=generator)
    targets = torch.randint(VOCAB, (b, s), generator=generator)
    return ids, targets, torch.rand(b, s, generator=generator) >= invalid


def naive_logits(state, ids, heads, num_layers, tied):
    """One sequence, lists of Python floats, one query and one key at a time: no tensor operation at all."""
    weights = {name: x.tolist() for name, x in state.items()}

    def linear(x, name):
        w, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return [sum(a * c for a, c in zip(row, x, strict=True)) + z for row, z in zip(w, bias, strict=True)]

    def norm(x, name):
        mean = sum(x) / len(x)
        variance = sum((a - mean) ** 2 for a in x) / len(x)
        gain, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return [(a - mean) / math.sqrt(variance + 1e-5) * g + z for a, g, z in zip(x, gain, bias, strict=True)]

    def gelu(a):
        return 0.5 * a * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))

    def add(x, y):
        return [a + c for a, c in zip(x, y, strict=True)]

    words, positions = weights["embedding.word_embeddings.weight"], weights["embedding.position_embeddings.weight"]
    xs = [add(words[token], positions[place]) for place, token in enumerate(ids)]
    d = len(xs[0]) // heads
    for i in range(num_layers):
        qkv = [linear(norm(x, f"layers.{i}.input_layernorm"), f"layers.{i}.self_attention.linear_qkv") for x in xs]
        for place in reversed(range(len(xs))):
            mixed = []
            for head in range(heads):
                q = qkv[place][3 * d * head : 3 * d * head + d]
                exps, sums = [], [0.0] * d
                for other in range(place + 1):  # only what came before
                    k = qkv[other][3 * d * head + d : 3 * d * head + 2 * d]
                    v = qkv[other][3 * d * head + 2 * d : 3 * d * head + 3 * d]
                    exps.append(math.exp(sum(a * c for a, c in zip(q, k, strict=True)) / math.sqrt(d)))
                    sums = [total + exps[-1] * c for total, c in zip(sums, v, strict=True)]
                mixed += [total / sum(exps) for total in sums]
            xs[place] = add(xs[place], linear(mixed, f"layers.{i}.self_attention.linear_proj"))
        for place, x in enumerate(xs):
            inner = [gelu(a) for a in linear(norm(x, f"layers.{i}.pre_mlp_layernorm"), f"layers.{i}.mlp.linear_fc1")]
            xs[place] = add(x, linear(inner, f"layers.{i}.mlp.linear_fc2"))
    head_weight = words if tied else weights["output_layer.weight"]
    finals = [norm(x, "final_layernorm") for x in xs]
    return [[sum(a * c for a, c in zip(row, x, strict=True)) for row in head_weight] for x in finals]


class ModuleGPT(nn.Module):
    """The same model from torch's own modules, batch first, with MultiheadAttention's [all q; all k; all v] rows."""

    def __init__(self, state, heads, num_layers, tied):
        super().__init__()
        self.heads, self.num_layers = heads, num_layers
        vocab, h = state["embedding.word_embeddings.weight"].shape
        longest = len(state["embedding.position_embeddings.weight"])
        self.words, self.positions = nn.Embedding(vocab, h), nn.Embedding(longest, h)
        self.norm1 = nn.ModuleList(nn.LayerNorm(h) for _ in range(num_layers))
        self.attention = nn.ModuleList(nn.MultiheadAttention(h, heads, batch_first=True) for _ in range(num_layers))
        self.norm2 = nn.ModuleList(nn.LayerNorm(h) for _ in range(num_layers))
        ffn = len(state["layers.0.mlp.linear_fc1.weight"])
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(h, ffn), nn.GELU(approximate="tanh"), nn.Linear(ffn, h)) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(h)
        self.head = nn.Linear(h, vocab, bias=False)
        self.double()
        if tied:
            self.head.weight = self.words.weight
        with torch.no_grad():
            for name, parameter in self.by_global_name().items():
                parameter.copy_(self.from_heads(state[name]) if "linear_qkv" in name else state[name])

    def from_heads(self, x):
        """Rows [q_0 k_0 v_0 q_1 ...] -> [q_0 q_1 ... k_0 ...]."""
        return torch.cat([torch.cat(x.chunk(3 * self.heads)[part::3]) for part in range(3)])

    def to_heads(self, x):
        blocks = x.chunk(3 * self.heads)
        return torch.cat([blocks[part * self.heads + head] for head in range(self.heads) for part in range(3)])

    def by_global_name(self):
        names = {
            "embedding.word_embeddings": self.words,
            "embedding.position_embeddings": self.positions,
            "final_layernorm": self.norm,
        }
        for i in range(self.num_layers):
            names |= {
                f"layers.{i}.input_layernorm": self.norm1[i],
                f"layers.{i}.self_attention.linear_proj": self.attention[i].out_proj,
                f"layers.{i}.pre_mlp_layernorm": self.norm2[i],
                f"layers.{i}.mlp.linear_fc1": self.mlp[i][0],
                f"layers.{i}.mlp.linear_fc2": self.mlp[i][2],
            }
        parameters = {f"{name}.{kind}": x for name, module in names.items() for kind, x in module.named_parameters()}
        for i in range(self.num_layers):
            parameters[f"layers.{i}.self_attention.linear_qkv.weight"] = self.attention[i].in_proj_weight
            parameters[f"layers.{i}.self_attention.linear_qkv.bias"] = self.attention[i].in_proj_bias
        if self.head.weight is not self.words.weight:
            parameters["output_layer.weight"] = self.head.weight
        return parameters

    def values(self, kind):
        """Gradients or data of all parameters by global name, rows of QKV head by head again."""
        found = {name: (x.grad if kind == "grad" else x.detach()).clone() for name, x in self.by_global_name().items()}
        return {name: self.to_heads(x) if "linear_qkv" in name else x for name, x in found.items()}

    def forward(self, ids):
        s = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(s, dtype=torch.float64)
        x = self.words(ids) + self.positions(torch.arange(s))
        for i in range(self.num_layers):
            y = self.norm1[i](x)
            x = x + self.attention[i](y, y, y, attn_mask=mask, need_weights=False)[0]
            x = x + self.mlp[i](self.norm2[i](x))
        return self.head(self.norm(x))  # [b, s, v]

    def loss(self, ids, targets, valid):
        """The mean over the valid tokens of all the rows given."""
        ignored = targets.masked_fill(~valid, -100)
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), ignored.flatten())


def assert_equal(found, expected, bound=1e-10):
    assert found.keys() == expected.keys()
    worst = {name: (found[name] - expected[name]).abs().max().item() for name in expected}
    assert max(worst.values()) <= bound, sorted(worst.items(), key=lambda item: -item[1])[:3]


def test_imports_nothing_from_minimeg():
    tree = ast.parse(Path(gpt.__file__).read_text(encoding="utf-8"))
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").split(".")[0])
    assert imported == {"math", "dataclasses", "torch"}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_logits_equal_plain_python(heads, tied):
    state = make_state(tied, seed=heads, ffn_hidden=12)
    model = ReferenceGPT(state, num_layers=L, num_attention_heads=heads, tied=tied)
    ids, _, _ = make_batch(1)
    logits = model.forward(ids)
    assert logits.shape == (5, 3, VOCAB)
    for row in range(len(ids)):
        naive = torch.tensor(naive_logits(state, ids[row].tolist(), heads, L, tied), dtype=torch.float64)
        assert (logits[:, row] - naive).abs().max() <= 1e-12


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_loss_and_every_gradient_equal_torch_modules(heads, tied):
    state = make_state(tied, seed=heads + 10)
    modules = ModuleGPT(state, heads, L, tied)
    leaves = {name: x.clone().requires_grad_() for name, x in state.items()}
    model = ReferenceGPT(leaves, num_layers=L, num_attention_heads=heads, tied=tied)
    batch = make_batch(2, s=LONGEST, invalid=0.4)
    assert 0 < int(batch[2].sum()) < batch[2].numel()
    loss, expected = model.loss(*batch), modules.loss(*batch)
    loss.backward()
    expected.backward()
    assert abs(loss.item() - expected.item()) <= 1e-12
    assert_equal({name: x.grad for name, x in leaves.items()}, modules.values("grad"), 1e-12)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_norm", [0.05, 1e6, None])
def test_training_equals_torch_adamw_on_the_whole_batch(tied, max_norm):
    """Three steps; the micro-batches differ in size and in valid tokens, one of them has none."""
    state = make_state(tied, seed=20)
    steps, rates = [], [1e-2, 3e-3, 2e-2]
    for step in range(3):
        microbatches = [make_batch(100 * step + i, b=1 + i % 2, invalid=0.3 * i) for i in range(3)]
        ids, targets, _ = make_batch(100 * step + 50)
        steps.append([*microbatches, (ids, torch.full_like(targets, -1), torch.zeros_like(ids, dtype=torch.bool))])
    before = {name: x.clone() for name, x in state.items()}
    result = train_reference(
        state, steps, num_layers=L, num_attention_heads=HEADS, tied=tied, learning_rates=rates, max_norm=max_norm
    )
    assert_equal(state, before, 0.0)

    modules = ModuleGPT(state, HEADS, L, tied)
    parameters = list(modules.parameters())
    groups = [
        {"params": [x for x in parameters if x.dim() >= 2], "weight_decay": 0.01},
        {"params": [x for x in parameters if x.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    for step, (microbatches, rate) in enumerate(zip(steps, rates, strict=True)):
        whole = tuple(torch.cat(parts) for parts in zip(*microbatches, strict=True))
        optimizer.zero_grad()
        loss = modules.loss(*whole)
        loss.backward()
        if step == 0:
            assert_equal(result.gradients, modules.values("grad"), 1e-12)
        norm = nn.utils.clip_grad_norm_(parameters, math.inf if max_norm is None else max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        assert abs(result.losses[step] - loss.item()) <= 1e-10
        assert abs(result.norms[step] - norm.item()) <= 1e-10
        assert (max_norm == 0.05) == (max_norm is not None and norm.item() > max_norm), (
            "both sides of the clip are tried"
        )
    # A key's bias has gradient 0 (the softmax does not see it) and AdamW divides its rounding, 1e-17, by itself; in float64
    # eps = 1e-8 still damps that, in float32 it would not.
    assert_equal(result.parameters, modules.values("data"), 1e-10)


def test_loss_does_not_depend_on_the_split_into_microbatches():
    state = make_state()
    ids, targets, valid = make_batch(3, b=4, invalid=0.5)
    arguments = {"num_layers": L, "num_attention_heads": HEADS, "learning_rates": [1e-3]}
    whole = train_reference(state, [[(ids, targets, valid)]], **arguments)
    rows = [(ids[i : i + 1], targets[i : i + 1], valid[i : i + 1]) for i in range(4)]
    assert len({int(row[2].sum()) for row in rows}) > 1, "the rows must weigh differently"
    split = train_reference(state, [rows], **arguments)
    assert abs(whole.losses[0] - split.losses[0]) <= 1e-12
    assert_equal(split.gradients, whole.gradients, 1e-12)


def test_no_valid_token_gives_zero():
    state = make_state()
    model = ReferenceGPT(state, num_layers=L, num_attention_heads=HEADS)
    ids, targets, valid = make_batch(4)
    assert model.loss(ids, targets, torch.zeros_like(valid)).item() == 0.0


def test_gradcheck():
    shapes = parameter_shapes(1, 4, 5, 3, tied=True)
    state = random_state(shapes, seed=5)
    ids, targets = torch.tensor([[0, 4, 1], [2, 2, 3]]), torch.tensor([[4, 1, 3], [2, 3, 0]])
    valid = torch.tensor([[True, True, True], [True, False, True]])

    def loss(*tensors):
        full = dict(zip(shapes, tensors, strict=True))
        return ReferenceGPT(full, num_layers=1, num_attention_heads=2).loss(ids, targets, valid)

    assert torch.autograd.gradcheck(loss, tuple(x.requires_grad_() for x in state.values()))


@pytest.mark.parametrize("place", range(5))
def test_a_token_changes_only_what_follows(place):
    model = ReferenceGPT(make_state(), num_layers=L, num_attention_heads=HEADS)
    ids, _, _ = make_batch(6)
    changed = ids.clone()
    changed[1, place] = (ids[1, place] + 1) % VOCAB
    difference = (model.forward(changed) - model.forward(ids)).abs().amax(dim=-1)  # [s, b]
    assert difference[:place].eq(0).all(), "the past saw the future"
    assert difference[place:, 1].gt(0).all(), "the future did not see the past"
    assert difference[:, [0, 2]].eq(0).all(), "another sequence saw it"


def test_float32_and_shorter_sequences():
    state = {name: x.float() for name, x in make_state().items()}
    logits = ReferenceGPT(state, num_layers=L, num_attention_heads=HEADS).forward(torch.tensor([[3]]))
    assert logits.dtype == torch.float32
    assert logits.shape == (1, 1, VOCAB)


def test_wrong_states_are_refused_with_all_faults():
    good = make_state()
    bad = {name: x for name, x in good.items() if name not in ("final_layernorm.bias", "layers.1.mlp.linear_fc1.bias")}
    bad["layers.2.mlp.linear_fc1.bias"] = torch.zeros(32)
    bad["output_layer.weight"] = torch.zeros(VOCAB, H)
    with pytest.raises(ValueError, match="not the state of this GPT") as error:
        ReferenceGPT(bad, num_layers=L, num_attention_heads=HEADS)
    for fault in (
        "missing: final_layernorm.bias",
        "missing: layers.1.mlp.linear_fc1.bias",
        "unknown: layers.2.mlp.linear_fc1.bias",
        "unknown: output_layer.weight",
    ):
        assert fault in str(error.value)
    with pytest.raises(ValueError, match=r"missing: output_layer\.weight"):
        ReferenceGPT(good, num_layers=L, num_attention_heads=HEADS, tied=False)
    with pytest.raises(ValueError, match=r"unknown: layers\.1\."):  # a layer too many must not be dropped in silence
        ReferenceGPT(good, num_layers=1, num_attention_heads=HEADS)
    with pytest.raises(ValueError, match=r"shape of final_layernorm.bias: \(1,\), not \(8,\)"):
        ReferenceGPT(good | {"final_layernorm.bias": torch.zeros(1)}, num_layers=L, num_attention_heads=HEADS)
    with pytest.raises(ValueError, match="hidden size 8 is not divisible by num_attention_heads 3"):
        ReferenceGPT(good, num_layers=L, num_attention_heads=3)
    with pytest.raises(ValueError, match="sequence of 8 tokens, but only 7 positions"):
        ReferenceGPT(good, num_layers=L, num_attention_heads=HEADS).forward(torch.zeros(1, 8, dtype=torch.long))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_tokens_outside_the_vocabulary_are_refused(token):
    model = ReferenceGPT(make_state(), num_layers=L, num_attention_heads=HEADS)
    ids, targets, valid = make_batch(7, invalid=0.0)
    with pytest.raises(IndexError):
        model.forward(torch.full_like(ids, token))
    with pytest.raises((IndexError, RuntimeError)):
        model.loss(ids, torch.full_like(targets, token), valid)
