"""The MoE layers of one rank, while vLLM loads them and when they run."""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group

from vllm_dymoe.cache.budget import workspace_bytes
from vllm_dymoe.cache.host_cache import join
from vllm_dymoe.cache.migration import Agree
from vllm_dymoe.cache.pages import available_host_memory
from vllm_dymoe.cache.store import HostStore
from vllm_dymoe.experts.format import ModelExperts
from vllm_dymoe.experts.identity import ModelIdentity
from vllm_dymoe.kernels import Decode, Grouped
from vllm_dymoe.options import ConfigError, Options
from vllm_dymoe.policies import make_policy
from vllm_dymoe.prefetch import Predictor, PredictorError, RoutedModel, TrainedPredictor
from vllm_dymoe.prefetch.gate import FAR
from vllm_dymoe.prefetch.online import OnlineTraining, network_bytes
from vllm_dymoe.prefetch.trained import network_dtype
from vllm_dymoe.quantize.readers import PLAIN_READER, Reader
from vllm_dymoe.quantize.readers.base import describe
from vllm_dymoe.server import ExpertServer, minimum_budget
from vllm_dymoe.server.misses import CHOICES, choose_misses
from vllm_dymoe.server.self_test import RESULTS, tested
from vllm_dymoe.vllm_plugin.announcements import describe_server, logger, warnings
from vllm_dymoe.vllm_plugin.automatic_budget import automatic_budget, budget_in_host_memory
from vllm_dymoe.vllm_plugin.failures import make_step_failures
from vllm_dymoe.vllm_plugin.gates import PredictorObserver
from vllm_dymoe.vllm_plugin.model_files import expert_ranks, meets, ranks_of_machine
from vllm_dymoe.vllm_plugin.model_store import LayerSpec, ModelStore, held_bytes
from vllm_dymoe.vllm_plugin.observers import Observation, observe_trace
from vllm_dymoe.vllm_plugin.rank_server import RankServer
from vllm_dymoe.vllm_plugin.sleep import past_the_pool
from vllm_dymoe.vllm_plugin.step import RunningStep
from vllm_dymoe.vllm_plugin.training import ServedTraining


class Loading:
    """The models with MoE layers that vLLM loads on one rank.

    There is one, and possibly a draft that proposes its tokens. The rank can run once the first model is loaded. A
    draft's layers become further layers of the same server, with slots from the same budget; its experts have a store
    of their own.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        options: Options,
        checkpoint: Mapping[str, Any] | None,  # its quantization_config, if it is ours
        reader: Reader = PLAIN_READER,
        draft_reader: Callable[[], Reader] = lambda: PLAIN_READER,
    ) -> None:
        self.options, self.reader, self._draft_reader = options, reader, draft_reader
        self.rank_server: RankServer | None = None  # None until the last layer of the first model is loaded
        self.config = vllm_config
        moving = "experts move from rank to rank (--enable-eplb)" if vllm_config.parallel_config.enable_eplb else ""
        self._predictor_observer = PredictorObserver(options, moving)
        self.model_made = self._predictor_observer.model_made
        self.around = 0, 0  # MoE layers of pipeline stages before this one and after it
        # Measured before any rank of this machine fills its share.
        self._host_memory = available_host_memory()
        self._model = ModelStore(vllm_config, options, checkpoint, reader, self._host_memory)
        self._draft: ModelStore | None = None
        self._begin = time.perf_counter()

    def add_layer(self, spec: LayerSpec) -> int:
        """Add one MoE layer and return its position.

        Raises:
            ConfigError: it does not fit the layers before it.
        """
        if self.rank_server is None:
            self._model.add(spec)
            return len(self._model.layers) - 1
        if self._draft is None:
            self._begin = time.perf_counter()
            taken = held_bytes(self._model.store)
            reader, formats, bits = self._draft_reader(), self._model.experts.formats, self.options.stored_bits
            # A draft's experts keep their codes if the model's do and each expert has one version.
            kept = len(bits) == 1 and self.reader.keeps(bits) and (not reader.mixed or reader.keeps(bits))
            other = reader.format != self.reader.format
            how = {"requantize": other and not kept, "keeps": kept}
            self._draft = ModelStore(self.config, self.options, None, reader, self._host_memory, taken, formats, **how)
        if self._draft.place is not None:
            raise ConfigError(f"vllm-dymoe: {spec.name} belongs to a third model with MoE layers; two are supported.")
        self._draft.add(spec)
        draft, model = self._draft.experts, self._model.experts
        fmt = next(iter(model.formats.values()))
        shape = spec.hidden, spec.dtype, spec.bias, spec.activation.has_gate, draft.num_experts, draft.top_k
        wanted = fmt.hidden, fmt.dtype, fmt.bias, fmt.has_gate, model.num_experts, model.top_k
        if shape != wanted or spec.intermediate > fmt.intermediate:
            raise ConfigError(
                f"vllm-dymoe: the experts of the draft layer {spec.name} differ in shape from the model's, which is "
                "not supported yet; leave --speculative-config out."
            )
        return len(self._model.layers) + len(self._draft.layers) - 1

    @property
    def layers(self) -> int:
        """Number of the model's MoE layers on this rank, so far."""
        return len(self._model.layers)

    @property
    def experts(self) -> ModelExperts:
        """The rank's experts, without a draft's."""
        return self._model.experts

    def place(self, position: int) -> tuple[ModelStore, int]:
        """Return the store of a layer's experts, and the layer's position in it."""
        count = len(self._model.layers)
        return (self._model, position) if position < count or self._draft is None else (self._draft, position - count)

    def layer_loaded(self, position: int, routed_experts: Any) -> None:
        """Record that vLLM has loaded one more layer.

        With the model's last layer the rank runs.

        Raises:
            StoreError: the checkpoint lacks an expert, or the store cannot be written.
            ConfigError: the budget is not feasible.
        """
        store, layer = self.place(position)
        complete = store.layer_loaded(layer)
        if store is self._model:
            self._predictor_observer.layer_loaded(position, routed_experts)
        if not complete:
            return
        if (rank_server := self.rank_server) is None:
            past_the_pool(self.config, lambda: self._run(routed_experts.moe_config.num_experts))
        else:
            past_the_pool(self.config, lambda: self._extend(rank_server, store))

    @property
    def not_readable_again(self) -> str:
        """Why dense weights cannot be read again from the checkpoint.

        Empty if they can be.
        """
        if self.reader.held or self.reader.mixed or self.options.dense != 16:
            return "reloading quantized dense layers is untested; restart the server"
        return "" if self._model.unchanged() else "the files of its checkpoint have changed; restart the server"

    def close(self) -> None:
        """Shut down with the engine; another engine may start in this process."""
        rank_server, models = self.rank_server, (self._model, self._draft)
        vars(self).clear()  # vLLM may keep a layer, which refers to this object, and would keep stores and gates
        if rank_server is not None:
            rank_server.close()
        for model in models:
            if model is not None:
                model.close(served=rank_server is not None)

    def _run(self, num_experts: int) -> None:
        options, config, spec, store = self.options, self.config, self._model.layers[0], self._model.store
        assert store is not None
        device = torch.device(config.device_config.device)
        self._predictor_observer.model_loaded(len(self._model.layers))

        def header() -> ModelIdentity:
            model = config.model_config.model, self._model.model_fingerprint
            return ModelIdentity(*model, len(self._model.layers), num_experts, spec.top_k, spec.hidden)

        training = self._make_training(header, device)

        def predictor(on_device: bool) -> Predictor | None:
            if on_device and training is not None:
                return training.predictor()
            return self._predictor_observer.predictor(self._routed_model())

        observation, step = Observation(self._recordable()), RunningStep()
        late = options.computes_misses or not options.plain_cpu(device.type)
        failures = make_step_failures(
            step, shared=meets(config.parallel_config), late=late, on_failure=observation.forget,
            on_device=lambda number: "" if self.rank_server is None else self.rank_server.device_failure(number),
        )  # fmt: skip
        server = self._server(store, device, predictor, failures.record_late)
        self._warm_up(server)
        self._announce(server, self._model)

        observation.start_trace(observe_trace(options, header, lambda: self._predictor_observer.gates))
        speculative = config.speculative_config
        drafted = speculative.num_speculative_tokens if speculative else 0
        self.rank_server = RankServer(server, step, failures, self._predictor_observer, observation, drafted, training)

    def _extend(self, rank_server: RankServer, draft: ModelStore) -> None:
        """Add a draft's layers after the model's; slots are divided among all of them."""
        before = rank_server.server
        assert draft.store is not None
        before.close(keep_store=True)  # two arenas at a time would exceed the budget
        store = join(before.store, draft.store)
        predictor = None if before.predictor is None else before.predictor.predictor
        late = rank_server.failures.record_late
        server = self._server(store, before.device, predictor, late)
        self._warm_up(server)
        rank_server.extend(server)
        self._announce(server, draft)

    def _warm_up(self, server: ExpertServer) -> None:
        """Compile what a device's steps need before the first request."""
        if server.small_batches is None:
            return
        for activation, on_input in dict.fromkeys((layer.activation, layer.weights_on_input) for layer in self._layers):
            server.small_batches.warm_up(activation, weights_on_input=on_input)

    @property
    def _layers(self) -> list[LayerSpec]:
        """The MoE layers of the model and its draft, so far."""
        return [*self._model.layers, *([] if self._draft is None else self._draft.layers)]

    def _announce(self, server: ExpertServer, store: ModelStore) -> None:
        """Log in one line what is active, and log warnings.

        The line also says where numbers come from, and why the host store is where it is.
        """
        source, place = "", store.place.reason if store.place is not None else ""
        if (self.reader.held or self.reader.mixed) and not store.dummy:
            bits, kept = self.options.stored_bits, self.reader.keeps(self.options.stored_bits)
            source = f" Experts: {describe(self.reader, bits, self.options.quantizer, kept=kept)}."
        parallel = self.config.parallel_config
        ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        rank = f"rank {parallel.rank} of {ranks}" if ranks > 1 else ""
        if parallel.data_parallel_size > 1:
            rank = f"engine {parallel.data_parallel_rank} of {parallel.data_parallel_size} {rank}".rstrip()
        said, seconds = describe_server(server, rank, place), time.perf_counter() - self._begin
        logger.info("%s%s Experts were ready after %.1f s.", said, source, seconds)
        for warning in warnings(server, expert_ranks(parallel)):
            logger.warning("vllm-dymoe: %s", warning)

    def _server(
        self, store: HostStore, device: torch.device,
        predictor: Predictor | Callable[[bool], Predictor | None] | None, on_late: Callable[[str], None],
    ) -> ExpertServer:  # fmt: skip
        experts, config, options = store.experts, self.config, self.options
        in_place = options.plain_cpu(device.type)
        policy = make_policy(options).of_stage(*self.around)
        least = minimum_budget(experts, options, policy, workspace_bytes(experts, device.type))
        try:
            budget = automatic_budget(config, device, experts, least, options.expert_budget.requests)
        except ConfigError:
            if options.expert_budget.is_auto:
                raise
            budget = 0  # resizing to it is refused while the model is served
        if in_place:
            budget = budget_in_host_memory(options, experts, budget, workspace_bytes(experts))
        if options.misses == "auto" and in_place and store.mapped:
            options = options.model_copy(update={"misses": "compute"})  # on a CPU a slot is the same memory
        given: dict[str, Any] = {
            "predictor": predictor,
            "agree": _agreement(config),
            "all_experts": max(layer.all_experts for layer in self._layers),
            "around": self.around,
            "on_late": on_late,
            "machine_ranks": ranks_of_machine(config.parallel_config),
        }
        given["rates"] = self._model.rates
        if options.train_predictor is not None:
            sizes, ahead = self._routed_model().identity, self._look_ahead
            item = network_dtype(device).itemsize
            given["training_bytes"] = OnlineTraining.nbytes(sizes, ahead, item, options.train_predictor.memory)
            given["predictor_room"] = network_bytes(sizes, ahead, item)
        if device.type == "cuda":
            given["decode"], given["grouped"] = self._tested(store, device)
        if options.misses == "auto" and device.type == "cuda":
            rates, activation = self._model.rates, self._model.layers[0].activation
            return choose_misses(
                lambda chosen: ExpertServer(store, chosen, device, budget, **given), options, activation,
                None if rates is None else rates.with_name(CHOICES),
                lambda sentence: logger.info("vllm-dymoe: %s", sentence),
            )  # fmt: skip
        return ExpertServer(store, options, device, budget, **given)

    def _tested(self, store: HostStore, device: torch.device) -> tuple[Decode, Grouped]:
        """Return the fastest kernels that pass the self-test on this card.

        Raises:
            ConfigError: none does.
        """
        rates = self._model.rates
        slowest = max(Decode), max(Grouped)
        while True:
            found = [
                tested(
                    store.experts.of_kind(kind),
                    self.options,
                    device,
                    list(dict.fromkeys(layer.activation for layer in self._layers)),
                    kept=None if rates is None else rates.with_name(RESULTS),
                    say=lambda sentence: logger.warning("vllm-dymoe: %s", sentence),
                    at_most=slowest,
                    from_disk=not store.readable,
                )
                for kind in range(len(store.experts.of_kinds))
            ]
            slowest = min(decode for decode, _ in found), min(grouped for _, grouped in found)
            if all(choice == slowest for choice in found):
                return slowest  # else some kinds of layers are tested again, as they will be used

    @property
    def _look_ahead(self) -> int:
        """Return how many layers ahead a predictor is evaluated."""
        prefetch = make_policy(self.options).prefetch
        return max(1 if prefetch is None else prefetch.layers, self._routed_model().horizon)

    def _make_training(self, header: Callable[[], ModelIdentity], device: torch.device) -> ServedTraining | None:
        """Return the training of a predictor on this rank, if requested.

        Raises ConfigError for a file that cannot be continued.
        """
        if (wanted := self.options.train_predictor) is None:
            return None
        network = None
        if wanted.file.is_file():
            try:
                model = replace(self._routed_model(), device=torch.device("cpu"))  # training copies it
                network = TrainedPredictor.load(model, self._look_ahead).network
            except PredictorError as error:
                raise ConfigError(f"vllm-dymoe: {error}") from error
        if network is not None and (network.gates is None or network.matrices or network.history > 1):
            raise ConfigError(
                f"vllm-dymoe: train_predictor is {wanted.file}, which holds a predictor of another architecture than "
                "linear+input; name another file."
            )
        identity, dtype = header(), self._model.layers[0].dtype
        online = OnlineTraining(
            identity, self._look_ahead, device, dtype, network_dtype(device), wanted.memory, before=network,
            gates=self._predictor_observer.gates,
        )  # fmt: skip
        first = get_tp_group().rank_in_group == 0 and self.config.parallel_config.data_parallel_rank == 0
        return ServedTraining(
            online, identity, lambda: self._predictor_observer.checked_gates, wanted.file if first else None
        )

    def _routed_model(self) -> RoutedModel:
        experts, predictor = self.experts, self.options.predictor_file

        def held(layer: int) -> Set[int]:
            assert self.rank_server is not None
            return frozenset(self.rank_server.server.cache.table.precision[layer].nonzero()[0].tolist())

        return RoutedModel(
            len(experts.layers),
            experts.num_experts,
            experts.top_k,
            held=held,
            hidden=self._model.layers[0].hidden,
            fingerprint="" if predictor is None else self._model.model_fingerprint,
            device=torch.device(self.config.device_config.device),
            predictor=predictor,
            horizon=1 if self._model.store is not None and self._model.store.whole else FAR,
        )

    def _recordable(self) -> dict[str, Any] | None:
        """Return the description of a calibration of this rank's inputs.

        None on ranks that see the same as another.
        """
        spec = self._model.layers[0]
        if spec.rank or spec.expert_rank or self.config.parallel_config.enable_eplb:
            return None
        return {
            "layers": list(self.experts.layers),
            "top_k": spec.top_k,
            "hidden_size": spec.hidden,
            "dtype": str(spec.dtype).removeprefix("torch."),
            "activation": [str(layer.activation) for layer in self._model.layers],
        }


def layers_around(own: int) -> tuple[int, int]:
    """Return the MoE layers in pipeline stages before this one and after it.

    Stages exchange their numbers of layers.

    Args:
        own: number of this stage's MoE layers.
    """
    stages = get_pp_group()
    here, counts = stages.rank_in_group, torch.zeros(stages.world_size, dtype=torch.int64, device="cpu")
    counts[here] = own
    torch.distributed.all_reduce(counts, group=stages.cpu_group)
    return int(counts[:here].sum()), int(counts[here + 1 :].sum())


def _agreement(config: VllmConfig) -> Agree:
    """Return the exchange between ranks with parts of the same experts.

    With it they change versions in the same step.

    Otherwise a sum would mix precisions.
    """
    parallel = config.parallel_config
    return list if parallel.tensor_parallel_size == 1 or parallel.enable_expert_parallel else _least


def _least(said: Sequence[int]) -> Sequence[int]:
    numbers = torch.tensor(said, dtype=torch.int64, device="cpu")
    torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MIN, group=get_tp_group().cpu_group)
    found: list[int] = numbers.tolist()
    return found
