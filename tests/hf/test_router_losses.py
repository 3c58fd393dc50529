"""Router losses of experts on two ranks: the value and the gradients of one."""

import copy
import functools
import types

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import MixtralConfig

from megatron_magi.hf import context_parallel, shard_batch
from megatron_magi.hf.router_losses import wrap_balance
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import CONFIGS, EXPERTS, SIZES, make_model, packed_batch, padded_batch
from tests.refusals import error_of

pytestmark = pytest.mark.ranks(2)

COEFFICIENT = {"output_router_logits": True, "router_aux_loss_coef": 1.5}
"""So large that the loss is to a good part that of routers."""


def with_router_loss(config, **more):
    config = copy.deepcopy(config)
    for name, value in {**COEFFICIENT, **more}.items():
        setattr(config, name, value)
    return config


NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}
MODELS = {
    "Qwen3-MoE": with_router_loss(CONFIGS["qwen3_moe"]),
    "GPT-OSS": with_router_loss(CONFIGS["gpt_oss"]),
    "Mixtral": MixtralConfig(**SIZES, **EXPERTS, **COEFFICIENT, num_local_experts=4, sliding_window=7, **NO_TOKENS),
}


def unequal_batch():
    """Rows of which few have labels, and padding that is not even over ranks."""
    batch = padded_batch(seed=5)
    batch["attention_mask"][1, 6:] = 0
    batch["labels"][:, 9:] = -100
    batch["labels"][1, 6:] = -100
    return batch


BATCHES = {"packed": packed_batch, "padded": padded_batch, "unequal": unequal_batch}
CASES = [(name, "packed") for name in MODELS] + [("Qwen3-MoE", "padded"), ("Mixtral", "unequal")]
WAYS = ("fsdp", "recompute", "compiled", "sharded before", "number of tokens")


def losses_and_gradients(model, batch):
    output = model(**batch, use_cache=False)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), output.aux_loss.detach(), gradients


def prepared(name, way, mesh):
    """A model over the ranks of ``mesh``."""
    model = make_model(MODELS[name])
    if way == "sharded before":
        return model
    context_parallel(model, mesh)
    if way == "fsdp":
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh)
    if way == "recompute":
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if way == "compiled":
        model.compile(backend="eager")
    return model


def both(name, kind, mesh, way=None):
    """Differences between two ranks and one of the loss, the routers' part of it, and relative ones of gradients."""
    batch = BATCHES[kind]()
    more = {"num_items_in_batch": 70} if way == "number of tokens" else {}
    one_rank = make_model(MODELS[name], "magi" if name == "GPT-OSS" else "eager")
    loss, aux, gradients = losses_and_gradients(one_rank, {**batch, **more})
    assert aux > 0.5
    model = prepared(name, way, mesh)
    batch = shard_batch(batch, mesh, model.config)[0] if way == "sharded before" else batch
    own_loss, own_aux, own = losses_and_gradients(model, {**batch, **more})
    if way == "sharded before":
        dist.all_reduce(own_loss)
        own_loss /= mesh.size()
    own_loss *= mesh.size() if more else 1  # as the Trainer does
    assert own.keys() == gradients.keys()
    for parameter_name, gradient in own.items():
        if way == "fsdp":
            own[parameter_name] = gradient.full_tensor()
            continue
        dist.all_reduce(gradient)
        gradient /= 1 if more else mesh.size()
    relative = [(own[x] - g).abs().max().item() / (1e-2 + g.abs().max().item()) for x, g in gradients.items()]
    return abs(own_loss - loss).item(), abs(own_aux - aux).item(), max(relative)


def own_balance(*_args):
    return torch.zeros(())


def by_own_code(mesh):
    """A model with a router loss that no function known here has computed."""
    model = make_model(MODELS["Mixtral"])
    plain = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, **kwargs):
        output = plain(**{**kwargs, "output_router_logits": False})
        output.aux_loss = own_balance()
        return output

    model.forward = types.MethodType(forward, model)
    return context_parallel(model, mesh)


def refusals(rank, mesh):
    batch, qwen = packed_batch(), MODELS["Qwen3-MoE"]
    llama4 = with_router_loss(CONFIGS["llama4"])
    unlike = context_parallel(make_model(qwen), mesh)
    return {
        "output_router_logits: Llama4ForCausalLM": error_of(context_parallel(make_model(llama4), mesh), **batch),
        "output_router_logits: the model has": error_of(by_own_code(mesh), **batch),
        "return_dict": error_of(context_parallel(make_model(qwen), mesh), **batch, return_dict=False),
        "output_router_logits: ranks disagree": error_of(unlike, **batch, output_router_logits=rank == 0),
    }


def whole_router_logits(mesh):
    """Differences to one rank of router logits without a gradient, and whether a look at their shapes sends them."""
    batch, found = padded_batch(), []
    expected = make_model(MODELS["Qwen3-MoE"])(**batch, use_cache=False).router_logits
    model = context_parallel(make_model(MODELS["Qwen3-MoE"]), mesh)
    with torch.no_grad():
        logits = model(**batch).router_logits
    assert len(logits) == len(expected)
    for one, other in zip(logits, expected, strict=True):
        is_sent = one.shape != other.shape or one._rows.whole is not None
        found.append(((one.clone() - other)[batch["attention_mask"].bool().flatten()].abs().max().item(), is_sent))
    return found


def on_two_ranks(rank, num_ranks):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))["cp"]
    out = {case: both(*case, mesh) for case in CASES}
    out |= {way: both("Qwen3-MoE", "padded", mesh, way) for way in WAYS}
    out["whole"] = whole_router_logits(mesh)
    out["refusals"] = refusals(rank, mesh)
    return out


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("case", [*CASES, *WAYS], ids=str)
def test_router_losses_and_their_gradients_are_those_of_one_rank(results, case):
    for loss, aux, gradient in (result[case] for result in results):
        assert loss < 1e-5
        assert aux < 1e-5
        assert gradient < 1e-4


def test_router_logits_without_a_gradient_are_the_batchs_and_are_sent_when_used(results):
    for difference, is_sent in (one for result in results for one in result["whole"]):
        assert difference < 1e-5
        assert not is_sent


def test_what_is_not_known_is_refused_by_name(results):
    for result in results:
        for name, message in result["refusals"].items():
            assert message is not None and name in message, (name, message)


def test_another_definition_is_not_taken_for_the_known_one():
    space = {"load_balancing_loss_func": own_balance}
    forward = types.FunctionType((lambda self: None).__code__, space)
    layer = type("Layer", (torch.nn.Module,), {"forward": forward})()
    assert not wrap_balance([layer]) and not wrap_balance([layer])
    assert space["load_balancing_loss_func"]() == 0
    local, _ = shard_batch(packed_batch(), None, make_model("llama").config)
    with pytest.raises(ValueError, match=r"^output_router_logits: .* has a router loss of its own"):
        space["load_balancing_loss_func"](local["attention_mask"])
    assert wrap_balance([make_model(MODELS["Mixtral"])])
