"""verl's engines as far as an engine of one's own sees them: names, arguments, and the order of calls.

As in verl 0.9.1: `EngineRegistry`, `MegatronEngineWithLMHead`, microbatches that
are dictionaries of jagged tensors, losses that are called with ``model_output``, ``data`` and ``dp_group``.
"""

import sys
from types import ModuleType
from typing import ClassVar

import torch


class Microbatch(dict):
    """Stands for a TensorDict."""

    def to(self, _device):
        return self


class EngineRegistry:
    _engines: ClassVar = {}

    @classmethod
    def register(cls, model_type, backend, device="cuda"):
        def decorator(engine_class):
            for name in backend if isinstance(backend, list) else [backend]:
                for kind in device if isinstance(device, list) else [device]:
                    cls._engines.setdefault(model_type, {}).setdefault(name, {}).setdefault(kind, engine_class)
            return engine_class

        return decorator


@EngineRegistry.register(model_type="language_model", backend="megatron")
class MegatronEngineWithLMHead:
    def __init__(self, build):
        self._build = build

    def initialize(self):
        """Builds models with the class that mbridge's module names."""
        self.module = [self._build(sys.modules["mbridge.core.llm_bridge"].GPTModel)]

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        from functools import partial

        from megatron.core.pipeline_parallel import get_forward_backward_func

        for micro_batch in data:
            micro_batch["num_micro_batch"] = len(data)
        own = {"forward_only": forward_only, "loss_function": loss_function}
        step = partial(
            self.forward_step,
            logits_processor_func=loss_function,
            postprocess_micro_batch_func=partial(self.postprocess_micro_batch_func, **own),
        )
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(data),
            model=self.module,
            num_microbatches=len(data),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def prepare_model_outputs(self, output, data):
        return {name: output[name] for name in ("log_probs", "entropy") if name in output}

    def postprocess_micro_batch_func(self, output, data, forward_only, loss_function):
        model_output = self.prepare_model_outputs(output, data)
        loss, metrics = torch.tensor(1.0), {}
        if loss_function is not None:
            loss, metrics = loss_function(model_output=model_output, data=data, dp_group=None)
        scaled = loss * data["num_micro_batch"]
        return scaled, {"model_output": model_output, "loss": loss.detach().item(), "metrics": metrics}


def vocab_parallel_log_probs_from_logits(logits, labels):
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    return -vocab_parallel_cross_entropy(vocab_parallel_logits=logits, target=labels)


def vocab_parallel_entropy(vocab_parallel_logits):
    """On one tensor-parallel rank."""
    return torch.distributions.Categorical(logits=vocab_parallel_logits).entropy()


def get_non_tensor_data(data, key, default):
    return data.get(key, default)


def install(gpt_model=None):
    """Puts the modules where verl's are; ``gpt_model``: the class that mbridge builds."""
    contents = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.tensordict_utils": {"get_non_tensor_data": get_non_tensor_data},
        "verl.utils.megatron": {},
        "verl.utils.megatron.tensor_parallel": {
            "vocab_parallel_log_probs_from_logits": vocab_parallel_log_probs_from_logits,
            "vocab_parallel_entropy": vocab_parallel_entropy,
        },
        "verl.workers": {},
        "verl.workers.engine": {
            "EngineRegistry": EngineRegistry,
            "MegatronEngineWithLMHead": MegatronEngineWithLMHead,
        },
        "mbridge": {},
        "mbridge.core": {},
        "mbridge.core.llm_bridge": {"GPTModel": gpt_model},
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__dict__.update(names)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
