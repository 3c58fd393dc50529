"""`magi_attention` as megatron_magi provides it; this is not MagiAttention."""

import sys
from importlib.metadata import PackageNotFoundError, distribution

from megatron_magi.compat.package import as_magi_attention, fill_module

try:
    distribution("magi_attention")
except PackageNotFoundError:
    pass
else:
    raise ImportError(
        "magi_attention and megatron-magi-as-magi-attention are both installed, with files of the same names: "
        "pip uninstall both, and install the one you want"
    )

fill_module(sys.modules[__name__])
as_magi_attention()
