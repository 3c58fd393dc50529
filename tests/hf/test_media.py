"""Images and videos over two ranks: the losses and gradients of one. What cannot be sharded is refused by name."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers", reason="transformers is not installed: pip install megatron_magi[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install megatron_magi[hf]")

from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Qwen2_5_VLConfig,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2VLConfig,
    Qwen3VLConfig,
)

from megatron_magi.hf import context_parallel, shard_batch
from megatron_magi.testing.spawn import run_ranks
from tests.hf.models import SIZES, loss_and_gradients, make_model, packed_batch
from tests.refusals import error_of

pytestmark = pytest.mark.ranks(2)

IMAGE, VIDEO, START, END = 58, 57, 59, 60
TEXT = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 14,
    "out_hidden_size": 32,
}
IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
DEEPSTACK = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
CONFIGS = {
    "qwen2_vl": Qwen2VLConfig(text_config=TEXT, vision_config={**VISION, "embed_dim": 32, "mlp_ratio": 2}, **IDS),
    "qwen2_5_vl": Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, **IDS),
    "qwen3_vl": Qwen3VLConfig(text_config=TEXT, vision_config={**VISION, **DEEPSTACK}, **IDS),
}
KINDS = ("images", "videos", "both", "text", "packed")
CASES = [(name, kind) for name in CONFIGS for kind in KINDS]


def model_of(name, attn_implementation="magi"):
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(CONFIGS[name], attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.15)
    return model


def batch_of(kind):
    """Two rows, of which the second ends in padding; images of several sizes, and a video. Or documents with axes."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, IMAGE - 1, (2, 40), generator=draw)
    if kind == "packed":
        positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ((25, 15), (7, 33))])
        axes = torch.randint(0, 30, (3, 2, 40), generator=draw)
        return {"input_ids": tokens, "labels": tokens, "position_ids": torch.cat([positions[None], axes])}
    types, batch = torch.zeros_like(tokens), {}

    def put(row, start, count, token):
        tokens[row, start - 1], tokens[row, start + count] = START, END
        tokens[row, start : start + count], types[row, start : start + count] = token, 1 if token == IMAGE else 2

    if kind in ("images", "both"):
        for row, start, count in ((0, 5, 6), (1, 3, 4), (1, 20, 6)):
            put(row, start, count, IMAGE)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 6], [1, 4, 4], [1, 4, 6]])
        batch["pixel_values"] = torch.randn(64, 3 * 2 * 14 * 14, generator=draw)
    if kind in ("videos", "both"):
        put(0, 17, 6, VIDEO)
        batch["video_grid_thw"] = torch.tensor([[1, 4, 6]])
        batch["pixel_values_videos"] = torch.randn(24, 3 * 2 * 14 * 14, generator=draw)
    mask = torch.ones_like(tokens)
    mask[1, 33:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return {**batch, "input_ids": tokens, "labels": labels, "mm_token_type_ids": types, "attention_mask": mask}


def differences(name, kind):
    """Of the loss, and of gradients relative to the largest of a parameter."""
    expected_loss, expected = loss_and_gradients(model_of(name, "eager"), batch_of(kind))
    model = context_parallel(model_of(name), dist.group.WORLD)
    loss, gradients = loss_and_gradients(model, batch_of(kind))
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    assert gradients.keys() == expected.keys()
    found = [(gradients[n] - x).abs().max().item() / (1e-4 + x.abs().max().item()) for n, x in expected.items()]
    return abs(loss.item() - expected_loss.item()), max(found)


def differences_in_fsdp(name):
    """`differences` with units of FSDP: also of the language model, whose inputs are then views."""
    expected_loss, expected = loss_and_gradients(model_of(name, "eager"), batch_of("both"))
    model, mesh = context_parallel(model_of(name), dist.group.WORLD), init_device_mesh("cpu", (dist.get_world_size(),))
    inside = model.base_model
    decoder = inside.language_model
    for unit in (*inside.visual.blocks, *decoder.layers, inside.visual, decoder.embed_tokens, decoder, model):
        fully_shard(unit, mesh=mesh)
    loss, gradients = loss_and_gradients(model, batch_of("both"))
    assert gradients.keys() == expected.keys()
    whole = {n: gradient.full_tensor() for n, gradient in gradients.items()}
    found = [(whole[n] - x).abs().max().item() / (1e-4 + x.abs().max().item()) for n, x in expected.items()]
    return abs(loss.item() - expected_loss.item()), max(found)


def whole_logits(name):
    """Without a gradient they are the batch's."""
    batch = batch_of("both")
    with torch.no_grad():
        expected = model_of(name, "eager")(**batch).logits
        got = context_parallel(model_of(name), dist.group.WORLD)(**batch).logits
    return (got - expected)[batch["attention_mask"] > 0].abs().max().item()


def gemma3():
    """Its images see each other: a mask of its own."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes = {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=SIZES, vision_config={**vision, **sizes}, mm_tokens_per_image=4, image_token_id=IMAGE
    )
    return AutoModelForImageTextToText.from_config(config, attn_implementation="magi")


def audio():
    sizes = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 48}
    text = {"model_type": "qwen2", **SIZES}
    config = Qwen2AudioConfig(text_config=text, audio_config={**sizes, "num_mel_bins": 8}, audio_token_id=IMAGE)
    return Qwen2AudioForConditionalGeneration._from_config(config, attn_implementation="magi")


def refusals(rank):
    tokens = batch_of("text")["input_ids"][:1]
    batch = {"input_ids": tokens, "labels": tokens}
    models = {"text": make_model("llama"), "gemma3": gemma3(), "audio": audio(), "qwen2_5_vl": model_of("qwen2_5_vl")}
    for model in models.values():
        context_parallel(model, dist.group.WORLD)
    pixels = torch.zeros(1, 3, 28, 28)
    with_image = tokens.clone()
    with_image[0, 4:8] = IMAGE
    images = {"pixel_values": pixels, "token_type_ids": (with_image == IMAGE).long()}
    in_fsdp, mesh = context_parallel(model_of("qwen2_vl"), dist.group.WORLD), init_device_mesh("cpu", (2,))
    for unit in (in_fsdp.base_model, in_fsdp):
        fully_shard(unit, mesh=mesh)
    other = batch_of("images")
    other["pixel_values"] += 0.001 * rank
    return {
        "pixel_values_videos": error_of(models["text"], **batch, pixel_values_videos=pixels),
        "pixel_values": error_of(models["gemma3"], **{**batch, "input_ids": with_image}, **images),
        "token_type_ids": error_of(models["gemma3"], **batch, token_type_ids=torch.zeros_like(tokens)),
        "labels: Qwen2AudioForConditionalGeneration computes its loss by code of its own": error_of(
            models["audio"], **batch, input_features=torch.zeros(1, 8, 3000)
        ),
        "position_ids": error_of(models["text"], **batch, position_ids=torch.arange(40).expand(3, 1, 40)),
        "position_ids: expected [1, 40], or 3 or 4 of these": error_of(
            models["qwen2_5_vl"], **batch, position_ids=torch.arange(40).expand(2, 1, 40)
        ),
        "pixel_values: model is a unit of FSDP around the language model": error_of(in_fsdp, **batch_of("images")),
        "pixel_values: ranks disagree: rank 1": error_of(models["qwen2_5_vl"], **other),
    }


def on_two_ranks(rank, _num_ranks):
    found = {case: differences(*case) for case in CASES}
    found |= {(name, "fsdp"): differences_in_fsdp(name) for name in CONFIGS}
    found["logits"] = [whole_logits(name) for name in CONFIGS]
    found["refusals"] = refusals(rank)
    return found


@pytest.fixture(scope="module")
def results():
    return run_ranks(on_two_ranks, 2)


@pytest.mark.parametrize("name, kind", [*CASES, *[(name, "fsdp") for name in CONFIGS]])
def test_two_ranks_train_as_one(results, name, kind):
    for loss, gradient in (result[name, kind] for result in results):
        assert loss < 1e-5
        assert gradient < 1e-4


def test_logits_without_a_gradient_are_the_batchs(results):
    assert max(max(result["logits"]) for result in results) < 1e-4


def test_what_cannot_be_sharded_is_refused_by_name(results):
    for result in results:
        for name, message in result["refusals"].items():
            assert message is not None, name
            assert message.startswith(name), message


@pytest.mark.parametrize("name", ["pixel_values", "pixel_values_videos", "input_features", "image_grid_thw"])
def test_a_batch_that_is_sharded_before_the_model_is_of_text(name):
    batch = {**packed_batch(), name: torch.zeros(4)}
    with pytest.raises(ValueError, match=f"^{name}: cannot be sharded; text alone can, without it; images"):
        shard_batch(batch, None, make_model("llama").config)
