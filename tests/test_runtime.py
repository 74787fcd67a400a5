"""Meters, schedules, seeds, batches: what the loop leans on."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import dapo
import fipo
import models
from engines import Response, row_seed

ARGS = dapo.Args()


class Ranks:
    """A stand-in accelerator: this rank's view, with the other ranks' tensors given."""

    def __init__(self, rank=0, world=1, others=()):
        self.process_index, self.num_processes, self.others = rank, world, others
        self.device = torch.device("cpu")
        self.is_main_process = rank == 0

    def gather(self, tensor):
        return torch.cat([tensor, *self.others])


def groups_of(lengths, prompt=3):
    responses = [Response(np.ones(n, np.int32), np.zeros(n, np.float32), True) for n in lengths]
    problem = common.Problem(0, "", [1] * prompt, "")
    return [common.Group(0, problem, responses, [1.0] * len(lengths))]


def test_meter_divides_once_over_all_ranks():
    # 10 over 100 tokens here and 9 over 10 tokens there: 19 / 110, not the mean of .1 and .9.
    meter = common.Meter()
    meter.add({"a": torch.tensor(4.0), "x_min": 3.0, "x_max": 3.0}, 40)
    meter.add({"a": torch.tensor(6.0), "x_min": 2.0, "x_max": 5.0}, 60)
    others = [torch.tensor([[[9.0, 10.0], [7.0, 1.0], [1.0, 1.0]]], dtype=torch.float64)]
    got = meter.reduce(Ranks(world=2, others=others))  # names sorted: a, x_max, x_min
    assert got == {"a": pytest.approx(19 / 110), "x_max": 7.0, "x_min": 1.0}


def test_meter_of_nothing_is_zero_and_nan_stays_visible():
    meter = common.Meter()
    meter.add({"a": 0.0}, 0)
    meter.add({"b": float("nan")}, 1)
    got = meter.reduce(Ranks())
    assert got["a"] == 0.0 and np.isnan(got["b"])


def test_learning_rate_warms_up_holds_and_decays():
    args = replace(ARGS, learning_rate=1.0, warmup_steps=4, decay_steps=2, num_steps=10)
    got = [common.scheduled_learning_rate(step, args) for step in range(1, 11)]
    assert got == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.5]
    args = replace(args, decay_steps=0, warmup_steps=0)
    assert {common.scheduled_learning_rate(step, args) for step in range(1, 11)} == {1.0}


def test_bad_steps_are_counted_in_a_row_and_end_the_run():
    args = replace(ARGS, max_bad_steps=3)
    nan, fine = torch.tensor(float("nan")), torch.tensor(1.0)
    assert common.count_bad_steps(0, nan, args) == 1
    assert common.count_bad_steps(1, torch.tensor(float("inf")), args) == 2
    assert common.count_bad_steps(2, fine, args) == 0
    with pytest.raises(RuntimeError, match="3 updates in a row"):
        common.count_bad_steps(2, nan, args)


def test_row_seeds_differ_and_repeat():
    seeds = {row_seed(1, n, g) for n in range(50) for g in range(50)}
    assert len(seeds) == 2500 and max(seeds) < 2**63
    assert row_seed(1, 2, 3) == row_seed(1, 2, 3) != row_seed(2, 2, 3)
    assert row_seed(1, 2, 3) != row_seed(1, 3, 2)


def test_every_row_goes_to_one_rank_and_minibatches_keep_their_rows():
    lengths = [5, 9, 1, 7, 3, 8, 2, 6, 4, 10]
    groups, world = groups_of(lengths), 3
    for size in (4, 10):
        seen, loads = [], []
        for rank in range(world):
            batch = common.make_batch(groups, size, 0, Ranks(rank, world))
            assert len(batch.minibatches) == -(-10 // size)
            for i, minibatch in enumerate(batch.minibatches):
                rows = batch.rows[minibatch]
                assert ((rows >= i * size) & (rows < (i + 1) * size)).all()
            real = batch.mask.any(1)
            seen += batch.rows[real].tolist()
            loads.append(int(batch.mask.sum()))
        assert sorted(seen) == list(range(10))
    assert sorted(loads) == [18, 18, 19]  # of 55 tokens in one minibatch: balanced by length


def test_a_rank_without_a_row_gets_a_filler_of_mask_zero():
    batch = common.make_batch(groups_of([4, 5]), 2, 0, Ranks(rank=2, world=3))
    assert len(batch.minibatches) == 1 and len(batch.minibatches[0]) == 1
    assert batch.mask.sum() == 0


def test_a_short_batch_has_a_smaller_last_minibatch():
    batch = common.make_batch(groups_of([4] * 10), 4, 0, Ranks())
    assert [len(m) for m in batch.minibatches] == [4, 4, 2]


def test_mask_comes_from_lengths_and_holds_eos():
    batch = common.make_batch(groups_of([2, 4]), 2, 0, Ranks())
    assert batch.mask.sum(1).tolist() == [4, 2]  # longest first
    assert batch.ids.shape == (2, 7) and batch.prompt_lengths.tolist() == [3, 3]


def test_padding_is_counted_over_the_tokens_of_all_forwards():
    batch = common.make_batch(groups_of([5, 3, 2], prompt=1), 3, 0, Ranks())
    rows = torch.tensor([0, 1, 2])  # 6, 4 and 3 tokens, padded to 6: 18 positions
    assert batch.padding(rows, 1) == ({"train/padding_frac": 18 - 13}, 18)
    assert batch.padding(rows[1:], 1) == ({"train/padding_frac": 8 - 7}, 8)
    assert batch.padding(rows[:1], 0) == ({"train/padding_frac": 6}, 6)  # it fills up the number


def test_microbatches_weigh_padding_against_their_number():
    # Three rows of 100 tokens and five of 20, under 800: together they are 800 padded tokens, cut
    # in two 300 + 100. A piece costs 800 / 16 = 50 by itself: 850 against 500.
    args, lengths = SimpleNamespace(tokens_per_microbatch=800), [20, 100, 20, 20, 100, 20, 100, 20]
    batch = common.make_batch(groups_of(lengths, prompt=0), 8, 0, Ranks())
    pieces = common.microbatches(batch, batch.minibatches[0], args, Ranks())
    assert [len(rows) for rows, _ in pieces] == [3, 5]
    # Rows of 100 and 90: apart they are 460 + 100 with both pieces' own cost, together 500 + 50.
    batch = common.make_batch(groups_of([100, 90, 90, 90, 100], prompt=0), 5, 0, Ranks())
    (piece,) = common.microbatches(batch, batch.minibatches[0], args, Ranks())
    assert len(piece[0]) == 5


def test_microbatches_keep_the_budget_and_their_number_is_equal_on_all_ranks():
    batch = common.make_batch(groups_of([5, 9, 1, 7]), 4, 0, Ranks())
    args = SimpleNamespace(tokens_per_microbatch=24)
    pieces = common.microbatches(batch, batch.minibatches[0], args, Ranks())
    total = (batch.prompt_lengths + batch.response_lengths).tolist()
    for rows, weight in pieces:
        assert weight == 1
        assert len(rows) * max(total[i] for i in rows) <= 24
    assert sorted(i for rows, _ in pieces for i in rows.tolist()) == [0, 1, 2, 3]
    other = Ranks(world=2, others=[torch.tensor([5])])
    more = common.microbatches(batch, batch.minibatches[0], args, other)
    assert len(more) == 5 and [w for _, w in more] == [1] * len(pieces) + [0] * (5 - len(pieces))


def test_token_logprobs_by_hand():
    # logits [2, 0], token 0: at temperature 1, and at .5 where they are [4, 0].
    hidden, weight = torch.tensor([[2.0, 0.0]]), torch.eye(2)
    for temperature, logprob, entropy in ((1.0, -0.126928, 0.365334), (0.5, -0.018150, 0.090095)):
        got = models.token_logprobs(hidden, weight, None, torch.tensor([0]), temperature)
        torch.testing.assert_close(got[0], torch.tensor([logprob]), atol=1e-6, rtol=0)
        torch.testing.assert_close(got[1], torch.tensor([entropy]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("with_bias", [False, True])
def test_chunked_logprobs_equal_full_logits_with_their_gradient(with_bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    bias = torch.randn(50, requires_grad=True) if with_bias else None
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    targets, signal = torch.randint(50, (37,)), torch.randn(37)
    logits = torch.nn.functional.linear(hidden, weight, bias) / 0.7
    full = logits.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    want = torch.autograd.grad((full * signal).sum(), inputs)
    for chunk in (1, 5, 37, 100):
        settings = hidden, weight, bias, targets, 0.7, chunk
        logprobs, entropy = models.TokenLogprobs.apply(*settings)
        torch.testing.assert_close(logprobs, full)
        torch.testing.assert_close(entropy, -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1))
        assert not entropy.requires_grad
        got = torch.autograd.grad((logprobs * signal).sum(), inputs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_policy_reads_the_position_before_each_token_and_ignores_padding(base_policy):
    # prompt [5, 6, 7], response [8, 9]: logits at positions 2 and 3.
    args = replace(ARGS, model=base_policy)
    policy = common.Policy(common.load_lm(args))
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    full = policy.lm(ids).logits.log_softmax(-1)
    want = torch.stack([full[0, 2, 8], full[0, 3, 9]])
    one = (torch.tensor([3]), torch.tensor([2]), 2, 1.0)
    torch.testing.assert_close(policy(ids, *one)[0][0], want)
    padded = torch.tensor([[5, 6, 7, 8, 9, 0, 0], [11, 12, 8, 9, 10, 5, 6]])
    got, entropy = policy(padded, torch.tensor([3, 2]), torch.tensor([2, 5]), 6, 1.0)
    torch.testing.assert_close(got[0, :2], want, atol=1e-5, rtol=0)
    assert (got[0, 2:] == 0).all() and (entropy[0, 2:] == 0).all() and (entropy[1, :5] > 0).all()


def test_dropout_of_a_configuration_is_off(base_policy):
    args = replace(ARGS, model=base_policy)
    lm = common.load_lm(args)
    lm.config.attention_dropout = 0.5
    for layer in lm.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy = common.Policy(lm.train())
    inputs = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([3]), torch.tensor([2]), 2, 1.0
    assert torch.equal(policy(*inputs)[0], policy(*inputs)[0])


def test_logs_are_cut_at_the_checkpoint_and_warnings_know_their_past(tmp_path):
    run = object.__new__(common.Run)
    run.folder, run.is_main, run.past = tmp_path, True, common.defaultdict(list)
    lines = [{"step": i, "policy/kl": k} for i, k in enumerate([0.0, 1.0, float("nan"), 3.0, 4.0])]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (tmp_path / name).write_text(text + '{"step": 1, "pol')  # a kill cut the last line
    run._keep_logs_up_to(3)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / name).read_text() == text[: text.index('{"step": 4')]
    assert run.past["policy/kl"] == [0.0, 1.0, 3.0]  # as an uninterrupted run has it


def test_collapse_is_announced_by_three_jumps_once(capsys):
    run = object.__new__(common.Run)
    run.past, run.warned_of_collapse, run.is_main = common.defaultdict(list), False, True
    calm = {
        "policy/dual_clip_frac": 0.01,
        "policy/kl": -0.001,
        "optim/grad_norm": 1.0,
        "rollout/response_tokens_mean": 10.0,
    }
    assert [run.collapse_signals(calm) for _ in range(12)] == [0] * 12
    assert run.collapse_signals({**calm, "optim/grad_norm": 6.0, "policy/kl": 0.1}) == 2
    assert run.collapse_signals({"optim/grad_norm": 6.0}) == 1  # a script may log fewer of them
    assert "collapse" not in capsys.readouterr().out
    jump = {**calm, "optim/grad_norm": 6.0, "policy/kl": 0.1, "policy/dual_clip_frac": 0.2}
    assert [run.collapse_signals(jump) for _ in range(2)] == [3, 3]
    assert capsys.readouterr().out.count("looks like a collapse") == 1


@pytest.mark.parametrize("script", [dapo, fipo])
def test_a_nan_reaches_the_gradient_so_that_its_update_is_skipped(script):
    logprobs = torch.tensor([[0.1, 0.2, 0.3]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0, float("nan")]])
    settings = [0.2, 0.28, 10.0] + ([32.0, 0.8, 1.2, None] if script is fipo else [])
    mask = torch.ones(1, 3, dtype=torch.bool)
    loss, _ = script.policy_loss(logprobs, old, torch.ones(1, 1), mask, 3, *settings)
    loss.backward()
    assert torch.isnan(loss)
    assert not torch.isfinite(logprobs.grad.norm())
    assert common.count_bad_steps(0, logprobs.grad.norm(), ARGS) == 1


def test_ranks_that_read_no_weights_have_the_same_model_but_for_its_numbers(
    base_policy, monkeypatch
):
    args = replace(ARGS, model=base_policy)
    main = common.load_lm(args, sharded=True)
    monkeypatch.setattr(common, "PartialState", lambda: SimpleNamespace(is_main_process=False))
    other = common.load_lm(args, sharded=True)
    shapes = [{n: p.shape for n, p in lm.named_parameters()} for lm in (main, other)]
    assert shapes[0] == shapes[1]
    # Accelerate finds an optimizer's parameters by their address, so none may share one.
    assert len({p.data_ptr() for p in other.parameters()}) == len(shapes[1])
    assert other.lm_head.weight is other.model.embed_tokens.weight
    for (name, buffer), (_, same) in zip(main.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(buffer, same), name  # FSDP2 sends parameters only
    whole = common.load_lm(args)  # for an engine
    assert all(
        torch.equal(a, b) for a, b in zip(main.parameters(), whole.parameters(), strict=True)
    )


def test_settings_of_an_algorithm_without_a_dual_clip_pass():
    settings = {name: value for name, value in vars(ARGS).items() if name != "dual_clip"}
    common.check_args(SimpleNamespace(**settings))
    with pytest.raises(common.UsageError, match=r"--dual-clip 1\.0 must be above 1"):
        common.check_args(SimpleNamespace(**settings, dual_clip=1.0))
