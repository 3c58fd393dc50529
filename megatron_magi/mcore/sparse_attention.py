"""DeepSeek's sparse attention (DSA) in Megatron: an indexer chooses keys for each query, attention takes its lists.

Keys of all ranks are gathered, those of the indexer and those of the attention, once each: together the lists of a
rank's queries name almost all of them, and the indexer's loss needs all. Tokens may lie anywhere, as lists number the
keys of the whole sequence. Memory for scores is bounded (`indexer`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant.dsa import (
    DSAIndexerLossAutoScaler,
    DSAIndexerLossLoggingHelper,
    DSAttention,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_magi.api.finite import check_finite, with_finite_gradient
from megatron_magi.api.functions import runtime_of, undispatch
from megatron_magi.api.key import DistAttnRuntimeKey
from megatron_magi.attention.call_signature import verifies
from megatron_magi.comm.agreement import told
from megatron_magi.mcore import hybrid_pattern
from megatron_magi.mcore.carrier import MagiSeqParams, ShardLayout, carrier_of
from megatron_magi.mcore.indexer import Scores, Target, best_keys, indexer_loss
from megatron_magi.mcore.rotary import select_positions
from megatron_magi.ops.latent_attention import latent_sparse_attention
from megatron_magi.ops.sparse_attention import index_sparse_attention
from megatron_magi.runtime.no_compile import outside_graphs

_IMPL = {"auto": "auto", "reference": "reference", "torch": "reference", "triton": "triton"}
"""Of attention, and what computes lists of keys then."""


class MagiDSAttention(DSAttention):
    """`DSAttention` whose lists of keys this package's sparse attention takes.

    Same constructor, parameters and checkpoint keys. Where the loss of the indexer is asked for
    (``dsa_indexer_loss_coeff``), its gradient is that of the mean over the tokens of all context-parallel ranks; in
    stock Megatron without ``calculate_per_token_loss`` it grows with their number.

    Raises:
        ValueError: the configuration asks for something that is not supported.
    """

    def __init__(
        self, config: TransformerConfig, submodules: Any, layer_number: int, attn_mask_type: AttnMaskType,
        attention_type: str, attention_dropout: float | None = None, softmax_scale: float | None = None,
        k_channels: int | None = None, v_channels: int | None = None, cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:  # fmt: skip
        hybrid_pattern.check_sparse_options(config)
        if attention_dropout or config.attention_dropout:
            raise ValueError(f"attention_dropout: must be 0, got {attention_dropout or config.attention_dropout}")
        if attention_type != "self" or attn_mask_type != AttnMaskType.causal:
            raise ValueError(f"attention_type, attn_mask_type: expected causal self-attention, got {attn_mask_type}")
        super().__init__(
            config, submodules, layer_number, attn_mask_type, attention_type, softmax_scale=softmax_scale,
            k_channels=k_channels, v_channels=v_channels, cp_comm_type="allgather", pg_collection=pg_collection,
        )  # fmt: skip
        self.tp_group, self.cp_group = self.pg_collection.tp, self.pg_collection.cp
        self._rotary = None if self.indexer is None else _IndexerRotary(self.indexer)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor | None, attention_mask: Tensor | None, x: Tensor, qr: Tensor,
        position_ids: Tensor | None = None, attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None, packed_seq_params: Any = None, up_v_weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attends this rank's queries to the keys that the indexer chooses among those of all ranks.

        Args:
            query: ``[num_rows, num_heads, head_dim]``, or with a batch dimension of 1 after the first.
            key: likewise, of one head (absorbed) or all.
            value: likewise; None where it is the first ``kv_lora_rank`` channels of the key.
            attention_mask, position_ids, attn_mask_type: unused, the plan says it.
            x: hidden states, ``[seqlen, 1, hidden_size]``; with sequence parallelism a part of them.
            qr: what queries are made of, ``[seqlen, 1, q_lora_rank]``, or without the dimension of 1; likewise.
            attention_bias: must be None.
            packed_seq_params: the `MagiSeqParams` of the microbatch.
            up_v_weight: ``[num_heads, v_head_dim, kv_lora_rank]``, from absorbed values to those of heads.

        Returns:
            ``[seqlen, 1, num_heads * v_head_dim]``.

        Raises:
            ValueError: there is a bias or no plan, or several sequences.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias: not supported, got a tensor")
        params = carrier_of(packed_seq_params, type(self).__name__)
        if params.layout.batch_size > 1:
            raise ValueError(
                f"micro_batch_size: absorbed latent attention takes one sequence, got {params.layout.batch_size}"
            )
        q, k, v = (None if t is None else t.reshape(t.shape[0], *t.shape[-2:]) for t in (query, key, value))
        k, v = (None if t is None else self._whole_rows(t, q) for t in (k, v))
        dispatch_key = params.plans.key_of(self.cp_group)
        if dispatch_key.config.attend.sanity_check:
            _check_rows(dispatch_key, q, k, v)
        whole = _gathered(k, dispatch_key)
        lists, loss = self._lists(q, whole.detach(), x.detach(), qr.detach(), params, dispatch_key)
        out = self._attend(q, whole, None if v is None else _gathered(v, dispatch_key), lists, dispatch_key)
        if dispatch_key.config.attend.sanity_check:
            out = _with_finite_gradient(out, dispatch_key)
        if up_v_weight is not None:
            out = torch.einsum("rhc,hdc->rhd", out, up_v_weight.to(out.dtype))
        out = params.layout.from_rows(out.flatten(1))
        return out if loss is None else DSAIndexerLossAutoScaler.apply(out, loss)

    def _whole_rows(self, keys: Tensor, q: Tensor) -> Tensor:
        """Of all tensor-parallel ranks, where each has the keys of a part of the rows."""
        if keys.shape[0] == q.shape[0]:
            return keys
        return gather_from_sequence_parallel_region(keys, group=self.tp_group)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor | None, lists: Tensor, key: DistAttnRuntimeKey) -> Tensor:
        """``[num_rows, num_heads, head_dim_v]``, 0 on padding. Keys and values are those of all tokens."""
        attend = key.config.attend
        if attend.impl not in _IMPL:
            raise ValueError(f"impl: {attend.impl} is not offered for lists of latent keys; give {', '.join(_IMPL)}")
        options = {
            "softmax_scale": self.softmax_scale,
            "deterministic": attend.deterministic,
            "impl": _IMPL[attend.impl],
        }
        num_tokens, lists = lists.shape[0], lists[:, None]
        if v is None:
            out, _ = latent_sparse_attention(q[:num_tokens], k, lists, dim_v=self.config.kv_lora_rank, **options)
        else:
            out, _ = index_sparse_attention(q[:num_tokens], k, v, lists, **options)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, q.shape[0] - num_tokens))

    def _lists(
        self, q: Tensor, k: Tensor, x: Tensor, qr: Tensor, params: MagiSeqParams, key: DistAttnRuntimeKey
    ) -> tuple[Tensor, Tensor | None]:
        """Lists of keys of this rank's tokens, int32 ``[num_tokens, topk]``, and the indexer's loss if it is trained.

        ``k``: keys of all tokens, without gradients.
        """
        chosen = params.plans.chosen_keys
        if self.skip_topk:
            if self.source_layer not in chosen:
                raise ValueError(
                    f"dsa_indexer_topk_freq: layer {self.layer_number} takes the keys of layer {self.source_layer}, "
                    "which is not before it on this pipeline stage"
                )
            return chosen[self.source_layer], None
        coefficient = self.config.dsa_indexer_loss_coeff or 0.0
        has_loss = self.training and torch.is_grad_enabled() and coefficient > 0
        with torch.set_grad_enabled(has_loss):
            scores = self._scores(x, qr, params, key)
        lists = best_keys(scores, self.index_topk)
        if self.index_share:
            chosen[self.layer_number] = lists
        return lists, self._loss(scores, q, k, lists, coefficient) if has_loss else None

    def _scores(self, x: Tensor, qr: Tensor, params: MagiSeqParams, key: DistAttnRuntimeKey) -> Scores:
        """The indexer's queries of this rank's tokens, without padding, and its keys of all ranks."""
        assert self._rotary is not None
        with self._rotary.of(params.layout):
            q, k, weights = self.indexer.forward_before_topk(x, qr, params)
        visible = params.plans.visible_keys(self.layer_number, k.device)
        num_tokens = visible.shape[-1]
        return Scores(
            q[:num_tokens, 0],
            weights[:num_tokens, 0],
            _gathered(k[:, 0], key),
            visible,
            relu=getattr(self.config, "dsa_indexer_scoring_relu", True),
        )

    def _loss(self, scores: Scores, q: Tensor, k: Tensor, lists: Tensor, coefficient: float) -> Tensor:
        """The part of this rank's tokens in the indexer's loss, told to Megatron's log."""
        target = Target(
            q.detach()[: lists.shape[0]],
            k,
            self.softmax_scale,
            self.tp_group,
            lists if self.config.dsa_indexer_use_sparse_loss else None,
        )
        loss = indexer_loss(scores, target) * coefficient
        if not self.config.calculate_per_token_loss:
            loss = loss / scores.k.shape[0]
        DSAIndexerLossLoggingHelper.save_loss_to_tracker(
            loss,
            self.layer_number,
            self.config.num_layers,
            reduce_group=self.cp_group if self.cp_group.size() > 1 else None,
        )
        return loss


@outside_graphs
def _check_rows(key: DistAttnRuntimeKey, q: Tensor, k: Tensor, v: Tensor | None) -> None:
    """Raises ValueError for rows that are not finite, and RuntimeError on the other context-parallel ranks."""
    runtime = runtime_of(key)
    with told(runtime.group, verifies(key.config)):
        check_finite(runtime, key.config, q=q, k=k, v=v)


@outside_graphs
def _with_finite_gradient(out: Tensor, key: DistAttnRuntimeKey) -> Tensor:
    return with_finite_gradient(out, runtime_of(key), key.config)


def _gathered(rows: Tensor, key: DistAttnRuntimeKey) -> Tensor:
    """Of all tokens, in the order of the sequence; gradients are summed over the ranks."""
    if _is_whole(key):
        return rows[: key.layout.total_seqlen]
    return undispatch(rows, key, is_partial_grad=True)


def _is_whole(key: DistAttnRuntimeKey) -> bool:
    """One rank has all tokens, in their order."""
    return key.layout.cp_size == 1 and len(key.layout.ranges[0]) <= 1


class _IndexerRotary:
    """The rotary embedding inside an indexer: looks up the positions of the microbatch at hand."""

    def __init__(self, indexer: nn.Module) -> None:
        self._whole = indexer.rotary_pos_emb.forward
        self._layout: ShardLayout | None = None
        indexer.rotary_pos_emb.forward = self

    def of(self, layout: ShardLayout) -> _IndexerRotary:
        """A context in which angles are those of a shard."""
        self._layout = layout
        return self

    def __enter__(self) -> None:
        assert self._layout is not None

    def __exit__(self, *_error: object) -> None:
        self._layout = None

    def __call__(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group: Any = None) -> Any:
        assert self._layout is not None, "called outside of the layer's forward"
        out = self._whole(max_seq_len, offset, packed_seq=True)
        if isinstance(out, tuple):
            return select_positions(out[0], self._layout), *out[1:]
        return select_positions(out, self._layout)
