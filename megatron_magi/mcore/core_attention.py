"""Core attention for Megatron's attention layers: executes the plan of the microbatch."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_magi.attention import distributed_attention
from megatron_magi.mcore.carrier import Window, carrier_of
from megatron_magi.runtime.upload import current_device

_EXTRA_STATE = "_extra_state"
_CAUSAL_TYPES = (AttnMaskType.causal, AttnMaskType.padding_causal)


def layer_window(config: TransformerConfig, layer_number: int) -> Window:
    """Window of a layer (1-based), or None for full attention."""
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return tuple(config.window_size)
    return None


class MagiCoreAttention(MegatronModule):
    """Attention over the tokens of all context-parallel ranks, as the microbatch's plan says.

    Takes the place of Megatron's local and TE core attention: same constructor, same call,
    same parameter and checkpoint key (``softmax_offset``).

    Args:
        config: Megatron's.
        layer_number: 1-based.
        attn_mask_type: causal or padding_causal; which tokens see which is the plan's matter.
        attention_type: ``self``.
        softmax_scale: ``1 / sqrt(head_dim)`` when None.
        cp_comm_type: unused, it names ways of communicating that this module has no need of.
        pg_collection: with the groups ``tp`` and ``cp``.
        k_channels, v_channels: head dimensions, given by MLA.

    Raises:
        ValueError: an argument asks for something that is not supported.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"attention_type: only self-attention can be dispatched, got {attention_type!r}")
        if attn_mask_type not in _CAUSAL_TYPES:
            raise ValueError(f"attn_mask_type: expected causal or padding_causal, got {attn_mask_type.name}")
        if config.attention_dropout:
            raise ValueError(f"attention_dropout: must be 0, got {config.attention_dropout}")
        for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
            if getattr(config, name):
                raise ValueError(f"{name}: attention is computed in 16 bits or more; leave it False")
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.layer_number = max(1, layer_number)
        self.tp_group = pg_collection.tp
        self.cp_group = pg_collection.cp
        self.window = layer_window(config, self.layer_number)
        head_dim = k_channels if k_channels is not None else config.kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(head_dim)
        self.num_heads = config.num_attention_heads // self.tp_group.size()
        self.wants_max_logits = bool(config.qk_clip or config.log_max_attention_logit)
        self.current_max_attn_logits: Tensor | None = None
        self._make_softmax_offset()

    def _make_softmax_offset(self) -> None:
        """Registers the logit of the sink, one a head: fixed at 0, learnt, or none."""
        config = self.config
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "vanilla":
            return
        device = torch.device("cpu") if config.use_cpu_initialization else current_device()
        if config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(self.num_heads, device=device, dtype=torch.float32)
            return
        if config.softmax_type != "learnable":
            raise ValueError(f"softmax_type: expected vanilla, off-by-one or learnable, got {config.softmax_type!r}")
        del self.softmax_offset
        offset = torch.nn.Parameter(torch.empty(self.num_heads, device=device, dtype=config.params_dtype))
        # Tensor-parallel ranks hold different heads: without these marks the gradient's norm
        # and its count of zeros would be those of rank 0 alone.
        offset.tensor_model_parallel = True
        offset.partition_dim = 0
        offset.partition_stride = 1
        self.register_parameter("softmax_offset", offset)
        if config.perform_initialization:
            self._init_softmax_offset(offset)

    def _init_softmax_offset(self, offset: torch.nn.Parameter) -> None:
        self.config.init_method(offset)

    def _sink(self, device: torch.device) -> Tensor | None:
        if self.softmax_offset is None:
            return None
        return self.softmax_offset.to(device=device, dtype=torch.float32).unsqueeze(0)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
    ) -> Tensor:
        """Attends this rank's queries to the keys of all ranks.

        Args:
            query: ``[seqlen, batch_size, num_heads, head_dim]``, or without the batch dimension (MLA).
            key: like ``query``, with the heads of keys and values.
            value: likewise; its head dimension may differ.
            attention_mask, attn_mask_type: unused, the plan says it.
            attention_bias: must be None.
            packed_seq_params: the `MagiSeqParams` of the microbatch.

        Returns:
            ``[seqlen, batch_size, num_heads * head_dim_v]``.

        Raises:
            ValueError: there is a bias, or no plan.
        """
        if attention_bias is not None:
            raise ValueError("attention_bias: not supported, got a tensor")
        params = carrier_of(packed_seq_params, type(self).__name__)
        layout = params.layout
        q, k, v = (x if x.dim() == 3 else layout.to_rows(x) for x in (query, key, value))
        k, v = (_apart(x, q) for x in (k, v))
        # Megatron clips weights by what it finds after a step, which an evaluation before it has no part in.
        wants_max_logits = self.wants_max_logits and self.training
        out, meta = distributed_attention(
            q,
            k,
            v,
            params.plans.for_layer(self.layer_number, self.window),
            self.cp_group,
            config=params.plans.config,
            sink=self._sink(q.device),
            softmax_scale=self.softmax_scale,
            return_max_logits=wants_max_logits,
        )
        if wants_max_logits:
            self._keep_max_logits(meta.max_logits)
        return layout.from_rows(out.flatten(1))

    def _keep_max_logits(self, max_logits: Tensor) -> None:
        """Maximum in training since Megatron last cleared it, over this rank's queries; it reduces it over ranks."""
        max_logits = max_logits.detach()
        if self.current_max_attn_logits is not None:
            max_logits = torch.maximum(self.current_max_attn_logits, max_logits)
        self.current_max_attn_logits = max_logits

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The learnt sink under the key that local and TE attention use; nothing otherwise."""
        learnable = self.config.softmax_type == "learnable"
        return make_sharded_tensors_for_checkpoint(
            self._checkpointed_state() if learnable else {},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )

    def _checkpointed_state(self) -> dict:
        return self.state_dict(prefix="", keep_vars=True)


class MagiTECoreAttention(MagiCoreAttention):
    """`MagiCoreAttention` in the place of Transformer Engine's: what is drawn and saved is as there.

    TE's learnt sinks start from 0, without a draw that would change other weights. TE's attention saves
    an ``_extra_state`` next to its sinks (empty, unless attention itself is in FP8) and asks for it when a
    checkpoint is loaded, so one is saved here too, and what is loaded is dropped.
    """

    def _init_softmax_offset(self, offset: torch.nn.Parameter) -> None:
        torch.nn.init.zeros_(offset)

    def _checkpointed_state(self) -> dict:
        return {**super()._checkpointed_state(), _EXTRA_STATE: torch.empty(0, dtype=torch.uint8, device="cpu")}

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + _EXTRA_STATE, None)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _apart(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values as the backward is to keep them: a view would keep the whole output of the layer's first product
    with it. Where ``q`` is a view of that too it is kept anyway, and a copy would come on top.
    """
    return x if x.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() else x.contiguous()
