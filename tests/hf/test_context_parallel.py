"""Models of transformers on two ranks: the losses and gradients of one."""

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
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    BartConfig,
    EsmConfig,
    EsmModel,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    RobertaConfig,
)
from transformers.modeling_outputs import CausalLMOutput

from megatron_magi.config import CommConfig, MagiConfig
from megatron_magi.hf import context_parallel, log_probs, parallel, shard_batch
from megatron_magi.mask import builders
from megatron_magi.packing import make_prefix_tree
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import CONFIGS, ON_CPUS, VOCABULARY, loss_and_gradients, make_model, packed_batch, padded_batch
from tests.refusals import refusal

pytestmark = pytest.mark.ranks(2)

EAGER = {"gpt_oss": "magi", "llama4": "magi"}
"""Models that do not look at packed positions everywhere are compared with this attention on one rank."""


def cu_seq_lens_batch():
    """Packed by cumulative lengths alone."""
    batch = packed_batch((9, 30, 13))
    bounds = torch.tensor([0, 9, 39, 52], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 30, "max_length_k": 30}
    return {**batch, **lengths, "position_ids": torch.arange(52)[None]}


def tree_batch():
    """Two samples with a prefix in common."""
    batch = packed_batch((40,))
    positions = torch.cat([torch.arange(29), torch.arange(20, 31)])[None]
    return {**batch, "position_ids": positions, "magi_mask": builders.prefix_tree([20, 9, 11], [[0, 1], [0, 2]])[0]}


BATCHES = {"packed": packed_batch, "padded": padded_batch, "lengths": cu_seq_lens_batch, "tree": tree_batch}
CASES = [(name, "packed") for name in CONFIGS] + [("gemma3", "padded"), ("llama4", "padded")]
CASES += [(name, kind) for name in ON_CPUS for kind in ("packed", "padded")]
CASES += [("llama", "lengths"), ("llama4", "lengths"), ("gpt_oss", "lengths"), ("llama", "tree")]


def difference(one, other):
    return max((one[name] - other[name]).abs().max().item() / (1 + other[name].abs().max().item()) for name in other)


def both(name, kind, mesh, fsdp=False, recompute=False, compiled=False):
    """Relative differences of loss and gradients between two ranks and one, and what was compared."""
    make_batch = BATCHES[kind]
    one_rank = EAGER.get(name, "eager") if kind in ("packed", "padded") else "magi"
    expected_loss, expected = loss_and_gradients(make_model(name, one_rank), make_batch())
    model = context_parallel(make_model(name), mesh)
    assert context_parallel(model, mesh) is model
    if recompute:
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        model.compile(backend="eager")
    if fsdp:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    loss, gradients = loss_and_gradients(model, make_batch())
    for gradient_name, gradient in list(gradients.items()):
        if fsdp:
            gradients[gradient_name] = gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
            gradient /= mesh.size()
    assert gradients.keys() == expected.keys()
    return abs(loss.item() - expected_loss.item()), difference(gradients, expected)


class OwnForCausalLM(LlamaPreTrainedModel):
    """A model with a loss of its own, as remote code has it."""

    def __init__(self, config):
        super().__init__(config)
        self.model, self.lm_head = LlamaModel(config), torch.nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids=None, position_ids=None, labels=None, **kwargs):
        logits = self.lm_head(self.model(input_ids, position_ids=position_ids, **kwargs).last_hidden_state)
        return CausalLMOutput(torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:]), logits)


def refusals(mesh):
    """Messages for what cannot be sharded."""
    model = context_parallel(make_model("llama"), mesh)
    batch = packed_batch()
    square = torch.ones(1, 1, 53, 53, dtype=torch.bool).tril()
    without_mask = context_parallel(make_model("llama"), mesh)
    first = without_mask.model.layers[0]
    first.register_forward_pre_hook(lambda _m, x, named: (x, {**named, "attention_mask": None}), with_kwargs=True)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    numbers = RobertaConfig(**sizes, intermediate_size=32, attention_probs_dropout_prob=0.0, is_decoder=True)
    sums = MagiConfig(comm=CommConfig(dsink_all_reduce="sum"))
    bart = BartConfig(vocab_size=64, d_model=32, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=32)
    esm = EsmConfig(**sizes, intermediate_size=32, token_dropout=True, pad_token_id=1, attn_implementation="magi")
    noisy = context_parallel(make_model("llama"), mesh)
    noisy.get_input_embeddings().neftune_noise_alpha = 5.0
    replaced = context_parallel(make_model("llama"), mesh)
    # As accelerate wraps a forward, here of another class.
    replaced.forward = torch.autocast("cpu", enabled=False)(types.MethodType(OwnForCausalLM.forward, replaced))
    activated = context_parallel(make_model("llama"), mesh)
    activated.peft_config = {"default": types.SimpleNamespace(alora_invocation_tokens=[3])}  # as PEFT sets it
    own_loss = OwnForCausalLM._from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation="magi")
    scored = context_parallel(with_log_probs(make_model("llama")), mesh)
    classes = AutoModelForSequenceClassification, AutoModelForQuestionAnswering
    heads = [c.from_config(copy.deepcopy(CONFIGS["llama"]), attn_implementation="magi") for c in classes]
    return {
        "labels: none were given": refusal(model.train(), batch["input_ids"]),
        "labels: OwnForCausalLM": refusal(context_parallel(own_loss, mesh), **batch),
        "labels: LlamaForCausalLM computes its loss": refusal(replaced, **batch),
        "alora_invocation_tokens": refusal(activated, **batch),
        "token_dropout": refusal(context_parallel, EsmModel(esm), mesh),
        "token_dropout: embeddings": refusal(shard_batch, batch, mesh, esm),
        "neftune_noise_alpha": refusal(noisy.train(), **batch),
        "model: LlamaForSequenceClassification": refusal(context_parallel, heads[0], mesh),
        "model: LlamaForQuestionAnswering": refusal(context_parallel, heads[1], mesh),
        "log_probs": refusal(lambda: scored(**batch).log_probs[:, -5:]),
        "log_probs: a": refusal(lambda: scored(**batch).log_probs.clone()[:, -5:]),  # as DDP does
        "position_ids": refusal(context_parallel(make_model(numbers), mesh), batch["input_ids"]),
        "model: BartForCausalLM": refusal(context_parallel, make_model(bart), mesh),
        "dsink_all_reduce": refusal(context_parallel(make_model("gpt_oss"), mesh, sums), **batch),
        "attention_mask": refusal(model, **{**batch, "attention_mask": square}),
        "attention_mask: expected 0 and 1, got numbers from 1 to 2": refusal(
            model, **{**batch, "attention_mask": 1 + torch.arange(53)[None] // 30}
        ),
        "attention_mask: a layer": refusal(without_mask, **batch),
        "logits_to_keep": refusal(model, **batch, logits_to_keep=1),
        "attn_implementation": refusal(context_parallel, make_model("llama", "sdpa"), mesh),
        "magi_mask": refusal(context_parallel(make_model("mistral"), mesh), **batch, magi_mask=builders.causal(53)),
        "dropout": refusal(context_parallel(with_dropout(), mesh).train(), **batch),
    }


def test_a_forward_of_the_class_is_not_taken_for_another_where_accelerate_wraps_it():
    class CallsForCausalLM(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            return super().forward(input_ids, labels=labels, **kwargs)

    model = CallsForCausalLM(copy.deepcopy(CONFIGS["llama"]))
    for forward, is_replaced in ((CallsForCausalLM.forward, False), (OwnForCausalLM.forward, True)):
        model.forward = torch.autocast("cpu", enabled=False)(types.MethodType(forward, model))
        assert parallel._is_replaced(model) is is_replaced


def as_tuple(mesh):
    """Loss and logits without names, and with them."""
    model = context_parallel(make_model("qwen3_moe"), mesh)
    batch = packed_batch()
    named = model(**batch)
    loss, logits, *_ = model(**batch, return_dict=False)
    with torch.no_grad():
        without_labels = model(batch["input_ids"], position_ids=batch["position_ids"], return_dict=False)
        whole = model(**batch).logits
    assert type(without_labels) is tuple
    pairs = (loss, named.loss), (logits, named.logits), (without_labels[0], whole)
    return [torch.equal(x, y) for x, y in pairs]


def with_log_probs(model):
    """The model with numbers of each next token in its output, as TRL's trainers make it, and one that TRL has not."""
    plain = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, labels, shift_labels=None, **kwargs):
        if shift_labels is not None:
            kwargs["shift_labels"] = shift_labels
        output = plain(*args, labels=labels, **kwargs)
        logits, own = (
            (output.logits, shift_labels) if shift_labels is not None else (output.logits[:, :-1], labels[:, 1:])
        )
        output["log_probs"] = -torch.nn.functional.cross_entropy(logits.mT, own, reduction="none")
        output["entropy"] = torch.distributions.Categorical(logits=logits).entropy().masked_fill(own == -100, 0)
        output["is_top1"], output["label_mask"] = logits.argmax(-1) == own, own != -100
        output["unknown"] = logits.detach().sum(-1)
        return output

    model.forward = types.MethodType(forward, model)
    return model


def numbers_of_tokens(mesh):
    """Differences to one rank: of log-probabilities without gradients, of their sum, and of the gradients of that."""
    batch, found = padded_batch(), []
    for ranks in (None, mesh):
        model = with_log_probs(make_model("llama"))
        if ranks is not None:
            context_parallel(model, ranks)
        with torch.no_grad():
            each = model(**batch, use_cache=False).log_probs
        output = model(**batch, use_cache=False)
        metrics = torch.stack([x.detach().sum() for x in (output.entropy.float(), output.is_top1, output.label_mask)])
        total = output.log_probs.sum()
        total.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        total = total.detach().clone()
        for x in (total, *gradients.values()) if ranks is not None else ():
            dist.all_reduce(x)
        found.append((each, total, gradients, metrics))
    (each, total, gradients, metrics), (own_each, own_total, own_gradients, own_metrics) = found
    assert own_each.shape == each.shape and type(own_total) is torch.Tensor
    assert output.unknown.shape[0] == 1 and output.unknown.shape[1] < batch["labels"].numel(), "this rank's rows"
    assert (own_metrics - metrics).abs().max() < 1e-3 and metrics.min() > 0
    # Who shards the batch undispatches what the model gives.
    local, shard = shard_batch(batch, mesh.get_group(), model.config)
    with torch.no_grad():
        rows = model(**local, use_cache=False).log_probs
    for x in (rows, model(**local, use_cache=False).log_probs):
        assert (shard.undispatch(x)[:, : each.shape[1]] - each).abs().max() < 1e-4
    differences = (own_each - each).abs().max().item(), (own_total - total).abs().item() / total.abs().item()
    return *differences, difference(own_gradients, gradients)


def with_dropout():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return model


def undispatched_logits(mesh):
    """Logits in the order of the batch, for losses of a user's own."""
    model, batch = make_model("llama"), padded_batch()
    expected = model(**batch, use_cache=False).logits
    local, shard = shard_batch(batch, mesh, model.config)
    with torch.no_grad():
        logits = shard.undispatch(model(**local).logits)
    seen = batch["attention_mask"].bool()
    return (logits - expected)[seen].abs().max().item()


def whole_logits(mesh):
    """Differences to one rank of what is made of logits without a gradient, and whether logits were sent for it."""
    expected, batch = make_model("gemma3")(**padded_batch(), use_cache=False, output_hidden_states=True), padded_batch()
    model, seen = context_parallel(make_model("gemma3"), mesh), batch["attention_mask"].bool()
    functions = {
        "argmax": (lambda x: x.argmax(-1), False),
        "log_softmax": (lambda x: torch.nn.functional.log_softmax(x.float(), dim=-1).cpu(), False),
        "max": (lambda x: torch.max(x.detach(), dim=2).values, False),
        "over rows": (lambda x: x.cumsum(1).argmax(1)[:, None, :1].expand(2, 26, 1), True),
        "numpy": (lambda x: torch.from_numpy(x.numpy()), True),
        "copy": (copy.deepcopy, True),
        "change": (lambda x: x.mul_(3), True),
    }
    found = {}
    for name, (function, is_sent) in functions.items():
        with torch.no_grad():
            logits = model(**batch).logits
            out = function(logits)
        assert logits.shape == expected.logits.shape
        difference = (out - function(expected.logits.detach().clone()))[seen].abs().max().item()
        found[name] = difference, (logits._rows.whole is not None) == is_sent
    with torch.no_grad():
        hidden = model(**batch, output_hidden_states=True).hidden_states
    differences = [(x - y)[seen].abs().max().item() for x, y in zip(hidden, expected.hidden_states, strict=True)]
    found["hidden states"] = max(differences), True
    frozen = context_parallel(make_model("gemma3"), mesh).requires_grad_(False).train()
    logits = frozen(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    found["frozen"] = (logits - expected.logits)[seen].abs().max().item(), True
    return found


def embedded_before(mesh):
    """Relative differences of gradients where tokens are embedded before the model."""
    found = []
    for ranks in (None, mesh):
        model, batch = make_model("llama"), packed_batch()
        outside = copy.deepcopy(model.get_input_embeddings())
        batch["inputs_embeds"] = outside(batch.pop("input_ids"))
        if ranks is not None:
            context_parallel(model, ranks)
        _, gradients = loss_and_gradients(model, batch)
        gradients["outside"] = outside.weight.grad
        if ranks is not None:
            for gradient in gradients.values():
                dist.all_reduce(gradient)
                gradient /= mesh.size()
        found.append(gradients)
    assert found[1].keys() == found[0].keys()
    return difference(found[1], found[0])


def divided_by_a_number_of_tokens(mesh):
    """Relative differences of the loss times the number of ranks, as the Trainer takes it, and its gradients."""
    batch = {**packed_batch(), "num_items_in_batch": 70}  # those of other microbatches too
    expected_loss, expected = loss_and_gradients(make_model("llama", "magi"), batch)
    loss, gradients = loss_and_gradients(context_parallel(make_model("llama"), mesh), batch)
    for gradient in gradients.values():
        dist.all_reduce(gradient)  # the mean, times the number of ranks
    return abs(mesh.size() * loss - expected_loss).item(), difference(gradients, expected)


def sharded_before(mesh):
    """Relative differences of loss and gradients where the batch is sharded before the model."""
    batch = packed_batch((17, 24, 12))
    batch["labels"][:, 10:30] = -100  # ranks have unequally many
    expected_loss, expected = loss_and_gradients(make_model("llama", "magi"), batch)
    found = {}
    models = {"context-parallel": context_parallel(make_model("llama"), mesh), "not": make_model("llama")}
    for kind, model in models.items():
        local, _ = shard_batch(batch, mesh, model.config)
        loss, gradients = loss_and_gradients(model, local)
        if kind == "not":
            dist.all_reduce(loss)
            loss /= mesh.size()
        for gradient in gradients.values():
            dist.all_reduce(gradient)
            gradient /= mesh.size()
        found[kind] = abs(loss - expected_loss).item(), difference(gradients, expected)
    return found


def policy_gradients(mesh):
    """Of rollouts that share prompts, on two ranks and on one, from a forward for each rollout."""
    draw = torch.Generator().manual_seed(4)
    prompts = torch.randint(0, VOCABULARY, (2, 15), generator=draw)
    answers = torch.randint(0, VOCABULARY, (6, 9), generator=draw)
    rollouts = [torch.cat([prompts[i % 2], answer[: 4 + i]]) for i, answer in enumerate(answers)]
    advantages = torch.linspace(-1, 1, len(rollouts))
    tree = make_prefix_tree(rollouts)
    assert tree.num_rows < 0.8 * tree.num_predicted

    def of(model, each):
        loss = -sum((a * each(i).exp()).sum() for i, a in enumerate(advantages))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    eager = make_model("qwen3_moe", "eager")

    def one_forward(i):
        logits = eager(rollouts[i][None, :-1], use_cache=False).logits[0]
        return -torch.nn.functional.cross_entropy(logits, rollouts[i][1:], reduction="none")

    expected_loss, expected = of(eager, one_forward)
    out = []
    for where in (None, mesh):
        model = make_model("qwen3_moe")
        loss, gradients = of(model, log_probs(model, tree, where).__getitem__)
        for gradient in gradients.values() if where is not None else ():
            dist.all_reduce(gradient)
            gradient /= mesh.size()
        out.append((abs(loss - expected_loss).item(), difference(gradients, expected)))
    return out


def wrapped_rollouts(mesh):
    """Differences to the model alone of one that is wrapped or context-parallel; and a refusal."""
    tree = make_prefix_tree([[5, 6, 7, 8, 1], [5, 6, 7, 9, 9, 2], [5, 3]])
    model = make_model("llama")
    expected = torch.cat(log_probs(model, tree))
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    found = {"ddp": log_probs(ddp, tree, mesh)}
    torch.cat(found["ddp"]).sum().backward()  # averages over ranks, if DDP's own forward was called
    pairs = zip(model.parameters(), gradients, strict=True)
    found["context-parallel"] = log_probs(context_parallel(model, mesh), tree, mesh)
    found["both"] = log_probs(torch.nn.parallel.DistributedDataParallel(model), tree, mesh)
    errors = {name: (torch.cat(own) - expected).abs().max().item() for name, own in found.items()}
    errors["gradients"] = max(((p.grad - g).abs().max() / (1 + g.abs().max())).item() for p, g in pairs)
    return errors, refusal(log_probs, model, tree)


def on_two_ranks(_rank, num_ranks):
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))["cp"]
    out = {case: both(*case, mesh) for case in CASES}
    out["fsdp"] = {name: both(name, "packed", mesh, fsdp=True) for name in ("llama", "gpt_oss")}
    out["recompute"] = both("gemma3", "packed", mesh, recompute=True)
    out["compiled"] = both("llama", "padded", mesh, compiled=True)
    out["refusals"] = refusals(mesh)
    out["tuple"] = as_tuple(mesh)
    out["numbers of tokens"] = numbers_of_tokens(mesh)
    out["logits"] = undispatched_logits(mesh)
    out["whole logits"] = whole_logits(mesh)
    out["number of tokens"] = divided_by_a_number_of_tokens(mesh)
    out["sharded before"] = sharded_before(mesh)
    out["embedded before"] = embedded_before(mesh)
    out["rollouts"] = policy_gradients(mesh)
    out["wrapped rollouts"] = wrapped_rollouts(mesh)
    return out


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("name, kind", CASES)
def test_two_ranks_train_as_one(results, name, kind):
    for loss, gradient in (result[name, kind] for result in results):
        assert loss < 1e-5
        assert gradient < 1e-5


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_two_ranks_train_as_one_beside_fsdp2(results, name):
    for loss, gradient in (result["fsdp"][name] for result in results):
        assert loss < 1e-5
        assert gradient < 1e-5


def test_two_ranks_recompute_as_one_computes(results):
    for loss, gradient in (result["recompute"] for result in results):
        assert loss < 1e-5
        assert gradient < 1e-5


def test_two_ranks_with_a_compiled_model_train_as_one(results):
    for loss, gradient in (result["compiled"] for result in results):
        assert loss < 1e-5
        assert gradient < 1e-5


def test_what_cannot_be_sharded_is_refused_by_name(results):
    for result in results:
        for name, message in result["refusals"].items():
            assert message is not None, name
            assert message.startswith(name), message


def test_a_result_may_be_a_tuple(results):
    for result in results:
        assert all(result["tuple"]), result["tuple"]


def test_numbers_of_tokens_are_those_of_the_batch_without_gradients_and_add_up_to_them_with(results):
    assert max(max(result["numbers of tokens"]) for result in results) < 1e-5


def test_logits_come_back_in_the_order_of_the_batch(results):
    assert max(result["logits"] for result in results) < 1e-5


def test_logits_without_a_gradient_are_the_batchs_and_are_sent_only_where_that_is_needed(results):
    for result in results:
        for name, (difference, is_right) in result["whole logits"].items():
            assert difference < 1e-4 and is_right, name


def test_a_number_of_tokens_divides_the_losses_of_each_rank(results):
    assert max(max(result["number of tokens"]) for result in results) < 1e-5


@pytest.mark.parametrize("kind", ["context-parallel", "not"])
def test_the_loss_of_a_batch_that_is_sharded_before_the_model_is_that_of_one_rank(results, kind):
    assert max(max(result["sharded before"][kind]) for result in results) < 1e-5


def test_what_embeds_tokens_before_the_model_gets_the_gradient_of_one_rank(results):
    assert max(result["embedded before"] for result in results) < 1e-5


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_rollouts_in_a_tree_train_as_one_by_one(results, num_ranks):
    for loss, gradient in (result["rollouts"][num_ranks - 1] for result in results):
        assert loss < 1e-5
        assert gradient < 1e-5


def test_rollouts_take_models_that_are_wrapped_and_the_group_of_a_context_parallel_one(results):
    for errors, message in (result["wrapped rollouts"] for result in results):
        assert max(errors.values()) < 1e-5, errors
        assert message == "cp_group_or_mesh: the model is context-parallel, give its group"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": [1, 2]}, "labels: expected a tensor, got list"),
        ({"position_ids": "rising"}, "position_ids: expected a tensor, got str"),
        ({"cu_seq_lens_q": [0, 16]}, "cu_seq_lens_q: expected a tensor, got list"),
        ({"input_ids": [[1, 2]]}, "input_ids: expected a tensor, got list"),
        ({"input_ids": torch.zeros(8, dtype=torch.int64)}, r"input_ids: expected \[batch_size, seqlen\]"),
        ({"input_ids": None}, "input_ids: none were given"),
    ],
)
def test_a_batch_of_no_tensors_is_refused_by_name(changed, message):
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.int64), **changed}
    with pytest.raises(ValueError, match=f"^{message}"):
        shard_batch(batch, None, make_model("llama").config)


def test_labels_that_are_shifted_already_stay_as_they_are():
    batch, config = packed_batch(), make_model("llama").config
    given = batch["labels"].roll(3)
    local, _ = shard_batch({**batch, "shift_labels": given}, None, config)
    assert torch.equal(local["shift_labels"], given)
    local, _ = shard_batch(batch, None, config)
    assert torch.equal(local["shift_labels"][0, :-1], batch["labels"][0, 1:]) and local["shift_labels"][0, -1] == -100
