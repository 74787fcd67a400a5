"""Rollout engines against the trainer: the same log-probabilities, greedy tokens, seeds and ends.

Each test runs with transformers, and with vLLM where it is installed."""

import importlib.util
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import common
import dapo
import tiny
from engines import HFEngine, Sampling, row_seed, sample_tokens
from models import full_weights

ENGINES = [
    "hf",
    pytest.param(
        "vllm",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("vllm") is None, reason="vllm is not installed"
        ),
    ),
]
CPU = dapo.Args(max_prompt_tokens=150, engine_memory=0.25)


def untie(folder: str, target: str) -> None:
    """Write the model in folder to target, with a head that is not its embedding."""
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = False
    lm = AutoModelForCausalLM.from_pretrained(folder, config=config)
    generator = torch.Generator().manual_seed(2)
    head = lm.get_input_embeddings().weight.detach().clone()
    lm.lm_head.weight = torch.nn.Parameter(
        head + 0.05 * torch.randn(head.shape, generator=generator)
    )
    lm.save_pretrained(target)
    common.load_tokenizer(folder).save_pretrained(target)


class Setting:
    """A tiny policy, its optimizer and an engine, as a script sets them up."""

    def __init__(self, kind: str, folder: str):
        self.args = replace(CPU, rollout_engine=kind, model=folder)
        self.accelerator = common.make_accelerator(self.args)
        self.tokenizer = common.load_tokenizer(folder)
        self.policy, self.optimizer = common.load_policy(self.args, self.accelerator)
        self.engine = common.make_engine(self.args, self.policy, self.tokenizer, self.accelerator)
        self.engine.sync_weights(self.policy)

    def reset(self, folder: str) -> None:
        source = common.load_lm(replace(self.args, model=folder))
        self.policy.lm.load_state_dict(source.state_dict())
        self.engine.sync_weights(self.policy)


def prompts(tokenizer, num: int, words: int | None = None) -> list[list[int]]:
    rows = tiny.problems("train", num, seed=3)
    texts = [row["prompt"] for row in rows]
    if words:  # longer than a block of vLLM's prefix cache on a CPU, 128 tokens
        texts = [
            " ".join((text[:-2] + " ").split() * words)[: 2 * words - 2] + " ?" for text in texts
        ]
    return [tokenizer(text)["input_ids"] for text in texts]


def trainer_logprobs(policy, prompt_ids, answers, temperature=1.0):
    """[B, T] log-probabilities by the policy's forward, as in training."""
    rows = [(p, r) for p, responses in zip(prompt_ids, answers, strict=True) for r in responses]
    sequences = [torch.tensor([*p, *r.token_ids.tolist()]) for p, r in rows]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    prompt_lengths = torch.tensor([len(p) for p, _ in rows])
    lengths = torch.tensor([len(r.token_ids) for _, r in rows])
    with torch.no_grad():
        return policy(ids, prompt_lengths, lengths, int(lengths.max()), temperature)[0]


def greedy_by_hand(policy, prompt: list[int], max_tokens: int, stop: int) -> list[int]:
    """Greedy decoding with nothing but the model's forward: no cache, no batch."""
    ids = list(prompt)
    for _ in range(max_tokens):
        with torch.no_grad():
            ids.append(int(policy.lm(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == stop:
            break
    return ids[len(prompt) :]


@pytest.fixture(scope="module", params=ENGINES)
def setting(request, base_policy):
    return Setting(request.param, base_policy)


def test_sampler_and_trainer_agree_on_logprobs(setting):
    ids = prompts(setting.tokenizer, 16)
    for temperature in (1.0, 0.7):
        seeds = [[row_seed(5, i, g) for g in range(4)] for i in range(16)]
        answers = setting.engine.generate(ids, 4, Sampling(24, temperature), seeds)
        expected = trainer_logprobs(setting.policy, ids, answers, temperature)
        for row, response in enumerate(r for responses in answers for r in responses):
            got = torch.from_numpy(response.logprobs)
            assert len(response.logprobs) == len(response.token_ids)
            torch.testing.assert_close(got, expected[row, : len(got)], atol=1e-4, rtol=0)


def test_greedy_tokens_follow_every_weight_sync(setting, base_policy):
    # Prompts longer than one cache block, so that a prefix cache that survived a sync would show.
    ids = prompts(setting.tokenizer, 4, words=140)
    assert min(map(len, ids)) > 128
    stop, seeds = setting.tokenizer.eos_token_id, [[0]] * 4
    seen = []
    for change in (0.0, 0.05, 0.1):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for parameter in setting.policy.lm.parameters():
                parameter += change * torch.randn(parameter.shape, generator=generator)
        setting.engine.sync_weights(setting.policy)
        answers = setting.engine.generate(ids, 1, Sampling(12, temperature=0.0), seeds)
        got = [responses[0].token_ids.tolist() for responses in answers]
        assert got == [greedy_by_hand(setting.policy, p, 12, stop) for p in ids]
        seen.append(got)
    assert seen[0] != seen[1] != seen[2]
    setting.reset(base_policy)


def test_tokens_do_not_depend_on_the_batch(setting):
    ids = prompts(setting.tokenizer, 12)
    seeds = [[row_seed(9, i, g) for g in range(2)] for i in range(12)]
    together = setting.engine.generate(ids, 2, Sampling(24), seeds)
    alone = [
        setting.engine.generate([p], 2, Sampling(24), [s])[0]
        for p, s in zip(ids, seeds, strict=True)
    ]
    for one, other in zip(together, alone, strict=True):
        assert [r.token_ids.tolist() for r in one] == [r.token_ids.tolist() for r in other]


def test_seeds_differ_per_prompt_and_per_sample(setting):
    problem = common.Problem(0, "", prompts(setting.tokenizer, 1)[0], "")
    drawn = [(number, problem) for number in range(8)]  # the same prompt eight times
    sampling = Sampling(24, temperature=2.0)  # at 1 many responses are the same short answer

    def texts() -> list[tuple]:
        groups = common.sample(setting.engine, drawn, 4, sampling, 7)
        return [tuple(r.token_ids.tolist()) for group in groups for r in group.responses]

    assert len({*texts()}) > 16  # one seed for all prompts gives 4, one for all samples 8
    assert texts() == texts()


def test_a_response_ends_with_its_stop_token_or_at_the_limit(setting):
    ids = prompts(setting.tokenizer, 16)
    eos = setting.tokenizer.eos_token_id
    seeds = [[i] for i in range(16)]
    for limit in (3, 24):
        for responses in setting.engine.generate(ids, 1, Sampling(limit), seeds):
            tokens = responses[0].token_ids.tolist()
            assert eos not in tokens[:-1]
            assert responses[0].finished == (tokens[-1] == eos)
            assert responses[0].finished or len(tokens) == limit


def test_more_prompt_tokens_than_one_scheduling_step_holds(setting):
    # vLLM puts 4,096 prompt tokens into a step; on a CPU a prompt must not be split over two.
    ids = prompts(setting.tokenizer, 40, words=140)
    assert sum(map(len, ids)) > 4096
    answers = setting.engine.generate(ids, 2, Sampling(4), [[i, i + 100] for i in range(40)])
    assert len(answers) == 40 and all(len(responses) == 2 for responses in answers)


def test_sampling_leaves_the_random_state_of_training_alone(setting):
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    setting.engine.generate(prompts(setting.tokenizer, 2), 2, Sampling(8), [[1, 2], [3, 4]])
    setting.engine.sync_weights(setting.policy)
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_weights_are_sent_under_both_names_of_a_tie(setting):
    names = dict(full_weights(setting.policy))
    assert torch.equal(names["lm_head.weight"], names["model.embed_tokens.weight"])


def test_a_missing_or_wrong_weight_name_raises(base_policy):
    lm = common.load_lm(replace(CPU, model=base_policy))
    accelerator = common.make_accelerator(CPU)
    engine = HFEngine(lm, 0, False, [1], accelerator)
    policy = common.Policy(common.load_lm(replace(CPU, model=base_policy)))
    del policy.lm.model.layers[2]
    with pytest.raises(RuntimeError, match="Missing key"):
        engine.sync_weights(policy)


def test_stop_ids_are_the_union_of_tokenizer_and_generation_config(base_policy, tmp_path):
    tokenizer = common.load_tokenizer(base_policy)
    tokenizer.save_pretrained(tmp_path)
    tiny.make_config().save_pretrained(tmp_path)
    common.GenerationConfig(eos_token_id=[1, 7]).save_pretrained(tmp_path)
    assert common.stop_token_ids(str(tmp_path), tokenizer) == sorted({1, 7})


def test_sample_tokens_by_hand():
    # softmax of log(.1, .2, .7): the cdf is .1, .3, 1; u = .05 -> 0, .25 -> 1, .95 -> 2.
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(3, 1)
    uniforms = torch.tensor([0.05, 0.25, 0.95], dtype=torch.float64)
    token, logprob = sample_tokens(logits, uniforms, Sampling(1))
    assert token.tolist() == [0, 1, 2]
    torch.testing.assert_close(logprob.exp(), torch.tensor([0.1, 0.2, 0.7]))
    # top_p .6 keeps only the token of .7, which then has probability 1.
    token, logprob = sample_tokens(logits, uniforms, Sampling(1, top_p=0.6))
    assert token.tolist() == [2, 2, 2]
    torch.testing.assert_close(logprob, torch.zeros(3))
    # top_p .75 keeps .7 and .2, renormalised to 7/9 and 2/9: the cdf is 0, 2/9, 1.
    token, logprob = sample_tokens(logits, uniforms, Sampling(1, top_p=0.75))
    assert token.tolist() == [1, 2, 2]
    torch.testing.assert_close(logprob.exp(), torch.tensor([2 / 9, 7 / 9, 7 / 9]))
    # Temperature .5 squares the odds: 1 : 4 : 49.
    token, logprob = sample_tokens(logits, uniforms, Sampling(1, temperature=0.5))
    torch.testing.assert_close(logprob[2].exp(), torch.tensor(49 / 54))
    assert sample_tokens(logits, uniforms, Sampling(1, temperature=0.0))[0].tolist() == [2, 2, 2]
