"""verl's Megatron engine with rollouts as trees: losses and gradients of rollouts one by one, by a fake of verl."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_magi
from megatron_magi import cpu_device
from megatron_magi.testing.spawn import run_ranks
from tests.examples import verl_stand_in

pytestmark = pytest.mark.ranks(2)

FOLDER = Path(megatron_magi.__file__).parents[1] / "examples" / "verl"
VOCABULARY, TEMPERATURE = 61, 0.7


def engine_class(name, backend, device, gpt_model=None):
    """The engine of an example, as verl finds it in its registry."""
    verl_stand_in.install(gpt_model)
    sys.path.insert(0, str(FOLDER))
    made = importlib.import_module(name)
    found = verl_stand_in.EngineRegistry._engines["language_model"][backend][device]
    assert found.__module__ == made.__name__
    return found


def microbatches():
    """Microbatches of one and of two prompts, three answers each, one of two single tokens, and weights of losses."""
    draw, made = torch.Generator().manual_seed(0), []
    for num_prompts in (1, 2, 0):
        prompts = torch.randint(0, VOCABULARY, (num_prompts, 9), generator=draw)
        answers = [torch.randint(0, VOCABULARY, (n,), generator=draw) for n in (3, 7, 5)]
        samples = [torch.cat([prompt, answer]) for prompt in prompts for answer in answers]
        samples = samples or [torch.tensor([3]), torch.tensor([4])]
        weights = [torch.randn(len(sample), generator=draw) for sample in samples]
        for own in weights:
            own[-1] = 0  # nothing follows the last token
        jagged = torch.nested.as_nested_tensor(samples, layout=torch.jagged)
        positions = torch.nested.as_nested_tensor([torch.arange(len(s)) for s in samples], layout=torch.jagged)
        batch = {"input_ids": jagged, "position_ids": positions, "temperature": TEMPERATURE, "calculate_entropy": True}
        made.append(verl_stand_in.Microbatch(batch, weights=weights))
    return made


def loss_of(log_probs, entropy, weights):
    """No linear function of log-probabilities, as in policy gradients with a clipped ratio."""
    return sum((w * (own.exp() + 0.1 * e)).sum() for w, own, e in zip(weights, log_probs, entropy, strict=True))


def verl_loss(model_output, data, dp_group=None):
    log_probs, entropy = model_output["log_probs"], model_output["entropy"]
    assert torch.equal(log_probs.offsets(), data["input_ids"].offsets())
    return loss_of(log_probs.unbind(), entropy.unbind(), data["weights"]), {"size": len(data["weights"])}


def one_by_one(logits_of, batches):
    """Losses of microbatches, from a forward for each sample; ``logits_of(tokens)`` ``[length, vocabulary]``."""
    losses = []
    for batch in batches:
        log_probs, entropy = [], []
        for sample in batch["input_ids"].unbind():
            logits = logits_of(sample[:-1]) if len(sample) > 1 else torch.zeros(0, VOCABULARY)
            of_token = torch.log_softmax(logits / TEMPERATURE, dim=-1)
            own = of_token.gather(1, sample[1:, None])[:, 0], -(of_token.exp() * of_token).sum(-1)
            for whole, part in zip((log_probs, entropy), own, strict=True):
                whole.append(torch.nn.functional.pad(part, (0, 1)))
        losses.append(loss_of(log_probs, entropy, batch["weights"]))
    return losses


def record_rows(model):
    """The list to which each forward adds its number of rows."""
    rows = []
    model.register_forward_pre_hook(
        lambda _model, _x, named: rows.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    return rows


def check_rows(rows, num_ranks):
    """On all ranks together there is one row for what is the same in several samples; shards may be padded. Samples of
    one token each have no row, and one is computed for nothing.
    """
    samples = [[sample.tolist() for sample in batch["input_ids"].unbind()] for batch in microbatches()]
    whole = [len({tuple(s[:n]) for s in own for n in range(2, len(s) + 1)}) for own in samples]
    assert all(n < 0.7 * sum(len(s) - 1 for s in own) for n, own in zip(whole, samples, strict=True) if n)
    whole = [max(n, 1) for n in whole]
    total = torch.tensor(rows)
    if num_ranks > 1:
        dist.all_reduce(total)
    assert all(n <= found < n + 2 * num_ranks for n, found in zip(whole, total.tolist(), strict=True)), total
    assert num_ranks > 1 or rows == whole


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(ours, expected):
    assert ours.keys() == expected.keys()
    return max(((ours[n] - expected[n]).abs().max() / (1 + expected[n].abs().max())).item() for n in expected)


def build_gpt(model_class):
    """A small GPT of Megatron with random weights."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        normalization="RMSNorm",
        context_parallel_size=dist.get_world_size(),
    )
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    model = model_class(config, spec, VOCABULARY, 64, position_embedding_type="rope", parallel_output=True)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=draw))
    return model


def start_megatron():
    """One rank a sequence or all, on the CPU."""
    cpu_device.install()  # before Megatron is imported
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        context_parallel_size=dist.get_world_size(), create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)


def stock_megatron(_rank, _num_ranks):
    """Losses and gradients of stock Megatron, sample by sample."""
    start_megatron()
    from megatron.core.models.gpt.gpt_model import GPTModel

    model = build_gpt(GPTModel)

    def logits_of(tokens):
        hidden = torch.ones(1, 1, len(tokens), len(tokens), dtype=torch.bool).triu(1)
        return model(tokens[None], torch.arange(len(tokens))[None], hidden)[0]

    losses = one_by_one(logits_of, microbatches())
    sum(losses).backward()
    return [loss.item() for loss in losses], gradients(model)


def refuse():
    """What rollouts as trees cannot have raises an error that names it."""
    from rollout_trees import temperature_of, tree_of

    refused = {"use_remove_padding": False, "use_fused_kernels": True, "calculate_sum_pi_squared": True}
    refused |= {"distillation_use_topk": True, "distillation_only": True, "multi_modal_inputs": [{}]}
    refused["input_ids"] = torch.zeros(0, 4, dtype=torch.int64)
    for name, value in refused.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            tree_of(verl_stand_in.Microbatch(microbatches()[0], **{name: value}))
    with pytest.raises(ValueError, match=r"^temperature: "):
        temperature_of({"temperature": torch.tensor([0.5, 0.7, 0.7])})


def with_megatron(_rank, num_ranks):
    """Losses and gradients of the engine over all ranks."""
    start_megatron()
    from megatron.core.models.gpt.gpt_model import GPTModel

    engine = engine_class("megatron_engine", "megatron", "cuda", GPTModel)(build_gpt)
    engine.initialize()
    assert sys.modules["mbridge.core.llm_bridge"].GPTModel is GPTModel
    model = engine.module[0]
    rows = record_rows(model)
    outputs = engine.forward_backward_batch(microbatches(), verl_loss)
    check_rows(rows, num_ranks)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= num_ranks
    refuse()
    stock = type(engine)(lambda _class: torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"^model: Linear was not built by"):
        stock.initialize()
    return [o["loss"] for o in outputs], gradients(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks stand for GPUs by their CPUs, which real ones forbid")
def test_the_megatron_engine_computes_shared_prompts_once_and_each_rank_its_part():
    ((expected, expected_gradients),) = run_ranks(stock_megatron, 1)
    for losses, own in run_ranks(with_megatron, 2):
        assert losses == pytest.approx(expected, abs=1e-4)
        assert difference(own, expected_gradients) < 1e-5
