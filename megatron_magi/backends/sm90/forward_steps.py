"""The kernels of a forward pass, as steps of a list of launches."""

from __future__ import annotations

from megatron_magi.backends.sm90 import kernels as hopper_kernels
from megatron_magi.backends.sm90.mask_numbers import ForwardForm, first_arriving
from megatron_magi.backends.sm90.support import LOG2_E, of_rows, work_counter
from megatron_magi.cuda.arriving import Arriving
from megatron_magi.cuda.launch_list import Map, Step
from megatron_magi.operands.options import AttnOptions
from megatron_magi.operands.passes import ForwardInputs, ForwardOutput


def forward_steps(
    inputs: ForwardInputs,
    output: ForwardOutput,
    form: ForwardForm,
    options: AttnOptions,
    stream: int,
    arriving: Arriving | None = None,
) -> list[Step]:
    """The attention kernel, right behind the kernel that fetches keys, if there is one.

    Its addresses are ``q``, ``k``, ``v``, ``out``, ``lse``, ``sink`` and ``max_logits``, the last two if given, and
    those of the fetched keys; its numbers are those of a mask (`mask_numbers`).

    Args:
        inputs: tensors of the layout of the calls, or the layouts; q, k and v as TMA can load them, `sink_lse` fp32 of
            every row.
        output: likewise: ``out`` in the dtype of q or fp32, as TMA can store it, ``lse`` fp32, ``max_logits`` fp32,
            which is updated.
        form: of the masks that it serves.
        options: of the calls.
        stream: raw handle.
        arriving: fetched keys and values; the number of rows is a number of the mask. If it is 0, the fetching kernel
            still publishes this rank's rows, concurrently with attention. None: own keys only.
    """
    (q, k, v, sink_lse), (out, lse, accumulate, max_logits), (tile, packed) = inputs, output, form.tiles
    softcap, scale, captured = options.softcap, options.softmax_scale, form.captured
    dims = hopper_kernels.kernel_dims((q.shape[2], v.shape[2]), backward=False)
    kernel = hopper_kernels.forward(q.dtype, dims, tile, softcap > 0, arriving is not None, captured)
    params = kernel.params(
        counter=0 if captured else work_counter(q.device, stream).data_ptr(),
        out_row=out.stride(0), out_head=out.stride(1), lse_row=lse.stride(0), lse_head=lse.stride(1),
        logit_scale=softcap or scale,
        scale_log2=(softcap or scale) * LOG2_E, softcap_factor=scale / softcap if softcap else 0.0,
        accumulate=int(accumulate), out_fp32=int(out.dtype != q.dtype),
    )  # fmt: skip
    fields, overlaps = {"out": ("out", 0), "lse": ("lse", 0)}, False
    if sink_lse is not None:
        params.sink_row, params.sink_head = sink_lse.stride()
        fields["sink_lse"] = ("sink", 0)
    if max_logits is not None:
        fields["max_logits"] = ("max_logits", 0)
    maps = [
        Map(q, (64 // packed, packed), ("q", 0), "seen.rows"),
        Map(k, (tile[1],), ("k", 0), "seen.keys"), Map(v, (tile[1],), ("v", 0), "seen.keys"),
    ]  # fmt: skip
    if arriving is not None:
        overlaps = arriving.overlaps
        arriving.set_barrier(params.arrival_barrier, first_arriving(k.shape[0]))
        maps += arriving.maps(tile[1])
    stored = out if out.dtype == q.dtype else q  # fp32 output is not stored by TMA and needs no map
    maps.append(Map(stored, (16 // packed, packed), ("out", 0)))
    numbers = of_rows("rows", captured, waits=arriving is not None)
    attention = Step(
        kernel.load(q.device), "rows.grid", params, maps=maps, fields=fields, numbers=numbers, overlaps=overlaps
    )
    return [attention] if arriving is None else [arriving.step, attention]
