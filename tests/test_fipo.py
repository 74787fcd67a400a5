"""fipo.py, part 4: one test per equation, with numbers that can be checked on paper."""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dapo
import fipo
from common import Run, discounted_suffix_sum
from fipo import PRESETS, future_kl, influence_weights

NAN = float("nan")
CLIP = (0.2, 0.28, 10.0)  # clip_eps_low, clip_eps_high, dual_clip
E = math.exp


def row(*numbers):
    return torch.tensor([numbers])


def run(loss_function, log_ratio, advantages, mask, num_tokens, *settings, **switches):
    """Loss, gradient and stats of a policy_loss for log-ratios against old log-probs of 0."""
    logprobs = log_ratio.clone().requires_grad_()
    old_logprobs = torch.zeros_like(logprobs)
    loss, stats = loss_function(
        logprobs, old_logprobs, advantages, mask, num_tokens, *settings, **switches
    )
    loss.backward()
    return loss.detach(), logprobs.grad, stats


def run_fipo(log_ratio, advantages, mask=None, num_tokens=1, **changes):
    """fipo.policy_loss with no decay and f in [0.8, 1.2], but for these changes."""
    settings = {
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.28,
        "dual_clip": 10.0,
        "future_kl_half_life": None,
        "influence_low": 0.8,
        "influence_high": 1.2,
        "safety_threshold": None,
        **changes,
    }
    mask = torch.ones_like(log_ratio) > 0 if mask is None else mask
    return run(fipo.policy_loss, log_ratio, advantages, mask, num_tokens, **settings)


def assert_is_dapo_with(influence, log_ratio, advantages, mask=None, num_tokens=1, **changes):
    """FIPO is DAPO with `influence` * A for A, in its loss, its gradient and the shared stats: so
    the settings in `changes` gave these weights and did nothing else."""
    mask = torch.ones_like(log_ratio) > 0 if mask is None else mask
    dual_clip = changes.get("dual_clip", 10.0)
    loss, gradient, stats = run_fipo(log_ratio, advantages, mask, num_tokens, **changes)
    weighted = torch.as_tensor(influence) * advantages
    want = run(dapo.policy_loss, log_ratio, weighted, mask, num_tokens, 0.2, 0.28, dual_clip)
    torch.testing.assert_close(loss, want[0])
    torch.testing.assert_close(gradient, want[1])
    for name, value in want[2].items():
        torch.testing.assert_close(stats[name], value)


def random_batch(seed=0, num_rows=16, length=300, scale=1.0):
    """Log-ratios (some beyond every clip), advantages of both signs, and a ragged mask."""
    random = torch.Generator().manual_seed(seed)
    log_ratio = scale * torch.randn(num_rows, length, generator=random)
    advantages = torch.randn(num_rows, 1, generator=random)
    lengths = torch.randint(1, length + 1, (num_rows, 1), generator=random)
    return log_ratio, advantages, torch.arange(length) < lengths


# --------------------------------------------------------------------------------------------------
# future_kl [FIPO Eq. 3 to 6]
# --------------------------------------------------------------------------------------------------


def test_eq3_log_ratio_is_new_minus_old():
    # new -1, old -1.1: d = 0.1 and f = exp(0.1), not exp(-0.1). loss = -exp(0.1) exp(0.1)
    ones = torch.ones(1, 1)
    loss, _ = fipo.policy_loss(
        -1.0 * ones, -1.1 * ones, ones, ones > 0, 1, *CLIP, 32.0, 0.8, 1.2, None
    )
    assert loss.item() == pytest.approx(-E(0.2))


def test_eq3_log_ratio_is_clamped_at_20():
    # With d = 200, c = none and no bound on f but 10: A = -1, loss = exp(20) * 10
    loss, _, _ = run_fipo(row(200.0), row(-1.0), dual_clip=None, influence_high=None)
    assert loss.item() == pytest.approx(10 * E(20))


def test_eq4_future_kl_without_decay_is_the_suffix_sum():
    # 0.1 - 0.2 + 0.3 = 0.2, -0.2 + 0.3 = 0.1, 0.3: from each token to the end, itself included
    fkl = future_kl(row(0.1, -0.2, 0.3), torch.ones(1, 3), None, 10.0)
    torch.testing.assert_close(fkl, row(0.2, 0.1, 0.3))


def test_eq5_filter_leaves_extreme_tokens_out():
    # exp(3) = 20.1 > 10: its 3 counts for no token, itself included; exp(-3) is no extreme
    log_ratio = row(0.1, 3.0, 0.2, -3.0)
    fkl = future_kl(log_ratio, torch.ones(1, 4), None, 10.0)
    torch.testing.assert_close(fkl, row(-2.7, -2.8, -2.8, -3.0))


def test_eq5_filter_keeps_a_ratio_of_exactly_c():
    log_ratio = row(1.0)
    c = log_ratio.exp().item()
    assert future_kl(log_ratio, torch.ones(1, 1), None, c).item() == 1.0
    assert future_kl(log_ratio, torch.ones(1, 1), None, c - 1e-3).item() == 0.0


def test_eq5_dual_clip_none_filters_nothing():
    fkl = future_kl(row(0.1, 3.0, 0.2), torch.ones(1, 3), None, None)
    torch.testing.assert_close(fkl, row(3.3, 3.2, 0.2))


def test_eq5_filter_whatever_the_sign_of_the_advantage():
    # d = [0.1, 3]: 3 is left out, FKL_0 = 0.1, f_0 = exp(0.1), whether A is 1 or -1. The gradient
    # of the first token is -+ exp(0.1) f_0. Were 3 kept, f_0 would be 1.2.
    log_ratio = row(0.1, 3.0).expand(2, 2)
    _, gradient, _ = run_fipo(log_ratio, torch.tensor([[1.0], [-1.0]]))
    torch.testing.assert_close(gradient[:, 0], torch.tensor([-E(0.2), E(0.2)]))


def test_eq6_future_kl_decays():
    # gamma 1/2 (half-life 1): 0.1 - 0.1 + 0.075 = 0.075, -0.2 + 0.15 = -0.05, 0.3
    fkl = future_kl(row(0.1, -0.2, 0.3), torch.ones(1, 3), 1.0, 10.0)
    torch.testing.assert_close(fkl, row(0.075, -0.05, 0.3))


def test_eq6_half_life_is_where_the_influence_has_halved():
    # A lone 1 at position 40, half-life 32: 2^(-1/32) = 0.978572 one token before, 1/2 at 32
    # before, 2^(-40/32) = 0.420448 at 40 before, 0 behind it
    log_ratio = torch.zeros(1, 50)
    log_ratio[0, 40] = 1.0
    fkl = future_kl(log_ratio, torch.ones(1, 50), 32.0, 10.0)[0]
    torch.testing.assert_close(
        fkl[[0, 8, 39, 40, 41]], torch.tensor([0.420448, 0.5, 0.978572, 1, 0])
    )


def test_eq6_padding_does_not_reach_the_sum():
    mask = torch.tensor([[True, True, True, False]])
    for padding in (0.8, 5.0, -200.0, 200.0, NAN):
        for dual_clip in (None, 10.0):
            fkl = future_kl(row(0.1, -0.2, 0.3, padding), mask, 1.0, dual_clip)
            torch.testing.assert_close(fkl, row(0.075, -0.05, 0.3, 0.0))


def test_future_kl_of_extremes_is_finite():
    # 200 is left out by the filter; without one it stays 200, and -200 stays -200
    ones = torch.ones(1, 2)
    assert future_kl(row(-200.0, 200.0), ones, None, 10.0).tolist() == [[-200.0, 0.0]]
    assert future_kl(row(-200.0, 200.0), ones, None, None).tolist() == [[0.0, 200.0]]


def test_future_kl_nan_inside_the_mask_stays_visible():
    assert future_kl(row(0.1, NAN), torch.ones(1, 2), 1.0, 10.0).isnan().all()


def test_future_kl_is_fp32_whatever_comes_in():
    log_ratio = row(0.5, -0.25, 0.125).bfloat16()
    fkl = future_kl(log_ratio, torch.ones(1, 3), 1.0, 10.0)
    assert fkl.dtype == torch.float32
    torch.testing.assert_close(fkl, row(0.40625, -0.1875, 0.125))  # 0.5 - 0.125 + 0.03125


def double_sum(log_ratio, mask, half_life, dual_clip):
    """Future-KL in float64 as Eq. 6 writes it: for every t a sum over k >= t, O(T^2)."""
    extreme = log_ratio.exp() > (math.inf if dual_clip is None else dual_clip)
    kept = torch.where(mask & ~extreme, log_ratio, 0.0).double().numpy()
    length = kept.shape[1]
    gamma = 1.0 if half_life is None else 2 ** (-1 / half_life)
    powers = gamma ** np.arange(length, dtype=np.float64)  # gamma^(k-t)
    return np.stack([kept[:, t:] @ powers[: length - t] for t in range(length)], axis=1)


def worst_error(value, want):
    return np.max(np.abs(value.double().numpy() - want) / np.maximum(1, np.abs(want)))


@pytest.mark.parametrize("half_life", [None, 32.0, 8.0])
@pytest.mark.parametrize("length", [1, 2, 127, 128, 129, 255, 256, 257, 300])
def test_eq6_at_block_edges_equals_a_double_sum(length, half_life):
    log_ratio, _, mask = random_batch(length, 2, length)
    mask[0] = True
    want = double_sum(log_ratio, mask, half_life, 10.0)
    assert worst_error(future_kl(log_ratio, mask, half_life, 10.0), want) < 1e-5


@pytest.mark.parametrize("half_life", [None, 32.0, 256.0])
@pytest.mark.parametrize("dual_clip", [None, 10.0])
def test_eq6_at_20480_tokens_equals_a_float64_double_sum(half_life, dual_clip):
    log_ratio, _, mask = random_batch(1, 2, 20_480)
    mask[0] = True
    want = double_sum(log_ratio, mask, half_life, dual_clip)
    assert worst_error(future_kl(log_ratio, mask, half_life, dual_clip), want) < 1e-5


@pytest.mark.parametrize("length", [1, 127, 128, 129, 1000])
@pytest.mark.parametrize("half_life", [None, 32.0])
def test_future_kl_equals_discounted_suffix_sum(length, half_life):
    log_ratio, _, mask = random_batch(2, 3, length)
    kept = torch.where(mask, log_ratio, 0.0)
    want = discounted_suffix_sum(kept, 1.0 if half_life is None else 2 ** (-1 / half_life))
    fkl = future_kl(log_ratio, mask, half_life, None)
    torch.testing.assert_close(fkl, want, rtol=1e-5, atol=1e-5)


# --------------------------------------------------------------------------------------------------
# influence_weights [FIPO Eq. 7, §3.2]
# --------------------------------------------------------------------------------------------------


def test_eq7_weights_are_the_exponential_within_the_interval():
    # exp(0.075) = 1.07788, exp(-0.05) = 0.95123, exp(0.3) = 1.34986 -> 1.2, exp(-0.5) = 0.60653
    # -> 0.8
    fkl, ones = row(0.075, -0.05, 0.3, -0.5), torch.ones(1, 4)
    weights = influence_weights(fkl, ones, torch.ones(1, 1), 0.8, 1.2, 10.0)
    torch.testing.assert_close(weights, row(1.077884, 0.951229, 1.2, 0.8))


def test_eq7_interval_of_the_32b_recipe_never_lowers_an_advantage():
    fkl, ones = row(0.075, -0.05, 0.3), torch.ones(1, 3)
    weights = influence_weights(fkl, ones, torch.ones(1, 1), 1.0, 1.2, 10.0)
    torch.testing.assert_close(weights, row(1.077884, 1.0, 1.2))


def test_eq7_high_none_is_the_releases_rule():
    # min(exp(FKL), 10), and no lower bound: exp(3) = 20.1 -> 10, exp(2) = 7.389, exp(-3) = 0.0498
    fkl, ones = row(3.0, 2.0, -3.0, 200.0), torch.ones(1, 4)
    weights = influence_weights(fkl, ones, torch.ones(1, 1), 0.8, None, 10.0)
    torch.testing.assert_close(weights, row(10.0, 7.389056, 0.0497871, 10.0))


def test_safety_reset_gives_1_where_a_suppressed_token_is_far_off():
    # Threshold 3: reset for A < 0 and ratio 4; not for ratio 3 (not above), nor where A > 0 or 0
    fkl, ratio = torch.full((3, 3), 0.1), row(4.0, 3.0, 0.5).expand(3, 3)
    advantages = torch.tensor([[-1.0], [1.0], [0.0]])
    weights = influence_weights(fkl, ratio, advantages, 0.8, 1.2, 3.0)
    f = E(0.1)
    torch.testing.assert_close(weights, torch.tensor([[1.0, f, f], [f, f, f], [f, f, f]]))


def test_safety_reset_lifts_a_weight_below_1():
    # exp(-0.1) = 0.905 becomes 1, where the authors' clamp(f, 0.8, 1.0) would leave it
    weights = influence_weights(row(-0.1, -0.1), row(4.0, 2.0), row(-1.0), 0.8, 1.2, 3.0)
    torch.testing.assert_close(weights, row(1.0, E(-0.1)))


def test_safety_reset_also_without_clipping():
    weights = influence_weights(row(3.0, 3.0), row(4.0, 2.0), row(-1.0), 0.8, None, 3.0)
    torch.testing.assert_close(weights, row(1.0, 10.0))


def test_safety_reset_agrees_with_the_releases_clamp_on_the_32b_interval():
    # RELEASE: f = clamp(f, 0.8, 1.0) at reset tokens; with f in [1.0, 1.2] that is 1 as well
    fkl = torch.linspace(-3, 3, 61)[None]
    ours = influence_weights(fkl, torch.full_like(fkl, 11.0), row(-1.0), 1.0, 1.2, 10.0)
    theirs = influence_weights(fkl, torch.ones_like(fkl), row(-1.0), 1.0, 1.2, 10.0)
    assert torch.equal(ours, theirs.clamp(0.8, 1.0))


def test_eq7_takes_advantages_per_token():
    weights = influence_weights(row(0.1, 0.1), row(4.0, 4.0), row(-1.0, 1.0), 0.8, 1.2, 3.0)
    torch.testing.assert_close(weights, row(1.0, E(0.1)))


# --------------------------------------------------------------------------------------------------
# policy_loss [FIPO Eq. 8]
# --------------------------------------------------------------------------------------------------


def test_eq8_weighted_loss_and_gradient():
    # d = [0.1, -0.2, 0.3], gamma 1/2: f = [exp(0.075), exp(-0.05), 1.2]. A = 1: -exp(0.1 + 0.075),
    # -exp(-0.2 - 0.05), -1.28 * 1.2, the last without gradient; over 3 tokens -1.168682
    log_ratio, half_life = row(0.1, -0.2, 0.3), 1.0
    loss, gradient, _ = run_fipo(log_ratio, row(1.0), num_tokens=3, future_kl_half_life=half_life)
    assert loss.item() == pytest.approx(-(1.191246 + 0.778801 + 1.536) / 3, abs=1e-6)
    torch.testing.assert_close(gradient * 3, row(-1.191246, -0.778801, 0.0))
    # A = -1: exp(0.175), exp(-0.25), exp(0.3) * 1.2 = 1.619831, all with their gradient
    loss, gradient, _ = run_fipo(log_ratio, row(-1.0), num_tokens=3, future_kl_half_life=half_life)
    assert loss.item() == pytest.approx((1.191246 + 0.778801 + 1.619831) / 3, abs=1e-6)
    torch.testing.assert_close(gradient * 3, row(1.191246, 0.778801, 1.619831))


def test_eq8_padding_does_not_reach_the_loss():
    mask = torch.tensor([[True, True, True, False]])
    want = run_fipo(row(0.1, -0.2, 0.3), row(1.0), future_kl_half_life=1.0)
    for padding in (0.8, 5.0, NAN):
        loss, gradient, stats = run_fipo(
            row(0.1, -0.2, 0.3, padding), row(1.0), mask, future_kl_half_life=1.0
        )
        assert loss == want[0] and gradient[0, 3] == 0
        assert torch.equal(gradient[:, :3], want[1])
        assert all(torch.equal(stats[name], want[2][name]) for name in stats)


def test_eq8_dual_clip_bounds_the_weighted_advantage():
    # d = [ln 4, 0.1], c = 3, threshold 5: ln 4 is filtered, f_0 = exp(0.1), so the bound is
    # 3 exp(0.1) = 3.315513, without gradient; the second token: exp(0.1) exp(0.1) = 1.221403
    log_ratio = row(math.log(4), 0.1)
    loss, gradient, stats = run_fipo(log_ratio, row(-1.0), dual_clip=3.0, safety_threshold=5.0)
    assert loss.item() == pytest.approx(3.315513 + 1.221403, abs=1e-5)
    torch.testing.assert_close(gradient, row(0.0, 1.221403))
    assert stats["policy/dual_clip_frac"] == 1


def test_eq8_num_tokens_is_the_only_denominator():
    log_ratio, advantages, mask = random_batch(3)
    one = run_fipo(log_ratio, advantages, mask, 1)[0]
    torch.testing.assert_close(run_fipo(log_ratio, advantages, mask, 1000)[0] * 1000, one)


@pytest.mark.parametrize("scale", [0.0, 0.05, 1.0, 30.0])
@pytest.mark.parametrize("dual_clip", [10.0, None])
def test_influence_of_exactly_1_equals_dapo_bit_for_bit(scale, dual_clip):
    log_ratio, advantages, mask = random_batch(4, scale=scale)
    clip, num_tokens = (0.2, 0.28, dual_clip), mask.sum()
    loss, gradient, stats = run(
        fipo.policy_loss, log_ratio, advantages, mask, num_tokens, *clip, 32.0, 1.0, 1.0, 3.0
    )
    want = run(dapo.policy_loss, log_ratio, advantages, mask, num_tokens, *clip)
    assert torch.equal(loss, want[0])
    assert torch.equal(gradient, want[1])
    assert set(want[2]) < set(stats)
    assert all(torch.equal(stats[name], want[2][name]) for name in want[2])


@pytest.mark.parametrize("interval", [(0.8, 1.2), (1.0, 1.2), (0.8, None)])
def test_first_update_has_influence_exactly_1(interval):
    log_ratio, advantages, mask = random_batch(5, scale=0.0)
    loss, gradient, stats = run(
        fipo.policy_loss, log_ratio, advantages, mask, 99, *CLIP, 32.0, *interval, None
    )
    want = run(dapo.policy_loss, log_ratio, advantages, mask, 99, *CLIP)
    assert torch.equal(loss, want[0]) and torch.equal(gradient, want[1])
    assert stats["fipo/influence_min"] == stats["fipo/influence_max"] == 1


def test_second_update_has_live_influence():
    # After one plain gradient step the log-ratios are no longer 0, and FIPO is no longer DAPO.
    logprobs, advantages, mask = random_batch(6, scale=0.1)
    old_logprobs, settings = logprobs.clone(), (*CLIP, 32.0, 0.8, 1.2, None)
    _, first, _ = run(fipo.policy_loss, 0 * logprobs, advantages, mask, 1, *settings)
    logprobs = old_logprobs - 0.01 * first
    loss, stats = fipo.policy_loss(logprobs, old_logprobs, advantages, mask, 1, *settings)
    plain, _ = dapo.policy_loss(logprobs, old_logprobs, advantages, mask, 1, *CLIP)
    assert abs(loss - plain) > 0.01 * abs(plain)
    assert stats["fipo/influence_min"] < 0.99 and stats["fipo/influence_max"] > 1.01


def test_eq7_no_gradient_flows_through_the_weights():
    # With f a constant, the gradient of an unclipped token is -ratio f A, and of a clipped one 0.
    log_ratio, advantages, mask = random_batch(7, scale=0.3)
    ratio = log_ratio.exp()
    f = influence_weights(future_kl(log_ratio, mask, 32.0, 10.0), ratio, advantages, 0.8, 1.2, 10.0)
    clipped = ((advantages > 0) & (ratio > 1.28)) | ((advantages < 0) & (ratio < 0.8))
    want = torch.where(mask & ~clipped, -ratio * f * advantages, 0.0)
    gradient = run_fipo(log_ratio, advantages, mask, future_kl_half_life=32.0)[1]
    torch.testing.assert_close(gradient, want)
    assert 0.1 < clipped[mask].float().mean() < 0.9


@pytest.mark.parametrize("num_tokens", [7, 0])
def test_fully_masked_rows_have_loss_0_and_gradient_0(num_tokens):
    mask = torch.tensor([[False, False]])
    loss, gradient, stats = run_fipo(row(0.5, -3.0), row(1.0), mask, torch.tensor(num_tokens))
    assert loss == 0.0 and gradient.tolist() == [[0.0, 0.0]]
    sums = [v for name, v in stats.items() if not name.endswith(("_min", "_max"))]
    assert all(value == 0 for value in sums)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "want"),
    [(200.0, 0.0, 0.0), (200.0, 1.0, -1.28), (200.0, -1.0, 10.0), (-200.0, -1.0, 0.64)],
)
def test_extreme_log_ratio_is_finite(log_ratio, advantage, want):
    # 200 is filtered, so f = 1; -200 is not: f = 0.8, and 0.8 * 0.8 = 0.64
    loss, gradient, _ = run_fipo(row(log_ratio), row(advantage))
    assert loss.item() == pytest.approx(want) and torch.isfinite(gradient).all()


def test_nan_log_ratio_stays_visible():
    assert run_fipo(row(0.1, NAN), row(1.0))[0].isnan()


# --------------------------------------------------------------------------------------------------
# The switches of the ablations: each gives the weights worked out here, and nothing else changes
# --------------------------------------------------------------------------------------------------


def test_switch_half_life():
    # d = [0.1, 0.1]: f_0 is exp(0.2) -> 1.2 without decay, exp(0.15) = 1.161834 at half-life 1
    for sign in (1.0, -1.0):
        f = row(1.2, E(0.1))
        assert_is_dapo_with(f, row(0.1, 0.1), row(sign), future_kl_half_life=None)
        f = row(E(0.15), E(0.1))
        assert_is_dapo_with(f, row(0.1, 0.1), row(sign), future_kl_half_life=1.0)


def test_switch_interval():
    # FKL = [-0.4, -0.2, 0.1]: exp = [0.67032, 0.818731, 1.105171]
    log_ratio = row(-0.2, -0.3, 0.1)
    for sign in (1.0, -1.0):
        interval = {"influence_low": 0.8, "influence_high": 1.2}
        assert_is_dapo_with(row(0.8, E(-0.2), E(0.1)), log_ratio, row(sign), **interval)
        interval = {"influence_low": 1.0, "influence_high": 1.2}
        assert_is_dapo_with(row(1.0, 1.0, E(0.1)), log_ratio, row(sign), **interval)
        interval = {"influence_low": 0.5, "influence_high": 1.1}
        assert_is_dapo_with(row(E(-0.4), E(-0.2), 1.1), log_ratio, row(sign), **interval)


def test_switch_no_clipping_is_the_releases_rule():
    # FKL = [-1.8, -2, 0.2, 2.5, 2.5, 0.3] with the filter on (3 is left out); exp(2.5) = 12.2 -> 10
    log_ratio = row(0.2, -2.2, -2.3, 3.0, 2.2, 0.3)
    f = row(E(-1.8), E(-2.0), E(0.2), 10.0, 10.0, E(0.3))
    for sign in (1.0, -1.0):
        switches = {"influence_high": None, "safety_threshold": 50.0}
        assert_is_dapo_with(f, log_ratio, row(sign), **switches)


def test_switch_filter_extremes_off_keeps_the_dual_clip_and_the_safety_reset():
    # d = [0.1, 3]. On: FKL = [0.1, 0]. Off: FKL = [3.1, 3], f = [1.2, 1.2] where A > 0. Where
    # A < 0 the second ratio, exp(3) = 20 > 10, is reset to 1 either way and bounded at 10.
    log_ratio = row(0.1, 3.0)
    assert_is_dapo_with(row(E(0.1), 1.0), log_ratio, row(1.0), filter_extremes=True)
    assert_is_dapo_with(row(1.2, 1.2), log_ratio, row(1.0), filter_extremes=False)
    assert_is_dapo_with(row(E(0.1), 1.0), log_ratio, row(-1.0), filter_extremes=True)
    assert_is_dapo_with(row(1.2, 1.0), log_ratio, row(-1.0), filter_extremes=False)
    assert run_fipo(log_ratio, row(-1.0), filter_extremes=False)[0].item() == pytest.approx(
        1.2 * E(0.1) + 10
    )


def test_switch_safety_threshold_below_the_dual_clip():
    # d = [ln 4, 0.1], A = -1, c = 10. Threshold 3: f_0 = 1, loss 4, gradient 4. Threshold 5 or
    # none (that is c): f_0 = 1.2 and 4.8.
    log_ratio = row(math.log(4), 0.1)
    assert_is_dapo_with(row(1.0, E(0.1)), log_ratio, row(-1.0), safety_threshold=3.0)
    assert_is_dapo_with(row(1.2, E(0.1)), log_ratio, row(-1.0), safety_threshold=5.0)
    assert_is_dapo_with(row(1.2, E(0.1)), log_ratio, row(-1.0), safety_threshold=None)
    assert_is_dapo_with(row(1.2, E(0.1)), log_ratio, row(1.0), safety_threshold=3.0)
    _, gradient, _ = run_fipo(log_ratio, row(-1.0), safety_threshold=3.0)
    assert gradient[0, 0].item() == pytest.approx(4.0)


def test_switch_safety_threshold_none_is_the_dual_clip():
    # d = [ln 12, 0.1], A = -1: ln 12 is filtered, so f_0 = 1 by the reset and exp(0.1) without it:
    # the bound 10 f_0 differs, the gradient (0) does not.
    log_ratio = row(math.log(12), 0.1)
    assert_is_dapo_with(row(1.0, E(0.1)), log_ratio, row(-1.0), safety_threshold=None)
    assert_is_dapo_with(row(E(0.1), E(0.1)), log_ratio, row(-1.0), safety_threshold=20.0)
    # No dual clip and no threshold: no filter, no reset
    assert_is_dapo_with(row(1.2, E(0.1)), log_ratio, row(-1.0), dual_clip=None)


def test_switch_drop_dual_clipped_responses():
    # Rows with 2, 1, 0 dual-clipped tokens (ratio 12 > 10, A < 0), and one whose second such token
    # is padding: only the first loses its loss and gradient. num_tokens stays 7.
    far, near = math.log(12), 0.1
    log_ratio = torch.tensor(
        [[far, far, near], [far, near, 0.0], [near, 0.0, 0.0], [far, far, 0.0]]
    )
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]]) > 0
    kept = run_fipo(log_ratio, -torch.ones(4, 1), mask, 7)
    dropped = run_fipo(log_ratio, -torch.ones(4, 1), mask, 7, drop_dual_clipped_responses=True)
    # The first row had 10 + 10 + exp(0.1) exp(0.1)
    assert (kept[0] - dropped[0]).item() * 7 == pytest.approx(20 + E(0.2), abs=1e-4)
    assert torch.equal(dropped[1][1:], kept[1][1:])
    assert kept[1][0, 2] != 0 and (dropped[1][0] == 0).all()
    for name in set(kept[2]) - {"policy/loss"}:
        assert torch.equal(kept[2][name], dropped[2][name])
    assert dropped[2]["policy/loss"].item() == pytest.approx(dropped[0].item() * 7)


def test_switch_drop_leaves_positive_advantages_alone():
    log_ratio = row(math.log(12), math.log(12))
    kept = run_fipo(log_ratio, row(1.0))
    dropped = run_fipo(log_ratio, row(1.0), drop_dual_clipped_responses=True)
    assert kept[0] == dropped[0] != 0


def test_switch_length_heuristic_takes_the_place_of_f():
    # alpha 0.5, limit 4: length 2 and A > 0 give 1 + 0.5 * 2/4 = 1.25, length 4 gives 1.5; where
    # A < 0 or A = 0 it is 1. The interval, the filter and the reset have no say.
    log_ratio = torch.tensor([[0.1, -0.1, 9.0, 9.0], [0.1, -0.1, 3.0, 0.2], [0.1, 0.2, 3.0, 0.1]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]) > 0
    advantages = torch.tensor([[1.0], [1.0], [-1.0]])
    f = torch.tensor([[1.25], [1.5], [1.0]])
    for others in ({}, {"influence_high": 1.01}, {"safety_threshold": 1.05}):
        switches = {"length_heuristic": 0.5, "max_response_tokens": 4, **others}
        assert_is_dapo_with(f, log_ratio, advantages, mask, **switches)
    assert_is_dapo_with(
        f * 0 + 1, log_ratio, 0 * advantages, mask, length_heuristic=0.5, max_response_tokens=4
    )


def test_diagnostics_of_the_weights_before_and_after_clipping():
    # gamma 1/2: exp(FKL) = [1.077884, 0.951229, 1.349859], f = [.., .., 1.2]; then a filtered
    # token in a row of its own (FKL 0) and one below the interval: exp(-0.5) = 0.606531 -> 0.8
    log_ratio = torch.tensor([[0.1, -0.2, 0.3], [3.0, 5.0, 5.0], [-0.5, NAN, NAN]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 0, 0]]) > 0
    _, _, stats = run_fipo(log_ratio, torch.ones(3, 1), mask, future_kl_half_life=1.0)
    want = {
        "fipo/influence_mean": 1.077884 + 0.951229 + 1.2 + 1 + 0.8,  # a sum; the meter divides
        "fipo/influence_min": 0.8,
        "fipo/influence_max": 1.2,
        "fipo/unclipped_mean": 1.077884 + 0.951229 + 1.349859 + 1 + 0.606531,
        "fipo/unclipped_min": 0.606531,
        "fipo/unclipped_max": 1.349859,
        "fipo/clip_low_frac": 1,
        "fipo/clip_high_frac": 1,
        "fipo/filtered_frac": 1,
    }
    assert {name: float(stats[name]) for name in want} == pytest.approx(want, abs=1e-5)


# --------------------------------------------------------------------------------------------------
# The collapse warning [FIPO Fig. 2], and presets
# --------------------------------------------------------------------------------------------------

CALM = {
    "policy/dual_clip_frac": 0.01,
    "policy/kl": -0.001,
    "optim/grad_norm": 1.0,
    "rollout/response_tokens_mean": 100.0,
}


def collapse(*history):
    """How many signals the last of these steps gives after the others, and the warnings so far."""
    warnings = []
    run = SimpleNamespace(past=defaultdict(list), warned_of_collapse=False, warn=warnings.append)
    for metrics in history:
        count = Run.collapse_signals(run, metrics)
    return count, warnings


@pytest.mark.parametrize("name", list(CALM))
def test_collapse_signal_is_five_times_the_median(name):
    below, above = {**CALM, name: 4.9 * abs(CALM[name])}, {**CALM, name: 5.1 * abs(CALM[name])}
    assert collapse(*[CALM] * 10, below) == (0, [])
    assert collapse(*[CALM] * 10, above) == (1, [])


def test_collapse_warns_once_at_three_signals():
    wild = {name: 6 * abs(value) for name, value in CALM.items()}
    two = {**CALM, **{name: wild[name] for name in list(CALM)[:2]}}
    three = {**CALM, **{name: wild[name] for name in list(CALM)[:3]}}
    assert collapse(*[CALM] * 10, two) == (2, [])
    count, warnings = collapse(*[CALM] * 10, three)
    assert count == 3 and len(warnings) == 1
    assert all((name in warnings[0]) == (name in list(CALM)[:3]) for name in CALM)
    count, warnings = collapse(*[CALM] * 10, wild, wild)
    assert count == 4 and len(warnings) == 1


def test_collapse_signals_need_ten_steps_before():
    wild = {name: 6 * abs(value) for name, value in CALM.items()}
    assert collapse(*[CALM] * 9, wild) == (0, [])
    assert collapse(wild) == (0, [])


def test_collapse_signals_use_the_median_not_the_mean():
    # One spike of 1000 among eleven steps of 1 leaves the median at 1 and lifts the mean to 92
    spike, wild = {**CALM, "optim/grad_norm": 1000.0}, {**CALM, "optim/grad_norm": 6.0}
    assert collapse(*[CALM] * 10, spike, wild) == (1, [])


@pytest.mark.parametrize(
    ("preset", "group_size", "max_response_tokens", "overlong_buffer", "interval", "threshold"),
    [
        ("qwen2.5-32b", 16, 20_480, 4096, (1.0, 1.2), 10.0),
        ("qwen2.5-7b-math", 32, 10_240, 2048, (0.8, 1.2), 3.0),
    ],
)
def test_table2_and_table3_fipo_columns(
    preset, group_size, max_response_tokens, overlong_buffer, interval, threshold
):
    args = PRESETS[preset]
    assert (args.prompts_per_step, args.group_size) == (512, group_size)
    assert args.minibatch_size == 64 * group_size  # 8 updates per batch
    assert args.max_response_tokens == max_response_tokens
    assert args.overlong_buffer == overlong_buffer and args.overlong_penalty == 1.0
    assert (args.influence_low, args.influence_high) == interval
    assert args.safety_threshold == threshold and args.future_kl_half_life == 32
    assert (args.clip_eps_low, args.clip_eps_high, args.dual_clip) == CLIP
    assert (args.kl_coef, args.temperature, args.max_prompt_tokens) == (0.0, 1.0, 2048)
    assert (args.learning_rate, args.weight_decay, args.max_grad_norm) == (1e-6, 0.1, 1.0)
    assert args.warmup_steps == 10 and args.decay_steps == 0
    assert args.dynamic_sampling and args.max_gen_batches == 10
    assert args.gen_prompts == 4 * args.prompts_per_step
    assert args.filter_extremes and not args.drop_dual_clipped_responses
    assert args.length_heuristic is None
    assert (args.eval_samples, args.eval_temperature, args.eval_top_p) == (32, 1.0, 0.7)
