"""What is first used in inference mode, as by an evaluation before training, serves training afterwards."""

import pytest
import torch

from megatron_magi import api
from tests.api.test_functions import world

TOKENS, HEADS, DIM = 48, 4, 8
DOCUMENTS = ([0, 20, 48], [0, 48], [0, 5, 11, 48], [0, 1, 2, 48])
"""More masks than the comparisons by which ranks first meet."""


def keys_of(group):
    return [api.magi_attn_varlen_key(bounds, bounds, causal=True, cp_group_or_mesh=group) for bounds in DOCUMENTS]


def step(key, has_gradient):
    """Output and, if there is one, gradient of all that a layer may call."""
    x = torch.randn(TOKENS, 3 * HEADS, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x.requires_grad_(has_gradient)
    local = api.roll(api.dispatch(x, key), 1, 0, key)
    out, _ = api.calc_attn(*local.chunk(3, dim=1), key, return_max_logits=True)
    lists = torch.arange(4).expand(len(local), 1, -1) + api.get_position_ids(key).clamp(max=TOKENS - 4)[:, None, None]
    sparse, _ = api.calc_index_sparse_attn(*local.chunk(3, dim=1), lists, key, fetch="selected")
    whole = api.undispatch(out + sparse, key)
    return [whole.detach(), *(torch.autograd.grad(whole.square().sum(), x) if has_gradient else ())]


def train_after_evaluation(rank, num_ranks, evaluates):
    group = world(num_ranks)
    expected = [step(key, has_gradient=True) for key in keys_of(group)]
    api.clear_cache()
    with torch.inference_mode():
        keys = keys_of(group)
        for key, (out, _) in zip(keys, expected, strict=True) if evaluates else ():
            torch.testing.assert_close(step(key, has_gradient=False)[0], out, rtol=0, atol=0)
    for key, results in zip(keys, expected, strict=True):
        torch.testing.assert_close(step(key, has_gradient=True), results, rtol=0, atol=0)


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.ranks(2))])
def test_keys_made_there_train(ranks, num_ranks, evaluates):
    if num_ranks == 1:
        train_after_evaluation(0, 1, evaluates)
    else:
        ranks(num_ranks, train_after_evaluation, evaluates)
