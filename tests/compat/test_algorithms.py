"""Algorithms and cost factors: what each name of a configuration stands for."""

import pytest

from megatron_magi import api
from megatron_magi.compat.cost_factors import cost_factors, with_cost_factors
from megatron_magi.config import CostModel, MagiConfig
from megatron_magi.config import OverlapConfig as Overlap

SHAPE = {"num_heads_q": 6, "num_heads_kv": 3, "head_dim": 40}


def key(**options):
    return api.magi_attn_varlen_key(
        [0, 64], [0, 64], causal=True, dist_attn_config=options.pop("config", None), **SHAPE
    )


def test_algorithms_that_give_no_even_shards_are_refused_by_name():
    for alg in (api.LBDispatchAlg(), api.DPDispatchAlg(), api.BSDispatchAlg()):
        assert not (alg.is_partitions_returned and alg.is_equal_num_workloads)
        with pytest.raises(ValueError, match=rf"^alg: expected .*MinHeapDispatchAlg.*, got {type(alg).__name__}\(\)"):
            api.DispatchConfig(alg=alg)
    for alg in (api.GreedyOverlapAlg(), api.OverlapAlgType.GREEDY, "uniform"):
        with pytest.raises(ValueError, match=r"^alg: expected UniformOverlapAlg\(\)"):
            api.OverlapConfig(alg=alg)


def test_algorithms_know_their_names():
    algorithms = (api.MinHeapDispatchAlg(), api.ToppHeapDispatchAlg(0.5), api.SequentialDispatchAlg())
    assert [alg.type.value for alg in algorithms] == ["min_heap", "topp_heap", "sequential_select"]
    assert api.SortedSequentialSelectAlg(0.9).type is api.DispatchAlgType.SORTED_SEQUENTIAL_SELECT
    assert [alg.is_affinity_considered for alg in algorithms] == [False, True, False]
    assert (api.UniformOverlapAlg().type, api.GreedyOverlapAlg().type) == tuple(api.OverlapAlgType)
    assert all(isinstance(alg, api.DispatchAlg) for alg in algorithms)
    assert isinstance(api.UniformOverlapAlg(), api.OverlapAlg)


def test_a_degree_of_zero_is_no_overlap():
    config = api.DistAttnConfig(overlap_config=api.OverlapConfig(degree=0))
    assert key(config=config) == key(config=api.DistAttnConfig(overlap_config=api.OverlapConfig(enable=False)))


def test_cost_factors_are_the_times_of_a_pair_and_of_a_row():
    overlap = api.OverlapConfig(
        mode=api.AttnOverlapMode.DYNAMIC, degree=None, calc_cost_factor=2.5e-6, comm_cost_factor=0.03
    )
    made = key(config=api.DistAttnConfig(overlap_config=overlap))
    shown, cost = made.dist_attn_config.overlap_config, made.config.overlap.cost
    assert (shown.calc_cost_factor, shown.comm_cost_factor) == (pytest.approx(2.5e-6), pytest.approx(0.03))
    assert cost.attend_us(1000) == pytest.approx(2.5e-3) and cost.fetch_us(100) == pytest.approx(3.0)
    assert (cost.num_heads_q, cost.num_heads_kv, cost.head_dim) == (6, 3, 40)
    default = key().config.overlap.cost
    assert (default.tflops, default.gbytes_per_s) == (None, None)
    only_one = with_cost_factors(CostModel(), 1.0, 0.5)
    assert only_one.tflops is None and only_one.fetch_us(1) == pytest.approx(0.5)
    assert cost_factors(only_one) == (1.0, pytest.approx(0.5))
    for name in ("calc_cost_factor", "comm_cost_factor"):
        for bad in (0.0, -1.0, float("inf"), float("nan")):
            with pytest.raises(ValueError, match=f"^{name}: expected a positive number"):
                api.OverlapConfig(**{name: bad})


def test_cost_factors_of_a_device_mean_its_rates():
    cost = CostModel(tflops=400.0, gbytes_per_s=100.0, num_heads_q=6, num_heads_kv=3, head_dim=40)
    calc = api.get_calc_cost_factor(6, 40, tflops=800e12, mfu=0.5)
    comm = api.get_comm_cost_factor(3, 40, bandwidth=100e9 / cost.element_bytes, bwu=0.8, corr_factor=1 / 0.8)
    assert (calc, comm) == (pytest.approx(cost.attend_us(1)), pytest.approx(cost.fetch_us(1)))
    assert api.get_calc_cost_factor(6, 40, 800e12, 0.5, is_fwd=False) == pytest.approx(2.5 * calc)
    assert [api.get_a2a_corr_factor(n) for n in (1, 2, 8)] == [1.0, 0.5, 0.875]


@pytest.mark.parametrize(
    "config",
    [
        MagiConfig(),
        MagiConfig(overlap=Overlap(degree=0)),
        MagiConfig(overlap=Overlap(degree=3, max_degree=4)),
        api.DistAttnConfig(
            api.DispatchConfig(api.MinHeapDispatchAlg(), chunk_size=16, uneven_shard=True), api.OverlapConfig()
        ),
    ],
)
def test_the_configuration_of_a_key_makes_the_same_key(config):
    first = key(config=config)
    shown = first.dist_attn_config
    assert isinstance(shown, api.DistAttnConfig) and first.uneven_shard == shown.dispatch_config.uneven_shard
    again = key(config=shown)
    assert again.config.dispatch == first.config.dispatch
    assert again.config.overlap.degree == first.config.overlap.degree
    assert again.config.overlap.max_degree == first.config.overlap.max_degree
    assert not first.is_deterministic_mode_enable
