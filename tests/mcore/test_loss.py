"""Losses and reports of microbatches whose tokens are divided unevenly among ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.rerun_state_machine import RerunMode, RerunStateMachine

from megatron_magi.mcore import loss as loss_module
from megatron_magi.mcore import user_step
from megatron_magi.mcore.loss import averages_reports, microbatch_loss

LOSSES = torch.tensor([[1.0, 2.0, 4.0, 8.0, 3.0, 7.0, 5.0, 9.0]])
MASK = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]])
MEAN = float((LOSSES * MASK).sum() / MASK.sum())


@pytest.fixture(params=[False, True], ids=["mean", "per_token"])
def args(monkeypatch, request) -> SimpleNamespace:
    found = SimpleNamespace(
        sft=True,
        calculate_per_token_loss=request.param,
        check_for_nan_in_loss_and_grad=False,
        check_for_spiky_loss=False,
    )
    monkeypatch.setattr(loss_module, "get_args", lambda: found)
    monkeypatch.setattr(user_step, "get_args", lambda: found)
    return found


def _as_megatron_evaluates_sft(reports: list[dict[str, torch.Tensor]]) -> float:
    """The mean over ranks of each one's mean."""
    return sum(float(x[0] / x[1].clamp(min=1)) for x in (report["lm loss"] for report in reports)) / len(reports)


def test_means_of_ranks_become_the_mean_of_the_microbatch(args) -> None:
    halves = [slice(0, 4), slice(4, 8)]
    for count in (float(MASK.sum()), MASK.sum()):
        reports = [
            microbatch_loss(MASK[:, x], LOSSES[:, x], num_loss_tokens=count, cp_size=2, reports_mean=True)[2]
            for x in halves
        ]
        assert _as_megatron_evaluates_sft(reports) == pytest.approx(MEAN)
    plain = [microbatch_loss(MASK[:, x], LOSSES[:, x], num_loss_tokens=4.0, cp_size=2)[2]["lm loss"] for x in halves]
    assert torch.stack(plain).tolist() == [[1.0, 2.0], [15.0, 2.0]]


def test_a_loss_that_does_not_count_may_be_anything(args) -> None:
    for nothing in (torch.inf, torch.nan):
        losses = torch.where(MASK != 0, LOSSES, nothing).requires_grad_()
        total = microbatch_loss(MASK, losses)[0]
        total.backward()
        assert total.item() == pytest.approx(MEAN * float(MASK.sum()))
        assert torch.equal(losses.grad, MASK)


@pytest.fixture
def machine(monkeypatch) -> RerunStateMachine:
    """Megatron's, without reruns."""
    made = RerunStateMachine(mode=RerunMode.DISABLED)
    monkeypatch.setattr(loss_module, "get_rerun_state_machine", lambda: made)
    return made


@pytest.mark.parametrize(("bad", "name"), [(torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity")])
def test_a_loss_that_is_no_number_ends_a_training_that_looks_for_it(args, machine, bad: float, name: str) -> None:
    losses = LOSSES.index_fill(1, torch.tensor([4]), bad)
    microbatch_loss(MASK, losses)
    args.check_for_nan_in_loss_and_grad = True
    microbatch_loss(MASK, LOSSES)
    with pytest.raises(RuntimeError, match=f"{name} in the loss of a rank"):
        microbatch_loss(MASK, losses)


def test_a_loss_ten_times_the_largest_is_told_and_training_goes_on(args, machine, caplog) -> None:
    def told(factor: float) -> bool:
        caplog.clear()
        microbatch_loss(MASK, factor * LOSSES)
        return "spiky loss" in caplog.text

    assert not any(told(factor) for factor in (1.0, 100.0))
    args.check_for_spiky_loss = True
    assert not any(told(1.0) for _ in range(101)), "by so many Megatron knows what is large"
    assert not told(9.0) and told(11.0)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 8])
def test_weights_of_tokens_are_counted_over_all_ranks_before_their_sum_is_cut(args, cp_size: int) -> None:
    weights = MASK * torch.tensor([0.3, 1.0, 1.0, 1.0, 0.9, 0.8, 1.7, 1.0])  # 3.7, of which Megatron counts 3
    for count in (float(weights.sum()), weights.sum()):
        found = [
            microbatch_loss(part, losses, num_loss_tokens=count, cp_size=cp_size, cp_rank=rank)
            for rank, (part, losses) in enumerate(
                zip(weights.tensor_split(cp_size, 1), LOSSES.tensor_split(cp_size, 1), strict=True)
            )
        ]
        totals, counts, reports = zip(*found, strict=True)
        assert all(count.dtype == torch.int for count in counts) and sum(counts) == 3
        summed = sum(report["lm loss"] for report in reports)
        assert summed.tolist() == pytest.approx([float((LOSSES * weights).sum()), 3.0])
        if args.calculate_per_token_loss:
            mean = sum(totals) / sum(counts)
        else:
            mean = sum(total / count.clamp(min=1) for total, count in zip(totals, counts, strict=True)) / cp_size
        assert float(mean) == pytest.approx(float((LOSSES * weights).sum()) / 3)


def test_a_microbatch_in_which_no_token_counts_has_a_loss_of_zero(args, monkeypatch) -> None:
    monkeypatch.setattr(user_step, "get_context_parallel_group", lambda: SimpleNamespace(size=lambda: 2))
    monkeypatch.setattr(user_step.dist, "all_reduce", lambda x, group: x)
    losses, nothing = LOSSES.clone().requires_grad_(), torch.zeros_like(MASK)

    def of_the_user(output: torch.Tensor) -> tuple:
        total, count = (output * nothing).sum(), nothing.sum()
        return total, count.int(), {"lm loss": torch.stack([total.detach(), count])}

    found = [
        microbatch_loss(nothing, losses, num_loss_tokens=count, cp_size=2, reports_mean=True)
        for count in (0.0, torch.tensor(0.0))
    ]
    for total, num_tokens, report in (*found, user_step._microbatch_mean(of_the_user, True, losses)):
        (gradient,) = torch.autograd.grad(total, losses)
        assert total.item() == num_tokens.item() == report["lm loss"][0].item() == gradient.abs().max().item() == 0


def test_reports_of_a_users_loss_too_and_figures_without_a_count_stay(args, monkeypatch) -> None:
    monkeypatch.setattr(user_step, "get_context_parallel_group", lambda: SimpleNamespace(size=lambda: 2))
    # Of all ranks: tokens of the loss, and of a figure over other ones.
    monkeypatch.setattr(
        user_step.dist, "all_reduce", lambda x, group: x.copy_(torch.tensor([4.0, 8.0])[: x.numel()].view_as(x))
    )
    reports, totals = [], []
    for part in (slice(0, 4), slice(4, 8)):
        total, num_tokens = (LOSSES * MASK)[:, part].sum(), MASK[:, part].sum().int()
        result = (total, num_tokens, {"lm loss": torch.stack([total, num_tokens]), "other": torch.ones(1)})
        result[2]["every token"] = torch.stack([LOSSES[:, part].sum(), torch.tensor(4.0)])
        found = user_step._microbatch_mean(lambda _, result=result: result, True, torch.empty(0))
        reports.append(found[2])
        totals.append(float(found[0]) if args.calculate_per_token_loss else float(found[0] / num_tokens))
        assert found[2]["other"].tolist() == [1.0]
    assert _as_megatron_evaluates_sft(reports) == pytest.approx(MEAN)
    every = [{"lm loss": report["every token"]} for report in reports]
    assert _as_megatron_evaluates_sft(every) == pytest.approx(float(LOSSES.mean()))
    assert sum(totals) / (4 if args.calculate_per_token_loss else 2) == pytest.approx(MEAN)


@pytest.mark.parametrize(
    ("sft", "training", "averages"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_megatron_takes_means_of_ranks_in_evaluations_of_conversations(args, sft, training, averages) -> None:
    args.sft = sft
    model = torch.nn.Identity().train(training)
    assert averages_reports(args, model) is averages
