"""engines: rollouts with transformers or vLLM, behind one small interface.

Token ids in, token ids out. An engine gets a seed for every response, so what it samples does not
depend on the batch, the number of ranks, or what was sampled before.
"""

import os
import random
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from models import full_weights


@dataclass(frozen=True)
class Sampling:
    """Every sampling parameter that is in force; a checkpoint's generation config adds nothing."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


def longest_response(args) -> int:
    """The most tokens that training or evaluation samples."""
    return max(args.max_response_tokens, args.eval_max_tokens or 0)


@dataclass
class Response:
    """One sampled response. token_ids and the sampler's logprobs [T] end with the stop token where
    one was sampled; then `finished` is true. A response cut off at max_tokens is not finished."""

    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32
    finished: bool


def row_seed(*parts: int) -> int:
    """A 63-bit seed as a function of its parts (run seed, problem, sample, ...): equal on every
    rank and after a resume, different for each response. The number of parts is one of them, since
    numpy takes (1, 2) and (1, 2, 0) for the same."""
    sequence = np.random.SeedSequence([len(parts), *parts])
    return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))


def random_states() -> tuple:
    """The states of Python's, numpy's and torch's random generators."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def preserve_rng():
    """Leave Python's, numpy's and torch's random states as they were: building a vLLM engine and
    each of its generate calls change them."""
    states = random_states()
    yield
    set_random_states(states)


class Engine:
    """What both engines share. Ranks form teams of `tensor_parallel`, one engine to a team."""

    def __init__(self, stop_ids: list[int], tensor_parallel: int, accelerator: Accelerator):
        self.stop_ids, self.quiet = stop_ids, not accelerator.is_main_process
        self.team, self.member = divmod(accelerator.process_index, tensor_parallel)
        self.num_teams = accelerator.num_processes // tensor_parallel

    def share(self, items: list) -> list:
        """The items of this rank's team: every num_teams-th one."""
        return items[self.team :: self.num_teams]

    def generate(
        self, prompt_ids: list[list[int]], n: int, sampling: Sampling, seeds: list[list[int]]
    ) -> list[list[Response]]:
        """n responses to each prompt, the g-th drawn with its own seed, seeds[prompt][g]."""
        raise NotImplementedError

    def sync_weights(self, policy: nn.Module) -> None:
        """Take over the policy's weights. A collective under sharding."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Give GPU memory back until the next sync_weights."""


class HFEngine(Engine):
    """Rollouts with a transformers model. A prompt is prefilled once for all of its samples; each
    response has a random stream of its own, so its tokens do not depend on the batch (beyond float
    noise); finished responses leave the batch."""

    max_rows = 1024  # responses in one batch; bounds the memory of the KV cache

    def __init__(self, lm, pad_id: int, shared: bool, stop_ids, accelerator):
        super().__init__(stop_ids, 1, accelerator)
        self.lm, self.pad_id, self.shared = lm, pad_id, shared

    def sync_weights(self, policy):
        if not self.shared:  # else the engine generates with the trained module itself
            self.lm.load_state_dict(dict(full_weights(policy)), strict=True)

    @torch.no_grad()
    def generate(self, prompt_ids, n, sampling, seeds):
        responses, step = [], max(1, self.max_rows // n)
        starts = range(0, len(prompt_ids), step)
        for i in tqdm(starts, desc="rollout", delay=3, leave=False, disable=self.quiet):
            responses += self._batch(prompt_ids[i : i + step], n, sampling, seeds[i : i + step])
        return responses

    def _batch(self, prompt_ids, n, sampling, seeds):
        device, longest = self.lm.device, max(map(len, prompt_ids))
        # Left padding, so that all rows continue in the same column.
        padded = [[self.pad_id] * (longest - len(p)) + p for p in prompt_ids]
        position = torch.tensor([len(p) for p in prompt_ids], device=device)  # of the next token
        attention = torch.arange(longest, device=device) >= longest - position[:, None]
        attention = attention.long()  # [P, longest]
        cache = DynamicCache(config=self.lm.config)
        positions = (attention.cumsum(-1) - 1).clamp(min=0)
        logits = self._step(torch.tensor(padded, device=device), attention, positions, cache)
        cache.batch_repeat_interleave(n)
        logits, attention, position = (
            x.repeat_interleave(n, 0) for x in (logits, attention, position)
        )
        shape = (len(prompt_ids) * n, sampling.max_tokens)
        streams = [np.random.default_rng(s).random(shape[1]) for row in seeds for s in row]
        uniforms = torch.from_numpy(np.stack(streams)).to(device)  # [rows, max_tokens] fp64
        tokens = torch.full(shape, self.pad_id, device=device)
        logprobs = torch.zeros(shape, device=device)
        length = torch.full(shape[:1], shape[1], device=device)
        finished = torch.zeros(shape[:1], dtype=torch.bool, device=device)
        stops = torch.tensor(self.stop_ids, device=device)
        rows = torch.arange(shape[0], device=device)  # the rows that are still growing
        for t in range(sampling.max_tokens):
            token, tokens_logprob = sample_tokens(logits, uniforms[rows, t], sampling)
            tokens[rows, t], logprobs[rows, t] = token, tokens_logprob
            stopped = torch.isin(token, stops)
            length[rows[stopped]], finished[rows[stopped]] = t + 1, True
            if stopped.all() or t + 1 == sampling.max_tokens:
                break
            if stopped.any():
                keep = (~stopped).nonzero().squeeze(-1)
                cache.batch_select_indices(keep)
                rows, token, attention, position = (
                    x[keep] for x in (rows, token, attention, position)
                )
            attention = F.pad(attention, (0, 1), value=1)
            logits = self._step(token[:, None], attention, position[:, None], cache)
            position = position + 1
        tokens, logprobs, length, finished = (
            x.cpu().numpy() for x in (tokens, logprobs, length, finished)
        )
        flat = [
            Response(tokens[r, :end].astype(np.int32), logprobs[r, :end].copy(), bool(finished[r]))
            for r, end in enumerate(length)
        ]
        return [flat[i : i + n] for i in range(0, len(flat), n)]

    def _step(self, ids, attention, positions, cache) -> Tensor:
        cuda = ids.device.type == "cuda"  # where the trainer computes in bf16, too
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=cuda):
            output = self.lm(
                input_ids=ids,
                attention_mask=attention,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1].float()  # [rows, V]


def sample_tokens(logits: Tensor, uniforms: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row by inverse transform, and its log-probability under the distribution that
    was sampled from: temperature and top-p applied, renormalised. logits [rows, V], uniforms [rows]
    in [0, 1). Temperature 0 takes the most likely token."""
    if sampling.temperature == 0:
        token = logits.argmax(-1, keepdim=True)
        return token.squeeze(-1), logits.log_softmax(-1).gather(-1, token).squeeze(-1)
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(-1, descending=True)
        mass_before = ordered.exp().cumsum(-1) - ordered.exp()
        ordered = ordered.masked_fill(mass_before >= sampling.top_p, -torch.inf).log_softmax(-1)
        logprobs = torch.empty_like(ordered).scatter(-1, order, ordered)
    cdf = logprobs.double().exp().cumsum(-1)  # fp64, for at V = 150,000 an fp32 sum drifts
    target = uniforms[:, None] * cdf[:, -1:]
    token = torch.searchsorted(cdf, target, right=True).clamp(max=logits.shape[-1] - 1)
    return token.squeeze(-1), logprobs.gather(-1, token).squeeze(-1)


class VLLMEngine(Engine):
    """Rollouts with vLLM inside the training process."""

    def __init__(self, args, model: str, stop_ids, accelerator):
        super().__init__(stop_ids, args.tensor_parallel, accelerator)
        self.cuda, self.asleep = torch.cuda.is_available(), set()
        with torch.device("meta"):
            shell = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
        self.names = set(shell.state_dict())  # of the weights that a sync must send
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        max_context = args.max_prompt_tokens + longest_response(args)
        if self.cuda:  # a share of the GPU's memory
            limits = {"gpu_memory_utilization": args.engine_memory}
        else:  # gigabytes of KV cache; seeded requests crash where a prompt is split over two steps
            limits = {
                "kv_cache_memory_bytes": int(args.engine_memory * 2**30),
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": max(4096, max_context),
            }
        threads = torch.get_num_threads()
        with preserve_rng():
            from vllm import LLM

            self.llm = LLM(
                model=model,
                skip_tokenizer_init=True,  # token ids in, token ids out
                dtype="bfloat16" if self.cuda else "float32",
                seed=args.seed,
                max_model_len=max_context,
                hf_overrides=(
                    {"max_position_embeddings": args.max_context} if args.max_context else {}
                ),
                tensor_parallel_size=args.tensor_parallel,
                distributed_executor_backend=(
                    "external_launcher" if accelerator.num_processes > 1 else None
                ),
                enable_prefix_caching=True,
                enforce_eager=not self.cuda,
                enable_sleep_mode=self.cuda,
                logprobs_mode="processed_logprobs",  # of the distribution that was sampled from
                generation_config="vllm",  # not the checkpoint's sampling defaults
                **limits,
            )
        torch.set_num_threads(threads)

    def sync_weights(self, policy):
        sent = []

        def stream():
            for name, tensor in full_weights(policy):
                sent.append(name)
                yield name, tensor

        with preserve_rng():
            self._wake("weights")
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
            self.llm.reset_prefix_cache()  # cached prefixes belong to the old weights
        # vLLM only warns of a missing name, and keeps its old values.
        if set(sent) != self.names:
            differ = sorted(set(sent) ^ self.names)
            raise RuntimeError(f"weights sent and expected differ: {differ}")

    def generate(self, prompt_ids, n, sampling, seeds):
        from vllm import SamplingParams

        shared = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": self.stop_ids,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
        }
        # One request per response, for each has a seed of its own; the prompt's prefix is cached.
        params = [SamplingParams(n=1, seed=seed, **shared) for row in seeds for seed in row]
        prompts = [{"prompt_token_ids": p} for p in prompt_ids for _ in range(n)]
        with preserve_rng():
            self._wake("kv_cache")
            # No bar on the other ranks: vLLM divides by the time of a bar, 0 for a disabled one.
            bar = not self.quiet and partial(tqdm, delay=3, leave=False)
            outputs = [o.outputs[0] for o in self.llm.generate(prompts, params, use_tqdm=bar)]
        flat = []
        for output in outputs:
            pairs = zip(output.logprobs, output.token_ids, strict=True)
            logprobs = np.array([entry[token].logprob for entry, token in pairs], np.float32)
            ids = np.array(output.token_ids, np.int32)
            flat.append(Response(ids, logprobs, int(ids[-1]) in self.stop_ids))
        return [flat[i : i + n] for i in range(0, len(flat), n)]

    def sleep(self):
        if self.cuda:
            self.llm.sleep(2)
            self.asleep = {"weights", "kv_cache"}

    def _wake(self, part: str) -> None:
        if part in self.asleep:
            self.llm.wake_up([part])
            self.asleep.remove(part)
