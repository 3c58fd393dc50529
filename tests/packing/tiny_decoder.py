"""A decoder of two layers in fp64, whose attention is `slice_attention`."""

import torch

from megatron_magi import slice_attention

VOCABULARY, HIDDEN, HEADS = 5, 16, 2


class TinyDecoder(torch.nn.Module):
    def __init__(self, num_layers=2, max_positions=64):
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = torch.nn.Embedding(max_positions, HIDDEN)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, 3 * HIDDEN) for _ in range(num_layers))
        self.out = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(num_layers))
        self.double()

    def forward(self, tokens, positions, labels, attend):
        """The log-probabilities of labels, fp64 ``[num_rows]``; ``attend(q, k, v)`` is attention."""
        x = self.tokens(tokens) + self.positions(positions)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = qkv(x).view(len(x), 3, HEADS, -1).unbind(1)
            x = x + torch.tanh(out(attend(q, k, v).reshape(len(x), -1)))
        return -torch.nn.functional.cross_entropy(x @ self.tokens.weight.T, labels, reduction="none")

    def of_mask(self, tokens, positions, labels, mask):
        """On one rank."""
        return self(tokens, positions, labels, lambda q, k, v: slice_attention(q, k, v, mask)[0])
