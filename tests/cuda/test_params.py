"""Structs that are read from CUDA sources."""

from __future__ import annotations

import pytest

from megatron_magi.comm import peer_kernels, peers


@pytest.mark.parametrize("struct", [peer_kernels.params_of("get_rows"), peers.control_struct()])
def test_a_member_that_the_source_does_not_have_cannot_be_set(struct) -> None:
    (first, _), *_ = struct._fields_
    params = struct()
    getattr(params, first)
    with pytest.raises(AttributeError, match="no_member"):
        params.no_member = 1
    with pytest.raises(AttributeError, match="no_member"):
        struct(no_member=1)
