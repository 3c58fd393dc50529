"""Models whose packed training under context parallelism is tested, and the table of them in the documents.

``python -m tests.hf.packed_models`` prints the table.
"""

from __future__ import annotations

import copy
import os

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.state import AcceleratorState, GradientState, PartialState

from megatron_magi.hf import MagiParallelismConfig
from megatron_magi.hf.attention import CP_GROUP
from megatron_magi.testing.spawn import run_ranks
from tests.hf.model_types import config_of
from tests.hf.models import CONFIGS, VOCABULARY, make_model, packed_batch
from tests.refusals import refusal as refusal_of


def with_router_losses(config):
    """In which they are large enough to matter."""
    config = copy.deepcopy(config)
    config.output_router_logits, config.router_aux_loss_coef = True, 0.5
    return config


MODELS = {
    "Llama": CONFIGS["llama"],
    "Mistral": CONFIGS["mistral"],
    "Gemma 3": CONFIGS["gemma3"],
    "GPT-OSS": with_router_losses(CONFIGS["gpt_oss"]),
    "Qwen3-MoE": with_router_losses(CONFIGS["qwen3_moe"]),
    "Llama 4": CONFIGS["llama4"],
    "MiMo-V2-Flash": config_of("mimo_v2_flash", layer_types=["sliding_attention", "full_attention"]),
    "Granite SWA": config_of("granite_swa", layer_types=["sliding_attention", "full_attention"]),
}
"""A tiny configuration of each."""

LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
REFUSED = {"Qwen3-Next": config_of("qwen3_next", **LINEAR), "Qwen3.5": config_of("qwen3_5_text", **LINEAR)}
"""Of models with layers that need all tokens in their order."""

ALL = {**MODELS, **REFUSED}

NOT_BY_TRL = {"Llama 4"}
"""Text models that TRL's SFTTrainer does not take on one rank either, with any attention."""

LENGTHS = [9, 14, 22, 5, 17, 11, 8, 20]


def documents():
    """Tokens of documents, the samples of a data set."""
    return [packed_batch((n,), seed=n)["input_ids"][0].tolist() for n in LENGTHS]


def on_two_ranks_and_one(on_ranks, train, folder):
    """Results of ``on_ranks(rank, 2, folder)``, and of ``train(folder, 1)`` in this process."""
    try:
        return run_ranks(on_ranks, 2, folder), train(folder, 1)
    finally:
        fresh_state()


def fresh_state():
    """accelerate keeps what it knows of the process for good, and wants an address although there is a group."""
    if "RANK" in os.environ:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_WORLD_SIZE=os.environ["WORLD_SIZE"])
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def options(folder, cp_size):
    """Of ``TrainingArguments`` or their subclasses: three steps of two samples, and context parallelism."""
    parallel = {} if cp_size == 1 else {"parallelism_config": MagiParallelismConfig(cp_size=cp_size)}
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "seed": 3,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "per_device_train_batch_size": 2,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        **parallel,
    }


def padded(features):
    """A collator: a row for each document."""
    tokens = [torch.tensor(x["input_ids"]) for x in features]
    ids, labels = (torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=n) for n in (0, -100))
    return {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).to(torch.int64)}


def train(trainer):
    """Losses of each step, parameters in the end, and what a changed token then moves if the model is over ranks."""
    model = trainer.model
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    moved = probe(model.eval()) if hasattr(model, CP_GROUP) else None
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, moved


def compare(got, expected):
    """Of `train`, on several ranks and on one."""
    losses, parameters, (unseen, seen) = got
    assert len(losses) == 3 and losses == pytest.approx(expected[0], abs=1e-5)
    for name, parameter in expected[1].items():
        assert torch.allclose(parameters[name], parameter, rtol=1e-5, atol=1e-5), name
    # Experts compute other rows together with a token that moves to another expert, which rounds differently.
    assert unseen < 5e-6 and seen > 1e-2


def reach(config, bounds, token):
    """For each layer the last row that a token may have moved after it."""
    end = next(b for b in bounds if b > token) - 1
    start = max(b for b in bounds if b <= token)
    last, out = token, []
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    for kind in kinds(config):
        if kind == "sliding_attention":
            last = min(last + window - 1, end)
        elif kind == "chunked_attention":
            last = min(start + ((last - start) // chunk + 1) * chunk - 1, end)
        else:
            last = end
        out.append(last)
    return out


def kinds(config):
    """The kind of each layer's attention."""
    text = config.get_text_config()
    every = "sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"
    return list(getattr(text, "layer_types", None) or [every] * text.num_hidden_layers)


@torch.no_grad()
def probe(model):
    """What changing a token moves in a pack: the most that it moves rows that cannot see it, in any layer, and the
    least that it moves the last row that can.
    """
    lengths = (17, 1, 24, 11)
    batch, bounds = packed_batch(lengths), torch.tensor([0, *lengths]).cumsum(0).tolist()
    del batch["labels"]
    before = hidden_states(model, batch)
    unseen, seen = 0.0, float("inf")
    for token in (0, 3, 16, 17, 18, 40, 42):
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, token] = (changed["input_ids"][0, token] + 1) % VOCABULARY
        moved = [(x - y).abs().amax(-1) for x, y in zip(before, hidden_states(model, changed), strict=True)]
        for rows, last in zip(moved, reach(model.config.get_text_config(), bounds, token), strict=True):
            outside = torch.cat([rows[:token], rows[last + 1 :]])
            unseen, seen = max(unseen, outside.max().item()), min(seen, rows[last].item())
    return unseen, seen


def hidden_states(model, batch):
    """``[num_rows, hidden_size]`` after each layer."""
    states = model(**batch, use_cache=False, output_hidden_states=True).hidden_states[1:]
    return [state[0] + 0 for state in states]


def refusal(name):
    """What accelerate's own context parallelism says of a model; empty if it takes it."""
    return refusal_of(_attach_context_parallel_hooks, make_model(ALL[name], "eager")) or ""


def table():
    """Of Markdown."""
    words = {"full_attention": "full", "sliding_attention": "windows", "chunked_attention": "chunks"}
    words["linear_attention"] = "linear"
    columns = "model", "layers' attention", "accelerate's own context parallelism", "Trainer here", "SFTTrainer here"
    rows = [columns, ["---"] * len(columns)]
    for name, config in ALL.items():
        parts = sorted({words[kind] for kind in kinds(config)})
        parts += ["sinks"] * any("sinks" in parameter for parameter, _ in make_model(config).named_parameters())
        own = "refuses it" if refusal(name) else "takes it, not packed"
        here = "refused" if name in REFUSED else "as one rank"
        by_trl = "not taken by TRL" if name in NOT_BY_TRL else here
        rows.append((name, ", ".join(parts), own, here, by_trl))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
    print(table())
