"""The shipped model in one vLLM engine, and its loss of quality.

The engine computes everything but the experts in the same way every time. Between measurements the experts are
exchanged: measurements differ only in the server's store, options and policy. vLLM scores a text as a prompt
(``prompt_logprobs``), in one step or, if its scheduler may give a step only one token, as in decode.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

# vLLM reads this at import: the engine core stays in this process, where its experts can be exchanged.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("DYMOE_STORE_DIR", tempfile.mkdtemp(prefix="dymoe-quality-"))

import awq
import numpy as np
import observations
import torch
from losses import Scores
from numpy.typing import NDArray
from vllm import LLM, SamplingParams

import vllm_dymoe
from vllm_dymoe.cache.store import HostStore, Manifest
from vllm_dymoe.cache.store.writer import StoreWriter
from vllm_dymoe.experts.format import ExpertFormat, ModelExperts
from vllm_dymoe.options import CALIBRATED, Options
from vllm_dymoe.planner.routing import Routing
from vllm_dymoe.quantize.calibration import Calibration
from vllm_dymoe.quantize.checkpoint import Checkpoint
from vllm_dymoe.quantize.packer import ExpertPacker, pack
from vllm_dymoe.quantize.quantizers import QUANTIZERS
from vllm_dymoe.server import ExpertServer

MODEL = Path(__file__).resolve().parents[1] / "tiny_moe" / "model"
DOMAINS = ("docs", "code", "arithmetic")
END = "<|endoftext|>"
WINDOW = 512  # most tokens of context
GROUP_SIZE = 64
WIDTHS = (16, 8, 4, 2)
SCORE = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)


@dataclass(frozen=True)
class Variant:
    """One way to compute the experts."""

    name: str  # for the tables
    options: dict[str, Any]  # of the plugin, without the budget
    quantizer: str = "rtn"  # quantizer of the bytes; see `Bench.store`


def planned_bytes(scores: Scores, variant: Variant, formats: Mapping[int, ExpertFormat]) -> float:
    """Return the bytes of the experts that a step computed, wherever they were."""
    bits = variant.options
    nbytes = scores.planned["high"] * formats[bits["high"]].whole_nbytes
    if bits.get("low"):
        nbytes += scores.planned["low"] * formats[bits["low"]].whole_nbytes
    return nbytes / scores.steps


class Bench:
    """One engine, its texts, and the experts of each quantizer.

    Texts are token ids. ``prompts`` are windows of WINDOW tokens of each domain, evenly spread over the held-out texts;
    ``decoded`` are their first tokens, which are read one by one.
    """

    def __init__(self, windows: int, decoded: int) -> None:
        options = {"high": 16, "low": 2, "policy": "dymoe", "expert_budget": "100%", "group_size": GROUP_SIZE}
        self._llm = LLM(
            model=str(MODEL),
            quantization="dymoe",
            additional_config={"dymoe": options},
            enforce_eager=True,
            max_model_len=WINDOW + 8,
            max_num_seqs=1,
            max_num_batched_tokens=WINDOW + 8,
            enable_prefix_caching=False,
        )
        core = self._llm.llm_engine
        self._model = core.vllm_config.quant_config.loaded_model()
        self._scheduler = core.engine_core.engine_core.scheduler
        self._sampler = core.model_executor.driver_worker.worker.model_runner.sampler
        self._seen: list[torch.Tensor] = []
        compute_logprobs = self._sampler.compute_logprobs

        def watched(logits: torch.Tensor) -> torch.Tensor:
            self._seen.append(compute_logprobs(logits))
            return self._seen[-1]

        # vLLM returns only the likeliest tokens, but KL divergence needs all of them.
        self._sampler.compute_logprobs = watched
        self.checkpoint = Checkpoint.open(MODEL)
        self.prompts, self._unread = self._texts(windows)
        self.decoded = [text[:decoded] for text in self.prompts[::windows]]
        self._stores: dict[str, HostStore] = {}

    @property
    def experts(self) -> ModelExperts:
        """Return shapes and formats of the experts."""
        return self.checkpoint.model_experts(WIDTHS, GROUP_SIZE, torch.bfloat16)

    @property
    def server(self) -> ExpertServer:
        """Return the engine's server."""
        return self._model.server

    @cached_property
    def _held_out(self) -> dict[str, list[int]]:
        """Return token ids of each domain."""
        tokenizer, found = self._llm.get_tokenizer(), {}
        for domain in DOMAINS:
            documents = (MODEL / "heldout" / f"{domain}.txt").read_text().split(f"\n{END}\n")
            found[domain] = [token for text in documents for token in [*tokenizer.encode(text.strip("\n")), 0]]
        return found

    @property
    def domains(self) -> dict[str, list[list[int]]]:
        """Return each domain's whole text, cut into texts of WINDOW tokens."""
        starts = {domain: range(0, len(ids) - WINDOW + 1, WINDOW) for domain, ids in self._held_out.items()}
        return {domain: [ids[at : at + WINDOW] for at in starts[domain]] for domain, ids in self._held_out.items()}

    def _texts(self, windows: int) -> tuple[list[list[int]], list[str]]:
        """Return windows of each domain, and the texts between them for calibration."""
        tokenizer = self._llm.get_tokenizer()
        found, between = [], []
        for domain, ids in self._held_out.items():
            stride = (len(ids) - WINDOW) // windows
            assert stride > WINDOW, f"{domain} has {len(ids)} tokens, too few for {windows} windows of {WINDOW}"
            for start in range(0, windows * stride, stride):
                found.append(ids[start : start + WINDOW])
                between.append(tokenizer.decode(ids[start + WINDOW : start + stride]))
        return found, between

    def score(self, variant: Variant, texts: list[list[int]], *, decode: bool, share: float | None = None) -> Scores:
        """Let the engine read texts with these experts.

        Args:
            decode: read one token per step instead of a whole text.
            share: share of all experts' bytes at 4 bits; None holds every expert, each in the planned version.
        """
        workspace = self._model.server.kernel.workspace_bytes
        budget = "100%" if share is None else workspace + int(share * self.experts.nbytes(4))
        chosen = dict(variant.options, expert_budget=budget)
        if share is None and chosen.get("policy") == "dymoe":
            chosen["policy_options"] = {"reuse_high": False, **chosen["policy_options"]}
        options = Options(group_size=GROUP_SIZE, **chosen)
        self.serve(variant.quantizer, options)
        self._scheduler.max_num_scheduled_tokens = 1 if decode else WINDOW + 8
        if share is not None:  # begin with a cache that has been in use
            self._read(texts[-1][:64])
            self._model.server.reset_stats()
        scores = Scores()
        for text in texts:
            scores.logprobs.append(self._read(text))
            scores.steps += len(text) if decode else 1
        stats = self._model.server.stats()
        self._model.server.check_integrity()
        scores.moved, scores.planned = sum(stats.bytes_moved.values()), stats.planned
        scores.hit_rate = stats.hit_rate
        return scores

    def bits_per_weight(self, variant: Variant) -> float:
        """Return bits of an expert at high precision, with its scales."""
        fmt = self.store(variant.quantizer).experts.formats[variant.options["high"]]
        return 8 * fmt.whole_nbytes / (3 * fmt.hidden * fmt.intermediate)

    def serve(self, store: str, options: Options) -> None:
        """Serve with a store, by its name."""
        before = self._model.server
        self._model.use(ExpertServer(self.store(store), options, torch.device("cpu")))
        self._scheduler.max_num_scheduled_tokens = WINDOW + 8
        before.engine.close()

    def read(self, texts: list[list[int]]) -> Scores:
        """Read texts in sequence, each in a step."""
        return Scores([self._read(text) for text in texts])

    def read_each(self, texts: list[list[int]], *, decode: bool) -> list[torch.Tensor]:
        """Return the log-probabilities after each token of the texts.

        Args:
            texts: token ids.
            decode: read one token per step.
        """
        self._scheduler.max_num_scheduled_tokens = 1 if decode else WINDOW + 8
        return [self._read(text) for text in texts]

    @contextlib.contextmanager
    def counted(self) -> Iterator[NDArray[np.int64]]:
        """Sum the squared gates of what is read in the ``with`` block.

        int64 [layers, experts].
        """
        serving = self._model.server.host_planned
        sums, forward = np.zeros((len(self.experts.layers), self.experts.num_experts), np.int64), serving.forward

        def counting(routing: Routing, *arguments: Any) -> torch.Tensor:
            gates = routing.squared_gates
            sums[routing.layer, : len(gates)] += gates
            return forward(routing, *arguments)

        serving.forward = counting  # type: ignore[method-assign]
        yield sums
        del serving.forward

    def nested_bytes(self, store: str, share: float) -> int:
        """Return a budget for all experts at low and a share of them at high."""
        experts = self.store(store).experts
        every = len(experts.layers) * experts.num_experts
        nbytes = every * experts.formats[2].nbytes + int(share * every) * experts.formats[4].nbytes
        return self._model.server.kernel.workspace_bytes + nbytes

    def _read(self, text: list[int]) -> torch.Tensor:
        """Return log-probabilities after each token but the last.

        Shape [tokens - 1, vocabulary], float32.

        Raises:
            SystemExit: they differ from vLLM's answers.
        """
        self._seen.clear()
        (output,) = self._llm.generate({"prompt_token_ids": text}, SCORE, use_tqdm=False)
        found = torch.cat(self._seen)
        if found.shape[0] != len(text) - 1:
            raise SystemExit(f"{found.shape[0]} rows were seen for a text of {len(text)} tokens; no report was written")
        last = output.prompt_logprobs[-1][text[-1]].logprob
        if not math.isclose(found[-1, text[-1]], last, abs_tol=1e-4):
            raise SystemExit("the recorded tokens are not those of vLLM's answers; no report was written")
        return found

    def store(self, name: str) -> HostStore:
        """Return the experts of a quantizer, packed at first use.

        A quantizer's name alone gives separate versions. "nested NAME" nests 2 bits in 4. "awq BITS" has AWQ's
        dequantized weights at 16 bits; "layer NUMBER" has 16 bits, with the weights of one layer rounded to 2 bits.
        """
        if name not in self._stores:
            *kind, quantizer = name.split()
            if kind == ["awq"]:
                self._stores[name] = self._pack("rtn", (16,), awq_bits=int(quantizer))
            elif kind == ["layer"]:
                self._stores[name] = self._pack("rtn", (16,), rounded=int(quantizer))
            else:
                self._stores[name] = self._pack(quantizer, (4, 2) if kind else (2,) if quantizer == "e8" else WIDTHS)
        return self._stores[name]

    def _pack(self, name: str, bits: tuple[int, ...], awq_bits: int = 0, rounded: int | None = None) -> HostStore:
        calibration = self._calibration if name in CALIBRATED else None
        experts = self.checkpoint.model_experts(bits, GROUP_SIZE, torch.bfloat16, name)
        if calibration is not None:
            experts = replace(experts, curves=calibration.curves())
        folder = Path(tempfile.mkdtemp(prefix="dymoe-quality-"))
        writer = StoreWriter(folder / "store", Manifest(experts, name, "measured"))
        if awq_bits:
            packer = ExpertPacker(experts, QUANTIZERS[name], writer)
            awq.put(packer, self.checkpoint, self._calibration, self.experts.formats[awq_bits])
            return packer.finish()
        if rounded is not None:
            packer = ExpertPacker(experts, QUANTIZERS[name], writer)
            observations.put_rounded(packer, self.checkpoint, rounded, self.experts.formats[2])
            return packer.finish()
        errors = pack(self.checkpoint, experts, name, writer, calibration)
        if any(errors.fallbacks):
            raise SystemExit("some experts are too rare in the calibration; no report was written")
        return writer.finish(errors)

    @cached_property
    def _calibration(self) -> Calibration:
        """Return the experts' inputs for texts that are not measured."""
        folder = Path(tempfile.mkdtemp(prefix="dymoe-quality-"))
        self.serve("rtn", Options(high=16, group_size=GROUP_SIZE, expert_budget="100%"))
        vllm_dymoe.calibrate(self._llm, self._unread, folder / "calibration", length=WINDOW)
        return Calibration(folder / "calibration")
