"""--dry-run: published sizes, memory by hand, every preset without a network and a run folder."""

import importlib
import os
import runpy
import shlex
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT, SCRIPTS
from transformers import AutoModelForCausalLM, GPT2Config

import dapo
import dry_run
import ppo_critic
import rfpo
import tiny
from dry_run import SHAPES, Size, find_config, make_plan, size_of, update_memory
from runtime import UsageError, num_processes

PRESETS = [(name, preset) for name in SCRIPTS for preset in importlib.import_module(name).PRESETS]


@pytest.fixture(autouse=True)
def no_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def offline(monkeypatch):
    """No socket can be opened, and weights cannot be made."""

    def refuse(*_, **__):
        raise AssertionError("a dry run opened a socket")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def call(monkeypatch, script: str, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *argv])
    runpy.run_path(str(ROOT / script), run_name="__main__")


# --------------------------------------------------------------------------------------------------
# Sizes
# --------------------------------------------------------------------------------------------------

# Bytes of the bf16 weights in the index files of the published models, and the billions of
# parameters without embedding and head in their cards.
PUBLISHED = {
    "qwen2.5-math-7b": (15_231_233_024, 6.53),
    "qwen2.5-7b": (15_231_233_024, 6.53),
    "qwen2.5-32b": (65_527_752_704, 31.0),
    "qwen3-4b": (8_044_936_192, 3.6),
}


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_those_of_the_published_models(name):
    size_bytes, billions = PUBLISHED[name]
    size = size_of(SHAPES[name])
    assert 2 * size.params == size_bytes
    assert size.layer * size.num_layers / 1e9 == pytest.approx(billions, rel=0.02)
    assert size.root + size.layer * size.num_layers == size.params


def test_a_critic_has_one_output_in_place_of_the_vocabulary():
    for name in ("qwen2.5-math-7b", "qwen3-4b"):
        policy, critic = size_of(SHAPES[name]), size_of(SHAPES[name], critic=True)
        hidden, tied = policy.hidden, SHAPES[name].tie_word_embeddings
        lost = 0 if tied else policy.head
        assert critic.head == 0 and critic.params == policy.params - lost + hidden + 1


def test_bytes_of_the_cache_are_two_per_number_of_keys_and_values():
    # Qwen3-4B: 36 layers x 8 heads x 128 numbers, once for keys and once for values
    assert size_of(SHAPES["qwen3-4b"]).kv == 36 * 8 * 128 * 2 * 2


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-4b"])
def test_what_a_layer_keeps_for_its_backward_pass(name):
    """Against the tensors that autograd saves in a real bf16 forward of a small model."""
    small = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 64, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    small |= {"layer_types": ["full_attention"] * 2}
    config = type(SHAPES[name])(**small)
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in lm.parameters()}
    saved, keep_alive, tokens = {}, [], 128

    def pack(tensor):
        keep_alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        lm.base_model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    final_norm = 8 * config.hidden_size
    measured = sum(saved.values()) / tokens - final_norm
    # The rest is small at real sizes: variances, the attention's normalizers, rotary tables.
    assert measured == pytest.approx(2 * size_of(config).saved, rel=0.06)


# --------------------------------------------------------------------------------------------------
# Memory, by hand
# --------------------------------------------------------------------------------------------------

# 1,000 parameters in 4 layers of 200 and 200 outside, of which 100 in the head
SMALL = Size(params=1000, layer=200, num_layers=4, root=200, head=100, hidden=10, saved=300, kv=8)
SETTINGS = replace(
    dapo.PRESETS["dapo-7b-math"], tokens_per_microbatch=50, activation_checkpointing=True
)


@pytest.fixture
def small(monkeypatch):
    """Plans in which every model is the small one."""
    monkeypatch.setattr(dry_run, "CHUNK", 10)
    monkeypatch.setattr(dry_run, "size_of", lambda config, critic=False: SMALL)
    return replace(SETTINGS, dry_run=True, max_prompt_tokens=10, max_response_tokens=30)


def test_update_memory_by_hand(monkeypatch):
    monkeypatch.setattr(dry_run, "CHUNK", 10)
    # A layer's input is 2 x 10 x 50 = 1,000 bytes, what it keeps 300 x 50 = 15,000.
    # In a layer: 4 inputs, 1.5 x 15,000 = 26,500; weights 2 x (200 + 100) + 12 x 200 = 3,000.
    # At the head: 4 + 7 inputs = 11,000, and 2 x 200 + 6 x 100 + 10 x 10: less.
    assert update_memory(SMALL, SETTINGS, 4) == {
        "gradients, fp32": 1000,
        "activations": 26_500,
        "gathered weights, gradients": 3000,
    }
    # Without recomputation: 4 x 15,000 + 0.5 x 15,000 in a layer.
    stored = replace(SETTINGS, activation_checkpointing=False)
    assert update_memory(SMALL, stored, 4)["activations"] == 67_500
    # With offload no gradient stays on the GPU.
    assert update_memory(SMALL, replace(SETTINGS, cpu_offload=True), 4)["gradients, fp32"] == 0


def test_the_worst_moment_may_be_the_head_or_the_reduction(monkeypatch):
    monkeypatch.setattr(dry_run, "CHUNK", 10)
    shallow = replace(SMALL, saved=0, num_layers=0, head=10_000, root=10_000, layer=0)
    rows = update_memory(shallow, SETTINGS, 4)
    # 7 inputs; bf16 weights of the root, and an fp32 and a bf16 gradient of the head
    assert rows["activations"] == 7000 and rows["logits of a chunk"] == 100
    assert rows["gathered weights, gradients"] == 2 * 10_000 + 6 * 10_000
    one_token = replace(SETTINGS, tokens_per_microbatch=1)
    rows = update_memory(replace(shallow, head=0), one_token, 4)
    assert rows["gathered weights, gradients"] == 6 * 10_000  # bf16 gradients, and fp32 to reduce


def test_state_of_a_trained_and_a_frozen_critic(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    args = replace(small, tensor_parallel=1)
    # Per rank: 250 parameters. Weights 4 bytes each, moments 8, gradients 4 of the one that trains.
    both = make_plan(args, trained_critic="tiny").phases
    assert [*both] == ["rollout", "critic update", "policy update"]
    for phase in both.values():
        assert phase["weights, fp32"] == 2 * 1000 and phase["moments of AdamW, fp32"] == 2 * 2000
    assert both["policy update"]["gradients, fp32"] == 1000  # one module's, never both
    frozen = make_plan(args, frozen_critic="tiny").phases
    assert [*frozen] == ["rollout", "policy update"]
    assert frozen["rollout"]["weights, fp32"] == 1000
    assert frozen["rollout"]["moments of AdamW, fp32"] == 2000
    assert frozen["rollout"]["frozen weights, bf16"] == 500


def test_a_reference_is_a_frozen_policy_whose_root_stays_gathered(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    rows = make_plan(small, reference=True).phases["policy update"]
    assert rows["weights, fp32"] == 1000 and rows["frozen weights, bf16"] == 500
    assert rows["reference, gathered"] == 2 * 200


def test_engine_and_training_state_meet_in_the_rollout_only(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    plan = make_plan(replace(small, engine_memory=0.5, gen_prompts=64, group_size=16))
    assert plan.phases["rollout"]["vLLM"] == 40e9 and "vLLM" not in plan.phases["policy update"]
    # A token id and a log-prob of 4 bytes each, of every response of a round, on every rank
    assert plan.phases["rollout"]["responses to all ranks"] == 8 * 64 * 16 * 30
    # The cache has what weights and reserve leave: 8 bytes a token
    assert plan.cache == (40e9 - 2 * 1000 - dry_run.ENGINE_RESERVE) / 8
    # Two GPUs hold half of the weights and of every token each
    double = make_plan(replace(small, engine_memory=0.5, tensor_parallel=2))
    assert double.cache == (40e9 - 1000 - dry_run.ENGINE_RESERVE) / 4


def test_offload_moves_the_state_to_the_host(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    plan = make_plan(replace(small, cpu_offload=True))
    assert plan.phases["policy update"]["weights, fp32"] == 0
    # 16 ranks on two nodes: rank 0 loads a whole fp32 model beside half of the fp32 shards, and
    # later each node holds half of 16 bytes a parameter
    assert [*plan.host.values()] == [4 * 1000 + 4 * 1000 / 2, 16 * 1000 / 2]
    assert [*make_plan(small).host.values()] == [4 * 1000]


def test_what_the_presets_need():
    """The verdicts that docs/scale.md states."""
    for args, critics, fits in (
        (ppo_critic.PRESETS["qwen3-4b"], {"trained_critic": "qwen3-4b"}, True),
        (rfpo.PRESETS["qwen3-4b"], {"frozen_critic": "qwen3-4b"}, True),
        (dapo.PRESETS["grpo-7b"], {"reference": True}, True),
        (dapo.PRESETS["dapo-32b"], {}, True),
        (replace(dapo.PRESETS["dapo-32b"], cpu_offload=False), {}, False),
        (replace(dapo.PRESETS["dapo-32b"], tensor_parallel=1), {}, False),
    ):
        args = replace(args, dry_run=True)
        assert make_plan(args, **critics).verdict(args).startswith("fits") == fits


# --------------------------------------------------------------------------------------------------
# The scripts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_every_preset_without_network_and_without_a_folder(
    name, preset, offline, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny, "CACHE", tmp_path / "cache")
    call(monkeypatch, f"{name}.py", preset, "--dry-run")
    text = capsys.readouterr().out
    assert "policy" in text and "parameters, trained" in text
    assert ("on a CPU" in text) == (preset == "tiny")
    assert preset == "tiny" or ("on 8 GPUs" in text and "\nfits: rollout" in text)
    assert ("critic  " in text) == (name in ("ppo_critic", "rfpo"))
    assert ("reference" in text) == (preset == "grpo-7b")
    assert [*tmp_path.iterdir()] == []


def test_it_starts_no_engine_and_loads_nothing_in_a_process_of_its_own(tmp_path):
    command = [sys.executable, str(ROOT / "dapo.py"), "dapo-7b-math", "--dry-run"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "7,615,616,512 parameters" in done.stdout and not (tmp_path / "runs").exists()


def test_flags_that_help_are_tried(monkeypatch, capsys):
    call(monkeypatch, "dapo.py", "dapo-32b", "--no-cpu-offload", "--dry-run")
    text = capsys.readouterr().out
    assert "\ndoes not fit: " in text and "with --cpu-offload it fits: " in text
    assert "with --engine-memory 0.3 it does not fit" in text


def test_the_torchrun_lines_of_the_readme_take_it(monkeypatch, capsys):
    lines = [x for x in (ROOT / "README.md").read_text().splitlines() if x.startswith("torchrun")]
    assert lines
    for line in lines:
        words = shlex.split(line, comments=True)
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        world = words[words.index("--nproc_per_node") + 1]
        for name, value in {"RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}.items():
            monkeypatch.setenv(name, value)
        call(monkeypatch, words[at], *words[at + 1 :], "--dry-run")
        first = capsys.readouterr().out.splitlines()[0]
        assert first.endswith(f"on {world} GPUs of 80 GB")  # torchrun's number, nothing assumed


def test_the_other_ranks_print_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    call(monkeypatch, "fipo.py", "--dry-run")
    assert capsys.readouterr().out == ""


def test_how_many_processes():
    share, gigabytes = dapo.PRESETS["dapo-7b-math"], dapo.Args()
    assert num_processes(share) == 1 and num_processes(replace(share, dry_run=True)) == 8
    assert num_processes(replace(gigabytes, dry_run=True)) == 1


def test_a_folder_goes_before_the_name(tmp_path):
    folder = tmp_path / "runs" / "qwen3-4b" / "model"
    assert find_config(str(folder)) is SHAPES["qwen3-4b"]  # not there yet: by its name
    tiny.make_config().save_pretrained(folder)
    assert size_of(find_config(str(folder))).params == size_of(find_config("tiny")).params


@pytest.mark.parametrize("flag", ["--model", "--critic"])
def test_an_unknown_name_gives_one_clear_line(flag, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "ppo_critic.py", flag, "acme/large", "--dry-run")
    line = capsys.readouterr().err.strip()
    assert stopped.value.code == 2 and "\n" not in line and line.startswith("ppo_critic.py: error:")
    assert "'acme/large'" in line and "config.json" in line and "qwen3-4b" in line


def test_another_architecture_gives_one_clear_line():
    with pytest.raises(UsageError, match="GPT2"):
        size_of(GPT2Config(n_layer=1, n_embd=8, n_head=1))


def test_wrong_settings_are_refused_first(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "dapo.py", "dapo-32b", "--tensor-parallel", "3", "--dry-run")
    assert "--tensor-parallel 3" in capsys.readouterr().err


def test_without_it_the_checks_are_as_before(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "dapo.py", "dapo-7b-math")
    assert "torchrun" in capsys.readouterr().err
