"""FSDP2, context parallelism, selective recomputation and a distributed checkpoint, in a plain PyTorch loop.

    torchrun --nproc-per-node 2 examples/torch_native/train.py [--cp N] [--steps N] [--checkpoint FOLDER] [--cpu]

The data-parallel size is the world size divided by ``--cp``; each replica reads its own batches. Parameters are sharded
over all ranks. Each save makes a folder of its own, ``FOLDER/step_N``, which is whole once torch has written its
metadata, after all ranks' parts. A run resumes from the last whole one, also with another number of ranks, and passes
over one whose save was interrupted; older ones are kept.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from llama import Llama, LlamaSize
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from megatron_magi.api import calc_attn, dispatch, magi_attn_varlen_key

SEQLEN = 500
IGNORED = -100


def make_batch(index: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int]]:
    """Packed documents that count up: tokens, labels and positions, each ``[SEQLEN]``, and the documents' bounds."""
    draw = torch.Generator().manual_seed(index)
    bounds = [0, *sorted(torch.randint(1, SEQLEN, (5,), generator=draw).unique().tolist()), SEQLEN]
    lengths = torch.tensor(bounds).diff()
    positions = torch.cat([torch.arange(n) for n in lengths])
    starts = torch.randint(0, vocabulary, (len(lengths),), generator=draw).repeat_interleave(lengths)
    tokens = (starts + positions) % vocabulary
    labels = tokens.roll(-1)
    labels[torch.tensor(bounds[1:]) - 1] = IGNORED
    return tokens, labels, positions, bounds


def attend(key, q, k, v):
    """Attention of this rank's rows."""
    return calc_attn(q, k, v, key)[0]


def step(model: Llama, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, index: int) -> float:
    """One batch for each data-parallel rank; returns the mean loss of a token over all of them."""
    device = torch.device(mesh.device_type)
    index = index * mesh["dp"].size() + mesh["dp"].get_local_rank()
    tokens, labels, positions, bounds = make_batch(index, model.size.vocabulary)
    size = model.size
    key = magi_attn_varlen_key(
        bounds, bounds, size.num_heads_q, size.num_heads_kv, size.head_dim, causal=True, cp_group_or_mesh=mesh["cp"]
    )
    tokens, positions = (dispatch(x.to(device), key) for x in (tokens, positions))
    labels = dispatch(labels.to(device), key, pad_value=IGNORED)
    count = (labels != IGNORED).sum()
    dist.all_reduce(count)
    logits = model(tokens, positions, partial(attend, key))
    # FSDP averages gradients over all ranks, so a rank's part is taken times their number.
    loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") / count
    (loss * mesh.size()).backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach()
    dist.all_reduce(mean)
    return mean.item()


class State:
    """Model, optimizer and step, as a distributed checkpoint saves them."""

    def __init__(self, model: Llama, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.step = state["step"]


def last_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint in a folder as rank 0 finds it, None if there is none. Collective.

    Raises:
        ValueError: the folder cannot be read, or has something else.
    """
    found: list = [None, ""]
    if dist.get_rank() == 0:  # on a shared file system others may see it later
        try:
            found[0] = find_checkpoint(folder)
        except Exception as error:  # noqa: BLE001  (whatever it is, the other ranks must not wait)
            found[1] = f"checkpoint: {error}"
    dist.broadcast_object_list(found)
    if found[1]:
        raise ValueError(found[1])
    return found[0]


def find_checkpoint(folder: Path) -> Path | None:
    """The last whole checkpoint; says what is there."""
    saved = sorted(folder.glob("step_*"), reverse=True)
    if not saved and folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has no step_N, but {sorted(path.name for path in folder.iterdir())[:5]}")
    for path in saved:
        if is_whole(path):
            print(f"resumes from {path}", flush=True)
            return path
        print(f"{path} is not whole: its save was interrupted", flush=True)
    print(f"no whole checkpoint in {folder}, begins anew", flush=True)
    return None


def is_whole(checkpoint: Path) -> bool:
    """Whether all ranks have written their parts: the metadata is written after them, under another name first."""
    try:
        dcp.FileSystemReader(checkpoint).read_metadata()
    except FileNotFoundError:
        return False
    return True


def save(state: State, folder: Path) -> None:
    """Saves beside the checkpoints that there are. What an interrupted save has left of this step is overwritten."""
    path = folder / f"step_{state.step:08d}"
    dcp.save({"state": state}, storage_writer=dcp.FileSystemWriter(path, overwrite=False))


def main(argv: list[str] | None = None) -> list[float]:
    """Trains, and returns the losses of the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cp", type=int, help="ranks of one sequence; all when not given")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument(
        "--checkpoint", type=Path, help="folder of checkpoints: one is saved in the end, the last loaded"
    )
    parser.add_argument("--cpu", action="store_true", help="also where there are GPUs")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    world = dist.get_world_size()
    cp = world if args.cp is None else args.cp
    if cp < 1 or world % cp:
        raise ValueError(f"cp: expected a divisor of the number of ranks, {world}, got {cp}")
    mesh = init_device_mesh(device, (world // cp, cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = Llama(LlamaSize()).to(device)
    everyone = mesh["dp", "cp"]._flatten("all")
    for layer in model.layers:
        fully_shard(layer, mesh=everyone)
    fully_shard(model, mesh=everyone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = State(model, optimizer)
    last = last_checkpoint(args.checkpoint) if args.checkpoint else None
    if last is not None:
        dcp.load({"state": state}, checkpoint_id=last)
    losses = []
    for index in range(state.step, args.steps):
        losses.append(step(model, optimizer, mesh, index))
        if dist.get_rank() == 0:
            print(f"step {index}: loss {losses[-1]:.4f}", flush=True)
        state.step = index + 1
    if args.checkpoint and losses:
        save(state, args.checkpoint)
    return losses


if __name__ == "__main__":
    backend = "gloo" if not torch.cuda.is_available() else None
    dist.init_process_group(backend)
    main()
    dist.destroy_process_group()
