"""ppo_critic.py: the equations by hand, the critic's indexing, and its loop at small sizes."""

import functools
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3ForTokenClassification,
)

import common
import fipo
import models
import ppo_critic
import sft
import tiny
from common import UsageError, explained_variance, load_critic, mean_and_variance
from ppo_critic import PRESETS, Args, check, gae, policy_loss, value_loss, whiten

try:
    import rfpo
except ImportError:
    rfpo = None

NAN = float("nan")


ARGS = {field.name for field in fields(Args)}


def row(*numbers):
    return torch.tensor([numbers])


def close(x, y, tolerance=1e-6):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def ragged(lengths):
    """A mask whose rows are contiguous from the left."""
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


# --------------------------------------------------------------------------------------------------
# gae
# --------------------------------------------------------------------------------------------------


def test_gae_by_hand_with_a_padded_slot():
    # delta = [0.5 - 0.2, 1 - 0.5] = [0.3, 0.5]; A = [0.3 + 0.95 * 0.5, 0.5]; R = A + V
    advantages, returns = gae(row(0.0, 1.0, 0.0), row(0.2, 0.5, 9.0), row(1, 1, 0), 1.0, 0.95)
    close(advantages, row(0.775, 0.5, 0.0))
    close(returns, row(0.975, 1.0, 0.0))


def test_gae_by_hand_with_discount_and_lambda():
    # delta = [-0.05, -0.05, 0.5], gamma lambda = 0.72: A = [-0.05 + 0.72 * 0.31, 0.31, 0.5]
    rewards, values = row(0.0, 0.0, 1.0), row(0.5, 0.5, 0.5)
    advantages, returns = gae(rewards, values, row(1, 1, 1), 0.9, 0.8)
    close(advantages, row(0.1732, 0.31, 0.5))
    close(returns, row(0.6732, 0.81, 1.0))


def test_rfpo_algorithm1_advantage_is_the_outcome_minus_the_value():
    # gamma = lambda = 1, r at the end: A = r - V, and every state's return is r
    rewards, mask = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]), ragged([3, 2])
    values = torch.tensor([[0.2, 0.5, 0.9], [0.3, -0.1, 7.0]])
    advantages, returns = gae(rewards, values, mask, 1.0, 1.0)
    close(advantages, torch.tensor([[0.8, 0.5, 0.1], [-0.3, 0.1, 0.0]]))
    close(returns, torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]))


def test_gae_without_values_is_the_reward():
    rewards = row(0.0, 0.0, 0.7, 0.0)
    advantages, returns = gae(rewards, torch.zeros(1, 4), row(1, 1, 1, 0), 1.0, 1.0)
    assert torch.equal(advantages, row(0.7, 0.7, 0.7, 0.0)) and torch.equal(returns, advantages)


def test_gae_with_lambda_0_is_the_td_error():
    # r + gamma V' - V, with nothing behind the last token
    rewards, values = row(0.0, 1.0), row(0.2, 0.6)
    advantages, _ = gae(rewards, values, row(1, 1), 0.5, 0.0)
    close(advantages, row(0.5 * 0.6 - 0.2, 1.0 - 0.6))


def test_eq1_every_prefix_is_fitted_to_the_outcome():
    # gamma = lambda = 1: whatever the values, the return of every state is the final reward
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    rewards = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    values = torch.tensor([[0.2, 0.9, -0.4], [0.7, 0.1, 5.0]])
    returns = ppo_critic.gae(rewards, values, mask, 1.0, 1.0)[1]
    assert returns.flatten().tolist() == pytest.approx([1, 1, 1, 0, 0, 0], abs=1e-6)


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 1, 1], [0, 0, 1], [1, 1, 0, 1]])
def test_gae_refuses_a_hole(mask):
    x = torch.zeros(2, len(mask))
    with pytest.raises(ValueError, match="contiguous"):
        gae(x, x, torch.tensor([[1] * len(mask), mask]), 1.0, 1.0)


def test_gae_takes_an_empty_row():
    x, mask = torch.ones(2, 2), torch.tensor([[0, 0], [1, 0]])
    assert gae(x, 0 * x, mask, 1.0, 1.0)[0].tolist() == [[0.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize("padding", [NAN, math.inf, -9.0])
def test_gae_never_reads_padding(padding):
    rewards, values = row(0.0, 1.0, padding), row(0.2, 0.5, padding)
    advantages, returns = gae(rewards, values, row(1, 1, 0), 1.0, 0.95)
    close(advantages, row(0.775, 0.5, 0.0))
    close(returns, row(0.975, 1.0, 0.0))


@pytest.mark.parametrize("gamma", [1.0, 0.99, 0.5, 0.0])
@pytest.mark.parametrize("gae_lambda", [1.0, 0.95, 0.3, 0.0])
def test_gae_equals_a_double_loop(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(7)
    lengths = [1, 2, 129, 150, 57]
    mask = ragged(lengths)
    rewards, values = torch.randn(2, 5, 150, generator=generator, dtype=torch.float64)
    want = torch.zeros_like(values)
    for i, length in enumerate(lengths):
        r, v = rewards[i].tolist(), [*values[i, :length].tolist(), 0.0]  # no bootstrapping: 0
        for t in range(length):
            want[i, t] = sum(
                (gamma * gae_lambda) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k])
                for k in range(t, length)
            )
    advantages, returns = gae(rewards, values, mask, gamma, gae_lambda)
    close(advantages, want, 1e-10)
    close(returns, torch.where(mask, want + values, 0.0), 1e-10)


def test_gae_leaves_its_inputs_alone():
    inputs = row(0.0, 1.0, 5.0), row(0.2, 0.5, 9.0), row(1, 1, 0)
    copies = [x.clone() for x in inputs]
    gae(*inputs, 0.9, 0.8)
    assert all(map(torch.equal, inputs, copies))


@pytest.mark.parametrize("half_life", [None, 2.0, 32.0])
def test_gae_and_future_kl_are_the_same_recurrence(half_life):
    # y_t = x_t + c y_(t+1): x are TD errors and c is lambda, or x are log-ratios and c is gamma
    generator, mask = torch.Generator().manual_seed(3), ragged([300, 1, 128, 129, 40])
    rewards, values = torch.randn(2, 5, 300, generator=generator)
    discount = 1.0 if half_life is None else 2 ** (-1 / half_life)
    inside = torch.where(mask, values, 0.0)
    errors = rewards + torch.cat([inside[:, 1:], torch.zeros(5, 1)], 1) - inside
    advantages, _ = gae(rewards, values, mask, 1.0, discount)
    close(advantages, fipo.future_kl(errors, mask, half_life, None), 1e-4)
    sums, _ = gae(rewards, 0 * values, mask, discount, 1.0)
    close(sums, fipo.future_kl(rewards, mask, half_life, None), 1e-4)


# --------------------------------------------------------------------------------------------------
# whiten
# --------------------------------------------------------------------------------------------------

ALONE = SimpleNamespace(reduce=lambda x: x)


class PseudoRank:
    """What mean_and_variance takes for an accelerator: reduce adds up over the threads."""

    def __init__(self, shared, rank):
        self.shared, self.rank = shared, rank

    def reduce(self, x):
        self.shared.parts[self.rank] = x
        self.shared.barrier.wait(timeout=30)
        total = sum(self.shared.parts)
        self.shared.barrier.wait(timeout=30)
        return total


def whitened(*ranks):
    """whiten of (x, mask) pairs, one per rank, with the statistics of all of them."""
    shared = SimpleNamespace(parts=[None] * len(ranks), barrier=threading.Barrier(len(ranks)))
    found = [None] * len(ranks)

    def work(rank, x, mask):
        moments = mean_and_variance(x, mask.bool(), PseudoRank(shared, rank))
        found[rank] = whiten(x, mask, *moments)

    threads = [threading.Thread(target=work, args=(i, *pair)) for i, pair in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_whiten_by_hand_with_the_population_variance():
    # mean 2, variance ((1 - 2)^2 + (3 - 2)^2) / 2 = 1; the unbiased one would give 0.70711
    mean, var = mean_and_variance(row(1.0, 3.0, 100.0), row(1, 1, 0).bool(), ALONE)
    assert (mean.item(), var.item()) == (2.0, 1.0)
    close(whiten(row(1.0, 3.0, 100.0), row(1, 1, 0), mean, var), row(-1.0, 1.0, 0.0))


def test_whiten_adds_1e_8_to_the_variance():
    # 1e-4 / sqrt(0 + 1e-8) = 1, and 1 / sqrt(3e-8 + 1e-8) = 5000
    close(whiten(row(1e-4), row(1), torch.tensor(0.0), torch.tensor(0.0)), row(1.0))
    close(whiten(row(1.0), row(1), torch.tensor(0.0), torch.tensor(3e-8)), row(5000.0))


def test_whiten_of_a_single_token_and_of_equal_ones_is_0():
    for x, mask in ((row(0.7, 9.0), row(1, 0)), (torch.full((3, 16), 0.7), torch.ones(3, 16))):
        assert whitened((x, mask))[0].abs().max() < 1e-6


def test_whiten_of_no_token_is_0():
    assert whitened((row(5.0, NAN), row(0, 0)))[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("padding", [NAN, math.inf, 1e9])
def test_whiten_never_reads_padding(padding):
    close(whitened((row(1.0, 3.0, padding), row(1, 1, 0)))[0], row(-1.0, 1.0, 0.0))


def test_whiten_over_two_ranks_uses_global_statistics():
    # [1, 1] and [3, 3]: mean 2, variance 1; of a rank alone both would be all 0
    one, two = whitened((row(1.0, 1.0), row(1, 1)), (row(3.0, 3.0), row(1, 1)))
    close(one, row(-1.0, -1.0))
    close(two, row(1.0, 1.0))


def test_whiten_weighs_ranks_by_their_tokens_and_takes_an_empty_one():
    # [0, 0, 0] and [4]: mean 1, variance (3 + 9) / 4 = 3; the third rank has no token
    empty = row(NAN, NAN), row(0, 0)
    found = whitened((row(0.0, 0.0, 0.0), row(1, 1, 1)), (row(4.0, 8.0), row(1, 0)), empty)
    close(found[0], row(*[-1 / math.sqrt(3)] * 3))
    close(found[1], row(math.sqrt(3), 0.0))
    assert found[2].tolist() == [[0.0, 0.0]]


def test_whiten_of_a_single_token_beside_a_rank_of_others():
    # One token here, three there: never a question of how many this rank has
    one, _ = whitened((row(1.0), row(1)), (row(3.0, 3.0, 1.0), row(1, 1, 1)))
    close(one, row(-1.0))


def test_whiten_keeps_the_dtype_and_its_input():
    x = row(1.0, 3.0)
    (y,) = whitened((x, row(1, 1)))
    assert y.dtype == torch.float32 and x.tolist() == [[1.0, 3.0]]


# --------------------------------------------------------------------------------------------------
# policy_loss
# --------------------------------------------------------------------------------------------------


def surrogate(ratios, advantages, mask=None, num_tokens=1, low=0.2, high=0.2, dual_clip=None):
    """policy_loss for ratios [B, T] against old log-probabilities of 0; also the gradient."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    mask = torch.ones_like(logprobs) if mask is None else torch.tensor(mask)
    advantages = torch.tensor(advantages)
    loss, stats = policy_loss(
        logprobs, torch.zeros_like(logprobs), advantages, mask, num_tokens, low, high, dual_clip
    )
    loss.backward()
    return loss.item(), logprobs.grad, stats


def test_policy_loss_at_the_first_update_is_minus_the_mean_advantage():
    # Ratio 1: -(2 - 1 + 0.5) / 3 = -0.5, gradient -A / 3; no clip, no KL
    loss, gradient, stats = surrogate([[1.0, 1.0, 1.0]], [[2.0, -1.0, 0.5]], num_tokens=3)
    assert loss == pytest.approx(-0.5)
    close(gradient, row(-2 / 3, 1 / 3, -0.5 / 3))
    names = ("kl", "clip_high_frac", "clip_low_frac", "dual_clip_frac")
    assert [stats[f"policy/{name}"].item() for name in names] == [0, 0, 0, 0]


def test_rfpo_table6_clip_of_a_fifth_on_both_sides():
    # -min(1.3, 1.2), +max(1.3, 1.2), -min(0.7, 0.8), +max(0.7, 0.8): -1.2 + 1.3 - 0.7 + 0.8 = 0.2
    loss, gradient, stats = surrogate([[1.3, 1.3, 0.7, 0.7]], [[1.0, -1.0, 1.0, -1.0]])
    assert loss == pytest.approx(0.2)
    close(gradient, row(0.0, 1.3, -0.7, 0.0))
    assert stats["policy/clip_high_frac"] == 1 and stats["policy/clip_low_frac"] == 1
    assert stats["policy/loss"].item() == pytest.approx(0.2)


def test_policy_loss_has_a_bound_for_each_side():
    # [1 - 0.1, 1 + 0.3]: 1.25 and 0.95 are inside, 1.35 counts as 1.3 and 0.85 as 0.9
    found = surrogate([[1.25, 0.95, 1.35, 0.85]], [[1.0, -1.0, 1.0, -1.0]], low=0.1, high=0.3)
    assert found[0] == pytest.approx(-1.25 + 0.95 - 1.3 + 0.9)
    close(found[1], row(-1.25, 0.95, 0.0, 0.0))


def test_policy_clip_binds_in_the_second_of_two_updates():
    # SGD at rate 0.5: the first update moves log-probs by 0.5 A, so ratios are exp(+-0.5)
    logprobs, advantages = torch.zeros(1, 2, requires_grad=True), row(1.0, -1.0)
    found = []
    for _ in range(2):
        logprobs.grad = None
        loss, stats = policy_loss(
            logprobs, torch.zeros(1, 2), advantages, row(1, 1), 1, 0.2, 0.2, None
        )
        loss.backward()
        clipped = stats["policy/clip_high_frac"] + stats["policy/clip_low_frac"]
        found.append((round(loss.item(), 6), int(clipped), logprobs.grad.tolist()))
        with torch.no_grad():
            logprobs -= 0.5 * logprobs.grad
    # -1 + 1, then -1.2 + 0.8 = -0.4 without a gradient
    assert found == [(0.0, 0, [[-1.0, 1.0]]), (-0.4, 2, [[0.0, 0.0]])]


def test_policy_loss_has_no_dual_clip_unless_asked():
    for dual_clip, want, slope, count in ((None, 5.0, 5.0, 0), (3.0, 3.0, 0.0, 1)):
        loss, gradient, stats = surrogate([[5.0]], [[-1.0]], dual_clip=dual_clip)
        assert loss == pytest.approx(want) and gradient.item() == pytest.approx(slope)
        assert stats["policy/dual_clip_frac"] == count


def test_dual_clip_acts_on_negative_advantages_beyond_its_bound_only():
    # 2 < 3 stays; A > 0 is clipped at 1.2 as ever; 4 * 2 is bounded by 3 * 2
    loss, gradient, stats = surrogate([[2.0, 4.0, 4.0]], [[-1.0, 1.0, -2.0]], dual_clip=3.0)
    assert loss == pytest.approx(2.0 - 1.2 + 6.0)
    close(gradient, row(2.0, 0.0, 0.0))
    assert stats["policy/dual_clip_frac"] == 1


def test_policy_loss_never_reads_padding():
    # Three rows of one token: NaN in the padding of log-probs, old log-probs, advantages
    logprobs = torch.tensor([[0.1, NAN], [0.1, 0.0], [0.1, 0.0]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0], [0.0, NAN], [0.0, 0.0]])
    advantages = torch.tensor([[1.0, 9.0], [1.0, 9.0], [1.0, NAN]])
    mask = torch.tensor([[1, 0]] * 3)
    loss, stats = policy_loss(logprobs, old, advantages, mask, 3, 0.2, 0.2, 3.0)
    loss.backward()
    assert loss.item() == pytest.approx(-math.exp(0.1))
    close(logprobs.grad, torch.tensor([[-math.exp(0.1) / 3, 0.0]] * 3))
    assert all(math.isfinite(x.item()) for x in stats.values())


def test_policy_stats_count_each_clip_and_leave_padding_out():
    # A > 0 at 1.3 twice, A < 0 at 0.7 once, and A < 0 at 11 for the dual clip; a padded slot each
    ratios = [[1.3] * 2, [1.3] * 2, [0.7] * 2, [11.0] * 2]
    advantages = [[1.0] * 2, [1.0] * 2, [-1.0] * 2, [-1.0] * 2]
    _, gradient, stats = surrogate(ratios, advantages, [[1, 0]] * 4, dual_clip=3.0)
    names = ("clip_high_frac", "clip_low_frac", "dual_clip_frac")
    assert [stats[f"policy/{name}"].item() for name in names] == [2, 1, 1]
    assert gradient[:, 1].tolist() == [0.0] * 4


def test_policy_kl_is_the_sum_of_old_minus_new_log_probs():
    # -ln 2 + ln 4 = ln 2
    _, _, stats = surrogate([[2.0, 0.25, 9.0]], [[1.0] * 3], [[1, 1, 0]], num_tokens=2)
    assert stats["policy/kl"].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "want"),
    [
        (200.0, 0.0, 0.0),
        (200.0, 1.0, -1.2),
        (200.0, -1.0, math.exp(20)),  # clamped at 20
        (-200.0, 1.0, -math.exp(-20)),  # clamped at -20
        (-200.0, -1.0, 0.8),
    ],
)
def test_policy_loss_of_an_extreme_log_ratio_is_finite(log_ratio, advantage, want):
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    loss, _ = policy_loss(logprobs, row(0.0), row(advantage), row(1), 1, 0.2, 0.2)
    loss.backward()
    assert loss.item() == pytest.approx(want) and torch.isfinite(logprobs.grad).all()


def test_policy_loss_keeps_a_nan_of_a_token_visible_in_loss_and_gradient():
    loss, gradient, _ = surrogate([[1.0, NAN]], [[1.0, 1.0]])
    assert math.isnan(loss) and gradient[0].isnan().tolist() == [False, True]


def test_policy_loss_of_no_token_is_0_with_a_gradient_of_0():
    loss, gradient, _ = surrogate([[1.5]], [[1.0]], [[0]], num_tokens=0)
    assert loss == 0 and gradient.tolist() == [[0.0]]


def test_policy_loss_of_microbatches_adds_up_to_that_of_the_batch():
    generator, mask = torch.Generator().manual_seed(1), ragged([5, 1, 3, 4])
    x = 0.4 * torch.randn(3, 4, 5, generator=generator)
    settings = int(mask.sum()), 0.2, 0.2, 1.3

    def total(pieces):
        logprobs = x[0].clone().requires_grad_()
        losses = [policy_loss(logprobs[p], x[1][p], x[2][p], mask[p], *settings)[0] for p in pieces]
        sum(losses).backward()
        return sum(losses).detach(), logprobs.grad

    whole = total([[0, 1, 2, 3]])
    for pieces in ([[3, 1], [0], [2]], [[2], [0, 3, 1]]):
        for got, want in zip(total(pieces), whole, strict=True):
            close(got, want)


# --------------------------------------------------------------------------------------------------
# value_loss
# --------------------------------------------------------------------------------------------------


def value_error(values, old_values, returns, mask=None, num_states=1, value_clip=0.5):
    """value_loss, and its gradient with respect to the values."""
    values = torch.tensor(values, requires_grad=True)
    mask = torch.ones_like(values) if mask is None else torch.tensor(mask)
    old_values, returns = torch.tensor(old_values), torch.tensor(returns)
    loss, stats = value_loss(values, old_values, returns, mask, num_states, value_clip)
    loss.backward()
    return loss.item(), values.grad, stats


def test_value_loss_is_half_the_squared_error():
    # 0.5 * (0.3 - 1)^2 = 0.245; gradient V - R = -0.7
    loss, gradient, stats = value_error([[0.3]], [[0.3]], [[1.0]])
    assert loss == pytest.approx(0.245) and gradient.item() == pytest.approx(-0.7)
    assert stats["value/loss"].item() == pytest.approx(0.245)
    assert stats["value/clip_frac"] == 0


def test_rfpo_table6_value_loss_clipped_at_one_half_takes_the_larger_error():
    # old 0, R = 1.  V = 0.8: clipped to 0.5, 0.5 * 0.25 > 0.5 * 0.04: clipped, no gradient.
    # V = -0.8: clipped to -0.5, 0.5 * 2.25 < 0.5 * 3.24: unclipped.  V = 0.4: no clip, 0.5 * 0.36
    loss, gradient, stats = value_error([[0.8, -0.8, 0.4]], [[0.0] * 3], [[1.0] * 3])
    assert loss == pytest.approx(0.125 + 1.62 + 0.18)
    close(gradient, row(0.0, -1.8, -0.6))
    assert stats["value/clip_frac"] == 1
    # and the other way down: old 0, R = -1, V = -0.8 is clipped to -0.5
    loss, gradient, stats = value_error([[-0.8]], [[0.0]], [[-1.0]])
    assert loss == pytest.approx(0.125) and gradient.item() == 0 and stats["value/clip_frac"] == 1


def test_value_clip_is_around_the_old_value():
    # old 2, clip 0.25: V = 3 counts as 2.25 against R = 3: 0.5 * 0.75^2
    loss, gradient, _ = value_error([[3.0]], [[2.0]], [[3.0]], value_clip=0.25)
    assert loss == pytest.approx(0.28125) and gradient.item() == 0


def test_no_value_within_the_clip_counts_as_clipped():
    # At most 0.48 from its old value; old + (V - old) may miss V by its last bits, which is no clip
    values, old = 0.24 * (2 * torch.rand(2, 10_000, generator=torch.Generator().manual_seed(0)) - 1)
    _, stats = value_loss(values, old, 0 * old, torch.ones(10_000), 10_000, 0.5)
    assert stats["value/clip_frac"] == 0


def test_value_clip_binds_in_the_second_of_two_updates():
    # SGD at rate 0.6 from V = 0 towards R = 1: V = 0.6 is beyond the clip, so the gradient is 0
    values, old, found = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, 1), []
    for _ in range(2):
        values.grad = None
        loss, stats = value_loss(values, old, row(1.0), row(1), 1, 0.5)
        loss.backward()
        found.append((loss.item(), int(stats["value/clip_frac"]), values.grad.item()))
        with torch.no_grad():
            values -= 0.6 * values.grad
    assert found == [(0.5, 0, -1.0), (0.125, 1, 0.0)]


def test_value_loss_is_a_sum_over_states_by_num_states():
    # 0.5 * (1 + 4 + 9) / 10 = 0.7, gradient (V - R) / 10; the stats are sums
    x, mask = [[1.0, 2.0], [3.0, 7.0]], [[1, 1], [1, 0]]
    loss, gradient, stats = value_error(x, x, [[0.0] * 2] * 2, mask, num_states=10)
    assert loss == pytest.approx(0.7) and stats["value/loss"].item() == pytest.approx(7.0)
    close(gradient, torch.tensor([[0.1, 0.2], [0.3, 0.0]]))


def test_value_loss_never_reads_padding():
    # NaN in the padding of values, of old values, of returns; V = 0.9 is beyond the clip
    values = [[0.3, NAN], [0.9, 5.0], [0.3, 5.0]]
    old, returns = [[0.3, 0.0], [0.0, NAN], [0.3, 0.0]], [[1.0, 0.0], [1.0, 0.0], [1.0, NAN]]
    loss, gradient, stats = value_error(values, old, returns, [[1, 0]] * 3)
    assert loss == pytest.approx(2 * 0.245 + 0.125)
    close(gradient, torch.tensor([[-0.7, 0.0], [0.0, 0.0], [-0.7, 0.0]]))
    assert stats["value/clip_frac"] == 1 and math.isfinite(stats["value/loss"].item())


def test_value_loss_keeps_a_nan_of_a_state_visible_in_loss_and_gradient():
    loss, gradient, _ = value_error([[NAN, 0.3]], [[0.0, 0.3]], [[1.0, 1.0]])
    assert math.isnan(loss) and gradient.isnan().any()


def test_value_loss_of_no_state_is_0_with_a_gradient_of_0():
    loss, gradient, _ = value_error([[0.5]], [[0.0]], [[1.0]], [[0]], num_states=0)
    assert loss == 0 and gradient.tolist() == [[0.0]]


def test_value_loss_takes_any_shape():
    for shape in ((6,), (2, 3), (1, 2, 3)):
        ones = torch.ones(shape)
        assert value_loss(0 * ones, 0 * ones, ones, ones, 6, 0.5)[0] == 0.5


def test_value_loss_of_microbatches_adds_up_to_that_of_the_batch():
    generator, mask = torch.Generator().manual_seed(2), ragged([6, 2, 4, 5])
    x = torch.randn(3, 4, 6, generator=generator)

    def total(pieces):
        values = x[0].clone().requires_grad_()
        losses = [
            value_loss(values[p], x[1][p], x[2][p], mask[p], mask.sum(), 0.5)[0] for p in pieces
        ]
        sum(losses).backward()
        return sum(losses).detach(), values.grad

    whole = total([[0, 1, 2, 3]])
    for pieces in ([[3, 1], [0], [2]], [[2], [0, 3, 1]]):
        for got, want in zip(total(pieces), whole, strict=True):
            close(got, want)


# --------------------------------------------------------------------------------------------------
# The critic: which state a value belongs to
# --------------------------------------------------------------------------------------------------


def make_critic(bias: float = 0.3, **changes) -> models.Critic:
    """A tiny critic with random weights; its head has a bias, which values must include."""
    torch.manual_seed(0)
    config = tiny.make_config()
    config.num_labels = 1
    for name, value in changes.items():
        setattr(config, name, value)
    lm = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.constant_(lm.score.bias, bias)
    return models.Critic(lm)


def read(critic, sequences, width=None):
    """Values [b, width + 1] of (prompt, response) pairs of token ids."""
    ids = [torch.tensor([*prompt, *response]) for prompt, response in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    prompts, responses = (torch.tensor([len(pair[i]) for pair in sequences]) for i in (0, 1))
    with torch.no_grad():
        return critic(ids, prompts, responses, int(responses.max()) if width is None else width)


def test_the_baseline_has_not_seen_the_token_it_judges():
    critic, prompt, response = make_critic(), [5, 6, 7], [8, 9, 10, 11, 12]
    values = read(critic, [(prompt, response)])[0]  # [T + 1]
    assert len(values) == len(response) + 1
    for t in range(len(response)):
        changed = [*response]
        changed[t] = 50 + t
        other = read(critic, [(prompt, changed)])[0]
        close(other[: t + 1], values[: t + 1])  # states up to the one in which token t is chosen
        assert ((other - values)[t + 1 :].abs() > 1e-3).all()  # every state after it, the last too


def test_values_of_a_response_are_read_from_the_token_before_it_to_its_last():
    # Prompt [5, 6, 7], response [8, 9]: positions 2, 3 and 4 of the classifier's own output
    critic = make_critic()
    values = read(critic, [([5, 6, 7], [8, 9])])
    with torch.no_grad():
        everywhere = critic.lm(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits[:, :, 0]
    assert values.dtype == torch.float32 and values.shape == (1, 3)
    close(values, everywhere[:, 2:5])


def test_values_of_a_row_depend_on_no_other_row_and_no_padding():
    critic = make_critic(attention_dropout=0.1, classifier_dropout=0.5)  # neither is in force
    pairs = [([5, 6, 7], [8, 9]), ([4, 5, 6, 7, 8, 9], [20, 21, 22, 23]), ([30], [31])]
    together, wide = read(critic, pairs), read(critic, pairs, width=9)
    assert wide.shape == (3, 10) and wide[:, 5:].abs().max() == 0
    for i, (prompt, response) in enumerate(pairs):
        alone = read(critic, [(prompt, response)])[0]
        for values in (together[i], wide[i]):
            close(values[: len(alone)], alone, 1e-5)
            assert values[len(alone) :].tolist() == [0.0] * (len(values) - len(alone))


# --------------------------------------------------------------------------------------------------
# The loop: one small run of ppo_critic.main, in this process
# --------------------------------------------------------------------------------------------------

# About half of all responses are right, whatever an untrained model writes.
REWARD = """
def reward(prompts, responses, golds):
    return [float(sum(map(ord, r)) % 2) for r in responses]
"""


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory) -> str:
    """The untrained tiny policy, with a quarter of the vocabulary as stop ids, so that responses
    differ in length."""
    folder = tmp_path_factory.mktemp("policy") / "untrained"
    shutil.copytree(tiny.untrained_policy(), folder)
    GenerationConfig(eos_token_id=list(range(1, 36))).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def small_run(tmp_path, monkeypatch, policy_folder):
    """Runs a script at small sizes; returns its folder and its metrics, by step."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    (tmp_path / "reward.py").write_text(REWARD)
    problems = tiny.problems
    # 9 problems instead of 20,000, and no picture: seconds that this test has no use for
    monkeypatch.setattr(tiny, "problems", lambda split, *_, **__: problems(split, 9, seed=0))
    monkeypatch.setattr(common.Run, "finish", lambda self: None)

    def run(script=ppo_critic, name="run", **changes):
        monkeypatch.setattr(sys, "argv", [str(ROOT / f"{script.__name__}.py")])
        settings = {
            "model": policy_folder,
            "reward": f"{tmp_path / 'reward.py'}:reward",
            "runs_dir": str(tmp_path / "runs"),
            "run_name": name,
            "rollout_engine": "hf",
            "num_steps": 1,
            "prompts_per_step": 3,
            "group_size": 4,
            "minibatch_size": 12,
            "tokens_per_microbatch": 48,  # several micro-batches
            "max_response_tokens": 8,
            "eval_problems": 1,
            "eval_samples": 1,
            "critic_updates_per_batch": 1,
            "critic_warmup_steps": 0,
            "save_actor_at_step": None,
            "save_critic_at_step": None,
            **changes,
        }
        known = {field.name for field in fields(script.Args)}
        script.main(script.Args(**{k: v for k, v in settings.items() if k in known}), "tiny")
        folder = tmp_path / "runs" / name
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return folder, {line["step"]: line for line in lines}

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def spy(monkeypatch):
    """Keeps the arguments and the result of every call of a function of ppo_critic."""

    def watch(name):
        function, calls = getattr(ppo_critic, name), []

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            result = function(*args, **kwargs)
            calls.append(SimpleNamespace(args=args, kwargs=kwargs, result=result))
            return result

        monkeypatch.setattr(ppo_critic, name, wrapper)
        return calls

    return watch


def weights(folder: Path) -> dict:
    return load_file(folder / "model.safetensors")


def same(one: dict, two: dict, atol: float = 0.0) -> bool:
    """Whether both hold (bit for bit) the same tensors under the names that they share."""
    shared = one.keys() & two.keys()
    return bool(shared) and all(
        torch.allclose(one[name], two[name], rtol=0, atol=atol) for name in shared
    )


def test_the_terminal_state_gets_gradient(small_run, spy):
    losses, gaes = spy("value_loss"), spy("gae")

    def keep_gradient(values, *_):
        values.retain_grad()

    original = ppo_critic.value_loss
    ppo_critic.value_loss = lambda *args: (keep_gradient(*args), original(*args))[1]
    small_run()
    ppo_critic.value_loss = original
    (call,) = gaes
    length = call.args[2].sum(1)  # of each response
    assert length.min() < length.max()
    seen = []
    for loss in losses:
        values, old, targets, keep, num_states, _ = loss.args
        assert values.shape[1] == call.args[2].shape[1] + 1
        ends = keep.sum(1) - 1  # T states for the tokens of a response, and the terminal one
        at_end = torch.arange(len(ends)), ends
        assert not keep[:, 1:][~keep[:, :-1]].any()  # contiguous
        seen += ends.tolist()
        # The first update: no clip, so the gradient is (V - R) / num_states, where there is a state
        close(values.grad, torch.where(keep, values - targets, 0.0).detach() / num_states)
        assert values.grad[at_end].abs().min() > 0
        # gamma = lambda = 1: every state of a response has the outcome for its target
        close(torch.where(keep, targets, 0.0), torch.where(keep, targets[at_end][:, None], 0.0))
        assert set(targets[at_end].tolist()) <= {0.0, 1.0}
        close(old, values.detach(), 1e-5)  # the values at the rollout, of all T + 1 states
    assert sorted(seen) == sorted(length.tolist())
    assert num_states == sum(seen) + len(seen)


def test_targets_by_gae_stop_before_the_terminal_state(small_run, spy):
    # gamma 0.5, lambda 0: the target of state t is r_t + 0.5 V_(t+1), but the last token's is the
    # outcome alone, and so is the terminal state's
    losses = spy("value_loss")
    small_run(gamma=0.5, gae_lambda=0.0)
    for loss in losses:
        _, old, targets, keep, _, _ = loss.args
        for i, end in enumerate((keep.sum(1) - 1).tolist()):
            assert targets[i, end] in (0.0, 1.0)
            assert targets[i, end - 1] == pytest.approx(targets[i, end].item(), abs=1e-6)
            close(targets[i, : end - 1], 0.5 * old[i, 1:end])


def test_the_reward_stands_at_the_last_token_cut_off_or_not(small_run, spy):
    gaes, made = spy("gae"), spy("make_batch")
    small_run()
    (rewards, values, mask, gamma, gae_lambda), batch = gaes[0].args, made[0].result
    correct = torch.tensor([c for group in made[0].args[0] for c in group.correct])[batch.rows]
    finished = [r.finished for group in made[0].args[0] for r in group.responses]
    assert 0 < sum(finished) < len(finished) and 0 < correct.sum() < len(correct)
    assert rewards.shape == values.shape == mask.shape and (gamma, gae_lambda) == (1.0, 1.0)
    for i, length in enumerate(batch.response_lengths.tolist()):
        assert rewards[i].tolist() == [
            float(correct[i]) if t == length - 1 else 0.0 for t in range(mask.shape[1])
        ]


def test_rfpo_table6_advantages_are_whitened_over_the_batch(small_run, spy):
    gaes, made, losses = spy("gae"), spy("make_batch"), spy("policy_loss")
    small_run()
    mask, (advantages, _) = gaes[0].args[2], gaes[0].result
    x = advantages[mask].double()
    want = torch.where(mask, (advantages - x.mean()) / x.std(unbiased=False), 0.0)
    trained = torch.cat([loss.args[2][loss.args[3]] for loss in losses]).sort().values
    close(trained, want[mask].float().sort().values, 1e-5)
    assert len(made) == 1 and all(loss.args[4] == mask.sum() for loss in losses)


def test_one_update_has_ratio_1_exactly_and_no_pass_for_old_log_probs(small_run, monkeypatch):
    grads = []
    forward = models.Policy.forward
    monkeypatch.setattr(
        models.Policy,
        "forward",
        lambda self, *args: (grads.append(torch.is_grad_enabled()), forward(self, *args))[1],
    )
    _, metrics = small_run()
    line = metrics[1]
    assert line["train/updates_per_batch"] == 1
    names = ("policy/kl", "policy/clip_high_frac", "policy/clip_low_frac", "policy/dual_clip_frac")
    assert [line[name] for name in names] == [0.0] * 4
    assert line["value/clip_frac"] == 0.0 and line["optim/grad_norm"] > 0
    assert grads and all(grads)
    assert line["rollout/logprob_gap_max"] < 1e-4


def test_a_pass_for_old_log_probs_changes_no_number_of_one_update(small_run):
    one, line = small_run(name="one")
    two, other = small_run(name="two", old_logprobs_pass=True)
    assert same(weights(one / "model"), weights(two / "model"))
    names = [n for n in line[1] if n.split("/")[0] in ("policy", "value", "optim", "reward")]
    assert len(names) > 15
    assert {n: line[1][n] for n in names} == {n: other[1][n] for n in names}
    assert other[1]["policy/kl"] == 0.0


def test_two_updates_take_old_log_probs_before_the_first(small_run, spy, monkeypatch):
    no_grad_rows, losses = [], spy("policy_loss")
    forward = models.Policy.forward

    def counted(self, ids, *args):
        if not torch.is_grad_enabled():
            no_grad_rows.append(len(ids))
        return forward(self, ids, *args)

    monkeypatch.setattr(models.Policy, "forward", counted)
    _, metrics = small_run(minibatch_size=6, learning_rate=0.02, warmup_steps=0)
    line = metrics[1]
    assert line["train/updates_per_batch"] == 2
    assert sum(no_grad_rows) == 6  # the second minibatch; the first has its update's own forward
    # The old log-probs are the sampler's, though weights moved far between the two updates
    assert line["rollout/logprob_gap_max"] < 1e-4
    moved = [(c.args[0] - c.args[1])[c.args[3].bool()].abs().max().item() for c in losses]
    assert min(moved) == 0.0 and max(moved) > 0.1
    assert line["policy/kl"] != 0.0
    assert line["policy/clip_high_frac"] + line["policy/clip_low_frac"] > 0


def test_a_second_epoch_clips_against_the_first(small_run):
    rates = {"warmup_steps": 0, "learning_rate": 0.02, "critic_learning_rate": 1e-3}
    _, metrics = small_run(num_epochs=2, value_clip=0.01, **rates)
    line = metrics[1]
    assert line["train/updates_per_batch"] == 2 and line["policy/kl"] != 0.0
    assert line["policy/clip_high_frac"] + line["policy/clip_low_frac"] > 0
    assert line["value/clip_frac"] > 0  # the critic's second epoch, against the rollout's values
    assert line["rollout/logprob_gap_max"] < 1e-4


def test_policy_and_critic_cut_one_batch_each_in_their_own_way(small_run, spy):
    # 12 responses: 2 policy minibatches of 6, 3 critic minibatches of 4
    gaes, policies, critics = spy("gae"), spy("policy_loss"), spy("value_loss")
    small_run(minibatch_size=6, critic_updates_per_batch=3)
    tokens = int(gaes[0].args[2].sum())

    def groups_of(calls):
        """(rows, their tokens or states, the number that divides) of each run of micro-batches."""
        found = []
        for number, run in itertools.groupby(calls, lambda c: int(c.args[4])):
            masks = [c.args[3] for c in run]
            found.append((sum(map(len, masks)), sum(int(m.sum()) for m in masks), number))
        return found

    cut, critic_cut = groups_of(policies), groups_of(critics)
    assert [rows for rows, _, _ in cut] == [6, 6]
    assert [rows for rows, _, _ in critic_cut] == [4, 4, 4]
    assert all(inside == number for _, inside, number in (*cut, *critic_cut))
    assert sum(number for *_, number in cut) == tokens
    assert sum(number for *_, number in critic_cut) == tokens + 12  # T + 1 states each


def test_critic_updates_clip_around_the_values_of_the_rollout(small_run, spy):
    # The second part of the batch meets a critic that has moved; its old_values have not
    losses = spy("value_loss")
    rates = {"warmup_steps": 0, "critic_learning_rate": 1e-3}
    _, metrics = small_run(critic_updates_per_batch=2, value_clip=0.01, **rates)
    moved = [(c.args[0] - c.args[1])[c.args[3]].abs().max().item() for c in losses]
    assert moved[0] < 1e-5 and moved[-1] > 0.02
    assert metrics[1]["value/clip_frac"] > 0 and metrics[1]["train/updates_per_batch"] == 1


def test_critic_warmup_trains_the_critic_alone(small_run, policy_folder):
    flags = {"save_actor_at_step": 2, "save_critic_at_step": 2, "num_steps": 3}
    folder, metrics = small_run(critic_warmup_steps=2, learning_rate=1.0, **flags)
    start = weights(Path(policy_folder))
    assert same(weights(folder / "pi_0"), start)  # bit for bit
    assert not same(weights(folder / "critic"), start)
    assert not same(weights(folder / "model"), start)
    for step in (1, 2):
        assert metrics[step]["train/updates_per_batch"] == 0
        assert metrics[step]["optim/critic_grad_norm"] > 0
        assert not [name for name in metrics[step] if name.startswith("policy/")]
    assert metrics[3]["train/updates_per_batch"] == 1 and metrics[3]["policy/kl"] == 0.0
    # Warm-up of the rates: the critic's from the first step, the policy's from its own first
    critic_rates = [metrics[step]["optim/critic_learning_rate"] for step in (1, 2, 3)]
    assert critic_rates == pytest.approx([1e-4, 2e-4, 3e-4])
    assert metrics[3]["optim/learning_rate"] == pytest.approx(0.1)


def test_a_run_too_short_for_the_pair_says_so_at_start(small_run, capsys):
    small_run(num_steps=1, save_actor_at_step=1, save_critic_at_step=2)
    assert "--num-steps 1 ends before step 2" in capsys.readouterr().out
    small_run(name="long", num_steps=2, save_actor_at_step=1, save_critic_at_step=2)
    assert "ends before" not in capsys.readouterr().out


def test_neither_update_touches_the_other_module(small_run, policy_folder):
    # A rate of 1e-30 leaves fp32 weights where they are, but for zeros, which move by 1e-31
    save = {"save_critic_at_step": 1}
    both, _ = small_run(name="both", critic_learning_rate=0.1, learning_rate=0.1, **save)
    actor, _ = small_run(name="actor", critic_learning_rate=1e-30, learning_rate=0.1, **save)
    critic, _ = small_run(name="critic", critic_learning_rate=0.1, learning_rate=1e-30, **save)
    start = weights(Path(policy_folder))
    assert same(weights(critic / "model"), start, 1e-29)
    assert same(weights(actor / "critic"), start, 1e-29)
    assert not same(weights(both / "model"), start) and not same(weights(both / "critic"), start)
    assert same(weights(actor / "model"), weights(both / "model"))
    assert same(weights(critic / "critic"), weights(both / "critic"))


def test_both_optimizers_are_adamw_with_the_settings_of_table_6(small_run, monkeypatch):
    found = []
    monkeypatch.setattr(common.Run, "resume", lambda self, *trained: found.extend(trained) or {})
    small_run()
    assert [type(module).__name__ for module, _ in found] == ["Policy", "Critic"]
    for module, optimizer in found:
        assert isinstance(optimizer.optimizer, torch.optim.AdamW)
        (group,) = optimizer.param_groups
        assert group["betas"] == (0.9, 0.999) and group["weight_decay"] == 0.1
        assert {*map(id, group["params"])} == {*map(id, module.parameters())}


def test_gradients_of_both_are_clipped(small_run, monkeypatch):
    found, step = [], torch.optim.AdamW.step

    def watched(self, *args, **kwargs):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        found.append(torch.stack([g.norm() for g in grads if g is not None]).norm().item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    monkeypatch.setattr(common.Run, "save_if_due", lambda self, *_, **__: None)
    _, metrics = small_run(max_grad_norm=1e-3)
    assert metrics[1]["optim/grad_norm"] > 1e-3 and metrics[1]["optim/critic_grad_norm"] > 1e-3
    assert found == pytest.approx([1e-3, 1e-3], rel=1e-2)


def test_no_gradient_is_left_over_for_the_next_update(small_run):
    # At rates of 1e-30 a second epoch has the gradients of the first again, not twice as much
    rates = {"learning_rate": 1e-30, "critic_learning_rate": 1e-30}
    (_, once), (_, twice) = (small_run(name=f"{n}", num_epochs=n, **rates) for n in (1, 2))
    for name in ("optim/grad_norm", "optim/critic_grad_norm"):
        assert twice[1][name] == pytest.approx(once[1][name], rel=1e-4)


def test_logged_explained_variance_is_that_of_values_and_returns(small_run, spy):
    gaes = spy("gae")
    _, metrics = small_run()
    (_, values, mask, _, _), (_, returns) = gaes[0].args, gaes[0].result
    want = explained_variance(values, returns, mask)
    assert want != 0 and metrics[1]["value/explained_variance"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("bias", [20.0, -20.0])  # so that a padded 0 would be an extreme
def test_logged_value_metrics_are_those_of_all_states(bias, small_run, spy, tmp_path):
    losses, gathered, made = spy("value_loss"), spy("gather_rows"), spy("make_batch")
    critic = saved(tmp_path / "critic", make_critic(bias).lm, tiny.make_tokenizer())
    _, metrics = small_run(critic=critic)
    line, values = metrics[1], torch.cat([c.args[1][c.args[3]] for c in losses])
    assert line["value/mean"] == pytest.approx(values.mean().item(), rel=1e-5)
    assert line["value/min"] == pytest.approx(values.min().item())
    assert line["value/max"] == pytest.approx(values.max().item())
    targets = torch.cat([c.args[2][c.args[3]] for c in losses])
    want = 0.5 * ((values - targets) ** 2).mean()
    assert line["value/loss"] == pytest.approx(want.item(), rel=1e-5)
    # AUCs are of the terminal values, in the order of the batch
    terminal = torch.cat([c.args[1].gather(1, c.args[3].sum(1, True) - 1) for c in losses])[:, 0]
    groups, scores = made[0].args[0], gathered[0].result
    close(scores.sort().values, terminal.sort().values)
    correct = [c for group in groups for c in group.correct]
    ends = torch.cat([c.args[2].gather(1, c.args[3].sum(1, True) - 1) for c in losses])[:, 0]
    assert line["value/auc"] == common.auc(scores, correct) == common.auc(terminal, ends)
    problems = [group.number for group in groups for _ in group.correct]
    assert line["value/within_auc"] == common.within_problem_auc(scores, correct, problems)


def test_a_critic_update_that_is_not_finite_is_skipped_and_counted(
    small_run, policy_folder, monkeypatch
):
    original = ppo_critic.value_loss

    def broken(*args):
        loss, stats = original(*args)
        return loss * NAN, stats

    monkeypatch.setattr(ppo_critic, "value_loss", broken)
    folder, metrics = small_run(critic_updates_per_batch=2, save_critic_at_step=1)
    assert metrics[1]["optim/bad_steps"] == 2
    start = weights(Path(policy_folder))
    assert same(weights(folder / "critic"), start)  # untouched
    assert not same(weights(folder / "model"), start)  # trained
    with pytest.raises(RuntimeError, match="3 updates in a row"):
        small_run(name="more", critic_updates_per_batch=3)


# --------------------------------------------------------------------------------------------------
# Counted work [DESIGN: in units of P T, a forward is 2 and a backward 4]
# --------------------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch, small_run):
    """Runs one step of a script; returns forwards and backwards of policy and critic, in batches
    of tokens. Evaluation, rollouts and calibration do not count."""

    def count(script, **changes):
        tokens, totals = Counter(), []
        with monkeypatch.context() as patch:
            for module in (models.Policy, models.Critic):
                patch.setattr(module, "forward", counted(module, tokens))
            log, make_batch = common.Run.log, script.make_batch

            def first_step_begins(self, step, *args):
                tokens.clear() if step == 0 else totals.append(dict(tokens))
                return log(self, step, *args)

            def total_of(*args):
                batch = make_batch(*args)
                size = int((batch.prompt_lengths + batch.response_lengths).sum())
                totals[:] = [size]
                return batch

            patch.setattr(common.Run, "log", first_step_begins)
            patch.setattr(script, "make_batch", total_of)
            small_run(script, name=f"{script.__name__}-{len(changes)}", **changes)
        size, done = totals
        return {name: number / size for name, number in done.items()}

    def counted(module, tokens):
        forward, name = module.forward, module.__name__

        def wrapper(self, ids, prompt_lengths, response_lengths, *rest):
            number = int((prompt_lengths + response_lengths).sum())
            result = forward(self, ids, prompt_lengths, response_lengths, *rest)
            tokens[f"{name} forward"] += number
            first = result[0] if isinstance(result, tuple) else result
            if first.requires_grad:
                first.register_hook(lambda _: tokens.update({f"{name} backward": number}))
            return result

        return wrapper

    return count


def units(work: dict) -> float:
    return sum(n * (2 if name.endswith("forward") else 4) for name, n in work.items())


def test_counted_work_of_supervised_ppo_is_14_units(work):
    done = work(ppo_critic)
    assert done == {
        "Critic forward": 2,  # values, and the update
        "Critic backward": 1,
        "Policy forward": 1,
        "Policy backward": 1,
    }
    assert units(done) == 14
    assert units(work(ppo_critic, old_logprobs_pass=True)) == 16


@pytest.fixture
def critic_folder(tmp_path) -> str:
    """A critic with random weights, as a run leaves it."""
    accelerator = common.make_accelerator(Args())
    common.export(make_critic(), tiny.make_tokenizer(), tmp_path / "a-critic", accelerator)
    return str(tmp_path / "a-critic")


@pytest.mark.skipif(rfpo is None, reason="rfpo.py does not import")
def test_counted_work_of_rfpo_is_8_units(work, critic_folder, policy_folder):
    flags = {
        "policy": policy_folder,
        "critic": critic_folder,
        "allow_weak_critic": True,
        "calibration_rollouts": 32,
    }
    done = work(rfpo, **flags)
    assert done == {"Critic forward": 1, "Policy forward": 1, "Policy backward": 1}
    assert units(done) == 8
    assert units(work(rfpo, **flags, old_logprobs_pass=True)) == 10


# --------------------------------------------------------------------------------------------------
# Checkpoints and folders
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_resume_of_two_modules_equals_an_uninterrupted_run(small_run, warmup_steps):
    # With a warm-up the checkpoint after step 1 has a policy that no update has touched yet
    flags = {"critic_warmup_steps": warmup_steps, "save_critic_at_step": 4, "minibatch_size": 6}
    flags |= {"critic_updates_per_batch": 2, "learning_rate": 1e-2}
    whole, metrics = small_run(name="whole", num_steps=4, save_every=4, **flags)
    small_run(name="broken", num_steps=2, save_every=1, **flags)
    broken, resumed = small_run(name="broken", num_steps=4, save_every=4, resume=True, **flags)
    assert list(resumed) == [0, 1, 2, 3, 4]
    for name in ("reward/mean", "value/loss", "policy/entropy", "tokens", "optim/grad_norm"):
        assert [metrics[i].get(name) for i in metrics] == [resumed[i].get(name) for i in metrics]
    for part in ("model", "critic"):
        one, two = weights(whole / part), weights(broken / part)
        assert one.keys() == two.keys() and same(one, two)


def test_exported_actor_and_critic_load_in_transformers(small_run):
    steps = {"num_steps": 2, "save_actor_at_step": 1, "save_critic_at_step": 2}
    folder, _ = small_run(**steps, learning_rate=0.1)
    actor = AutoModelForCausalLM.from_pretrained(folder / "pi_0")
    critic, missing = AutoModelForTokenClassification.from_pretrained(
        folder / "critic", output_loading_info=True
    )
    assert actor.lm_head.weight is actor.model.embed_tokens.weight
    assert critic.config.num_labels == 1 and critic.score.weight.shape == (1, 64)
    assert not any(missing.values())  # the head is in the folder, and nothing else
    assert not same(weights(folder / "pi_0"), weights(folder / "model"))  # of its own step
    for name in ("pi_0", "critic", "model"):
        tokenizer = AutoTokenizer.from_pretrained(folder / name)
        assert tokenizer.get_vocab() == tiny.make_tokenizer().get_vocab()


def test_a_saved_critic_gives_the_same_values_when_it_is_loaded(critic_folder, policy_folder):
    args = Args(critic=critic_folder, model=policy_folder)
    pairs = [([5, 6, 7], [8, 9]), ([4, 5], [20, 21, 22])]
    loaded = load_critic(args, AutoTokenizer.from_pretrained(policy_folder))
    close(read(loaded, pairs), read(make_critic(), pairs))
    assert next(loaded.parameters()).dtype == torch.float32


def test_a_new_critic_has_the_weights_of_the_policy_and_a_fresh_head(policy_folder):
    torch.manual_seed(5)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    critic = load_critic(Args(model=policy_folder), tokenizer)
    names = [name for name in critic.lm.state_dict() if not name.startswith("score")]
    policy = weights(Path(policy_folder))
    assert all(torch.equal(critic.lm.state_dict()[name], policy[name]) for name in names)
    assert {*policy} - {*names} <= {"lm_head.weight"}
    assert critic.lm.score.weight.shape == (1, 64) and critic.lm.score.weight.abs().min() > 0


def saved(folder: Path, lm, tokenizer) -> str:
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def llama(folder):
    config = LlamaConfig(vocab_size=137, hidden_size=16, intermediate_size=16, num_labels=1,
                         num_hidden_layers=1, num_attention_heads=1)  # fmt: skip
    return saved(folder, LlamaForTokenClassification(config), tiny.make_tokenizer())


def two_outputs(folder):
    config = tiny.make_config()
    config.num_labels = 2
    lm = Qwen3ForTokenClassification(config)
    return saved(folder, lm, tiny.make_tokenizer())


def no_tokenizer(folder):
    make_critic().lm.save_pretrained(folder)
    return str(folder)


def another_vocabulary(folder):
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens(["maybe"])
    return saved(folder, make_critic().lm, tokenizer)


def same_size_another_order(folder):
    core = json.loads(tiny.make_tokenizer().backend_tokenizer.to_str())
    words = core["model"]["vocab"]
    words["?"], words["}"] = words["}"], words["?"]
    file = folder / "tokenizer.json"
    folder.mkdir()
    file.write_text(json.dumps(core))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(file), pad_token="<pad>", eos_token="<eos>"
    )
    return saved(folder, make_critic().lm, tokenizer)


BAD_CRITICS = {
    "no value head": (lambda _: tiny.untrained_policy(), ["has no value head", "critic folder"]),
    "two outputs": (two_outputs, ["has a head of 2 outputs"]),
    "no tokenizer": (no_tokenizer, ["vocabulary (1 tokens)", "whose folder holds it"]),
    "another architecture": (llama, ["llama", "qwen3", "must agree"]),
    "another vocabulary": (another_vocabulary, ["another vocabulary", "138 tokens", "137"]),
    "the same words, other ids": (same_size_another_order, ["another vocabulary"]),
    "a missing folder": (lambda folder: str(folder / "nowhere"), ["nowhere", "no such folder"]),
    "no model in it": (lambda folder: str(folder.parent), ["no config.json"]),
}


@pytest.mark.parametrize("name", BAD_CRITICS)
def test_a_critic_that_does_not_fit_is_named(name, tmp_path, policy_folder):
    make, words = BAD_CRITICS[name]
    args = Args(critic=make(tmp_path / "critic"), model=policy_folder)
    with pytest.raises(UsageError) as error:
        load_critic(args, AutoTokenizer.from_pretrained(policy_folder))
    message = str(error.value)
    assert message.startswith(f"--critic {args.critic!r}") and "\n" not in message
    for word in words:
        assert word in message, message


# --------------------------------------------------------------------------------------------------
# Two processes
# --------------------------------------------------------------------------------------------------

# The script itself, on 9 problems: 12 responses in uneven shares; then 4 to one prompt, which one
# rank samples, and of which it has one in each minibatch of the critic, and the other rank none;
# last, a third step of the first run, resumed. The one evaluation problem, too, is one rank's.
DRIVER = """
import json, sys
from dataclasses import replace

import common, ppo_critic, tiny
from torch.distributed.tensor import DTensor

problems, (settings, few) = tiny.problems, json.loads(sys.argv[1])
tiny.problems = lambda split, *_, **__: problems(split, 9, seed=0)
common.Run.finish = lambda self: None
resume = common.Run.resume

def watched(self, *trained):
    for module, _ in trained:
        parameters = list(module.parameters())
        assert all(isinstance(p, DTensor) for p in parameters)
        held = sum(p.to_local().numel() for p in parameters)
        assert held < 0.6 * sum(p.numel() for p in parameters), held  # about half of it is here
        print(f"sharded {type(module).__name__}", flush=True)  # one string, one write
    return resume(self, *trained)

common.Run.resume = watched
args = replace(ppo_critic.Args(), **settings)
ppo_critic.main(replace(args, run_name="many", num_steps=2), "tiny")
ppo_critic.main(replace(args, run_name="few", **few), "tiny")
ppo_critic.main(replace(args, run_name="many", num_steps=3, resume=True), "tiny")
"""


def test_two_processes_shard_both_modules_and_agree_with_one(tmp_path, small_run, policy_folder):
    # Pieces of 3 responses: 2 on one rank, 1 on the other, and mostly one to a micro-batch
    sizes = {"minibatch_size": 6, "critic_updates_per_batch": 4, "tokens_per_microbatch": 24}
    few = {"prompts_per_step": 1, "group_size": 4, "minibatch_size": 4, "num_steps": 1}
    few |= {"critic_updates_per_batch": 4, "save_critic_at_step": 1}
    one = {}
    many_folder, one["many"] = small_run(name="many", num_steps=3, **sizes)
    few_folder, one["few"] = small_run(name="few", **{**sizes, **few})
    settings = {
        **{
            k: v
            for k, v in json.loads((many_folder / "args.json").read_text()).items()
            if k in ARGS
        },
        "runs_dir": str(tmp_path / "two"),
    }
    (tmp_path / "driver.py").write_text(DRIVER)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(31500 + os.getpid() % 2000), str(tmp_path / "driver.py")]
    done = subprocess.run(
        [*command, json.dumps([settings, few])],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(done.stdout.count(f"sharded FSDP{name}") == 6 for name in ("Policy", "Critic"))
    same_numbers = ("reward/mean", "tokens", "train/updates_per_batch", "optim/learning_rate")
    for name, lines in one.items():
        text = (tmp_path / "two" / name / "metrics.jsonl").read_text()
        two = {line["step"]: line for line in map(json.loads, text.splitlines())}
        assert list(two) == list(lines)
        for step in list(lines)[1:]:
            a, b = lines[step], two[step]
            assert [a[key] for key in same_numbers] == [b[key] for key in same_numbers]
            tolerance = 1e-5 if step == 1 else 1e-4  # Adam's divisions enlarge float noise
            names = [n for n in a if n.split("/")[0] in ("policy", "value", "optim", "reward")]
            assert len(names) > 20 and {*names} <= {*b}
            for key in names:
                assert b[key] == pytest.approx(a[key], rel=tolerance, abs=1e-6, nan_ok=True), key
            assert b["rollout/logprob_gap_max"] < 1e-4
    for a, b in ((few_folder / n, tmp_path / "two" / "few" / n) for n in ("critic", "model")):
        assert weights(a).keys() == weights(b).keys() and same(weights(a), weights(b), 1e-5)


def test_a_rank_without_a_prompt_judges_nothing():
    # Fewer prompts than ranks, in training or in evaluation
    assert common.judge([], tiny.reward, tiny.make_tokenizer()) == []


# --------------------------------------------------------------------------------------------------
# Settings
# --------------------------------------------------------------------------------------------------


def test_presets_follow_table_6(monkeypatch):
    one, two, rl = (PRESETS[n] for n in ("qwen3-4b-phase1", "qwen3-4b-phase2", "qwen3-4b"))
    for args in (one, two, rl, PRESETS["qwen3-4b-cap4096"]):
        batch = args.prompts_per_step * args.group_size
        assert args.minibatch_size == batch and args.num_epochs == 1  # one update per batch
        assert args.critic_updates_per_batch == 1 and args.max_prompt_tokens == 2048
        assert args.dataset == "dapo-math-17k" and args.reward == "verifier"
        assert args.temperature == 1.0 and args.tensor_parallel == 2
        assert args.eval_every == 10 and args.eval_dataset == "aime26,amc23"
        assert (args.eval_samples, args.eval_temperature, args.eval_top_p) == (8, 0.7, 1.0)
        assert args.gamma == args.gae_lambda == 1.0
        assert args.clip_eps_low == args.clip_eps_high == 0.2 and args.dual_clip is None
        assert not {"kl_coef", "entropy_coef"} & {*asdict(args)}  # no such term
        assert args.value_clip == 0.5 and args.rollout_is_cap == 0.0
        assert (args.learning_rate, args.critic_learning_rate) == (1e-6, 1e-5)
        assert args.warmup_steps == 10 and args.weight_decay == 0.1 and args.max_grad_norm == 1.0
        assert args.activation_checkpointing
    caps = [(a.max_response_tokens, a.eval_max_tokens) for a in (one, two, rl)]
    assert caps == [(8192, 8192), (5120, 12_288), (5120, 12_288)]
    assert [(a.prompts_per_step, a.group_size) for a in (one, two, rl)] == [
        (64, 8),
        *[(128, 8)] * 2,
    ]
    assert [a.num_steps for a in (one, two, rl)] == [500, 300, 300]
    assert [a.critic_warmup_steps for a in (one, two, rl)] == [30, 0, 0]
    # Actor and critic: from SFT with a new head; then from step 500; then pi_0 after step 700 of
    # both phases, and the critic after step 800
    assert one.model == "runs/sft-qwen3-4b-base-seed1/epoch-2" and one.critic is None
    assert "qwen3-4b-base" in sft.PRESETS and sft.PRESETS["qwen3-4b-base"].seed == one.seed == 1
    first, second = (f"runs/ppo_critic-qwen3-4b-phase{i}-seed1" for i in (1, 2))
    assert (two.model, two.critic) == (f"{first}/model", f"{first}/critic")
    assert one.save_critic_at_step == one.num_steps == 500
    assert (rl.model, rl.critic) == (f"{second}/pi_0", f"{second}/critic")
    assert (two.save_actor_at_step, two.save_critic_at_step) == (200, 300)
    cap = replace(rl, num_steps=310, max_response_tokens=4096)  # Table 4's pair
    assert PRESETS["qwen3-4b-cap4096"] == cap
    # TINY: the paper updates the critic once per batch, and at other rates
    args = PRESETS["tiny"]
    assert args.critic_updates_per_batch == 8
    assert (args.learning_rate, args.critic_learning_rate) == (2e-4, 1e-3)
    assert args.minibatch_size == args.prompts_per_step * args.group_size and args.num_epochs == 1
    for name in ("gamma", "gae_lambda", "clip_eps_low", "clip_eps_high", "dual_clip", "value_clip",
                 "temperature", "warmup_steps", "weight_decay", "max_grad_norm"):  # fmt: skip
        assert vars(args)[name] == vars(one)[name], name
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "8")):  # as torchrun sets them
        monkeypatch.setenv(name, value)
    for args in PRESETS.values():
        check(args)


WRONG = {
    "critic updates that do not divide": ({"critic_updates_per_batch": 3}, ["3", "512"]),
    "no critic update": ({"critic_updates_per_batch": 0}, ["--critic-updates-per-batch 0"]),
    "negative critic updates": ({"critic_updates_per_batch": -1}, ["updates-per-batch -1"]),
    "more critic updates than responses": ({"critic_updates_per_batch": 1024}, ["1024", "512"]),
    "gamma above 1": ({"gamma": 1.01}, ["--gamma 1.01", "[0, 1]"]),
    "gamma below 0": ({"gamma": -0.1}, ["--gamma -0.1", "[0, 1]"]),
    "gamma nan": ({"gamma": NAN}, ["--gamma nan"]),
    "lambda above 1": ({"gae_lambda": 2.0}, ["--gae-lambda 2.0", "[0, 1]"]),
    "lambda below 0": ({"gae_lambda": -1.0}, ["--gae-lambda -1.0"]),
    "value clip 0": ({"value_clip": 0.0}, ["--value-clip 0.0", "above 0"]),
    "warm-up as long as the run": ({"critic_warmup_steps": 60}, ["warmup-steps 60", "steps 60"]),
    "warm-up longer": ({"critic_warmup_steps": 9, "num_steps": 8}, ["9", "--num-steps 8"]),
    "negative warm-up": ({"critic_warmup_steps": -1}, ["--critic-warmup-steps -1"]),
    "critic rate 0": ({"critic_learning_rate": 0.0}, ["--critic-learning-rate 0.0", "above 0"]),
    "negative critic rate": ({"critic_learning_rate": -1.0}, ["--critic-learning-rate -1.0"]),
    "critic rate nan": ({"critic_learning_rate": NAN}, ["--critic-learning-rate nan"]),
    "critic rate inf": ({"critic_learning_rate": math.inf}, ["--critic-learning-rate inf"]),
    "rate 0": ({"learning_rate": 0.0}, ["--learning-rate 0.0", "above 0"]),
    "negative rate": ({"learning_rate": -1.0}, ["--learning-rate -1.0"]),
    "minibatch that does not divide": ({"minibatch_size": 100}, ["100", "512"]),
    "dual clip 1": ({"dual_clip": 1.0}, ["--dual-clip 1.0", "above 1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_settings_give_one_line(name):
    changes, words = WRONG[name]
    with pytest.raises(UsageError) as error:
        check(replace(Args(), **changes))
    message = str(error.value)
    assert "\n" not in message and message.startswith("--")
    for word in words:
        assert word in message, message


def test_settings_at_their_limits_pass():
    for changes in (
        {"gamma": 0.0, "gae_lambda": 0.0},
        {"critic_updates_per_batch": 512},
        {"critic_warmup_steps": 59},
        {"critic_warmup_steps": 0},
        {"minibatch_size": 256, "critic_updates_per_batch": 1},
    ):
        check(replace(Args(), **changes))
