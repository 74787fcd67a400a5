"""Properties of part 4 of the scripts that hold for all inputs (hypothesis draws them)."""

import copy
import importlib
import inspect

import pytest
import torch
from conftest import RL_SCRIPTS
from hypothesis import given, settings
from hypothesis import strategies as st

import dapo
import fipo
from common import k3

NAN = float("nan")
FIPO = {
    "future_kl_half_life": 3.0,
    "influence_low": 0.8,
    "influence_high": 1.2,
    "safety_threshold": 3.0,
}


def loss_of(name, **changes):
    """policy_loss of a script, and what stands behind its denominator: flags, as in Args."""
    script = importlib.import_module(name)
    flags = list(inspect.signature(script.policy_loss).parameters)[5:]
    defaults = {flag: value for flag, value in vars(script.Args()).items() if flag in flags}
    return script.policy_loss, defaults | changes


LOSSES = {name: loss_of(name) for name in RL_SCRIPTS} | {
    "dapo without dual clip": loss_of("dapo", dual_clip=None),
    "ppo_critic with dual clip": loss_of("ppo_critic", dual_clip=10.0),
    "fipo": loss_of("fipo", **FIPO),
    "fipo without filter": loss_of("fipo", **FIPO, filter_extremes=False),
    "fipo without clipping": loss_of("fipo", **{**FIPO, "influence_high": None}),
    "fipo without decay": loss_of("fipo", **{**FIPO, "future_kl_half_life": None}),
    "fipo without dual clip": loss_of("fipo", **FIPO, dual_clip=None),
    "fipo that drops": loss_of("fipo", **FIPO, drop_dual_clipped_responses=True),
    "fipo by length": loss_of("fipo", **FIPO, length_heuristic=0.5, max_response_tokens=9),
}
every_loss = pytest.mark.parametrize("name", list(LOSSES))
examples = settings(max_examples=15, deadline=None, derandomize=True, database=None)


@st.composite
def batches(draw, min_rows=1):
    """logprobs, old_logprobs [B, T], advantages [B, 1] or [B, T], mask [B, T], contiguous from the
    left, with empty and full rows; log-ratios reach from rounding noise to beyond every clip."""
    num_rows, length = draw(st.integers(min_rows, 6)), draw(st.integers(1, 9))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.0, 0.01, 0.3, 3.0]))
    old_logprobs = -3 * torch.rand(num_rows, length, generator=random)
    log_ratio = scale * torch.randn(num_rows, length, generator=random)
    columns = draw(st.sampled_from([1, length]))
    advantages = torch.randn(num_rows, columns, generator=random).round(decimals=1)
    rows = st.lists(st.integers(0, length), min_size=num_rows, max_size=num_rows)
    mask = torch.arange(length) < torch.tensor(draw(rows))[:, None]
    return old_logprobs + log_ratio, old_logprobs, advantages, mask


def run(name, logprobs, old_logprobs, advantages, mask, num_tokens=17):
    """Loss, gradient with respect to logprobs, stats."""
    function, flags = LOSSES[name]
    logprobs = logprobs.clone().requires_grad_()
    loss, stats = function(logprobs, old_logprobs, advantages, mask, num_tokens, **flags)
    loss.backward()
    return loss.detach(), logprobs.grad, {k: v.detach() for k, v in stats.items()}


def assert_same(one, other, **tolerance):
    for a, b in zip(one[:2], other[:2], strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    assert one[2].keys() == other[2].keys()
    for key, value in one[2].items():
        torch.testing.assert_close(value, other[2][key], **tolerance, msg=lambda m, k=key: k + m)


EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


# --------------------------------------------------------------------------------------------------
# policy_loss
# --------------------------------------------------------------------------------------------------


@every_loss
@examples
@given(batch=batches(), padding=st.sampled_from([NAN, float("inf"), -200.0, 200.0]))
def test_values_in_padding_change_nothing(name, batch, padding):
    logprobs, old_logprobs, advantages, mask = batch
    advantages = advantages.expand(mask.shape)
    want = run(name, logprobs, old_logprobs, torch.where(mask, advantages, 1.0), mask)
    for poisoned in ((True, False, False), (False, True, False), (False, False, True)):
        inputs = [
            torch.where(mask, x, padding) if hit else x
            for x, hit in zip((logprobs, old_logprobs, advantages), poisoned, strict=True)
        ]
        got = run(name, *inputs, mask)
        assert_same(got, want, **EXACT)
        assert (got[1][~mask] == 0).all()


@every_loss
@examples
@given(batch=batches(), extra=st.integers(1, 130))
def test_more_padding_columns_change_nothing(name, batch, extra):
    logprobs, old_logprobs, advantages, mask = batch
    want = run(name, *batch)
    wider = torch.nn.functional.pad
    if advantages.shape[1] > 1:
        advantages = wider(advantages, (0, extra))
    got = run(
        name,
        wider(logprobs, (0, extra), value=NAN),
        wider(old_logprobs, (0, extra), value=-1.0),
        advantages,
        wider(mask, (0, extra)),
    )
    assert (got[1][:, mask.shape[1] :] == 0).all()
    assert_same((got[0], got[1][:, : mask.shape[1]], got[2]), want, **CLOSE)


@every_loss
@examples
@given(batch=batches(min_rows=2), data=st.data())
def test_microbatches_and_row_order_change_nothing(name, batch, data):
    num_rows = len(batch[0])
    order = torch.tensor(data.draw(st.permutations(range(num_rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_rows - 1))))
    loss, gradient, stats = run(name, *batch)
    pieces = torch.tensor_split(order, cuts)
    parts = [run(name, *(x[rows] for x in batch)) for rows in pieces]
    torch.testing.assert_close(sum(part[0] for part in parts), loss, **CLOSE)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient[order], **CLOSE)
    for key, value in stats.items():
        values = [part[2][key] for part in parts]
        whole = (min if key.endswith("_min") else max if key.endswith("_max") else sum)(values)
        torch.testing.assert_close(torch.as_tensor(whole), value, **CLOSE)


@every_loss
@examples
@given(batch=batches(), dtype=st.sampled_from([torch.int64, torch.float32, torch.uint8]))
def test_dtype_of_the_mask_changes_nothing(name, batch, dtype):
    want = run(name, *batch)
    assert_same(run(name, *batch[:3], batch[3].to(dtype)), want, **EXACT)


@every_loss
@examples
@given(batch=batches(), num_tokens=st.integers(1, 10**6))
def test_loss_and_gradient_scale_with_num_tokens_and_stats_do_not(name, batch, num_tokens):
    one, many = run(name, *batch, 1), run(name, *batch, num_tokens)
    torch.testing.assert_close(many[0] * num_tokens, one[0], **CLOSE)
    torch.testing.assert_close(many[1] * num_tokens, one[1], **CLOSE)
    assert all(torch.equal(one[2][key], many[2][key]) for key in one[2])


@examples
@given(batch=batches())
def test_influence_of_exactly_1_is_dapo(batch):
    clips = (17, 0.2, 0.28, 10.0)
    loss, stats = fipo.policy_loss(*batch, *clips, 32.0, 1.0, 1.0, None)
    want, want_stats = dapo.policy_loss(*batch, *clips)
    assert torch.equal(loss, want)
    assert all(torch.equal(stats[key], want_stats[key]) for key in want_stats)


@every_loss
@examples
@given(batch=batches())
def test_loss_of_a_fully_masked_batch_has_a_graph_and_gradient_0(name, batch):
    # Else backward would raise on one rank while the others wait for its gradients
    function, flags = LOSSES[name]
    logprobs = batch[0].clone().requires_grad_()
    loss, _ = function(logprobs, *batch[1:3], 0 * batch[3], 1, **flags)
    assert loss.requires_grad and loss == 0
    loss.backward()
    assert (logprobs.grad == 0).all()


# --------------------------------------------------------------------------------------------------
# Inputs stay as they were
# --------------------------------------------------------------------------------------------------


def assert_untouched(function, *arguments, **keywords):
    before = copy.deepcopy((arguments, keywords))
    function(*arguments, **keywords)
    for old, new in zip(
        [*before[0], *before[1].values()], [*arguments, *keywords.values()], strict=True
    ):
        if isinstance(old, torch.Tensor):
            torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
        else:
            assert new == old


@settings(examples, max_examples=5)
@given(batch=batches())
def test_no_function_writes_into_its_arguments(batch):
    logprobs, old_logprobs, advantages, mask = batch
    logprobs = torch.where(mask, logprobs, NAN)
    for function, flags in LOSSES.values():
        for valid in (mask, mask.float()):
            num_tokens = torch.tensor(17)
            assert_untouched(
                function, logprobs, old_logprobs, advantages, valid, num_tokens, **flags
            )
    log_ratio, ratio = logprobs - old_logprobs, (logprobs - old_logprobs).exp()
    for half_life, dual_clip in ((32.0, 10.0), (None, None)):
        for valid in (mask, mask.long(), mask.float()):
            assert_untouched(fipo.future_kl, log_ratio, valid, half_life, dual_clip)
    for high in (1.2, None):
        assert_untouched(fipo.influence_weights, log_ratio, ratio, advantages, 0.8, high, 3.0)
    assert_untouched(k3, logprobs, old_logprobs, mask)
    for script in (dapo, fipo):
        rewards, lengths = (advantages[:, 0] > 0).float(), mask.sum(1).float()
        assert_untouched(script.group_advantages, rewards, len(rewards))
        assert_untouched(script.shape_rewards, rewards, lengths, 9, 4, 1.0, -1.0)


# --------------------------------------------------------------------------------------------------
# future_kl
# --------------------------------------------------------------------------------------------------


@examples
@given(batch=batches(), half_life=st.sampled_from([None, 0.5, 32.0]), filtered=st.booleans())
def test_future_kl_is_the_double_sum_whatever_the_padding_holds(batch, half_life, filtered):
    logprobs, old_logprobs, _, mask = batch
    log_ratio = torch.where(mask, logprobs - old_logprobs, NAN)
    dual_clip = 2.0 if filtered else None
    gamma = 1.0 if half_life is None else 2 ** (-1 / half_life)
    got = fipo.future_kl(log_ratio, mask, half_life, dual_clip)
    want = torch.zeros_like(got)
    for i, length in enumerate(mask.sum(1).tolist()):
        for t in range(length):
            for k in range(t, length):
                d = log_ratio[i, k].item()
                kept = not filtered or log_ratio[i, k].exp() <= 2.0
                want[i, t] += gamma ** (k - t) * d * kept
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for dtype in (torch.int64, torch.float32):
        again = fipo.future_kl(log_ratio, mask.to(dtype), half_life, dual_clip)
        assert torch.equal(again, got)


# --------------------------------------------------------------------------------------------------
# Rewards and advantages
# --------------------------------------------------------------------------------------------------


@st.composite
def grouped_rewards(draw):
    num_prompts, group_size = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    reward = st.sampled_from([0.0, 1.0, 0.3, 0.7, -1.0])
    size = num_prompts * group_size
    return torch.tensor(draw(st.lists(reward, min_size=size, max_size=size))), group_size


@examples
@given(grouped=grouped_rewards(), data=st.data())
def test_order_of_groups_and_members_permutes_the_advantages(grouped, data):
    rewards, group_size = grouped
    want = dapo.group_advantages(rewards, group_size).view(-1, group_size)
    groups = rewards.view(-1, group_size)
    order = data.draw(st.permutations(range(len(groups))))
    inside = data.draw(st.permutations(range(group_size)))
    shuffled = groups[order][:, inside].reshape(-1)
    got = dapo.group_advantages(shuffled, group_size).view(-1, group_size)
    torch.testing.assert_close(got, want[order][:, inside], rtol=1e-5, atol=1e-6)


@examples
@given(grouped=grouped_rewards())
def test_advantages_of_a_group_sum_to_0_and_have_spread_1_or_0(grouped):
    rewards, group_size = grouped
    advantages = dapo.group_advantages(rewards, group_size)
    assert advantages.shape == (len(rewards), 1)
    for group, reward in zip(
        advantages.view(-1, group_size), rewards.view(-1, group_size), strict=True
    ):
        if reward.max() == reward.min():
            assert (group == 0).all()
        else:
            torch.testing.assert_close(group.sum(), torch.tensor(0.0), rtol=0, atol=1e-5)
            torch.testing.assert_close(group.std(), torch.tensor(1.0), rtol=1e-4, atol=0)


@examples
@given(
    lengths=st.lists(st.integers(0, 40), min_size=2, max_size=8),
    buffer=st.integers(0, 20),
    penalty=st.floats(0, 2),
)
def test_overlong_penalty_never_rewards_length_and_stays_in_bounds(lengths, buffer, penalty):
    lengths = torch.tensor(sorted(lengths)).float()
    rewards = dapo.shape_rewards(torch.ones(len(lengths)), lengths, 20, buffer, penalty)
    assert (rewards.diff() <= 1e-6).all()
    assert (rewards >= 1 - penalty - 1e-6).all() and (rewards <= 1).all()
    assert (rewards[lengths <= 20 - buffer] == 1).all()
