"""common.py, section 1: sums, means and scores against values worked out on paper."""

import itertools
import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from common import (
    Meter,
    auc,
    discounted_suffix_sum,
    explained_variance,
    logprob_gap,
    majority_vote,
    masked_mean,
    pass_at_k,
    pass_at_k_plugin,
    truncated_importance,
    within_problem_auc,
)

NAN = float("nan")


def row(*numbers):
    return torch.tensor([numbers])


# --------------------------------------------------------------------------------------------------
# discounted_suffix_sum
# --------------------------------------------------------------------------------------------------


def test_discounted_suffix_sum_by_hand():
    # 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4
    torch.testing.assert_close(discounted_suffix_sum(row(1.0, 2.0, 4.0), 0.5), row(3.0, 4.0, 4.0))


def test_discounted_suffix_sum_with_discount_1_and_0():
    x = row(1.0, 2.0, 4.0)
    torch.testing.assert_close(discounted_suffix_sum(x, 1.0), row(7.0, 6.0, 4.0))
    torch.testing.assert_close(discounted_suffix_sum(x, 0.0), x)


def test_discounted_suffix_sum_keeps_rows_apart():
    x = torch.tensor([[1.0, 0.0], [0.0, 8.0]])
    want = torch.tensor([[1.0, 0.0], [4.0, 8.0]])
    torch.testing.assert_close(discounted_suffix_sum(x, 0.5), want)


@pytest.mark.parametrize("discount", [1.0, 0.978572, 0.5, 0.0])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 700])
def test_discounted_suffix_sum_at_block_edges(length, discount):
    # y_t = x_t + discount y_(t+1), token by token in float64
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(length))
    want, y = torch.zeros(3, length, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):
        y = x[:, t].double() + discount * y
        want[:, t] = y
    torch.testing.assert_close(
        discounted_suffix_sum(x, discount).double(), want, rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        discounted_suffix_sum(x.double(), discount), want, rtol=1e-12, atol=1e-12
    )


def test_discounted_suffix_sum_of_one_late_impulse_crosses_every_block():
    # A lone 1 at position 600: 0.99^600 = 0.002405 at position 0, 0 behind it
    x = torch.zeros(1, 700)
    x[0, 600] = 1.0
    y = discounted_suffix_sum(x, 0.99)[0]
    torch.testing.assert_close(
        y[[0, 600, 601]], torch.tensor([0.0024048, 1.0, 0.0]), rtol=1e-4, atol=0
    )


# --------------------------------------------------------------------------------------------------
# masked_mean, explained_variance
# --------------------------------------------------------------------------------------------------


def test_masked_mean_counts_valid_entries_only():
    # (1 + 3) / 2, whatever stands in the third slot
    for padding in (100.0, NAN, math.inf):
        assert masked_mean(row(1.0, 3.0, padding), torch.tensor([[1, 1, 0]])) == 2.0


def test_masked_mean_of_nothing_is_0():
    assert masked_mean(row(NAN, 1.0), torch.zeros(1, 2)) == 0.0


def test_masked_mean_is_over_all_entries_not_a_mean_of_row_means():
    # (6 + 1 + 1 + 0) / 4 = 2; the mean of the row means 6 and 2/3 is 3.33
    x, mask = torch.tensor([[6.0, 9.0, 9.0], [1.0, 1.0, 0.0]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert masked_mean(x, mask) == 2.0


def test_masked_mean_gradient_is_finite_beside_nan():
    x = row(1.0, 3.0, NAN).requires_grad_()
    masked_mean(x, torch.tensor([[1, 1, 0]])).backward()
    assert x.grad.tolist() == [[0.5, 0.5, 0.0]]


def test_explained_variance_by_hand():
    # returns [0, 1, 2] have variance 2/3; residuals [0, 0, 1] have 1/3 - 1/9 = 2/9: 1 - 1/3
    mask = torch.ones(1, 3)
    assert explained_variance(row(0.0, 1.0, 1.0), row(0.0, 1.0, 2.0), mask) == pytest.approx(2 / 3)
    # perfect up to a shift: 1; constant: 0; mirrored: residuals [-2, 0, 2], 1 - 4 = -3
    assert explained_variance(row(5.0, 6.0, 7.0), row(0.0, 1.0, 2.0), mask) == pytest.approx(1)
    assert explained_variance(row(9.0, 9.0, 9.0), row(0.0, 1.0, 2.0), mask) == pytest.approx(0)
    assert explained_variance(row(2.0, 1.0, 0.0), row(0.0, 1.0, 2.0), mask) == pytest.approx(-3)


def test_explained_variance_sees_valid_entries_only():
    mask = torch.tensor([[1, 1, 1, 0]])
    value = explained_variance(row(0.0, 1.0, 1.0, NAN), row(0.0, 1.0, 2.0, 50.0), mask)
    assert value == pytest.approx(2 / 3)


def test_explained_variance_of_constant_returns_is_0():
    assert explained_variance(row(0.1, 0.2), row(0.3, 0.3), torch.ones(1, 2)) == 0
    assert explained_variance(row(0.1, 0.2), row(0.3, 0.4), torch.zeros(1, 2)) == 0


# --------------------------------------------------------------------------------------------------
# pass@k
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "want"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 1 - C(3,2)/C(4,2) = 1 - 3/6; the plug-in gives 0.4375
        (4, 1, 4, 1.0),
        (10, 3, 5, 0.9166667),  # 1 - C(7,5)/C(10,5) = 1 - 21/252
        (16, 4, 8, 0.9615385),  # 1 - C(12,8)/C(16,8) = 1 - 495/12870
        (5, 5, 3, 1.0),
        (1, 1, 1, 1.0),
        (4, 0, 4, 0.0),
        (8, 1, 1, 0.125),
    ],
)
def test_pass_at_k(num_samples, num_correct, k, want):
    assert pass_at_k(num_samples, num_correct, k) == pytest.approx(want, abs=1e-7)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            subsets = [min(s) < c for s in itertools.combinations(range(n), k)]
            assert pass_at_k(n, c, k) == pytest.approx(statistics.mean(subsets))


def test_pass_at_k_of_large_numbers_is_finite():
    # C(1997,1000)/C(2000,1000) = 1000 * 999 * 998 / (2000 * 1999 * 1998) = 0.124812
    want = 1 - 1000 * 999 * 998 / (2000 * 1999 * 1998)
    assert pass_at_k(2000, 3, 1000) == pytest.approx(want)


@pytest.mark.parametrize("arguments", [(2, 0, 5), (2, 2, 3), (4, 5, 1), (4, 1, 0), (4, -1, 1)])
def test_pass_at_k_refuses_what_it_cannot_estimate(arguments):
    with pytest.raises(ValueError):
        pass_at_k(*arguments)


def test_pass_at_k_plugin():
    # 1 - (3/4)^2 = 0.4375; 1 - (3/4)^4 = 0.6836; k may exceed n: 1 - (1/2)^3 = 0.875
    assert pass_at_k_plugin(4, 1, 2) == pytest.approx(0.4375)
    assert pass_at_k_plugin(4, 1, 4) == pytest.approx(0.68359375)
    assert pass_at_k_plugin(2, 1, 3) == pytest.approx(0.875)
    assert pass_at_k_plugin(4, 0, 2) == 0 and pass_at_k_plugin(4, 4, 1) == 1


# --------------------------------------------------------------------------------------------------
# majority_vote
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "want"),
    [
        (["3", "5", "5"], "5"),
        (["5", "3", "3", "5"], "5"),  # a tie goes to the class seen first
        (["3", "5", "5", "3"], "3"),
        ([None, None, None, "4"], "4"),  # None never wins
        ([None, None], None),
        ([], None),
        (["7", "1/2", "0.5", r"\frac12"], "1/2"),  # one class, named by its first member
        (["2", "1.0", "1", "2", "2.0"], "2"),
    ],
)
def test_majority_vote(answers, want):
    assert majority_vote(answers) == want


# --------------------------------------------------------------------------------------------------
# AUC
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "correct", "want"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),  # 3 of the 4 pairs are in order
        ([1, 2, 3], [0, 0, 1], 1.0),
        ([3, 2, 1], [0, 0, 1], 0.0),
        ([1, 1, 1], [0, 1, 0], 0.5),  # ties count half
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),  # 3 in order and 1 tie, of 4
    ],
)
def test_auc(scores, correct, want):
    assert auc(scores, correct) == pytest.approx(want)


def test_auc_without_one_of_the_classes_is_nan():
    assert math.isnan(auc([1, 2], [1, 1])) and math.isnan(auc([1, 2], [0, 0]))
    assert math.isnan(auc([], []))


def test_auc_equals_the_count_over_pairs():
    random = np.random.default_rng(0)
    scores, correct = random.integers(0, 8, 60), random.random(60) < 0.4
    pairs = [float(r > w) + 0.5 * float(r == w) for r in scores[correct] for w in scores[~correct]]
    assert auc(scores, correct) == pytest.approx(np.mean(pairs))
    assert auc(torch.tensor(scores), torch.tensor(correct)) == pytest.approx(np.mean(pairs))


def test_within_problem_auc_is_a_mean_over_problems():
    # a: 1 of 2 pairs in order; b: 2 of 2, though its scores all lie below a's
    scores = [10, 11, 12, 1, 2, 3]
    correct = [0, 1, 0, 0, 0, 1]
    assert within_problem_auc(scores, correct, list("aaabbb")) == pytest.approx((0.5 + 1.0) / 2)
    # Order of the rows does not matter
    order = [3, 0, 5, 1, 4, 2]
    mixed = [[x[i] for i in order] for x in (scores, correct, list("aaabbb"))]
    assert within_problem_auc(*mixed) == pytest.approx(0.75)


def test_within_problem_auc_weighs_problems_alike_whatever_their_size():
    # a: 3 rollouts, AUC 0; b: 6 rollouts, AUC 1
    scores, correct = [3, 2, 1, 1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 0, 0, 1, 1, 1]
    assert within_problem_auc(scores, correct, [0] * 3 + [1] * 6) == pytest.approx(0.5)


def test_within_problem_auc_leaves_out_small_and_one_sided_problems():
    # b has two rollouts only (its AUC would be 0), c has no wrong one
    scores, correct = [1, 2, 3, 2, 1, 7, 8, 9], [0, 0, 1, 0, 1, 1, 1, 1]
    assert within_problem_auc(scores, correct, list("aaabbccc")) == 1.0
    assert math.isnan(within_problem_auc([2, 1, 7, 8, 9], [0, 1, 1, 1, 1], list("bbccc")))


# --------------------------------------------------------------------------------------------------
# Engine against trainer
# --------------------------------------------------------------------------------------------------


def test_truncated_importance_is_the_ratio_of_trainer_to_engine_up_to_the_cap():
    # exp(0) = 1, exp(1) = 2.718 -> 2, exp(-1) = 0.367879; no gradient is asked for
    old, engine = row(-1.0, -1.0, -3.0), row(-1.0, -2.0, -2.0)
    weights = truncated_importance(old, engine, SimpleNamespace(rollout_is_cap=2.0))
    torch.testing.assert_close(weights, row(1.0, 2.0, 0.3678794))
    assert truncated_importance(old, engine, SimpleNamespace(rollout_is_cap=0.0)) == 1.0


def test_logprob_gap_is_over_valid_tokens():
    # |-1 + 1.5| + |-2 + 1| = 1.5, at most 1
    gap = logprob_gap(row(-1.0, -2.0, NAN), row(-1.5, -1.0, 5.0), torch.tensor([[1, 1, 0]]) > 0)
    assert {k.split("_")[-1]: v.item() for k, v in gap.items()} == {"mean": 1.5, "max": 1.0}


# --------------------------------------------------------------------------------------------------
# Meter: every metric is one sum over one count
# --------------------------------------------------------------------------------------------------


def test_meter_divides_sums_by_counts_once():
    # 10 over 100 tokens and 9 over 10 tokens: 19 / 110 = 0.172727; the mean of means is 0.5
    one_process = SimpleNamespace(device="cpu", gather=lambda x: x)
    meter = Meter()
    meter.add({"x": torch.tensor(10.0), "x_min": 3.0, "x_max": 3.0}, 100)
    meter.add({"x": torch.tensor(9.0), "x_min": 2.0, "x_max": 5.0}, torch.tensor(10))
    metrics = meter.reduce(one_process)
    assert metrics["x"] == pytest.approx(19 / 110)
    assert (metrics["x_min"], metrics["x_max"]) == (2.0, 5.0)


def test_meter_divides_sums_by_counts_once_over_ranks():
    # The same two, each on a rank of its own: what gather returns on both
    meters = [Meter(), Meter()]
    meters[0].add({"x": 10.0, "x_min": 3.0, "x_max": 3.0}, 100)
    meters[1].add({"x": 9.0, "x_min": 2.0, "x_max": 5.0}, 10)
    shares = []
    for meter in meters:
        meter.reduce(SimpleNamespace(device="cpu", gather=lambda x: shares.append(x) or x))
    both = SimpleNamespace(device="cpu", gather=lambda x: torch.cat(shares))
    for meter in meters:
        metrics = meter.reduce(both)
        assert metrics["x"] == pytest.approx(19 / 110)
        assert (metrics["x_min"], metrics["x_max"]) == (2.0, 5.0)


def test_meter_of_no_tokens_is_0_and_not_nan():
    meter = Meter()
    meter.add({"x": 0.0}, 0)
    assert meter.reduce(SimpleNamespace(device="cpu", gather=lambda x: x)) == {"x": 0.0}
