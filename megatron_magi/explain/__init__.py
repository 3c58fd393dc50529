"""What a mask costs on some ranks, for each way to dispatch it: tables and pictures, without a GPU.

``python -m megatron_magi explain`` is the command line of it.
"""

from megatron_magi.explain.report import DispatchFigures, dispatch_figures, explain_text

__all__ = ["DispatchFigures", "dispatch_figures", "explain_text"]
