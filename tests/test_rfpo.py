"""rfpo.py: the calibration, the reward, what announces a decline, and whole small runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, fields, replace
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT

import calibration
import common
import metrics
import ppo_critic
import rfpo
import tiny
from calibration import Calibration, critic_faults, fit_calibration, length_trend
from common import UsageError
from models import Critic
from rfpo import critic_rewards
from verifier import verify

NAN = float("nan")

# --------------------------------------------------------------------------------------------------
# fit_calibration: edges, offsets, threshold [RFPO §3.2, Table 7]
# --------------------------------------------------------------------------------------------------

# Two bins, {10, 20, 30} and {40, 50}; right ones score 0.7 on average, wrong ones 0.3.
LENGTHS = [10, 20, 30, 40, 50]
CORRECT = [1.0, 0.0, 1.0, 1.0, 0.0]
SCORES = [0.9, 0.4, 0.8, 0.4, 0.2]


def test_edges_are_the_upper_linear_quantiles():
    # Of 1, ..., 10 the quantile q stands at place 9 q: 2.25, 4.5, 6.75 and 9 from the first.
    fitted = fit_calibration(range(10), range(1, 11), [0, 1] * 5, num_bins=4)
    assert fitted.edges == [3.25, 5.5, 7.75, 10.0]
    assert fitted.num_rollouts == 10
    assert len(fit_calibration(range(20), range(20), [0, 1] * 10).edges) == 10  # deciles


def test_table7_ties_at_the_cap_merge_bins():
    # Places 2, 4, 6 and 8: 3, 5, 5, 5
    fitted = fit_calibration(range(9), [5, 1, 5, 2, 5, 3, 5, 4, 5], [0, 1, 1] * 3, num_bins=4)
    assert fitted.edges == [3.0, 5.0] and len(fitted.offsets) == 2


def test_table7_offsets_are_the_mean_of_the_deviations_within_each_class():
    # Bin 1: right 0.85 - 0.7 = 0.15, wrong 0.4 - 0.3 = 0.1. Bin 2: 0.4 - 0.7 and 0.2 - 0.3.
    # The edge 30 belongs to the first bin.
    fitted = fit_calibration(SCORES, LENGTHS, CORRECT, num_bins=2)
    assert fitted.edges == [30.0, 50.0]
    assert fitted.offsets == pytest.approx([0.125, -0.2])


def test_table7_a_bin_of_one_class_takes_the_deviation_of_that_class():
    # Bin 1 holds right ones only: 0.8 - 0.7. Bin 2: right 0.5 - 0.7, wrong 0.2 - 0.2; mean -0.1.
    fitted = fit_calibration([0.9, 0.7, 0.5, 0.2], [10, 20, 30, 40], [1, 1, 1, 0], num_bins=2)
    assert fitted.offsets == pytest.approx([0.1, -0.1])
    # The same with the classes turned around
    fitted = fit_calibration([0.9, 0.7, 0.5, 0.2], [10, 20, 30, 40], [0, 0, 0, 1], num_bins=2)
    assert fitted.offsets == pytest.approx([0.1, -0.1])


def test_an_empty_bin_goes_with_the_one_below():
    # Places 0.75, 1.5, 2.25, 3: 10, 15, 20, 20. Nothing is longer than 10 and at most 15.
    fitted = fit_calibration([0.9, 0.7, 0.3, 0.1], [10, 10, 20, 20], [1, 0, 1, 0], num_bins=4)
    assert fitted.edges == [10.0, 15.0, 20.0]
    # right 0.6 on average, wrong 0.4: both 0.3 above in the first bin, and 0.3 below in the last
    assert fitted.offsets == pytest.approx([0.3, 0.3, -0.3])
    assert fitted.offset([12, 15.5]).tolist() == pytest.approx([0.3, -0.3])


TABLE7 = Calibration(
    edges=[1735, 2137, 2455, 2782, 3150, 3556, 3884, 4469, 5079, 5120],
    offsets=[0.071, 0.087, 0.1, 0.065, 0.083, 0.063, 0.024, -0.07, -0.104, -0.224],
    scale=1.0,
    threshold=0.5215,
    num_rollouts=512,
)


def test_table7_upper_edges_are_inclusive():
    assert TABLE7.offset([1735, 1736, 5079, 5080, 5120]).tolist() == [
        *(0.071, 0.087, -0.104, -0.224, -0.224)
    ]


def test_table7_lengths_outside_the_fitted_range_take_the_nearest_offset():
    assert TABLE7.offset(torch.tensor([0, 1, 5121, 40_000])).tolist() == [
        *(0.071, 0.071, -0.224, -0.224)
    ]


def test_threshold_is_the_quantile_that_rewards_as_many_as_are_right():
    # v - b: 0.775, 0.275, 0.675, 0.6, 0.4. 3 of 5 are right, so the quantile at 0.4: place 1.6 in
    # 0.275, 0.4, 0.6, 0.675, 0.775, which is 0.4 + 0.6 x 0.2.
    fitted = fit_calibration(SCORES, LENGTHS, CORRECT, num_bins=2)
    assert fitted.threshold == pytest.approx(0.52)
    assert critic_rewards(SCORES, LENGTHS, fitted).tolist() == [1, 0, 1, 1, 0]


def test_threshold_is_fitted_with_the_scale():
    # v - 2 b: 0.65, 0.15, 0.55, 0.8, 0.6; place 1.6 in order: 0.55 + 0.6 x 0.05
    fitted = fit_calibration(SCORES, LENGTHS, CORRECT, num_bins=2, scale=2.0)
    assert fitted.scale == 2.0 and fitted.offsets == pytest.approx([0.125, -0.2])
    assert fitted.threshold == pytest.approx(0.58)


def test_a_length_trend_within_the_classes_is_removed_and_the_gap_between_them_kept():
    # Score: 0.2, plus 0.4 where right, minus 0.3 x length / 1000; long ones are more often wrong.
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 1001, size=4000)
    correct = (rng.random(4000) < 0.9 - 0.8 * lengths / 1000).astype(float)
    scores = 0.2 + 0.4 * correct - 0.3 * lengths / 1000 + 0.02 * rng.normal(size=4000)
    fitted = fit_calibration(scores, lengths, correct)
    debiased = scores - fitted.offset(lengths).numpy()
    for kind in (correct == 1, correct == 0):
        slope = np.polyfit(lengths[kind] / 1000, debiased[kind], 1)[0]
        assert np.polyfit(lengths[kind] / 1000, scores[kind], 1)[0] == pytest.approx(-0.3, abs=0.01)
        assert slope == pytest.approx(0, abs=0.01)
    gap = scores[correct == 1].mean() - scores[correct == 0].mean()
    assert gap > 0.45  # 0.4, and what short right answers owe to their length
    gap = debiased[correct == 1].mean() - debiased[correct == 0].mean()
    assert gap == pytest.approx(0.4, abs=0.01)


def test_a_calibration_survives_json():
    fitted = replace(fit_calibration(SCORES, LENGTHS, CORRECT, 2), cap=24, critic="abc")
    assert Calibration.from_json(fitted.to_json()) == fitted


@pytest.mark.parametrize(("verdict", "word"), [(1.0, "right"), (0.0, "wrong")])
def test_a_sample_of_one_class_is_refused_with_what_to_do(verdict, word):
    with pytest.raises(UsageError, match=f"all 12 .* {word} .*; .* easier or harder problems"):
        fit_calibration(range(12), range(12), [verdict] * 12)


def test_fewer_rollouts_than_bins_are_refused():
    with pytest.raises(UsageError, match="9 calibration rollouts are fewer than 10 bins"):
        fit_calibration(range(9), range(9), [0, 1, 1] * 3)
    assert len(fit_calibration(range(9), range(9), [0, 1, 1] * 3, num_bins=9).edges) == 9


# --------------------------------------------------------------------------------------------------
# scale="auto" [RFPO App. E.5]
# --------------------------------------------------------------------------------------------------

# Right ones are 1 to 4 tokens long, wrong ones 3 to 6, with two bins: {1, 2, 3}, {4, 5, 6}.
AUTO_LENGTHS = [1, 2, 3, 4, 3, 4, 5, 6]
AUTO_CORRECT = [1, 1, 1, 1, 0, 0, 0, 0]


def auto(right, wrong=(0.0, 0.0, 0.0, 0.0)):
    return fit_calibration([*right, *wrong], AUTO_LENGTHS, AUTO_CORRECT, 2, "auto")


def test_app_e5_length_trend_splits_each_class_at_its_own_median():
    # Right: medians 2.5: 0.9 - 0.5. Wrong: median 4.5: 0.5 - 0.2. Mean 0.35
    scores = torch.tensor([0.9, 0.9, 0.5, 0.5, 0.5, 0.5, 0.2, 0.2])
    lengths, correct = torch.tensor(AUTO_LENGTHS).double(), torch.tensor(AUTO_CORRECT) > 0
    assert length_trend(scores, lengths, correct) == pytest.approx(0.35)


def test_app_e5_length_trend_counts_the_median_as_long():
    # Lengths 1, 2, 3: the short half is {1}, the long one {2, 3}: 0.9 - (0.4 + 0.2) / 2
    scores = torch.tensor([0.9, 0.4, 0.2, 0.5])
    lengths, correct = torch.tensor([1.0, 2.0, 3.0, 9.0]), torch.tensor([True, True, True, False])
    assert length_trend(scores, lengths, correct) == pytest.approx(0.6)


def test_app_e5_length_trend_leaves_a_class_without_halves_out():
    # The right ones are all 5 tokens long: only the wrong ones count, 0.4 - 0.
    scores = torch.tensor([0.9, 0.1, 0.4, 0.4, 0.0, 0.0])
    lengths = torch.tensor([5.0, 5.0, 1.0, 2.0, 3.0, 4.0])
    correct = torch.tensor([True, True, False, False, False, False])
    assert length_trend(scores, lengths, correct) == pytest.approx(0.4)
    assert length_trend(scores[:3], lengths[:3], correct[:3]) == 0.0


def test_app_e5_auto_scale_leaves_no_length_trend():
    # Right 0.9 0.9 0.5 0.5, mean 0.7; wrong 0.4 0.4 0 0, mean 0.2: D(0) = 0.4.
    # b of bin 1: (0.7667 - 0.7 + 0.4 - 0.2) / 2 = 0.1333; of bin 2: (0.5 - 0.7 + 0.1333 - 0.2) / 2
    # = -0.1333. D(b): right 0.1333 - 0, wrong 0 + 0.1333. D(1) = 0.4 - 0.1333, s = 0.4 / 0.1333.
    right, wrong = [0.9, 0.9, 0.5, 0.5], [0.4, 0.4, 0.0, 0.0]
    fitted = auto(right, wrong)
    assert fitted.offsets == pytest.approx([0.4 / 3, -0.4 / 3])
    assert fitted.scale == pytest.approx(3.0)
    scores = torch.tensor([*right, *wrong], dtype=torch.float64)
    lengths, correct = torch.tensor(AUTO_LENGTHS).double(), torch.tensor(AUTO_CORRECT) > 0
    trends = [
        length_trend(scores - s * fitted.offset(lengths), lengths, correct) for s in (0, 1, 3)
    ]
    assert trends == pytest.approx([0.4, 0.8 / 3, 0.0], abs=1e-6)  # linear in s
    # The threshold is fitted with s. v - 3 b: 0.5 0.5 0.1 0.9, 0 0.8 0.4 0.4; half are right, so
    # the middle of 0.4 and 0.5.
    assert fitted.threshold == pytest.approx(0.45)


def test_app_e5_auto_scale_is_1_where_each_length_has_its_bin():
    fitted = fit_calibration(
        [0.9, 0.8, 0.7, 0.4, 0.5, 0.4, 0.3, 0.0], [1, 2, 3, 4] * 2, [1] * 4 + [0] * 4, 4, "auto"
    )
    assert fitted.scale == pytest.approx(1.0)


def test_app_e5_auto_scale_is_refused_where_offsets_do_not_change_the_trend():
    # Every bin holds one class, whole: all offsets are 0.
    with pytest.raises(UsageError, match="do not change the length trend"):
        fit_calibration(
            [0.9, 0.8, 0.7, 0.6, 0.3, 0.3, 0.1, 0.1], range(1, 9), [1] * 4 + [0] * 4, 2, "auto"
        )


def test_app_e5_auto_scale_is_refused_outside_0_to_4():
    # Of right ones a, a, c, d beside constant wrong ones: D(0) = (a - (c + d) / 2) / 2, and
    # D(0) - D(1) = ((2 a + c) / 3 - d) / 4. Here a = 0.9.
    assert auto([0.9, 0.9, 0.4, 0.5]).scale == pytest.approx(0.225 / (0.7 / 3 / 4))  # 3.86
    for c, d, found in ((0.38, 0.5, "4.06"), (0.3, 0.5, "5"), (0.0, 0.8, "-5")):
        with pytest.raises(UsageError, match=rf"found {found}, outside \[0, 4\]; use --scale 1"):
            auto([0.9, 0.9, c, d])


# --------------------------------------------------------------------------------------------------
# critic_rewards [RFPO Eq. 2]
# --------------------------------------------------------------------------------------------------

# b is 0.25 up to 100 tokens, then -0.5.
STEPPED = Calibration([100.0, 200.0], [0.25, -0.5], 1.0, 0.5, 512)


def test_eq2_subtracts_the_offset_and_cuts_at_the_threshold():
    # tau 0.5215 [RFPO §3.2]: 0.6 - 0.071 = 0.529 and 0.59 - 0.071 = 0.519; 0.3 + 0.224 = 0.524
    rewards = critic_rewards([0.6, 0.59, 0.3, 0.29], [1000, 1000, 5120, 9999], TABLE7)
    assert rewards.tolist() == [1, 0, 1, 0]
    assert rewards.dtype == torch.float32


def test_eq2_is_a_strict_inequality():
    # 0.75 - 0.25 is 0.5 exactly.
    scores = torch.tensor([0.75, 0.7500001, 0.7499999])
    assert critic_rewards(scores, torch.tensor([100.0] * 3), STEPPED).tolist() == [0, 1, 0]


def test_eq2_scales_the_offset():
    # s = 2: 0.9 - 0.5 = 0.4; -0.4 + 1 = 0.6
    rewards = critic_rewards([0.9, -0.4], [50, 150], replace(STEPPED, scale=2.0))
    assert rewards.tolist() == [0, 1]
    assert critic_rewards([0.9, -0.4], [50, 150], STEPPED).tolist() == [1, 0]


def test_app_f2_continuous_reward_is_the_debiased_score():
    rewards = critic_rewards([0.5, 0.5], [100, 101], STEPPED, "continuous")
    assert rewards.tolist() == [0.25, 1.0]
    rewards = critic_rewards([0.5, 0.5], [100, 101], replace(STEPPED, scale=3.0), "continuous")
    assert rewards.tolist() == [-0.25, 2.0]
    assert rewards.dtype == torch.float32


def test_app_f2_debias_until_holds_the_offset_constant_beyond():
    lengths = torch.tensor([50.0, 100.0, 101.0, 9999.0])
    rewards = critic_rewards([0.5] * 4, lengths, STEPPED, "continuous", debias_until=100)
    assert rewards.tolist() == [0.25] * 4
    rewards = critic_rewards([0.5] * 4, lengths, STEPPED, "continuous", debias_until=101)
    assert rewards.tolist() == [0.25, 0.25, 1.0, 1.0]
    assert lengths.tolist() == [50, 100, 101, 9999]  # nothing is written into them
    binary = critic_rewards([0.5] * 4, lengths, STEPPED, "binary", debias_until=100)
    assert binary.tolist() == [0, 0, 1, 1]  # it is of the continuous mode alone


def test_app_f1_threshold_reward_cuts_the_raw_score():
    scores = [0.59, 0.61, 0.5, 0.51]
    assert critic_rewards(scores, [150] * 4, STEPPED, "threshold").tolist() == [0, 1, 0, 0]
    strict = critic_rewards(scores, [50] * 4, STEPPED, "threshold", fixed_threshold=0.5)
    assert strict.tolist() == [1, 1, 0, 1]


def test_app_f1_raw_reward_is_the_score():
    scores = torch.tensor([-0.3, 0.2, 1.4])
    assert torch.equal(critic_rewards(scores, [50, 150, 999], STEPPED, "raw"), scores)


# --------------------------------------------------------------------------------------------------
# critic_faults [RFPO App. E]
# --------------------------------------------------------------------------------------------------

# Eight problems of six: in each one right answer that outscores three of five wrong ones; and as
# many problems, all right, that score high, so that there is variance to explain.
RIGHT, BETTER, WORSE = 0.35, 0.3, 0.4
MIXED = [RIGHT, BETTER, BETTER, BETTER, WORSE, WORSE]
FAULT_SCORES = MIXED * 8 + [0.9] * 48
FAULT_CORRECT = [1, 0, 0, 0, 0, 0] * 8 + [1] * 48
FAULT_PROBLEMS = [i // 6 for i in range(96)]
GOOD = [False] * 48 + [True] * 48  # rewarded: precision 1, of 56 / 96 = 0.583 right ones


def test_app_e_a_good_critic_has_no_fault():
    assert critic_faults(FAULT_SCORES, GOOD, FAULT_CORRECT, FAULT_PROBLEMS) == []
    # Its scores need not be probabilities: a constant on top changes nothing.
    higher = [score + 5 for score in FAULT_SCORES]
    assert critic_faults(higher, GOOD, FAULT_CORRECT, FAULT_PROBLEMS) == []


def test_app_e_within_problem_auc_below_0_6_is_a_fault():
    # 3 of 5 pairs are in order: 0.6 passes. 2 of 5: 0.4
    scores = [RIGHT, BETTER, BETTER, WORSE, WORSE, WORSE] * 8 + [0.9] * 48
    faults = critic_faults(scores, GOOD, FAULT_CORRECT, FAULT_PROBLEMS)
    assert faults == ["within-problem AUC 0.400 is not at least 0.6"]
    # One problem of eight falls to 2 of 5: (7 x 0.6 + 0.4) / 8 = 0.575
    scores = [RIGHT, BETTER, BETTER, WORSE, WORSE, WORSE, *MIXED * 7] + [0.9] * 48
    faults = critic_faults(scores, GOOD, FAULT_CORRECT, FAULT_PROBLEMS)
    assert faults == ["within-problem AUC 0.575 is not at least 0.6"]


def test_app_e_no_problem_with_both_outcomes_is_a_fault():
    faults = critic_faults([0.9, 0.8, 0.9, 0.1, 0.2, 0.1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0],
                           [0, 0, 0, 1, 1, 1])  # fmt: skip
    assert faults == ["within-problem AUC nan is not at least 0.6"]


def test_app_e_explained_variance_of_0_is_a_fault():
    # Var(y) = 1/4. Off by 0.5 for all, with either sign: the errors +-0.5 have variance 1/4 too.
    # Right ones score 0.5 or 1.5, wrong ones 0.5 or -0.5; all in order but for ties.
    correct, problems = [1, 1, 0, 0] * 4, [i // 4 for i in range(16)]
    scores, rewarded = [1.5, 0.5, 0.5, -0.5] * 4, [1, 1, 0, 0] * 4
    faults = critic_faults(scores, np.array(rewarded) > 0, correct, problems)
    assert faults == ["explained variance 0.000 is not above 0"]
    scores = [1.49, 0.5, 0.5, -0.5] * 4
    assert critic_faults(scores, np.array(rewarded) > 0, correct, problems) == []


def test_app_e_precision_must_be_0_05_above_the_share_of_right_answers():
    # 20 of 40 are right. 11 of 20 rewarded ones: 0.55 passes; 12 of 22: 0.545 does not.
    correct, problems = [1, 0] * 20, [i // 4 for i in range(40)]
    scores = [0.9, 0.1] * 20

    def rewarded(right, wrong):
        return torch.tensor([x for i in range(20) for x in (i < right, i < wrong)])

    assert critic_faults(scores, rewarded(11, 9), correct, problems) == []
    faults = critic_faults(scores, rewarded(12, 10), correct, problems)
    assert faults == ["precision 0.545 is not 0.05 above the share of right answers, 0.500"]
    faults = critic_faults(scores, rewarded(0, 0), correct, problems)  # none is rewarded
    assert faults == ["precision 0.000 is not 0.05 above the share of right answers, 0.500"]


def test_app_e_faults_are_all_named():
    faults = critic_faults([NAN] * 4, [False] * 4, [1, 0, 1, 0], [0, 0, 1, 1])
    assert [fault.split()[0] for fault in faults] == ["explained", "within-problem", "precision"]


# --------------------------------------------------------------------------------------------------
# best_cut, and what announces a decline [RFPO App. F.3, Table 14]
# --------------------------------------------------------------------------------------------------


def test_best_cut_lies_halfway_between_two_neighbours():
    assert metrics.best_cut([0.1, 0.8, 0.3, 0.9], [0, 1, 0, 1]) == pytest.approx(0.55)
    # 0.1 | 0.4: catches 1 of 2 wrong and loses no right one; 0.4 | 0.6 loses 1 of 3: 0.5 - 0.33 ...
    # 0.6 | 0.7: catches both and loses 1 of 3, which is best: 2/3 against 1/2
    cut = metrics.best_cut([0.1, 0.4, 0.6, 0.7, 0.9], [0, 1, 0, 1, 1])
    assert cut == pytest.approx(0.65)


def test_best_cut_of_equally_good_ones_is_the_lowest():
    # Above 0.1 and above 0.3 one of two wrong ones more is caught than right ones are lost.
    assert metrics.best_cut([0.1, 0.2, 0.3, 0.4], [0, 1, 0, 1]) == pytest.approx(0.15)


def test_best_cut_takes_tied_scores_together():
    # At 0.2 stand both wrong ones and one of two right ones; a cut cannot part them.
    assert metrics.best_cut([0.2, 0.2, 0.2, 0.6], [1, 0, 0, 1]) == pytest.approx(0.4)
    assert metrics.best_cut([0.5, 0.5], [1, 0]) == 0.5


def test_best_cut_weighs_the_classes_alike():
    # One right among nine wrong ones: the cut is below it, although most above are wrong then.
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.55, 0.7, 0.8, 0.9]
    assert metrics.best_cut(scores, [0] * 5 + [1] + [0] * 4) == pytest.approx(0.575)


@pytest.mark.parametrize("correct", [[1, 1], [0, 0]])
def test_best_cut_without_one_class_is_nan(correct):
    assert np.isnan(metrics.best_cut([0.1, 0.9], correct))


STATEMENTS = {
    "a box": (r"so \boxed{4}", 1),
    "4,000 and 4/3 are not 4": (r"The answer is 4,000. Or: the answer is 4/3. \boxed{4}", 1),
    "brackets, stars and a line": ("the answer is \\(4\\). **Answer: 4**", 2),
    "a box with spaces": (r"so \boxed { 4 }", 1),
    "answer is": (r"The answer is 4, hence \boxed{4}", 2),
    "answer is, with a colon and dollars": (r"the ANSWER is: $4$. \boxed{4}", 2),
    "an = that ends a sentence": (r"2 + 2 = 4. \boxed{4}", 2),
    "an = that ends a line": ("2 + 2 = 4\n\\boxed{4}", 2),
    "an = that ends the text": (r"\boxed{4}, since $2 + 2 = 4$", 2),
    "an = within a sentence": (r"2 + 2 = 4 and so \boxed{4}", 1),
    "42 and 4.5 and 14": (r"6 x 7 = 42. 9 / 2 = 4.5. The answer is 14, or 42: \boxed{4}", 1),
    "answer is 42 or 4.5": (r"The answer is 42. The answer is 4.5. \boxed{4}", 1),
    "minus 4": (r"2 - 6 = -4. The answer is -4. \boxed{4}", 1),
    "answer is a box": (r"the answer is \boxed{4}", 1),
    "answer is a box in dollars": (r"the answer is $\boxed{4}$.", 1),
    "another box": (r"\boxed{5}, no, \boxed{4}", 1),
    "boxes before and after": (r"<think> \boxed{4}, \boxed{4} </think> \boxed{4}", 3),
    "no answer": ("I do not know; the answer is open. 2 + 2 = 4.", 0),
    "nothing": ("", 0),
    "LaTeX": (r"x = \frac{1}{2}. The answer is $\frac{1}{2}$. \boxed{\frac{1}{2}}", 3),
    "LaTeX with a root": (r"x = \sqrt{2}+1. \boxed{\sqrt{2}+1}", 2),
    "a letter": (r"The answer is B. \boxed{B}, not Bob. The answer is Bob.", 2),
}


@pytest.mark.parametrize("name", STATEMENTS)
def test_app_f3_restatements(name):
    text, count = STATEMENTS[name]
    assert metrics.restatements(text) == count


def test_app_f3_final_box_is_the_text_from_the_last_box_on():
    assert metrics.final_box(r"\boxed{5} no \boxed{4} so") == r"\boxed{4} so"
    assert metrics.final_box("the answer is 4") == ""


def test_table14_repetition_is_of_60_character_shingles():
    # 120 characters of period 10: 61 shingles, 10 of them new
    assert metrics.repetition("abcdefghij" * 12) == pytest.approx(51 / 61)
    assert metrics.repetition("ab" * 30) == 0  # one shingle
    assert metrics.repetition("ab" * 29) == 0  # none
    assert metrics.repetition("".join(map(chr, range(200, 400)))) == 0


def test_table14_statement_stats_are_sums_over_texts():
    texts = [
        r"<think> \boxed{5} </think> \boxed{4}. So 2 + 2 = 4.",
        r"<think> the answer is \boxed{4}",
        "abcdefghij" * 12,
    ]
    assert metrics.statement_stats(texts) == {
        "text/restatements": 3,  # a box and an =; a box
        "text/boxed_answers": 3,
        "text/unclosed_frac": 2,
        "text/repetition": pytest.approx(51 / 61),
    }


def test_left_band_is_mean_plus_four_standard_deviations_of_20_steps():
    # 1 and 3 in turn: mean 2, population standard deviation 1, so the band ends at 6.
    early = [1.0, 3.0] * 10
    assert not metrics.left_band([*early, 6.0])
    assert metrics.left_band([*early, 6.01])
    assert metrics.left_band([*early, *[9.0] * 50, 6.01])  # only the first 20 make the band
    assert not metrics.left_band([*early, 9.0, 5.9])  # and only the last one is asked
    assert not metrics.left_band([*early[:-1], 99.0])  # the twentieth belongs to the band
    assert not metrics.left_band([1.0, 99.0]) and not metrics.left_band([])


def recorded(means, seed):
    """Means over 1,024 responses per step: a count of means[t], with the spread that counts of
    repeated statements have: a standard deviation as large as the mean, and Poisson noise."""
    rng = np.random.default_rng(seed)
    return [rng.poisson(m * rng.exponential(size=1024)).mean() for m in means]


def stopped(history):
    """The first step at which the run ends, or None."""
    steps = range(1, len(history) + 1)
    return next((step for step in steps if metrics.left_band(history[:step])), None)


@pytest.mark.parametrize("seed", range(4))
def test_table14_restatement_that_rises_to_68_is_stopped_early(seed):
    # 1.79 at step 1, 4.14 at 110, 67.94 at 250, growing by a constant share in between
    logs = np.interp(range(1, 251), [1, 110, 250], np.log([1.79, 4.14, 67.94]))
    history = recorded(np.exp(logs), seed)
    assert 20 < stopped(history) <= 120
    assert history[stopped(history) - 1] < 5


@pytest.mark.parametrize("seed", range(4))
def test_app_f3_restatement_that_drifts_from_1_9_to_2_6_is_not_stopped(seed):
    # The 16% arm, 141 steps, whose accuracy does not decline for restatement
    assert stopped(recorded(np.linspace(1.9, 2.6, 141), seed)) is None


# --------------------------------------------------------------------------------------------------
# Whole small runs
# --------------------------------------------------------------------------------------------------

REWARD = """
def reward(prompts, responses, golds):
    return [{verdict}] * len(golds)
"""
SMALL = {
    "num_steps": 2,
    "eval_every": 99,
    "save_every": 1,
    "eval_problems": 2,
    "eval_samples": 1,
    "prompts_per_step": 4,
    "group_size": 4,
    "minibatch_size": 16,
    "rollout_engine": "hf",
    "learning_rate": 1e-3,
    "warmup_steps": 0,
    "calibration_rollouts": 64,
    "num_bins": 4,
    "allow_weak_critic": True,
}


def make_critic(model, folder, tokenizer):
    """A critic with a random head over the body of a model folder."""
    from transformers import AutoModelForTokenClassification

    torch.manual_seed(0)
    lm = AutoModelForTokenClassification.from_pretrained(model, num_labels=1)
    common.export(Critic(lm), tokenizer, folder, common.make_accelerator(rfpo.Args()))
    return str(folder)


@pytest.fixture(scope="module")
def pair(base_policy, tmp_path_factory):
    """Folders of a policy and of a critic, which knows nothing."""
    folder = tmp_path_factory.mktemp("pair") / "critic"
    return base_policy, make_critic(base_policy, folder, common.load_tokenizer(base_policy))


def few_problems(patch):
    """300 problems instead of 20,000, and no picture: seconds that these tests have no use for."""
    make = tiny.problems
    patch(tiny, "problems", lambda split, *_, **__: make(split, 300, seed=0))
    patch(rfpo.Run, "finish", lambda self: None)
    patch(sys, "argv", [str(ROOT / "rfpo.py")])


@pytest.fixture
def world(pair, tmp_path, monkeypatch):
    """A function that runs rfpo.main in tmp_path and returns the run's folder."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    few_problems(monkeypatch.setattr)

    def run(name, **changes):
        args = rfpo.Args(policy=pair[0], critic=pair[1], run_name=name, runs_dir=str(tmp_path))
        rfpo.main(replace(args, **{**SMALL, **changes}), "tiny")
        return tmp_path / name

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def lines(folder):
    """The lines of metrics.jsonl, without what depends on the clock."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/", "seconds"))}
        for line in found
    ]


def fitted(folder):
    return Calibration.from_json((folder / "calibration.json").read_text())


def watch(patch):
    """Note what passes through rfpo.main: the models, and of each step the batch, its values and
    scores, rewards by row [B], and the advantages by row, [T] each."""
    seen = SimpleNamespace(steps=[], pieces=[])

    def after(name, note):
        function = getattr(rfpo, name)

        @wraps(function)  # keeps the signature, which main reads
        def noting(*args, **kwargs):
            result = function(*args, **kwargs)
            note(result, *args)
            return result

        patch(rfpo, name, noting)

    def batch(result, *_):
        seen.batch = result

    def values(result, *_):
        seen.values, seen.scores = (x.clone() for x in result)

    def rewards(result, rewards, values, *_):
        totals = dict(zip(seen.batch.rows.tolist(), rewards.sum(1).tolist(), strict=True))
        seen.steps.append(
            SimpleNamespace(
                batch=seen.batch,
                values=seen.values,
                scores=seen.scores,
                rewards=totals,
                advantages={},
            )
        )

    def pieces(result, *_):
        seen.pieces = [rows for rows, _ in result]

    def advantages(result, logprobs, old_logprobs, advantages, mask, *_):
        rows = seen.pieces.pop(0)
        numbers = seen.steps[-1].batch.rows[rows].tolist()
        for number, row, keep in zip(numbers, advantages, mask, strict=True):
            if keep.any():  # not a row that stands in
                seen.steps[-1].advantages[number] = row[keep]

    after("freeze", lambda result, *_: setattr(seen, "critic", result))
    after("load_policy", lambda result, *_: setattr(seen, "trained", result))
    after("make_batch", batch)
    after("read_values", values)
    after("gae", rewards)
    after("microbatches", pieces)
    after("policy_loss", advantages)
    return seen


def by_row(numbers):
    """[B] in the order of the batch, from a dict by row."""
    assert sorted(numbers) == list(range(len(numbers)))
    return torch.tensor([numbers[row] for row in sorted(numbers)])


def other_golds(monkeypatch, gold):
    make = tiny.problems
    monkeypatch.setattr(
        tiny, "problems", lambda *a, **k: [{**row, "answer": gold} for row in make(*a, **k)]
    )


def test_algorithm1_without_labels_the_policy_cannot_see_a_verdict(world, monkeypatch):
    sighted = world("sighted")
    calibrated = {"calibration": str(sighted / "calibration.json")}
    half = world("half", label_fraction=0.5, **calibrated)
    other_golds(monkeypatch, "nonsense")
    blind, half_blind = (
        world("blind", **calibrated),
        world("half_blind", label_fraction=0.5, **calibrated),
    )
    assert all(line["reward/accuracy"] > 0.1 for line in lines(sighted)[1:])
    assert all(line["reward/accuracy"] == 0 for line in lines(blind)[1:])
    assert same(weights(sighted / "model"), weights(blind / "model"))
    assert [x["reward/mean"] for x in lines(sighted)[1:]] == [
        x["reward/mean"] for x in lines(blind)[1:]
    ]
    assert not same(weights(half / "model"), weights(half_blind / "model"))
    assert not same(weights(sighted / "model"), weights(half / "model"))


def test_with_all_labels_the_reward_is_the_verdict(world):
    found = lines(world("all", label_fraction=1.0))
    for line in found[1:]:
        assert line["reward/mean"] == line["reward/accuracy"]
        assert line["rfpo/reward_gap"] == 0 and line["rfpo/agreement"] == 1
    assert 0 < found[1]["reward/accuracy"] < 1
    for line in lines(world("none"))[1:]:
        assert line["rfpo/reward_gap"] == line["reward/mean"] - line["reward/accuracy"] != 0


def constant_labels(tmp_path, pair):
    """Settings of a run in which a label is 0.25 and any other reward is not."""
    (tmp_path / "quarter.py").write_text(REWARD.format(verdict=0.25))
    whole = Calibration([24.0], [0.0], 1.0, 0.0, 64, 24, common.fingerprint(pair[1]))
    (tmp_path / "whole.json").write_text(whole.to_json())
    return {
        "reward": f"{tmp_path / 'quarter.py'}:reward",
        "calibration": str(tmp_path / "whole.json"),
        "reward_mode": "raw",
        "prompts_per_step": 32,
        "minibatch_size": 128,
    }


def test_algorithm1_labels_are_drawn_per_response_and_anew_each_step(
    world, pair, tmp_path, monkeypatch
):
    seen = watch(monkeypatch.setattr)
    settings = constant_labels(tmp_path, pair)
    world("labels", label_fraction=0.5, **settings)
    labelled = [by_row(step.rewards) == 0.25 for step in seen.steps]
    for step, chosen in zip(seen.steps, labelled, strict=True):
        assert 45 <= chosen.sum() <= 83  # of 128: 64 and 3.3 standard deviations
        groups = chosen.view(32, 4).sum(1)
        assert ((groups > 0) & (groups < 4)).sum() > 16  # within a group, some are and some not
        scores = torch.empty(128).scatter_(0, step.batch.rows, step.scores)
        assert torch.equal(by_row(step.rewards)[~chosen], scores[~chosen])
    assert not torch.equal(*labelled)
    seen.steps.clear()
    world("fewer", label_fraction=0.1, num_steps=1, **settings)
    fewer = by_row(seen.steps[0].rewards) == 0.25
    assert 3 <= fewer.sum() <= 25 and not (fewer & ~labelled[0]).any()
    seen.steps.clear()
    world("other seed", label_fraction=0.5, num_steps=1, seed=2, **settings)
    assert not torch.equal(by_row(seen.steps[0].rewards) == 0.25, labelled[0])


def test_labels_are_drawn_with_seeds_of_their_own(world, monkeypatch):
    # Not with that of some response, whose tokens would then decide which responses are labelled
    seeds = {rfpo: set(), common: set()}
    for module, found in seeds.items():
        make = module.row_seed
        monkeypatch.setattr(
            module, "row_seed", lambda *p, make=make, found=found: found.add(make(*p)) or make(*p)
        )
    world("run", label_fraction=0.5)
    assert len(seeds[rfpo]) == 2 and len(seeds[common]) > 32
    assert not seeds[rfpo] & seeds[common]


def hand_values(folder, batch, i):
    """Values of the states of response i, by transformers alone: after the prompt, ..., after the
    last token."""
    from transformers import AutoModelForTokenClassification

    lm = AutoModelForTokenClassification.from_pretrained(folder).eval()
    prompt, response = int(batch.prompt_lengths[i]), int(batch.response_lengths[i])
    with torch.no_grad():
        logits = lm(input_ids=batch.ids[i : i + 1, : prompt + response]).logits[0, :, 0]
    return logits[prompt - 1 :]


def test_algorithm1_advantage_is_reward_minus_the_value_before_the_token_whitened(
    world, pair, monkeypatch
):
    # A limit of 8 cuts some responses off: they are scored as they stand.
    seen = watch(monkeypatch.setattr)
    folder = world("one", num_steps=1, max_response_tokens=8, tokens_per_microbatch=64)
    step, b = seen.steps[0], fitted(folder)
    assert 0 < lines(folder)[1]["rollout/truncated_frac"] < 1
    want, scores = {}, {}
    for i, row in enumerate(step.batch.rows.tolist()):
        values = hand_values(pair[1], step.batch, i)
        scores[row] = values[-1].item()
        length = int(step.batch.response_lengths[i])
        place = next((k for k, edge in enumerate(b.edges) if length <= edge), len(b.edges) - 1)
        reward = float(scores[row] - b.scale * b.offsets[place] > b.threshold)
        assert step.rewards[row] == reward
        assert step.scores[i].item() == pytest.approx(scores[row], abs=1e-5)
        want[row] = reward - values[:-1]  # V_t is of the state before token t
    assert 0 < sum(step.rewards.values()) < 16
    everything = torch.cat(list(want.values())).double()
    mean, std = everything.mean(), everything.std(unbiased=False)
    for row, advantages in want.items():
        torch.testing.assert_close(
            step.advantages[row], ((advantages - mean) / std).float(), rtol=1e-4, atol=1e-4
        )


def test_a_step_logs_gaps_agreement_drift_and_statements(world, pair, monkeypatch):
    seen, judged = watch(monkeypatch.setattr), []
    gather = rfpo.gather_groups

    def gathering(*args):
        judged.append(gather(*args))
        return judged[-1]

    monkeypatch.setattr(rfpo, "gather_groups", gathering)
    found = lines(world("run"))
    for line, step, groups in zip(found[1:], seen.steps, judged[1:], strict=True):
        correct = torch.tensor([c for group in groups for c in group.correct])
        scores = torch.empty(16).scatter_(0, step.batch.rows, step.scores)
        rewards = by_row(step.rewards)
        want = {
            "rfpo/reward_gap": (rewards.mean() - correct.mean()).item(),
            "rfpo/score_gap": (scores.mean() - correct.mean()).item(),
            "rfpo/agreement": (rewards == correct).double().mean().item(),
            "rfpo/best_cut": metrics.best_cut(scores, correct),
            "value/auc": metrics.auc(scores, correct),
            "rfpo/length_drift": line["rollout/response_tokens_mean"]
            / found[1]["rollout/response_tokens_mean"]
            - 1,
        }
        assert {name: line[name] for name in want} == pytest.approx(want, abs=1e-6)
        texts = common.response_texts(groups, common.load_tokenizer(pair[0]))
        for name, total in metrics.statement_stats(texts).items():
            assert line[name] == pytest.approx(total / 16)
        assert line["text/restatements"] > 0
        golds = [group.problem.gold for group in groups for _ in group.responses]
        boxed = [verify(metrics.final_box(x), gold) for x, gold in zip(texts, golds, strict=True)]
        assert line["text/box_accuracy"] == np.mean(boxed) > 0
    assert found[1]["rfpo/length_drift"] == 0 != found[2]["rfpo/length_drift"]


@pytest.mark.parametrize("mode", ["binary", "continuous", "threshold", "raw"])
def test_each_reward_mode_trains(mode, world, monkeypatch):
    seen = watch(monkeypatch.setattr)
    settings = {"fixed_threshold": 0.1, "debias_until": 6, "scale": 0.5}
    folder = world(mode, num_steps=1, reward_mode=mode, **settings)
    step, c = seen.steps[0], fitted(folder)
    assert c.scale == 0.5
    for i, row in enumerate(step.batch.rows.tolist()):
        v, length = step.scores[i].item(), step.batch.response_lengths[i].item()
        b, clipped = c.offset([length]).item(), c.offset([min(length, 6)]).item()
        want = {
            "binary": float(v - 0.5 * b > c.threshold),
            "continuous": v - 0.5 * clipped,
            "threshold": float(v > 0.1),
            "raw": v,
        }
        assert step.rewards[row] == pytest.approx(want[mode], abs=1e-6)
    assert lines(folder)[1]["reward/mean"] == pytest.approx(by_row(step.rewards).mean().item())
    assert lines(folder)[1]["optim/grad_norm"] > 0


def test_app_f2_group_advantage(world, monkeypatch):
    # [1, 0, 0, 0]: mean 1/4, unbiased std 1/2: 1.5, -0.5, -0.5, -0.5; the same for each token. Two
    # groups do not mix: [3, 1, 1, 1] has mean 1.5 and std 1.
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 3.0, 1.0, 1.0, 1.0] * 2)
    monkeypatch.setattr(rfpo, "critic_rewards", lambda scores, *_: rewards[: len(scores)])
    seen = watch(monkeypatch.setattr)
    folder = world("group", num_steps=1, advantage="group", tokens_per_microbatch=64,
                   calibration_rollouts=16)  # fmt: skip
    want = [1.5, -0.5, -0.5, -0.5] * 4
    for row, advantages in seen.steps[0].advantages.items():
        torch.testing.assert_close(advantages, torch.full_like(advantages, want[row]), rtol=1e-5,
                                   atol=0)  # fmt: skip
    assert len(seen.steps[0].advantages) == 16
    assert lines(folder)[1]["reward/mean"] == pytest.approx(14 / 16)


def test_the_calibration_holds_rollouts_of_pi_0_at_the_real_limit(world, pair, monkeypatch):
    judged, scored = [], []
    for name, found in (("gather_groups", judged), ("gather_rows", scored)):
        gather = getattr(rfpo, name)
        monkeypatch.setattr(
            rfpo,
            name,
            lambda *a, gather=gather, found=found: found.append(gather(*a)) or found[-1],
        )
    settings = {"num_steps": 1, "max_response_tokens": 12, "num_bins": 2, "scale": 0.5}
    whole, part = world("all", **settings), world("part", calibrate_on="finished", **settings)
    assert len(judged[0]) == 16
    responses = [response for group in judged[0] for response in group.responses]
    lengths = torch.tensor([len(r.token_ids) for r in responses])
    correct = torch.tensor([c for group in judged[0] for c in group.correct])
    finished = torch.tensor([r.finished for r in responses])
    assert len(responses) == 64 and 0 < finished.sum() < 64 and lengths.max() == 12
    made_for = {"cap": 12, "critic": common.fingerprint(pair[1])}
    want = fit_calibration(scored[0], lengths, correct, 2, 0.5)
    assert fitted(whole) == replace(want, **made_for)
    some = (x[finished] for x in (scored[0], lengths, correct))
    assert fitted(part) == replace(fit_calibration(*some, 2, 0.5), **made_for)
    assert judged[0][0].responses[0].token_ids.tolist() != (
        judged[1][0].responses[0].token_ids.tolist()
    )  # training does not see the rollouts of the calibration again


def test_the_critic_stays_what_it_was(world, pair, monkeypatch):
    before = weights(Path(pair[1]))

    def check(seen):
        (_, optimizer), critic = seen.trained, seen.critic
        assert same(dict(critic.lm.state_dict()), before)
        assert not any(module.training for module in critic.lm.modules())
        assert not any(p.requires_grad or p.grad is not None for p in critic.parameters())
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert len(trained) == len(list(seen.trained[0].parameters()))
        assert not trained & {id(p) for p in critic.parameters()}

    seen = watch(monkeypatch.setattr)
    folder = world("run")
    check(seen)
    assert not same(weights(folder / "model"), weights(Path(pair[0])))
    world("run", num_steps=3, resume=True)
    check(seen)
    assert [line["step"] for line in lines(folder)] == [0, 1, 2, 3]


class Killed(Exception):
    pass


def test_resume_equals_an_uninterrupted_run(world, monkeypatch):
    settings = {"num_steps": 5, "save_every": 2, "label_fraction": 0.5}
    whole = world("whole", **settings)
    warmup = rfpo.warmup

    def until_step_4(step, *args):
        if step == 4:
            raise Killed
        return warmup(step, *args)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(rfpo, "warmup", until_step_4)
        world("broken", **settings)
    folder = whole.with_name("broken")
    (folder / "calibration.json").unlink()
    for name in ("calibrate", "fit_calibration"):
        monkeypatch.setattr(rfpo, name, None)  # it comes from the checkpoint
    world("broken", resume=True, **settings)
    assert same(weights(whole / "model"), weights(folder / "model"))
    assert fitted(whole) == fitted(folder)
    assert lines(whole) == lines(folder)
    for run in (whole, folder):
        state = json.loads((run / "checkpoints" / "step-000005" / "state.json").read_text())
        assert [stated for _, stated, _ in state["past"]] == [
            line["text/restatements"] for line in lines(run)[1:]
        ]


def test_a_given_calibration_is_not_fitted_anew(world, monkeypatch):
    first = world("first")
    changed = replace(fitted(first), threshold=99.0)
    path = first / "changed.json"
    path.write_text(changed.to_json())
    monkeypatch.setattr(rfpo, "calibrate", None)
    second = world("second", calibration=str(path))
    assert fitted(second) == changed
    assert [line["reward/mean"] for line in lines(second)[1:]] == [0.0, 0.0]


def test_stop_on_restatement_goes_back_to_the_last_checkpoint(world, monkeypatch, capsys):
    # 1.8 and a little for 20 steps, then 2.0 and from step 23 on 68; saved every 5 steps.
    steps, saved = [], {}

    def counts(texts):
        steps.append(0)
        step = len(steps)
        count = 1.8 + 0.1 * (step % 2) if step <= 20 else 2.0 if step < 23 else 68.0
        return metrics.statement_stats(texts) | {"text/restatements": count * len(texts)}

    monkeypatch.setattr(rfpo, "statement_stats", counts)
    save = rfpo.Run.save

    def saving(self, step, trained, **state):
        save(self, step, trained, **state)
        saved[step] = {k: v.clone() for k, v in trained[0].lm.state_dict().items()}

    monkeypatch.setattr(rfpo.Run, "save", saving)
    settings = {"num_steps": 25, "save_every": 5, "prompts_per_step": 1, "minibatch_size": 4}
    folder = world("stopped", stop_on_restatement=True, **settings)
    assert [line["step"] for line in lines(folder)] == list(range(24))
    assert "step 23: answers are restated" in capsys.readouterr().out
    assert sorted(saved) == [5, 10, 15, 20]
    assert same(weights(folder / "model"), saved[20])
    assert not same(saved[20], saved[15])
    steps.clear()
    folder = world("through", **settings)  # without the flag nothing stops it
    assert lines(folder)[-1]["step"] == 25
    assert same(weights(folder / "model"), saved[25])


def test_stop_on_entropy_rise_goes_back_to_the_last_checkpoint(world, monkeypatch, capsys):
    # 1.0 and falling; from step 23 on 10.1 % above the lowest, which is 0.9
    step = iter(range(1, 26))
    entropy = rfpo.rollout_metrics

    def measured(groups):
        t = next(step)
        return entropy(groups) | {"policy/entropy": 0.991 if t >= 23 else max(1.1 - 0.01 * t, 0.9)}

    monkeypatch.setattr(rfpo, "rollout_metrics", measured)
    settings = {"num_steps": 25, "save_every": 5, "prompts_per_step": 1, "minibatch_size": 4}
    folder = world("stopped", stop_on_entropy_rise=True, **settings)
    assert lines(folder)[-1]["step"] == 23
    assert "step 23: the entropy rises" in capsys.readouterr().out


def test_rebounded_is_a_tenth_above_the_lowest_from_step_21_on():
    falling = [2.0 - 0.05 * t for t in range(20)]  # down to 1.05
    assert not metrics.rebounded([*falling, 1.05 * 1.099])
    assert metrics.rebounded([*falling, 1.05 * 1.101])
    assert not metrics.rebounded([*falling[1:], 99.0])  # only the twentieth
    assert not metrics.rebounded([*falling, 9.0, 1.05])  # only the last is asked


# --- Two processes


def test_a_rank_without_a_prompt_has_no_texts(pair):
    # As where there are fewer prompts, or evaluation problems, than ranks
    tokenizer = common.load_tokenizer(pair[0])
    assert common.response_texts([], tokenizer) == []
    assert common.judge([], common.load_reward("tiny.py:reward"), tokenizer) == []


DRIVER = """
import sys
sys.path[:0] = {paths}
import test_rfpo
test_rfpo.child()
"""


def child():
    """One of two processes: what it has seen in each run goes to a file."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    seen = watch(setattr)
    few_problems(setattr)
    for settings in json.loads(os.environ["RFPO_TEST"]):
        seen.steps.clear()
        rfpo.main(rfpo.Args(**settings), "tiny")
        parameters = list(seen.critic.parameters())
        trained = {id(p) for group in seen.trained[1].param_groups for p in group["params"]}
        local = sum(p.to_local().numel() for p in parameters)
        whole = sum(p.numel() for p in parameters)
        found = {
            "sharded": all(isinstance(p, DTensor) for p in parameters) and local < 0.6 * whole,
            "frozen": not any(p.requires_grad or p.grad is not None for p in parameters),
            "eval": not any(module.training for module in seen.critic.lm.modules()),
            "apart": not trained & {id(p) for p in parameters},
            "critic": {n: t.full_tensor() for n, t in seen.critic.lm.state_dict().items()},
            "rewards": [step.rewards for step in seen.steps],
        }
        folder = Path(settings["runs_dir"]) / settings["run_name"]
        torch.save(found, folder / f"rank-{dist.get_rank()}.pt")


def test_two_processes_shard_and_agree_with_one(world, pair, tmp_path, monkeypatch):
    seen, rewards, runs = watch(monkeypatch.setattr), {}, []
    for name in ("gae", "group"):
        settings = {"label_fraction": 0.5, "reward_mode": "continuous", "advantage": name}
        world(f"{name}-one", **settings)
        rewards[name] = [by_row(step.rewards) for step in seen.steps]
        seen.steps.clear()
        folders = {"policy": pair[0], "critic": pair[1], "runs_dir": str(tmp_path)}
        runs.append(SMALL | settings | folders | {"run_name": f"{name}-two"})
    (tmp_path / "driver.py").write_text(DRIVER.format(paths=[str(ROOT), str(ROOT / "tests")]))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"),
            *("--master_port", str(31500 + os.getpid() % 2000), str(tmp_path / "driver.py")),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RFPO_TEST": json.dumps(runs)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("gae", "group"):
        one, two = tmp_path / f"{name}-one", tmp_path / f"{name}-two"
        assert asdict(fitted(two)) == {
            k: v if isinstance(v, int | str) else pytest.approx(v, rel=1e-5, abs=1e-6)
            for k, v in asdict(fitted(one)).items()
        }
        for a, b in zip(lines(one), lines(two), strict=True):
            assert a.keys() == b.keys()
            # Noise, and padding, which depends on how the rows fall to the ranks
            own = {"rollout/logprob_gap_mean", "rollout/logprob_gap_max", "train/padding_frac"}
            for key in a.keys() - own:
                assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-6, nan_ok=True), key
        ranks = [torch.load(two / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
        for rank in ranks:
            assert rank["sharded"] and rank["frozen"] and rank["eval"] and rank["apart"]
            assert same(rank["critic"], weights(Path(pair[1])))
        shares = (rank["rewards"] for rank in ranks)
        for whole, first, second in zip(rewards[name], *shares, strict=True):
            assert first and second and not first.keys() & second.keys()
            torch.testing.assert_close(by_row(first | second), whole, rtol=1e-5, atol=1e-6)


# --------------------------------------------------------------------------------------------------
# Wrong use
# --------------------------------------------------------------------------------------------------

FLAGS = [
    "--num-steps",
    "1",
    "--eval-problems",
    "1",
    "--eval-samples",
    "1",
    "--prompts-per-step",
    "2",
    "--group-size",
    "4",
    "--minibatch-size",
    "8",
    "--calibration-rollouts",
    "64",
    "--num-bins",
    "4",
    "--rollout-engine",
    "hf",
]


@pytest.fixture
def line_of(pair, tmp_path, monkeypatch, capsys):
    """A function that calls rfpo.py with these flags, and returns its one line on stderr."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    few_problems(monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)

    def call(*flags, policy=pair[0], critic=pair[1]):
        models = ["--policy", policy, "--critic", critic] if policy else []
        monkeypatch.setattr(sys, "argv", [str(ROOT / "rfpo.py"), *models, *FLAGS, *flags])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            rfpo.launch(rfpo.main, rfpo.Args, rfpo.PRESETS, rfpo.__doc__)
        assert stopped.value.code == 2
        line = capsys.readouterr().err.strip()
        assert line.startswith("rfpo.py: error: ") and "\n" not in line
        return line

    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)


CASES = {
    "label fraction above 1": (["--label-fraction", "1.5"], ["--label-fraction 1.5", "[0, 1]"]),
    "label fraction below 0": (["--label-fraction", "-0.1"], ["--label-fraction -0.1", "[0, 1]"]),
    "label fraction nan": (["--label-fraction", "nan"], ["--label-fraction nan"]),
    "fewer rollouts than bins": (
        ["--calibration-rollouts", "8", "--num-bins", "9"],
        ["--calibration-rollouts 8", "--num-bins 9"],
    ),
    "rollouts in no whole groups": (
        ["--calibration-rollouts", "66"],
        ["--calibration-rollouts 66", "--group-size 4"],
    ),
    "no bins": (["--num-bins", "0"], ["--num-bins 0"]),
    "saved too seldom to go back": (
        ["--stop-on-restatement", "--save-every", "21"],
        ["--stop-on-restatement", "--save-every 21", "20"],
    ),
    "unknown reward mode": (["--reward-mode", "ternary"], ["--reward-mode", "ternary"]),
    "unknown scale": (["--scale", "much"], ["--scale", "much"]),
    "a group of one": (
        ["--advantage", "group", "--group-size", "1", "--minibatch-size", "2"],
        ["--group-size 1", "--advantage group"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_wrong_use_is_named(name, line_of, tmp_path):
    flags, words = CASES[name]
    line = line_of(*flags)
    for word in words:
        assert word in line, line
    assert not (tmp_path / "runs").exists()  # nothing was started


def test_save_every_20_is_enough_to_go_back():
    rfpo.check(rfpo.Args(stop_on_restatement=True, save_every=20))
    rfpo.check(rfpo.Args(save_every=50))


def test_without_a_critic_the_command_that_makes_one_is_printed(line_of):
    assert "make them with: python ppo_critic.py" in line_of(policy=None)


@pytest.mark.parametrize("flag", ["policy", "critic"])
def test_a_missing_folder_is_named_by_its_flag(flag, line_of):
    for name in ("./nowhere", "nowhere/critic"):  # the second could be a hub id
        line = line_of(**{flag: name})
        assert f"{name!r}" in line and "no such folder" in line


def test_a_critic_in_place_of_the_policy(line_of, pair):
    line = line_of(policy=pair[1])
    assert "is a critic; name the folder of a policy" in line


def test_the_folder_of_a_run_says_what_is_in_it(line_of, pair):
    run = str(Path(pair[1]).parent)
    assert f"--critic {run!r}: the folder has no config.json; inside are: " in line_of(critic=run)


def test_a_critic_without_a_value_head(line_of, pair):
    assert "has no value head; take the critic folder" in line_of(critic=pair[0])


def test_a_critic_of_another_architecture(line_of, pair, tmp_path):
    from transformers import LlamaConfig, LlamaForTokenClassification

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(vocab_size=132, num_labels=1, **sizes)
    folder = str(tmp_path / "llama")
    LlamaForTokenClassification(config).save_pretrained(folder)
    common.load_tokenizer(pair[0]).save_pretrained(folder)
    line = line_of(critic=folder)
    assert f"--critic {folder!r}" in line and "llama" in line and "qwen3" in line


def test_a_critic_of_another_tokenizer(line_of, pair, tmp_path):
    folder = shutil.copytree(pair[1], tmp_path / "other")
    tokenizer = common.load_tokenizer(pair[1])
    size = len(tokenizer)
    tokenizer.add_tokens(["7"])
    tokenizer.save_pretrained(folder)
    line = line_of(critic=str(folder))
    assert "another vocabulary" in line and str(size) in line and str(size + 1) in line


def test_a_weak_critic_is_refused_and_can_be_allowed(line_of, tmp_path, capsys, monkeypatch):
    line = line_of()
    assert "this critic is no reward" in line and "--allow-weak-critic" in line
    # Each of its measures, and how many responses are finished
    for words in ("is not above 0", "within-problem AUC", "64 rollouts", "% right", "% finished"):
        assert words in line
    assert not (tmp_path / "runs").exists()  # a refusal leaves no folder that takes a run's name
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--allow-weak-critic", "--run-name", "allowed"])
    rfpo.launch(rfpo.main, rfpo.Args, rfpo.PRESETS, rfpo.__doc__)
    assert "warning: within-problem AUC" in capsys.readouterr().out
    assert (tmp_path / "runs" / "allowed" / "model" / "config.json").exists()


@pytest.mark.parametrize(("verdict", "word"), [(1.0, "right"), (0.0, "wrong")])
def test_a_policy_that_is_always_right_or_wrong(verdict, word, line_of, tmp_path):
    (tmp_path / "always.py").write_text(REWARD.format(verdict=verdict))
    line = line_of("--reward", "always.py:reward", "--allow-weak-critic")
    assert f"all 64 calibration rollouts are {word}" in line and "easier or harder" in line


CALIBRATIONS = {
    "of another critic": ({"critic": "another"}, "belongs to another critic"),
    "of another limit": ({"cap": 25}, "fitted at 25 response tokens"),
    "no json": ("this is no json", "is no calibration"),
    "another json": ('{"edges": [1]}', "is no calibration"),
    "a list": ("[1, 2]", "is no calibration"),
    "not a number": ({"scale": float("nan")}, "is damaged"),
    "a word": ({"offsets": ["x"]}, "is damaged"),
    "more offsets than edges": ({"offsets": [0.0, 0.1]}, "is damaged"),
    "falling edges": ({"edges": [24.0, 12.0], "offsets": [0.0, 0.1]}, "is damaged"),
    "missing": (None, "no such file"),
}


@pytest.mark.parametrize("name", CALIBRATIONS)
def test_a_calibration_that_does_not_fit(name, line_of, pair, tmp_path):
    content, words = CALIBRATIONS[name]
    mine = Calibration([24.0], [0.0], 1.0, 0.0, 64, 24, common.fingerprint(pair[1]))
    path = tmp_path / "calibration.json"
    if isinstance(content, dict):
        content = replace(mine, **content).to_json()
    if content is not None:
        path.write_text(content)
    line = line_of("--calibration", str(path))
    assert f"--calibration {str(path)!r}" in line and words in line
    path.write_text(mine.to_json())
    args = rfpo.Args(calibration=str(path), critic=pair[1], max_response_tokens=24)
    assert calibration.load_calibration(args) == mine


def test_a_calibration_that_does_not_fit_starts_no_run(line_of, tmp_path):
    assert "no such file" in line_of("--calibration", "nowhere.json")
    assert not (tmp_path / "runs").exists()


# --------------------------------------------------------------------------------------------------
# Presets
# --------------------------------------------------------------------------------------------------


def test_rl_stage_presets_follow_table_6():
    args = rfpo.PRESETS["qwen3-4b"]
    table = {
        "num_steps": 300,
        "prompts_per_step": 128,
        "group_size": 8,
        "max_response_tokens": 5120,
        "eval_max_tokens": 12_288,
        "minibatch_size": 1024,  # the whole batch: one update
        "num_epochs": 1,
        "max_prompt_tokens": 2048,
        "temperature": 1.0,
        "tensor_parallel": 2,
        "eval_every": 10,
        "eval_dataset": "aime26,amc23",
        "eval_samples": 8,
        "eval_temperature": 0.7,
        "advantage": "gae",
        "gamma": 1.0,
        "gae_lambda": 1.0,
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.2,
        "dual_clip": None,
        "learning_rate": 1e-6,
        "warmup_steps": 10,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "activation_checkpointing": True,
        # the main result: no labels, Eq. 2 on deciles of 512 rollouts, finished or not
        "label_fraction": 0.0,
        "reward_mode": "binary",
        "calibration": None,
        "calibration_rollouts": 512,
        "calibrate_on": "all",
        "num_bins": 10,
        "scale": 1.0,
        "allow_weak_critic": False,
        "stop_on_restatement": False,
    }
    assert {name: vars(args)[name] for name in table} == table
    # App. E.5 keeps every setting but the limit, and refits b on six bins with a scale.
    smaller = rfpo.PRESETS["qwen3-4b-cap4096"]
    changes = {"max_response_tokens": 4096, "num_steps": 310, "num_bins": 6, "scale": "auto"}
    assert smaller == replace(args, **changes)
    # RFPO and supervised PPO share every setting.
    critics = {f.name for f in fields(ppo_critic.Args)} - {f.name for f in fields(rfpo.Args)}
    assert critics == {
        "model",
        "critic_learning_rate",
        "critic_updates_per_batch",
        "critic_warmup_steps",
        "save_actor_at_step",
        "save_critic_at_step",
        "value_clip",
    }
    for name in ("qwen3-4b", "qwen3-4b-cap4096"):
        ours, theirs = rfpo.PRESETS[name], ppo_critic.PRESETS[name]
        shared = {f.name for f in fields(ppo_critic.Args)} - critics
        assert {n: vars(ours)[n] for n in shared} == {n: vars(theirs)[n] for n in shared}
        assert ours.policy == theirs.model
    for preset in rfpo.PRESETS.values():
        if not preset.activation_checkpointing:  # it needs torchrun
            rfpo.check(preset)
