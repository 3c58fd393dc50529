"""A layout answers as the tensor does that lies so."""

from __future__ import annotations

import pytest
import torch

from megatron_magi.cuda.layout import Layout

STORED = torch.zeros(4096, dtype=torch.bfloat16)
TENSORS = {
    "contiguous": STORED.view(8, 4, 128),
    "heads of a wider tensor": STORED.view(8, 4, 128)[:, 1:3],
    "rows apart": STORED.view(8, 4, 128)[::2],
    "no rows": STORED.view(8, 4, 128)[:0],
    "one row": STORED[1:9].view(1, 2, 4),
    "expanded": torch.zeros(1, 4).expand(8, 4),
}


@pytest.mark.parametrize("t", TENSORS.values(), ids=TENSORS)
def test_a_layout_is_that_of_its_tensor(t):
    layout = Layout.of(t)
    for x, y in ((layout, t), (layout[:3], t[:3]), (Layout.of(layout), t), (layout.new_empty(t.shape), t.contiguous())):
        assert (x.shape, x.stride(), x.dtype, x.device) == (tuple(y.shape), y.stride(), y.dtype, y.device)
        assert (len(x), x.dim(), x.numel(), x.is_contiguous()) == (len(y), y.dim(), y.numel(), y.is_contiguous())
        assert x.element_size() == y.element_size() and [x.stride(i) for i in range(x.dim())] == [*y.stride()]
    assert (layout.data_ptr() - t.data_ptr()) % 256 == 0, "aligned alike"
    assert layout.new_empty((2, 3), dtype=torch.float32).dtype == torch.float32
    assert layout.with_rows(100).shape == (100, *t.shape[1:]) and layout.with_rows(100).stride() == t.stride()
