"""dapo.py, part 4: one test per equation, with numbers that can be checked on paper."""

import math

import pytest
import torch

from common import k3
from dapo import PRESETS, group_advantages, policy_loss, shape_rewards

NAN = float("nan")


def surrogate(
    ratios, advantages, mask=None, num_tokens=1, low=0.2, high=0.28, dual_clip=10.0, old=None
):
    """policy_loss for ratios [B, T] against old log-probabilities of 0; also the gradient."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    old_logprobs = torch.zeros_like(logprobs) if old is None else torch.tensor(old)
    mask = torch.ones_like(logprobs) if mask is None else torch.tensor(mask)
    advantages = torch.tensor(advantages)
    loss, stats = policy_loss(
        logprobs, old_logprobs, advantages, mask.bool(), num_tokens, low, high, dual_clip
    )
    loss.backward()
    return loss.item(), logprobs.grad, stats


# --------------------------------------------------------------------------------------------------
# shape_rewards
# --------------------------------------------------------------------------------------------------


def test_overlong_penalty_grows_over_the_buffer():
    # Limit 20, buffer 4: (length - 16) / 4, within 0 and 1, is taken off a right answer's 1.
    lengths = torch.tensor([1.0, 16.0, 17.0, 18.0, 20.0, 21.0])
    rewards = shape_rewards(torch.ones(6), lengths, 20, 4, 1.0)
    torch.testing.assert_close(rewards, torch.tensor([1.0, 1.0, 0.75, 0.5, 0.0, 0.0]))


def test_overlong_penalty_hits_wrong_answers_too_and_scales():
    # 0 - 0.5 * (18 - 16) / 4 = -0.25
    rewards = shape_rewards(torch.zeros(1), torch.tensor([18.0]), 20, 4, 0.5)
    torch.testing.assert_close(rewards, torch.tensor([-0.25]))


def test_overlong_buffer_0_shapes_nothing():
    rewards = shape_rewards(torch.tensor([1.0, 0.0]), torch.tensor([20.0, 99.0]), 20, 0, 1.0)
    assert rewards.tolist() == [1.0, 0.0]


def test_wrong_reward_is_the_reward_of_a_wrong_answer():
    # -1 + 2 * correct: right 1, wrong -1, half right 0; the penalty comes on top: -1 - 1 = -2
    correct, lengths = torch.tensor([1.0, 0.0, 0.5, 0.0]), torch.tensor([5.0, 5.0, 5.0, 20.0])
    rewards = shape_rewards(correct, lengths, 20, 4, 1.0, wrong_reward=-1.0)
    torch.testing.assert_close(rewards, torch.tensor([1.0, -1.0, 0.0, -2.0]))


def test_integer_lengths_give_the_same_rewards():
    rewards = shape_rewards(torch.tensor([1, 1]), torch.tensor([17, 18]), 20, 4, 1.0)
    torch.testing.assert_close(rewards, torch.tensor([0.75, 0.5]))


# --------------------------------------------------------------------------------------------------
# group_advantages [FIPO §2]
# --------------------------------------------------------------------------------------------------


def test_group_advantages_divide_by_the_unbiased_std():
    # mean 1/4, squared deviations 9/16 + 3/16 = 3/4, over n-1 = 3: std 1/2. (1 - 1/4) / (1/2) = 1.5
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), 4)
    assert advantages.shape == (4, 1)
    torch.testing.assert_close(advantages[:, 0], torch.tensor([1.5, -0.5, -0.5, -0.5]))


def test_group_advantages_of_two_groups_do_not_mix():
    # [1, 0, 0]: mean 1/3, std 1/sqrt(3): (2/3) sqrt(3) = 1.1547, -(1/3) sqrt(3) = -0.57735
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0]), 3)[:, 0]
    want = [1.1547005, -0.5773503, -0.5773503, 0.5773503, 0.5773503, -1.1547005]
    torch.testing.assert_close(advantages, torch.tensor(want), rtol=1e-5, atol=0)


def test_group_advantages_of_a_pair_and_of_one_wrong_in_eight():
    # [1, 0]: +-(1/2) / sqrt(1/2) = +-0.70711
    pair = group_advantages(torch.tensor([1.0, 0.0]), 2)[:, 0]
    torch.testing.assert_close(pair, torch.tensor([0.7071068, -0.7071068]), rtol=1e-5, atol=0)
    # 7 right, 1 wrong: mean 7/8, variance (7/64 + 49/64) / 7 = 1/8: (1/8) sqrt(8) = 0.353553
    eight = group_advantages(torch.tensor([1.0] * 7 + [0.0]), 8)[:, 0]
    want = torch.tensor([0.3535534] * 7 + [-2.4748737])
    torch.testing.assert_close(eight, want, rtol=1e-5, atol=0)


def test_group_advantages_add_1e_6_to_the_std():
    # [0, 1e-6]: mean 5e-7, std 7.0711e-7: 5e-7 / (7.0711e-7 + 1e-6) = 0.29289
    advantages = group_advantages(torch.tensor([0.0, 1e-6]), 2)[:, 0]
    torch.testing.assert_close(advantages, torch.tensor([-0.2928932, 0.2928932]))


@pytest.mark.parametrize(
    "rewards", [[1.0] * 4, [0.0] * 4, [0.3] * 7, [0.7] * 16, [0.1] * 3, [1e6 + 0.1] * 5, [0.7]]
)
def test_group_advantages_of_equal_rewards_are_exactly_0(rewards):
    # The fp32 mean of seven 0.3 is off by 3e-8; over a std of 3e-8 + 1e-8 that would be 0.7.
    assert group_advantages(torch.tensor(rewards), len(rewards)).tolist() == [[0.0]] * len(rewards)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.float64, torch.bool])
def test_group_advantages_do_not_depend_on_the_dtype(dtype):
    rewards = torch.tensor([1.0] * 7 + [0.0] + [0.0] * 5 + [1.0] * 3)
    want = group_advantages(rewards, 8)
    torch.testing.assert_close(group_advantages(rewards.to(dtype), 8), want, rtol=1e-6, atol=1e-6)


def test_group_advantages_of_minus_1_and_1_equal_those_of_0_and_1():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    want = group_advantages(rewards, 3)
    torch.testing.assert_close(group_advantages(2 * rewards - 1, 3), want, rtol=1e-5, atol=0)


# --------------------------------------------------------------------------------------------------
# policy_loss [FIPO Eq. 8 with f = 1]
# --------------------------------------------------------------------------------------------------


def test_eq8_is_the_ratio_times_the_advantage_between_the_bounds():
    loss, gradient, stats = surrogate([[1.1, 0.9]], [[2.0]])
    assert loss == pytest.approx(-4.0)  # -1.1 * 2 - 0.9 * 2
    torch.testing.assert_close(gradient, torch.tensor([[-2.2, -1.8]]))  # d ratio / d logp = ratio
    assert stats["policy/clip_high_frac"] == stats["policy/clip_low_frac"] == 0


def test_eq8_clip_high():
    # A = 1: min(1.5, 1.28) = 1.28, a constant. A = -1: min(-1.5, -1.28) = -1.5, with a gradient.
    loss, gradient, stats = surrogate([[1.5], [1.5]], [[1.0], [-1.0]])
    assert loss == pytest.approx(-1.28 + 1.5)
    torch.testing.assert_close(gradient, torch.tensor([[0.0], [1.5]]))
    assert stats["policy/clip_high_frac"] == 1 and stats["policy/clip_low_frac"] == 0


def test_eq8_clip_low():
    # A = -1: min(-0.5, -0.8) = -0.8, a constant. A = 1: min(0.5, 0.8) = 0.5, with a gradient.
    loss, gradient, stats = surrogate([[0.5], [0.5]], [[-1.0], [1.0]])
    assert loss == pytest.approx(0.8 - 0.5)
    torch.testing.assert_close(gradient, torch.tensor([[0.0], [-0.5]]))
    assert stats["policy/clip_low_frac"] == 1 and stats["policy/clip_high_frac"] == 0


def test_clip_higher_leaves_room_above_the_symmetric_bound():
    # Ratio 1.25, A = 1 [DAPO §3.1]: clipped at 1.2 with eps 0.2, free with eps_high 0.28
    assert surrogate([[1.25]], [[1.0]], high=0.2)[0] == pytest.approx(-1.2)
    assert surrogate([[1.25]], [[1.0]], high=0.28)[0] == pytest.approx(-1.25)
    assert surrogate([[0.75]], [[-1.0]], low=0.2)[0] == pytest.approx(0.8)
    assert surrogate([[0.75]], [[-1.0]], low=0.28)[0] == pytest.approx(0.75)


def test_dual_clip_bounds_negative_advantages():
    # A = -2, ratio 4, c = 3: min(4 * 2, 3 * 2) = 6, a constant
    loss, gradient, stats = surrogate([[4.0]], [[-2.0]], dual_clip=3.0)
    assert (loss, gradient.item(), stats["policy/dual_clip_frac"]) == (pytest.approx(6.0), 0.0, 1)
    # Below c nothing changes: 2.9 * 2 = 5.8
    loss, gradient, stats = surrogate([[2.9]], [[-2.0]], dual_clip=3.0)
    assert loss == pytest.approx(5.8) and gradient.item() == pytest.approx(5.8)
    assert stats["policy/dual_clip_frac"] == 0


def test_dual_clip_leaves_positive_advantages_alone():
    # A = 2, ratio 4: clip-higher, -1.28 * 2 = -2.56; c = 1.1 would have made it -2.2
    loss, _, stats = surrogate([[4.0]], [[2.0]], dual_clip=1.1)
    assert loss == pytest.approx(-2.56) and stats["policy/dual_clip_frac"] == 0


def test_dual_clip_none_is_no_bound():
    loss, gradient, stats = surrogate([[4.0]], [[-2.0]], dual_clip=None)
    assert loss == pytest.approx(8.0) and gradient.item() == pytest.approx(8.0)
    assert stats["policy/dual_clip_frac"] == 0


def test_token_mean_over_the_minibatch():
    # Losses [1] | [2, 2, 2] | [3, 3, 3, 3] | [0, 0]: 19 / 10 tokens. The mean of the four means is
    # 1.5, the mean of the means of two ranks (7/4 and 12/6) is 1.875.
    rows = [[1.0], [2.0] * 3, [3.0] * 4, [0.0] * 2]
    losses = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)
    mask = torch.arange(4) < torch.tensor([[len(r)] for r in rows])
    zeros = torch.zeros(4, 4)
    whole = policy_loss(zeros, zeros, -losses, mask, 10, 0.2, 0.28, 10.0)[0]
    parts = [
        policy_loss(z[None], z[None], -a[None], m[None], 10, 0.2, 0.28, 10.0)[0]
        for z, a, m in zip(zeros, losses, mask, strict=True)
    ]
    assert whole.item() == pytest.approx(1.9)
    assert sum(parts).item() == pytest.approx(1.9)


def test_num_tokens_may_be_a_tensor():
    zeros, mask = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool)
    loss = policy_loss(zeros, zeros, -torch.ones(1, 1), mask, mask.sum() * 2, 0.2, 0.28, 10.0)[0]
    assert loss.item() == pytest.approx(0.5)  # 2 / 4


def test_masked_row_leaves_the_numerator_and_the_denominator():
    # 3 tokens of loss 1, and a masked row of 5: 3 / 3 = 1, not 3 / 8 = 0.375
    mask = [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    loss, gradient, stats = surrogate([[1.0] * 5] * 2, [[-1.0], [-1.0]], mask, num_tokens=3)
    assert loss == pytest.approx(1.0)
    torch.testing.assert_close(gradient * 3, torch.tensor(mask).float())
    assert stats["policy/loss"].item() == pytest.approx(3.0)


@pytest.mark.parametrize("num_tokens", [7, 0])
def test_fully_masked_rows_have_loss_0_and_gradient_0(num_tokens):
    # 7: other ranks or micro-batches have the tokens; 0: nobody has one
    loss, gradient, stats = surrogate(
        [[1.5, 2.0]], [[1.0]], [[0, 0]], num_tokens=torch.tensor(num_tokens)
    )
    assert loss == 0.0
    assert gradient.tolist() == [[0.0, 0.0]]
    assert all(value == 0 for value in stats.values())


def test_nan_in_padding_changes_nothing():
    loss, gradient, stats = surrogate([[1.0, 1.0]], [[1.0, 1.0]], [[1, 0]], old=[[0.0, NAN]])
    assert loss == -1.0 and stats["policy/kl"] == 0
    assert gradient.tolist() == [[-1.0, 0.0]]


def test_advantages_in_padding_change_nothing():
    ratios, mask = [[1.1, 0.9, 1.2, 1.0]], [[1, 1, 0, 0]]
    loss, gradient, _ = surrogate(ratios, [[1.0, 1.0, 10.0, 10.0]], mask)
    want_loss, want_gradient, _ = surrogate(ratios, [[1.0, 1.0, 0.0, 0.0]], mask)
    assert loss == want_loss == pytest.approx(-2.0)  # -(1.1 + 0.9)
    assert torch.equal(gradient, want_gradient)


def test_response_of_only_eos_is_trained_and_an_empty_one_is_not():
    _, gradient, _ = surrogate([[1.0] * 3] * 2, [[1.0], [1.0]], [[1, 0, 0], [0, 0, 0]])
    assert gradient.tolist() == [[-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "want"),
    [
        (200.0, 0.0, 0.0),
        (200.0, 1.0, -1.28),  # clipped at 1 + eps_high
        (200.0, -1.0, 10.0),  # the dual clip
        (-200.0, 1.0, -math.exp(-20)),  # clamped at -20
        (-200.0, -1.0, 0.8),  # clipped at 1 - eps_low
    ],
)
def test_extreme_log_ratio_is_finite(log_ratio, advantage, want):
    logprobs = torch.tensor([[log_ratio]], requires_grad=True)
    ones = torch.ones(1, 1)
    loss, stats = policy_loss(logprobs, 0 * ones, advantage * ones, ones > 0, 1, 0.2, 0.28, 10.0)
    loss.backward()
    assert loss.item() == pytest.approx(want)
    assert torch.isfinite(logprobs.grad).all()
    assert stats["policy/kl"].item() == pytest.approx(-20 if log_ratio > 0 else 20)


def test_log_ratio_is_clamped_at_20():
    # Without the dual clip a ratio of exp(200) counts as exp(20)
    logprobs, ones = torch.tensor([[200.0]]), torch.ones(1, 1)
    loss = policy_loss(logprobs, 0 * ones, -ones, ones > 0, 1, 0.2, 0.28, None)[0]
    assert loss.item() == pytest.approx(math.exp(20))


def test_nan_log_ratio_stays_visible():
    assert math.isnan(surrogate([[1.0, NAN]], [[1.0]])[0])


def test_clip_fractions_count_only_where_the_clip_decides():
    # Ratio 1.3 is clipped for A > 0 only, 0.7 for A < 0 only: 1/4 high, 1/4 low, not 4/4.
    _, gradient, stats = surrogate([[1.3, 1.3, 0.7, 0.7]], [[1.0, -1.0, 1.0, -1.0]])
    assert stats["policy/clip_high_frac"] == 1 and stats["policy/clip_low_frac"] == 1
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 1.3, -0.7, 0.0]]))


def test_clip_fractions_leave_padding_out():
    ratios = [[1.3, 1.3, 1.3], [0.7, 0.7, 0.7], [11.0, 11.0, 11.0]]
    mask = [[1, 0, 0]] * 3
    _, _, stats = surrogate(ratios, [[1.0], [-1.0], [-1.0]], mask)
    assert stats["policy/clip_high_frac"] == 1 and stats["policy/clip_low_frac"] == 1
    assert stats["policy/dual_clip_frac"] == 1


def test_policy_kl_is_the_sum_of_old_minus_new():
    # log pi_old - log pi_theta = -ln 2 + ln 4 = ln 2 over two valid tokens [FIPO footnote 1]
    _, _, stats = surrogate([[2.0, 0.25, 9.0]], [[1.0]], [[1, 1, 0]], num_tokens=2)
    assert stats["policy/kl"].item() == pytest.approx(math.log(2))


def test_stats_are_sums_and_carry_no_division():
    _, _, stats = surrogate([[1.1, 0.9]], [[2.0]], num_tokens=1000)
    assert stats["policy/loss"].item() == pytest.approx(-4.0)


# --------------------------------------------------------------------------------------------------
# k3
# --------------------------------------------------------------------------------------------------


def test_k3_and_its_gradient():
    # d = -1.5 + 1 = -0.5: exp(-0.5) + 0.5 - 1 = 0.106531; gradient 1 - exp(-0.5) = 0.393469
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    value = k3(logprobs, torch.tensor([[-1.5]]), torch.ones(1, 1))
    value.backward()
    assert value.item() == pytest.approx(0.106531, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(0.393469, abs=1e-6)


def test_k3_the_other_way_round():
    # d = -0.5 + 1 = 0.5: exp(0.5) - 0.5 - 1 = 0.148721
    value = k3(torch.tensor([[-1.0]]), torch.tensor([[-0.5]]), torch.ones(1, 1))
    assert value.item() == pytest.approx(0.148721, abs=1e-6)


def test_k3_is_a_sum_over_valid_tokens_that_padding_cannot_reach():
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    value = k3(logprobs, torch.tensor([[-1.5, -0.5, NAN]]), torch.tensor([[1, 1, 0]]))
    value.backward()
    assert value.item() == pytest.approx(0.106531 + 0.148721, abs=1e-6)
    assert logprobs.grad[0, 2] == 0


def test_k3_is_0_at_equality_never_negative_and_finite():
    x = torch.linspace(-300, 300, 601)[None]
    ones = torch.ones(1, 1)
    assert k3(x, x, torch.ones_like(x)) == 0
    assert all(0 <= k3(d * ones, 0 * ones, ones) < math.inf for d in x[0])


def test_k3_has_a_gradient_where_the_advantage_is_0():
    logprobs, ones = torch.tensor([[-1.0]], requires_grad=True), torch.ones(1, 1)
    loss, _ = policy_loss(logprobs, -ones, 0 * ones, ones > 0, 1, 0.2, 0.28, 10.0)
    (loss + 0.5 * k3(logprobs, -1.5 * ones, ones)).backward()
    assert logprobs.grad.item() == pytest.approx(0.5 * 0.393469, abs=1e-6)


# --------------------------------------------------------------------------------------------------
# Presets
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "max_response_tokens", "overlong_buffer"),
    [("dapo-32b", 20_480, 4096), ("dapo-7b-math", 8192, 4096)],
)
def test_table2_and_table3_dapo_columns(preset, max_response_tokens, overlong_buffer):
    args = PRESETS[preset]
    assert (args.prompts_per_step, args.group_size) == (512, 16)
    assert args.minibatch_size == 32 * 16  # 16 updates per batch
    assert (args.max_response_tokens, args.overlong_buffer) == (
        max_response_tokens,
        overlong_buffer,
    )
    assert (args.clip_eps_low, args.clip_eps_high, args.dual_clip) == (0.2, 0.28, 10.0)
    assert (args.overlong_penalty, args.kl_coef, args.temperature) == (1.0, 0.0, 1.0)
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-6, 0.1, 1.0)
    assert args.warmup_steps == 10 and args.decay_steps == 0 and args.max_prompt_tokens == 2048
    assert args.dynamic_sampling and args.max_gen_batches == 10
    assert args.gen_prompts == 4 * args.prompts_per_step
    assert (args.eval_samples, args.eval_temperature, args.eval_top_p) == (32, 1.0, 0.7)


def test_grpo_preset_has_none_of_dapos_changes():
    args = PRESETS["grpo-7b"]
    assert args.clip_eps_low == args.clip_eps_high == 0.2
    assert args.kl_coef > 0 and not args.dynamic_sampling
    assert args.overlong_penalty == 0 or args.overlong_buffer == 0
