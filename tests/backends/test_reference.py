"""Weights of the definition of attention."""

import pytest
import torch

from megatron_magi.backends.reference.attention import weights

INF = torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sink", [None, 0.5, -INF, INF])
def test_weights_are_exponentials_over_their_sum(dtype, sink):
    logits = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=dtype)
    logits[0, 0], logits[1, :, 3] = -INF, -INF
    sinks = None if sink is None else torch.full((2, 5), sink)
    p, lse = weights(logits, sinks)
    wanted = logits.logsumexp(-1) if sink is None else torch.logaddexp(logits.logsumexp(-1), sinks.to(dtype))
    torch.testing.assert_close(lse, wanted)
    torch.testing.assert_close(p, torch.exp(logits - wanted.masked_fill(wanted == -INF, 0)[..., None]))


def test_a_row_without_keys_has_the_lse_of_its_sink():
    for sinks, wanted in ((None, -INF), (torch.ones(2, 3), 1.0)):
        p, lse = weights(torch.empty(2, 3, 0), sinks)
        assert p.shape == (2, 3, 0) and (lse == wanted).all()


@pytest.mark.parametrize("size", [1.0, 1e4, 1e8, 1e30])
def test_large_equal_logits_and_sinks_share_a_row(size):
    """A key that counts twice has twice the weight of another one, or of the sink."""
    p, _ = weights(torch.full((1, 2), size), torch.full((1,), size), torch.tensor([[2, 1]]))
    torch.testing.assert_close(p, torch.tensor([[0.5, 0.25]]))
