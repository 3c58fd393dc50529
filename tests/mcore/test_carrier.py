import dataclasses
from types import SimpleNamespace

import pytest
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_magi.mcore.carrier import MagiSeqParams, carrier_of, find_carrier

PLANS, LAYOUT = SimpleNamespace(), SimpleNamespace()


@pytest.fixture
def carrier():
    return MagiSeqParams(
        qkv_format="sbhd", max_seqlen_q=24, max_seqlen_kv=24, plans=PLANS, layout=LAYOUT, num_loss_tokens=7.0
    )


def test_plans_survive_where_megatron_makes_new_parameters_of_the_fields_it_knows(carrier):
    known = {f.name: getattr(carrier, f.name) for f in dataclasses.fields(PackedSeqParams)}
    found = carrier_of(PackedSeqParams(**{**known, "max_seqlen_q": 48}), "test")
    assert (found.qkv_format, found.max_seqlen_q, found.max_seqlen_kv) == ("sbhd", 48, 24)
    assert found.plans is PLANS and found.layout is LAYOUT and found.num_loss_tokens == 7.0


def test_a_copy_with_other_plans_has_these(carrier):
    other = SimpleNamespace()
    copied = dataclasses.replace(carrier, plans=other)
    assert copied.plans is other and copied.layout is LAYOUT
    assert find_carrier(PackedSeqParams(qkv_format=copied.qkv_format)).plans is other
    assert carrier.plans is PLANS and find_carrier(carrier) is carrier


@pytest.mark.parametrize("other", [None, PackedSeqParams(qkv_format="thd"), PackedSeqParams()])
def test_parameters_without_plans_are_refused(other):
    assert find_carrier(other) is None
    with pytest.raises(ValueError, match=r"^packed_seq_params: test needs the MagiSeqParams"):
        carrier_of(other, "test")
