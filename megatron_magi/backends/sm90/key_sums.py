"""Sums of the gradients of single keys on Hopper GPUs without additions in memory.

A kernel stores what each query gives to each key of its list, in 16 bits. Another one adds this key by key in fp32, by
lists of the places where a key is named, whose order can be fixed. Queries are processed in parts, so that what is
stored has bounded memory; sums wait between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_magi.backends.sm90 import sparse_kernels as kernels
from megatron_magi.backends.sm90 import tuning
from megatron_magi.backends.sm90.kernels import element
from megatron_magi.backends.sm90.kernels import params as params_of
from megatron_magi.backends.sm90.support import sm_count
from megatron_magi.cuda.launch import Launch, prepared
from megatron_magi.cuda.streams import current_stream
from megatron_magi.operands.sparse_pattern import num_blocks, sorted_into

_BLOCKS_OF_SM = 8  # of the kernel that turns lists
_WARPS_OF_BLOCK = 8  # of the kernel that adds
_LONG_ROW, _WARPS_OF_LONG_ROW = 256, 3  # elements of what a query gives up to which a key takes one warp there


@dataclass(frozen=True)
class Form:
    """Of what queries give to keys.

    Attributes:
        packs: tiles of a query, of all key heads.
        places: of a list: its length, rounded up to steps of a kernel.
        rows: queries of a part.
    """

    packs: int
    places: int
    rows: int


def form_of(gradients: Sequence[Tensor], entries: Tensor, packs: int, most_bytes: int) -> Form:
    """The form for arguments of `add_stored`; parts end with a wave of tiles."""
    (_, num_rows, width), device = entries.shape, entries.device
    columns, numbers = sum(x.shape[2] for x in gradients), sum(x.numel() for x in gradients)
    places = max(1, num_blocks(width, kernels.PIECE)) * kernels.PIECE
    most = max(most_bytes, tuning.GIVEN_OVER_SUMS * torch.float32.itemsize * numbers)
    rows = max(1, most // (gradients[0].element_size() * columns * places * packs))
    if rows >= num_rows:
        return Form(packs, places, num_rows)
    wave = sm_count(device)
    return Form(packs, places, max(rows * packs // wave * wave // packs, min(rows, wave)))


def query_rows(call: Any, first: int, past: int) -> dict[str, Tensor]:
    """Of the tensors of a backward that have a row for each query, by name, those of queries ``first`` to ``past``."""
    return {name: getattr(call, name)[first:past] for name in ("q", "dout", "lse", "delta", "dq")}


def storing_pays(device: torch.device, num_rows: int, num_keys: int, columns: int, width: int) -> bool:
    """Whether it is faster to store what queries with lists of ``width`` keys give to ``columns`` sums of each of the
    keys of a head than to add it at once.
    """
    return (
        torch.float32.itemsize * num_keys * columns > tuning.LEAST_STORED_SUM_BYTES
        and min(sm_count(device), num_rows) * width < tuning.MOST_STORED_ADDITIONS * num_keys
    )


def add_stored(
    gradients: Sequence[Tensor],
    entries: Tensor,
    packs: int,
    most_bytes: int,
    deterministic: bool,
    attend: Callable[[int, int, Tensor, Form], None],
) -> None:
    """Writes gradients of keys.

    Args:
        gradients: of values and of keys, or of latent keys, ``[num_keys, num_heads_kv, head_dim]``, fp16 or bf16,
            contiguous.
        entries: the lists, int32 ``[lists, num_rows, width]``, rows contiguous; lists: 1 or one for each key head.
        packs: tiles of a query, of all key heads.
        most_bytes: that are stored at a time, if `tuning.GIVEN_OVER_SUMS` does not allow more.
        deterministic: what is given to a key is added in the order of the queries and their lists.
        attend: stores what queries give: the first one, past the last one, memory ``[packs, queries, places, elements
            of all gradients]``, and the form.
    """
    first_one, num_rows = gradients[0], entries.shape[1]
    form, device, dtype = form_of(gradients, entries, packs, most_bytes), first_one.device, first_one.dtype
    columns = sum(x.shape[2] for x in gradients)
    given = torch.empty(form.packs * form.rows * form.places * columns, dtype=dtype, device=device)
    numbers = 0 if form.rows == num_rows else sum(x.numel() for x in gradients)
    sums = torch.empty(numbers, dtype=torch.float32, device=device)
    for first in range(0, num_rows, form.rows):
        past = min(num_rows, first + form.rows)
        part = entries[:, first:past]
        turned = (sorted_places if deterministic else _places)(part, first_one.shape[0], form)
        attend(first, past, given, form)
        _add(gradients, part, given, turned, sums, form, first > 0, past < num_rows)


def _places(entries: Tensor, num_keys: int, form: Form) -> tuple[Tensor, Tensor]:
    """For each key the places where lists ``[lists, rows, width]`` name it: ``row * form.places`` and the number in the
    list; in no order.

    Returns:
        ``(starts, places)``: int32 ``[lists * num_keys + 1]`` and ``[entries.numel()]``.
    """
    (num_lists, num_rows, width), device = entries.shape, entries.device
    stream = current_stream(device)
    ends = torch.zeros(num_lists * num_keys + 1, dtype=torch.int32, device=device)
    places = torch.empty(entries.numel(), dtype=torch.int32, device=device)

    def make(part: int) -> Launch:
        params = params_of("sparse_places")(
            head_step=entries.stride(0), list_step=entries.stride(1), width=width, list_places=form.places,
            num_lists=num_lists, num_rows=num_rows, num_keys=num_keys,
        )  # fmt: skip
        blocks = min(num_lists * num_rows, _BLOCKS_OF_SM * sm_count(device))
        return Launch(kernels.small_kernel(device, "sparse_places", (f"PART={part}",)), blocks, params)

    for part in range(2):
        key = ("sparse_places", part, device, entries.shape, entries.stride(), num_keys, form.places)
        launch = prepared(key, partial(make, part))
        with launch.lock:
            params = launch.params
            params.entries, params.ends, params.places = entries.data_ptr(), ends.data_ptr(), places.data_ptr()
            launch.fire(stream)
        if part == 0:
            ends = ends.cumsum(0, dtype=torch.int32)
    return ends, places


def sorted_places(entries: Tensor, num_keys: int, form: Form) -> tuple[Tensor, Tensor]:
    """As `_places`; those of a key ascend."""
    (num_lists, num_rows, width), device = entries.shape, entries.device
    first = num_keys * torch.arange(num_lists, device=device, dtype=torch.int32)
    keys = torch.where((entries >= 0) & (entries < num_keys), entries + first[:, None, None], num_lists * num_keys)
    order, starts = sorted_into(keys, num_lists * num_keys)
    order = order.int() % (num_rows * width)
    return starts.int(), order // width * form.places + order % width


def _add(
    gradients: Sequence[Tensor], entries: Tensor, given: Tensor, turned: tuple[Tensor, Tensor], sums: Tensor,
    form: Form, reads: bool, writes: bool,
) -> None:  # fmt: skip
    """Adds what queries gave to the sums, if it ``reads`` them; ``writes``: into them, else to the gradients."""
    dv, dk = gradients[0], gradients[-1]
    (num_keys, heads, dim), (num_lists, num_rows, _) = dk.shape, entries.shape
    assert all(x.is_contiguous() and x.shape == dk.shape for x in gradients)

    def make() -> Launch:
        params = params_of("sparse_sums")(
            dk_row=dk.stride(0), dk_head=dk.stride(1), dv_row=dv.stride(0), dv_head=dv.stride(1),
            num_keys=num_keys, heads_kv=heads, list_heads=num_lists, packs=form.packs // heads,
            pack_places=num_rows * form.places, reads_sums=reads, writes_sums=writes,
        )  # fmt: skip
        defines = f"HEAD_DIM={dim}", f"GRADIENTS={len(gradients)}", element(dk.dtype)
        warps = num_keys * heads * (_WARPS_OF_LONG_ROW if len(gradients) * dim > _LONG_ROW else 1)
        kernel = kernels.small_kernel(dk.device, "sparse_sums", defines)
        return Launch(kernel, num_blocks(warps, _WARPS_OF_BLOCK), params)

    key = "sparse_sums", dk.device, dk.dtype, dk.shape, len(gradients), num_lists, form, num_rows, reads, writes
    launch = prepared(key, make)
    with launch.lock:
        params = launch.params
        params.given, (params.starts, params.places) = given.data_ptr(), (t.data_ptr() for t in turned)
        params.sums, params.dk, params.dv = sums.data_ptr(), dk.data_ptr(), dv.data_ptr()
        launch.fire(current_stream(dk.device))
